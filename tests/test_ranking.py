"""Ranking over streaming data, for every structure, against dense matrices of that structure."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ntk_laplace as ntkl
from exact_cases import fit as exact_fit
from ntk_laplace.posterior.explain import ranking
from ntk_laplace.posterior.explain.joint_removal import GroupRemoval
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.reduction import SingleProcess
from pairwise import pairwise
from ranks import on_ranks
from reference import outputs, relative_error
from reference_effects import dense_effects
from refusals import refused
from registry import LIKELIHOODS, problem, targets
from registry_cases import jacobians
from structured_cases import STRUCTURES, fit, truth

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")

CASES = [
    ("deep_mlp", "categorical", "layer"), ("scalar_outputs", "gaussian", "scalar"),
    ("far_from_optimum", "bernoulli", "tensor"), ("transformer_tied", "poisson", "scalar"),
]


@pytest.mark.parametrize(("case", "structure", "by"), pairwise(
    CASES, [name for name in STRUCTURES if "reduce" not in name],
    ["output", "probability", "variance", "probability_variance"],
), ids=lambda value: value if isinstance(value, str) else "-".join(value))
def test_effects_are_the_dense_ones_of_the_structure(case, structure, by):
    """All effects, and the heap's choice among them, with data in pieces of two rows."""
    reference, own = truth(*case, "ggn", structure), problem(case[0])
    posterior = fit(*case, "ggn", structure)
    f, jac_new = outputs(own.network, own.x_new), jacobians(case[0])[1]
    explanation = posterior.explain(own.x_new, k=3, by=by)
    chosen = torch.nn.functional.one_hot(explanation.output, f.shape[1]).double()
    if by.startswith("probability"):
        response = LIKELIHOODS[case[1]].response
        slope = torch.func.vmap(torch.func.jacrev(response))(f)
        direction = torch.einsum("xc,xcd->xd", chosen, slope)
    else:
        direction = chosen
    expected = dense_effects(reference.posterior_precision, reference, jac_new, direction, "variance" in by, False)
    assert relative_error(posterior.removal_effects(own.x_new, by=by), expected) < 1e-8
    support = expected if "variance" in by else -expected
    for side, order in (("for", support), ("against", -support)):
        if side not in explanation.quantity.sides:
            continue
        best = order.argsort(dim=1, descending=True)[:, :3]
        assert torch.equal(explanation.indices[side], best)
        assert relative_error(explanation.effects[side], expected.gather(1, best)) < 1e-8
    leverage = [torch.linalg.eigvals(c @ j @ torch.linalg.solve(reference.posterior_precision, j.T)).real.max()
                for j, c in zip(reference.jac, reference.hessian, strict=True)]
    assert relative_error(explanation.leverage, torch.stack(leverage)) < 1e-7
    assert "no refit" in explanation.guarantees[1]


@pytest.mark.parametrize("by", ["output", "variance", "probability_variance"])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_weight_space_ranks_as_function_space(case, by):
    """structure="full" is exact: the same effects, sums and sides as structure="gp"."""
    x = problem(case[0]).x_new
    streamed, dense = (exact_fit(*case, structure).explain(x, k=4, by=by) for structure in ("full", "gp"))
    assert relative_error(exact_fit(*case, "full").removal_effects(x, by=by), dense.effect) < 1e-7
    assert torch.equal(exact_fit(*case, "gp").removal_effects(x, by=by), dense.effect)
    assert torch.equal(streamed.supporting(), dense.supporting())
    assert torch.equal(streamed.top(2), dense.top(2)) or "variance" in by
    assert relative_error(streamed.offset, dense.offset) < 1e-9
    assert relative_error(streamed.contributed(), dense.contributed()) < 1e-9
    total = streamed.offset + streamed.total + streamed.gap
    assert relative_error(total, dense.f) < 1e-10
    assert "exact for one Newton step" in streamed.guarantees[1]
    for a, b in zip(streamed.to_dataframe()["meaning"], dense.to_dataframe()["meaning"], strict=True):
        assert a == b


def test_log_likelihoods_to_first_order():
    case, y = CASES[0], torch.tensor([1, 0, 4, 2])
    reference, own = truth(*case, "ggn", "ekfac"), problem(case[0])
    f, density = outputs(own.network, own.x_new), LIKELIHOODS["categorical"].log_density
    direction = torch.func.vmap(torch.func.grad(density))(f, y)
    expected = dense_effects(reference.posterior_precision, reference, jacobians(case[0])[1], direction, False, False)
    posterior = fit(*case, "ggn", "ekfac")
    assert relative_error(posterior.removal_effects(own.x_new, by="log_likelihood", y=y), expected) < 1e-8
    assert "first order in the change" in posterior.explain(own.x_new, by="log_likelihood", y=y).guarantees[2]


@pytest.mark.parametrize("curvature", ["ef", "mc"])
def test_other_curvatures_rank_too(curvature):
    """A point is taken out of the curvature that was fitted."""
    own = problem("deep_mlp")
    data = own.x, targets(LIKELIHOODS["categorical"], own)
    found = [
        ntkl.laplace(own.network, data, ntkl.Categorical(), structure=structure, curvature=curvature)
        for structure in ("gp", "full")
    ]
    exact, streamed = (posterior.removal_effects(own.x_new) for posterior in found)
    assert relative_error(streamed, exact) < 1e-8
    for posterior in found:
        assert "no refit" in posterior.explain(own.x_new).guarantees[1]
        assert "first order" not in posterior.explain(own.x_new).guarantees[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("structure", ["gp", "full", ntkl.Iterative()], ids=["gp", "full", "iterative"])
@pytest.mark.parametrize("curvature", ["ef", "mc"])
def test_a_point_of_high_leverage_is_taken_out_of_another_curvature(curvature, structure):
    """It is in the precision, as `remove` shows: effects, leave-one-out and groups are not of first order."""
    x, y = torch.randn(11, 3).double(), torch.randn(11, 1).double()
    x[0] *= 4
    new, limit = x[:1] + 0.3, 1e-8 if isinstance(structure, str) else 1e-6  # by conjugate gradients
    posterior = ntkl.laplace(torch.nn.Linear(3, 1).double(), (x, y), ntkl.Gaussian(0.3), ntkl.GaussianPrior(0.3),
                             structure, curvature)
    left = posterior.leave_one_out()
    i = int(left.leverage.argmax())
    assert 0.9 < left.leverage[i] < 1.0 and "no refit" in left.guarantees[0] and "0.9" not in left.guarantees[0]
    without = posterior.remove([i])
    covariance = without.latent_moments(x[i : i + 1])[1]
    assert relative_error(left.mean[i], without.outputs(x[i : i + 1])[0]) < limit
    assert relative_error(left.covariance[i], covariance[0]) < limit
    gained = 0.5 * (posterior.log_det() - without.log_det())
    assert relative_error(left.information[i], gained) < limit
    change = without.outputs(new) - posterior.outputs(new)
    assert relative_error(posterior.removal_effects(new)[:, i], change[:, 0]) < limit
    wider = without.latent_moments(new)[1] - posterior.latent_moments(new)[1]
    assert relative_error(posterior.removal_effects(new, by="variance")[:, i], wider[:, 0, 0]) < limit
    if structure != "gp":
        group = torch.tensor(sorted({i, (i + 1) % 11}))
        moved, _, trusted = GroupRemoval(posterior.fitted, group).effects(posterior.jacobian(new), [group])
        both = posterior.remove(group.tolist()).outputs(new) - posterior.outputs(new)
        assert trusted.all() and relative_error(moved, both) < limit


def test_memory_is_bounded_and_pieces_change_nothing(monkeypatch):
    """Rows are written out a few at a time, inputs go through the data in groups, ties go to the earlier point."""
    case, own = CASES[0], problem("deep_mlp")
    posterior = fit(*case, "ggn", "ekfac")
    before = posterior.explain(own.x_new, k=2)
    groups, part = [], ranking._Passing
    monkeypatch.setattr(ranking, "_Passing", lambda *given: groups.append(given[1].num_examples) or part(*given))
    monkeypatch.setattr(tuning, "DIRECTION_BYTES", 3 * posterior.num_parameters * 8)
    monkeypatch.setattr(tuning, "WRITTEN_BYTES", 1)
    after = posterior.explain(own.x_new, k=2)
    assert groups == [3, 1]
    for side in ("for", "against"):
        assert torch.equal(before.indices[side], after.indices[side])
        assert relative_error(before.effects[side], after.effects[side]) < 1e-12
    assert relative_error(before.gap, after.gap) < 1e-12


WIDE = {
    "linear": lambda: torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3)),
    "grouped": lambda: torch.nn.Sequential(torch.nn.Unflatten(1, (4, 10)), torch.nn.Conv1d(4, 6, 10, groups=2),
                                           torch.nn.Flatten(), torch.nn.Linear(6, 3)),
    "positions": lambda: torch.nn.Sequential(torch.nn.Unflatten(1, (4, 10)), torch.nn.Conv1d(4, 16, 3),
                                             torch.nn.Flatten(), torch.nn.Linear(128, 3)),
    "table": lambda: torch.nn.Sequential(Tokens(), torch.nn.Embedding(9, 5), torch.nn.Flatten(),
                                         torch.nn.Linear(200, 3)),
}


class Tokens(torch.nn.Module):
    """Whole numbers of what is given."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 9).long()


@pytest.mark.parametrize(
    "structure", ["kfac", ntkl.KFAC(damped=True), "ekfac", ntkl.INF(rank=6), "diag", "full"], ids=str
)
@pytest.mark.parametrize("kind", WIDE)
def test_covariances_towards_given_inputs(kind, structure):
    """V between rows that pass by and given ones, by short sums where there are some, is the joint covariance."""
    torch.manual_seed(0)
    network, x, x_new = WIDE[kind]().double(), torch.rand(12, 40).double(), torch.rand(5, 40).double()
    posterior = ntkl.laplace(network, (x, torch.arange(12) % 3), ntkl.Categorical(), structure=structure)
    rows, given = posterior.jacobian(x), posterior.jacobian(x_new)
    direction, root = torch.randn(5, 3, 1).double(), torch.randn(12, 3, 2).double()
    joint = posterior.posterior_precision.covariance(posterior.jacobian(torch.cat([x, x_new]))).view(17, 3, 17, 3)[:12,
                                                                                                                :, 12:]
    expected = torch.einsum("ncxd,ncr,xd->rnx", joint, root, direction[..., 0])
    cross_covariance = posterior.posterior_precision.cross_covariance(given.weighted(direction))
    assert relative_error(cross_covariance.products(rows.weighted(root)), expected) < 1e-10
    sizes = {name: shape.numel() for name, shape in posterior.network.shapes.items()}
    assert relative_error(cross_covariance.products(rows.weighted(root).densified(sizes)), expected) < 1e-10
    if structure == "kfac":
        assert (cross_covariance.numbers < 5 * posterior.num_parameters) == (kind == "linear")


def test_a_bounded_heap_is_a_sort():
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 20, (3, 40), generator=generator).double()
    order = values.argsort(dim=1, descending=True, stable=True)[:, :5]

    def run(reducer):
        """Each rank has every other part, the last rank those of the first points."""
        heap = ranking._Strongest.of(values, 5)
        for here in torch.arange(40).split(7)[reducer.world_size - 1 - reducer.rank :: reducer.world_size]:
            heap.add(values[:, here], here)
        found = heap.collected(reducer)
        assert torch.equal(found.indices, order)
        assert torch.equal(found.values, values.gather(1, order))

    run(SingleProcess())
    on_ranks(2, run)


@pytest.mark.slow
def test_pictures_and_pages_of_a_ranking():
    own = problem("deep_mlp")
    explanation = fit(*CASES[0], "ggn", "kfac").explain(own.x_new, k=2)
    assert len(explanation.plot(own.x_new, own.x).axes) == 8
    assert "no refit" in explanation.to_html()
    assert "Ranking(4 input(s)" in repr(explanation)
    table = explanation.to_dataframe()
    assert len(table) == 16 and "contribution" not in table


def test_missing_data_are_requested(tmp_path):
    own = problem("deep_mlp")
    posterior = fit(*CASES[0], "ggn", "kfac")
    posterior.save(tmp_path / "posterior.pt")
    loaded = ntkl.load(tmp_path / "posterior.pt", own.network)
    with refused(ntkl.NTKLaplaceError, "training data", "a checkpoint without them", "load"):
        loaded.explain(own.x_new)


@pytest.mark.slow
def test_shuffled_loaders_keep_their_order():
    """Training points are counted in the order in which the loader delivers them, the same in every pass."""
    own = problem("deep_mlp")
    y = targets(LIKELIHOODS["categorical"], own)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(own.x, y), batch_size=2, shuffle=True)
    for structure in ("gp", "full", "ekfac"):
        settings = ntkl.Settings(batch_size=2)
        shuffled = ntkl.laplace(own.network, loader, ntkl.Categorical(), structure=structure, settings=settings)
        plain = ntkl.laplace(own.network, (own.x, y), ntkl.Categorical(), structure=structure)
        order = (shuffled.f[:, None] - plain.f).abs().sum(2).argmin(1)
        assert order.sort().values.tolist() == list(range(len(y)))
        found, expected = shuffled.removal_effects(own.x_new), plain.removal_effects(own.x_new)
        assert relative_error(found, expected[:, order]) < 1e-8


# ------------------------------------------------------------------------------------------------------- leave-one-out


@pytest.mark.parametrize("structure", [name for name in STRUCTURES if "reduce" not in name])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_leave_one_out_takes_points_out_of_the_structure(case, structure):
    """Means, covariances, leverages and what they say of the targets, from this structure's dense H."""
    reference, own = truth(*case, "ggn", structure), problem(case[0])
    loo, density = fit(*case, "ggn", structure).leave_one_out(strict=False), LIKELIHOODS[case[1]].log_density
    f, y = outputs(own.network, own.x), targets(LIKELIHOODS[case[1]], own)
    y = y[:, None] if y.is_floating_point() and y.ndim == 1 else y
    inverse = torch.linalg.inv(reference.posterior_precision)
    for i, (jac, curvature, residual) in enumerate(
        zip(reference.jac, reference.hessian, reference.residual, strict=True)
    ):
        inner = jac @ inverse @ jac.T
        eye = torch.eye(len(inner), dtype=inner.dtype)
        leverage = torch.linalg.eigvals(curvature @ inner).real.max()
        used = (curvature @ inner).trace()
        trusted = leverage <= 0.9
        covariance = torch.linalg.solve(eye - inner @ curvature, inner) if trusted else inner
        information = -0.5 * torch.linalg.slogdet(eye - curvature @ inner).logabsdet if trusted else 0.5 * used
        mean = f[i] - covariance @ residual
        assert relative_error(loo.covariance[i], covariance) < 1e-8
        assert relative_error(loo.mean[i], mean) < 1e-8
        assert abs(loo.leverage[i] - leverage) < 1e-7 * max(1.0, leverage)
        assert bool(loo.flagged[i]) == (not trusted)
        assert relative_error(loo.effective_parameters[i], used) < 1e-7
        assert relative_error(loo.information[i], information) < 1e-7
        plug_in = density(mean, y[i])
        assert relative_error(loo.plug_in_log_density[i], plug_in) < 1e-7 or not plug_in.isfinite()
    assert "no refit" in loo.guarantees[0]
    assert loo.to_dataframe()["flagged"].tolist() == loo.flagged.tolist()


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_weight_space_leaves_points_out_as_function_space(case):
    """structure="full" is exact: every column, drawn densities included."""
    found, expected = (exact_fit(*case, structure).leave_one_out() for structure in ("full", "gp"))
    assert found.guarantees == expected.guarantees and "exact for one Newton step" in found.guarantees[0]
    for name in ("mean", "covariance", "leverage", "self_influence", "effective_parameters", "information",
                 "importance", "plug_in_log_density"):
        one, other = getattr(found, name), getattr(expected, name)
        finite = other.isfinite()
        assert relative_error(one[finite], other[finite]) < 1e-6
    assert (found.log_density - expected.log_density).abs().max() < 1e-3


@pytest.mark.parametrize("curvature", ["ef", "mc"])
def test_other_curvatures_leave_points_out_too(curvature):
    own = problem("deep_mlp")
    data = own.x, targets(LIKELIHOODS["categorical"], own)
    found, exact = (
        ntkl.laplace(own.network, data, ntkl.Categorical(), structure=structure, curvature=curvature)
        .leave_one_out(strict=False)
        for structure in ("full", "gp")
    )
    assert "no refit" in found.guarantees[0] and found.guarantees == exact.guarantees
    for name in ("mean", "covariance", "information"):
        assert relative_error(getattr(found, name), getattr(exact, name)) < 1e-8


def test_densities_drawn_in_pieces(monkeypatch):
    """Few draws at a time, noise per point included: the same density, but for the draws."""
    own = problem("deep_mlp")
    y = targets(LIKELIHOODS["gaussian"], own)
    noise = torch.rand(len(y), generator=torch.Generator().manual_seed(0)).double() + 0.5
    posterior = ntkl.laplace(own.network, (own.x, y), ntkl.Gaussian(noise=noise), structure="kfac")
    whole = posterior.leave_one_out(strict=False)
    monkeypatch.setattr(tuning, "DRAWN_NUMBERS", 1000 * posterior.num_outputs * 3)
    assert relative_error(posterior.leave_one_out(strict=False).log_density, whole.log_density) < 1e-12
    for name, axes in whole.AXES.items():
        sizes = {"training point": len(y), "output": posterior.num_outputs}
        assert getattr(whole, name).shape == tuple(sizes[axis] for axis in axes)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_so_many_training_points():
    """Both kinds of explanation say what is wrong with a number, an input or a side."""
    own = problem("deep_mlp")
    ranking_, dense = fit(*CASES[0], "ggn", "kfac"), exact_fit(*CASES[0], "gp")
    for found in (ranking_.explain(own.x_new, k=2), dense.explain(own.x_new, k=2)):
        for k in (0, -1, 1.5, True, "a"):
            for verb in (found.supporting, found.opposing, found.top, found.to_dataframe):
                with refused(ntkl.DataError, "k of at least 1, a whole number", ".", "one or more"):
                    verb(k)
        for i in (-1, 4, 0.5):
            with refused(ntkl.DataError, "an input from 0 to 3", ".", "explained"):
                found.entries(i, "for")
        with refused(ntkl.UnsupportedError, "the side 'for' or 'against'", "'both'", "Choose"):
            found.entries(0, "both")
        assert found.supporting(1).shape == found.opposing(1).shape == found.top(1).shape == (4, 1)
    with refused(ntkl.DataError, "the 2 training points kept", "k=3", r"explain\(x, k=3\)"):
        ranking_.explain(own.x_new, k=2).supporting(3)
    assert dense.explain(own.x_new, k=2).supporting(3).shape == (4, 3)
    every = ranking_.explain(own.x_new, k=1000)
    assert every.supporting(2000).shape == (4, own.case.examples)
    for found in (ranking_.explain(own.x_new, by="variance"), dense.explain(own.x_new, by="variance")):
        with refused(ntkl.UnsupportedError, "the side 'for'", "'against'", "supporting"):
            found.opposing()
    for k in (0, -3, "all"):
        with refused(ntkl.DataError, "k of at least 1", ".", "one or more"):
            dense.leave_one_out().ranked(k=k)


def test_axes_of_a_ranking_are_named():
    own = problem("deep_mlp")
    found = fit(*CASES[0], "ggn", "kfac").explain(own.x_new, k=3)
    sizes = {"input": 4, "training point": own.case.examples, "output": 5, "rank": 3}
    for name, axes in found.AXES.items():
        values = getattr(found, name)
        for one in values.values() if isinstance(values, dict) else [values]:
            assert one.shape == tuple(sizes[axis] for axis in axes)
