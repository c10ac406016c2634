"""Explanations against refits: shares add up to the prediction, removals are Newton steps, all in closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from exact_cases import TURNS, fit, ids, trained, truth
from ntk_laplace.plotting.style import png
from ntk_laplace.posterior.explain.algebra import Removals
from reference import jacobian, outputs, relative_error
from refusals import inputs, labels, network, refused
from registry import LIKELIHOODS, NETWORKS, PRIORS, fresh, problem, targets
from registry_cases import jacobians, tolerance

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")


@pytest.mark.parametrize("case", TURNS, ids=ids)
def test_shares_add_up(case):
    """f(x) = offset + Σ contributions + gap, and each part is what it is said to be."""
    reference, limit = truth(*case), tolerance(case[0], 1e-9)
    explanation = fit(*case, "gp").explain(problem(case[0]).x_new)
    jac = jacobians(case[0])[1]
    shares = torch.einsum("xcp,p,nkp,nk->xnc", jac, 1 / reference.precision, reference.jac, reference.residual)
    assert relative_error(explanation.contributions, shares) < limit
    f = outputs(problem(case[0]).network, problem(case[0]).x_new)
    # of a network that is linear in its weights the offset is zero, up to the rounding of f
    assert (explanation.offset - (f - jac @ reference.offset)).norm() < limit * (f.norm() + explanation.offset.norm())
    total = explanation.offset + explanation.contributions.sum(1) + explanation.gap
    assert relative_error(total, f) < limit


@pytest.mark.parametrize("case", TURNS, ids=ids)
def test_removing_a_point_is_a_newton_step_without_it(case):
    """-V_xi (I - Λ_i V_ii)⁻¹ r_i is J_x times -(H - J_iᵀΛ_iJ_i)⁻¹ J_iᵀr_i, in weight space."""
    reference, limit = truth(*case), tolerance(case[0], 1e-8)
    explanation = fit(*case, "gp").explain(problem(case[0]).x_new)
    loo = fit(*case, "gp").leave_one_out()
    jac_new = jacobians(case[0])[1]
    effects, means, covariances, leverages = [], [], [], []
    each = torch.einsum("ncp,ncd,ndq->npq", reference.jac, reference.hessian, reference.jac)
    f_train = outputs(problem(case[0]).network, problem(case[0]).x)
    for i, (jac, curvature, residual, f) in enumerate(
        zip(reference.jac, reference.hessian, reference.residual, f_train, strict=True)
    ):
        # summed over the others: a difference would lose what a point of high leverage drowns
        without = torch.cat([each[:i], each[i + 1 :]]).sum(0) + torch.diag(reference.precision)
        step = -torch.linalg.solve(without, jac.T @ residual)
        effects.append(jac_new @ step)
        means.append(f + jac @ step)
        covariances.append(jac @ torch.linalg.solve(without, jac.T))
        inner = jac @ torch.linalg.solve(reference.posterior_precision, jac.T)
        leverages.append(torch.linalg.eigvals(curvature @ inner).real.max())
    assert relative_error(explanation.removal, torch.stack(effects, 1)) < limit
    assert relative_error(loo.mean, torch.stack(means)) < limit
    assert relative_error(loo.covariance, torch.stack(covariances)) < limit
    for leverage in (explanation.leverage, loo.leverage):
        assert (leverage - torch.stack(leverages)).abs().max() < limit
        assert 0 <= leverage.min() and leverage.max() < 1


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_at_the_map_there_is_no_gap(likelihood):
    """The representer identity of [T20] 5.2 at a stationary point."""
    case, y = trained(likelihood)
    prior = PRIORS["scalar"].build(case)
    posterior = ntkl.laplace(case.network, (case.x, y), LIKELIHOODS[likelihood].build(), prior=prior)
    explanation = posterior.explain(case.x_new)
    assert explanation.gap.abs().max() < 1e-8 * explanation.f.abs().max()
    away = fit("far_from_optimum", likelihood, "scalar", "gp").explain(case.x_new)
    assert away.gap.abs().max() > 1e-2


def test_linear_regression_without_a_point_is_the_refit():
    """Identity 7: a linear model at its MAP, refitted without each point in turn."""
    noise, delta = 0.3, 0.7
    torch.manual_seed(1)
    network, x, y = torch.nn.Linear(3, 2).double(), torch.randn(8, 3).double(), torch.randn(8, 2).double()
    design = torch.cat([x, torch.ones(8, 1).double()], 1)

    def weights(rows: Tensor) -> Tensor:
        gram = design[rows].T @ design[rows] / noise + delta * torch.eye(4, dtype=torch.float64)
        return torch.linalg.solve(gram, design[rows].T @ y[rows] / noise)

    with torch.no_grad():
        best = weights(torch.arange(8))
        network.weight.copy_(best[:3].T)
        network.bias.copy_(best[3])
    new = torch.randn(4, 3).double()
    posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(noise=noise), ntkl.GaussianPrior(delta))
    explanation, loo = posterior.explain(new), posterior.leave_one_out()
    for i in range(8):
        refit = weights(torch.tensor([n for n in range(8) if n != i]))
        change = torch.cat([new, torch.ones(4, 1).double()], 1) @ (refit - best)
        assert relative_error(explanation.removal[:, i], change) < 1e-10
        assert relative_error(loo.mean[i], design[i] @ refit) < 1e-10
        rows = torch.tensor([n for n in range(8) if n != i])
        spread = design[rows].T @ design[rows] / noise + delta * torch.eye(4, dtype=torch.float64)
        variance = design[i] @ torch.linalg.solve(spread, design[i]) + noise
        density = torch.distributions.Normal(loo.mean[i], variance.sqrt()).log_prob(y[i]).sum()
        assert relative_error(loo.log_density[i], density) < 1e-9


@pytest.mark.parametrize(("noise", "delta", "limit"), [(1e-2, 1e-4, 1e-6), (1e-4, 1e-4, 1e-4), (1e-6, 1e-3, 1e-3)])
def test_little_noise_and_a_weak_prior_cost_few_digits(noise: float, delta: float, limit: float) -> None:
    """No large numbers are subtracted: k(x, x_i) r_i is up to 1e8 times the effect here."""
    torch.manual_seed(0)
    x = torch.randn(40, 3).double()
    design = torch.cat([x, torch.ones(40, 1).double()], 1)
    y = design @ torch.tensor([1.0, -2.0, 0.5, 0.0]).double() + noise**0.5 * torch.randn(40).double()

    def weights(rows: list[int]) -> Tensor:
        gram = design[rows].T @ design[rows] / noise + delta * torch.eye(4, dtype=torch.float64)
        return torch.linalg.solve(gram, design[rows].T @ y[rows] / noise)

    network, best, new = torch.nn.Linear(3, 1).double(), weights(list(range(40))), torch.randn(5, 3).double()
    with torch.no_grad():
        network.weight.copy_(best[None, :3])
        network.bias.copy_(best[3:])
    posterior = ntkl.laplace(network, (x, y[:, None]), ntkl.Gaussian(noise), ntkl.GaussianPrior(delta))
    refits = torch.stack([weights([n for n in range(40) if n != i]) - best for i in range(40)])
    changes = torch.cat([new, torch.ones(5, 1).double()], 1) @ refits.T
    assert relative_error(posterior.removal_effects(new), changes) < limit
    exact = ntkl.laplace(network, (x, y[:, None]), ntkl.Gaussian(noise), ntkl.GaussianPrior(delta), "full")
    assert relative_error(posterior.predict_interval(new).width, exact.predict_interval(new).width) < limit


@pytest.mark.parametrize("curvature", ["mc", "ef"])
def test_residuals_outside_the_range_of_a_root(curvature: str) -> None:
    """Drawn labels give another root than the residuals: single and joint removals are those of weight space."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    x, y, new = torch.randn(12, 2).double(), torch.arange(12) % 3, torch.randn(3, 2).double()
    here, full = (ntkl.laplace(network, (x, y), ntkl.Categorical(), structure=structure, curvature=curvature)
                  for structure in ("gp", "full"))
    assert relative_error(here.removal_effects(new), full.removal_effects(new)) < 1e-9
    groups = [torch.tensor([0, 5, 7]), torch.tensor([1]), torch.tensor([2, 3])]
    joint = Removals(here.fitted).joint(here.jacobian(new), groups)
    for i, group in enumerate(groups):
        change = here.remove(group.tolist()).outputs(new[i : i + 1]) - here.outputs(new[i : i + 1])
        assert relative_error(joint[i : i + 1], change) < 1e-9


@pytest.mark.parametrize("name", NETWORKS)
def test_no_residual_outside_the_range_of_a_root(name: str) -> None:
    """Of layers of every kind: joint removals of single points are their single removals."""
    case = problem(name)
    y = targets(LIKELIHOODS["gaussian"], case)
    posterior = ntkl.laplace(case.network, (case.x, y), LIKELIHOODS["gaussian"].build(), ntkl.GaussianPrior(1.0))
    _require_one_change(posterior, case.x_new)


def test_no_residual_outside_where_rows_of_positions_are_written_out() -> None:
    torch.manual_seed(0)
    convolutional = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Flatten(),
                                  nn.Linear(128, 10)).double()
    x, y = torch.randn(40, 1, 8, 8).double(), torch.arange(40) % 10
    _require_one_change(ntkl.laplace(convolutional, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(1.0)), x[:3] + 0.1)


def _require_one_change(posterior: ntkl.Posterior, new: Any) -> None:
    rows, n = posterior.jacobian(new), posterior.num_examples
    removals = Removals(posterior.fitted)
    chosen = [torch.tensor([i % n]) for i in range(rows.num_examples)]
    found = removals.effects(rows)[0][range(len(chosen)), torch.cat(chosen)]
    assert relative_error(removals.joint(rows, chosen), found) < 1e-9


def test_the_first_output_is_explained_where_they_are_no_classes():
    """The largest of several real numbers in units of their own says nothing, and would change from input to input."""
    case = fresh("deep_mlp")
    with torch.no_grad():
        case.network[-1].bias[1] += 5.0
    posterior = ntkl.laplace(case.network, (case.x, outputs(case.network, case.x)), ntkl.Gaussian(0.1))
    assert int(outputs(case.network, case.x_new).argmax(1).max()) > 0
    found = posterior.explain(case.x_new, k=3)
    assert torch.equal(found.output, torch.zeros_like(found.output))
    assert torch.equal(posterior.removal_effects(case.x_new), posterior.removal_effects(case.x_new, 0))


def test_of_several_labels_the_most_probable_one_is_explained():
    """Independent labels, and a likelihood of one's own that says that its outputs are classes."""
    case = problem("deep_mlp")
    f = outputs(case.network, case.x)
    own = ntkl.CustomLikelihood(lambda f, y: (y * f.log_softmax(1)).sum(1), lambda f: f.softmax(1), classifies=True)
    for likelihood, y in ((ntkl.Bernoulli(), (f > f.mean()).to(f)), (own, torch.eye(5).to(f)[f.argmax(1)])):
        posterior = ntkl.laplace(case.network, (case.x, y), likelihood)
        assert torch.equal(posterior.explain(case.x_new, k=2).output, outputs(case.network, case.x_new).argmax(1))
    with pytest.raises(ntkl.UnsupportedError, match="classifies True or False"):
        ntkl.CustomLikelihood(lambda f, y: f.sum(1), classifies="yes")


def test_signs_and_order_match_the_text():
    """Supporting points come first by how far their removal lowers the output."""
    case = problem("deep_mlp")
    y = targets(LIKELIHOODS["categorical"], case)
    explanation = ntkl.laplace(case.network, (case.x, y), ntkl.Categorical()).explain(case.x_new, k=3)
    assert torch.equal(explanation.output, outputs(case.network, case.x_new).argmax(1))
    for i, output in enumerate(explanation.output):
        order = explanation.removal[i, :, output].argsort()
        assert torch.equal(explanation.supporting()[i], order[:3])
        assert torch.equal(explanation.opposing()[i], order.flip(0)[:3])
    table = explanation.to_dataframe()
    sides = (explanation.effect < 0).sum(1), (explanation.effect > 0).sum(1)
    assert len(table) == sum(int(side.clamp_max(3).sum()) for side in sides)
    for _, row in table.iterrows():
        assert row["removal_effect"] == explanation.effect[row["input"], row["training_index"]].item()
        assert ("lowers" in row["meaning"]) == (row["removal_effect"] < 0)
        assert row["speaks"] == ("for" if row["removal_effect"] < 0 else "against")


def test_the_jacobians_behind_the_table_are_the_references():
    """Jacobian used here come from the same place as the identities': a shared slip would show in one number."""
    case = problem("deep_mlp")
    assert relative_error(jacobians("deep_mlp")[0], jacobian(case.network, case.x)) == 0
    assert NETWORKS["deep_mlp"].outputs == 5


# ------------------------------------------------------------------------------------------------- what is asked of it


def _after(case, i: int, x_new):
    """Outputs and variances at new inputs after one dense Newton step without point i."""
    reference, jac_new = truth(*case), jacobians(case[0])[1]
    each = torch.einsum("ncp,ncd,ndq->npq", reference.jac, reference.hessian, reference.jac)
    without = torch.cat([each[:i], each[i + 1 :]]).sum(0) + torch.diag(reference.precision)
    f = outputs(problem(case[0]).network, x_new)
    moved = f - jac_new @ torch.linalg.solve(without, reference.jac[i].T @ reference.residual[i])
    return f, moved, torch.einsum("xcp,pq,xdq->xcd", jac_new, torch.linalg.inv(without), jac_new)


CATEGORICAL = ("deep_mlp", "categorical", "layer")


@pytest.mark.parametrize(
    "by", ["output", "logit", "probability", "log_likelihood", "variance", "probability_variance"]
)
def test_effects_are_differences_of_the_quantity(by):
    """Every quantity, recomputed from outputs and variances before and after each removal."""
    own, posterior, density = problem("deep_mlp"), fit(*CATEGORICAL, "gp"), LIKELIHOODS["categorical"]
    y = torch.tensor([1, 0, 4, 2])
    explanation = posterior.explain(own.x_new, output=2, by=by, y=y)
    assert explanation.by == by and explanation.output.tolist() == [2] * 4
    before = posterior.latent_moments(own.x_new)[1]
    slope = torch.func.vmap(torch.func.jacrev(lambda f: density.response(f)[2]))(outputs(own.network, own.x_new))
    for i in range(own.case.examples):
        f, moved, variance = _after(CATEGORICAL, i, own.x_new)
        expected = {
            "probability": lambda f=f, m=moved: (density.response(m) - density.response(f))[:, 2],
            "log_likelihood": lambda f=f, m=moved: torch.stack(
                [density.log_density(b, t) - density.log_density(a, t) for a, b, t in zip(f, m, y, strict=True)]
            ),
            "variance": lambda v=variance: (v - before)[:, 2, 2],
            "probability_variance": lambda v=variance: torch.einsum("xc,xcd,xd->x", slope, v - before, slope),
        }.get(by, lambda f=f, m=moved: (m - f)[:, 2])()
        assert relative_error(explanation.effect[:, i], expected) < 1e-8
    words = {"output": "output 2", "logit": "logit 2", "probability": "the probability of class 2",
             "log_likelihood": "log likelihood by .* nats", "variance": "raises the variance of output 2",
             "probability_variance": "raises the variance of the probability of class 2"}[by]
    table = explanation.to_dataframe(k=2)
    assert table["meaning"].str.contains(words).all()
    assert (table["meaning"].str.contains("lowers") == (table["removal_effect"] < 0)).all()


@pytest.mark.parametrize("by, words", [
    ("output", "the output of class 1"), ("logit", "the logit of class 1"),
    ("probability", "the probability of class 1"),
    ("variance", "raises the variance of the output of class 1"), ("log_likelihood", "the log likelihood by .* nats"),
    ("probability_variance", "the variance of the probability of class 1"),
])
def test_one_output_of_two_classes_is_that_of_class_one(by, words):
    """An "output 0" would be read as class 0."""
    x = torch.randn(6, 2).double()
    posterior = ntkl.laplace(nn.Linear(2, 1).double(), (x, (x[:, :1] > 0).double()), ntkl.Bernoulli())
    meaning = posterior.explain(x, k=1, by=by, y=torch.ones(6)).to_dataframe()["meaning"]
    assert meaning.str.contains(words).all()


def test_supporters_of_a_sure_prediction_are_those_that_make_it_sure():
    """A variance can but rise: there is one side, and the strongest come first."""
    explanation = fit(*CATEGORICAL, "gp").explain(problem("deep_mlp").x_new, k=3, by="variance")
    assert explanation.effect.min() >= 0
    assert torch.equal(explanation.supporting(), explanation.effect.argsort(dim=1, descending=True)[:, :3])
    table = explanation.to_dataframe()
    assert len(table) == 4 * 3 and set(table["speaks"]) == {"for"}


@pytest.mark.parametrize("case", TURNS, ids=ids)
def test_importances_and_similarities(case):
    """[T20] 5.2: shares are the kernel with each output times the residual; the correlation is the kernel's own."""
    reference, limit = truth(*case), tolerance(case[0], 1e-9)
    explanation = fit(*case, "gp").explain(problem(case[0]).x_new)
    jac, jac_new = reference.jac, jacobians(case[0])[1]
    rows = jac_new[torch.arange(len(jac_new)), explanation.output]
    kernel = torch.einsum("xp,p,ncp->xnc", rows, 1 / reference.precision, jac)
    assert relative_error(explanation.kernel, kernel) < limit
    assert relative_error(explanation.importance, reference.residual) < limit
    assert relative_error(torch.einsum("xnc,nc->xn", explanation.kernel, explanation.importance), explanation.share) < (
        limit if limit < 1e-6 else 1e-4
    )
    own = torch.einsum("xp,p->x", rows**2, 1 / reference.precision)
    theirs = torch.einsum("ncp,p->nc", jac**2, 1 / reference.precision)[:, explanation.output].T
    same = kernel[torch.arange(len(rows)), :, explanation.output]
    assert relative_error(explanation.similarity, same) < limit
    assert relative_error(explanation.correlation, same / (own[:, None] * theirs).sqrt()) < limit
    assert explanation.correlation.abs().max() <= 1 + 1e-6


def test_axes_are_named_as_they_are():
    explanation = fit(*CATEGORICAL, "gp").explain(problem("deep_mlp").x_new)
    sizes = {"input": 4, "training point": problem("deep_mlp").case.examples, "output": 5}
    assert len(explanation.AXES) == 13
    for name, axes in explanation.AXES.items():
        assert getattr(explanation, name).shape == tuple(sizes[axis] for axis in axes)


def test_the_strongest_of_either_sign():
    explanation = fit(*CATEGORICAL, "gp").explain(problem("deep_mlp").x_new)
    for found, effect in zip(explanation.top(3), explanation.effect, strict=True):
        assert found.tolist() == sorted(range(len(effect)), key=lambda j: -abs(float(effect[j])))[:3]


def test_the_decomposition_as_a_table():
    explanation = fit(*CATEGORICAL, "gp").explain(problem("deep_mlp").x_new)
    table = explanation.decomposition()
    assert len(table) == 4 * 5
    total = table["offset"] + table["contributions"] + table["gap"]
    assert (total - table["prediction"]).abs().max() < 1e-10
    assert table.loc[7, ["input", "output"]].tolist() == [1, 2]
    assert table.loc[7, "prediction"] == explanation.f[1, 2].item()


@pytest.mark.parametrize("case", TURNS, ids=ids)
def test_the_training_set_seen_from_within(case):
    """Self-influence, effective parameters and information from dense matrices."""
    reference, limit = truth(*case), tolerance(case[0], 1e-7)
    posterior = fit(*case, "gp")
    loo, f = posterior.leave_one_out(), outputs(problem(case[0]).network, problem(case[0]).x)
    density, y = LIKELIHOODS[case[1]].log_density, targets(LIKELIHOODS[case[1]], problem(case[0]))
    y = y[:, None] if y.is_floating_point() and y.ndim == 1 else y
    own = torch.stack([density(a.double(), b) - density(m, b) for a, m, b in zip(f, loo.mean, y, strict=True)])
    finite = own.isfinite()  # without a point of high leverage a rate may overflow
    assert torch.equal(loo.self_influence.isfinite(), finite)
    assert relative_error(loo.self_influence[finite], own[finite]) < limit
    inner = reference.hessian @ (reference.jac @ torch.linalg.solve(
        reference.posterior_precision, reference.jac.flatten(0, 1).T
    ).T.view_as(reference.jac).mT)  # Λ_iV_ii
    assert relative_error(loo.effective_parameters, inner.diagonal(dim1=1, dim2=2).sum(1)) < limit
    assert relative_error(loo.effective_parameters.sum(), posterior.effective_parameters().sum()) < limit
    eye = torch.eye(inner.shape[1], dtype=inner.dtype)
    assert relative_error(loo.information, -0.5 * torch.linalg.slogdet(eye - inner).logabsdet) < max(limit, 1e-6)
    assert relative_error(loo.importance, reference.residual.norm(dim=1)) < limit


def test_the_training_table_sorts_by_any_column():
    loo = fit(*CATEGORICAL, "gp").leave_one_out()
    table = loo.to_dataframe()
    assert table["training_index"].tolist() == list(range(problem("deep_mlp").case.examples))
    for name in ("suspicion", "self_influence", "leverage", "information", "importance", "log_density"):
        values = loo.to_dataframe(name, k=4)[name].tolist()
        assert values == sorted(table[name], reverse=True)[:4]
        assert torch.equal(loo.ranked(name, 3), getattr(loo, name).argsort(descending=True)[:3])
    assert (table["suspicion"] == -table["log_density"]).all()
    with refused(ntkl.UnsupportedError, "one of suspicion", "'beauty'", "suspicion"):
        loo.ranked("beauty")


def test_wrong_labels_are_suspected_first():
    """A separated problem with two labels turned: the rest does not believe them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator).double()
    y = (x[:, 0] > 0).long()
    x[:, 0] += 2 * x[:, 0].sign()
    wrong = [7, 21]
    y[wrong] = 1 - y[wrong]
    network = torch.nn.Linear(2, 2).double()
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        norm = sum(p.square().sum() for p in network.parameters())
        loss = torch.nn.functional.cross_entropy(network(x), y, reduction="sum") + 0.5 * norm
        loss.backward()
        return loss

    optimizer.step(closure)
    posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(1.0))
    assert sorted(posterior.leave_one_out().ranked(k=2).tolist()) == wrong


@pytest.mark.parametrize("batch_size", [None, 1])
@pytest.mark.parametrize("count", [1, 3])
def test_as_many_targets_as_inputs(count, batch_size):
    """One too many would be the targets of other inputs."""
    posterior = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical())
    with refused(ntkl.TargetError, "targets for 2 examples", rf"\({count},\)", "one row of targets for each input"):
        posterior.explain(inputs(2), by="log_likelihood", y=labels(count), batch_size=batch_size)


def test_questions_that_make_no_sense():
    posterior, x = fit(*CATEGORICAL, "gp"), problem("deep_mlp").x_new
    with refused(ntkl.UnsupportedError, "output, logit, probability", "'loss'", "output"):
        posterior.explain(x, by="loss")
    with refused(ntkl.DataError, "an output from 0 to 4", "5", "by its number, the same at all inputs"):
        posterior.explain(x, output=5)
    with refused(ntkl.DataError, "k of at least 1", "0", "one or more"):
        posterior.explain(x, k=0)
    with refused(ntkl.TargetError, "targets for 4 examples", ".", "row of targets"):
        posterior.explain(x, by="log_likelihood", y=[1, 2])
    with refused(ntkl.DataError, "targets y at the inputs", "none", "y="):
        fit("deep_mlp", "gaussian", "layer", "gp").explain(x, by="log_likelihood")


PLOTS = {
    "bars": (lambda case: {}, 4),
    "table": (lambda case: {"inputs": case.x_new, "training": case.x, "names": list("abc")}, 8),
    "images": (lambda case: {"inputs": case.x_new, "training": case.x, "shape": (1, 3)}, 4 * 5),
    "line": (lambda case: {"inputs": case.x_new[:, 0], "training": case.x[:, :1]}, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLOTS)
@pytest.mark.parametrize("by", ["output", "variance"])
def test_pictures_of_every_kind(kind, by):
    case = problem("deep_mlp")
    arguments, panels = PLOTS[kind]
    explanation = fit(*CATEGORICAL, "gp").explain(case.x_new, k=2, by=by)
    figure = explanation.plot(**arguments(case))
    assert len(figure.axes) == (panels if by == "output" or kind != "images" else 4 * 3)
    words = [t for axes in figure.axes for t in (axes.title, axes.xaxis.label, *axes.get_yticklabels())]
    text = " ".join(t.get_text() for t in words)
    first = int(explanation.supporting()[0, 0])
    assert f"#{first}" in text or kind == "line"
    figure.canvas.draw()


@pytest.mark.slow
def test_the_page_contains_what_is_documented():
    case = problem("deep_mlp")
    page = fit(*CATEGORICAL, "gp").explain(case.x_new, k=2).to_html(inputs=case.x_new, training=case.x)
    for words in ("data:image/png;base64,", "exact for one Newton step", "How each prediction is made up", "removing"):
        assert words in page
    assert "<script" not in page and "http" not in page


def test_questions_of_the_wrong_type():
    for structure in ("gp", "full"):
        posterior = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(), structure=structure)
        for output in (0.5, "a", True, torch.tensor([0, 1])):
            with refused(ntkl.DataError, "an output from 0 to 2", ".", "outputs"):
                posterior.explain(inputs()[:2], output=output)
        for k in (0, 2.5, "3", None):
            with refused(ntkl.DataError, "k of at least 1", repr(k), "one or more"):
                posterior.explain(inputs()[:2], k=k)
        with refused(ntkl.UnsupportedError, "an effect on one of", "output", "Leave it out"):
            posterior.explain(inputs()[:2], by=["output"])


@pytest.mark.slow
def test_inputs_of_whole_numbers_have_a_picture():
    """Tokens have no mean; their table has."""
    net = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Flatten(), torch.nn.Linear(12, 3)).double()
    tokens = torch.arange(36).reshape(9, 4) % 5
    explanation = ntkl.laplace(net, (tokens, labels()), ntkl.Categorical(), structure="gp").explain(tokens[:2], k=2)
    assert "<img" in explanation.to_html(inputs=tokens[:2], training=tokens)


def test_pictures_of_arrays_and_of_what_does_not_fit():
    case = problem("deep_mlp")
    found = fit(*CATEGORICAL, "gp").explain(case.x_new, k=2)
    x, training = case.x_new.numpy(), case.x.tolist()
    assert len(found.plot(x, training).axes) == 8
    assert len(found.plot((case.x_new, case.x_new), training).axes) == 4  # a tuple of inputs has bars alone
    for inputs_, others, more, expected in (
        (x[:2], training, {}, "the 4 inputs that were explained"),
        (x, training[:3], {}, "training inputs of the fit"), (x, "abc", {}, "training inputs of the fit"),
        (x, training, {"shape": (2, 2)}, "4 numbers, for images of"),
        (x, training, {"shape": (3,)}, "height, width"), (x, training, {"shape": 3}, "height, width"),
        (x, training, {"names": ["a"]}, "the 3 features"),
        (x[:, :2], training, {}, "the 3 features"),
    ):
        with refused(ntkl.DataError, expected, ".", "Pass"):
            found.plot(inputs_, others, **more)


def test_names_of_features_are_text_and_no_formulas():
    """matplotlib would read what stands between two dollar signs as mathematics."""
    case = problem("deep_mlp")
    figure = fit(*CATEGORICAL, "gp").explain(case.x_new, k=2).plot(case.x_new, case.x, names=["$\\x$", "$1-$2", "c"])
    png(figure)  # formulas are read when they are drawn
    heads = {cell.get_text().get_text() for axes in figure.axes for table in axes.tables
             for cell in table.get_celld().values()}
    assert {r"\$\x\$", r"\$1-\$2", "c"} <= heads


@pytest.mark.parametrize("shape", [None, (3, 5, 4), (5, 4, 3)])
def test_images_in_color(shape):
    """Of any range, with channels first or last; one range for all, so that they can be compared."""
    torch.manual_seed(0)
    x = 3 * torch.randn(6, 3, 5, 4).double()
    flat = nn.Sequential(nn.Flatten(), nn.Linear(60, 2)).double()
    found = ntkl.laplace(flat, (x, torch.arange(6) % 2), ntkl.Categorical()).explain(x[:2], k=2)
    given = x if shape is None else (x if shape[0] == 3 else x.permute(0, 2, 3, 1)).flatten(1)
    figure = found.plot(given[:2], given, shape)
    first = figure.axes[0].images[0].get_array()
    assert first.shape == (5, 4, 3) and first.min() >= 0 and first.max() <= 1
    expected = (x[:2] - x[:2].min()) / (x[:2].max() - x[:2].min())
    assert torch.allclose(torch.as_tensor(first), expected[0].permute(1, 2, 0))


def test_a_point_is_on_one_side_alone():
    """Where fewer than k points oppose, supporters do not fill the other half of the table."""
    torch.manual_seed(0)
    x = torch.randn(5, 2).double()
    found = ntkl.laplace(nn.Linear(2, 2).double(), (x, torch.arange(5) % 2), ntkl.Categorical()).explain(x, k=5)
    for _, rows in found.to_dataframe().groupby("input"):
        assert rows["training_index"].is_unique and set(rows["speaks"]) <= {"for", "against"}
    for i in range(5):
        assert all(entry.support > 0 for entry in found.entries(i, "for"))
        assert all(entry.support < 0 for entry in found.entries(i, "against"))


@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
def test_a_large_gap_is_told(structure: str) -> None:
    """Of weights at no optimum, for one batch of inputs and for several; not after a refit."""
    x = torch.linspace(-2, 2, 12, dtype=torch.float64)[:, None]
    network = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    early = ntkl.laplace(network, (x, x.sin()), ntkl.Gaussian(0.1), ntkl.GaussianPrior(0.5), structure)
    refitted = early.refit(linearization="moving")
    for size in (None, 5):
        found, after = (own.explain(x, k=2, batch_size=size) for own in (early, refitted))
        assert found.gap.abs().max() > 0.1 * (found.f - found.offset).abs().max()
        share = float(found.gap.abs().max() / (found.f - found.offset).abs().max())
        assert f"the gap is up to {share:.0%} of the largest" in found.guarantees[-1]
        assert not any("the gap is" in words for words in after.guarantees)
    if structure != "kfac":
        assert not any("the gap is" in words for words in early.refit().explain(x, k=2).guarantees)


@pytest.mark.parametrize("structure", ["gp", "full", "iterative"])
def test_contributions_at_the_optimum_of_the_linearized_network(structure: str) -> None:
    """Those of the ridge regression that it is, in closed form: with the offset they are its prediction."""
    x, new = torch.linspace(-2, 2, 12, dtype=torch.float64)[:, None], torch.tensor([[0.3], [2.5]], dtype=torch.float64)
    y, noise, delta = x.sin(), 0.1, 0.5
    network = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(noise), ntkl.GaussianPrior(delta), structure)
    found, plain = (posterior.explain(new, k=12, decomposition=how) for how in ("optimum", "weights"))
    theta = torch.cat([p.detach().flatten() for p in network.parameters()])
    (jac, jac_new), (f, f_new) = (tuple(of(network, inputs_).squeeze(1) for inputs_ in (x, new))
                                  for of in (jacobian, outputs))
    seen = (y.squeeze(1) - f + jac @ theta) / noise  # targets of the regression on J, with weights from the prior mean
    best = torch.linalg.solve(jac.T @ jac / noise + delta * torch.eye(len(theta), dtype=torch.float64), jac.T @ seen)
    at_optimum = f_new - jac_new @ theta + jac_new @ best
    residual = (y.squeeze(1) - f + jac @ theta - jac @ best) / noise
    assert relative_error(found.offset.squeeze(1), f_new - jac_new @ theta) < 1e-9
    assert relative_error(found.gap.squeeze(1), f_new - at_optimum) < 1e-7
    assert relative_error(found.contributed().squeeze(1), jac_new @ best) < 1e-7
    assert relative_error(found.importance.squeeze(1), residual) < 1e-7
    assert relative_error(plain.importance.squeeze(1), (y.squeeze(1) - f) / noise) < 1e-9
    if structure == "gp":
        assert relative_error(found.contributions.squeeze(2), jac_new @ jac.T * residual / delta) < 1e-7
    assert found.at_optimum and not plain.at_optimum and not any("the gap is up" in words for words in found.guarantees)
    assert [one.removal_effect for one in found.entries(0, "for")] == [
        one.removal_effect for one in plain.entries(0, "for")]
    assert torch.equal(posterior.explain(new, decomposition="auto").gap, found.gap)


@pytest.mark.parametrize("structure", ["gp", "full"])
def test_contributions_to_logits_at_the_optimum_are_those_of_the_refit(structure: str) -> None:
    x, y = inputs(20), labels(20)
    posterior = ntkl.laplace(network(), (x, y), ntkl.Categorical(), ntkl.GaussianPrior(1.0), structure)
    found, reference = posterior.explain(x[:4], 2, 1, decomposition="optimum"), posterior.refit().explain(x[:4], 2, 1)
    assert relative_error(found.contributed(), reference.contributed()) < 1e-9
    assert relative_error(found.offset, reference.offset) < 1e-9
    assert relative_error(found.gap, found.f - reference.f) < 1e-6


def test_an_approximation_has_no_optimum_to_decompose() -> None:
    posterior = ntkl.laplace(network(), (inputs(20), labels(20)), ntkl.Categorical(), structure="kfac")
    with refused(ntkl.UnsupportedError, 'structure="gp", "full" or "iterative"', "kfac", "leave it out"):
        posterior.explain(inputs(2), decomposition="optimum")
    with refused(ntkl.UnsupportedError, "decomposition", "prior", "Leave it out"):
        posterior.explain(inputs(2), decomposition="prior")
    auto, plain = (posterior.explain(inputs(2), decomposition=how) for how in ("auto", "weights"))
    assert torch.equal(auto.gap, plain.gap) and auto.guarantees == plain.guarantees and not auto.at_optimum
