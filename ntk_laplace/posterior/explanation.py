"""Verbs of explanation: what the training points have to do with it."""

from __future__ import annotations

from ntk_laplace.data import Inputs
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.explain import Explanation, LeaveOneOut, explain, leave_one_out
from ntk_laplace.posterior.fitted import Fitted

__all__ = ["ExplanationVerbs"]


class ExplanationVerbs(Fitted):
    """Training points behind a prediction."""

    def explain(self, x: Inputs, k: int = 8, output: int | None = None) -> Explanation:
        """Which training points make the predictions at `x`.

        Parameters
        ----------
        x : tensor, tuple or dict of tensors
        k : int
            Training points to show for and against.
        output : int, optional
            The output to explain; by default the predicted class (or the only output).

        Returns
        -------
        Explanation
        """
        self._require_function_space("explain")
        return explain(self._trained, self._structure, self.curvature, self._rows(x), k, output)

    def leave_one_out(self) -> LeaveOneOut:
        """What each training point's prediction would be without it, in closed form."""
        self._require_function_space("leave_one_out")
        return leave_one_out(self._trained, self._structure, self.curvature)

    def _require_function_space(self, verb: str) -> None:
        if self.structure != "gp" or self._trained.root.curvature != "ggn":
            raise UnsupportedError(f'structure="gp" and curvature="ggn" for {verb}',
                                   f"structure={self.structure!r}, curvature={self._trained.root.curvature!r}",
                                   'Fit with ntk_laplace.laplace(..., structure="gp").')
