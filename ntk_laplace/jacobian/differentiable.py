"""Rows of the Jacobian with their autograd graph in the inputs: written out, example by example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ntk_laplace.jacobian.fallback import NOT_VECTORIZED, vectorized_rows
from ntk_laplace.jacobian.gradient_check import agree
from ntk_laplace.jacobian.passes import passing
from ntk_laplace.model.data import Inputs, leaves, map_tensors, num_examples, take
from ntk_laplace.model.network import Network, twice_differentiable


class DifferentiableRows:
    """Outputs f and rows of J of a frozen network, differentiable in the inputs.

    Rows are computed by `vmap` over examples. At the first call, the gradient of the first example's rows is compared
    with autograd's; if it differs, or a layer has no batching rule, one example is differentiated after the other.

    Parameters
    ----------
    network : Network
    dtype : torch.dtype
        Of f and J.

    Attributes
    ----------
    vectorized : bool or None
        Whether `vmap` is used; None before the first call.
    """

    def __init__(self, network: Network, dtype: torch.dtype) -> None:
        self.network, self.dtype = network, dtype
        self.vectorized: bool | None = None

    def __call__(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """f (n, C) and J (n, C, P) at `x`, with their graph in `x` and in nothing else."""
        network = self.network
        fixed = {name: parameter.detach() for name, parameter in network.parameters.items()}
        # the fused kernels of attention have no second derivative
        with passing(network), twice_differentiable(network.module), torch.enable_grad():
            f = network.evaluate_at(fixed, x)
            if self.vectorized is None:
                self.vectorized = self._is_right(take(x, slice(0, 1)))
            rows = self._by_vmap(x) if self.vectorized else self._by_loop(x)
        return f.to(self.dtype), rows.to(self.dtype)

    def _by_vmap(self, x: Inputs) -> Tensor:
        n, c = num_examples(x), self.network.num_outputs
        cotangents = torch.eye(c, dtype=self.network.dtype, device=self.network.device)[:, None].expand(c, n, c)
        with _PlainNorms():
            return torch.cat(vectorized_rows(self.network, self.network.names, x, cotangents), -1).transpose(0, 1)

    def _by_loop(self, x: Inputs) -> Tensor:
        rows = []
        for example in range(num_examples(x)):
            # leaves of their own: a backward pass leaves no gradient in the network
            values = {name: p.detach().requires_grad_() for name, p in self.network.parameters.items()}
            out = self.network.evaluate_at(values, take(x, slice(example, example + 1)))[0]
            found = [torch.autograd.grad(one, list(values.values()), create_graph=True, allow_unused=True,
                                         materialize_grads=True) for one in out]
            rows.append(torch.stack([torch.cat([part.flatten() for part in own]) for own in found]))
        return torch.stack(rows)

    def _is_right(self, x: Inputs) -> bool:
        """Whether `vmap` takes the network, and gives a randomly weighted sum of rows autograd's gradient in `x`."""
        x = map_tensors(lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), x)
        watched = [tensor for tensor in leaves(x) if tensor.requires_grad]
        found = []
        for compute in (self._by_loop, self._by_vmap):
            try:
                rows = compute(x)
            except NOT_VECTORIZED:
                if compute == self._by_loop:
                    raise
                return False
            generator = torch.Generator().manual_seed(0)
            weights = torch.randn(rows.shape, generator=generator, dtype=torch.float64, device="cpu").to(rows)
            slopes: Sequence[Tensor] = ()
            if rows.requires_grad and watched:  # rows of biases alone are constant
                slopes = torch.autograd.grad((weights * rows).sum(), watched, allow_unused=True, materialize_grads=True)
            found.append([part.detach().flatten() for part in (rows, *slopes)])
        largest = [float(part.abs().max()) for part in found[0]]
        return len(found[0]) == len(found[1]) and all(
            agree(own, expected, size, max(largest), self.network.precision)
            for own, expected, size in zip(found[1], found[0], largest, strict=True))


class _PlainNorms(TorchFunctionMode):
    """Layer and group normalization in elementary operations.

    `vmap` of torch's own (2.13) differentiates their rows as if mean and variance did not depend on the inputs.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _PLAIN.get(function, function)(*args, **(kwargs or {}))


def _layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    found = _standardized(x, tuple(range(-len(normalized_shape), 0)), eps)
    found = found if weight is None else found * weight
    return found if bias is None else found + bias


def _group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    groups = x.reshape(x.shape[0], num_groups, -1)
    found = _standardized(groups, (-1,), eps).view_as(x)
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    found = found if weight is None else found * weight.view(shape)
    return found if bias is None else found + bias.view(shape)


def _standardized(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    centered = x - x.mean(axes, keepdim=True)
    return centered * (centered.square().mean(axes, keepdim=True) + eps).rsqrt()


_PLAIN: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.layer_norm: _layer_norm, functional.group_norm: _group_norm,
}
