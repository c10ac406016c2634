"""H block diagonal, from moving averages of a structure's sums: VOGN for "diag", noisy K-FAC for "kfac".

One step replaces each sum s over the data by (1-γ) s + γ ŝ, where ŝ is the sum over the samples and examples of the
step, and the diagonal d by (1-γ) d + γ P0. A diagonal is linear in its sums, so that H follows the step exactly. A
Kronecker block is a product of two averages, of the layer's inputs and of its output gradients, and follows it
approximately.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import (
    BlockDiagonalPrecision,
    Eigenbasis,
    ParameterBlock,
    Products,
    Summary,
    find_parameter_blocks,
)
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime import tuning
from ntk_laplace.structures.block_spec import BlockSpec
from ntk_laplace.structures.structured import block_precision
from ntk_laplace.variational_inference.states import DataTerms, VariationalState, prior_times


class BlockState(VariationalState):
    """q = N(μ, H⁻¹) with the sums of a block-diagonal structure in place of H.

    Draws and steps of "kfac" use the H of an earlier step, whose eigenvectors are known, until Σγ since then reaches
    `tuning.BLOCK_REFRESH`, or the trace of a block has changed by the share `tuning.BLOCK_CHANGE`. `precision` is the
    present one. At the start there are the sums of the structure, none for H = diag(d), and the ratio d / P0 of each
    prior group, (G,). UnsupportedError if the structure takes a second pass over the data, in the eigenvectors of the
    first.
    """

    def __init__(
        self, mean: Tensor, spec: BlockSpec, summaries: Sequence[Summary], ratio: Tensor, prior: GaussianPrior
    ) -> None:
        if spec.second_pass:
            raise UnsupportedError("a structure of one pass over the data, whose sums a step can average",
                                   f"structure={spec.name!r}", 'Use structure="kfac" or "diag".')
        spec.check(prior)
        super().__init__(mean, prior)
        self.spec, self._ratio, self._sums = spec, ratio, list(summaries)
        self._refresh()

    # --- H

    @property
    def precision(self) -> BlockDiagonalPrecision:
        """The present H; `log_det` is relative to diag(d)."""
        return self._factorized(self._sums, self._ratio) if self._waited else self._working

    def _factorized(self, sums: Sequence[Summary], ratio: Tensor) -> BlockDiagonalPrecision:
        parts = [(summary, Eigenbasis.of(summary, self.spec.factor_rank), None) for summary in sums]
        return block_precision(self.spec, parts, prior_times(self._prior, ratio), self.mean)

    def _refresh(self) -> None:
        """Let draws and steps use the present H."""
        self._used, self._waited = (self._sums, self._ratio), 0.0
        self._working = self._factorized(*self._used)

    def _changed(self) -> bool:
        """Whether H is cheap, or its size on a block has changed since the last refresh."""
        used = self._used[0]
        if self.spec.kind == "diagonal" or len(used) < len(self._sums):
            return True
        before, now = (torch.stack([_trace(summary) for summary in sums]) for sums in (used, self._sums))
        return bool(((now - before).abs() > tuning.BLOCK_CHANGE * before).any())

    @torch.no_grad()
    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        return self._working.sample(count, generator)

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        return self._working.covariance_blocks(rows)

    # --- steps

    def update(self, step_size: float, terms: Iterable[DataTerms]) -> float:
        """Average the sums, and move μ by a solve with each block."""
        gradient = self._pull()
        fresh = [Summary(summary.block, {}) for summary in self._sums]
        for part in terms:
            gradient += part.gradient
            self._meet(part.rows, fresh)
            products = Products()
            for summary in fresh:
                summary.add_factors(part.rows, self.spec.sharing, products, part.counts, self.spec.factor_rank)
        self._sums = [_averaged(old, new, step_size) for old, new in zip(self._sums, fresh, strict=True)]
        self._ratio = torch.lerp(self._ratio, torch.ones_like(self._ratio), step_size)
        self._waited += step_size
        if self._waited >= tuning.BLOCK_REFRESH or self._changed():
            self._refresh()
        return self._move(step_size, gradient, self._working)

    def _meet(self, rows: Jacobian, fresh: list[Summary]) -> None:
        """Blocks for the parameters of the first rows. UnsupportedError if later rows reach other parameters."""
        names = {name for block in rows.blocks for name in block.names}
        late = sorted(names - {name for summary in self._sums for name in summary.block.names})
        if not late:
            return
        if self._sums:
            raise UnsupportedError(f"every minibatch to reach {', '.join(late[:3])}", "one that is the first to do so",
                                   'Use structure="full" or "gp", or a larger batch_size.')
        found = find_parameter_blocks(rows, self._prior, self.spec.kind, self.spec.squares)
        self._sums = [*self._sums, *(Summary(block, {}) for block in found)]
        fresh += [Summary(block, {}) for block in found]

    # --- storage

    def record(self) -> dict[str, Any]:
        """μ, d / P0 and the sums, at present and at the last refresh."""
        return copy.deepcopy({
            "mean": self.mean, "waited": self._waited, "now": _record(self._sums, self._ratio),
            "used": _record(*self._used),
        })

    def restore(self, record: Mapping[str, Any]) -> None:
        record = copy.deepcopy(dict(record))
        self.mean = record["mean"].to(self.mean)
        self._sums, self._ratio = _of_record(record["used"], self.mean)
        self._refresh()
        self._sums, self._ratio = _of_record(record["now"], self.mean)
        self._waited = float(record["waited"])


def _trace(summary: Summary) -> Tensor:
    """Trace of the block of JᵀΛJ."""
    sums = summary.sums
    if "squares" in sums:
        return sums["squares"].sum()
    if "block" in sums:
        return sums["block"].diagonal().sum()
    left, right = (_trace_of_side(summary, name) for name in ("left", "right"))
    return (left * right).sum() / summary.count.to(left)


def _trace_of_side(summary: Summary, name: str) -> Tensor:
    """Trace of a Kronecker factor, (G,) or 0-d."""
    sums = summary.sums
    if f"{name}_trace" in sums:  # of a wide side of KFAC(rank=...)
        return sums[f"{name}_trace"]
    return sums[name].sum(-1) if summary.block.table and name == "left" else sums[name].diagonal(
        dim1=-2, dim2=-1).sum(-1)


def _averaged(old: Summary, new: Summary, step_size: float) -> Summary:
    """(1-γ) old + γ new; a sum that one of them lacks is zero there."""
    sums = {name: (1.0 - step_size) * value for name, value in old.sums.items()}
    for name, value in new.sums.items():
        sums[name] = sums[name].add_(value, alpha=step_size) if name in sums else step_size * value
    return Summary(old.block, sums)


def _record(sums: Sequence[Summary], ratio: Tensor) -> dict[str, Any]:
    return {"ratio": ratio, "blocks": [summary.block.record() for summary in sums],
            "sums": [dict(summary.sums) for summary in sums]}


def _of_record(record: Mapping[str, Any], like: Tensor) -> tuple[list[Summary], Tensor]:
    pairs = zip(record["blocks"], record["sums"], strict=True)
    sums = [Summary(ParameterBlock.from_record(block), dict(own)).to(like.device, like.dtype) for block, own in pairs]
    return sums, record["ratio"].to(like)
