"""Counts: their distributions under a normal f against sums and SciPy, and the negative binomial in every verb."""

from __future__ import annotations

import functools
import io
import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.metrics import central_coverage
from ntk_laplace.model.predictive import predictive
from reference import relative_error
from refusals import refused

LIKELIHOODS = {"poisson": ntkl.Poisson(), "negative binomial": ntkl.NegativeBinomial(0.6)}
each_likelihood = pytest.mark.parametrize("kind", LIKELIHOODS)


def masses(kind: str, mean: float, variance: float, most: int) -> np.ndarray:
    """P(y) of y = 0, ..., most for f ~ N(mean, variance), by SciPy and a fine grid of f."""
    z = np.linspace(-9.0, 9.0, 801)
    weight = scipy.stats.norm.pdf(z) / scipy.stats.norm.pdf(z).sum()
    rate, y = np.exp(mean + math.sqrt(variance) * z)[:, None], np.arange(most + 1)
    if kind == "poisson":
        return weight @ scipy.stats.poisson.pmf(y, rate)
    return weight @ scipy.stats.nbinom.pmf(y, 1 / 0.6, 1 / (1 + 0.6 * rate))


@each_likelihood
@pytest.mark.parametrize(("mean", "variance"), [(0.3, 0.0), (0.3, 0.5), (-3.0, 2.0), (4.5, 0.04), (4.5, 1.0)])
def test_distributions_under_a_normal_f(kind: str, mean: float, variance: float) -> None:
    """Of every method that makes one: sums to each count, and the least count with a given sum."""
    mass = masses(kind, mean, variance, 3000 if mean > 1 and variance > 0.5 else 1000)
    below = torch.tensor(mass.cumsum())
    one = torch.full((1, 1), mean, dtype=torch.float64)
    response = predictive(LIKELIHOODS[kind], one, torch.full((1, 1, 1), variance, dtype=torch.float64))
    each = response.univariate()
    counts = torch.arange(len(mass)).double().view(-1, 1, 1)
    torch.testing.assert_close(each.cdf(counts).flatten(), below, rtol=1e-10, atol=1e-13)
    assert torch.equal(each.cdf(counts[:9] + 0.7), each.cdf(counts[:9])) and not each.cdf(counts[:1] - 1.0).any()
    torch.testing.assert_close(each.log_prob(counts).exp().flatten(), torch.tensor(mass), rtol=1e-6, atol=1e-11)
    for level in (1e-9, 0.05, 0.5, 0.9, 0.999):
        wanted = int((below < level - 1e-13).sum())
        assert response.quantiles(level).item() == wanted
    moments = float((mass * np.arange(len(mass))).sum()), float((mass * np.arange(len(mass)) ** 2).sum())
    if mean < 1 and variance < 1:  # else a part of the variance is beyond the sum
        assert each.mean.item() == pytest.approx(moments[0], rel=1e-4)
        assert response.mean.item() == pytest.approx(moments[0], rel=1e-4)
        assert response.variance.item() == pytest.approx(moments[1] - moments[0] ** 2, rel=1e-3)


@each_likelihood
def test_quantiles_in_both_tails(kind: str) -> None:
    each = LIKELIHOODS[kind].distribution(torch.tensor([[2.0, 8.0]]).double()).univariate()
    rate = np.exp([2.0, 8.0])
    own = scipy.stats.poisson(rate) if kind == "poisson" else scipy.stats.nbinom(1 / 0.6, 1 / (1 + 0.6 * rate))
    for level in (1e-12, 1e-3, 0.5, 1 - 1e-3, 1 - 1e-12):
        found = each.icdf(torch.tensor(level, dtype=torch.float64)).flatten()
        assert np.abs(found.numpy() - own.ppf(level)).max() <= (0 if level < 0.9 else 1)  # 1 - q has few digits
    last = each.icdf(torch.tensor(1 - 2.0**-52, dtype=torch.float64)).flatten().numpy()
    assert np.abs(last - own.isf(2.0**-52)).max() <= 1
    assert each.icdf(torch.tensor([0.0, 1.0]).double().view(2, 1, 1)).isnan().all()
    assert each[0, 1].icdf(torch.tensor(0.5)).item() == own.ppf(0.5)[1]
    both = each.over_samples(1).reshaped(2)
    assert torch.equal(both.cdf(torch.tensor(7.0)), each.cdf(torch.tensor(7.0)).flatten())
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(0)
    drawn = each.sample((20_000,))
    torch.random.set_rng_state(generator_state)
    torch.testing.assert_close(drawn.mean(0), each.mean, rtol=0.05, atol=0.0)
    assert each.sample((0, 3)).shape == (0, 3, 1, 2)


@each_likelihood
def test_quantiles_of_a_wide_f(kind: str) -> None:
    """Beyond the moments that a number can hold: those of exp(f), whose spread the count's own is far below."""
    mean, deviation = torch.tensor([[2.0, -3.0, 30.0]]).double(), torch.tensor([12.0, 25.0, 45.0]).double()
    each = LIKELIHOODS[kind].univariate_of(mean, torch.diag(deviation.square())[None])
    for level in (0.9, 0.95):
        wanted = mean[0] + scipy.stats.norm.ppf(level) * deviation
        found = each.icdf(torch.tensor(level, dtype=torch.float64))[0].log()
        assert bool(((found - wanted).abs() < 0.03 * deviation).all())
    assert each.icdf(torch.tensor(0.01, dtype=torch.float64)).tolist() == [[0.0, 0.0, 0.0]]


def test_coverage_of_central_intervals() -> None:
    """A count is inside if it is between the quantiles, ends included."""
    rate = torch.linspace(0.2, 30.0, 400, dtype=torch.float64)
    for dispersion in (0.0, 0.5):
        each = ntkl.CountMixture.single(rate, torch.tensor(dispersion, dtype=torch.float64))
        torch.manual_seed(0)
        y, levels = each.sample(), (0.3, 0.5, 0.9)
        ends = [[each.icdf(torch.tensor(0.5 + sign * level / 2)) for sign in (-1, 1)] for level in levels]
        inside = [float(((low <= y) & (y <= high)).double().mean()) for low, high in ends]
        assert central_coverage(each, y, levels).tolist() == inside and inside[2] >= 0.88


@functools.cache
def problem() -> tuple[nn.Module, Tensor, Tensor]:
    """A network at its optimum, for dispersion 0.3 and precision 0.5."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x = torch.randn(30, 2, dtype=torch.float64)
    y = torch.poisson((0.8 * x[:, :1] + 1.0).exp())
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=500, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = 0.25 * sum(p.square().sum() for p in network.parameters())
        loss = loss - ntkl.NegativeBinomial(0.3).log_prob(network(x), y).sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    return network, x, y


def fitted(structure: str = "gp", dispersion: float = 0.3) -> tuple[ntkl.Posterior, Tensor, Tensor]:
    network, x, y = problem()
    likelihood = ntkl.NegativeBinomial(dispersion)
    return ntkl.laplace(network, (x, y), likelihood, ntkl.GaussianPrior(0.5), structure), x, y


@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "diag"])
def test_the_evidence_and_its_gradient_in_the_dispersion(structure: str) -> None:
    """The value from dense matrices; the gradient by central differences of it."""
    posterior, x, y = fitted(structure)
    evidence = posterior.log_marginal_likelihood()
    if structure in ("gp", "full"):
        rows = posterior.jacobian(x).dense(posterior.network.shapes)[0].detach()
        f = posterior.outputs(x).detach().reshape(-1)
        rate = f.exp()
        precision = rows.T @ ((rate / (1 + 0.3 * rate)).unsqueeze(1) * rows) + 0.5 * torch.eye(rows.shape[1]).double()
        weights = torch.cat([p.detach().reshape(-1) for p in posterior.network.module.parameters()])
        density = scipy.stats.nbinom(1 / 0.3, 1 / (1 + 0.3 * rate)).logpmf(y.flatten()).sum()
        value = density - 0.25 * float(weights @ weights) + 0.5 * len(weights) * math.log(0.5)
        assert float(evidence) == pytest.approx(value - 0.5 * float(torch.logdet(precision)), rel=1e-10)
    (gradient,) = torch.autograd.grad(evidence, posterior.likelihood.log_dispersion)
    above, below = (float(fitted(structure, 0.3 * math.exp(step))[0].log_marginal_likelihood())
                    for step in (1e-4, -1e-4))
    assert float(gradient) == pytest.approx((above - below) / 2e-4, rel=1e-5)


def test_every_verb_takes_counts(tmp_path) -> None:
    posterior, x, y = fitted()
    full, _, _ = fitted("full")
    new = 2 * torch.randn(4, 2, dtype=torch.float64)
    for verb in ("leave_one_out", "explain", "predict_interval"):
        arguments = {"leave_one_out": (), "explain": (new,), "predict_interval": (new, 0.8)}[verb]
        assert getattr(posterior, verb)(*arguments) is not None
    assert relative_error(posterior.predict(new).mean, full.predict(new).mean) < 1e-8
    assert relative_error(posterior.remove([3]).predict(new).mean, full.remove([3]).predict(new).mean) < 1e-8
    path = tmp_path / "counts.pt"
    posterior.save(path, include_data=True)
    loaded = ntkl.load(path, problem()[0])
    assert float(loaded.likelihood.dispersion) == pytest.approx(0.3)
    assert relative_error(loaded.predict(new).mean, posterior.predict(new).mean) < 1e-10
    fit = posterior.fit_predictive("loo", strict=False)
    assert fit.after >= fit.before - 1e-9
    kept = io.StringIO()
    print(posterior, file=kept)
    assert "NegativeBinomial" in kept.getvalue()
    with refused(ntkl.TargetError, "whole numbers from 0", r"-1", "another likelihood"):
        ntkl.laplace(problem()[0], (x, y - 1 - y.max()), ntkl.NegativeBinomial())


def test_a_training_finds_the_dispersion() -> None:
    """Of counts whose rates vary by gamma factors of variance 0.5; of Poisson counts it is small."""
    torch.manual_seed(1)
    x = torch.randn(600, 2, dtype=torch.float64)
    rate = (0.7 * x[:, :1] + 1.5).exp()
    factor = torch.distributions.Gamma(2.0, 2.0).sample(rate.shape).double()
    for y, low, high in ((torch.poisson(rate * factor), 0.38, 0.65), (torch.poisson(rate), 0.0, 0.05)):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        schedule = ntkl.EvidenceSchedule(5, steps=10, learning_rate=0.3)
        training = ntkl.train_with_evidence(network, (x, y), ntkl.NegativeBinomial(), structure="full", epochs=40,
                                            batch_size=200, schedule=schedule)
        found = float(training.posterior.likelihood.dispersion)
        assert low <= found < high
        again = training.posterior
        again.fit_hyperparameters()
        assert float(again.log_marginal_likelihood()) >= float(training.evidence) - 1e-6
