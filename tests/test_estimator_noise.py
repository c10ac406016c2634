"""Noise in `LaplaceRegressor`, also with heavy tails or one that depends on the inputs: which is tried, and units."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import nn

import ntk_laplace as ntkl
from ntk_laplace.errors import warn
from ntk_laplace.runtime import tuning
from ntk_laplace.tools.estimators import base
from ntk_laplace.tools.estimators import noise as choice
from ntk_laplace.tools.estimators import training as estimator_training
from ntk_laplace.tools.estimators.noise import Candidate, Errors, may_vary_by_factors, tail_gain
from ntk_laplace.tools.estimators.tables import Standardized, StandardizedLogs
from ntk_laplace.tools.estimators.training import Design, Designs, Trained
from refusals import refused

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is not at the optimum of the evidence"),
    pytest.mark.filterwarnings("ignore:the network is not at its optimum"),
]
QUICK: dict[str, Any] = {"epochs": 10, "learning_rate": 0.1, "hidden_layer_sizes": (8,), "precision": 1.0,
                         "random_state": 0, "fourier_features": 0, "piecewise_features": False}
SHORT = QUICK | {"epochs": 4}  # where it does not matter how well it is trained


def problem(outliers: bool = True, targets: int = 1, n: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """Sines around 50 with noise of deviation 1; a tenth is off by 60."""
    draws = np.random.default_rng(0)
    x = draws.uniform(-2, 2, (n, 1))
    y = 50 + 20 * np.sin(np.arange(1, targets + 1) * x) + draws.standard_normal((n, targets))
    if outliers:
        y[::10] += 60 * draws.choice([-1.0, 1.0], (len(y[::10]), targets))
    return x, y[:, 0] if targets == 1 else y


@pytest.fixture(scope="module")
def found() -> ntkl.LaplaceRegressor:
    return ntkl.LaplaceRegressor(**QUICK).fit(*problem())


def test_the_evidence_chooses_the_noise(found: ntkl.LaplaceRegressor) -> None:
    """With outliers it is that of Student's t, which is the training under it; else the second is not even tried."""
    x, y = problem()
    fits = {name: ntkl.LaplaceRegressor(likelihood=name, **QUICK).fit(x, y) for name in ("gaussian", "student-t")}
    evidence = {name: one.log_marginal_likelihood_value_ for name, one in fits.items()}
    assert found.likelihood_ == "student-t" and found.log_marginal_likelihood_value_ == evidence["student-t"]
    assert evidence["student-t"] > evidence["gaussian"] + 50
    truth = 50 + 20 * np.sin(x[:, 0])
    error = {name: np.abs(one.predict(x) - truth).mean() for name, one in fits.items()}
    assert error["student-t"] < 0.5 * error["gaussian"]
    assert np.array_equal(found.predict(x), fits["student-t"].predict(x))
    clean = ntkl.LaplaceRegressor(**QUICK).fit(*problem(outliers=False))
    assert clean.likelihood_ == "gaussian" and not Errors.of(clean.posterior_, PLAIN).have_tails


def test_the_first_training_is_kept_if_the_second_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The networks are trained once for all of these."""
    x, y = problem()
    train, trainings = base.trained, dict[type, Trained]()

    def once(form: Any, designs: Any, data: Any, likelihood: ntkl.Likelihood, *options: Any) -> Trained:
        kind = type(likelihood)
        if kind not in trainings:
            trainings[kind] = train(form, designs, data, likelihood, *options)
        return trainings[kind]

    monkeypatch.setattr(base, "trained", once)
    normal = ntkl.LaplaceRegressor(likelihood="gaussian", **QUICK).fit(x, y)

    def fit(fails: Any) -> ntkl.LaplaceRegressor:
        with monkeypatch.context() as patch:
            fails(patch)
            return ntkl.LaplaceRegressor(**QUICK).fit(x, y)

    def broken(*_: Any) -> None:
        raise ntkl.NumericalError("a factor", "none", "Nothing.")

    score = Candidate.rank.fget
    for fails in (
        lambda patch: [patch.setattr(one, "residual", broken)
                       for one in (ntkl.StudentT, ntkl.HeteroscedasticGaussian)],
        lambda patch: patch.setattr(Errors, "larger_than", lambda *_: True),
        lambda patch: patch.setattr(Errors, "biased", True),
        lambda patch: patch.setattr(Candidate, "rank", property(lambda one: (
            one.likelihood == "gaussian", score(one)[1]))),
    ):
        assert np.array_equal(fit(fails).predict(x), normal.predict(x))
    assert fit(lambda patch: None).likelihood_ == "student-t" and len(trainings) == 3


PLAIN = Standardized(np.zeros(1), np.ones(1))
TARGETS = np.full((120, 1), -0.5)


def of_likelihood(likelihood: ntkl.Likelihood, structure: str = "full", design: Design | None = None) -> Candidate:
    """A posterior at random weights, with a warning."""
    torch.manual_seed(0)
    x, y = (torch.as_tensor(part).reshape(120, 1) / 10 for part in problem())
    network = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    warn(f"of {type(likelihood).__name__}")
    posterior = ntkl.laplace(network, (x, y - 5.0), likelihood, structure=structure)
    trained = Trained(network, posterior, None, None, np.zeros(0), design=design or Design())
    return Candidate(type(likelihood).__name__, trained, PLAIN)


def test_only_the_warnings_of_the_result_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"have_tails": True, "biased": False, "larger_than": lambda *_: False}.items():
        monkeypatch.setattr(Errors, name, value)
    for noise, name in ((2.0, "StudentT"), (1e9, "Gaussian")):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            kinds = {"gaussian": ntkl.Gaussian(1.0), "student-t": ntkl.StudentT(noise, 3.0)}
            found = choice.chosen_noise(lambda kind, _, kinds=kinds: of_likelihood(kinds[kind]), TARGETS, None, True)
        assert found.likelihood == name
        assert [str(one.message) for one in told if one.category is ntkl.NTKLaplaceWarning] == [f"of {name}"]


def test_folds_are_of_the_chosen_likelihood(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, train = list[tuple[str, int]](), estimator_training.train_with_evidence

    def recorded(network: nn.Module, data: Any, likelihood: ntkl.Likelihood, *given: Any, **options: Any) -> Any:
        trained.append((type(likelihood).__name__, len(data[1])))
        return train(network, data, likelihood, *given, **options)

    monkeypatch.setattr(estimator_training, "train_with_evidence", recorded)
    monkeypatch.setattr(estimator_training, "_FOLDS", 2)
    model = ntkl.LaplaceRegressor(predictive="folds", **SHORT).fit(*problem())
    assert model.likelihood_ == "student-t" and model.predictive_fit_.objective == "folds"
    assert {name for name, rows in trained if rows == 120} == {"Gaussian", "StudentT", "HeteroscedasticGaussian"}
    folds = [name for name, rows in trained if rows == 60]
    assert set(folds) == {"StudentT"} and 2 <= len(folds) < 5


@pytest.mark.filterwarnings("ignore:of Gaussian")
def test_likelihoods_that_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Student's t and noise that depends on the inputs have the design of the first; counts and logarithms choose.

    After these, if they are better, no other is tried; after logarithms, if their residuals have no tails.
    """
    own, counts = Design(linear=True, pieces=True), np.arange(120.0)[:, None] % 9
    others = [("student-t", own), ("heteroscedastic-gaussian", own)]
    factors, numbers = ("log-normal", None), ("negative-binomial", None)
    positive = 1 + TARGETS + np.arange(120)[:, None] / 1000
    tailed, asked = {"gaussian", "log-normal"}, list[tuple[str, Design | None]]()
    better, ratios = set[str](), list[float]()

    def larger_than(own: Errors, other: Errors, most: float) -> bool:
        ratios.append(most)
        return False

    monkeypatch.setattr(Errors, "larger_than", larger_than)

    def run(name: str, design: Design | None) -> Candidate:
        asked.append((name, design))
        return replace(of_likelihood(ntkl.Gaussian(1.0), design=own), likelihood=name)

    def errors(one: Candidate) -> Errors:
        found = Errors.of(one.trained.posterior, PLAIN)
        monkeypatch.setattr(Errors, "have_tails", one.likelihood in tailed)
        return found

    monkeypatch.setattr(Candidate, "errors", property(errors))
    monkeypatch.setattr(Candidate, "rank", property(lambda one: (True, float(one.likelihood in better))))
    for targets, own_network, wanted in (
        (TARGETS, False, others), (positive, False, [factors, *others]), (positive.round(1), False, others),
        (counts, False, [numbers, *others]), *((targets, True, others[:1]) for targets in (TARGETS, positive, counts)),
    ):
        asked.clear()
        assert choice.chosen_noise(run, targets, None, own_network).likelihood == "gaussian"
        assert asked == [("gaussian", None), *wanted]
        assert ratios == [1000.0 if name == "log-normal" else 1.5 for name, _ in wanted]
        ratios.clear()
    better |= {"log-normal", "negative-binomial"}
    for targets, tails, wanted in (
        (positive, {"gaussian", "log-normal"}, [factors, *others]), (positive, {"gaussian"}, [factors]),
        (counts, {"gaussian", "negative-binomial"}, [numbers]), (counts, set(), [numbers]), (positive, set(), []),
    ):
        asked.clear()
        tailed.clear()
        tailed |= tails
        found = choice.chosen_noise(run, targets, None, False).likelihood
        assert asked == [("gaussian", None), *wanted] and found == (wanted[0][0] if wanted else "gaussian")


def test_targets_that_vary_by_factors() -> None:
    """Positive, and told finely enough; each column of several."""
    y = np.exp(np.random.default_rng(0).standard_normal((200, 2)))
    assert may_vary_by_factors(y) and may_vary_by_factors(1e9 * y) and may_vary_by_factors(y.round(3))
    coarse = np.maximum(y.round(1), 0.1)
    wide = np.exp(3 * y)  # neighbors differ by more than the smallest, which is no rounding
    assert np.diff(np.sort(wide[:, 0])).min() > 0 and may_vary_by_factors(wide[:20] ** 3)
    steps = 250 * np.maximum((4 * y).round(), 1)
    assert not may_vary_by_factors(steps) and not may_vary_by_factors(steps / 1.34102)
    assert may_vary_by_factors(steps + 1e4)
    assert not may_vary_by_factors(np.cumsum(np.full((30, 1), 0.1), 0))  # not whole up to rounding
    for wrong in (coarse, y - y.min(), -y, np.stack([y[:, 0], coarse[:, 0]], 1), np.full((9, 1), 3.0)):
        assert not may_vary_by_factors(wrong)


def test_means_of_factors_are_not_far_above_all_targets() -> None:
    """Shares, of which a third is at a limit of detection: their logarithms vary by far more than they do."""
    draws = np.random.default_rng(2)
    x = draws.normal(size=(150, 5))
    center = 1 / (1 + np.exp(2 - 2 * np.sin(1.5 * x[:, 0]) - 1.4 * x[:, 1] - x[:, 2] * x[:, 3]))
    draws.normal(size=150)
    y = draws.beta(2 * center, 2 * (1 - center)).clip(1e-6, 1)
    given: dict[str, Any] = {"random_state": 0, "epochs": 100, "piecewise_features": False, "fourier_features": 0}
    assert ntkl.LaplaceRegressor(likelihood="log-normal", **given).fit(x, y).predict(x).mean() > 10
    model = ntkl.LaplaceRegressor(**given).fit(x, y)
    assert model.likelihood_ != "log-normal" and model.predict(x).max() < 2


@pytest.mark.parametrize(("given", "pieces", "wanted"), [
    (False, False, (False,)), (True, True, (True,)), ("auto", False, (False,)), ("auto", True, (False, True)),
])
def test_other_likelihoods_are_tried_without_pieces(
    given: bool | str, pieces: bool, wanted: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under normal noise pieces may only follow noise that has another distribution."""
    asked, train = list[tuple[bool, ...]](), base.trained

    def record(form: Any, designs: Designs, *options: Any) -> Trained:
        first = designs.first.pieces
        asked.append((first, not first) if "pieces" in designs.tried else (first,))
        if len(asked) > 1:
            raise ntkl.NumericalError("a factor", "none", "Nothing.")
        return replace(train(form, Designs(Design(pieces=pieces)), *options), tried=designs.tried)

    monkeypatch.setattr(base, "trained", record)
    monkeypatch.setattr(Errors, "have_tails", True)
    model = ntkl.LaplaceRegressor(**SHORT | {"piecewise_features": given}).fit(*problem())
    assert model.likelihood_ == "gaussian" and model.piecewise_features_ == [0] * pieces
    assert asked == [{False: (False,), True: (True,), "auto": (False, True)}[given], wanted, wanted]


@pytest.mark.filterwarnings("ignore:of Gaussian")
@pytest.mark.parametrize("tried", [True, False])
@pytest.mark.parametrize("tails", [True, False])
@pytest.mark.parametrize("noise", [0.05, 20.0])
def test_pieces_that_follow_outliers_are_left_out(
    noise: float, tails: bool, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise vanishes with them, and residuals have tails without them; pieces that were asked for stay."""
    monkeypatch.setattr(Candidate, "rank", (True, 0.0))
    fit = ntkl.PredictiveFit(ntkl.Calibration(noise=noise), "loo", -1.0, -1.0, -1.0, 120, at_bounds=("noise",))
    pieces, asked = Design(pieces=True), list[tuple[str, Design | None]]()

    def errors(one: Candidate) -> Any:
        return SimpleNamespace(have_tails=tails and not one.trained.design.pieces, biased=False,
                               larger_than=lambda *_: False)

    def run(name: str, like: Design | None) -> Candidate:
        asked.append((name, like))
        found = of_likelihood(ntkl.Gaussian(1.0), design=like or pieces)
        return replace(found, trained=replace(found.trained, predictive=fit, tried=["pieces"] if tried else []))

    monkeypatch.setattr(Candidate, "errors", property(errors))
    found = choice.chosen_noise(run, TARGETS, None, True)
    again = tried and noise < 1
    assert found.trained.design == (Design() if again and tails else pieces)
    further = [("gaussian", Design()), *[("student-t", pieces)] * tails] if again else []
    assert asked == [("gaussian", None), *further]


@pytest.mark.filterwarnings("ignore:of Gaussian", "ignore:leave-one-out is not to be trusted")
def test_errors_of_the_training_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out of an exact posterior, and plain of another; the evidence is one a point."""
    first, second = (of_likelihood(ntkl.Gaussian(0.5), name) for name in ("full", "kfac"))
    exact, other = first.trained.posterior, second.trained.posterior
    left_out = exact.leave_one_out()
    found, error = first.errors, (left_out.targets - left_out.mean).detach().numpy()
    deviation = (left_out.covariance[:, :, 0] + 0.5).sqrt().detach().numpy()
    np.testing.assert_allclose(found.error, error, rtol=1e-9)
    np.testing.assert_allclose(found.residual, error / deviation, rtol=1e-9)
    plain = (other.targets - other.f).detach().numpy()
    np.testing.assert_allclose(second.errors.error, plain, rtol=1e-9)
    np.testing.assert_allclose(second.errors.residual, plain / 0.5**0.5, rtol=1e-9)
    logs = replace(first, targets=StandardizedLogs(np.full(1, 1.5), np.full(1, 0.3)))
    own, mean = (np.exp(1.5 + 0.3 * part.detach().numpy()) for part in (left_out.targets, left_out.mean))
    np.testing.assert_allclose(logs.errors.error, own - mean * np.exp(0.5 * 0.3**2 * 0.5), rtol=1e-9)
    np.testing.assert_array_equal(logs.errors.residual, found.residual)
    monkeypatch.setattr(tuning, "LEFT_OUT_ERRORS", 119)
    some, index = first.errors, exact.leave_one_out(119).index
    np.testing.assert_allclose(some.error, found.error[index], rtol=1e-9)
    np.testing.assert_allclose(some.residual, found.residual[index], rtol=1e-9)
    assert len(some.weights) == 119
    evidence, values = float(exact.log_marginal_likelihood()), np.exp(1.5 + 0.3 * exact.targets.numpy())
    assert first.rank == (True, pytest.approx(evidence / 120, rel=1e-9))
    units = stats.lognorm(0.3, scale=np.exp(1.5)).logpdf(values) - stats.norm.logpdf(exact.targets.numpy())
    assert logs.rank == (True, pytest.approx((evidence + units.sum()) / 120, rel=1e-9))


def test_tails_and_bias_of_errors() -> None:
    """Errors as large as their predictions say have no tails; a mean error counts from three standard errors on."""
    draws = np.random.default_rng(0)
    error, weights = draws.standard_normal((400, 2)), np.ones(400)
    spread = np.exp(2.0 * draws.standard_normal((400, 1)))
    assert not Errors(spread * error, error, weights).have_tails
    assert Errors(error, spread * error, weights).have_tails
    for residual in (3.0 * error, error + 1.0):  # nor have those that a normal distribution fits with another scale
        assert not Errors(error, residual, weights).have_tails
    centered = error - error.mean(0)
    for shift, few, many in ((0.1, False, False), (0.13, False, False), (0.16, True, True)):
        moved = Errors(centered + np.array([0.0, shift]), np.ones((400, 2)), weights)
        assert moved.biased == few and Errors(moved.error, moved.residual, 100 * weights).biased == many
    few = centered[:50] - centered[:50].mean(0) + 0.3  # two standard errors
    assert not Errors(few, np.ones((50, 2)), np.ones(50)).biased
    assert Errors(few, np.ones((50, 2)), np.full(50, 4.0)).biased


def test_squared_errors_are_larger_by_more_than_chance() -> None:
    draws = np.random.default_rng(0)
    error, one = draws.standard_normal((400, 1)), np.ones((400, 1))
    plain = Errors(error, one, one[:, 0])
    assert Errors(1.04 * error, one, one[:, 0]).larger_than(plain) and not plain.larger_than(plain)
    few = error + np.where(np.arange(400)[:, None] % 200 == 0, 5.0, 0.0)  # two points, whose change is by chance
    assert not Errors(few, one, one[:, 0]).larger_than(plain)
    more = Errors(4 * few, one, one[:, 0])
    assert more.larger_than(plain) and more.larger_than(plain, np.inf)
    single = Errors(error + 30.0 * (np.arange(400) == 0)[:, None], one, one[:, 0])
    assert single.larger_than(plain) and not single.larger_than(plain, np.inf)
    assert Errors(few, one, 100 * one[:, 0]).larger_than(plain) and Errors(1.3 * few, one, one[:, 0]).larger_than(plain)
    assert not Errors(1.02 * error, one, one[:, 0]).larger_than(plain)
    assert Errors(few[:200], one[:200], one[:200, 0]).larger_than(Errors(error, one, one[:, 0]))
    for unit in (1e-130, 1e130):  # of the targets
        of_unit = Errors(unit * error, one, one[:, 0])
        assert not Errors(unit * few, one, one[:, 0]).larger_than(of_unit)
        assert Errors(unit * 1.3 * few, one, one[:, 0]).larger_than(of_unit)


def test_the_share_of_equal_targets_counts_weights() -> None:
    x, y, weights = torch.randn(10, 1).double(), torch.arange(10.0).double().view(10, 1), torch.ones(10).double()
    y[:4], weights[:4] = 3.0, 3.0
    posterior = ntkl.laplace(nn.Linear(1, 1).double(), (x, y, weights), ntkl.Gaussian(1.0), structure="kfac")
    assert Errors.of(posterior, PLAIN).tied == pytest.approx((4 * 3 + 0) / 18)


def test_equal_targets_are_no_normal_noise_with_outliers() -> None:
    """The density of Student's t at them has no bound: its intervals would hold these targets alone."""
    draws = np.random.default_rng(0)
    x, y = draws.uniform(-2, 2, (120, 1)), np.where(np.arange(120) % 4 < 3, 7.0, 7.0 + 3.0 * draws.standard_normal(120))
    model = ntkl.LaplaceRegressor(**QUICK).fit(x, y)
    assert model.likelihood_ == "gaussian"
    lower, upper = model.predict_quantiles(x, (0.005, 0.995)).T
    assert ((lower <= y) & (y <= upper)).mean() > 0.9


@pytest.mark.parametrize("likelihood", ["student-t", "heteroscedastic-gaussian"])
@pytest.mark.parametrize("targets", [1, 2])
def test_predictions_are_in_units_of_the_targets(targets: int, likelihood: str) -> None:
    """Moments, quantiles, densities and draws, against those of the posterior."""
    x, y = problem(targets=targets)
    model = ntkl.LaplaceRegressor(likelihood=likelihood, **SHORT).fit(x, y)
    center, scale = y.mean(0), y.std(0)
    with torch.no_grad():
        response = model.posterior_.predict(model.network_inputs(x[:6]))
    mean, std = model.predict(x[:6], return_std=True)
    own = response.variance.sqrt().numpy().reshape(mean.shape) * scale
    np.testing.assert_allclose(std, own, rtol=1e-12)
    own, fit = model.posterior_.likelihood, model.posterior_.predictive
    noise = model.posterior_.predict(model.network_inputs(x)).aleatoric.numpy().mean(0)  # if it depends on the inputs
    if likelihood == "student-t":
        df = float(own.df)
        noise = own.noise.detach().numpy() * (1.0 if fit is None else fit.noise) * df / (df - 2)
    np.testing.assert_allclose(model.noise_, noise.squeeze() * scale**2, rtol=1e-9)
    assert np.isscalar(model.noise_) == (targets == 1) and model.score(x, y) > 0.1
    levels = (0.05, 0.5, 0.9)
    quantiles, each = model.predict_quantiles(x[:6], levels), model.predict_distribution(x[:6])
    inner = np.moveaxis(response.quantiles(levels).numpy(), 0, -1).reshape(*mean.shape, 3)
    np.testing.assert_allclose(quantiles, inner * np.expand_dims(scale, -1) + np.expand_dims(center, -1), rtol=1e-12)
    np.testing.assert_allclose(each.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(each.cdf(torch.as_tensor(quantiles[..., 2])), 0.9, atol=1e-9)
    if targets == 1:
        standard = torch.as_tensor((y[:6] - center) / scale)[:, None]
        np.testing.assert_allclose(each.log_prob(torch.as_tensor(y[:6])), response.log_prob(standard) - np.log(scale),
                                   atol=1e-9)
    _, covariance = model.predict(x[:6], return_cov=True)
    np.testing.assert_allclose(np.sqrt(np.einsum("ii...->i...", covariance)), std, rtol=1e-9)
    draws = model.sample_y(x[:6], 20_000, random_state=0)
    assert np.array_equal(draws, model.sample_y(x[:6], 20_000, random_state=0))
    for index, level in enumerate(levels):
        np.testing.assert_allclose((draws < quantiles[..., index, None]).mean(-1), level, atol=0.015)
    found, plain = model.explain(x[:6], 3), model.posterior_.explain(
        model.network_inputs(x[:6]), 3, decomposition="auto")
    np.testing.assert_allclose(found.f[:, :targets], mean.reshape(6, -1), rtol=1e-9)
    np.testing.assert_allclose(found.targets.reshape(y.shape), y, rtol=1e-9)
    np.testing.assert_allclose(found.total[:, :targets], plain.total[:, :targets].numpy() * scale, rtol=1e-9)
    if likelihood != "student-t":  # the log variance of a target in its units
        np.testing.assert_allclose(found.f[:, targets:], plain.f[:, targets:].numpy() + 2 * np.log(scale), rtol=1e-9)
        np.testing.assert_allclose(found.total[:, targets:], plain.total[:, targets:], rtol=1e-9)


def test_noise_that_depends_on_the_inputs() -> None:
    """It is chosen, known at each input, and not tried with a network of one output."""
    draws = np.random.default_rng(0)
    x = draws.uniform(-2, 2, (200, 1))
    deviation = 0.2 + 5.0 * np.maximum(x[:, 0], 0)
    y = 50 + 20 * x[:, 0] + deviation * draws.standard_normal(200)
    model = ntkl.LaplaceRegressor(**QUICK | {"epochs": 20}).fit(x, y)
    assert model.likelihood_ == "heteroscedastic-gaussian" and model.posterior_.num_outputs == 2
    weights = np.where(x[:, 0] > 0, 3.0, 1.0)
    short = QUICK | {"epochs": 2}
    weighted = ntkl.LaplaceRegressor(likelihood=model.likelihood_, **short).fit(x, y, weights)
    noise = weighted.posterior_.predict(weighted.network_inputs(x)).aleatoric[:, 0].numpy()
    assert weighted.noise_ == pytest.approx(weighted.output_units[0][0] ** 2 * np.average(noise, weights=weights))
    std = model.predict(np.array([[-1.0], [1.8]]), return_std=True)[1]
    assert std[0] < 3.0 and 6.0 < std[1] < 15.0
    alone = model.predict_distribution(x[:5], "map")
    np.testing.assert_allclose(alone.variance, model.explain(x[:5], 1).f[:, 1].exp(), rtol=1e-9)
    single = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, 1)).double()
    alone = ntkl.LaplaceRegressor(single, standardize=True, **short).fit(x, y)
    assert alone.posterior_.num_outputs == 1
    with refused(ntkl.DataError, "2 outputs, a mean and a log variance for each", "1", "last layer"):
        ntkl.LaplaceRegressor(single, likelihood="heteroscedastic-gaussian", **QUICK).fit(x, y)

    def refuses(features: int, outputs: int) -> nn.Module:
        assert outputs == 1, "one output"
        return copy.deepcopy(single)

    for network in (refuses, lambda features, _: copy.deepcopy(single)):  # takes no outputs
        fixed = ntkl.LaplaceRegressor(network, **short).fit(x, y)
        assert fixed.posterior_.num_outputs == 1


@pytest.mark.parametrize("targets", [1, 2])
def test_positive_targets_by_their_logarithms(targets: int) -> None:
    """All of it is the fit to the logarithms, in the units of the targets; moments are of first order."""
    x, y = problem(outliers=False, targets=targets)
    logs = y / 40.0
    y = np.exp(logs)
    weights = np.where(x[:, 0] > 0, 2.0, 1.0)
    short = SHORT | {"smooth_clipping": False}
    model = ntkl.LaplaceRegressor(likelihood="log-normal", **short).fit(x, y, weights)
    plain = ntkl.LaplaceRegressor(likelihood="gaussian", **short).fit(x, logs, weights)
    assert model.likelihood_ == "log-normal" and model.get_params()["likelihood"] == "log-normal"
    each, of_logs = model.predict_distribution(x[:6]), plain.predict_distribution(x[:6])
    assert isinstance(each, ntkl.LogNormalMixture)
    m, v, noise = of_logs.mean.numpy(), of_logs.variance.numpy(), np.asarray(plain.noise_)
    mean, std = model.predict(x[:6], return_std=True)
    np.testing.assert_allclose(mean, np.exp(m + noise / 2), rtol=1e-10)
    np.testing.assert_allclose(std, mean * np.sqrt(v - noise + np.expm1(noise)), rtol=1e-8)
    np.testing.assert_allclose(each.mean, np.exp(m + v / 2), rtol=1e-10)
    np.testing.assert_array_equal(model.predict(x[:6]), mean)
    own = torch.as_tensor(y[:6])
    np.testing.assert_allclose(each.log_prob(own), of_logs.log_prob(own.log()) - own.log(), rtol=1e-7)
    np.testing.assert_allclose(model.predict_quantiles(x[:6]), np.exp(plain.predict_quantiles(x[:6])), rtol=1e-9)
    np.testing.assert_allclose(model.sample_y(x[:6], 5), np.exp(plain.sample_y(x[:6], 5)), rtol=1e-7)
    _, covariance = model.predict(x[:6], return_cov=True)
    _, of_plain = plain.predict(x[:6], return_cov=True)
    rows = np.arange(6)
    of_plain[rows, rows] += np.expm1(noise) - noise
    np.testing.assert_allclose(covariance, mean[:, None] * mean[None] * of_plain, rtol=1e-7)
    wanted = np.average(stats.lognorm(noise**0.5, scale=np.exp(plain.predict(x))).var(), 0, weights)
    np.testing.assert_allclose(model.noise_, wanted, rtol=1e-9)
    shift = float(weights @ logs.reshape(len(x), -1).sum(1))
    assert model.log_marginal_likelihood_value_ == pytest.approx(plain.log_marginal_likelihood_value_ - shift, rel=1e-9)
    assert model.predictive_fit_.after == pytest.approx(plain.predictive_fit_.after - shift / weights.sum(), rel=1e-8)
    np.testing.assert_allclose(model.explain(x[:2], 2).f, plain.explain(x[:2], 2).f, rtol=1e-9)
    np.testing.assert_allclose(model.network_targets(y), plain.network_targets(logs), atol=1e-12)
    with refused(ntkl.DataError, "positive numbers in", "0", "another likelihood"):
        model.fit(x, y - y.min())


def test_the_distribution_of_positive_numbers() -> None:
    """Against SciPy's log-normal distributions."""
    log_weights = torch.tensor([0.3, 0.7], dtype=torch.float64).log()
    mean, deviation = torch.tensor([[0.0, 1.0], [-1.0, 3.0]]).double(), torch.tensor([[0.5, 0.2], [1.5, 0.3]]).double()
    each = ntkl.LogNormalMixture(log_weights, mean, deviation)
    parts = stats.lognorm(deviation.numpy(), scale=mean.exp().numpy())
    x = np.array([0.8, 5.0])
    share = np.array([0.3, 0.7])
    own = torch.as_tensor(x)
    np.testing.assert_allclose(each.log_prob(own), np.log(parts.pdf(x[:, None]) @ share), rtol=1e-12)
    np.testing.assert_allclose(each.cdf(own), parts.cdf(x[:, None]) @ share, rtol=1e-12)
    np.testing.assert_allclose(each.mean, parts.mean() @ share, rtol=1e-12)
    np.testing.assert_allclose(each.cdf(each.icdf(torch.tensor(0.9, dtype=torch.float64))), 0.9, rtol=1e-9)
    assert each.log_prob(-own).isneginf().all() and not each.cdf(0 * own).any()
    assert each[0].icdf(torch.tensor(0.5)) == each.icdf(torch.tensor(0.5))[0] and (each.sample((50,)) > 0).all()


def test_quantiles_of_normal_noise() -> None:
    x, y = problem(outliers=False, targets=2)
    model = ntkl.LaplaceRegressor(**QUICK).fit(x, y)
    mean, std = model.predict(x[:6], return_std=True)
    expected = stats.norm.ppf([0.025, 0.5, 0.975], mean[..., None], std[..., None])
    np.testing.assert_allclose(model.predict_quantiles(x[:6]), expected, rtol=1e-9)
    alone = model.predict_distribution(x[:6], "map")
    np.testing.assert_allclose(alone.stddev, np.broadcast_to(model.noise_**0.5, (6, 2)), rtol=1e-12)
    draws = model.sample_y(x[:3], 20_000)
    np.testing.assert_allclose(draws.std(-1), std[:3], rtol=0.03)


def test_the_network_alone_has_the_noise_of_the_calibration(found: ntkl.LaplaceRegressor) -> None:
    alone = found.predict_distribution(problem()[0][:4], method="map")
    np.testing.assert_allclose(alone.variance, found.noise_, rtol=1e-9)
    with refused(ntkl.UnsupportedError, '"glm" or "map"', "'nn'", "Choose"):
        found.predict_distribution(problem()[0][:4], method="nn")


@pytest.mark.parametrize(("draw", "least", "most"), [
    (lambda g: g.standard_normal(400), -1e-9, 5.0), (lambda g: g.standard_t(3, 400), 5.0, np.inf),
    (lambda g: 1e-4 * g.standard_t(5, 400), 2.0, np.inf), (lambda g: np.zeros(400), 0.0, 0.0),
    (lambda g: np.r_[g.standard_normal(380), 30 * g.standard_normal(20)], 200.0, np.inf),
])
def test_the_gain_of_heavy_tails(draw: Any, least: float, most: float) -> None:
    """Against a search over both parameters."""
    residual = draw(np.random.default_rng(1))
    weights = np.ones(400)
    weights[::3] = 2.0
    found = tail_gain(residual, weights)
    assert least <= found <= most
    repeated = np.repeat(residual, weights.astype(int))
    assert found == pytest.approx(tail_gain(repeated, np.ones(len(repeated))), rel=1e-9, abs=1e-9)
    if not residual.any():
        return
    normal = stats.norm.logpdf(repeated, 0, (repeated**2).mean() ** 0.5)

    def loss(free: np.ndarray) -> float:
        return -float(stats.t.logpdf(repeated, 2.1 + np.exp(free[0]), 0, np.exp(free[1])).sum())

    starts = ([start, np.log(np.median(np.abs(repeated)))] for start in (-2.0, 1.0, 3.0))
    best = min(optimize.minimize(loss, start, method="Nelder-Mead").fun for start in starts)
    assert found == pytest.approx(-best - normal.sum(), abs=1.5)


@pytest.mark.parametrize("likelihood", ["t", None, "student"])
def test_what_is_refused(likelihood: Any) -> None:
    x, y = problem()
    with refused(ntkl.UnsupportedError, "auto, gaussian, student-t, heteroscedastic-gaussian", repr(likelihood),
                 "Choose one"):
        ntkl.LaplaceRegressor(likelihood=likelihood, **QUICK).fit(x, y)


@pytest.mark.parametrize("likelihood", ["auto", "gaussian", "student-t", "heteroscedastic-gaussian"])
def test_a_noise_that_is_refused(likelihood: str) -> None:
    with refused(ntkl.HyperparameterError, "positive and finite", "-1", "above 0"):
        ntkl.LaplaceRegressor(likelihood=likelihood, noise=-1.0, **QUICK).fit(*problem())


def test_levels_that_are_refused(found: ntkl.LaplaceRegressor) -> None:
    with refused(ntkl.DataError, "strictly between 0 and 1", "95", "0.9"):
        found.predict_quantiles(problem()[0][:2], (5, 95))
