"""Optimizations of the Jacobian pass, apart from the code that they speed up.

Each has a plain version that gives the same numbers; tests/test_optimizations.py compares the two. The gains are what
``python examples/benchmarks/optimizations.py --repeats 4`` printed on one thread of a CPU that other processes shared:

* Fused accumulation: sums of a layer's output gradients, for structures that need no rows of the Jacobian. A layer with
  one position and one use becomes a `FusedSums`, whose sums are accumulated during the backward passes; the gradients
  of a few examples are kept, for the gradient check. Plain: store the rows, then sum them (`NO_FUSED_LAYERS`).
  Gain on an MLP: KFAC 1.3 times faster with 116 MiB for 351, an exact diagonal 2.0 times with 128 MiB for 416.
* The sums of a last linear layer in closed form, Σ_n Λ_n (`FusedSums.of_last_layer`), where Λ has a `DiagonalForm`: no
  root S and no backward passes. Plain: rows of SᵀJ. Gain: see the page on many outputs.
* `Products`: a product of the same matrix is computed once. Plain: compute it for each parameter block.
  Gain: KFAC in batches of 128 with one precision per tensor 1.2 times faster.
* `side_by_side`: blocks are freed while they are copied. Plain: `Dense.cat`.
  Gain: 175 MiB for 246, a ResNet's rows in another floating type.
* `gradient_buffer`: the memory order that later products read without a copy. Plain: a contiguous tensor.
  Gain: KFAC of a CNN 1.1 times faster, with 356 MiB for 439.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ntk_laplace.jacobian.blocks import Block, Dense, Outer
from ntk_laplace.model.likelihoods import DiagonalForm
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import add_outer_lower_
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.resources import buffer_bytes

# --- fused accumulation


@dataclass(frozen=True)
class FusedLayer:
    """Expected shape of a layer, to detect a batch whose graph uses the weight differently.

    Attributes
    ----------
    outputs : int
        Number of outputs o.
    biases : container of str or None
        Names of the biases that the weight may have; None stands for no bias.
    """

    outputs: int
    biases: Container[str | None]


@dataclass(frozen=True)
class FusedLayers:
    """Layers for which only sums of output gradients are needed.

    Attributes
    ----------
    weights : mapping of str to FusedLayer or None
        Their weights, each with the layer shape that the sums require; None accepts any shape.
    squared : bool
        If true, the sums are Σ_k b² of each example, for exact diagonals; else Σ_nk b bᵀ, for Kronecker factors.
    moments : bool
        Whether second moments in a basis are needed, which only a last layer gives without its rows.
    """

    weights: Mapping[str, FusedLayer | None] = field(default_factory=dict)
    squared: bool = False
    moments: bool = False

    def suits(self, weight: str, outputs: int, bias: str | None) -> bool:
        """Whether the sums of a layer with this weight, shape and bias are sufficient."""
        layer = self.weights.get(weight)
        return weight in self.weights and (layer is None or (outputs == layer.outputs and bias in layer.biases))


NO_FUSED_LAYERS = FusedLayers()


class FusedAccumulation:
    """The fused sums of one batch.

    Parameters
    ----------
    fused_layers : FusedLayers
    sample : Tensor, (m,)
        Examples whose gradients are also kept, for the gradient check.
    dtype : torch.dtype
        Floating type of the sums.
    """

    def __init__(self, fused_layers: FusedLayers, sample: Tensor, dtype: torch.dtype) -> None:
        self.fused_layers, self._sample, self._dtype = fused_layers, sample, dtype
        self._sums: dict[int, Tensor] = {}  # Σ g gᵀ or Σ g², by extraction
        self._some: dict[int, Tensor] = {}  # g of the sample

    def suits(self, weight: str, bias: str | None, n: int, outputs: int) -> bool:
        """Whether to fuse a layer; with N < o, the update of the o x o sum for each cotangent would dominate."""
        layers = self.fused_layers
        return not layers.moments and layers.suits(weight, outputs, bias) and (layers.squared or outputs <= n)

    def start(self, index: int, cotangents: Tensor, outputs: int, dtype: torch.dtype) -> None:
        """Allocate the sums of an extraction, for cotangents (K, N, C) and gradients of this type."""
        k, n = cotangents.shape[:2]
        self._sums[index] = cotangents.new_zeros(n if self.fused_layers.squared else outputs, outputs,
                                                 dtype=self._dtype)
        self._some[index] = cotangents.new_zeros(k, len(self._sample), outputs, dtype=dtype)

    def add(self, index: int, gradient: Tensor, k: int) -> None:
        """Add the gradient (N, o) of cotangent k to the sums while it is in cache."""
        self._some[index][k] = gradient[self._sample]
        gradient = gradient.to(self._dtype)
        if self.fused_layers.squared:
            self._sums[index].addcmul_(gradient, gradient)
        else:
            add_outer_lower_(self._sums[index], gradient)

    def any(self, index: int) -> bool:
        """Whether a gradient of the extraction had a nonzero entry."""
        return bool(self._sums[index].any())

    def block(self, index: int, layer: Block, bias: str | None) -> FusedSums:
        """The sums of an extraction; the `Outer` gives the layer's inputs, and its own gradients are not read."""
        if not isinstance(layer, Outer):
            raise TypeError(f"only an Outer block has fused sums, not a {type(layer).__name__}")
        rows = replace(layer, bias=bias, b=self._some.pop(index)[:, :, None, None], a=layer.a[self._sample])
        return FusedSums(self._sums.pop(index), self.fused_layers.squared, layer.a[:, 0, 0], rows)


@dataclass(frozen=True)
class FusedSums:
    """Sums that replace an `Outer` block of one position and one group.

    Attributes
    ----------
    sums : Tensor
        Σ_nk b bᵀ, (o, o), lower triangle (whole diagonal blocks); or Σ_k b² of each example, (N, o).
    squared : bool
        Whether `sums` is Σ_k b².
    a : Tensor, (N, i)
        Layer inputs.
    sample : Outer
        Rows of a few examples, for the gradient check.
    form : DiagonalForm, optional
        Λ of each example, for a last layer, whose output gradients S are not computed.
    """

    sums: Tensor
    squared: bool
    a: Tensor
    sample: Outer
    form: DiagonalForm | None = None

    @classmethod
    def of_last_layer(cls, layer: Outer, form: DiagonalForm, squared: bool) -> FusedSums:
        """The sums of a last layer, Σ_n Λ_n or the diagonals of Λ_n, from its rows of J: b is the identity."""
        sums = form.squares() if squared else form.total()
        return cls(sums, squared, layer.a[:, 0, 0], layer.subset(slice(0, tuning.FEWEST_CHECKED)), form)

    @property
    def weight(self) -> str:
        """The layer's weight."""
        return self.sample.weight

    @property
    def bias(self) -> str | None:
        """The layer's bias, whose rows are the output gradients."""
        return self.sample.bias

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return self.sample.names

    @property
    def values(self) -> Tensor:
        """Sums that are finite only if all are: of products the diagonal."""
        return self.sums if self.squared else self.sums.diagonal()

    def squares(self, ones: bool) -> Tensor:
        """Σ_nk (b_o a_i)² from the sums of squares, (1, o, i); `ones` appends an input of 1."""
        (n, o), i = self.sums.shape, self.a.shape[1]
        total = self.sums.new_zeros(1, o, i + ones)
        room = buffer_bytes(tuning.SQUARED_INPUT_BYTES, self.a.device)
        for part in panels(n, i * self.a.element_size(), room):
            total[0, :, :i].addmm_(self.sums[part].T, self.a[part].square())
        if ones:
            total[0, :, i] = self.sums.sum(0)
        return total

    def moments(self, left: Tensor | None, right: Tensor | None, ones: bool) -> Tensor:
        """Σ_nk (bᵀU_B)_o² (aᵀU_A)_i², (1, o, i), in bases (1, o, o) and (1, i, i); `ones` appends an input of 1."""
        if self.form is None:
            raise ValueError("only a last layer has second moments without its rows")
        inputs = torch.cat([self.a, self.a.new_ones(len(self.a), 1)], 1) if ones else self.a
        inputs = inputs if right is None else inputs @ right[0]
        outputs = self.form.squares(None if left is None else left[0])
        return (outputs.T @ inputs.square()).unsqueeze(0)

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> FusedSums:
        """The same sums in another floating type, or on another device."""
        sums, a = self.sums.to(device, dtype), self.a.to(device, dtype)
        form = None if self.form is None else self.form.to(dtype)
        return replace(self, sums=sums, a=a, sample=self.sample.to(dtype, device), form=form)


# --- products of the same matrix


class Products:
    """Cache of the products Σ v vᵀ over the rows of one batch's matrices, lower triangles.

    If a layer has one position, a bias's exact block and its weight's output factor are the same product.
    """

    def __init__(self) -> None:
        self._made: dict[tuple, tuple[Tensor, Tensor]] = {}

    def add_to(self, total: Tensor, rows: Tensor) -> None:
        """total (p, p) += rowsᵀ rows for rows (m, p)."""
        if rows.shape[1] > tuning.LARGEST_SHARED_PRODUCT:
            add_outer_lower_(total, rows)
            return
        where = rows.data_ptr(), rows.shape, rows.stride()
        if where not in self._made:
            product = torch.zeros_like(total)
            add_outer_lower_(product, rows)
            self._made[where] = rows, product  # keeping `rows` alive keeps its address unique
        total += self._made[where][1]


# --- memory


def side_by_side(blocks: list[Block], dtype: torch.dtype) -> Iterator[Block]:
    """Turn written-out rows into matrices, concatenate small ones, and convert all blocks to `dtype`.

    The list is emptied on the way: each block is freed once it is converted.
    """
    elsewhere = {name for block in blocks if not isinstance(block, Dense) for name in block.names}
    small: list[Dense] = []
    block: Block | None
    while blocks:
        block = blocks.pop(0)
        if not isinstance(block, Dense) or block.weight in elsewhere:
            yield block.to(dtype)
        elif block.rows.shape[2] >= tuning.SEPARATE_MATRIX_ENTRIES:
            alone = [block]
            del block
            yield _matrix(alone, dtype)
        else:
            small.append(block)
    if small:
        block = None
        yield _matrix(small, dtype)


def _matrix(blocks: list[Dense], dtype: torch.dtype) -> Dense:
    """`Dense.cat` of blocks with examples first in memory. The list is emptied: each block is freed once it is copied.

    A single block that already has the right memory layout is not copied.
    """
    if len(blocks) == 1:
        only = blocks.pop()
        return replace(only, rows=only.rows.to(dtype).contiguous())
    k, n = blocks[0].shape
    spans = Dense.spans_of(blocks)
    rows = blocks[0].rows.new_empty(n, k, spans[-1][2], dtype=dtype)
    start = 0
    while blocks:
        block = blocks.pop(0)
        stop = start + block.rows.shape[2]
        rows[:, :, start:stop] = block.rows
        start = stop
    return Dense(spans, rows)


def gradient_buffer(values: Tensor, num_cotangents: int, axis: int) -> Tensor:
    """Allocate (K, *shape of values) in the memory order of `values`, with K just outside the channel axis.

    The channel axis follows the example axis `axis`. Cotangents and channels together are one axis of a matrix,
    positions the other.
    """
    dense = values.is_contiguous() or (
        values.ndim == 4 and values.is_contiguous(memory_format=torch.channels_last)
    )
    order = sorted(range(values.ndim), key=lambda d: -values.stride()[d]) if dense else list(range(values.ndim))
    order.insert(order.index(axis + 1) if axis + 1 < values.ndim else 0, -1)
    sizes = [num_cotangents if d < 0 else values.shape[d] for d in order]
    return values.new_empty(sizes).permute([order.index(d) for d in range(-1, values.ndim)])
