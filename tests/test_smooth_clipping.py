"""`SmoothClipping`, against NumPy, and where the estimators take it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ntk_laplace as ntkl
from ntk_laplace.posterior.calibrate import PredictiveFit
from ntk_laplace.tools.estimators import training as estimator_training
from refusals import refused

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is not at the optimum of the evidence"),
    pytest.mark.filterwarnings("ignore:the network is not at its optimum"),
]
QUICK: dict[str, Any] = {"epochs": 20, "hidden_layer_sizes": (8,), "precision": 1.0, "random_state": 0,
                         "fourier_features": 0, "piecewise_features": False, "likelihood": "gaussian"}


def extreme(n: int = 100, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A sine and a line of two columns, where a slip of the decimal point was made in some rows of the first."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3))
    y = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + 0.1 * rng.normal(size=n)
    x[::25, 0] *= 100
    return x, y


def test_inputs_are_bounded() -> None:
    """A median and quartiles of each, or the median distance of the values that are not the median."""
    x = torch.as_tensor(extreme(101)[0])
    x[:, 1] = x[:, 1] > 0
    x[:, 2] = 0.0
    x[:10, 2] = torch.arange(1.0, 11.0, dtype=torch.float64, device="cpu") ** 6
    module = ntkl.SmoothClipping.of(x)
    assert repr(module) == "SmoothClipping([0, 2], bound=8)" and not list(module.parameters())
    low, center, high = np.quantile(x[:, 0], [0.25, 0.5, 0.75])
    scales = [(high - low) / 1.349, np.median(x[:10, 2]) / (1.349 / 2)]
    clipped = []
    for column, middle, scale in zip((0, 2), (center, 0.0), scales, strict=True):
        z = (x[:, column].numpy() - middle) / scale
        t = z / np.sqrt(1 + (z / 8) ** 2)
        clipped.append((t - t.mean()) / t.std())
    found = module(x)
    np.testing.assert_allclose(found[:, [0, 2]], np.stack(clipped, 1), rtol=1e-12)
    assert torch.equal(found[:, 1], x[:, 1]) and module(x[3]).shape == (3,)
    x[:, 1] = torch.arange(101, dtype=torch.float64, device="cpu")
    assert ntkl.SmoothClipping.of(x).inputs.tolist() == [0, 1, 2]  # one without extreme values may have some later
    for none in (x[:, 1:2], x[:, :0], x.round().clamp(0, 1)):
        assert not len(ntkl.SmoothClipping.of(none).inputs)
    assert not len(ntkl.SmoothClipping.of(x, bound=1e9).inputs)
    assert ntkl.SmoothClipping.of(x, bound=1e9, always=True).inputs.tolist() == [0, 1, 2]
    x[:, 1] = x[:, 1] > 50
    units = [torch.tensor(part, dtype=torch.float64, device="cpu") for part in ([3.0, -1.0, 2.0], [10.0, 2.0, 0.1])]
    other = module.standardized(*units)((x - units[0]) / units[1])
    torch.testing.assert_close(other[:, [0, 2]], found[:, [0, 2]], rtol=1e-12, atol=1e-12)


def test_values_without_end_are_bounded() -> None:
    """In both precisions, whole numbers too; the order of values is kept."""
    module = ntkl.SmoothClipping([1], center=2.0, scale=0.5, bound=4.0, shift=1.0, factor=3.0)
    x = torch.tensor([[7.0, value] for value in (-1e300, -5.0, 1.9, 2.0, 2.1, 5.0, 1e300)], dtype=torch.float64,
                     device="cpu")
    out = module(x)
    assert torch.equal(out[:, 0], x[:, 0]) and (out[1:, 1] > out[:-1, 1]).all()
    assert out[[0, 3, -1], 1].tolist() == [3.0 * (-4.0 - 1.0), -3.0, 3.0 * (4.0 - 1.0)]
    assert module(x[1:-1].float()).dtype == torch.float32
    assert torch.equal(module(torch.tensor([[7, 5]], device="cpu")), module(torch.tensor([[7.0, 5.0]], device="cpu")))


def test_no_rows_have_no_extreme_values() -> None:
    x = torch.zeros(0, 3, device="cpu")
    assert not len(ntkl.SmoothClipping.of(x).inputs) and not len(ntkl.PiecewiseLinearFeatures.of(x).inputs)


def test_gradients_and_batched_jacobians() -> None:
    module = ntkl.SmoothClipping([2, 0], center=[0.3, -0.2], scale=[0.5, 2.0], bound=1.5, factor=[1.0, 2.0])
    x = torch.randn(5, 3, generator=torch.Generator(device="cpu").manual_seed(0), device="cpu").double()
    assert torch.autograd.gradcheck(module, x.requires_grad_())
    network = nn.Sequential(module, nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    posterior = ntkl.laplace(network, (x.detach(), torch.zeros(5, 2, device="cpu").double()), ntkl.Gaussian(1.0))
    weights = dict(network.named_parameters())
    rows = torch.func.vmap(torch.func.jacrev(lambda own, one: torch.func.functional_call(network, own, (one,))),
                           (None, 0))(weights, x.detach())
    wanted = torch.cat([part.flatten(2) for part in rows.values()], -1)
    shapes = {name: part.shape for name, part in weights.items()}
    found = posterior.jacobian(x.detach()).dense(shapes)
    torch.testing.assert_close(found, wanted.movedim(1, 0), rtol=1e-9, atol=1e-12)


def test_what_smooth_clipping_refuses() -> None:
    clipping = ntkl.SmoothClipping
    for given in ([0.5], [-1], [0, 0], 3):
        with refused(ntkl.HyperparameterError, "numbers of inputs, each once", r".", r"\[0, 3\]"):
            clipping(given)
    for scale in (0.0, [1.0, -1.0]):
        with refused(ntkl.HyperparameterError, "positive scales", r"\d", "chooses them"):
            clipping([0, 1], scale=scale)
    with refused(ntkl.HyperparameterError, "a finite center, or 2, one for each", "nan", "chooses them"):
        clipping([0, 1], center=float("nan"))
    x = torch.randn(6, 2, device="cpu")
    for make in (lambda bound: clipping([0], bound=bound), lambda bound: clipping.of(x, bound)):
        with refused(ntkl.HyperparameterError, "a positive bound", "0", "for 8"):
            make(0)
    for wrong in (x[0], x / 0, [1.0]):
        with refused(ntkl.DataError, r"inputs x of shape \(n, d\)", r".", "as a tensor"):
            clipping.of(wrong)
    with refused(ntkl.NetworkError, "inputs of at least 3 numbers", r"\(6, 2\)", "SmoothClipping from 0"):
        clipping([2])(x)


def test_leave_one_out_chooses_the_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tables with extreme values, also where leave-one-out is behind by 0.01; errors far away are bounded."""
    x, y = extreme()
    fits = {clip: ntkl.LaplaceRegressor(smooth_clipping=clip, **QUICK).fit(x, y) for clip in (False, True)}
    assert fits[True].clipped_features_ == [0, 1, 2] and fits[False].clipped_features_ == []
    assert fits[True].predictive_fit_.after > fits[False].predictive_fit_.after
    model = ntkl.LaplaceRegressor(**QUICK).fit(x, y)
    assert model.clipped_features_ == [0, 1, 2] and np.array_equal(model.predict(x), fits[True].predict(x))
    far = np.array([[1e4, 0.0, 0.0], [-1e8, 0.0, 0.0]])
    assert (np.abs(model.predict(far)) < 10).all() and (np.abs(fits[False].predict(far)) > 10).any()
    assert model.relevance_.shape == (3,) and model.original_inputs(model.network_inputs(x)) == pytest.approx(x)
    between = sum(fit.predictive_fit_.after for fit in fits.values()) / 2 + np.log(y.std())  # of standardized targets
    with monkeypatch.context() as patch:
        patch.setattr(PredictiveFit, "trusted", property(lambda fit: fit.after < between))
        other = ntkl.LaplaceRegressor(**QUICK).fit(x, y)
    assert other.clipped_features_ == [] and np.array_equal(other.predict(x), fits[False].predict(x))
    for gain in (-0.009, -0.011):
        with monkeypatch.context() as patch:
            patch.setattr(estimator_training, "rank", lambda training, left_out, gain=gain: (
                True, gain if any(isinstance(part, ntkl.SmoothClipping)
                                  for part in training.posterior.network.module.modules()) else 0.0))
            found = ntkl.LaplaceRegressor(**QUICK | {"epochs": 1}).fit(x, y)
        assert bool(found.clipped_features_) is (gain > -0.01)
    kinds = ntkl.SmoothClipping, ntkl.PiecewiseLinearFeatures  # each part that is tried is added to those before
    with monkeypatch.context() as patch:
        patch.setattr(estimator_training, "rank", lambda training, left_out: (
            True, float(sum(isinstance(part, kinds) for part in training.posterior.network.module.modules()))))
        both = ntkl.LaplaceRegressor(**QUICK | {"epochs": 1, "piecewise_features": "auto"}).fit(x, y)
    assert both.clipped_features_ == both.piecewise_features_ == [0, 1, 2]
    linear = x[:, 0] + 0.1 * np.random.default_rng(1).normal(size=len(x))  # all the way
    assert ntkl.LaplaceRegressor(**QUICK).fit(x, linear).clipped_features_ == []
    normal = np.random.default_rng(0).normal(size=x.shape)
    assert ntkl.LaplaceRegressor(smooth_clipping=True, **QUICK).fit(normal, y).clipped_features_ == []


@pytest.mark.parametrize("likelihood", ["log-normal", "negative-binomial", "poisson"])
def test_exponentials_are_bounded_far_from_the_data(likelihood: str) -> None:
    """Of all features of more than two values, with extreme ones or not; a mean was 10 to the power of 10."""
    rng = np.random.default_rng(0)
    x = np.c_[rng.normal(size=(80, 2)), np.arange(80) % 2]
    y = rng.poisson(np.exp(1 + 0.5 * x[:, 0])) + (likelihood == "log-normal")
    options = QUICK | {"likelihood": likelihood}
    model = ntkl.LaplaceRegressor(**options).fit(x, y)
    far = np.array([[60.0, 0.0, 0.0], [1e9, -1e9, 1.0]])
    assert model.clipped_features_ == [0, 1] and (model.predict(far) < 1e4).all()
    open_ended = ntkl.LaplaceRegressor(smooth_clipping=False, **options).fit(x, y)
    assert open_ended.clipped_features_ == [] and open_ended.predict(far[:1]) > 1e6
    without_choice = ntkl.LaplaceRegressor(**options | {"predictive": None, "epochs": 1}).fit(x, y)
    assert without_choice.clipped_features_ == [0, 1]
    layer = nn.Linear(3, 1, device="cpu").double()
    assert ntkl.LaplaceRegressor(layer, **options | {"precision": 1.0}).fit(x, y).clipped_features_ == []


@pytest.mark.parametrize("likelihood", ["auto", "heteroscedastic-gaussian"])
def test_noise_that_depends_on_the_inputs_is_bounded_far_from_the_data(likelihood: str) -> None:
    """Its variance is an exponential too, also where it is tried after a Gaussian without clipping."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (150, 2))
    y = x[:, 0] + 0.3 * np.exp(0.8 * x[:, 1]) * rng.normal(size=150)
    options = QUICK | {"likelihood": likelihood, "epochs": 40}
    model = ntkl.LaplaceRegressor(**options).fit(x, y)
    assert model.likelihood_ == "heteroscedastic-gaussian" and model.clipped_features_ == [0, 1]
    far = np.array([[0.0, 1e6]])
    assert (np.abs(model.predict_quantiles(far)) < 1e4).all() and np.isfinite(model.predict(far, return_std=True)).all()
    open_ended = ntkl.LaplaceRegressor(**options | {"smooth_clipping": False}).fit(x, y)
    assert open_ended.clipped_features_ == []
    assert (np.abs(open_ended.predict_quantiles(far)[:, ::2]) > 1e6).all()
    assert not np.isfinite(open_ended.predict(far, return_std=True)[1])


def test_classes_with_extreme_features_and_waves() -> None:
    """The inputs themselves are clipped, not their sines, whose periods are in units of the feature."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 10, (150, 1))
    y = (np.sin(2 * np.pi * x[:, 0] / 1.7) > 0).astype(int)
    x[::30] *= 200
    options = {name: value for name, value in QUICK.items() if name not in ("likelihood", "fourier_features")}
    model = ntkl.LaplaceClassifier(smooth_clipping=True, **options).fit(x, y)
    assert model.clipped_features_ == [0]
    added = model.network_[:-1](model.network_inputs(x))
    clipped = ntkl.SmoothClipping.of(torch.as_tensor(x))(torch.as_tensor(x))
    torch.testing.assert_close(added[:, :1], clipped, rtol=1e-9, atol=1e-9)
    for place, (feature, period) in enumerate(model.fourier_features_):
        angle = 2 * np.pi * x[:, feature] / period
        found = added[:, 1 + 2 * place : 3 + 2 * place].numpy()
        np.testing.assert_allclose(found[:, 0] ** 2 + found[:, 1] ** 2, (found**2).sum(1), rtol=1e-9)
        turned = np.hypot(*found.T) > 0
        assert turned.all() and np.allclose(np.cos(angle) * found[0, 1] / np.cos(angle[0]), found[:, 1], atol=1e-6)
    with refused(ntkl.UnsupportedError, 'smooth_clipping True, False or "auto"', "3", "Choose one"):
        ntkl.LaplaceClassifier(smooth_clipping=3).fit(x, y)
    with refused(ntkl.UnsupportedError, 'network="mlp", for smooth_clipping=True', "Linear", "Add it to the network"):
        ntkl.LaplaceClassifier(nn.Linear(1, 2), smooth_clipping=True).fit(x, y)
