"""PAC-Bayes bounds: the formulas, their coverage in simulated data sets, the Gibbs risk, and what is not a bound."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import rel_entr
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.func import functional_call, jacrev

import ntk_laplace as ntkl
from ntk_laplace.selection import pac_bayes
from refusals import refused

DELTA, DATA_SETS = 0.05, 2000
KINDS = ("seeger", "mcallester", "catoni")

# --- formulas on numbers


def bound(kind: str, risk: float, kl: float, n: int, delta: float = DELTA) -> float:
    return getattr(pac_bayes, kind)(risk, kl, n, delta, *([2.0] if kind == "catoni" else []))


@pytest.mark.parametrize(("log_evidence", "n", "low", "high"), [(-300.0, 200, 0.2, 3.0), (-9.5, 7, 0.0, 0.7),
                                                                (-4e4, 10_000, 1.0, 12.0)])
def test_germain_is_catoni_at_the_range_of_the_loss(log_evidence: float, n: int, low: float, high: float) -> None:
    """-log Z = n R + KL for the Bayes posterior, so any such pair gives the same number."""
    for kl in (0.0, 0.3 * (-log_evidence - low * n)):
        risk, span = (-log_evidence - kl) / n, high - low
        scaled = pac_bayes.catoni((risk - low) / span, kl, n, DELTA, span)
        assert pac_bayes.germain(log_evidence, n, DELTA, low, high) == pytest.approx(low + span * scaled, abs=1e-12)
    root = math.exp(log_evidence / n) * DELTA ** (1 / n)
    printed = low + span / (1 - math.exp(low - high)) * (1 - math.exp(low) * root)
    assert pac_bayes.germain(log_evidence, n, DELTA, low, high) == pytest.approx(printed, abs=1e-12)


@pytest.mark.parametrize("n", [1, 30, 1000])
@pytest.mark.parametrize("kl", [0.0, 3.0, 40.0])
@pytest.mark.parametrize("risk", [0.0, 1e-9, 0.05, 0.6, 1.0])
def test_seeger_is_the_root_of_the_divergence(risk: float, kl: float, n: int) -> None:
    room = (kl + math.log(2 * math.sqrt(n) / DELTA)) / n

    def excess(p: float) -> float:
        return float(rel_entr(risk, p) + rel_entr(1 - risk, 1 - p)) - room

    most = 1 - 1e-14
    expected = 1.0 if risk == 1.0 or excess(most) < 0 else brentq(excess, max(risk, 1e-300), most, xtol=1e-15)
    assert pac_bayes.seeger(risk, kl, n, DELTA) == pytest.approx(expected, abs=1e-9)
    assert pac_bayes.seeger(risk, kl, n, DELTA) <= max(1.0, pac_bayes.mcallester(risk, kl, n, DELTA))


def halved(risk: float, most: float, tolerance: float) -> float:
    """kl⁻¹(risk, most) as pacbb's `inv_kl` finds it: a midpoint, once the interval is short beside its upper end."""
    low, high = risk, 1 - 1e-10
    while True:
        middle = 0.5 * (low + high)
        divergence = float(rel_entr(risk, middle) + rel_entr(1 - risk, 1 - middle))
        low, high = (low, middle) if divergence > most else (middle, high)
        if (high - low) / high < tolerance:
            return middle


@pytest.mark.slow
def test_seegers_bound_is_that_of_pacbb_up_to_its_tolerance() -> None:
    """`KLBound`: the risk of K draws is bounded first. It stops at a relative 1e-5, and the page has these figures."""
    random, gaps = np.random.default_rng(0), {1e-5: [], 1e-13: []}
    for _ in range(2000):
        risk, kl, n, draws = random.uniform(), 10 ** random.uniform(-1, 4), int(10 ** random.uniform(1.5, 5)), \
            int(10 ** random.uniform(2, 4))
        sampled, room = math.log(2 / 0.01) / draws, (kl + math.log(2 * math.sqrt(n) / 0.04)) / n
        own = pac_bayes.seeger(pac_bayes.inverse_divergence(risk, sampled), kl, n, 0.04)
        for tolerance, found in gaps.items():
            found.append(abs(own - halved(halved(risk, sampled, tolerance), room, tolerance)))
    published, tight = (np.array(found) for found in gaps.values())
    assert published.max() == pytest.approx(1.36e-5, rel=0.01) and (published <= 1e-6).sum() == 443
    assert tight.max() == pytest.approx(1.0e-10, rel=0.01)  # of bounds at 1: its search ends at 1 - 1e-10


def test_two_roots_of_n_bound_the_moment_of_seegers_bound() -> None:
    """E exp(n kl(R̂ ‖ R)) over binomial R̂ is at most 2 √n (Maurer 2004, who proves it from n = 8 on)."""
    for n in range(1, 40):
        moment = sum(math.comb(n, k) * (k / n) ** k * (1 - k / n) ** (n - k) for k in range(n + 1))
        assert moment <= 2 * math.sqrt(n) + 1e-9


def test_mcallester_as_printed() -> None:
    """[L22] Eq. 15, with numbers put in by hand."""
    printed = 0.1 + (31.210340371976182 / 999) ** 0.5
    assert pac_bayes.mcallester(0.1, 20.0, 500, 0.05) == pytest.approx(printed, abs=1e-12)
    assert pac_bayes.mcallester(0.0, 0.0, 1, 1.0) == pytest.approx(2**0.5, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_union_over_models_adds_their_logarithm_to_the_divergence(kind: str) -> None:
    together, alone = bound(kind, 0.1, 5.0, 1000, DELTA / 100), bound(kind, 0.1, 5.0 + math.log(100), 1000)
    assert together == pytest.approx(alone, abs=1e-12)


# --- coverage: labels are coin flips, so the true risk of every classifier is 1/2, and every posterior overfits


def covered(risks: Tensor, divergences: Tensor, n: int) -> None:
    """At most δ of the data sets violate the bounds; without the divergence, far more do."""
    pairs = list(zip(risks.tolist(), divergences.tolist(), strict=True))
    for kind in KINDS:
        assert sum(bound(kind, risk, kl, n) < 0.5 for risk, kl in pairs) <= DELTA * len(pairs)
    assert sum(bound("seeger", risk, 0.0, n) < 0.5 for risk, _ in pairs) > 4 * DELTA * len(pairs)


@pytest.mark.slow
def test_coverage_of_a_finite_class() -> None:
    """The best of 1,000 fixed classifiers, and exponential weights over them, in 2,000 data sets of 40 labels."""
    n, classifiers = 40, 1000
    generator = torch.Generator().manual_seed(0)
    errors = torch.stack([  # classifiers predict at random, labels are random: independent errors
        (torch.rand(n, classifiers, generator=generator) < 0.5).double().mean(0) for _ in range(DATA_SETS)
    ])
    best = errors.min(1).values
    covered(best, torch.full_like(best, math.log(classifiers)), n)
    weights = torch.softmax(-2.0 * n * errors, 1)
    covered((weights * errors).sum(1), math.log(classifiers) - torch.special.entr(weights).sum(1), n)


def test_coverage_of_a_gaussian_posterior() -> None:
    """Linear classifiers of 30 features under N(0, I), with q around the sum of the labeled features."""
    n, features, spread = 40, 30, 0.3
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(DATA_SETS, n, features, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 2, (DATA_SETS, n), generator=generator).double() * 2 - 1
    mean = torch.einsum("dnp,dn->dp", x, y) / n**0.5
    margin = torch.einsum("dnp,dp->dn", x, mean) * y / (spread * x.norm(dim=2))
    risks = torch.special.ndtr(-margin).mean(1)
    kl = 0.5 * (features * (spread**2 - 1 - 2 * math.log(spread)) + mean.square().sum(1))
    covered(risks, kl, n)


@pytest.mark.slow
def test_coverage_of_the_function_itself() -> None:
    """Logistic regression on labels of a coin, drawn weights and all: the expected error of any network is ½."""
    generator, wrong, above = torch.Generator().manual_seed(2), 0, 0
    for _ in range(100):
        x = torch.randn(60, 5, generator=generator).double()
        y = torch.randint(0, 2, (60, 1), generator=generator).double()
        network = nn.Linear(5, 1).double()
        with torch.no_grad():  # one Newton step from 0, nearly the optimum
            features = torch.cat([x, torch.ones(60, 1).double()], 1)
            theta = torch.linalg.solve(torch.eye(6).double() + features.T @ features / 4, features.T @ (y - 0.5))
            network.weight.copy_(theta[:5].T)
            network.bias.copy_(theta[5])
        posterior = ntkl.laplace(network, (x, y), ntkl.Bernoulli(), ntkl.GaussianPrior(1.0), structure="full")
        found = ntkl.risk_bound(posterior, (x, y), delta=DELTA, draws=200, generator=generator)
        wrong += found.value < 0.5
        above += found.risk < 0.5
    assert wrong <= DELTA * 100 and above > 90  # the mean loss on the data is no bound


def test_an_unbounded_log_loss_has_no_bound() -> None:
    """[L22] Eq. 15 with the log loss of a Gaussian, data with heavy tails: wrong far more often than δ."""
    n, generator = 20, torch.distributions.StudentT(torch.tensor(2.2).double())
    torch.manual_seed(0)
    y = generator.sample((500, n))
    variance = 1 / (1 + n)
    mean = variance * y.sum(1)
    risk = 0.5 * math.log(2 * math.pi) + 0.5 * ((y - mean.unsqueeze(1)).square().mean(1) + variance)
    kl = 0.5 * (variance + mean.square() - 1 - math.log(variance))
    true = 0.5 * math.log(2 * math.pi) + 0.5 * (2.2 / 0.2 + mean.square() + variance)
    bounds = [pac_bayes.mcallester(r, k, n, DELTA) for r, k in zip(risk.tolist(), kl.tolist(), strict=True)]
    assert sum(b < t for b, t in zip(bounds, true.tolist(), strict=True)) > 0.8 * 500


# --- posteriors: the first twelve points make a prior, the others the risk

FIRST, ALL = 12, 40


@functools.cache
def points() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ALL, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (ALL,), generator=generator)


def others() -> tuple[Tensor, Tensor]:
    x, y = points()
    return x[FIRST:], y[FIRST:]


@functools.cache
def network(count: int, classes: int = 3) -> nn.Module:
    """A small network at an optimum of the log joint of the first points."""
    torch.manual_seed(3)
    found = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, classes)).double()
    x, y = (part[:count] for part in points())
    optimizer = torch.optim.LBFGS(found.parameters(), max_iter=300, line_search_fn="strong_wolfe",
                                  tolerance_grad=1e-10, tolerance_change=1e-14)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(found(x), y % classes, reduction="sum")
        value = value + 0.5 * sum(p.square().sum() for p in found.parameters())
        value.backward()
        return value

    optimizer.step(loss)
    return found


def fitted(count: int, structure: Any = "full", **options: Any) -> ntkl.Posterior:
    x, y = points()
    prior = options.pop("prior", ntkl.GaussianPrior(1.0))
    return ntkl.laplace(network(count), (x[:count], y[:count]), ntkl.Categorical(), prior, structure, **options)


def gaussian(posterior: ntkl.Posterior) -> MultivariateNormal:
    matrix = posterior.posterior_precision.multiply(torch.eye(posterior.num_parameters, dtype=torch.float64))
    return MultivariateNormal(posterior.fitted.theta, precision_matrix=0.5 * (matrix + matrix.T))


@pytest.mark.slow
def test_the_divergence_of_two_posteriors() -> None:
    """All pairs of structures, precisions in other groups, a given Gaussian and a refit."""
    mine = [fitted(ALL, s, prior=ntkl.GaussianPrior(2.0, groups="layer")) for s in ("gp", "full", "kfac", "diag")]
    mine.append(fitted(FIRST).condition(others()).refit())
    x, y = points()
    mine.append(ntkl.gaussian_posterior(network(ALL), (x, y), ntkl.Categorical(), precision=torch.full((31,), 7.0)))
    theirs = [fitted(FIRST, s, prior=ntkl.GaussianPrior(0.7, groups="tensor")) for s in ("gp", "full", "kfac")]
    theirs.append(ntkl.gaussian_posterior(network(FIRST), (x[:FIRST], y[:FIRST]), ntkl.Categorical(),
                                          precision=torch.linspace(1, 9, 31)))
    for one in mine:
        for other in theirs:
            expected = kl_divergence(gaussian(one), gaussian(other))
            found = one.kl(other)
            assert float(found) == pytest.approx(float(expected), rel=1e-9)
            assert found.standard_error == 0.0
    assert float(mine[0].kl(mine[0])) == pytest.approx(0.0, abs=1e-9)
    with refused(ntkl.DataError, "same parameters", "15 parameters", "Fit"):
        mine[0].kl(last_layer(FIRST))
    with refused(ntkl.UnsupportedError, "another posterior", "GaussianPrior", "Leave"):
        mine[0].kl(ntkl.GaussianPrior())  # type: ignore[arg-type]


def last_layer(count: int) -> ntkl.Posterior:
    return fitted(count, parameters="last_layer")


def draws_of(posterior: ntkl.Posterior, count: int) -> Tensor:
    """The draws that `risk_bound` takes by default: all at once for a small network."""
    return posterior.sample(count, generator=torch.Generator().manual_seed(0))


def outputs_at(posterior: ntkl.Posterior, theta: Tensor, x: Tensor) -> Tensor:
    module = posterior.network.module
    return functional_call(module, posterior.network.unflatten(theta), (x,))


def zero_one(f: Tensor, y: Tensor) -> float:
    return float((f.argmax(1) != y).double().mean())


def log_loss(f: Tensor, y: Tensor) -> float:
    return float(nn.functional.cross_entropy(f, y, reduction="none").clamp(max=math.log(100)).mean())


def brier(f: Tensor, y: Tensor) -> float:
    return float((f.softmax(1) - nn.functional.one_hot(y, 3)).square().sum(1).mean())


def sine(f: Tensor, y: Tensor) -> Tensor:
    return 3.0 + 2.0 * torch.sin(f[:, 0] * y)


LOSSES: dict[str, tuple[Any, Callable[[Tensor, Tensor], float], float, float]] = {
    "zero-one": ("zero-one", zero_one, 0.0, 1.0), "log": ("log", log_loss, 0.0, math.log(100)),
    "brier": ("brier", brier, 0.0, 2.0), "custom": (sine, lambda f, y: float(sine(f, y).mean()), 1.0, 5.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_bound_from_a_loop_over_draws(name: str) -> None:
    """Risk, draws, divergence and δ put together by hand, for each loss, structure and kind."""
    loss, mean_loss, low, high = LOSSES[name]
    posterior, prior, (x, y), count, models = fitted(ALL, "gp"), fitted(FIRST), others(), 60, 3
    given: dict[str, Any] = {"bounds": (low, high)} if name == "custom" else {}
    risk = sum(mean_loss(outputs_at(posterior, theta, x), y) for theta in draws_of(posterior, count)) / count
    kl, share, n, span = float(posterior.kl(prior)), DELTA / models / 2, ALL - FIRST, high - low

    def excess(p: float) -> float:
        scaled = (risk - low) / span
        return float(rel_entr(scaled, p) + rel_entr(1 - scaled, 1 - p)) - math.log(2 / share) / count

    sampled = brentq(excess, (risk - low) / span, 1 - 1e-15, xtol=1e-15)
    expected = {kind: getattr(pac_bayes, kind)(sampled, kl, n, share) for kind in KINDS[:2]}
    expected["catoni"] = min(pac_bayes.catoni(sampled, kl, n, share / 8, 2.0**p) for p in range(-3, 5))
    for kind, value in expected.items():
        found = ntkl.risk_bound(posterior, (x, y), prior, loss, kind, draws=count, models=models, **given)
        assert found.risk == pytest.approx(risk, abs=1e-12)
        assert found.kl == pytest.approx(kl, rel=1e-12)
        assert found.sampled_risk == pytest.approx(low + span * sampled, abs=1e-9)
        assert float(found) == pytest.approx(low + span * min(value, 1.0), abs=1e-9)
        assert (found.n, found.prior_points, found.repeated) == (n, FIRST, 0)
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)
    if name == "custom":
        unnamed = ntkl.risk_bound(posterior, (x, y), prior, lambda f, y: sine(f, y), draws=2, **given)
        assert (found.loss, unnamed.loss) == ("sine", "custom")
    if name == "log":
        germain = ntkl.risk_bound(posterior, (x, y), prior, "log", "germain", draws=count)
        beta = np.array(math.log(100)) if models == 1 else torch.tensor([math.log(100)], dtype=torch.float64)
        same = ntkl.risk_bound(posterior, (x, y), prior, "log", "catoni", draws=count,
                               beta=beta)
        assert float(germain) == pytest.approx(float(same), abs=1e-12)
        log_z = -(n * germain.sampled_risk + kl)  # its lower bound, in place of that of Eq. 17
        printed = pac_bayes.germain(log_z, n, DELTA / 2, 0.0, high)
        assert float(germain) == pytest.approx(min(printed, high), abs=1e-12)


@pytest.mark.parametrize("loss", ["zero-one", "brier", "log"])
def test_classes_of_a_likelihood_of_ones_own(loss: str) -> None:
    """Its targets say that each is one label."""
    data = points()
    own = ntkl.CustomLikelihood(lambda f, y: -nn.functional.cross_entropy(f, y, reduction="none"),
                                mean=lambda f: f.softmax(1), classifies=True)
    first, second = (ntkl.risk_bound(ntkl.laplace(network(ALL), data, likelihood, structure="full"), data, loss=loss,
                                     draws=20) for likelihood in (own, ntkl.Categorical()))
    assert first.risk == pytest.approx(second.risk, rel=1e-9) and first.chance == second.chance


def test_a_fixed_prior_takes_the_divergence_from_it_and_little_memory_the_same_risk() -> None:
    x, y = points()
    wide = fitted(ALL)
    narrow = fitted(ALL, settings=ntkl.Settings(memory_budget=60_000))
    first, second = (ntkl.risk_bound(one, (x, y), draws=50, delta=0.1) for one in (wide, narrow))
    assert first.kl == pytest.approx(float(wide.kl()), rel=1e-12)
    assert first.risk == pytest.approx(second.risk, abs=1e-12)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=7)
    assert ntkl.risk_bound(wide, loader, draws=50, delta=0.1) == first
    one, other = (ntkl.risk_bound(wide, (x, y), loss="brier", draws=50, generator=generator)
                  for generator in (None, torch.Generator().manual_seed(5)))
    assert one.risk != other.risk


def test_binary_labels_and_outputs_that_are_not_finite() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    y = (torch.rand(20, 2, generator=generator) < 0.5).double()
    own = nn.Linear(3, 2).double()
    posterior = ntkl.laplace(own, (x, y), ntkl.Bernoulli(), ntkl.GaussianPrior(1.0), "full")
    fs = torch.stack([outputs_at(posterior, theta, x) for theta in draws_of(posterior, 30)])
    p = torch.sigmoid(fs)
    joint = torch.distributions.Bernoulli(p).log_prob(y).sum(-1)
    expected = {"zero-one": ((p > 0.5) != (y > 0.5)).double().mean(), "brier": 2 * (p - y).square().mean(),
                "log": -joint.clamp(min=math.log(0.01)).mean()}
    for loss, value in expected.items():
        assert ntkl.risk_bound(posterior, (x, y), loss=loss, draws=30).risk == pytest.approx(float(value), abs=1e-12)

    class Overflows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(own)

        def forward(self, x: Tensor) -> Tensor:
            return torch.where(self.inner.weight.sum() > own.weight.sum(), torch.inf, 1.0) * self.inner(x)

    broken = ntkl.gaussian_posterior(Overflows(), (x, y), ntkl.Bernoulli(), precision=torch.ones(8))
    half = ntkl.risk_bound(broken, (x, y), draws=30)
    assert 0.55 < half.risk < 0.95  # about half of the draws have the largest loss


def test_labels_at_many_positions() -> None:
    """One position is the likelihood itself; several are a mean of their losses, or the sum of their densities."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    for inner, classes in ((ntkl.Categorical(), 3), (ntkl.Bernoulli(), 2)):
        y = torch.randint(0, classes, (30, 4), generator=generator)
        per = classes if classes == 3 else 1
        own = nn.Linear(3, per).double()
        alone, placed = (ntkl.laplace(own, (x, y[:, :1] if positions else y[:, 0]),
                                      ntkl.Everywhere(inner, 1) if positions else inner,
                                      ntkl.GaussianPrior(1.0), "full") for positions in (False, True))
        wide = ntkl.laplace(nn.Linear(3, 4 * per).double(), (x, y), ntkl.Everywhere(inner), ntkl.GaussianPrior(1.0),
                            "full")
        fs = torch.stack([outputs_at(wide, theta, x) for theta in draws_of(wide, 30)]).unflatten(-1, (4, per))
        p = fs.softmax(-1) if per == 3 else torch.cat([1 - fs.sigmoid(), fs.sigmoid()], -1)
        chosen = p.gather(-1, y.expand(30, -1, -1).unsqueeze(-1)).squeeze(-1)
        right = nn.functional.one_hot(y, classes)
        expected = {"zero-one": (p.argmax(-1) != y).double().mean(), "brier": (p - right).square().sum(-1).mean(),
                    "log": -chosen.log().sum(-1).clamp(min=math.log(0.01)).mean()}
        for loss, value in expected.items():
            one, other = (ntkl.risk_bound(posterior, (x, labels), loss=loss, draws=30)
                          for posterior, labels in ((alone, y[:, 0]), (placed, y[:, :1])))
            assert one.risk == pytest.approx(other.risk, abs=1e-12) and one.chance == pytest.approx(other.chance)
            found = ntkl.risk_bound(wide, (x, y), loss=loss, draws=30)
            assert found.risk == pytest.approx(float(value), abs=1e-12)
            assert found.chance == pytest.approx((4 if loss == "log" else 1) * one.chance)


def test_the_linearized_network_of_the_first_points() -> None:
    prior, (x, y) = fitted(FIRST), others()
    posterior = prior.condition((x, y)).refit()
    found = ntkl.risk_bound(posterior, (x, y), prior, model="glm", draws=40)
    theta = prior.network.theta
    jacobian = jacrev(lambda theta: outputs_at(prior, theta, x))(theta)
    f = outputs_at(prior, theta, x)
    losses = [zero_one(f + jacobian @ (drawn - theta), y) for drawn in draws_of(posterior, 40)]
    assert found.risk == pytest.approx(sum(losses) / 40, abs=1e-12)
    assert found.kl == pytest.approx(float(kl_divergence(gaussian(posterior), gaussian(prior))), rel=1e-9)


def test_words() -> None:
    posterior, prior = fitted(ALL), fitted(FIRST)
    found = ntkl.risk_bound(posterior, others(), prior, draws=100, models=4)
    assert repr(found).startswith(f"RiskBound({found.value:.4f}, loss='zero-one', kind='seeger', risk=")
    assert found.vacuous and repr(found).endswith(", vacuous)")  # 28 points and three classes
    for words in ("random network", "probability 0.95, for each of 4 models", "vacuous", "28 points", "100 draws",
                  "prior given 12 other points"):
        assert words in str(found)
    assert found.chance == pytest.approx(2 / 3) and found.value > found.chance
    tight = ntkl.risk_bound(posterior, others(), prior, lambda f, y: 0.0 * f[:, 0], bounds=(0, 1), draws=100)
    assert not tight.vacuous and "vacuous" not in str(tight) and 0 < float(tight) < 1


@pytest.mark.parametrize("loss", ["log", "brier"])
@pytest.mark.parametrize(("likelihood", "outputs"), [(ntkl.Categorical(), 3), (ntkl.Bernoulli(), 2)])
def test_a_bound_above_a_guess_is_vacuous(loss: str, likelihood: ntkl.Likelihood, outputs: int) -> None:
    """The guess is what a network without weights says."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).double()
    y = torch.arange(40) % 3 if outputs == 3 else torch.stack([torch.arange(40) % 2, torch.arange(40) % 3 > 1], 1)
    silent = nn.Linear(3, outputs).double()
    nn.init.zeros_(silent.weight)
    nn.init.zeros_(silent.bias)
    given = ntkl.gaussian_posterior(silent, (x, y), likelihood, ntkl.GaussianPrior(1.0, mean=0.1),
                                    precision=torch.full((4 * outputs,), 1e12).double())
    found = ntkl.risk_bound(given, (x, y), loss=loss, draws=np.int64(20), models=np.int64(2))  # type: ignore
    assert found.chance == pytest.approx(found.risk, rel=1e-5) and found.chance < found.value
    assert found.vacuous and "a guess has" in str(found) and repr(found).endswith(", vacuous)")
    assert type(found.value) is float and type(found.draws) is type(found.models) is int
    counts = ntkl.gaussian_posterior(nn.Linear(3, 1).double(), (x, y[:, None] if outputs == 3 else y[:, :1]),
                                     ntkl.Poisson(), precision=torch.ones(4).double())
    assert ntkl.risk_bound(counts, (x, torch.ones(40, 1)), loss="log", draws=5).chance is None


def test_nothing_of_the_caller_changes() -> None:
    module, state = network(ALL), torch.get_rng_state()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    posterior = fitted(ALL)
    values = [ntkl.risk_bound(posterior, points(), draws=20) for _ in range(2)]
    assert values[0] == values[1]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


# --- what is not a bound


def test_unbounded_losses() -> None:
    x, _ = points()
    regression = ntkl.laplace(nn.Linear(3, 1).double(), (x, x[:, :1]), ntkl.Gaussian(0.1), structure="full")
    data = x, x[:, :1]
    with refused(ntkl.UnsupportedError, "bounded loss: the log loss of a density", "no bound", "Clip"):
        ntkl.risk_bound(regression, data, loss="log")
    with refused(ntkl.UnsupportedError, "likelihood of classes", "Gaussian", "Clip"):
        ntkl.risk_bound(regression, data)
    with refused(ntkl.UnsupportedError, "a bounded loss", "'squared'", "Clip"):
        ntkl.risk_bound(regression, data, loss="squared")
    for bounds in (None, (0.0, math.inf), (1.0, 1.0), 3):
        with refused(ntkl.UnsupportedError, "bounds=", "bounds=", "Clip"):
            ntkl.risk_bound(regression, data, loss=lambda f, y: (f - y).square()[:, 0], bounds=bounds)  # type: ignore
    with refused(ntkl.DataError, "losses between", "values from", "hold for every weight"):
        ntkl.risk_bound(regression, data, loss=lambda f, y: 9 * (f - y).square()[:, 0], bounds=(0, 1))
    with refused(ntkl.DataError, "one per example", r"\(\)", "one number"):
        ntkl.risk_bound(regression, data, loss=lambda f, y: f.mean(), bounds=(0, 1))
    with refused(ntkl.HyperparameterError, "p_min", "p_min=0", "0.01"):
        ntkl.risk_bound(fitted(ALL), points(), loss="log", p_min=0.0)
    clipped = ntkl.risk_bound(regression, data, loss=lambda f, y: (f - y).square()[:, 0].clamp(max=1), bounds=(0, 1))
    assert clipped.chance is None and clipped.value <= 1.0


def test_tuned_precisions_and_losses(tmp_path: Path) -> None:
    tuned = fitted(ALL)
    tuned.fit_hyperparameters()
    with refused(ntkl.UnsupportedError, "fixed before the data", "optimized", "models=k"):
        ntkl.risk_bound(tuned, points())
    training = ntkl.train_with_evidence(copy.deepcopy(network(FIRST)), tuple(p[:FIRST] for p in points()),
                                        ntkl.Categorical(), epochs=6, batch_size=None)
    with refused(ntkl.UnsupportedError, "fixed before the data", "optimized", "models=k"):
        ntkl.risk_bound(training.posterior, tuple(p[:FIRST] for p in points()))
    again = fitted(ALL, prior=training.posterior.prior)  # a copy of a tuned prior is tuned
    with refused(ntkl.UnsupportedError, "fixed before the data", "optimized", "models=k"):
        ntkl.risk_bound(again, points())
    tuned.save(tmp_path / "tuned.pt", include_data=True)
    with refused(ntkl.UnsupportedError, "fixed before the data", "optimized", "models=k"):
        ntkl.risk_bound(ntkl.load(tmp_path / "tuned.pt", network(ALL)), points())
    prior = ntkl.load(tmp_path / "tuned.pt", network(ALL), data=points()).prior
    prior.precision = 3.0
    assert prior.as_given  # a number that the caller chose
    assert ntkl.risk_bound(fitted(ALL, prior=prior), points(), draws=10, models=5).models == 5
    # a posterior of other points may have tuned its own
    assert ntkl.risk_bound(fitted(ALL), others(), training.posterior, draws=10).prior_points == FIRST
    cold = fitted(ALL)
    cold.likelihood.temperature = 0.5
    with refused(ntkl.UnsupportedError, "loss that was fixed", "likelihood", "Fit"):
        ntkl.risk_bound(cold, points(), loss="log")
    assert ntkl.risk_bound(cold, points(), draws=10).loss == "zero-one"  # it does not depend on the temperature


def test_priors_and_networks_that_saw_the_data() -> None:
    theta = torch.cat([p.detach().flatten() for p in network(ALL).parameters()])
    for mean in (theta, theta.float().double(), theta * (1 + 1e-9)):
        with refused(ntkl.UnsupportedError, "prior mean", "trained weights", "mean of 0"):
            ntkl.risk_bound(fitted(ALL, prior=ntkl.GaussianPrior(1.0, mean=mean)), points())
    other = theta * (1 + 1e-3 * torch.randn(len(theta), generator=torch.Generator().manual_seed(0)))
    assert ntkl.risk_bound(fitted(ALL, prior=ntkl.GaussianPrior(1.0, mean=other)), points(), draws=5).n == 40
    with refused(ntkl.UnsupportedError, "everything that was trained", "'0.weight'", "Linearize all"):
        ntkl.risk_bound(last_layer(ALL), points())
    with refused(ntkl.UnsupportedError, "agree in all", "2 tensors that differ, '0.weight'", "Linearize"):
        ntkl.risk_bound(last_layer(ALL), others(), last_layer(FIRST))
    normed = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double().eval()
    posterior = ntkl.laplace(normed, points(), ntkl.Categorical(), structure="full")
    with refused(ntkl.UnsupportedError, "everything that was trained", "running_mean", "Linearize all"):
        ntkl.risk_bound(posterior, points())


def test_linearizations_that_saw_the_data() -> None:
    for structure in ("gp", "full"):
        with refused(ntkl.UnsupportedError, "linearized before", "features J", "condition"):
            ntkl.risk_bound(fitted(ALL, structure), points(), model="glm")
        with refused(ntkl.UnsupportedError, "prior_posterior shares", "trained on the data", "condition"):
            ntkl.risk_bound(fitted(ALL, structure), others(), fitted(FIRST), model="glm")


def test_points_of_the_prior() -> None:
    posterior, prior = fitted(ALL), fitted(FIRST)
    with refused(ntkl.DataError, "has not seen", "12 of 40 points", "Train a network"):
        ntkl.risk_bound(posterior, points(), prior)
    x, y = points()
    found = ntkl.risk_bound(posterior, (x[FIRST - 2 :], y[FIRST - 2 :]), prior, draws=10)
    assert found.repeated == 2 and "2 of the points equal" in str(found)
    # fitted to the first points, at weights that were trained on all
    for apart in (posterior.subset(range(FIRST)), fitted(ALL, "gp").subset(range(FIRST))):
        with refused(ntkl.DataError, "weights that were trained on its own points", "subset", "Train a network"):
            ntkl.risk_bound(posterior, others(), apart)
        with refused(ntkl.DataError, "weights that were trained on its own points", "subset", "Train a network"):
            ntkl.risk_bound(posterior.refit(), others(), apart, model="glm")
    with refused(ntkl.UnsupportedError, "fitted to other points", "what-if", "Train a network"):
        ntkl.risk_bound(posterior, others(), posterior.remove(range(FIRST, ALL)))


def test_discrete_data_repeat_themselves() -> None:
    """Points that are equal by chance, as often as in the prior's own, are no points of the prior."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randint(0, 2, (60, 2), generator=generator).double()
    y = torch.randint(0, 2, (60, 1), generator=generator).double()
    first, last = nn.Linear(2, 1).double(), nn.Linear(2, 1).double()
    prior = ntkl.laplace(first, (x[:30], y[:30]), ntkl.Bernoulli(), structure="full")
    posterior = ntkl.laplace(last, (x, y), ntkl.Bernoulli(), structure="full")
    assert ntkl.risk_bound(posterior, (x[30:], y[30:]), prior, draws=10).repeated == 30


def test_posteriors_that_a_what_if_changed() -> None:
    posterior = fitted(ALL, "gp")
    for changed in (posterior.remove([3]), posterior.refit(), posterior.remove([3]).relinearize(points()[0])):
        with refused(ntkl.UnsupportedError, "unchanged training data", "what-if changed", "Pass the posterior before"):
            ntkl.risk_bound(changed, points())


def test_data_that_are_no_sample() -> None:
    (x, y), posterior = points(), fitted(ALL)
    with refused(ntkl.DataError, "count once", "weights", "without weights"):
        ntkl.risk_bound(posterior, (x, y, torch.ones(ALL)))
    with refused(ntkl.DataError, "have a target", "missing", "Leave"):
        ntkl.risk_bound(posterior, (x, y.index_fill(0, torch.tensor([1]), -100)))
    with refused(ntkl.DataError, "hard labels", "probabilities", "log"):
        ntkl.risk_bound(posterior, (x, nn.functional.one_hot(y, 3).double()))


def test_a_divergence_that_is_an_estimate() -> None:
    """Where the log determinant has an error bar."""
    posterior = fitted(ALL, ntkl.Iterative(rank=4, probes=8, relative_error=0.5))
    with refused(ntkl.UnsupportedError, "exact divergence", "an estimate", "full"):
        ntkl.risk_bound(posterior, points())


def test_options() -> None:
    posterior, data = fitted(ALL), points()
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (ntkl.UnsupportedError, {"kind": "hoeffding"}), (ntkl.UnsupportedError, {"model": "map"}),
        (ntkl.HyperparameterError, {"delta": 0.0}), (ntkl.HyperparameterError, {"delta": 1}),
        (ntkl.HyperparameterError, {"draws": 0}), (ntkl.HyperparameterError, {"models": 0}),
        (ntkl.HyperparameterError, {"models": 1.5}), (ntkl.UnsupportedError, {"beta": 1.0}),
        (ntkl.HyperparameterError, {"beta": -1.0, "kind": "catoni"}), (ntkl.UnsupportedError, {"kind": "germain"}),
        (ntkl.HyperparameterError, {"beta": [], "kind": "catoni"}), (ntkl.UnsupportedError, {"generator": 3}),
        (ntkl.UnsupportedError, {"bounds": (0, 1)}), (ntkl.UnsupportedError, {"prior_posterior": network(FIRST)}),
    ]
    for error, options in wrong:
        with refused(error, "", "", ""):
            ntkl.risk_bound(posterior, data, **options)
    with refused(ntkl.UnsupportedError, "Posterior", "Sequential", "laplace"):
        ntkl.risk_bound(network(ALL), data)  # type: ignore[arg-type]
