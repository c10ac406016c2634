"""All plots, as matplotlib figures, without pyplot, global state or import side effects.

Functions take arrays, or a result of the library, and return a `Figure`, which `png` converts to bytes. Every
difference in color is also a difference in shape or position. The `plot` methods of results call these functions.
"""

from ntk_laplace.plotting.calibration import confidence_histograms, coverage_diagram, reliability_diagram
from ntk_laplace.plotting.curves import learning_curve, removal_curves
from ntk_laplace.plotting.estimates import approximation_errors
from ntk_laplace.plotting.explanations import explanation
from ntk_laplace.plotting.histories import hyperparameter_history, training_history, variational_history
from ntk_laplace.plotting.images import ImageExplanation, image_explanations
from ntk_laplace.plotting.predictions import Panel, prediction_intervals, predictive_1d, predictive_2d
from ntk_laplace.plotting.reranking import reranking
from ntk_laplace.plotting.selection import evidence_comparison, model_ranking, selection_curves
from ntk_laplace.plotting.source_effects import source_effects
from ntk_laplace.plotting.style import BLUE, GREEN, GREY, ORANGE, SERIES, VERMILION, png

__all__ = [
    "BLUE",
    "GREEN",
    "GREY",
    "ORANGE",
    "SERIES",
    "VERMILION",
    "ImageExplanation",
    "Panel",
    "approximation_errors",
    "confidence_histograms",
    "coverage_diagram",
    "evidence_comparison",
    "explanation",
    "hyperparameter_history",
    "image_explanations",
    "learning_curve",
    "model_ranking",
    "png",
    "prediction_intervals",
    "predictive_1d",
    "predictive_2d",
    "reliability_diagram",
    "removal_curves",
    "reranking",
    "selection_curves",
    "source_effects",
    "training_history",
    "variational_history",
]
