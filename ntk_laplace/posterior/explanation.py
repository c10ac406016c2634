"""Verbs of explanation: what the training points have to do with it."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from ntk_laplace.data import Inputs
from ntk_laplace.errors import NTKLaplaceWarning, UnsupportedError
from ntk_laplace.explain import Asked, Explanation, LeaveOneOut, Ranking, effects, explain, leave_one_out, rank
from ntk_laplace.posterior.fitted import Fitted

__all__ = ["ExplanationVerbs"]


class ExplanationVerbs(Fitted):
    """Training points behind a prediction."""

    def explain(
        self, x: Inputs, k: int = 8, output: int | None = None, *, by: str = "output", y: Any = None
    ) -> Explanation | Ranking:
        """Which training points make the predictions at `x`, and what would be without each of them.

        With structure "gp" all of them, exactly, in memory of n x N x C. The other structures read the training data
        again and keep the strongest alone; `guarantees` says what holds there.

        Parameters
        ----------
        x : tensor, tuple or dict of tensors
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

        Returns
        -------
        Explanation, or Ranking where the structure is not "gp"

        Raises
        ------
        DataError, UnsupportedError
            If there is no such output or quantity, or the data cannot be read again.
        """
        asked = Asked(k, output, by, y)
        how = explain if self.structure == "gp" else rank
        return how(self._trained, self._structure, self.curvature, self._rows(x), asked)

    def removal_effects(
        self, x: Inputs, output: int | None = None, *, by: str = "output", y: Any = None
    ) -> Tensor:
        """Change of the quantity at each input of `x` if one training point were left out, for all of them.

        Parameters
        ----------
        x, output, by, y
            As in `explain`.

        Returns
        -------
        Tensor, (n, N)
            The numbers that `explain` ranks by: with structure "gp" exact differences, elsewhere as it says there.
        """
        rows, asked = self._rows(x), Asked(1, output, by, y)
        if self.structure == "gp":
            return explain(self._trained, self._structure, self.curvature, rows, asked).effect
        question, _ = asked.of(self._trained, rows.f, self.num_examples)
        return effects(self._trained, self._structure, self.curvature, rows, question)

    def leave_one_out(self, *, strict: bool = True) -> LeaveOneOut:
        """What each training point's prediction would be without it, in closed form, and what it does to the fit.

        Structure "gp" has it from the rows that it keeps, the others from another pass over the data. "gp" and "full"
        are exact for one Newton step of the linearized model; the others take a point out of their own approximation
        of the curvature. `guarantees` says what holds, `reliability` what was measured, and a warning says so where
        that speaks against taking the numbers for retraining without the point: hyperparameters that the weights were
        not trained with, a prior too vague to hold them, an approximate curvature.

        Parameters
        ----------
        strict : bool
            Refuse leverages above 1. False: let them stand, as a ranking of the points.

        Raises
        ------
        DataError
            If the data cannot be read again.
        UnsupportedError
            If points have a leverage above 1 in an approximate curvature, which holds less of them than they have:
            there is no model without them.
        """
        found = self._left_out()
        above = int((found.leverage > 1.0).sum())
        if strict and above and not found.reliability.exact:
            raise UnsupportedError(
                "leverages of at most 1, as an exact curvature has them",
                f"{above:,} of {self.num_examples:,} points above it, the largest {float(found.leverage.max()):.3g}, "
                f"under structure={self.structure!r} and curvature={self._trained.root.curvature!r}",
                'Fit with structure="gp" or "full" and curvature="ggn", or use other data for a score; strict=False '
                "gives numbers that rank the points.",
            )  # fmt: skip
        self._warn_of(found)
        return found

    # --- inside

    def _left_out(self) -> LeaveOneOut:
        return leave_one_out(self._trained, self._structure, self.curvature)

    def _warn_of(self, found: LeaveOneOut) -> None:
        if not found.trusted:
            warnings.warn(str(found.reliability), NTKLaplaceWarning, stacklevel=3)
