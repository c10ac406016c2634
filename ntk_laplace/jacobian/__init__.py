"""Factors: one pass over data turns a network into rows of its Jacobian, in blocks that keep their structure."""

from ntk_laplace.jacobian.blocks import Dense, Lookup, Outer
from ntk_laplace.jacobian.fused import NO_FUSED_LAYERS, FusedLayer, FusedLayers, FusedSums
from ntk_laplace.jacobian.jacobian import Jacobian
from ntk_laplace.jacobian.passes import JacobianPass, RootFunction
from ntk_laplace.jacobian.serialization import jacobian_from_record, jacobian_record

__all__ = [
    "NO_FUSED_LAYERS",
    "Dense",
    "FusedLayer",
    "FusedLayers",
    "FusedSums",
    "Jacobian",
    "JacobianPass",
    "Lookup",
    "Outer",
    "RootFunction",
    "jacobian_from_record",
    "jacobian_record",
]  # fmt: skip
