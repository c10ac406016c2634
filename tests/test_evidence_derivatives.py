"""First derivatives of the evidence alone: what would be differentiated twice, or after a change, is refused."""

from __future__ import annotations

from collections.abc import Callable

import gpytorch
import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.gp import LaplaceGP
from ntk_laplace.runtime.known_gradients import scaled_by, with_gradients
from refusals import inputs, labels, network, refused

STRUCTURES = ["gp", "full", "kfac", "ekfac", ntkl.INF(rank=10), "diag", "iterative"]
pytestmark = pytest.mark.filterwarnings("ignore:INF's low-rank part")
LIKELIHOODS: dict[str, Callable[[], nn.Module]] = {
    "temperature": lambda: ntkl.Tempered(ntkl.Categorical(), 0.7),
    "scale": lambda: ntkl.Gaussian(0.3),  # Λ = c Λ'
    "form": lambda: ntkl.Gaussian([0.3, 0.2, 0.5]),  # Λ in O(C) numbers
}


def fit(structure: object, name: str = "temperature") -> ntkl.Posterior:
    y = labels() if name == "temperature" else torch.randn(len(inputs()), 3, dtype=torch.float64)
    return ntkl.laplace(network(), (inputs(), y), LIKELIHOODS[name](), ntkl.GaussianPrior(1.0), structure)


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_a_second_derivative_is_refused(structure: object) -> None:
    """In the precision as in the likelihood's hyperparameters, and not only where the incoming gradient has a graph."""
    for name in LIKELIHOODS:
        posterior = fit(structure, name)
        for parameter in (posterior.prior.log_precision, *posterior.likelihood.parameters()):
            with refused(UnsupportedError, "first derivative of the evidence", "create_graph=True", "finite differ"):
                torch.autograd.grad(posterior.log_marginal_likelihood(), parameter, create_graph=True)


def test_that_of_the_correction_and_of_the_kernel_is_refused() -> None:
    posterior = fit("gp")
    correction = posterior.evidence(correction=True).correction
    with refused(UnsupportedError, "first derivative of the evidence", "create_graph=True", "Differentiate once"):
        torch.autograd.grad(correction, posterior.prior.log_precision, create_graph=True)
    gp = LaplaceGP(posterior)
    with refused(UnsupportedError, "first derivative of the kernel", "create_graph=True", "Differentiate once"):
        matrix = ntkl.gp.NTKKernel(network(), posterior.prior)(inputs()).to_dense()
        torch.autograd.grad(matrix.sum(), posterior.prior.log_precision, create_graph=True)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(gp.likelihood, gp)
    with refused(UnsupportedError, "first derivative of the evidence", "create_graph=True", "Differentiate once"):
        value = mll(gp(*gp.train_inputs), gp.train_targets)
        torch.autograd.grad(value, gp.prior.log_precision, create_graph=True)


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_backward_after_a_change_is_refused(structure: object) -> None:
    """The gradient is computed in backward, from hyperparameters that must be those of the value."""
    for name in LIKELIHOODS:
        posterior = fit(structure, name)
        own = [posterior.prior.log_precision, *posterior.likelihood.parameters()]
        expected = torch.autograd.grad(posterior.log_marginal_likelihood(), own)
        for parameter in own:
            value = posterior.log_marginal_likelihood()
            with torch.no_grad():
                before = parameter.clone()
                parameter.add_(0.5)
            with refused(UnsupportedError, "as they were", "changed in place", r"backward\(\) before the change"):
                torch.autograd.grad(value, posterior.prior.log_precision, retain_graph=True)
            with torch.no_grad():
                parameter.copy_(before)
            # back where they were: the value's own gradient again
            found = torch.autograd.grad(value, posterior.prior.log_precision)[0]
            torch.testing.assert_close(found, expected[0], rtol=1e-9, atol=0)


def test_known_gradients_are_those_given_in_dtype_and_device_of_the_tensors() -> None:
    one = torch.tensor(2.0, dtype=torch.float32, requires_grad=True)
    two = torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True)
    made: list[str] = []

    def slope() -> Tensor:
        made.append("two")
        return torch.tensor([5.0, 7.0], dtype=torch.float64)

    value = torch.tensor(4.0, dtype=torch.float64)
    found = with_gradients(value, "it", (one, lambda upstream: 3 * upstream), (two, scaled_by(slope)))
    assert found is not value and found.item() == 4.0 and not value.requires_grad
    by_one, by_two = torch.autograd.grad(2 * found, [one, two])
    assert by_one.dtype == torch.float32 and by_one == 6.0 and by_two.tolist() == [10.0, 14.0] and made == ["two"]
    alone = with_gradients(value, "it", (one, lambda upstream: 3 * upstream), (two.detach(), scaled_by(slope)))
    assert torch.autograd.grad(alone, one)[0] == 3.0 and made == ["two"]  # what has no gradient is not computed
