"""Rules: from an autograd node and its output gradient to rows of the operand that a parameter feeds.

A rule reads what the node saved for its own backward pass (`_saved_*`, semi-private: tests pin them) and returns the
operand's rows in the operand's shape, or None where it does not apply. Nothing here is trusted blindly: the plan
checks every parameter's rows against autograd before it uses them, and an unmatched parameter takes the fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ntk_laplace.factors.layout import Layout

__all__ = ["RULES", "OperandDense", "OperandLookup", "OperandOuter", "OperandRows", "Use"]


@dataclass(frozen=True)
class Use:
    """One operand of one node, and the gradient that reaches the node.

    Attributes
    ----------
    node : autograd node
    operand : int
        Index among the node's inputs.
    shape : torch.Size
        Shape of the operand.
    gradient : Tensor, (K, *output shape)
        One output gradient per seed.
    layout : Layout
        Where the examples lie in the node's output.
    n : int
        Number of examples.
    memo : dict of str to Tensor
        What does not depend on the gradient, kept for the next one.
    """

    node: Any
    operand: int
    shape: torch.Size
    gradient: Tensor
    layout: Layout
    n: int
    memo: dict[str, Tensor] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """The value of that name, made if it is not there."""
        if name not in self.memo:
            self.memo[name] = make()
        return self.memo[name]


@dataclass(frozen=True)
class OperandOuter:
    """Rows Σ_t b ⊗ a; `order` says whether the operand's flat order is (g, o, i) or (g, i, o)."""

    b: Tensor
    a: Tensor
    order: str


@dataclass(frozen=True)
class OperandLookup:
    """Rows of a table looked up at tokens; the row `padding` (-1: none) gets no gradient."""

    b: Tensor
    tokens: Tensor
    padding: int = -1


@dataclass(frozen=True)
class OperandDense:
    """Rows (K, N, numel) in the operand's flat order."""

    rows: Tensor


OperandRows = OperandOuter | OperandLookup | OperandDense


def _dense(rows: Tensor | None) -> OperandDense | None:
    return None if rows is None else OperandDense(rows)


def _saved(node: Any, name: str) -> Any:
    value = getattr(node, f"_saved_{name}", None)
    return value.detach() if isinstance(value, Tensor) else value


def _product(use: Use, data: Tensor | None) -> OperandRows | None:
    """Operand of a matrix product whose other operand is `data`; either side, with or without a batch axis."""
    if data is None:
        return None
    g = use.gradient if use.gradient.ndim == 4 else use.gradient.unsqueeze(1)  # (K, G, rows, cols)
    data = data if data.ndim == 3 else data.unsqueeze(0)
    dim = use.layout.dim + (4 - use.gradient.ndim)  # axis in (G, rows, cols)
    if dim == 0:
        return None
    layout = Layout(dim, use.layout.positions_first)
    split = layout.split(g, use.n, 1)  # (K, N, T, G, the other axis)
    b = split.permute(0, 1, 3, 2, 4)
    if dim == 1:  # examples in rows: data (G, rows, i), operand (G, i, o)
        a = Layout(1, use.layout.positions_first).split(data, use.n, 0).permute(0, 2, 1, 3)
        return OperandOuter(b, a, "gio")
    # examples in columns: operand (G, o, i) times data (G, i, cols)
    a = Layout(2, use.layout.positions_first).split(data, use.n, 0).permute(0, 2, 1, 3)
    return OperandOuter(b, a, "goi")


def _addmm(use: Use) -> OperandRows | None:
    if _saved(use.node, "alpha") != 1 or _saved(use.node, "beta") != 1:
        return None
    if use.operand == 0:
        return _dense(use.layout.reduce(use.gradient, use.n, use.shape))
    return _product(use, _saved(use.node, "mat1" if use.operand == 2 else "mat2"))


def _mm(use: Use) -> OperandRows | None:
    return _product(use, _saved(use.node, "self" if use.operand == 1 else "mat2"))


def _mv(use: Use) -> OperandRows | None:
    data = _saved(use.node, "self")
    if use.operand != 1 or data is None or use.layout.dim != 0:
        return None
    a = use.layout.split(data, use.n, 0)  # (N, T, i)
    b = use.layout.split(use.gradient, use.n, 1)  # (K, N, T)
    return OperandOuter(b[:, :, None, :, None], a.unsqueeze(1), "goi")


def _windows(x: Tensor, kernel: tuple, stride: tuple, dilation: tuple, padding: tuple, out: tuple) -> Tensor:
    """Sliding windows of (M, c, *space) as a view (M, c, *out, *kernel); any number of spatial axes."""
    if any(padding):
        x = F.pad(x, [p for axis in reversed(padding) for p in (axis, axis)])
    steps = x.stride()
    space = [s * step for s, step in zip(stride, steps[2:], strict=True)]
    inner = [d * step for d, step in zip(dilation, steps[2:], strict=True)]
    return x.as_strided((*x.shape[:2], *out, *kernel), (*steps[:2], *space, *inner))


def _grouped(windows: Tensor, groups: int, axes: int) -> Tensor:
    """(M, G*c, *out, *kernel) -> (M, G, positions, c * kernel entries)."""
    channels = windows.shape[1]
    split = windows.unflatten(1, (groups, channels // groups))
    order = [0, 1, *range(3, 3 + axes), 2, *range(3 + axes, 3 + 2 * axes)]
    return split.permute(order).flatten(2 + axes).flatten(2, 1 + axes)


def _unfolded(
    x: Tensor, kernel: tuple, stride: tuple, dilation: tuple, padding: tuple, out: tuple, groups: int
) -> Tensor:
    """Inputs of a convolution at each of its positions, (M, G, positions, c * kernel entries)."""
    if len(kernel) != 2:
        return _grouped(_windows(x, kernel, stride, dilation, padding, out), groups, len(kernel))
    columns = F.unfold(x, kernel, dilation, padding, stride)  # (M, G*c*kernel, positions), by a kernel of its own
    return columns.unflatten(1, (groups, -1)).transpose(2, 3).contiguous()


def _channels(x: Tensor, groups: int) -> Tensor:
    """(M, G*c, *space) -> (M, G, positions, c)."""
    return x.flatten(2).unflatten(1, (groups, x.shape[1] // groups)).transpose(2, 3)


def _convolution(use: Use) -> OperandRows | None:
    if use.layout.dim != 0 or use.operand == 0:
        return None
    g = use.gradient
    if use.operand == 2:
        channel_shape = torch.Size((g.shape[2],) + (1,) * (g.ndim - 3))
        return _dense(use.layout.reduce(g, use.n, channel_shape))
    node = use.node
    x, groups = _saved(node, "input"), int(_saved(node, "groups"))
    stride, dilation = tuple(_saved(node, "stride")), tuple(_saved(node, "dilation"))
    padding, kernel = tuple(_saved(node, "padding")), tuple(use.shape[2:])
    axes = len(kernel)
    stride, dilation, padding = (v * axes if len(v) == 1 else v for v in (stride, dilation, padding))
    flat = g.flatten(0, 1)
    first = Layout(0, use.layout.positions_first)

    def split_inputs(a: Tensor) -> Tensor:
        return first.split(a, use.n, 0).movedim(1, 2).flatten(2, 3)  # (N, G, T, i)

    if _saved(node, "transposed"):
        # y[o] = Σ_s x[s] w[o - stride s]: windows of the output gradient at each input position
        b = _grouped(_windows(flat, kernel, stride, dilation, padding, tuple(x.shape[2:])), groups, axes)
        a, order = split_inputs(_channels(x, groups)), "gio"
    else:
        b, order = _channels(flat, groups), "goi"
        out = tuple(g.shape[3:])
        a = use.once("windows", lambda: split_inputs(
            _unfolded(x, kernel, stride, dilation, padding, out, groups)
        ))  # fmt: skip
    b = b.unflatten(0, g.shape[:2])  # (K, M, G, positions, o)
    b = first.split(b, use.n, 1).movedim(2, 3).flatten(3, 4)  # (K, N, G, T, o)
    return OperandOuter(b, a, order)


def _embedding(use: Use) -> OperandRows | None:
    tokens, padding = _saved(use.node, "indices"), _saved(use.node, "padding_idx")
    if tokens is None or _saved(use.node, "scale_grad_by_freq"):
        return None
    b = use.layout.split(use.gradient, use.n, 1)
    b = b.flatten(2, -2)  # (K, N, T, d)
    tokens = use.layout.split(tokens, use.n, 0).flatten(1)
    padding = _signed(padding)
    if padding >= 0:
        b = b * (tokens != padding).to(b.dtype)[None, :, :, None]
    return OperandLookup(b, tokens, padding)


def _signed(value: Any) -> int:
    """Saved 64-bit integers come back unsigned: -1 reads 2**64 - 1."""
    number = -1 if value is None else int(value)
    return number - 2**64 if number >= 2**63 else number


def _per_channel(use: Use, normalize: Callable[[], Tensor]) -> OperandRows | None:
    rows = use.gradient * use.once("normalized", normalize) if use.operand == 1 else use.gradient
    channel_shape = torch.Size((rows.shape[2],) + (1,) * (rows.ndim - 3))
    return _dense(use.layout.reduce(rows, use.n, channel_shape))


def _layer_norm(use: Use) -> OperandRows | None:
    if use.operand == 1:
        def normalize() -> Tensor:
            return (_saved(use.node, "input") - _saved(use.node, "result1")) * _saved(use.node, "result2")

        return _dense(use.layout.reduce(use.gradient * use.once("normalized", normalize), use.n, use.shape))
    return _dense(use.layout.reduce(use.gradient, use.n, use.shape)) if use.operand == 2 else None


def _group_norm(use: Use) -> OperandRows | None:
    if use.operand == 0:
        return None
    def normalize() -> Tensor:
        x, eps = _saved(use.node, "input"), float(_saved(use.node, "eps"))
        return F.group_norm(x, int(_saved(use.node, "group")), eps=eps)

    return _per_channel(use, normalize)


def _batch_norm(use: Use) -> OperandRows | None:
    if use.operand == 0 or bool(_saved(use.node, "training")):
        return None
    def normalize() -> Tensor:
        x = _saved(use.node, "input")
        eps = _saved(use.node, "eps")
        eps = float(_saved(use.node, "epsilon") if eps is None else eps)
        shape = (1, -1) + (1,) * (x.ndim - 2)
        mean, variance = _saved(use.node, "running_mean").view(shape), _saved(use.node, "running_var").view(shape)
        return (x - mean) * (variance + eps).rsqrt()

    return _per_channel(use, normalize)


def _sum_operand(sign: float) -> Callable[[Use], OperandRows | None]:
    def rule(use: Use) -> OperandRows | None:
        alpha = _saved(use.node, "alpha") if use.operand == 1 else 1
        if use.operand == 1 and alpha is None:
            alpha = 1
        factor = (sign if use.operand == 1 else 1.0) * float(alpha)
        rows = use.gradient if factor == 1.0 else use.gradient * factor
        return _dense(use.layout.reduce(rows, use.n, use.shape))

    return rule


def _mul(use: Use) -> OperandRows | None:
    other = _saved(use.node, "other" if use.operand == 0 else "self")
    if other is None:
        return None
    return _dense(use.layout.reduce(use.gradient * other, use.n, use.shape))


def _div(use: Use) -> OperandRows | None:
    other = _saved(use.node, "other")
    if other is None:
        return None
    factor = other.reciprocal()
    if use.operand == 1:
        numerator = _saved(use.node, "self")
        if numerator is None:
            return None
        factor = -numerator * factor * factor
    return _dense(use.layout.reduce(use.gradient * factor, use.n, use.shape))


def _expand(use: Use) -> OperandRows | None:
    return _dense(use.layout.reduce(use.gradient, use.n, use.shape))


def _repeat(use: Use) -> OperandRows | None:
    # (C,) repeated for every example, as instance norm does with its weight
    if use.gradient.ndim != 2 or use.layout.positions_first or use.gradient.shape[1] != use.n * use.shape.numel():
        return None
    return OperandDense(use.gradient.unflatten(1, (use.n, use.shape.numel())))


def _prelu(use: Use) -> OperandRows | None:
    if use.operand != 1:
        return None
    x = _saved(use.node, "self")
    return _dense(use.layout.reduce(use.gradient * x.clamp_max(0.0), use.n, use.shape))


RULES: dict[str, Callable[[Use], OperandRows | None]] = {
    "AddmmBackward": _addmm,
    "MmBackward": _mm,
    "BmmBackward": _mm,
    "MvBackward": _mv,
    "ConvolutionBackward": _convolution,
    "ConvolutionOverrideableBackward": _convolution,
    "EmbeddingBackward": _embedding,
    "NativeLayerNormBackward": _layer_norm,
    "NativeGroupNormBackward": _group_norm,
    "NativeBatchNormBackward": _batch_norm,
    "CudnnBatchNormBackward": _batch_norm,
    "MiopenBatchNormBackward": _batch_norm,
    "AddBackward": _sum_operand(1.0),
    "SubBackward": _sum_operand(-1.0),
    "MulBackward": _mul,
    "DivBackward": _div,
    "ExpandBackward": _expand,
    "RepeatBackward": _repeat,
    "PreluKernelBackward": _prelu,
}
