"""The posterior beyond the identities: other curvatures, choices of parameters, chunks, precision, samples."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ntk_laplace as ntkl
from exact_cases import fit, truth
from ntk_laplace.runtime.meter import PeakMemory
from pairwise import pairwise
from reference import Dense, outputs, relative_error
from registry import LIKELIHOODS, PRIORS, problem, targets
from registry_cases import derivatives, jacobians

STRUCTURES = ("gp", "full")
CASE = "far_from_optimum"


def data(likelihood: str, network: str = CASE) -> tuple[Tensor, Tensor]:
    return problem(network).x, targets(LIKELIHOODS[likelihood], problem(network))


# ------------------------------------------------------------------------------------------ one eigendecomposition


@pytest.mark.parametrize(("likelihood", "prior", "structure"), pairwise(LIKELIHOODS, PRIORS, STRUCTURES))
def test_the_eigendecomposition_is_the_cholesky_factorization(likelihood, prior, structure):
    """Every precision scaled at once: the curve from one spectrum against a factorization for each factor."""
    posterior = ntkl.laplace(
        problem(CASE).network, data(likelihood), LIKELIHOODS[likelihood].build(),
        prior=PRIORS[prior].build(problem(CASE)), structure=structure,
    )
    factors = torch.logspace(-3, 3, 7, dtype=torch.float64)
    curve = posterior.evidence_curve(factors)
    precision = posterior.prior.precision.detach().clone()
    for factor, found in zip(factors, curve, strict=True):
        posterior.prior.precision = precision * factor
        assert relative_error(found, posterior.log_marginal_likelihood()) < 1e-9


# --------------------------------------------------------------- gradients in what a likelihood learns, both spaces


class Sharper(ntkl.Categorical):
    """A curvature of its own."""

    def root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        return super().root(f, y) * (1 + self.log_temperature.exp()).sqrt()

    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        return super().curvature(f, y) * (1 + self.log_temperature.exp())


def moving(name: str, curvature: str = "ggn") -> ntkl.Likelihood:
    c = problem(CASE).case.outputs
    mixing = torch.eye(c).double() + 0.3 * torch.ones(c, c)
    decades = 6 if curvature == "ggn" else 2  # gradients go with 1/σ², and their squares with its square
    return {
        "nearly certain": lambda: ntkl.Categorical(temperature=0.02),
        "subclass": lambda: Sharper(temperature=1.3),
        "tempered": lambda: ntkl.Tempered(ntkl.Categorical(temperature=1.3), 2.5),
        "noise per output": lambda: ntkl.Gaussian(torch.logspace(-decades, decades, c).double(), "output"),
        "covariance": lambda: ntkl.Gaussian(mixing, "covariance"),
        "noise per point": lambda: ntkl.Gaussian(torch.linspace(0.1, 3.0, len(problem(CASE).x)).double(), "point"),
    }[name]()


@pytest.mark.parametrize(("name", "precisions", "curvature", "weights"), pairwise(
    ["nearly certain", "subclass", "tempered", "noise per output", "covariance", "noise per point"],
    [True, False], ["ggn", "ef", "mc"], [None, (0.0, 2.5)],
))
def test_gradients_of_function_space_are_those_of_weight_space(name, precisions, curvature, weights):
    """V_nn through a left inverse of S and the blocks of B⁻¹, against V_nn from H⁻¹; entries of their own size."""
    kind = "categorical" if isinstance(moving(name), (ntkl.Categorical, ntkl.Tempered)) else "gaussian"
    found = []
    for structure in STRUCTURES:
        likelihood = moving(name, curvature)
        posterior = ntkl.laplace(
            problem(CASE).network, data(kind), likelihood, PRIORS["tensor"].build(problem(CASE)), structure, curvature
        )
        if weights is not None:
            posterior = posterior.reweight([0, 3], list(weights))
        variables = [*likelihood.parameters(), *(posterior.prior.parameters() if precisions else ())]
        found.append(torch.autograd.grad(posterior.log_det(), variables, allow_unused=True))
    for own, want in zip(*found, strict=True):
        torch.testing.assert_close(own, want, rtol=1e-8, atol=1e-12)


def test_factors_of_the_curve_are_positive():
    posterior = ntkl.laplace(problem(CASE).network, data("gaussian"), LIKELIHOODS["gaussian"].build())
    with pytest.raises(ntkl.HyperparameterError, match=r"positive finite factors; got .*-1.*logarithms"):
        posterior.evidence_curve(torch.tensor([1.0, -1.0]))


# ------------------------------------------------------------------------------------------------ other curvatures


@pytest.mark.parametrize("structure", [*STRUCTURES, "kfac"])
@pytest.mark.parametrize("correction", [False, True])
def test_the_terms_of_the_evidence(structure, correction):
    """Each term against the dense reference, their sum against the value, and the gradient through all of them."""
    want = truth(CASE, "categorical", "tensor")
    posterior = ntkl.laplace(
        problem(CASE).network, data("categorical"), LIKELIHOODS["categorical"].build(),
        prior=PRIORS["tensor"].build(problem(CASE)), structure=structure,
    )
    found = posterior.evidence(correction)
    assert torch.equal(found.value, posterior.log_marginal_likelihood(correction)) and found.standard_error == 0.0
    assert relative_error(found.log_likelihood, want.log_prob.sum()) < 1e-12
    energy = (want.precision * want.offset.square()).sum()
    assert relative_error(found.log_prior, -0.5 * energy) < 1e-12
    parts = found.log_likelihood + found.log_prior - 0.5 * found.log_det + found.correction
    assert relative_error(parts, found.value) < 1e-12
    (whole,), (summed,) = (
        torch.autograd.grad(v, [posterior.prior.log_precision], retain_graph=True) for v in (found.value, parts)
    )
    assert relative_error(summed, whole) < 1e-12
    assert bool(found.correction > 0) == correction
    if structure == "kfac":
        assert (found.lower, found.upper) == (-float("inf"), float("inf"))
        return
    expected = want.regression_evidence() if correction else want.evidence()
    assert relative_error(found.value, expected) < 1e-9
    assert found.lower == found.upper == float(found)
    assert f"{float(found):,.3f} nats" in str(found) and ("correction" in str(found)) == correction


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_empirical_fisher_has_the_gradients_as_root(likelihood, structure):
    """Λ replaced by r rᵀ, everything else as it was."""
    log_prob, residual, _ = derivatives(CASE, likelihood)
    exact = truth(CASE, likelihood, "tensor")
    fisher = torch.einsum("nc,nd->ncd", residual, residual)
    reference = Dense(log_prob, residual, fisher, exact.jac, exact.offset, exact.precision)
    posterior = ntkl.laplace(
        problem(CASE).network, data(likelihood), LIKELIHOODS[likelihood].build(),
        prior=PRIORS["tensor"].build(problem(CASE)), structure=structure, curvature="ef",
    )
    assert relative_error(posterior.log_marginal_likelihood(), reference.evidence()) < 1e-9
    assert relative_error(posterior.log_marginal_likelihood(True), reference.regression_evidence()) < 1e-9
    covariance = reference.latent_covariance(jacobians(CASE)[1])
    assert relative_error(posterior.latent(problem(CASE).x_new).covariance_matrix, covariance) < 1e-8


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_monte_carlo_fisher(likelihood):
    """The same draws in both spaces, and the curvature itself on average."""
    model, root = LIKELIHOODS[likelihood].build(), ntkl.CurvatureType("mc", samples=1_500, seed=3)
    f, y = outputs(problem(CASE).network, problem(CASE).x), data(likelihood)[1]
    found = root.curvature(model, f, model.targets(y, *f.shape))
    assert relative_error(found, derivatives(CASE, likelihood)[2]) < 0.2
    seeds = [ntkl.CurvatureType("mc", 2, seed).curvature(model, f, model.targets(y, *f.shape)) for seed in (3, 5)]
    assert relative_error(*seeds) > 0.01
    evidences = [
        ntkl.laplace(
            problem(CASE).network, data(likelihood), LIKELIHOODS[likelihood].build(), structure=structure,
            curvature=ntkl.CurvatureType("mc", samples=2, seed=5),
        ).log_marginal_likelihood()
        for structure in STRUCTURES
    ]
    assert relative_error(evidences[0], evidences[1]) < 1e-9


@pytest.mark.parametrize("curvature", ["ggn", "ef", "mc"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_an_example_that_counts_three_times_has_three_times_the_curvature(likelihood, curvature):
    model, root = LIKELIHOODS[likelihood].build(), ntkl.CurvatureType(curvature, samples=2)
    f, y = outputs(problem(CASE).network, problem(CASE).x), data(likelihood)[1]
    arguments = f, model.targets(y, *f.shape)
    own = root.root(ntkl.Tempered(model, 3.0), *arguments)
    for found in (own @ own.mT, root.curvature(ntkl.Tempered(model, 3.0), *arguments)):
        assert relative_error(found, 3.0 * root.curvature(model, *arguments)) < 1e-12


# ----------------------------------------------------------------------------------------- choices, auto, dtype

CHOICES = {
    "last layer": ("last_layer", [4, 5]),
    "names": (["0.bias", "2.weight"], [1, 2]),
    "a module": (["2"], [2, 3]),
    "one name": ("4.weight", [4]),
    "a predicate": (lambda name, parameter: parameter.ndim == 1, [1, 3, 5]),
    "a generator": ((name for name in ("4.bias", "0.weight")), [0, 5]),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_parameters_chosen_by_the_caller(choice):
    """A subset of the columns of J and of the prior, in the network's order whatever the order of the names."""
    wanted, kept = CHOICES[choice]
    sizes = [p.numel() for p in problem(CASE).parameters.values()]
    columns = torch.cat([torch.arange(sum(sizes[:i]), sum(sizes[: i + 1])) for i in kept])
    log_prob, residual, hessian = derivatives(CASE, "categorical")
    theta = problem(CASE).theta[columns]
    jac = jacobians(CASE)[0][..., columns]
    reference = Dense(log_prob, residual, hessian, jac, theta, torch.full_like(theta, 0.7))
    door = ntkl.laplace(
        problem(CASE).network, data("categorical"), LIKELIHOODS["categorical"].build(),
        prior=ntkl.GaussianPrior(0.7), parameters=wanted,
    )
    assert door.num_parameters == len(columns)
    assert door.network.names == [problem(CASE).names[i] for i in kept]
    assert relative_error(door.log_marginal_likelihood(correction=True), reference.evidence(True)) < 1e-9
    covariance = reference.latent_covariance(jacobians(CASE)[1][..., columns])
    assert relative_error(door.latent(problem(CASE).x_new).covariance_matrix, covariance) < 1e-8


@pytest.mark.parametrize(("network", "chosen"), [("linear_model", "full"), ("cnn_groups", "gp")])
def test_auto_takes_the_smaller_matrix_and_gives_the_reason(network, chosen):
    posterior = ntkl.laplace(problem(network).network, data("gaussian", network), ntkl.Gaussian(), structure="auto")
    assert posterior.structure == chosen
    for text in ("auto", "P = ", chosen):
        assert text in posterior.reason
    assert posterior.reason in repr(posterior)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_single_precision_algebra_is_close_and_single(structure):
    posterior = ntkl.laplace(
        problem(CASE).network, data("categorical"), LIKELIHOODS["categorical"].build(),
        prior=PRIORS["tensor"].build(problem(CASE)), structure=structure, dtype=torch.float32,
    )
    want = truth(CASE, "categorical", "tensor")
    assert posterior.f.dtype == posterior.latent_moments(problem(CASE).x_new)[1].dtype == torch.float32
    assert relative_error(posterior.log_marginal_likelihood(), want.evidence()) < 1e-4
    covariance = want.latent_covariance(jacobians(CASE)[1])
    assert relative_error(posterior.latent(problem(CASE).x_new).covariance_matrix, covariance) < 1e-3


# ---------------------------------------------------------------------------------------------------------- chunks

BUFFERS = ("WORKING_SET_BYTES", "FULL_ROWS_BYTES", "COVARIANCE_BYTES", "TILE_BYTES", "INVERSE_COLUMNS")


def answers(posterior) -> list[Tensor]:
    evidence = posterior.log_marginal_likelihood(correction=True)
    variables = [*posterior.prior.parameters(), *posterior.likelihood.parameters()]
    gradients = torch.autograd.grad(evidence, variables)
    x = problem(CASE).x_new
    joint = posterior.latent(x, mean="posterior")
    return [evidence, *gradients, joint.mean, joint.covariance_matrix, posterior.latent_moments(x)[1]]


@pytest.mark.slow
@pytest.mark.parametrize(("prior", "structure", "batch_size"), pairwise(PRIORS, STRUCTURES, (None, 1, 3)))
def test_chunks_of_any_size_change_nothing(prior, structure, batch_size, monkeypatch):
    """Identity 6: every buffer as small as it goes, one row, one panel, one example at a time."""
    want = answers(fit(CASE, "categorical", prior, structure))
    for name in BUFFERS:
        monkeypatch.setattr(f"ntk_laplace.runtime.tuning.{name}", 1)
    small = ntkl.laplace(
        problem(CASE).network, data("categorical"), LIKELIHOODS["categorical"].build(),
        prior=PRIORS[prior].build(problem(CASE)), structure=structure,
        settings=ntkl.Settings(batch_size=batch_size, progress=False),
    )
    for found, expected in zip(answers(small), want, strict=True):
        assert relative_error(found, expected) < 1e-9


# --------------------------------------------------------------------------------------------------------- samples


def units(*shape: int | torch.Size, **options: object) -> Tensor:
    """What stands for random numbers: with one draw per unit vector, the root of the covariance itself."""
    shape = torch.Size(shape[0] if len(shape) == 1 else shape)
    return torch.eye(math.prod(shape[:-1]), shape[-1], dtype=torch.float64).reshape(shape)


def test_weight_samples_have_the_covariance_of_the_weights(monkeypatch):
    posterior, reference = fit(CASE, "poisson", "layer", "full"), truth(CASE, "poisson", "layer")
    p = posterior.num_parameters
    monkeypatch.setattr(torch, "randn", units)
    root = posterior.sample(p) - problem(CASE).theta
    assert relative_error(root.T @ root, reference.covariance) < 1e-9


@pytest.mark.parametrize("prior", PRIORS)
def test_weight_samples_of_function_space_have_the_covariance_of_the_weights(prior, monkeypatch):
    """Matheron's rule is linear in its random numbers: one unit vector for each gives a root of the covariance."""
    posterior, reference = fit(CASE, "poisson", prior, "gp"), truth(CASE, "poisson", prior)
    p, noises = posterior.num_parameters, posterior.posterior_precision.root[:, 0, :].numel()
    calls = iter((0, p))

    def unit(*shape: int, **options: object) -> Tensor:
        assert shape[0] == p + noises
        return torch.eye(shape[0], dtype=torch.float64)[:, next(calls) :][:, : shape[1]]

    monkeypatch.setattr(torch, "randn", unit)
    root = posterior.sample(p + noises) - problem(CASE).theta
    assert relative_error(root.T @ root, reference.covariance) < 1e-9


@pytest.mark.parametrize("method", ["glm", "blr", "map", "nn"])
def test_the_mean_of_a_prediction(method: str) -> None:
    """`mean="posterior"` moves every prediction that plugs in or averages around it; weight samples have none."""
    posterior, x = fit(CASE, "gaussian", "layer", "full"), problem(CASE).x_new
    with pytest.raises(ntkl.UnsupportedError, match='"map"'):
        posterior.predict(x, method, mean="mode")
    if method == "nn":
        with pytest.raises(ntkl.UnsupportedError, match="samples the weights"):
            posterior.predict(x, method, mean="posterior")
        return
    found = posterior.predict(x, method, mean="posterior").mean
    assert relative_error(found, posterior.latent(x, mean="posterior").mean) < 1e-9
    assert not torch.allclose(found, posterior.predict(x, method).mean)


def test_outputs_of_weight_samples_are_made_in_pieces(monkeypatch):
    """Seven draws, three at a time: each is the network itself with those weights."""
    posterior, x = fit(CASE, "poisson", "layer", "full"), problem(CASE).x_new
    draws = posterior.sample(7)
    given = iter(draws)
    theta = problem(CASE).theta
    monkeypatch.setattr(posterior.posterior_precision, "sample",
                        lambda count, _: torch.stack([next(given) - theta for _ in range(count)]))
    monkeypatch.setattr("ntk_laplace.runtime.tuning.WEIGHT_SAMPLE_BYTES", 3 * 8 * posterior.num_parameters)
    found = posterior.predict(x, "nn", samples=7).f
    network = copy.deepcopy(problem(CASE).network)
    for own, theta in zip(found, draws, strict=True):
        torch.nn.utils.vector_to_parameters(theta, network.parameters())
        assert relative_error(own, outputs(network, x)) < 1e-12


@pytest.mark.parametrize("structure", STRUCTURES)
def test_function_samples_have_the_covariance_of_the_functions(structure, monkeypatch):
    posterior, reference = fit(CASE, "poisson", "layer", structure), truth(CASE, "poisson", "layer")
    x, jac = problem(CASE).x_new, jacobians(CASE)[1]
    monkeypatch.setattr(torch, "randn", units)
    n, c = len(x), jac.shape[1]
    root = (posterior.sample(n * c, x) - outputs(problem(CASE).network, x)).flatten(1)
    assert relative_error(root.T @ root, reference.latent_covariance(jac)) < 1e-8


@pytest.mark.parametrize("structure", STRUCTURES)
def test_samples_follow_their_generator(structure):
    posterior, x = fit(CASE, "poisson", "layer", structure), problem(CASE).x_new
    draws = [posterior.sample(5, x, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert draws[0].shape == (5, len(x), 3)
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert posterior.sample(0).shape == (0, posterior.num_parameters) and posterior.sample(0, x).shape == (0, len(x), 3)


def test_effective_parameters_are_those_of_weight_space():
    """γ_g = n_g - δ_g tr_g(H⁻¹), in both spaces and for every grouping."""
    for prior in PRIORS:
        reference = truth(CASE, "categorical", prior)
        each = 1 - reference.precision * reference.covariance.diagonal()
        found = [fit(CASE, "categorical", prior, structure).effective_parameters() for structure in STRUCTURES]
        for gamma in found:
            assert relative_error(gamma.sum(), each.sum()) < 1e-9
        assert relative_error(found[0], found[1]) < 1e-9
    assert relative_error(found[0], each) < 1e-9


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize("groups", ["all", "layer"])
def test_gradients_make_no_second_matrix(groups):
    """Precisions' and temperature's gradients take panels of B⁻¹ beside B, 3,240 x 3,240 here."""
    x, y = torch.randn(360, 8, dtype=torch.float64), torch.arange(360) % 10
    network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10)).double()
    prior = ntkl.GaussianPrior(1.0, groups=groups)
    value = ntkl.laplace(network, (x, y), ntkl.Categorical(), prior, "gp").log_marginal_likelihood()
    with PeakMemory(x.device) as memory:
        value.backward()
    assert memory.bytes < 0.5 * 3240**2 * 8
