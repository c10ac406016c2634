"""A structure from outside the library obeys the laws of the exact ones, in every method, file and command."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import ntk_laplace as ntkl
from ntk_laplace.tools import cli
from pairwise import one_each
from reference import relative_error
from registry import LIKELIHOODS, PRIORS, problem, targets
from unregistered import Eigen, build

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")

ROOT = Path(__file__).resolve().parents[1]
CASES = [
    ("deep_mlp", "gaussian", "layer"), ("cnn_groups", "categorical", "scalar"),
    ("transformer_tied", "poisson", "tensor"), ("scalar_outputs", "bernoulli", "parameter"),
    ("far_from_optimum", "categorical", "layer"),
]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ntkl.structures.REGISTERED, "eigh", Eigen)


def fit(case: tuple[str, str, str], structure: str | ntkl.StructureSpec) -> ntkl.Posterior:
    network, likelihood, prior = case
    own = problem(network)
    y = targets(LIKELIHOODS[likelihood], own)
    return ntkl.laplace(own.network, (own.x, y), LIKELIHOODS[likelihood].build(), PRIORS[prior].build(own), structure)


def gradients(posterior: ntkl.Posterior, correction: bool) -> Tensor:
    value = posterior.log_marginal_likelihood(correction)
    parameters = [posterior.prior.log_precision, *posterior.likelihood.parameters()]
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters)])


def noisier(posterior: ntkl.Posterior) -> Tensor:
    for parameter in posterior.likelihood.parameters():
        with torch.no_grad():
            parameter += 0.3
    return posterior.log_marginal_likelihood()


LAWS: dict[str, Callable[[ntkl.Posterior, Tensor], Tensor]] = {
    "evidence": lambda p, x: p.log_marginal_likelihood(),
    "evidence with correction": lambda p, x: p.log_marginal_likelihood(correction=True),
    "gradients": lambda p, x: gradients(p, False),
    "gradients with correction": lambda p, x: gradients(p, True),
    "effective parameters": lambda p, x: p.effective_parameters(),
    "evidence curve": lambda p, x: p.evidence_curve(torch.tensor([0.1, 1.0, 7.0])),
    "covariance": lambda p, x: p.latent(x).covariance_matrix,
    "moments at the optimum": lambda p, x: torch.cat([t.flatten() for t in p.latent_moments(x, "posterior")]),
    "predict": lambda p, x: p.predict(x, generator=torch.Generator().manual_seed(0)).mean,
    "removal effects": lambda p, x: p.removal_effects(x),
    "leave-one-out": lambda p, x: p.leave_one_out().log_density,
    "one step without points": lambda p, x: p.remove([1, 3]).latent_moments(x)[0],
    "refit without points": lambda p, x: p.remove([1, 3], steps=None).log_marginal_likelihood(),
    "reweighted and relabeled": lambda p, x: p.reweight([0], 2.0).relabel([2], p.targets[:1]).latent_moments(x)[0],
    "added": lambda p, x: p.add(x[:2], p.targets[:2], steps=2).latent_moments(x)[1],
    "relinearized": lambda p, x: p.remove([0]).relinearize(problem("deep_mlp").x).outputs(x),
    "subset": lambda p, x: p.subset([0, 2, 4]).log_marginal_likelihood(),
    "merged": lambda p, x: p.subset([0, 2]).merge(p.subset([1, 3, 4])).log_marginal_likelihood(),
    "condition": lambda p, x: p.condition((x, p.targets[: len(x)])).log_det(),
    "conditional evidence": lambda p, x: p.conditional_log_marginal_likelihood(3, permutations=2),
    "other noise": lambda p, x: noisier(p),
    "float32": lambda p, x: p.to(dtype=torch.float32).log_det(),
}
PLAIN = ("subset", "merged", "condition", "added", "relinearized", "reweighted and relabeled")  # inputs are one tensor


# every law on the first case, and on another one in turns
PAIRS = [*product(CASES[:1], LAWS),
         *((case, law) for law, case in one_each([law for law in LAWS if law not in PLAIN], CASES[1:]))]


@pytest.mark.parametrize(("case", "law"), PAIRS, ids=str)
def test_it_is_the_full_structure_computed_another_way(case: tuple[str, str, str], law: str) -> None:
    x = problem(case[0]).x_new
    limit = 1e-4 if law == "float32" else 1e-7
    found, want = (LAWS[law](fit(case, structure), x) for structure in ("eigh", "full"))
    assert found.shape == want.shape and relative_error(found, want) < limit


def test_samples_have_its_covariance() -> None:
    posterior = fit(CASES[0], Eigen())
    draws = posterior.sample(20_000, generator=torch.Generator().manual_seed(0)) - posterior.fitted.theta
    covariance = torch.linalg.inv(fit(CASES[0], "full").posterior_precision.solve(torch.eye(draws.shape[1]).double()))
    whitened = draws @ torch.linalg.cholesky(covariance)
    assert (whitened.mT @ whitened / len(draws) - torch.eye(draws.shape[1])).abs().max() < 0.06
    assert posterior.predict(problem(CASES[0][0]).x_new, "nn", samples=3).mean.isfinite().all()


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    posterior, own = fit(CASES[1], "eigh"), problem(CASES[1][0])
    posterior.save(tmp_path / "p.pt")
    loaded = ntkl.load(tmp_path / "p.pt", own.network)
    assert loaded.structure == "eigh" and "eigh" in repr(loaded)
    assert float(loaded.log_marginal_likelihood()) == float(posterior.log_marginal_likelihood())
    assert torch.equal(loaded.latent_moments(own.x_new)[1], posterior.latent_moments(own.x_new)[1])


@pytest.mark.slow
def test_it_trains_a_network_and_is_compared_with_others() -> None:
    torch.manual_seed(0)
    x, network = torch.randn(30, 2).double(), build().double()
    y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
    result = ntkl.train_with_evidence(network, (x, y), ntkl.Categorical(), structure="eigh", epochs=20,
                                      optimizer=torch.optim.Adam, settings=ntkl.Settings(progress=False))
    assert result.posterior.structure == "eigh" and np.isfinite(result.evidence)
    table = ntkl.compare_evidence(network.eval(), (x, y), ntkl.Categorical(), structures=["gp", Eigen(), "kfac"])
    assert abs(table["eigh"].difference) < 1e-8 < abs(table["kfac"].difference)
    assert "eigh" in {row.structure for row in ntkl.compare_evidence(network, (x, y), ntkl.Categorical()).rows}
    found = ntkl.compare_models({"one": result.posterior}, conditional="evidence")
    assert np.isfinite(found["one"].loo) and np.isfinite(found["one"].conditional)


@pytest.mark.slow
def test_the_command_line_takes_it_from_the_network_s_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(build().state_dict(), "w.pt")
    np.savez("d.npz", X=np.random.default_rng(0).normal(size=(20, 2)), y=np.arange(20) % 3)
    own = [str(Path(__file__).with_name("outside_structure.py")) + ":build", "--checkpoint", "w.pt", "--data", "d.npz",
           "--likelihood", "categorical"]
    assert cli.main(["evidence", *own, "--structures", "gp,eigh", "--json", "o.json"]) == 0
    exact, own_row = json.loads(Path("o.json").read_text())["rows"]
    assert own_row["structure"] == "eigh" and own_row["evidence"] == pytest.approx(exact["evidence"], rel=1e-9)
    assert cli.main(["explain", *own, "--structure", "eigh", "--inputs", "d.npz"]) == 0
    assert "structure eigh" in Path("explanations.html").read_text()
    assert cli.main(["evidence", *own, "--structures", "gp,egih"]) == 1
    assert "expected structure among gp, full" in capsys.readouterr().err


def test_a_name_belongs_to_one_class() -> None:
    with pytest.raises(ntkl.UnsupportedError, match=r"a structure name that is free.*'eigh' of Eigen"):
        ntkl.register_structure(type("Other", (Eigen,), {"name": "eigh"}))


def test_no_file_of_the_library_mentions_it() -> None:
    for path in (ROOT / "ntk_laplace").rglob("*.py"):
        assert '"eigh"' not in path.read_text(), path
