"""Predictive and samples of structured weight space against dense formulas."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

import ntk_laplace as ntkl
from ntk_laplace.model.predictive import predictive
from ntk_laplace.runtime import tuning
from pairwise import pairwise
from reference import outputs, relative_error
from registry import LIKELIHOODS, problem, targets
from registry_cases import jacobians, tolerance
from structured_cases import AXES, CASES, CHOSEN, admits, fit, fresh_fit, ids, truth

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")

METHODS = {"gaussian": ("glm", "map", "blr"), "categorical": ("glm", "map", "blr", "probit"), "poisson": ("glm", "blr")}


@pytest.mark.parametrize("structure", CHOSEN)
@pytest.mark.parametrize("likelihood", METHODS)
def test_predictive_is_that_of_the_dense_moments(likelihood, structure):
    case = "deep_mlp", likelihood, "layer", "ggn", structure
    if likelihood == "gaussian" and structure == "inf":
        case = "deep_mlp", likelihood, "layer", "ef", structure  # no ties
    posterior, reference, x = fit(*case), truth(*case), problem("deep_mlp").x_new
    f, jac = outputs(problem("deep_mlp").network, x), jacobians("deep_mlp")[1]
    covariance = jac @ reference.covariance @ jac.mT
    for method in METHODS[likelihood]:
        found = posterior.predict(x, method=method, samples=64)
        blocks = torch.zeros_like(covariance) if method == "map" else covariance
        want = predictive(LIKELIHOODS[likelihood].build(), f, blocks, method, 64)
        assert relative_error(found.mean, want.mean) < 1e-8
        assert relative_error(found.variance, want.variance) < 1e-8
        y = LIKELIHOODS[likelihood].targets(len(f), f.shape[1])
        assert relative_error(found.log_prob(y), want.log_prob(y)) < 1e-8


@pytest.mark.parametrize("structure", CHOSEN)
def test_predictive_by_weight_samples(structure):
    """method="nn": the network at weights that `sample` draws, responses averaged."""
    posterior, case = fit("cnn_groups", "categorical", "layer", "ggn", structure), problem("cnn_groups")
    draws = posterior.sample(20, generator=torch.Generator().manual_seed(5))
    found = posterior.predict(case.x_new, method="nn", samples=20, generator=torch.Generator().manual_seed(5))
    probabilities = []
    for theta in draws:
        pieces = theta.split([p.numel() for p in case.parameters.values()])
        weights = {name: v.view_as(p) for (name, p), v in zip(case.parameters.items(), pieces, strict=True)}
        f = functional_call(case.network, weights, (case.x_new,))
        probabilities.append(LIKELIHOODS["categorical"].response(f))
    assert relative_error(found.probs, torch.stack(probabilities).mean(0)) < 1e-10


# -------------------------------------------------------------------------------------------------------------- samples

# every structure with every curvature and prior; INF's factor is the one with cases of its own
FACTORS = [
    *pairwise(("deep_mlp", "transformer_tied", "scalar_outputs"), *AXES, allowed=admits),
    *[case for case in CASES if case[4] == "inf"],
]


@pytest.mark.parametrize("case", FACTORS, ids=ids)
def test_the_sampler_s_factor_is_a_root_of_the_covariance(case):
    """F Fᵀ = H⁻¹, F read off by sending unit vectors through the sampler's transform."""
    posterior, reference = fit(*case), truth(*case)
    factor = posterior.posterior_precision.factor(torch.eye(len(reference.precision), dtype=torch.float64)).T
    assert relative_error(factor @ factor.T, reference.covariance) < tolerance(case[0], 1e-8)


@pytest.mark.parametrize(
    "structure",
    [ntkl.INF(rank=1), ntkl.INF(rank="trace:0.9"), ntkl.INF(rank=1.0, violation="raise"), ntkl.KFAC(damped=True)],
    ids=repr,
)
def test_factors_of_the_variants(structure):
    """The same, where H is what `newton` inverts."""
    case = problem("deep_mlp")
    y = targets(LIKELIHOODS["categorical"], case)
    prior = ntkl.GaussianPrior(precision=40.0)
    posterior = ntkl.laplace(case.network, (case.x, y), ntkl.Categorical(), prior=prior, structure=structure)
    eye = torch.eye(case.theta.numel(), dtype=torch.float64)
    factor = posterior.posterior_precision.factor(eye).T
    inverse = torch.stack([posterior.posterior_precision.solve(column) for column in eye])
    assert relative_error(factor @ factor.T, inverse) < 1e-10
    if not isinstance(structure, ntkl.KFAC):
        precision = posterior.posterior_precision.information() + 40.0 * eye
        assert relative_error(inverse, torch.linalg.inv(precision)) < 1e-10


def test_covariances_of_inf_are_computed_a_few_inputs_at_a_time(monkeypatch):
    case = "deep_mlp", "categorical", "layer", "ggn", "inf"
    x, jac = problem("deep_mlp").x_new, jacobians("deep_mlp")[1]
    expected = jac @ truth(*case).covariance @ jac.mT
    monkeypatch.setattr(tuning, "CHUNK_BYTES", 1)
    _, found = fit(*case).latent_moments(x, batch_size=len(x))
    assert relative_error(found, expected) < tolerance(case[0], 1e-8)


@pytest.mark.parametrize("structure", CHOSEN)
def test_samples_have_the_covariance(structure):
    """Moments of many draws, of the weights and of functions."""
    case = "linear_model", "poisson", "tensor", "ggn", structure
    posterior, reference = fit(*case), truth(*case)
    count, x = 40_000, problem("linear_model").x_new
    draws = posterior.sample(count, generator=torch.Generator().manual_seed(1)) - problem("linear_model").theta
    scale = reference.covariance.diagonal().sqrt()
    # entries of a correlation have a standard error of at most √(2/count)
    deviation = (draws.T @ draws / count - reference.covariance) / scale / scale[:, None]
    assert deviation.abs().max() < 5 * (2 / count) ** 0.5
    assert (draws.mean(0) / scale).abs().max() < 5 / count**0.5
    assert torch.equal(draws[0] != draws[1], torch.ones(len(scale), dtype=torch.bool))
    functions = posterior.sample(count, x, generator=torch.Generator().manual_seed(2)).flatten(1)
    joint = posterior.latent(x).covariance_matrix
    scale = joint.diagonal().sqrt()
    deviation = (functions.T.cov() - joint) / scale / scale[:, None]
    assert deviation.abs().max() < 5 * (2 / count) ** 0.5


PIECES = ("WRITTEN_BYTES", "SQUARED_INPUT_BYTES", "COVARIANCE_BYTES", "HESSIAN_BYTES")


# two structures for each network, and two networks for each structure
@pytest.mark.parametrize(("network", "structure"), [
    (network, CHOSEN[(number + step) % len(CHOSEN)]) for step in (0, 2) for number, network in enumerate(
        ["deep_mlp", "cnn_groups", "shared_positions", "decoder_dict", "transformer_tied"])
])
def test_pieces_change_nothing(network, structure, monkeypatch):
    """Rows, products of rows and sums are made one example, or one output of a layer, at a time where memory asks."""

    def answers() -> list[torch.Tensor]:
        posterior = fresh_fit(network, "categorical", "layer", "ggn", structure)
        x = problem(network).x_new
        evidence = posterior.log_marginal_likelihood(correction=True)
        evidence.backward()
        found = [evidence, *posterior.latent_moments(x), posterior.latent(x).covariance_matrix]
        found += [posterior.reweight([0, 2], 1.5).latent_moments(x)[1], posterior.prior.log_precision.grad]
        return [*found, *(parameter.grad for parameter in posterior.likelihood.parameters())]

    whole = answers()
    for name in PIECES:
        monkeypatch.setattr(f"ntk_laplace.runtime.tuning.{name}", 1)
    for own, expected in zip(answers(), whole, strict=True):
        assert relative_error(own, expected) < 1e-9
