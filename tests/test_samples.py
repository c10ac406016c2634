"""Conditional evidence from samples: values, honest errors, autocorrelated chains, warnings and refusals."""

from __future__ import annotations

import functools
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_laplace as ntkl
from ntk_laplace.model.predictive import normal_points
from ntk_laplace.runtime import tuning
from ntk_laplace.selection import ConditionalEstimate, conditional_from_samples

LOG_2PI = math.log(2 * math.pi)


class Regression:
    """Bayesian linear regression of N points, of which the last n are asked; numpy only, from textbook formulas."""

    def __init__(self, seed: int, parameters: int, points: int, asked: int, noise: float) -> None:
        self.random, self.noise = np.random.default_rng(seed), noise
        x = self.random.standard_normal((points, parameters)) / parameters**0.5
        y = x @ self.random.standard_normal(parameters) + noise**0.5 * self.random.standard_normal(points)
        known = points - asked
        precision = np.eye(parameters) + x[:known].T @ x[:known] / noise
        self.x, self.y = x[known:], y[known:]
        self.mean = np.linalg.solve(precision, x[:known].T @ y[:known] / noise)
        self.root = np.linalg.cholesky(np.linalg.inv(precision))
        covariance = noise * np.eye(asked) + self.x @ self.root @ self.root.T @ self.x.T
        error = self.y - self.x @ self.mean
        self.joint = -0.5 * (asked * LOG_2PI + np.linalg.slogdet(covariance)[1]
                             + error @ np.linalg.solve(covariance, error))
        variance = np.diag(covariance)
        self.marginal = -0.5 * (LOG_2PI + np.log(variance) + error**2 / variance).sum()

    def log_likelihood(self, samples: int) -> np.ndarray:
        theta = self.mean + self.random.standard_normal((samples, len(self.mean))) @ self.root.T
        return -0.5 * (LOG_2PI + np.log(self.noise)) - 0.5 * (self.y - theta @ self.x.T) ** 2 / self.noise


def estimate(log_likelihood: np.ndarray, kind: str = "joint") -> ConditionalEstimate:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)
        return conditional_from_samples(log_likelihood, kind)


def test_the_two_points_of_appendix_g() -> None:
    """Two models, two points: .9 and .1, .1 and .9: the joint density is .09, the marginal one .25 ([L22] G)."""
    table = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64).log()
    with pytest.warns(ntkl.NTKLaplaceWarning, match="2 samples, fewer than 10"):
        joint = conditional_from_samples(table)
    with pytest.warns(ntkl.NTKLaplaceWarning):
        marginal = conditional_from_samples(table.numpy(), "marginal")
    assert math.exp(float(joint)) == pytest.approx(0.09, abs=1e-12) and joint.variance < 1e-30
    assert math.exp(marginal.value) == pytest.approx(0.25, abs=1e-12)
    assert joint.interval == (-math.inf, math.inf) and not joint.trusted
    assert joint.samples == joint.asked == 2


def test_values_and_errors_by_hand() -> None:
    logs = np.random.default_rng(0).normal(-1.0, 0.2, (40, 3))
    joint, marginal = conditional_from_samples(logs), conditional_from_samples(torch.tensor(logs), "marginal")
    product, each = np.exp(logs.sum(1)), np.exp(logs)
    assert joint.value == pytest.approx(np.log(product.mean()), abs=1e-12)
    assert marginal.value == pytest.approx(np.log(each.mean(0)).sum(), abs=1e-12)
    assert joint.variance == pytest.approx(logs.sum(1).var(ddof=1), rel=1e-12)
    assert marginal.variance == pytest.approx(logs.var(0, ddof=1).max(), rel=1e-12)
    assert joint.ess == pytest.approx(product.sum() ** 2 / (product**2).sum(), rel=1e-12)
    assert marginal.ess == pytest.approx((each.sum(0) ** 2 / (each**2).sum(0)).min(), rel=1e-12)
    # the delta method, by finite differences of the value in the share of each sample
    slopes = (each / each.mean(0)).sum(1)
    assert marginal.standard_error == pytest.approx(slopes.std(ddof=1) / 40**0.5, rel=1e-12)
    assert marginal.bias == pytest.approx(-0.5 * (each.var(0, ddof=1) / each.mean(0) ** 2).sum() / 40, rel=1e-12)
    assert joint.standard_error >= product.std(ddof=1) / product.mean() / 40**0.5 - 1e-15
    assert joint.bias == pytest.approx(-0.5 * joint.standard_error**2, rel=1e-12)
    low, high = joint.interval
    assert 0.5 * (low + high) == pytest.approx(joint.value - joint.bias, abs=1e-12)
    assert 0.5 * (high - low) == pytest.approx(1.684875 * joint.standard_error, rel=1e-6)  # t of 39, 95 %


def test_the_error_knows_what_was_not_drawn() -> None:
    """For L = a - bG with gamma G the relative variance is known, which the moments of few draws show."""
    random = np.random.default_rng(1)
    shape, b = 4.0, 0.6
    truth = ((1 + b) ** 2 / (1 + 2 * b)) ** shape - 1
    many = conditional_from_samples(-b * random.gamma(shape, size=(200_000, 1)))
    assert many.standard_error == pytest.approx((truth / 200_000) ** 0.5, rel=0.02)
    larger = set()
    for _ in range(10):  # the larger one of the delta method's error and of that of the three moments
        logs = -b * random.gamma(shape, size=(12, 1))
        weights = np.exp(logs)
        moments = logs.var(ddof=1), stats.skew(logs[:, 0], bias=False)
        k = 4 / moments[1] ** 2
        c = (moments[0] / k) ** 0.5
        fitted = ((1 + c) ** 2 / (1 + 2 * c)) ** k - 1 if moments[1] < 0 else math.expm1(moments[0])
        both = weights.std(ddof=1) / weights.mean() / 12**0.5, (fitted / 12) ** 0.5
        assert estimate(logs).standard_error == pytest.approx(max(both), rel=1e-9)
        larger.add(both[0] > both[1])
    assert larger == {False, True}
    normal = random.normal(0.0, 0.9**0.5, (100_000, 1))
    assert conditional_from_samples(normal).standard_error == pytest.approx((math.expm1(0.9) / 1e5) ** 0.5, rel=0.03)
    assert conditional_from_samples(np.full((20, 3), -2.0)).standard_error == pytest.approx(0.0, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["joint", "marginal"])
def test_intervals_cover_the_exact_value(kind: str) -> None:
    """90 % intervals of conjugate models hold the exact value in 90 ± 5 %, wherever there is no warning."""
    covered = []
    for samples in (10, 20, 100):
        for number, form in enumerate([(2, 40, 5, 0.1), (10, 200, 15, 0.1), (10, 200, 30, 0.1), (5, 30, 10, 1.0)] * 30):
            model = Regression(1000 * samples + number, *form)
            found = estimate(model.log_likelihood(samples), kind)
            if found.trusted:
                low, high = found.interval
                covered.append(low <= (model.joint if kind == "joint" else model.marginal) <= high)
    assert len(covered) > 250
    assert 0.85 <= np.mean(covered) <= 0.95


def test_many_parameters_and_points_are_warned_of() -> None:
    """P = 400, 300 points asked, 20 samples: the joint form is about 35 nats too low."""
    errors = []
    for seed in range(6):
        model = Regression(seed, 400, 2000, 300, 0.1)
        with pytest.warns(ntkl.NTKLaplaceWarning, match="not to be trusted: variance of the log density"):
            found = conditional_from_samples(model.log_likelihood(20))
        errors.append(found.value - model.joint)
        assert found.variance > 50 and "effective" in str(found) and "±" not in str(found)
    assert -42.0 <= np.mean(errors) <= -28.0


def test_a_tail_to_the_left_is_no_reason_to_warn() -> None:
    """Log densities of variance 20 that are bounded above: many samples are effective, and the interval is right."""
    shape, b, covered = 0.3, 8.0, []
    for seed in range(100):
        logs = -b * np.random.default_rng(seed).gamma(shape, size=(500, 1))
        found = conditional_from_samples(logs)
        assert found.variance > math.log(500) and found.ess > 100 and "above log 500" in found.words
        low, high = found.interval
        covered.append(low <= -shape * math.log1p(b) <= high)
    assert 0.83 <= np.mean(covered) <= 0.97
    assert not estimate(logs[:40]).trusted or estimate(logs[:40]).variance <= math.log(40)


def test_autocorrelated_chains_are_worth_fewer_samples() -> None:
    """AR(1) with φ = .8: one independent draw in (1 + φ)/(1 - φ) = 9."""
    random, phi, chains = np.random.default_rng(2), 0.8, 4
    series = np.zeros((chains, 6000))
    for step in range(1, 6000):
        series[:, step] = phi * series[:, step - 1] + 0.2 * random.standard_normal(chains)
    draws = series[:, 100:, None]
    found, blind = conditional_from_samples(draws), conditional_from_samples(draws.reshape(-1, 1))
    assert found.samples / found.independent == pytest.approx(9.0, rel=0.15)
    ratio = (found.standard_error / blind.standard_error) ** 2
    assert ratio == pytest.approx(found.samples / found.independent, rel=1e-9)
    assert found.value == blind.value and blind.independent == blind.samples
    assert "worth" in found.words
    # chains that do not agree are worth about as many draws as chains
    apart = draws + 0.4 * np.arange(chains)[:, None, None]
    assert estimate(apart).independent < 30
    # draws against each other are not counted as more than independent ones
    signs = np.tile([1.0, -1.0], 50)[None, :, None] * 0.1
    assert estimate(signs).independent == 100


def test_zero_densities() -> None:
    logs = np.full((20, 2), -1.0)
    logs[3, 1] = -math.inf
    with pytest.warns(ntkl.NTKLaplaceWarning, match="variance of the log density inf"):
        found = conditional_from_samples(logs)
    assert found.value == pytest.approx(math.log(19 / 20) - 2.0) and found.standard_error == pytest.approx(1 / 19)
    assert not found.trusted and found.interval == (-math.inf, math.inf)  # 20 samples


@pytest.mark.parametrize("kind", ["joint", "marginal"])
def test_a_density_of_zero_is_a_weight_of_zero(kind: str) -> None:
    """As one of e^-800, but that its logarithm has no spread; where every sample has it, nothing is known."""
    good = -1.0 + 0.3 * np.random.default_rng(0).standard_normal((500, 6))
    zero, small = (conditional_from_samples(np.concatenate([good, np.full((1, 6), low)]), "marginal")
                   for low in (-math.inf, -800.0))
    assert zero.trusted and zero.interval == pytest.approx(small.interval, abs=1e-9) and zero.variance == math.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mixed = conditional_from_samples(np.concatenate([good, np.full((1, 6), -math.inf)]), kind)
        never = conditional_from_samples(np.where(np.arange(6) == 2, -math.inf, good), kind)
    assert math.isfinite(mixed.value) and math.isfinite(mixed.standard_error) and math.isfinite(mixed.bias)
    assert never.value == -math.inf and not never.trusted and never.interval == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("given", "kind", "error", "words"),
    [
        (np.zeros((20, 3)), "sum", ntkl.UnsupportedError, '"joint" or "marginal"'),
        (np.zeros((1, 3)), "joint", ntkl.DataError, "at least 2 samples"),
        ("a", "joint", ntkl.DataError, "tensor or an array"),
        (np.zeros(20), "joint", ntkl.DataError, r"shape \(20,\)"),
        (np.zeros((20, 0)), "joint", ntkl.DataError, r"shape \(20, 0\)"),
        (np.zeros((2, 2, 2, 2)), "marginal", ntkl.DataError, "chains, draws, N"),
        (torch.zeros(20, 3).to_sparse(), "joint", ntkl.DataError, "sparse"),
        (torch.zeros(20, 3, device="meta"), "joint", ntkl.DataError, "meta"),
        (np.where(np.eye(20) > 0, np.nan, 0.0), "joint", ntkl.NonFiniteError, r"nan at \(0, 0\)"),
        (np.where(np.eye(20) > 0, np.inf, 0.0), "marginal", ntkl.NonFiniteError, r"inf at \(0, 0\)"),
    ],
)
def test_refusals(given: Any, kind: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        conditional_from_samples(given, kind)


def test_arrays_that_torch_does_not_take() -> None:
    values = np.random.default_rng(0).normal(size=(50, 3))
    given = estimate(values)
    for array in (values[::-1][::-1], np.ascontiguousarray(values[::-1])[::-1], values.astype(">f8")):
        assert estimate(array).value == given.value


def test_an_overflow_is_not_trusted() -> None:
    found = estimate(np.where(np.arange(60).reshape(20, 3) % 2, 1e308, -1e308), "marginal")
    assert not found.trusted and found.interval == (-math.inf, math.inf)


# --- of a posterior's own samples


@functools.cache
def regression() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(30, 3).double()
    y = x @ torch.randn(3, 2).double() + 0.5 * torch.randn(30, 2).double()
    return nn.Linear(3, 2).double(), x, y  # far from its optimum, which must not matter


@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "diag"])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_samples_of_a_posterior_have_its_joint_density(structure: str, scale: float) -> None:
    """log N(y; refitted mean, c J H⁻¹ Jᵀ + σ²) of all asked points together, from the fit to the known ones alone."""
    network, x, y = regression()
    posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(0.25), structure=structure)
    options = {"method": "samples", "scale": scale, "draws": 10_000}
    found = float(posterior.conditional_log_marginal_likelihood(27, 0, **options))
    alone = ntkl.laplace(network, (x[:27], y[:27]), ntkl.Gaussian(0.25), structure=structure)
    f = alone.latent(x[27:], mean="posterior")
    noisy = scale * f.covariance_matrix + 0.25 * torch.eye(6).double()
    truth = float(torch.distributions.MultivariateNormal(f.mean.flatten(), noisy).log_prob(y[27:].flatten()))
    assert found == pytest.approx(truth, abs=0.05)
    if scale == 1.0 and structure in ("gp", "full"):
        assert truth == pytest.approx(float(posterior.conditional_log_marginal_likelihood(27, 0)), abs=1e-9)
    # the same draws again; others for another seed
    again = posterior.conditional_log_marginal_likelihood(27, 0, **options)
    other = posterior.conditional_log_marginal_likelihood(27, 0, seed=1, **options)
    assert float(again) == found != float(other)


def test_small_parts_of_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws that do not fit in memory at once, batches of a loader and weights of examples."""
    network, x, y = regression()
    weights = torch.ones(30).double()
    weights[[2, 25]] = 2.0
    plain = ntkl.laplace(network, (x, y, weights), ntkl.Gaussian(0.25), structure="diag")
    twice = torch.cat([x[:24], x[2:3], x[24:], x[25:26]]), torch.cat([y[:24], y[2:3], y[24:], y[25:26]])
    repeated = ntkl.laplace(network, twice, ntkl.Gaussian(0.25), structure="diag")
    options = {"method": "samples", "scale": 0.1, "draws": 200}
    whole = float(plain.conditional_log_marginal_likelihood(24, 0, **options))
    assert whole == pytest.approx(float(repeated.conditional_log_marginal_likelihood(25, 0, **options)), rel=1e-9)
    monkeypatch.setattr(tuning, "WEIGHT_SAMPLE_BYTES", 8 * 8 * 30)
    loader = DataLoader(TensorDataset(x, y), 7)
    parts = ntkl.laplace(network, loader, ntkl.Gaussian(0.25), structure="diag")
    same = ntkl.laplace(network, (x, y), ntkl.Gaussian(0.25), structure="diag")
    in_parts = float(parts.conditional_log_marginal_likelihood(24, 0, **options))
    assert in_parts == pytest.approx(float(same.conditional_log_marginal_likelihood(24, 0, **options)), rel=1e-9)


@functools.cache
def classifier(structure: str = "gp") -> tuple[ntkl.Posterior, Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(60, 2).double()
    y = (x[:, 0] + 0.7 * torch.randn(60).double() > 0).long() + (x[:, 1] > 0.8).long()
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(0.3), structure=structure), x, y


def held_out(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and covariance blocks of the first 51 points less a seventeenth, at these and at the last 9; labels."""
    posterior, x, y = classifier()
    part = posterior.subset(torch.arange(51 - count))
    rows = part.jacobian(x[51 - count :])
    mean = rows.f - rows.jvp(part.network.unflatten(part.fitted.newton_step()))
    return mean, part.posterior_precision.covariance_blocks(rows), y[51 - count :]


def log_densities(mean: Tensor, covariance: Tensor, y: Tensor, scale: float, draws: float, average: float) -> Tensor:
    """log of softmax(log E softmax(f/T) / T_a) at the label, over the points of f that `predict` uses."""
    values, vectors = torch.linalg.eigh(scale * covariance)
    root = vectors @ torch.diag_embed(values.clamp_min(0).sqrt()) @ vectors.mT
    f = mean + torch.einsum("ncd,sd->snc", root, normal_points(1000, 3))
    averaged = torch.softmax(f / draws, 2).mean(0)
    return torch.log_softmax(averaged.log() / average, 1).gather(1, y[:, None])[:, 0]


@pytest.mark.parametrize("temperature", ["draws", "average"])
def test_the_temperature_is_fitted_to_the_held_out_seventeenth(temperature: str) -> None:
    posterior, *_ = classifier()
    mean, covariance, y = held_out(3)

    def at(t: float, part: slice) -> float:
        numbers = (0.5, t, 1.0) if temperature == "draws" else (0.5, 1.0, t)
        return float(log_densities(mean[part], covariance[part], y[part], *numbers).sum())

    best = optimize.minimize_scalar(lambda t: -at(t, slice(3)), bounds=(0.25, 10.0), method="bounded",
                                    options={"xatol": 1e-7}).x
    found = posterior.conditional_log_marginal_likelihood(51, 0, method="average", scale=0.5, temperature=temperature)
    assert float(found) == pytest.approx(at(best, slice(3, None)), abs=1e-4)
    assert abs(float(found) - at(1.0, slice(3, None))) > 0.01
    free = posterior.conditional_log_marginal_likelihood(51, 0, method="average", temperature=temperature)
    assert math.isfinite(free) and float(free) != float(found)
    if temperature == "draws":
        sampled = posterior.conditional_log_marginal_likelihood(51, 0, method="samples", scale=0.5, draws=10_000,
                                                                temperature="draws")
        part, index = posterior.subset(torch.arange(48)), torch.arange(51, 60)
        rows = part.jacobian(classifier()[1][index])
        root = torch.linalg.cholesky(0.5 * part.posterior_precision.covariance(rows) + 1e-12 * torch.eye(27).double())
        torch.manual_seed(0)
        f = mean[3:] + (torch.randn(10_000, 27).double() @ root.T).view(-1, 9, 3)
        joint = torch.log_softmax(f / best, 2).gather(2, y[3:].expand(10_000, 9)[..., None])[..., 0].sum(1)
        assert float(sampled) == pytest.approx(float(joint.logsumexp(0)) - math.log(10_000), abs=0.1)


def test_samples_warn_and_refuse() -> None:
    posterior, *_ = classifier()
    with pytest.warns(ntkl.NTKLaplaceWarning, match="5 samples, fewer than 10") as caught:
        posterior.conditional_log_marginal_likelihood(51, 0, method="samples", scale=1.0, draws=5)
    assert Path(caught[0].filename).name == "test_samples.py"
    for options, error, words in (
        ({"draws": 1}, ntkl.HyperparameterError, "draws as a whole number, at least 2"),
        ({"temperature": "average"}, ntkl.UnsupportedError, 'temperature "draws" for the joint density'),
        ({"temperature": "warm"}, ntkl.UnsupportedError, "'warm'"),
        ({"scale": -1.0}, ntkl.HyperparameterError, "scale of the covariance"),
    ):
        with pytest.raises(error, match=words):
            posterior.conditional_log_marginal_likelihood(51, 0, method="samples", **options)
    network, x, y = regression()
    with pytest.raises(ntkl.UnsupportedError, match="for this likelihood"):
        ntkl.laplace(network, (x, y), ntkl.Gaussian(0.25)).conditional_log_marginal_likelihood(
            24, 0, method="average", temperature="draws")
