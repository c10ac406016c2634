"""Linear algebra of the posterior, in function space and in weight space, with a common interface."""

from ntk_laplace.curvature.block_summary import Products, Summary
from ntk_laplace.curvature.curvature_type import CurvatureType, Draws
from ntk_laplace.curvature.distributed_function_space import DistributedFunctionSpacePrecision
from ntk_laplace.curvature.eigenbases import Eigenbasis, FactorEigen
from ntk_laplace.curvature.full import FullPrecision, accumulate_ggn
from ntk_laplace.curvature.function_space import FunctionSpacePrecision
from ntk_laplace.curvature.given import GivenPrecision
from ntk_laplace.curvature.given_forms import given_precision
from ntk_laplace.curvature.inf import LowRank
from ntk_laplace.curvature.last_layer import LastLayerPrecision, last_layer
from ntk_laplace.curvature.log_det_terms import LogDetTerm, joined
from ntk_laplace.curvature.parameter_blocks import ParameterBlock, diagonal_block, find_parameter_blocks
from ntk_laplace.curvature.posterior_precision import CrossCovariance, PosteriorPrecision
from ntk_laplace.curvature.structured import BlockDiagonalPrecision, BlockPrecision

__all__ = [
    "BlockDiagonalPrecision",
    "BlockPrecision",
    "CrossCovariance",
    "CurvatureType",
    "DistributedFunctionSpacePrecision",
    "Draws",
    "Eigenbasis",
    "FactorEigen",
    "FullPrecision",
    "FunctionSpacePrecision",
    "GivenPrecision",
    "LastLayerPrecision",
    "LogDetTerm",
    "LowRank",
    "ParameterBlock",
    "PosteriorPrecision",
    "Products",
    "Summary",
    "accumulate_ggn",
    "diagonal_block",
    "find_parameter_blocks",
    "given_precision",
    "joined",
    "last_layer",
]
