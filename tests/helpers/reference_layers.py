"""One example's layers, read off the calls of `torch.nn.functional` that apply a trained weight.

A layer's inputs come from the call (for a convolution, from applying it to every one-hot weight), its output
gradients from differentiating in a zero that is added to the call's result. No name of the library is used here.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


@dataclass(frozen=True)
class Application:
    """A weight applied once: what was applied, to what, and the zero that was added to the result."""

    name: str
    apply: Callable[..., Tensor]  # (input, weight) -> output without bias
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    zero: Tensor
    groups: int
    padding: int | None = None


@contextlib.contextmanager
def recorded() -> Iterator[list[Application]]:
    """Inside, every call of F.linear, F.conv*, F.conv_transpose* and F.embedding is written down."""
    found: list[Application] = []

    def wrap(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return keep(original(x, weight, bias), lambda x, w: original(x, w), x, weight, bias, 1)

        def convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **named: Any) -> Tensor:
            position = 4 if name in _TRANSPOSED else 3  # of `groups` after the bias
            groups = named.get("groups", rest[position - (0 if name in _CONVOLUTIONS else 1)] if rest else 1)
            out = original(x, weight, bias, *rest, **named)
            return keep(out, lambda x, w: original(x, w, None, *rest, **named), x, weight, bias, groups)

        def embedding(x: Tensor, weight: Tensor, padding_idx: int | None = None, *rest: Any, **named: Any) -> Tensor:
            out = original(x, weight, padding_idx, *rest, **named)
            return keep(out, lambda x, w: original(x, w), x, weight, None, 1, padding_idx)

        def keep(out: Tensor, apply, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, padding=None):
            zero = torch.zeros_like(out, requires_grad=True)
            found.append(Application(name, apply, x.detach(), weight, bias, zero, groups, padding))
            return out + zero

        return {"linear": linear, "embedding": embedding}.get(name, convolution)

    names = ("linear", "embedding", *_CONVOLUTIONS, *_TRANSPOSED)
    originals = {name: getattr(F, name) for name in names}
    try:
        for name, original in originals.items():
            setattr(F, name, wrap(name, original))
        yield found
    finally:
        for name, original in originals.items():
            setattr(F, name, original)


def _where(tensor: Tensor | None, places: dict[int, tuple[Tensor, Tensor]]) -> Tensor | None:
    """Flat index in the vector of all parameters of every entry of a parameter, or of a view of one.

    A copy says itself where it comes from: `origin` is the parameter and the function that was applied to it.
    """
    if tensor is None:
        return None
    if hasattr(tensor, "origin"):
        parameter, arranged = tensor.origin
        return arranged(places[id(parameter)][1].view(parameter.shape))
    base = tensor if tensor._base is None else tensor._base
    if id(base) not in places:
        return None
    parameter, index = places[id(base)]
    offset = tensor.storage_offset() - parameter.storage_offset() + index.storage_offset()
    return index.as_strided(tensor.shape, tensor.stride(), offset)


@dataclass(frozen=True)
class Layer:
    """Rows of one application for one example: J_c = Σ_t b_ct ⊗ a_t, group by group.

    `index` (G, o, i) and `bias` (G, o) say where entries lie in the flat order; a is (G, T, i), b is (C, G, T, o).
    """

    kind: str
    index: Tensor
    bias: Tensor | None
    a: Tensor
    b: Tensor


def _linear(use: Application, g: Tensor, index: Tensor, bias: Tensor | None) -> Layer:
    a, b = use.x.reshape(1, -1, use.x.shape[-1]), g.reshape(len(g), 1, -1, g.shape[-1])
    return Layer("linear", index[None], None if bias is None else bias[None], a, b)


def _embedding(use: Application, g: Tensor, index: Tensor, bias: Tensor | None) -> Layer:
    a, b = F.one_hot(use.x.reshape(-1), len(index)).to(g), g.reshape(len(g), 1, -1, g.shape[-1])
    if use.padding is not None:  # autograd leaves it out: neither a token nor a gradient
        padding = use.x.reshape(-1) == use.padding
        a[padding], b[:, :, padding] = 0.0, 0.0
    return Layer("embedding", index.T[None], None, a[None], b)


def _convolution(use: Application, g: Tensor, index: Tensor, bias: Tensor | None) -> Layer:
    """Inputs of a convolution by what it makes of one-hot weights: out[o, t] = Σ_i w[o, i] a[t, i]."""
    o, groups = len(index) // use.groups, use.groups
    inputs = index[0].numel()
    one_hot = torch.zeros(inputs, groups, o, inputs, dtype=g.dtype)
    one_hot[range(inputs), :, 0, range(inputs)] = 1.0
    seen = torch.stack([use.apply(use.x, w.view(use.weight.shape))[0] for w in one_hot])  # (i, G * o, *space)
    a = seen.unflatten(1, (groups, o))[:, :, 0].flatten(2).permute(1, 2, 0)
    b = g[:, 0].flatten(2).unflatten(1, (groups, o)).transpose(2, 3)
    return Layer("linear", index.reshape(groups, o, inputs), None if bias is None else bias.view(groups, o), a, b)


def _transposed(use: Application, g: Tensor, index: Tensor, bias: Tensor | None) -> Layer:
    """A transposed convolution's positions are those of its input: each throws a window onto the output.

    Its bias belongs to the output's positions, which are others, so that the two share no factor.
    """
    channels, space = use.x.shape[1] // use.groups, use.x.shape[2:]
    rows = []
    for where in itertools.product(*map(range, space)):
        unit = torch.zeros_like(use.x).unflatten(1, (use.groups, channels))
        unit[(0, slice(None), 0, *where)] = 1.0  # the first channel of each group, at one position
        weight = use.weight.detach().clone().requires_grad_()
        out = use.apply(unit.flatten(1, 2), weight)
        thrown = torch.stack([torch.autograd.grad(out, weight, each, retain_graph=True)[0] for each in g])
        rows.append(thrown.unflatten(1, (use.groups, channels))[:, :, 0].flatten(2))  # (C, G, o * kernel)
    index = index.reshape(use.groups, channels, -1).transpose(1, 2)
    a = use.x[0].flatten(1).unflatten(0, (use.groups, channels)).transpose(1, 2)
    return Layer("linear", index, None, a, torch.stack(rows, 2))


def layers_of_example(run: Callable[[Any], Tensor], x: Any, places: dict[int, tuple[Tensor, Tensor]]) -> list[Layer]:
    """Every application of a trained weight for a batch of one."""
    with recorded() as uses:
        f = run(x).reshape(-1)
    uses = [use for use in uses if _where(use.weight, places) is not None]
    if not uses:
        return []
    zeros = [use.zero for use in uses]
    grads = [torch.autograd.grad(each, zeros, retain_graph=True, materialize_grads=True) for each in f]
    layers = []
    for use, g in zip(uses, map(torch.stack, zip(*grads, strict=True)), strict=True):
        build = _convolution if use.name in _CONVOLUTIONS else _transposed if use.name in _TRANSPOSED else None
        build = build or {"linear": _linear, "embedding": _embedding}[use.name]
        with torch.enable_grad():
            layer = build(use, g, _where(use.weight, places), _where(use.bias, places))
        layers.append(Layer(layer.kind, layer.index, layer.bias, layer.a.detach().double(), layer.b.double()))
    return layers
