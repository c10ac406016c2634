"""BALD of likelihoods at many positions: against all label vectors, from draws of the outputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace import active
from refusals import refused


def fitted(likelihood: ntkl.Likelihood, outputs: int, y: Callable[[Tensor], Tensor], length: int) -> ntkl.Posterior:
    """A posterior of 8 sequences, each position with outputs of its own and of its neighbors."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, outputs, 1)).double()
    x = inputs(8, length)
    return ntkl.laplace(network, (x, y(x)), ntkl.Everywhere(likelihood, length), ntkl.GaussianPrior(0.3))


def inputs(count: int, length: int) -> Tensor:
    return torch.randn(count, 2, length, generator=torch.Generator().manual_seed(count)).double()


def drawn(posterior: ntkl.Posterior, x: Tensor) -> Tensor:
    """Outputs, (S, n, L, C)."""
    mean, covariance = posterior.latent_moments(x)
    jitter = 1e-10 * torch.eye(mean.shape[1]).double()
    f = torch.distributions.MultivariateNormal(mean, covariance + jitter).sample((40_000,))
    return f.unflatten(-1, (*posterior.likelihood.positions, -1))


def information(p: Tensor) -> Tensor:
    """H[E p(y)] - E H[p(y)] of probabilities (S, n, L, K), by a sum over the vectors y."""
    vectors = itertools.product(range(p.shape[-1]), repeat=p.shape[-2])
    each = [p[:, :, range(p.shape[-2]), list(y)].prod(-1) for y in vectors]  # (S, n) of each
    return sum(-torch.xlogy(one.mean(0), one.mean(0)) + torch.xlogy(one, one).mean(0) for one in each)


@pytest.mark.parametrize("tempered", [False, True])
def test_classes(tempered: bool) -> None:
    posterior = fitted(ntkl.Categorical(), 3, lambda x: (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long(), 2)
    x = 2 * inputs(4, 2)
    wanted = information(drawn(posterior, x).softmax(-1))
    if tempered:
        posterior = ntkl.laplace(posterior.network.module, (inputs(8, 2), torch.zeros(8, 2).long()),
                                 ntkl.Tempered(posterior.likelihood, 2.0), ntkl.GaussianPrior(0.3))
        wanted = information(drawn(posterior, x).softmax(-1))
    found = active.score(posterior, x, "bald", samples=8192)
    assert torch.allclose(found, wanted, atol=0.015) and float(wanted.min()) > 0.05
    assert len(set(active.select(posterior, x, 2, "bald").indices.tolist())) == 2


@pytest.mark.slow
def test_labels() -> None:
    """Two of each position."""
    posterior = fitted(ntkl.Bernoulli(), 2, lambda x: (x > 0).double(), 3)
    x = 2 * inputs(2, 3)
    p = drawn(posterior, x).sigmoid().flatten(2)
    found = active.score(posterior, x, "bald", samples=8192)
    assert torch.allclose(found, information(torch.stack([1 - p, p], -1)), atol=0.015)


def test_of_gaussian_noise_it_is_the_information() -> None:
    posterior = fitted(ntkl.Gaussian(noise=0.2), 2, lambda x: x, 3)
    x = inputs(4, 3)
    assert torch.equal(active.score(posterior, x, "bald"), active.score(posterior, x, "information"))


def test_float32() -> None:
    posterior = fitted(ntkl.Categorical(), 3, lambda x: (x.sum(1) > 0).long(), 2)
    data = inputs(8, 2).float(), (inputs(8, 2).sum(1) > 0).long()
    single = ntkl.laplace(posterior.network.module.float(), data, posterior.likelihood, ntkl.GaussianPrior(0.3))
    found = active.score(single, inputs(4, 2).float(), "bald")
    assert found.isfinite().all() and float(found.min()) >= 0


def test_refusals() -> None:
    posterior = fitted(ntkl.Categorical(), 3, lambda x: (x.sum(1) > 0).long(), 7)
    with refused(ntkl.UnsupportedError, "at most 6 labels of an example with 3 classes", "7", "information"):
        active.score(posterior, inputs(2, 7), "bald")
    counts = fitted(ntkl.Poisson(), 1, lambda x: x[:, :1].abs().round(), 3)
    with refused(ntkl.UnsupportedError, "Categorical", "Poisson", "information"):
        active.score(counts, inputs(2, 3), "bald")
