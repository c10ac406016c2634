"""Quasi-Newton descents and their preconditioner, against dense algebra."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import ntk_laplace as ntkl
from minima import case
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.krylov import Deflated, minimize
from ntk_laplace.runtime.krylov.quasi_newton import Pairs, descend
from reference import relative_error
from refusals import inputs, labels, network, refused

SIZE = 7


def definite(seed: int, least: float = 0.5) -> Tensor:
    root = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)).double()
    return root @ root.T + least * torch.eye(SIZE).double()


@pytest.mark.parametrize("most", [3, 20])
def test_directions_are_those_of_bfgs_updates(most):
    """The compact form is that of updates of the inverse one by one, of the last pairs whose curvature is positive."""
    generator = torch.Generator().manual_seed(4)
    inverse, kept = definite(0), [[], []]
    pairs = Pairs(torch.zeros(2, SIZE).double(), 2 * 2 * SIZE * 8 * most)
    for turn in range(8):
        step, change, gradient = (torch.randn(2, SIZE, generator=generator).double() for _ in range(3))
        bends = torch.tensor([-1.0 if turn == 5 else 1.0, -1.0 if turn in (0, 6) else 1.0]).double()
        change = change * ((step * change).sum(1).sign() * bends).unsqueeze(1)
        found = pairs.solved(step, change, change @ inverse, gradient, gradient @ inverse)
        for i in range(2):
            kept[i] += [(step[i], change[i])] if bends[i] > 0 else []
            want = inverse
            for s, y in kept[i][-max(most, tuning.FEWEST_PAIRS) :]:
                turned = torch.eye(SIZE).double() - torch.outer(s, y) / (s @ y)
                want = turned @ want @ turned.T + torch.outer(s, s) / (s @ y)
            assert relative_error(found[i], want @ gradient[i]) < 1e-9
    pairs.keep(torch.tensor([False, True]))
    step, change, gradient = found[1:], found[1:] @ definite(2), gradient[1:]
    again = pairs.solved(step, change, change @ inverse, gradient, gradient @ inverse)
    assert again.shape == (1, SIZE) and relative_error(again @ change.T, gradient @ step.T) < 1e-9  # H y = s


class Quadratics:
    """½ xᵀA x - b x with matrices of their own; the first is not defined beyond 100."""

    def __init__(self) -> None:
        self.matrices = torch.stack([definite(1), definite(2), definite(3)])
        self.right = torch.ones(3, SIZE).double()

    def values_and_gradients(self, at: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        image = torch.einsum("sij,sj->si", self.matrices[rows], at)
        values = (0.5 * image * at - self.right[rows] * at).sum(1)
        return torch.where((rows == 0) & (at.norm(dim=1) > 100), torch.nan, values), image - self.right[rows]

    def precondition(self, vectors: Tensor) -> Tensor:
        return 5.0 * vectors


@pytest.mark.parametrize("room", [0, 10**6])
def test_descents_end_at_minima(room):
    own = Quadratics()
    want = torch.linalg.solve(own.matrices, own.right)
    start = torch.stack([30.0 * torch.ones(SIZE).double(), want[1], -torch.ones(SIZE).double()])
    at, values, steps = descend(own, start, 1e-16, room)
    assert relative_error(at, want) < 1e-6 and steps[1] <= 1 < steps[0]
    assert relative_error(values, own.values_and_gradients(want, torch.arange(3))[0]) < 1e-12


class Nowhere(Quadratics):
    """Second derivatives that are NaN in one of the problems."""

    def at_once(self) -> int:
        return 3

    def local(self, at: Tensor, rows: Tensor) -> SimpleNamespace:
        broken = torch.where(rows == 1, torch.nan, 1.0).unsqueeze(1)
        return SimpleNamespace(gradients=self.values_and_gradients(at, rows)[1],
                               products=lambda v: broken * torch.einsum("sij,sj->si", self.matrices[rows], v))


def test_steps_that_are_refused_move_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tuning, "QUASI_NEWTON_STEPS", 1)
    own = Nowhere()
    found = minimize(own, torch.full((3, SIZE), 2.0).double(), 1e-16)
    want = torch.linalg.solve(own.matrices, own.right)
    assert found.converged.tolist() == [True, False, True] and relative_error(found.at[::2], want[::2]) < 1e-9
    assert torch.equal(found.values[1:2], own.values_and_gradients(found.at[1:2], torch.tensor([1]))[0])


def test_deflation_is_the_inverse_where_lanczos_has_converged():
    """With all steps |H|⁻¹ in the metric of M, by eigenvectors; with none, or where M is H, M⁻¹."""
    metric, hessian = definite(5), definite(6) - 4.0 * torch.eye(SIZE).double()
    probe, eye = torch.linspace(1.0, 2.0, SIZE).double(), torch.eye(SIZE).double()
    inverse = torch.linalg.inv(metric)
    root = torch.linalg.cholesky(inverse)
    values, vectors = torch.linalg.eigh(root.T @ hessian @ root)
    assert values[0] < -0.05 < 1.0 < values[-1]
    turned = root @ vectors
    want = turned / values.abs().clamp_min(0.05) @ turned.T
    found = Deflated(lambda v: v @ hessian, lambda v: v @ inverse, probe, 100)(eye)
    assert relative_error(found, want) < 1e-8
    for matrix, steps in ((hessian, 0), (metric, 100)):
        found = Deflated(lambda v, m=matrix: v @ m, lambda v: v @ inverse, probe, steps)(eye)
        assert relative_error(found, inverse) < 1e-10


def test_what_descents_remember_fits_into_the_budget():
    """Less memory takes more steps and fewer networks at a time, to the same minima; too little is refused."""
    posterior, _, _ = case("classes")
    groups = [[i] for i in range(9)]
    want = posterior.what_ifs(groups).thetas
    module, x = network(), inputs()
    module.load_state_dict(posterior.network.module.state_dict())
    for budget in (2**15, 2**18):
        small = ntkl.laplace(module, (x, labels()), ntkl.Categorical(), ntkl.GaussianPrior(3.0),
                             settings=ntkl.Settings(memory_budget=budget))  # fmt: skip
        if budget == 2**15:
            with refused(ntkl.MemoryBudgetError, "the weights of 90 networks", "predicted need", "fewer groups"):
                small.what_ifs(groups * 10)
        else:
            assert (small.what_ifs(groups).thetas - want).abs().max() < 1e-7 * want.abs().max()
