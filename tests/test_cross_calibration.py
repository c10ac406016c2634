"""`cross_calibrate`: where the features do not move, folds of one point are leave-one-out in closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ntk_laplace as ntkl
from refusals import refused

F64 = torch.float64
PRECISION = 0.5
COUNT = 14


def data_of(classes: bool) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(COUNT, 2, generator=draws, dtype=F64)
    noise = 0.4 * torch.randn(COUNT, 1, generator=draws, dtype=F64)
    y = x[:, :1] - 0.5 * x[:, 1:] + noise
    return (x, (y[:, 0] > 0).long() + (y[:, 0] > 0.8).long()) if classes else (x, y)


def trained(likelihood: Callable[[int], ntkl.Likelihood], outputs: int) -> Callable[[Any], ntkl.Posterior]:
    """Trains a linear network to the optimum of its log joint, by Newton's method."""

    def train(part: Any) -> ntkl.Posterior:
        columns = [torch.stack(column) for column in zip(*part, strict=True)] if isinstance(part, Dataset) else part
        x, y, w = (*columns, torch.ones(len(columns[0]), dtype=F64))[:3]
        own, network = likelihood(len(x)), nn.Linear(2, outputs).double()
        theta = torch.zeros(3 * outputs, dtype=F64)

        def objective(theta: Tensor) -> Tensor:
            f = x @ theta[: 2 * outputs].view(outputs, 2).T + theta[2 * outputs :]
            return 0.5 * PRECISION * theta.square().sum() - (w * own.log_prob(f, y)).sum()

        for _ in range(12):
            slope = torch.autograd.functional.jacobian(objective, theta)
            theta = theta - torch.linalg.solve(torch.autograd.functional.hessian(objective, theta), slope)
        nn.utils.vector_to_parameters(theta, network.parameters())
        return ntkl.laplace(network, (x, y, w), own, ntkl.GaussianPrior(PRECISION), "full")

    return train


@pytest.mark.parametrize("kind", ["plain", "weights", "dataset", "noise per point"])
def test_folds_of_one_point_are_leave_one_out(kind: str) -> None:
    """Of a linear Gaussian model leave-one-out is retraining."""
    noises = torch.linspace(0.1, 0.5, COUNT, dtype=F64)
    points = kind == "noise per point"
    data: Any = data_of(classes=False)
    if kind == "weights":
        data = *data, torch.arange(COUNT, dtype=F64) % 3 + 0.5
    whole = trained(lambda n: ntkl.Gaussian(noises if points else 0.2), 1)(data)
    expected = whole.fit_predictive(strict=False)
    folds = torch.randperm(COUNT, generator=torch.Generator().manual_seed(3)) if points else torch.arange(COUNT)
    left = iter(folds.argsort().tolist())  # the points that are left out, one after the other
    train = trained(lambda n: ntkl.Gaussian(noises[torch.arange(COUNT) != next(left)] if points else 0.2), 1)
    found = whole.cross_calibrate(train, TensorDataset(*data) if kind == "dataset" else data, folds)
    for name in ("before", "after", "network", "standard_error", "gain_error"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-9), name
    assert found.objective == "folds" and found.trusted and "left-out training points" in str(found)
    assert whole.predictive == found.calibration
    assert found.scale == pytest.approx(expected.scale, rel=1e-5)


def test_random_folds_are_scored_by_networks_that_have_not_seen_them() -> None:
    """Classes, in three folds: each point's density is that of the network without its fold."""
    data = data_of(classes=True)
    train, seen = trained(lambda n: ntkl.Categorical(), 3), []

    def watched(part: tuple[Tensor, Tensor]) -> ntkl.Posterior:
        seen.append(part[0])
        return train(part)

    whole = train(data)
    found = whole.cross_calibrate(watched, data, 3, seed=1)
    assert sorted(map(len, seen)) == [9, 9, 10]
    total = 0.0
    for x in seen:
        away = (data[0].unsqueeze(1) != x).any(2).all(1)
        one = train((data[0][~away], data[1][~away]))
        one.predictive = found.calibration
        total += float(one.predict(data[0][away]).log_prob(data[1][away]).sum())
    assert found.after == pytest.approx(total / COUNT, abs=1e-9)
    again = whole.cross_calibrate(watched, data, 3, seed=1)
    assert again == found and all(torch.equal(a, b) for a, b in zip(seen[:3], seen[3:], strict=True))


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"train": 3}, ntkl.UnsupportedError, ("train, a function that takes part of the data", "^3$", "Pass for example")),
    ({"train": lambda part: 3}, ntkl.UnsupportedError, (r"a posterior of 3 outputs from train", "^3$", "Return")),
    ({"folds": 1}, ntkl.DataError, ("2 to 14 folds", "^1$", "Pass a number from 2 to 14")),
    ({"data": (torch.zeros(5, 2), torch.zeros(5))}, ntkl.DataError, ("the 14 training examples", "^5$", "of the fit")),
    ({"data": DataLoader(TensorDataset(*data_of(True)))}, ntkl.DataError, ("be split", "a DataLoader", "Pass the ten")),
    ({"data": (torch.zeros(14, 2), torch.zeros(13))}, ntkl.DataError, ("one target for", "14 ex.* 13 tar", "Look at")),
    ({"data": {"x": 1}}, ntkl.DataError, ("data that can be split: ", "^a dict$", "Pass the tensors")),
])
def test_bad_input(options: dict[str, Any], error: type[Exception], words: tuple[str, str, str]) -> None:
    data = data_of(classes=True)
    train = trained(lambda n: ntkl.Categorical(), 3)
    posterior = train(data)
    with refused(error, *words):
        posterior.cross_calibrate(**{"train": train, "data": data} | options)
    assert posterior.predictive is None


def test_one_point_has_no_folds() -> None:
    x, y = data_of(classes=False)
    train = trained(lambda n: ntkl.Gaussian(0.2), 1)
    with refused(ntkl.DataError, "two or more training points", "^1$", "Fit more"):
        train((x[:1], y[:1])).cross_calibrate(train, (x[:1], y[:1]))
