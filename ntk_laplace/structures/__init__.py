"""Structures: how the posterior precision is stored, and what is kept of the training data."""

from ntk_laplace.curvature import STRUCTURE_SPECS
from ntk_laplace.structures.accumulation import Accumulation
from ntk_laplace.structures.base import LinearizedModel, Settings, Structure
from ntk_laplace.structures.batch_merging import merged_batches
from ntk_laplace.structures.changed import ChangedStructure, rows_of
from ntk_laplace.structures.full import FullStructure
from ntk_laplace.structures.gp import FunctionSpaceStructure
from ntk_laplace.structures.records import opened, require_place, resumed, write
from ntk_laplace.structures.saving import posterior_record
from ntk_laplace.structures.structured import StructuredStructure

RESTORE = {
    "gp": FunctionSpaceStructure.restored,
    "full": FullStructure.restored,
} | {name: StructuredStructure.restored for name in STRUCTURE_SPECS}

__all__ = [
    "RESTORE",
    "Accumulation",
    "ChangedStructure",
    "FullStructure",
    "FunctionSpaceStructure",
    "LinearizedModel",
    "Settings",
    "Structure",
    "StructuredStructure",
    "merged_batches",
    "opened",
    "posterior_record",
    "require_place",
    "resumed",
    "rows_of",
    "write",
]
