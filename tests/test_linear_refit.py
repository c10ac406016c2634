"""`refit`: the linearized model at its own optimum, and its precision and noise by leave-one-out, in closed form."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.posterior.calibrate.linear_refit import LinearLeaveOneOut
from ntk_laplace.runtime import tuning

CASES = {
    "one output": ntkl.Gaussian(0.3),
    "covariance": ntkl.Gaussian(torch.tensor([[0.5, 0.2], [0.2, 0.9]]).double()),
    "missing outputs": ntkl.Gaussian(torch.tensor([[0.5, 0.2], [0.2, 0.9]]).double(), missing="nan"),
    "weights": ntkl.Gaussian(torch.tensor([0.4, 0.7]).double()),
    "tempered": ntkl.Tempered(ntkl.Gaussian(0.3), 3.0),
}


def problem(name: str) -> tuple[nn.Module, tuple[Tensor, ...], ntkl.Likelihood]:
    """A network that was not trained, data, and a likelihood."""
    torch.manual_seed(0)
    outputs = 1 if name in ("one output", "tempered") else 2
    x = torch.randn(9, 2).double()
    y = x @ torch.randn(2, outputs).double() + 0.5 * torch.randn(9, outputs).double()
    network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).double()
    data: tuple[Tensor, ...] = (x, y)
    if name == "missing outputs":
        y[0, 0] = y[4, 1] = y[5, 0] = y[5, 1] = torch.nan
    if name == "weights":
        data = (x, y, torch.tensor([2.0, 0.5, 0.0, *[1.0] * 6]).double())
    return network, data, CASES[name]


def fitted(name: str, structure: str, precision: float = 0.7, noise: float = 1.0) -> ntkl.Posterior:
    network, data, likelihood = problem(name)
    prior = ntkl.GaussianPrior(precision, groups="layer")
    return ntkl.laplace(network, data, likelihood.scaled_noise(noise), prior, structure=structure)


def mean(objective: LinearLeaveOneOut, setting: dict[str, Tensor]) -> float:
    """The mean log density."""
    return sum(float(part.sum()) for part in objective.parts(setting))


@pytest.mark.parametrize("structure", ["gp", "full"])
@pytest.mark.parametrize("name", CASES)
def test_the_objective_is_leave_one_out_at_the_refit(name: str, structure: str) -> None:
    objective = LinearLeaveOneOut(fitted(name, structure).fitted)
    for a, s in ((1.0, 1.0), (0.2, 3.0), (4.0, 0.5)):
        setting = {"precision": torch.tensor(a, dtype=torch.float64), "noise": torch.tensor(s, dtype=torch.float64)}
        found = fitted(name, structure, 0.7 * a, s).refit()
        one = found.leave_one_out()
        counts = found.weights * ~found.targets.isnan().all(1)
        expected = (counts * one.log_density).sum() / counts.sum()
        assert mean(objective, setting) == pytest.approx(float(expected), abs=1e-10)


def test_leave_one_out_of_a_refit_is_refitting_without_each_point() -> None:
    """Against linear regressions on the Jacobian, one for each point."""
    posterior = fitted("one output", "gp").refit()
    network, (x, y), _ = problem("one output")
    theta = nn.utils.parameters_to_vector(network.parameters()).detach()
    jacobian = posterior.jacobian(x).dense(posterior.network.shapes)[0]
    z = (y - network(x).detach())[:, 0] + jacobian @ theta
    means, variances = [], []
    for n in range(len(x)):
        kept = [m for m in range(len(x)) if m != n]
        precision = 0.7 * torch.eye(len(theta)).double() + jacobian[kept].T @ jacobian[kept] / 0.3
        weights = torch.linalg.solve(precision, jacobian[kept].T @ z[kept] / 0.3)
        means.append(network(x[n]).detach() + jacobian[n] @ (weights - theta))
        variances.append(jacobian[n] @ torch.linalg.solve(precision, jacobian[n]))
    found = posterior.leave_one_out()
    assert torch.allclose(found.mean, torch.stack(means), atol=1e-10)
    assert torch.allclose(found.covariance.flatten(), torch.stack(variances), atol=1e-10)


@pytest.mark.parametrize("structure", ["gp", "full"])
def test_the_factors_are_the_best_of_a_fine_grid(structure: str) -> None:
    posterior = fitted("covariance", structure)
    objective = LinearLeaveOneOut(posterior.fitted)
    found = posterior.refit("loo")
    best = float(found.leave_one_out().log_density.mean())
    a = (found.prior.precision / posterior.prior.precision).detach()
    s = (found.likelihood.noise / posterior.likelihood.noise).detach()
    assert torch.allclose(a, a[:1]) and torch.allclose(s, s[:1, :1])  # one factor each
    around = [mean(objective, {"precision": a[0] * p, "noise": s[0, 0] * q})
              for p in (0.95, 1.0, 1.05) for q in (0.95, 1.0, 1.05)]
    steps = torch.logspace(-4, 4, 17, dtype=torch.float64), torch.logspace(-2, 2, 17, dtype=torch.float64)
    grid = [mean(objective, {"precision": p, "noise": q}) for p in steps[0] for q in steps[1]]
    assert best >= max(around + grid) - 1e-8
    assert float(posterior.prior.precision[0].detach()) == pytest.approx(0.7)  # it keeps its own


@pytest.mark.parametrize("structure", ["gp", "full"])
def test_a_refit_is_the_optimum_of_the_linear_model(structure: str) -> None:
    posterior = fitted("covariance", structure)
    found = posterior.refit()
    x = problem("covariance")[1][0]
    assert torch.allclose(found.outputs(x), posterior.latent_moments(x, mean="posterior")[0], atol=1e-10)
    assert found.leave_one_out().reliability.decrement < 1e-20
    assert float(found.log_marginal_likelihood()) == pytest.approx(
        float(posterior.log_marginal_likelihood(correction=True)), rel=1e-12)
    assert "refitted" in repr(found) and "refitted" not in repr(posterior)


@pytest.mark.parametrize("structure", ["gp", "full"])
@pytest.mark.parametrize("likelihood", [ntkl.Gaussian(0.3), ntkl.Bernoulli()])
def test_what_ifs_after_a_refit_are_refits_of_the_changed_data(structure: str, likelihood: ntkl.Likelihood) -> None:
    network, (x, y), _ = problem("one output")
    y = (y > 0).double()
    prior = ntkl.GaussianPrior(0.7)
    posterior = ntkl.laplace(network, (x, y), likelihood, prior, structure=structure).refit()
    kept = [0, 1, 2, 4, 5, 7, 8]
    fewer = ntkl.laplace(network, (x[kept], y[kept]), likelihood, prior, structure=structure).refit()
    assert torch.allclose(posterior.remove([3, 6], steps=None).outputs(x), fewer.outputs(x), atol=1e-7)
    unchanged = posterior.remove([], steps=None)
    assert torch.allclose(unchanged.outputs(x), posterior.outputs(x), atol=1e-10)


@pytest.mark.slow
def test_relinearizing_a_refit_trains_the_network() -> None:
    network, (x, y), likelihood = problem("one output")
    posterior = ntkl.laplace(network, (x, y), likelihood, ntkl.GaussianPrior(0.7))
    trained = posterior.refit().relinearize(x, steps=60)
    gradient = trained.fitted.joint_gradient()
    assert gradient.norm() < 1e-5 * posterior.fitted.joint_gradient().norm()
    assert torch.equal(posterior.network.theta, nn.utils.parameters_to_vector(network.parameters()))


def test_leave_one_out_of_refitted_classes_is_not_trusted() -> None:
    network, (x, y), _ = problem("one output")
    posterior = ntkl.laplace(network, (x, (y > 0).double()), ntkl.Bernoulli()).refit()
    with pytest.warns(ntkl.NTKLaplaceWarning, match="features that have seen all labels"):
        posterior.leave_one_out()


@pytest.mark.parametrize("structure", ["gp", "full"])
def test_a_matrix_of_too_many_rows_is_refused(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, data, likelihood = problem("one output")
    posterior = ntkl.laplace(network, data, likelihood, structure=structure)
    size = {"gp": len(data[1]), "full": posterior.num_parameters}[structure]
    monkeypatch.setattr(tuning, "LARGEST_SPECTRUM", size - 1)
    with pytest.raises(ntkl.UnsupportedError, match=f"at most {size - 1} eigenvectors .* a matrix of {size} rows"):
        posterior.refit("loo")


def test_refusals() -> None:
    network, (x, y), likelihood = problem("one output")
    with pytest.raises(ntkl.UnsupportedError, match="for a refit"):
        ntkl.laplace(network, (x, y), likelihood, structure="kfac").refit()
    posterior = ntkl.laplace(network, (x, (y > 0).double()), ntkl.Bernoulli())
    with pytest.raises(ntkl.UnsupportedError, match="Gaussian likelihood"):
        posterior.refit("loo")
    with pytest.raises(ntkl.UnsupportedError, match='"loo"'):
        posterior.refit("evidence")


def test_points_of_leverage_one_have_no_prediction() -> None:
    _, (x, y), likelihood = problem("one output")
    alone = torch.cat([x, 1e6 * torch.ones(1, 2).double()]), torch.cat([y, torch.ones(1, 1).double()])
    linear = nn.Linear(2, 1).double()
    posterior = ntkl.laplace(linear, alone, likelihood)
    setting = {"precision": torch.tensor(1e-10).double(), "noise": torch.tensor(1e-6).double()}
    value = mean(LinearLeaveOneOut(posterior.fitted), setting)
    assert math.isfinite(value) and value < -10


def test_a_bound_is_told() -> None:
    network, x = nn.Linear(1, 1).double(), torch.linspace(-1, 1, 12).double().unsqueeze(1)
    noiseless = ntkl.laplace(network, (x, 3.0 * x + 1.0), ntkl.Gaussian(0.3))
    with pytest.warns(ntkl.NTKLaplaceWarning, match="bounds of"):
        noiseless.refit("loo")


@pytest.mark.filterwarnings("ignore:leave-one-out is not to be trusted")  # of refitted classes
@pytest.mark.parametrize("structure", ["gp", "full"])
@pytest.mark.parametrize("name", ["missing outputs", "weights", "classes"])
def test_a_saved_refit_answers_as_before(name: str, structure: str, tmp_path: Path) -> None:
    """With its predictive, from the file alone and with the data, which are read at the trained weights again."""
    if name == "classes":
        network, (x, *_), _ = problem("weights")
        data: tuple[Tensor, ...] = (x, torch.arange(9) % 2)
        posterior = ntkl.laplace(network, data, ntkl.Categorical(), ntkl.GaussianPrior(0.7), structure).refit()
    else:
        network, data, _ = problem(name)
        posterior = fitted(name, structure).refit(objective="loo")
        posterior.fit_predictive("loo", strict=False)
    x = data[0]
    posterior.save(tmp_path / "refit.pt", include_data=True)
    found = ntkl.load(tmp_path / "refit.pt", network)
    assert repr(found) == repr(posterior) and found.predictive == posterior.predictive
    asked = [lambda one: one.log_marginal_likelihood(), lambda one: one.latent_moments(x)[0],
             lambda one: one.latent_moments(x)[1]]
    if structure == "gp":
        asked += [lambda one: one.leave_one_out().log_density, lambda one: one.relinearize(x).outputs(x)]
    for answer in asked:
        torch.testing.assert_close(answer(found), answer(posterior), rtol=1e-12, atol=1e-12, equal_nan=True)
    again = ntkl.load(tmp_path / "refit.pt", network, data=data)
    asked = [*asked[:3], lambda one: one.remove([3]).outputs(x), lambda one: one.leave_one_out().log_density]
    if name == "classes":
        asked.append(lambda one: one.remove([3], linearization="moving").outputs(x))
    for answer in asked:
        torch.testing.assert_close(answer(again), answer(posterior), rtol=1e-9, atol=1e-9, equal_nan=True)


def test_a_refit_of_changed_data_is_not_saved(tmp_path: Path) -> None:
    changed = fitted("one output", "gp").remove([0], steps=None).refit()
    with pytest.raises(ntkl.UnsupportedError, match="one that a what-if changed"):
        changed.save(tmp_path / "refit.pt", include_data=True)
