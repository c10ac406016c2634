"""Verbs of explanation: what the training points have to do with it."""

from __future__ import annotations

from typing import Any

from ntk_laplace.data import Inputs
from ntk_laplace.explain import Asked, Explanation, LeaveOneOut, explain, leave_one_out
from ntk_laplace.posterior.fitted import Fitted

__all__ = ["ExplanationVerbs"]


class ExplanationVerbs(Fitted):
    """Training points behind a prediction."""

    def explain(
        self, x: Inputs, k: int = 8, output: int | None = None, *, by: str = "output", y: Any = None
    ) -> Explanation:
        """Which training points make the predictions at `x`, and what would be without each of them.

        Parameters
        ----------
        x : tensor, tuple or dict of tensors
        k : int
            Training points to show for and against.
        output : int, optional
            The output to explain; by default the predicted class (or the only output).
        by : str
            The quantity whose change ranks the training points: "output" (or "logit"), "probability" (the mean
            response), "log_likelihood" of `y`, in nats, "variance" of the output.
        y : optional
            Targets at `x`, for "log_likelihood"; for classes by default the explained class.

        Returns
        -------
        Explanation

        Raises
        ------
        DataError, UnsupportedError
            If there is no such output or quantity, or the structure keeps no rows.
        """
        self._require_rows("explain")
        asked = Asked(k, output, by, y)
        return explain(self._trained, self._structure, self.curvature, self._rows(x), asked)

    def leave_one_out(self) -> LeaveOneOut:
        """What each training point's prediction would be without it, in closed form, and what it does to the fit."""
        self._require_rows("leave_one_out")
        return leave_one_out(self._trained, self._structure, self.curvature)
