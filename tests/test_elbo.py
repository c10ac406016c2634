"""Expectations over f, the divergence from the prior, and the evidence lower bound."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from outside_likelihood import Gamma
from torch import Tensor

import ntk_laplace as ntkl
from ntk_laplace.model.expectations import Expectation

# --- expectations over f_n ~ N(m_n, V_nn)


def drawn(n: int, c: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Means, and covariances of full rank."""
    generator = torch.Generator().manual_seed(10 * n + c)
    mean = torch.randn(n, c, generator=generator, dtype=torch.float64)
    root = scale * torch.randn(n, c, c, generator=generator, dtype=torch.float64) / c**0.5
    return mean, root @ root.mT


def product_rule(function: Callable[[Tensor], Tensor], mean: Tensor, covariance: Tensor, order: int = 20) -> Tensor:
    """E function(f (n, C)) by a product Gauss-Hermite rule in the whitened outputs of one Cholesky factor."""
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(order))
    c = mean.shape[1]
    grid = torch.cartesian_prod(*[nodes] * c).view(-1, c)
    weight = torch.cartesian_prod(*[weights] * c).view(-1, c).prod(1) / math.sqrt(2 * math.pi) ** c
    root = torch.linalg.cholesky(covariance)
    return sum(w * function(mean + (root @ z)) for z, w in zip(grid, weight, strict=True))


def gaps(y: Tensor) -> Tensor:
    y = y.clone()
    y.view(-1)[1] = torch.nan
    return y


REAL = torch.tensor([[0.3, -1.0], [2.0, 0.4], [-0.7, 1.1]], dtype=torch.float64)
COUNTS = torch.tensor([[0.0, 3.0], [1.0, 2.0], [5.0, 0.0]], dtype=torch.float64)
LABELS = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
KNOWN = {  # likelihoods without sampling, with targets, and the outputs of the network
    "gaussian": (ntkl.Gaussian(0.3), REAL, 2),
    "gaussian with gaps": (ntkl.Gaussian(torch.tensor([[0.5, 0.2], [0.2, 0.4]]), missing="nan"), gaps(REAL), 2),
    "noise per point": (ntkl.Gaussian(torch.tensor([0.3, 0.5, 1.2]), kind="point"), REAL, 2),
    "poisson": (ntkl.Poisson(), COUNTS, 2),
    "poisson with gaps": (ntkl.Poisson(missing="nan"), gaps(COUNTS), 2),
    "bernoulli": (ntkl.Bernoulli(), LABELS, 2),
    "bernoulli with gaps": (ntkl.Bernoulli(missing="nan"), gaps(LABELS), 2),
    "tempered": (ntkl.Tempered(ntkl.Poisson(), 2.5), COUNTS, 2),
    "heteroscedastic": (ntkl.HeteroscedasticGaussian(), REAL[:, :1], 2),
    "heteroscedastic with gaps": (ntkl.HeteroscedasticGaussian(missing="nan"), gaps(REAL[:, :1]), 2),
    "user's, one output": (ntkl.CustomLikelihood(lambda f, y: -(2 * (y - f).cosh()).log().sum(1)), REAL[:, :1], 1),
}


@pytest.mark.parametrize("name", KNOWN)
def test_expectations_without_sampling(name: str) -> None:
    """E log p, E r and E Λ equal a product quadrature of the likelihood's own methods."""
    likelihood, y, c = KNOWN[name]
    mean, covariance = drawn(3, c, 0.5)
    likelihood.bind(3, c)
    found = Expectation(likelihood)
    values, errors = found.log_prob(mean, covariance, y)
    assert not errors.any()
    own = values, *found.derivatives(mean, covariance, y)
    for value, function in zip(own, (likelihood.log_prob, likelihood.residual, likelihood.curvature), strict=True):
        wanted = product_rule(lambda f, function=function: function(f, y).detach(), mean, covariance)
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-9)


def test_wide_bernoulli_is_accurate() -> None:
    """Far wider than a posterior at its training points: where a Gauss-Hermite rule of 20 nodes errs by 1e-2."""
    mean, covariance = torch.tensor([[0.5], [-3.0]]).double(), torch.tensor([[[16.0]], [[9.0]]]).double()
    y = torch.tensor([[1.0], [1.0]]).double()
    z = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    f = mean + covariance[:, 0].sqrt() * z
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    wanted = torch.trapezoid(torch.nn.functional.logsigmoid(f) * density, z)
    found, _ = Expectation(ntkl.Bernoulli()).log_prob(mean, covariance, y)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)


SAMPLED = {
    "categorical": (ntkl.Categorical(1.3), torch.tensor([0, 1, 1]), 2),
    "soft labels, one missing": (ntkl.Categorical(), torch.tensor([[0.2, 0.8], [-100, -100], [1.0, 0.0]]).double(), 2),
    "tempered": (ntkl.Tempered(ntkl.Categorical(), 3.0), torch.tensor([0, 1, 1]), 2),
    "natural": (ntkl.HeteroscedasticGaussian("natural"), REAL[:, :1], 2),
    "two outputs per response": (Gamma(), REAL[:, :1].abs(), 2),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_expectations(name: str) -> None:
    """They meet a product quadrature within their standard error, which is what seeds make of it."""
    likelihood, y, c = SAMPLED[name]
    mean, covariance = drawn(3, c, 0.25)
    wanted = product_rule(lambda f: likelihood.log_prob(f, y).detach(), mean, covariance)
    deviations = []
    for seed in range(80):
        found = Expectation(likelihood, 256, torch.Generator().manual_seed(seed))
        values, errors = found.log_prob(mean, covariance, y)
        assert (errors < 0.1).all()
        deviations.append((values - wanted).sum() / errors.square().sum().sqrt())
    assert 0.6 < torch.stack(deviations).square().mean() < 1.9  # neither too small nor too large
    residual, curvature = Expectation(likelihood, 4000).derivatives(mean, covariance, y)
    torch.testing.assert_close(residual, product_rule(lambda f: likelihood.residual(f, y).detach(), mean, covariance),
                               rtol=1e-2, atol=5e-3)  # fmt: skip
    torch.testing.assert_close(curvature, product_rule(lambda f: likelihood.curvature(f, y).detach(), mean, covariance),
                               rtol=3e-2, atol=1e-2)  # fmt: skip


def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mean, covariance = drawn(5, 3)
    found, y = Expectation(ntkl.Categorical(), 64), torch.tensor([0, 2, 1, 1, 0])
    whole = *found.log_prob(mean, covariance, y), *found.derivatives(mean, covariance, y)
    monkeypatch.setattr("ntk_laplace.runtime.tuning.AVERAGED_OUTPUTS", 2 * 64 * 3)
    parts = *found.log_prob(mean, covariance, y), *found.derivatives(mean, covariance, y)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_certain_outputs_give_the_density_itself() -> None:
    mean, _ = drawn(3, 2)
    for likelihood, y in ((ntkl.Categorical(), torch.tensor([0, 1, 1])), (ntkl.Bernoulli(), LABELS)):
        values, errors = Expectation(likelihood).log_prob(mean, mean.new_zeros(3, 2, 2), y)
        torch.testing.assert_close(values, likelihood.log_prob(mean, y).detach(), rtol=1e-12, atol=1e-12)
        assert (errors < 1e-12).all()
