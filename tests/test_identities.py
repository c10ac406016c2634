"""Identities 1, 2, 6, 7 and 8 of the mathematics, over networks x likelihoods x priors, at 1e-9 and 1e-8."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import ntk_laplace as ntkl
from exact_cases import CASES, STRUCTURES, TURNS, admits, fit, ids, trained, truth
from pairwise import one_each, pairwise
from reference import Dense, difference, differentiate, jacobian, join, outputs, relative_error, take
from reference_refit import Linearized
from registry import LIKELIHOODS, NETWORKS, PRIORS, problem, targets
from registry_cases import derivatives, jacobians, offered, tolerance
from streams import loader

# the fallback announces itself; that it does so, and by name, is held in test_factors
pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")


def names(value) -> str:
    return value if isinstance(value, str) else ids(value)


# one of the two spaces for each case; with this seed, every network and every pair of likelihood and prior has both
BOTH = one_each(CASES, STRUCTURES, seed=1)


@pytest.mark.parametrize(("case", "structure"), BOTH, ids=names)
def test_evidence_of_both_spaces_is_the_dense_one(case, structure):
    """Identity 1, and 2: the evidence with correction is Gaussian-process regression on pseudo-targets."""
    reference, limit = truth(*case), tolerance(case[0], 1e-9)
    posterior = fit(*case, structure)
    assert relative_error(posterior.log_marginal_likelihood(), reference.evidence()) < limit
    corrected = posterior.log_marginal_likelihood(correction=True)
    assert relative_error(corrected, reference.evidence(correction=True)) < limit
    assert relative_error(corrected, reference.regression_evidence()) < limit


@pytest.mark.parametrize("case", TURNS, ids=ids)
def test_moments_of_both_spaces_are_the_dense_ones(case):
    """Identity 1: mean, joint covariance and blocks of f at new inputs."""
    reference, limit = truth(*case), tolerance(case[0], 1e-8)
    x_new, jac = problem(case[0]).x_new, jacobians(case[0])[1]
    f, covariance = outputs(problem(case[0]).network, x_new), reference.latent_covariance(jac)
    n, c = f.shape
    blocks = torch.stack([covariance[i * c : i * c + c, i * c : i * c + c] for i in range(n)])
    for structure in STRUCTURES:
        posterior = fit(*case, structure)
        joint = posterior.latent(x_new)
        assert relative_error(joint.mean, f) < limit
        assert relative_error(joint.covariance_matrix, covariance) < limit
        mean, variance = posterior.latent_moments(x_new)
        assert relative_error(mean, f) < limit
        assert relative_error(variance, blocks) < limit


# in this one, rounding of a large objective hides the last steps' gain from a line search
HARD = ("conv_padding", "poisson", "parameter")


@pytest.mark.parametrize(
    ("case", "structure"), [*one_each(TURNS, STRUCTURES), *((HARD, each) for each in STRUCTURES)], ids=names
)
def test_mean_of_the_refitted_linear_model(case, structure):
    """f + J(θ̄ - θ*) away from the MAP, under every kind of prior mean, θ̄ by dense Newton steps to the optimum."""
    problem_, reference = problem(case[0]), truth(*case)
    y = targets(LIKELIHOODS[case[1]], problem_)
    y = y[:, None] if y.is_floating_point() and y.ndim == 1 else y
    f, (jac, jac_new) = outputs(problem_.network, problem_.x), jacobians(case[0])
    model = Linearized(LIKELIHOODS[case[1]].log_density, f, jac, reference.precision, reference.offset)
    move, _ = model.refit(y, torch.ones(len(f)).double(), None)
    mean = outputs(problem_.network, problem_.x_new) + jac_new @ move
    found = fit(*case, structure).latent(problem_.x_new, mean="posterior").mean
    assert relative_error(found, mean) < tolerance(case[0], 1e-8)


def test_the_registry_covers_what_it_claims():
    assert len(NETWORKS) >= 16
    table = {(n, likelihood, prior) for n in NETWORKS for likelihood in offered(n) for prior in PRIORS}
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert {(case[left], case[right]) for case in CASES} == {(case[left], case[right]) for case in table}
    assert set(CASES) <= table
    for key in (slice(0, 1), slice(1, 3)):
        every = {(case[key], each) for case in CASES for each in STRUCTURES}
        assert {(case[key], each) for case, each in BOTH} == every
    assert {case[1:] for case in TURNS} >= {(likelihood, prior) for likelihood in LIKELIHOODS for prior in PRIORS}
    p = LIKELIHOODS["categorical"].response(outputs(problem("saturated").network, problem("saturated").x))
    assert 1e-14 < p.min() < 2e-12
    assert 1 in targets(LIKELIHOODS["categorical"], problem("saturated")), "no label hits the improbable class"


SOME = [case for case in CASES if case[0] in ("deep_mlp", "saturated", "scalar_outputs")]


@pytest.mark.parametrize("case", SOME, ids=ids)
def test_references_agree_with_each_other(case):
    """The references are derived apart, so a mistake in one of them shows here."""
    reference = truth(*case)
    assert relative_error(reference.regression_evidence(), reference.evidence(correction=True)) < 1e-11
    if case[1] == "gaussian":
        assert relative_error(reference.regression_evidence_literally(), reference.evidence(correction=True)) < 1e-11


# ------------------------------------------------------------------------------------------------------ known in full


@pytest.mark.parametrize("structure", STRUCTURES)
def test_bayesian_linear_regression(structure):
    """Linear model, Gaussian noise: the evidence is the density of y, wherever the weights stand."""
    case = problem("linear_model")
    precision, mean = PRIORS["parameter"].dense(case)
    y, noise = targets(LIKELIHOODS["gaussian"], case), 0.3
    jac = jacobians("linear_model")[0].flatten(0, 1)
    marginal = torch.distributions.MultivariateNormal(
        jac @ mean, (jac / precision) @ jac.T + noise * torch.eye(len(jac), dtype=torch.float64)
    )
    posterior = fit("linear_model", "gaussian", "parameter", structure)
    evidence = posterior.log_marginal_likelihood(correction=True)
    assert relative_error(evidence, marginal.log_prob(y.reshape(-1))) < 1e-9


NOISES = {
    "output": torch.tensor([0.2, 0.7, 1.3]),
    "point": 0.2 + torch.rand(7, generator=torch.Generator().manual_seed(1)),
    "point and output": 0.2 + torch.rand(7, 3, generator=torch.Generator().manual_seed(2)),
    "covariance": torch.tensor([[1.0, 0.3, 0.0], [0.3, 0.5, 0.1], [0.0, 0.1, 0.4]]),
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("noise", NOISES)
def test_noise_of_every_shape(noise, structure):
    """Noise per output, per point, per both, and as a covariance between outputs."""
    case, value = problem("far_from_optimum"), NOISES[noise].double()
    y, f = targets(LIKELIHOODS["gaussian"], case), outputs(case.network, case.x)
    per_example = {
        "output": lambda n: torch.diag(value),
        "point": lambda n: value[n] * torch.eye(3, dtype=torch.float64),
        "point and output": lambda n: torch.diag(value[n]),
        "covariance": lambda n: value,
    }[noise]
    covariance = torch.stack([per_example(n) for n in range(7)])
    inverse = torch.linalg.inv(covariance)
    residual = torch.einsum("ncd,nd->nc", inverse, y - f)
    log_prob = torch.distributions.MultivariateNormal(f, covariance).log_prob(y)
    precision, mean = PRIORS["tensor"].dense(case)
    reference = Dense(log_prob, residual, inverse, jacobians("far_from_optimum")[0], case.theta - mean, precision)
    prior = PRIORS["tensor"].build(case)
    posterior = ntkl.laplace(case.network, (case.x, y), ntkl.Gaussian(noise=value), prior=prior, structure=structure)
    assert relative_error(posterior.log_marginal_likelihood(), reference.evidence()) < 1e-9
    assert relative_error(posterior.log_marginal_likelihood(True), reference.regression_evidence_literally()) < 1e-9
    variance = reference.latent_covariance(jacobians("far_from_optimum")[1])
    assert relative_error(posterior.latent(case.x_new).covariance_matrix, variance) < 1e-8


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_at_the_map_the_correction_vanishes(likelihood, structure):
    """[T20] Theorem 3.3 without correction at the MAP, and one mean instead of two."""
    case, y = trained(likelihood)
    model, prior = LIKELIHOODS[likelihood].build(), PRIORS["scalar"].build(case)
    posterior = ntkl.laplace(case.network, (case.x, y), model, prior=prior, structure=structure)
    f, jac = outputs(case.network, case.x), jacobian(case.network, case.x)
    derived = differentiate(LIKELIHOODS[likelihood].log_density, f, y)
    reference = Dense(*derived, jac, case.theta, PRIORS["scalar"].dense(case)[0])
    assert reference.gradient.abs().max() < 1e-9, "the network did not reach its MAP"
    assert relative_error(posterior.log_marginal_likelihood(), reference.regression_evidence()) < 1e-9
    assert relative_error(posterior.log_marginal_likelihood(True), posterior.log_marginal_likelihood()) < 1e-9
    means = [posterior.latent(case.x_new, mean=mean).mean for mean in ("map", "posterior")]
    assert relative_error(means[0], means[1]) < 1e-8


# -------------------------------------------------------------------------------------------------- order and batches


# one of the two for each network; each with both structures
@pytest.mark.parametrize(
    "case", [(*case, *rest) for case, *rest in one_each(TURNS, STRUCTURES, ("permuted", "shuffled"))], ids=ids
)
def test_order_and_batches_change_nothing(case):
    """Identity 6: permuted data in batches of four (the last is smaller), and a loader that shuffles each pass."""
    *fitted, way = case
    network, likelihood, prior, structure = fitted
    x, y = problem(network).x, targets(LIKELIHOODS[likelihood], problem(network))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(4))
    if way == "permuted":
        data = loader(take(x, order), y[order], batch_size=4)
    else:
        data = loader(x, y, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(5))
    posterior = ntkl.laplace(
        problem(network).network, data, LIKELIHOODS[likelihood].build(),
        prior=PRIORS[prior].build(problem(network)), structure=structure,
        settings=ntkl.Settings(batch_size=data.batch_size),  # else small batches are read together
    )
    want = answers(fit(*fitted), problem(network).x_new)
    for found, expected in zip(answers(posterior, problem(network).x_new), want, strict=True):
        assert relative_error(found, expected) < tolerance(network, 1e-9)


def answers(posterior, x_new) -> list[Tensor]:
    evidences = [posterior.log_marginal_likelihood(), posterior.log_marginal_likelihood(correction=True)]
    return [*evidences, *posterior.latent_moments(x_new, mean="posterior")]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_conditioning_in_two_steps_is_conditioning_in_one(likelihood, structure):
    """Identity 6: the posterior given three points, conditioned by hand on four more, is that given all seven."""
    case = problem("far_from_optimum")
    y, prior = targets(LIKELIHOODS[likelihood], case), PRIORS["tensor"].build(case)
    first = ntkl.laplace(
        case.network, (case.x[:3], y[:3]), LIKELIHOODS[likelihood].build(), prior=prior, structure=structure
    )
    joint = first.latent(join(case.x_new, case.x[3:])).covariance_matrix
    new = 3 * len(case.x_new)
    # V - V_*M Λ_M (I + V_MM Λ_M)⁻¹ V_M*
    curvature = torch.block_diag(*derivatives("far_from_optimum", likelihood)[2][3:])
    across, among = joint[:new, new:], joint[new:, new:]
    inner = torch.eye(len(among), dtype=torch.float64) + among @ curvature
    second = joint[:new, :new] - across @ curvature @ torch.linalg.solve(inner, across.T)
    both = fit("far_from_optimum", likelihood, "tensor", structure).latent(case.x_new).covariance_matrix
    assert relative_error(both, second) < 1e-9


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", ["bernoulli", "categorical", "poisson"])
def test_points_without_curvature_change_nothing(likelihood, structure):
    """Identity 7: a point whose Λ is exactly zero adds its log density to the evidence and nothing else."""
    case = problem("linear_model")
    y = targets(LIKELIHOODS[likelihood], case)
    # two far points at which every p (1 - p), or every rate, is zero in float64
    side = torch.linalg.lstsq(case.network.weight.detach(), torch.tensor([-1.0, -2.0, -3.0]).double()[:, None]).solution
    far = 2000.0 * side.T.expand(2, -1)
    label = torch.tensor([0, 1]) if likelihood == "categorical" else torch.tensor([[0.0] * 3, [1.0] * 3]).double()
    density = LIKELIHOODS[likelihood].log_density
    f = outputs(case.network, far)
    log_prob, _, curvature = differentiate(density, f, label)
    assert curvature.abs().max() == 0
    prior = [PRIORS["layer"].build(case) for _ in range(2)]
    both = torch.cat([case.x, far]), torch.cat([y, label])
    less = ntkl.laplace(case.network, (case.x, y), LIKELIHOODS[likelihood].build(), prior=prior[0], structure=structure)
    more = ntkl.laplace(case.network, both, LIKELIHOODS[likelihood].build(), prior=prior[1], structure=structure)
    added = more.log_marginal_likelihood() - less.log_marginal_likelihood()
    assert relative_error(added, log_prob.sum()) < 1e-9
    for verb in ("covariance_matrix", "mean"):
        assert relative_error(getattr(more.latent(case.x_new), verb), getattr(less.latent(case.x_new), verb)) < 1e-12
    more.log_marginal_likelihood().backward()
    less.log_marginal_likelihood().backward()
    assert relative_error(more.prior.log_precision.grad, less.prior.log_precision.grad) < 1e-9
    for one, two in zip(more.likelihood.parameters(), less.likelihood.parameters(), strict=True):
        assert one.grad.isfinite().all() and two.grad.isfinite().all()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_more_data_is_never_less_certain(structure):
    """Conditioning shrinks the covariance, so an eigenvalue of the difference below zero is a mistake."""
    case = problem("deep_mlp")
    y = targets(LIKELIHOODS["categorical"], case)
    covariances = []
    for n in (3, 7):
        posterior = ntkl.laplace(case.network, (case.x[:n], y[:n]), ntkl.Categorical(), structure=structure)
        covariances.append(posterior.latent(case.x_new).covariance_matrix)
    values = torch.linalg.eigvalsh(covariances[0] - covariances[1])
    assert values.min() > -1e-12 * values.max()
    assert torch.equal(join(case.x[:3], case.x[3:]), case.x)


# ---------------------------------------------------------------------------------------------------------- gradients


def hyperparameters(posterior) -> list[Tensor]:
    return [*posterior.prior.parameters(), *posterior.likelihood.parameters()]


# the corrected evidence in both spaces, in every hyperparameter that a pair of likelihood and prior has
GRADIENTS = pairwise(
    ("saturated", "deep_mlp", "scalar_outputs", "transformer_tied", "frozen_part"), LIKELIHOODS, PRIORS,
    (False, True), STRUCTURES, allowed=admits,
)


@pytest.mark.parametrize(("network", "likelihood", "prior", "correction", "structure"), GRADIENTS)
def test_evidence_gradients_are_finite_differences(network, likelihood, prior, correction, structure):
    """Identity 8: in log precisions of every grouping, log noise and log temperature."""
    data = problem(network).x, targets(LIKELIHOODS[likelihood], problem(network))
    posterior = ntkl.laplace(
        problem(network).network, data, LIKELIHOODS[likelihood].build(),
        prior=PRIORS[prior].build(problem(network)), structure=structure,
    )
    variables = hyperparameters(posterior)
    gradients = torch.autograd.grad(posterior.log_marginal_likelihood(correction), variables)

    def value() -> Tensor:
        return posterior.log_marginal_likelihood(correction)

    for variable, gradient in zip(variables, gradients, strict=True):
        generator = torch.Generator().manual_seed(6)
        random = torch.randn(variable.shape, generator=generator, dtype=torch.float64)
        units = torch.eye(variable.numel(), dtype=torch.float64).reshape(-1, *variable.shape)
        for direction in [random / random.norm(), units[-1]][: variable.numel()]:
            slope = difference(value, variable, direction)
            scale = gradient.norm().clamp_min(1e-3)
            assert ((gradient * direction).sum() - slope).abs() < 1e-7 * scale


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_every_change_of_a_hyperparameter_is_seen(likelihood, structure):
    """Changed in place after the fit: every later answer is that of a fresh fit with the new values."""
    case = problem("deep_mlp")
    y = targets(LIKELIHOODS[likelihood], case)
    late = {"gaussian": lambda: ntkl.Gaussian(noise=0.9), "categorical": lambda: ntkl.Categorical(temperature=0.6)}

    def fresh_fit(model, precision):
        prior = ntkl.GaussianPrior(precision=precision, groups="layer")
        return ntkl.laplace(case.network, (case.x, y), model, prior=prior, structure=structure)

    precisions = torch.tensor([0.3, 2.0, 5.0, 0.8], dtype=torch.float64)
    posterior = fresh_fit(LIKELIHOODS[likelihood].build(), 1.0)
    before = posterior.log_marginal_likelihood(), posterior.latent(case.x_new)
    assert torch.equal(before[0], posterior.log_marginal_likelihood())
    with torch.no_grad():
        posterior.prior.log_precision.copy_(precisions.log())
        for name, parameter in late[likelihood]().named_parameters():
            dict(posterior.likelihood.named_parameters())[name].copy_(parameter)
    want = fresh_fit(late[likelihood](), precisions)
    assert relative_error(posterior.log_marginal_likelihood(), want.log_marginal_likelihood()) < 1e-12
    assert relative_error(posterior.log_marginal_likelihood(), before[0]) > 1e-3
    for mean in ("map", "posterior"):
        found, expected = (each.latent(case.x_new, mean=mean) for each in (posterior, want))
        assert relative_error(found.mean, expected.mean) < 1e-11
        assert relative_error(found.covariance_matrix, expected.covariance_matrix) < 1e-11
    assert relative_error(posterior.latent_moments(case.x_new)[1], want.latent_moments(case.x_new)[1]) < 1e-11
    found, expected = (each.predict(case.x_new, method="map").mean for each in (posterior, want))
    assert relative_error(found, expected) < 1e-11
    assert math.isfinite(float(before[1].mean.sum()))
