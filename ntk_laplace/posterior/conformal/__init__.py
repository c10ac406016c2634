"""Intervals and sets from left-out points: jackknife+ from closed-form leave-one-out, and split conformal."""

from ntk_laplace.posterior.conformal.intervals import INTERVAL_SCORES, PredictionIntervals, ends, response_scale
from ntk_laplace.posterior.conformal.labels import (
    SET_SCORES,
    PredictionSets,
    class_probabilities,
    hard_labels,
    label_scores,
    members,
    require_classes,
)
from ntk_laplace.posterior.conformal.left_out import WithoutEach
from ntk_laplace.posterior.conformal.quantiles import checked_level, rank_of, too_few, words_of

__all__ = [
    "INTERVAL_SCORES",
    "SET_SCORES",
    "PredictionIntervals",
    "PredictionSets",
    "WithoutEach",
    "checked_level",
    "class_probabilities",
    "ends",
    "hard_labels",
    "label_scores",
    "members",
    "rank_of",
    "require_classes",
    "response_scale",
    "too_few",
    "words_of",
]
