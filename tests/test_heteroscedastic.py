"""The heteroscedastic Gaussian: outputs (N, 2D), responses (N, D), the Fisher information as curvature.

The references are the densities as the paper prints them, derivatives by autograd, and the Fisher information by
Gauss-Hermite quadrature over y: products of gradients have degree 4 in y, so 5 nodes are exact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacrev, vmap

import ntk_laplace as ntkl
from ntk_laplace.metrics import held_out_scores
from ntk_laplace.model.likelihoods.linearized import LinearizedResponse
from ntk_laplace.model.predictive import predictive
from ntk_laplace.posterior.calibrate.densities import LeftOut, densities
from ntk_laplace.structures.weight_likelihood import ManyPoints
from reference import Dense, jacobian, outputs, relative_error
from reference_structures import Structured, StructuredModel, parts_of
from registry import PRIORS, problem
from structured_cases import STRUCTURES as DENSE_STRUCTURES
from structured_cases import fused_biases

BOTH = ["natural", "log variance"]
NETWORKS = ["layer_twice", "conv_padding", "unused_parameters", "self_attention_sequence_first"]
EVEN = [name for name in NETWORKS if problem(name).case.outputs % 2 == 0]


def by_hand(parametrization: str):
    """log p of one example, (2D,) and (D,), as [Immer et al. 2023] print it, or of a normal by its log variance."""

    def natural(f: Tensor, y: Tensor) -> Tensor:
        first, second = f.chunk(2)
        second = -0.5 * torch.log1p(torch.exp(second))
        terms = first * y + second * y**2 + first**2 / (4 * second) + 0.5 * torch.log(-2 * second)
        return (terms - 0.5 * math.log(2 * math.pi)).sum()

    def log_variance(f: Tensor, y: Tensor) -> Tensor:
        mean, log = f.chunk(2)
        return (-0.5 * (y - mean) ** 2 / log.exp() - 0.5 * log - 0.5 * math.log(2 * math.pi)).sum()

    return natural if parametrization == "natural" else log_variance


def moments(parametrization: str, f: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance, (..., D)."""
    u, s = f.chunk(2, -1)
    return (u / torch.log1p(s.exp()), 1 / torch.log1p(s.exp())) if parametrization == "natural" else (u, s.exp())


def hermite(order: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of a standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    return torch.tensor(nodes), torch.tensor(weights) / math.sqrt(2 * math.pi)


def fisher(parametrization: str, f: Tensor) -> Tensor:
    """E[g gᵀ] over y given f, (N, C, C); responses are independent, and the gradients have mean zero."""
    mean, variance = moments(parametrization, f)
    responses, gradient = mean.shape[1], vmap(grad(by_hand(parametrization)))
    total = f.new_zeros(*f.shape, f.shape[1])
    for d in range(responses):
        mine = torch.zeros(f.shape[1], dtype=f.dtype)
        mine[[d, responses + d]] = 1.0
        for node, weight in zip(*hermite(5), strict=True):
            y = mean + node * variance.sqrt()
            g = gradient(f, y) * mine
            total += weight * g[:, :, None] * g[:, None]
    return total


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


F, Y = 2 * draw(0, 6, 4), draw(1, 6, 2)


# ----------------------------------------------------------------------------------------- the density in the outputs


@pytest.mark.parametrize("name", BOTH)
def test_density_and_derivatives(name: str) -> None:
    likelihood, density = ntkl.HeteroscedasticGaussian(name), by_hand(name)
    torch.testing.assert_close(likelihood.log_prob(F, Y), vmap(density)(F, Y), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(likelihood.residual(F, Y), vmap(grad(density))(F, Y), rtol=1e-11, atol=1e-11)
    mean, variance = moments(name, F)
    torch.testing.assert_close(likelihood.mean(F), mean)
    torch.testing.assert_close(likelihood.response_covariance(F), torch.diag_embed(variance))
    slopes = vmap(jacrev(lambda f: moments(name, f)[0]))(F)
    torch.testing.assert_close(likelihood.mean_jacobian(F), slopes, rtol=1e-12, atol=1e-14)
    single = likelihood.root(F.float()), likelihood.residual(F.float(), Y)
    assert all(one.dtype == torch.float32 for one in single)
    torch.testing.assert_close(single[1].double(), likelihood.residual(F, Y), rtol=1e-4, atol=1e-4)
    assert likelihood.is_density and likelihood.num_responses(4) == 2 and likelihood.event_shape(4) == (2,)


@pytest.mark.parametrize("name", BOTH)
def test_the_curvature_is_the_fisher_information(name: str) -> None:
    likelihood, expected = ntkl.HeteroscedasticGaussian(name), fisher(name, F)
    root = likelihood.root(F)
    torch.testing.assert_close(likelihood.curvature(F, Y), expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(root @ root.mT, expected, rtol=1e-11, atol=1e-12)
    many = F.repeat_interleave(10000, 0)
    drawn = ntkl.CurvatureType("mc", 4, seed=2).curvature(likelihood, many, many[:, :2])
    assert relative_error(drawn.unflatten(0, (6, 10000)).mean(1), expected) < 0.05


def test_natural_parameters_have_the_fisher_as_their_hessian() -> None:
    """The Gauss-Newton matrix of the network followed by softplus, at any y."""

    def natural(f: Tensor) -> Tensor:
        u, s = f.chunk(2)
        return torch.cat([u, -0.5 * torch.log1p(s.exp())])

    def density(eta: Tensor, y: Tensor) -> Tensor:
        first, second = eta.chunk(2)
        return (first * y + second * y**2 + first**2 / (4 * second) + 0.5 * torch.log(-2 * second)).sum()

    inner, eta = vmap(jacrev(natural))(F), vmap(natural)(F)
    expected = inner.mT @ -vmap(hessian(density))(eta, Y) @ inner
    torch.testing.assert_close(ntkl.HeteroscedasticGaussian("natural").curvature(F), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "f", "y"), [("natural", [[6.0, 0.0]], [[0.0]]), ("log variance", [[1.0, 0.0]], [[2.0]])]
)
def test_the_log_density_is_not_concave_in_the_outputs(name: str, f: list, y: list) -> None:
    """Its second derivative is no curvature: the determinant is that of the docstring, and negative."""
    f, y = torch.tensor(f, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
    (own,) = torch.linalg.det(-vmap(hessian(by_hand(name)))(f, y))
    (mean,), (variance,) = (one[0] for one in moments(name, f))
    expected = -((y - mean) ** 2) / (2 * variance**2)
    if name == "natural":
        slope = torch.sigmoid(f[0, 1])
        expected = (slope * (1 - slope) * (y**2 - mean**2 - variance) + slope**2 * variance**2) * variance / 2
    assert own < 0
    torch.testing.assert_close(own, expected.squeeze(), rtol=1e-10, atol=0.0)
    autograd = ntkl.CustomLikelihood(lambda f, y: vmap(by_hand(name))(f, y))
    with pytest.raises(ntkl.UnsupportedError, match="concave in f"):
        autograd.root(f, y)


@pytest.mark.parametrize("s", [-600.0, -20.001, -19.999, 40.0, 1e6])
def test_extreme_precisions(s: float) -> None:
    likelihood, f = ntkl.HeteroscedasticGaussian("natural"), torch.tensor([[0.0, s]], dtype=torch.float64)
    log = math.log(math.log1p(math.exp(s))) if s < 700 else math.log(s)
    y = torch.zeros(1, 1, dtype=torch.float64)
    assert likelihood.log_prob(f, y).item() == pytest.approx(0.5 * log - 0.5 * math.log(2 * math.pi), rel=1e-13)
    slope = 1.0 / (1.0 + math.exp(-s)) / math.exp(log)
    assert likelihood.curvature(f)[0, 1, 1].item() == pytest.approx(0.5 * slope**2, rel=1e-12)
    torch.testing.assert_close(likelihood.residual(f, y), grad(lambda f: likelihood.log_prob(f, y).sum())(f))


@pytest.mark.parametrize(("name", "s"), [("natural", -800.0), ("log variance", 800.0), ("log variance", -800.0)])
def test_variances_beyond_the_dtype_are_refused(name: str, s: float) -> None:
    f = torch.tensor([[0.0, 0.0], [0.0, s]], dtype=torch.float64)
    with pytest.raises(ntkl.NonFiniteError, match=r"noise variances within torch.float64; got .* at example 1"):
        ntkl.HeteroscedasticGaussian(name).root(f)


# ------------------------------------------------------------------------------------------------ laws over networks


@functools.cache
def truth(network: str, name: str) -> Dense:
    case = problem(network)
    f, precision, mean = outputs(case.network, case.x), *PRIORS["layer"].dense(case)
    y = draw(2, len(f), f.shape[1] // 2)
    density = by_hand(name)
    return Dense(vmap(density)(f, y), vmap(grad(density))(f, y), fisher(name, f), jacobian(case.network, case.x),
                 case.theta - mean, precision)


def fit(network: str, name: str, structure: str = "gp", **options: object) -> ntkl.Posterior:
    case = problem(network)
    y = draw(2, case.case.examples, case.case.outputs // 2)
    return ntkl.laplace(case.network, (case.x, y), ntkl.HeteroscedasticGaussian(name), PRIORS["layer"].build(case),
                        structure, **options)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("network", EVEN)
@pytest.mark.parametrize("structure", ["gp", "full"])
def test_exact_structures(network: str, name: str, structure: str) -> None:
    dense, posterior, case = truth(network, name), fit(network, name, structure), problem(network)
    for correction in (False, True):
        found = posterior.log_marginal_likelihood(correction=correction)
        assert relative_error(found, dense.evidence(correction)) < 1e-9
    rows = jacobian(case.network, case.x_new)
    joint = posterior.latent(case.x_new).covariance_matrix
    assert relative_error(joint, dense.latent_covariance(rows)) < 1e-8
    assert relative_error(posterior.evidence().value, dense.evidence()) < 1e-9


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("network", ["layer_twice", "conv_padding"])
@pytest.mark.parametrize("structure", ["kfac", "diag"])
def test_other_structures(network: str, name: str, structure: str) -> None:
    dense, posterior, case = truth(network, name), fit(network, name, structure), problem(network)
    fused = fused_biases(fit(network, name, "kfac"))
    parts = parts_of(case.network, case.x, lambda weight, bias: (weight, bias) in fused)
    information = DENSE_STRUCTURES[structure][1](Structured(parts, dense.jac, dense.hessian))
    model = StructuredModel(*(getattr(dense, field) for field in Dense.__dataclass_fields__), information=information)
    assert relative_error(posterior.log_marginal_likelihood(), model.evidence()) < 1e-9
    rows = jacobian(case.network, case.x_new)
    covariance = torch.einsum("ncp,pq,ndq->ncd", rows, torch.linalg.inv(model.posterior_precision), rows)
    assert relative_error(posterior.latent_moments(case.x_new)[1], covariance) < 1e-8


@pytest.mark.parametrize("name", BOTH)
def test_leave_one_out_and_explanations(name: str) -> None:
    dense, case = truth("layer_twice", name), problem("layer_twice")
    posterior, new = fit("layer_twice", name), jacobian(case.network, case.x_new)
    with pytest.warns(ntkl.NTKLaplaceWarning, match="not at the optimum"):
        own = posterior.leave_one_out(strict=False)
    f_new = outputs(case.network, case.x_new)
    effects = posterior.explain(case.x_new, k=2, output=1)
    slopes = vmap(jacrev(lambda f: moments(name, f)[0]))(f_new)[:, 1]
    spread = posterior.explain(case.x_new, k=2, by="probability_variance", output=1).effect
    response = posterior.explain(case.x_new, k=2, by="probability", output=1).effect
    for i, (jac, r) in enumerate(zip(dense.jac, dense.residual, strict=True)):
        without = torch.linalg.inv(dense.posterior_precision - jac.T @ dense.hessian[i] @ jac)
        torch.testing.assert_close(own.covariance[i], jac @ without @ jac.T, rtol=1e-7, atol=1e-9)
        move = -without @ jac.T @ r
        torch.testing.assert_close(own.mean[i] - posterior.f[i], jac @ move, rtol=1e-7, atol=1e-9)
        moved = f_new + new @ move
        torch.testing.assert_close(effects.effect[:, i], (new @ move)[:, 1], rtol=1e-7, atol=1e-9)
        change = moments(name, moved)[0][:, 1] - moments(name, f_new)[0][:, 1]
        torch.testing.assert_close(response[:, i], change, rtol=1e-6, atol=1e-8)
        wider = new @ (without - dense.covariance) @ new.mT
        wider = torch.einsum("nc,ncd,nd->n", slopes, wider, slopes)
        torch.testing.assert_close(spread[:, i], wider, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("structure", ["gp", "full"])
def test_what_ifs(name: str, structure: str) -> None:
    dense, case, posterior = truth("layer_twice", name), problem("layer_twice"), fit("layer_twice", name, structure)
    f, new = outputs(case.network, case.x_new), jacobian(case.network, case.x_new)
    jac, residual = dense.jac[[1, 4]].flatten(0, 1), dense.residual[[1, 4]].flatten()
    without = dense.posterior_precision - jac.T @ torch.block_diag(*dense.hessian[[1, 4]]) @ jac
    mean, covariance = posterior.remove([1, 4]).latent_moments(case.x_new)
    assert relative_error(mean, f - new @ torch.linalg.solve(without, jac.T @ residual)) < 1e-8
    assert relative_error(covariance, new @ torch.linalg.inv(without) @ new.mT) < 1e-8
    y = torch.tensor([[0.5, -0.5]], dtype=torch.float64)
    own = outputs(case.network, case.x)[2:3]
    change = vmap(grad(by_hand(name)))(own, y)[0] - dense.residual[2]
    moved = posterior.relabel([2], y).latent_moments(case.x_new)[0]
    assert relative_error(moved, f + new @ dense.covariance @ dense.jac[2].T @ change) < 1e-8
    with pytest.raises(ntkl.TargetError, match=r"shape \(1, 2\)"):
        posterior.relabel([2], torch.zeros(1, 4, dtype=torch.float64))


# ------------------------------------------------------------------------------------------------------- predictions


def tiny(outputs: int = 2, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


X, X_NEW = draw(4, 14, 3), draw(5, 4, 3)


def fitted(name: str, responses: int = 1, structure: str = "gp", missing: str | None = None, y: Tensor | None = None,
           **options: object) -> ntkl.Posterior:
    y = draw(6, 14, responses) if y is None else y
    likelihood = ntkl.HeteroscedasticGaussian(name, missing=missing)
    prior = options.pop("prior", ntkl.GaussianPrior(8.0))
    return ntkl.laplace(tiny(2 * responses), (X, y), likelihood, prior, structure, **options)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("structure", ["gp", "full"])
def test_the_optimum_of_the_linearized_model(name: str, structure: str) -> None:
    """Its gradient is zero: with θ̄ = P0⁻¹Jᵀr at its outputs f̄, f̄ = f - Jθ* + K r(f̄)."""
    network, prior = tiny(4), ntkl.GaussianPrior(20.0)
    jac, theta = jacobian(network, X).flatten(0, 1), nn.utils.parameters_to_vector(network.parameters()).detach()
    found = fitted(name, 2, structure, prior=prior).latent_moments(X, mean="posterior")[0]
    residual = vmap(grad(by_hand(name)))(found, draw(6, 14, 2)).flatten()
    expected = network(X).detach().flatten() + jac @ (jac.T @ residual / 20.0 - theta)
    assert relative_error(found.flatten(), expected) < 1e-6


def test_newton_steps_beyond_the_dtype_are_halved() -> None:
    """A network that is far too sure: the first step takes log variances past what float64 holds."""
    network, y = nn.Linear(3, 2).double(), draw(6, 14, 1)
    with torch.no_grad():
        network.weight.zero_()
        network.bias.copy_(torch.tensor([0.0, -7.0]))
    posterior = ntkl.laplace(network, (X, y), ntkl.HeteroscedasticGaussian())
    step = posterior.posterior_precision.solve(posterior.fitted.joint_gradient())
    assert torch.isfinite(step).all() and (X @ step[3:6] + step[7]).abs().max() > math.log(torch.finfo(y.dtype).max)
    found = posterior.refit().latent_moments(X)[0]
    residual = vmap(grad(by_hand("log variance")))(found, y)
    inputs = torch.cat([X, torch.ones(14, 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(found, inputs @ (inputs.T @ residual), rtol=1e-6, atol=1e-6)


def test_an_example_is_named_by_its_own_number_at_many_weights() -> None:
    points = fitted("log variance").fitted.points
    f = points.f.repeat(3, 1, 1)
    f[2, 5, 1] = 800.0
    with pytest.raises(ntkl.NonFiniteError, match="at example 5"):
        ManyPoints(ntkl.HeteroscedasticGaussian(), points).each(f)


@pytest.mark.parametrize("name", BOTH)
def test_glm_is_the_integral_over_the_outputs(name: str) -> None:
    """Quadrature in the two outputs of one response; the library averages over 2^14 points, or has a closed form."""
    posterior, (y,) = fitted(name), draw(7, 1, 4, 1)
    mean, covariance = posterior.latent_moments(X_NEW)
    nodes, weights = hermite(40)
    grid = torch.cartesian_prod(nodes, nodes)
    weight = torch.outer(weights, weights).flatten()[:, None, None]
    f = mean + torch.einsum("ncd,sd->snc", torch.linalg.cholesky(covariance), grid)
    mu, variance = moments(name, f)
    density = (weight * torch.distributions.Normal(mu, variance.sqrt()).log_prob(y).exp()).sum((0, 2))
    first = (weight * mu).sum(0)
    epistemic, aleatoric = (weight * mu**2).sum(0) - first**2, (weight * variance).sum(0)
    found = posterior.predict(X_NEW, samples=2**14)
    limit = 2e-2 if name == "natural" else 1e-9
    assert relative_error(found.mean, first) < 0.1 * limit
    assert relative_error(found.epistemic, epistemic) < limit and relative_error(found.aleatoric, aleatoric) < limit
    assert relative_error(found.variance, epistemic + aleatoric) < limit
    assert relative_error(found.log_prob(y), density.log()) < 2e-3
    torch.testing.assert_close(found.log_prob(y.squeeze(1)), found.log_prob(y))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("wrap", [lambda own: own, lambda own: ntkl.Everywhere(own, 1)], ids=["one", "everywhere"])
def test_the_density_of_several_responses_with_certain_noise_is_normal(
    name: str, wrap: Callable[[ntkl.Likelihood], ntkl.Likelihood]
) -> None:
    """No point of u from its own distribution is near all five responses at once."""
    likelihood, d = wrap(ntkl.HeteroscedasticGaussian(name, missing="nan")), 5
    mean, covariance, y = draw(0, 7, 2 * d), torch.zeros(7, 2 * d, 2 * d, dtype=torch.float64), 3 * draw(1, 7, d)
    root = draw(2, 7, d, d)
    covariance[:, :d, :d] = 4 * root @ root.mT
    mean[:, d:] = 3.0 if name == "natural" else -3.0
    mu, variance = moments(name, mean)
    slope = mu / mean[:, :d]
    own = slope[:, :, None] * covariance[:, :d, :d] * slope[:, None] + torch.diag_embed(variance)
    expected = torch.distributions.MultivariateNormal(mu, own).log_prob(y)
    y[0, 2] = torch.nan
    there = [0, 1, 3, 4]
    expected[0] = torch.distributions.MultivariateNormal(mu[0, there], own[0][there][:, there]).log_prob(y[0, there])
    y = y if likelihood.positions is None else y.unsqueeze(1)
    torch.testing.assert_close(predictive(likelihood, mean, covariance).log_prob(y), expected, rtol=0, atol=0.05)
    left_out = LeftOut(mean, 4 * covariance, y, torch.ones(7, dtype=torch.float64))
    (terms,) = densities(*left_out.by_position(likelihood)).parts({"scale": torch.tensor(0.25, dtype=torch.float64)})
    torch.testing.assert_close(7 * terms, expected, rtol=0, atol=0.05)


def test_the_density_of_an_outlier_is_the_integral_over_the_outputs() -> None:
    """By a fine grid."""
    mean = torch.tensor([[0.5, -3.0], [1.0, 0.3]], dtype=torch.float64)
    covariance = torch.tensor([[[0.5, 0.1], [0.1, 0.4]], [[2.0, -0.3], [-0.3, 0.2]]], dtype=torch.float64)
    y = torch.tensor([[4.0], [-5.0]], dtype=torch.float64)
    grid = torch.linspace(-8, 8, 401, dtype=torch.float64)
    z = torch.cartesian_prod(grid, grid)
    mu, variance = moments("log variance", mean[:, None] + z @ torch.linalg.cholesky(covariance).mT)
    inner = torch.distributions.Normal(mu, variance.sqrt()).log_prob(y[:, None]).squeeze(2) - 0.5 * z.square().sum(1)
    expected = inner.logsumexp(1) + math.log(0.04**2 / (2 * math.pi))
    found = predictive(ntkl.HeteroscedasticGaussian(), mean, covariance).log_prob(y)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1)


@pytest.mark.parametrize("name", BOTH)
def test_linearized_and_plug_in_predictions(name: str) -> None:
    posterior, y = fitted(name, 2), draw(7, 4, 2)
    mean, covariance = posterior.latent_moments(X_NEW)
    slopes = vmap(jacrev(lambda f: moments(name, f)[0]))(mean)
    mu, variance = moments(name, mean)
    latent = slopes @ covariance @ slopes.mT
    found = posterior.predict(X_NEW, "blr")
    assert isinstance(found, LinearizedResponse) and found.event_shape == (2,)
    torch.testing.assert_close(found.mean, mu)
    torch.testing.assert_close(found.covariance_matrix, latent + torch.diag_embed(variance))
    normal = torch.distributions.MultivariateNormal(mu, latent + torch.diag_embed(variance))
    torch.testing.assert_close(found.log_prob(y), normal.log_prob(y))
    plain = posterior.predict(X_NEW, "map")
    torch.testing.assert_close(plain.variance, variance)
    torch.testing.assert_close(plain.log_prob(y), torch.distributions.Normal(mu, variance.sqrt()).log_prob(y).sum(1))
    torch.testing.assert_close(posterior.predict(X_NEW, "blr", batch_size=3).log_prob(y), found.log_prob(y))
    with pytest.raises(ntkl.UnsupportedError, match="probit"):
        posterior.predict(X_NEW, "probit")


@pytest.mark.parametrize("name", BOTH)
def test_sampled_weights_and_responses(name: str) -> None:
    posterior, y = fitted(name, 2, "full"), draw(7, 4, 2)
    torch.manual_seed(0)
    drawn = posterior.predict(X_NEW, "nn", samples=50, generator=torch.Generator().manual_seed(3))
    weights = posterior.sample(50, generator=torch.Generator().manual_seed(3))
    network, values = tiny(4), []
    for theta in weights:
        nn.utils.vector_to_parameters(theta, network.parameters())
        mu, variance = moments(name, network(X_NEW).detach())
        values.append(torch.distributions.Normal(mu, variance.sqrt()).log_prob(y).sum(1))
    torch.testing.assert_close(drawn.log_prob(y), torch.stack(values).logsumexp(0) - math.log(50))
    torch.manual_seed(0)
    for method in ("glm", "map", "blr"):
        response = posterior.predict(X_NEW, method)
        samples = response.sample((20000,))
        assert samples.shape == (20000, 4, 2)
        assert ((samples.mean(0) - response.mean).abs() < 6 * (response.variance / 20000).sqrt()).all()
    assert posterior.sample(3, X_NEW).shape == (3, 4, 4)


@pytest.mark.parametrize("method", ["glm", "map", "blr"])
def test_metrics(method: str) -> None:
    """Scores on held-out data, in one batch and in two; an example without any target does not count."""
    posterior, y = fitted("natural", 2, missing="nan"), draw(7, 4, 2)
    y[1, 0] = y[3] = torch.nan
    there = ~y.isnan()
    parts = [posterior.predict(one, method) for one in (X_NEW[:3], X_NEW[3:])]
    for response in (posterior.predict(X_NEW, method), type(parts[0]).join(parts)):
        scores = held_out_scores(response, y)
        assert response.present(y).tolist() == [True, True, True, False]
        assert scores["log_likelihood"] == pytest.approx(response.log_prob(y)[:3].mean().item())
        error = (response.mean - y)[there].square().mean().sqrt().item()
        assert scores["rmse"] == pytest.approx(error) and scores.keys() == {"log_likelihood", "rmse"}


# -------------------------------------------------------------------------------------------- missing targets, weights


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
def test_missing_targets_carry_no_information(name: str, structure: str) -> None:
    """Outputs d and D + d of a missing target y_d have no density, gradient or curvature."""
    y = draw(6, 14, 2)
    y[0, 1] = y[3] = torch.nan
    posterior = fitted(name, 2, structure, missing="nan", y=y)
    likelihood, network = posterior.likelihood, tiny(4)
    f, there = network(X).detach(), ~y.isnan()
    twice = torch.cat([there, there], 1).double()

    def density(f: Tensor, y: Tensor, there: Tensor) -> Tensor:
        return sum(
            by_hand(name)(torch.stack([f[d], f[2 + d]]), y[d].reshape(1)) * there[d] for d in range(2)
        )

    filled = y.nan_to_num(0.0)
    dense = Dense(vmap(density)(f, filled, there), vmap(grad(density))(f, filled, there),
                  fisher(name, f) * twice[:, :, None] * twice[:, None], jacobian(network, X),
                  nn.utils.parameters_to_vector(network.parameters()).detach(),
                  torch.full((44,), 8.0, dtype=torch.float64))
    torch.testing.assert_close(likelihood.residual(f, y), dense.residual, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(likelihood.curvature(f, y), dense.hessian, rtol=1e-11, atol=1e-12)
    assert posterior.likelihood.observed(posterior.targets).tolist() == there.tolist()
    if structure != "kfac":
        assert relative_error(posterior.log_marginal_likelihood(correction=True), dense.evidence(True)) < 1e-9
    answer = posterior.predict(X_NEW, "map").log_prob(torch.tensor([[0.3, torch.nan]] * 4, dtype=torch.float64))
    mu, variance = moments(name, network(X_NEW).detach())
    expected = torch.distributions.Normal(mu, variance.sqrt()).log_prob(torch.tensor(0.3).double())[:, 0]
    torch.testing.assert_close(answer, expected)
    drawn = ntkl.CurvatureType("mc", 3).curvature(likelihood, f, y)
    assert not drawn[3].any() and not drawn[0, 1].any() and drawn[0, 0].any()


def test_weights_count_examples() -> None:
    counts = torch.arange(14) % 3
    y = draw(6, 14, 2)
    weighted = ntkl.laplace(tiny(4), (X, y, counts.double()), ntkl.HeteroscedasticGaussian("natural"), structure="full")
    repeated = (X.repeat_interleave(counts, 0), y.repeat_interleave(counts, 0))
    plain = ntkl.laplace(tiny(4), repeated, ntkl.HeteroscedasticGaussian("natural"), structure="full")
    torch.testing.assert_close(weighted.log_marginal_likelihood(), plain.log_marginal_likelihood())
    natural, data = ntkl.HeteroscedasticGaussian("natural"), (X.repeat(3, 1), y.repeat(3, 1))
    tempered = ntkl.laplace(tiny(4), (X, y), ntkl.Tempered(natural, 3.0), structure="full")
    thrice = ntkl.laplace(tiny(4), data, natural, structure="full")
    torch.testing.assert_close(tempered.log_marginal_likelihood(), thrice.log_marginal_likelihood())
    torch.testing.assert_close(tempered.predict(X_NEW).mean, thrice.predict(X_NEW).mean)


# ------------------------------------------------------------------------------------------------------ other callers


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("tempered", [False, True])
def test_saved_and_loaded(name: str, tempered: bool, tmp_path: Path) -> None:
    likelihood = ntkl.HeteroscedasticGaussian(name, missing="nan")
    likelihood = ntkl.Tempered(likelihood, 2.0) if tempered else likelihood
    posterior = ntkl.laplace(tiny(4), (X, draw(6, 14, 2)), likelihood, structure="kfac")
    posterior.save(tmp_path / "p.pt")
    loaded = ntkl.load(tmp_path / "p.pt", tiny(4))
    assert repr(loaded.likelihood) == repr(posterior.likelihood)
    assert loaded.likelihood.weight == (2.0 if tempered else 1.0)
    torch.testing.assert_close(loaded.log_marginal_likelihood(), posterior.log_marginal_likelihood())
    torch.testing.assert_close(loaded.predict(X_NEW).mean, posterior.predict(X_NEW).mean)


@pytest.mark.parametrize("name", BOTH)
def test_gpytorch(name: str) -> None:
    from gpytorch.mlls import ExactMarginalLogLikelihood

    posterior, y = fitted(name, 2), draw(7, 4, 2)
    gp = ntkl.gp.LaplaceGP(posterior)
    objective = ExactMarginalLogLikelihood(gp.likelihood, gp)
    value = objective(gp(*gp.train_inputs), gp.train_targets)
    assert value.isfinite()
    gp.eval()
    response = gp.likelihood(gp(X_NEW))
    torch.testing.assert_close(response.mean, posterior.predict(X_NEW).mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(response.log_prob(y), posterior.predict(X_NEW).log_prob(y), rtol=1e-6, atol=1e-8)


def test_the_evidence_selects_the_model_that_knows_its_noise() -> None:
    """Noise grows with the input: a network that predicts it has the larger evidence than one of constant noise."""
    x = torch.linspace(0.1, 3, 200, dtype=torch.float64)[:, None]
    y = 0.5 * x + x * draw(8, 200, 1)
    models = {}
    for name, likelihood, width in (
        ("constant", ntkl.Gaussian(3.2), 1), ("natural", ntkl.HeteroscedasticGaussian("natural"), 2),
        ("log variance", ntkl.HeteroscedasticGaussian("log variance"), 2),
    ):
        network = nn.Sequential(nn.Linear(1, width)).double()
        optimizer = torch.optim.LBFGS(network.parameters(), max_iter=200, line_search_fn="strong_wolfe")

        def loss(network: nn.Module = network, likelihood: ntkl.Likelihood = likelihood) -> Tensor:
            decay = sum(p.square().sum() for p in network.parameters()) / 2
            return decay - likelihood.log_prob(network(x), y).sum()

        def closure(optimizer=optimizer, loss=loss) -> Tensor:
            optimizer.zero_grad()
            value = loss()
            value.backward()
            return value

        optimizer.step(closure)
        models[name] = ntkl.laplace(network, (x, y), likelihood)
    scores = {row.name: row.evidence for row in ntkl.compare_models(models, conditional="none").rows}
    assert scores["log variance"] > scores["constant"] + 10 and scores["natural"] > scores["constant"] + 10


def test_training_and_hyperparameters() -> None:
    network = tiny(4)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    result = ntkl.train_with_evidence(network, (X, draw(6, 14, 2)), ntkl.HeteroscedasticGaussian("natural"),
                                      optimizer=optimizer, epochs=4)
    assert result.posterior.log_marginal_likelihood().isfinite()
    posterior = fitted("log variance", 2)
    before = posterior.log_marginal_likelihood().item()
    posterior.fit_hyperparameters()
    assert posterior.log_marginal_likelihood().item() > before
    (gradient,) = torch.autograd.grad(posterior.log_marginal_likelihood(), posterior.prior.log_precision)
    assert gradient.abs().max() < 1e-2


def test_the_page_of_explanations(tmp_path: Path) -> None:
    page = ntkl.explore(fitted("natural", 2), X_NEW, targets=draw(7, 4, 2))
    page.write(tmp_path / "page.html")
    assert "output 3" in (tmp_path / "page.html").read_text()


# ----------------------------------------------------------------------------------------------------------- refusals


def test_what_is_refused() -> None:
    likelihood = ntkl.HeteroscedasticGaussian("natural")
    with pytest.raises(ntkl.NetworkError, match=r"two outputs per response .* \(N, 2D\); got 3 outputs"):
        ntkl.laplace(tiny(3), (X, draw(6, 14, 1)), likelihood)
    with pytest.raises(ntkl.NetworkError, match="got 1 output"):
        ntkl.laplace(tiny(1), (X, draw(6, 14, 1)), likelihood)
    with pytest.raises(ntkl.TargetError, match=r"targets of shape \(14, 2\); got shape \(14, 4\)"):
        ntkl.laplace(tiny(4), (X, draw(6, 14, 4)), likelihood)
    with pytest.raises(ntkl.TargetError, match=r"targets of shape \(14, 1\) or \(14,\); got shape \(14, 2\)"):
        ntkl.laplace(tiny(2), (X, draw(6, 14, 2)), likelihood)
    with pytest.raises(ntkl.NonFiniteError, match=r'HeteroscedasticGaussian\(missing="nan"\)'):
        ntkl.laplace(tiny(2), (X, torch.full((14,), torch.nan).double()), likelihood)
    with pytest.raises(ntkl.HyperparameterError, match="parametrization among"):
        ntkl.HeteroscedasticGaussian("variance")
    with pytest.raises(ntkl.HyperparameterError, match='missing="nan"'):
        ntkl.HeteroscedasticGaussian(missing="none")
    posterior = fitted("natural", 2)
    with pytest.raises(ntkl.DataError, match="a response from 0 to 1; got 2"):
        posterior.explain(X_NEW, by="probability", output=2)
    with pytest.raises(ntkl.TargetError, match=r"shape \(4, 2\)"):
        posterior.predict(X_NEW).log_prob(torch.zeros(4, 4).double())


def test_a_target_whose_variance_lies_near_those_that_are_refused() -> None:
    """Newton steps towards it are halved where they leave the range of float64."""
    mean, covariance = torch.zeros(2, 2).double(), torch.diag(torch.tensor([1e-4, 150.0**2]).double()).expand(2, 2, 2)
    y = torch.tensor([[1e150], [3.0]], dtype=torch.float64)
    found = predictive(ntkl.HeteroscedasticGaussian(), mean, covariance).log_prob(y)
    s = torch.linspace(-709.0, 709.0, 1_000_001, dtype=torch.float64)
    terms = -0.5 * (s + (y**2).log().sub(s).exp() + math.log(2 * math.pi) + (s / 150.0) ** 2)
    expected = terms.logsumexp(1) + math.log(1418e-6 / (150.0 * (2 * math.pi) ** 0.5))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.3)
