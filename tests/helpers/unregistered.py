"""The structure of outside_structure.py without its registration: other tests go through all registered structures."""

from outside_structure import Eigen, EigenPrecision, build

import ntk_laplace as ntkl

__all__ = ["Eigen", "EigenPrecision", "build"]

ntkl.structures.REGISTERED.pop("eigh", None)
