"""Fitting a calibration: mean log densities of left-out or held-out points, as a function of a few numbers."""

from ntk_laplace.posterior.calibrate.densities import LeftOut, densities
from ntk_laplace.posterior.calibrate.linear_refit import with_left_out_hyperparameters
from ntk_laplace.posterior.calibrate.result import PredictiveFit
from ntk_laplace.posterior.calibrate.search import fit_calibration, log_density_terms

__all__ = [
    "LeftOut",
    "PredictiveFit",
    "densities",
    "fit_calibration",
    "log_density_terms",
    "with_left_out_hyperparameters",
]
