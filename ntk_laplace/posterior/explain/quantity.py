"""Quantities: what is explained of a prediction, its unit, and its description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import numpy as np
import torch
from torch import Size, Tensor
from torch.nn.functional import one_hot

from ntk_laplace.errors import DataError, is_whole, require_choice
from ntk_laplace.model.likelihoods import Likelihood

Output: TypeAlias = int | Sequence[int] | None
"""What to explain: the number of an output; under `Everywhere` also its position and number, (row, column, class)."""

SPREADS = ("variance", "probability_variance")
"""Quantities that every training point makes smaller."""

_WORDS = {
    "output": "output {0}",
    "logit": "logit {0}",
    "probability": "the mean response {0}",
    "log_likelihood": "the log likelihood",
    "variance": "the variance of output {0}",
    "probability_variance": "the variance of the mean response {0}",
}
_UNITS = {"log_likelihood": " nats"}


@dataclass(frozen=True)
class Quantity:
    """The explained quantity of each prediction.

    Attributes
    ----------
    by : str
        "output" (for classes also "logit"): f itself. "probability": the mean response at f, for classes the
        probability. "log_likelihood": log p(y | f), nats. "variance": the posterior variance of f.
        "probability_variance": that of the mean response, gᵀVg with g its gradient in f; where Λ is that gradient,
        an entry of ΛVΛ, the part of the predictive covariance ΛVΛ + Λ that data reduce ([T20] 3.16).
    output : Tensor, (n,)
        The explained output, or for "probability" and "probability_variance" the explained response, which is the same
        where a likelihood has as many responses as outputs. For "log_likelihood" it is only displayed.
    targets : Tensor or None
        y at the explained inputs, in canonical form, for "log_likelihood" alone.
    likelihood : Likelihood
    num_values : int
        How many outputs, or responses, there are to choose from.
    """

    by: str
    output: Tensor
    targets: Tensor | None
    likelihood: Likelihood
    num_values: int

    @property
    def good(self) -> float:
        """1 if a point that supports a prediction raises the quantity, -1 if it lowers it."""
        return -1.0 if self.by in SPREADS else 1.0

    @property
    def sides(self) -> tuple[str, ...]:
        """The possible sides of a training point; for variances only one, because every point reduces them."""
        return ("for",) if self.by in SPREADS else ("for", "against")

    def subset(self, index: slice) -> Quantity:
        """The quantity of some of the inputs."""
        targets = None if self.targets is None else self.targets[index]
        return replace(self, output=self.output[index], targets=targets)

    @staticmethod
    def joined(parts: Sequence[Quantity]) -> Quantity:
        """Concatenate the quantities of consecutive inputs."""
        first = parts[0]
        targets = [part.targets for part in parts if part.targets is not None]
        return replace(first, output=torch.cat([part.output for part in parts]),
                       targets=torch.cat(targets) if targets else None)

    def words(self, i: int) -> str:
        """Description of the quantity of input i."""
        words = _WORDS[self.by]
        if self.likelihood.classifies and self.num_values == 1:  # a 0 would be read as class 0
            words = words.replace("the mean response", "the probability").replace("{0}", "of class 1")
            return words.replace("output of", "the output of").replace("logit of", "the logit of")
        if self.by.startswith("probability") and self.likelihood.classifies:
            of_classes = self.likelihood.at_position().event_shape(2) == ()
            one = "the probability of class {0}" if of_classes else "probability {0}"
            words = f"the variance of {one}" if self.by in SPREADS else one
        return words.format(self.place_words(i))

    def place_words(self, i: int, separator: str = " ") -> str:
        """Number of the output of input i, and its position."""
        *position, number = self.place(i)
        where = f"at position {position[0] if len(position) == 1 else tuple(position)}"
        return f"{number}{separator}{where}" if position else f"{number}"

    def shown_target(self, i: int, target: Tensor) -> Tensor:
        """What a training point's target is at the position of input i's output."""
        return target[tuple(self.place(i)[:-1])]

    def place(self, i: int) -> list[int]:
        """Position and number of the output of input i; the number alone, if there are no positions."""
        return _place(self.likelihood.positions or Size(), int(self.output[i]), self.num_values)

    def meaning(self, i: int, effect: float) -> str:
        """The meaning of the effect's sign in words."""
        return f"removing it {'lowers' if effect < 0 else 'raises'} {self.words(i)} by {abs(effect):.3g}" + self.unit

    @property
    def unit(self) -> str:
        """The unit shown after a number."""
        return _UNITS.get(self.by, "")

    def _value(self, f: Tensor) -> Tensor:
        """Mean response or log likelihood at outputs f (m, C), m a multiple of n, grouped by input, (m,)."""
        each = len(f) // len(self.output)
        if self.targets is not None:
            return self.likelihood.log_prob(f, self.targets.repeat_interleave(each, 0))
        return self.likelihood.mean(f).gather(1, self.output.repeat_interleave(each).unsqueeze(1)).squeeze(1)

    def direction(self, f: Tensor) -> Tensor:
        """Derivative of the quantity in f (n, C); for the variance, the unit vector of the output."""
        if self.targets is not None:
            return self.likelihood.residual(f, self.targets)
        if self.by.startswith("probability"):
            slope = self.likelihood.mean_jacobian(f)
            return slope[torch.arange(len(f), device=f.device), self.output]
        return one_hot(self.output, f.shape[1]).to(f)

    def effect(self, f: Tensor, moved: Tensor, widened: Tensor) -> Tensor:
        """Change of the quantity for changes of f and its variance (n, N, C): (n, N), the exact difference.

        For "probability_variance" `widened` is the change of gᵀVg, (n, N, 1).
        """
        n, count, c = moved.shape
        if self.by == "probability_variance":
            return widened.squeeze(2)
        if self.by in ("output", "logit", "variance"):
            change = widened if self.by == "variance" else moved
            return change.gather(2, self.output.view(-1, 1, 1).expand(-1, count, 1)).squeeze(2)
        then = self._value((f.unsqueeze(1) + moved).reshape(-1, c))
        return then.view(n, count) - self._value(f).unsqueeze(1)

    def change(self, f: Tensor, after: Tensor) -> Tensor:
        """Change of the quantity from outputs f (n, C) to each of those after, (n, m, C): (n, m); of no variance."""
        moved = after - f.unsqueeze(1)
        with torch.no_grad():
            return self.effect(f, moved, moved)


def require_quantity(by: object) -> None:
    """Refuse what names no quantity (UnsupportedError)."""
    require_choice(by, _WORDS, f"an effect on one of {', '.join(_WORDS)}", 'Leave it out for "output".')


def quantity_of(likelihood: Likelihood, f: Tensor, by: str, output: Output, y: object) -> Quantity:
    """Validate a request at predictions f (n, C).

    DataError if the output does not exist, or required targets are missing; UnsupportedError if there is no such
    quantity.
    """
    n, c = f.shape
    require_quantity(by)
    responses = by.startswith("probability") and likelihood.num_responses(c) != c
    values = likelihood.mean(f) if responses else f
    count = values.shape[1]
    number = None if output is None else _number(likelihood.positions or Size(), output, count, responses)
    if number is None and likelihood.classifies:
        chosen = values.argmax(1)
    else:
        chosen = torch.full((n,), number or 0, device=f.device)
    if by != "log_likelihood":
        return Quantity(by, chosen, None, likelihood, count)
    likelihood = likelihood.for_new_points()
    if y is None:
        if likelihood.event_shape(c) != ():
            raise DataError("targets y at the inputs, for their log likelihood", "none", "Pass y=, one per input.")
        return Quantity(by, chosen, chosen, likelihood, count)
    targets = likelihood.targets(y, n, c).to(f.device)
    if output is None and targets.ndim == 1 and likelihood.event_shape(c) == ():
        observed = likelihood.observed(targets)
        chosen = targets if observed is None else torch.where(observed, targets, chosen)
    return Quantity(by, chosen, targets, likelihood, count)


def _number(positions: Size, output: int | Sequence[int], count: int, responses: bool) -> int:
    """The number among `count` outputs, or responses, of all positions."""
    if is_whole(output, 0) and output < count:
        return int(output)
    what, whose = ("a response", "likelihood's responses") if responses else ("an output", "network's outputs")
    if not positions:
        raise DataError(f"{what} from 0 to {count - 1}", f"{output!r}"[:80],
                        f"Choose one of the {whose} by its number, the same at all inputs.")
    shape = (*positions, count // prod(positions))
    place = list(output) if isinstance(output, Sequence) and not isinstance(output, str) else []
    if len(place) != len(shape) or not all(is_whole(i, 0) and i < m for i, m in zip(place, shape, strict=True)):
        raise DataError(f"{what} as its position and number, below {shape}, or from 0 to {count - 1}", f"{output}",
                        f"Choose one of the {whose}.")
    return int(np.ravel_multi_index(place, shape))


def _place(positions: Size, number: int, count: int) -> list[int]:
    """Position and number at it of one of `count` outputs of all positions."""
    return [int(i) for i in np.unravel_index(number, (*positions, count // prod(positions)))]
