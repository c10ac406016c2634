"""The scikit-learn estimators in other libraries: MAPIE's intervals and sets on top, skorch's nets inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ntk_laplace as ntkl

pytestmark = pytest.mark.usefixtures("one_perceptron")
QUICK = {"hidden_layer_sizes": (12,), "epochs": 60, "random_state": 0}


def waves(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, noisy targets, and classes with names."""
    generator = np.random.default_rng(0)
    x = generator.uniform(-2, 2, (count, 2))
    y = np.sin(2 * x[:, 0]) + 0.3 * generator.normal(size=count)
    return x, y, np.where(y > 0.3, "high", np.where(y < -0.3, "low", "middle"))


@pytest.mark.slow
def test_intervals_of_mapie_cover() -> None:
    mapie = pytest.importorskip("mapie.regression")
    x, y, _ = waves(1700)
    fitted = ntkl.LaplaceRegressor(**QUICK).fit(x[:200], y[:200])
    split = mapie.SplitConformalRegressor(fitted, confidence_level=0.9, prefit=True).conformalize(
        x[200:700], y[200:700]
    )
    _, ends = split.predict_interval(x[700:])
    covered = (ends[:, 0, 0] <= y[700:]) & (y[700:] <= ends[:, 1, 0])
    assert abs(covered.mean() - 0.9) <= 0.03


@pytest.mark.slow
def test_sets_of_mapie_cover() -> None:
    mapie = pytest.importorskip("mapie.classification")
    x, _, names = waves(1700)
    fitted = ntkl.LaplaceClassifier(**QUICK).fit(x[:200], names[:200])
    split = mapie.SplitConformalClassifier(fitted, confidence_level=0.9, prefit=True)
    _, sets = split.conformalize(x[200:700], names[200:700]).predict_set(x[700:])
    own = np.searchsorted(fitted.classes_, names[700:])
    assert abs(sets[np.arange(1000), own, 0].mean() - 0.9) <= 0.03


class Regression(nn.Module):
    """A module as skorch's users write it, with an option."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(2, width), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x).tanh())


class Probabilities(nn.Module):
    """As skorch's default loss of classes wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(2, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x).tanh()).softmax(-1)


def assert_binary_net(net: Any, x: np.ndarray, positive: np.ndarray) -> None:
    """One output for two classes: its probabilities, and the evidence of a Bernoulli likelihood."""
    net.fit(x.astype(np.float32), positive.astype(np.float32))
    model = ntkl.LaplaceClassifier(net, prefit=True, predictive=None, structure="full")
    model.fit(x, np.where(positive, "yes", "no"))
    data, own = model.network_inputs(x), model.posterior_
    p = net.predict_proba(x.astype(np.float32))
    np.testing.assert_allclose(own.predict(data, "map").probs, p, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(model.predict(x) == "yes", model.predict_proba(x)[:, 1] > 0.5)
    one = nn.Sequential(*list(model.network_)[:-1])
    y = torch.as_tensor(positive).double()[:, None]
    prior = ntkl.GaussianPrior(own.prior.precision.detach(), groups="layer")
    other = ntkl.laplace(nn.Sequential(one, nn.Unflatten(0, (-1, 1)), nn.Flatten()), (data, y), ntkl.Bernoulli(), prior,
                         "full", dtype=torch.float64)
    assert float(own.log_marginal_likelihood()) == pytest.approx(float(other.log_marginal_likelihood()), rel=1e-4)


@pytest.mark.slow
def test_nets_of_skorch() -> None:
    """A fitted net keeps its predictions, one that is not fitted gives its module with its options."""
    skorch = pytest.importorskip("skorch")
    torch.manual_seed(0)
    x, y, names = waves(150)
    options = {"max_epochs": 20, "lr": 0.05, "verbose": 0, "train_split": None, "optimizer": torch.optim.Adam}
    net = skorch.NeuralNetRegressor(Regression, module__width=8, **options)
    trained = ntkl.LaplaceRegressor(net, **(QUICK | {"epochs": 5})).fit(x, y)
    assert trained.network_.inner.out_features == 8
    net.fit(x.astype(np.float32), y[:, None].astype(np.float32))
    before = {name: value.clone() for name, value in net.module_.state_dict().items()}
    kept = ntkl.LaplaceRegressor(net, prefit=True).fit(x, y)
    np.testing.assert_allclose(kept.predict(x), net.predict(x.astype(np.float32))[:, 0], rtol=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in net.module_.state_dict().items())
    assert_binary_net(skorch.NeuralNetBinaryClassifier(Regression, module__width=8, **options), x, y > 0)
    sigmoid = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1), nn.Sigmoid(), nn.Flatten(0))
    assert_binary_net(skorch.NeuralNetBinaryClassifier(sigmoid, criterion=nn.BCELoss, **options), x, y > 0)
    classes, labels = np.unique(names, return_inverse=True)
    net = skorch.NeuralNetClassifier(Probabilities, **options).fit(x.astype(np.float32), labels)
    kept = ntkl.LaplaceClassifier(net, prefit=True, predictive=None).fit(x, names)
    np.testing.assert_array_equal(kept.predict(x), classes[net.predict(x.astype(np.float32))])
