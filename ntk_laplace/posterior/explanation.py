"""Verbs of explanation: what the training points have to do with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from ntk_laplace.data import Inputs, gather
from ntk_laplace.explain import (
    Asked,
    Explanation,
    LeaveOneOut,
    Ranking,
    bytes_of_each,
    effects,
    explain,
    joined,
    leave_one_out,
    rank,
)
from ntk_laplace.factors import Rows
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
        chunks, asked = self._chunks(x, batch_size), Asked(k, output, by, y)
        if self.structure == "gp":
            return joined(self._explained(chunks, asked), chunks.length or 0)
        groups = _grouped(chunks.rows(), batch_size)
        return joined(rank(self._trained, self._structure, self.curvature, groups, asked), chunks.length or 0)

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
        chunks, asked = self._chunks(x, batch_size), Asked(1, output, by, y)
        if self.structure == "gp":
            found = (explanation.effect for explanation in self._explained(chunks, asked))
        else:
            groups = _grouped(chunks.rows(), batch_size)
            found = effects(self._trained, self._structure, self.curvature, groups, asked)
        return gather(found, chunks.length or 0).rows

    def leave_one_out(self) -> LeaveOneOut:
        """What each training point's prediction would be without it, in closed form, and what it does to the fit.

        Structure "gp" has it from the rows that it keeps, the others from another pass over the data. "gp" and "full"
        are exact for one Newton step of the linearized model; the others take a point out of their own approximation
        of the curvature. `guarantees` says what holds.

        Raises
        ------
        DataError
            If the data cannot be read again.
        """
        return leave_one_out(self._trained, self._structure, self.curvature)

    def _explained(self, chunks: Chunks, asked: Asked) -> Iterator[Explanation]:
        """In function space, a chunk at a time."""
        structure, space = self._structure, self.curvature
        return explain(self._trained, structure, space, chunks.rows(bytes_of_each(structure, space)), asked)


def _grouped(chunks: Iterable[Rows], batch_size: int | None) -> Iterator[Rows]:
    """Chunks that go through the training data together: up to 512 MiB of rows, or each alone if its size was given."""
    group: list[Rows] = []
    for rows in chunks:
        group.append(rows)
        if batch_size is not None or sum(one.nbytes for one in group) + rows.nbytes > _TOGETHER:
            yield Rows.concatenate(group)
            group.clear()
    if group:
        yield Rows.concatenate(group)
