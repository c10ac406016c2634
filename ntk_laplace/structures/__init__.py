"""Structures: what is kept of the training data so that every later question is algebra."""

from ntk_laplace.structures.accumulation import Accumulation
from ntk_laplace.structures.base import Settings, Structure, Trained
from ntk_laplace.structures.full import FullStructure
from ntk_laplace.structures.gp import FunctionSpaceStructure
from ntk_laplace.structures.records import resumed
from ntk_laplace.structures.structured import StructuredStructure

__all__ = [
    "Accumulation",
    "FullStructure",
    "FunctionSpaceStructure",
    "Settings",
    "Structure",
    "StructuredStructure",
    "Trained",
    "resumed",
]
