"""Losses with known bounds, of many draws of a network's outputs at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ntk_laplace.errors import DataError, HyperparameterError, UnsupportedError, is_number, require_choice
from ntk_laplace.model.likelihoods import Likelihood

CustomLoss = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs (n, C) and canonical targets to losses (n,)."""

_NAMES = ("zero-one", "log", "brier")
_FIXED = "Clip or rescale it, and pass loss= as a function of f and y with bounds=(low, high)."


@dataclass(frozen=True)
class BoundedLoss:
    """A loss of one example with values in [low, high]."""

    name: str
    low: float
    high: float
    function: CustomLoss
    by_probability: bool = False  # whether it depends on hyperparameters of the likelihood
    chance: float | None = None  # of a guess with equal probabilities; None for counts and for a custom loss

    def of(self, f: Tensor, y: Tensor) -> Tensor:
        """Losses (S, n) of outputs (S, n, C); the largest where an output is not finite.

        DataError if a loss is outside its bounds, or the function returns another shape.
        """
        good = torch.isfinite(f).all(-1)
        given = (f if bool(good.all()) else torch.where(good.unsqueeze(-1), f, 0.0)).flatten(0, 1)
        found = self.function(given, y.repeat(len(f), *[1] * (y.ndim - 1)))
        if not isinstance(found, Tensor) or found.shape != given.shape[:1]:
            raise DataError(f"losses of shape ({len(given)},), one per example, from loss=",
                            f"{tuple(found.shape)}" if isinstance(found, Tensor) else f"{found!r}"[:80],
                            "Return one number for each row of f.")
        room = 1e-6 * (self.high - self.low)
        if not bool(((found >= self.low - room) & (found <= self.high + room)).all()):  # NaN too
            raise DataError(f"losses between bounds=({self.low:g}, {self.high:g})",
                            f"values from {float(found.min()):g} to {float(found.max()):g}",
                            "A bound of the risk needs bounds that hold for every weight and every example.")
        found = found.double().clamp(self.low, self.high).view(good.shape)
        return torch.where(good, found, self.high)


def bounded_loss(
    loss: str | CustomLoss, bounds: tuple[float, float] | None, p_min: float, likelihood: Likelihood, num_outputs: int,
    targets: Tensor,
) -> BoundedLoss:
    """The loss of `risk_bound`; its arguments, and canonical targets.

    UnsupportedError if the name is unknown, or a loss is not bounded for this likelihood. HyperparameterError if bounds
    or `p_min` are no numbers in order.
    """
    plain = likelihood.counted_once()
    if callable(loss):
        low, high = _ordered(bounds)
        name = getattr(loss, "__name__", "<>")
        return BoundedLoss(name if name.isidentifier() else "custom", low, high, loss)
    require_choice(loss, _NAMES, f"a bounded loss: {', '.join(map(repr, _NAMES))}, or a function with bounds=", _FIXED)
    if bounds is not None:
        raise UnsupportedError("bounds= for a loss that is a function", f"bounds={bounds!r} for {loss!r}",
                               "Leave bounds= out.")
    one, positions = plain.at_position(), plain.num_positions(num_outputs)
    outputs = num_outputs // positions
    event = one.event_shape(outputs)
    if event is None:  # of a likelihood of your own: as its targets are
        event = targets.shape[1 + len(plain.positions or ()) :]
    single = event == torch.Size()  # else one label for each output
    if loss == "log":
        guess = math.log(outputs) if single else outputs * math.log(2.0)
        return _log_loss(plain, p_min, positions * guess if plain.classifies else None)
    if not plain.classifies:
        raise UnsupportedError(f"a likelihood of classes for loss={loss!r}", type(plain).__name__, _FIXED)
    function = {"zero-one": _errors, "brier": _squares}[loss]

    def mean_over_labels(f: Tensor, y: Tensor) -> Tensor:
        apart, labels = plain.apart(f, y)
        soft = labels.ndim > 1 if single else bool(((labels != 0) & (labels != 1)).any())
        if soft:
            raise DataError("hard labels for this loss", "probabilities of classes", 'Use loss="log".')
        return function(one.mean(apart), labels, single).view(len(f), -1).mean(1)

    return BoundedLoss(loss, 0.0, 1.0 if loss == "zero-one" else 2.0, mean_over_labels, loss == "brier",
                       1.0 - 1.0 / outputs if single else 0.5)


def _log_loss(likelihood: Likelihood, p_min: float, chance: float | None) -> BoundedLoss:
    if likelihood.is_density:
        raise UnsupportedError(
            "a bounded loss: the log loss of a density is bounded on neither side",
            f"loss='log' for {type(likelihood).__name__}, for which the bound would be no bound", _FIXED)
    if not is_number(p_min, above=0, below=1):
        raise HyperparameterError("a probability p_min between 0 and 1 at which the log loss is clipped: without it "
                                  "the loss has no bound", f"p_min={p_min!r}", "Leave it out for 0.01.")
    high = -math.log(p_min)
    return BoundedLoss("log", 0.0, high, lambda f, y: (-likelihood.log_prob(f, y)).clamp(0.0, high), True, chance)


def _errors(p: Tensor, y: Tensor, single: bool) -> Tensor:
    """Whether the most probable class is wrong; for several labels each of them."""
    return (p.argmax(-1) != y).to(p) if single else ((p > 0.5) != (y > 0.5)).to(p)


def _squares(p: Tensor, y: Tensor, single: bool) -> Tensor:
    """Σ_c (p_c - [c = y])² over all classes; for several labels of each."""
    if single:
        return (p - one_hot(y.long(), p.shape[-1]).to(p)).square().sum(-1)
    return 2.0 * (p - y.to(p)).square()


def _ordered(bounds: object) -> tuple[float, float]:
    numbers = isinstance(bounds, (tuple, list)) and len(bounds) == 2 and all(map(is_number, bounds))
    if not numbers or not bounds[0] < bounds[1]:  # type: ignore[index]
        raise UnsupportedError("a bounded loss: bounds=(low, high) that hold for every weight and every example",
                               f"bounds={bounds!r}", _FIXED)
    return float(bounds[0]), float(bounds[1])  # type: ignore[index]
