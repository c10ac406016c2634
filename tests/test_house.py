"""The order of the rooms: data flow from network to explanation, and imports only point backwards.

Read from the source with ``ast``, so a function-level import counts as well.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ntk_laplace"

# Each line is a room, or rooms that know nothing of each other; a room may import from earlier lines alone.
HOUSE = [
    ["errors"],
    ["linalg", "resources", "progress", "meter"],
    ["data"],
    ["network"],
    ["likelihoods", "priors"],
    ["predictive", "factors"],
    ["contractions"],
    ["gram"],
    ["curvature"],
    ["evidence"],
    ["structures"],
    ["explain", "hyperparameters", "selection"],
    ["posterior"],
    ["fit", "ntk", "checkpoint"],
    ["gp", "training"],
    ["metrics"],
    ["plotting", "report"],
    ["comparison", "explorer", "attribution"],
