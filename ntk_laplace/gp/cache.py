"""Jacobian rows at the last few inputs, found again by content: training hyperparameters makes none anew."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.data import refuse_input_gradients
from ntk_laplace.gp.input_format import InputFormat
from ntk_laplace.jacobian import Jacobian, JacobianPass
from ntk_laplace.network import Network

__all__ = ["CachedRows"]

_KEPT = 4  # training and test inputs, and the two of another fold


class CachedRows:
    """Jacobian J_nc of one frozen network at flat inputs.

    What it answers never changes, so copies of a kernel share it. A pickle of it holds the network and no inputs.

    Parameters
    ----------
    network : Network
    form : InputFormat
    dtype : torch.dtype
        Of the rows.
    """

    def __init__(self, network: Network, form: InputFormat, dtype: torch.dtype) -> None:
        self.network, self.form, self.dtype = network, form, dtype
        self._factors = JacobianPass(network, dtype)
        self._kept: list[tuple[Tensor, Jacobian]] = []

    @property
    def device(self) -> torch.device:
        """Where the network stands."""
        return self.network.device

    def __call__(self, x: Tensor) -> Jacobian:
        """Rows at x (n, d); the same object for the same content."""
        refuse_input_gradients(x)
        for place, (known, rows) in enumerate(self._kept):
            if known.shape == x.shape and known.dtype == x.dtype and torch.equal(known, x):
                self._kept.append(self._kept.pop(place))
                return rows
        own = x.detach().clone()  # rows hold on to their inputs, and x may be changed in place later
        rows = self._factors.rows(self.form.restore(own, self.network))
        self._kept = [*self._kept[1 - _KEPT :], (own, rows)]
        return rows

    def num_outputs(self, x: Tensor) -> int:
        """C, from one evaluation at the first row of x (..., n, d) if it is not known yet."""
        if self.network.num_outputs is None:
            one = x.detach().reshape(-1, x.shape[-1])[:1]
            self.network.without_grad(self.form.restore(one, self.network))
        return self.network.num_outputs

    def to(self, device: torch.device, dtype: torch.dtype) -> CachedRows:
        """The same rows elsewhere, or in another floating type; the network keeps its own."""
        if (device, dtype) == (self.device, self.dtype):
            return self
        return CachedRows(self.network.to(device), self.form, dtype)

    def __copy__(self) -> CachedRows:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedRows:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"network": copy.copy(self.network), "form": self.form, "dtype": self.dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)
