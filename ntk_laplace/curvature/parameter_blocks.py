"""Parameter blocks: the parameters that share one factorization, and its kind.

A layer's weight, with its bias if both have the same prior precision or if each input has one, is a Kronecker block.
Other parameters are an exact block if they are small, else an exact diagonal. H has no entries between blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.errors import UnsupportedError, warn
from ntk_laplace.jacobian import Block, FusedLayer, FusedSums, Jacobian, LayerRows, Lookup, Outer
from ntk_laplace.jacobian.blocks import clusters, same_order, summed
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.reflections import Basis


@dataclass(frozen=True)
class ParameterBlock:
    """Entries of θ that one factorization covers, as (G, o, i) with i fastest.

    Attributes
    ----------
    kind : str
        "kronecker", "block" or "diagonal".
    weight : str
        The parameter.
    bias : str or None
        The bias that is the last column, if there is one.
    entries : tuple of int
        (G, o, i), including the bias's column.
    numel : int
        Entries of the whole weight.
    index : Tensor or None, (G*o*i,)
        Positions of the entries in the weight's flat order; None if the two orders are the same.
    group : int or None
        Group of a grouped convolution that this block covers; None for all groups.
    table : bool
        The weight is an embedding: o is the token, and the factor of that side is diagonal.
    """

    kind: str
    weight: str
    bias: str | None
    entries: tuple[int, int, int]
    numel: int
    index: Tensor | None = None
    group: int | None = None
    table: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def size(self) -> int:
        """Number of entries."""
        g, o, i = self.entries
        return g * o * i

    @property
    def numbers(self) -> int:
        """Upper bound of the stored numbers: sums, eigenvectors, second moments and an exact diagonal."""
        g, o, i = self.entries
        left = o if self.table else o * o
        return {
            "kronecker": 2 * g * (left + i * i) + 3 * self.size,
            "block": 2 * self.size**2,
            "diagonal": 2 * self.size,
        }[self.kind]

    def __str__(self) -> str:
        g, o, i = self.entries
        form = {"kronecker": f"{o} x {i}", "block": f"{i} x {i}", "diagonal": f"{self.size:,}"}[self.kind]
        times = f"{g} times " if g > 1 else ""
        return f"{' + '.join(self.names)}: {self.kind} {times}{form}"

    def record(self) -> dict[str, Any]:
        """Plain containers of tensors."""
        return asdict(self) | {"entries": list(self.entries)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ParameterBlock:
        """Restore a block from its record."""
        return cls(**(dict(record) | {"entries": tuple(record["entries"])}))

    # --- between θ and (G, o, i)

    def gather(self, vector: dict[str, Tensor]) -> Tensor:
        """Gather the block's entries from tensors by name, (..., parameter shape): (..., G, o, i)."""
        weight = vector[self.weight]
        columns = self.entries[2] - (self.bias is not None)
        weight = weight if self.index is None else weight[..., self.index]
        weight = self._own(weight.unflatten(-1, (-1, self.entries[1], columns)))
        if self.bias is None:
            return weight
        bias = vector[self.bias]
        bias = self._own(bias.unflatten(-1, (-1, self.entries[1], 1)))
        return torch.cat([weight, bias], -1)

    def scatter_(self, vector: dict[str, Tensor], values: Tensor) -> None:
        """Write values (..., G, o, i) to their positions in flat tensors by name, in place."""
        columns = self.entries[2] - (self.bias is not None)
        self._write(vector[self.weight], values[..., :columns].flatten(-2), self.index)
        if self.bias is not None:
            self._write(vector[self.bias], values[..., columns], None)

    def _own(self, values: Tensor) -> Tensor:
        """Select this block's groups from (..., all groups, o, i)."""
        return values if self.group is None else values[..., self.group : self.group + 1, :, :]

    def _write(self, target: Tensor, values: Tensor, index: Tensor | None) -> None:
        values = values.flatten(-2)
        start = 0 if self.group is None else self.group * values.shape[-1]
        run = slice(start, start + values.shape[-1])
        target[..., run if index is None else index[run]] = values

    # --- rows

    def rows(self, rows: Jacobian) -> LayerRows:
        """Rows of a data set, restricted to this block's entries."""
        mine = rows.restricted(self.names).blocks
        own = [block for block in mine if isinstance(block, Outer | Lookup) and self._has_form_of(block)]
        if len(own) == 1 and (len(mine) == 1 or self.index is not None):
            return self._factored(own[0])
        return SummedRows(self, rows.f, rows.num_cotangents, mine)

    def sums(self, rows: Jacobian) -> FusedSums | None:
        """Fused sums of a layer; None if `rows` contains its rows.

        Raises
        ------
        UnsupportedError
            If the graph uses these parameters in several ways, and one of them is fused.
        """
        mine: Sequence[Block | FusedSums] = rows.restricted(self.names).blocks
        fused = [block for block in mine if isinstance(block, FusedSums)]
        if not fused:
            return None
        if len(mine) > 1:
            raise self.other_use('Use structure="full" or "gp", or larger batches.')
        return fused[0]

    def other_use(self, remedy: str) -> UnsupportedError:
        """The error of a batch whose rows of this block have no form of a layer's."""
        return UnsupportedError(f"every batch to reach {self.weight!r} through its layer",
                                "a batch that uses it in another operation", remedy)

    @property
    def layer(self) -> FusedLayer | None:
        """Shape of the layer whose fused sums are sufficient, with its bias; None if fused sums are not."""
        return None if self.index is not None else FusedLayer(self.entries[1], (self.bias,))

    def _has_form_of(self, block: Outer | Lookup) -> bool:
        if isinstance(block, Lookup):
            return self.table
        if block.weight != self.weight or self.table or block.b.shape[4] != self.entries[1]:
            return False
        # a batch's graph may use the bias elsewhere, or not at all
        return self.bias in (None, block.bias) and same_order(block.index, self.index)

    def _factored(self, block: Outer | Lookup) -> Block:
        if isinstance(block, Lookup):
            return block
        b, a = block.b, block.a
        if self.group is not None:
            b, a = b[:, :, self.group : self.group + 1], a[:, self.group : self.group + 1]
        return replace(block, bias=self.bias, b=b, a=a)


@dataclass(frozen=True)
class SummedRows(LayerRows):
    """Rows of a parameter block as the sum over blocks of any kind, written out a few examples at a time.

    Attributes
    ----------
    block : ParameterBlock
    f : Tensor, (N, C)
        The outputs.
    num_cotangents : int
        K.
    terms : tuple of Block
        The blocks with rows of these parameters; without any, all rows are zero.
    bases : tuple of Basis
        In the order in which rows are turned.
    """

    copies = 3  # of a term, of the sum, and in the order of the entries

    block: ParameterBlock
    f: Tensor
    num_cotangents: int
    terms: tuple[Block, ...]
    bases: tuple[Basis, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_cotangents, len(self.f)

    @property
    def like(self) -> Tensor:
        """The outputs."""
        return self.f

    @property
    def entries(self) -> tuple[int, int, int]:
        """(G, o, i), in the last basis."""
        g, o, i = self.block.entries
        for basis in self.bases:  # reflections keep the size
            sides = (basis.left, o), (basis.right, i)
            o, i = (side.shape[2] if isinstance(side, Tensor) else p for side, p in sides)
        return g, o, i

    def rotated(self, basis: Basis) -> SummedRows:
        """Rows in another basis, in which they are turned when they are written."""
        return replace(self, bases=(*self.bases, basis))

    def written(self, part: slice) -> Tensor:
        block = self.block
        total = summed(_written_names(term.subset(part), set(block.names)) for term in self.terms)
        columns = block.entries[2] - (block.bias is not None)
        for name in block.names:
            if name not in total:
                size = block.numel if name == block.weight else block.numel // columns
                total[name] = self.f.new_zeros(self.num_cotangents, len(self.f[part]), size)
        rows = block.gather(total).transpose(0, 1)
        for basis in self.bases:
            rows = basis.turn(rows)
        return rows


def _written_names(block: Block, names: set[str]) -> dict[str, Tensor]:
    """Written-out rows (K, N, p) of some of a block's parameters; a bias alone needs no product."""
    if isinstance(block, Outer) and block.bias in names and block.weight not in names:
        return {block.bias: block.sums()}
    return {name: rows for name, rows in block.dense().items() if name in names}


def diagonal_block(name: str, size: int) -> ParameterBlock:
    """Parameter block for the exact diagonal of one parameter of any kind."""
    return ParameterBlock("diagonal", name, None, (1, 1, size), size)


def find_parameter_blocks(
    rows: Jacobian, prior: GaussianPrior, form: str, split_groups: bool = False
) -> list[ParameterBlock]:
    """Divide the parameters in some rows into parameter blocks.

    Parameters
    ----------
    rows : Jacobian
        Rows of a few examples, with their factors kept.
    prior : GaussianPrior
        A weight and its bias share a Kronecker block only if they have the same precision.
    form : str
        "kronecker": Kronecker blocks where rows have factors. "diagonal": only diagonals.
    split_groups : bool
        One parameter block for each group of a grouped convolution.

    Warns
    -----
    NTKLaplaceWarning
        If a parameter without factors is too large for an exact block.
    """
    parts = [part for cluster in clusters(rows.blocks) for part in _parts_of(cluster, prior, form)]
    if split_groups:
        parts = [single for part in parts for single in _split(part)]
    large = [part for part in parts if part.kind == "diagonal"]
    if form == "kronecker" and large:
        warn(f"no Kronecker factors fit {', '.join(part.weight for part in large)} (a parameter used in several "
             f"ways, or not by a layer with inputs), and more than {tuning.LARGEST_EXACT_BLOCK:,} entries are too many "
             "for an exact block: their exact diagonal is kept")
    return parts


def _parts_of(cluster: tuple[Block, ...], prior: GaussianPrior, form: str) -> Iterator[ParameterBlock]:
    block = cluster[0]
    if len(cluster) == 1 and isinstance(block, Lookup):
        entries = 1, block.vocabulary, block.b.shape[3]
        yield ParameterBlock(form, block.weight, None, entries, entries[1] * entries[2], table=True)
        return
    if isinstance(block, FusedSums):
        block = block.sample
    if len(cluster) == 1 and isinstance(block, Outer):
        g, o, i = block.b.shape[2], block.b.shape[4], block.a.shape[3]
        together = block.bias is not None and (form == "diagonal" or _together(prior, block.weight, block.bias))
        bias = block.bias if together else None
        yield ParameterBlock(form, block.weight, bias, (g, o, i + together), block.size, block.index)
        if block.bias is not None and not together:
            yield _plain(block.bias, g * o, form)
        return
    sizes = {name: size for member in cluster for name, size in member.sizes().items()}
    for name, size in sizes.items():
        yield _plain(name, size, form)


def _together(prior: GaussianPrior, weight: str, bias: str) -> bool:
    """Whether all outputs of a layer have the same precisions of the inputs, of which the bias is the last."""
    one, other = prior.group_of(weight), prior.group_of(bias)
    if isinstance(one, int):
        return one == other
    return prior.groups == "input" and isinstance(other, int)


def _plain(name: str, size: int, form: str) -> ParameterBlock:
    block = form == "kronecker" and size <= tuning.LARGEST_EXACT_BLOCK
    return ParameterBlock("block" if block else "diagonal", name, None, (1, 1, size), size)


def _split(part: ParameterBlock) -> list[ParameterBlock]:
    g, o, i = part.entries
    if part.kind != "kronecker" or g == 1:
        return [part]
    return [replace(part, entries=(1, o, i), group=number) for number in range(g)]
