"""Factors: one pass over data turns a network into rows of its Jacobian, in blocks that keep their structure."""

from ntk_laplace.factors.blocks import Dense, Lookup, Outer
from ntk_laplace.factors.folding import NO_FOLD, Fold, Folded, Layer
from ntk_laplace.factors.passes import FactorPass, Seeds
from ntk_laplace.factors.records import rows_from, rows_record
from ntk_laplace.factors.rows import Rows

__all__ = [
    "NO_FOLD", "Dense", "FactorPass", "Fold", "Folded", "Layer", "Lookup", "Outer", "Rows", "Seeds", "rows_from",
    "rows_record",
]  # fmt: skip
