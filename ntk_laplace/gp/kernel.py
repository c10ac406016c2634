"""The network's tangent kernel as a GPyTorch kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Size, Tensor, nn

from ntk_laplace.errors import DataError, UnsupportedError
from ntk_laplace.gp.cache import CachedRows
from ntk_laplace.gp.gram_functions import FullGram, GramDiagonal
from ntk_laplace.gp.input_format import InputFormat
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.network import Network, ParameterChoice, outside_autocast
from ntk_laplace.model.priors import GaussianPrior


class NTKKernel(Kernel):
    """Finite-width NTK of a network under a prior, K = J P0⁻¹ Jᵀ, for GPyTorch.

    A multi-output kernel: ``kernel(x1, x2)`` is (N1*C, N2*C), in the order n*C + c ("interleaved") of GPyTorch's
    multitask models. It can be added to and multiplied with other kernels of C tasks. Its hyperparameters are the
    prior's log precisions. The network's weights are not hyperparameters, and the network's mode never changes.
    Jacobians at recent inputs are cached, so hyperparameter training computes them once.

    Parameters
    ----------
    network : nn.Module
        Maps (N, ...) to (N, C) or (N,). It is copied and does not change.
    prior : GaussianPrior, optional
        By default precision 1. Shared with the caller; its log precisions take the kernel's dtype, as GPyTorch
        requires.
    input_shape : tuple of int, optional
        Shape of one input, such as (1, 28, 28), if it is not a vector: GPyTorch's inputs are (N, features).
    input_dtype : torch.dtype, optional
        Dtype of the inputs if it is not the network's, such as torch.long for token ids.
    parameters : optional
        Which parameters are linearized, as in `ntk_laplace.laplace`.
    dtype : torch.dtype, optional
        Dtype of the kernel's values; the network's by default. ``kernel.to(dtype)`` changes it.
    output : str or int, optional
        Which returned tensor is the output, as in `ntk_laplace.laplace`.
    batch_shape : torch.Size, optional
        Batch dimensions of the values. All batches share the precisions; a `ScaleKernel` with this batch shape gives
        each batch a separate scale.
    active_dims : sequence of int, optional
        Features that the network uses.

    Raises
    ------
    DataError, UnsupportedError
        If a dtype or shape argument is invalid; on evaluation, if inputs are not one tensor, features do not fit
        `input_shape`, or a gradient in the inputs is requested.
    """

    has_lengthscale = False

    def __init__(
        self, network: nn.Module, prior: GaussianPrior | None = None, input_shape: tuple[int, ...] | Size | None = None,
        input_dtype: torch.dtype | None = None, parameters: ParameterChoice = None, dtype: torch.dtype | None = None,
        output: str | int | None = None, **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        frozen = Network(network, parameters, output)  # not a module: its parameters are not registered
        dtype = frozen.dtype if dtype is None else dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise UnsupportedError("dtype as a floating torch.dtype", repr(dtype),
                                   "Leave it out for the network's own.")
        self._rows = CachedRows(frozen, InputFormat.of(input_shape, input_dtype), dtype)
        self.prior = GaussianPrior.of(prior).bind(frozen.shapes).to(frozen.device)
        self.prior.log_precision.data = self.prior.log_precision.data.to(dtype)

    def __call__(self, x1: Tensor, x2: Tensor | None = None, *args: Any, **params: Any) -> Any:
        """K(x1, x2), evaluated lazily."""
        for x in (x1, x2):
            if x is not None and not isinstance(x, Tensor):
                raise DataError("inputs of a kernel as one tensor, (..., N, features)", f"a {type(x).__name__}",
                                "Join parts along their features, torch.cat(parts, -1), and wrap the network in a "
                                "module that takes them apart; LaplaceGP takes parts as they are.")
        return super().__call__(x1, x2, *args, **params)

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """C. Sums of kernels pass all features, other callers pass the active ones."""
        if self.active_dims is not None and x1.shape[-1] != len(self.active_dims):
            x1 = x1.index_select(-1, self.active_dims)
        return self._rows.num_outputs(x1)

    @outside_autocast()
    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> Tensor:
        """K(x1, x2) (..., N1*C, N2*C), or its diagonal (..., N*C), differentiable in the prior's log precisions."""
        if last_dim_is_batch:
            raise UnsupportedError("a kernel over whole inputs", "last_dim_is_batch=True",
                                   "Use active_dims to give the network some of the features.")
        if not (x1.shape[-2] and x2.shape[-2]):
            return self._empty(x1, x2, diag)
        left, right = self._rows(x1.reshape(-1, x1.shape[-1])), self._rows(x2.reshape(-1, x2.shape[-1]))
        make = GramDiagonal if diag else FullGram
        batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
        values = [
            make(one, None if one is two else two, self.prior).weighted()
            for one, two in _pairs(left, right, x1.shape, x2.shape, batch)
        ]
        stacked = torch.stack(values).view(*batch, *values[0].shape)
        return stacked.expand(*torch.broadcast_shapes(batch, self.batch_shape), *values[0].shape)

    def _empty(self, x1: Tensor, x2: Tensor, diag: bool) -> Tensor:
        """K of no inputs, as kernels of GPyTorch have it."""
        c = self._rows.num_outputs(x1 if x1.shape[-2] else x2)
        batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2], self.batch_shape)
        sides = x1.shape[-2] * c, x2.shape[-2] * c
        return torch.zeros(*batch, *(sides[:1] if diag else sides), dtype=self.dtype, device=self._rows.device)

    # --- dtype, device and batches, which other kernels derive from their parameters

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the values."""
        found = {self._rows.dtype} | {parameter.dtype for parameter in self.parameters()}
        if len(found) > 1:
            raise RuntimeError(f"The kernel's parameters have multiple dtypes: {found}.")
        return self._rows.dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> NTKKernel:
        super()._apply(fn, *args, **kwargs)
        there = fn(torch.empty(0, dtype=self._rows.dtype, device=self._rows.device))
        self._rows = self._rows.to(there.device, there.dtype)
        return self

    def expand_batch(self, *sizes: Any) -> Kernel:
        """The kernel over a larger batch shape; it shares the prior."""
        shape = Size(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
        try:
            fits = torch.broadcast_shapes(shape, self.batch_shape) == shape
        except RuntimeError:
            fits = False
        if not fits:
            raise RuntimeError(f"Cannot expand a kernel with batch shape {self.batch_shape} to new shape {shape}")
        return self._over(shape)

    def __getitem__(self, index: Any) -> Kernel:
        if not self.batch_shape:
            return self
        return self._over(torch.empty((), device="cpu").expand(self.batch_shape)[index].shape)

    def _over(self, batch_shape: Size) -> NTKKernel:
        """The same kernel with another batch shape and the same prior."""
        if batch_shape == self.batch_shape:
            return self
        other = copy.deepcopy(self, {id(self.prior): self.prior})
        other.batch_shape = batch_shape
        return other


def _pairs(left: Jacobian, right: Jacobian, shape1: Size, shape2: Size, batch: Size) -> list[tuple[Jacobian, Jacobian]]:
    """Pairs of Jacobians for each batch; Jacobians with equal content are one object."""
    if not batch:
        return [(left, right)]

    def parts(rows: Jacobian, shape: Size) -> list[Jacobian]:
        each = [rows.subset(slice(at, at + shape[-2])) for at in range(0, shape[:-1].numel(), shape[-2])]
        places = torch.arange(len(each), device="cpu").view(shape[:-2]).expand(batch).flatten().tolist()
        return [each[place] for place in places]

    ours = parts(left, shape1)
    return list(zip(ours, ours if left is right and shape1 == shape2 else parts(right, shape2), strict=True))
