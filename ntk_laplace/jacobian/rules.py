"""Rules: for an autograd node, an extractor that computes a parameter's rows from gradients of the node's output.

A rule reads the tensors that the node saved for its backward pass (`_saved_*`, semi-private: tests pin them) once per
batch, and returns None where it does not apply. Its extractor may get the gradients of all cotangents, or of one at a
time. The gradient check compares every batch's rows with autograd; parameters that no rule covers use the fallback.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ntk_laplace.errors import UnsupportedError
from ntk_laplace.jacobian.blocks import Block
from ntk_laplace.jacobian.layout import Layout
from ntk_laplace.jacobian.path import ParameterPath
from ntk_laplace.runtime import tuning


@dataclass(frozen=True)
class Use:
    """One operand of one node.

    Attributes
    ----------
    node : autograd node
    operand : int
        Index among the node's inputs.
    shape, output : torch.Size
        Shapes of the operand and of the node's output.
    layout : Layout
        Example axis of the node's output.
    n : int
        Number of examples.
    dtype : torch.dtype
        Floating type of the rows and of the gradients; saved tensors are converted to it.
    path : ParameterPath
        From the parameter to the operand; it makes the blocks.
    """

    node: Any
    operand: int
    shape: torch.Size
    output: torch.Size
    layout: Layout
    n: int
    dtype: torch.dtype
    path: ParameterPath


@dataclass(frozen=True)
class Extractor:
    """Function from output gradients to rows.

    Attributes
    ----------
    extract : callable
        Returns rows for gradients (K, *output shape); None if the rule does not support their layout.
    summed : bool
        The rows are sums over positions and have no factors. Reading one cotangent at a time saves the memory of all
        cotangents' gradients.
    short : bool
        The rows have factors, but are far shorter than the gradients. They are read one cotangent at a time too,
        unless factors are kept.
    """

    extract: Callable[[Tensor], Block | None]
    summed: bool = False
    short: bool = False


def _summed(use: Use, factor: Tensor | float = 1.0, channels: bool = False) -> Extractor:
    """Gradient times `factor`, summed over all axes but examples and the operand's (`channels`: the second axis)."""
    unscaled = isinstance(factor, float) and factor == 1.0

    def extract(gradient: Tensor) -> Block | None:
        rows = gradient if unscaled else gradient * factor
        shape = torch.Size((rows.shape[2],) + (1,) * (rows.ndim - 3)) if channels else use.shape
        found = use.layout.reduce(rows, use.n, shape)
        return None if found is None else use.path.dense(found)

    return Extractor(extract, summed=True)


def _saved(node: Any, name: str) -> Any:
    value = getattr(node, f"_saved_{name}", None)
    return value.detach() if isinstance(value, Tensor) else value


def _product(use: Use, data: Tensor | None) -> Extractor | None:
    """Extractor for an operand of a matrix product with `data`, on either side, with or without a batch axis."""
    if data is None:
        return None
    dim = use.layout.dim + (3 - data.ndim)  # axis in (G, rows, cols)
    data = data if data.ndim == 3 else data.unsqueeze(0)
    if dim == 0:
        return None
    layout = Layout(dim, use.layout.positions_first)

    def extract(gradient: Tensor) -> Block:
        g = gradient if gradient.ndim == 4 else gradient.unsqueeze(1)  # (K, G, rows, cols)
        b = layout.split(g, use.n, 1).permute(0, 1, 3, 2, 4)  # from (K, N, T, G, remaining axis)
        inputs = data.to(use.dtype)
        if dim == 1:  # examples in rows: data (G, rows, i), operand (G, i, o)
            a = Layout(1, use.layout.positions_first).split(inputs, use.n, 0).permute(0, 2, 1, 3)
            return use.path.outer(b, a, inputs_first=True)
        # examples in columns: operand (G, o, i) times data (G, i, cols)
        a = Layout(2, use.layout.positions_first).split(inputs, use.n, 0).permute(0, 2, 1, 3)
        return use.path.outer(b, a)

    return Extractor(extract)


def _addmm(use: Use) -> Extractor | None:
    if _saved(use.node, "alpha") != 1 or _saved(use.node, "beta") != 1:
        return None
    if use.operand == 0:
        return _summed(use)
    return _product(use, _saved(use.node, "mat1" if use.operand == 2 else "mat2"))


def _mm(use: Use) -> Extractor | None:
    return _product(use, _saved(use.node, "self" if use.operand == 1 else "mat2"))


def _mv(use: Use) -> Extractor | None:
    data = _saved(use.node, "self")
    if use.operand != 1 or data is None or use.layout.dim != 0:
        return None

    def extract(gradient: Tensor) -> Block:
        a = use.layout.split(data.to(use.dtype), use.n, 0)  # (N, T, i)
        b = use.layout.split(gradient, use.n, 1)  # (K, N, T)
        return use.path.outer(b[:, :, None, :, None], a.unsqueeze(1))

    return Extractor(extract)


def _windows(x: Tensor, kernel: tuple, stride: tuple, dilation: tuple, padding: tuple, out: tuple) -> Tensor:
    """Sliding windows of (M, c, *space) as a view (M, c, *out, *kernel); any number of spatial axes."""
    x = x.contiguous()  # makes runs of positions contiguous for the copy
    if any(padding):
        x = F.pad(x, [p for axis in reversed(padding) for p in (axis, axis)])
    steps = x.stride()
    space = [s * step for s, step in zip(stride, steps[2:], strict=True)]
    inner = [d * step for d, step in zip(dilation, steps[2:], strict=True)]
    return x.as_strided((*x.shape[:2], *out, *kernel), (*steps[:2], *space, *inner))


def _grouped(windows: Tensor, groups: int, axes: int) -> Tensor:
    """(M, G*c, *out, *kernel) -> (M, G, positions, c * kernel entries), with positions contiguous in memory.

    Neighboring positions are then contiguous in source and target, which makes the copy several times faster.
    """
    split = windows.unflatten(1, (groups, windows.shape[1] // groups))
    order = [0, 1, 2, *range(3 + axes, 3 + 2 * axes), *range(3, 3 + axes)]
    entries_first = split.permute(order).flatten(2, 2 + axes).flatten(3)
    return entries_first.transpose(2, 3)


def _channels(x: Tensor, groups: int) -> Tensor:
    """(..., G*c, *space) after two leading axes -> (..., G, positions, c)."""
    return x.flatten(3).unflatten(2, (groups, x.shape[2] // groups)).transpose(3, 4)


def _convolution(use: Use) -> Extractor | None:
    if use.layout.dim != 0 or use.operand == 0:
        return None
    if use.operand == 2:
        return _summed(use, channels=True)
    node, axes = use.node, len(use.shape) - 2
    x, groups, kernel = _saved(node, "input"), int(_saved(node, "groups")), tuple(use.shape[2:])
    sizes = [tuple(_saved(node, name)) for name in ("stride", "dilation", "padding")]
    stride, dilation, padding = (v * axes if len(v) == 1 else v for v in sizes)
    transposed = bool(_saved(node, "transposed"))

    space = tuple(use.output[2:])

    @cache
    def inputs() -> Tensor:
        own = x.to(use.dtype)
        if transposed:
            a = _channels(own.unsqueeze(0), groups)[0]
        else:
            a = _grouped(_windows(own, kernel, stride, dilation, padding, space), groups, axes)
        return use.layout.split(a, use.n, 0).movedim(1, 2).flatten(2, 3)

    def extract(gradient: Tensor) -> Block:
        if transposed:
            # y[o] = Σ_s x[s] w[o - stride s]: windows of the output gradient at each input position
            flat = gradient.transpose(0, 1).flatten(0, 1)
            windows = _windows(flat, kernel, stride, dilation, padding, tuple(x.shape[2:]))
            b = _grouped(windows, groups, axes).unflatten(0, (gradient.shape[1], -1)).transpose(0, 1)
        else:
            b = _channels(gradient, groups)
        # (K, M, G, positions, o), where M may contain further positions: (K, N, G, T, o) and (N, G, T, i)
        b = use.layout.split(b, use.n, 1).movedim(2, 3).flatten(3, 4)
        return use.path.outer(b, inputs(), inputs_first=transposed)

    return Extractor(extract, short=not transposed and tuning.LONG_GRADIENT * use.shape[1:].numel() <= math.prod(space))


def _embedding(use: Use) -> Extractor | None:
    tokens, padding = _saved(use.node, "indices"), _signed(_saved(use.node, "padding_idx"))
    if tokens is None or _saved(use.node, "scale_grad_by_freq"):
        return None

    def extract(gradient: Tensor) -> Block:
        b = use.layout.split(gradient, use.n, 1).flatten(2, -2)  # (K, N, T, d)
        own = use.layout.split(tokens, use.n, 0).flatten(1)
        if padding >= 0:
            b = b * (own != padding).to(b.dtype)[None, :, :, None]
        return use.path.lookup(b, own, padding)

    return Extractor(extract)


def _signed(value: Any) -> int:
    """Convert a saved 64-bit integer, which torch returns unsigned (-1 as 2**64 - 1), to a signed one."""
    number = -1 if value is None else int(value)
    return number - 2**64 if number >= 2**63 else number


def _layer_norm(use: Use) -> Extractor | None:
    if use.operand != 1:
        return _summed(use) if use.operand == 2 else None
    x = _saved(use.node, "input").to(use.dtype)
    return _summed(use, (x - _saved(use.node, "result1")).mul_(_saved(use.node, "result2")))


def _per_channel(use: Use, normalized: Callable[[Tensor], Tensor]) -> Extractor:
    """Weight (operand 1) and bias of a norm layer with one entry per channel."""
    if use.operand != 1:
        return _summed(use, channels=True)
    return _summed(use, normalized(_saved(use.node, "input").to(use.dtype)), channels=True)


def _group_norm(use: Use) -> Extractor | None:
    if use.operand == 0:
        return None
    mean, deviation = _saved(use.node, "result1"), _saved(use.node, "result2")  # (N, groups); `deviation` is an inverse

    def normalized(x: Tensor) -> Tensor:
        grouped = x.unflatten(1, (mean.shape[1], -1))
        shape = (*mean.shape, *[1] * (grouped.ndim - 2))
        return (grouped - mean.view(shape)).mul_(deviation.view(shape)).flatten(1, 2)

    return _per_channel(use, normalized)


def _batch_norm(use: Use) -> Extractor | None:
    if use.operand == 0 or bool(_saved(use.node, "training")):
        return None
    eps = _saved(use.node, "eps")
    eps = float(_saved(use.node, "epsilon") if eps is None else eps)
    mean, variance = _saved(use.node, "running_mean"), _saved(use.node, "running_var")

    def normalized(x: Tensor) -> Tensor:
        shape = (1, -1) + (1,) * (x.ndim - 2)
        return (x - mean.view(shape)).mul_((variance + eps).rsqrt().view(shape))

    return _per_channel(use, normalized)


def _sum_operand(sign: float) -> Callable[[Use], Extractor | None]:
    def rule(use: Use) -> Extractor | None:
        alpha = _saved(use.node, "alpha") if use.operand == 1 else 1
        return _summed(use, (sign if use.operand == 1 else 1.0) * float(1 if alpha is None else alpha))

    return rule


def _mul(use: Use) -> Extractor | None:
    other = _saved(use.node, "other" if use.operand == 0 else "self")
    return None if other is None else _summed(use, other)


def _div(use: Use) -> Extractor | None:
    other = _saved(use.node, "other")
    if other is None:
        return None
    factor = other.to(use.dtype).reciprocal()
    if use.operand == 1:
        numerator = _saved(use.node, "self")
        if numerator is None:
            return None
        factor = -numerator * factor * factor
    return _summed(use, factor)


def _repeat(use: Use) -> Extractor:
    # instance norm repeats its weight (C,) for every example
    def extract(gradient: Tensor) -> Block | None:
        size = use.shape.numel()
        if gradient.ndim != 2 or use.layout.positions_first or gradient.shape[1] != use.n * size:
            return None
        return use.path.dense(gradient.unflatten(1, (use.n, size)))

    return Extractor(extract, summed=True)


def _prelu(use: Use) -> Extractor | None:
    return _summed(use, _saved(use.node, "self").clamp_max(0.0)) if use.operand == 1 else None


Rule = Callable[[Use], Extractor | None]
"""Maps the use of an operand to an extractor; None if the rule does not apply."""

RULES: dict[str, Rule] = {
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
    "ExpandBackward": _summed,
    "RepeatBackward": _repeat,
    "PreluKernelBackward": _prelu,
}


def register_rule(kind: str) -> Callable[[Rule], Rule]:
    """Decorator: make a rule known for an autograd node, for example of a `torch.autograd.Function` of one's own.

    Parameters
    ----------
    kind : str
        Name of the node without its number: ``type(output.grad_fn).__name__`` of an ``AddmmBackward0`` is
        "AddmmBackward", of a function ``Scale`` it is "ScaleBackward".

    Raises
    ------
    UnsupportedError
        If the library has a rule for this node, or this is no name of a node, or the rule is no function.
    """
    if not isinstance(kind, str) or kind[-1:].isdigit():
        raise UnsupportedError("the name of an autograd node without its number", f"{kind!r}"[:80],
                               'Write for example @register_rule("FilterBackward") above the rule.')

    def register(rule: Rule) -> Rule:
        if not callable(rule):
            raise UnsupportedError(f"a function as the rule of {kind}", f"{rule!r}"[:80],
                                   "Pass a function that takes a Use and returns an Extractor or None.")
        known = RULES.get(kind)
        if known is not None and known.__module__ == __name__:
            raise UnsupportedError("an autograd node that the library has no rule for", repr(kind),
                                   "Name the node of your own function; networks with other nodes need no rule.")
        RULES[kind] = rule
        return rule

    return register
