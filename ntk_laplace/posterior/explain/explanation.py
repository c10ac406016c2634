"""Explanation: the exact contributions and removal effects of all training points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ntk_laplace.errors import is_choice
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.gram import diagonal_blocks
from ntk_laplace.model.data import as_tensors
from ntk_laplace.posterior.explain.algebra import Removals, contributions, leverages, similarities
from ntk_laplace.posterior.explain.quantity import Output, Quantity, quantity_of
from ntk_laplace.posterior.explain.ranked import AT_OPTIMUM, Entry, Ranked, counted, strongest, whole
from ntk_laplace.structures import FittedModel, LinearizedModel
from ntk_laplace.structures.what_if import HIGH_LEVERAGE

_EXACT = (
    "offset, contributions and gap add up to the prediction exactly",
    "removal effects are exact for one Newton step of the linearized model without the point",
)
_OTHER_ROOT = (
    _EXACT[0],
    "removal effects take the point out of this precision, which is not the linearized model's: they rank, and are no "
    "refit",
)


@dataclass(frozen=True)
class ExplanationRequest:
    """The quantity to explain, as in `Posterior.explain`, and how many training points to show on each side."""

    k: int = 8
    output: Output = None
    by: str = "output"
    y: object = None

    def of_each(
        self, model: LinearizedModel, chunks: Iterable[Jacobian], count: int
    ) -> Iterator[tuple[Jacobian, Quantity, int]]:
        """Rows of each chunk, the quantity at their predictions, and the number of training points to show.

        DataError or UnsupportedError as `quantity_of`, or if `k` is not a whole number of at least 1; TargetError if
        there are fewer targets than inputs, or more, after the last chunk.
        """
        y, start = as_tensors(self.y), 0
        each = y if is_choice(self.by, ("log_likelihood",)) and isinstance(y, Tensor) and y.ndim > 0 else None
        for rows in chunks:
            stop = start + rows.num_examples
            if each is not None and len(each) < stop:
                model.likelihood.for_new_points().targets(each, stop, model.network.num_outputs)
            own = self.y if each is None else each[start:stop]
            found = rows, quantity_of(model.likelihood, rows.f, self.by, self.output, own), min(whole(self.k), count)
            del rows
            yield found
            del found  # before the rows of the next chunk are computed
            start = stop
        if each is not None and len(each) != start:
            model.likelihood.for_new_points().targets(each, start, model.network.num_outputs)


@dataclass(frozen=True, repr=False)
class Explanation(Ranked):
    """Contributions and effects of the training points on predictions, in units of the requested quantity.

    Axes are named: n inputs explained, N training points, C outputs; `AXES` lists them by field.

    Attributes
    ----------
    f : Tensor, (n, C)
        The predictions: network outputs (logits, for classes).
    quantity : Quantity
        The explained quantity: `by`, its `output` (n,), the targets.
    offset : Tensor, (n, C)
        Output of the linearized network at the prior mean.
    contributions : Tensor, (n, N, C)
        k(x, x_i) r_i. Exactly ``f = offset + contributions.sum(1) + gap``.
    gap : Tensor, (n, C)
        Distance of the weights from a stationary point, in units of the outputs; zero there ([T20] 5.2).
    removal : Tensor, (n, N, C)
        Change of each output if one training point were left out (posterior covariance, one Newton step).
        Positive: removal raises the output, so the point speaks against it.
    widening : Tensor, (n, N, C)
        Change of each output's posterior variance if one training point were left out; never negative.
    effect : Tensor, (n, N)
        Change of the requested quantity if one training point were left out. For a probability or a log likelihood
        the exact difference between the outputs after and before.
    importance : Tensor, (N, C)
        r_i, the residuals of the training points ([T20] 5.2).
    at_optimum : bool
        Whether they are those of the optimum of the linearized network, and not of the weights.
    kernel : Tensor, (n, N, C)
        k(x, x_i) between the explained output and each output of the training point; its sum over C, weighted by
        `importance`, is `share` ([T20] 5.2).
    similarity, correlation : Tensor, (n, N)
        k(x, x_i) of the explained output with the same output of the training point; k(x, x_i)/√(k(x, x) k(x_i, x_i)).
    variance : Tensor, (n, C)
        Posterior variance of each output.
    leverage : Tensor, (N,)
        In [0, 1). Near 1 the removal effect is an extrapolation; see `flagged`.
    targets : Tensor
        Training targets.
    k : int
        Training points shown for and against.
    guarantees : tuple of str
        What is exact, and what is not.
    """

    contributions: Tensor
    removal: Tensor
    widening: Tensor
    effect: Tensor
    kernel: Tensor
    similarity: Tensor
    correlation: Tensor
    variance: Tensor

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        **dict.fromkeys(("f", "offset", "gap", "variance"), ("input", "output")),
        **dict.fromkeys(("contributions", "removal", "widening", "kernel"), ("input", "training point", "output")),
        **dict.fromkeys(("effect", "similarity", "correlation"), ("input", "training point")),
        "importance": ("training point", "output"), "leverage": ("training point",),
    }

    @property
    def share(self) -> Tensor:
        """Contribution to the explained output, (n, N)."""
        index = self.output[:, None, None].expand(-1, self.contributions.shape[1], 1)
        return self.contributions.gather(2, index).squeeze(2)

    @property
    def support(self) -> Tensor:
        """The effect, with a sign such that positive speaks for the prediction, (n, N)."""
        return -self.quantity.good * self.effect

    def supporting(self, k: int | None = None) -> Tensor:
        """Indices of the training points that speak most for the prediction (its proponents), (n, k).

        Their removal lowers the quantity most; for a variance, raises it most.
        """
        return strongest(self.support, counted(k, self.k))

    def opposing(self, k: int | None = None) -> Tensor:
        """Indices of the training points that speak most against the prediction (its opponents), (n, k)."""
        self._require_side("against")
        return strongest(-self.support, counted(k, self.k))

    def top(self, k: int | None = None) -> Tensor:
        """Indices of the training points with the largest effects of either sign, (n, k)."""
        return strongest(self.effect.abs(), counted(k, self.k))

    def _entries(self, i: int, side: str, k: int | None) -> list[Entry]:
        chosen = self.supporting(k) if side == "for" else self.opposing(k)
        return [self._entry(i, j, float(self.effect[i, j]), self._more(i, j)) for j in chosen[i].tolist()]

    def _more(self, i: int, j: int) -> dict[str, float]:
        return {
            "contribution": float(self.share[i, j]), "similarity": float(self.similarity[i, j]),
            "correlation": float(self.correlation[i, j]), "importance": float(self.importance[j, self.output[i]]),
        }

    def contributed(self) -> Tensor:
        return self.contributions.sum(1)

    def __repr__(self) -> str:
        n, count, c = self.removal.shape
        worst = float(self.gap.abs().max())
        return (
            f"Explanation({n} input(s), {count} training points, {c} output(s); largest gap {worst:.2g}; "
            f"{int(self.flagged.sum())} point(s) of leverage above {HIGH_LEVERAGE})"
        )


def explain(
    fitted: FittedModel, chunks: Iterable[Jacobian], request: ExplanationRequest, optimum: FittedModel | None = None
) -> Iterator[Explanation]:
    """Decompose predictions and rank the training points behind them, for each chunk of rows of J at inputs.

    Contributions are made of the residuals of the model at its `optimum`, if it is given.
    """
    decompose = _Decomposing(fitted, optimum)
    for test, about, k in request.of_each(fitted.model, chunks, fitted.num_examples):
        found = decompose(test, about, k)
        del test  # before the rows of the next chunk are computed
        yield found
        del found


class _Decomposing:
    """Explanations in function space; terms that depend only on the training points are computed once."""

    def __init__(self, fitted: FittedModel, optimum: FittedModel | None) -> None:
        self._fitted, self._space = fitted, fitted.function_space
        self._residual, self._at_optimum = (optimum or fitted).residual(), optimum is not None
        own = _EXACT if fitted.exact else _OTHER_ROOT
        self._guarantees = (AT_OPTIMUM, *own[1:]) if self._at_optimum else own
        space = self._space
        with torch.no_grad():
            self._centered = fitted.from_prior_mean
            self._removals = Removals(fitted)
            self._squares = diagonal_blocks(space.rows, space.variances).diagonal(dim1=1, dim2=2)
            self._leverage = leverages(space.inverse_blocks)[:, -1]

    @torch.no_grad()
    def __call__(self, test: Jacobian, about: Quantity, k: int) -> Explanation:
        """Explain the inputs whose rows of J are `test`."""
        space = self._space
        pushed = test.jvp(space.shapes.named(self._centered))
        shares = contributions(space, test, self._residual)
        moved, widened = self._removals.effects(test)
        variance = space.covariance_blocks(test).diagonal(dim1=1, dim2=2)
        kernel, similarity, correlation = similarities(space, test, about.output, self._squares)
        along = widened
        if about.by == "probability_variance":
            along = self._removals.widening(test.weighted(about.direction(test.f).unsqueeze(-1)))
        effect = about.effect(test.f, moved, along)
        return Explanation(f=test.f, quantity=about, offset=test.f - pushed, contributions=shares,
                           gap=pushed - shares.sum(1), removal=moved, widening=widened, effect=effect,
                           importance=self._residual, at_optimum=self._at_optimum, kernel=kernel,
                           similarity=similarity, correlation=correlation, variance=variance, leverage=self._leverage,
                           targets=self._fitted.points.targets, k=k, guarantees=self._guarantees)


def bytes_of_each(fitted: FittedModel) -> int:
    """Bytes of the explanation of one input, and of its intermediate results."""
    n, c = fitted.points.f.shape
    space = fitted.function_space
    return n * c * (7 + 3 * space.weighted.num_cotangents) * space.rows.dtype.itemsize
