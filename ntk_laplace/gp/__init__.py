"""GPyTorch interface: the network's tangent kernel and its Laplace posterior as GPyTorch objects."""

from ntk_laplace.gp.kernel import NTKKernel
from ntk_laplace.gp.model import LaplaceGP

__all__ = ["LaplaceGP", "NTKKernel"]
