"""Curvature: the posterior's algebra, in function space and in weight space, behind the same verbs."""

from ntk_laplace.curvature.changed import ChangedWeightSpace
from ntk_laplace.curvature.specifications import EKFAC, STRUCTURE_SPECS, INF, KFAC, Diagonal, StructureSpec
from ntk_laplace.curvature.eigenbases import Eigenbasis, FactorEigen
from ntk_laplace.curvature.full import FullWeightSpace, accumulate_ggn
from ntk_laplace.curvature.function_space import FunctionSpace, prior_variances
from ntk_laplace.curvature.inf import LowRank
from ntk_laplace.curvature.parameter_blocks import ParameterBlock, find_parameter_blocks, diagonal_block
from ntk_laplace.curvature.curvature_type import CURVATURES, CurvatureType
from ntk_laplace.curvature.structured import StructuredWeightSpace, group_numbers
from ntk_laplace.curvature.block_summary import Products, Summary

__all__ = [
    "CURVATURES",
    "EKFAC",
    "STRUCTURE_SPECS",
    "INF",
    "KFAC",
    "ChangedWeightSpace",
    "Diagonal",
    "StructureSpec",
    "Eigenbasis",
    "FullWeightSpace",
    "FunctionSpace",
    "LowRank",
    "ParameterBlock",
    "Products",
    "CurvatureType",
    "FactorEigen",
    "StructuredWeightSpace",
    "Summary",
    "accumulate_ggn",
    "find_parameter_blocks",
    "group_numbers",
    "diagonal_block",
    "prior_variances",
]
