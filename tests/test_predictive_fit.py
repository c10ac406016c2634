"""Calibrations fitted to left-out and held-out points: against hand-written densities and fine grids."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.model.likelihoods.covariances import covariance_root
from ntk_laplace.model.predictive import normal_points, predictive
from ntk_laplace.posterior.calibrate import LeftOut, densities, log_density_terms
from refusals import refused


def trained(
    likelihood: ntkl.Likelihood, x: Tensor, y: Tensor, outputs: int, precision: float = 1.0
) -> nn.Sequential:
    """A small network at the optimum of its log joint."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(x.shape[1], 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        energy = sum((p.square().sum() for p in network.parameters()), torch.zeros(()))
        loss = 0.5 * precision * energy - likelihood.log_prob(network(x), y).sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    return network


def classes(n: int = 30, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(n, 2).double()
    return x, (torch.atan2(x[:, 1] + 0.5 * torch.randn(n), x[:, 0]) / (2 * math.pi / 3) + 1.5).long().clamp(0, 2)


def line(n: int = 25, outputs: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(n, 1).double()
    return x, torch.sin(2 * x) * torch.arange(1, outputs + 1) + 0.3 * torch.randn(n, outputs).double()


def unfinished(data: tuple[Tensor, Tensor], noise: ntkl.Likelihood, steps: int = 60) -> ntkl.Posterior:
    """Of a network with kinks, after few steps."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, data[1].shape[1])).double()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    weights = torch.linspace(0.5, 2.0, len(data[0])).double()
    for _ in range(steps):
        optimizer.zero_grad()
        error = torch.where(data[1].isnan(), 0.0, network(data[0]) - data[1].nan_to_num())
        energy = sum((p.square().sum() for p in network.parameters()), torch.zeros(()))
        (0.25 * energy + (weights * error.square().sum(1)).sum() / 0.1).backward()
        optimizer.step()
    return ntkl.laplace(network, (*data, weights), noise, ntkl.GaussianPrior(0.5, groups="layer"))


@pytest.fixture(scope="module")
def classifier() -> ntkl.Posterior:
    x, y = classes(50, seed=3)  # the best scale is not zero here
    network = trained(ntkl.Categorical(), x, y, 3, precision=0.1)
    return ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(0.1))


@pytest.fixture(scope="module")
def regression() -> ntkl.Posterior:
    x, y = line()
    likelihood = ntkl.Gaussian(0.05)
    return ntkl.laplace(trained(likelihood, x, y, 1), (x, y), likelihood)


def class_score(mean: Tensor, covariance: Tensor, y: Tensor, c: float, temperature: float) -> float:
    """Mean of log E softmax((m + √c V^½ z)/T)[y], point by point."""
    z, total = normal_points(1000, mean.shape[1]), 0.0
    for m, v, label in zip(mean, covariance, y, strict=True):
        values, vectors = torch.linalg.eigh(v)
        root = vectors @ torch.diag(values.clamp_min(0).sqrt()) @ vectors.T
        total += float(torch.softmax((m + math.sqrt(c) * z @ root) / temperature, 1)[:, label].mean().log())
    return total / len(y)


def normal_scores(mean: Tensor, covariance: Tensor, y: Tensor, c: float, noise: float) -> Tensor:
    return torch.distributions.Normal(mean[:, 0], (c * covariance[:, 0, 0] + noise).sqrt()).log_prob(y[:, 0])


def normal_score(*arguments: Any) -> float:
    return float(normal_scores(*arguments).mean())


def mean_of(found: Any, calibration: ntkl.Calibration) -> float:
    return float(log_density_terms(found, calibration).sum())


# --- the fit

@pytest.mark.slow
def test_classes_are_fitted_to_the_optimum_of_a_fine_grid(classifier: ntkl.Posterior) -> None:
    found = classifier.leave_one_out()
    fit = classifier.fit_predictive(strict=False)
    best = class_score(found.mean, found.covariance, classifier.targets, fit.scale, fit.temperature)
    assert fit.after == pytest.approx(best, abs=1e-9)
    around = [class_score(found.mean, found.covariance, classifier.targets, fit.scale * a, fit.temperature * b)
              for a in (0.97, 1.0, 1.03) for b in (0.99, 1.0, 1.01)]
    grid = [class_score(found.mean, found.covariance, classifier.targets, c, t)
            for c in torch.logspace(-3, 1.2, 9).tolist() for t in torch.logspace(-0.8, 0.8, 9).tolist()]
    assert fit.scale > 0 and max(around + grid) <= best + 1e-7
    assert fit.before == pytest.approx(class_score(found.mean, found.covariance, classifier.targets, 1.0, 1.0))
    assert fit.network == pytest.approx(class_score(found.mean, found.covariance, classifier.targets, 0.0, 1.0))
    assert fit.after > max(fit.before, fit.network)


def test_a_gaussian_is_fitted_to_the_optimum_of_a_fine_grid(regression: ntkl.Posterior) -> None:
    found, y = regression.leave_one_out(), regression.targets
    fit = regression.fit_predictive(strict=False)
    own = float(regression.likelihood.noise)
    best = normal_score(found.mean, found.covariance, y, fit.scale, fit.noise * own)
    assert fit.after == pytest.approx(best, abs=1e-12)
    grid = [normal_score(found.mean, found.covariance, y, c, own * s)
            for c in [0.0, *torch.logspace(-3, 1.3, 60).tolist()] for s in torch.logspace(-1.3, 2, 60).tolist()]
    assert best >= max(grid) - 1e-9
    assert fit.network == pytest.approx(normal_score(found.mean, found.covariance, y, 0.0, own))
    scores = normal_scores(found.mean, found.covariance, y, fit.scale, fit.noise * own)
    gains = scores - normal_scores(found.mean, found.covariance, y, 0.0, own)
    assert fit.standard_error == pytest.approx(float(scores.std()) / len(y) ** 0.5, rel=1e-9)
    assert fit.gain == pytest.approx(float(gains.mean()), rel=1e-9)
    assert fit.gain_error == pytest.approx(float(gains.std()) / len(y) ** 0.5, rel=1e-9)
    assert f"{fit.after:.4f} ± {fit.standard_error:.2g} nats" in str(fit)
    fit = regression.fit_predictive(parameters="common", strict=False)
    variance = found.covariance[:, 0, 0] + own
    assert fit.scale == fit.noise == pytest.approx(float(((y - found.mean)[:, 0].square() / variance).mean()))


def test_a_scale_of_zero_is_chosen_where_the_covariance_only_adds_error() -> None:
    x, y = classes()
    network = trained(ntkl.Categorical(), x, y, 3)
    posterior = ntkl.laplace(network, (x, y), ntkl.Categorical())
    certain = posterior.predict(x, "map").probs.argmax(1)  # labels that the network is too cautious about
    fit = posterior.fit_predictive((x, certain), parameters="scale")
    assert fit.scale == 0.0 and fit.after == fit.network > fit.before
    assert torch.allclose(posterior.predict(x).probs, torch.softmax(network(x), 1))


@pytest.mark.parametrize("kind", ["covariance", "output"])
def test_normal_densities_are_those_of_the_response(kind: str) -> None:
    torch.manual_seed(0)
    noise = torch.tensor([[0.5, 0.2], [0.2, 0.9]]) if kind == "covariance" else torch.tensor([0.5, 0.9])
    likelihood = ntkl.Gaussian(noise.double(), kind, missing="nan")
    mean, half, y = torch.randn(4, 2).double(), torch.randn(4, 2, 2).double(), torch.randn(4, 2).double()
    y[0, 0] = y[2, 1] = torch.nan
    weights = torch.tensor([1.0, 2.0, 0.5, 1.0]).double()
    found = densities(likelihood, LeftOut(mean, half @ half.mT, y, weights))
    scaled = ntkl.Gaussian(1.7 * noise.double(), kind, missing="nan")
    expected = scaled.integrate(mean, 0.3 * half @ half.mT).log_prob(y).detach() @ weights / weights.sum()
    calibration = ntkl.Calibration(scale=0.3, noise=1.7)
    assert mean_of(found, calibration) == pytest.approx(float(expected), abs=1e-12)
    assert torch.allclose(likelihood.scaled_noise(1.7).response_covariance(mean), scaled.response_covariance(mean))


def test_weights_count_as_repetitions_and_removed_points_do_not_count() -> None:
    torch.manual_seed(0)
    mean, half, y = torch.randn(3, 3).double(), torch.randn(3, 3, 3).double(), torch.tensor([0, 2, 1])
    moments = mean, half @ half.mT, y
    weighted = densities(ntkl.Categorical(), LeftOut(*moments, torch.tensor([2.0, 0.0, 1.0]).double()))
    index = torch.tensor([0, 0, 2])
    repeated = densities(ntkl.Categorical(), LeftOut(*(t[index] for t in moments), torch.ones(3).double()))
    calibration = ntkl.Calibration(scale=0.4, temperature=1.3)
    assert mean_of(weighted, calibration) == pytest.approx(mean_of(repeated, calibration), abs=1e-12)
    with pytest.raises(ntkl.DataError, match="at least one point"):
        densities(ntkl.Categorical(), LeftOut(*moments, torch.zeros(3).double()))


@pytest.mark.parametrize("soft", [False, True])
def test_chunks_and_soft_labels_do_not_change_the_density(monkeypatch: pytest.MonkeyPatch, soft: bool) -> None:
    torch.manual_seed(0)
    mean, half = torch.randn(6, 3).double(), torch.randn(6, 3, 3).double()
    y = torch.softmax(torch.randn(6, 3).double(), 1) if soft else torch.randint(3, (6,))
    points = LeftOut(mean, half @ half.mT, y, torch.ones(6).double())
    calibration = ntkl.Calibration(scale=0.5, temperature=0.8)
    whole = mean_of(densities(ntkl.Categorical(), points), calibration)
    samples = mean / 0.8 + math.sqrt(0.5) / 0.8 * torch.einsum(
        "ncd,sd->snc", covariance_root(half @ half.mT), normal_points(1000, 3))
    log_p = torch.softmax(samples, 2).mean(0).log()
    expected = (y * log_p).sum(1) if soft else log_p.gather(1, y.unsqueeze(1))
    assert whole == pytest.approx(float(expected.mean()), abs=1e-10)
    found = densities(ntkl.Categorical(), points)
    monkeypatch.setattr("ntk_laplace.runtime.tuning.AVERAGED_OUTPUTS", 2 * 1000 * 3)
    assert mean_of(found, calibration) == pytest.approx(whole, abs=1e-12)


# --- predictions

@pytest.mark.parametrize("method", ["glm", "probit", "blr"])
def test_predictions_use_the_calibration_once(classifier: ntkl.Posterior, method: str) -> None:
    fit = classifier.fit_predictive(strict=False)
    x = classes(7, seed=3)[0]
    mean, covariance = classifier.latent_moments(x)
    t = fit.temperature
    plain = ntkl.laplace(classifier.network.module, classes(50, seed=3), ntkl.Categorical(), ntkl.GaussianPrior(0.1))
    expected = predictive(ntkl.Categorical(), mean / t, fit.scale * covariance / t**2, method)
    assert torch.allclose(classifier.predict(x, method).mean, expected.mean, atol=1e-12)
    assert torch.allclose(classifier.predict(x, method, calibrated=False).mean, plain.predict(x, method).mean)
    own = classifier.predict(x, method, likelihood=ntkl.Categorical(2.0)).mean
    assert torch.allclose(own, plain.predict(x, method, likelihood=ntkl.Categorical(2.0)).mean)


def test_the_noise_of_predictions_is_scaled(regression: ntkl.Posterior) -> None:
    fit = regression.fit_predictive(strict=False)
    x = torch.linspace(-3, 3, 5).double().unsqueeze(1)
    covariance = regression.latent_moments(x)[1][:, 0, 0]
    expected = fit.scale * covariance + fit.noise * regression.likelihood.noise.detach()
    assert torch.allclose(regression.predict(x).variance[:, 0], expected)
    before = regression.predict(x, calibrated=False).variance[:, 0]
    assert torch.allclose(before, covariance + regression.likelihood.noise.detach())


def test_the_average_has_a_temperature_of_its_own(classifier: ntkl.Posterior) -> None:
    x, y = classes(20, seed=5)
    fit = classifier.calibrate((x, y), temperature="average")
    t = fit.calibration.average_temperature
    assert fit.temperature == 1.0 and t != 1.0
    mean, covariance = classifier.latent_moments(x)
    z = normal_points(1000, 3)
    values, vectors = torch.linalg.eigh(fit.scale * covariance)
    root = vectors @ torch.diag_embed(values.clamp_min(0).sqrt()) @ vectors.mT
    averaged = torch.softmax(mean + torch.einsum("ncd,sd->snc", root, z), 2).mean(0)
    expected = torch.softmax(averaged.log() / t, 1)
    response = classifier.predict(x)
    assert torch.allclose(response.probs, expected, atol=1e-10)
    assert torch.allclose(response.variance, expected * (1 - expected), atol=1e-10)
    assert fit.after == pytest.approx(float(response.log_prob(y).mean()), abs=1e-9)
    alone = classifier.calibrate((x, y), temperature="network")  # temperature scaling
    assert alone.scale == 0.0 and alone.calibration.average_temperature == 1.0
    scores = [nn.functional.cross_entropy(mean / t, y) for t in (alone.temperature * torch.tensor([0.98, 1, 1.02]))]
    assert scores[1] == min(scores) and alone.after == pytest.approx(-float(scores[1]), abs=1e-7)
    draws = classifier.calibrate((x, y), temperature="draws")
    assert draws.calibration.average_temperature == 1.0 and draws.temperature != 1.0


def test_options_without_a_meaning_are_refused() -> None:
    """The network of counts has no temperature, and held-out data leave no points out."""
    x = torch.linspace(-1, 1, 12).double().unsqueeze(1)
    data = x, torch.arange(12.0).double().unsqueeze(1) % 3
    posterior = ntkl.laplace(nn.Linear(1, 1).double(), data, ntkl.Poisson())
    with refused(ntkl.UnsupportedError, "classes, or additive noise", "a Poisson likelihood", "Leave temperature out"):
        posterior.calibrate(data, temperature="network")
    with refused(ntkl.UnsupportedError, "points= with objective", "held-out data", "Leave points= out"):
        posterior.fit_predictive(data, points=[0, 1])
    assert posterior.calibrate(data).scale >= 0.0


@pytest.mark.parametrize("temperature", ["draws", "average", "network"])
def test_held_out_numbers_are_those_of_a_grid_of_one_in_ten_thousand(temperature: str) -> None:
    """T and c maximize the mean log density on grids of relative step 1e-4; accuracy and random state do not change."""
    x, y = classes(20, seed=3)
    posterior = ntkl.laplace(trained(ntkl.Categorical(), x, y, 3, precision=0.3), (x, y), ntkl.Categorical(),
                             ntkl.GaussianPrior(0.3))
    x, y = classes(40, seed=9)  # few enough for the search to take all points of f
    outputs, state = posterior.network.module(x), torch.random.get_rng_state()
    fit = posterior.calibrate((x, y), temperature=temperature)
    assert torch.equal(torch.random.get_rng_state(), state) and torch.equal(posterior.network.module(x), outputs)
    mean, covariance = posterior.latent_moments(x)
    f_away = torch.einsum("ncd,sd->snc", covariance_root(covariance), normal_points(1000, 3))
    t = fit.calibration.average_temperature if temperature == "average" else fit.temperature
    assert (fit.scale == 0.0) == (temperature == "network")

    def score(scale: float, t: float) -> float:
        f = mean + math.sqrt(scale) * (f_away if scale else f_away[:1])
        draws, average = (1.0, t) if temperature == "average" else (t, 1.0)
        averaged = torch.log_softmax(f / draws, 2).logsumexp(0) - math.log(len(f))
        return float(torch.log_softmax(averaged / average, 1).gather(1, y[:, None]).mean())

    near = [1e-4 * step for step in range(-20, 21)]
    values = [score(fit.scale, t * (1 + step)) for step in near]
    assert abs(near[values.index(max(values))]) < 1.5e-4
    if fit.scale:
        values = [score(fit.scale * (1 + step), t) for step in near]
        assert abs(near[values.index(max(values))]) < 1.5e-4
    assert fit.after == pytest.approx(score(fit.scale, t), abs=1e-9)
    plain = outputs.argmax(1)
    assert torch.equal(posterior.predict(x, "map").probs.argmax(1), plain)


@pytest.mark.parametrize("binary", [False, True])
def test_a_temperature_of_the_average_keeps_the_shares_of_the_variance(binary: bool) -> None:
    x, y = classes(20)
    likelihood: ntkl.Likelihood = ntkl.Bernoulli() if binary else ntkl.Categorical()
    y = (y > 0).double() if binary else y
    network = trained(likelihood, x, y.unsqueeze(1) if binary else y, 1 if binary else 3)
    posterior = ntkl.laplace(network, (x, y), likelihood)
    plain = posterior.predict(x)
    posterior.predictive = ntkl.Calibration(average_temperature=2.0)
    found = posterior.predict(x)
    powers = torch.stack([1 - plain.probs, plain.probs]).sqrt() if binary else plain.probs.sqrt()
    expected = powers[1] / powers.sum(0) if binary else powers / powers.sum(1, keepdim=True)
    assert torch.allclose(found.probs, expected)
    assert torch.allclose(found.variance, expected * (1 - expected))
    assert torch.allclose(found.epistemic / found.variance, plain.epistemic / plain.variance)


def test_binary_labels_have_both_temperatures() -> None:
    x, y = classes()
    y = (y > 0).double()
    posterior = ntkl.laplace(trained(ntkl.Bernoulli(), x, y.unsqueeze(1), 1), (x, y), ntkl.Bernoulli())
    x, y = classes(40, seed=5)
    y = (y > 0).double()
    for name in ("draws", "average"):
        fit = posterior.calibrate((x, y), temperature=name)
        assert fit.after == pytest.approx(float(posterior.predict(x).log_prob(y).mean()), abs=1e-9)
        assert fit.after > fit.before


@pytest.mark.parametrize("structure", ["full", "kfac", "diag"])
def test_held_out_data_calibrate_every_structure(structure: str) -> None:
    x, y = classes()
    posterior = ntkl.laplace(trained(ntkl.Categorical(), x, y, 3), (x, y), ntkl.Categorical(), structure=structure)
    held_out = classes(40, seed=9)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*held_out), 16)
    fit = posterior.calibrate(loader)
    assert fit.objective == "held-out data" and fit.num_points == 40 and fit.reliability is None
    assert fit.after == pytest.approx(float(posterior.predict(held_out[0]).log_prob(held_out[1]).mean()), abs=1e-9)
    assert fit.after >= max(fit.before, fit.network)


# --- how long it holds

def test_the_calibration_ends_with_the_hyperparameters_it_was_fitted_at(classifier: ntkl.Posterior) -> None:
    classifier.fit_predictive(strict=False)
    assert "predictive: covariance times" in repr(classifier) and classifier.predictive is not None
    assert classifier.remove([0]).predictive is None and classifier.subset(range(20)).predictive is None
    before = classifier.prior.precision
    classifier.prior.precision = 2.0
    assert classifier.predictive is None and "predictive" not in repr(classifier)
    classifier.prior.precision = before
    assert classifier.predictive is not None  # a look at other hyperparameters changes nothing
    classifier.predictive = ntkl.Calibration(scale=0.5)
    assert classifier.predictive.scale == 0.5
    with pytest.raises(ntkl.UnsupportedError, match="a Calibration"):
        classifier.predictive = 0.5


def test_evidence_and_latent_moments_do_not_change(classifier: ntkl.Posterior) -> None:
    x = classes(5, seed=2)[0]
    classifier.predictive = None
    before = classifier.latent_moments(x), classifier.log_marginal_likelihood(), classifier.leave_one_out().log_density
    classifier.fit_predictive(strict=False)
    after = classifier.latent_moments(x), classifier.log_marginal_likelihood(), classifier.leave_one_out().log_density
    assert torch.equal(before[0][1], after[0][1])
    assert torch.equal(before[1], after[1]) and torch.equal(before[2], after[2])


def test_a_checkpoint_keeps_the_calibration(classifier: ntkl.Posterior, tmp_path: Path) -> None:
    classifier.fit_predictive(strict=False)
    classifier.save(tmp_path / "p.pt", include_data=True)
    again = ntkl.load(tmp_path / "p.pt", classifier.network.module)
    x = classes(5, seed=2)[0]
    assert again.predictive == classifier.predictive
    assert torch.allclose(again.predict(x).probs, classifier.predict(x).probs)


# --- refusals

@pytest.mark.slow
def test_a_compressed_posterior_keeps_the_calibration(classifier: ntkl.Posterior, tmp_path: Path) -> None:
    """Its data and hyperparameters are the same; at a full rank so are all predictions, also after a save."""
    fitted, x = classifier.to(), classes(10, seed=1)[0]
    fitted.fit_predictive()
    small = fitted.compress(fitted.num_parameters)
    small.save(tmp_path / "posterior.pt")
    expected = fitted.predict(x, "probit").probs
    assert not torch.allclose(expected, fitted.predict(x, "probit", calibrated=False).probs, rtol=1e-3)
    for found in (small, ntkl.load(tmp_path / "posterior.pt", classifier.network.module)):
        assert found.predictive == fitted.predictive
        torch.testing.assert_close(found.predict(x, "probit").probs, expected, rtol=1e-7, atol=0)


def test_structured_posteriors_leave_out_some_points() -> None:
    x, y = classes(50, seed=3)
    network = trained(ntkl.Categorical(), x, y, 3)
    posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), structure="kfac")
    fit = posterior.fit_predictive(points=12, strict=False)
    found = posterior.leave_one_out(points=12)
    assert fit.num_points == 12 and torch.equal(found.targets, y[found.index])
    score = class_score(found.mean, found.covariance, found.targets, fit.scale, fit.temperature)
    assert fit.after == pytest.approx(score, abs=1e-9)
    assert fit.before == pytest.approx(float(found.log_density.mean()), abs=0.02)
    assert posterior.fit_predictive(strict=False).num_points == 50  # all, if there are few
    sampled = ntkl.laplace(network, (x, y), ntkl.Categorical(), structure="full", curvature="ef")
    with pytest.raises(ntkl.UnsupportedError, match="held-out data"):
        sampled.fit_predictive()


@pytest.mark.filterwarnings("ignore:the fitted predictive is not to be trusted")
def test_points_without_weight_are_not_drawn() -> None:
    x = torch.linspace(-1.0, 1.0, 360).double()[:, None]
    weights, network = (torch.arange(360) % 18 == 0).double(), nn.Linear(1, 1).double()
    posterior = ntkl.laplace(network, (x, x, weights), ntkl.Gaussian(0.04), structure="diag")
    assert posterior.fit_predictive(strict=False).num_points == 20


def test_of_many_points_some_are_left_out() -> None:
    torch.manual_seed(0)
    x = torch.linspace(-1.0, 1.0, 50_001).double()[:, None]
    network, data = nn.Linear(1, 1).double(), (x, x + 0.1 * torch.randn(len(x), 1).double())
    network.weight.data.fill_(1.0), network.bias.data.zero_()
    posterior = ntkl.laplace(network, data, ntkl.Gaussian(0.04), structure="full").refit()
    fit, whole = (posterior.fit_predictive(points=points) for points in (None, range(50_001)))
    assert (fit.num_points, whole.num_points) == (50_000, 50_001)
    assert fit.noise == pytest.approx(whole.noise, rel=1e-3) and fit.noise == pytest.approx(0.25, rel=0.05)


def test_named_points_with_noise_of_their_own() -> None:
    x, y = line()
    likelihood = ntkl.Gaussian(0.02 + 0.1 * torch.rand(25).double())
    posterior = ntkl.laplace(trained(likelihood, x, y, 1), (x, y), likelihood)
    chosen = [3, 4, 11, 20]
    fit = posterior.fit_predictive(points=chosen, strict=False)
    found = posterior.leave_one_out()
    variance = fit.scale * found.covariance[:, 0, 0] + fit.noise * likelihood.noise.detach()
    scores = torch.distributions.Normal(found.mean[:, 0], variance.sqrt()).log_prob(y[:, 0])
    assert fit.after == pytest.approx(float(scores[chosen].mean()), abs=1e-10)


def test_leave_one_out_that_is_not_trusted_is_refused() -> None:
    x, y = classes()
    posterior = ntkl.laplace(trained(ntkl.Categorical(), x, y, 3), (x, y), ntkl.Categorical())
    posterior.prior.precision = 50.0  # the weights are far from the optimum of this prior
    with pytest.raises(ntkl.UnsupportedError, match=r"approximate retraining.*optimum.*retrain"):
        posterior.fit_predictive()
    assert posterior.predictive is None
    with pytest.warns(ntkl.NTKLaplaceWarning, match="not to be trusted"):
        fit = posterior.fit_predictive(strict=False)
    assert not fit.trusted and posterior.predictive is not None


def test_changed_precisions_leak_labels_of_classes() -> None:
    """At the optimum of a precision next to the trained one the decrement is small, and the fit still leaks."""
    x, y = classes(50, seed=3)
    network = trained(ntkl.Categorical(), x, y, 3, precision=0.1)
    posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(0.1))
    posterior.prior.precision = 0.12
    assert posterior.leave_one_out().trusted
    with pytest.raises(ntkl.UnsupportedError, match="have changed since the fit"):
        posterior.fit_predictive()


@pytest.mark.slow
def test_a_regression_with_as_many_effective_parameters_as_points_is_not_judged_by_them() -> None:
    x, y = line(8)
    likelihood = ntkl.Gaussian(1e-3)
    network = trained(likelihood, x, y, 1, precision=1e-2)
    posterior = ntkl.laplace(network, (x, y), likelihood, ntkl.GaussianPrior(1e-2))
    share = float(posterior.effective_parameters().sum()) / 8
    assert share > 0.65
    with pytest.warns(ntkl.NTKLaplaceWarning, match="effective parameters for each training output"):
        found = posterior.leave_one_out().reliability
    assert found.effective_share == pytest.approx(share)


def test_what_ends_at_a_bound_is_told(regression: ntkl.Posterior) -> None:
    x = torch.linspace(-1, 1, 10).double().unsqueeze(1)
    far = 100.0 + torch.randn(10, 1).double()
    with pytest.warns(ntkl.NTKLaplaceWarning, match="scale lies at the bound"):
        fit = regression.fit_predictive((x, far), parameters={"scale"})
    assert fit.at_bounds == ("scale",) and not fit.trusted and "bound" in str(fit)


@pytest.mark.filterwarnings("ignore:.*scale lies at the bound")
@pytest.mark.parametrize(("count", "end"), [(1_000.0, 20.0), (2_000.0, 30.0)])
def test_the_largest_scale_counts_many_examples_as_a_thousand(count: float, end: float) -> None:
    """Each target of 20 inputs, with `count` examples of each in the fit, is likeliest under a scale of 30."""
    x = torch.eye(20, dtype=torch.float64)
    posterior = ntkl.laplace(nn.Linear(20, 1, bias=False).double(), (x, x.sum(1, keepdim=True), count * x.sum(1)),
                             ntkl.Gaussian(0.1), ntkl.GaussianPrior(1.0))
    f = posterior.latent(x)
    far = (f.mean + (30.0 * f.variance + 0.1).sqrt()).detach().reshape(20, 1)
    fit = posterior.fit_predictive((x, far), parameters={"scale"})
    assert fit.scale == pytest.approx(end, rel=2e-3)  # the density changes by 1e-10 there
    assert fit.at_bounds == (() if end == 30.0 else ("scale",)) and fit.trusted == (end == 30.0)


def test_labels_that_are_all_right_are_told(classifier: ntkl.Posterior) -> None:
    x = classes(40, seed=7)[0]
    fit = classifier.calibrate((x, classifier.predict(x, "map").probs.argmax(1)), temperature="network")
    assert fit.at_bounds == ("temperature",) and fit.temperature == pytest.approx(0.25)
    assert fit.trusted and "temperature at a bound" in str(fit)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"objective": "evidence"}, "held-out data"), ({"parameters": ["noise"]}, "parameters among"),
    ({"parameters": []}, "parameters among"), ({"parameters": ["common", "scale"]}, "parameters among"),
])
def test_unknown_objectives_and_parameters(classifier: ntkl.Posterior, arguments: dict, message: str) -> None:
    with pytest.raises(ntkl.UnsupportedError, match=message):
        classifier.fit_predictive(**{"strict": False, **arguments})
    with pytest.raises(ntkl.UnsupportedError, match="draws"):
        classifier.calibrate(classes(), temperature="each")


@pytest.mark.parametrize("numbers", [{"scale": -1.0}, {"temperature": 0.0}, {"noise": math.inf}, {"scale": "1"}])
def test_calibrations_are_numbers(numbers: dict) -> None:
    with pytest.raises(ntkl.HyperparameterError, match="a finite"):
        ntkl.Calibration(**numbers)


# --- weights that are at no optimum


@pytest.mark.parametrize("structure", ["gp", "full"])
@pytest.mark.parametrize("points", [None, [3, 7, 11, 20]])
@pytest.mark.filterwarnings("ignore:the fitted predictive is not to be trusted")
def test_points_are_left_out_of_ridge_regressions_where_weights_are_at_no_optimum(
    structure: str, points: list[int] | None
) -> None:
    """Written out: the linearized model is solved again without each point, and its densities are calibrated."""
    x, y = line()
    first = unfinished((x, y), ntkl.Gaussian(0.05))
    network, weights = first.network.module, torch.linspace(0.5, 2.0, len(x)).double()
    posterior = ntkl.laplace(network, (x, y, weights), ntkl.Gaussian(0.05), ntkl.GaussianPrior(0.5), structure)
    fit = posterior.fit_predictive("loo", strict=False, points=points)
    assert fit.reliability is not None and fit.reliability.decrement > 0.02 and fit.reliability.at_optimum

    values = {name: p.detach() for name, p in network.named_parameters()}
    rows = torch.func.jacrev(lambda v: torch.func.functional_call(network, v, (x,)))(values)
    jac = torch.cat([rows[name].flatten(2).squeeze(1) for name in values], 1)
    f, start = network(x).detach().flatten(), torch.cat([value.flatten() for value in values.values()])
    prior = 0.5 * torch.eye(len(start), dtype=torch.float64)

    def density(n: int, scale: float, factor: float) -> float:
        counted = weights.clone()
        counted[n] = 0.0
        scaled = jac.T * (counted / 0.05)
        hessian = scaled @ jac + prior
        step = torch.linalg.solve(hessian, scaled @ (y.flatten() - f) - prior @ start)
        variance = scale * jac[n] @ torch.linalg.solve(hessian, jac[n]) + factor * 0.05
        return torch.distributions.Normal(f[n] + jac[n] @ step, variance.sqrt()).log_prob(y[n, 0]).item()

    found = fit.calibration
    chosen = range(len(x)) if points is None else points
    total = sum(float(weights[n]) for n in chosen)
    for value, scale, factor in ((fit.after, found.scale, found.noise), (fit.before, 1.0, 1.0),
                                 (fit.network, 0.0, 1.0)):
        expected = sum(float(weights[n]) * density(n, float(scale), float(factor)) for n in chosen) / total
        assert value == pytest.approx(expected, rel=1e-8)
    # the numbers are those of the refit, and the mean stays the network's
    refit = posterior.refit()
    again = refit.fit_predictive("loo", strict=False, points=points)
    assert again.after == pytest.approx(fit.after, rel=1e-8) and not again.reliability.at_optimum
    torch.testing.assert_close(posterior.predict(x).mean, network(x).detach(), rtol=1e-12, atol=1e-12)


def test_weights_far_from_the_optimum_are_told() -> None:
    """Up to 0.1 nats a point are trusted; far from it the network's errors may be others."""
    data = line()
    near, far = (unfinished(data, ntkl.Gaussian(0.05), steps) for steps in (600, 60))
    with pytest.raises(ntkl.UnsupportedError, match=r"far from the optimum.*decrement is \d.*at most 0\.1"):
        far.fit_predictive()
    fit = near.fit_predictive()
    assert 0.02 < fit.reliability.decrement < 0.1 and fit.trusted
    with pytest.warns(ntkl.NTKLaplaceWarning, match="not at the optimum of this model"):
        near.leave_one_out()  # which is at its weights


@pytest.mark.filterwarnings("ignore:the fitted predictive is not to be trusted")
def test_a_network_that_explains_less_than_left_out_points_has_other_errors() -> None:
    """The linearized model at its optimum has learned the targets, and the network has not been trained."""
    posterior = unfinished(line(), ntkl.Gaussian(0.05), steps=0)
    fit = posterior.fit_predictive("loo", strict=False)
    refit = posterior.refit().fit_predictive("loo", strict=False)
    assert not fit.reliability.at_optimum and not fit.trusted and fit.after < refit.after - 0.3
    posterior.predictive = refit.calibration  # which would be sure of the network's errors
    x, y = line()
    assert posterior.predict(x).log_prob(y).mean() < refit.after


@pytest.mark.filterwarnings("ignore:the fitted predictive is not to be trusted")
def test_noise_of_a_network_that_fits_all_its_targets_is_found() -> None:
    """The training error says nothing of it: the factor is a hundred million."""
    x, y = line()
    fits = [unfinished((x, y), ntkl.Gaussian(noise)).fit_predictive("loo", strict=False) for noise in (1e-9, 1e-7)]
    assert all(fit.calibration.noise > 1e5 and "noise" not in fit.at_bounds for fit in fits)
    assert fits[0].after == pytest.approx(fits[1].after, abs=0.1) and fits[0].after > -2.0


@pytest.mark.filterwarnings("ignore:the fitted predictive is not to be trusted")
def test_other_posteriors_leave_points_out_at_their_weights() -> None:
    """At the optimum, for other noise, and for structures that are not exact."""
    data = line()
    kfac = ntkl.laplace(unfinished(data, ntkl.Gaussian(0.05)).network.module, data, ntkl.Gaussian(0.05),
                        structure="kfac")
    x, y = data
    converged = ntkl.laplace(trained(ntkl.Gaussian(0.05), x, y, 1), data, ntkl.Gaussian(0.05))
    for posterior in (unfinished(data, ntkl.StudentT(0.05)), kfac, converged):
        assert not posterior.fit_predictive("loo", strict=False).reliability.at_optimum


@pytest.mark.filterwarnings("ignore:the fitted predictive is not to be trusted")
def test_missing_targets_of_several_responses_are_left_out_at_the_optimum() -> None:
    x, y = line(outputs=2)
    y[3, 1] = y[9, 0] = y[12] = math.nan
    posterior = unfinished((x, y), ntkl.Gaussian(torch.tensor([0.05, 0.1]).double(), missing="nan"))
    fit, again = (own.fit_predictive("loo", strict=False) for own in (posterior, posterior.refit()))
    assert fit.reliability.at_optimum and fit.after == pytest.approx(again.after, rel=1e-8)
    assert fit.num_points == again.num_points == 24
