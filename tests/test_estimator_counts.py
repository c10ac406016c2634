"""Counts in `LaplaceRegressor` and the command, against the posterior, sums over counts, and draws."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas
import pytest
import torch
from scipy import stats
from torch import nn

import ntk_laplace as ntkl
from ntk_laplace.tools import cli
from ntk_laplace.tools.estimators.noise import may_be_counts
from refusals import refused

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is not at the optimum of the evidence"),
    pytest.mark.filterwarnings("ignore:the network is not at its optimum"),
]
QUICK: dict[str, Any] = {"epochs": 10, "learning_rate": 0.1, "hidden_layer_sizes": (8,), "precision": 1.0,
                         "random_state": 0, "fourier_features": 0, "piecewise_features": False}


def problem(targets: int = 1, level: float = 3.0, n: int = 150) -> tuple[np.ndarray, np.ndarray]:
    """Rates around exp(level) that vary by gamma factors of variance 0.25."""
    draws = np.random.default_rng(0)
    x = draws.uniform(-2, 2, (n, 1))
    rate = np.exp(level + 0.7 * np.sin(np.arange(1, targets + 1) * x)) * draws.gamma(4.0, 0.25, (n, targets))
    y = draws.poisson(rate).astype(float)
    return x, y[:, 0] if targets == 1 else y


@pytest.mark.parametrize("likelihood", ["negative-binomial", "poisson"])
@pytest.mark.parametrize("targets", [1, 2])
def test_predictions_of_counts(targets: int, likelihood: str) -> None:
    """Quantiles, masses and draws are those of the posterior, whose targets are the counts; moments of first order."""
    x, y = problem(targets, level=1.0)
    model = ntkl.LaplaceRegressor(likelihood=likelihood, **QUICK).fit(x, y)
    assert model.likelihood_ == likelihood and np.array_equal(np.asarray(model.y_train_), y)
    with torch.no_grad():
        response = model.posterior_.predict(model.network_inputs(x[:6]))
    mean, std = model.predict(x[:6], return_std=True)
    dispersion = float(model.posterior_.likelihood.dispersion)
    assert (dispersion > 0.05) == (likelihood == "negative-binomial")
    rates = model.posterior_.outputs(model.network_inputs(x)).exp().detach().numpy()
    noise = rates + dispersion * rates**2
    latent = model.posterior_.latent(model.network_inputs(x[:6]))
    scale = 1.0 if model.posterior_.predictive is None else model.posterior_.predictive.scale
    variance = scale * latent.variance.detach().numpy() * rates[:6] ** 2 + noise[:6]
    np.testing.assert_allclose(mean, rates[:6].reshape(mean.shape), rtol=1e-12)
    np.testing.assert_allclose(std, np.sqrt(variance).reshape(mean.shape), rtol=1e-9)
    np.testing.assert_array_equal(model.predict(x[:6]), mean)
    np.testing.assert_allclose(model.noise_, noise.mean(0).squeeze(), rtol=1e-9)
    levels = (0.05, 0.5, 0.9)
    quantiles, each = model.predict_quantiles(x[:6], levels), model.predict_distribution(x[:6])
    assert isinstance(each, ntkl.CountMixture) and (quantiles == np.floor(quantiles)).all() and quantiles.min() >= 0
    np.testing.assert_array_equal(quantiles, np.moveaxis(response.quantiles(levels).numpy(), 0, -1).reshape(
        *mean.shape, 3))
    np.testing.assert_allclose(each.mean, response.mean.numpy().reshape(mean.shape), rtol=1e-7)
    if targets == 1:
        own = torch.as_tensor(y[:6])
        np.testing.assert_allclose(each.log_prob(own), response.log_prob(own[:, None]), atol=1e-3)  # by 1,000 points
    alone = model.predict_distribution(x[:6], "map")
    rate = model.posterior_.outputs(model.network_inputs(x[:6])).exp().detach().numpy().reshape(mean.shape)
    np.testing.assert_allclose(alone.mean, rate, rtol=1e-9)
    np.testing.assert_allclose(alone.variance, rate + dispersion * rate**2, rtol=1e-9)
    _, covariance = model.predict(x[:6], return_cov=True)
    np.testing.assert_allclose(np.sqrt(np.einsum("ii...->i...", covariance)), std, rtol=1e-9)
    draws = model.sample_y(x[:6], 20_000, random_state=0)
    assert np.array_equal(draws, model.sample_y(x[:6], 20_000, random_state=0)) and (draws == np.floor(draws)).all()
    np.testing.assert_allclose(draws.mean(-1), each.mean, rtol=0.05)
    np.testing.assert_allclose(draws.std(-1), each.stddev, rtol=0.05)
    if targets == 1:
        drawn = np.cov(draws)
        size = np.sqrt(np.outer(drawn.diagonal(), drawn.diagonal()))
        np.testing.assert_allclose((drawn - covariance) / size * ~np.eye(6, dtype=bool), 0.0, atol=0.04)
    for index, level in enumerate(levels):
        assert ((draws <= quantiles[..., index, None]).mean(-1) > level - 0.02).all()
        assert ((draws < quantiles[..., index, None]).mean(-1) < level + 0.02).all()
    found = model.explain(x[:6], 3)  # of logarithms of rates
    np.testing.assert_allclose(found.f.exp().numpy().reshape(mean.shape), rate, rtol=1e-9)
    assert len(model.theta_) == len(model.posterior_.prior.precision.reshape(-1)) + (likelihood != "poisson")


def test_counts_start_at_their_mean_and_are_better_than_numbers() -> None:
    """Rates of 600 and of 0.02 are found; of counts the evidence of a negative binomial is far above the others."""
    for level in (6.4, -4.0):
        x, y = problem(level=level, n=400)
        model = ntkl.LaplaceRegressor(likelihood="negative-binomial", **QUICK).fit(x, y)
        assert model.predict(x).mean() == pytest.approx(y.mean(), rel=0.15)
    x, y = problem(level=1.0)
    new = ntkl.LaplaceRegressor(likelihood="negative-binomial", **QUICK).fit(x, y)
    normal = ntkl.LaplaceRegressor(likelihood="gaussian", **QUICK).fit(x, y)
    assert new.log_marginal_likelihood_value_ > normal.log_marginal_likelihood_value_ + 20
    assert new.log_marginal_likelihood(new.theta_) == pytest.approx(new.log_marginal_likelihood_value_, rel=1e-8)


def test_small_whole_numbers_that_vary_are_tried_as_counts() -> None:
    """The evidence chooses; the result is that of either likelihood, and others are not even tried as counts."""
    x, y = problem(level=1.0)
    found, counts = (ntkl.LaplaceRegressor(likelihood=name, **QUICK).fit(x, y)
                     for name in ("auto", "negative-binomial"))
    assert found.likelihood_ == "negative-binomial" and found.get_params()["likelihood"] == "auto"
    assert found.log_marginal_likelihood_value_ == counts.log_marginal_likelihood_value_
    np.testing.assert_array_equal(found.predict(x), counts.predict(x))
    np.testing.assert_array_equal(found.training_index_, counts.training_index_)
    assert [may_be_counts(one, None) for one in (y[:, None], np.stack([y, y], 1))] == [True, True]
    narrow = np.round(5 + np.tanh(x))  # varies less than a count of mean 5
    for other in (y[:, None] + 0.5, y[:, None] - 3, narrow, 100 * y[:, None], 0 * y[:, None]):
        assert not may_be_counts(other, None)
    assert not may_be_counts(y[:, None], np.where(y == 2, 1.0, 1e-9))
    steps = np.where(x[:, 0] > 0, 40.0, 0.0)  # a count of mean 40 would vary
    steps += np.random.default_rng(1).integers(0, 2, len(x))
    sharp = ntkl.LaplaceRegressor(**QUICK).fit(x, steps)
    assert may_be_counts(steps[:, None], None) and sharp.likelihood_ != "negative-binomial"


def test_equal_rows_and_weights_count_as_so_many() -> None:
    x, y = problem(n=40)
    weights = np.arange(40) % 3 + 1
    model, repeated = (ntkl.LaplaceRegressor(likelihood="negative-binomial", **QUICK | {"batch_size": None})
                       for _ in range(2))
    model.fit(x, y, weights)
    repeated.fit(np.repeat(x, weights, 0), np.repeat(y, weights, 0))
    np.testing.assert_allclose(model.predict(x), repeated.predict(x), rtol=1e-6)
    assert float(model.network_.state_dict()["1.shift"]) == pytest.approx(np.log(np.average(y, weights=weights)))


def test_draws_of_rates_that_are_far_from_the_data() -> None:
    """NumPy draws no counts above 1e18, where they are their rates."""
    x, _ = problem(n=40)
    model = ntkl.LaplaceRegressor(likelihood="poisson", smooth_clipping=False, **QUICK)
    model.fit(x, np.exp(2 * x[:, 0]).round())
    draws, mean = model.sample_y([[60.0]], 50), model.predict([[60.0]])
    assert mean > 1e20 and np.isfinite(draws).all() and (draws > 1e15).any()


def of_units(targets: int, seed: int = 0) -> tuple[pandas.DataFrame, np.ndarray, list[np.ndarray]]:
    """Rows with whole exposures, their counts, and those of each of the units that the exposure is the number of."""
    draws = np.random.default_rng(seed)
    a, years, b = draws.normal(size=30), draws.integers(1, 5, 30), draws.normal(size=30)
    frame = pandas.DataFrame({"a": a, "years": years, "b": b})
    units = [draws.poisson(np.exp(row.a), (int(row.years), targets)).astype(float) for row in frame.itertuples()]
    return frame.astype(float), np.array([each.sum(0) for each in units]), units


@pytest.mark.parametrize(("targets", "flat"), [(1, False), (1, True), (2, False)])
def test_a_count_of_an_exposure_is_the_sum_of_those_of_its_units(targets: int, flat: bool) -> None:
    """The posterior is that of Poisson counts of each unit; evidences differ by the masses given the sums."""
    frame, counts, units = of_units(targets)
    network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, targets), *[nn.Flatten(0)] * flat).double()
    given: dict[str, Any] = {"prefit": True, "predictive": None, "likelihood": "poisson", "precision": 1.0,
                             "structure": "gp"}
    model = ntkl.LaplaceRegressor(network, exposure="years", **given).fit(frame, counts.squeeze())
    years = frame["years"].to_numpy()
    rows = np.repeat(np.arange(30), years.astype(int))
    each = ntkl.LaplaceRegressor(network, **given).fit(frame[["a", "b"]].iloc[rows], np.concatenate(units).squeeze())
    theta = model.theta_
    given_sum = sum(stats.multinomial.logpmf(unit[:, d], int(unit[:, d].sum()), np.full(len(unit), 1 / len(unit)))
                    for unit in units for d in range(targets))
    difference = model.log_marginal_likelihood(theta) - each.log_marginal_likelihood(theta)
    assert difference == pytest.approx(-given_sum, rel=1e-9)
    np.testing.assert_allclose(model.theta_, each.theta_, atol=1e-3)
    rates = each.predict(frame[["a", "b"]])
    np.testing.assert_allclose(model.predict(frame).T, rates.T * years, rtol=1e-12)
    np.testing.assert_allclose(model.original_inputs(model.network_inputs(frame)), frame, rtol=1e-14)


def test_an_exposure_is_no_feature() -> None:
    """Columns are numbered as in X; predictions are in proportion; a name and a number say the same."""
    frame, counts, _ = of_units(1)
    frame["c"] = np.where(np.arange(30) % 10 == 3, 1e3, frame["a"])  # extreme values
    given = QUICK | {"exposure": "years", "piecewise_features": True, "smooth_clipping": True}
    model = ntkl.LaplaceRegressor(**given).fit(frame, counts[:, 0])
    assert model.likelihood_ == "negative-binomial" and model.n_features_in_ == 4
    assert model.piecewise_features_ == [0, 2, 3] == model.clipped_features_
    assert (model.relevance_ > 0).tolist() == [True, False, True, True]
    np.testing.assert_allclose(model.predict(frame.assign(years=2 * frame["years"])), 2 * model.predict(frame))
    weights = np.arange(30) % 3 + 1.0
    for own in (None, weights):
        state = ntkl.LaplaceRegressor(**given).fit(frame, 30 * counts[:, 0], own).network_.state_dict()
        rate = 30 * np.average(counts[:, 0], weights=own) / np.average(frame["years"], weights=own)
        assert float(state["1.shift"]) == pytest.approx(np.log(rate))
    assert counts.mean() > 2  # so that these are more than numbers are taken as counts without an exposure
    assert ntkl.LaplaceRegressor(**given).fit(frame, 30 * counts[:, 0]).likelihood_ == "negative-binomial"
    numbered = ntkl.LaplaceRegressor(**given | {"exposure": 1}).fit(frame.to_numpy(), counts[:, 0])
    np.testing.assert_array_equal(numbered.predict(frame.to_numpy()), model.predict(frame))
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_quantiles(frame), model.predict_quantiles(frame))


def test_a_wave_along_a_column_is_found_beside_an_exposure() -> None:
    draws = np.random.default_rng(0)
    frame = pandas.DataFrame({"years": draws.uniform(0.5, 2, 300), "month": draws.uniform(0, 60, 300)})
    counts = draws.poisson(20 * frame["years"] * np.exp(np.sin(2 * np.pi * frame["month"] / 12)))
    given = QUICK | {"exposure": "years", "likelihood": "poisson", "fourier_features": 1}
    (column, period), = ntkl.LaplaceRegressor(**given).fit(frame, counts).fourier_features_
    assert column == 1 and period == pytest.approx(12, rel=0.02)
    counts = draws.poisson(20 * frame["years"] * np.exp(np.sin(20 * np.log(frame["years"]))))
    along = ntkl.LaplaceRegressor(**given | {"piecewise_features": True}).fit(frame, counts)
    lack = along.posterior_.lack_of_fit()
    assert lack.input == 1 and lack.period is not None  # its logarithm comes last
    assert along.fourier_features_ == []


def test_what_is_no_exposure_is_refused() -> None:
    frame, counts, _ = of_units(1)
    y = counts[:, 0]
    for exposure, table, expected, got in (
        ("year", frame, "a column 'year' of X", "a, years, b"), ("years", frame.to_numpy(), "'years' of X", "without"),
        (3, frame, "from 0 to 2, or the name", "3"), (-1, frame, "from 0 to 2", "-1"), (True, frame, "to 2", "True"),
        ("a", frame, "positive exposures in column 'a' of X", "in row"),
        ("years", frame[["years"]], "beside the exposure", "column 'years'"),
    ):
        with refused(ntkl.DataError, expected, got, r"\w"):
            ntkl.LaplaceRegressor(exposure=exposure, **QUICK).fit(table, y)
    with refused(ntkl.UnsupportedError, 'likelihood "auto" or one of counts', "'gaussian'", "Divide"):
        ntkl.LaplaceRegressor(exposure="years", likelihood="gaussian", **QUICK).fit(frame, y)
    model = ntkl.LaplaceRegressor(exposure="years", **QUICK).fit(frame, y)
    with refused(ntkl.DataError, "positive exposures in column 'years' of X", "0 in row 0", "not observed"):
        model.predict(frame.assign(years=0.0))


class Named(nn.Module):
    """Outputs that are no tensor, or of another shape."""

    def __init__(self, shape: tuple[int, ...] | None) -> None:
        super().__init__()
        self.layer, self.shape = nn.Linear(2, 1), shape

    def forward(self, x: torch.Tensor) -> Any:
        f = self.layer(x)
        return {"rate": f} if self.shape is None else f.reshape(self.shape)


def test_a_network_that_does_not_fit_beside_an_exposure_is_refused_by_what_it_gets_and_gives() -> None:
    """It gets the columns but the exposure, and its outputs are those before the exposure."""
    frame, counts, _ = of_units(1)
    for network, error, expected, got in (
        (nn.Linear(3, 1), ntkl.NetworkError, r"takes X of shape \(2, 2\)", r"2x2 and 3x1"),
        (nn.Linear(2, 3), ntkl.DataError, "a network with 1 output", "3"),
        (Named(None), ntkl.NetworkError, "network outputs as one tensor", "a dict with the tensors 'rate'"),
        (Named((-1, 1, 1)), ntkl.NetworkError, "network outputs of shape", r"\(2, 1, 1\)"),
    ):
        with refused(error, expected, got, r"\w"):
            ntkl.LaplaceRegressor(network, exposure="years", epochs=2).fit(frame, counts[:, 0])
    flat = Named((-1,)).double()  # shape (n,) stands for one output
    model = ntkl.LaplaceRegressor(flat, exposure="years", prefit=True).fit(frame, counts[:, 0])
    rate = flat(torch.tensor(frame[["a", "b"]].to_numpy())).exp().detach().numpy()
    np.testing.assert_allclose(model.predict(frame), frame["years"] * rate, rtol=1e-9)


def test_fit_of_a_table_with_exposures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The prediction without inputs is one rate for all; the exposure is no column that is constant."""
    monkeypatch.chdir(tmp_path)
    frame, counts, _ = of_units(1)
    frame = frame.assign(claims=np.minimum(counts[:, 0], 6).astype(int), region=["north", "south"] * 15)
    frame.to_csv("t.csv", index=False)
    fit = ["fit", "t.csv", "--target", "claims", "--epochs", "4", "--hidden", "4", "--out", "out", "--exposure"]
    assert cli.main([*fit, "years"]) == 0
    out, found = capsys.readouterr().out, pandas.read_csv("out/predictions.csv")
    assert "claims is taken as counts" in out and "Constant" not in out
    new = frame.loc[found["row"]]
    train = frame.drop(index=found["row"])
    mean = train["years"] * train["claims"].sum() / train["years"].sum()
    alpha = max(0.0, ((train["claims"] - mean) ** 2 - mean).mean() / (mean**2).mean())
    rate = new["years"] * train["claims"].sum() / train["years"].sum()
    alike = stats.nbinom(1 / alpha, 1 / (1 + alpha * rate)) if alpha else stats.poisson(rate)
    (score,) = [float(line[14:].split()[0]) for line in out.splitlines() if line.startswith("without inputs")]
    assert score == pytest.approx(alike.logpmf(new["claims"]).mean(), abs=5.1e-5)
    for exposure, expected in (("region", "numbers alone in column 'region' of t.csv"), ("year", "--exposure COLUMN"),
                               ("a", "positive exposures in column 'a' of t.csv")):
        assert cli.main([*fit, exposure]) == 1
        assert expected in capsys.readouterr().err
    np.savez("t.npz", X=frame[["a", "years"]].to_numpy(), y=counts[:, 0])
    assert cli.main(["fit", "t.npz", "--exposure", "years", "--out", "out"]) == 1
    assert "a table, for --category COLUMN, --fill-missing and --exposure" in capsys.readouterr().err


def test_what_is_no_count_is_refused() -> None:
    x, y = problem(n=30)
    for wrong in (y - 100, y + 0.5):
        with refused(ntkl.TargetError, "whole numbers from 0", r"\d", "NegativeBinomial"):
            ntkl.LaplaceRegressor(likelihood="negative-binomial", **QUICK).fit(x, wrong)
    network = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    given = ntkl.LaplaceRegressor(network, likelihood="poisson", **QUICK).fit(x, y)  # as it is, without a shift
    assert type(given.network_) is nn.Sequential and len(given.network_) == 3


def test_fit_of_a_table_of_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Few whole numbers are no classes with --likelihood; files and scores are those of the estimator."""
    monkeypatch.chdir(tmp_path)
    x, y = problem(level=0.3, n=60)
    y = np.minimum(y, 7)
    pandas.DataFrame({"age": x[:, 0], "claims": y.astype(int)}).to_csv("t.csv", index=False)
    options = ["--target", "claims", "--epochs", "4", "--hidden", "4", "--out", "out"]
    assert cli.main(["fit", "t.csv", *options, "--likelihood", "negative-binomial"]) == 0
    out, found = capsys.readouterr().out, pandas.read_csv("out/predictions.csv")
    model = joblib.load("out/model.joblib")
    assert "claims is taken as counts (--likelihood says otherwise)" in out and "(negative binomial)" in out
    inputs = pandas.read_csv("t.csv").loc[found["row"], ["age"]]
    np.testing.assert_array_equal(found[["lower", "upper"]], model.predict_quantiles(inputs, (0.05, 0.95)))
    assert ((found["lower"] <= found["upper"]) & (found["lower"] >= 0)).all()
    scores = {line.split("  ")[0]: float(line[14:].split()[0]) for line in out.splitlines()
              if line.startswith(("without inputs", "network alone ", "posterior "))}
    train = pandas.read_csv("t.csv").drop(index=found["row"])["claims"]
    alpha = max(0.0, (train.var(ddof=0) - train.mean()) / train.mean() ** 2)
    alike = stats.nbinom(1 / alpha, 1 / (1 + alpha * train.mean())) if alpha else stats.poisson(train.mean())
    assert scores["without inputs"] == pytest.approx(alike.logpmf(found["target"]).mean(), abs=5.1e-5)
    own = model.predict_distribution(inputs).log_prob(torch.as_tensor(found["target"].to_numpy(copy=True)))
    assert scores["posterior"] == pytest.approx(float(own.mean()), abs=5.1e-5)
    for command in (["predict", "out/model.joblib", "--inputs", "t.csv", "--out", "again.csv"],
                    ["explain", "out/model.joblib", "--inputs", "t.csv", "--most", "3"],
                    ["evidence", "out/model.joblib"]):
        assert cli.main(command) == 0
    assert "log claims" in Path("out/explanations.html").read_text()
    pandas.DataFrame({"age": x[:, 0], "claims": 3 * np.arange(60)}).to_csv("t.csv", index=False)
    assert cli.main(["fit", "t.csv", *options, "--likelihood", "gaussian"]) == 0
    assert "which --likelihood negative-binomial takes as counts" in capsys.readouterr().out
