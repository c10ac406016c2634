"""Relinearizing: the network itself follows a what-if, by Gauss-Newton steps, and is linearized where it arrives.

A what-if moves the weights of the linearized network, θ - θ*. Here a copy of the network goes there, or as far towards
it as its own objective falls, its Jacobians are taken anew, and the next Newton step of the network linearized there
goes on: without end, that is training. The objective is that of the changed data, tilted as in `what_if` by the
gradient g0 that training had left, so that where nothing changes nothing moves:

    F(θ) = -Σ w_n log p(y_n | f(x_n; θ)) + ½ (θ-μ0)ᵀP0(θ-μ0) - g0ᵀθ.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ntk_laplace.data import Batches, Inputs, Source, as_tensors, gather, num_examples
from ntk_laplace.errors import DataError, NumericalError, UnsupportedError, require_whole
from ntk_laplace.evidence import joint_gradient
from ntk_laplace.explain.what_if import Exact
from ntk_laplace.network import Network
from ntk_laplace.points import TrainingPoints
from ntk_laplace.progress import track
from ntk_laplace.structures import FunctionSpaceStructure, Trained

__all__ = ["relinearized"]

_HALVINGS = 40


def relinearized(trained: Trained, structure: Exact, x: Inputs | None, steps: int) -> tuple[Trained, Exact]:
    """The model and its points after so many steps of the network itself.

    Parameters
    ----------
    trained : Trained
        That a what-if has moved, or that was relinearized before and goes on.
    structure : FunctionSpaceStructure or FullStructure
    x : tensor, tuple or dict of tensors, optional
        Inputs of all training points in the order of the fit, those that were added last; needed in function space.
    steps : int

    Returns
    -------
    Trained, structure
        Of a copy of the network. What training left is remembered, for steps that go on.

    Raises
    ------
    DataError
        If inputs are needed and not there, or are not those of the fit.
    NumericalError
        If no step makes the objective fall.
    UnsupportedError
        If nothing was changed.
    """
    require_whole("steps", steps, 1, "Pass how often the network is linearized anew, such as 3.")
    if trained.move is None and trained.held is None:
        raise UnsupportedError("a posterior that a what-if changed, to relinearize", "one of the data it was fitted to",
                               "Ask remove, relabel, reweight or add first.")  # fmt: skip
    quiet = replace(trained.settings, progress=False, checkpoint=None, resume=None)
    shown, trained = trained.settings.progress, replace(trained, settings=quiet)
    with torch.no_grad():
        climb = _Climb.of(trained, structure, _source(trained, structure, x))
        for _ in track(range(steps), "ntk_laplace: relinearizing", steps, shown):
            if not climb.step():
                break
    settings = replace(quiet, progress=shown)
    return replace(climb.trained, settings=settings), climb.structure


class _Climb:
    """The network on its way; `step` takes it one step on.

    Parameters
    ----------
    trained : Trained
        Not moved: the network is where it is.
    structure : structure
        Of the changed points there.
    source : Source
        Their inputs.
    direction : Tensor, (P,), optional
        Where to go first, if not to the optimum of the network linearized here.
    """

    def __init__(self, trained: Trained, structure: Exact, source: Source, direction: Tensor | None) -> None:
        self.trained, self.structure, self._source, self._direction = trained, structure, source, direction

    @classmethod
    def of(cls, trained: Trained, structure: Exact, source: Source) -> _Climb:
        """From where a what-if, or an earlier step, has left off."""
        if trained.move is None:
            return cls(trained, structure, source, None)
        still = replace(trained, move=None)
        base, points = structure.base, structure.points
        left = base.residual(trained.likelihood)
        left = torch.cat([left, left.new_zeros(len(points.f) - len(left), left.shape[1])])
        held = joint_gradient(structure.backproject(still, left), trained.prior, still.theta)  # g0
        f = torch.cat([base.f, (points.f - structure.push(still, trained.move))[len(base.f) :]])
        here = structure.changed(still, replace(points, f=f, expanded=None))
        return cls(replace(still, held=held), here, source, trained.move)

    def step(self) -> bool:
        """One step down the objective; False where there is none to take."""
        trained, points = self.trained, self.structure.points
        theta = trained.theta
        pulled = self.structure.backproject(trained, points.residual(trained.likelihood))
        gradient = joint_gradient(pulled, trained.prior, theta) - trained.held
        direction = self._direction
        if direction is None:
            direction = -self.structure.newton_at(trained, points, gradient)
        self._direction = None
        slope = float(gradient @ direction)
        value = self._value(theta, points.f)
        slack = 8 * torch.finfo(trained.network.dtype).eps * (1.0 + abs(value))
        if -slope <= slack:  # less than the objective can tell from its rounding
            return False
        there = self._search(theta, direction, slope, value, slack)
        self._go(there)
        return True

    def _search(self, theta: Tensor, direction: Tensor, slope: float, value: float, slack: float) -> Tensor:
        """The full step, or the largest of its halves that makes the objective fall."""
        size = 1.0
        for _ in range(_HALVINGS):
            there = theta + size * direction
            f = _outputs(self.trained, self._source, there)
            if self._value(there, f) <= value + 1e-4 * size * slope + slack:
                return there
            size /= 2
        raise NumericalError("a step of the network that makes its objective fall", f"none down to {size:.2g} of it",
                             "Ask what if with steps=1 before, or look for weights that are no optimum.")

    def _value(self, theta: Tensor, f: Tensor) -> float:
        """The objective, in nats; infinite where it is not a number."""
        trained = self.trained
        fit = replace(self.structure.points, f=f, expanded=None).log_likelihood(trained.likelihood)
        value = float(trained.prior.energy(theta) - fit - trained.held @ theta)
        return value if value == value else float("inf")

    def _go(self, theta: Tensor) -> None:
        """A copy of the network at θ, linearized there."""
        trained, points = self.trained, self.structure.points
        network = trained.network.at(theta)
        factors = trained.factors.on(network, trained.factors.dtype)
        self.trained = replace(trained, network=network, factors=factors)
        made = type(self.structure)(self.trained, self._source)
        made.points = replace(points, f=made.points.f, expanded=None)
        self.structure = made


def _source(trained: Trained, structure: Exact, x: Inputs | None) -> Source:
    """Inputs of the points in batches, held against the outputs that are known."""
    count = structure.points.num_examples
    if x is not None:
        x = as_tensors(x)
        if num_examples(x) != count:
            raise DataError(f"inputs of the {count:,} training points, with those that were added at the end",
                            f"{num_examples(x):,}", "Pass them in the order of the fit.")
        network = trained.network
        source = Batches((x, structure.points.targets), trained.settings.batch_size, network.device, network.dtype)
    elif isinstance(structure, FunctionSpaceStructure):
        raise DataError('the training inputs x, which structure="gp" does not keep', "none",
                        'Pass relinearize(x), in the order of the fit; structure="full" reads its data again.')
    else:
        source = structure.source
    known: TrainingPoints = structure.points if trained.move is None else structure.base
    f = _outputs(trained, source, trained.network.theta)[: len(known.f)]
    gap, size = float((f - known.f).abs().max()), 1.0 + float(known.f.abs().max())
    if not gap <= 1e3 * torch.finfo(trained.network.dtype).eps * size:
        raise DataError("the inputs of the fit, in its order", f"outputs that differ by {gap:.2g} from those known",
                        "Pass the same inputs in the same order.")
    return source


def _outputs(trained: Trained, source: Source, theta: Tensor) -> Tensor:
    """Outputs of the network at θ, (N, C)."""
    network: Network = trained.network
    found = gather((network.with_parameters(theta, x) for x, _ in source), source.length or 0)
    return found.rows.to(trained.factors.dtype)
