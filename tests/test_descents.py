"""Quasi-Newton descents and their preconditioner, against dense algebra."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

import ntk_laplace as ntkl
from minima import case
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.krylov import Deflated, WrittenOut, downward, minimize, newton
from ntk_laplace.runtime.krylov.quasi_newton import Inverses, descend
from ntk_laplace.structures import FittedModel
from ntk_laplace.structures.what_if.objectives import Refit
from reference import relative_error
from refusals import inputs, labels, network, refused

SIZE = 7


def definite(seed: int, least: float = 0.5) -> Tensor:
    root = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)).double()
    return root @ root.T + least * torch.eye(SIZE).double()


@pytest.mark.parametrize("most", [4, 20])
def test_directions_are_those_of_bfgs_updates(most):
    """Of the dense inverse, one by one; where memory ends, the eigenvalues closest to 1 in the metric of K become 1."""
    generator, inverse, rows = torch.Generator().manual_seed(4), definite(0), torch.arange(3)
    root, want, counts = torch.linalg.cholesky(inverse), inverse.expand(3, -1, -1).clone(), [1, 1, 1]
    gradients = torch.randn(3, SIZE, generator=generator).double()
    found, own = -gradients @ inverse, Inverses(gradients, gradients @ inverse, rows, min(most, SIZE), torch.float64)
    for turn in range(7):
        sizes = torch.rand(len(rows), generator=generator).double()
        drawn = torch.randn(len(rows), SIZE, generator=generator).double()
        sizes[turn % 2] = 0.0 if turn > 3 else sizes[turn % 2]
        there = torch.where(sizes.unsqueeze(1) > 0, drawn, gradients)
        steps, changes = sizes.unsqueeze(1) * found, there - gradients
        gradients, found = there, own.directions(sizes, there, there @ inverse)
        for i, (s, y, row) in enumerate(zip(steps, changes, rows.tolist(), strict=True)):
            if s @ y > 0:
                turned = torch.eye(SIZE).double() - torch.outer(s, y) / (s @ y)
                want[row] = turned @ want[row] @ turned.T + torch.outer(s, s) / (s @ y)
            counts[row] += int(sizes[i] > 0)
            if counts[row] == most:
                values, vectors = torch.linalg.eigh(torch.linalg.solve(root, torch.linalg.solve(root, want[row]).T))
                kept = values.log().abs().argsort()[-(most // 2) :]
                turned = root @ vectors[:, kept]
                want[row], counts[row] = inverse + turned * (values[kept] - 1.0) @ turned.T, most // 2 + 1
            assert relative_error(found[i], -want[row] @ gradients[i]) < 1e-9
        if turn == 5:
            order = own.keep(torch.tensor([False, True, True]))
            rows, gradients, found = rows[order], gradients[order], found[order]
            assert rows.tolist() == own.rows[:2].tolist() and sorted(own.rows.tolist()) == [0, 1, 2]
    for vector in torch.eye(SIZE).double():
        both = vector.expand(len(rows), -1)
        assert relative_error(own.times(both, both @ inverse), want[rows] @ vector) < 1e-9


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_the_basis_stays_orthonormal_where_gradients_hardly_leave_their_span(dtype, tolerance):
    """Rounding is not taken for a direction, whose errors each vector after it would multiply."""
    drawn = torch.randn(21, 40, generator=torch.Generator().manual_seed(0)).double()
    own = Inverses(drawn[:1], drawn[:1], torch.arange(1), 40, dtype)
    for last, new in itertools.pairwise(drawn):
        gradient = last + 1e-3 * new
        own.directions(torch.ones(1).double(), gradient[None], gradient[None])
    basis = own._basis[0, : int(own._counts[0])]
    assert len(basis) > 5 and (basis @ basis.T - torch.eye(len(basis))).abs().max() < tolerance


def test_vectors_in_single_precision_make_the_same_inverses_up_to_rounding():
    """After the descent they are symmetric and positive definite, also of vectors that are not orthonormal any more."""
    generator, inverse, size = torch.Generator().manual_seed(4), definite(0), 40
    inverse = torch.block_diag(*[inverse] * 6)[:size, :size]
    gradients = torch.randn(3, size, generator=generator).double()
    both = [Inverses(gradients, gradients @ inverse, torch.arange(3), 40, dtype)
            for dtype in (torch.float64, torch.float32)]
    for _ in range(12):
        gradients = torch.randn(3, size, generator=generator).double()
        exact, single = (own.directions(torch.ones(3).double(), gradients, gradients @ inverse) for own in both)
        assert 0.0 < relative_error(single, exact) < 1e-3
    eye = torch.eye(size).double()

    def dense(own: Inverses) -> Tensor:
        return torch.stack([own.times(e.expand(3, -1), (inverse @ e).expand(3, -1)) for e in eye], 1)

    found = dense(both[1])
    assert relative_error(found, found.mT) < 1e-5 and relative_error(found, dense(both[0])) < 1e-3
    both[1].directions(1e-5 * torch.ones(3).double(), -gradients, -gradients @ inverse)  # a large curvature
    both[1]._basis *= 1.01
    both[1].sharpen()
    found = dense(both[1])
    assert relative_error(found, found.mT) < 1e-12 and bool((torch.linalg.eigvalsh(found) > 0).all())


class Quadratics:
    """½ xᵀA x - b x with matrices of their own; the first is not defined beyond 100."""

    precision = torch.ones(SIZE).double()

    def __init__(self) -> None:
        self.matrices = torch.stack([definite(1), definite(2), definite(3)])
        self.right = torch.ones(3, SIZE).double()

    def values_and_gradients(self, at: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        image = torch.einsum("sij,sj->si", self.matrices[rows], at)
        values = (0.5 * image * at - self.right[rows] * at).sum(1)
        return torch.where((rows == 0) & (at.norm(dim=1) > 100), torch.nan, values), image - self.right[rows]

    def precondition(self, vectors: Tensor, rounded: bool = False) -> Tensor:
        return 5.0 * vectors

    def changes(self, at: Tensor, directions: Tensor) -> Tensor:
        return directions.norm(dim=1)


@pytest.mark.parametrize("room", [0, 10**6])
def test_descents_end_at_minima(room):
    own = Quadratics()
    want = torch.linalg.solve(own.matrices, own.right)
    start = torch.stack([30.0 * torch.ones(SIZE).double(), want[1], -torch.ones(SIZE).double()])
    at = start.clone()
    end = descend(own, at, torch.arange(3), 1e-16, room, 5)
    values, steps, soft = end.values, end.steps, end.soft
    assert len(end.going) == 0
    assert relative_error(at, want) < 1e-6 and steps[1] <= 1 < steps[0] and not bool(soft.any())
    assert relative_error(values, own.values_and_gradients(want, torch.arange(3))[0]) < 1e-12


def test_descents_of_some_leave_the_others():
    own = Quadratics()
    want, at = torch.linalg.solve(own.matrices, own.right), torch.ones(3, SIZE).double()
    end = descend(own, at, torch.tensor([2, 0]), 1e-16, 10**6, 5)
    values, steps, inverses = end.values, end.steps, end.inverses
    assert relative_error(at[[0, 2]], want[[0, 2]]) < 1e-6 and torch.equal(at[1], torch.ones(SIZE).double())
    assert steps[1] == 0 and values.isinf().tolist() == [False, True, False]
    assert sorted(inverses.rows.tolist()) == [0, 2]


class Curved(Quadratics):
    """With second derivatives, times a number for each problem."""

    renewal: int | None = None
    factors = torch.ones(3).double()

    def at_once(self) -> int:
        return 3

    def local(self, at: Tensor, rows: Tensor) -> SimpleNamespace:
        factors = self.factors[rows].unsqueeze(1)
        return SimpleNamespace(gradients=self.values_and_gradients(at, rows)[1],
                               products=lambda v: factors * torch.einsum("sij,sj->si", self.matrices[rows], v))


class Ring:
    """(|x|² - 1)² - s·x: a valley that goes round, down by a small slope s. The outcome is |x|, or x itself."""

    precision, renewal = torch.ones(2).double(), None

    def __init__(self, slope: float, round_: bool) -> None:
        self.slope, self.round = slope * torch.tensor([1.0, 0.0]).double(), round_

    def values_and_gradients(self, at: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        away = at.square().sum(1) - 1.0
        return away.square() - at @ self.slope, 4.0 * away.unsqueeze(1) * at - self.slope

    def precondition(self, vectors: Tensor, rounded: bool = False) -> Tensor:
        return vectors / 8.0

    def local(self, at: Tensor, rows: Tensor) -> SimpleNamespace:
        away = 4.0 * (at.square().sum(1, keepdim=True) - 1.0)
        return SimpleNamespace(gradients=self.values_and_gradients(at, rows)[1],
                               products=lambda v: away * v + 8.0 * (at * v).sum(1, keepdim=True) * at)

    def changes(self, at: Tensor, directions: Tensor) -> Tensor:
        return (at * directions).sum(1) if self.round else directions.norm(dim=1)


@pytest.mark.parametrize("slope", [1e-6, 1e-8])
def test_descents_end_on_the_ground_of_a_valley(slope: float):
    """Where the outcome stays along it. Where it does not, they go on to the valley's end."""
    start = torch.tensor([[0.3, 2.0], [-1.5, 0.2], [2.0, 1e-3]]).double()
    found = minimize(Ring(slope, True), start, 1e-16)
    assert bool(found.converged.all()) and bool((found.steps < 80).all())
    assert (found.at.norm(dim=1) - 1.0).abs().max() < slope + 1e-7
    assert bool((found.at[:2, 0] < 0.9).all())  # the end is (1, 0)
    found = minimize(Ring(1e-4, False), start[:2], 1e-16)
    assert bool(found.converged.all()) and relative_error(found.at, torch.eye(2).double()[[0, 0]]) < 1e-3


def test_a_valley_along_which_the_outcome_changes_is_none():
    for round_ in (True, False):
        at = torch.tensor([[0.3, 2.0]]).double()
        end = descend(Ring(1e-5, round_), at, torch.arange(1), 1e-16, 10**6, 5)
        assert bool(end.soft) == round_ and bool(at[0, 0] > 0.99) != round_


class Waking:
    """½(a² + b²) - s ab + ¼(ab)²: two factors that wake up where s > 1; the outcome is ab. The weights begin asleep."""

    precision, s, renewal = torch.ones(2).double(), 1.004, None

    def __init__(self) -> None:
        self.products = 0

    def values_and_gradients(self, at: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        product = at.prod(1)
        slope = (0.5 * product - self.s).unsqueeze(1)
        return 0.5 * at.square().sum(1) - self.s * product + 0.25 * product.square(), at + slope * at.flip(1)

    def precondition(self, vectors: Tensor, rounded: bool = False) -> Tensor:
        return vectors.clone()

    def local(self, at: Tensor, rows: Tensor) -> SimpleNamespace:
        self.products += 1
        across = at.prod(1, keepdim=True) - self.s
        return SimpleNamespace(gradients=self.values_and_gradients(at, rows)[1], products=lambda v: (
            (1.0 + 0.5 * at.flip(1).square()) * v + across * v.flip(1)))

    def changes(self, at: Tensor, directions: Tensor) -> Tensor:
        return (at.flip(1) * directions).sum(1).abs()


@pytest.mark.parametrize("asleep", [1e-6, 1e-5, 1e-3])
def test_a_saddle_is_not_the_ground_of_a_valley(asleep: float):
    """Shifted steps bend upward there, and do not settle the outcome: they are few."""
    own = Waking()
    found = minimize(own, asleep * torch.tensor([[1.0, 1.3]]).double(), 1e-16)
    assert bool(found.converged.all()) and relative_error(found.at, torch.full((1, 2), 0.008**0.5).double()) < 1e-4
    assert own.products < 30


class Renewed(Curved):
    """Whose preconditioner, once renewed, is a problem's exact inverse."""

    renewal = 2

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def renewed(self, at: Tensor, row: int) -> Renewed:
        self.calls.append(row)
        own = copy.copy(self)
        inverse = torch.linalg.inv(self.matrices[row])
        own.precondition = lambda vectors, rounded=False: vectors @ inverse
        return own


def test_a_descent_that_goes_far_renews_its_preconditioner():
    """Each on its own, from where it is; one that starts at its minimum keeps the first."""
    own = Renewed()
    want = torch.linalg.solve(own.matrices, own.right)
    start = torch.stack([torch.full((SIZE,), 30.0).double(), want[1], torch.full((SIZE,), -9.0).double()])
    found = minimize(own, start, 1e-16)
    assert own.calls == [0, 2] and bool(found.converged.all()) and not bool(found.falling.any())
    assert relative_error(found.at, want) < 1e-9
    assert relative_error(found.values, own.values_and_gradients(want, torch.arange(3))[0]) < 1e-12
    assert found.steps[1] < found.steps[0] < 8


def test_stretches_that_do_not_end_are_followed_by_newton_steps(monkeypatch: pytest.MonkeyPatch):
    """Where the preconditioner stays bad: after QUASI_NEWTON_STEPS gradients that fall little, or the most of them."""
    for least, most, calls in ((4, 100, 4), (100, 6, 4)):
        own = Renewed()
        monkeypatch.setattr(tuning, "QUASI_NEWTON_STEPS", least)
        monkeypatch.setattr(tuning, "MOST_QUASI_NEWTON_STEPS", most)
        monkeypatch.setattr(tuning, "STRETCH_FALL", 1e9)
        monkeypatch.setattr(Renewed, "renewed", lambda self, at, row: self.calls.append(row) or self)
        start = torch.full((3, SIZE), 30.0).double()
        found = minimize(own, start, 1e-16)
        assert own.calls.count(0) == (3 if least == 4 else calls)
        assert bool(found.converged.all())
        assert relative_error(found.at, torch.linalg.solve(own.matrices, own.right)) < 1e-9


class Nowhere(Curved):
    """Second derivatives that are NaN in one of the problems."""

    factors = torch.tensor([1.0, torch.nan, 1.0]).double()


def test_steps_that_are_refused_move_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tuning, "MOST_QUASI_NEWTON_STEPS", 1)
    own = Nowhere()
    found = minimize(own, torch.full((3, SIZE), 2.0).double(), 1e-16)
    want = torch.linalg.solve(own.matrices, own.right)
    assert found.converged.tolist() == [True, False, True] and relative_error(found.at[::2], want[::2]) < 1e-9
    assert torch.equal(found.values[1:2], own.values_and_gradients(found.at[1:2], torch.tensor([1]))[0])


def test_deflation_is_the_inverse_where_lanczos_has_converged():
    """With all steps |H|⁻¹ in the metric of M, by eigenvectors; with none, or where M is H, M⁻¹."""
    metric, hessian = definite(5), definite(6) - 4.0 * torch.eye(SIZE).double()
    probe, eye = torch.linspace(1.0, 2.0, SIZE).double(), torch.eye(SIZE).double()
    inverse, scale = torch.linalg.inv(metric), torch.ones(SIZE).double()
    root = torch.linalg.cholesky(inverse)
    values, vectors = torch.linalg.eigh(root.T @ hessian @ root)
    assert values[0] < -0.05 < 1.0 < values[-1]
    turned = root @ vectors
    want = turned / values.abs().clamp_min(0.05) @ turned.T
    found = Deflated(lambda v: v @ hessian, lambda v: v @ inverse, probe, 100, scale)
    assert relative_error(found(eye), want) < 1e-8
    assert float(found.lowest @ hessian @ found.lowest) < 0.0
    for matrix, steps in ((hessian, 0), (metric, 100)):
        found = Deflated(lambda v, m=matrix: v @ m, lambda v: v @ inverse, probe, steps, scale)(eye)
        assert relative_error(found, inverse) < 1e-10


def test_an_inverse_that_is_written_out():
    """(H + s D⁻²)⁻¹; none of an indefinite matrix, even if the shift made it definite."""
    scale, eye, hessian = torch.linspace(0.5, 2.0, SIZE).double(), torch.eye(SIZE).double(), definite(5)
    found = WrittenOut.of(hessian, scale, 0.1)
    assert found is not None
    assert relative_error(found(eye), torch.linalg.inv(hessian + torch.diag(0.1 / scale.square()))) < 1e-10
    assert WrittenOut.of(definite(6) - 4.0 * eye, scale, 100.0) is None


def test_a_direction_that_leads_down():
    """Of an indefinite matrix, at its first pivot or later; none of a definite one."""
    indefinite = definite(6) - 4.0 * torch.eye(SIZE).double()
    for matrix in (indefinite, indefinite.flip(0, 1), -definite(5)):
        found = downward(matrix)
        assert found is not None and float(found @ matrix @ found) < 0.0
    assert downward(definite(5)) is None


@pytest.mark.parametrize("structure", ["full", "kfac"])
def test_the_minima_do_not_depend_on_what_preconditions(structure: str, monkeypatch: pytest.MonkeyPatch):
    """Written out for many groups, and of the points put back; the Hessian of the fit is computed once."""
    posterior, _, _ = case("classes", structure)
    groups, made = [[i] for i in range(9)], list[int]()
    whole = WrittenOut.__init__

    def counted(self: WrittenOut, inverse: Tensor, single: Tensor) -> None:
        made.append(len(inverse))
        whole(self, inverse, single)

    monkeypatch.setattr(WrittenOut, "__init__", counted)
    found = posterior.what_ifs(groups)
    home = found.comes_back()
    assert len(made) == 2 and made[0] <= 9 * tuning.WRITTEN_PER_GROUP
    monkeypatch.setattr(tuning, "WRITTEN_PER_GROUP", 0)
    other = posterior.what_ifs(groups)
    assert len(made) == 2 and bool((found.converged & other.converged).all())
    assert relative_error(other.thetas, found.thetas) < 1e-7
    assert torch.equal(other.comes_back(), home)
    refits, fit = list[Tensor](), Refit.__call__
    monkeypatch.setattr(Refit, "__call__", lambda self, *at: refits.append(at[0]) or fit(self, *at))
    monkeypatch.setattr(Refit, "stretch", 5)
    renewed = posterior.what_ifs(groups)
    assert len(refits) >= len(groups) and bool(renewed.converged.all())
    # a step that gains rounding of the objective is longer in the metric of a preconditioner that was just renewed
    assert (renewed.log_prob() - found.log_prob()).abs().max() < 1e-6 and torch.equal(renewed.comes_back(), home)

    def fails(self: Refit, *at: Tensor) -> None:
        raise ntkl.NumericalError("a factor", "none", "Add a prior.")

    monkeypatch.setattr(Refit, "__call__", fails)  # the preconditioner before stays
    assert (posterior.what_ifs(groups[:2]).log_prob() - found.log_prob()[:2]).abs().max() < 1e-6


@pytest.mark.parametrize("structure", ["full", "gp", "kfac"])
def test_what_renews_a_preconditioner_is_the_fit_of_the_change(structure: str, monkeypatch: pytest.MonkeyPatch):
    """At the weights that the descent has reached, without the points of the group; as often as it is worth."""
    posterior, x, y = case("classes", structure)
    fits, fit = [], Refit.__call__

    def kept(self: Refit, *at: Tensor) -> FittedModel:
        fits.append((self, at[0].clone(), at[1], fit(self, *at)))
        return fits[-1][-1]

    with monkeypatch.context() as patch:
        patch.setattr(Refit, "__call__", kept)
        patch.setattr(Refit, "stretch", 3)
        posterior.what_ifs([[0, 4]])
    refit, theta, weights, found = fits[0]
    assert weights.tolist() == [0, 1, 1, 1, 0, 1, 1, 1, 1] and not torch.equal(theta, posterior.fitted.theta)
    own = copy.deepcopy(posterior.network.module)
    vector_to_parameters(theta, own.parameters())
    want = ntkl.laplace(own, (x, y, weights), posterior.likelihood, posterior.prior, structure).fitted
    vectors = torch.eye(len(theta)).to(theta)
    assert relative_error(found.solver.solve(vectors), want.solver.solve(vectors)) < 1e-9
    if structure == "full":
        p, n, r = len(theta), 9, 2  # Λ of three classes has rank two
        gradients = r + (n * r * p**2 + p**3 / 3) / (6 * n * p)
        assert refit.stretch == tuning.STRETCH > gradients
        monkeypatch.setattr(tuning, "STRETCH", 1)
        assert refit.stretch == math.ceil(gradients)
        monkeypatch.setattr(tuning, "MOST_QUASI_NEWTON_STEPS", 1)
        assert refit.stretch is None


@pytest.mark.parametrize(("activation", "smooth"), [(nn.ReLU, False), (nn.Tanh, True), (nn.GELU, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_networks_with_kinks_are_not_fitted_again(activation, smooth: bool, dtype: torch.dtype,
                                                  monkeypatch: pytest.MonkeyPatch):
    """Preconditioners of single places would begin the steps over and over, which shorten at each kink."""
    torch.manual_seed(0)
    x = torch.randn(20, 3, dtype=dtype)
    y = (x.prod(1, keepdim=True) + 0.1 * torch.randn(20, 1)).to(dtype)
    own = nn.Sequential(nn.Linear(3, 5), activation(), nn.Linear(5, 1)).to(dtype)
    posterior = ntkl.train_with_evidence(own, (x, y), ntkl.Gaussian(0.5), epochs=5).posterior
    made = list[Tensor]()
    monkeypatch.setattr(Refit, "__call__", lambda self, *at: made.append(at[0]) or posterior.fitted)
    monkeypatch.setattr(tuning, "STRETCH", 3)
    monkeypatch.setattr(tuning, "MOST_QUASI_NEWTON_STEPS", 100)  # no minimum is needed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)
        found = posterior.what_ifs([list(range(5)), [0]])
    assert bool(made) == smooth and len(found) == 2


def test_an_inverse_that_is_not_positive_definite_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    """Conjugate gradients end early with it, and their short direction is no sign of a minimum."""
    own = Curved()
    want = torch.linalg.solve(own.matrices, own.right)
    monkeypatch.setattr(newton, "descend", lambda own, at, rows, eps, *more: descend(own, at, rows, 1e-3, *more))
    monkeypatch.setattr(Inverses, "sharpen", lambda self: self._reduced.neg_())
    found = minimize(own, torch.full((3, SIZE), 2.0).double(), 1e-16)
    assert bool(found.converged.all()) and relative_error(found.at, want) < 1e-9


@pytest.mark.parametrize("structure", ["full", "kfac"])
def test_the_minima_do_not_depend_on_the_precision_of_vectors(structure: str, monkeypatch: pytest.MonkeyPatch):
    """Few groups, preconditioned by products, and many, by a Hessian that is written out."""
    posterior, _, _ = case("classes", structure)
    for groups in ([[0], [1, 4]], [[i] for i in range(9)]):
        want = posterior.what_ifs(groups)
        monkeypatch.setattr(tuning, "SINGLE_BYTES", 0)
        found = posterior.what_ifs(groups)
        monkeypatch.undo()
        assert bool(found.converged.all()) and not torch.equal(found.thetas, want.thetas)
        assert relative_error(found.thetas, want.thetas) < 1e-7


def test_what_descents_remember_fits_into_the_budget():
    """Less memory takes more steps and fewer networks at a time, to the same minima; too little is refused."""
    posterior, _, _ = case("classes")
    groups = [[i] for i in range(9)]
    want = posterior.what_ifs(groups).thetas
    module, x = network(), inputs()
    module.load_state_dict(posterior.network.module.state_dict())
    for budget in (2**15, 2**18):
        small = ntkl.laplace(module, (x, labels()), ntkl.Categorical(), ntkl.GaussianPrior(3.0),
                             settings=ntkl.Settings(memory_budget=budget))
        if budget == 2**15:
            with refused(ntkl.MemoryBudgetError, "the weights of 90 networks", "predicted need", "fewer groups"):
                small.what_ifs(groups * 10)
        else:
            assert (small.what_ifs(groups).thetas - want).abs().max() < 1e-7 * want.abs().max()
