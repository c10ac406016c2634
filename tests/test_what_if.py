"""What if: changed training data against refits of the linearized model in weight space, written out."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from exact_cases import TURNS, fit, ids, trained
from reference import jacobian, outputs, relative_error, take
from reference_refit import Linearized
from refusals import inputs, labels, network, refused
from registry import LIKELIHOODS, PRIORS, fresh, problem, targets
from registry_cases import jacobians, tolerance

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")

STEPS = (1, 3, None)
GROUP = [1, 4]
SOME = [case for case in TURNS if case[0] in (
    "deep_mlp", "cnn_groups", "transformer_tied", "scalar_outputs", "cross_attention_tuple", "far_from_optimum",
    "direct_parameters",
)]


@functools.cache
def linearized(case: tuple[str, str, str]) -> tuple[Linearized, Tensor, Tensor]:
    """The dense model, its targets, and the gradient that its training left."""
    name, likelihood, prior = case
    own = problem(name)
    precision, mean = PRIORS[prior].dense(own)
    model = Linearized(LIKELIHOODS[likelihood].log_density, outputs(own.network, own.x), jacobians(name)[0], precision,
                       own.theta - mean)
    y = targets(LIKELIHOODS[likelihood], own)
    ones = torch.ones(len(model.f), dtype=torch.float64)
    return model, y, model.gradient(torch.zeros_like(precision), y, ones)[0]


def without(count: int, indices: list[int], weight: float = 0.0) -> Tensor:
    weights = torch.ones(count, dtype=torch.float64)
    weights[indices] = weight
    return weights


def changes(case: tuple[str, str, str]):
    """Each verb with its dense counterpart: (posterior -> posterior, targets, weights)."""
    _, y, _ = linearized(case)
    n = len(y)
    other = y.clone()
    other[GROUP] = y[[0, 2]]
    return {
        "remove": (lambda p, s: p.remove(GROUP, steps=s), y, without(n, GROUP)),
        "reweight": (lambda p, s: p.reweight(GROUP, [0.3, 2.0], steps=s), y,
                     without(n, [1], 0.3) * without(n, [4], 2.0)),
        "relabel": (lambda p, s: p.relabel(GROUP, other[GROUP], steps=s), other, torch.ones(n, dtype=torch.float64)),
    }


def check(found, model: Linearized, moved: tuple[Tensor, Tensor], case, x_new, jac_new: Tensor, limit: float) -> None:
    """Means and covariances of f at new inputs, joint and blocks."""
    move, curvature = moved
    mean, blocks = found.latent_moments(x_new)
    f = outputs(problem(case[0]).network, x_new) + jac_new @ move
    flat = jac_new.flatten(0, 1)
    covariance = flat @ torch.linalg.solve(curvature, flat.T)
    n, c = f.shape
    assert relative_error(mean, f) < limit
    assert relative_error(found.latent(x_new).covariance_matrix, covariance) < limit
    own = torch.stack([covariance[i * c : i * c + c, i * c : i * c + c] for i in range(n)])
    assert relative_error(blocks, own) < limit


@pytest.mark.parametrize("verb", ["remove", "reweight", "relabel"])
@pytest.mark.parametrize("case", SOME, ids=ids)
def test_changes_are_newton_steps_of_the_linearized_model(case, verb):
    """Mean and covariance after 1 step, 3 steps and at the optimum; what training left undone is held."""
    model, _, held = linearized(case)
    change, labels_, weights = changes(case)[verb]
    for steps in STEPS:
        if steps == 3 and case[1] == "poisson":
            continue  # undamped steps of an exponential overflow
        found = change(fit(*case, "gp"), steps)
        moved = model.refit(labels_, weights, steps, held)
        check(found, model, moved, case, problem(case[0]).x_new, jacobians(case[0])[1], tolerance(case[0], 1e-8))


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("case", [c for c in SOME if c[1] != "poisson"], ids=ids)
def test_added_points_pull(case, steps):
    """New points enter the fit; the mean follows."""
    model, y, held = linearized(case)
    own, name = problem(case[0]), case[0]
    x_more, y_more = take(own.x_new, slice(0, 2)), y[:2]
    if own.case.dtype != torch.float64:
        pytest.skip("one pass in float32 or two: the same to rounding alone")
    more = Linearized(model.density, torch.cat([model.f, outputs(own.network, x_more)]),
                      torch.cat([model.jac, jacobians(name)[1][:2]]), model.precision, model.offset)
    found = fit(*case, "gp").add(x_more, y_more, steps=steps)
    assert found.num_examples == len(y) + 2
    moved = more.refit(torch.cat([y, y_more]), without(len(y) + 2, []), steps, held)
    check(found, more, moved, case, own.x_new, jacobians(name)[1], 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_at_the_map_a_removal_is_the_plain_refit(likelihood):
    """At a stationary point nothing is held, and the optimum is that of the rest of the data; so is its evidence."""
    case, y = trained(likelihood)
    prior = PRIORS["scalar"].build(case)
    posterior = ntkl.laplace(case.network, (case.x, y), LIKELIHOODS[likelihood].build(), prior)
    model = Linearized(LIKELIHOODS[likelihood].log_density, outputs(case.network, case.x),
                       jacobian(case.network, case.x), torch.full_like(_theta(case), 0.7), _theta(case))
    n = len(y)
    for indices in ([0], [2, 5], [0, 1, 3, 6]):
        found = posterior.remove(indices, steps=None)
        move, curvature = model.refit(y, without(n, indices), None)
        jac = jacobian(case.network, case.x_new)
        f = outputs(case.network, case.x_new) + jac @ move
        for mean in ("map", "posterior"):
            assert relative_error(found.latent_moments(case.x_new, mean=mean)[0], f) < 1e-9
        assert relative_error(found.predict(case.x_new, method="map").mean.reshape(f.shape),
                              LIKELIHOODS[likelihood].response(f)) < 1e-9
        rest = [i for i in range(n) if i not in indices]
        density = sum(model.density((model.f + model.jac @ move)[i], _row(y, i)) for i in rest)
        energy = 0.35 * (_theta(case) + move).square().sum()
        log_det = torch.linalg.slogdet(curvature / 0.7).logabsdet
        evidence = found.log_marginal_likelihood()
        assert relative_error(evidence, density - energy - 0.5 * log_det) < 1e-9
        assert relative_error(found.log_marginal_likelihood(correction=True), evidence) < 1e-9


def _theta(case) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in case.network.parameters()])


def _row(y: Tensor, i: int) -> Tensor:
    return y[i]


def test_a_linear_model_without_points_is_the_model_of_the_rest():
    """Identity 7: linear in its parameters with Gaussian noise, one step is the whole refit, in every answer."""
    torch.manual_seed(2)
    x, y = torch.randn(9, 3).double(), torch.randn(9, 2).double()
    new, rest = torch.randn(4, 3).double(), [0, 2, 3, 5, 6, 8]

    def posterior(rows: list[int] | slice):
        design = torch.cat([x[rows], torch.ones(len(x[rows]), 1).double()], 1)
        best = torch.linalg.solve(design.T @ design / 0.3 + 0.7 * torch.eye(4).double(), design.T @ y[rows] / 0.3)
        layer = torch.nn.Linear(3, 2).double()
        with torch.no_grad():
            layer.weight.copy_(best[:3].T)
            layer.bias.copy_(best[3])
        return ntkl.laplace(layer, (x[rows], y[rows]), ntkl.Gaussian(noise=0.3), ntkl.GaussianPrior(0.7))

    truth, whole = posterior(rest), posterior(slice(None))
    for found in (
        whole.remove([1, 4, 7]), whole.remove([1, 4, 7], steps=None), whole.remove(7).remove([4, 1]),
        posterior(rest[:-1]).add(x[rest[-1:]], y[rest[-1:]]),
    ):
        for a, b in zip(found.latent_moments(new), truth.latent_moments(new), strict=True):
            assert relative_error(a, b) < 1e-10
        assert relative_error(found.predict(new).log_prob(y[:4]), truth.predict(new).log_prob(y[:4])) < 1e-10
        assert relative_error(found.log_marginal_likelihood(), truth.log_marginal_likelihood()) < 1e-10
        assert relative_error(found.effective_parameters(), truth.effective_parameters()) < 1e-10
    kept = whole.remove([1, 4, 7])
    loo, truth_loo = kept.leave_one_out(), truth.leave_one_out()
    for name in ("mean", "covariance", "log_density", "leverage", "self_influence", "information"):
        assert relative_error(getattr(loo, name)[rest], getattr(truth_loo, name)) < 1e-10
    explained, truth_explained = kept.explain(new), truth.explain(new)
    assert relative_error(explained.removal[:, rest], truth_explained.removal) < 1e-10
    assert relative_error(explained.contributions[:, rest], truth_explained.contributions) < 1e-10
    assert explained.removal[:, [1, 4, 7]].abs().max() == 0


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_one_removal_equals_explain_and_leave_one_out(likelihood):
    """Three ways to the same closed form, away from the optimum."""
    posterior = fit("deep_mlp", likelihood, "layer", "gp")
    x = problem("deep_mlp").x
    explained, loo = posterior.explain(x), posterior.leave_one_out()
    before = posterior.latent_moments(x)
    for i in (0, 3):
        mean, covariance = posterior.remove(i).latent_moments(x)
        assert relative_error(mean - before[0], explained.removal[:, i]) < 1e-8
        spread = (covariance - before[1]).diagonal(dim1=1, dim2=2)
        assert relative_error(spread, explained.widening[:, i]) < 1e-8
        assert relative_error(mean[i], loo.mean[i]) < 1e-9
        assert relative_error(covariance[i], loo.covariance[i]) < 1e-9


def test_changing_nothing_moves_nothing_and_order_does_not_matter():
    posterior = fit("deep_mlp", "categorical", "layer", "gp")
    x = problem("deep_mlp").x_new
    before = posterior.latent_moments(x)
    for steps in STEPS:
        for same in (posterior.remove([], steps=steps), posterior.reweight([0, 2], 1.0, steps=steps)):
            for a, b in zip(same.latent_moments(x), before, strict=True):
                assert relative_error(a, b) < 1e-12
    together = posterior.remove([1, 5], steps=None).latent_moments(x)
    there = torch.tensor([False, True, False, False, False, True] + [False] * (posterior.num_examples - 6))
    back = posterior.remove([1, 2, 5], steps=None).reweight(2, 1.0, steps=None)
    for other in (posterior.remove(5, steps=None).remove(1, steps=None), posterior.remove(there, steps=None), back):
        for a, b in zip(other.latent_moments(x), together, strict=True):
            assert relative_error(a, b) < 1e-9
    for a, b in zip(posterior.latent_moments(x), before, strict=True):
        assert torch.equal(a, b), "the posterior that was asked has changed"


def test_an_added_point_is_another_of_its_kind():
    """Adding a training point again is counting it twice; adding conditions, and moves the mean besides."""
    posterior, own = fit("deep_mlp", "categorical", "layer", "gp"), problem("deep_mlp")
    y = targets(LIKELIHOODS["categorical"], own)
    twice = posterior.add(own.x[2:3], y[2:3], steps=None)
    for a, b in zip(twice.latent_moments(own.x_new), posterior.reweight(2, 2.0, steps=None).latent_moments(own.x_new),
                    strict=True):
        assert relative_error(a, b) < 1e-9
    once = posterior.add(own.x[2:3], y[2:3])
    assert relative_error(once.latent_moments(own.x_new)[1],
                          posterior.condition((own.x[2:3], y[2:3])).latent_moments(own.x_new)[1]) < 1e-9
    kept = posterior.remove([0]).condition((own.x[2:3], y[2:3]))
    assert relative_error(kept.latent_moments(own.x_new)[0], posterior.remove([0]).latent_moments(own.x_new)[0]) < 1e-12
    # its own curvature is that where the weights have moved, the others' stays where their one step began
    removed, cut = posterior.remove([0]), len(own.x_new) * posterior.num_outputs
    joint = removed.latent(torch.cat([own.x_new, own.x[2:3]])).covariance_matrix
    across, hessian = joint[:cut, cut:], posterior.likelihood.curvature(removed.outputs(own.x[2:3]))[0].detach()
    taken = across @ torch.linalg.solve(torch.eye(len(hessian)) + hessian @ joint[cut:, cut:], hessian @ across.T)
    assert relative_error(kept.latent(own.x_new).covariance_matrix, joint[:cut, :cut] - taken) < 1e-9


def test_all_methods_of_a_changed_posterior_use_the_moved_model():
    posterior, x = fit("deep_mlp", "categorical", "layer", "gp").remove([0, 3]), problem("deep_mlp").x_new
    mean, covariance = posterior.latent_moments(x)
    assert "2 removed" in repr(posterior)
    assert posterior.weights.tolist()[:4] == [0, 1, 1, 0]
    assert torch.equal(posterior.outputs(x), mean)
    assert relative_error(posterior.latent(x).mean, mean) == 0
    draws = posterior.sample(4000, x, generator=torch.Generator().manual_seed(0))
    sd = covariance.diagonal(dim1=1, dim2=2).sqrt()
    assert ((draws.mean(0) - mean) / sd).abs().max() < 0.1
    assert relative_error(posterior.prior_latent(x).mean, fit("deep_mlp", "categorical", "layer", "gp").prior_latent(x)
                          .mean) < 1e-10
    explained = posterior.explain(x)
    total = explained.offset + explained.contributions.sum(1) + explained.gap
    assert relative_error(total, mean) < 1e-10
    gp = ntkl.gp.LaplaceGP(posterior)
    gp.eval()
    assert relative_error(gp(x).mean, mean) < 1e-12
    before = posterior.log_marginal_likelihood(correction=True).item()
    hyperparameters = [*posterior.prior.parameters(), *posterior.likelihood.parameters()]  # the cached fit's own
    own = [parameter.detach().clone() for parameter in hyperparameters]
    try:
        posterior.fit_hyperparameters(steps=3)
        assert posterior.log_marginal_likelihood() > before - 100
    finally:
        with torch.no_grad():
            for parameter, value in zip(hyperparameters, own, strict=True):
                parameter.copy_(value)


# ------------------------------------------------------------------------------------------------------------ refusals


def small(structure: str = "gp", curvature: str = "ggn"):
    return ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(), structure=structure, curvature=curvature)


@pytest.mark.parametrize("indices, got", [
    ([9], "9"), ([-1], "-1"), ([1, 1], "1 more than once"), ([0.5], "float"), (torch.ones(4, dtype=torch.bool),
    "4 booleans"), ("abc", "abc"),
])
def test_indices_that_are_none(indices, got):
    with refused(ntkl.DataError, "training point", got, "from 0 to 8"):
        small().remove(indices)


def test_changes_that_make_no_sense():
    posterior = small()
    with refused(ntkl.DataError, "at least one training point", "none", "fewer"):
        posterior.remove(range(9))
    for weights in (-1.0, float("nan"), [1.0, 2.0, 3.0]):
        with refused(ntkl.HyperparameterError, "weight of at least 0", ".", "0 to remove"):
            posterior.reweight([0, 1], weights)
    for steps in (0, -1, 1.5, True, "all"):
        with refused(ntkl.HyperparameterError, "steps of at least 1", ".", "steps=1"):
            posterior.remove(0, steps=steps)
    with refused(ntkl.TargetError, "class labels in 0..2", "7", "classes"):
        posterior.relabel([0], [7])
    with refused(ntkl.TargetError, "targets for 2 examples", ".", "row of targets"):
        posterior.relabel([0, 1], [1, 1, 1])
    with refused(ntkl.TargetError, "class labels", "5", "classes"):
        posterior.add(inputs()[:1], [5])
    with refused(ntkl.UnsupportedError, "to save", "what-if", "Save the original"):
        posterior.remove(0).save("nowhere.pt", include_data=True)
    with refused(ntkl.UnsupportedError, "unchanged", "1 removed", "Merge first"):
        posterior.merge(posterior.remove(0))


def test_a_change_of_no_points_is_none():
    posterior, x = small(), inputs(3)
    nothing = torch.zeros(9, dtype=torch.bool)
    for same in (
        posterior.remove([]), posterior.remove(nothing), posterior.reweight([], []), posterior.reweight([], 2.0),
        posterior.relabel([], []), posterior.relabel([], 1), posterior.relabel(nothing, torch.zeros(0)),
    ):
        assert torch.equal(same.outputs(x), posterior.outputs(x)) and torch.equal(same.targets, posterior.targets)
    with refused(ntkl.TargetError, "no target for no points", "2", "which points"):
        posterior.relabel([], [1, 2])


def test_one_label_for_all_and_targets_of_regression():
    posterior = small()
    assert posterior.relabel([0, 2], 1).targets[[0, 2]].tolist() == [1, 1]
    y = torch.randn(9, 3).double()
    regression = ntkl.laplace(network(), (inputs(), y), ntkl.Gaussian(noise=0.5))
    assert torch.equal(regression.relabel(4, y[0]).targets[4], y[0])
    assert torch.equal(regression.relabel([4, 5], y[:2]).targets[4:6], y[:2])
    noisy = ntkl.laplace(network(), (inputs(), y), ntkl.Gaussian(noise=torch.rand(9) + 0.5))
    assert torch.isfinite(noisy.remove([0, 1]).latent_moments(inputs())[0]).all()


@pytest.mark.parametrize("structure", ["gp", "full"])
def test_scores_of_a_changed_posterior_are_those_of_the_data_that_are_left(structure):
    """Subsets, the learning curve and the conditional evidence count a removed point for nothing."""
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(8, 3, generator=generator).double(), torch.randn(8, 1, generator=generator).double()
    network = torch.nn.Linear(3, 1).double()
    one_by_one = ntkl.Settings(batch_size=1, progress=False)
    posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(noise=0.4), structure=structure, settings=one_by_one)
    posterior = posterior.remove([2, 6])
    kept = torch.tensor([0, 1, 3, 4, 5, 7])
    truth = ntkl.laplace(network, (x[kept], y[kept]), ntkl.Gaussian(noise=0.4))
    evidence = truth.log_marginal_likelihood(correction=True)
    assert relative_error(posterior.log_marginal_likelihood(correction=True), evidence) < 1e-9
    if structure == "gp":
        assert relative_error(posterior.learning_curve(0).terms.sum(), evidence) < 1e-9
    for found in (posterior.subset(kept), posterior.add(x[:1], y[:1]).subset(kept)):
        assert relative_error(found.log_marginal_likelihood(correction=True), evidence) < 1e-9
        again = found.reweight([0], 1.0)
        assert relative_error(again.log_marginal_likelihood(correction=True), evidence) < 1e-9
        # what training had left undone is held for the points of the subset alone
        assert relative_error(found.remove([1]).outputs(x), truth.remove([1]).outputs(x)) < 1e-9
    weights = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 1.0]).double()
    weighted = ntkl.laplace(network, (x[kept], y[kept]), ntkl.Gaussian(noise=0.4 / weights))
    assert relative_error(posterior.reweight([1, 3], weights[1:3]).log_det(), weighted.log_det()) < 1e-9
    added = posterior.add(x[:1], y[:1]).subset([*kept, 8]).remove([1])
    assert relative_error(added.outputs(x), truth.add(x[:1], y[:1]).remove([1]).outputs(x)) < 1e-9


def test_conditioning_after_a_what_if_leaves_the_weights_where_they_are():
    """The pull of points that were conditioned on stays held in the next what-if, as it does before the first."""
    own = problem("deep_mlp")
    posterior, more = fit("deep_mlp", "gaussian", "layer", "gp"), (own.x[:3], targets(LIKELIHOODS["gaussian"], own)[:3])
    for changed in (posterior.remove([0], steps=None), posterior.add(*more, steps=None)):
        found = changed.condition(more)
        for a, b in zip(found.remove([]).latent_moments(own.x_new), found.latent_moments(own.x_new), strict=True):
            assert relative_error(a, b) < 1e-9
        moved = found.remove([1]).outputs(own.x_new) - found.outputs(own.x_new)
        assert relative_error(moved, found.explain(own.x_new).removal[:, 1]) < 1e-9


def test_changes_of_the_wrong_type():
    posterior = small()
    for weights in ("a", None):
        with refused(ntkl.HyperparameterError, "weight of at least 0", ".", "0 to remove"):
            posterior.reweight(0, weights)
    for y in ("a", None):
        with refused(ntkl.TargetError, "number", repr(y), "one target per point"):
            posterior.relabel(0, y)


def test_the_sums_of_a_what_if_have_no_graph():
    """The curvature at the likelihood's present temperature is a number: a graph would double the memory."""
    case = fresh("deep_mlp")
    y = targets(LIKELIHOODS["categorical"], case)
    posterior = ntkl.laplace(case.network, (case.x, y), ntkl.Categorical(), structure="full")
    other = posterior.remove([1]).fitted
    assert posterior.likelihood.log_temperature.requires_grad
    assert not any(total.requires_grad for total in other.structure.sums(other.model).values())


def test_a_step_that_goes_too_far_is_told():
    """A sure network at new labels: its curvature is near zero, and one step flips every prediction."""
    x = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]]).double()
    sure = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(sure.weight, 4.0)
    posterior = ntkl.laplace(sure, (x, (x > 0).double()), ntkl.Bernoulli(), ntkl.GaussianPrior(0.01))
    with pytest.warns(ntkl.NTKLaplaceWarning, match="goes too far: .* from .* to .* nats. Use steps=None"):
        far = posterior.relabel([0], [1.0])
    near = posterior.relabel([0], [1.0], steps=None)
    assert abs(far.outputs(x)[0]) > 4 * abs(near.outputs(x)[0])
