"""Hyperparameters: prior precisions, noise and temperature that maximize the evidence at fixed weights."""

from ntk_laplace.posterior.hyperparameters.ascent import Ascent
from ntk_laplace.posterior.hyperparameters.history import HyperparameterHistory
from ntk_laplace.posterior.hyperparameters.maximize import METHODS, maximize
from ntk_laplace.posterior.hyperparameters.objectives import Evidence, SpectralEvidence
from ntk_laplace.posterior.hyperparameters.variables import Variables

__all__ = ["METHODS", "Ascent", "Evidence", "HyperparameterHistory", "SpectralEvidence", "Variables", "maximize"]
