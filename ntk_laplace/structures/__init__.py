"""Structures: how the posterior precision is stored, and what is kept of the training data."""

# the order of registration is that of names in messages and tables
# isort: off
from ntk_laplace.structures.function_space import FunctionSpace, FunctionSpaceStructure
from ntk_laplace.structures.full import FullWeightSpace
from ntk_laplace.structures.sketch_specifications import Iterative, Nystrom, compressed
from ntk_laplace.structures.block_specifications import EKFAC, INF, KFAC, Diagonal
from ntk_laplace.structures.gaussian import GivenGaussian
# isort: on

from ntk_laplace.structures.auto import Auto
from ntk_laplace.structures.batch_merging import merged_batches
from ntk_laplace.structures.block_spec import BlockBasis
from ntk_laplace.structures.fitted_model import FittedModel
from ntk_laplace.structures.model import LinearizedModel, Settings
from ntk_laplace.structures.products import CurvatureProducts
from ntk_laplace.structures.registry import (
    REGISTERED,
    register_structure,
    require_name,
    structure_named,
    structure_names,
    structure_of,
)
from ntk_laplace.structures.structure import Saved, Structure, StructureSpec
from ntk_laplace.structures.summed import SummedSpec

__all__ = [
    "EKFAC",
    "INF",
    "KFAC",
    "REGISTERED",
    "Auto",
    "BlockBasis",
    "CurvatureProducts",
    "Diagonal",
    "FittedModel",
    "FullWeightSpace",
    "FunctionSpace",
    "FunctionSpaceStructure",
    "GivenGaussian",
    "Iterative",
    "LinearizedModel",
    "Nystrom",
    "Saved",
    "Settings",
    "Structure",
    "StructureSpec",
    "SummedSpec",
    "compressed",
    "merged_batches",
    "register_structure",
    "require_name",
    "structure_named",
    "structure_names",
    "structure_of",
]
