"""Fourier features, and the periods that residuals show: beside networks of expanded inputs and least squares."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas
import pytest
import torch
from scipy.signal import lombscargle
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.posterior.periods import strongest_wave
from ntk_laplace.tools import cli
from ntk_laplace.tools.estimators import training as estimator_training
from refusals import refused

pytestmark = pytest.mark.usefixtures("one_perceptron")
QUIET = ntkl.Settings(progress=False)
WAVES = [(2, 1.5), (0, 4.0), (2, 0.7)]


def expanded(x: Tensor) -> Tensor:
    angles = torch.stack([2 * np.pi * x[..., number] / period for number, period in WAVES], -1)
    return torch.cat([x, torch.sin(angles), torch.cos(angles)], -1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_they_append_sines_and_cosines(dtype: torch.dtype) -> None:
    x = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0), dtype=dtype)
    features = ntkl.FourierFeatures(WAVES)
    assert features(x).dtype == dtype
    torch.testing.assert_close(features(x), expanded(x), rtol=0, atol=10 * torch.finfo(dtype).eps)
    torch.testing.assert_close(ntkl.FourierFeatures([])(x), x, rtol=0, atol=0)
    again = pickle.loads(pickle.dumps(copy.deepcopy(features)))
    assert again.waves == tuple(WAVES) == features.waves and "(2, 1.5)" in repr(features)
    other = ntkl.FourierFeatures([(1, 1.0)] * 3)
    other.load_state_dict(features.state_dict())
    assert torch.equal(other(x), features(x))


def test_what_fourier_features_refuse() -> None:
    for waves, got in (([(0, 0.0)], "(0, 0.0)"), ([(-1, 1.0)], "(-1, 1.0)"), ([(0.5, 1.0)], "(0.5, 1.0)"), (3, "3"),
                       ([3], "3"), ("ab", "'ab'"), ([(0, float("inf"))], "(0, inf)"), ([(1, 2, 3)], "(1, 2, 3)")):
        with refused(ntkl.HyperparameterError, "an input's number and a positive period", got, "(0, 12.0)"):
            ntkl.FourierFeatures(waves)
    with refused(ntkl.NetworkError, "inputs of at least 3 numbers", "(4, 2)", "from 0"):
        ntkl.FourierFeatures(WAVES)(torch.zeros(4, 2))


@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "diag"])
def test_a_network_has_the_posterior_of_one_of_expanded_inputs(structure: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 3).double(), torch.randn(12, 2).double()
    inner = nn.Sequential(nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    outer = nn.Sequential(ntkl.FourierFeatures(WAVES), copy.deepcopy(inner))
    prior = ntkl.GaussianPrior(2.0, groups="input")
    with torch.no_grad():
        plain, own = (ntkl.laplace(network, (inputs, y), ntkl.Gaussian(0.3), prior, structure, settings=QUIET)
                      for network, inputs in ((inner, expanded(x)), (outer, x)))
    assert float(own.log_marginal_likelihood()) == pytest.approx(float(plain.log_marginal_likelihood()), rel=1e-12)
    new = torch.randn(5, 3).double()
    for found, expected in zip(own.latent_moments(new), plain.latent_moments(expanded(new)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    assert len(own.prior.precision[own.prior.inputs]) == 9


def share(places: np.ndarray, residual: np.ndarray, period: float) -> float:
    angle = 2 * np.pi * places / period
    design, shares = np.stack([np.sin(angle), np.cos(angle)], 1), []
    for column in (residual - residual.mean(0)).T:
        if column.any():
            fit = design @ np.linalg.lstsq(design, column, rcond=None)[0]
            shares.append((fit**2).sum() / (column**2).sum())
    return float(np.mean(shares))


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_wave_is_that_of_least_squares(outputs: int) -> None:
    rng = np.random.default_rng(outputs)
    places = rng.uniform(100.0, 130.0, 60)
    residual = rng.normal(size=(60, outputs)) * 10.0 ** np.arange(outputs)
    residual[:, 0] += 12.0 * np.sin(places * 2 * np.pi / 3.3 + 0.4)  # in the smallest of them
    if outputs > 1:
        residual[:, 1] = 7.0  # says nothing
    found = strongest_wave(places, residual)
    assert found is not None and found.period == pytest.approx(3.3, rel=0.02)
    assert found.share == pytest.approx(share(places, residual, found.period), rel=1e-9)
    assert found.share > 0.99 * max(share(places, residual, period) for period in np.geomspace(1.1, 100.0, 4000))


@pytest.mark.parametrize("n", [30, 401])
def test_no_other_frequency_explains_more(n: int) -> None:
    """Beside SciPy's periodogram, at frequencies between those of its grid."""
    rng = np.random.default_rng(n)
    for frequency in (0.6, 0.13 * n, 0.45 * n):
        places = np.sort(rng.uniform(-3.0, 7.0, n) if n < 100 else rng.normal(size=n))
        residual = np.sin(frequency * 2.0 * np.pi * places / np.ptp(places)) + 0.5 * rng.normal(size=n)
        residual = (residual - residual.mean()) / residual.std() / n**0.5
        found = strongest_wave(places, residual[:, None])
        steps = np.pi / np.ptp(places) * np.arange(1.0, n, 0.05)
        others = 2.0 * lombscargle(places, residual, steps)
        assert found is not None and others.max() - 1e-3 < found.share < others.max() + 1e-3
        assert found.share == pytest.approx(
            2.0 * float(lombscargle(places, residual, np.array([2.0 * np.pi / found.period]))), rel=1e-9)


@pytest.mark.parametrize("power", [1, 2])
def test_the_longest_wave_of_a_trend_is_twice_the_range(power: int) -> None:
    places = np.linspace(-2.0, 4.0, 40)
    found = strongest_wave(places, (places**power)[:, None])
    assert found is not None and found.period <= 12.0 and found.share > 0.8


def test_few_places_and_equal_residuals_have_no_wave() -> None:
    wave = np.sin(np.arange(50.0) * 2.5)[:, None]
    assert strongest_wave(np.arange(7.0), wave[:7]) is None
    found = strongest_wave(np.arange(50.0), wave)
    assert found is not None and found.period == pytest.approx(2 * np.pi / 2.5, rel=1e-3)
    assert strongest_wave(np.arange(50.0), np.ones((50, 2))) is None


@pytest.mark.parametrize("inputs", [1, 20])
def test_a_wave_of_chance_is_none(inputs: int) -> None:
    """The bound on the gain, log(inputs n) + 7 nats, from both sides; and the bound on the share."""
    rng, n = np.random.default_rng(0), 100
    places = np.sort(rng.uniform(0.0, 10.0, n))
    wave, noise = np.sin(places * 3.0), rng.normal(size=n)
    design = np.stack([np.sin(places * 3.0), np.cos(places * 3.0), np.ones(n)], 1)
    noise -= design @ np.linalg.lstsq(design, noise, rcond=None)[0]
    wave, noise = (part / (part**2).sum() ** 0.5 for part in (wave - wave.mean(), noise))
    bound = np.log(inputs * n) + 7.0
    for nats, there in ((bound - 1.0, False), (bound + 1.5, True)):
        part = 1.0 - np.exp(-2.0 * nats / (n - 3))  # the share with this probability by chance
        found = strongest_wave(places, (part**0.5 * wave + (1 - part) ** 0.5 * noise)[:, None], inputs)
        assert (found is not None) == there
    assert all(strongest_wave(places, rng.normal(size=(n, 1)), inputs) is None for _ in range(50))
    many = np.arange(1500.0)
    for amplitude, there in ((0.28, False), (0.37, True)):  # 4 and 6 % of the squares, both beyond chance
        found = strongest_wave(many, (amplitude * np.sin(many) + rng.normal(size=1500))[:, None])
        assert (found is not None) == there


def test_few_numbers_of_noise_have_no_wave_by_chance() -> None:
    """Ten places and ten frequencies: the best explains half of the noise, and often more."""
    rng, places = np.random.default_rng(1), np.arange(10.0) ** 1.1
    found = [strongest_wave(places, rng.normal(size=(10, 1))) for _ in range(2000)]
    assert sum(wave is not None for wave in found) <= 8  # 2 are expected of independent frequencies


def season(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A year of 12 in the second of three features, over a trend."""
    rng = np.random.default_rng(seed)
    x = np.stack([rng.normal(size=n), rng.uniform(0.0, 120.0, n), rng.normal(size=n)], 1)
    return x, 0.02 * x[:, 1] + np.sin(2 * np.pi * x[:, 1] / 12.0) + 0.5 * x[:, 0] + 0.1 * rng.normal(size=n)


def test_lack_of_fit_tells_the_period() -> None:
    x, y = (torch.as_tensor(part) for part in season(150))
    design = torch.cat([x, torch.ones(150, 1).double()], 1)
    network = nn.Linear(3, 1).double()
    with torch.no_grad():
        weights = torch.linalg.lstsq(design, y[:, None]).solution
        network.weight.copy_(weights[:3].mT)
        network.bias.copy_(weights[3])
    found = ntkl.laplace(network, (x, y[:, None]), ntkl.Gaussian(0.5), structure="diag").lack_of_fit()
    assert found.input == 1 and found.period == pytest.approx(12.0, rel=0.02) and found.clear
    still = ntkl.laplace(network, (x, network(x).detach()), ntkl.Gaussian(0.5), structure="diag").lack_of_fit()
    assert still.period is None and not still.clear


class Wider(nn.Module):
    """Takes more inputs, and uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.more = nn.Linear(3, 1), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, :3]) + self.more * x[:, 3:].sum(1, keepdim=True)


QUICK: dict[str, Any] = {"hidden_layer_sizes": (8,), "epochs": 60, "random_state": 0, "precision": 1.0}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the network misses", "ignore:noise is not at the optimum")
def test_a_regressor_finds_a_season(monkeypatch: pytest.MonkeyPatch) -> None:
    (x, y), (x_test, y_test) = season(150), season(200, seed=1)
    x, x_test = x * [1.0, 1e3, 1.0], x_test * [1.0, 1e3, 1.0]
    plain, model = (ntkl.LaplaceRegressor(likelihood="gaussian", fourier_features=most, **QUICK).fit(x, y)
                    for most in (0, 4))
    assert plain.fourier_features_ == [] and len(model.fourier_features_) == 1
    (feature, period), = model.fourier_features_
    assert feature == 1 and period == pytest.approx(12e3, rel=0.01)
    assert plain.score(x_test, y_test) < 0.7 < 0.95 < model.score(x_test, y_test)
    assert model.posterior_.lack_of_fit().period is None and plain.posterior_.lack_of_fit().period is not None
    added = model.posterior_.prior.precision[model.posterior_.prior.inputs].detach().rsqrt().numpy()
    assert model.relevance_.tolist() == [added[0], max(added[[1, 3, 4]]), added[2]]
    monkeypatch.setattr(estimator_training, "_FOLDS", 2)
    folds = ntkl.LaplaceRegressor(likelihood="gaussian", predictive="folds", **QUICK).fit(x, y)
    assert folds.fourier_features_ == model.fourier_features_ and folds.predictive_fit_.objective == "folds"
    again = pickle.loads(pickle.dumps(model))
    assert again.fourier_features_ == model.fourier_features_
    np.testing.assert_array_equal(again.predict(x_test), model.predict(x_test))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the network misses", "ignore:noise is not at the optimum", "ignore:the weights")
def test_a_classifier_finds_one_and_networks_of_the_caller_keep_their_inputs() -> None:
    x, y = season(200)
    labels = np.where(np.sin(2 * np.pi * x[:, 1] / 12.0) > 0, "up", "down")
    sizes: list[int] = []

    def network(features: int, outputs: int) -> nn.Module:
        sizes.append(features)
        return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, outputs)).double()

    model = ntkl.LaplaceClassifier(network, **QUICK).fit(x[:150], labels[:150])
    assert {feature for feature, _ in model.fourier_features_} == {1} and sizes[0] == 3 and 5 in sizes
    assert model.score(x[150:], labels[150:]) > 0.85
    def three(features: int, outputs: int) -> nn.Module:
        return nn.Linear(3, outputs).double()  # whatever is asked for

    for given in (Wider().double(), three):
        own = ntkl.LaplaceRegressor(given, likelihood="gaussian", **QUICK | {"epochs": 5}).fit(x, y)
        assert own.fourier_features_ == [] and own.posterior_.lack_of_fit().period is not None
    without = ntkl.LaplaceRegressor(likelihood="gaussian", predictive=None, **QUICK).fit(x, y)
    assert without.fourier_features_ == [] and without.posterior_.lack_of_fit().period is not None
    with refused(ntkl.HyperparameterError, "fourier_features", "-1", "0 for none"):
        ntkl.LaplaceRegressor(fourier_features=-1).fit(x, y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the network misses", "ignore:noise is not at the optimum")
def test_the_command_tells_the_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = season(100)
    frame = pandas.DataFrame({"kind": x[:, 0], "month": x[:, 1], "sales": y})
    frame.to_csv("sales.csv", index=False)
    assert cli.main(["fit", "sales.csv", "--target", "sales", "--likelihood", "gaussian", "--epochs", "60",
                     "--hidden", "8", "--out", "out"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert re.search(r"sines and cosines are inputs of the network too: month of period 1[12]\b", told)
    model = joblib.load("out/model.joblib")
    assert model.score(frame[["kind", "month"]], y) > 0.95


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the network misses", "ignore:noise is not at the optimum", "ignore:the weights")
@pytest.mark.parametrize("gain", [0.05, 0.06])
def test_leave_one_out_gains_more_than_the_best_of_many_waves_by_chance(
    gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = season(100)  # log(3 * 100)/100 is 0.057

    def rank(training: ntkl.EvidenceTraining, left_out: bool) -> tuple[bool, float]:
        modules = training.posterior.network.module.modules()
        return left_out, gain * any(isinstance(module, ntkl.FourierFeatures) for module in modules)

    monkeypatch.setattr(estimator_training, "rank", rank)
    model = ntkl.LaplaceRegressor(likelihood="gaussian", **QUICK).fit(x, y)
    assert len(model.fourier_features_) == (gain > 0.057)
