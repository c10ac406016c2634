"""Plots of predictions as matplotlib figures, without pyplot, global state or import side effects.

Functions take arrays and return a `Figure`, which `png` converts to bytes. Every difference in color is also a
difference in shape or position.
"""

from ntk_laplace.plotting.calibration import confidence_histograms, coverage_diagram, reliability_diagram
from ntk_laplace.plotting.images import ImageExplanation, image_explanations
from ntk_laplace.plotting.predictions import Panel, predictive_1d, predictive_2d
from ntk_laplace.plotting.selection import evidence_comparison, model_ranking, selection_curves
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
    "confidence_histograms",
    "coverage_diagram",
    "evidence_comparison",
    "image_explanations",
    "model_ranking",
    "png",
    "predictive_1d",
    "predictive_2d",
    "reliability_diagram",
    "selection_curves",
]
