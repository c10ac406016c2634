"""LaplaceGP: one model with its posterior, to rounding, and with the dense reference, to 1e-9 and 1e-8."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.gp import LaplaceGP
from ntk_laplace.jacobian import JacobianPass
from ntk_laplace.runtime.lower_triangle import LowerTriangle
from pairwise import pairwise
from reference import Dense, differentiate, jacobian, outputs, relative_error
from registry import PRIORS, Problem, fresh

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")

FULL_NOISE = torch.tensor([[0.5, 0.2, 0.0], [0.2, 0.4, -0.1], [0.0, -0.1, 0.3]], dtype=torch.float64)


@dataclass(frozen=True)
class Observed:
    """A likelihood of the library beside its log density by hand, and targets for it."""

    build: Callable[[], ntkl.Likelihood]
    log_density: Callable[[Tensor, Tensor], Tensor]
    draw: Callable[[Tensor], Tensor]


def _gaussian(covariance: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """log N(y; f, Σ) for one example, written with the inverse."""

    def log_density(f: Tensor, y: Tensor) -> Tensor:
        sigma = covariance if covariance.dim() == 2 else covariance * torch.eye(len(f)).double()
        distance = (y - f) @ torch.linalg.inv(sigma) @ (y - f)
        return -0.5 * (distance + torch.logdet(sigma) + len(f) * math.log(2 * math.pi))

    return log_density


def _categorical(temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda f, y: ((torch.arange(len(f)) == y) * f).sum() / temperature - torch.logsumexp(f / temperature, 0)


def _labels(f: Tensor) -> Tensor:
    return torch.randint(0, f.shape[1], (len(f),), generator=torch.Generator().manual_seed(3))


def _coins(f: Tensor) -> Tensor:
    return (torch.rand(f.shape, generator=torch.Generator().manual_seed(4)) < 0.5).double()


def _reals(f: Tensor) -> Tensor:
    return f + torch.randn(f.shape, generator=torch.Generator().manual_seed(5)).double()


def _counts(f: Tensor) -> Tensor:
    return torch.randint(0, 5, f.shape, generator=torch.Generator().manual_seed(6)).double()


OBSERVED = {
    "gaussian": Observed(lambda: ntkl.Gaussian(0.3), _gaussian(torch.tensor(0.3, dtype=torch.float64)), _reals),
    "outputs": Observed(
        lambda: ntkl.Gaussian(FULL_NOISE.diagonal().clone()), _gaussian(FULL_NOISE.diagonal().diag()), _reals
    ),
    "covariance": Observed(lambda: ntkl.Gaussian(FULL_NOISE), _gaussian(FULL_NOISE), _reals),
    "bernoulli": Observed(
        ntkl.Bernoulli, lambda f, y: (y * f - torch.logaddexp(f, torch.zeros_like(f))).sum(), _coins
    ),
    "categorical": Observed(lambda: ntkl.Categorical(1.7), _categorical(1.7), _labels),
    "poisson": Observed(ntkl.Poisson, lambda f, y: (y * f - torch.exp(f) - torch.lgamma(y + 1)).sum(), _counts),
}
NETS = ("linear_model", "cnn_groups", "saturated", "scalar_outputs")


OF_ONE_OUTPUT = ("gaussian", "bernoulli", "poisson")


def admits(network: str, observed: str, *_: str) -> bool:
    return network != "scalar_outputs" or observed in OF_ONE_OUTPUT


CASES = pairwise(NETS, OBSERVED, PRIORS, allowed=admits)


@functools.cache
def problem(network: str) -> Problem:
    return fresh(network)


@functools.cache
def jacobians(network: str) -> tuple[Tensor, Tensor]:
    case = problem(network)
    return jacobian(case.network, case.x), jacobian(case.network, case.x_new)


def build(network: str, observed: str, prior: str) -> LaplaceGP:
    case = problem(network)
    y = OBSERVED[observed].draw(outputs(case.network, case.x))
    likelihood = OBSERVED[observed].build()
    return LaplaceGP(ntkl.laplace(case.network, (case.x, y), likelihood, PRIORS[prior].build(case)))


def truth(network: str, observed: str, prior: str) -> Dense:
    case = problem(network)
    f = outputs(case.network, case.x)
    precision, mean = PRIORS[prior].dense(case)
    derivatives = differentiate(OBSERVED[observed].log_density, f, OBSERVED[observed].draw(f))
    return Dense(*derivatives, jacobians(network)[0], case.theta - mean, precision)


def evidence(gp: LaplaceGP) -> Tensor:
    """What an ordinary GPyTorch training loop computes, in nats."""
    rows = gp.train()(*gp.train_inputs)
    return ExactMarginalLogLikelihood(gp.likelihood, gp)(rows, gp.train_targets) * rows.event_shape.numel()


def ids(case: tuple[str, ...]) -> str:
    return "-".join(case)


# --- training mode


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_marginal_likelihood_is_the_evidence(case: tuple[str, str, str]) -> None:
    gp = build(*case)
    value, posterior = evidence(gp), gp.posterior.log_marginal_likelihood()
    assert relative_error(value, posterior) < 1e-13
    assert relative_error(value, truth(*case).evidence()) < 1e-9
    wanted = torch.autograd.grad(posterior, list(gp.parameters()))
    for mine, true in zip(torch.autograd.grad(value, list(gp.parameters())), wanted, strict=True):
        assert relative_error(mine, true) < 1e-12


@pytest.mark.parametrize("case", [c for c in CASES if c[0] == "linear_model"], ids=ids)
def test_gradients_are_finite_differences(case: tuple[str, str, str]) -> None:
    gp = build(*case)
    for parameter, slope in zip(gp.parameters(), torch.autograd.grad(evidence(gp), list(gp.parameters())), strict=True):
        direction = torch.randn_like(parameter)
        values = []
        for step in (1e-4, -1e-4):
            with torch.no_grad():
                parameter.add_(step * direction)
                values.append(evidence(gp).detach())
                parameter.sub_(step * direction)
        assert relative_error((slope * direction).sum(), (values[0] - values[1]) / 2e-4) < 1e-5


def test_no_setting_turns_the_evidence_into_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ("linear_model", "categorical", "layer")
    gp = build(*case)
    wanted = torch.autograd.grad(evidence(gp), list(gp.parameters()))

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("an iterative method was used")

    monkeypatch.setattr("linear_operator.utils.linear_cg", never)
    monkeypatch.setattr("linear_operator.functions._inv_quad_logdet.InvQuadLogdet.forward", never)
    settings = gpytorch.settings
    for setting in (
        settings.max_cholesky_size(1), settings.fast_computations(log_prob=False), settings.cg_tolerance(10.0),
        settings.fast_computations(solves=True, log_prob=True), settings.num_trace_samples(1),
    ):
        with setting, settings.max_cholesky_size(1):
            value = evidence(gp)
            slopes = torch.autograd.grad(value, list(gp.parameters()))
        assert relative_error(value, truth(*case).evidence()) < 1e-9
        for mine, true in zip(slopes, wanted, strict=True):
            assert torch.equal(mine, true)


@pytest.mark.slow
@pytest.mark.parametrize("observed", ("gaussian", "categorical"))
def test_a_torch_optimizer_raises_the_evidence_and_the_posterior_follows(observed: str) -> None:
    gp = build("deep_mlp", observed, "layer")
    x_new, before = problem("deep_mlp").x_new, gp.posterior.log_marginal_likelihood().item()
    first = gp.eval()(x_new).covariance_matrix
    objective = ExactMarginalLogLikelihood(gp.likelihood, gp)
    optimizer = torch.optim.Adam(gp.parameters(), lr=0.1)
    gp.train()
    for _ in range(60):
        optimizer.zero_grad()
        loss = -objective(gp(*gp.train_inputs), gp.train_targets)
        loss.backward()
        optimizer.step()
    after = gp.posterior.log_marginal_likelihood().item()
    assert after > before + 0.5
    assert relative_error(evidence(gp), torch.tensor(after, dtype=torch.float64)) < 1e-12
    assert relative_error(gp.eval()(x_new).covariance_matrix, first) > 1e-2
    assert torch.equal(gp(x_new).covariance_matrix, gp.posterior.latent(x_new).covariance_matrix)


def test_a_closure_optimizer_too() -> None:
    gp = build("linear_model", "gaussian", "scalar")
    optimizer = torch.optim.LBFGS(gp.parameters(), max_iter=50, line_search_fn="strong_wolfe", tolerance_grad=1e-9)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -evidence(gp)
        loss.backward()
        return loss

    optimizer.step(closure)
    slopes = torch.autograd.grad(evidence(gp), list(gp.parameters()))
    assert all(slope.abs().max() < 1e-5 for slope in slopes)


def test_one_pass_and_one_factorization(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, list[int]] = {"factorized": [], "rows": [], "cholesky": []}

    def counted(owner: object, name: str, key: str, size: Callable[..., int]) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: object, **options: object) -> object:
            calls[key].append(size(*arguments))
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, wrapped)

    counted(LowerTriangle, "cholesky_", "factorized", len)
    counted(JacobianPass, "parts", "rows", lambda self, x, *rest: len(x))
    gp = build("linear_model", "categorical", "tensor")
    counted(torch.linalg, "cholesky_ex", "cholesky", len)  # what GPyTorch would call
    case = problem("linear_model")
    evidence(gp).backward()
    gp.posterior.log_marginal_likelihood()
    gp.likelihood(gp.eval()(case.x_new))
    assert calls == {"factorized": [2 * len(case.x)], "rows": [len(case.x), len(case.x_new)], "cholesky": []}
    with torch.no_grad():
        gp.prior.log_precision.add_(0.1)
    evidence(gp)
    assert calls["factorized"] == [2 * len(case.x)] * 2
    assert len(calls["rows"]) == 2, "another pass over the data"


@pytest.mark.slow
def test_the_prior_over_whitened_rows() -> None:
    gp = build("linear_model", "categorical", "layer")
    reference, rows = truth("linear_model", "categorical", "layer"), gp.train()(*gp.train_inputs)
    assert type(rows.mean) is Tensor and isinstance(rows, MultivariateNormal) and rows.batch_shape == torch.Size()
    root = gp.posterior.posterior_precision.root
    n, c, r = root.shape
    assert r == c - 1 and rows.event_shape == (n * r,)
    whitened = torch.einsum("ncr,ncp->nrp", root, reference.jac).flatten(0, 1)
    dense = (whitened / reference.precision) @ whitened.T
    identity = torch.eye(n * r).double()
    for distribution, matrix, count in ((rows, dense, 2000), (gp.likelihood(rows), dense + identity, 20000)):
        operator = distribution.lazy_covariance_matrix
        vectors = torch.randn(n * r, 3).double()
        with torch.no_grad():
            assert relative_error(distribution.covariance_matrix, matrix) < 1e-10
            assert relative_error(distribution.variance, matrix.diagonal()) < 1e-10
            assert relative_error(operator @ vectors, matrix @ vectors) < 1e-10
            factor = operator.root_decomposition().root.to_dense()
            assert relative_error(factor @ factor.T, matrix) < 1e-10
            assert relative_error(operator[2:5, :3].to_dense(), matrix[2:5, :3]) < 1e-10
            assert relative_error(operator[1, 2], matrix[1, 2]) < 1e-10
            draws = distribution.sample(torch.Size([count]))
            assert draws.shape == (count, n * r)
            assert relative_error(draws.T @ draws / count, matrix) < 6 / count**0.5
    noisy, right = gp.likelihood(rows), torch.randn(n * r).double()
    with torch.no_grad():
        true = torch.distributions.MultivariateNormal(torch.zeros(n * r).double(), dense + torch.eye(n * r).double())
        assert relative_error(noisy.log_prob(right), true.log_prob(right)) < 1e-10
        several = noisy.sample(torch.Size([4, 2]))
        assert relative_error(noisy.log_prob(several), true.log_prob(several)) < 1e-10
        operator = noisy.lazy_covariance_matrix
        assert relative_error(operator.solve(right), torch.linalg.solve(true.covariance_matrix, right)) < 1e-10
        assert relative_error(operator.logdet(), torch.logdet(true.covariance_matrix)) < 1e-10
        lower = operator.cholesky().to_dense()
        assert relative_error(lower, torch.linalg.cholesky(true.covariance_matrix)) < 1e-10


def test_unavailable_gradients_are_refused() -> None:
    """A wrong zero is worse than an error: the root's own derivative is not known."""
    gp = build("linear_model", "categorical", "layer")
    noisy = gp.likelihood(gp.train()(*gp.train_inputs))
    operator, right = noisy.lazy_covariance_matrix, torch.randn(len(gp.train_targets)).double()
    for value in (
        noisy.log_prob(right), noisy.covariance_matrix.sum(), noisy.variance.sum(), operator.solve(right).sum(),
        noisy.rsample().sum(), (operator @ right).sum(), operator.cholesky().to_dense().sum(),
    ):
        with pytest.raises(ntkl.errors.UnsupportedError, match="ExactMarginalLogLikelihood"):
            value.backward()
    with pytest.raises(ntkl.errors.UnsupportedError, match=r"may be singular.*likelihood"):
        gp(*gp.train_inputs).log_prob(gp.train_targets)


@pytest.mark.parametrize("curvature", ("ef", "mc"))
def test_other_curvatures(curvature: str) -> None:
    case = problem("linear_model")
    y = _labels(outputs(case.network, case.x))
    posterior = ntkl.laplace(case.network, (case.x, y), ntkl.Categorical(), curvature=curvature)
    gp = LaplaceGP(posterior)
    assert len(gp.train_targets) == len(case.x)
    assert relative_error(evidence(gp), posterior.log_marginal_likelihood()) < 1e-13


# --- eval mode


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_posterior_of_f(case: tuple[str, str, str]) -> None:
    gp, x_new, jac = build(*case).eval(), problem(case[0]).x_new, jacobians(case[0])[1]
    latent, wanted = gp(x_new), gp.posterior.latent(x_new)
    assert isinstance(latent, MultitaskMultivariateNormal)
    assert torch.equal(latent.mean, wanted.mean) and torch.equal(latent.covariance_matrix, wanted.covariance_matrix)
    assert relative_error(latent.mean, outputs(problem(case[0]).network, x_new)) < 1e-12
    assert relative_error(latent.covariance_matrix, truth(*case).latent_covariance(jac)) < 1e-8


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_responses(case: tuple[str, str, str]) -> None:
    gp, x_new = build(*case).eval(), problem(case[0]).x_new
    latent = gp(x_new)
    n, c = latent.event_shape
    if isinstance(gp.posterior.likelihood, ntkl.Gaussian):
        response = gp.likelihood(latent)
        apart = FULL_NOISE.diagonal().diag()
        noise = {"gaussian": 0.3 * torch.eye(c).double(), "outputs": apart, "covariance": FULL_NOISE}
        blocks = torch.block_diag(*[noise[case[1]]] * n)
        assert isinstance(response, MultitaskMultivariateNormal)
        assert relative_error(response.covariance_matrix, latent.covariance_matrix + blocks) < 1e-13
        assert relative_error(gp.likelihood.log_marginal(latent.mean, latent), response.log_prob(latent.mean)) < 1e-13
        return
    generator = torch.Generator().manual_seed(8)
    response = gp.likelihood(latent, samples=200, generator=generator)
    wanted = gp.posterior.predict(x_new, samples=200, generator=generator.manual_seed(8))
    assert response.batch_shape == (n,)
    assert relative_error(response.mean, wanted.mean) < 1e-12
    assert relative_error(response.variance, wanted.variance) < 1e-12
    for method in ("blr", "map"):
        mine = gp.likelihood(latent, method=method)
        assert relative_error(mine.mean, gp.posterior.predict(x_new, method=method).mean) < 1e-12
    given = gp.likelihood(latent.mean)
    assert relative_error(given.mean, gp.posterior.predict(x_new, method="map").mean) < 1e-12


def test_noise_of_the_training_points_is_not_that_of_others() -> None:
    case = problem("linear_model")
    noise = 0.1 + torch.rand(len(case.x), 3).double()
    gp = LaplaceGP(case.network, (case.x, _reals(outputs(case.network, case.x))), ntkl.Gaussian(noise))
    assert relative_error(evidence(gp), gp.posterior.log_marginal_likelihood()) < 1e-13
    gp.eval()
    for x in (case.x, case.x_new):  # as many points as in training make them no training points
        with pytest.raises(ntkl.errors.UnsupportedError, match="per point"):
            gp.likelihood(gp(x))
    latent = gp(case.x_new)
    there = 0.1 + torch.rand(len(case.x_new), 3).double()
    for noise in (torch.tensor(0.1), there):
        response = gp.likelihood(latent, likelihood=ntkl.Gaussian(noise))
        assert relative_error(response.variance, latent.variance + noise) < 1e-12


def test_flat_inputs_and_batches_of_them() -> None:
    case = problem("cnn_groups")
    y = _labels(outputs(case.network, case.x))
    gp = LaplaceGP(case.network, (case.x, y), ntkl.Categorical(), input_shape=case.x.shape[1:]).eval()
    wanted = gp.posterior.latent(case.x_new)
    for x in (case.x_new, case.x_new.flatten(1), case.x_new.flatten(1).float().double()):
        got = gp(x)
        assert relative_error(got.mean, wanted.mean) < 1e-6 and got.event_shape == wanted.event_shape
        assert relative_error(got.covariance_matrix, wanted.covariance_matrix) < 1e-6
    batched = gp(torch.stack([case.x.flatten(1)[:3], case.x_new.flatten(1)[:3]]))
    assert batched.batch_shape == (2,) and batched.event_shape == (3, 3)
    part = gp.posterior.latent(case.x_new[:3])
    assert relative_error(batched.mean[1], part.mean) < 1e-12
    assert relative_error(batched.covariance_matrix[1], part.covariance_matrix) < 1e-12
    with pytest.raises(ntkl.errors.UnsupportedError, match="one batch"):
        gp.likelihood(batched)
    with pytest.raises(ntkl.errors.DataError, match="input_shape"):
        gp(torch.randn(2, 5).double())


def test_batches_of_regressions_take_noise() -> None:
    case = problem("linear_model")
    y = _reals(outputs(case.network, case.x))
    gp = LaplaceGP(case.network, (case.x, y), ntkl.Gaussian(FULL_NOISE), input_shape=case.x.shape[1:]).eval()
    x = torch.stack([case.x[:3], case.x_new[:3]])
    for observation in (gp.posterior.likelihood, ntkl.Tempered(ntkl.Gaussian(FULL_NOISE), 2.0)):
        gp = LaplaceGP(case.network, (case.x, y), observation, input_shape=case.x.shape[1:]).eval()
        joint = gp.likelihood(gp(x[1])).covariance_matrix
        assert relative_error(gp.likelihood(gp(x)).covariance_matrix[1], joint) < 1e-12


def test_token_ids_may_come_as_floats() -> None:
    case = problem("transformer_tied")
    y = _labels(outputs(case.network, case.x))
    gp = LaplaceGP(case.network, (case.x, y), ntkl.Categorical(), input_shape=case.x.shape[1:], input_dtype=torch.long)
    gp.eval()
    assert torch.equal(gp(case.x_new.double()).mean, gp(case.x_new).mean)


def test_inputs_of_several_tensors() -> None:
    for name in ("cross_attention_tuple", "decoder_dict"):
        case = problem(name)
        gp = LaplaceGP(case.network, (case.x, _labels(outputs(case.network, case.x))), ntkl.Categorical()).eval()
        latent = gp(*case.x_new) if isinstance(case.x_new, tuple) else gp(case.x_new)
        assert torch.equal(latent.covariance_matrix, gp.posterior.latent(case.x_new).covariance_matrix)


def test_settings_that_eval_mode_knows() -> None:
    case = problem("linear_model")
    gp = build("linear_model", "categorical", "tensor").eval()
    precision, mean = PRIORS["tensor"].dense(case)
    jac = jacobians("linear_model")[1]
    with gpytorch.settings.prior_mode():
        prior = gp(case.x_new)
    wanted = outputs(case.network, case.x_new) + jac @ (mean - case.theta)
    assert relative_error(prior.mean, wanted) < 1e-10
    rows = jac.flatten(0, 1)
    assert relative_error(prior.covariance_matrix, (rows / precision) @ rows.T) < 1e-10
    with gpytorch.settings.skip_posterior_variances():
        bare = gp(case.x_new)
    assert torch.equal(bare.mean, gp(case.x_new).mean) and not bare.covariance_matrix.any()


# --- one model with the posterior


def test_from_a_network_or_from_a_posterior() -> None:
    case = problem("linear_model")
    y = _labels(outputs(case.network, case.x))
    posterior = ntkl.laplace(case.network, (case.x, y), ntkl.Categorical(), ntkl.GaussianPrior(2.0))
    fitted = LaplaceGP(case.network, (case.x, y), ntkl.Categorical(), ntkl.GaussianPrior(2.0), dtype=torch.float64)
    shared = LaplaceGP.from_posterior(posterior)
    assert shared.posterior is posterior and shared.prior is posterior.prior
    assert torch.equal(evidence(shared), evidence(fitted))
    with torch.no_grad():
        posterior.prior.log_precision.add_(1.0)
    assert relative_error(evidence(shared), evidence(fitted)) > 1e-3


def test_the_noise_is_that_of_the_observation_model() -> None:
    """As GPyTorch's own GaussianLikelihood has it; a likelihood without one says so."""
    gp = build("linear_model", "gaussian", "layer")
    assert torch.equal(gp.likelihood.noise, gp.posterior.likelihood.noise) and hasattr(gp.likelihood, "noise")
    before = evidence(gp)
    gp.likelihood.noise = 2.5
    assert float(gp.posterior.likelihood.noise) == pytest.approx(2.5, rel=1e-12)
    case = problem("linear_model")
    other = ntkl.laplace(case.network, (case.x, gp.posterior.targets), ntkl.Gaussian(2.5), gp.posterior.prior)
    assert relative_error(evidence(gp), other.log_marginal_likelihood()) < 1e-12 < relative_error(before, evidence(gp))
    classes = build("linear_model", "categorical", "layer").likelihood
    assert not hasattr(classes, "noise")
    for touch in (lambda: classes.noise, lambda: setattr(classes, "noise", 1.0)):
        with pytest.raises(AttributeError, match="a Gaussian likelihood, for its noise; got a Categorical"):
            touch()
    with pytest.raises(AttributeError, match="has no attribute 'nose'"):
        _ = classes.nose


def test_parameters_state_and_modes() -> None:
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).double().eval()
    x, y = torch.randn(9, 3).double(), torch.randint(0, 3, (9,))

    def make(precision: float) -> LaplaceGP:
        return LaplaceGP(network, (x, y), ntkl.Categorical(1.2), ntkl.GaussianPrior(precision, groups="layer"))

    gp = make(2.0)
    names = ["likelihood.observation.log_temperature", "prior.log_precision"]
    assert [name for name, _ in gp.named_parameters()] == names and list(gp.state_dict()) == names
    first = gp.eval()(x).covariance_matrix
    rows = gp.train()(*gp.train_inputs)
    assert not gp.posterior.network.module.training and rows.event_shape == (18,)
    assert torch.equal(gp.eval()(x).covariance_matrix, first)
    assert gp.train().training and not any(m.training for m in gp.posterior.network.module.modules())

    other = make(5.0).eval()
    assert relative_error(other(x).covariance_matrix, first) > 1e-2
    other.load_state_dict(gp.state_dict())
    assert torch.equal(other(x).covariance_matrix, first)
    assert torch.equal(other.posterior.prior.precision, gp.posterior.prior.precision)


def test_floating_types() -> None:
    gp, x_new = build("linear_model", "categorical", "layer"), problem("linear_model").x_new
    value, covariance = evidence(gp).item(), gp.eval()(x_new).covariance_matrix
    assert gp.float() is gp
    assert {p.dtype for p in gp.parameters()} == {gp.train_targets.dtype} == {torch.float32}
    assert gp(x_new).covariance_matrix.dtype == gp(x_new.float()).mean.dtype == gp.posterior.f.dtype == torch.float32
    assert relative_error(gp(x_new).covariance_matrix, covariance) < 1e-4
    assert evidence(gp).item() == pytest.approx(value, rel=1e-5)
    evidence(gp).backward()
    gp.double()
    assert evidence(gp).item() == pytest.approx(value, rel=1e-6) and evidence(gp).dtype == torch.float64


@pytest.mark.parametrize("structure", ("gp", "full"))
def test_posteriors_change_their_floating_type(structure: str) -> None:
    case = problem("cnn_groups")
    y = _labels(outputs(case.network, case.x))
    prior = ntkl.GaussianPrior(2.0, groups="layer")
    posterior = ntkl.laplace(case.network, (case.x, y), ntkl.Categorical(1.3), prior, structure=structure)
    value, moments = posterior.log_marginal_likelihood(correction=True), posterior.latent_moments(case.x_new)
    assert posterior.to(dtype=torch.float32) is posterior and posterior.prior.log_precision.dtype == torch.float64
    assert posterior.latent_moments(case.x_new)[1].dtype == posterior.f.dtype == torch.float32
    assert relative_error(posterior.log_marginal_likelihood(correction=True), value) < 1e-4
    assert relative_error(posterior.latent_moments(case.x_new)[1], moments[1]) < 1e-4
    posterior.to(torch.device("cpu"), torch.float64)
    assert relative_error(posterior.log_marginal_likelihood(), posterior.log_joint() - posterior.log_det() / 2) < 1e-14
    assert relative_error(posterior.latent_moments(case.x_new)[1], moments[1]) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_devices() -> None:
    gp, x_new = build("cnn_groups", "categorical", "layer"), problem("cnn_groups").x_new
    value, covariance = evidence(gp), gp.eval()(x_new).covariance_matrix
    gp.cuda()
    assert gp(x_new.cuda()).mean.is_cuda and gp.posterior.network.device.type == "cuda"
    assert relative_error(gp(x_new.cuda()).covariance_matrix.cpu(), covariance) < 1e-9
    assert relative_error(evidence(gp).cpu(), value) < 1e-10
    assert relative_error(gp.cpu().eval()(x_new).covariance_matrix, covariance) < 1e-9


def test_copies_stand_alone() -> None:
    gp, x_new = build("linear_model", "gaussian", "layer").eval(), problem("linear_model").x_new
    before, value = gp(x_new).covariance_matrix, evidence(gp).detach()
    gp.eval()
    for twin in (copy.deepcopy(gp), pickle.loads(pickle.dumps(gp))):
        assert twin.prior is twin.posterior.prior and twin.prior is not gp.prior
        assert torch.equal(twin(x_new).covariance_matrix, before) and torch.equal(evidence(twin), value)
        twin.eval()
        with torch.no_grad():
            twin.prior.log_precision.add_(1.0)
        assert relative_error(twin(x_new).covariance_matrix, before) > 1e-2
        assert torch.equal(gp(x_new).covariance_matrix, before)


def test_unsupported_methods_of_the_model_raise_errors() -> None:
    case = problem("linear_model")
    y = _labels(outputs(case.network, case.x))
    gp = build("linear_model", "categorical", "scalar")
    refused = functools.partial(pytest.raises, ntkl.errors.UnsupportedError)
    full = ntkl.laplace(case.network, (case.x, y), ntkl.Categorical(), structure="full")
    with refused(match=r"structure=\"gp\".*got structure='full'.*Fit with"):
        LaplaceGP(full)
    for structure in ("full", "auto", "kfac", ntkl.KFAC()):
        with refused(match=r"structure=\"gp\".*got structure=.*Leave structure= out"):
            LaplaceGP(case.network, (case.x, y), ntkl.Categorical(), structure=structure)
    with refused(match="got a Tensor"):
        LaplaceGP(case.x)
    with refused(match="posterior and arguments"):
        LaplaceGP(gp.posterior, prior=ntkl.GaussianPrior())
    with refused(match=r"got fantasy observations\. .*LaplaceGP\(gp\.posterior\.add\(x, y\)\)"):
        gp.get_fantasy_model(case.x, y)
    with refused(match="Fit again"):
        gp.set_train_data(case.x, y)
    with refused(match="expected_log_prob"):
        gp.likelihood.expected_log_prob(gp.train_targets, gp(*gp.train_inputs))
    with refused(match="what the LaplaceGP returned"):
        gp.likelihood(MultivariateNormal(torch.zeros(3).double(), torch.eye(3).double()))
    with refused(match=r"require no gradient.*detach"):
        gp.eval()(case.x_new.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="train on the training inputs"):
        gp.train()(case.x)
