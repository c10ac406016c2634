"""Posteriors, what-ifs and results as pickles: what scikit-learn and processes hand back answers as before."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import ntk_laplace as ntkl
from refusals import inputs, labels, network

STRUCTURES: dict[str, Any] = {
    "gp": "gp", "full": "full", "kfac": "kfac", "ekfac": "ekfac", "inf": ntkl.INF(rank=3), "diag": "diag",
    "iterative": "iterative", "nystrom": "nystrom", "last layer": "gp",
}
CHANGES = {
    "itself": lambda p: p, "remove": lambda p: p.remove([1, 4]), "add": lambda p: p.add(inputs(2) + 0.3, labels(2)),
    "relabel": lambda p: p.relabel([0], (labels(1) + 1) % 3), "subset": lambda p: p.subset([0, 2, 3, 7]),
    "condition": lambda p: p.condition((inputs(2) + 0.3, labels(2))),
    "moving": lambda p: p.remove([1], linearization="moving"),
}


def fit(name: str) -> ntkl.Posterior:
    chosen = "last_layer" if name == "last layer" else None
    return ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(), ntkl.GaussianPrior(2.0, groups="layer"),
                        STRUCTURES[name], parameters=chosen, settings=ntkl.Settings(batch_size=4))


def answers(posterior: ntkl.Posterior) -> list[Tensor]:
    return [posterior.predict(inputs(4) + 0.1).probs, posterior.log_marginal_likelihood().detach()]


@pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")
# every structure as it was fitted and with two changes, and every change of two structures at least
@pytest.mark.parametrize(("name", "change"), [
    (name, change) for number, name in enumerate(STRUCTURES)
    for change in ("itself", *(list(CHANGES)[1 + (number + step) % 6] for step in (0, 3)))
])
def test_posteriors(name: str, change: str) -> None:
    """Before they have answered, when nothing is cached, and after."""
    posterior = CHANGES[change](fit(name))
    before = pickle.loads(pickle.dumps(posterior))
    expected = answers(posterior)
    after = pickle.loads(pickle.dumps(posterior))
    for each in (before, after):
        for found, value in zip(answers(each), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")
@pytest.mark.parametrize("name", ["gp", "kfac"])
def test_results(name: str) -> None:
    posterior, x = fit(name), inputs(2) + 0.2
    with torch.no_grad():
        evidence = posterior.evidence()
    results = [
        posterior.explain(x), posterior.removal_effects(x), posterior.what_ifs([[0], [1, 2]]), posterior.predict(x),
        posterior.source_effects(x, ["a", "b", "c"] * 3), evidence,
        ntkl.plan(network(), (inputs(), labels()), ntkl.Categorical()),
    ]
    for result in results:
        assert repr(pickle.loads(pickle.dumps(result))) == repr(result)
