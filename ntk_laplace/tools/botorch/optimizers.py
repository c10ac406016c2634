"""Training of a network on few data: descent of the negative log joint over all of them, in units of the prior."""

from __future__ import annotations

import torch
from torch import Tensor

from ntk_laplace.jacobian.differentiable import DifferentiableRows
from ntk_laplace.model.data import Inputs
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.network import Network
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime import tuning

_DAMPING, _LEAST_DAMPING, _MOST_DAMPING = 1e-2, 1e-6, 1e8  # of the prior precision
_DECREASE = 1e-5  # nats: a step that gains less is the last


def _units(network: Network, prior: GaussianPrior) -> tuple[Tensor, Tensor, Tensor]:
    """μ0, P0^-½ and u = P0^½ (θ - μ0) at the network's weights."""
    with torch.no_grad():
        mean, scale = prior.flat_mean().to(network.device), prior.flat_precision().rsqrt().to(network.device)
        return mean, scale, (network.theta - mean) / scale


def lbfgs(network: Network, x: Inputs, y: Tensor, likelihood: Likelihood, prior: GaussianPrior, steps: int) -> None:
    """Move the network towards an optimum of the log joint by L-BFGS."""
    mean, scale, start = _units(network, prior)
    u = start.requires_grad_()
    optimizer = torch.optim.LBFGS([u], max_iter=steps, max_eval=2 * steps, history_size=tuning.LBFGS_PAIRS,
                                  tolerance_grad=1e-6, tolerance_change=1e-9, line_search_fn="strong_wolfe")

    def negative_log_joint() -> Tensor:
        optimizer.zero_grad()
        theta = (mean + scale * u).to(network.dtype)
        f = network.evaluate_at(network.unflatten(theta), x).to(u.dtype)
        value = 0.5 * u.square().sum() - likelihood.log_prob(f, y.to(f)).sum()
        value.backward(inputs=[u])
        return value.detach()

    optimizer.step(negative_log_joint)
    network.move_to((mean + scale * u).detach())


@torch.no_grad()
def gauss_newton(
    network: Network, x: Inputs, y: Tensor, likelihood: Likelihood, prior: GaussianPrior, steps: int
) -> None:
    """Move the network towards an optimum of the log joint by damped Gauss-Newton steps (Levenberg, Marquardt).

    With A = Sᵀ J P0^-½ a step solves ((1 + λ) I + AᵀA) Δu = -g by the n m equations of (1 + λ) I + A Aᵀ. The damping λ
    falls after a step that lowers the negative log joint; any other is not taken, and λ rises.
    """
    mean, scale, u = _units(network, prior)
    rows = DifferentiableRows(network, u.dtype)

    def at(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        network.move_to(mean + scale * u)
        f, jac = rows(x)
        return 0.5 * u.square().sum() - likelihood.log_prob(f.detach(), y.to(f)).sum(), f.detach(), jac.detach() * scale

    value, f, jac = at(u)
    damping = _DAMPING
    for _ in range(steps):
        gradient = u - jac.flatten(0, 1).mT @ likelihood.residual(f, y.to(f)).flatten()
        whitened = (likelihood.root(f, y.to(f)).mT @ jac).flatten(0, 1)
        size = 1.0 + damping
        gram = whitened @ whitened.mT
        gram.diagonal().add_(size)
        along = torch.cholesky_solve((whitened @ gradient).unsqueeze(-1), torch.linalg.cholesky(gram)).squeeze(-1)
        tried = u - (gradient - whitened.mT @ along) / size
        found = at(tried)
        decrease = float(value - found[0])
        if decrease > 0:
            u, (value, f, jac) = tried, found
        damping = min(max(damping / 5 if decrease > 0 else damping * 6, _LEAST_DAMPING), _MOST_DAMPING)
        if 0 <= decrease < _DECREASE:
            break
    network.move_to(mean + scale * u)
