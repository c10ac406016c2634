"""Predictive distributions against quadrature, SciPy and sums over all responses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from torch import distributions as td

from ntk_laplace.errors import (
    HyperparameterError,
    NTKLaplaceWarning,
    NumericalError,
    TargetError,
    UnsupportedError,
)
from ntk_laplace.model.likelihoods import (
    Bernoulli,
    Categorical,
    CustomLikelihood,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Poisson,
    StudentT,
    Tempered,
)
from ntk_laplace.model.likelihoods.covariances import covariance_root
from ntk_laplace.model.predictive import METHODS, joined, normal_points, predictive, predictive_from_samples

N = 5
CLOSE = {"rtol": 1e-12, "atol": 1e-13}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments(outputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Means and covariances of f at N inputs; the second covariance has rank one, the third is zero."""
    root = 0.7 * draw(seed + 1, N, outputs, outputs)
    root[1, :, 1:] = 0.0
    root[2] = 0.0
    return draw(seed, N, outputs), root @ root.mT


def nodes(mean: Tensor, covariance: Tensor, order: int = 48) -> tuple[Tensor, Tensor]:
    """Gauss-Hermite points of N(mean, covariance) at each input, (Q, n, C), and their weights (Q,)."""
    z, w = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(order))
    outputs = mean.shape[-1]
    grid = torch.tensor(list(itertools.product(z.tolist(), repeat=outputs)), dtype=torch.float64)
    weights = torch.tensor([math.prod(c) for c in itertools.product(w.tolist(), repeat=outputs)], dtype=torch.float64)
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    return mean + torch.einsum("ncd,qd->qnc", root, grid), weights / weights.sum()


@dataclass(frozen=True)
class Case:
    """A likelihood with targets for N inputs and C outputs."""

    name: str
    build: Callable[[], Likelihood]
    targets: Callable[[int], Tensor]
    outputs: int
    scalar: bool = False

    def predict(self, method: str = "glm", **options: object) -> torch.distributions.Distribution:
        return predictive(self.build(), *moments(self.outputs), method, scalar=self.scalar, **options)

    @property
    def y(self) -> Tensor:
        y = self.targets(self.outputs)
        return y.squeeze(-1) if self.scalar else y


COVARIANCE = torch.tensor([[0.5, 0.2, -0.1], [0.2, 0.9, 0.3], [-0.1, 0.3, 0.4]], dtype=torch.float64)


def binary(outputs: int) -> Tensor:
    return (draw(9, N, outputs) > 0).double()


def counts(outputs: int) -> Tensor:
    return torch.arange(N * outputs).reshape(N, outputs).double() % 4


CASES = [
    Case("gaussian", lambda: Gaussian(0.3), lambda c: draw(8, N, c), 3),
    Case("gaussian-one", lambda: Gaussian(0.3), lambda c: draw(8, N, c), 1),
    Case("gaussian-scalar", lambda: Gaussian(0.3), lambda c: draw(8, N, c), 1, scalar=True),
    Case("gaussian-covariance", lambda: Gaussian(COVARIANCE), lambda c: draw(8, N, c), 3),
    Case("bernoulli", Bernoulli, binary, 2),
    Case("bernoulli-one", Bernoulli, binary, 1),
    Case("bernoulli-scalar", Bernoulli, binary, 1, scalar=True),
    Case("categorical", lambda: Categorical(1.3), lambda c: torch.arange(N) % c, 3),
    Case("categorical-two", Categorical, lambda c: torch.arange(N) % c, 2),
    Case("student", lambda: StudentT(0.3, 5.0), lambda c: draw(8, N, c), 2),
    Case("student-scalar", lambda: StudentT(0.3, 5.0), lambda c: draw(8, N, c), 1, scalar=True),
    Case("poisson", Poisson, counts, 2),
    Case("poisson-one", Poisson, counts, 1),
    Case("poisson-scalar", Poisson, counts, 1, scalar=True),
    Case("binomial", lambda: NegativeBinomial(0.5), counts, 2),
    Case("binomial-scalar", lambda: NegativeBinomial(0.5), counts, 1, scalar=True),
]
BY_NAME = {case.name: case for case in CASES}
SUPPORTED = [
    (case, method) for case in CASES for method in [*METHODS, "glm"] if method != "probit" or case.build().classifies
]
each = pytest.mark.parametrize(("case", "method"), SUPPORTED, ids=[f"{c.name}-{m}" for c, m in SUPPORTED])


def select(*words: str) -> pytest.MarkDecorator:
    cases = [case for case in CASES if any(word in case.name for word in words)]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


# --- what every predictive offers -----------------------------------------------------------------


@each
def test_shapes(case: Case, method: str) -> None:
    with torch.no_grad():
        response = case.predict(method, samples=64)
    assert isinstance(response, torch.distributions.Distribution)
    assert response.batch_shape == (N,)
    classes = "categorical" in case.name
    vector = () if case.scalar else (case.outputs,)
    assert response.event_shape == (() if classes and method != "blr" else vector)
    for name in ("mean", "variance", "epistemic", "aleatoric"):
        assert getattr(response, name).shape == (N, *vector), name
    assert response.log_prob(case.y).shape == (N,)
    torch.manual_seed(0)
    for shape in [(), (4,), (2, 3)]:
        y = response.sample(shape)
        assert y.shape == (*shape, N, *response.event_shape)
        assert response.log_prob(y).shape == (*shape, N)
        torch.testing.assert_close(response.log_prob(y)[..., :1].isfinite().all(), torch.tensor(True))


@each
def test_two_parts_of_the_variance(case: Case, method: str) -> None:
    response = case.predict(method, samples=64)
    torch.testing.assert_close(response.variance, response.epistemic + response.aleatoric)
    torch.testing.assert_close(response.stddev, response.variance.sqrt())
    assert (response.epistemic >= 0).all() and (response.aleatoric >= 0).all()
    assert bool(response.epistemic.any()) == (method != "map")
    assert not response.epistemic[2].any()  # f is certain there


@each
def test_class_probabilities(case: Case, method: str) -> None:
    response = case.predict(method, samples=64)
    if not case.build().classifies:
        assert not hasattr(response, "probs")
        return
    torch.testing.assert_close(response.probs, response.mean)
    assert ((response.probs > 0) & (response.probs < 1)).all()
    if "categorical" in case.name:
        torch.testing.assert_close(response.probs.sum(1), torch.ones(N, dtype=torch.float64), **CLOSE)
    if method != "blr":  # whose variance is that of a Gaussian
        torch.testing.assert_close(response.variance, response.probs * (1 - response.probs), rtol=1e-10, atol=0)


@each
def test_without_uncertainty_all_methods_are_the_likelihood(case: Case, method: str) -> None:
    mean, covariance = moments(case.outputs)
    likelihood = case.build()
    response = predictive(likelihood, mean, torch.zeros_like(covariance), method, samples=8, scalar=case.scalar)
    known = likelihood.distribution(mean, case.scalar)
    torch.testing.assert_close(response.mean, known.mean, **CLOSE)
    torch.testing.assert_close(response.variance, known.variance, **CLOSE)
    if method != "blr" or "gaussian" in case.name:
        torch.testing.assert_close(response.log_prob(case.y), known.log_prob(case.y), **CLOSE)
        torch.testing.assert_close(
            known.log_prob(case.y), likelihood.log_prob(mean, case.targets(case.outputs)), **CLOSE
        )


@each
def test_splitting_the_batch_changes_nothing(case: Case, method: str) -> None:
    mean, covariance = moments(case.outputs)
    whole = case.predict(method)
    for rows in (slice(0, 2), slice(2, N)):
        part = predictive(case.build(), mean[rows], covariance[rows], method, scalar=case.scalar)
        torch.testing.assert_close(part.log_prob(case.y[rows]), whole.log_prob(case.y)[rows], **CLOSE)
        torch.testing.assert_close(part.variance, whole.variance[rows], **CLOSE)


@each
def test_the_dtype_of_f_rules(case: Case, method: str) -> None:
    mean, covariance = (moment.float() for moment in moments(case.outputs))
    single = predictive(case.build(), mean, covariance, method, scalar=case.scalar)
    double = case.predict(method)
    for name in ("mean", "variance"):
        assert getattr(single, name).dtype == torch.float32
        torch.testing.assert_close(getattr(single, name).double(), getattr(double, name), rtol=1e-3, atol=1e-4)
    score = single.log_prob(case.y)
    assert score.dtype == torch.float32
    # not blr at the inputs with a covariance that is nearly singular
    torch.testing.assert_close(score.double(), double.log_prob(case.y), rtol=1e-3, atol=1e-3)


@each
def test_gradients_reach_the_moments(case: Case, method: str) -> None:
    mean, covariance = moments(case.outputs)
    mean.requires_grad_()
    response = predictive(case.build(), mean, covariance, method, samples=16, scalar=case.scalar)
    (gradient,) = torch.autograd.grad(response.log_prob(case.y).sum(), mean)
    assert gradient.isfinite().all() and gradient.any(1).all()


# --- Gaussian ---------------------------------------------------------------------------------------


@select("gaussian")
@pytest.mark.parametrize("method", ["glm", "blr"])
def test_gaussian_is_closed_form(case: Case, method: str) -> None:
    mean, covariance = moments(case.outputs)
    noise = COVARIANCE if "covariance" in case.name else 0.3 * torch.eye(case.outputs, dtype=torch.float64)
    response = case.predict(method)
    rows = zip(case.targets(case.outputs), mean, covariance + noise, strict=True)
    expected = [scipy.stats.multivariate_normal(m, v).logpdf(y) for y, m, v in rows]
    torch.testing.assert_close(response.log_prob(case.y).detach(), torch.tensor(expected), **CLOSE)
    variance = covariance.diagonal(dim1=1, dim2=2).reshape(response.mean.shape)
    torch.testing.assert_close(response.epistemic, variance, **CLOSE)
    torch.testing.assert_close(
        response.aleatoric.detach(), noise.diagonal().expand(N, -1).reshape(variance.shape), **CLOSE
    )
    torch.testing.assert_close(response.mean, mean.reshape(variance.shape), **CLOSE)
    kind = torch.distributions.Normal if case.scalar else torch.distributions.MultivariateNormal
    assert isinstance(response, kind)
    if not case.scalar:
        torch.testing.assert_close(response.covariance_matrix.detach(), covariance + noise, **CLOSE)
        torch.testing.assert_close(response.latent_covariance, covariance, **CLOSE)


def test_gaussian_with_noise_of_the_new_points() -> None:
    mean, covariance = moments(2)
    noise = torch.linspace(0.1, 1.0, N, dtype=torch.float64)
    likelihood = Gaussian(noise)
    response = predictive(likelihood, mean, covariance)
    torch.testing.assert_close(response.aleatoric.detach(), noise.unsqueeze(1).expand(N, 2), **CLOSE)
    f = draw(3, 6, N, 2)
    mixture = predictive_from_samples(Gaussian(noise), f)
    torch.testing.assert_close(mixture.aleatoric.detach(), noise.unsqueeze(1).expand(N, 2), **CLOSE)
    y = draw(4, N, 2)
    each = torch.stack([Gaussian(noise).log_prob(row, y) for row in f])
    torch.testing.assert_close(mixture.log_prob(y), each.exp().mean(0).log(), **CLOSE)
    with pytest.raises(UnsupportedError, match=r"expected the 5 points that the noise per point was given for; got 3"):
        likelihood.bind(N, 2)
        predictive(likelihood, mean[:3], covariance[:3])


# --- glm against quadrature ---------------------------------------------------------------------------


@select("bernoulli", "categorical", "poisson")
def test_glm_is_the_average_over_f(case: Case) -> None:
    """Even points are much closer than 1/√S: 4,000 independent draws would miss these tolerances."""
    likelihood = case.build()
    f, weights = nodes(*moments(case.outputs), order={1: 64, 2: 48, 3: 32}[case.outputs])
    response = case.predict("glm", samples=4096)
    flat = f.flatten(0, 1)
    means = likelihood.mean(flat).unflatten(0, f.shape[:2])
    mean = torch.einsum("q,qnc->nc", weights, means)
    epistemic = torch.einsum("q,qnc->nc", weights, (means - mean) ** 2)
    aleatoric = torch.einsum("q,qnc->nc", weights, likelihood.response_variance(flat).unflatten(0, f.shape[:2]))
    y = case.targets(case.outputs)
    scores = likelihood.log_prob(flat, y.repeat(len(weights), *[1] * (y.dim() - 1))).unflatten(0, f.shape[:2])
    log_prob = (weights.log().unsqueeze(1) + scores).logsumexp(0)
    # a rate's moments are those of a lognormal, in closed form, for few points reach its tail
    close = {"rtol": 1e-8, "atol": 1e-12} if "poisson" in case.name else {"rtol": 2e-3, "atol": 1e-4}
    shape = response.mean.shape
    torch.testing.assert_close(response.mean, mean.reshape(shape), **close)
    torch.testing.assert_close(response.aleatoric, aleatoric.reshape(shape), **close)
    torch.testing.assert_close(response.epistemic, epistemic.reshape(shape), **close)
    torch.testing.assert_close(response.log_prob(case.y), log_prob, rtol=2e-3, atol=2e-3)


def test_glm_of_poisson_knows_the_lognormal() -> None:
    f, v = torch.full((4, 1), 0.4).double(), torch.tensor([0.0, 1e-9, 0.09, 16.0]).double()
    found = joined([predictive(Poisson(), f[i], v[i].view(-1, 1, 1)) for i in ([0, 1], [2, 3])])
    mean = (f + v.view(-1, 1) / 2).exp()
    torch.testing.assert_close(found.mean, mean, **CLOSE)
    torch.testing.assert_close(found.epistemic, mean**2 * torch.expm1(v).view(-1, 1), **CLOSE)
    torch.testing.assert_close(found.aleatoric, mean, **CLOSE)


@pytest.mark.parametrize("likelihood", [Poisson(), HeteroscedasticGaussian("log variance")])
def test_glm_knows_no_variance_below_zero(likelihood: Likelihood) -> None:
    """Rounding leaves negative ones where f is known."""
    covariance = torch.tensor([[[-1e-19, 0.0], [0.0, 1.0]]]).double()
    assert predictive(likelihood, torch.zeros(1, 2).double(), covariance).epistemic.flatten()[0] == 0


@pytest.mark.parametrize("method", ["glm", "nn", "map"])
def test_probabilities_sum_to_one(method: str) -> None:
    for case in CASES:
        if not case.build().classifies and (method == "glm" or "poisson" not in case.name):
            continue  # densities by points that depend on the target: compared with quadrature below
        likelihood, (mean, covariance) = case.build(), moments(case.outputs)
        if method == "nn":
            response = predictive_from_samples(likelihood, draw(5, 7, N, case.outputs), case.scalar)
        else:
            response = predictive(likelihood, mean, 0.3 * covariance, method, samples=7, scalar=case.scalar)
        if "categorical" in case.name:
            every = torch.arange(case.outputs).unsqueeze(1).expand(-1, N)
        else:
            most = 1 if "bernoulli" in case.name else 150
            values = torch.tensor(list(itertools.product(range(most + 1), repeat=case.outputs))).double()
            every = values.unsqueeze(1).expand(-1, N, -1)
            every = every.squeeze(-1) if case.scalar else every
        total = response.log_prob(every).exp().sum(0)
        torch.testing.assert_close(total, torch.ones(N, dtype=torch.float64), rtol=1e-10, atol=0.0)


def test_probabilities_of_counts_sum_to_one_up_to_the_error_of_their_points() -> None:
    """Each count has points of its own."""
    for case in (BY_NAME["poisson-one"], BY_NAME["poisson-scalar"]):
        mean, covariance = moments(case.outputs)
        response = predictive(case.build(), mean, 0.3 * covariance, "glm", scalar=case.scalar)
        values = torch.tensor(list(itertools.product(range(61), repeat=case.outputs))).double()
        every = values.unsqueeze(1).expand(-1, N, -1)
        total = response.log_prob(every.squeeze(-1) if case.scalar else every).exp().sum(0)
        torch.testing.assert_close(total, torch.ones(N, dtype=torch.float64), rtol=2e-3, atol=0.0)


def log_cosh(f: Tensor, y: Tensor) -> Tensor:
    """Sharp, with tails that are not normal."""
    return -(torch.log(torch.cosh(8 * (y - f))) + math.log(math.pi / 8)).sum(-1)


def log_student(f: Tensor, y: Tensor) -> Tensor:
    """Not concave."""
    return td.StudentT(3.0, f, 0.1).log_prob(y).sum(-1)


@pytest.mark.parametrize("outputs", [1, 10])
@pytest.mark.parametrize(("likelihood", "level", "limit"), [
    (Poisson(), 3.0, 0.02),
    (CustomLikelihood(log_cosh), 0.0, 0.6),
    (Tempered(CustomLikelihood(log_cosh), 2.0), 0.0, 0.6),
    (CustomLikelihood(log_student), 0.0, 0.6),
], ids=["counts", "sharp", "tempered", "not-concave"])
def test_sharp_densities_of_many_outputs(likelihood: Likelihood, level: float, limit: float, outputs: int) -> None:
    """Outputs are independent a priori: the density is a product of integrals. No point of f is near all targets."""
    mean, scales = level + 0.5 * draw(0, 30, outputs), 0.3 + 0.4 * draw(1, 30, outputs).sigmoid()
    f = mean + scales * draw(2, 30, outputs)
    y = f.exp().round() if level else f + 0.1 * draw(3, 30, outputs)
    grid = torch.linspace(-8, 8, 2001, dtype=torch.float64)[:, None, None]
    each = mean + scales * grid
    once = likelihood.counted_once()
    inner = once.log_prob(each.reshape(-1, 1), y.expand_as(each).reshape(-1, 1)).reshape(each.shape)
    expected = (inner + td.Normal(0.0, 1.0).log_prob(grid)).logsumexp(0).add(math.log(0.008)).sum(1)
    response = predictive(likelihood, mean, torch.diag_embed(scales.square()))
    torch.testing.assert_close(response.log_prob(y), expected, rtol=0, atol=limit)
    if level:  # several targets of each input
        both = response.log_prob(torch.stack([y, y + 1]))
        torch.testing.assert_close(both, torch.stack([response.log_prob(y), response.log_prob(y + 1)]))


def test_a_mixture_of_normals_integrates_to_one() -> None:
    response = predictive_from_samples(Gaussian(0.2), draw(6, 9, N, 1), scalar=True)
    grid = torch.linspace(-9, 9, 4001, dtype=torch.float64)
    with torch.no_grad():
        density = response.log_prob(grid.unsqueeze(1).expand(-1, N)).exp()
    for power, expected in ((0, torch.ones(N).double()), (1, response.mean), (2, response.mean**2 + response.variance)):
        found = torch.trapezoid(density * grid.unsqueeze(1) ** power, grid, dim=0)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-8, atol=1e-8)


def test_labels_that_share_uncertainty_are_dependent() -> None:
    """Two outputs that are one: seeing the first label tells the second."""
    mean = torch.zeros(1, 2, dtype=torch.float64)
    response = predictive(Bernoulli(), mean, 25.0 * torch.ones(1, 2, 2, dtype=torch.float64), samples=4096)
    same, different = (response.log_prob(torch.tensor([[1.0, b]])).exp() for b in (1.0, 0.0))
    torch.testing.assert_close(response.probs, torch.full((1, 2), 0.5, dtype=torch.float64), rtol=1e-3, atol=0.0)
    assert float(same / different) > 4.0


def test_samples_of_a_mixture_have_its_moments() -> None:
    response = BY_NAME["bernoulli"].predict()
    torch.manual_seed(1)
    y = response.sample((20_000,))
    assert float((y.mean(0) - response.mean).abs().max()) < 5 * 0.5 / 20_000**0.5
    joint = (y[:, :, 0] * y[:, :, 1]).mean(0)
    expected = response.log_prob(torch.ones(N, 2)).exp()
    assert float((joint - expected).abs().max()) < 5 * 0.5 / 20_000**0.5


@select("bernoulli-one", "categorical", "poisson")
def test_many_inputs_are_averaged_in_chunks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = case.predict(samples=50)
    monkeypatch.setattr("ntk_laplace.runtime.tuning.AVERAGED_OUTPUTS", 120 * case.outputs)  # two inputs at a time
    chunked = case.predict(samples=50)
    for name in ("mean", "epistemic", "aleatoric"):
        torch.testing.assert_close(getattr(chunked, name), getattr(whole, name), **CLOSE)
    torch.testing.assert_close(chunked.log_prob(case.y), whole.log_prob(case.y), **CLOSE)
    assert chunked.batch_shape == (N,) and chunked.event_shape == whole.event_shape


def test_averages_keep_small_probabilities() -> None:
    f = torch.tensor([[[60.0]], [[50.0]]], dtype=torch.float64)
    response = predictive_from_samples(Bernoulli(), f)
    expected = math.log(0.5 * math.exp(-60) + 0.5 * math.exp(-50))
    assert float(response.log_prob(torch.zeros(1, 1))) == pytest.approx(expected, rel=1e-13)
    response = predictive_from_samples(Categorical(), torch.cat([f, torch.zeros_like(f)], -1))
    assert float(response.log_prob(torch.tensor([1])).detach()) == pytest.approx(expected, rel=1e-13)
    f = torch.tensor([[[2000.0, 0.0]], [[1900.0, 0.0]]], dtype=torch.float64)  # no double holds the probability
    response = predictive_from_samples(Categorical(), f)
    assert float(response.log_prob(torch.tensor([1])).detach()) == pytest.approx(-1900 - math.log(2), rel=1e-13)


# --- even points -------------------------------------------------------------------------------------


def test_points_are_standard_normal_and_even() -> None:
    z = normal_points(4096, 4)
    assert z.shape == (4096, 4) and z.dtype == torch.float64
    torch.testing.assert_close(z.mean(0), torch.zeros(4).double(), rtol=0.0, atol=2e-3)
    torch.testing.assert_close(z.mT @ z / 4096, torch.eye(4).double(), rtol=0.0, atol=2e-2)
    statistic = scipy.stats.kstest(z[:, 0].numpy(), "norm").statistic
    assert statistic < 1e-3  # 4,096 independent draws have about 0.013
    assert normal_points(2**17, 1).isfinite().all()


def test_points_at_the_ends_of_the_interval_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([[0.0], [1.0 - 2.0**-30]], dtype=torch.float64)
    monkeypatch.setattr("ntk_laplace.model.predictive.scrambled_sobol", lambda *_: ends)
    low, high = normal_points(2, 1).flatten().tolist()
    assert -7 < low < -6 and high == pytest.approx(-low, rel=1e-6)


def test_points_leave_the_random_numbers_alone() -> None:
    case = BY_NAME["categorical"]
    before = torch.get_rng_state()
    first, second = case.predict().probs, case.predict().probs
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)


def test_a_generator_seeds_the_points() -> None:
    case = BY_NAME["categorical"]
    one, same, other = (case.predict(generator=torch.Generator().manual_seed(s)).probs for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    torch.testing.assert_close(one, other, rtol=0.0, atol=5e-3)


# --- blr, probit, map ---------------------------------------------------------------------------------


@select("bernoulli", "categorical-two", "poisson")
def test_blr_moments(case: Case) -> None:
    """[T20] 3.16: mean g⁻¹(f), covariance Λ V Λ + Λ, at temperature 1."""
    (mean, covariance), likelihood = moments(case.outputs), case.build()
    response, curvature = case.predict("blr"), likelihood.curvature(mean)
    expected = curvature @ covariance @ curvature + curvature
    torch.testing.assert_close(response.covariance_matrix, expected, **CLOSE)
    torch.testing.assert_close(response.mean, likelihood.mean(mean).reshape(response.mean.shape), **CLOSE)
    torch.testing.assert_close(
        response.variance, expected.diagonal(dim1=1, dim2=2).reshape(response.mean.shape), **CLOSE
    )
    aleatoric = curvature.diagonal(dim1=1, dim2=2).reshape(response.mean.shape)
    torch.testing.assert_close(response.aleatoric, aleatoric, **CLOSE)
    if "categorical" not in case.name:
        rows = zip(case.targets(case.outputs), likelihood.mean(mean), expected, strict=True)
        density = [scipy.stats.multivariate_normal(m, v).logpdf(y) for y, m, v in rows]
        torch.testing.assert_close(response.log_prob(case.y), torch.tensor(density), **CLOSE)


def test_blr_of_classes_does_not_depend_on_their_order() -> None:
    (mean, covariance), y = moments(3), torch.arange(N) % 3
    order = torch.tensor([1, 0, 2])  # not cyclic, which a cyclic mistake would survive
    response = predictive(Categorical(1.3), mean, covariance, "blr")
    rows = zip(torch.nn.functional.one_hot(y), response.mean.detach(), response.covariance_matrix.detach(), strict=True)
    expected = [scipy.stats.multivariate_normal(m[1:], v[1:, 1:]).logpdf(e[1:]) for e, m, v in rows]
    torch.testing.assert_close(response.log_prob(y).detach(), torch.tensor(expected), rtol=1e-10, atol=0.0)
    turned = predictive(Categorical(1.3), mean[:, order], covariance[:, order][:, :, order], "blr")
    torch.testing.assert_close(turned.log_prob(order.argsort()[y]), response.log_prob(y), rtol=1e-10, atol=0.0)
    indicators = torch.nn.functional.one_hot(y, 3)
    torch.testing.assert_close(response.log_prob(indicators.double()), response.log_prob(y), **CLOSE)
    draws = response.rsample((50,))
    torch.testing.assert_close(draws.sum(-1), torch.ones(50, N).double(), rtol=0.0, atol=1e-7)


def test_blr_samples_have_the_moments() -> None:
    response = BY_NAME["poisson"].predict("blr")
    torch.manual_seed(2)
    y = response.sample((20_000,))
    centered = y - response.mean
    found = torch.einsum("snc,snd->ncd", centered, centered) / len(y)
    scale = response.stddev.unsqueeze(-1) * response.stddev.unsqueeze(-2)
    assert float(((found - response.covariance_matrix) / scale).abs().max()) < 0.05
    assert float((centered.mean(0) / response.stddev).abs().max()) < 5 / 20_000**0.5


@select("bernoulli", "categorical")
def test_probit_is_close_to_the_average(case: Case) -> None:
    with torch.no_grad():
        probit, glm = case.predict("probit"), case.predict("glm", samples=4096)
    assert float((probit.probs - glm.probs).abs().max()) < 0.07
    if "categorical" not in case.name:  # where the approximation was made for
        assert float((probit.probs - glm.probs).abs().max()) < 0.02
        assert float((probit.epistemic - glm.epistemic).abs().max()) < 0.02
    kappa = (
        1
        / (
            1 + math.pi / 8 * moments(case.outputs)[1].diagonal(dim1=1, dim2=2) / (1.3**2 if case.outputs == 3 else 1)
        ).sqrt()
    )
    logits = kappa * moments(case.outputs)[0] / (1.3 if case.outputs == 3 else 1)
    expected = logits.softmax(-1) if "categorical" in case.name else logits.sigmoid()
    torch.testing.assert_close(probit.probs, expected.reshape(probit.probs.shape), **CLOSE)


@pytest.mark.parametrize(("temperature", "added"), [(4.0, 0.0), (1.7, 0.1)], ids=["singular", "regular"])
@pytest.mark.parametrize("method", [*METHODS, "glm"])
def test_temperature_is_a_unit_of_the_logits(method: str, temperature: float, added: float) -> None:
    """A change E of a covariance moves its root by E / (2 sqrt of its least eigenvalue), or by sqrt(E) if that is 0.

    Draws from a singular covariance show rounding at its square root, so that only a power of two is a unit there.
    """
    (mean, covariance), y = moments(3), torch.arange(N) % 3
    covariance = covariance + added * torch.eye(3).double()
    warm = predictive(Categorical(temperature), mean, covariance, method)
    scaled = predictive(Categorical(), mean / temperature, covariance / temperature**2, method)
    for name in ("mean", "epistemic", "aleatoric"):
        torch.testing.assert_close(getattr(warm, name), getattr(scaled, name), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(warm.log_prob(y), scaled.log_prob(y), rtol=1e-9, atol=1e-12)


# --- your own likelihood ----------------------------------------------------------------------------------


def test_a_log_density_predicts() -> None:
    own = CustomLikelihood(lambda f, y: Poisson().log_prob(f, y))
    mean, covariance = moments(2)
    response = predictive(own, mean, covariance)
    expected = predictive(Poisson(), mean, covariance)
    torch.testing.assert_close(response.log_prob(counts(2)), expected.log_prob(counts(2)), **CLOSE)
    with pytest.raises(UnsupportedError, match="expected a likelihood with a mean response; got CustomLikelihood"):
        _ = response.mean
    full = CustomLikelihood(Poisson().log_prob, Poisson().mean, Poisson().response_covariance)
    sampled = type("Sampled", (Poisson,), {})()  # a subclass may override the moments: no closed form
    for method in ("glm", "blr", "map"):
        response, expected = (predictive(lik, mean, covariance, method) for lik in (full, sampled))
        torch.testing.assert_close(response.mean, expected.mean, **CLOSE)
        torch.testing.assert_close(response.variance, expected.variance, **CLOSE)
    flat = predictive(own, mean[:, :1], covariance[:, :1, :1])
    torch.testing.assert_close(flat.log_prob(counts(1).squeeze(1)), flat.log_prob(counts(1)), **CLOSE)


# --- roots of covariances ---------------------------------------------------------------------------------


def test_the_symmetric_root() -> None:
    _, covariance = moments(4)
    root = covariance_root(covariance)
    torch.testing.assert_close(root, root.mT, rtol=0.0, atol=1e-14)
    torch.testing.assert_close(root @ root, covariance, rtol=1e-12, atol=1e-13)


def test_the_root_is_continuous() -> None:
    """Equal eigenvalues turn freely, and the root does not."""
    covariance = torch.eye(3, dtype=torch.float64).expand(1, 3, 3)
    noise = 1e-12 * draw(3, 1, 3, 3)
    root = covariance_root(covariance + noise + noise.mT)
    torch.testing.assert_close(root, covariance, rtol=0.0, atol=1e-11)


def test_covariances_that_are_none() -> None:
    mean, covariance = moments(2)
    bad = covariance.clone()
    bad[3] = torch.diag(torch.tensor([1.0, -0.5]))
    message = "expected positive semidefinite covariances; got an eigenvalue -0.5 beside .* at input 3. Use inputs sc"
    with pytest.raises(NumericalError, match=message):
        predictive(Bernoulli(), mean, bad)
    bad[3] = torch.diag(torch.tensor([1.0, -1e-9]))
    with pytest.warns(NTKLaplaceWarning, match="a latent covariance had an eigenvalue -1e-09 beside .* counts as zero"):
        predictive(Bernoulli(), mean, bad)
    bad[3] = torch.diag(torch.tensor([1.0, -1e-15]))
    predictive(Bernoulli(), mean, bad)  # rounding
    bad[1, 0, 0] = float("nan")
    with pytest.raises(NumericalError, match=r"expected finite covariances; got NaN or infinity at input 1. Check"):
        predictive(Bernoulli(), mean, bad)
    with pytest.raises(NumericalError, match=r"expected positive variances of the response; got -4 at input 1. Use"):
        predictive(Gaussian(1.0), mean[:, :1], torch.tensor([1.0, -5.0, 1, 1, 1]).double()[:, None, None], scalar=True)
    with pytest.raises(
        NumericalError, match="a positive definite covariance of the response; got a singular one at input 2"
    ):
        predictive(
            Gaussian(1.0), mean, torch.diag(torch.tensor([1.0, -5.0])).double() * (torch.arange(N) == 2)[:, None, None]
        )


def test_saturated_classes_have_no_density() -> None:
    mean = torch.tensor([[0.0, 0.0, 0.0], [2000.0, 0.0, 0.0]], dtype=torch.float64)
    response = predictive(Categorical(), mean, torch.zeros(2, 3, 3).double(), "blr")
    message = "a positive definite covariance of the response; got a singular one at input 1. Predict with method=.glm."
    with pytest.raises(NumericalError, match=message):
        response.log_prob(torch.tensor([0, 0]))
    assert response.sample((3,)).isfinite().all()
    certain = predictive(Categorical(), mean, torch.zeros(2, 3, 3).double()).log_prob(torch.tensor([0, 0]))
    assert float(certain.detach()[1]) == 0.0


# --- asked for what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"method": "nn"},
            UnsupportedError,
            "a method among ['blr', 'glm', 'map', 'probit'] for moments of f; got 'nn'.",
        ),
        ({"method": "mc"}, UnsupportedError, "got 'mc'. Pass one of them; \"nn\" needs samples of the weights."),
        ({"method": "probit"}, UnsupportedError, "a likelihood with a probit approximation; got Poisson. Predict with"),
        ({"samples": 0}, HyperparameterError, "samples as a whole number, at least 1; got 0. Pass a positive number"),
    ],
)
def test_bad_requests(options: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        BY_NAME["poisson"].predict(**options)
    assert text in str(caught.value)


def test_samples_of_f_have_three_dimensions() -> None:
    with pytest.raises(UnsupportedError, match=r"samples of f of shape \(S, n, C\), S at least 1; got shape \(5, 2\)"):
        predictive_from_samples(Bernoulli(), draw(0, 5, 2))


@each
def test_targets_that_do_not_fit(case: Case, method: str) -> None:
    response = case.predict(method, samples=8)
    with pytest.raises(TargetError, match=r"with sample dimensions in front if any; got shape \(3"):
        response.log_prob(case.y[:3].double() if method == "blr" and "categorical" in case.name else case.y[:3])
    if "categorical" in case.name:
        with pytest.raises(TargetError, match=r"expected class labels in 0\.\..; got 7 at example 0"):
            response.log_prob(torch.full((N,), 7))


@pytest.mark.parametrize("method", [*METHODS, "glm"])
def test_targets_of_one_output_may_be_flat(method: str) -> None:
    for name in ("bernoulli-one", "bernoulli-scalar"):
        response = BY_NAME[name].predict(method, samples=8)
        flat, column = binary(1).squeeze(1), binary(1)
        assert torch.equal(response.log_prob(flat), response.log_prob(column))


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_a_mixture_averages_its_samples_in_pieces(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three samples of f at a time: the mean of all densities is that of the pieces together."""
    f, y = draw(3, samples, N, 2), draw(4, N, 2)
    density = torch.distributions.Normal(f, 0.3**0.5).log_prob(y).sum(-1).exp().mean(0)
    monkeypatch.setattr("ntk_laplace.runtime.tuning.MIXTURE_OUTPUTS", 3 * N * 2)
    found = predictive_from_samples(Gaussian(0.3), f).log_prob(y)
    torch.testing.assert_close(found, density.log(), **CLOSE)
