"""The Jacobian of a data set, stored in blocks, with its products and conversions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.jacobian.blocks import Block, Dense, Lookup, Outer, summed, written_out


@dataclass(frozen=True)
class Jacobian:
    """Rows J_nk of N examples and K cotangents; a cotangent is an output (identity) or a column of a root S.

    Attributes
    ----------
    blocks : tuple of Block
        Each parameter's rows are the sum over the blocks that name it; a parameter in none has zero rows.
    num_cotangents, num_examples : int
    f : Tensor, (N, C)
        Network outputs.
    """

    blocks: tuple[Block, ...]
    num_cotangents: int
    num_examples: int
    f: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the rows."""
        return self.f.dtype

    @property
    def last_layer(self) -> Outer | None:
        """The one block, if its layer's outputs are the network's: b is the identity at every example; else None."""
        block = self.blocks[0] if len(self.blocks) == 1 else None
        if not (isinstance(block, Outer) and block.single and block.index is None and block.constant):
            return None
        b, outputs = block.b[:, 0, 0, 0], self.f.shape[1]
        identity = len(b) == b.shape[1] == outputs and (b.diagonal() == 1).all() & (b.count_nonzero() == outputs)
        return block if identity else None

    def weighted(self, root: Tensor) -> Jacobian:
        """Rows of SᵀJ for a root S (N, C, R); self must contain the rows of J, one per output."""
        return replace(self, blocks=tuple(block.weighted(root) for block in self.blocks), num_cotangents=root.shape[-1])

    def subset(self, index: slice | Tensor) -> Jacobian:
        """Rows of some of the examples."""
        f = self.f[index]
        return replace(self, blocks=tuple(b.subset(index) for b in self.blocks), num_examples=len(f), f=f)

    def restricted(self, names: Collection[str]) -> Jacobian:
        """The blocks that name one of these parameters, with their rows of other parameters."""
        return replace(self, blocks=tuple(block for block in self.blocks if not set(names).isdisjoint(block.names)))

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Jacobian:
        """The same rows in another floating type, or on another device."""
        blocks = tuple(block.to(dtype, device) for block in self.blocks)
        return replace(self, blocks=blocks, f=self.f.to(device, dtype))

    def jvp(self, vector: Mapping[str, Tensor]) -> Tensor:
        """J v for parameter tensors v by name: (N, K)."""
        total = self.f.new_zeros(self.num_cotangents, self.num_examples)
        for block in self.blocks:
            total += block.jvp(vector)
        return total.T

    def vjp(self, cotangent: Tensor, shapes: Mapping[str, torch.Size]) -> Tensor:
        """Jᵀ c for cotangents c (N, K), flat (P,), in the order of `shapes`."""
        total = summed(block.vjp(cotangent.T) for block in self.blocks)
        return torch.cat(self._all_of(total, shapes))

    def _all_of(self, total: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], *lead: int) -> list[Tensor]:
        """The entries (*lead, p) of every parameter; zero for one that is in no block."""
        return [total[name] if name in total else self.f.new_zeros(*lead, shape.numel())
                for name, shape in shapes.items()]

    def dense(self, shapes: Mapping[str, torch.Size]) -> Tensor:
        """The rows written out, (K, N, P), parameters in the order of `shapes`."""
        total = written_out(self.blocks)
        return torch.cat(self._all_of(total, shapes, self.num_cotangents, self.num_examples), -1)

    def products(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """J v for m parameter vectors v, flat (m, p) by name: (K, N, m)."""
        count = len(next(iter(vectors.values())))
        total = self.f.new_zeros(self.num_cotangents, self.num_examples, count)
        for block in self.blocks:
            total += block.push(vectors)
        return total

    def transposed_products(self, cotangents: Tensor, shapes: Mapping[str, torch.Size]) -> Tensor:
        """Jᵀ c for m cotangents c (K, N, m): flat (m, P), in the order of `shapes`."""
        total, count = summed(block.pull(cotangents) for block in self.blocks), cotangents.shape[2]
        return torch.cat(self._all_of(total, shapes, count), 1)

    @staticmethod
    def concatenate(parts: Sequence[Jacobian]) -> Jacobian:
        """Concatenate the rows of several batches."""
        if len(parts) == 1:
            return parts[0]
        if len({tuple(block.kind for block in part.blocks) for part in parts}) != 1:
            # sequence lengths or branches of the network differ between batches: write the rows out
            sizes = {n: size for part in parts for block in part.blocks for n, size in block.sizes().items()}
            parts = [part.densified(sizes) for part in parts]
        blocks = tuple(same[0].concatenated(same) for same in zip(*(part.blocks for part in parts), strict=True))
        f = torch.cat([part.f for part in parts])
        return Jacobian(blocks, parts[0].num_cotangents, len(f), f)

    def densified(self, sizes: dict[str, int]) -> Jacobian:
        """Write out the rows of every parameter in `sizes`; a parameter in no block has zero rows."""
        shapes = {name: torch.Size([size]) for name, size in sizes.items()}
        rows = self._all_of(written_out(self.blocks), shapes, self.num_cotangents, self.num_examples)
        return replace(self, blocks=(Dense.cat([Dense.of(*own) for own in zip(sizes, rows, strict=True)]),))

    def record(self) -> dict[str, Any]:
        """Plain containers of tensors: each block as its fields and the name of its type. The keys are of version 1."""
        blocks = [_block_record(block) for block in self.blocks]
        return {"blocks": blocks, "num_seeds": self.num_cotangents, "num_examples": self.num_examples, "f": self.f}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Jacobian:
        """Restore a Jacobian from its record."""
        blocks = tuple(_block(**own) for own in record["blocks"])
        return cls(blocks, record["num_seeds"], record["num_examples"], record["f"])


def _block_record(block: Block) -> dict[str, Any]:
    if isinstance(block, Dense):
        return {"kind": "Wide", "spans": [list(span) for span in block.spans], "rows": block.rows}
    return {"kind": type(block).__name__} | {field.name: getattr(block, field.name) for field in fields(block)}


def _block(kind: str, **values: Any) -> Block:
    if kind == "Wide":
        return Dense(tuple((name, start, stop) for name, start, stop in values["spans"]), values["rows"])
    if kind == "Dense":  # one parameter, with the cotangents first
        return Dense.of(values["weight"], values["rows"])
    return {"Outer": Outer, "Lookup": Lookup}[kind](**values)


def grouped(chunks: Iterable[Jacobian], size: Callable[[Jacobian], int], most: int) -> Iterator[Jacobian]:
    """Consecutive chunks as one while the sum of their sizes is at most `most`; a larger chunk is alone."""
    group: list[Jacobian] = []
    for rows in chunks:
        group.append(rows)
        if sum(map(size, group)) + size(rows) > most:  # the next is about as large
            yield Jacobian.concatenate(group)
            group.clear()
    if group:
        yield Jacobian.concatenate(group)


def placed(parts: Iterable[Jacobian]) -> Iterator[tuple[slice, Jacobian]]:
    """Rows of consecutive examples, each part with the places of its examples among all."""
    start = 0
    for rows in parts:
        here = slice(start, start + rows.num_examples)
        start = here.stop
        yield here, rows
        del rows  # before the next are computed
