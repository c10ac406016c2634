"""Slow dense references of structured weight space: KFAC, EKFAC, INF and the diagonal as P x P matrices.

Derived another way than the library derives them: layers' inputs and output gradients from one example at a time
(reference_layers), Λ from a log density written by hand, every matrix written out. What belongs together is found by
trying: a weight is a Kronecker part if the recorded calls make up its whole Jacobian. No name of the library is used
here.

Sources: [I21] Immer et al. 2021, Eq. 9, A.3; [S20] Lee et al. 2020, section 2 and lemmas 1 to 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reference import Dense, call, jacobian, num_examples, take
from reference_layers import Layer, layers_of_example

LARGEST_BLOCK = 1024  # entries of a tensor whose exact block is kept; of a larger one the diagonal is

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
        inner, outer = inner.contiguous(), outer.contiguous()  # torch.kron views them, and einsum keeps no order
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
