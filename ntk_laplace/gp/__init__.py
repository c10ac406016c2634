"""GPyTorch interface: tangent kernel and Laplace posterior as GPyTorch objects, and the conditional evidence."""

import warnings

with warnings.catch_warnings():  # here gpytorch is first imported; its linear_operator scripts functions
    warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated")
    from ntk_laplace.gp.conditional import ConditionalMarginalLogLikelihood
    from ntk_laplace.gp.kernel import NTKKernel
    from ntk_laplace.gp.model import LaplaceGP

__all__ = ["ConditionalMarginalLogLikelihood", "LaplaceGP", "NTKKernel"]
