"""Conditional evidence from samples: values, honest errors, autocorrelated chains, warnings and refusals."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

import ntk_laplace as ntkl
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
    normal = random.normal(0.0, 0.9**0.5, (100_000, 1))
    assert conditional_from_samples(normal).standard_error == pytest.approx((math.expm1(0.9) / 1e5) ** 0.5, rel=0.03)
    assert conditional_from_samples(np.full((20, 3), -2.0)).standard_error == pytest.approx(0.0, abs=1e-12)


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
    assert found.value == pytest.approx(math.log(19 / 20) - 2.0) and found.standard_error == math.inf


@pytest.mark.parametrize(
    ("given", "kind", "error", "words"),
    [
        (np.zeros((20, 3)), "sum", ntkl.UnsupportedError, '"joint" or "marginal"'),
        (np.zeros((1, 3)), "joint", ntkl.DataError, "at least 2 samples"),
        (np.zeros(20), "joint", ntkl.DataError, r"shape \(20,\)"),
        (np.zeros((20, 0)), "joint", ntkl.DataError, r"shape \(20, 0\)"),
        (np.zeros((2, 2, 2, 2)), "marginal", ntkl.DataError, "chains, draws, N"),
        (np.where(np.eye(20) > 0, np.nan, 0.0), "joint", ntkl.NonFiniteError, r"nan at \(0, 0\)"),
        (np.where(np.eye(20) > 0, np.inf, 0.0), "marginal", ntkl.NonFiniteError, r"inf at \(0, 0\)"),
    ],
)
def test_refusals(given: np.ndarray, kind: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        conditional_from_samples(given, kind)
