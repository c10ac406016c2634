"""Distributions of single numbers: mixtures of normals, their quantiles, and Student's t as one of them."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.model.likelihoods.normal_mixture import NormalMixture
from ntk_laplace.model.predictive import predictive
from reference import relative_error
from refusals import refused

LEVELS = torch.tensor([1e-6, 0.01, 0.3, 0.7, 0.95, 0.9999], dtype=torch.float64)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("df", [2.1001, 2.5, 4.0, 30.0, 400.0, 1e5])
def test_students_t_is_a_mixture_of_normals(df: float) -> None:
    """Quantiles, densities of outliers and variances, against scipy's."""
    likelihood, zero = ntkl.StudentT(0.3, df), torch.zeros(1, dtype=torch.float64)
    with torch.no_grad():
        found = likelihood.univariate(zero, zero)
        own = stats.t(float(likelihood.df), scale=float(likelihood.noise) ** 0.5)
    np.testing.assert_allclose(found.icdf(LEVELS.unsqueeze(1))[:, 0], own.ppf(LEVELS), rtol=1e-9)
    y = numbers(-5.0, 0.0, 0.3, 2.0, 30.0 if df < 1000 else 3.0)
    np.testing.assert_allclose(found.log_prob(y.unsqueeze(1))[:, 0], own.logpdf(y), rtol=1e-10)
    np.testing.assert_allclose(found.cdf(y.unsqueeze(1))[:, 0], own.cdf(y), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.variance, own.var(), rtol=1e-9)


def test_students_t_of_uncertain_outputs() -> None:
    """Density and distribution function against quadrature over f; one output and, in float32, a scalar one."""
    likelihood, mean, variance = ntkl.StudentT(0.3, 3.0), numbers(0.4, -2.0).view(2, 1), numbers(0.8, 0.01).view(2, 1)
    own = stats.t(float(likelihood.df.detach()), scale=float(likelihood.noise.detach()) ** 0.5)
    y = numbers(1.7, 3.0).view(2, 1)
    with torch.no_grad():
        response = predictive(likelihood, mean, variance.unsqueeze(2))
        single = predictive(likelihood, mean.float(), variance.unsqueeze(2).float(), scalar=True)
        median = response.quantiles([0.5, 0.9])
    for i, (m, v, at) in enumerate(zip(mean[:, 0], variance[:, 0], y[:, 0], strict=True)):
        m, s, at = float(m), float(v) ** 0.5, float(at)

        def expected(function, at, m=m, s=s):
            area = integrate.quad(lambda z: stats.norm.pdf(z) * function(at - m - s * z), -9, 9, points=[(at - m) / s]
                                  if abs(at - m) < 9 * s else None, epsabs=1e-13, epsrel=1e-11)
            return area[0]

        assert float(response.log_prob(y)[i]) == pytest.approx(np.log(expected(own.pdf, at)), abs=1e-9)
        assert float(single.log_prob(y[:, 0])[i]) == pytest.approx(float(response.log_prob(y)[i]), abs=1e-5)
        assert expected(own.cdf, float(median[1, i])) == pytest.approx(0.9, abs=1e-10)
        assert float(median[0, i]) == pytest.approx(m, abs=1e-12)


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.0])
def test_a_response_whose_noise_is_uncertain(scale: float) -> None:
    """Against quadrature over the log variance and the mean, with correlation; the moments are those in closed form."""
    likelihood = ntkl.HeteroscedasticGaussian()
    mean, y = numbers(0.4, -1.0, 2.0, -3.0).view(2, 2), numbers(1.5, 4.0).view(2, 1)
    covariance = scale * torch.tensor([[[0.5, 0.3], [0.3, 0.7]], [[0.1, -0.2], [-0.2, 0.6]]], dtype=torch.float64)
    response = predictive(likelihood, mean, covariance)
    z = torch.linspace(-12.0, 12.0, 1601, dtype=torch.float64)
    root = torch.linalg.cholesky(covariance + 1e-300 * torch.eye(2)) if scale else covariance
    u = mean[:, :1, None] + root[:, :1, :1] * z.view(1, -1, 1)
    s = mean[:, 1:, None] + root[:, 1:, :1] * z.view(1, -1, 1) + root[:, 1:, 1:] * z
    log_weight = -0.5 * (z.unsqueeze(1).square() + z.square())
    log_weight = log_weight - log_weight.flatten().logsumexp(0)
    given, each = torch.distributions.Normal(u, (0.5 * s).exp()), response.univariate()
    density = (given.log_prob(y.unsqueeze(2)) + log_weight).flatten(1).logsumexp(1)
    torch.testing.assert_close(response.log_prob(y), density, rtol=0, atol=1e-8)
    below = (given.cdf(y.unsqueeze(2)) * log_weight.exp()).sum((1, 2))
    torch.testing.assert_close(each.cdf(y)[:, 0], below, rtol=0, atol=1e-9)
    torch.testing.assert_close(each.variance, response.variance, rtol=1e-9, atol=0)
    far = predictive(likelihood, mean, covariance).log_prob(y + 1e4)
    assert far.isfinite().all()
    wide = predictive(likelihood, mean, covariance + 1600.0 * torch.eye(2, dtype=torch.float64))
    both = [one.log_prob(y) for one in (response, wide)]
    torch.testing.assert_close(type(wide).join([response, wide]).log_prob(torch.cat([y, y])), torch.cat(both))
    unknown = predictive(likelihood, mean, 1e4 * (covariance + torch.eye(2, dtype=torch.float64)))
    certain = predictive(likelihood, mean, torch.diag(numbers(0.0, 1e4)).expand(2, 2, 2))
    assert certain.log_prob(mean[:, :1]).isfinite().all()
    assert unknown.log_prob(y).isfinite().all() and unknown.quantiles([0.1, 0.9]).isfinite().all()


@pytest.mark.parametrize(("deviation", "correlation", "y"), [
    (1e-8, -1.0, 0.0), (0.1, -1.0, 1.0), (1.0, -1.0, 1.0), (0.1, 0.9, 30.0), (0.1, 0.0, 100.0),
])
def test_a_mean_that_tells_the_noise(deviation: float, correlation: float, y: float) -> None:
    """Of a variance far above the noise: no gaps between the normals, and outliers; against a fine rule."""
    spread = 10.0 if correlation else 1e-3
    both, at = correlation * deviation * spread, y * max(1.0, spread)
    covariance = torch.tensor([[[spread**2, both], [both, deviation**2]]], dtype=torch.float64)
    found = predictive(ntkl.HeteroscedasticGaussian(), torch.zeros(1, 2).double(), covariance).log_prob(numbers(at))
    z = np.linspace(-45.0, 45.0, 300_001)
    noise = spread**2 * (1 - correlation**2) + np.exp(deviation * z)
    each = stats.norm.logpdf(z) + stats.norm.logpdf(at, correlation * spread * z, noise**0.5)
    assert float(found) == pytest.approx(special.logsumexp(each) + np.log(z[1] - z[0]), rel=1e-6)


def test_each_of_several_responses_whose_noise_is_uncertain() -> None:
    """From its own mean, log variance and their covariance, as if it were alone."""
    torch.manual_seed(0)
    mean, root = torch.randn(5, 6).double(), 0.6 * torch.randn(5, 6, 6).double()
    likelihood, y = ntkl.HeteroscedasticGaussian(), torch.randn(5, 3).double()
    each = predictive(likelihood, mean, root @ root.mT, samples=8).univariate()
    for d in range(3):
        pair = [d, 3 + d]
        alone = predictive(likelihood, mean[:, pair], (root @ root.mT)[:, pair][:, :, pair])
        torch.testing.assert_close(each.log_prob(y)[:, d], alone.log_prob(y[:, d : d + 1]), rtol=0, atol=1e-10)


def test_densities_with_missing_targets_joined_parts_and_draws() -> None:
    likelihood, mean = ntkl.StudentT(0.3, 5.0, missing="nan"), torch.linspace(-1, 1, 6).double().unsqueeze(1)
    variance = torch.linspace(0.1, 2.0, 6).double().view(6, 1, 1)
    y = torch.stack([mean + 0.3, mean - 2.0])
    y[0, 2] = torch.nan
    with torch.no_grad():
        whole = predictive(likelihood, mean, variance)
        parts = [predictive(likelihood, mean[rows], variance[rows]) for rows in (slice(0, 1), slice(1, 6))]
        joined = type(whole).join(parts)
    scalars = [predictive(likelihood, mean[rows], variance[rows], scalar=True) for rows in (slice(0, 1), slice(1, 6))]
    assert torch.equal(scalars[0].log_prob(y[:, :1, 0]), whole.log_prob(y)[:, :1])
    assert torch.equal(type(whole).join(scalars).log_prob(y[..., 0]), whole.log_prob(y))
    assert joined.log_prob(y).shape == (2, 6) and torch.equal(joined.log_prob(y), whole.log_prob(y))
    assert whole.log_prob(y)[0, 2] == 0.0 and bool((whole.log_prob(y)[1] < 0).all())
    assert torch.equal(joined.variance, whole.variance) and torch.equal(joined.mean, mean)
    torch.manual_seed(0)
    draws = whole.sample((20_000,))
    assert draws.shape == (20_000, 6, 1)
    levels = [0.05, 0.25, 0.9]
    below = torch.stack([(draws < end).double().mean(0) for end in whole.quantiles(levels)])
    torch.testing.assert_close(below, numbers(*levels).view(3, 1, 1).expand(3, 6, 1), rtol=0, atol=0.01)


def test_the_density_follows_noise_and_degrees_of_freedom() -> None:
    """Gradients against differences."""
    likelihood, y = ntkl.StudentT(0.3, 4.0), numbers(0.2, 2.5).view(2, 1)
    mean, variance = torch.zeros(2, 1).double(), torch.full((2, 1, 1), 0.2).double()

    def density() -> Tensor:
        return predictive(likelihood, mean, variance).log_prob(y).sum()

    slopes = torch.autograd.grad(density(), list(likelihood.parameters()))
    for parameter, slope in zip(likelihood.parameters(), slopes, strict=True):
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter.add_(step)
                values.append(float(density()))
                parameter.sub_(step)
        assert float(slope) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6)


def test_quantiles_of_mixtures_with_several_modes() -> None:
    """They invert the distribution function, also where a Newton step would leave the bounds."""
    mixture = NormalMixture(numbers(0.5, 0.3, 0.2).log(), numbers(-40.0, 0.0, 1e3).expand(4, 3),
                            numbers(1e-3, 5.0, 20.0))
    levels = torch.linspace(0.001, 0.999, 96, dtype=torch.float64).unsqueeze(1)  # not 0.5, in a gap
    found = mixture.icdf(levels)
    torch.testing.assert_close(mixture.cdf(found), levels.expand(96, 4), rtol=0, atol=1e-10)
    assert bool((found.diff(dim=0) > 0).all())
    assert mixture.icdf(numbers(-0.1, 0.0, 1.0, 2.0)).isnan().all()
    moved = mixture.affine(numbers(2.0), numbers(-7.0))
    torch.testing.assert_close(moved.icdf(levels), 2.0 * found - 7.0, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(moved[1:3].reshaped(2, 1).mean, 2.0 * mixture.mean[:2].unsqueeze(1) - 7.0)


@pytest.mark.parametrize(("weights", "means", "deviations", "unit"), [
    ((0.4, 0.6), (83.0, 83.0), (3.0, 3.0), 1.0),  # one normal
    ((0.5, 0.5), (83.0, 1e5), (1e-3, 1e-3), 0.5),  # of which one is far away
    ((1.0, 1e-25), (200.0, -1.0), (2.0, 0.1), 1e-25),  # of which one matters in the tail alone
])
@pytest.mark.parametrize("level", [1e-300, 1e-50, 1e-30])
def test_quantiles_far_out_are_those_of_the_lowest_normal(
    weights: tuple[float, ...], means: tuple[float, ...], deviations: tuple[float, ...], unit: float, level: float
) -> None:
    """Beside a median, and a number that is no level."""
    lowest = int(np.argmin(means))
    mixture = NormalMixture(numbers(*weights).log(), numbers(*means), numbers(*deviations))
    found = mixture.icdf(numbers(level, 0.5))
    expected = means[lowest] + deviations[lowest] * stats.norm.ppf(level / unit)
    assert float(found[0]) == pytest.approx(expected, rel=1e-12)
    assert float(mixture.cdf(found[1])) == pytest.approx(0.5, abs=1e-12)
    torch.testing.assert_close(mixture.icdf(numbers(float("nan"), level)), numbers(float("nan"), expected),
                               rtol=1e-12, atol=0, equal_nan=True)


def test_newton_steps_that_go_to_and_fro_are_halved() -> None:
    """Between narrow and wide normals they may stay within the bounds without an end."""
    draws = np.random.default_rng(2)
    weights, deviation = draws.uniform(size=5) ** 3, np.exp(2.0 * draws.standard_normal(5))
    mixture = NormalMixture(*(torch.as_tensor(part) for part in (
        np.log(weights), draws.standard_normal((20_000, 5)), deviation)))
    levels = torch.as_tensor(draws.uniform(size=20_000))
    torch.testing.assert_close(mixture.cdf(mixture.icdf(levels)), levels, rtol=0, atol=1e-10)


def test_draws_parts_and_more_copies_of_mixtures() -> None:
    """As torch's distributions have them: draws with as many below each quantile, indices and `expand`."""
    mixture = NormalMixture(numbers(0.2, 0.8).log(), numbers(-3.0, 1.0).expand(2, 3, 2), numbers(0.5, 2.0))
    levels = numbers(0.1, 0.25, 0.9).view(3, 1, 1)
    torch.manual_seed(0)
    draws = mixture.sample((20_000,))
    assert draws.shape == (20_000, 2, 3) and mixture.sample().shape == (2, 3)
    assert mixture.sample((0,)).shape == (0, 2, 3) and mixture[:0].sample((4,)).shape == (4, 0, 3)
    below = (draws.unsqueeze(1) < mixture.icdf(levels)).double().mean(0)
    torch.testing.assert_close(below, levels.expand(3, 2, 3), rtol=0, atol=0.012)
    assert abs(np.corrcoef(draws[:, 0, 0], draws[:, 1, 2])[0, 1]) < 0.03
    assert mixture[..., 0].batch_shape == (2,) and mixture[0, ..., 1:].batch_shape == (2,)
    assert torch.equal(mixture[0, 0].icdf(levels[:, 0, 0]), mixture.icdf(levels)[:, 0, 0])
    copies = mixture.expand((5, 2, 3))
    assert copies.sample().shape == (5, 2, 3) and torch.equal(copies.mean[4], mixture.mean)


@pytest.mark.parametrize("shapes", [((2, 3), (2, 3), (2, 3)), ((3,), (2,), (3,)), ((3,), (4, 3), ()), ((), (2,), (2,))])
def test_parts_of_other_shapes_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    with refused(ntkl.DataError, "log weights", re.escape(", ".join(map(str, shapes))), "same weights"):
        NormalMixture(*(torch.ones(shape) for shape in shapes))


@pytest.mark.parametrize("weights", [(1.0,), (0.5, 0.5)])
def test_levels_near_1_of_float32_numbers(weights: tuple[float, ...]) -> None:
    """In float32 such a level is 1."""
    mixture = NormalMixture(numbers(*weights).float().log(), torch.zeros(1), torch.ones(1))
    ends = mixture.icdf(numbers(1e-10, 1.0 - 1e-10))
    torch.testing.assert_close(ends, torch.tensor([-6.3613409, 6.3613409]), rtol=1e-6, atol=0)


def test_densities_of_many_points_are_computed_in_few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    response = predictive(ntkl.StudentT(0.3, 3.0), torch.zeros(1000, 1).double(), torch.ones(1000, 1, 1).double())
    parts, log_prob = [], NormalMixture.log_prob
    monkeypatch.setattr(NormalMixture, "log_prob", lambda own, y: (parts.append(len(y)), log_prob(own, y))[1])
    response.log_prob(torch.zeros(1000, 1).double())
    assert parts == [1000]


NETWORKS = {
    "normal": (ntkl.Gaussian(torch.tensor([0.3, 0.02])), 2, "glm"),
    "covariance": (ntkl.Gaussian(torch.tensor([[0.3, 0.1], [0.1, 0.2]]), "covariance"), 2, "glm"),
    "two outputs of t": (ntkl.StudentT(torch.tensor([0.3, 0.02]), 4.0), 2, "glm"),
    "t alone": (ntkl.StudentT(0.1, 4.0), 2, "map"),
    "t of samples": (ntkl.StudentT(0.1, 4.0), 1, "nn"),
    "heteroscedastic": (ntkl.HeteroscedasticGaussian(), 2, "glm"),
    "several heteroscedastic": (ntkl.HeteroscedasticGaussian(), 4, "glm"),
    "everywhere": (ntkl.Everywhere(ntkl.StudentT(0.1, 5.0), (2,)), 2, "glm"),
    "tempered": (ntkl.Tempered(ntkl.StudentT(0.1, 5.0), 2.0), 1, "glm"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_quantiles_of_predictions(name: str) -> None:
    """As many draws are below them as they say."""
    likelihood, outputs, method = NETWORKS[name]
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 30).double().unsqueeze(1)
    network = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    y = torch.sin(x).expand(30, likelihood.num_responses(outputs)) + 0.1
    y = y.unsqueeze(2) if name == "everywhere" else y
    response = ntkl.laplace(network, (x, y), likelihood, ntkl.GaussianPrior(2.0)).predict(x[:5], method, 200)
    levels = [0.1, 0.5, 0.975]
    found = response.quantiles(levels)
    assert found.shape == (3, *response.mean.shape)
    below = (response.sample((4000,)).unsqueeze(1) < found).double().mean(0)
    torch.testing.assert_close(below, numbers(*levels).view(3, *(1 for _ in response.mean.shape)).expand_as(found),
                               rtol=0, atol=0.03)
    assert relative_error(response.univariate().mean, response.mean) < 1e-6
    assert relative_error(response.univariate().variance, response.variance) < 1e-6


def test_what_has_no_quantiles() -> None:
    mean, covariance = torch.zeros(2, 3).double(), torch.eye(3).double().expand(2, 3, 3)
    for likelihood in (ntkl.Categorical(), ntkl.Bernoulli(), ntkl.Poisson()):
        response = predictive(likelihood, mean, covariance, "map")
        for verb in (response.cdf, response.icdf):
            with refused(ntkl.UnsupportedError, "distribution function|quantiles", type(likelihood).__name__, "univar"):
                verb(response.mean)
        if not likelihood.classifies:
            continue
        with refused(ntkl.UnsupportedError, "mixtures of normals", type(likelihood).__name__, "samples"):
            predictive(likelihood, mean, covariance, samples=8).quantiles(0.5)
    with refused(ntkl.UnsupportedError, "an entropy in closed form", "CountResponse of Poisson", "Average draws"):
        response.entropy()  # torch's own error has no words
    response = predictive(ntkl.Gaussian(0.1), mean, covariance)
    assert response.quantiles(0.5).shape == (1, 2, 3)
    assert response.entropy().isfinite().all()
    for levels in (0.0, [0.5, 1.0], [], "many", [float("nan")]):
        with refused(ntkl.DataError, "strictly between 0 and 1", "", "0.9"):
            response.quantiles(levels)


class Heavier(ntkl.StudentT):
    """A class whose density is another."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return 2.0 * super().log_prob(f, y)


def test_a_subclass_has_no_closed_form_of_another_density() -> None:
    own = Heavier(0.3)
    assert not own.integrates(1) and own.integrate(torch.zeros(1, 1), torch.ones(1, 1, 1)) is None
    with refused(ntkl.UnsupportedError, "mixtures of normals", "Heavier", "samples"):
        own.univariate(torch.zeros(1), torch.ones(1))
