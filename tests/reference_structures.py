"""Slow dense references of structured weight space: KFAC, EKFAC, INF and the diagonal as P x P matrices.

Derived another way than the library derives them: one example at a time; a layer's inputs are read off the call of
`torch.nn.functional` that applies its weight (for a convolution, by applying it to every one-hot weight); its
output gradients are the derivatives in a zero that is added to its output; Λ comes from a log density written by
hand; every matrix is written out. What belongs together is found by trying: a weight is a Kronecker part if the
recorded calls make up its whole Jacobian. No name of the library is used here.

Sources: [I21] Immer et al. 2021, Eq. 9, A.3; [S20] Lee et al. 2020, section 2 and lemmas 1 to 3.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import Dense, call, jacobian, num_examples, take

LARGEST_BLOCK = 1024  # entries of a tensor whose exact block is kept; of a larger one the diagonal is

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


# ---------------------------------------------------------------------------------------------- one example's layers


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


# -------------------------------------------------------------------------------------------------------------- parts


@dataclass(frozen=True)
class Kronecker:
    """A part with rows J_nc = Σ_t b_nct ⊗ a_nt: `index` (o, i), a (N, T, i), b (N, C, T, o)."""

    names: tuple[str, ...]
    index: Tensor
    a: Tensor
    b: Tensor
    one_hot: bool = False

    @property
    def rows(self) -> Tensor:
        """(N, C, o * i)."""
        return torch.einsum("ncto,nti->ncoi", self.b, self.a).flatten(2)

    def with_bias(self, bias: Tensor, name: str) -> Kronecker:
        """Fuse the bias: a gets a trailing 1."""
        a = torch.cat([self.a, torch.ones_like(self.a[..., :1])], 2)
        return Kronecker((*self.names, name), torch.cat([self.index, bias[:, None]], 1), a, self.b)


@dataclass(frozen=True)
class Block:
    """A part kept exactly (or, beyond `LARGEST_BLOCK`, its diagonal): `index` (p,)."""

    names: tuple[str, ...]
    index: Tensor


Part = Kronecker | Block


def parts_of(
    network: nn.Module, x: Any, fused: Callable[[str, str], bool], run: Callable[[Any], Tensor] | None = None
) -> list[Part]:
    """Split the parameters into Kronecker parts and tensors of their own.

    Parameters
    ----------
    network : nn.Module
    x : tensor, tuple or dict of tensors
        N examples.
    fused : Callable
        Whether a weight and its bias, by name, are to share a part.
    run : Callable, optional
        The network by calls of `torch.nn.functional` on its parameters, where its layers make none of their own.
    """
    run = functools.partial(call, network) if run is None else run
    names = {name: p for name, p in network.named_parameters() if p.requires_grad}
    spans = torch.arange(sum(p.numel() for p in names.values())).split([p.numel() for p in names.values()])
    places = {id(p): (p, span) for p, span in zip(names.values(), spans, strict=True)}
    owner = [name for name, p in names.items() for _ in range(p.numel())]
    jac = jacobian(network, x)
    examples = [layers_of_example(run, take(x, slice(n, n + 1)), places) for n in range(num_examples(x))]
    found: list[Part] = []
    taken: set[int] = set()
    for name, span in zip(names, spans, strict=True):
        uses = [[layer for layer in each if int(layer.index.flatten()[0]) in set(span.tolist())] for each in examples]
        parts = _kronecker(name, span, uses, jac)
        for part, bias in parts:
            bias_name = None if bias is None else owner[int(bias[0])]
            if bias is not None and fused(name, bias_name):
                assert _explains(part.b.sum(2), jac[:, :, bias]), f"{bias_name} is used elsewhere too"
                part = part.with_bias(bias, bias_name)
            found.append(part)
            taken |= set(part.index.flatten().tolist())
    for name, span in zip(names, spans, strict=True):
        left = [i for i in span.tolist() if i not in taken]
        if left:
            assert len(left) == len(span), f"{name}: a tensor that belongs to two parts in part"
            found.append(Block((name,), span))
    return found


def _kronecker(
    name: str, span: Tensor, uses: list[list[Layer]], jac: Tensor
) -> list[tuple[Kronecker, Tensor | None]]:
    """The Kronecker parts of one weight, each with its bias's place; none if calls do not explain its Jacobian."""
    if not uses[0] or len({layer.kind for layer in uses[0]}) > 1 or not jac[:, :, span].any():
        return []
    parts: list[tuple[Kronecker, Tensor | None]] = []
    for key in {tuple(layer.index.flatten().tolist()): None for layer in uses[0]}:
        same = [[layer for layer in each if tuple(layer.index.flatten().tolist()) == key] for each in uses]
        first = same[0][0]
        for group in range(len(first.index)):
            a = torch.stack([torch.cat([layer.a[group] for layer in each], 0) for each in same])
            b = torch.stack([torch.cat([layer.b[:, group] for layer in each], 1) for each in same])
            part = Kronecker((name,), first.index[group], a, b, first.kind == "embedding")
            whole = all(layer.bias is not None for layer in same[0])
            whole = whole and len({tuple(layer.bias.flatten().tolist()) for layer in same[0]}) == 1
            parts.append((part, first.bias[group] if whole else None))
    indices = torch.cat([part.index.flatten() for part, _ in parts])
    if len(indices.unique()) != len(indices):
        return []
    covered = torch.zeros_like(jac[:, :, span])
    for part, _ in parts:
        covered[:, :, part.index.flatten() - span[0]] = part.rows
    return parts if _explains(covered, jac[:, :, span]) else []


def _explains(rows: Tensor, jac: Tensor) -> bool:
    return bool((rows - jac).abs().max() <= 1e-4 * jac.abs().max())  # a use that went unseen is no rounding error


# ------------------------------------------------------------------------------------------------------- the matrices


@dataclass(frozen=True)
class Structured:
    """Parts, exact rows and the curvature of outputs: everything that a structure summarizes.

    Attributes
    ----------
    parts : list of Part
    jac : Tensor, (N, C, P)
    curvature : Tensor, (N, C, C)
        S Sᵀ. No structure depends on the root itself: Σ_k b_k b_kᵀ = Σ_cd (S Sᵀ)_cd b_c b_dᵀ.
    """

    parts: list[Part]
    jac: Tensor
    curvature: Tensor

    @functools.cached_property
    def exact(self) -> Tensor:
        """JᵀΛJ, (P, P)."""
        return torch.einsum("ncp,ncd,ndq->pq", self.jac, self.curvature, self.jac)

    @property
    def diagonal(self) -> Tensor:
        """The matrix of structure "diag"."""
        return torch.diag(self.exact.diagonal())

    def factors(self, part: Kronecker, sharing: str = "expand") -> tuple[Tensor, Tensor, int]:
        """A (i, i), B (o, o) and the number of positions, by which B ⊗ A is divided.

        An embedding's positions are always counted one by one (their average is no token); padding is none.
        """
        a, b = part.a, part.b
        if sharing == "reduce" and not part.one_hot:
            a, b = a.mean(1, keepdim=True), b.sum(2, keepdim=True)
        inner = torch.einsum("nti,ntj->ij", a, a)
        outer = torch.einsum("ncto,ncd,ndtp->op", b, self.curvature, b)
        return inner, outer, int(a.sum()) if part.one_hot else a.shape[0] * a.shape[1]

    def basis(self, part: Kronecker, sharing: str = "expand") -> tuple[Tensor, Tensor]:
        """Eigenvectors (U_B, U_A) in columns; an embedding's A is a diagonal of token counts."""
        inner, outer, _ = self.factors(part, sharing)
        axes = torch.eye(len(inner), dtype=inner.dtype) if part.one_hot else torch.linalg.eigh(inner).eigenvectors
        return torch.linalg.eigh(outer).eigenvectors.contiguous(), axes.contiguous()

    def block_exact(self, part: Part) -> Tensor:
        """The part's own block of JᵀΛJ, (p, p)."""
        index = part.index.flatten()
        return self.exact[index][:, index]

    def kfac(self, sharing: str = "expand") -> Tensor:
        """B ⊗ A / (N T) ([I21] 9), (P, P)."""

        def block(part: Kronecker) -> Tensor:
            inner, outer, count = self.factors(part, sharing)
            return torch.kron(outer, inner) / count

        return self._assemble(block)

    def ekfac(self, sharing: str = "expand") -> Tensor:
        """U diag(Uᵀ E U) Uᵀ: the block E's own second moments in KFAC's eigenbasis, (P, P)."""

        def block(part: Kronecker) -> Tensor:
            basis = torch.kron(*self.basis(part, sharing))
            return basis @ torch.diag((basis * (self.block_exact(part) @ basis)).sum(0)) @ basis.T

        return self._assemble(block)

    def inf(self, rank: Callable[[Tensor], int], sharing: str = "expand", violation: str = "shrink") -> Tensor:
        """U Λ_L Uᵀ + D ([S20] 2), (P, P); `rank` gives K from a part's eigenvalues in descending order."""

        def block(part: Kronecker) -> Tensor:
            low = self.low_rank(part, rank, sharing)[0]
            exact = self.block_exact(part).diagonal()
            if violation == "shrink":
                too_much = low.diagonal() > exact
                scale = torch.where(too_much, (exact / low.diagonal().clamp_min(1e-300)).sqrt(), torch.ones_like(exact))
                low = scale[:, None] * low * scale
            return low + torch.diag(exact - low.diagonal())

        return self._assemble(block)

    def low_rank(self, part: Kronecker, rank: Callable[[Tensor], int], sharing: str) -> tuple[Tensor, int, int]:
        """U Λ_L Uᵀ over the eigenvectors that the top K eigenvalues hit ([S20] 17), and how many of either side."""
        left, right = self.basis(part, sharing)
        full = torch.kron(left, right)
        values = (full * (self.block_exact(part) @ full)).sum(0)
        top = values.argsort(descending=True)[: rank(values.sort(descending=True).values)]
        rows, columns = (top // right.shape[1]).unique(), (top % right.shape[1]).unique()
        kept = torch.kron(left[:, rows], right[:, columns])
        values = values.view(left.shape[1], -1)[rows][:, columns].flatten()
        return kept @ torch.diag(values) @ kept.T, len(rows), len(columns)

    def damped(self, precision: Tensor, sharing: str = "expand") -> Tensor:
        """H of damped KFAC, (P, P): (B' + √δ I) ⊗ (A' + √δ I) with B' ⊗ A' = B ⊗ A / (N T) ([I21] A.3)."""
        whole = self._assemble(lambda part: torch.zeros(2 * (part.index.numel(),), dtype=self.jac.dtype))
        whole = whole + torch.diag(precision)
        for part in self.parts:
            if isinstance(part, Kronecker):
                inner, outer, count = self.factors(part, sharing)
                root = precision[part.index.flatten()[0]].sqrt()
                inner, outer = (m / count**0.5 + root * torch.eye(len(m), dtype=m.dtype) for m in (inner, outer))
                index = part.index.flatten()
                whole[index[:, None], index] = torch.kron(outer, inner)
        return whole

    def _assemble(self, block: Callable[[Kronecker], Tensor]) -> Tensor:
        whole = torch.zeros_like(self.exact)
        for part in self.parts:
            index = part.index.flatten()
            if isinstance(part, Kronecker):
                whole[index[:, None], index] = block(part)
            else:
                exact = self.block_exact(part)
                whole[index[:, None], index] = exact if len(index) <= LARGEST_BLOCK else torch.diag(exact.diagonal())
        return whole


@dataclass(frozen=True)
class StructuredModel(Dense):
    """The linearized model whose JᵀΛJ is replaced by a structure's matrix `information`, (P, P)."""

    information: Tensor | None = None

    @functools.cached_property
    def posterior_precision(self) -> Tensor:
        """H, (P, P)."""
        return self.information + torch.diag(self.precision)

    def log_det(self) -> Tensor:
        """log det H - log det P0."""
        return torch.linalg.slogdet(self.posterior_precision).logabsdet - self.precision.log().sum()

    def effective_parameters(self, group: Tensor) -> Tensor:
        """γ_g = Σ_{p in g} (1 - δ_p (H⁻¹)_pp), for `group` (P,), the group of each parameter."""
        each = 1.0 - self.precision * self.covariance.diagonal()
        return torch.zeros(int(group.max()) + 1, dtype=each.dtype).index_add_(0, group, each)
