"""A cache of Jacobians at recent inputs, looked up by content, so hyperparameter training computes them once."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.gp.input_format import InputFormat
from ntk_laplace.jacobian import Jacobian, JacobianPass
from ntk_laplace.model.data import refuse_input_gradients
from ntk_laplace.model.network import Network
from ntk_laplace.runtime import tuning

# linear_operator marks the inputs of a kernel that is not evaluated yet, in the Kronecker products of LMC models
_FIXED = ("fix inducing points, learn_inducing_locations=False or inducing_points.requires_grad_(False); call an LMC "
          "model under gpytorch.settings.lazily_evaluate_kernels(False); for acquisition functions use "
          "ntk_laplace.botorch.LaplaceModel.")


class CachedRows:
    """Jacobian J_nc of one frozen network at flat inputs, in a dtype.

    Its results never change, so copies of a kernel share it. A pickle contains the network but no inputs.
    """

    def __init__(self, network: Network, form: InputFormat, dtype: torch.dtype) -> None:
        self.network, self.form, self.dtype = network, form, dtype
        self._jacobian_pass = JacobianPass(network, dtype)
        self._kept: list[tuple[Tensor, Jacobian]] = []

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return self.network.device

    def __call__(self, x: Tensor) -> Jacobian:
        """Jacobian at x (n, d); the same object for the same content."""
        refuse_input_gradients(x, _FIXED)
        for place, (known, rows) in enumerate(self._kept):
            if known.shape == x.shape and known.dtype == x.dtype and torch.equal(known, x):
                self._kept.append(self._kept.pop(place))
                return rows
        own = x.detach().clone()  # the Jacobian keeps its inputs, and x may change in place later
        rows = self._jacobian_pass.rows(self.form.restore(own, self.network))
        self._kept = [*self._kept[1 - tuning.GP_CACHED_INPUTS :], (own, rows)]
        return rows

    def num_outputs(self, x: Tensor) -> int:
        """C, from one evaluation at the first row of x (..., n, d) if it is not known yet."""
        if not self.network.evaluated:
            one = x.detach().reshape(-1, x.shape[-1])[:1]
            self.network.without_grad(self.form.restore(one, self.network))
        return self.network.num_outputs

    def to(self, device: torch.device, dtype: torch.dtype) -> CachedRows:
        """A cache on another device or in another dtype; the network keeps its dtype."""
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
        vars(self).update(vars(CachedRows(**state)))
