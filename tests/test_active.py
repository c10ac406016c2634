"""Active learning: scores against brute force over all labels and joint covariances, and the greedy choice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_laplace as ntkl
from ntk_laplace import active
from ntk_laplace.runtime import tuning
from reference import relative_error
from refusals import refused

LIKELIHOODS: dict[str, tuple[Any, int]] = {
    "gaussian": (lambda: ntkl.Gaussian(noise=0.2), 2), "categorical": (ntkl.Categorical, 3),
    "bernoulli": (ntkl.Bernoulli, 1),
}


def fitted(kind: str, structure: str = "gp") -> tuple[ntkl.Posterior, Tensor]:
    """A posterior of 12 points, and a pool of 9."""
    likelihood, outputs = LIKELIHOODS[kind]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    x = torch.randn(12, 3, dtype=torch.float64)
    y = {"gaussian": torch.randn(12, 2).double(), "categorical": torch.arange(12) % 3,
         "bernoulli": (x[:, :1] > 0).double()}[kind]
    posterior = ntkl.laplace(network, (x, y), likelihood(), ntkl.GaussianPrior(0.5), structure)
    return posterior, 2 * torch.randn(9, 3, dtype=torch.float64)


def joint(posterior: ntkl.Posterior, x: Tensor) -> Tensor:
    """SᵀVS over all inputs from the dense joint covariance, (nR, nR)."""
    rows = posterior.jacobian(x)
    covariance = posterior.posterior_precision.covariance(rows)
    root = torch.block_diag(*posterior.likelihood.root(rows.f).detach())
    return root.T @ covariance @ root


def told(matrix: Tensor, rank: int, chosen: tuple[int, ...]) -> float:
    """½ log det(I + A) of the chosen inputs."""
    index = torch.cat([torch.arange(i * rank, (i + 1) * rank) for i in chosen])
    return 0.5 * float(torch.logdet(torch.eye(len(index)).double() + matrix[index][:, index]))


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
def test_information_and_greedy_choice(kind: str, structure: str) -> None:
    """Each step of the greedy choice is the best by brute force, and the batch is near the best of all batches."""
    posterior, x = fitted(kind, structure)
    matrix = joint(posterior, x)
    rank = len(matrix) // 9
    wanted = torch.tensor([told(matrix, rank, (i,)) for i in range(9)], dtype=torch.float64)
    assert relative_error(active.score(posterior, x, "information"), wanted) < 1e-9
    assert relative_error(active.score(posterior, x, "information", batch_size=2), wanted) < 1e-9
    found = active.select(posterior, x, 3, "information")
    chosen: tuple[int, ...] = ()
    for index, gain in zip(found.indices.tolist(), found.gains.tolist(), strict=True):
        gains = {i: told(matrix, rank, (*chosen, i)) - (told(matrix, rank, chosen) if chosen else 0.0)
                 for i in range(9) if i not in chosen}
        assert index == max(gains, key=lambda i: gains[i]) and gain == pytest.approx(gains[index], rel=1e-9)
        chosen = *chosen, index
    best = max(told(matrix, rank, batch) for batch in itertools.combinations(range(9), 3))
    assert float(found.gains.sum()) >= (1 - 1 / torch.e) * best
    assert list(found.to_dataframe()["index"]) == found.indices.tolist()


def test_information_is_what_a_label_adds() -> None:
    """Of a Gaussian: half the change of log det B when the point is added, whatever its label."""
    posterior, x = fitted("gaussian")
    before = float(posterior.evidence().log_det)
    for index, gain in zip(range(3), active.score(posterior, x[:3], "information"), strict=True):
        more = posterior.add(x[index : index + 1], torch.full((1, 2), 7.0).double())
        assert 0.5 * (float(more.evidence().log_det) - before) == pytest.approx(float(gain), rel=1e-9)


def test_bald() -> None:
    """Of classes: from a million independent draws of f. Of a Gaussian: the information."""
    posterior, x = fitted("gaussian")
    assert torch.equal(active.score(posterior, x, "bald"), active.score(posterior, x, "information"))
    for kind in ("categorical", "bernoulli"):
        posterior, x = fitted(kind)
        mean, covariance = posterior.latent_moments(x[:3])
        draws = torch.distributions.MultivariateNormal(mean, covariance).sample((100000,))
        p = draws.softmax(-1) if kind == "categorical" else torch.cat([draws.sigmoid(), 1 - draws.sigmoid()], -1)
        wanted = -(p.mean(0) * p.mean(0).log()).sum(-1) + (p * p.log()).sum(-1).mean(0)
        assert torch.allclose(active.score(posterior, x[:3], "bald", samples=4096), wanted, atol=0.01)


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_epig(kind: str) -> None:
    """Mean of ½ (log det of each + log det of the other - log det of both), from joint covariances."""
    posterior, x = fitted(kind)
    matrix = joint(posterior, x)
    rank = len(matrix) // 9
    single = [told(matrix, rank, (i,)) for i in range(9)]
    wanted = torch.tensor([
        sum(single[i] + single[j] - told(matrix, rank, (i, j)) for j in (5, 6, 7, 8)) / 4 for i in range(5)
    ], dtype=torch.float64)
    assert relative_error(active.score(posterior, x[:5], "epig", targets=x[5:]), wanted) < 1e-8


def test_targets_come_from_the_pool_where_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a small pool; a part of a larger one, of which each has the same chance, and the same in every call."""
    posterior, x = fitted("categorical")
    assert torch.equal(active.score(posterior, x), active.score(posterior, x, "epig", targets=x))
    assert torch.equal(active.select(posterior, x, 3).gains, active.select(posterior, x, 3, targets=x).gains)
    pool = 2 * torch.randn(400, 3, dtype=torch.float64)
    assert torch.equal(active.score(posterior, pool), active.score(posterior, pool, targets=pool))
    monkeypatch.setattr(tuning, "TARGET_COVARIANCES", 400 * 100 * 4 - 1)
    found = active.score(posterior, pool)
    assert torch.equal(found, active.score(posterior, pool))
    assert not torch.equal(found, active.score(posterior, pool, targets=pool[:100]))
    assert relative_error(active.select(posterior, pool, 1).gains, found.max().reshape(1)) < 1e-10
    whole = active.score(posterior, pool, targets=pool)
    assert torch.stack([found, whole]).corrcoef()[0, 1] > 0.9  # the mean of a hundred of four hundred
    loader = DataLoader(TensorDataset(pool, torch.zeros(400)), batch_size=70)
    assert relative_error(active.score(posterior, loader), found) < 1e-10
    monkeypatch.setattr(tuning, "TARGET_COVARIANCES", 400 * 200 * 4)
    more = active.score(posterior, pool)
    assert not torch.equal(more, found) and not torch.equal(more, whole)
    assert torch.stack([more, whole]).corrcoef()[0, 1] > 0.95
    assert active.select(posterior, loader, 2).indices.equal(active.select(posterior, pool, 2).indices)


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("method", ["epig", "variance", "bald"])
def test_greedy_choice_given_the_labels_before(kind: str, method: str) -> None:
    """Each score is that of the dense joint covariance given the chosen; gains of "epig" add up (chain rule)."""
    posterior, x = fitted(kind)
    pool, there = (x[:6], x[6:]) if method == "epig" else (x, None)
    found = active.select(posterior, pool, 3, method, targets=there, samples=4096)
    rows = posterior.jacobian(x)
    dense, roots = posterior.posterior_precision.covariance(rows), posterior.likelihood.root(rows.f).detach()
    outputs = rows.f.shape[1]
    chosen: list[int] = []
    for index, gain in zip(found.indices.tolist(), found.gains.tolist(), strict=True):
        if method == "epig":
            matrix, rank = joint(posterior, x), roots.shape[-1]
            def about(batch: tuple[int, ...], a: Tensor = matrix, r: int = rank) -> float:
                return sum(told(a, r, batch) + told(a, r, (j,)) - told(a, r, (*batch, j)) for j in (6, 7, 8)) / 3
            gains = {i: about((*chosen, i)) - (about(tuple(chosen)) if chosen else 0.0) for i in range(6)}
        else:
            given = dense
            if chosen:  # V - V_M S (I + SᵀV_MM S)⁻¹ SᵀV_M
                at = torch.cat([torch.arange(i * outputs, (i + 1) * outputs) for i in chosen])
                root = torch.block_diag(*roots[chosen])
                inner = torch.eye(root.shape[1]).double() + root.T @ dense[at][:, at] @ root
                given = dense - dense[:, at] @ root @ torch.linalg.solve(inner, root.T @ dense[at])
            blocks = torch.stack([given[i * outputs : (i + 1) * outputs, i * outputs : (i + 1) * outputs]
                                  for i in range(9)])
            gains = dict(enumerate(_single(kind, method, rows.f, blocks, roots).tolist()))
        gains = {i: value for i, value in gains.items() if i not in chosen}
        tolerance = {"rel": 1e-8} if method != "bald" or kind == "gaussian" else {"abs": 0.01}
        assert gain == pytest.approx(gains[index], **tolerance)
        assert gain == pytest.approx(max(gains.values()), **tolerance)
        chosen.append(index)


def _single(kind: str, method: str, mean: Tensor, blocks: Tensor, roots: Tensor) -> Tensor:
    """Variance or BALD of each input from its covariance."""
    if method == "variance":
        return blocks.diagonal(dim1=1, dim2=2).sum(1)
    if kind == "gaussian":
        return 0.5 * torch.logdet(torch.eye(roots.shape[-1]).double() + roots.mT @ blocks @ roots)
    jitter = 1e-12 * torch.eye(blocks.shape[-1]).double()
    draws = torch.distributions.MultivariateNormal(mean.detach(), blocks + jitter).sample((50000,))
    p = draws.softmax(-1) if kind == "categorical" else torch.cat([draws.sigmoid(), 1 - draws.sigmoid()], -1)
    return -torch.xlogy(p.mean(0), p.mean(0)).sum(-1) + torch.xlogy(p, p).sum(-1).mean(0)


def test_bald_of_correlated_labels() -> None:
    """Of three labels: from all eight label vectors, by a hundred thousand draws; the graph of f is not kept."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 3)).double()
    x = torch.randn(10, 2, dtype=torch.float64)
    posterior = ntkl.laplace(network, (x, (x @ torch.ones(2, 3).double() > 0).double()), ntkl.Bernoulli(),
                             ntkl.GaussianPrior(0.1), "full")
    mean, covariance = posterior.latent_moments(3 * x[:3])
    draws = torch.distributions.MultivariateNormal(mean, covariance).sample((100000,)).sigmoid()
    vectors = torch.tensor(list(itertools.product((0.0, 1.0), repeat=3)), dtype=torch.float64)
    p = torch.stack([(draws * v + (1 - draws) * (1 - v)).prod(-1) for v in vectors], -1)  # (S, n, 8)
    wanted = -torch.xlogy(p.mean(0), p.mean(0)).sum(-1) + torch.xlogy(p, p).sum(-1).mean(0)
    found = active.score(posterior, 3 * x[:3], "bald", samples=4096)
    assert torch.allclose(found, wanted, atol=0.01) and not found.requires_grad
    assert len(active.select(posterior, x, 2, "bald").to_dataframe()) == 2
    many = ntkl.laplace(nn.Linear(2, 11).double(), (x, torch.ones(10, 11).double()), ntkl.Bernoulli())
    with refused(ntkl.UnsupportedError, "at most 10 labels", "11", "information"):
        active.score(many, x, "bald")


def test_labels_with_another_noise() -> None:
    """Noise per point belongs to the training points: that of new labels is given, and lowers V for the next choice."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(12, 3, dtype=torch.float64)
    posterior = ntkl.laplace(network, (x, x[:, :1]), ntkl.Gaussian(0.1 + x[:, :1] ** 2, "point"))
    with refused(ntkl.UnsupportedError, "12 points that the noise", "new points", "likelihood="):
        active.score(posterior, x)
    with refused(ntkl.UnsupportedError, "a likelihood object", "0.3", "Gaussian"):
        active.select(posterior, x, 1, likelihood=0.3)  # type: ignore[arg-type]
    for noise in (torch.ones(12, 1), torch.ones(12)):  # a chunk of as many inputs would take them for its own
        with refused(ntkl.UnsupportedError, "one noise for all inputs", "Gaussian with another", "on their own"):
            active.score(posterior, torch.cat([x, x]), likelihood=ntkl.Gaussian(noise), batch_size=12)
    likelihood, pool = ntkl.Gaussian(0.3), 2 * torch.randn(5, 3, dtype=torch.float64)
    covariance = posterior.posterior_precision.covariance(posterior.jacobian(pool)) / 0.3
    found = active.score(posterior, pool, "information", likelihood=likelihood)
    assert torch.allclose(found, 0.5 * covariance.diagonal().log1p(), rtol=1e-10)
    whole = 0.5 * torch.logdet(torch.eye(5).double() + covariance)
    for method in ("information", "bald"):
        chosen = active.select(posterior, pool, 5, method, likelihood=likelihood)
        assert torch.allclose(chosen.gains.sum(), whole, rtol=1e-10)


@pytest.mark.parametrize("method", ["epig", "bald"])
def test_large_pools_are_scored_in_parts(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = fitted("categorical")
    targets = x[5:] if method == "epig" else None
    whole = active.select(posterior, x, 3, method, targets=targets)
    monkeypatch.setattr(tuning, "AVERAGED_OUTPUTS", 1)
    parts = active.select(posterior, x, 3, method, targets=targets)
    assert torch.equal(whole.indices, parts.indices) and torch.allclose(whole.gains, parts.gains, rtol=1e-10)


def test_what_does_not_fit_in_memory_is_refused() -> None:
    likelihood, x = ntkl.Categorical(), torch.randn(300, 3, dtype=torch.float64)
    posterior = ntkl.laplace(nn.Linear(3, 3).double(), (x[:12], torch.arange(12) % 3), likelihood,
                             settings=ntkl.Settings(memory_budget=10**6))
    with refused(ntkl.MemoryBudgetError, "300 inputs and 300 targets", ".", "fewer targets"):
        active.select(posterior, x, 2, "epig", targets=x)
    with refused(ntkl.MemoryBudgetError, "300 inputs and 200 of them", ".", "fewer, or pass a part"):
        active.select(posterior, x, 200)


def test_variance_prefers_what_tells_nothing() -> None:
    """Far away f varies most, and the label is certain: the pitfall that the docs tell."""
    posterior, _ = fitted("bernoulli")
    x = torch.tensor([[0.1, 0.0, 0.0], [400.0, 0.0, 0.0]], dtype=torch.float64)
    variance, information = (active.score(posterior, x, method) for method in ("variance", "information"))
    mean, covariance = posterior.latent_moments(x)
    assert torch.equal(variance, covariance[:, 0, 0]) and variance[1] > variance[0]
    slope = torch.sigmoid(mean) * torch.sigmoid(-mean)
    assert torch.allclose(information, 0.5 * torch.log1p(slope[:, 0] * covariance[:, 0, 0]))
    top = active.select(posterior, x, 1, "variance")
    assert top.indices.tolist() == [1] and top.method == "variance"


def test_refusals() -> None:
    posterior, x = fitted("categorical")
    with refused(ntkl.UnsupportedError, "information, bald", "entropy", "information"):
        active.score(posterior, x, "entropy")
    with refused(ntkl.UnsupportedError, "targets=", "information", "Leave"):
        active.select(posterior, x, 2, "information", targets=x)
    with refused(ntkl.HyperparameterError, "at most 9", "10", "fewer"):
        active.select(posterior, x, 10)
    estimator = ntkl.LaplaceClassifier()
    estimator.posterior_ = None
    for ask in (lambda: active.score(estimator, x), lambda: active.select(estimator, x, 2)):
        with refused(ntkl.UnsupportedError, "a Posterior", "LaplaceClassifier", r"\.posterior_, and \.network_inputs"):
            ask()
    with refused(ntkl.UnsupportedError, "Posterior", "Linear", "laplace"):
        active.score(nn.Linear(1, 1), x)  # type: ignore[arg-type]
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    exact = ntkl.laplace(wide, (x, x[:, :1]), ntkl.Gaussian(1e-9), ntkl.GaussianPrior(0.1)).to(dtype=torch.float32)
    with pytest.warns(match="few correct digits"), refused(ntkl.NumericalError, "the noise", "float32", "float64"):
        active.select(exact, torch.cat([x, x, -x]), 9)
    counts = ntkl.laplace(nn.Linear(3, 1).double(), (x, torch.ones(9, 1)), ntkl.Poisson())
    with refused(ntkl.UnsupportedError, "Categorical", "Poisson", "information"):
        active.score(counts, x, "bald")
    assert active.score(counts, x).shape == (9,)
