"""Curvature: the posterior's algebra, in function space and in weight space, behind the same verbs."""

from ntk_laplace.curvature.full import FullWeightSpace, accumulate_ggn
from ntk_laplace.curvature.function_space import FunctionSpace, prior_variances
from ntk_laplace.curvature.roots import CURVATURES, Root

__all__ = ["CURVATURES", "FullWeightSpace", "FunctionSpace", "Root", "accumulate_ggn", "prior_variances"]
