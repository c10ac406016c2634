"""Verbs of explanation: what the training points have to do with it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from ntk_laplace.data import Inputs, fill_buffer
from ntk_laplace.errors import NTKLaplaceWarning, UnsupportedError
from ntk_laplace.explain import (
    Explanation,
    ExplanationRequest,
    LeaveOneOut,
    Ranking,
    bytes_of_each,
    effects,
    explain,
    joined,
    leave_one_out,
    rank,
)
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.posterior.chunks import Chunks
from ntk_laplace.posterior.fitted import Fitted

__all__ = ["ExplanationVerbs"]

_TOGETHER = 512 * 2**20  # bytes of rows at inputs that go through the training data together


class ExplanationVerbs(Fitted):
    """Training points behind a prediction."""

    def explain(
        self, x: Inputs, k: int = 8, output: int | None = None, *, by: str = "output", y: Any = None,
        batch_size: int | None = None,
    ) -> Explanation | Ranking:  # fmt: skip
        """Which training points make the predictions at `x`, and what would be without each of them.

        With structure "gp" all of them, exactly; the answer itself takes memory of n x N x C. The other structures read
        the training data again and keep the strongest alone; `guarantees` says what holds there.

        Parameters
        ----------
        x : tensor, tuple or dict of tensors, DataLoader or Dataset
        k : int
            Training points to show for and against.
        output : int, optional
            The output to explain; by default the predicted class (or the only output).
        by : str
            The quantity whose change ranks the training points: "output" (or "logit"), "probability" (the mean
            response), "log_likelihood" of `y`, in nats, "variance" of the output, "probability_variance" (of the
            mean response, to first order in f: what of the predictive variance comes of not knowing the weights).
        y : optional
            Targets at `x`, for "log_likelihood"; for classes by default the explained class.
        batch_size : int, optional
            Most inputs at a time; by default as many as suits memory. With a structure other than "gp" each batch of
            inputs takes a pass over the training data.

        Returns
        -------
        Explanation, or Ranking where the structure is not "gp"

        Raises
        ------
        DataError, UnsupportedError
            If there is no such output or quantity, or the data cannot be read again.
        """
        chunks, request = self._chunks(x, batch_size), ExplanationRequest(k, output, by, y)
        if self.structure == "gp":
            return joined(self._explained(chunks, request), chunks.length or 0)
        groups = _grouped(chunks.rows(), batch_size)
        return joined(rank(self._model, self._structure, self.posterior_precision, groups, request), chunks.length or 0)

    def removal_effects(
        self, x: Inputs, output: int | None = None, *, by: str = "output", y: Any = None,
        batch_size: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Change of the quantity at each input of `x` if one training point were left out, for all of them.

        Parameters
        ----------
        x, output, by, y, batch_size
            As in `explain`.

        Returns
        -------
        Tensor, (n, N)
            The numbers that `explain` ranks by: with structure "gp" exact differences, elsewhere as it says there.
        """
        chunks, request = self._chunks(x, batch_size), ExplanationRequest(1, output, by, y)
        if self.structure == "gp":
            found = (explanation.effect for explanation in self._explained(chunks, request))
        else:
            groups = _grouped(chunks.rows(), batch_size)
            found = effects(self._model, self._structure, self.posterior_precision, groups, request)
        return fill_buffer(found, chunks.length or 0).rows

    def leave_one_out(self, *, strict: bool = True) -> LeaveOneOut:
        """What each training point's prediction would be without it, in closed form, and what it does to the fit.

        Structure "gp" has it from the rows that it keeps, the others from another pass over the data. "gp" and "full"
        are exact for one Newton step of the linearized model; the others take a point out of their own approximation
        of the curvature. `guarantees` says what holds, `reliability` what was measured, and a warning says so where
        that speaks against taking the numbers for retraining without the point: hyperparameters that the weights were
        not trained with, a prior too vague to hold them, an approximate precision.

        Parameters
        ----------
        strict : bool
            Refuse leverages above 1. False: let them stand, as a ranking of the points.

        Raises
        ------
        DataError
            If the data cannot be read again.
        UnsupportedError
            If points have a leverage above 1 in an approximate precision, which holds less of them than they have:
            there is no model without them.
        """
        found = self._left_out()
        above = int((found.leverage > 1.0).sum())
        if strict and above and not found.reliability.exact:
            raise UnsupportedError(
                "leverages of at most 1, as an exact curvature has them",
                f"{above:,} of {self.num_examples:,} points above it, the largest {float(found.leverage.max()):.3g}, "
                f"under structure={self.structure!r} and curvature={self._model.curvature_type.kind!r}",
                'Fit with structure="gp" or "full" and curvature="ggn", or use other data for a score; strict=False '
                "gives numbers that rank the points.",
            )  # fmt: skip
        self._warn_of(found)
        return found

    # --- inside

    def _left_out(self) -> LeaveOneOut:
        return leave_one_out(self._model, self._structure, self.posterior_precision)

    def _warn_of(self, found: LeaveOneOut) -> None:
        if not found.trusted:
            warnings.warn(str(found.reliability), NTKLaplaceWarning, stacklevel=3)

    def _explained(self, chunks: Chunks, request: ExplanationRequest) -> Iterator[Explanation]:
        """In function space, a chunk at a time."""
        structure, space = self._structure, self.posterior_precision
        return explain(self._model, structure, space, chunks.rows(bytes_of_each(structure, space)), request)


def _grouped(chunks: Iterable[Jacobian], batch_size: int | None) -> Iterator[Jacobian]:
    """Chunks that go through the training data together: up to 512 MiB of rows, or each alone if its size was given."""
    group: list[Jacobian] = []
    for rows in chunks:
        group.append(rows)
        if batch_size is not None or sum(one.nbytes for one in group) + rows.nbytes > _TOGETHER:
            yield Jacobian.concatenate(group)
            group.clear()
    if group:
        yield Jacobian.concatenate(group)
