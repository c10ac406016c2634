"""Summaries: the sums over examples of rows of SᵀJ that structured weight space stores. Summaries can be added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.curvature.parameter_blocks import ParameterBlock
from ntk_laplace.errors import NonFiniteError
from ntk_laplace.jacobian import FusedSums, Jacobian, Lookup, Outer, Products
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import add_outer_lower_
from ntk_laplace.runtime.reflections import Basis, Reflections

SHARING = ("expand", "reduce")


@dataclass
class Summary:
    """Sums of one parameter block.

    Attributes
    ----------
    block : ParameterBlock
    sums : dict of str to Tensor
        By kind of the block. "kronecker": "left" Σ b bᵀ (G, o, o) and "right" Σ a aᵀ (G, i, i), lower triangles;
        "count", the number of terms in "right"; "moments" (G, o, i), second moments in a basis; "squares" (G, o, i),
        the exact diagonal. Of a wide side of `KFAC` with a rank, instead of "left" or "right": "left_products" or
        "right_products", the factor times `sketch_vectors` (p, s), and "left_trace" or "right_trace". "block": "block"
        (p, p), lower triangle. "diagonal": "squares". The terms of an example with weight w are multiplied by w.
    """

    block: ParameterBlock
    sums: dict[str, Tensor]

    @property
    def count(self) -> Tensor:
        """The number of terms in "right"; 1 if there are none, as of tokens that are all padding: the factors are 0."""
        found = self.sums["count"]
        return torch.where(found > 0, found, torch.ones_like(found))

    def add_factors(
        self, rows: Jacobian, sharing: str, products: Products, counts: Tensor | None = None, rank: int | None = None
    ) -> None:
        """Add one batch of rows of SᵀJ to the factors, the block or the diagonal.

        If a layer has one position, a bias's exact block and its weight's output factor are the same product;
        `products` caches these for all parameter blocks of this batch. The root S already contains the examples'
        `counts` (N,); here they weight the layer's inputs. Sides wider than `rank` are sketched.
        """
        sums = self.block.sums(rows)
        if sums is not None:
            self._add_sums(sums, counts)
            return
        own = self.block.rows(rows)
        if self.block.kind == "diagonal":
            self._add("squares", own.squares())
        elif self.block.kind == "block":
            for _, written in own.panels():
                flat = _as_matrix(written.flatten(2))
                products.add_to(self._zeros("block", flat, flat.shape[1], flat.shape[1]), flat)
                del written, flat  # before the next are written
        elif isinstance(own, Outer):
            self._add_outer(own, sharing, products, counts, rank)
        elif isinstance(own, Lookup):
            self._add_lookup(own, counts)
        else:
            raise self.block.other_use('Use structure="diag", "full" or "gp", or larger batches.')

    def _add_outer(
        self, rows: Outer, sharing: str, products: Products, counts: Tensor | None, rank: int | None
    ) -> None:
        g, o, i = rows.entries
        a, b = rows.a, rows.full_b()
        if sharing == "reduce" and not rows.one_position:
            a, b = a.mean(2, keepdim=True), b.sum(3, keepdim=True)
        each = None if counts is None else counts.repeat_interleave(a.shape[2])
        if is_sketched(o, g, rank):
            self._add_sketch("left", _as_matrix(b[:, :, 0]), rank)
        else:
            left = self._zeros("left", b, g, o, o)
            for number in range(g):
                products.add_to(left[number], _as_matrix(b[:, :, number]))
        if is_sketched(i, g, rank):
            inputs = rows.inputs.mean(2, keepdim=True) if a is not rows.a else rows.inputs
            inputs = inputs[:, 0].flatten(0, 1)
            self._add_sketch("right", inputs if each is None else inputs * each.to(inputs).sqrt().unsqueeze(1), rank)
        else:
            right = self._zeros("right", a, g, i, i)
            for number in range(g):
                _add_inputs_(right[number], a[:, number].reshape(-1, a.shape[3]), each)
        self._count(a.shape[0] * a.shape[2] if each is None else each.sum(), a)

    def _add_sketch(self, side: str, rows: Tensor, rank: int | None) -> None:
        """Add vᵀv times the test vectors for rows v (m, p), and its trace."""
        self._add(f"{side}_products", rows.T @ (rows @ sketch_vectors(rows.shape[1], rank or 0, rows)))
        self._add(f"{side}_trace", rows.square().sum())

    def _add_sums(self, sums: FusedSums, counts: Tensor | None) -> None:
        """Add one batch of a layer with fused sums; its bias may be a separate parameter block."""
        if sums.squared:
            self._add("squares", sums.squares(ones=self.block.bias is not None))
        elif self.block.kind == "kronecker":
            self._add("left", sums.sums.unsqueeze(0))
            i = self.block.entries[2]
            _add_inputs_(self._zeros("right", sums.a, 1, i, i)[0], sums.a, counts)
            self._count(len(sums.a) if counts is None else counts.sum(), sums.a)
        elif self.block.kind == "block":
            self._add("block", sums.sums)
        else:
            self._add("squares", sums.sums.diagonal().reshape(self.block.entries))

    def _add_lookup(self, rows: Lookup, counts: Tensor | None) -> None:
        # the inputs are one-hot: Σ onehot onehotᵀ is the diagonal matrix of the token counts
        places = rows.tokens != rows.padding  # padding is skipped
        tokens = rows.tokens[places]
        each = None if counts is None else counts.unsqueeze(1).expand_as(places)[places]
        self._add("left", torch.bincount(tokens, each, minlength=rows.vocabulary).to(rows.b.dtype).unsqueeze(0))
        d = rows.b.shape[3]
        add_outer_lower_(self._zeros("right", rows.b, 1, d, d)[0], rows.b.reshape(-1, d))
        self._count(tokens.numel() if each is None else each.sum(), rows.b)

    def _count(self, terms: float | Tensor, like: Tensor) -> None:
        # in double precision: float32 is exact only up to 2**24
        self._add("count", torch.tensor(float(terms), dtype=torch.float64, device=like.device))

    def add_second_moments(self, rows: Jacobian, basis: Basis, squares: bool) -> None:
        """Add one batch of rows of SᵀJ to the second moments in a basis and, with `squares`, to the exact diagonal."""
        sums = self.block.sums(rows)
        if sums is not None:
            left, right = (one.columns() if isinstance(one, Reflections) else one for one in (basis.left, basis.right))
            self._add("moments", sums.moments(left, right, self.block.bias is not None))
            if squares:
                self._add("squares", sums.moments(None, None, self.block.bias is not None))
            return
        own = self.block.rows(rows)
        self._add("moments", own.rotated(basis).squares())
        if squares:
            self._add("squares", own.squares())

    def require_finite(self) -> None:
        """Raise an error if a sum has overflowed (NonFiniteError)."""
        for values in self.sums.values():
            # a finite sum implies finite entries, in one pass
            if not bool(torch.isfinite(values.sum())) and not bool(torch.isfinite(values).all()):
                raise NonFiniteError(
                    f"finite sums over the data for {self.block.weight!r}", "sums that overflow",
                    "Use dtype=torch.float64 for the algebra, or look for huge inputs or diverged weights.",
                )

    def merged(self, other: Summary) -> Summary:
        """Sums over both data sets. Sums that only one has are dropped: factors, if the other's basis was given."""
        both = self.sums.keys() & other.sums.keys()
        return Summary(self.block, {name: self.sums[name] + other.sums[name] for name in sorted(both)})

    def scaled(self, factor: float) -> Summary:
        """Sums for Λ multiplied by a number; sums over the layers' inputs do not depend on Λ."""
        return self if factor == 1.0 else Summary(self.block, {
            name: value if name in self.inputs else value * factor for name, value in self.sums.items()
        })

    @property
    def inputs(self) -> Sequence[str]:
        """Names of the sums over the layer's inputs, which do not depend on Λ."""
        return ("count", "left") if self.block.table else ("count", "right", "right_products", "right_trace")

    def to(self, device: torch.device, dtype: torch.dtype) -> Summary:
        """The same sums on another device, or in another floating type."""
        return Summary(self.block, {
            name: value.to(device, torch.float64 if name == "count" else dtype) for name, value in self.sums.items()
        })

    def _zeros(self, name: str, like: Tensor, *shape: int) -> Tensor:
        if name not in self.sums:
            self.sums[name] = like.new_zeros(shape)
        return self.sums[name]

    def _add(self, name: str, values: Tensor) -> None:
        self._zeros(name, values, *values.shape).add_(values)


def _add_inputs_(total: Tensor, inputs: Tensor, counts: Tensor | None) -> None:
    """Add Σ w a aᵀ of inputs (m, i), lower triangle, in place; a larger `total` appends an input of 1."""
    m, i = inputs.shape
    ones = inputs.new_ones(m)
    if counts is not None:
        ones = counts.to(inputs).sqrt()
        inputs = inputs * ones.unsqueeze(1)
    if len(total) > i:  # the bias row of A is the column sum of the inputs
        total[-1, :-1] += ones @ inputs
        total[-1, -1] += m if counts is None else ones @ ones
    add_outer_lower_(total[:i, :i], inputs)


def is_sketched(width: int, groups: int, rank: int | None) -> bool:
    """Whether a side of this width is kept as a low rank and a multiple of the identity."""
    return rank is not None and groups == 1 and width > rank


def num_tests(width: int, rank: int) -> int:
    """Test vectors of a side that is sketched."""
    return min(width, max(round(tuning.OVERSAMPLING * rank), rank + tuning.FACTOR_TESTS))


def sketch_vectors(width: int, rank: int, like: Tensor) -> Tensor:
    """The test vectors of all sides of this width, (p, s): the same for all batches and processes."""
    generator = torch.Generator().manual_seed(width)
    drawn = torch.randn(width, num_tests(width, rank), generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(like)


def _as_matrix(values: Tensor) -> Tensor:
    """(..., o) -> (m, o), with rows in memory order: no copy is needed, and a sum over rows ignores their order."""
    order = sorted(range(values.ndim - 1), key=lambda axis: -values.stride()[axis])
    return values.permute(*order, values.ndim - 1).reshape(-1, values.shape[-1])
