"""What-ifs: the posterior that other training data would have given, without retraining."""

from ntk_laplace.structures.what_if.changed_precision import HIGH_LEVERAGE, ChangedPrecision
from ntk_laplace.structures.what_if.changed_structure import rows_of
from ntk_laplace.structures.what_if.changes import (
    Indices,
    drawn,
    positions,
    relabeled,
    require_left,
    require_steps,
    reweighted,
)
from ntk_laplace.structures.what_if.groups import Groups
from ntk_laplace.structures.what_if.moving import at_minimum, moved, own_minimum, tell_unreached
from ntk_laplace.structures.what_if.newton import refitted
from ntk_laplace.structures.what_if.relinearize import relinearized
from ntk_laplace.structures.what_if.steps import at_optimum, stepped, stepped_once

__all__ = [
    "HIGH_LEVERAGE",
    "ChangedPrecision",
    "Groups",
    "Indices",
    "at_minimum",
    "at_optimum",
    "drawn",
    "moved",
    "own_minimum",
    "positions",
    "refitted",
    "relabeled",
    "relinearized",
    "require_left",
    "require_steps",
    "reweighted",
    "rows_of",
    "stepped",
    "stepped_once",
    "tell_unreached",
]
