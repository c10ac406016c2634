"""Options that are arrays, lists or numbers where a name is meant end in one error of the library."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ntk_laplace as ntkl
from ntk_laplace.errors import HyperparameterError, MemoryBudgetError, NTKLaplaceError, UnsupportedError, is_choice
from refusals import refused

QUIET = ntkl.Settings(progress=False)


def classifier() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(12, 3, dtype=torch.float64)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), (x, (x[:, 0] > 0).long())


def fitted(**options: Any) -> ntkl.Posterior:
    network, data = classifier()
    return ntkl.laplace(network, data, ntkl.Categorical(), settings=QUIET, **options)


def ascended(**options: Any) -> Any:
    network, data = classifier()
    return ntkl.variational(network, data, ntkl.Categorical(), steps=1, settings=QUIET, **options)


X = classifier()[1][0]
CALLS: dict[str, Callable[[Any], Any]] = {
    "structure": lambda o: fitted(structure=o), "curvature": lambda o: fitted(curvature=o),
    "dtype": lambda o: fitted(dtype=o), "groups": lambda o: ntkl.GaussianPrior(1.0, groups=o),
    "method": lambda o: fitted().predict(X, method=o), "mean": lambda o: fitted().predict(X, mean=o),
    "objective": lambda o: fitted().fit_predictive(objective=o), "by": lambda o: fitted().removal_effects(X, by=o),
    "linearization": lambda o: fitted().remove([1], linearization=o), "elbo": lambda o: fitted().elbo(method=o),
    "search": lambda o: fitted().fit_hyperparameters(method=o),
    "model": lambda o: fitted().importance_evidence(model=o),
    "conditional": lambda o: fitted().conditional_log_marginal_likelihood((X[:3], torch.ones(3).long()), method=o),
    "annealed": lambda o: fitted().annealed_evidence(model=o),
    "temperature": lambda o: fitted().calibrate(classifier()[1], temperature=o),
    "kind": lambda o: ntkl.risk_bound(fitted(), classifier()[1], kind=o),
    "score": lambda o: ntkl.active.score(fitted(), X, method=o), "algorithm": lambda o: ascended(algorithm=o),
    "parametrization": lambda o: ntkl.HeteroscedasticGaussian(parametrization=o),
    "evidence": lambda o: ntkl.train_with_evidence(*classifier(), ntkl.Categorical(), epochs=1, evidence=o,
                                                   settings=QUIET),
}


SEEDED: dict[str, Callable[[Any], torch.Tensor]] = {
    "compress": lambda i: fitted().compress(i, i, i).posterior_precision.log_det(),
    "Iterative": lambda i: fitted(structure=ntkl.Iterative(i, i, seed=i)).log_marginal_likelihood(),
    "Nystrom": lambda i: fitted(structure=ntkl.Nystrom(i, rounds=i, seed=i)).log_marginal_likelihood(),
    "CurvatureType": lambda i: fitted(curvature=ntkl.CurvatureType("mc", i, i)).log_marginal_likelihood(),
    "conditional": lambda i: fitted().conditional_log_marginal_likelihood(4, i, i),
    "samples": lambda i: fitted().conditional_log_marginal_likelihood(4, i, i, method="samples", draws=40 * i),
    "learning_curve": lambda i: fitted().learning_curve(i, i).mean,
    "evidence_bound": lambda i: fitted().evidence_bound(examples=2 * i, blocks=i, seed=i).value,
    "leave_one_out": lambda i: fitted().leave_one_out(points=2 * i, seed=i, strict=False).log_density,
    "KFAC": lambda i: fitted(structure=ntkl.KFAC(rank=i)).log_marginal_likelihood(),
    "INF": lambda i: fitted(structure=ntkl.INF(rank=i)).log_marginal_likelihood(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SEEDED)
def test_integers_of_numpy_are_those_of_python(name: str) -> None:
    torch.testing.assert_close(SEEDED[name](np.int64(2)), SEEDED[name](2), rtol=0.0, atol=0.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("structure", [
    lambda i: ntkl.Nystrom(i, rounds=i, seed=i), lambda i: ntkl.Iterative(i, i, seed=i), lambda i: ntkl.KFAC(rank=i),
    lambda i: ntkl.INF(rank=i),
], ids=["nystrom", "iterative", "kfac", "inf"])
def test_integers_of_numpy_are_saved(structure: Callable[[Any], Any], tmp_path: Any) -> None:
    posterior = fitted(structure=structure(np.int64(2)), curvature=ntkl.CurvatureType("mc", np.int64(2), np.int64(1)))
    posterior.save(tmp_path / "p.pt")
    again = ntkl.load(tmp_path / "p.pt", classifier()[0])
    assert again.curvature_type == ntkl.CurvatureType("mc", 2, 1)
    torch.testing.assert_close(again.log_marginal_likelihood(), posterior.log_marginal_likelihood())


@pytest.mark.parametrize("option", [np.array(["gp", "kfac"]), torch.ones(2), ["gp"], {"a": 1}],
                         ids=["array", "tensor", "list", "dict"])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_name_is_refused(name: str, option: Any) -> None:
    with pytest.raises(NTKLaplaceError) as caught:
        CALLS[name](option)
    assert caught.value.expected and caught.value.remedy.endswith(".")


def test_a_choice_is_a_name_or_the_object_itself() -> None:
    assert is_choice("gp", ("gp", "full")) and is_choice(None, (None, "loo"))
    assert is_choice(torch.float32, (torch.float32,)) and not is_choice(np.array("gp"), ("gp",))
    assert not is_choice("kfac", ("gp", "full")) and not is_choice(1.0, (True,))


@pytest.mark.parametrize(("call", "words"), [
    (lambda: fitted().annealed_evidence(temperatures=10**13), "10,000,000,000,000 temperatures"),
    (lambda: ascended(samples=10**12), "1,000,000,000,000 samples of 26 weights"),
    (lambda: ascended(samples=10**12, algorithm="lgva", expectations="weights"), "samples of 26 weights"),
])
def test_counts_that_do_not_fit_are_refused_before_allocation(call: Callable[[], Any], words: str) -> None:
    with refused(MemoryBudgetError, words, "predicted need", "Use fewer"):
        call()


@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
def test_what_is_copied_merged_or_moved_in_inference_mode_is_searched(structure: str) -> None:
    posterior = fitted(structure=structure)
    with torch.inference_mode():
        made = copy.deepcopy(posterior), posterior.merge(posterior), copy.deepcopy(posterior).to(dtype=torch.float32)
    for one in made:
        before = one.log_marginal_likelihood()
        one.fit_hyperparameters(progress=False)
        assert one.log_marginal_likelihood() > before
    assert posterior.prior.precision == 1.0  # that of the copy is another


def test_what_is_read_in_inference_mode_says_why_it_is_not_searched() -> None:
    posterior = fitted()
    with torch.inference_mode():
        read = pickle.loads(pickle.dumps(posterior))
    with refused(HyperparameterError, "can change", "inference_mode", "outside"):
        read.fit_hyperparameters(progress=False)
    assert copy.deepcopy(read).fit_hyperparameters(progress=False).evidence  # as the remedy says


def test_an_article_fits_its_noun() -> None:
    assert "got an Adam. " in str(UnsupportedError("a module", "a Adam", "Pass one."))
    assert "got a Module. " in str(UnsupportedError("a module", "a Module", "Pass one."))
