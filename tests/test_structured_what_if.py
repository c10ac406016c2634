"""What if in weight space: "full" against function space, structured posteriors against dense matrices of theirs."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
from torch import Tensor

import ntk_laplace as ntkl
from exact_cases import fit as exact_fit
from ntk_laplace.posterior.explain import SPREADS
from pairwise import pairwise
from reference import differentiate, outputs, relative_error, take
from reference_effects import dense_effects
from refusals import inputs, labels, network, refused
from registry import LIKELIHOODS, problem, targets
from registry_cases import jacobians
from structured_cases import MC, STRUCTURES, fit, output_curvature, truth

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")

EXACT = [
    ("deep_mlp", "categorical", "layer"), ("scalar_outputs", "gaussian", "scalar"),
    ("far_from_optimum", "bernoulli", "tensor"), ("transformer_tied", "poisson", "scalar"),
]
CASES = [*EXACT[:2], ("cnn_groups", "categorical", "scalar")]
NAMES = [name for name in STRUCTURES if "reduce" not in name]
GROUP = [1, 4]


def relabeled(y: Tensor) -> Tensor:
    other = y.clone()
    other[GROUP] = y[[0, 2]]
    return other


def asked(case: tuple[str, str, str], posterior, verb: str, **steps):
    """The library's answer."""
    own = problem(case[0])
    y = targets(LIKELIHOODS[case[1]], own)
    return {
        "remove": lambda: posterior.remove(GROUP, **steps),
        "reweight": lambda: posterior.reweight(GROUP, [0.3, 2.0], **steps),
        "relabel": lambda: posterior.relabel(GROUP, relabeled(y)[GROUP], **steps),
        "relabel and reweight": lambda: asked(case, posterior, "relabel", **steps).reweight(GROUP, [0.3, 2.0], **steps),
        "add": lambda: posterior.add(take(own.x_new, slice(0, 2)), y[:2], **steps),
        "one after the other": lambda: posterior.relabel(GROUP[:1], relabeled(y)[GROUP[:1]], **steps).add(
            take(own.x_new, slice(0, 1)), y[:1], **steps).remove(GROUP[1:], **steps),
    }[verb]()


def same(found, expected, x, limit: float = 1e-8) -> None:
    """Everything two posteriors say."""
    for a, b in zip(found.latent_moments(x), expected.latent_moments(x), strict=True):
        assert relative_error(a, b) < limit
    assert relative_error(found.latent(x).covariance_matrix, expected.latent(x).covariance_matrix) < limit
    for mean in ("map", "posterior") if found.curvature_type.kind == "ggn" else ("map",):
        assert relative_error(found.latent_moments(x, mean=mean)[0], expected.latent_moments(x, mean=mean)[0]) < limit
    for correction in (False, True):
        values = [p.log_marginal_likelihood(correction) for p in (found, expected)]
        assert relative_error(*values) < limit
    assert relative_error(found.effective_parameters(), expected.effective_parameters()) < limit
    assert relative_error(found.weights, expected.weights) == 0 and torch.equal(found.targets, expected.targets)


def stays_finite(case: tuple[str, str, str], verb: str, steps: int | None) -> bool:
    return case[1] != "poisson" or not ("add" in verb or "after" in verb)  # undamped steps of an exponential overflow


# every case with every verb, and both with one step and with the optimum
@pytest.mark.parametrize(("case", "verb", "steps"), pairwise(
    EXACT, ["remove", "reweight", "relabel", "add", "one after the other"], [1, None], allowed=stays_finite,
))
def test_weight_space_answers_as_function_space(case, verb, steps):
    same(*(asked(case, exact_fit(*case, name), verb, steps=steps) for name in ("full", "gp")), problem(case[0]).x_new)


@pytest.mark.slow
def test_scores_gradients_and_explanations_of_a_changed_weight_space():
    case = EXACT[0]
    x = problem(case[0]).x_new
    full, gp = (asked(case, exact_fit(*case, name), "one after the other") for name in ("full", "gp"))
    slopes = []
    for posterior in (full, gp):
        posterior.prior.log_precision.grad = None
        posterior.log_marginal_likelihood(correction=True).backward()
        slopes.append(posterior.prior.log_precision.grad.clone())
        posterior.prior.log_precision.grad = None
    assert relative_error(*slopes) < 1e-7
    assert relative_error(full.removal_effects(x), gp.removal_effects(x)) < 1e-7
    for name in ("mean", "covariance", "log_density", "leverage", "information"):
        a, b = (getattr(posterior.leave_one_out(), name) for posterior in (full, gp))
        assert relative_error(a, b) < 1e-7
    assert relative_error(full.evidence_curve([0.5, 2.0]), gp.evidence_curve([0.5, 2.0])) < 1e-8
    kept = torch.arange(1, full.num_examples)
    same(full.subset(kept), gp.subset(kept), x)
    more = take(problem(case[0]).x, slice(0, 2)), targets(LIKELIHOODS[case[1]], problem(case[0]))[:2]
    same(full.condition(more), gp.condition(more), x)
    same(full.condition(more).remove([0]), gp.condition(more).remove([0]), x)
    with refused(ntkl.UnsupportedError, "to save", "what-if", "Save the original"):
        full.save("nowhere.pt", include_data=True)


@pytest.mark.parametrize("curvature", ["ef", "mc"])
def test_other_curvatures_lose_the_points_too(curvature):
    """Out of the curvature that was fitted, in function space and in weight space."""
    own = problem("deep_mlp")
    y = targets(LIKELIHOODS["categorical"], own)
    gp, full = (ntkl.laplace(own.network, (own.x, y), ntkl.Categorical(), structure=name,
                             curvature=MC if curvature == "mc" else curvature) for name in ("gp", "full"))
    for verb in ("remove", "reweight", "relabel", *["add"] * (curvature == "ef")):
        same(*(asked(("deep_mlp", "categorical", ""), p, verb) for p in (full, gp)), own.x_new)
    with refused(ntkl.UnsupportedError, "steps=1 for structure='gp'", "steps=None", 'curvature="ggn"'):
        gp.remove(0, steps=None)
    if curvature == "mc":
        with refused(ntkl.UnsupportedError, 'curvature="ggn" or "ef" to add', "drawn", "Fit with"):
            gp.add(own.x[:1], y[:1])


# ------------------------------------------------------------------------------------------------ structured posteriors


class Changed:
    """H', the move and the outputs after a change, matrix by matrix."""

    def __init__(self, case: tuple[str, str, str], structure: str, verb: str, curvature: str = "ggn") -> None:
        own, name = problem(case[0]), case[0]
        self.reference = truth(*case, curvature, structure)
        f, jac = outputs(own.network, own.x), jacobians(name)[0]
        y = targets(LIKELIHOODS[case[1]], own)
        before = torch.ones(len(y), dtype=torch.float64)
        after, labels_ = before.clone(), y
        if verb in ("relabel", "relabel and reweight", "one after the other"):
            labels_ = relabeled(y)
        if verb == "remove":
            after[GROUP] = 0
        if "reweight" in verb:
            after[GROUP] = torch.tensor([0.3, 2.0], dtype=torch.float64)
        extra = {"add": 2, "one after the other": 1}.get(verb, 0)
        if verb == "one after the other":
            labels_, after[GROUP[1]] = torch.where(torch.arange(len(y)).view(-1, *[1] * (y.ndim - 1)) == GROUP[0],
                                                   labels_, y), 0
        f = torch.cat([f, outputs(own.network, take(own.x_new, slice(0, extra)))]) if extra else f
        self.jac = torch.cat([jac, jacobians(name)[1][:extra]])
        before, after = (torch.cat([w, w.new_full((extra,), v)]) for w, v in ((before, 0.0), (after, 1.0)))
        y, labels_ = torch.cat([y, y[:extra]]), torch.cat([labels_, y[:extra]])
        density = LIKELIHOODS[case[1]].log_density
        (_, r, h), (_, r_new, h_new) = differentiate(density, f, y), differentiate(density, f, labels_)
        if curvature == "ef":
            h, h_new = r[:, :, None] * r[:, None], r_new[:, :, None] * r_new[:, None]
        difference = after[:, None, None] * h_new - before[:, None, None] * h

        def changed(by: Tensor) -> Tensor:
            return self.reference.posterior_precision + torch.einsum("ncp,ncd,ndq->pq", self.jac, by, self.jac)

        self.matrix = changed(difference)
        self.held = 1 - float(torch.linalg.eigvals(
            torch.linalg.solve(self.reference.posterior_precision, self.matrix)).real.min())
        if self.held > 0.9:  # what is added is added, nothing is taken out
            gain = (after - before).clamp_min(0)[:, None, None] * h
            self.matrix = changed(gain if torch.equal(h, h_new) else after[:, None, None] * h_new)
        pull = after[:, None] * r_new - before[:, None] * r
        self.move = torch.linalg.solve(self.matrix, torch.einsum("ncp,nc->p", self.jac, pull))
        moved = f + self.jac @ self.move
        density_there, self.residual, _ = differentiate(density, moved, labels_)
        self.hessian, self.residual = after[:, None, None] * h_new, after[:, None] * self.residual
        self.log_prob = (after * density_there).sum()


@functools.cache
def dense(case: tuple[str, str, str], structure: str, verb: str) -> Changed:
    return Changed(case, structure, verb)


VERBS = ["remove", "reweight", "relabel", "add", "one after the other"]


@pytest.mark.parametrize(("case", "structure", "verb"), pairwise(CASES, NAMES, VERBS))
def test_structured_changes_are_dense_ones_of_the_structure(case, structure, verb):
    """Mean, covariance, evidence and effective parameters, from the dense H of the structure, changed densely."""
    expected, posterior, own = dense(case, structure, verb), fit(*case, "ggn", structure), problem(case[0])
    found = asked(case, posterior, verb)
    jac_new = jacobians(case[0])[1]
    covariance = jac_new.flatten(0, 1) @ torch.linalg.solve(expected.matrix, jac_new.flatten(0, 1).T)
    mean, blocks = found.latent_moments(own.x_new)
    n, c = mean.shape
    assert relative_error(mean, outputs(own.network, own.x_new) + jac_new @ expected.move) < 1e-8
    assert relative_error(found.latent(own.x_new).covariance_matrix, covariance) < 1e-8
    own_blocks = covariance.view(n, c, n, c).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    assert relative_error(blocks, own_blocks) < 1e-8
    reference = expected.reference
    inverse = torch.linalg.inv(expected.matrix)
    assert relative_error(found.effective_parameters().sum(),
                          len(inverse) - (reference.precision * inverse.diagonal()).sum()) < 1e-7
    if expected.held > 0.9:
        with refused(ntkl.UnsupportedError, "the evidence without them", "leverage", "Change fewer points"):
            found.log_marginal_likelihood()
        return
    log_det = torch.linalg.slogdet(expected.matrix).logabsdet - reference.precision.log().sum()
    offset = reference.offset + expected.move
    evidence = expected.log_prob - 0.5 * (reference.precision * offset**2).sum() - 0.5 * log_det
    assert relative_error(found.log_det(), log_det) < 1e-8
    assert relative_error(found.log_marginal_likelihood(), evidence) < 1e-8
    gradient = reference.precision * offset - torch.einsum("ncp,nc->p", expected.jac, expected.residual)
    corrected = evidence + 0.5 * gradient @ torch.linalg.solve(expected.matrix, gradient)
    assert relative_error(found.log_marginal_likelihood(correction=True), corrected) < 1e-8


@pytest.mark.parametrize("structure", NAMES)
def test_explanations_and_samples_of_a_changed_structure(structure):
    """Effects, leave-one-out and weight samples of the posterior after a change."""
    case = CASES[0]
    expected, own = dense(case, structure, "reweight"), problem(case[0])
    found = asked(case, fit(*case, "ggn", structure), "reweight")
    f, jac_new = found.outputs(own.x_new), jacobians(case[0])[1]
    chosen = torch.nn.functional.one_hot(f.argmax(1), f.shape[1]).double()
    for by in ("output", "variance"):
        effects = dense_effects(expected.matrix, expected, jac_new, chosen, by in SPREADS, False)
        assert relative_error(found.removal_effects(own.x_new, by=by), effects) < 1e-8
    inverse = torch.linalg.inv(expected.matrix)
    leverage = [torch.linalg.eigvals(c @ j @ inverse @ j.T).real.max()
                for j, c in zip(expected.jac, expected.hessian, strict=True)]
    assert relative_error(found.leave_one_out(strict=False).leverage, torch.stack(leverage)) < 1e-7
    # a draw of N(0, H⁻¹) is turned into one of N(0, H'⁻¹): columns of a root of the one make a root of the other
    changed = found.posterior_precision
    root = torch.linalg.cholesky(torch.linalg.inv(expected.reference.posterior_precision))
    draws = found.sample(3)
    assert draws.shape == (3, len(root)) and torch.isfinite(draws).all()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(changed.base, "sample", lambda count, generator: root.T)
        turned = changed.sample(len(root))
    assert relative_error(turned.T @ turned, inverse) < 1e-8
    assert relative_error(found.fitted.theta, own.theta + expected.move) < 1e-9


@pytest.mark.parametrize("verb", ["remove", "relabel", "relabel and reweight", "add"])
def test_the_empirical_fisher_of_a_structure_changes_with_the_labels(verb):
    case = CASES[0]
    expected, own = Changed(case, "diag", verb, "ef"), problem(case[0])
    assert relative_error(output_curvature(*case[:2], "ef"), expected.reference.hessian) > 0.1
    found = asked(case, fit(*case, "ef", "diag"), verb)
    mean = outputs(own.network, own.x_new) + jacobians(case[0])[1] @ expected.move
    assert relative_error(found.outputs(own.x_new), mean) < 1e-8
    log_det = torch.linalg.slogdet(expected.matrix).logabsdet - expected.reference.precision.log().sum()
    assert relative_error(found.log_det(), log_det) < 1e-8


@pytest.mark.parametrize("structure", ["kfac", "diag"])
def test_changes_one_after_the_other_are_one_joint_step(structure):
    case = CASES[0]
    posterior, x = fit(*case, "ggn", structure), problem(case[0]).x_new
    before = posterior.latent_moments(x)
    together = posterior.remove([1, 5]).latent_moments(x)
    for other in (posterior.remove(5).remove(1), posterior.remove([1, 2, 5]).reweight(2, 1.0)):
        for a, b in zip(other.latent_moments(x), together, strict=True):
            assert relative_error(a, b) < 1e-10
    for nothing in (posterior.remove([]), posterior.remove(5).reweight(5, 1.0)):
        for a, b in zip(nothing.latent_moments(x), before, strict=True):
            assert relative_error(a, b) < 1e-12
    assert "2 removed" in repr(posterior.remove([1, 5]))
    for a, b in zip(posterior.latent_moments(x), before, strict=True):
        assert torch.equal(a, b), "the posterior that was asked has changed"


def test_hyperparameters_of_a_changed_structure_may_move():
    """The evidence's slope in the precisions and in a common noise, against differences; both posteriors see them."""
    own = problem("deep_mlp")
    y = targets(LIKELIHOODS["gaussian"], own)
    posterior = ntkl.laplace(own.network, (own.x, y), ntkl.Gaussian(noise=0.7), ntkl.GaussianPrior(2.0, groups="layer"),
                             "kfac")
    found = posterior.reweight([1, 4], [0.4, 1.5])
    found.log_marginal_likelihood().backward()
    for parameter in (found.prior.log_precision, found.likelihood.log_noise):
        slopes = []
        for place in range(parameter.numel()):
            values = []
            for shift in (1e-4, -1e-4):
                with torch.no_grad():
                    parameter.view(-1)[place] += shift
                    values.append(found.log_marginal_likelihood().item())
                    parameter.view(-1)[place] -= shift
            slopes.append((values[0] - values[1]) / 2e-4)
        assert relative_error(parameter.grad.flatten(), torch.tensor(slopes).double()) < 1e-5
    single = found.to(dtype=torch.float32)
    assert single.latent_moments(own.x_new)[0].dtype == torch.float32
    assert posterior.latent_moments(own.x_new)[0].dtype == torch.float64
    with torch.no_grad():
        posterior.prior.log_precision += 0.1  # asks for the algebra anew, of sums that are double still
    fresh = ntkl.laplace(own.network, (own.x, y), posterior.likelihood, copy.deepcopy(posterior.prior), "kfac")
    assert relative_error(posterior.log_det(), fresh.log_det()) < 1e-12


def test_what_a_changed_structure_refuses():
    posterior = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(), ntkl.GaussianPrior(5.0), "kfac")
    found, more = posterior.reweight([0, 1], 0.5), (inputs(2), labels()[:2])
    for steps in (2, None):
        with refused(ntkl.UnsupportedError, "steps=1 for structure='kfac'", f"steps={steps}", 'structure="gp"'):
            posterior.remove(0, steps=steps)
    with refused(ntkl.UnsupportedError, "to condition", "what-if", "add"):
        found.condition(more)
    with refused(ntkl.UnsupportedError, "part of", "what-if", "Take the part first"):
        found.subset([0, 1])
    with refused(ntkl.UnsupportedError, "to save", "what-if", "Save the original"):
        found.save("nowhere.pt")
    with refused(ntkl.UnsupportedError, "over many precisions", "what-if", "log_precision"):
        found.evidence_curve([1.0])
    with refused(ntkl.UnsupportedError, "unchanged", "changed", "Merge first"):
        posterior.merge(found)
    tempered = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(temperature=2.0), structure="diag")
    with refused(ntkl.UnsupportedError, "gradient", "what-if", "Fit them first"):
        tempered.reweight([0], 2.0).log_marginal_likelihood().backward()
    damped = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(), structure=ntkl.KFAC(damped=True))
    with refused(ntkl.UnsupportedError, "not damped", "damped", "KFAC"):
        damped.reweight([0], 2.0).effective_parameters()
    small = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(), structure="diag",
                         settings=ntkl.Settings(memory_budget=6_000))
    with refused(ntkl.MemoryBudgetError, "points", ".", r'fewer points.*subset\(points that stay\).*"moving"'):
        small.reweight(range(9), 2.0)
    assert small.subset(range(3)).num_examples == 3


def test_a_group_with_too_high_a_leverage_stays_in_the_curvature():
    """KFAC holds 0.81 of seven points, 0.94 of eight; of an exact structure nothing is too much."""
    data, x = (inputs(), labels()), inputs(3)
    held = ntkl.laplace(network(), data, ntkl.Categorical(), ntkl.GaussianPrior(3.0), "kfac")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held.remove(range(7))
        ntkl.laplace(network(), data, ntkl.Categorical(), ntkl.GaussianPrior(1e-3), "full").remove(range(8))
    with pytest.warns(ntkl.NTKLaplaceWarning, match="leverage of 0.9.* to first order"):
        found = held.remove(range(8))
    assert relative_error(found.latent_moments(x)[1], held.latent_moments(x)[1]) < 1e-12
    more = ntkl.laplace(network(), data, ntkl.Categorical(), ntkl.GaussianPrior(0.3), "kfac").add(x[:1], data[1][:1])
    with pytest.warns(ntkl.NTKLaplaceWarning, match="to first order"):
        found = more.remove(range(8))
    assert relative_error(found.latent_moments(x)[1], more.latent_moments(x)[1]) < 1e-12  # what is added is added
    with pytest.warns(ntkl.NTKLaplaceWarning, match="to first order"):
        one = ntkl.laplace(network(), data, ntkl.Categorical(), ntkl.GaussianPrior(0.01), "kfac")
        first = one.explain(x, output=0)
        moved = one.remove(0).outputs(x)[:, 0] - one.outputs(x)[:, 0]
    assert first.leverage[0] > 0.9 and relative_error(moved, one.removal_effects(x, output=0)[:, 0]) < 1e-8
