"""One batch during a Jacobian pass, and the gradient check of the rows that are computed from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ntk_laplace.errors import MixedExamplesError
from ntk_laplace.jacobian.blocks import Block
from ntk_laplace.jacobian.fast import FusedSums
from ntk_laplace.jacobian.gradient_check import GradientCheck, agree
from ntk_laplace.model.data import Inputs, check_finite, take
from ntk_laplace.model.network import Network
from ntk_laplace.runtime import tuning


@dataclass(frozen=True)
class Batch:
    """Inputs, outputs and cotangents from which a batch's rows are computed.

    Attributes
    ----------
    network : Network
    parameters : dict of str to nn.Parameter
        Parameters to differentiate.
    x : tensor, tuple or dict of tensors
    out : Tensor, (N, C)
        Outputs with their autograd graph.
    cotangents : Tensor, (K, N, C)
        Starting points of the backward passes.
    offset : int
        Index of the first example, for messages.
    """

    network: Network
    parameters: dict[str, nn.Parameter]
    x: Inputs
    out: Tensor
    cotangents: Tensor
    offset: int

    @cached_property
    def sample(self) -> Tensor | None:
        """Sorted indices of random examples for the gradient check; None if all examples are checked."""
        n = len(self.out)
        count = max(tuning.FEWEST_CHECKED, min(tuning.MOST_CHECKED, n // 8))
        if n <= count:
            return None
        order = torch.randperm(n, generator=torch.Generator().manual_seed(n), device="cpu")
        return order[:count].sort().values.to(self.out.device)

    def disagreeing(
        self, blocks: Sequence[Block], whole: bool = False, uncertain: bool = False
    ) -> tuple[str, ...]:
        """Parameters whose randomly weighted rows do not sum to autograd's gradient of the batch.

        The check costs one more backward pass. Random weights reveal rows of the wrong example and mixed examples. In
        larger batches a random sample of examples is evaluated alone, which also reveals mixing. If the sample fails,
        or `uncertain`, the check is repeated on the full batch; `whole` checks that alone. Rows have to be finite
        (NonFiniteError, with the index of the example).
        """
        if not whole and self.sample is not None and self.sample_agrees(blocks) and not uncertain:
            self._require_finite(blocks)
            return ()
        wrong = self._sums_disagree(blocks, self.out, self.cotangents)
        if wrong is None:
            self._require_finite(blocks)
        return tuple(self.parameters) if wrong is None else wrong

    def sample_agrees(self, blocks: Sequence[Block | FusedSums]) -> bool:
        """Whether the rows of the examples in `sample` agree with autograd's gradient of these examples alone.

        The outputs of the sample alone must equal those within the batch (MixedExamplesError). The fallback computes
        rows one example at a time, so its rows do not reveal mixing.
        """
        index = slice(None) if self.sample is None else self.sample
        few = [block.sample if isinstance(block, FusedSums) else block.subset(index) for block in blocks]
        alone = self.network.evaluate(take(self.x, index), self.offset)
        own, there = alone.detach(), self.out.detach()[index]
        size = float(there.abs().max())
        if not agree(own, there, size, size, self.network.precision):
            gap = float((own - there).abs().max())
            raise mixed(f"outputs that change by {gap:.2g} with the other examples of the batch")
        cotangents = self.cotangents
        if cotangents.stride(1) == 0:  # the same for all examples, and written out for none
            cotangents = cotangents[:, :1].expand(-1, len(own), -1)
        else:
            cotangents = cotangents[:, index]
        return self._sums_disagree(few, alone, cotangents) == ()

    def _sums_disagree(self, blocks: Sequence[Block], out: Tensor, cotangents: Tensor) -> tuple[str, ...] | None:
        """Parameters whose randomly weighted rows differ from autograd's gradient; None for a nonfinite gradient."""
        generator = torch.Generator().manual_seed(len(out))
        weights = torch.randn(cotangents.shape[:2], generator=generator, dtype=torch.float64, device="cpu")
        truth = GradientCheck(out, cotangents, weights.to(cotangents), self.parameters, self.network.precision)
        return truth.disagreeing(blocks) if truth.finite else None

    def _require_finite(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            check_finite(block.values.transpose(0, 1), "Jacobians", "Look at that input, or at diverged weights.",
                         self.offset)


def all_finite(blocks: Sequence[Block | FusedSums]) -> bool:
    """Whether all entries are finite."""
    return all(bool(torch.isfinite(block.values.sum())) for block in blocks)


def mixed(got: str) -> MixedExamplesError:
    """Return the error to raise for a network that mixes examples."""
    return MixedExamplesError("a network whose outputs depend on their own example alone", got,
                              "Call network.eval() before the fit, or remove the operation that looks across examples.")
