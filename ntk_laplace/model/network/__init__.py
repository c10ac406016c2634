"""The frozen network: a private copy of the caller's module, the choice of parameters, and checks before use.

The caller's module is read once and never changed. All other code works on the copy.
"""

from ntk_laplace.model.network.caller import Caller
from ntk_laplace.model.network.choice import ParameterChoice
from ntk_laplace.model.network.copying import private_copy, require_module
from ntk_laplace.model.network.frozen import Network, preserved_rng, seeded_rng
from ntk_laplace.model.network.many import ManyWeights, twice_differentiable
from ntk_laplace.model.network.precision import outside_autocast

__all__ = [
    "Caller",
    "ManyWeights",
    "Network",
    "ParameterChoice",
    "outside_autocast",
    "preserved_rng",
    "private_copy",
    "require_module",
    "seeded_rng",
    "twice_differentiable",
]
