"""The frozen network: a private copy of the caller's module, the choice of parameters, and checks before use.

The caller's module is read once and never changed. All other code works on the copy.
"""

from ntk_laplace.model.network.caller import Caller, channels_fit
from ntk_laplace.model.network.choice import ParameterChoice
from ntk_laplace.model.network.copying import private_copy, require_module
from ntk_laplace.model.network.fourier_features import FourierFeatures
from ntk_laplace.model.network.frozen import Network
from ntk_laplace.model.network.many import ManyWeights, twice_differentiable
from ntk_laplace.model.network.piecewise_linear import PiecewiseLinearFeatures
from ntk_laplace.model.network.precision import outside_autocast
from ntk_laplace.model.network.probing import independent_of_batches, probe
from ntk_laplace.model.network.readings import autograd_nodes
from ntk_laplace.model.network.smooth_clipping import SmoothClipping
from ntk_laplace.model.network.variation import linear_at, linearized, varying

__all__ = [
    "Caller",
    "FourierFeatures",
    "ManyWeights",
    "Network",
    "ParameterChoice",
    "PiecewiseLinearFeatures",
    "SmoothClipping",
    "autograd_nodes",
    "channels_fit",
    "independent_of_batches",
    "linear_at",
    "linearized",
    "outside_autocast",
    "private_copy",
    "probe",
    "require_module",
    "twice_differentiable",
    "varying",
]
