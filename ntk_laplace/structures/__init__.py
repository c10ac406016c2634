"""Structures: what is kept of the training data so that every later question is algebra."""

from ntk_laplace.structures.base import Settings, Structure, Trained
from ntk_laplace.structures.full import FullStructure
from ntk_laplace.structures.gp import FunctionSpaceStructure

__all__ = ["FullStructure", "FunctionSpaceStructure", "Settings", "Structure", "Trained"]
