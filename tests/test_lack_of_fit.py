"""Lack of fit: Moran's I of residuals of neighbors beside all orders and beside networks trained without each point."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.posterior.explain import leave_one_out
from ntk_laplace.posterior.lack_of_fit import LackOfFit, moran
from ntk_laplace.posterior.periods import Wave
from ntk_laplace.runtime import tuning
from refusals import refused

QUIET = ntkl.Settings(progress=False)


@pytest.fixture(autouse=True)
def same_networks() -> None:
    torch.manual_seed(0)


def nearest(x: np.ndarray, k: int) -> np.ndarray:
    distance = ((x[:, None] - x[None]) ** 2).sum(-1)
    np.fill_diagonal(distance, np.inf)
    return np.argsort(distance, 1)[:, :k]


@pytest.mark.parametrize(("n", "k", "outputs"), [(6, 2, 1), (6, 3, 2), (6, 1, 3)])
def test_the_score_is_that_among_all_orders(n: int, k: int, outputs: int) -> None:
    rng = np.random.default_rng(n + k)
    r, near = rng.normal(size=(n, outputs)) * 10.0 ** np.arange(outputs), nearest(rng.normal(size=(n, 2)), k)
    r = r + 5.0
    scaled = (r - r.mean(0)) / r.std(0)
    sums = np.array([sum(scaled[order[i]] @ scaled[order[j]] for i in range(n) for j in near[i])
                     for order in itertools.permutations(range(n))])
    correlation, deviations = moran(torch.as_tensor(r), torch.as_tensor(near))
    assert correlation == pytest.approx(sums[0] / (n * k * outputs), rel=1e-12)
    assert deviations == pytest.approx((sums[0] - sums.mean()) / sums.std(), rel=1e-10)
    assert sums.mean() / (n * k * outputs) == pytest.approx(-1 / (n - 1))


def test_residuals_that_are_equal_say_nothing() -> None:
    near = torch.as_tensor(nearest(np.random.default_rng(0).normal(size=(8, 2)), 2))
    assert moran(torch.ones(8, 2).double(), near) == (0.0, 0.0)
    r = torch.randn(8, 1, generator=torch.Generator().manual_seed(0)).double()
    one, two = moran(r, near), moran(torch.cat([r, torch.ones_like(r)], 1), near)
    assert one == pytest.approx(two, rel=1e-12)


@pytest.mark.parametrize(("correlation", "deviations", "above", "clear", "of_classes"), [
    (0.21, 3.1, True, True, False), (0.19, 3.1, True, False, False), (0.21, 2.9, True, False, False),
    (0.34, 3.1, True, True, True), (0.04, 9.0, False, False, False), (0.9, 0.9, False, False, False),
])
def test_what_counts_as_alike(
    correlation: float, deviations: float, above: bool, clear: bool, of_classes: bool
) -> None:
    found = ntkl.LackOfFit(correlation, deviations, 3, 100, True)
    assert (found.above(0.05), found.clear) == (above, clear)
    assert ntkl.LackOfFit(correlation, deviations, 3, 100, True, classes=True).clear == of_classes


def test_residuals_of_classes_are_those_of_their_probabilities() -> None:
    rng = np.random.default_rng(0)
    x, y = torch.as_tensor(rng.uniform(-1, 1, (40, 2))), torch.as_tensor(rng.integers(0, 3, 40))
    network = nn.Linear(2, 3).double()
    found = ntkl.laplace(network, (x, y), ntkl.Categorical(), structure="diag").lack_of_fit()
    with torch.no_grad():
        residual = nn.functional.one_hot(y) - network(x).softmax(1)
    expected = moran(residual, torch.as_tensor(nearest((x / x.std(0)).numpy(), 3)))
    assert (found.correlation, found.deviations) == pytest.approx(expected, rel=1e-9) and found.classes


def largest(residual: Tensor, x: Tensor, k: int) -> tuple[float, float, int | None]:
    """Correlation, deviations and input, of residuals cut off at three root mean squares."""
    centered = residual - residual.mean(0)
    most = 3 * centered.square().mean(0).sqrt()
    centered = torch.minimum(torch.maximum(centered, -most), most)
    found = [(*moran(centered, torch.as_tensor(nearest((x / x.std(0)).numpy(), k))), None)]
    for j in range(x.shape[1]):
        correlation, deviations = moran(centered, torch.as_tensor(nearest(x[:, j:j + 1].numpy(), k)))
        deviations -= (2 * np.log(x.shape[1])) ** 0.5
        found += [(correlation, deviations, j)] if deviations > 2 else []
    return max(found, key=lambda one: one[1])


def linear(n: int = 30) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(1)
    x = torch.as_tensor(rng.uniform(-1, 1, (n, 2)) * [1, 7])
    return x, torch.sin(3 * x[:, :1]) + 0.1 * torch.as_tensor(rng.normal(size=(n, 1)))


def ridge(x: Tensor, y: Tensor, noise: float) -> nn.Module:
    """The optimum of a linear network under prior precision 1."""
    design = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    weights = torch.linalg.solve(design.mT @ design / noise + torch.eye(3).double(), design.mT @ y / noise)
    network = nn.Linear(2, 1).double()
    with torch.no_grad():
        network.weight.copy_(weights[:2].mT)
        network.bias.copy_(weights[2])
    return network


@pytest.mark.parametrize("structure", ["gp", "full", "diag", "iterative"])
def test_residuals_are_those_of_points_that_were_left_out(structure: str) -> None:
    (x, y), noise = linear(), 0.1
    posterior = ntkl.laplace(ridge(x, y, noise), (x, y), ntkl.Gaussian(noise), ntkl.GaussianPrior(1.0), structure)
    found = posterior.lack_of_fit(neighbors=4)
    with torch.no_grad():
        if structure in ("diag", "iterative"):  # not exact, or too dear
            residual = y - posterior.network.module(x)
        else:
            kept = [torch.arange(len(x)) != n for n in range(len(x))]
            residual = torch.stack([y[n] - ridge(x[keep], y[keep], noise)(x[n]) for n, keep in enumerate(kept)])
    correlation, deviations, along = largest(residual, x, 4)
    assert found.input == along == 0
    assert found.correlation == pytest.approx(correlation, rel=1e-9)
    assert found.deviations == pytest.approx(deviations, rel=1e-9)
    assert (found.num_points, found.neighbors, found.left_out) == (30, 4, structure in ("gp", "full"))
    assert f"4 nearest neighbors along input 0 correlate by {correlation:.3g}, {deviations:.2g} standard" in str(found)


@pytest.mark.parametrize("structure", ["gp", "full"])
def test_means_of_a_leave_one_out_are_used_until_a_hyperparameter_moves(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x, y), noise = linear(), 0.1
    fit = [ntkl.laplace(ridge(x, y, noise), (x, y), ntkl.Gaussian(noise), ntkl.GaussianPrior(1.0), structure)
           for _ in range(2)]
    fit[0].leave_one_out()
    with monkeypatch.context() as context:
        for name in ("without_each", "removal_terms"):  # nothing is left out again
            context.setattr(sys.modules[leave_one_out.__module__], name, None)
        found = fit[0].lack_of_fit()
    assert found == fit[1].lack_of_fit()
    for posterior in fit:
        posterior.prior.precision = 1.01
    fit[1].leave_one_out()
    assert fit[0].lack_of_fit() == fit[1].lack_of_fit() != found


def test_points_without_a_target_or_a_weight_are_left_out() -> None:
    x, y = linear()
    weight, missing = torch.ones(30).double(), y.clone()
    weight[3], missing[5] = 0.0, torch.nan
    network, noise = ridge(x, y, 0.1), torch.linspace(0.05, 0.2, 30)
    likelihood = ntkl.Gaussian(noise, missing="nan")
    posterior = ntkl.laplace(network, (x, missing, weight), likelihood, ntkl.GaussianPrior(1.0),
                             settings=ntkl.Settings(batch_size=7))
    there = [n for n in range(30) if n not in (3, 5)]
    fewer = ntkl.laplace(network, (x[there], y[there]), ntkl.Gaussian(noise[there]), ntkl.GaussianPrior(1.0))
    found, expected = posterior.lack_of_fit(), fewer.lack_of_fit()
    assert found.num_points == 28
    assert found.correlation == pytest.approx(expected.correlation, rel=1e-9)


def test_what_is_missed_along_one_input_is_found() -> None:
    """Neighbors among all seven inputs are far apart in it."""
    rng = np.random.default_rng(3)
    x = torch.as_tensor(rng.uniform(-3, 3, (200, 7)))
    x[:, 2], x[:, 5] = torch.arange(200) % 2, 1.0  # a category, and a constant
    y = torch.sin(5 * x[:, 3:4]) + 0.2 * torch.as_tensor(rng.normal(size=(200, 1)))
    network, likelihood = nn.Linear(7, 1).double(), ntkl.Gaussian(0.5)
    with torch.no_grad():
        network.weight.zero_()
    found = ntkl.laplace(network, (x, y), likelihood, structure="diag").lack_of_fit()
    assert found.input == 3 and found.clear and "along input 3" in str(found)
    y[:] = torch.linspace(-1, 1, 200).double()[:, None]  # of equal numbers, no row is nearer than another
    assert ntkl.laplace(network, (x, y), likelihood, structure="diag").lack_of_fit().input is None
    y[:] = torch.as_tensor(rng.normal(size=(200, 1)))
    order = x[:, 0].argsort()
    y[order[10:12]] = 10.0  # two outliers that are neighbors along the first input
    assert ntkl.laplace(network, (x, y), likelihood, structure="diag").lack_of_fit().input is None


@pytest.mark.parametrize(("share", "along"), [(0.1, None), (0.5, 0)])
def test_a_wave_along_one_input_comes_before_all_of_them(share: float, along: int | None) -> None:
    rng = np.random.default_rng(1)
    x = torch.as_tensor(rng.uniform(-1, 1, (200, 2)))
    y = torch.sin(4 * x[:, :1]) * x[:, 1:].sign() + share * torch.sin(3 * x[:, :1])
    network = nn.Linear(2, 1).double()
    with torch.no_grad():
        network.weight.zero_()
        network.bias.zero_()
    found = ntkl.laplace(network, (x, y), ntkl.Gaussian(1.0), structure="diag").lack_of_fit()
    assert found.input == along and found.clear and (found.deviations > 10) == (along is None)
    assert (found.period is None) == (along is None)


def test_classes_that_follow_one_input_are_no_lack_of_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cautious predictions leave the same residual of all points of a class; a wave says more."""
    monkeypatch.setattr(sys.modules[LackOfFit.__module__], "strongest_wave", lambda *given: None)
    rng = np.random.default_rng(7)
    x = torch.as_tensor(rng.normal(size=(60, 3)))
    y, network = (x[:, 1] > 0).long() + (x[:, 1] > 1).long(), nn.Linear(3, 3).double()
    with torch.no_grad():
        network.weight.zero_()
        network.bias.zero_()
        network.weight[:, 1] = torch.tensor([-1.5, 0.5, 1.5])
    found = ntkl.laplace(network, (x, y), ntkl.Categorical(), structure="diag").lack_of_fit()
    residual = (nn.functional.one_hot(y) - network(x).softmax(1)).detach()
    alone = moran(residual, torch.as_tensor(nearest(x[:, 1:2].numpy(), 3)))
    assert alone[0] > 0.33 and alone[1] > 5 and found.input is None


def test_of_several_waves_the_largest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = linear()
    x = torch.cat([x, torch.ones(30, 1).double(), x.flip(1)], 1)  # one is constant, and not looked at
    shares, looked = iter([0.1, 0.3, 0.2, 0.25]), []

    def wave(places: np.ndarray, residual: np.ndarray, inputs: int) -> Wave:
        looked.append(inputs)
        return Wave(float(len(looked)), next(shares))

    monkeypatch.setattr(sys.modules[LackOfFit.__module__], "strongest_wave", wave)
    found = ntkl.laplace(nn.Linear(5, 1).double(), (x, y), ntkl.Gaussian(1.0), structure="diag").lack_of_fit()
    assert (found.input, found.period, found.explained, looked) == (1, 2.0, 0.3, [4, 4, 4, 4])


def test_residuals_at_equal_numbers_are_one() -> None:
    rng = np.random.default_rng(5)
    number = np.minimum(rng.geometric(0.1, 300), 30.0) ** 1.05  # some of them often
    x = torch.as_tensor(np.stack([number, rng.normal(size=300), rng.normal(size=300), rng.normal(size=300)], 1))
    y = torch.as_tensor(np.sin(number / 2) + rng.normal(size=300))[:, None]
    network = nn.Linear(4, 1).double()
    with torch.no_grad():
        network.weight.zero_()
        network.bias.zero_()
    found = ntkl.laplace(network, (x, y), ntkl.Gaussian(1.0), structure="diag").lack_of_fit()
    centered = y[:, 0].numpy() - y.mean().item()
    centered = centered.clip(*(np.array([-3, 3]) * centered.std()))
    values = np.unique(number)
    sums = np.array([centered[number == value].sum() / (number == value).sum() ** 0.5 for value in values])
    correlation, deviations = moran(torch.as_tensor(sums)[:, None], torch.as_tensor(nearest(values[:, None], 3)))
    assert found.input == 0 and found.correlation == pytest.approx(correlation, rel=1e-9)
    assert found.deviations == pytest.approx(deviations - (2 * np.log(4)) ** 0.5, rel=1e-9)


def test_residuals_whose_squares_overflow_are_those_in_another_unit() -> None:
    """As those of log variances are at an outlier."""
    x = torch.linspace(-1, 1, 40, dtype=torch.float64, device="cpu").unsqueeze(1)
    network, likelihood = nn.Linear(1, 1).double(), ntkl.Gaussian(2.0**-200)
    with torch.no_grad():
        network.weight.zero_()
        network.bias.zero_()
    found = [ntkl.laplace(network, (x, unit * torch.sin(20 * x)), likelihood, structure="diag").lack_of_fit()
             for unit in (1.0, 2.0**340)]
    assert found[0] == found[1] and found[0].period is not None


def test_a_constant_input_has_no_distances() -> None:
    x, y = linear()
    network = nn.Linear(3, 1).double()
    with torch.no_grad():
        network.weight[:, 2] = 0.0
        network.weight[:, :2], network.bias[:] = ridge(x, y, 0.1).weight, ridge(x, y, 0.1).bias
    plain, wide = (ntkl.laplace(own, (inputs, y), ntkl.Gaussian(0.1), structure="diag").lack_of_fit()
                   for own, inputs in ((ridge(x, y, 0.1), x), (network, torch.cat([x, 0 * x[:, :1] + 0.1], 1))))
    assert wide.correlation == pytest.approx(plain.correlation, rel=1e-9)


def test_neighbors_are_those_among_the_inputs_that_matter_too() -> None:
    """With a precision of its own for each input: the larger correlation of the two."""
    rng = np.random.default_rng(2)
    x = torch.as_tensor(np.concatenate([rng.uniform(-1, 1, (60, 1)), rng.normal(size=(60, 6))], 1))
    y = torch.sin(4 * x[:, :1]) * x[:, 1:2].sign()  # nothing is to be seen along one of them
    network, likelihood = nn.Linear(7, 1).double(), ntkl.Gaussian(0.1)
    plain = ntkl.laplace(network, (x, y), likelihood, ntkl.GaussianPrior(1.0, groups="layer"))
    precision = torch.tensor([1.0, 9.0, *[1e6] * 5, 1.0]).double()  # the last of the bias
    prior = ntkl.GaussianPrior(1.0, groups="input").bind({"weight": torch.Size((1, 7)), "bias": torch.Size((1,))})
    with torch.no_grad():
        prior.log_precision.copy_(precision.log())
    relevant = ntkl.laplace(network, (x, y), likelihood, prior)
    assert relevant.lack_of_fit().correlation > 0.5 > 0.3 > plain.lack_of_fit().correlation


def test_of_many_points_some_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = linear()
    posterior = ntkl.laplace(ridge(x, y, 0.1), (x, y), ntkl.Gaussian(0.1))
    whole = posterior.lack_of_fit()
    monkeypatch.setattr(tuning, "NEIGHBOR_POINTS", 20)
    part = posterior.lack_of_fit()
    assert part.num_points == 20 and part.correlation != whole.correlation and part == posterior.lack_of_fit()


def test_single_pixels_are_not_looked_at() -> None:
    rng = np.random.default_rng(4)
    x = torch.as_tensor(rng.uniform(-3, 3, (100, 4)))
    network, likelihood = nn.Sequential(nn.Flatten(), nn.Linear(4, 1)).double(), ntkl.Gaussian(0.5)
    nn.init.zeros_(network[1].weight)
    table, images = (ntkl.laplace(network, (own, torch.sin(5 * x[:, 1:2])), likelihood, structure="diag").lack_of_fit()
                     for own in (x, x.reshape(100, 1, 2, 2)))
    assert table.input == 1 and images.input is None


def test_pixels_keep_their_scale_and_a_loaded_posterior_takes_the_inputs(tmp_path: object) -> None:
    x, y = linear()
    images = torch.stack([x, 5.0 * x.flip(1)], 1).reshape(30, 1, 2, 2)
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 1)).double()
    posterior = ntkl.laplace(network, (images, y), ntkl.Gaussian(0.1), structure="full")
    found = posterior.lack_of_fit()
    with torch.no_grad():
        hat = posterior.fitted.precision.covariance_blocks(posterior.jacobian(images))[:, 0, 0] / 0.1
        residual = (y - network(images))[:, 0] / (1 - hat)
    near = torch.as_tensor(nearest(images.flatten(1).numpy(), 3))
    assert (found.correlation, found.deviations) == pytest.approx(moran(residual[:, None], near), rel=1e-9)
    posterior.save(f"{tmp_path}/posterior.pt", include_data=True)
    loaded = ntkl.load(f"{tmp_path}/posterior.pt", network)
    with refused(ntkl.DataError, "the training inputs x", "none", "pass lack_of_fit"):
        loaded.lack_of_fit()


def test_what_lack_of_fit_refuses() -> None:
    x, y = linear()
    posterior = ntkl.laplace(nn.Linear(2, 1).double(), (x, y), ntkl.Gaussian(0.1))
    with refused(ntkl.HyperparameterError, "neighbors as a whole number", "0", "Leave it out for 3"):
        posterior.lack_of_fit(neighbors=0)
    with refused(ntkl.DataError, "at least 34 training points", "30", "fewer neighbors"):
        posterior.lack_of_fit(neighbors=30)
    with refused(ntkl.DataError, "inputs of the 30 training points", "29", "order of the fit"):
        posterior.lack_of_fit(x[1:])
    words = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(4, 1)).double()
    tokens = torch.randint(5, (30, 2), generator=torch.Generator().manual_seed(0))
    with refused(ntkl.UnsupportedError, "one array of real numbers", "an array of torch.int64", "leave_one_out"):
        ntkl.laplace(words, (tokens, y), ntkl.Gaussian(0.1)).lack_of_fit()


@pytest.mark.filterwarnings("always:the network misses", "ignore:noise is not at the optimum")
def test_a_training_that_misses_a_part_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = linear(60)
    options = {"epochs": 20, "batch_size": None, "settings": QUIET}
    words = r"misses a part .* correlate by 0.[0-9]+, .* weaker prior.*, such as FourierFeatures\(\[\(0, \d"
    with pytest.warns(ntkl.NTKLaplaceWarning, match=words):
        training = ntkl.train_with_evidence(nn.Linear(2, 1).double(), (x, y), ntkl.Gaussian(), predictive="loo",
                                            **options)
    assert training.lack_of_fit.clear and training.lack_of_fit == training.posterior.lack_of_fit()
    with pytest.warns(ntkl.NTKLaplaceWarning) as told:
        trainings = ntkl.train_from_starts(nn.Linear(2, 1).double(), (x, y), ntkl.Gaussian(), **options)
    assert len(trainings) == 2 and sum("misses a part" in str(one.message) for one in told) == 1
    noise = torch.randn(60, 1, generator=torch.Generator().manual_seed(2)).double()
    for misfit, count in ((0.05, 1), (None, 2)):
        assert len(ntkl.train_from_starts(nn.Linear(2, 1).double(), (x, noise), ntkl.Gaussian(), misfit=misfit,
                                          **options)) == count
    with monkeypatch.context() as context:
        wave = ntkl.LackOfFit(0.0, 0.0, 3, 60, True, False, 0, 1.0, 0.1)  # neighbors are not alike
        context.setattr(ntkl.EvidenceTraining, "lack_of_fit", wave)
        with pytest.warns(ntkl.NTKLaplaceWarning, match="explains 10% of their squares"):
            tried = ntkl.train_from_starts(nn.Linear(2, 1).double(), (x, noise), ntkl.Gaussian(), **options)
        assert len(tried) == 2
    with monkeypatch.context() as context:
        context.setattr(ntkl.PredictiveFit, "trusted", False)  # residuals that are not alike are not enough
        assert len(ntkl.train_from_starts(nn.Linear(2, 1).double(), (x, noise), ntkl.Gaussian(), **options)) == 2
    tokens = ntkl.train_with_evidence(nn.Sequential(nn.Embedding(2, 1), nn.Flatten()).double(),
                                      ((y > 0).long(), y), ntkl.Gaussian(), **options)
    assert tokens.lack_of_fit is None


@pytest.mark.parametrize("named", [True, False])
def test_an_estimator_names_the_column_that_its_network_misses(named: bool) -> None:
    """With the period in its units, and what an estimator can do."""
    rng = np.random.default_rng(0)
    table = np.column_stack([rng.normal(size=200), rng.uniform(0, 120, 200)])
    y = np.sin(2 * np.pi * table[:, 1] / 3.7) + 0.1 * rng.normal(size=200)
    x = pandas.DataFrame(table, columns=["age", "month"]) if named else table
    model = ntkl.LaplaceRegressor(random_state=0, fourier_features=0, precision=1.0, epochs=30, likelihood="gaussian",
                                  piecewise_features=False)
    words = rf"along column {repr('month') if named else 1} correlate .* period 3\.7\d* .*Fourier features, as far as"
    with pytest.warns(ntkl.NTKLaplaceWarning, match=words) as told:
        model.fit(x, y)
    assert sum("misses a part" in str(one.message) for one in told) == 1
    counts = rng.poisson(20 * table[:, 1] * np.exp(np.sin(table[:, 1] / 4)) / 60)
    with pytest.warns(ntkl.NTKLaplaceWarning, match="along the logarithm of column"):  # comes last in the network
        ntkl.LaplaceRegressor(random_state=0, exposure=1, precision=1.0, epochs=30, likelihood="poisson",
                              piecewise_features=False).fit(x, counts)
