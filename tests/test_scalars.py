"""Scalars that carry a gradient are read as numbers without a warning, and are tensors in everything else."""

from __future__ import annotations

import io
import math
import pickle

import numpy as np
import pytest
import torch

import ntk_laplace as ntkl
from exact_cases import fit
from ntk_laplace.runtime.scalars import Scalar, scalar
from registry import problem


@pytest.fixture(autouse=True)
def every_time():
    """Torch says what it warns of once in a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.fixture
def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([1.5, -2.0], dtype=torch.float64))


def value(parameter: torch.nn.Parameter) -> torch.Tensor:
    return scalar(parameter.square().sum())  # 6.25


@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "diag"])
def test_numbers_of_a_posterior_are_read_without_a_warning(structure):
    network, x, y = problem("far_from_optimum").network, problem("far_from_optimum").x, torch.arange(6) % 3
    posterior = ntkl.laplace(network, (x[:6], y), ntkl.Categorical(temperature=1.3), structure=structure)
    changed = posterior.reweight([1], 1.1)
    for one in (posterior, changed):
        for found in (one.log_likelihood(), one.log_joint(), one.log_det(), one.log_marginal_likelihood(),
                      one.log_marginal_likelihood(correction=True), one.likelihood.temperature, one.bic(),
                      one.aic()):
            assert isinstance(float(found), float) and float(found) == found.item()
    assert float(posterior.conditional_log_marginal_likelihood(3)) < 0.0
    for found in (posterior.log_likelihood(), posterior.log_joint(), posterior.log_det(),
                  posterior.log_marginal_likelihood(), posterior.likelihood.temperature):
        assert found.requires_grad and found.ndim == 0
    assert float(posterior.log_marginal_likelihood() - changed.log_marginal_likelihood()) != 0.0
    assert float(ntkl.Gaussian(0.25).noise) == pytest.approx(0.25)


def test_a_number_for_python(parameter):
    own = value(parameter)
    assert type(float(own)) is float and float(own) == own.item() == 6.25 and complex(own) == 6.25 and int(own) == 6
    assert f"{own:.1f} {own:8.3f} {own}" == "6.2    6.250 6.25"
    assert math.log(own) == math.log(6.25) and np.float64(own) == 6.25
    assert own > 6.0 and bool(own) and max(own, 2 * own) == 12.5 and sorted([2 * own, own])[0] == 6.25


def test_what_is_made_of_it(parameter):
    """One number with a gradient is such a scalar again, so that differences can be read; all else is plain."""
    own = value(parameter)
    for again in (own - 2 * own, -own, own / 3, sum([own, own]), own.clone(), own.float(), np.float64(2) * own):
        assert type(again) is Scalar and again.requires_grad and math.isfinite(float(again))
    for plain in (own.detach(), own.data, own > 1, own.unsqueeze(0), own * torch.ones(3), torch.stack([own, own])):
        assert type(plain) is torch.Tensor
    with torch.no_grad():
        assert type(own * 2) is torch.Tensor
    assert type(scalar(torch.ones(()))) is type(scalar(parameter.square())) is torch.Tensor


def test_gradients_pass_through(parameter):
    own = value(parameter)
    (gradient,) = torch.autograd.grad(own * own / 2, parameter, create_graph=True)
    torch.testing.assert_close(gradient, 6.25 * 2 * parameter)
    assert type(gradient) is torch.Tensor
    own.backward()
    torch.testing.assert_close(parameter.grad, 2 * parameter.detach())
    plain = torch.nn.Parameter(parameter.detach().clone())
    for given, function in ((parameter, value), (plain, lambda p: p.square().sum())):
        for optimizer in (torch.optim.Adam([given]), torch.optim.LBFGS([given], lr=0.1)):

            def closure(optimizer=optimizer, given=given, function=function):
                optimizer.zero_grad()
                loss = function(given)
                loss.backward()
                return loss

            optimizer.step(closure)
    assert torch.equal(parameter, plain)


def test_numpy_still_asks_for_a_detached_tensor(parameter):
    for convert in (np.asarray, torch.Tensor.numpy):
        with pytest.raises(RuntimeError, match="requires grad"):
            convert(value(parameter))


def test_it_is_stored_and_printed_as_a_tensor(parameter):
    own, file = value(parameter), io.BytesIO()
    torch.save({"evidence": own}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)["evidence"]
    assert type(found) is torch.Tensor and found.item() == 6.25
    assert type(pickle.loads(pickle.dumps(own))) is torch.Tensor
    assert repr(own).startswith("tensor(6.25") and str(own) == repr(own)


def test_the_evidence_keeps_its_gradient():
    """The wrapped evidence against a difference of two, read as numbers."""
    posterior = fit("far_from_optimum", "categorical", "scalar", "gp")
    variables = list(posterior.prior.parameters())
    (slope,) = torch.autograd.grad(posterior.log_marginal_likelihood(), variables)
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            variables[0] += sign * 1e-4
        ends.append(float(posterior.log_marginal_likelihood()))
        with torch.no_grad():
            variables[0] -= sign * 1e-4
    assert float(slope) == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-5)
