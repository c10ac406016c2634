"""Scores of an attribution method: how well it predicts retraining on other data.

Axes: M subsets of the training data used for retraining, N training points, n test points. Effects are changes of a
quantity at a test point if a training point is removed, as returned by `Posterior.removal_effects`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ntk_laplace.errors import DataError, NonFiniteError, is_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Score:
    """A score with its standard error.

    Attributes
    ----------
    value : float
    error : float
        Bootstrap standard error over the subsets.
    each : array, (n,)
        The score of each test point; `value` is their mean.
    """

    value: float
    error: float
    each: NDArray[np.float64]

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"


def additive(effects: ArrayLike, kept: ArrayLike) -> NDArray[np.float64]:
    """Additive prediction for subsets: the sum of effects over the points left out.

    Parameters
    ----------
    effects : array_like, (n, N)
        Change of the quantity if a training point is removed.
    kept : array_like of bool, (M, N)
        Which training points are in each subset.

    Returns
    -------
    array, (M, n)
    """
    effects, kept = _finite(effects, "effects"), np.asarray(kept, dtype=bool)
    if effects.ndim != 2 or kept.ndim != 2 or kept.shape[1] != effects.shape[1]:
        raise DataError("effects (n, N) and masks of subsets (M, N)", f"shapes {effects.shape} and {kept.shape}",
                        "Give every subset one boolean per training point.")
    return (~kept).astype(np.float64) @ effects.T


def datamodeling_score(
    predictions: ArrayLike, outcomes: ArrayLike, bootstrap: int = 200, seed: int = 0
) -> Score:
    """Linear datamodeling score: rank correlation, over subsets, of predicted and retrained outcomes.

    Parameters
    ----------
    predictions : array_like, (M, n)
        Predicted outcome of each test point after training on each subset: `additive` effects, or `predicted` with all
        points removed together. An increasing function of the outcome gives the same score.
    outcomes : array_like, (M, n) or (S, M, n)
        Outcomes after retraining; they are averaged over S random seeds.
    bootstrap : int
        Number of bootstrap samples for the standard error; 0 omits it (NaN).
    seed : int
        Random seed of the bootstrap.

    Returns
    -------
    Score
        Mean over test points of Spearman's correlation; a test point with constant predictions or outcomes counts as 0.

    Raises
    ------
    DataError, NonFiniteError
        If shapes do not match or numbers are not finite.
    """
    predictions, outcomes = _finite(predictions, "predictions"), _finite(outcomes, "outcomes")
    outcomes = outcomes.mean(0) if outcomes.ndim == 3 else outcomes
    if predictions.shape != outcomes.shape or predictions.ndim != 2 or len(predictions) < 3:
        raise DataError("predictions and outcomes of one shape (M, n), M at least 3",
                        f"{predictions.shape} and {outcomes.shape}", "Give one row per subset, one column per test "
                        "point.")
    each = _spearman(predictions, outcomes)
    generator, count = np.random.default_rng(seed), len(predictions)
    drawn = [generator.integers(0, count, count) for _ in range(bootstrap)]
    means = [_spearman(predictions[rows], outcomes[rows]).mean() for rows in drawn]
    return Score(float(each.mean()), float(np.std(means, ddof=1)) if bootstrap > 1 else float("nan"), each)


def seed_ceiling(outcomes: ArrayLike, bootstrap: int = 200, seed: int = 0) -> Score:
    """Score of retraining with another random seed, outcomes (S, M, n): the mean over pairs of seeds.

    With outcomes of one seed, a score near this ceiling cannot be distinguished from a perfect one.
    """
    outcomes = _finite(outcomes, "outcomes")
    if outcomes.ndim != 3 or len(outcomes) < 2:
        raise DataError("outcomes of at least two seeds, (S, M, n)", f"shape {outcomes.shape}",
                        "Retrain with seeds=(0, 1).")
    pairs = [(a, b) for a in range(len(outcomes)) for b in range(a)]
    found = [datamodeling_score(outcomes[a], outcomes[b], bootstrap, seed) for a, b in pairs]
    each = np.mean([score.each for score in found], 0)
    return Score(float(each.mean()), float(np.mean([score.error for score in found])), each)


@dataclass(frozen=True)
class Agreement:
    """Agreement of predicted changes with those of retraining.

    Attributes
    ----------
    correlation : float
        Pearson correlation.
    rank_correlation : float
        Spearman correlation.
    slope : float
        Slope of the least-squares line of truth on prediction through the origin: 1 if effects have the right size,
        above 1 if they are too small.
    """

    correlation: float
    rank_correlation: float
    slope: float

    def __str__(self) -> str:
        return f"r = {self.correlation:.3f}, rank {self.rank_correlation:.3f}, slope {self.slope:.2f}"


def leave_one_out_agreement(predictions: ArrayLike, truth: ArrayLike) -> Agreement:
    """Agreement of predicted changes with those of retraining, over all pairs of removed and test points.

    Parameters
    ----------
    predictions, truth : array_like, of one shape
        Changes of a quantity, after minus before.
    """
    x, y = _finite(predictions, "predictions").ravel(), _finite(truth, "truth").ravel()
    if x.shape != y.shape or len(x) < 3 or not (np.ptp(x) and np.ptp(y)):
        raise DataError("at least three predicted and true changes that are not all the same",
                        f"{len(x)} and {len(y)}", "Retrain without more points.")
    return Agreement(float(np.corrcoef(x, y)[0, 1]), float(np.corrcoef(_ranks(x), _ranks(y))[0, 1]),
                     float((x @ y) / (x @ x)))


def mislabel_auroc(suspicion: ArrayLike, wrong: ArrayLike) -> float:
    """Probability that a wrong label is more suspicious than a right one (area under the ROC curve).

    Parameters
    ----------
    suspicion : array_like, (N,)
        Such as `LeaveOneOut.suspicion`.
    wrong : array_like of bool, (N,)
    """
    from ntk_laplace.metrics import detection_auroc  # imports scikit-learn lazily

    suspicion, wrong = _suspects(suspicion, wrong)
    return detection_auroc(suspicion[~wrong], suspicion[wrong])


def mislabels_found(suspicion: ArrayLike, wrong: ArrayLike, shares: Sequence[float] = (0.1, 0.2, 0.4)) -> dict:
    """Fraction of all wrong labels found among the most suspicious examples, by fraction of the data inspected."""
    suspicion, wrong = _suspects(suspicion, wrong)
    shares = [shares] if is_number(shares) else list(shares)
    if not all(is_number(share) and 0 < share <= 1 for share in shares):
        raise DataError("shares of the data above 0, at most 1", f"{shares}", "Pass for example (0.1, 0.2).")
    order = np.argsort(-suspicion, kind="stable")
    return {share: float(wrong[order[: round(share * len(wrong))]].sum() / wrong.sum()) for share in shares}


@dataclass(frozen=True)
class RemovalCurve:
    """Outcomes as more and more training points are removed.

    Attributes
    ----------
    removed : array, (F,)
        Numbers of removed points.
    outcomes : dict of str to array, (F,)
        Outcomes by ranking.
    """

    removed: NDArray[np.int64]
    outcomes: dict[str, NDArray[np.float64]]

    def plot(self, label: str = "outcome") -> Figure:
        """Plot one line per ranking."""
        from ntk_laplace.plotting import removal_curves

        return removal_curves(self.removed, self.outcomes, label)


def removal_curve(
    train: Callable[[NDArray[np.int64]], float], rankings: dict[str, ArrayLike], removed: Sequence[int]
) -> RemovalCurve:
    """Retrain without the first points of each ranking.

    Parameters
    ----------
    train : callable
        Maps the indices of the kept training points to one number.
    rankings : dict of str to array_like, (N,)
        All training points in the order of removal.
    removed : sequence of int
        How many points to remove.
    """
    counts = np.atleast_1d(np.asarray(removed, dtype=np.int64))
    if counts.size == 0 or not rankings:
        raise DataError("at least one ranking and one number of points to remove",
                        f"{len(rankings)} and {counts.size}", "Pass for example removed=(0, 10, 20).")
    found = {}
    for name, order in rankings.items():
        order = np.asarray(order).astype(np.int64)
        if sorted(order.tolist()) != list(range(len(order))) or counts.min() < 0 or counts.max() >= len(order):
            raise DataError("rankings with every training point once, and fewer points to remove",
                            f"{len(order)} entries in {name!r}, {counts.max()} to remove",
                            "Pass for example effects.argsort().")
        found[name] = np.array([float(train(np.sort(order[count:]))) for count in counts])
    return RemovalCurve(counts, found)


# --- private


def _spearman(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Spearman correlation of each column; 0 if a column is constant."""
    a, b = _ranks(first), _ranks(second)
    a, b = a - a.mean(0), b - b.mean(0)
    scale = np.sqrt((a**2).sum(0) * (b**2).sum(0))
    return np.divide((a * b).sum(0), scale, out=np.zeros_like(scale), where=scale > 0)


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    from scipy.stats import rankdata  # the import changes warning filters and random state

    return rankdata(values, axis=0)


def _finite(values: ArrayLike, what: str) -> NDArray[np.float64]:
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what} as an array of numbers", f"{values!r}"[:80], "Pass a NumPy array.") from error
    if not np.isfinite(found).all():
        raise NonFiniteError(f"finite {what}", f"{int((~np.isfinite(found)).sum())} that are not",
                             "Look for training runs that diverged.")
    return found


def _suspects(suspicion: ArrayLike, wrong: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    suspicion, wrong = _finite(suspicion, "suspicions"), np.asarray(wrong, dtype=bool)
    if suspicion.shape != wrong.shape or suspicion.ndim != 1 or wrong.all() or not wrong.any():
        raise DataError("one suspicion per training point, some labels wrong and some right",
                        f"shapes {suspicion.shape} and {wrong.shape}, {int(wrong.sum())} wrong",
                        "Pass a mask of booleans, true where a label is wrong.")
    return suspicion, wrong
