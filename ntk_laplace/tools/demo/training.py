"""Training to the MAP: the objective that the Laplace approximation expands, until its gradient is negligible."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.priors import GaussianPrior

__all__ = ["Training", "negative_log_joint", "train_map"]


@dataclass(frozen=True)
class Training:
    """The outcome of a training.

    Attributes
    ----------
    loss : float
        Negative log joint at the end, in nats.
    gradient_norm : float
        Euclidean norm of its gradient in the weights; zero at a MAP.
    evaluations : int
        Forward and backward passes over the data.
    seconds : float
        Wall time.
    """

    loss: float
    gradient_norm: float
    evaluations: int
    seconds: float


def negative_log_joint(
    network: nn.Module, x: Tensor, targets: Tensor, likelihood: Likelihood, prior: GaussianPrior
) -> Tensor:
    """Minus the log likelihood, summed over the data, plus the prior's energy: the loss with weight decay.

    ``-Σ log p(y_n given f_n) + ½ (θ-μ0)ᵀ P0 (θ-μ0)``: minus the log joint up to the prior's normalization, which
    does not depend on the weights. `targets` are in canonical form, ``likelihood.targets(y, N, C)``.
    """
    outputs = network(x)
    f = outputs.unsqueeze(1) if outputs.ndim == 1 else outputs
    theta = torch.cat([parameter.flatten() for parameter in network.parameters()])
    return prior.energy(theta) - likelihood.log_prob(f, targets).sum()


def train_map(
    network: nn.Module,
    data: tuple[Tensor, Tensor],
    likelihood: Likelihood,
    prior: GaussianPrior,
    tolerance: float = 1e-4,
    max_evaluations: int = 3000,
    report: Callable[[float], None] | None = None,
) -> Training:
    """Train a float64 network in place by full-batch L-BFGS until the gradient is negligible.

    Parameters
    ----------
    network : nn.Module
        Its current weights are the starting point.
    data : (Tensor, Tensor)
        All inputs and targets.
    likelihood, prior
        With fixed hyperparameters.
    tolerance : float
        Stop at this Euclidean norm of the gradient of the summed loss.
    max_evaluations : int
        Stop at the latest after about this many passes over the data.
    report : callable, optional
        Called with the gradient's norm from time to time.

    Returns
    -------
    Training
    """
    x, y = data
    with torch.no_grad():
        outputs = network(x)
    n, c = len(outputs), outputs[0].numel()
    likelihood.bind(n, c)
    prior.bind({name: parameter.shape for name, parameter in network.named_parameters()})
    targets = likelihood.targets(y, n, c)
    parameters = list(network.parameters())
    begin, evaluations = time.perf_counter(), 0

    def closure() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        loss = negative_log_joint(network, x, targets, likelihood, prior)
        # not backward(), which would also fill the gradients of the hyperparameters
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        return loss.detach()

    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=50,
        history_size=60,
        # infinity norm, at most the Euclidean norm, which is tested below
        tolerance_grad=tolerance / len(targets) ** 0.5,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
    with _one_thread():
        loss, norm, falling = float(closure()), _norm(parameters), True
        while norm > tolerance and evaluations < max_evaluations and falling:
            optimizer.step(closure)
            before, loss = loss, float(closure())
            norm = _norm(parameters)
            # below this the line search compares rounding errors
            falling = before - loss > 1e-13 * abs(loss)
            if report is not None:
                report(norm)
    for parameter in parameters:
        parameter.grad = None
    return Training(loss, norm, evaluations, time.perf_counter() - begin)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread, which is faster for networks this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _norm(parameters: list[nn.Parameter]) -> float:
    return float(torch.cat([parameter.grad.flatten() for parameter in parameters]).norm())
