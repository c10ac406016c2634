"""The verbs of structured weight space against dense formulas: evidence, gradients, moments, predictive, samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ntk_laplace as ntkl
from pairwise import pairwise
from reference import difference, outputs, relative_error
from reference_structures import Structured, StructuredModel
from registry import LIKELIHOODS, NETWORKS, PRIORS, problem, targets
from registry_cases import derivatives, jacobians, offered, tolerance
from structured_cases import CASES, CHOSEN, CURVATURES, STRUCTURES, fit, fresh_fit, ids, structured, truth

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")


def groups(posterior) -> Tensor:
    """The prior's group of each parameter, (P,)."""
    found = []
    for name, parameter in posterior.network.shapes.items():
        group = posterior.prior.group_of(name)
        found += group.tolist() if isinstance(group, Tensor) else [group] * parameter.numel()
    return torch.tensor(found)


# ------------------------------------------------------------------------------------------------ evidence and moments


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_evidence_is_the_dense_one(case):
    """[I21] Eq. 8 and A.1 with the structure's own H, its determinant, and γ."""
    posterior, reference, limit = fit(*case), truth(*case), tolerance(case[0], 1e-9)
    assert relative_error(posterior.log_det(), reference.log_det()) < limit
    assert relative_error(posterior.log_marginal_likelihood(), reference.evidence()) < limit
    assert relative_error(posterior.log_marginal_likelihood(correction=True), reference.evidence(True)) < limit
    assert relative_error(posterior.effective_parameters(), reference.effective_parameters(groups(posterior))) < limit


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_evidence_curve_is_the_dense_one(case):
    reference, factors = truth(*case), torch.tensor([0.05, 1.0, 30.0])
    curve = torch.stack([
        StructuredModel(
            *derivatives(*case[:2]), reference.jac, reference.offset, factor * reference.precision,
            information=reference.information,
        ).evidence()
        for factor in factors.double()
    ])
    assert relative_error(fit(*case).evidence_curve(factors), curve) < tolerance(case[0], 1e-9)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_moments_are_the_dense_ones(case):
    """V = J H⁻¹ Jᵀ, joint and in blocks, and the mean of the refitted linear model."""
    posterior, reference, limit = fit(*case), truth(*case), tolerance(case[0], 1e-8)
    x, jac = problem(case[0]).x_new, jacobians(case[0])[1]
    f, covariance = outputs(problem(case[0]).network, x), reference.latent_covariance(jac)
    n, c = f.shape
    blocks = torch.stack([covariance[i * c : i * c + c, i * c : i * c + c] for i in range(n)])
    joint, (mean, variance) = posterior.latent(x), posterior.latent_moments(x)
    assert relative_error(joint.mean, f) < limit and relative_error(mean, f) < limit
    assert relative_error(joint.covariance_matrix, covariance) < limit
    assert relative_error(variance, blocks) < limit
    refitted = reference.latent_mean(f, jac)
    if case[1] != "gaussian":  # one step of an approximate curvature is not at the optimum
        with pytest.raises(ntkl.UnsupportedError, match=r"several Newton steps.*structure=.*the network's own outputs"):
            posterior.latent_moments(x, mean="posterior")
        rows = posterior.jacobian(x)
        refitted_here = rows.f - rows.jvp(posterior.network.unflatten(posterior.fitted.newton_step()))
        assert relative_error(refitted_here, refitted) < limit
        return
    assert relative_error(posterior.latent(x, mean="posterior").mean, refitted) < limit
    assert relative_error(posterior.latent_moments(x, mean="posterior")[0], refitted) < limit


def test_the_table_covers_what_it_claims():
    assert {case[0] for case in CASES} == set(NETWORKS)
    assert {case[4] for case in CASES} == set(CHOSEN)
    assert {case[1] for case in CASES} == set(LIKELIHOODS)
    assert {case[2::2] for case in CASES} >= {(p, s) for p in ("scalar", "layer", "tensor") for s in ("kfac", "ekfac")}
    assert {case[3:] for case in CASES} >= {(c, s) for c in CURVATURES for s in ("kfac", "ekfac", "inf", "diag")}


# --------------------------------------------------------------------------------------------------------------- damped


@pytest.mark.parametrize("network", ["deep_mlp", "cnn_groups", "layer_twice"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_damping_is_its_own_model(network, sharing):
    """[I21] A.3: (β' + √δ)(α' + √δ) in place of β'α' + δ, in every verb; its evidence is another, and lower."""
    likelihood = offered(network)[1]
    damped = fresh_fit(network, likelihood, "layer", "ggn", ntkl.KFAC(sharing=sharing, damped=True))
    plain = fresh_fit(network, likelihood, "layer", "ggn", ntkl.KFAC(sharing=sharing))
    precision, mean = PRIORS["layer"].dense(problem(network))
    dense = structured(network, likelihood, "layer", "ggn")

    def model(factor: float) -> StructuredModel:
        information = dense.damped(factor * precision, sharing) - torch.diag(factor * precision)
        offset = problem(network).theta - mean
        return StructuredModel(
            *derivatives(network, likelihood), dense.jac, offset, factor * precision, information=information
        )

    reference = model(1.0)
    assert relative_error(damped.log_det(), reference.log_det()) < 1e-10
    for correction in (False, True):
        found = damped.log_marginal_likelihood(correction)
        assert relative_error(found, reference.evidence(correction)) < 1e-10
    factors = torch.tensor([0.3, 4.0])
    curve = torch.stack([model(float(factor)).evidence() for factor in factors])
    assert relative_error(damped.evidence_curve(factors), curve) < 1e-8  # float32 factors
    variance = reference.latent_covariance(jacobians(network)[1])
    assert relative_error(damped.latent(problem(network).x_new).covariance_matrix, variance) < 1e-9
    # every eigenvalue grows by √δ (α' + β'), so the evidence falls
    assert damped.log_marginal_likelihood() < plain.log_marginal_likelihood() - 0.1


# ------------------------------------------------------------------------------------------------------------ gradients


def check_gradients(posterior, correction: bool, limit: float = 1e-7) -> None:
    step = 2e-4 if posterior.structure == "inf" else 2e-3  # INF's shrinking has kinks
    variables = [*posterior.prior.parameters(), *posterior.likelihood.parameters()]
    gradients = torch.autograd.grad(posterior.log_marginal_likelihood(correction), variables)
    for number, (variable, gradient) in enumerate(zip(variables, gradients, strict=True)):
        random = torch.randn(variable.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        direction = random / random.norm()
        slope = difference(lambda: posterior.log_marginal_likelihood(correction), variable, direction, step)
        error = ((gradient * direction).sum() - slope).abs() / gradient.norm().clamp_min(1e-2)
        assert error < limit


GRADIENTS = pairwise(
    ("deep_mlp", "cnn_groups", "transformer_tied", "decoder_dict"), ("gaussian", "categorical"),
    ("layer", "tensor", "scalar"), ("ggn", "ef"), CHOSEN, (False, True),
)


@pytest.mark.parametrize(("network", "likelihood", "prior", "curvature", "structure", "correction"), GRADIENTS)
def test_evidence_gradients_are_finite_differences(network, likelihood, prior, curvature, structure, correction):
    """Identity 8, in log precisions, log noise and log temperature; EKFAC's and INF's eigenvectors stay the fit's."""
    check_gradients(fresh_fit(network, likelihood, prior, curvature, structure), correction)


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diag"])
def test_gradients_in_noise_that_turns_the_eigenvectors(structure):
    """One noise per output: Λ does not move by a common factor, so KFAC's eigenvectors turn."""
    case = problem("deep_mlp")
    y = targets(LIKELIHOODS["gaussian"], case)
    noise = torch.tensor([0.2, 0.5, 0.9, 1.3, 2.0])
    prior = ntkl.GaussianPrior(precision=0.7)
    posterior = ntkl.laplace(case.network, (case.x, y), ntkl.Gaussian(noise=noise), prior=prior, structure=structure)
    check_gradients(posterior, False)
    check_gradients(posterior, True)


@pytest.mark.parametrize("structure", [ntkl.KFAC(damped=True), ntkl.INF(rank=1.0), ntkl.INF(rank=2)], ids=repr)
def test_gradients_of_the_variants(structure):
    for likelihood in ("gaussian", "categorical"):
        check_gradients(fresh_fit("deep_mlp", likelihood, "layer", "ggn", structure), True)


@pytest.mark.parametrize("structure", CHOSEN)
@pytest.mark.parametrize(
    ("network", "likelihood"), [("deep_mlp", "gaussian"), ("deep_mlp", "categorical"), ("decoder_dict", "gaussian")]
)
def test_every_change_of_a_hyperparameter_is_seen(network, likelihood, structure):
    """Changed after the fit, prior and noise answer like a fresh fit; a temperature does where no basis is held."""
    late = {"gaussian": lambda: ntkl.Gaussian(noise=0.9), "categorical": lambda: ntkl.Categorical(temperature=0.6)}
    case = problem(network)
    y = targets(LIKELIHOODS[likelihood], case)
    # what INF keeps of tied eigenvalues is a matter of the last digit: all of them
    asked = ntkl.INF(rank=1.0) if structure == "inf" else STRUCTURES[structure][0]()
    posterior = fresh_fit(network, likelihood, "layer", "ggn", asked)
    before = posterior.log_marginal_likelihood()
    precisions = 0.3 + torch.rand(posterior.prior.log_precision.shape, dtype=torch.float64)
    with torch.no_grad():
        posterior.prior.log_precision.copy_(precisions.log())
        posterior.likelihood.load_state_dict(late[likelihood]().state_dict())
    assert relative_error(posterior.log_marginal_likelihood(), before) > 1e-3
    if likelihood == "categorical" and structure in ("ekfac", "inf"):
        return  # the eigenvectors are those of the fit
    prior = ntkl.GaussianPrior(precision=precisions, mean=0.25, groups="layer")
    want = ntkl.laplace(case.network, (case.x, y), late[likelihood](), prior=prior, structure=asked)
    for correction in (False, True):
        found, expected = (each.log_marginal_likelihood(correction) for each in (posterior, want))
        assert relative_error(found, expected) < 1e-10
    assert relative_error(posterior.fitted.newton_step(), want.fitted.newton_step()) < 1e-9
    found, expected = (each.latent(case.x_new) for each in (posterior, want))
    assert relative_error(found.covariance_matrix, expected.covariance_matrix) < 1e-9


NOISES = {
    "point": 0.2 + torch.rand(7, generator=torch.Generator().manual_seed(1)),
    "point and output": 0.2 + torch.rand(7, 5, generator=torch.Generator().manual_seed(2)),
    "covariance": torch.eye(5) + 0.4,
}


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diag"])
@pytest.mark.parametrize("noise", NOISES)
def test_noise_of_every_shape(noise, structure):
    """Noise per point belongs to its point, in whatever batches the data come."""
    case, value = problem("deep_mlp"), NOISES[noise].double()
    y, f = targets(LIKELIHOODS["gaussian"], case), outputs(case.network, case.x)
    each = {
        "point": lambda n: value[n] * torch.eye(5, dtype=torch.float64),
        "point and output": lambda n: torch.diag(value[n]),
        "covariance": lambda n: value,
    }[noise]
    covariance = torch.stack([each(n) for n in range(7)])
    inverse = torch.linalg.inv(covariance)
    residual = torch.einsum("ncd,nd->nc", inverse, y - f)
    log_prob = torch.distributions.MultivariateNormal(f, covariance).log_prob(y)
    precision, mean = PRIORS["tensor"].dense(case)
    parts = structured("deep_mlp", "gaussian", "tensor", "ggn").parts
    dense = STRUCTURES[structure][1](Structured(parts, jacobians("deep_mlp")[0], inverse))
    reference = StructuredModel(
        log_prob, residual, inverse, jacobians("deep_mlp")[0], case.theta - mean, precision, information=dense
    )
    posterior = ntkl.laplace(
        case.network, (case.x, y), ntkl.Gaussian(noise=value), prior=PRIORS["tensor"].build(case),
        structure=structure, settings=ntkl.Settings(batch_size=3),
    )
    assert relative_error(posterior.posterior_precision.information(), dense) < 1e-10
    for correction in (False, True):
        assert relative_error(posterior.log_marginal_likelihood(correction), reference.evidence(correction)) < 1e-10


# -------------------------------------------------------------------------------------- precision, choice of parameters


@pytest.mark.parametrize("structure", CHOSEN)
def test_single_precision_is_close_to_double(structure):
    if structure == "inf":  # a choice of eigenvectors is a matter of the last digit
        structure = ntkl.INF(rank=1.0)
    case = problem("cnn_groups")
    posteriors = [
        fresh_fit("cnn_groups", "categorical", "layer", "ggn", structure, dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    ]
    assert posteriors[0].latent_moments(case.x_new)[1].dtype == torch.float32
    for correction in (False, True):
        single, double = (each.log_marginal_likelihood(correction) for each in posteriors)
        assert 0 < relative_error(single, double) < 2e-5
    single, double = (each.fitted.newton_step() for each in posteriors)
    assert relative_error(single, double) < 1e-4
    single, double = (each.latent(case.x_new) for each in posteriors)
    assert relative_error(single.covariance_matrix, double.covariance_matrix) < 1e-4


@pytest.mark.parametrize("structure", CHOSEN)
@pytest.mark.parametrize("network", ["deep_mlp", "cnn_groups", "transformer_tied"])
def test_the_last_layer_alone(network, structure):
    """Parts are independent, so the last layer's matrix is its own block of the whole one."""
    likelihood = offered(network)[1]
    posterior = fresh_fit(network, likelihood, "scalar", "ggn", structure, parameters="last_layer")
    chosen = torch.cat([
        torch.full((p.numel(),), name in posterior.network.shapes) for name, p in problem(network).parameters.items()
    ])
    assert 0 < chosen.sum() == posterior.num_parameters < len(chosen)
    whole = fit(network, likelihood, "scalar", "ggn", structure).posterior_precision.information()
    assert relative_error(posterior.posterior_precision.information(), whole[chosen][:, chosen]) < 1e-9
    precision = 0.7 * torch.eye(int(chosen.sum()), dtype=torch.float64) + whole[chosen][:, chosen]
    log_det = torch.linalg.slogdet(precision / 0.7).logabsdet
    assert relative_error(posterior.log_det(), log_det) < 1e-9
    jac = jacobians(network)[1][:, :, chosen].flatten(0, 1)
    variance = jac @ torch.linalg.solve(precision, jac.T)
    assert relative_error(posterior.latent(problem(network).x_new).covariance_matrix, variance) < 1e-8


# --------------------------------------------------------------------------------------------------------- eigenvectors


def test_an_evidence_asks_for_eigenvalues_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And stays to the last digit when eigenvectors come later, from another decomposition."""
    case = "deep_mlp", "categorical", "tensor", "ggn", "kfac"  # Kronecker parts, and blocks for the biases
    made, reference, x = fresh_fit(*case), truth(*case), problem("deep_mlp").x_new
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", lambda *_, **__: pytest.fail("eigenvectors were made"))
        before = made.log_marginal_likelihood(), *made.effective_parameters()
        made.evidence_curve(torch.tensor([0.5, 2.0]))
    assert relative_error(made.log_det(), reference.log_det()) < 1e-10
    want = reference.latent_covariance(jacobians("deep_mlp")[1])
    assert relative_error(made.latent(x).covariance_matrix, want) < 1e-10
    assert (made.log_marginal_likelihood(), *made.effective_parameters()) == before


def test_a_posterior_saved_without_eigenvectors_makes_them_when_loaded(tmp_path) -> None:
    case = "deep_mlp", "categorical", "tensor", "ggn", "kfac"
    early, late, x = tmp_path / "early.pt", tmp_path / "late.pt", problem("deep_mlp").x_new
    made = fresh_fit(*case)
    made.save(early)
    want = made.latent_moments(x)[1]
    made.save(late)
    for path in (early, late):
        loaded = ntkl.load(path, problem("deep_mlp").network)
        assert relative_error(loaded.latent_moments(x)[1], want) < 1e-12
        assert relative_error(loaded.log_marginal_likelihood(), made.log_marginal_likelihood()) < 1e-14
    assert late.stat().st_size > early.stat().st_size


@pytest.mark.parametrize("rank", [0.4, 1.0])
@pytest.mark.parametrize("likelihood", [ntkl.Gaussian, ntkl.Categorical])
def test_gradients_with_a_dead_unit(likelihood, rank):
    """No example reaches its weights: exact diagonal and kept eigenvalues are zero there, where roots have no slope."""
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3)).double()
    with torch.no_grad():
        network[0].bias[1] = -50.0
    x, y = torch.randn(12, 3).double(), torch.randn(12, 3).double()
    y = y if likelihood is ntkl.Gaussian else y.argmax(1)
    posterior = ntkl.laplace(network, (x, y), likelihood(0.7), structure=ntkl.INF(rank=rank))
    (own,) = posterior.likelihood.parameters()
    for correction in (False, True):
        own.grad = None
        posterior.log_marginal_likelihood(correction).backward()
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                own.add_(step)
                values.append(posterior.log_marginal_likelihood(correction))
                own.sub_(step)
        assert own.grad.item() == pytest.approx(float(values[0] - values[1]) / 2e-5, rel=1e-5)
