"""Inputs with extreme values, bounded smoothly."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ntk_laplace.errors import HyperparameterError, is_number, is_whole, require_flags
from ntk_laplace.model.network.single_inputs import checked_table, numbers_of_each, selected, with_fractions

_QUARTILES = 1.349  # standard deviations between the quartiles of a normal distribution: twice its median distance


class SmoothClipping(nn.Module):
    """Bounds single inputs: input j becomes ``(z / √(1 + (z/b)²) - shift) factor`` of ``z = (x_j - center) / scale``.

    So a value far from the others is at most b away from the center, and next to b it hardly matters how far; values
    near the center keep their distances. The smooth clipping of Holzmüller, Grinsztajn and Steinwart (2024). Without it
    a network is a linear function of a value that is far outside of the others, such as a code for a missing number, a
    slip of a decimal point, or one of a distribution with heavy tails. Other inputs stay as they are:
    ``nn.Sequential(SmoothClipping.of(x), nn.Linear(d, 32), ...)``.

    Parameters
    ----------
    inputs : sequence of int
        Numbers of the inputs, (m,).
    center, scale : float or sequence of float
        One for all of them, or one for each. A scale is positive.
    bound : float
        b, positive, in scales.
    shift, factor : float or sequence of float
        One for all, or one for each.

    Raises
    ------
    HyperparameterError
        If a number is not whole or is there twice, a scale or the bound is not positive, or numbers are not m.
    NetworkError
        From a call, if the inputs are fewer.
    """

    inputs: Tensor
    center: Tensor
    scale: Tensor
    shift: Tensor
    factor: Tensor

    def __init__(
        self, inputs: Sequence[int], center: float | Sequence[float] = 0.0, scale: float | Sequence[float] = 1.0,
        bound: float = 8.0, shift: float | Sequence[float] = 0.0, factor: float | Sequence[float] = 1.0,
    ) -> None:
        super().__init__()
        whole = isinstance(inputs, Sequence) and all(is_whole(number, 0) for number in inputs)
        if not whole or len(set(inputs)) < len(inputs):
            raise HyperparameterError("numbers of inputs, each once", repr(inputs)[:80], "Pass for example [0, 3].")
        _require_bound(bound)
        self.bound = float(bound)
        device = torch.get_default_device()
        numbers = torch.tensor([int(number) for number in inputs], dtype=torch.long, device=device)
        self.register_buffer("inputs", numbers)
        for name, given in (("center", center), ("scale", scale), ("shift", shift), ("factor", factor)):
            values = numbers_of_each(name, given, len(inputs), device, "SmoothClipping.of(x) chooses them.")
            self.register_buffer(name, values)
        if min(scale if isinstance(scale, Sequence) else [scale], default=1.0) <= 0:
            raise HyperparameterError("positive scales", repr(scale)[:80], "SmoothClipping.of(x) chooses them.")

    @classmethod
    def of(cls, x: Tensor, bound: float = 8.0, always: bool = False) -> SmoothClipping:
        """Clipping of all inputs of more than two values, if one has a value further than the bound from its median.

        New data may have such values where these have none. Each clipped input has mean 0 and variance 1.

        Parameters
        ----------
        x : Tensor, (n, d)
            Its columns are the inputs; the module comes to its device.
        bound : float
            In scales of each input: its distance between quartiles over 1.349, which is the standard deviation of a
            normal distribution. If they are equal, that from the median to the median of the other values, over 0.674.
        always : bool
            Also where no value is beyond the bound.

        Returns
        -------
        SmoothClipping

        Raises
        ------
        DataError
            If x is not (n, d) of finite numbers.
        HyperparameterError
            If the bound is not positive.
        """
        _require_bound(bound)
        require_flags(always=always)
        columns = checked_table(x)
        inputs = [number for number, column in enumerate(columns.T) if len(np.unique(column)) > 2]
        center, scale = np.array([_place(column) for column in columns.T[inputs]]).reshape(-1, 2).T.tolist()
        if not always and not (np.abs(columns[:, inputs] - center) > bound * np.array(scale)).any():
            inputs, center, scale = [], [], []
        with x.device:  # one that is the default may hold no values
            made = cls(inputs, center, scale, bound)
        if inputs:
            clipped = made._clipped(x.detach().double())
            made.shift.copy_(clipped.mean(0))
            made.factor.copy_(1.0 / clipped.std(0, correction=0))
        return made

    def standardized(self, mean: Tensor, scale: Tensor) -> SmoothClipping:
        """The same clipping of inputs less a mean (d,), divided by a scale (d,); its values do not change."""
        found = copy.deepcopy(self)
        found.center.sub_(mean[self.inputs]).div_(scale[self.inputs])
        found.scale.div_(scale[self.inputs])
        return found

    def forward(self, x: Tensor) -> Tensor:
        """x with these inputs clipped; whole numbers become torch's default floating type."""
        x = with_fractions(x)
        own = (self._clipped(x) - self.shift.to(x.dtype)) * self.factor.to(x.dtype)
        return x.index_copy(-1, self.inputs, own)

    def _clipped(self, x: Tensor) -> Tensor:
        """Without shift and factor, (..., m)."""
        chosen = selected(x, self.inputs, type(self).__name__)
        z = (chosen - self.center.to(x.dtype)) / self.scale.to(x.dtype)
        return self.bound * (z / self.bound).atan().sin()  # u/√(1 + u²), whose square may be infinite

    def extra_repr(self) -> str:
        """Numbers of the inputs, and the bound, for `repr`."""
        return f"{self.inputs.tolist()}, bound={self.bound:g}"


def _require_bound(bound: object) -> None:
    if not is_number(bound, above=0):
        raise HyperparameterError("a positive bound", repr(bound)[:80], "Leave it out for 8.")


def _place(column: NDArray[np.float64]) -> tuple[float, float]:
    """Center and scale of a column of several values."""
    center = float(np.median(column))
    low, high = np.quantile(column, (0.25, 0.75))
    if low < high:
        return center, float(high - low) / _QUARTILES
    return center, 2.0 * float(np.median(np.abs(column - center)[column != center])) / _QUARTILES
