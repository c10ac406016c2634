"""Every likelihood obeys the laws of `Likelihood`, with SciPy, autograd and exact sums as the references."""

from __future__ import annotations

import itertools
import math
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, vmap

from noise import COVARIANCE, PER_ENTRY, PER_OUTPUT, PER_POINT, C, N, draw
from ntk_laplace.errors import HyperparameterError, NetworkError, NonFiniteError, TargetError, UnsupportedError
from ntk_laplace.model.likelihoods import (
    Bernoulli,
    Categorical,
    CustomLikelihood,
    Everywhere,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Poisson,
    StudentT,
    Tempered,
)
from ntk_laplace.model.likelihoods.counts import Counts
from ntk_laplace.model.likelihoods.per_output import PerOutput

T = 1.7


def normal_density(variance: Tensor) -> Callable[[Tensor, Tensor], list[float]]:
    """Log densities of rows of y by SciPy, for noise with these covariances (N, C, C)."""

    def density(f: Tensor, y: Tensor) -> list[float]:
        rows = zip(y.numpy(), f.numpy(), variance.numpy(), strict=True)
        return [scipy.stats.multivariate_normal(mean, cov).logpdf(value) for value, mean, cov in rows]

    return density


def negative_binomial_mass(dispersion: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Log probabilities of rows of y by SciPy, of counts with this dispersion."""

    def mass(f: Tensor, y: Tensor) -> Tensor:
        return scipy.stats.nbinom(1 / dispersion, 1 / (1 + dispersion * f.exp())).logpmf(y).sum(1)

    return mass


@dataclass(frozen=True)
class Case:
    """A likelihood, targets that fit it, and its log density by other means."""

    name: str
    build: Callable[[], Likelihood]
    targets: Tensor
    reference: Callable[[Tensor, Tensor], object]

    def bound(self) -> Likelihood:
        likelihood = self.build()
        likelihood.bind(N, C)
        return likelihood

    def reached(self, name: str) -> Tensor:
        """Outputs of the network by name, within what the rate of a Poisson can be."""
        f = OUTPUTS[name]
        return f.clamp_max(30.0) if self.targets is COUNTS else f


REAL = draw(1, N, C)
BINARY = (draw(2, N, C) > 0).double()
LABELS = torch.arange(N) % C
COUNTS = torch.arange(N * C).reshape(N, C).double() % 6
EYE = torch.eye(C, dtype=torch.float64).expand(N, C, C)
CASES = [
    Case("gaussian", lambda: Gaussian(0.3), REAL, normal_density(0.3 * EYE)),
    Case("gaussian-output", lambda: Gaussian(PER_OUTPUT), REAL, normal_density(torch.diag(PER_OUTPUT).expand(N, C, C))),
    Case("gaussian-point", lambda: Gaussian(PER_POINT), REAL, normal_density(PER_POINT[:, None, None] * EYE)),
    Case("gaussian-entry", lambda: Gaussian(PER_ENTRY), REAL, normal_density(torch.diag_embed(PER_ENTRY))),
    Case("gaussian-covariance", lambda: Gaussian(COVARIANCE), REAL, normal_density(COVARIANCE.expand(N, C, C))),
    Case("bernoulli", Bernoulli, BINARY, lambda f, y: scipy.stats.bernoulli(torch.special.expit(f)).logpmf(y).sum(1)),
    Case(
        "categorical",
        lambda: Categorical(T),
        LABELS,
        lambda f, y: [
            math.log(math.exp(row[k] / T) / sum(math.exp(v / T) for v in row)) for row, k in zip(f, y, strict=True)
        ],
    ),
    Case("student", lambda: StudentT(0.3, 8.0), REAL,
         lambda f, y: scipy.stats.t(8.0, f, 0.3**0.5).logpdf(y).sum(1)),
    Case("student-output", lambda: StudentT(PER_OUTPUT, 20.0), REAL,
         lambda f, y: scipy.stats.t(20.0, f, PER_OUTPUT.sqrt()).logpdf(y).sum(1)),
    Case("poisson", Poisson, COUNTS, lambda f, y: scipy.stats.poisson(f.exp()).logpmf(y).sum(1)),
    Case("negative-binomial", lambda: NegativeBinomial(0.8), COUNTS, negative_binomial_mass(0.8)),
    Case("negative-binomial-narrow", lambda: NegativeBinomial(0.02), COUNTS, negative_binomial_mass(0.02)),
    Case(
        "tempered", lambda: Tempered(Bernoulli(), 2.5), BINARY,
        lambda f, y: 2.5 * scipy.stats.bernoulli(torch.special.expit(f)).logpmf(y).sum(1),
    ),
]
# their curvature is no second derivative
FISHER = [case for case in CASES if "student" in case.name or "negative" in case.name]
NORMALIZED = [case for case in CASES if case.name != "tempered"]
OUTPUTS = {
    "moderate": draw(3, N, C),
    # one class near 1e-12 from certainty, another far from it, ties
    "saturated": torch.tensor([[14.0, -14.0, 0.5], [-47.0, 0.0, 0.0], [0.0, 0.0, -80.0], [30.0, 60.0, 10.0]] * 2)[
        :N
    ].double(),
    # probabilities that are 0 or 1 in float64
    "degenerate": torch.tensor([[900.0, -900.0, 0.0], [-2000.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1500.0, -50.0]] * 2)[
        :N
    ].double(),
}
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_output = pytest.mark.parametrize("outputs", OUTPUTS)


def test_every_likelihood_is_a_case() -> None:
    known = {*Likelihood.__subclasses__(), *PerOutput.__subclasses__(), *Counts.__subclasses__()}
    # other tests define some, and run docstrings that do
    own = {kind for kind in known if kind.__module__.startswith("ntk_laplace.")
           and hasattr(sys.modules[kind.__module__], kind.__name__)}
    # the last two have a module each
    elsewhere = {CustomLikelihood, PerOutput, Counts, HeteroscedasticGaussian, Everywhere}
    assert {type(case.build()) for case in CASES} == own - elsewhere


# --- the laws -------------------------------------------------------------------------------------


@each_case
def test_log_prob_is_the_normalized_density(case: Case) -> None:
    f = OUTPUTS["moderate"]
    expected = torch.as_tensor(case.reference(f, case.targets), dtype=torch.float64)
    torch.testing.assert_close(case.bound().log_prob(f, case.targets).detach(), expected, rtol=1e-12, atol=1e-12)


@each_case
@each_output
def test_residual_is_the_gradient(case: Case, outputs: str) -> None:
    f, likelihood = case.reached(outputs), case.bound()
    autograd = grad(lambda f: likelihood.log_prob(f, case.targets).sum())(f)
    torch.testing.assert_close(likelihood.residual(f, case.targets), autograd, rtol=1e-12, atol=1e-15)


@each_case
@each_output
def test_density_and_residual_together_are_those_alone(case: Case, outputs: str) -> None:
    f, likelihood, y = case.reached(outputs), case.bound(), case.targets
    found = likelihood.log_prob_and_residual(f, y)
    torch.testing.assert_close(found, (likelihood.log_prob(f, y), likelihood.residual(f, y)), rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("case", [case for case in CASES if case not in FISHER], ids=lambda case: case.name)
@each_output
def test_hessian_is_minus_the_second_derivative(case: Case, outputs: str) -> None:
    f, likelihood = case.reached(outputs), case.bound()
    full = hessian(lambda f: likelihood.log_prob(f, case.targets).sum())(f)
    blocks = torch.stack([-full[n, :, n, :] for n in range(N)])
    # atol: autograd's own rounding where p is near 1
    torch.testing.assert_close(likelihood.curvature(f, case.targets), blocks, rtol=1e-12, atol=1e-15)
    assert torch.equal(likelihood.curvature(f), likelihood.curvature(f, case.targets))


@pytest.mark.parametrize("case", [case for case in FISHER if "student" in case.name], ids=lambda case: case.name)
def test_fisher_information_is_the_variance_of_the_residual(case: Case) -> None:
    """By quadrature over all responses of one output, at three outputs."""
    likelihood, f = case.bound(), torch.tensor([[0.3, -2.0, 5.0]]).double()
    steps = torch.linspace(-12.0, 12.0, 20_001, dtype=torch.float64)
    y = f + torch.sinh(steps).unsqueeze(1)
    marginal = [scipy.stats.t(float(likelihood.df), 0.0, math.sqrt(v)).pdf(torch.sinh(steps).numpy())
                for v in likelihood.noise.detach().expand(C).tolist()]
    weight = torch.tensor(np.stack(marginal, 1)) * torch.cosh(steps).unsqueeze(1) * 24.0 / 20_000
    residual = likelihood.residual(f.expand(len(y), C), y)
    torch.testing.assert_close((weight * residual).sum(0), torch.zeros(C).double(), rtol=0.0, atol=1e-12)
    information = (weight * residual.square()).sum(0)
    torch.testing.assert_close(likelihood.curvature(f)[0], information.diag(), rtol=1e-12, atol=0.0)
    variance = (weight * (y - f).square()).sum(0)
    torch.testing.assert_close(likelihood.response_variance(f)[0], variance, rtol=1e-7, atol=0.0)
    assert likelihood.diagonal_form(f) is not None
    again = [pickle.loads(pickle.dumps(likelihood)), StudentT.from_record(likelihood.record())]
    assert all(one.df == likelihood.df and torch.equal(one.noise, likelihood.noise) for one in again)


@pytest.mark.parametrize("dispersion", [0.02, 0.8, 3.0])
def test_moments_of_a_negative_binomial(dispersion: float) -> None:
    """By sums over all counts of one output, at three outputs; Poisson is the limit of no dispersion."""
    likelihood, f = NegativeBinomial(dispersion), torch.tensor([[0.3, -2.0, 3.0]]).double()
    y = torch.arange(30_000).double().unsqueeze(1).expand(-1, C)
    weight = likelihood.distribution(f).base_dist.log_prob(y).exp().detach()
    each = likelihood.log_prob(f.mT, torch.full((C, 1), 3.0, dtype=torch.float64))  # each output as an example
    torch.testing.assert_close(each.exp(), weight[3], rtol=1e-12, atol=0.0)
    residual = likelihood.residual(f.expand(len(y), C), y)
    torch.testing.assert_close(weight.sum(0), torch.ones(C).double(), rtol=1e-12, atol=0.0)
    torch.testing.assert_close((weight * residual).sum(0), torch.zeros(C).double(), rtol=0.0, atol=1e-11)
    information = (weight * residual.square()).sum(0).diag()
    torch.testing.assert_close(likelihood.curvature(f)[0], information, rtol=1e-11, atol=0.0)
    variance = (weight * (y - likelihood.mean(f)).square()).sum(0)
    torch.testing.assert_close(likelihood.response_variance(f)[0], variance, rtol=1e-11, atol=0.0)
    assert likelihood.diagonal_form(f) is not None
    again = [pickle.loads(pickle.dumps(likelihood)), NegativeBinomial.from_record(likelihood.record())]
    assert all(one.dispersion == likelihood.dispersion for one in again)


def test_a_negative_binomial_without_dispersion_is_a_poisson() -> None:
    f, y = OUTPUTS["moderate"], 100 * COUNTS
    for verb in ("log_prob", "residual"):
        found = getattr(NegativeBinomial(1e-12), verb)(f, y)
        torch.testing.assert_close(found, getattr(Poisson(), verb)(f, y), rtol=1e-8, atol=0.0)
    torch.testing.assert_close(NegativeBinomial(1e-12).curvature(f), Poisson().curvature(f), rtol=1e-8, atol=0.0)
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(HyperparameterError, match="positive dispersion"):
            NegativeBinomial(wrong)


@each_case
@each_output
def test_root_times_its_transpose_is_the_hessian(case: Case, outputs: str) -> None:
    f, likelihood = case.reached(outputs), case.bound()
    root = likelihood.root(f, case.targets)
    assert root.shape == (N, C, likelihood.rank(C))
    assert root.isfinite().all()
    # entry by entry: a saturated example has small entries, and they are right too
    torch.testing.assert_close(root @ root.mT, likelihood.curvature(f), rtol=1e-12, atol=1e-300)
    assert torch.equal(root, likelihood.root(f))


@each_case
def test_mean_jacobian_is_the_derivative_of_the_mean(case: Case) -> None:
    f, likelihood = OUTPUTS["moderate"], case.bound()
    full = jacrev(likelihood.mean)(f)
    blocks = torch.stack([full[n, :, n, :] for n in range(N)])
    torch.testing.assert_close(likelihood.mean_jacobian(f), blocks, rtol=1e-12, atol=1e-15)


@each_case
def test_response_variance_is_the_diagonal_of_the_covariance(case: Case) -> None:
    f, likelihood = OUTPUTS["moderate"], case.bound()
    diagonal = likelihood.response_covariance(f).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(likelihood.response_variance(f), diagonal, rtol=1e-15, atol=0.0)


@each_case
def test_differentiation_finds_the_closed_forms(case: Case) -> None:
    f, likelihood, y = OUTPUTS["moderate"], case.bound(), case.targets
    close = {"rtol": 1e-11, "atol": 1e-13}
    torch.testing.assert_close(Likelihood.residual(likelihood, f, y), likelihood.residual(f, y), **close)
    if case not in FISHER:
        torch.testing.assert_close(Likelihood.curvature(likelihood, f, y), likelihood.curvature(f, y), **close)
    root = Likelihood.root(likelihood, f, y)
    torch.testing.assert_close(root @ root.mT, likelihood.curvature(f, y), **close)
    torch.testing.assert_close(Likelihood.mean_jacobian(likelihood, f), likelihood.mean_jacobian(f), **close)


def every_response(case: Case, likelihood: Likelihood, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All responses of one example with outputs f, their weights, and the vectors whose moments are the response's."""
    if case.name == "categorical":
        y = torch.arange(C)
        vectors = torch.eye(C, dtype=torch.float64)
    elif case.name == "bernoulli":
        y = vectors = torch.tensor(list(itertools.product([0.0, 1.0], repeat=C)), dtype=torch.float64)
    else:
        y = vectors = torch.tensor(list(itertools.product(range(40), repeat=C)), dtype=torch.float64)
    return y, likelihood.log_prob(f.expand(len(y), C), y).exp(), vectors


@pytest.mark.parametrize(
    "case", [c for c in NORMALIZED if "gaussian" not in c.name and c not in FISHER], ids=lambda case: case.name
)
def test_moments_over_all_responses(case: Case) -> None:
    """Probabilities sum to one; residuals have mean 0 and covariance Λ; responses have their mean and covariance."""
    likelihood, f = case.build(), 0.5 * OUTPUTS["moderate"][0]
    y, weight, vectors = every_response(case, likelihood, f)
    close = {"rtol": 1e-12, "atol": 1e-12}
    row = f.unsqueeze(0)
    residual = likelihood.residual(f.expand(len(y), C), y)
    centered = vectors - likelihood.mean(row)
    torch.testing.assert_close(weight.sum(), torch.ones_like(weight[0]), **close)
    torch.testing.assert_close(weight @ residual, torch.zeros_like(f), **close)
    torch.testing.assert_close((residual.mT * weight) @ residual, likelihood.curvature(row)[0], **close)
    torch.testing.assert_close(weight @ centered, torch.zeros_like(f), **close)
    torch.testing.assert_close((centered.mT * weight) @ centered, likelihood.response_covariance(row)[0], **close)


@pytest.mark.parametrize("case", [case for case in CASES if "gaussian" in case.name], ids=lambda case: case.name)
def test_gaussian_hessian_is_the_inverse_covariance(case: Case) -> None:
    likelihood, f = case.bound(), OUTPUTS["moderate"]
    product = likelihood.curvature(f) @ likelihood.response_covariance(f)
    torch.testing.assert_close(product, EYE, rtol=0.0, atol=1e-13)
    assert torch.equal(likelihood.mean(f), f)


def exact_softmax(f: list[float]) -> list[Decimal]:
    powers = [(Decimal(value) / Decimal(T)).exp() for value in f]
    return [power / sum(powers) for power in powers]


@each_output
def test_categorical_hessian_is_exact_entry_by_entry(outputs: str) -> None:
    """Against 60 digits: 1 - p is not lost where p is 1 - 1e-12."""
    with localcontext() as context:
        context.prec = 60 if outputs != "degenerate" else 700
        p = [exact_softmax(row) for row in OUTPUTS[outputs].tolist()]
        exact = [
            [
                [float((a * (1 - a) if i == j else -a * b) / Decimal(T) ** 2) for j, b in enumerate(row)]
                for i, a in enumerate(row)
            ]
            for row in p
        ]
        residual = [
            [float(((k == label) - a) / Decimal(T)) for k, a in enumerate(row)]
            for row, label in zip(p, LABELS.tolist(), strict=True)
        ]
    likelihood = Categorical(T)
    expected = torch.tensor(exact, dtype=torch.float64)
    torch.testing.assert_close(likelihood.curvature(OUTPUTS[outputs]).detach(), expected, rtol=1e-12, atol=1e-300)
    root = likelihood.root(OUTPUTS[outputs]).detach()
    torch.testing.assert_close(root @ root.mT, expected, rtol=1e-12, atol=1e-300)
    expected = torch.tensor(residual, dtype=torch.float64)
    torch.testing.assert_close(
        likelihood.residual(OUTPUTS[outputs], LABELS).detach(), expected, rtol=1e-12, atol=1e-300
    )


def test_labels_of_draws_of_the_outputs() -> None:
    """The residual of draws (S, N, C) is that of each draw, and one label may stand for all examples."""
    likelihood, f = Categorical(T), OUTPUTS["moderate"]
    draws, labels = torch.stack([f, -f, 2.0 * f]), LABELS.clone()
    labels[0] = -100
    expected = torch.stack([likelihood.residual(one, labels) for one in draws])
    torch.testing.assert_close(likelihood.residual(draws, labels), expected, rtol=1e-12, atol=1e-15)
    one = likelihood.residual(f, torch.ones(len(f), dtype=torch.long))
    torch.testing.assert_close(likelihood.residual(f, torch.ones(1, dtype=torch.long)), one, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("f", [-700.0, -36.0, -3.0, 0.0, 3.0, 28.0, 36.0, 700.0])
def test_bernoulli_is_exact_at_saturation(f: float) -> None:
    with localcontext() as context:
        context.prec = 700
        p = 1 / (1 + (-Decimal(f)).exp())
        exact = [float(x) for x in (p * (1 - p), 1 - p, -p)]
    logit = torch.tensor([[f]], dtype=torch.float64)
    found = [Bernoulli().curvature(logit), *(Bernoulli().residual(logit, torch.tensor([[y]])) for y in (1, 0))]
    assert [float(x) for x in found] == pytest.approx(exact, rel=1e-13, abs=1e-305)
    assert float(Bernoulli().root(logit) ** 2) == pytest.approx(exact[0], rel=1e-12, abs=1e-305)


def test_a_certain_point_carries_no_information() -> None:
    f = torch.tensor([[2000.0, 0.0, -2000.0]], dtype=torch.float64)
    root = Categorical().root(f)
    assert not (root @ root.mT).any()
    assert not Categorical().curvature(f).any()
    assert float(Bernoulli().curvature(f)[0, 0, 0]) == 0.0


LEARNT = [case for case in CASES if list(case.build().parameters())]


@pytest.mark.parametrize("verb", ["log_prob", "residual", "curvature", "root", "mean", "response_covariance"])
@pytest.mark.parametrize("case", LEARNT, ids=lambda case: case.name)
def test_hyperparameter_gradients_are_finite_differences(case: Case, verb: str) -> None:
    likelihood, f, y = case.bound(), OUTPUTS["moderate"], case.targets
    names, values = zip(*likelihood.named_parameters(), strict=True)

    def function(*values: Tensor) -> Tensor:
        arguments = (f,) if verb in ("mean", "response_covariance") else (f, y)
        call = _Verb(likelihood, verb)
        return functional_call(
            call, {f"likelihood.{name}": v for name, v in zip(names, values, strict=True)}, arguments
        )

    if not function(*values).requires_grad:
        assert verb == "mean" and isinstance(likelihood, (Gaussian, StudentT, NegativeBinomial))
        return
    assert torch.autograd.gradcheck(function, [v.detach().clone().requires_grad_() for v in values], rtol=1e-5)


class _Verb(nn.Module):
    def __init__(self, likelihood: Likelihood, verb: str) -> None:
        super().__init__()
        self.likelihood, self.verb = likelihood, verb

    def forward(self, *arguments: Tensor) -> Tensor:
        return getattr(self.likelihood, self.verb)(*arguments)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("bernoulli", "categorical")], ids=lambda case: case.name
)
def test_root_has_finite_gradients_at_saturation(case: Case) -> None:
    f = OUTPUTS["degenerate"].clone().requires_grad_()
    case.build().root(f).sum().backward()
    assert f.grad.isfinite().all()


@each_case
def test_the_dtype_of_f_rules(case: Case) -> None:
    likelihood, f = case.bound(), OUTPUTS["moderate"].float()
    for verb in ("log_prob", "residual", "curvature", "root"):
        single = getattr(likelihood, verb)(f, case.targets)
        assert single.dtype == torch.float32
        double = getattr(likelihood, verb)(f.double(), case.targets)
        torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-6)
    for verb in ("mean", "mean_jacobian", "response_covariance", "response_variance"):
        assert getattr(likelihood, verb)(f).dtype == torch.float32
    assert all(parameter.dtype == torch.float64 for parameter in likelihood.parameters())


@each_case
def test_examples_do_not_mix(case: Case) -> None:
    likelihood, f, y = case.bound(), OUTPUTS["moderate"], case.targets
    index = torch.tensor([4, 1, 6])
    part = likelihood.at(index)
    for verb in ("log_prob", "residual", "curvature", "root"):
        whole = getattr(likelihood, verb)(f, y)[index]
        torch.testing.assert_close(getattr(part, verb)(f[index], y[index]), whole, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("case", NORMALIZED, ids=lambda case: case.name)
def test_distribution_is_the_density(case: Case) -> None:
    likelihood, f = case.bound(), OUTPUTS["moderate"]
    response = likelihood.distribution(f)
    assert response.batch_shape == (N,)
    assert response.event_shape == likelihood.event_shape(C) == likelihood.targets(case.targets, N, C).shape[1:]
    torch.testing.assert_close(response.log_prob(case.targets), likelihood.log_prob(f, case.targets))
    torch.testing.assert_close(response.mean, likelihood.mean(f))
    torch.testing.assert_close(response.variance, likelihood.response_variance(f))
    assert float(response.epistemic.abs().max()) == 0.0


@each_case
def test_drawn_responses_have_the_moments(case: Case) -> None:
    likelihood, f = case.bound(), OUTPUTS["moderate"]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        y = likelihood.distribution(f).sample((20_000,))
    y = nn.functional.one_hot(y, C).double() if case.name == "categorical" else y
    covariance = likelihood.response_covariance(f).detach()
    sd = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    assert float(((y.mean(0) - likelihood.mean(f).detach()) / sd).abs().max()) < 5 / 20_000**0.5
    centered = y - y.mean(0)
    found = torch.einsum("snc,snd->ncd", centered, centered) / 20_000
    assert float((found - covariance).div(sd.unsqueeze(-1) * sd.unsqueeze(-2)).abs().max()) < 0.1


# --- the root of the categorical ------------------------------------------------------------------


@each_case
@each_output
def test_the_left_inverse_undoes_the_root(case: Case, outputs: str) -> None:
    """Up to rounding of each column's own size; where a column is zero, so is the row."""
    f, likelihood = case.reached(outputs), case.bound()
    inverse = likelihood.left_inverse(f)
    if inverse is None:
        assert not list(likelihood.parameters()), "its gradients take the long way"
        return
    root = likelihood.root(f, case.targets)
    assert inverse.shape == root.mT.shape and inverse.square().isfinite().all()
    product = (inverse @ root).detach()
    there = product.diagonal(dim1=1, dim2=2) > 0.5
    torch.testing.assert_close(product, torch.diag_embed(there.to(product)), rtol=0, atol=1e-12)
    assert (inverse[~there] == 0).all()
    assert (root.mT[~there].abs() < 1e-130).all()


@pytest.mark.parametrize("classes", [2, 3, 10, 50])
def test_categorical_root_at_any_number_of_classes(classes: int) -> None:
    f = 5 * draw(classes, 4, classes)
    root, expected = Categorical(0.8).root(f), Categorical(0.8).curvature(f)
    assert root.shape == (4, classes, classes - 1)
    torch.testing.assert_close(root @ root.mT, expected, rtol=1e-11, atol=1e-300)
    assert int(torch.linalg.matrix_rank(root[0])) == classes - 1
    # constants in the logits change nothing
    torch.testing.assert_close(root.sum(1), torch.zeros(4, classes - 1, dtype=torch.float64), rtol=0, atol=1e-15)


def test_two_classes_are_a_bernoulli() -> None:
    f, y = draw(5, N, 1), BINARY[:, :1]
    pair = torch.cat([torch.zeros_like(f), f], 1)
    categorical = Categorical()
    torch.testing.assert_close(categorical.log_prob(pair, y[:, 0].long()), Bernoulli().log_prob(f, y))
    torch.testing.assert_close(categorical.curvature(pair)[:, 1:, 1:], Bernoulli().curvature(f))


# --- Gaussian noise -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "kind", "resolved"),
    [
        (0.3, "auto", "scalar"),
        (torch.tensor([0.3]), "auto", "scalar"),
        (PER_OUTPUT, "auto", "output"),
        (PER_POINT, "auto", "point"),
        (PER_ENTRY, "auto", "point"),
        (COVARIANCE, "auto", "covariance"),
        (COVARIANCE, "covariance", "covariance"),
        (PER_POINT, "point", "point"),
        (PER_OUTPUT, "output", "output"),
    ],
)
def test_gaussian_kinds(noise: float | Tensor, kind: str, resolved: str) -> None:
    likelihood = Gaussian(noise, kind)
    likelihood.bind(N, C)
    likelihood.bind(N, C)
    assert likelihood.kind == resolved
    expected = torch.as_tensor(noise, dtype=torch.float64)
    expected = expected.reshape(()) if resolved == "scalar" else expected
    torch.testing.assert_close(likelihood.noise.detach(), expected, rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize("kind", ["output", "point"])
def test_as_many_examples_as_outputs_need_a_kind(kind: str) -> None:
    f, y, noise = draw(1, C, C), draw(2, C, C), PER_OUTPUT
    with pytest.raises(HyperparameterError, match=r'one per point or of kind .output.*kind="output".*kind="point"'):
        Gaussian(noise).bind(C, C)
    with pytest.raises(HyperparameterError, match=r'one per point or of kind .covariance.*kind="covariance"'):
        Gaussian(COVARIANCE).bind(C, C)
    variance = noise.expand(C, C) if kind == "output" else noise.unsqueeze(1).expand(C, C)
    expected = scipy.stats.norm(f, variance.sqrt()).logpdf(y).sum(1)
    torch.testing.assert_close(Gaussian(noise, kind).log_prob(f, y).detach(), torch.tensor(expected))


@pytest.mark.parametrize("case", [case for case in CASES if "gaussian" in case.name], ids=lambda case: case.name)
def test_noise_is_set_in_place(case: Case) -> None:
    likelihood = case.bound()
    before = list(likelihood.parameters())
    wanted = likelihood.noise.detach() * 2.5
    likelihood.noise = wanted
    torch.testing.assert_close(likelihood.noise.detach(), wanted)
    likelihood.noise = 0.25
    full = 0.25 * torch.eye(C).double() if likelihood.kind == "covariance" else torch.full_like(wanted, 0.25)
    torch.testing.assert_close(likelihood.noise.detach(), full)
    assert all(a is b for a, b in zip(likelihood.parameters(), before, strict=True))


def test_noise_per_point_belongs_to_its_points() -> None:
    likelihood = Gaussian(PER_POINT)
    likelihood.bind(N, C)
    message = r"expected the 7 points that the noise per point was given for; got .*predict\(x, likelihood="
    with pytest.raises(UnsupportedError, match=message):
        likelihood.distribution(OUTPUTS["moderate"][:2])
    with pytest.raises(UnsupportedError, match=message):
        likelihood.response_covariance(OUTPUTS["moderate"][:2])
    with pytest.raises(UnsupportedError, match=message):
        likelihood.for_new_points()
    others = [case.bound() for case in NORMALIZED if case.name not in ("gaussian-point", "gaussian-entry")]
    assert all(likelihood.for_new_points() is likelihood for likelihood in others)
    # one output per point is differentiable through a subset
    likelihood.at(slice(2, 4)).log_prob(OUTPUTS["moderate"][2:4], REAL[2:4]).sum().backward()
    assert (likelihood.log_noise.grad != 0).tolist() == [2 <= n < 4 for n in range(N)]


@pytest.mark.parametrize("case", NORMALIZED, ids=lambda case: case.name)
def test_a_tempered_response_is_tempered_once(case: Case) -> None:
    """The weight is of the training examples: the response is the likelihood's, and a part keeps the weight."""
    own, tempered = case.bound(), Tempered(case.bound(), 2.5)
    f, spread, part = OUTPUTS["moderate"], 0.3 * EYE, slice(2, 5)

    def answers(model: Likelihood) -> list[Tensor]:
        found = [model.distribution(f), model.average(torch.stack([f, -f])), model.linearize(f, spread)]
        found += [model.integrate(f, spread), *([model.probit(f, spread)] if own.classifies else [])]
        found = [value for one in found if one is not None for value in (one.mean, one.epistemic, one.aleatoric)]
        return [model.mean(f), model.mean_jacobian(f), model.response_covariance(f), model.response_variance(f), *found]

    assert all(torch.equal(a, b) for a, b in zip(answers(own), answers(tempered), strict=True))
    assert tempered.classifies == own.classifies
    y = case.targets
    torch.testing.assert_close(tempered.at(part).log_prob(f[part], y[part]), 2.5 * own.log_prob(f, y)[part])


def test_a_likelihood_travels_by_state_dict() -> None:
    source, target = Gaussian(COVARIANCE), Gaussian(torch.eye(C))
    target.load_state_dict(source.state_dict())
    torch.testing.assert_close(target.noise, source.noise)
    source, target = Categorical(2.5), Categorical()
    target.load_state_dict(source.state_dict())
    assert float(target.temperature.detach()) == pytest.approx(2.5)


def test_temperature_is_set_in_place() -> None:
    likelihood = Categorical(2.0)
    parameter = likelihood.log_temperature
    likelihood.temperature = 0.5
    assert float(likelihood.temperature.detach()) == pytest.approx(0.5)
    assert likelihood.log_temperature is parameter


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Gaussian(0.0), "expected noise variances that are positive and finite; got 0. Pass variances above"),
        (lambda: Gaussian(torch.tensor([1.0, -2.0])), "positive and finite; got -2. Pass"),
        (lambda: Gaussian("loud"), "expected noise as a number or a tensor; got 'loud'. Pass variances"),
        (lambda: setattr(Gaussian(), "noise", None), "expected noise as a number or a tensor; got None. Pass"),
        (lambda: Categorical("hot"), "expected one temperature that is positive and finite; got 'hot'. Pass"),
        (lambda: Gaussian(float("nan")), "positive and finite; got nan. Pass"),
        (lambda: Gaussian(torch.ones(2, 2, 2)), "(C, C) for a covariance; got shape (2, 2, 2). Pass"),
        (lambda: Gaussian(torch.tensor([])), "got shape (0,). Pass"),
        (lambda: Gaussian(torch.tensor([[1.0, 2.0], [2.0, 1.0]])), "got one that is not positive definite. Noise of"),
        (lambda: Gaussian(torch.tensor([[1.0, 2.0], [0.0, 1.0]])), "not symmetric. Noise of one variance per point"),
        (lambda: Gaussian(torch.ones(2), "covariance"), "expected a noise covariance (C, C)"),
        (lambda: Gaussian(torch.ones(2), "scalar"), 'expected one number for kind="scalar"; got shape (2,). Pass'),
        (lambda: Gaussian(1.0, "each"), "expected a kind among ('auto', 'scalar',"),
        (lambda: Gaussian(torch.ones(4)).bind(N, C), "of shape (), (3,), (7,), (7, 3) or (3, 3) for 7 examples of 3"),
        (lambda: Gaussian(torch.ones(4, 3)).bind(N, C), "got shape (4, 3). Pass one variance, one per output"),
        (lambda: Gaussian(torch.eye(2)).bind(N, C), "got shape (2, 2). Pass"),
        (lambda: setattr(Gaussian(1.0), "noise", -1.0), "positive and finite; got -1. Pass"),
        (lambda: setattr(Gaussian(PER_OUTPUT), "noise", torch.ones(2)), "of shape (3,), or one number; got shape (2,)"),
        (lambda: setattr(Gaussian(COVARIANCE), "noise", torch.eye(2)), "of shape (3, 3), or one number; got shape"),
        (lambda: Categorical(0.0), "expected one temperature that is positive and finite; got 0.0. Pass"),
        (lambda: setattr(Categorical(), "temperature", float("inf")), "positive and finite; got inf. Pass"),
    ],
)
def test_bad_hyperparameters(build: Callable[[], object], text: str) -> None:
    with pytest.raises(HyperparameterError) as caught:
        build()
    assert text in str(caught.value)


# --- targets at the door --------------------------------------------------------------------------


def at(index: int, value: float, like: Tensor) -> Tensor:
    """A copy of targets whose example `index` is wrong."""
    y = like.double().clone()
    y[index].fill_(value) if y.dim() == 1 else y[index, -1].fill_(value)
    return y


NAN, INF = float("nan"), float("inf")
BAD_TARGETS = [
    (Gaussian(), REAL[:, :2], TargetError, "expected targets of shape (7, 3); got shape (7, 2). Give each example one"),
    (Gaussian(), REAL[:, 0], TargetError, "expected targets of shape (7, 3); got shape (7,). Give"),
    (Gaussian(), REAL[:4], TargetError, "expected targets for 7 examples; got shape (4, 3). Pass one row"),
    (Gaussian(), at(5, NAN, REAL), NonFiniteError, "nan] at example 5. Remove or impute"),
    (Gaussian(), REAL.to(torch.complex128), TargetError, "expected real targets; got dtype torch.complex128."),
    (Gaussian(), "seven", TargetError, "expected targets as a tensor or an array of numbers; got str. Convert"),
    (Bernoulli(), at(3, 2.0, BINARY), TargetError, "2] at example 3. Map labels of -1 and 1 by (y + 1) / 2"),
    (Bernoulli(), at(2, INF, BINARY), NonFiniteError, "inf] at example 2."),
    (Bernoulli(), at(0, 1.5, BINARY), TargetError, "expected targets that are 0 or 1, or a probability of 1; got ["),
    (Bernoulli(), at(4, NAN, BINARY), NonFiniteError, 'or say that NaN marks a missing one, Bernoulli(missing="nan")'),
    (Gaussian(missing="nan"), at(5, INF, REAL), NonFiniteError, "inf] at example 5. Remove or impute"),
    (Poisson(), at(4, -1.0, COUNTS), TargetError, "expected targets that are whole numbers from 0; got ["),
    (Poisson(), at(4, 1.5, COUNTS), TargetError, "1.5] at example 4. Poisson() is for counts"),
    (Categorical(), at(6, 3, LABELS), TargetError, "expected class labels in 0..2; got 3 at example 6. Number the"),
    (Categorical(), at(1, -1, LABELS), TargetError, "expected class labels in 0..2; got -1 at example 1. Number"),
    (
        Categorical(),
        at(1, 0.5, LABELS),
        TargetError,
        "expected class labels that are whole numbers; got 0.5 at example 1",
    ),
    (Categorical(), at(1, NAN, LABELS), NonFiniteError, "expected finite targets; got nan at example 1. Remove"),
    (
        Categorical(),
        torch.eye(3)[LABELS].long(),
        TargetError,
        "got shape (7, 3). Turn one-hot rows into labels with y.argmax(1)",
    ),
    (
        Categorical(),
        LABELS.unsqueeze(1),
        TargetError,
        "expected class labels of shape (7,); got shape (7, 1). Pass one",
    ),
]


@pytest.mark.parametrize(("likelihood", "y", "error", "text"), BAD_TARGETS)
def test_bad_targets(likelihood: Likelihood, y: Tensor, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        likelihood.targets(y, N, C)
    assert text in str(caught.value)


@each_case
def test_no_targets(case: Case) -> None:
    with pytest.raises(TargetError, match=r"expected targets for at least one example; got shape \(0, 3\)"):
        case.build().targets(torch.zeros(0, 3), 0, C)


def test_one_class_is_none() -> None:
    message = "expected a network with one output per class for Categorical.., at least 2; got 1 output. Use Bernoulli"
    with pytest.raises(NetworkError, match=message):
        Categorical().bind(N, 1)
    with pytest.raises(NetworkError, match=message):
        Categorical().targets(LABELS, N, 1)


@pytest.mark.parametrize("likelihood", [Gaussian(), Bernoulli(), Poisson()], ids=lambda lik: type(lik).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_targets_of_one_output_may_be_flat(likelihood: Likelihood, dtype: torch.dtype) -> None:
    y = torch.tensor([0, 1, 1, 0]).to(dtype)
    flat, column = likelihood.targets(y, 4, 1), likelihood.targets(y.unsqueeze(1), 4, 1)
    assert flat.shape == (4, 1)
    assert torch.equal(flat, column)
    assert flat.dtype == (dtype if dtype.is_floating_point else torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_labels_of_any_type(dtype: torch.dtype) -> None:
    assert torch.equal(Categorical().targets(LABELS.to(dtype), N, C), LABELS)
    assert torch.equal(Categorical().targets(LABELS.numpy().tolist(), N, C), LABELS)


def test_a_rate_beyond_the_dtype() -> None:
    f = torch.tensor([[1.0], [90.0], [91.0]])
    message = "expected rates exp.f. within torch.float32; got f = 90 at example 1. Scale the network's output, or use"
    for verb in (Poisson().curvature, Poisson().root, Poisson().distribution, lambda f: Poisson().residual(f, f)):
        with pytest.raises(NonFiniteError, match=message):
            verb(f)
    assert Poisson().curvature(f.double()).isfinite().all()


# --- a likelihood of your own ---------------------------------------------------------------------


class Logistic(Likelihood):
    """Logistic noise with a learnt scale, from the log density alone."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(-0.3, dtype=torch.float64))

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        z = (y - f) * (-self.log_scale).exp()
        return (nn.functional.logsigmoid(z) + nn.functional.logsigmoid(-z) - self.log_scale).sum(-1)


def test_a_log_density_is_enough() -> None:
    likelihood, f = Logistic(), OUTPUTS["moderate"]
    scale = math.exp(-0.3)
    expected = torch.tensor(scipy.stats.logistic(f, scale).logpdf(REAL).sum(1))
    torch.testing.assert_close(likelihood.log_prob(f, REAL).detach(), expected)
    z = (REAL - f) / scale
    torch.testing.assert_close(likelihood.residual(f, REAL), torch.tanh(z / 2) / scale)
    curvature = torch.sigmoid(z) * torch.sigmoid(-z) * 2 / scale**2
    torch.testing.assert_close(likelihood.curvature(f, REAL), torch.diag_embed(curvature))
    root = likelihood.root(f, REAL)
    torch.testing.assert_close(root @ root.mT, torch.diag_embed(curvature), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("verb", ["residual", "curvature"])
def test_hyperparameters_of_your_own_are_differentiable(verb: str) -> None:
    call = _Verb(Logistic(), verb)

    def function(log_scale: Tensor) -> Tensor:
        # detached inputs, as inside the library
        return functional_call(call, {"likelihood.log_scale": log_scale}, (OUTPUTS["moderate"][:2], REAL[:2]))

    assert torch.autograd.gradcheck(function, torch.tensor(-0.3, dtype=torch.float64, requires_grad=True))


def test_derivatives_need_no_grad_mode() -> None:
    with torch.no_grad():
        residual = Logistic().residual(OUTPUTS["moderate"], REAL)
        root = Logistic().root(OUTPUTS["moderate"], REAL)
    assert not residual.requires_grad and not root.requires_grad
    torch.testing.assert_close(residual, Logistic().residual(OUTPUTS["moderate"], REAL))


def test_rounding_of_a_large_singular_curvature_is_no_lack_of_concavity() -> None:
    """Of rank one and of size 1e8: eigh leaves zeros at -1e-8."""
    a, f = draw(5, C), draw(6, 50, C)
    root = CustomLikelihood(lambda f, y: -0.5e8 * (f @ a).square()).root(f, f)
    torch.testing.assert_close(root @ root.mT, 1e8 * torch.outer(a, a).expand(50, C, C), rtol=1e-9, atol=1e-6)


def test_a_log_density_that_is_no_number_mixes_no_examples() -> None:
    """What is wrong with it is said where outputs and targets are checked, not as a broadcast that it is not."""
    f = torch.tensor([[1.0], [-2.0], [4.0], [8.0]])
    assert torch.equal(CustomLikelihood(lambda f, y: f.log().sum(1)).residual(f, f), 1 / f)


def test_a_flat_log_density_has_no_curvature() -> None:
    linear = CustomLikelihood(lambda f, y: (f * y).sum(1))
    assert torch.equal(linear.residual(OUTPUTS["moderate"], REAL), REAL)
    assert float(linear.curvature(OUTPUTS["moderate"], REAL).abs().max()) == 0.0


def student(f: Tensor, y: Tensor) -> Tensor:
    return -2 * torch.log1p((y - f) ** 2 / 3).sum(1)


OWN_ERRORS = [
    (student, "root", "expected a log density that is concave in f; got a second derivative with eigenvalue +"),
    (student, "root", "at example 2. Choose a log-concave likelihood, override `curvature`"),
    (lambda f, y: -((f - y) ** 2), "residual", "expected log densities of shape (7,), one per example; got (7, 3)"),
    (lambda f, y: y.sum(1), "residual", "log density that autograd can differentiate in f; got one without a gradient"),
    (lambda f, y: y.sum(1), "curvature", "without numpy, item() or detach()"),
    (lambda f, y: 0.0, "curvature", "got float from your log density. Sum over the outputs of each example"),
    (lambda f, y: -((f - f.mean(0) - y) ** 2).sum(1), "residual", "expected a log density that treats examples apart"),
    (lambda f, y: -((f[:, :1] - y[:, 0]) ** 2).sum(1), "residual", "one that changes at example 0 when others"),
    (lambda f, y: -((f - y) ** 2).sum(1) * torch.arange(N), "residual", "got an error for 3 of 7 examples: The size"),
    (lambda f, y: (f - 9.0).sqrt().sum(1), "root", "expected a finite second derivative of the log density; got NaN"),
]


@pytest.mark.parametrize(("log_density", "verb", "text"), OWN_ERRORS)
def test_bad_log_densities(log_density: Callable[..., Tensor], verb: str, text: str) -> None:
    y = REAL.clone()
    y[2] = OUTPUTS["moderate"][2] + 10.0
    y[:2] = OUTPUTS["moderate"][:2]
    with pytest.raises((UnsupportedError, NonFiniteError)) as caught:
        getattr(CustomLikelihood(log_density), verb)(OUTPUTS["moderate"], y)
    assert text in str(caught.value)


def test_what_a_log_density_alone_does_not_define() -> None:
    likelihood = CustomLikelihood(lambda f, y: -torch.log(2 * torch.cosh(y - f)).sum(1))
    f = OUTPUTS["moderate"]
    with pytest.raises(UnsupportedError, match=r"with a mean response; got CustomLikelihood. Override mean\(f\), or"):
        likelihood.mean(f)
    with pytest.raises(
        UnsupportedError, match=r"with a response covariance; got CustomLikelihood\. Override response_"
    ):
        likelihood.response_covariance(f)
    with pytest.raises(
        UnsupportedError, match=r"that can draw responses; got CustomLikelihood\. Override distribution"
    ):
        likelihood.distribution(f).sample()
    with pytest.raises(UnsupportedError, match=r"log_prob\(f, y\) of Likelihood; got a class without it"):
        Likelihood().log_prob(f, REAL)
    torch.testing.assert_close(likelihood.distribution(f).log_prob(REAL), likelihood.log_prob(f, REAL))


def test_mean_and_covariance_of_your_own() -> None:
    f = OUTPUTS["moderate"]
    likelihood = CustomLikelihood(student, mean=torch.sinh, covariance=lambda f: torch.diag_embed(1 + f**2))
    assert CustomLikelihood(student, torch.sinh).mean(f).equal(torch.sinh(f))
    torch.testing.assert_close(likelihood.mean_jacobian(f), torch.diag_embed(torch.cosh(f)))
    torch.testing.assert_close(likelihood.response_variance(f), 1 + f**2)
    turn = draw(7, C, C)  # outputs that share their means: the Jacobian is not symmetric
    turned = CustomLikelihood(student, mean=lambda f: f @ turn.mT)
    torch.testing.assert_close(turned.mean_jacobian(f), turn.expand(N, C, C))
    torch.testing.assert_close(likelihood.distribution(f).variance, 1 + f**2)


def test_hyperparameters_of_a_module_are_seen() -> None:
    module = Logistic()
    likelihood = CustomLikelihood(_Verb(module, "log_prob"))
    assert [p is module.log_scale for p in likelihood.parameters()] == [True]


def test_vmap_and_closed_forms_agree() -> None:
    """One example at a time under torch.func, as other tools call a likelihood."""
    one = vmap(grad(lambda f, y: Categorical(T).log_prob(f[None], y[None])[0]))(OUTPUTS["moderate"], LABELS)
    torch.testing.assert_close(one, Categorical(T).residual(OUTPUTS["moderate"], LABELS))


def test_a_covariance_is_known_without_the_data() -> None:
    """Its shape is that of one variance per point too where N = C; before `bind` the responses take the covariance."""
    covariance = torch.tensor([[0.5, 0.1, 0.0], [0.1, 0.4, 0.0], [0.0, 0.0, 0.3]], dtype=torch.float64)
    likelihood, f = Gaussian(covariance), OUTPUTS["moderate"][:3]
    assert likelihood.kind == "covariance" and torch.allclose(likelihood.response_covariance(f)[1], covariance)
    assert torch.allclose(likelihood.curvature(f)[2], torch.linalg.inv(covariance))
    with pytest.raises(HyperparameterError, match='Say which'):
        likelihood.bind(3, 3)


@pytest.mark.parametrize("likelihood", [
    Gaussian(0.5), Gaussian(torch.full((1, 1), 0.5)), StudentT(0.5), HeteroscedasticGaussian(),
    Bernoulli(), Poisson(), NegativeBinomial(), Everywhere(Bernoulli(), 4),
], ids=repr)
def test_targets_without_a_column_are_not_paired_with_every_output(likelihood: Likelihood) -> None:
    """A network (N, 1) and targets (N,) in a training loop: torch would add up all N x N pairs without a word."""
    outputs = {HeteroscedasticGaussian: 2, Everywhere: 4}.get(type(likelihood), 1)
    f = torch.linspace(-1, 1, 5 * outputs, dtype=torch.float64, device="cpu").view(5, outputs)
    y = torch.arange(20, device="cpu").double().view(5, 4) % 2
    y = y if outputs == 4 else y[:, 0]
    for method in (likelihood.log_prob, likelihood.residual):
        with pytest.raises(TargetError, match=r"a column per response.*likelihood\.targets\(y, N, C\)"):
            method(f, y)
    rows = likelihood.targets(y, 5, outputs)
    one_by_one = torch.cat([likelihood.log_prob(f[i : i + 1], rows[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(likelihood.log_prob(f, rows), one_by_one)
