"""Training from several prior precisions: which start is kept, what the caller's network gets, and what is refused."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.training.starts import rank

QUICK = {"epochs": 4, "batch_size": None, "settings": ntkl.Settings(progress=False)}


def made() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x = torch.rand(30, 1).double() * 4
    y = torch.sin(3 * x) + 0.1 * torch.randn_like(x)
    return nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 1)).double(), (x, y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the fitted predictive is not to be trusted", "ignore:the network stays")
def test_starts_are_trainings_by_hand_sorted_by_leave_one_out() -> None:
    network, data = made()
    before, likelihood = copy.deepcopy(network), ntkl.Gaussian(0.5)
    prior = ntkl.GaussianPrior({"0": 2.0, "2": 1.0, "3": 1.0}, groups="layer")
    found = ntkl.train_from_starts(network, data, likelihood, prior, starts=(1.0, 0.01, 10.0), **QUICK)
    expected = []
    for factor in (1.0, 0.01, 10.0):
        module = copy.deepcopy(before)
        own = ntkl.GaussianPrior({"0": 2.0 * factor, "2": factor, "3": factor}, groups="layer")
        training = ntkl.train_with_evidence(module, data, likelihood, own, predictive="loo", **QUICK)
        expected.append((training.predictive.after, module))
    expected.sort(key=lambda pair: -pair[0])
    assert [each.predictive.after for each in found] == pytest.approx([after for after, _ in expected], rel=1e-12)
    assert len({round(after, 6) for after, _ in expected}) == 3  # else the order shows nothing
    assert max(found[0].history.evidence) < max(found[1].history.evidence)  # whose order is another
    own, best = ([*module.parameters(), *module.buffers()] for module in (network, expected[0][1]))
    assert all(torch.equal(one, other) for one, other in zip(own, best, strict=True))
    assert not torch.equal(network[2].running_mean, before[2].running_mean)
    assert prior.log_precision is None and likelihood.noise.item() == pytest.approx(0.5)  # the caller's


def test_a_start_may_be_a_whole_number_that_no_tensor_holds() -> None:
    network, data = torch.nn.Linear(2, 1).double(), (torch.ones(4, 2).double(), torch.ones(4, 1).double())
    (found,) = ntkl.train_from_starts(network, data, ntkl.Gaussian(), starts=[10**30], **QUICK)
    assert found.history.epochs


def test_priors_are_scaled_bound_or_not() -> None:
    shapes = {"0.weight": torch.Size((2, 3)), "0.bias": torch.Size((2,))}
    for prior in (ntkl.GaussianPrior(2.0), ntkl.GaussianPrior({"0": 2.0}, groups="layer"),
                  ntkl.GaussianPrior(2.0, groups="input").bind(shapes)):
        scaled = prior.scaled(0.25).bind(shapes)
        torch.testing.assert_close(scaled.flat_precision().detach(), torch.full((8,), 0.5).double())
        assert scaled.as_given and torch.all(prior.bind(shapes).flat_precision() == 2.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no predictive is fitted", "ignore:the network stays")
@pytest.mark.parametrize("options", [
    {"predictive": None}, {"settings": ntkl.Settings(progress=False, memory_budget=5000)}
], ids=["not wanted", "does not fit in memory"])
def test_without_leave_one_out_the_largest_evidence_is_first(options: dict) -> None:
    network, data = made()
    found = ntkl.train_from_starts(network, data, ntkl.Gaussian(0.5), starts=(30.0, 1e-3, 1.0), **QUICK | options)
    evidence = [max(each.history.evidence) for each in found]
    assert all(each.predictive is None for each in found)
    assert evidence[0] > evidence[1] > evidence[2]
    trained = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    assert torch.equal(trained, found[0].posterior.network.theta)


@pytest.mark.filterwarnings("ignore:no predictive is fitted", "ignore:the network stays", "ignore:noise is not at")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_start_whose_leave_one_out_fails_is_last(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its evidence, of all points, is larger than the density of one, and was compared with it."""
    (_, (x, y)), network = made(), nn.Linear(1, 1).double()
    nn.init.zeros_(network.weight)
    nn.init.zeros_(network.bias)
    calls, fit = iter(range(2)), ntkl.Posterior.fit_predictive

    def fails(*args: Any, **options: Any) -> Any:
        if next(calls) == failing:
            raise ntkl.NumericalError("a density", "none", "Try again.")
        return fit(*args, **options)

    monkeypatch.setattr(ntkl.Posterior, "fit_predictive", fails)
    first, last = ntkl.train_from_starts(network, (x, 1e-3 * y), ntkl.Gaussian(1e-3), **QUICK,
                                         optimizer=partial(torch.optim.SGD, lr=1e-12))
    assert first.predictive is not None and last.predictive is None and last.evidence > first.predictive.after
    assert rank(first, left_out=True) > rank(last, left_out=True)


def test_what_starts_refuse_leaves_the_network_as_it_was() -> None:
    network, data = made()
    before = copy.deepcopy(network.state_dict())
    adam = torch.optim.Adam(network.parameters())
    for options, error, words in (
        ({"starts": ()}, ntkl.HyperparameterError, r"factors of the prior's precisions; got \(\)"),
        ({"starts": (1.0, -1.0)}, ntkl.HyperparameterError, "positive finite starts; got -1.0"),
        ({"misfit": float("nan")}, ntkl.HyperparameterError, "a finite misfit, or None; got nan"),
        ({"predictive": "held-out"}, ntkl.UnsupportedError, 'predictive="loo" or None; got .held-out'),
        ({"optimizer": adam}, ntkl.UnsupportedError, "what makes the optimizer of each training; got an Adam"),
        ({"settings": ntkl.Settings(checkpoint="x.pt")}, ntkl.UnsupportedError, "without checkpoint and resume"),
    ):
        with pytest.raises(error, match=words):
            ntkl.train_from_starts(network, data, ntkl.Gaussian(0.5), **QUICK | options)
    assert all(torch.equal(network.state_dict()[name], value) for name, value in before.items())
