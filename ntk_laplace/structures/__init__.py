"""Structures: what is kept of the training data so that every later question is algebra."""

from ntk_laplace.curvature import FORMS
from ntk_laplace.structures.accumulation import Accumulation
from ntk_laplace.structures.base import Settings, Structure, Trained
from ntk_laplace.structures.changed import ChangedStructure, rows_of
from ntk_laplace.structures.coalescing import coalesced
from ntk_laplace.structures.full import FullStructure
from ntk_laplace.structures.gp import FunctionSpaceStructure
from ntk_laplace.structures.records import opened, require_place, resumed, write
from ntk_laplace.structures.saving import posterior_record
from ntk_laplace.structures.structured import StructuredStructure

RESTORE = {
    "gp": FunctionSpaceStructure.restored,
    "full": FullStructure.restored,
} | {name: StructuredStructure.restored for name in FORMS}

__all__ = [
    "RESTORE",
    "Accumulation",
    "ChangedStructure",
    "FullStructure",
    "FunctionSpaceStructure",
    "Settings",
    "Structure",
    "StructuredStructure",
    "Trained",
    "coalesced",
    "opened",
    "posterior_record",
    "require_place",
    "resumed",
    "rows_of",
    "write",
]
