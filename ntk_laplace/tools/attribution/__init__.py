"""Evaluation of data attribution: scores of training points compared with retraining without them."""

from ntk_laplace.tools.attribution.adapter import Attributor, predicted
from ntk_laplace.tools.attribution.retraining import random_halves, retrain, without_each_in_turn
from ntk_laplace.tools.attribution.scores import (
    Agreement,
    RemovalCurve,
    Score,
    additive,
    datamodeling_score,
    leave_one_out_agreement,
    mislabel_auroc,
    mislabels_found,
    removal_curve,
    seed_ceiling,
)

__all__ = [
    "Agreement",
    "Attributor",
    "RemovalCurve",
    "Score",
    "additive",
    "datamodeling_score",
    "leave_one_out_agreement",
    "mislabel_auroc",
    "mislabels_found",
    "predicted",
    "random_halves",
    "removal_curve",
    "retrain",
    "seed_ceiling",
    "without_each_in_turn",
]
