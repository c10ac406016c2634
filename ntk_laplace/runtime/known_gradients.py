"""Values whose first derivatives are known in closed form, as nodes of autograd's graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.errors import UnsupportedError

Gradient = Callable[[Tensor], Tensor]


def with_gradients(
    value: Tensor, what: str, *gradients: tuple[Tensor, Gradient], check: Callable[[], None] | None = None
) -> Tensor:
    """Return a copy of `value`, differentiable once.

    Parameters
    ----------
    value : Tensor
        Its own graph is not used.
    what : str
        The value, for the error of a second derivative.
    gradients : tuples (Tensor, callable)
        A tensor that the value depends on, and the product of the value's gradient with the derivative in that
        tensor. The product is computed in backward, and only for a tensor that requires a gradient.
    check : callable, optional
        Called first in backward; raises an error if the products would no longer belong to the value.
    """
    tensors, products = [tensor for tensor, _ in gradients], [product for _, product in gradients]
    found: Tensor = _Known.apply(value.detach(), what, products, check, *tensors)
    return found


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, what: str, products: list[Gradient], check: Callable[[], None] | None, *tensors: Tensor
    ) -> Tensor:
        ctx.what, ctx.products, ctx.check = what, products, check
        ctx.like = [(tensor.dtype, tensor.device) for tensor in tensors]
        return value.clone()  # autograd puts the graph into what is returned

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        require_first_derivative(ctx.what)
        if ctx.check is not None:
            ctx.check()
        found = [
            product(upstream).to(device=device, dtype=dtype) if needed else None
            for needed, product, (dtype, device) in zip(ctx.needs_input_grad[4:], ctx.products, ctx.like, strict=True)
        ]
        return None, None, None, None, *found


def scaled_by(slope: Callable[[], Tensor]) -> Gradient:
    """The product of a number's gradient with the number's derivative, which is computed when it is needed."""

    def product(upstream: Tensor) -> Tensor:
        found = slope()
        return upstream.to(found) * found

    return product


def require_first_derivative(what: str) -> None:
    """Refuse a gradient that is to be differentiated again (UnsupportedError); called in backward."""
    if torch.is_grad_enabled():
        raise UnsupportedError(f"a first derivative of {what}", "a second one, create_graph=True",
                               "Differentiate once, or take finite differences of the gradient.")
