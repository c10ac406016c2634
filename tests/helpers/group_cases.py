"""A small problem for fits on several processes, and what of a posterior has to be equal on all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ntk_laplace as ntkl

STRUCTURES = ["gp", "full", "kfac", "ekfac", "diag", ntkl.INF(rank=0.4), ntkl.KFAC(sharing="reduce")]
N = 13


def small(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def inputs(n: int = N) -> Tensor:
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def labels(n: int = N) -> Tensor:
    return torch.randint(3, (n,), generator=torch.Generator().manual_seed(2))


def real(n: int = N, outputs: int = 3) -> Tensor:
    return torch.randn(n, outputs, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def numbers(n: int = N) -> Tensor:
    return 0.5 + torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def noise_per_point() -> ntkl.Likelihood:
    return ntkl.Gaussian(numbers(), kind="point")


def quantities(posterior: Any) -> dict[str, Tensor]:
    """What must be equal: evidence and its gradients, moments, training points."""
    evidence = posterior.log_marginal_likelihood(correction=True)
    hyperparameters = [p for m in (posterior.prior, posterior.likelihood) for p in m.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(evidence, hyperparameters, allow_unused=True)
    joint = posterior.latent(inputs(4) + 0.1)
    found = {
        "evidence": evidence.detach(), "mean": joint.mean, "covariance": joint.covariance_matrix,
        "f": posterior.f, "targets": posterior.targets, "counts": posterior.weights,
    }
    if posterior.fitted.exact:
        found["mean at the optimum"] = posterior.latent(inputs(4), mean="posterior").mean
    saved = posterior.fitted.structure.state(posterior.fitted.model, True)
    for i, sums in enumerate(saved["sums"] if "sums" in saved else [saved] if "ggn" in saved else []):
        lower = {"left", "right", "block", "ggn"}
        found |= {f"{name} {i}": v.tril() if name in lower else v for name, v in sums.items()}
    return found | {f"slope {i}": slope for i, slope in enumerate(slopes) if slope is not None}


def require_same(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for own in found:
        assert own.keys() == expected.keys()
        for name, value in expected.items():
            scale = float(value.detach().abs().max()) + 1e-300
            gap = float((own[name] - value).detach().abs().max()) / scale
            assert gap < 1e-12, f"{name}: {gap:.2g}"
