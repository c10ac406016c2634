"""Jacobian rows of a network, computed in one pass over the data and stored in structured blocks."""

from ntk_laplace.jacobian.blocks import Block, Dense, LayerRows, Lookup, Outer
from ntk_laplace.jacobian.fast import FusedLayer, FusedLayers, FusedSums, Products
from ntk_laplace.jacobian.jacobian import Jacobian, grouped, placed
from ntk_laplace.jacobian.passes import JacobianPass
from ntk_laplace.jacobian.rules import Extractor, Use, register_rule

__all__ = [
    "Block",
    "Dense",
    "Extractor",
    "FusedLayer",
    "FusedLayers",
    "FusedSums",
    "Jacobian",
    "JacobianPass",
    "LayerRows",
    "Lookup",
    "Outer",
    "Products",
    "Use",
    "grouped",
    "placed",
    "register_rule",
]
