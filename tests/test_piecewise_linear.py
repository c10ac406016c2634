"""Piecewise linear features, precisions that inputs share, and the choice of estimators between networks with both."""

from __future__ import annotations

import copy
import pickle
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Size, Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.posterior.calibrate import PredictiveFit
from ntk_laplace.posterior.lack_of_fit import LackOfFit
from ntk_laplace.runtime import tuning
from ntk_laplace.tools.estimators import base as estimators_base
from ntk_laplace.tools.estimators import training as estimator_training
from ntk_laplace.tools.estimators.training import Design, Designs
from refusals import refused

QUIET = ntkl.Settings(progress=False)
KNOTS = [(2, [-1.0, 0.5, 2.0]), (0, [0.0, 0.25])]
GROUPS = [1, 0, 1, 2, 0]


def expanded(x: Tensor, knots: Any = KNOTS) -> Tensor:
    """Between each two knots, by NumPy's interpolation."""
    parts = [np.interp(x[..., number].double().numpy(), pair, (0.0, 1.0))
             for number, own in knots for pair in pairwise(own)]
    return torch.cat([x, torch.from_numpy(np.stack(parts, -1)).to(x)], -1)


# --- features


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_they_are_linear_between_knots(dtype: torch.dtype) -> None:
    x = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0), dtype=dtype)
    features = ntkl.PiecewiseLinearFeatures(KNOTS)
    assert features(x).dtype == dtype
    torch.testing.assert_close(features(x), expanded(x), rtol=0, atol=10 * torch.finfo(dtype).eps)
    moved = ntkl.PiecewiseLinearFeatures(KNOTS, shift=[1.0, 0.0, 2.0], factor=2.0)(x)[..., 3:]
    torch.testing.assert_close(moved, 2.0 * (expanded(x)[..., 3:] - torch.tensor([1.0, 0.0, 2.0], dtype=dtype)))
    torch.testing.assert_close(ntkl.PiecewiseLinearFeatures([])(x), x, rtol=0, atol=0)
    again = pickle.loads(pickle.dumps(copy.deepcopy(features)))
    assert torch.equal(again(x), features(x)) and "{2: 2, 0: 1} pieces" in repr(features)
    other = ntkl.PiecewiseLinearFeatures([(1, [0.0, 1.0])] * 3, factor=3.0)
    other.load_state_dict(features.state_dict())
    assert torch.equal(other(x), features(x))


def test_a_linear_layer_of_them_is_any_piecewise_linear_function() -> None:
    knots, values = np.array([-1.0, -0.2, 0.1, 2.0]), np.array([3.0, -1.0, 5.0, 4.0])
    features = ntkl.PiecewiseLinearFeatures([(0, knots.tolist())])
    x = torch.linspace(-3.0, 4.0, 200, dtype=torch.float64, device="cpu")[:, None]
    found = values[0] + features(x)[:, 1:].numpy() @ np.diff(values)
    np.testing.assert_allclose(found, np.interp(x[:, 0].numpy(), knots, values), rtol=1e-13, atol=1e-13)


def test_knots_are_quantiles_of_the_data() -> None:
    rng = np.random.default_rng(0)
    x = np.stack([np.exp(rng.normal(size=90)), rng.integers(0, 2, 90), rng.integers(0, 4, 90), np.full(90, 3.0),
                  np.maximum(rng.normal(size=90), 0.8)], 1)
    found = ntkl.PiecewiseLinearFeatures.of(torch.from_numpy(x), pieces=5, scale=1.5)
    knots = [(0, np.quantile(x[:, 0], np.linspace(0, 1, 6)).tolist()), (2, [0.0, 1.0, 2.0, 3.0]),
             (4, np.unique(np.quantile(x[:, 4], np.linspace(0, 1, 6))).tolist())]
    assert len(knots[2][1]) < 6  # equal quantiles are one knot
    plain = expanded(torch.from_numpy(x), knots)[:, 5:]
    features = found(torch.from_numpy(x))[:, 5:]
    assert found.inputs.tolist() == [0] * 5 + [2] * 3 + [4] * (len(knots[2][1]) - 1)
    torch.testing.assert_close(features.mean(0), torch.zeros(len(found.inputs), dtype=torch.float64, device="cpu"))
    for number in (0, 2, 4):
        own, before = features[:, found.inputs == number], plain[:, found.inputs == number]
        assert float(own.var(0, correction=0).sum()) == pytest.approx(1.5**2, rel=1e-12)
        ratio = 1.5 / before.var(0, correction=0).sum().sqrt()
        torch.testing.assert_close(own, (before - before.mean(0)) * ratio, rtol=1e-11, atol=1e-12)
    assert found.input_groups(5) == [0, 1, 2, 3, 4, *[5] * 5, *[6] * 3, *[7] * (len(knots[2][1]) - 1)]
    none = ntkl.PiecewiseLinearFeatures.of(torch.from_numpy(x[:, [1, 3]]))
    assert none.input_groups(2) == [0, 1] and none(torch.from_numpy(x[:, [1, 3]])).shape == (90, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_that_differ_by_rounding_are_one_knot(dtype: torch.dtype) -> None:
    """Also where they are small beside others; else a piece between two of them is of their last digits."""
    eps = torch.finfo(dtype).eps
    levels = torch.tensor([-1e-20, 0.0, 1e-20, 0.1, 3.0], dtype=dtype, device="cpu")
    rounded = torch.stack([levels, levels * (1 + eps), levels * (1 - eps)], 1).flatten()
    table = torch.stack([rounded, rounded.sign().abs(), torch.full_like(rounded, 7.0)], 1)
    table[::2, 1:] *= 1 + eps
    found = ntkl.PiecewiseLinearFeatures.of(table)
    assert found.inputs.tolist() == [0, 0, 0, 0]
    knots = torch.cat([found.start, found.start[-1:] + found.width[-1:]])
    torch.testing.assert_close(knots, levels.double(), rtol=4 * eps, atol=0)


@pytest.mark.parametrize("kind", [ntkl.PiecewiseLinearFeatures, ntkl.FourierFeatures])
def test_features_of_whole_numbers(kind: Any) -> None:
    """Knots and periods were rounded to whole numbers too."""
    features = kind([(0, [-0.5, 0.25, 9.75])] if kind is ntkl.PiecewiseLinearFeatures else [(0, 0.75)])
    counts = torch.arange(12, device="cpu").view(6, 2)
    assert features(counts).dtype == torch.float32
    torch.testing.assert_close(features(counts), features(counts.float()), rtol=0, atol=0)
    torch.testing.assert_close(features(counts > 2), features((counts > 2).float()), rtol=0, atol=0)


def test_knots_are_where_the_data_are() -> None:
    """Not on torch's default device, which may hold no values."""
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0), device="cpu")
    with torch.device("meta"):
        found = ntkl.PiecewiseLinearFeatures.of(x)
    torch.testing.assert_close(found(x), ntkl.PiecewiseLinearFeatures.of(x)(x), rtol=0, atol=0)


def test_features_of_standardized_inputs_are_the_same() -> None:
    x = torch.rand(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu") * 7.0 + 40.0
    features = ntkl.PiecewiseLinearFeatures.of(x)
    mean, scale = x.mean(0), torch.tensor([2.0, 0.3, 5.0], dtype=torch.float64, device="cpu")
    own = features.standardized(mean, scale)((x - mean) / scale)[:, 3:]
    torch.testing.assert_close(own, features(x)[:, 3:], rtol=1e-11, atol=1e-12)  # whose knots stay as they were
    torch.testing.assert_close(features(x)[:, 3:], ntkl.PiecewiseLinearFeatures.of(x)(x)[:, 3:], rtol=0, atol=0)


def test_what_piecewise_linear_features_refuse() -> None:
    of, x = ntkl.PiecewiseLinearFeatures.of, torch.zeros(3, 2, device="cpu")
    for knots, got in (([(0, [0.0])], "(0, [0.0])"), ([(0, [1.0, 0.0])], "(0, [1.0, 0.0])"), (3, "3"), ("ab", "'a'"),
                       ([(-1, [0.0, 1.0])], "(-1, [0.0, 1.0])"), ([(0, 1.0)], "(0, 1.0)"),
                       ([(0, [0.0, float("nan")])], "(0, [0.0, nan])"), ([(0, [0.0, 0.0])], "(0, [0.0, 0.0])")):
        with refused(ntkl.HyperparameterError, "two or more ascending knots", re.escape(got), "0.5, 1.0"):
            ntkl.PiecewiseLinearFeatures(knots)
    for options, got in (({"shift": [1.0]}, "1.0"), ({"factor": float("inf")}, "inf"), ({"factor": "a"}, "'a'")):
        name = next(iter(options))
        with refused(ntkl.HyperparameterError, f"a finite {name}, or 3, one for each", got, "chooses them"):
            ntkl.PiecewiseLinearFeatures(KNOTS, **options)
    with refused(ntkl.NetworkError, "inputs of at least 3 numbers", r"\(4, 2\)", "from 0"):
        ntkl.PiecewiseLinearFeatures(KNOTS)(torch.zeros(4, 2, device="cpu"))
    with refused(ntkl.HyperparameterError, "pieces", "0", "pieces=8"):
        of(x, pieces=0)
    with refused(ntkl.HyperparameterError, "a positive scale", "-1.0", "for 3"):
        of(x, scale=-1.0)
    for bad, got in ((x[0], r"shape \(2,\)"), (x.numpy(), "array"), (x / 0, "NaN or infinity")):
        with refused(ntkl.DataError, "finite numbers", got, "training inputs"):
            of(bad)


@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "diag"])
def test_a_network_has_the_posterior_of_one_of_expanded_inputs(structure: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 3).double(), torch.randn(12, 2).double()
    inner = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    features = ntkl.PiecewiseLinearFeatures(KNOTS)
    outer = nn.Sequential(features, copy.deepcopy(inner))
    prior = ntkl.GaussianPrior(2.0, groups="input", input_groups=features.input_groups(3))
    with torch.no_grad():
        plain, own = (ntkl.laplace(network, (inputs, y), ntkl.Gaussian(0.3), prior, structure, settings=QUIET)
                      for network, inputs in ((inner, expanded(x)), (outer, x)))
    assert float(own.log_marginal_likelihood()) == pytest.approx(float(plain.log_marginal_likelihood()), rel=1e-12)
    new = torch.randn(5, 3).double()
    for found, expected in zip(own.latent_moments(new), plain.latent_moments(expanded(new)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    assert len(own.prior.precision[own.prior.inputs]) == 5


# --- precisions that inputs share


def shared_prior(precision: Any = 2.0, **options: Any) -> ntkl.GaussianPrior:
    return ntkl.GaussianPrior(precision, groups="input", input_groups=GROUPS, **options)


SHAPES = {"0.weight": Size((4, 5)), "0.bias": Size((4,)), "2.weight": Size((1, 4)), "2.bias": Size((1,))}


def test_inputs_share_precisions() -> None:
    prior = shared_prior(torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0], device="cpu")).bind(SHAPES)
    assert prior.group_names == ["0.weight[:, [1, 4]]", "0.weight[:, [0, 2]]", "0.weight[:, 3]", "0", "2"]
    together = ntkl.GaussianPrior(groups="input", input_groups=[0, 1, 1, 1, 2]).bind(SHAPES)
    assert together.group_names[:3] == ["0.weight[:, 0]", "0.weight[:, 1:4]", "0.weight[:, 4]"]
    expected = torch.tensor([3.0, 2.0, 3.0, 5.0, 2.0] * 4 + [7.0] * 4 + [11.0] * 5, dtype=torch.float64, device="cpu")
    torch.testing.assert_close(prior.flat_precision(), expected)
    assert prior.precision_of_inputs.tolist() == pytest.approx([3.0, 2.0, 3.0, 5.0, 2.0])
    assert prior.group_counts().tolist() == [8, 8, 4, 4, 5] and prior.inputs == slice(0, 3)
    theta = torch.arange(29.0, dtype=torch.float64, device="cpu")
    assert float(prior.energy(theta).detach()) == pytest.approx(0.5 * float((expected * theta**2).sum()))
    logs = torch.tensor([2.0, 3.0, 5.0], device="cpu").log()
    hyperprior = -0.5 * float(((logs - logs.mean()) ** 2).sum())
    assert float(prior.log_hyperprior().detach()) == pytest.approx(hyperprior, rel=1e-6)
    named = shared_prior({"0.weight": torch.tensor([2.0, 3.0, 5.0], device="cpu"), "0": 7.0, "2": 11.0}).bind(SHAPES)
    torch.testing.assert_close(named.flat_precision(), expected)
    restored = ntkl.GaussianPrior.from_record(prior.record(), SHAPES)
    torch.testing.assert_close(restored.flat_precision(), expected)
    assert restored.input_groups == tuple(GROUPS) and restored.group_names == prior.group_names


def test_a_permutation_of_the_inputs_is_no_identity() -> None:
    """As many groups as inputs."""
    precision = torch.tensor([1.0, 2.0, 3.0, 4.0], device="cpu")
    prior = ntkl.GaussianPrior(precision, groups="input", input_groups=[2, 0, 1]).bind({"weight": Size((2, 3)),
                                                                                        "b.bias": Size((1,))})
    assert prior.flat_precision().tolist() == pytest.approx([3.0, 1.0, 2.0] * 2 + [4.0])


@pytest.mark.parametrize("structure", ["gp", "full", "diag", "kfac"])
def test_shared_precisions_are_equal_ones(structure: str, tmp_path: Path) -> None:
    """Value, slopes and effective parameters are sums over those of a prior with a precision for each input."""
    torch.manual_seed(0)
    x, y = torch.randn(15, 5).double(), torch.randn(15, 1).double()
    network = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    numbers = torch.tensor([*GROUPS, 3, 4], device="cpu")
    values = torch.tensor([2.0, 0.5, 1.0, 3.0, 0.7], dtype=torch.float64, device="cpu")
    own, other = (ntkl.laplace(network, (x, y), ntkl.Gaussian(0.3), prior, structure, settings=QUIET)
                  for prior in (shared_prior(values), ntkl.GaussianPrior(values[numbers], groups="input")))
    slopes = []
    for posterior in (own, other):
        value = posterior.log_marginal_likelihood()
        slopes.append((float(value.detach()), *torch.autograd.grad(value, posterior.prior.log_precision)))
    assert slopes[0][0] == pytest.approx(slopes[1][0], rel=1e-12)
    sums = torch.zeros_like(values).index_add(0, numbers, slopes[1][1])
    torch.testing.assert_close(slopes[0][1], sums, rtol=1e-10, atol=1e-12)
    effective = torch.zeros_like(values).index_add(0, numbers, other.fitted.precision.effective_parameters().double())
    torch.testing.assert_close(own.fitted.precision.effective_parameters().double(), effective, rtol=1e-9, atol=1e-12)
    own.fit_hyperparameters()
    value = own.log_marginal_likelihood() + own.prior.log_hyperprior()
    assert float(torch.autograd.grad(value, own.prior.log_precision)[0].abs().max()) < 1e-3
    own.save(tmp_path / "posterior.pt", include_data=True)
    again = ntkl.load(tmp_path / "posterior.pt", network)
    assert again.prior.input_groups == tuple(GROUPS)
    with torch.no_grad():
        assert float(again.log_marginal_likelihood()) == pytest.approx(float(own.log_marginal_likelihood()), rel=1e-12)


@pytest.mark.parametrize("structure", ["gp", "full", "diag", "kfac"])
def test_a_precision_keeps_the_groups_of_its_prior(structure: str, tmp_path: Path) -> None:
    """Elsewhere, and from a file: its own record has them."""
    torch.manual_seed(0)
    x, y = torch.randn(9, 5).double(), torch.randn(9, 1).double()
    network = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    prior = shared_prior(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], device="cpu"))
    found = ntkl.laplace(network, (x, y), ntkl.Gaussian(0.3), prior, structure, settings=QUIET)
    given = ntkl.gaussian_posterior(network, (x, y), ntkl.Gaussian(0.3), found.prior,
                                    precision=found.fitted.precision, settings=QUIET)
    given.save(tmp_path / "given.pt", include_data=True)
    for posterior in (given, ntkl.load(tmp_path / "given.pt", network), given.to("cpu", torch.float64)):
        assert float(posterior.kl().value) == pytest.approx(float(found.kl().value), rel=1e-10)


def test_lack_of_fit_weighs_inputs_of_shared_precisions() -> None:
    """As with a precision for each: the residuals are alike among neighbors in the two inputs that count."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(300, 20, generator=generator).double() * 4.0
    y = (torch.floor(x[:, :1]) + torch.floor(x[:, 1:2])) % 2
    network, values = nn.Linear(20, 1).double(), torch.tensor([0.1, 1e6, 1.0], dtype=torch.float64, device="cpu")
    numbers = [0, 0, *[1] * 18]
    nn.init.zeros_(network.weight)
    own, other, equal = (
        ntkl.laplace(network, (x, y), ntkl.Gaussian(0.5), prior, "full", settings=QUIET).lack_of_fit().correlation
        for prior in (ntkl.GaussianPrior(values, groups="input", input_groups=numbers),
                      ntkl.GaussianPrior(values[[*numbers, 2]], groups="input"), ntkl.GaussianPrior(1.0)))
    assert own == other > equal + 0.1


def test_a_training_is_not_resumed_with_other_groups(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(9, 5).double(), torch.randn(9, 1).double()
    network = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    options: dict[str, Any] = {"epochs": 2, "settings": ntkl.Settings(progress=False, checkpoint=tmp_path / "c.pt")}
    ntkl.train_with_evidence(network, (x, y), ntkl.Gaussian(1.0), shared_prior(), **options)
    options["settings"] = ntkl.Settings(progress=False, resume=tmp_path / "c.pt")
    other = ntkl.GaussianPrior(2.0, groups="input", input_groups=[0, 1, 1, 2, 0])
    with refused(ntkl.UnsupportedError, "prior groups", "0, 1, 1, 2, 0", "Pass the same"):
        ntkl.train_with_evidence(network, (x, y), ntkl.Gaussian(1.0), other, **options)


def test_what_shared_precisions_refuse() -> None:
    for bad in ([0, 0.5], ["a"], "01", 3, [], [True, False], [-1, 0], torch.tensor([0.5, 0.0], device="cpu")):
        with refused(ntkl.HyperparameterError, "input_groups of whole numbers from 0", "", "share a precision"):
            ntkl.GaussianPrior(groups="input", input_groups=bad)
    with refused(ntkl.HyperparameterError, "each number up to 3", "none that is 1", "without gaps"):
        ntkl.GaussianPrior(groups="input", input_groups=[0, 3, 2])
    with refused(ntkl.HyperparameterError, f"each number up to {10**15}", "none that is 1", "without gaps"):
        ntkl.GaussianPrior(groups="input", input_groups=[0, 10**15])  # without a list of all of them
    with refused(ntkl.HyperparameterError, r"0.weight\[:, 3\]", "another in that of '0.weight'", "each group once"):
        shared_prior({"0.weight": 1.0, "0.weight[:, 3]": 2.0, "0": 1.0, "2": 1.0}).bind(SHAPES)
    with refused(ntkl.HyperparameterError, 'groups="input" for input_groups', "'layer'", "Pass it"):
        ntkl.GaussianPrior(groups="layer", input_groups=[0, 1])
    with refused(ntkl.HyperparameterError, "the 5 inputs of '0.weight'", "2 numbers", "one number for each"):
        ntkl.GaussianPrior(groups="input", input_groups=[0, 1]).bind(SHAPES)
    with refused(ntkl.HyperparameterError, r"one for each group of inputs, \(3,\)", r"shape \(5,\)", "Pass a number"):
        shared_prior({"0.weight": torch.ones(5, device="cpu"), "0": 1.0, "2": 1.0}).bind(SHAPES)


# --- estimators

pytestmark = pytest.mark.filterwarnings("ignore:.* is not at the optimum of the evidence")
QUICK: dict[str, Any] = {"epochs": 30, "hidden_layer_sizes": (8,), "precision": 1.0, "random_state": 0,
                         "fourier_features": 0, "smooth_clipping": False}


def skewed(n: int = 80) -> tuple[np.ndarray, np.ndarray]:
    """A function with jumps of the logarithms of two columns, beside a third of two values."""
    rng = np.random.default_rng(0)
    logs = rng.normal(size=(n, 2))
    x = np.column_stack([np.exp(2 * logs), rng.integers(0, 2, n)])
    return x, np.sign(logs[:, 0]) + 0.5 * np.abs(logs[:, 1]) + 0.1 * rng.normal(size=n)


def designs_tried(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that fits an estimator up to its training, and returns the designs that are tried."""
    tried: list[Designs] = []

    def recorded(form: Any, designs: Designs, *args: Any) -> Any:
        tried.append(designs)
        raise KeyboardInterrupt

    def fitted(model: Any, x: np.ndarray, y: np.ndarray) -> tuple[Design, list[str]]:
        with pytest.raises(KeyboardInterrupt):
            model.fit(x, y)
        found = tried.pop()
        return found.first, list(found.tried)

    monkeypatch.setattr(estimators_base, "trained", recorded)
    return fitted


@pytest.mark.parametrize("estimator", [ntkl.LaplaceRegressor, ntkl.LaplaceClassifier])
def test_which_tables_are_tried_in_pieces(estimator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, rng = designs_tried(monkeypatch), np.random.default_rng(0)
    x, y, clipped = rng.normal(size=(60, 5)), np.arange(60) % 2, (Design(), ["clipping"])
    both, none, always = (Design(), ["pieces"]), (Design(), []), (Design(pieces=True), [])
    for options, expected in (({}, both), ({"piecewise_features": False}, none), ({"piecewise_features": True}, always),
                              ({"predictive": None}, none), ({"predictive": "folds"}, both),
                              ({"groups": "layer"}, none), ({"groups": "layer", "piecewise_features": True}, always),
                              ({"precision": {"0": 1.0}}, none), ({"precision": torch.ones(7, device="cpu")}, none),
                              ({"precision": torch.tensor(2.0, device="cpu")}, both), ({"precision": (1.0, 0.1)}, both),
                              ({"hidden_layer_sizes": ()}, none), ({"structure": ntkl.EKFAC()}, none),
                              ({"structure": "full"}, none), ({"structure": "gp"}, both), ({"structure": "auto"}, both),
                              ({"linear_part": True}, (Design(linear=True), ["pieces"])),
                              ({"network": lambda d, c: nn.Linear(d, c).double()}, none)):
        assert tried(estimator(**options), x, y) == expected, options
    for options in ({}, {"piecewise_features": True}):
        assert tried(estimator(**options), (x > 0).astype(float), y) == none  # no column has more than two values
    for name, value, expected in (("INPUTS_IN_PIECES", 4, none), ("INPUTS_IN_PIECES", 5, both),
                                  ("EXAMPLES_IN_PIECES", 59, none), ("EXAMPLES_IN_PIECES", 60, both)):
        with monkeypatch.context() as patch:
            patch.setattr(tuning, name, value)
            assert tried(estimator(), x, y) == expected, (name, value)
    found = tried(estimator(), rng.normal(size=(60, 16)), y)  # a linear part may be chosen in a regression
    assert found == ((Design(), ["linear", "pieces"]) if estimator is ntkl.LaplaceRegressor else both)
    x[0, 3] = 50.0
    for options, expected in (({}, (Design(), ["clipping", "pieces"])), ({"piecewise_features": False}, clipped),
                              ({"smooth_clipping": False}, both), ({"predictive": None}, none),
                              ({"smooth_clipping": True}, (Design(clipping=True), ["pieces"])),
                              ({"smooth_clipping": True, "groups": "layer"}, (Design(clipping=True), [])),
                              ({"groups": "layer"}, none)):
        assert tried(estimator(**options), x, y) == expected, options


def test_no_pieces_are_made_of_tables_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many columns and rows they took gigabytes, also for a trained network."""
    monkeypatch.setattr(ntkl.PiecewiseLinearFeatures, "of", lambda *args: pytest.fail("made pieces"))
    x, y = skewed(20)
    network = nn.Linear(3, 1, device="cpu").double()
    assert ntkl.LaplaceRegressor(network, prefit=True, likelihood="gaussian").fit(x, y).piecewise_features_ == []


def test_pieces_are_where_the_perceptron_is() -> None:
    """On torch's default device, and not on the CPU as the data they were made of: a training refuses this one."""
    x, y = skewed(20)
    with torch.device("meta"), refused(ntkl.DataError, "dense tensors with values", "a meta one", "holds no values"):
        ntkl.LaplaceRegressor(piecewise_features=True, likelihood="gaussian", **QUICK).fit(x, y)


@pytest.mark.slow
def test_waves_are_where_the_network_is() -> None:
    """Of a network that is not on torch's default device none were found, without a word."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 20, (60, 1))
    y = np.sin(2 * np.pi * x[:, 0] / 1.3) + 0.1 * rng.normal(size=60)

    def network(inputs: int, outputs: int) -> nn.Module:
        layers = nn.Linear(inputs, 8, device="cpu"), nn.Tanh(), nn.Linear(8, outputs, device="cpu")
        return nn.Sequential(*layers).double()

    model = ntkl.LaplaceRegressor(network, likelihood="gaussian", **QUICK | {"fourier_features": 1})
    expected = model.fit(x, y).fourier_features_
    with torch.device("meta"):
        found = model.fit(x, y).fourier_features_
    assert len(expected) == 1 and found == expected


@pytest.mark.slow
def test_leave_one_out_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces must gain 0.02 nats a point, and are not taken where leave-one-out of them is not to be trusted."""
    (x, y), chosen = skewed(), set()
    quick = QUICK | {"likelihood": "gaussian"}
    for targets in (y, 0.3 * x[:, 2] + np.tanh(0.1 * x[:, 0]) + 0.1 * np.random.default_rng(1).normal(size=len(x))):
        fits = {pieces: ntkl.LaplaceRegressor(piecewise_features=pieces, **quick).fit(x, targets)
                for pieces in (False, True)}
        best = fits[True].predictive_fit_.after > fits[False].predictive_fit_.after + 0.02
        model = ntkl.LaplaceRegressor(**quick).fit(x, targets)
        assert np.array_equal(model.predict(x), fits[best].predict(x))
        assert model.piecewise_features_ == ([0, 1] if best else []) == fits[best].piecewise_features_
        chosen.add(best)
        if best:
            between = sum(fit.predictive_fit_.after for fit in fits.values()) / 2
            for bound in (between, -10.0):  # of none of the two
                with monkeypatch.context() as patch:
                    patch.setattr(PredictiveFit, "trusted", property(lambda fit, bound=bound: fit.after < bound))
                    other = ntkl.LaplaceRegressor(**quick).fit(x, targets)
                assert np.array_equal(other.predict(x), fits[False].predict(x)) and not other.piecewise_features_
    assert chosen == {False, True}
    for gain in (0.019, 0.021):
        monkeypatch.setattr(estimator_training, "rank", lambda training, left_out, gain=gain: (
            True, gain if training.posterior.prior.input_groups else 0.0))
        assert bool(ntkl.LaplaceRegressor(**quick | {"epochs": 1}).fit(x, y).piecewise_features_) is (gain > 0.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:training to the optimum")
@pytest.mark.parametrize(("behind", "longer"), [(0.09, 2), (0.11, 1)])
def test_a_perceptron_in_pieces_that_is_far_behind_is_dropped(
    behind: float, longer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not trained for longer, as the first one is."""
    (x, y), lengths, train = skewed(20), [], estimator_training.train_from_starts
    monkeypatch.setattr(LackOfFit, "clear", property(lambda _: True))
    monkeypatch.setattr(estimator_training, "rank", lambda training, left_out: (
        True, -behind if training.posterior.prior.input_groups else 0.0))
    monkeypatch.setattr(estimator_training, "train_from_starts",
                        lambda *given, **options: lengths.append(options["epochs"]) or train(*given, **options))
    ntkl.LaplaceRegressor(**QUICK | {"epochs": 1, "precision": "auto", "likelihood": "gaussian"}).fit(x, y)
    assert lengths.count(1) == 2 and lengths.count(3) == longer


@pytest.mark.slow
def test_the_first_training_is_a_result_where_pieces_take_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = skewed(20)
    train = estimator_training.train_with_evidence

    def large(module: Any, data: Any, likelihood: Any, prior: Any, **options: Any) -> Any:
        if prior.input_groups:
            raise ntkl.MemoryBudgetError("less", "more", "Take fewer.")
        return train(module, data, likelihood, prior, **options)

    monkeypatch.setattr(estimator_training, "train_with_evidence", large)
    options = QUICK | {"epochs": 1, "likelihood": "gaussian"}
    assert not ntkl.LaplaceRegressor(**options).fit(x, y).piecewise_features_
    with refused(ntkl.MemoryBudgetError, "less", "more", "fewer"):
        ntkl.LaplaceRegressor(piecewise_features=True, **options).fit(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("classes", [False, True])
def test_an_estimator_in_pieces_is_the_training_by_hand(classes: bool) -> None:
    x, y = skewed()
    standard = torch.from_numpy((x - x.mean(0)) / x.std(0))
    features = ntkl.PiecewiseLinearFeatures.of(standard, 8, 3.0)
    torch.manual_seed(int(np.random.RandomState(0).randint(2**31 - 1)))
    layers = nn.Linear(19, 8), nn.Tanh() if classes else nn.SiLU(), nn.Linear(8, 1 + classes)
    network = nn.Sequential(features, *layers).double()
    prior = ntkl.GaussianPrior(groups="input", spread=1.0 if classes else 3.0, input_groups=features.input_groups(3))
    options: dict[str, Any] = {"epochs": 4, "predictive": "loo", "settings": QUIET}
    if classes:
        model: Any = ntkl.LaplaceClassifier(piecewise_features=True, **QUICK | {"epochs": 4}).fit(x, y > 0)
        found = ntkl.train_with_evidence(
            network, (standard, torch.from_numpy(y > 0).long()), ntkl.Categorical(), prior, structure="kfac",
            optimizer=lambda p: torch.optim.Adam(p, lr=0.02), batch_size=128, **options)
    else:
        quick = QUICK | {"epochs": 4, "likelihood": "gaussian"}
        model = ntkl.LaplaceRegressor(piecewise_features=True, **quick).fit(x, y)
        found = ntkl.train_with_evidence(
            network, (standard, torch.from_numpy((y - y.mean()) / y.std())[:, None]), ntkl.Gaussian(noise=1.0), prior,
            optimizer=lambda p: torch.optim.Adam(p, lr=0.03), schedule=ntkl.EvidenceSchedule(1, 20),
            scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4), **options)
    evidence = float(found.posterior.log_marginal_likelihood().detach()) - (0 if classes else len(y) * np.log(y.std()))
    assert model.log_marginal_likelihood_value_ == pytest.approx(evidence, rel=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(model.network_(standard), network(standard), rtol=1e-10, atol=1e-12)
    deviation = found.posterior.prior.precision.detach()[:5].rsqrt().numpy()
    np.testing.assert_allclose(model.relevance_, np.maximum(deviation[:3], [*3.0 * deviation[3:], 0.0]), rtol=1e-9)
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(again.predict(x), model.predict(x)) and again.piecewise_features_ == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("standardize", [True, False])
def test_no_pieces_of_rounding(standardize: bool) -> None:
    """Of a column that is constant up to rounding, and one of two values; their last digits changed predictions."""
    x, y = skewed(40)
    up = np.where(np.arange(40) % 3, 1.0, 1.0 + 4e-16)
    x = np.column_stack([x[:, 0], (x[:, 2] + 100.0) * up, 7.0 * up])
    model = ntkl.LaplaceRegressor(piecewise_features=True, likelihood="gaussian", standardize=standardize,
                                  **QUICK | {"epochs": 3}).fit(x, y)
    assert model.piecewise_features_ == [0]
    other = x / np.column_stack([np.ones(40), up, up])
    np.testing.assert_allclose(model.predict(x), model.predict(other), rtol=1e-9, atol=1e-9)
    own = x[:, 0] if not standardize else (x[:, 0] - x[:, 0].mean()) / x[:, 0].std()
    knots = np.quantile(own, np.linspace(0.0, 1.0, 9))
    np.testing.assert_allclose(model.network_[0].start.numpy(), knots[:-1], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(model.network_[0].width.numpy(), np.diff(knots), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_pieces_and_waves_are_inputs_of_one_network() -> None:
    """Of the same column; each sine and cosine has a precision of its own."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 20, (120, 2))
    y = np.sin(2 * np.pi * x[:, 0] / 1.3) + (x[:, 1] > 9) + 0.1 * rng.normal(size=120)
    options = QUICK | {"epochs": 60, "fourier_features": 1, "likelihood": "gaussian"}
    model = ntkl.LaplaceRegressor(piecewise_features=True, **options).fit(x, y)
    chosen = ntkl.LaplaceRegressor(**options).fit(x, y)  # one without waves would be dropped as far behind
    assert chosen.piecewise_features_ == [0, 1] and len(chosen.fourier_features_) == 1
    (column, period), = model.fourier_features_
    assert column == 0 and period == pytest.approx(1.3, rel=0.05) and model.piecewise_features_ == [0, 1]
    prior = model.posterior_.prior
    assert model.network_[2][0].in_features == len(prior.input_groups) == 2 + 16 + 2
    assert prior.input_groups == (0, 1, *[2] * 8, *[3] * 8, 4, 5)
    deviation = prior.precision.detach()[:6].rsqrt().numpy()
    expected = [max(deviation[0], 3 * deviation[2], deviation[4], deviation[5]), max(deviation[1], 3 * deviation[3])]
    np.testing.assert_allclose(model.relevance_, expected, rtol=1e-12)


def test_what_estimators_refuse_of_pieces() -> None:
    x, y = skewed(20)
    with refused(ntkl.UnsupportedError, 'piecewise_features True, False or "auto"', "'all'", "Choose"):
        ntkl.LaplaceRegressor(piecewise_features="all").fit(x, y)
    with refused(ntkl.UnsupportedError, 'network="mlp", for piecewise_features=True', "Linear", "Add them to the net"):
        ntkl.LaplaceClassifier(nn.Linear(3, 2).double(), piecewise_features=True).fit(x, y > 0)
