"""Likelihoods whose methods contradict each other, merges of other options, hyperparameters without effect."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl


class Plain(ntkl.Likelihood):
    """A Gaussian of variance 1 without constants."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return -0.5 * (y - f).square().sum(1)


class Total(Plain):
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(f, y).sum()


class NotFinite(Plain):
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(f, y) * torch.nan


class WrongSign(Plain):
    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return f - y


def case() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(12, 2).double()
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double(), (x, x[:, :1] - 1.0)


@pytest.mark.parametrize(("likelihood", "words"), [
    (Total, r"shape \(4,\) from Total.log_prob; got \(\)"), (NotFinite, "NotFinite.log_prob; got .* not finite"),
    (WrongSign, "WrongSign.residual, the derivative of its log_prob in f; got a difference of"),
])  # fmt: skip
def test_methods_that_contradict_each_other_are_refused(likelihood: type[ntkl.Likelihood], words: str) -> None:
    network, data = case()
    with pytest.raises(ntkl.UnsupportedError, match=words):
        ntkl.laplace(network, data, likelihood(), structure="full")


def test_consistent_methods_are_accepted() -> None:
    network, data = case()
    found = ntkl.laplace(network, data, Plain(), structure="full").log_det()
    assert torch.allclose(found, ntkl.laplace(network, data, ntkl.Gaussian(1.0), structure="full").log_det())


class Unused(Plain):
    """It has a hyperparameter that its log density does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale_of_nothing = nn.Parameter(torch.zeros(()).double())


def test_a_hyperparameter_without_effect_is_refused() -> None:
    network, data = case()
    posterior = ntkl.laplace(network, data, Unused(), structure="full")
    with pytest.raises(ntkl.UnsupportedError, match="an evidence that depends on scale_of_nothing; got one that does"):
        posterior.fit_hyperparameters()
    assert posterior.fit_hyperparameters(parameters=["precision"]).converged
