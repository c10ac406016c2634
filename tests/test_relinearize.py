"""Relinearizing: the network itself follows a what-if, against refits and against training by L-BFGS."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from reference import relative_error
from refusals import refused

DECAY = 5.0


@functools.cache
def trained(kind: str, hidden: int = 4) -> tuple[nn.Module, Tensor, Tensor]:
    """A small tanh network at a minimum of its objective, gradient below 1e-9."""
    torch.manual_seed(1)
    x = torch.randn(24, 3).double()
    y = torch.randint(3, (24,)) if kind == "classes" else torch.sin(x.sum(1, keepdim=True)) + 0.3 * torch.randn(24, 1)
    network = nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 3 if kind == "classes" else 1)).double()
    y = y if kind == "classes" else y.double()
    return retrained(network, kind, x, y, torch.ones(24).double()), x, y


def likelihood(kind: str) -> ntkl.Likelihood:
    return ntkl.Categorical() if kind == "classes" else ntkl.Gaussian(noise=0.4)


def objective(network: nn.Module, kind: str, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Written without the library."""
    return valued(network(x), list(network.parameters()), kind, y, weights)


def valued(f: Tensor, parameters: list[Tensor], kind: str, y: Tensor, weights: Tensor) -> Tensor:
    if kind == "classes":
        loss = nn.functional.cross_entropy(f, y, reduction="none")
    else:
        loss = 0.5 * (f - y).square().sum(1) / 0.4
    return (weights * loss).sum() + 0.5 * DECAY * sum(p.square().sum() for p in parameters)


def retrained(network: nn.Module, kind: str, x: Tensor, y: Tensor, weights: Tensor) -> nn.Module:
    """On from its weights by L-BFGS, in place, and by Newton's method with autograd's Hessian to the last digits."""
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=5000, tolerance_grad=1e-11, tolerance_change=0.0,
                                  history_size=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective(network, kind, x, y, weights)
        loss.backward()
        return loss

    optimizer.step(closure)
    shapes = {name: p.shape for name, p in network.named_parameters()}

    def at(theta: Tensor) -> Tensor:
        parts = theta.split([shape.numel() for shape in shapes.values()])
        named = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        return valued(torch.func.functional_call(network, named, (x,)), list(parts), kind, y, weights)

    theta = nn.utils.parameters_to_vector(network.parameters()).detach()
    for _ in range(3):
        theta = theta - torch.linalg.solve(torch.func.hessian(at)(theta), torch.func.grad(at)(theta))
    assert float(torch.func.grad(at)(theta).abs().max()) < 1e-11
    nn.utils.vector_to_parameters(theta, network.parameters())
    network.zero_grad()
    return network


def posterior(kind: str, structure: str):
    network, x, y = trained(kind)
    return ntkl.laplace(network, (x, y), likelihood(kind), ntkl.GaussianPrior(DECAY), structure)


@pytest.mark.slow
@pytest.mark.parametrize("verb, kind, structure", [
    ("remove", "classes", "full"), ("remove", "values", "gp"), ("reweight", "values", "full"),
    ("relabel", "classes", "gp"), ("add", "values", "gp"), ("add", "values", "full"),
])
def test_enough_steps_are_training(verb, kind, structure):
    """The minimum that L-BFGS finds on the changed data, from the same weights; and a posterior fitted there."""
    network, x, y = trained(kind)
    new = torch.randn(5, 3, generator=torch.Generator().manual_seed(2)).double()
    others, weights = y.clone(), torch.ones(24)
    found = posterior(kind, structure)
    if verb == "remove":
        found, weights[[2, 11]] = found.remove([2, 11]), 0.0
    elif verb == "reweight":
        found, weights[[2, 11]] = found.reweight([2, 11], [0.2, 2.5]), torch.tensor([0.2, 2.5])
    elif verb == "relabel":
        others[[2, 11]] = y[[5, 6]]
        found = found.relabel([2, 11], y[[5, 6]])
    else:
        found, weights = found.add(new[:2], y[:2]), torch.ones(26)
        x, others = torch.cat([x, new[:2]]), torch.cat([y, y[:2]])
    before = found.outputs(new)
    arrived = found.relinearize(x if structure == "gp" else None, steps=300)
    own = retrained(copy.deepcopy(network), kind, x, others, weights.double())
    with torch.no_grad():
        truth, start = own(new), network(new)
    assert relative_error(arrived.outputs(new) - start, truth - start) < 1e-5
    assert torch.equal(arrived.outputs(new), arrived.network.module(new).detach())
    assert relative_error(arrived.network.theta, nn.utils.parameters_to_vector(own.parameters()).detach()) < 1e-6
    assert torch.equal(found.outputs(new), before), "the posterior that was asked has changed"
    # the posterior is that of the network there, fitted to the points that are left
    if verb in ("remove", "add", "relabel"):
        stay = weights > 0
        fitted = ntkl.laplace(arrived.network.module, (x[stay], others[stay]), likelihood(kind),
                              ntkl.GaussianPrior(DECAY), structure)
        for a, b in zip(arrived.latent_moments(new), fitted.latent_moments(new), strict=True):
            assert relative_error(a, b) < 1e-8
        assert relative_error(arrived.log_marginal_likelihood(), fitted.log_marginal_likelihood()) < 1e-9
    assert "relinearized" in repr(arrived) and arrived.num_examples == len(x)


@pytest.mark.parametrize("structure", ["gp", "full"])
def test_one_step_of_a_linear_network_is_the_refit(structure):
    torch.manual_seed(3)
    x, y = torch.randn(12, 3).double(), torch.randn(12, 2).double()
    layer = nn.Linear(3, 2, bias=False).double()

    def best(rows: list[int]) -> Tensor:
        inner = x[rows].T @ x[rows] / 0.3 + 0.7 * torch.eye(3).double()
        return torch.linalg.solve(inner, x[rows].T @ y[rows] / 0.3).T

    with torch.no_grad():
        layer.weight.copy_(best(list(range(12))))
    kept = layer.weight.detach().clone()
    found = ntkl.laplace(layer, (x, y), ntkl.Gaussian(noise=0.3), ntkl.GaussianPrior(0.7), structure)
    rest = [i for i in range(12) if i not in (1, 7)]
    moved = found.remove([1, 7]).relinearize(x)
    assert relative_error(moved.network.module.weight, best(rest)) < 1e-10
    assert torch.equal(layer.weight, kept) and layer.weight.grad is None, "the caller's network has moved"
    assert torch.equal(moved.relinearize(x, steps=3).network.theta, moved.network.theta)  # there is nothing left to do
    again = moved.reweight(7, 1.0).relinearize(x)
    assert relative_error(again.network.module.weight, best([*rest, 7])) < 1e-10
    assert "relinearized, 1 removed" in repr(again)


def test_steps_decrease_the_objective_and_can_be_continued():
    """The objective never rises; step by step is the same as at once."""
    _, x, y = trained("values")
    weights = torch.ones(24).double()
    weights[::2] = 0
    found = posterior("values", "full").remove(weights == 0)
    values, each = [], found
    for _ in range(4):
        each = each.relinearize()
        values.append(objective(each.network.module, "values", x, y, weights).item())
    assert values == sorted(values, reverse=True) and values[0] > values[-1]
    at_once = found.relinearize(steps=4)
    assert relative_error(at_once.network.theta, each.network.theta) < 1e-10
    gp = posterior("values", "gp").remove(weights == 0).relinearize(x, steps=4)
    assert relative_error(gp.network.theta, each.network.theta) < 1e-8


@pytest.mark.slow
def test_a_step_that_overshoots_is_halved():
    """The whole step of a what-if, taken by the network, would raise the objective."""
    network, x, y = trained("values", 8)
    whole = ntkl.laplace(network, (x, y), likelihood("values"), ntkl.GaussianPrior(1e-3), "full")
    start, halved = nn.utils.parameters_to_vector(network.parameters()).detach(), 0
    for last in range(6, 20, 2):
        found = whole.remove(range(last))
        moved, full = found.relinearize().network.theta - start, found.fitted.model.displacement
        share = float((moved / full).median())
        assert relative_error(moved, share * full) < 1e-9 and share <= 1
        halved += share < 0.99
    assert halved


@pytest.mark.slow
def test_the_gradient_left_by_training_stays_fixed():
    """Far from an optimum nothing moves where nothing changes; a change moves towards its own tilted optimum."""
    torch.manual_seed(5)
    network, (_, x, y) = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), trained("classes")
    found = ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(DECAY), "full")
    theta = nn.utils.parameters_to_vector(network.parameters()).detach()
    assert torch.equal(found.remove([]).relinearize(steps=3).network.theta, theta)
    arrived = found.remove([0, 1]).relinearize(steps=100)
    weights = torch.ones(24).double()
    slopes = []
    for module, gone in ((network, []), (arrived.network.module, [0, 1])):
        weights[gone] = 0
        moving = copy.deepcopy(module)
        for parameter in moving.parameters():
            parameter.requires_grad_(True)
        objective(moving, "classes", x, y, weights).backward()
        slopes.append(torch.cat([p.grad.flatten() for p in moving.parameters()]))
    assert slopes[0].abs().max() > 0.1 and relative_error(slopes[1], slopes[0]) < 3e-3


def test_relinearizing_that_makes_no_sense():
    _, x, _ = trained("classes")
    gp, full = (posterior("classes", name) for name in ("gp", "full"))
    removed = gp.remove(0)
    with refused(ntkl.UnsupportedError, "a what-if changed, to relinearize", "fitted to", "Ask remove"):
        gp.relinearize(x)
    with refused(ntkl.DataError, "24 training points", "23", "order"):
        removed.relinearize(x[1:])
    with refused(ntkl.DataError, "the inputs of the fit, in its order", "differ by", "same order"):
        removed.relinearize(x.flip(0))
    for steps in (0, 1.5, None, True):
        with refused(ntkl.HyperparameterError, "steps", ".", "such as 3"):
            removed.relinearize(x, steps=steps)
    for other in (posterior("classes", "kfac").reweight(0, 0.9), full.remove(0).relinearize()):
        if other.structure == "kfac":
            with refused(ntkl.UnsupportedError, 'structure="gp", "full" or "iterative"', "kfac", "Fit one"):
                other.relinearize()
        else:
            with refused(ntkl.UnsupportedError, "to save", "what-if", "Save the original"):
                other.save("nowhere.pt", include_data=True)
