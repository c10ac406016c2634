"""A fit on several processes, each with its share of the data, is the fit of one process with all data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.curvature import CurvatureType
from ntk_laplace.reduction import Reducer
from ranks import on_ranks, shares, take_all

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
        "at the optimum": posterior.latent(inputs(4), mean="posterior").mean,
    }  # fmt: skip
    return found | {f"slope {i}": slope for i, slope in enumerate(slopes) if slope is not None}


def require_same(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for own in found:
        assert own.keys() == expected.keys()
        for name, value in expected.items():
            scale = float(value.abs().max()) + 1e-300
            gap = float((own[name] - value).abs().max()) / scale
            assert gap < 1e-12, f"{name}: {gap:.2g}"


def compare(
    data: tuple[Tensor, ...], world_size: int, likelihood: Callable[[], ntkl.Likelihood],
    look: Callable[[Any], dict[str, Tensor]] = quantities, network: nn.Module | None = None, **arguments: Any,
) -> None:  # fmt: skip
    """Fit on one process and on several; `look` at both."""
    network = small() if network is None else network

    def fit(data: tuple[Tensor, ...], **settings: Any) -> dict[str, Tensor]:
        return look(ntkl.laplace(network, data, likelihood(), settings=ntkl.Settings(batch_size=3, **settings),
                                 **arguments))

    parts = shares(len(data[0]), world_size)
    assert len({part.stop - part.start for part in parts}) > 1, "unequal shares"

    def run(reducer: Reducer) -> dict[str, Tensor]:
        return fit(take_all(data, parts[reducer.rank]), reducer=reducer)

    require_same(on_ranks(world_size, run), fit(data))


STRUCTURES = ["gp", "full", "kfac", "ekfac", "diag", ntkl.INF(rank=0.4), ntkl.KFAC(sharing="reduce")]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.filterwarnings("ignore:INF")
def test_shares_are_one_data_set(structure: Any, world_size: int) -> None:
    compare((inputs(), labels()), world_size, ntkl.Categorical, structure=structure,
            prior=ntkl.GaussianPrior(2.0, groups="layer"))


@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "ekfac", "diag"])
def test_drawn_labels_have_global_numbers(structure: str) -> None:
    compare((inputs(), labels()), 3, ntkl.Categorical, structure=structure,
            curvature=CurvatureType("mc", samples=2, seed=3))


@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "ekfac", "diag"])
def test_noise_per_point_has_global_numbers(structure: str) -> None:
    compare((inputs(), real()), 3, noise_per_point, structure=structure)


@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "ekfac", "diag"])
def test_example_weights_are_shared_out_too(structure: str) -> None:
    weights = torch.where(torch.arange(N) % 5 == 0, torch.zeros(()).double(), numbers())
    compare((inputs(), labels(), weights), 2, ntkl.Categorical, structure=structure)
