"""GPyTorch interface: tangent kernel and Laplace posterior as GPyTorch objects, and the conditional evidence."""

from ntk_laplace.gp.conditional import ConditionalMarginalLogLikelihood
from ntk_laplace.gp.kernel import NTKKernel
from ntk_laplace.gp.model import LaplaceGP

__all__ = ["ConditionalMarginalLogLikelihood", "LaplaceGP", "NTKKernel"]
