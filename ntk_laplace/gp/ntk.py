"""The empirical neural tangent kernel of a network as a dense matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ntk_laplace.jacobian import JacobianPass
from ntk_laplace.jacobian.gram import gram
from ntk_laplace.model.data import Inputs, as_tensors, to_device
from ntk_laplace.model.network import Network, ParameterChoice, outside_autocast
from ntk_laplace.model.priors import GaussianPrior


def empirical_ntk(
    network: nn.Module, x1: Inputs, x2: Inputs | None = None, prior: GaussianPrior | None = None,
    parameters: ParameterChoice = None, dtype: torch.dtype | None = None, output: str | int | None = None,
) -> Tensor:
    """Finite-width NTK, K = J(x1) P0⁻¹ J(x2)ᵀ.

    Parameters
    ----------
    network : nn.Module
        Maps (N, ...) to (N, C) or (N,); does not change.
    x1, x2 : tensor, tuple or dict of tensors
        N1 and N2 inputs. Without `x2` the result is K(x1, x1), of which only half is computed.
    prior : GaussianPrior, optional
        By default precision 1: the plain NTK, J Jᵀ.
    parameters, output : optional
        As in `laplace`.
    dtype : torch.dtype, optional
        Dtype of the Jacobians and the result; the network's by default.

    Returns
    -------
    Tensor, (N1*C, N2*C)
        Interleaved: row n*C + c.
    """
    frozen = Network(network, parameters, output)
    prior = GaussianPrior.of(prior).bind(frozen.shapes)
    jacobian_pass = JacobianPass(frozen, frozen.dtype if dtype is None else dtype)
    left = jacobian_pass.rows(to_device(as_tensors(x1), frozen.device, frozen.input_dtype))
    right = None if x2 is None else jacobian_pass.rows(to_device(as_tensors(x2), frozen.device, frozen.input_dtype))
    with outside_autocast():
        return gram(left, prior.variances(), right)
