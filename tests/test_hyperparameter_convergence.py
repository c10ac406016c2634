"""Convergence of the evidence's maximization is judged by the gradient that was reached."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import scipy.optimize
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.posterior.hyperparameters import HyperparameterHistory, maximize

BELOW, ROUNDING = "gradient below tolerance", "the evidence no longer changes beyond rounding"


class Hill:
    """An evidence over two precisions, given as a function of their logarithms."""

    def __init__(self, height: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float64) -> None:
        self.prior, self.likelihood, self.height, self.dtype = nn.Module(), nn.Module(), height, dtype
        self.prior.log_precision, self.prior.group_names = nn.Parameter(torch.zeros(2).double()), ["a", "b"]
        self.prior.has_hyperprior = False

    def log_marginal_likelihood(self, correction: bool = False) -> Tensor:
        return self.height(self.prior.log_precision)

    def log_scale(self) -> None:
        return None

    def log_det_terms(self) -> None:
        return None

    def local_log_det(self) -> None:
        return None

    def maximize(self, **options: object) -> tuple[HyperparameterHistory, str]:
        """The history, and what was warned of."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = maximize(self, **options)
        return history, "; ".join(str(one.message) for one in caught)

    @property
    def steepest(self) -> float:
        """The largest gradient where it stands, as a share of 1 + abs(evidence)."""
        value = self.height(self.prior.log_precision)
        (slope,) = torch.autograd.grad(value, self.prior.log_precision)
        return slope.abs().max().item() / (1 + abs(value.item()))


def height(logs: Tensor) -> Tensor:
    """Additions and products alone, which every processor rounds alike."""
    a, b = logs - torch.tensor([1.0, -0.5]).double()
    return -100 - 100 * (a * a + a * b + 3 * b * b + a * a * a * a + a * a * b * b)


@pytest.mark.parametrize("tolerance", [1e-3, 1e-6, 1e-8, 1e-9, 1e-10])
def test_of_steps_with_one_evidence_the_flattest_is_kept(tolerance: float) -> None:
    """Gradients fall on where the evidence no longer changes: its error is of second order."""
    hill = Hill(height)
    history, said = hill.maximize(tolerance=tolerance)
    assert history.converged and history.message == BELOW and said == ""
    assert hill.steepest <= tolerance and history.best == len(history) - 1
    if tolerance == 1e-9:
        assert history.evidence[-1] == history.evidence[-2]  # or the test would show nothing


def test_the_best_step_is_the_last_of_those_that_rounding_cannot_order() -> None:
    largest, rounding = -270.0, 2.0**-44  # the distance of two numbers there
    for evidence, best in (
        ([-271.0, largest, largest], 2), ([-271.0, largest, largest - rounding], 2), ([largest, -271.0, largest], 2),
        ([-271.0, largest, largest - 1e-9], 1), ([largest], 0), ([0.0, -1.0], 0),
    ):
        assert HyperparameterHistory("lbfgs", ["noise"], evidence).best == best


def test_a_gradient_that_rounding_leaves_is_convergence_too() -> None:
    """In float32 the evidence says nothing of gradients below the root of its precision."""

    def coarse(logs: Tensor) -> Tensor:
        value = height(logs)
        return value + (value.detach().float().double() - value.detach())

    hill = Hill(coarse, torch.float32)
    history, said = hill.maximize(tolerance=1e-12)
    assert history.converged and history.message == ROUNDING and said == ""
    assert 1e-12 < hill.steepest < torch.finfo(torch.float32).eps ** 0.5
    hill = Hill(coarse)  # float64 claims more than that
    history, said = hill.maximize(tolerance=1e-12)
    assert not history.converged and "the search ended at a gradient of" in said and hill.steepest > 1e-7


STOPS = [(0, True, "CONVERGENCE: RELATIVE REDUCTION OF F <= FACTR*EPSMCH"), (1, False, "STOP: TOTAL NO. OF ITERATIONS"),
         (2, False, "ABNORMAL_TERMINATION_IN_LNSRCH"), (99, False, "`callback` raised `StopIteration`.")]


@pytest.mark.parametrize(("status", "success", "message"), STOPS, ids=[str(stop[0]) for stop in STOPS])
@pytest.mark.parametrize("steps", [7, 100])  # to a gradient of 3e-5, and to one below 1e-6
def test_how_the_optimizer_stopped_decides_nothing(monkeypatch, steps, status, success, message) -> None:
    own = scipy.optimize.minimize

    def stops(*arguments, options: dict, **rest):
        found = own(*arguments, options={**options, "maxiter": steps}, **rest)
        found.status, found.success, found.message = status, success, message
        return found

    monkeypatch.setattr(scipy.optimize, "minimize", stops)
    hill = Hill(height)
    history, said = hill.maximize()
    assert history.converged is (steps == 100) is (hill.steepest <= 1e-6)
    if steps == 100:
        assert history.message == BELOW and said == ""
    elif status == 1:
        assert history.message == "200 steps were not enough for gradients within tolerance" and "200 steps" in said
    else:
        assert "the search ended at a gradient of" in history.message and 'method="adam"' in said
    assert "callback" not in history.message and "CONV" not in history.message


def test_steps_that_do_not_suffice_are_named() -> None:
    history, said = Hill(height).maximize(steps=3)
    assert not history.converged and len(history) == 4
    assert "not reached: 3 steps were not enough for gradients within tolerance" in said


def test_a_gradient_of_the_wrong_sign_is_no_convergence() -> None:
    """No step along it climbs, the line search gives up, and the evidence could still grow."""
    hill = Hill(lambda logs: 2 * height(logs).detach() - height(logs))
    history, said = hill.maximize()
    assert not history.converged and hill.prior.log_precision.abs().max() < 1e-12 and hill.steepest > 1
    assert "the search ended at a gradient of" in said and "dtype=torch.float64" in said


@pytest.mark.slow
def test_float32_algebra_converges(recwarn) -> None:
    x = torch.linspace(-2, 2, 40).unsqueeze(1)
    y = torch.sin(3 * x) + 0.2 * torch.randn(40, 1)
    network = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))
    for structure in ("gp", "diag"):
        prior = ntkl.GaussianPrior(groups="layer")
        posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(0.04), prior, structure, dtype=torch.float32)
        history = posterior.fit_hyperparameters(tolerance=1e-9)
        assert history.converged and history.message in (BELOW, ROUNDING)
    assert not [str(one.message) for one in recwarn]
