"""Many tanh networks retrained at once, each without one training point, by damped Gauss-Newton steps.

Algebra of its own, nothing of the library: steps in the function space of the training points, whose Gram matrix comes
from each layer's inputs and output gradients. It stands for what retraining does, to put leave-one-out to the test.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["retrained"]

_HALVINGS = 25


class _Networks:
    """K networks of one architecture; `theta` (K, P) in the order of ``module.parameters()``."""

    def __init__(self, module: nn.Sequential, count: int) -> None:
        self.shapes = [layer.weight.shape for layer in module if isinstance(layer, nn.Linear)]
        self.theta = nn.utils.parameters_to_vector(module.parameters()).detach().repeat(count, 1)

    def layers(self, theta: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Weights (K, out, in) and biases (K, out) of each layer."""
        found, start = [], 0
        for out, width in self.shapes:
            weight = theta[:, start : start + out * width].view(-1, out, width)
            start += out * width
            found.append((weight, theta[:, start : start + out]))
            start += out
        return found

    def forward(self, theta: Tensor, x: Tensor) -> list[Tensor]:
        """Inputs of each layer and, last, the outputs, (K, N, ...)."""
        found = [x.expand(len(theta), *x.shape)]
        *hidden, (weight, bias) = self.layers(theta)
        for own, shift in hidden:
            found.append(torch.tanh(found[-1] @ own.mT + shift.unsqueeze(1)))
        return [*found, found[-1] @ weight.mT + bias.unsqueeze(1)]

    def backward(self, theta: Tensor, inputs: list[Tensor], seeds: Tensor) -> list[Tensor]:
        """Gradients (K, N, R, out) at each layer's outputs of seeds (K, N, R, C) at the network's."""
        found = [seeds]
        for (weight, _), own in zip(reversed(self.layers(theta)[1:]), reversed(inputs[1:]), strict=True):
            found.append((found[-1] @ weight.unsqueeze(1)) * (1.0 - own.square()).unsqueeze(2))
        return found[::-1]


def retrained(
    module: nn.Sequential, x: Tensor, y: Tensor, noise: float | None, precision: Tensor, left_out: Tensor,
    steps: int = 60, tolerance: float = 1e-3, start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights (K, P) from those of `module`, each network without one point, and the decrements left, (K,), nats.

    Parameters
    ----------
    module : nn.Sequential
        Linear layers with tanh between them.
    noise : float or None
        Variance of a Gaussian likelihood; None for classes.
    precision : Tensor, (P,)
        Of the prior.
    left_out : Tensor, (K,)
        The points, -1 for none.
    start : Tensor, (K, P), optional
        Weights to start from, if not those of `module`.
    """
    networks = _Networks(module, len(left_out))
    mask = torch.ones(len(left_out), len(x), dtype=x.dtype)
    out = (left_out >= 0).nonzero().squeeze(1)
    mask[out, left_out[out]] = 0.0
    theta = networks.theta if start is None else start
    value = _objective(networks, theta, x, y, noise, precision, mask)
    for _ in range(steps):
        step, decrement = _step(networks, theta, x, y, noise, precision, mask)
        size, going = torch.ones_like(value), decrement > tolerance
        for _ in range(_HALVINGS):
            there = theta - (size * going)[:, None] * step
            new = _objective(networks, there, x, y, noise, precision, mask)
            worse = going & ~(new <= value - 1e-4 * size * decrement)
            if not worse.any():
                break
            size = torch.where(worse, size / 2, size)
        gain = torch.where(worse, torch.zeros_like(value), value - new)
        theta = torch.where(worse[:, None], theta, there)
        value = value - gain
        if not (gain > 0.1 * tolerance).any():
            break
    return theta, decrement


def _objective(
    networks: _Networks, theta: Tensor, x: Tensor, y: Tensor, noise: float | None, precision: Tensor, mask: Tensor
) -> Tensor:
    """Negative log joint up to a constant, (K,)."""
    f = networks.forward(theta, x)[-1]
    if noise is not None:
        loss = 0.5 * (f - y).square().sum(2) / noise
    else:
        loss = -torch.log_softmax(f, 2).gather(2, y.expand(len(f), -1).unsqueeze(2)).squeeze(2)
    return (loss * mask).sum(1) + 0.5 * (precision * theta.square()).sum(1)


def _step(
    networks: _Networks, theta: Tensor, x: Tensor, y: Tensor, noise: float | None, precision: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """H⁻¹g (K, P) and gᵀH⁻¹g (K,) of the Gauss-Newton H."""
    *inputs, f = networks.forward(theta, x)
    residual, seeds = _derivatives(f, y, noise)
    blocks = networks.backward(theta, inputs, seeds * mask[:, :, None, None])
    pulled = networks.backward(theta, inputs, (residual * mask[:, :, None]).unsqueeze(2))
    gradient = precision * theta - _pull(inputs, pulled, torch.ones_like(mask).unsqueeze(2))
    variances = networks.layers((1.0 / precision).unsqueeze(0))  # constant within each tensor
    k, n, r, _ = seeds.shape
    gram = torch.eye(n * r, dtype=x.dtype).repeat(k, 1, 1)
    for own, block, (weight, bias) in zip(inputs, blocks, variances, strict=True):
        outer = weight[0, 0, 0] * own @ own.mT + bias[0, 0]
        flat = block.reshape(k, n * r, -1)
        gram += outer.repeat_interleave(r, 1).repeat_interleave(r, 2) * (flat @ flat.mT)
    scaled = gradient / precision
    seen = sum(
        torch.einsum("knrh,knh->knr", block, own @ weight.mT + bias.unsqueeze(1))
        for own, block, (weight, bias) in zip(inputs, blocks, networks.layers(scaled), strict=True)
    )
    solved = torch.cholesky_solve(seen.reshape(k, -1, 1), torch.linalg.cholesky(gram)).view(k, n, r)
    step = scaled - _pull(inputs, blocks, solved) / precision
    return step, (gradient * step).sum(1)


def _derivatives(f: Tensor, y: Tensor, noise: float | None) -> tuple[Tensor, Tensor]:
    """Residuals (K, N, C) and roots (K, N, R, C) of minus the second derivative, transposed."""
    if noise is not None:
        return (y - f) / noise, torch.full((*f.shape[:2], 1, 1), noise**-0.5, dtype=f.dtype)
    p = torch.softmax(f, 2)
    residual = nn.functional.one_hot(y, f.shape[2]).to(f) - p
    if f.shape[2] == 2:
        return residual, (p.prod(2).sqrt()[..., None] * f.new_tensor([1.0, -1.0])).unsqueeze(2)
    half = p.sqrt()
    return residual, torch.diag_embed(half) - half.unsqueeze(3) * p.unsqueeze(2)


def _pull(inputs: list[Tensor], blocks: list[Tensor], weights: Tensor) -> Tensor:
    """Σ weights times rows, (K, P), for blocks (K, N, R, out) and weights (K, N, R)."""
    found = []
    for own, block in zip(inputs, blocks, strict=True):
        signal = torch.einsum("knrh,knr->knh", block, weights)
        found += [(signal.mT @ own).flatten(1), signal.sum(1)]
    return torch.cat(found, 1)
