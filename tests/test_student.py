"""Student's t: hyperparameters, noise in the calibration, outliers, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.posterior.calibrate.densities import LeftOut, densities
from ntk_laplace.posterior.calibrate.search import log_density_terms
from reference import jacobian, relative_error
from refusals import refused


def problem(outputs: int = 2) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.linspace(-3.0, 3.0, 40).double().unsqueeze(1)
    y = torch.sin(x) + 0.1 * torch.randn(40, outputs).double()
    y[::9] += 4.0
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, outputs)).double(), x, y


@pytest.mark.filterwarnings("ignore:.*fitted predictive")
@pytest.mark.parametrize("likelihood", [
    ntkl.StudentT(torch.tensor([0.3, 0.02]), 3.0, missing="nan"), ntkl.Tempered(ntkl.StudentT(0.05, 6.0, "nan"), 2.0),
], ids=["two noises", "tempered"])
def test_calibration_scales_the_noise(likelihood: ntkl.Likelihood) -> None:
    """The densities of the search are those of `predict` with another noise."""
    network, x, y = problem()
    y[5, 1] = y[7] = torch.nan
    posterior = ntkl.laplace(network, (x, y), likelihood)
    fit = posterior.calibrate((x, y))
    assert fit.noise != 1.0 and fit.after > fit.before
    there = torch.tensor([i for i in range(40) if i != 7])
    density = posterior.predict(x[there]).log_prob(y[there]).mean()
    assert float(density) == pytest.approx(fit.after, rel=1e-9)
    one, other = (own.counted_once().noise for own in (likelihood, likelihood.scaled_noise(fit.noise)))
    assert relative_error(other, fit.noise * one) < 1e-12


def test_outliers_pull_less_and_the_evidence_says_so(tmp_path: Path) -> None:
    found, networks = {}, {}
    for name, likelihood in {"t": ntkl.StudentT(0.3), "normal": ntkl.Gaussian(0.3)}.items():
        networks[name], x, y = problem(1)
        found[name] = ntkl.train_with_evidence(networks[name], (x, y), likelihood, structure="full", epochs=200,
                                               schedule=ntkl.EvidenceSchedule(20, 20))
    errors = {name: (one.posterior.predict(x).mean - torch.sin(x)).abs().median() for name, one in found.items()}
    assert errors["t"] < 0.5 * errors["normal"]
    evidence = {name: float(one.posterior.log_marginal_likelihood()) for name, one in found.items()}
    assert evidence["t"] > evidence["normal"] + 10.0
    assert found["t"].history.names[-2:] == ["noise", "excess"]
    posterior = found["t"].posterior
    assert 2.1 < float(posterior.likelihood.df) < 4.0
    posterior.save(tmp_path / "t.pt")
    again = ntkl.load(tmp_path / "t.pt", networks["t"])
    assert torch.equal(again.likelihood.df, posterior.likelihood.df)
    assert torch.equal(again.predict(x).variance, posterior.predict(x).variance)


def test_densities_with_scaled_noise_where_outputs_are_uncertain() -> None:
    """Against quadrature over f, with as much uncertainty as noise."""
    torch.manual_seed(0)
    mean, covariance = torch.randn(6, 1).double(), torch.linspace(0.1, 0.6, 6).double().view(6, 1, 1)
    y, likelihood = mean + torch.randn(6, 1).double(), ntkl.StudentT(0.2, 4.0)
    points = LeftOut(mean, covariance, y, torch.ones(6).double())
    found = log_density_terms(densities(likelihood, points), ntkl.Calibration(scale=1.5, noise=2.5)) * 6
    z = torch.linspace(-9.0, 9.0, 20_001, dtype=torch.float64).view(-1, 1)
    each = [ntkl.StudentT(0.5, 4.0).log_prob(m + (1.5 * v).sqrt() * z, t.expand_as(z))
            for m, v, t in zip(mean, covariance[:, 0], y, strict=True)]
    weight = 18.0 / 20_000 / (2.0 * math.pi) ** 0.5
    expected = (torch.stack(each).detach() - 0.5 * z.square().T).logsumexp(1) + math.log(weight)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*fitted predictive")
def test_the_noise_of_a_network_everywhere() -> None:
    network, x, y = problem()
    likelihood = ntkl.Everywhere(ntkl.StudentT(0.3, 6.0), (2,))
    posterior = ntkl.laplace(network, (x, y.unsqueeze(2)), likelihood)
    fit = posterior.calibrate((x, y.unsqueeze(2)), temperature="network")
    assert fit.scale == 0.0 and fit.noise != 1.0
    density = ntkl.StudentT(0.3 * fit.noise, 6.0).log_prob(network(x), y)
    assert fit.after == pytest.approx(float(density.detach().mean()) / 2, rel=1e-9)


@pytest.mark.parametrize("deviation", [0.1, 1.0, 3.0])
def test_expectations_over_uncertain_outputs(deviation: float) -> None:
    """Against a rule of very small steps, also where f is far more uncertain than the noise is large."""
    likelihood, y = ntkl.StudentT(0.01, 3.0), torch.tensor([[0.0], [2.0]]).double()
    mean, covariance = torch.tensor([[0.1], [-0.5]]).double(), torch.full((2, 1, 1), deviation**2, dtype=torch.float64)
    found = likelihood.expected(mean, covariance, y)
    z = torch.linspace(-10.0, 10.0, 200_001, dtype=torch.float64)
    density = torch.exp(-0.5 * z.square()) / (2 * torch.pi) ** 0.5
    for row in range(2):
        f, own = mean[row] + deviation * z.unsqueeze(1), y[row].expand(len(z), 1)
        for value, function in zip(found, (likelihood.log_prob, likelihood.residual), strict=False):
            wanted = torch.trapezoid(function(f, own).detach().flatten() * density, z)
            torch.testing.assert_close(value[row].detach().squeeze(), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("arguments", "words"), [
    ({"df": 2.1}, ("above 2.1", "2.1", "df=10")), ({"df": "many"}, ("above 2", "many", "df=10")),
    ({"noise": 0.0}, ("positive", "0", "above 0")), ({"noise": torch.ones(2, 2)}, ("one for each", "2, 2", "each")),
    ({"missing": "none"}, ("nan", "none", "NaN")),
])
def test_what_the_constructor_refuses(arguments: dict[str, Any], words: tuple[str, str, str]) -> None:
    with refused(ntkl.HyperparameterError, *words):
        ntkl.StudentT(**arguments)


@pytest.mark.parametrize("df", [5.0, 1e3, 1e6])
def test_densities_in_float32_do_not_lose_the_constant(df: float) -> None:
    """A difference of two log gammas, 6e6 each at a million degrees of freedom."""
    likelihood, f, y = ntkl.StudentT(0.5, df), torch.zeros(5, 2), torch.linspace(-2, 2, 10).view(5, 2)
    found, exact = likelihood.log_prob(f, y), likelihood.log_prob(f.double(), y.double())
    assert found.dtype == torch.float32 and torch.allclose(found.double(), exact, rtol=1e-6, atol=0)


def test_one_noise_for_each_output() -> None:
    network, x, y = problem()
    with refused(ntkl.HyperparameterError, r"shape \(2,\)", r"\(3,\)", "for each output"):
        ntkl.laplace(network, (x, y), ntkl.StudentT(torch.ones(3)))
    with refused(ntkl.UnsupportedError, "noise, scale", "temperature", "scale and noise"):
        ntkl.laplace(network, (x, y), ntkl.StudentT()).fit_predictive("loo", parameters=["temperature"])


@pytest.mark.filterwarnings("ignore:the evidence's maximum was not reached")
@pytest.mark.parametrize("curvature", ["ggn", "ef", "mc"])
@pytest.mark.parametrize("structure", ["gp", "kfac"])
def test_the_evidence_follows_noise_and_degrees_of_freedom(structure: str, curvature: str) -> None:
    """At every step it is that of a fit with these hyperparameters."""
    network, x, y = problem()
    found = ntkl.laplace(network, (x, y), ntkl.StudentT(0.3, 5.0), structure=structure, curvature=curvature)
    history = found.fit_hyperparameters(parameters=["precision", "noise", "excess"], method="adam", steps=4)
    assert abs(float(found.likelihood.df) - 5.0) > 0.1
    again = ntkl.laplace(network, (x, y), found.likelihood, found.prior, structure, curvature)
    evidence = float(again.log_marginal_likelihood())
    assert float(found.log_marginal_likelihood()) == pytest.approx(evidence, rel=1e-10)
    assert max(history.evidence) == pytest.approx(evidence, rel=1e-10)


def test_variance_is_that_of_outputs_and_noise() -> None:
    network, x, y = problem()
    posterior = ntkl.laplace(network, (x, y), ntkl.StudentT(torch.tensor([0.3, 0.02]), 6.0))
    _, covariance = posterior.latent_moments(x)
    response = posterior.predict(x)
    assert relative_error(response.epistemic, covariance.diagonal(dim1=-2, dim2=-1)) < 1e-12
    noise = torch.tensor([0.3, 0.02], dtype=torch.float32).double() * 6.0 / 4.0
    assert relative_error(response.aleatoric, noise.expand(40, 2)) < 1e-12


@pytest.mark.parametrize("structure", ["gp", "full"])
def test_optima_of_the_linearized_model_under_heavy_tails(structure: str) -> None:
    """At the optimum P0 (θ - μ0) = Jᵀ w r, written in outputs: Fisher scoring alone takes hundreds of steps."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    x = torch.randn(60, 2).double()
    y = torch.sin(2 * x[:, :1]) + 0.3 * torch.distributions.StudentT(2.2).sample((60, 1)).double()
    f, jac = network(x).detach(), jacobian(network, x).squeeze(1)
    theta = torch.cat([p.detach().reshape(-1) for p in network.parameters()])

    def moved(f: Tensor, weights: Tensor) -> Tensor:
        """J (P0⁻¹ Jᵀ w r - θ*), with r of three degrees of freedom."""
        error = y - f
        return jac @ (jac.T @ (weights * 4.0 * error / (0.12 + error.square())) / 0.1 - theta.unsqueeze(1))

    posterior = ntkl.laplace(network, (x, y), ntkl.StudentT(0.04, 3.0), ntkl.GaussianPrior(0.1), structure)
    found = posterior.refit()
    weights = torch.ones(60, 1, dtype=torch.float64, device="cpu")
    assert relative_error(found.f, f + moved(found.f, weights)) < 1e-4
    without = found.remove(range(9, 12), steps=None)
    weights[9:12] = 0.0
    assert relative_error(without.f, f + moved(without.f, weights)) < 1e-4
