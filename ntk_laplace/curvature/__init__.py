"""Linear algebra of the posterior, in function space and in weight space, with a common interface."""

from ntk_laplace.curvature.block_summary import Products, Summary
from ntk_laplace.curvature.changed import ChangedWeightSpace
from ntk_laplace.curvature.curvature_type import CURVATURES, CurvatureType
from ntk_laplace.curvature.eigenbases import Eigenbasis, FactorEigen
from ntk_laplace.curvature.full import FullWeightSpace, accumulate_ggn
from ntk_laplace.curvature.function_space import FunctionSpace, prior_variances
from ntk_laplace.curvature.inf import LowRank
from ntk_laplace.curvature.parameter_blocks import ParameterBlock, diagonal_block, find_parameter_blocks
from ntk_laplace.curvature.specifications import EKFAC, INF, KFAC, STRUCTURE_SPECS, Diagonal, StructureSpec
from ntk_laplace.curvature.structured import StructuredWeightSpace, group_numbers

__all__ = [
    "CURVATURES",
    "EKFAC",
    "INF",
    "KFAC",
    "STRUCTURE_SPECS",
    "ChangedWeightSpace",
    "CurvatureType",
    "Diagonal",
    "Eigenbasis",
    "FactorEigen",
    "FullWeightSpace",
    "FunctionSpace",
    "LowRank",
    "ParameterBlock",
    "Products",
    "StructureSpec",
    "StructuredWeightSpace",
    "Summary",
    "accumulate_ggn",
    "diagonal_block",
    "find_parameter_blocks",
    "group_numbers",
    "prior_variances",
]
