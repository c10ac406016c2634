"""Verbs of explanation: what the training points have to do with it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ntk_laplace.data import Inputs
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
