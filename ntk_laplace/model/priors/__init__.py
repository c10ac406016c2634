"""Gaussian priors over the weights: a precision per group of parameters, and a mean."""

from __future__ import annotations

from ntk_laplace.model.priors.gaussian import GaussianPrior

__all__ = ["GaussianPrior"]
