"""Fourier features: sines and cosines of single inputs, for functions with waves that a network does not find."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ntk_laplace.errors import HyperparameterError, is_number, is_whole
from ntk_laplace.model.network.single_inputs import selected, with_fractions


class FourierFeatures(nn.Module):
    """Appends sines and cosines of single inputs: x (..., d) becomes (..., d + 2m), for m waves.

    A network trained from small weights learns slow functions first, and takes fast waves for noise. Of a wave whose
    period is known its sine and cosine are features that the first layer combines:
    ``nn.Sequential(FourierFeatures([(0, 12.0)]), nn.Linear(d + 2, 32), ...)``. `LackOfFit` names the input and the
    period of a wave that is left in the residuals.

    Parameters
    ----------
    waves : sequence of (int, float)
        Number of an input, and the period of a wave along it, in units of this input.

    Raises
    ------
    HyperparameterError
        If a number is not whole, or a period is not positive and finite.
    NetworkError
        From a call, if the inputs are fewer.
    """

    inputs: Tensor
    periods: Tensor

    def __init__(self, waves: Sequence[tuple[int, float]]) -> None:
        super().__init__()
        pairs = list(waves) if isinstance(waves, Sequence) and not isinstance(waves, str) else [waves]
        for pair in pairs:
            two = isinstance(pair, Sequence) and len(pair) == 2
            if not (two and is_whole(pair[0], 0) and is_number(pair[1], above=0)):
                raise HyperparameterError("pairs of an input's number and a positive period", repr(pair)[:80],
                                          "Pass for example FourierFeatures([(0, 12.0)]).")
        device = torch.get_default_device()
        numbers, periods = [int(number) for number, _ in pairs], [float(period) for _, period in pairs]
        self.register_buffer("inputs", torch.tensor(numbers, dtype=torch.long, device=device))
        self.register_buffer("periods", torch.tensor(periods, dtype=torch.float64, device=device))

    @property
    def waves(self) -> tuple[tuple[int, float], ...]:
        """The pairs of `__init__`."""
        return tuple(zip(self.inputs.tolist(), self.periods.tolist(), strict=True))

    def forward(self, x: Tensor) -> Tensor:
        """x, then all sines, then all cosines; whole numbers become torch's default floating type."""
        x = with_fractions(x)  # periods are no whole numbers
        chosen = selected(x, self.inputs, "FourierFeatures")
        angle = 2.0 * math.pi * chosen / self.periods.to(x.dtype)
        return torch.cat([x, angle.sin(), angle.cos()], -1)

    def extra_repr(self) -> str:
        """The waves, for `repr`."""
        return f"{[(number, float(f'{period:.6g}')) for number, period in self.waves]}"
