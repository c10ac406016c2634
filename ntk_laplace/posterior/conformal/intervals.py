"""Prediction intervals of real responses: jackknife+ of [Barber et al. 2021] and split conformal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.likelihoods.targets import read_columns
from ntk_laplace.posterior.conformal.quantiles import rank_of
from ntk_laplace.posterior.explain import Reliability

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

INTERVAL_SCORES = ("normalized", "absolute")


@dataclass(frozen=True, repr=False)
class PredictionIntervals:
    """An interval for each response of each input.

    Attributes
    ----------
    mean : Tensor, (n, D)
        The prediction by all points, D responses in units of y; (n,) for a network with outputs of shape (N,).
    lower, upper : Tensor, like `mean`
        Ends, which belong to the interval; infinite if there are too few points for the level. The lower end may be
        above the upper one at small levels: the interval is then empty.
    level : float
        Nominal coverage.
    method : str
        "jackknife+" or "split".
    score : str
        "normalized" or "absolute".
    counts : Tensor, (D,)
        Points that were scored for each response.
    guarantees : tuple of str
        What is guaranteed, and what is not.
    reliability : Reliability or None
        Of leave-one-out; None for "split".
    """

    mean: Tensor
    lower: Tensor
    upper: Tensor
    level: float
    method: str
    score: str
    counts: Tensor
    guarantees: tuple[str, ...]
    reliability: Reliability | None

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        **dict.fromkeys(("mean", "lower", "upper", "width"), ("input", "response")), "counts": ("response",),
    }

    @property
    def width(self) -> Tensor:
        """Upper less lower end, like `mean`; 0 if the interval is empty."""
        return (self.upper - self.lower).clamp_min(0.0)

    def contains(self, y: Any) -> Tensor:
        """Whether each target of `y` (n, D) is in its interval, bool, like `mean`; false for NaN.

        Raises
        ------
        TargetError
            If there is not one target for each response.
        """
        y = self._targets(y)
        return (self.lower <= y) & (y <= self.upper)

    def coverage(self, y: Any) -> float:
        """Fraction of the targets `y` (n, D) that are in their intervals, of all responses; NaN targets are left out.

        Raises
        ------
        TargetError
            If there is not one target for each response.
        """
        there = ~self._targets(y).isnan()
        return float(self.contains(y)[there].double().mean())

    def to_dataframe(self) -> pandas.DataFrame:
        """One row per input and response: mean, lower, upper, width. Its ``attrs`` contain level and guarantees."""
        import pandas

        n, responses = len(self.mean), len(self.counts)
        frame = pandas.DataFrame({
            "input": torch.arange(n, device="cpu").repeat_interleave(responses).tolist(),
            "response": list(range(responses)) * n,
            **{name: getattr(self, name).flatten().tolist() for name in ("mean", "lower", "upper", "width")},
        })
        frame.attrs |= {"level": self.level, "method": self.method, "guarantees": list(self.guarantees)}
        return frame

    def plot(self, y: ArrayLike | None = None, response: int = 0) -> Figure:
        """Draw the intervals of one response, ordered by its mean, with targets `y` (n, D) if given."""
        from ntk_laplace.plotting import prediction_intervals

        def column(values: Tensor) -> Any:
            return values.reshape(len(self.mean), -1)[:, response].cpu()

        targets = None if y is None else column(self._targets(y))
        return prediction_intervals(column(self.mean), column(self.lower), column(self.upper), targets, self.level)

    def _targets(self, y: Any) -> Tensor:
        read = read_columns(y, len(self.mean), len(self.counts), missing=True)
        return read.to(self.mean.device).view(self.mean.shape)

    def __repr__(self) -> str:
        widths = ", ".join(f"{float(w):.3g}" for w in self.width.reshape(len(self.mean), -1).median(0).values)
        trusted = self.reliability is None or self.reliability.trusted
        return (
            f"PredictionIntervals({len(self.mean)} inputs, {len(self.counts)} response(s); level {self.level:g}, "
            f"{self.method} with {self.score} scores of {int(self.counts.min())} points; median width {widths}"
            f"{'' if trusted else f'; {self.reliability}'})"
        )


def response_scale(likelihood: Likelihood, f: Tensor, variance: Tensor) -> Tensor:
    """Standard deviation of each response for f with these variances (m, C), through the linearized link, (m, D).

    Covariances between the outputs of one response are left out: a score may have any scale.
    """
    noise = likelihood.response_variance(f)
    if likelihood.additive_noise(f[:1]) is None:
        variance = (likelihood.mean_jacobian(f).square() @ variance.unsqueeze(-1)).squeeze(-1)
    return (variance + noise).sqrt()


def ends(mean: Tensor, scale: Tensor, scores: Tensor, kept: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Ends of jackknife+ intervals: the ⌈level (m + 1)⌉-th smallest mean_i + score_i scale_i, and its mirror image.

    The ends are (n, D). Mean and scale (n, N, D) are those of each response without each point; (n, 1, D) if they
    are the same for all points. The scores (N, D) are |y_i - mean_i| / scale_i at the points; of these, m are `kept`
    for each response.
    """
    lower, upper = [], []
    for one in range(scores.shape[1]):
        chosen = kept[:, one]
        rank, reach = rank_of(level, int(chosen.sum())), scores[chosen, one]
        if rank > len(reach):
            endless = mean.new_full((len(mean),), torch.inf)
            lower.append(-endless)
            upper.append(endless)
            continue
        center, width = (v[:, 0:1, one] if v.shape[1] == 1 else v[:, chosen, one] for v in (mean, scale))
        upper.append((center + reach * width).kthvalue(rank, 1).values)
        # the ⌊(1 - level)(m + 1)⌋-th smallest is the ⌈level (m + 1)⌉-th largest
        lower.append(-(reach * width - center).kthvalue(rank, 1).values)
    return torch.stack(lower, 1), torch.stack(upper, 1)
