"""Many outputs: the last linear layer with one matrix per output, and its sums in closed form."""

from __future__ import annotations

import copy
import functools
import resource
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import ntk_laplace as ntkl
from ntk_laplace.curvature import FunctionSpacePrecision, LastLayerPrecision
from ntk_laplace.errors import MemoryBudgetError
from ntk_laplace.runtime.meter import PeakMemory
from ntk_laplace.structures import function_space
from pairwise import pairwise
from reference import relative_error
from scripts import run_script

C, N = 10, 24
on_linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the meter reads /proc")


def network(inputs: int = 40, outputs: int = C, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A network whose last layer has more inputs than there are examples, or fewer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, inputs), nn.Tanh(), nn.Linear(inputs, outputs)).to(dtype)
    with torch.no_grad():
        net[2].weight *= scale
    return net


def data(outputs: int = C, count: int = N, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(outputs, (count,), generator=generator)


X_NEW = torch.randn(5, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def one_hot(y):
    return nn.functional.one_hot(y, C).double()


def missing(y):
    return torch.where(torch.arange(len(y)) % 5 == 0, -100, y)


def gaps(y):
    return one_hot(y).masked_fill(torch.arange(len(y) * C).view(-1, C) % 7 == 0, torch.nan)


LIKELIHOODS = {
    "categorical": (lambda: ntkl.Categorical(1.3), lambda y: y),
    "soft labels": (ntkl.Categorical, lambda y: 0.9 * one_hot(y) + 0.01),
    "missing labels": (ntkl.Categorical, missing),
    "tempered": (lambda: ntkl.Tempered(ntkl.Categorical(), 3.0), lambda y: y),
    "bernoulli": (ntkl.Bernoulli, one_hot),
    "missing outputs": (lambda: ntkl.Bernoulli(missing="nan"), gaps),
    "poisson": (ntkl.Poisson, lambda y: one_hot(y) * 3),
    "gaussian": (lambda: ntkl.Gaussian(0.3), lambda y: one_hot(y) + 0.1),
    "noise by output": (lambda: ntkl.Gaussian(torch.linspace(0.1, 1.0, C)), lambda y: one_hot(y) + 0.1),
}
LAYERS = {"more inputs than examples": 40, "fewer": 7}


@functools.cache
def fits(likelihood: str, inputs: int, groups: str = "layer", weighted: bool = False, scale: float = 1.0):
    """Posteriors with one matrix per output, and with B in one piece."""
    build, targets = LIKELIHOODS[likelihood]
    x, y = data()
    given = (x, targets(y), torch.arange(N) % 4 * 0.5) if weighted else (x, targets(y))
    found = []
    for whole in (False, True):
        # the reference: SᵀKS in one piece, by the code for any network
        other = mock.patch.object(function_space, "precision_by_output", lambda *_: None) if whole else nullcontext()
        with other:
            prior = ntkl.GaussianPrior(0.5, groups=groups)
            posterior = ntkl.laplace(network(inputs, scale=scale), given, build(), prior, parameters="last_layer")
            found.append((posterior, posterior.posterior_precision))
    assert isinstance(found[0][1], LastLayerPrecision) and type(found[1][1]) is FunctionSpacePrecision
    return found


@pytest.mark.parametrize("inputs", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_one_matrix_per_output_is_the_posterior_of_b_in_one_piece(likelihood, inputs):
    (ours, precision), (_, whole) = fits(likelihood, inputs, weighted="missing" not in likelihood)
    rows, vectors = ours.jacobian(X_NEW), torch.randn(3, ours.num_parameters, dtype=torch.float64)
    chosen = rows.weighted(torch.randn(len(X_NEW), C, 2, dtype=torch.float64))
    verbs = {
        "log det": lambda h: h.log_det(), "other precisions": lambda h: h.log_det_curve(torch.tensor([0.1, 7.0])),
        "effective": lambda h: h.effective_parameters(), "gained": lambda h: h.information_gained(),
        "solve": lambda h: h.solve(vectors), "multiply": lambda h: h.multiply(vectors),
        "blocks": lambda h: h.covariance_blocks(rows), "joint": lambda h: h.covariance(rows),
        "variances": lambda h: h.variances_of_outputs(rows),
        "directions": lambda h: h.covariance_blocks(chosen), "leave-one-out": lambda h: h.inverse_blocks,
        "cross": lambda h: h.cross_covariance(rows.weighted(rows.f.unsqueeze(-1))).products(rows),
        "samples": lambda h: h.sample(4, torch.Generator().manual_seed(3)), "spectrum": lambda h: h.spectrum(),
    }
    for name, verb in verbs.items():
        assert relative_error(verb(precision), verb(whole)) < 1e-10, name
    assert relative_error(precision.multiply(precision.solve(vectors)), vectors) < 1e-10


@pytest.mark.parametrize("groups", ["all", "tensor"])
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_evidence_and_its_gradients(likelihood, groups):
    (ours, _), (whole, _) = fits(likelihood, 40, groups)
    found = []
    for posterior in (ours, whole):
        moved = [posterior.prior.log_precision, *posterior.likelihood.parameters()]
        with mock.patch.object(function_space, "precision_by_output", lambda *_: None) if posterior is whole else \
                nullcontext():
            value = posterior.log_marginal_likelihood(correction=True)
        found.append([value.detach(), *torch.autograd.grad(value, moved)])
    for one, other in zip(*found, strict=True):
        assert relative_error(one, other) < 1e-10


@pytest.mark.parametrize("structure", ["gp", "kfac", "ekfac", "diag", "full"])
def test_the_temperature_has_the_slope_of_finite_differences(structure):
    x, y = data()
    posterior = ntkl.laplace(network(7), (x, y), ntkl.Categorical(), structure=structure, parameters="last_layer")
    (slope,) = torch.autograd.grad(posterior.log_marginal_likelihood(), [posterior.likelihood.log_temperature])
    values, step = [], 1e-4
    for sign in (1, -1):
        with torch.no_grad():
            posterior.likelihood.log_temperature += sign * step
            values.append(posterior.log_marginal_likelihood())
            posterior.likelihood.log_temperature -= sign * step
    if structure != "ekfac":  # its eigenvectors move, and their slope is left out
        assert abs(float((values[0] - values[1]) / (2 * step) - slope)) < 1e-5 * abs(float(slope))


@pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")  # the network is not trained
def test_predictions_scores_and_changes_agree():
    (ours, _), (whole, _) = fits("categorical", 40)
    pairs = [
        *((ours.predict(X_NEW, method).probs, whole.predict(X_NEW, method).probs) for method in ("probit", "glm")),
        (ours.leave_one_out().mean, whole.leave_one_out().mean),
        (ours.leave_one_out().leverage, whole.leave_one_out().leverage),
        (ours.explain(X_NEW).contributions, whole.explain(X_NEW).contributions),
        (ours.remove([0, 3]).predict(X_NEW).probs, whole.remove([0, 3]).predict(X_NEW).probs),
        (ours.latent_moments(X_NEW, mean="posterior")[0], whole.latent_moments(X_NEW, mean="posterior")[0]),
    ]
    for place, (one, other) in enumerate(pairs):
        assert relative_error(one, other) < 1e-9, place


@pytest.mark.parametrize("inputs", LAYERS.values(), ids=LAYERS)
def test_a_weak_prior_and_confident_outputs(inputs):
    """Classes of probability near 0 and 1, and weights that the data determine: M is nearly singular."""
    (_, precision), (_, whole) = fits("categorical", inputs, scale=30.0)
    for factor in (1e-6, 1.0):
        assert relative_error(precision.log_det_at(factor), whole.log_det_at(factor)) < 1e-10


def test_an_evidence_leaves_no_graph_in_the_precision():
    """The precision keeps its log determinant; copies of the posterior need it without a graph."""
    posterior = ntkl.laplace(network(), data(), ntkl.Categorical(), parameters="last_layer")
    assert isinstance(posterior.posterior_precision, LastLayerPrecision)
    assert posterior.log_marginal_likelihood().requires_grad
    assert not posterior.posterior_precision.log_det().requires_grad
    twin = copy.deepcopy(posterior)
    assert torch.equal(twin.log_marginal_likelihood(), posterior.log_marginal_likelihood())


def test_saved_moved_and_single_precision(tmp_path):
    (ours, _), _ = fits("categorical", 40)
    ours.save(tmp_path / "posterior.pt", include_data=True)
    loaded = ntkl.load(tmp_path / "posterior.pt", network())
    assert isinstance(loaded.posterior_precision, LastLayerPrecision)
    assert torch.equal(loaded.predict(X_NEW).probs, ours.predict(X_NEW).probs)
    x, y = data()
    single = ntkl.laplace(network(dtype=torch.float32), (x.float(), y), ntkl.Categorical(1.3), ntkl.GaussianPrior(0.5),
                          parameters="last_layer", dtype=torch.float32)
    unweighted = ntkl.laplace(network(), (x, y), ntkl.Categorical(1.3), ntkl.GaussianPrior(0.5),
                              parameters="last_layer")
    found, exact = single.predict(X_NEW.float(), "probit").probs, unweighted.predict(X_NEW, "probit").probs
    assert found.dtype == torch.float32 and relative_error(found.double(), exact) < 1e-5
    assert abs(float(single.log_marginal_likelihood() - unweighted.log_marginal_likelihood())) < 1e-3


@pytest.mark.parametrize("case", ["correlated noise", "subclass", "few outputs", "per parameter", "empirical Fisher"])
def test_what_the_algebra_does_not_cover_takes_b_in_one_piece(case):
    class Mine(ntkl.Categorical):
        def curvature(self, f, y=None):
            return 2.0 * super().curvature(f, y)

        def root(self, f, y=None):
            return 2.0**0.5 * super().root(f, y)

    (x, y), outputs = data(3 if case == "few outputs" else C), 3 if case == "few outputs" else C
    likelihood, curvature, groups = ntkl.Categorical(), "ggn", "layer"
    if case == "correlated noise":
        likelihood, y = ntkl.Gaussian(torch.eye(C) + 0.1), one_hot(y)
    likelihood = Mine() if case == "subclass" else likelihood
    groups = "parameter" if case == "per parameter" else groups
    curvature = "ef" if case == "empirical Fisher" else curvature
    fit = functools.partial(ntkl.laplace, network(7, outputs), (x, y), likelihood, parameters="last_layer")
    found = fit(ntkl.GaussianPrior(1.0, groups=groups), "gp", curvature)
    exact = fit(ntkl.GaussianPrior(1.0, groups=groups), "full", curvature)
    assert not isinstance(found.posterior_precision, LastLayerPrecision)
    assert relative_error(found.log_marginal_likelihood().detach(), exact.log_marginal_likelihood().detach()) < 1e-9


STRUCTURED = ["kfac", "ekfac", "diag", "inf"]


@pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")
@pytest.mark.parametrize(("structure", "likelihood", "groups"), pairwise(
    STRUCTURED, ["categorical", "missing labels", "noise by output"], ["layer", "tensor"]
))
def test_sums_in_closed_form_are_those_of_backward_passes(structure, likelihood, groups):
    build, targets = LIKELIHOODS[likelihood]
    x, y = data()
    found = []
    for closed in (True, False):
        passes = mock.patch("ntk_laplace.structures.batch_roots.has_form", lambda _, closed=closed: closed)
        with passes, mock.patch("ntk_laplace.jacobian.fast.FusedSums.of_last_layer",
                                wraps=ntkl.jacobian.fast.FusedSums.of_last_layer) as summed:
            spec = ntkl.INF(rank=1.0) if structure == "inf" else structure
            found.append(ntkl.laplace(network(7), (x, targets(y), torch.linspace(0.2, 2.0, N)), build(),
                                      ntkl.GaussianPrior(0.5, groups=groups), spec, parameters="last_layer",
                                      settings=ntkl.Settings(batch_size=9)))
            assert bool(summed.call_count) == closed
    ours, other = found
    for one, two in zip(ours.fitted.structure.summaries(ours.fitted.model),
                        other.fitted.structure.summaries(other.fitted.model), strict=True):
        for name, value in one.sums.items():
            lower = (lambda v: v.tril()) if value.ndim > 1 else (lambda v: v)
            if name == "moments":  # eigenvectors of equal eigenvalues differ
                lower = torch.sum
            assert relative_error(lower(value), lower(two.sums[name])) < 1e-10, name
    assert relative_error(ours.log_marginal_likelihood().detach(), other.log_marginal_likelihood().detach()) < 1e-10
    assert relative_error(ours.latent_moments(X_NEW)[1], other.latent_moments(X_NEW)[1]) < 1e-8
    rows = ours.jacobian(X_NEW)
    blocks = ours.posterior_precision.covariance_blocks(rows).diagonal(dim1=1, dim2=2)
    assert relative_error(ours.posterior_precision.variances_of_outputs(rows), blocks) < 1e-10


def test_variances_of_outputs_of_any_network():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)
    net = nn.Sequential(*layers).double().eval()
    x, y = torch.randn(9, 1, 6, 6, dtype=torch.float64), torch.randint(4, (9,))
    for structure in ("gp", "full", "kfac", "ekfac", "diag"):
        posterior = ntkl.laplace(net, (x, y), ntkl.Categorical(), structure=structure)
        rows, precision = posterior.jacobian(x), posterior.posterior_precision
        blocks = precision.covariance_blocks(rows).diagonal(dim1=1, dim2=2)
        assert relative_error(precision.variances_of_outputs(rows), blocks) < 1e-10


@pytest.mark.slow
def test_memory_is_forecast_and_refused():
    x, y = data(200)
    net = network(40, 200)
    plan = ntkl.plan(net, (x, y), ntkl.Categorical(), structures=["gp", "kfac"], parameters="last_layer")
    assert plan["gp"].fits and plan["gp"].stored["covariances by output"] == 8 * 200 * N**2
    assert "one matrix per output" in plan["gp"].note
    fit = functools.partial(ntkl.laplace, net, (x, y), ntkl.Categorical(), parameters="last_layer")
    with pytest.raises(MemoryBudgetError, match="one matrix for each of 200 outputs"):
        fit(settings=ntkl.Settings(memory_budget=10**5))
    posterior = fit()
    with mock.patch("ntk_laplace.runtime.resources.available_memory", lambda _: 10**6), \
            pytest.raises(MemoryBudgetError, match="needs no inverse of B"):
        posterior.posterior_precision.factor  # noqa: B018


def test_explanations_that_do_not_fit_are_refused_before_the_work():
    """Neither S of all points nor B is computed first: at C = 1,000 and N = 200 these took most of a minute."""
    x, y = data(80)
    fit = functools.partial(ntkl.laplace, network(40, 80), (x, y), ntkl.Categorical(), parameters="last_layer")
    bytes_of_inverse = 8 * (N * 79) ** 2
    for budget in (10**6, bytes_of_inverse - 1):  # not even L fits; L fits, and not B⁻¹
        posterior = fit()
        work = mock.patch.object(LastLayerPrecision, "weighted", property(lambda _: pytest.fail("work began")))
        free = mock.patch("ntk_laplace.runtime.resources.available_memory", lambda _, budget=budget: budget)
        with free, work:
            for ask in (posterior.explain, posterior.removal_effects):
                with pytest.raises(MemoryBudgetError, match=r"B.*needs no inverse of B"):
                    ask(x[:2])


@pytest.mark.slow
def test_a_thousand_classes():
    """C = 1,000: more than B in one piece could take (297 GiB); seconds and bytes are those of the page."""
    x, y = data(1000, 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    posterior = ntkl.laplace(network(16, 1000), (x, y), ntkl.Categorical(), parameters="last_layer")
    probabilities = posterior.predict(X_NEW, "probit").probs
    assert probabilities.shape == (5, 1000) and bool((probabilities.sum(1) - 1 < 1e-9).all())
    kfac = ntkl.laplace(network(16, 1000), (x, y), ntkl.Categorical(), structure="kfac", parameters="last_layer")
    assert kfac.predict(X_NEW, "probit").probs.shape == (5, 1000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    reference = _rasmussen_williams(network(16, 1000), x)
    assert relative_error(posterior.posterior_precision.log_det(), reference) < 1e-10


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize(("structure", "most"), [("gp", 1.5e9), ("kfac", 0.5e9)])
def test_the_memory_of_a_thousand_classes(structure, most):
    """N = 200, a layer of D = 128 inputs: B in one piece would take 149 GiB. Time is on the page."""
    with PeakMemory(torch.device("cpu")) as memory:
        ntkl.laplace(network(128, 1000), data(1000, 200), ntkl.Categorical(), structure=structure,
                     parameters="last_layer")
    assert 8 * 129_000 < memory.bytes < most


def _rasmussen_williams(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """log det B by [RW06] 3.3: Σ_c log det(I + D_c^½ K D_c^½) + log det Σ_c E_c."""
    with torch.no_grad():
        a, p = net[1](net[0](x)), net(x).softmax(1)
    kernel, total, log_det = a @ a.T + 1.0, torch.zeros(len(x), len(x), dtype=torch.float64), 0.0
    for c in range(p.shape[1]):
        root = p[:, c].sqrt()
        b = torch.eye(len(x), dtype=torch.float64) + root * kernel * root.unsqueeze(1)
        total += root * torch.linalg.inv(b) * root.unsqueeze(1)
        log_det = log_det + torch.logdet(b)
    return log_det + torch.logdet(total)


@pytest.mark.slow
def test_the_benchmarks(tmp_path):
    folder, few = Path(__file__).parents[1] / "examples" / "benchmarks", ("--small", "--threads", "1")
    assert "ntk_laplace gp -" in run_script(folder / "many_outputs.py", tmp_path, *few)
    assert "kfac(rank=10)" in run_script(folder / "lora.py", tmp_path, *few)
