"""Single numbers whose distribution is a mixture with the same weights for all of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributions as td
from typing_extensions import Self

from ntk_laplace.errors import DataError


class NumberMixture(td.MixtureSameFamily):
    """Mixtures of K distributions with the same weights, one for each number: a distribution of torch with `icdf`.

    Parameters
    ----------
    log_weights : Tensor, (K,)
        Up to a constant: the weights are divided by their sum.
    parts : Tensor, (..., K) or (..., 1)
        Parameters of the distributions; the batch shape is (...).

    Raises
    ------
    DataError
        If the shapes are others.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]  # of torch's base classes it is one
    _names: ClassVar[str]  # of the parts

    def __init__(self, log_weights: Tensor, *parts: Tensor) -> None:
        self._parts = parts  # not yet broadcast, as (..., K) may be large
        shapes = [tuple(part.shape) for part in (log_weights, *parts)]
        if len(shapes[0]) != 1 or any(shape[-1:] not in ((1,), shapes[0]) for shape in shapes[1:]):
            raise DataError(f"log weights (K,), and {self._names} (..., K) or (..., 1)",
                            "shapes " + ", ".join(map(str, shapes)), "Pass the same weights for all numbers.")
        *parts, _ = torch.broadcast_tensors(*parts, log_weights)
        super().__init__(td.Categorical(logits=log_weights, validate_args=False), self._component(*parts),
                         validate_args=False)

    @abstractmethod
    def _component(self, *parts: Tensor) -> td.Distribution:
        """The distributions, (..., K)."""

    @abstractmethod
    def icdf(self, value: Tensor) -> Tensor:
        """Quantiles of the levels `value`, broadcast against the batch shape; NaN outside of (0, 1)."""

    @property
    def log_weights(self) -> Tensor:
        """Of the parts, (K,)."""
        return self.mixture_distribution.logits

    def reshaped(self, *shape: int) -> Self:
        """With another batch shape of as many numbers."""
        return self._of_parts(lambda part: part.reshape(*shape, part.shape[-1]))

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """With a larger batch shape, as torch's distributions do it."""
        return self._of_parts(lambda part: part.expand(*batch_shape, -1))

    def __getitem__(self, index: Any) -> Self:
        """Of some of the numbers, as a tensor of the batch shape would be indexed."""
        index = index if isinstance(index, tuple) else (index,)
        last = slice(None) if any(one is ... for one in index) else ...
        return self._of_parts(lambda part: part[(*index, last)])

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """On another device, and of another type."""
        log_weights, *parts = (part.to(device, dtype) for part in (self.log_weights, *self._parts))
        return self._with(log_weights, *parts)

    def over_samples(self, samples: int) -> Self:
        """The equal mixture of the parts of the first dimension, which has those of each sample one after the other."""
        parts = (part.unflatten(0, (samples, -1)).movedim(0, -2).flatten(-2) for part in self._whole())
        return self._with(self.log_weights.repeat(samples), *parts)

    def _with(self, log_weights: Tensor, *parts: Tensor) -> Self:
        """A mixture of this kind."""
        return type(self)(log_weights, *parts)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Parameters of the distributions, (..., K) or (..., 1) each."""
        return self._parts

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws, of shape ``sample_shape + batch_shape``: each number is of a distribution of its own choice."""
        with torch.no_grad():
            shape = self._extended_shape(torch.Size(sample_shape))
            if not shape.numel():  # torch's Categorical refuses to draw nothing
                return self._parts[0].new_empty(shape)
            which = self.mixture_distribution.sample(shape).unsqueeze(-1)
            drawn = (part.expand(*shape, -1).gather(-1, which).squeeze(-1) for part in self._whole())
            found: Tensor = self._component(*drawn).sample()
            return found

    def _whole(self) -> list[Tensor]:
        """The parts, (..., K) each."""
        return [part.expand(*self.batch_shape, len(self.log_weights)) for part in self._parts]

    def _of_parts(self, change: Callable[[Tensor], Tensor]) -> Self:
        """With changed parts, from those of the whole batch shape."""
        return self._with(self.log_weights, *(change(part.expand(*self.batch_shape, -1)) for part in self._parts))

    def _levels(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Levels in float64, in the shape of the quantiles, and the number (...) that each belongs to."""
        like = self.mean
        q = torch.as_tensor(value, dtype=torch.float64, device=like.device)  # in float32 a level near 1 would be 1
        q = q.expand(torch.broadcast_shapes(q.shape, like.shape))
        return q, torch.arange(like.numel(), device=like.device).view(like.shape).expand_as(q)

    def _rows(self, number: Tensor) -> list[Tensor]:
        """The parts of these numbers, (len(number), K) or (len(number), 1), in float64."""
        return [part.expand(*self.batch_shape, -1).reshape(-1, part.shape[-1])[number].double()
                for part in self._parts]


def checked_levels(levels: float | Sequence[float]) -> Tensor:
    """Levels as float64 numbers (L,), each strictly between 0 and 1 (DataError if they are not, or there is none)."""
    try:
        found = torch.as_tensor(levels, dtype=torch.float64, device="cpu").detach().reshape(-1)
    except (TypeError, ValueError, RuntimeError):
        found = torch.zeros(0, device="cpu")
    if not len(found) or not bool(((found > 0) & (found < 1)).all()):
        raise DataError("levels strictly between 0 and 1", f"{levels!r}"[:80], "Pass probabilities such as 0.9.")
    return found
