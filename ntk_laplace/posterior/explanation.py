"""Explanation methods of a posterior: the influence of training points on predictions."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.errors import NumericalError, UnsupportedError, require_choice, require_flags, warn
from ntk_laplace.jacobian import Jacobian, grouped
from ntk_laplace.model.data import InputData, fill_buffer
from ntk_laplace.posterior.chunks import Chunks
from ntk_laplace.posterior.explain import (
    Explanation,
    ExplanationRequest,
    LeaveOneOut,
    Ranking,
    bytes_of_each,
    effects,
    explain,
    joined,
    leave_one_out,
    leave_some_out,
    rank,
)
from ntk_laplace.posterior.explain.quantity import Output
from ntk_laplace.posterior.fitted import Fitted
from ntk_laplace.posterior.lack_of_fit import LackOfFit, lack_of_fit
from ntk_laplace.runtime import tuning
from ntk_laplace.structures import FittedModel
from ntk_laplace.structures.what_if import Indices, at_optimum, drawn


class ExplanationVerbs(Fitted):
    """Explanations of predictions by training points."""

    def explain(
        self, x: InputData, k: int = 8, output: Output = None, *, by: str = "output", y: Any = None,
        decomposition: str = "weights", batch_size: int | None = None,
    ) -> Explanation | Ranking:
        """Which training points determine the predictions at `x`, and the predictions without each of them.

        Structure "gp" returns all of them, exactly, in memory of n x N x C. The other structures read the training data
        again and keep only the strongest; `guarantees` states what is exact.

        Parameters
        ----------
        x : tensor, tuple or dict of tensors, DataLoader or Dataset
        k : int
            Training points to show for and against.
        output : int or sequence of int, optional
            The output to explain, the same at all inputs; by default the predicted class at each input (of several
            labels the most probable one), and the first output where they are no classes. Under `Everywhere` also as
            its position and number there, such as (row, column, class).
        by : str
            The quantity whose change ranks the training points: "output" (or "logit"), "probability" (the mean
            response), "log_likelihood" of `y`, in nats, "variance" of the output, "probability_variance" (variance
            of the mean response, to first order in f: the epistemic part of the predictive variance).
        y : optional
            Targets at `x`, for "log_likelihood"; for classes by default the explained class.
        decomposition : str
            Which residuals contributions are made of. "weights": those of the posterior's own outputs; the gap is what
            the gradient that training has left adds, and a weak prior makes it larger than the prediction. "optimum":
            those at the optimum of the linearized model, as after `refit`; the gap leads from its output to the
            prediction. "auto": the optimum, if the structure is exact and it is reached.
        batch_size : int, optional
            Maximum inputs at a time; by default chosen by memory. With a structure other than "gp" each batch of
            inputs needs a pass over the training data.

        Returns
        -------
        Explanation, or Ranking if the structure is not "gp"

        Raises
        ------
        DataError, UnsupportedError
            If there is no such output or quantity, or the data cannot be read again; if structure or curvature are not
            exact, for the optimum.
        NumericalError
            If the optimum is not reached.
        MemoryBudgetError
            If the inverse of B does not fit in memory, for structure "gp"; nothing was computed.
        """
        self._fitted.warn_of_order()
        chunks, request = self._chunks(x, batch_size), ExplanationRequest(k, output, by, y)
        if self._fitted.structure.spec.keeps_jacobian:
            return joined(self._explained(chunks, request, decomposition), chunks.length or 0)
        optimum = self._optimum(decomposition)
        return joined(rank(self._fitted, _merged(chunks, batch_size), request, optimum), chunks.length or 0)

    def _optimum(self, decomposition: str) -> FittedModel | None:
        """The linearized model at its optimum, for this decomposition."""
        require_choice(decomposition, ("weights", "optimum", "auto"), 'decomposition="weights", "optimum" or "auto"',
                       "Leave it out for that at the weights.")
        if decomposition == "weights":
            return None
        try:
            self._fitted.require_exact(' for decomposition="optimum"', 'Fit one of them, or leave it out.')
            with torch.inference_mode(False):
                return at_optimum(self._fitted)
        except (NumericalError, UnsupportedError):
            if decomposition == "optimum":
                raise
            return None

    def removal_effects(
        self, x: InputData, output: Output = None, *, by: str = "output", y: Any = None, batch_size: int | None = None
    ) -> Tensor:
        """Change of the quantity at each input of `x` if one training point were left out, for all training points.

        Parameters
        ----------
        x, output, by, y, batch_size
            As in `explain`.

        Returns
        -------
        Tensor, (n, N)
            The effects that `explain` ranks by: exact differences with structure "gp", otherwise approximations as
            its `guarantees` state.
        """
        self._fitted.warn_of_order()
        chunks = self._chunks(x, batch_size)
        found = self._removal_effects(chunks, ExplanationRequest(1, output, by, y), batch_size)
        return fill_buffer(found, chunks.length or 0).rows

    def leave_one_out(self, points: Indices | None = None, *, seed: int = 0, strict: bool = True) -> LeaveOneOut:
        """Leave-one-out predictions at the training points, in closed form, with leverages and influences.

        Structure "gp" uses its stored rows, the others another pass over the data. "gp" and "full" are exact for one
        Newton step of the linearized model. The others have two ways. Without `points` each point is subtracted from
        their approximate curvature, which ranks them and is no score. With `points` the structure is fitted without
        these points, in groups of at most a tenth of the data, and nothing is subtracted: covariances are those of this
        fit, and means are a Newton step of the linearized model without the point. For each group this takes up to 30
        passes over the data, and matrices over the group's outputs, (mC, mC). `guarantees` states what is exact and
        `reliability` what was measured. A warning is issued if the numbers may differ from
        retraining without the point: hyperparameters other than in training, a prior too weak to determine the
        weights, an approximate curvature.

        Parameters
        ----------
        points : int, sequence of int, or Tensor, optional
            Training points to leave out, each alone: how many, drawn at random, or their numbers, or a mask of all. By
            default all.
        seed : int
            Random seed of the draw.
        strict : bool
            Raise an error for leverages above 1. False returns them, for a ranking of the points.

        Returns
        -------
        LeaveOneOut
            Of these points, in the order of the data.

        Raises
        ------
        DataError
            If there are no such points, or the data cannot be read again.
        MemoryBudgetError
            If a group of points does not fit in memory.
        UnsupportedError
            If a point has a leverage above 1, as approximate curvatures allow: the precision without it would be
            indefinite. With `points`, if the curvature is approximate and not the GGN.
        """
        require_flags(strict=strict)
        self._fitted.warn_of_order()
        if points is None:
            found = leave_one_out(self._fitted)
        else:
            found = leave_some_out(self._fitted, drawn(points, self.num_examples, seed))
        above = int((found.leverage > 1.0).sum())
        if strict and above and not self._fitted.structure.spec.exact:
            raise UnsupportedError(
                "leverages of at most 1, as an exact curvature has them",
                f"{above:,} of {self.num_examples:,} points above it, the largest {float(found.leverage.max()):.3g}, "
                f"under structure={self.structure!r} and curvature={self.curvature_type.kind!r}",
                'Fit with structure="gp", "full" or "iterative" and curvature="ggn", leave out some points with '
                "points=300, or use other data for a score; strict=False gives numbers that rank the points.",
            )
        self._warn_of(found)
        return found

    def lack_of_fit(self, x: InputData | None = None, *, neighbors: int = 3) -> LackOfFit:
        """How alike residuals of training points with similar inputs are: what the network has left unexplained.

        Where the network follows the function that made the targets, residuals of neighbors are as different as those
        of any points, or more: a positive correlation says that it is too smooth there, because training ended at a
        poor optimum, the network is too small, or an input is missing. The evidence alone takes it for noise.
        Residuals are ``∂ log p/∂f``, y less the prediction over the noise variance for normal noise and y - p for
        classes; an exact posterior predicts each point from all others (`leave_one_out`). None counts for more than
        three root mean squares.

        Parameters
        ----------
        x : Tensor, optional
            Inputs of the training points, in the order of the fit, for a posterior without its data. They are one array
            of real numbers. Distances are Euclidean, those of a table in standard deviations of its columns, and along
            each column alone, among its different numbers: of many columns, points that are near in one are far apart
            in others.
        neighbors : int
            Nearest points of each. Of more than 5,000 points as many are drawn.

        Returns
        -------
        LackOfFit
            Moran's I of the residuals, and its distance from that of random pairs in standard deviations: above 3 there
            is something to find. The input and the period of a wave in them, if there is one beyond chance. Of classes
            small correlations say little, because neighbors mostly have the same one, and cautious predictions the same
            residuals.

        Raises
        ------
        DataError
            If there are too few points, or `x` is needed or is not that of the fit.
        UnsupportedError
            If the inputs are something else, or several processes share the data.
        """
        return lack_of_fit(self._fitted, x, neighbors)

    # --- inside

    def _removal_effects(
        self, chunks: Chunks, request: ExplanationRequest, batch_size: int | None = None
    ) -> Iterator[Tensor]:
        """Effects of all training points, (n, N), chunk by chunk of the inputs."""
        if self._fitted.structure.spec.keeps_jacobian:
            return (one.effect for one in self._explained(chunks, request))
        return effects(self._fitted, _merged(chunks, batch_size), request)

    def _warn_of(self, found: LeaveOneOut) -> None:
        if not found.trusted:
            warn(str(found.reliability))

    def _explained(
        self, chunks: Chunks, request: ExplanationRequest, decomposition: str = "weights"
    ) -> Iterator[Explanation]:
        """Explanations in function space, chunk by chunk."""
        self._fitted.function_space.require_inverse()
        optimum = self._optimum(decomposition)
        return explain(self._fitted, chunks.rows(bytes_of_each(self._fitted)), request, optimum)


def _merged(chunks: Chunks, batch_size: int | None) -> Iterator[Jacobian]:
    """Chunks for a pass over the training data: up to 512 MiB of rows, or each alone if `batch_size` is given."""
    return grouped(chunks.rows(), attrgetter("nbytes"), tuning.EXPLAINED_BYTES if batch_size is None else 0)
