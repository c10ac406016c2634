"""Jacobian rows of a network, computed in one pass over the data and stored in structured blocks."""

from ntk_laplace.jacobian.blocks import Block, Dense, LayerRows, Lookup, Outer
from ntk_laplace.jacobian.fast import NO_FUSED_LAYERS, FusedLayer, FusedLayers, FusedSums, Products
from ntk_laplace.jacobian.jacobian import Jacobian, grouped, placed
from ntk_laplace.jacobian.passes import JacobianPass, RootFunction
from ntk_laplace.jacobian.rules import Extractor, Use, register_rule

__all__ = [
    "NO_FUSED_LAYERS",
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
    "RootFunction",
    "Use",
    "grouped",
    "placed",
    "register_rule",
]
