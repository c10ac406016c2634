"""Piecewise linear features of single inputs, for functions with jumps and corners that a smooth network rounds off."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ntk_laplace.errors import HyperparameterError, is_number, is_whole, require_whole
from ntk_laplace.model.network.single_inputs import checked_table, numbers_of_each, selected, with_fractions


class PiecewiseLinearFeatures(nn.Module):
    """Appends features that are linear between two knots: x (..., d) becomes (..., d + m), for m pieces.

    Between neighboring knots a < b of input j the feature is ``clip((x_j - a)/(b - a), 0, 1)``, the piecewise linear
    encoding of Gorishniy, Rubachev and Babenko (2022), less a shift, times a factor. A linear layer of them is any
    continuous function of the input that is linear between its knots, and constant beyond the outer ones: with one
    prior precision for its weights, a random walk from knot to knot. So a network that follows bends, jumps and skewed
    inputs as trees do, beside x itself:
    ``nn.Sequential(PiecewiseLinearFeatures.of(x), nn.Linear(d + m, 32), ...)``.

    Parameters
    ----------
    knots : sequence of (int, sequence of float)
        Number of an input, and at least two ascending knots along it, in its units.
    shift, factor : float or sequence of float
        One for all features, or one for each of the m.

    Raises
    ------
    HyperparameterError
        If a number is not whole, knots do not ascend, or a shift or factor is not finite or there are others than m.
    NetworkError
        From a call, if the inputs are fewer.
    """

    inputs: Tensor
    start: Tensor
    width: Tensor
    shift: Tensor
    factor: Tensor

    def __init__(
        self, knots: Sequence[tuple[int, Sequence[float]]], shift: float | Sequence[float] = 0.0,
        factor: float | Sequence[float] = 1.0,
    ) -> None:
        super().__init__()
        inputs: list[int] = []
        ends: list[tuple[float, float]] = []
        for number, own in map(_checked, knots if isinstance(knots, Sequence) else [knots]):
            inputs += [number] * (len(own) - 1)
            ends += pairwise(own)
        device = torch.get_default_device()
        start, stop = torch.tensor(ends, dtype=torch.float64, device=device).reshape(-1, 2).unbind(1)
        self.register_buffer("inputs", torch.tensor(inputs, dtype=torch.long, device=device))
        self.register_buffer("start", start.clone())
        self.register_buffer("width", stop - start)
        for name, given in (("shift", shift), ("factor", factor)):
            values = numbers_of_each(name, given, len(inputs), device, "PiecewiseLinearFeatures.of(x) chooses them.")
            self.register_buffer(name, values)

    @classmethod
    def of(cls, x: Tensor, pieces: int = 8, scale: float = 3.0) -> PiecewiseLinearFeatures:
        """Features whose knots are quantiles of data.

        Parameters
        ----------
        x : Tensor, (n, d)
            Its columns are the inputs; the features come to its device.
        pieces : int
            Of each input, at most: an input of fewer values has its knots there. Knots that differ by rounding are one,
            and an input of two knots or fewer has none.
        scale : float
            All features of an input have mean 0, and the root of the sum of their variances is this. With standardized
            inputs and weights of equal variance, a function of the features is so many times as large as one of the
            input.

        Returns
        -------
        PiecewiseLinearFeatures

        Raises
        ------
        DataError
            If x is not (n, d) of finite numbers.
        HyperparameterError
            If a number is not positive.
        """
        require_whole("pieces", pieces, 1, "Pass pieces=8.")
        if not is_number(scale, above=0):
            raise HyperparameterError("a positive scale", repr(scale), "Leave it out for 3.")
        columns = checked_table(x)
        close = 4 * torch.finfo(x.dtype if x.is_floating_point() else torch.float64).eps
        knots = [(number, own.tolist()) for number, column in enumerate(columns.T)
                 if len(own := _knots(column, pieces, close)) > 2]
        with x.device:  # one that is the default may hold no values
            found = cls(knots)
        if knots:
            features = found._pieces(x.detach().double())
            total = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device).index_add(
                0, found.inputs, features.var(0, correction=0))
            found.shift.copy_(features.mean(0))
            found.factor.copy_(scale * total[found.inputs].rsqrt())
        return found

    def standardized(self, mean: Tensor, scale: Tensor) -> PiecewiseLinearFeatures:
        """The same features of inputs less a mean (d,), divided by a scale (d,); their values do not change."""
        found = copy.deepcopy(self)
        found.start.sub_(mean[self.inputs]).div_(scale[self.inputs])
        found.width.div_(scale[self.inputs])
        return found

    def input_groups(self, inputs: int) -> list[int]:
        """Numbers for `GaussianPrior`: each of so many inputs has its own, and the features of each share one."""
        own = self.inputs.tolist()
        numbers = {number: inputs + place for place, number in enumerate(dict.fromkeys(own))}
        return [*range(inputs), *(numbers[number] for number in own)]

    def forward(self, x: Tensor) -> Tensor:
        """x, then the features, in the order of the knots; whole numbers become torch's default floating type."""
        x = with_fractions(x)  # knots are no whole numbers
        features = (self._pieces(x) - self.shift.to(x.dtype)) * self.factor.to(x.dtype)
        return torch.cat([x, features], -1)

    def _pieces(self, x: Tensor) -> Tensor:
        """Without shift and factor, each between 0 and 1, (..., m)."""
        chosen = selected(x, self.inputs, type(self).__name__)
        return ((chosen - self.start.to(x.dtype)) / self.width.to(x.dtype)).clamp(0.0, 1.0)

    def extra_repr(self) -> str:
        """Number of pieces of each input, for `repr`."""
        own = self.inputs.tolist()
        return f"{ {number: own.count(number) for number in dict.fromkeys(own)} } pieces"


def _checked(pair: Any) -> tuple[int, list[float]]:
    """The number of an input, and its knots."""
    two = isinstance(pair, Sequence) and len(pair) == 2 and is_whole(pair[0], 0) and isinstance(pair[1], Sequence)
    if two and len(pair[1]) > 1 and all(is_number(one) for one in pair[1]):
        own = [float(one) for one in pair[1]]
        if all(before < after for before, after in pairwise(own)):
            return int(pair[0]), own
    raise HyperparameterError("pairs of an input's number and two or more ascending knots", repr(pair)[:80],
                              "Pass for example PiecewiseLinearFeatures([(0, [0.0, 0.5, 1.0])]).")


def _knots(column: np.ndarray[Any, Any], pieces: int, close: float) -> np.ndarray[Any, Any]:
    """All values of a column, or quantiles if there are more than one for each end of so many pieces."""
    values = _distinct(column, close)
    if len(values) <= pieces + 1:
        return values
    return _distinct(np.quantile(column, np.linspace(0.0, 1.0, pieces + 1)), close)


def _distinct(values: np.ndarray[Any, Any], close: float) -> np.ndarray[Any, Any]:
    """In ascending order, without those so close, for their size, to the one before."""
    found = np.unique(values)
    return found[np.diff(found, prepend=-np.inf) > close * np.maximum(np.abs(found), np.abs(np.roll(found, 1)))]
