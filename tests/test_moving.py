"""What-ifs of the network itself: its own optimum for changed data, against training from the same weights."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, grad, hessian, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

import ntk_laplace as ntkl
from minima import parts
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.krylov import Deflated
from ntk_laplace.structures.training_inputs import training_inputs
from ntk_laplace.structures.weight_likelihood import NetworkLikelihood, likelihood_of
from ntk_laplace.structures.what_if import objectives
from ntk_laplace.structures.what_if.moving import checked_likelihood, moving_model, remaining_of
from ntk_laplace.structures.what_if.objectives import ChangedObjectives
from reference import outputs, relative_error, take
from refusals import inputs, labels, network, refused
from registry import LIKELIHOODS, Problem, fresh, targets

SOME = [("deep_mlp", "categorical", "full"),
        ("scalar_outputs", "gaussian", "kfac"), ("low_rank", "gaussian", "diag"),
        ("direct_parameters", "bernoulli", "gp")]
DECAY = 1.5
GROUP = [1, 4]


class Brute:
    """The objective of weighted data by autograd, with a gradient that stays; L-BFGS from θ to a gradient of 1e-8."""

    def __init__(self, module: nn.Module, density, precision: Tensor, mean: Tensor) -> None:
        self.module, self.density, self.precision, self.mean = module, density, precision, mean
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def value(self, theta: Tensor, x, y: Tensor, weights: Tensor) -> Tensor:
        parts = theta.split([p.numel() for p in self.parameters.values()])
        values = {name: v.view_as(p) for (name, p), v in zip(self.parameters.items(), parts, strict=True)}
        f = functional_call(self.module, values, (x,))
        f = f.unsqueeze(1) if f.ndim == 1 else f
        y = y.unsqueeze(1) if f.shape[1] == 1 and y.ndim == 1 else y
        fits = vmap(self.density)(f, y)
        return 0.5 * (self.precision * (theta - self.mean) ** 2).sum() - (weights * fits).sum()

    def trained(self, theta: Tensor, x, y: Tensor, weights: Tensor, held: Tensor | float = 0.0) -> Tensor:
        at = theta.clone().requires_grad_()
        optimizer = torch.optim.LBFGS([at], max_iter=600, tolerance_grad=1e-6, history_size=60,
                                      tolerance_change=0.0, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.value(at, x, y, weights) - (held * at).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        theta = at.detach()
        for _ in range(4):  # the line search ends at 1e-6 or so
            curvature = hessian(lambda here: self.value(here, x, y, weights))(theta)
            theta = theta - torch.linalg.solve(curvature, self.gradient(theta, x, y, weights) - held)
        assert (self.gradient(theta, x, y, weights) - held).abs().max() < 1e-8, "brute force has not converged"
        return theta

    def gradient(self, theta: Tensor, x, y: Tensor, weights: Tensor) -> Tensor:
        at = theta.clone().requires_grad_()
        return torch.autograd.grad(self.value(at, x, y, weights), at)[0]


@functools.cache
def arrived(name: str, likelihood: str) -> tuple[Problem, Brute, Tensor, Tensor]:
    """A network of the registry at a minimum, its brute force, its targets and its weights."""
    own, density = fresh(name), LIKELIHOODS[likelihood].log_density
    y, size = targets(LIKELIHOODS[likelihood], own), torch.ones_like(own.theta)
    truth = Brute(own.network, density, DECAY * size, 0.1 * size)
    with sdpa_kernel(SDPBackend.MATH):
        theta = truth.trained(own.theta, own.x, y, torch.ones(len(y)).double())
    chosen = [p for p in own.network.parameters() if p.requires_grad]
    nn.utils.vector_to_parameters(theta, chosen)
    return own, truth, y, theta


def posterior(name: str, likelihood: str, structure) -> ntkl.Posterior:
    own, _, y, _ = arrived(name, likelihood)
    prior = ntkl.GaussianPrior(DECAY, mean=0.1)
    return ntkl.laplace(own.network, (own.x, y), LIKELIHOODS[likelihood].build(), prior, structure)


@pytest.mark.parametrize(("name", "likelihood", "structure", "verb"), [  # every verb for two, and two verbs for each
    (*one, ["remove", "reweight", "relabel", "add"][(number + step) % 4])
    for number, one in enumerate(SOME) for step in (0, 2)
])
def test_the_network_goes_where_training_goes(name, likelihood, structure, verb):
    """From the same weights, by another optimizer; and the posterior is that of a fit there."""
    own, truth, y, start = arrived(name, likelihood)
    x, weights, other, model = own.x, torch.ones(len(y)).double(), y.clone(), posterior(name, likelihood, structure)
    if verb == "remove":
        weights[GROUP] = 0.0
        found = model.remove(GROUP, linearization="moving")
    elif verb == "reweight":
        weights[GROUP] = torch.tensor([0.3, 2.0], dtype=torch.float64)
        found = model.reweight(GROUP, [0.3, 2.0], linearization="moving")
    elif verb == "relabel":
        other[GROUP] = y[[0, 2]]
        found = model.relabel(GROUP, other[GROUP], linearization="moving")
    else:
        more = take(own.x_new, slice(0, 2))
        x, other, weights = torch.cat([x, more]), torch.cat([y, y[:2]]), torch.ones(len(y) + 2).double()
        found = model.add(more, y[:2], linearization="moving")
    with sdpa_kernel(SDPBackend.MATH):
        theta = truth.trained(start, x, other, weights)
    assert relative_error(found.network.theta - start, theta - start) < 1e-6
    assert found.structure == model.structure and torch.equal(found.weights, weights)
    fitted = ntkl.laplace(found.network.module, (x, other, weights), LIKELIHOODS[likelihood].build(),
                          ntkl.GaussianPrior(DECAY, mean=0.1), structure)
    for a, b in zip(found.latent_moments(own.x_new), fitted.latent_moments(own.x_new), strict=True):
        assert relative_error(a, b) < 1e-8
    assert relative_error(found.log_marginal_likelihood(), fitted.log_marginal_likelihood()) < 1e-9
    moved = outputs(found.network.module, own.x_new)
    assert relative_error(found.outputs(own.x_new), moved) < 1e-12


@pytest.mark.parametrize(("name", "likelihood", "structure"), [
    ("deep_mlp", "categorical", "gp"), ("deep_mlp", "categorical", "diag"), ("scalar_outputs", "gaussian", "kfac"),
])
def test_a_moving_refit_is_at_a_minimum(name, likelihood, structure):
    """From random weights to where the gradient vanishes and the Hessian is positive; what-ifs go on from there."""
    own, density = fresh(name), LIKELIHOODS[likelihood].log_density
    y, size, ones = targets(LIKELIHOODS[likelihood], own), torch.ones_like(own.theta), torch.ones(len(own.x)).double()
    model = ntkl.laplace(own.network, (own.x, y), LIKELIHOODS[likelihood].build(), ntkl.GaussianPrior(DECAY, mean=0.1),
                         structure)
    before = model.network.theta
    found = model.refit(linearization="moving")
    truth, theta = Brute(own.network, density, DECAY * size, 0.1 * size), found.network.theta
    assert truth.gradient(theta, own.x, y, ones).abs().max() < 1e-6
    hessian = torch.autograd.functional.hessian(lambda at: truth.value(at, own.x, y, ones), theta)
    assert torch.linalg.eigvalsh(hessian)[0] > 0.02 * DECAY
    assert torch.equal(model.network.theta, before) and found.structure == model.structure
    assert relative_error(found.remove([], linearization="moving").network.theta, theta) < 1e-8
    ones[GROUP] = 0.0
    want = truth.trained(theta, own.x, y, ones)
    assert relative_error(found.what_ifs([GROUP]).thetas[0] - theta, want - theta) < 1e-5


@pytest.mark.filterwarnings("ignore:the network is not at a minimum", "ignore:the fitted predictive")
@pytest.mark.parametrize("structure", ["gp", "kfac"])
def test_a_moving_refit_is_a_fit_like_any_other(structure, tmp_path, monkeypatch):
    """It is saved and loaded with its own network, and retrained; not where a what-if had changed the data."""
    monkeypatch.setattr(tuning, "RETRAINING_STEPS", 100)
    x, (y, own) = inputs(), parts("classes")
    model = ntkl.laplace(network(), (x, y), own, ntkl.GaussianPrior(3.0), structure)
    found = model.refit(linearization="moving")
    found.save(tmp_path / "p.pt", include_data=structure == "gp")
    loaded = ntkl.load(tmp_path / "p.pt", found.network.module)
    for a, b in zip(loaded.latent_moments(x), found.latent_moments(x), strict=True):
        assert relative_error(a, b) < 1e-12
    assert found.retrain((x, y)).evidence(correction=True).correction < 1e-3 and "relinearized" not in repr(found)
    for changed in (model.remove(0), model.remove(0, linearization="moving")):
        with refused(ntkl.UnsupportedError, "fitted to", "what-if changed", "."):
            changed.refit(linearization="moving").save(tmp_path / "q.pt")


class Product(nn.Module):
    """w v x: a saddle at w = v = 0, where x and y go together more than the prior holds."""

    def __init__(self, w: float, v: float) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.tensor(at).double()) for at in (w, v))

    def forward(self, x):
        return self.w * self.v * x


@pytest.mark.parametrize("per_group", [0, 32])
def test_a_start_at_no_minimum_is_told(per_group, monkeypatch):
    """By few products with the Hessian, or by all of its entries; of the fit's targets, and not after a refit."""
    monkeypatch.setattr(tuning, "WRITTEN_PER_GROUP", per_group)
    x = torch.tensor([[1.0], [-1.0], [2.0]]).double()

    def at(w: float, v: float, slope: float) -> ntkl.Posterior:
        return ntkl.laplace(Product(w, v), (x, slope * x), ntkl.Gaussian(1.0), ntkl.GaussianPrior(2.0))

    flat = at(0.01, 0.013, 0.3)  # 6 * 0.3 < 2
    flat.remove(0, linearization="moving")
    flat.relabel(0, 9.0, linearization="moving")
    saddle = at(0.01, 0.013, 1.0)
    for what_if in (lambda: saddle.remove(0, linearization="moving"), lambda: saddle.what_ifs([[0], [1]]),
                    lambda: saddle.add(x[:1], x[:1], linearization="moving")):
        with pytest.warns(ntkl.NTKLaplaceWarning, match="at a minimum.*refit.linearization=.moving"):
            what_if()
    found = saddle.refit(linearization="moving")
    w, v = found.network.theta.tolist()
    assert w == pytest.approx(v, rel=1e-6) and w * v == pytest.approx(4.0 / 6.0, rel=1e-9)  # 6 (1 - wv) = 2
    assert len(found.what_ifs([[0], [1]])) == 2
    saddle.refit().remove(0, linearization="moving")


class Balance(nn.Module):
    """20 (a - b) x + (a + b)² x / 2: outputs hold a - b, and along a + b the point a = b = 0 is a saddle."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2).double())

    def forward(self, x):
        a, b = self.weights
        return (20.0 * (a - b) + (a + b) ** 2 / 2.0) * x


@pytest.mark.parametrize("structure", ["gp", "diag"])
@pytest.mark.parametrize("per_group", [0, 32])
def test_a_saddle_is_told_whatever_the_structure(per_group, structure, monkeypatch):
    """Its curvature is -5 times the prior precision, and next to nothing of the diagonal's."""
    monkeypatch.setattr(tuning, "WRITTEN_PER_GROUP", per_group)
    x = torch.tensor([[1.0], [-1.0], [2.0]]).double()
    saddle = ntkl.laplace(Balance(), (x, x), ntkl.Gaussian(1.0), ntkl.GaussianPrior(2.0), structure)
    with pytest.warns(ntkl.NTKLaplaceWarning, match="at a minimum"):
        saddle.remove(0, linearization="moving")


@pytest.mark.parametrize("structure", ["gp", "diag"])
@pytest.mark.parametrize("per_group", [0, 32])
def test_rounding_is_no_saddle(per_group, structure, monkeypatch):
    """A linear network has none; in float32 the largest curvature rounds to more than the prior's."""
    monkeypatch.setattr(tuning, "WRITTEN_PER_GROUP", per_group)
    x = inputs().float()
    x = torch.cat([x, x.sum(1, keepdim=True)], 1)
    flat = nn.Linear(x.shape[1], 1)
    posterior = ntkl.laplace(flat, (x, flat(x).detach()), ntkl.Gaussian(1e-4), ntkl.GaussianPrior(1e-6), structure)
    posterior.remove([], linearization="moving")


def test_a_moving_refit_takes_hyperparameters_by_leave_one_out():
    """At the optimum of the linearized model first; refused where that does not exist."""
    x, (y, own) = inputs(), parts("values")
    model = ntkl.laplace(network(), (x, y), own, ntkl.GaussianPrior(3.0))
    found = model.refit("loo", linearization="moving")
    want = model.refit("loo")
    assert torch.equal(found.prior.precision, want.prior.precision) and found.likelihood.noise == want.likelihood.noise
    assert float(found.evidence(correction=True).correction) == pytest.approx(0.0, abs=1e-9)
    with refused(ntkl.UnsupportedError, 'structure="gp", "full"', "kfac", "moving"):
        ntkl.laplace(network(), (x, y), own, ntkl.GaussianPrior(3.0), "kfac").refit()
    with refused(ntkl.UnsupportedError, 'structure="gp", "full"', "kfac", "hyperparameters as they are.*moving"):
        ntkl.laplace(network(), (x, y), own, ntkl.GaussianPrior(3.0), "kfac").refit("loo", linearization="moving")


@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
def test_a_linear_network_is_refitted(structure):
    """The network is linear in its weights: the exact refit of the linearized model, whatever the preconditioner."""
    torch.manual_seed(3)
    x, y = torch.randn(12, 3).double(), torch.randint(3, (12,))
    layer, prior = nn.Linear(3, 3).double(), ntkl.GaussianPrior(0.7)
    exact = ntkl.laplace(layer, (x, y), ntkl.Categorical(), prior).remove([1, 7], steps=None)
    found = ntkl.laplace(layer, (x, y), ntkl.Categorical(), prior, structure).remove([1, 7], linearization="moving")
    assert relative_error(found.network.theta, exact.fitted.theta) < 1e-10
    assert relative_error(found.outputs(x), exact.outputs(x)) < 1e-10


def test_far_changes_end_at_a_minimum():
    """Half of the data of a network: the objective has fallen, its gradient is zero and its curvature positive."""
    own, truth, y, start = arrived("deep_mlp", "categorical")
    weights = (torch.arange(len(y)) % 2).double()
    found = posterior("deep_mlp", "categorical", "gp").remove(weights == 0, linearization="moving").network.theta
    assert truth.value(found, own.x, y, weights) < truth.value(start, own.x, y, weights)
    assert truth.gradient(found, own.x, y, weights).abs().max() < 1e-7
    curvature = hessian(lambda theta: truth.value(theta, own.x, y, weights))(found)
    assert torch.linalg.eigvalsh(curvature)[0] > 0


def test_an_objective_near_zero_has_the_rounding_of_its_terms():
    """Where a log density's constant brings it there, the last steps gain less than that, and have converged."""
    torch.manual_seed(4)
    x = torch.randn(12, 2, dtype=torch.float64)
    y, prior = 30 * torch.sin(2 * x), ntkl.GaussianPrior(3.0)
    module = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    plain = ntkl.Gaussian(0.05)
    fitted = ntkl.laplace(module, (x, y), plain, prior).refit(linearization="moving")
    found = fitted.remove(0, linearization="moving")
    value = 1.5 * found.network.theta.square().sum() - plain.log_prob(found.outputs(x), y)[1:].sum()
    shifted = ntkl.CustomLikelihood(lambda f, t: plain.log_prob(f, t) + value.item() / 11)
    other = ntkl.laplace(fitted.network.module, (x, y), shifted, prior).refit().what_ifs([[0]])
    assert other.converged.all()
    assert relative_error(other.thetas[0], found.network.theta) < 1e-6


def test_the_value_at_an_optimum_is_the_objective():
    """Also where log densities are positive: what the descent has added to it is taken off."""
    y, (module, x) = 0.1 * inputs()[:, :1], (network(1), inputs())
    likelihood = ntkl.Gaussian(1e-3)
    fitted = ntkl.laplace(module, (x, y), likelihood, ntkl.GaussianPrior(3.0)).refit(linearization="moving").fitted
    model, points = moving_model(fitted), fitted.structure.points_to_change
    own = checked_likelihood(model, points, training_inputs(fitted.model, fitted.structure), 1)
    changed = ChangedObjectives(fitted, own, points.counts[None], remaining_of(model), fitted.solver.solve)
    found = changed.minimize(1.01 * model.theta[None])
    fitted.network.module.load_state_dict(model.network.at(found.at[0]).module.state_dict())
    log_prob = likelihood.log_prob(fitted.network.module(x), y)
    assert log_prob.sum() > 0
    value = 1.5 * found.at.square().sum() - found.at[0] @ remaining_of(model) - log_prob.sum()
    assert relative_error(found.values, value[None]) < 1e-9


class Force(nn.Module):
    """Minus the derivative of an energy, by autograd or by `torch.func`, which refuses hooks on saved tensors."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.functional = functional
        self.energy = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1, bias=False)).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.functional:
            return -vmap(grad(lambda place: self.energy(place).sum()))(x)
        with torch.enable_grad():
            place = x.clone().requires_grad_()
            return -torch.autograd.grad(self.energy(place).sum(), place, create_graph=True)[0]


@pytest.mark.filterwarnings("ignore:torch.func.vmap does not evaluate")
def test_a_derivative_by_torch_func_moves_as_one_by_autograd():
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, state = [], Force(True).state_dict()
    for functional in (True, False):
        own = Force(functional)
        own.load_state_dict(state)
        fitted = ntkl.laplace(own, (x, -x), ntkl.Gaussian(0.1), ntkl.GaussianPrior(2.0)).refit(linearization="moving")
        found += [fitted.what_ifs([[0], [1]]).outputs(x) - fitted.outputs(x)]
    assert relative_error(*found) < 1e-9


def test_the_gradient_left_by_training_stays():
    """Without a change nothing moves; a change moves to where the gradient that was left is the gradient again."""
    torch.manual_seed(5)
    module, x, y = network(), inputs(), labels()
    truth = Brute(module, LIKELIHOODS["categorical"].log_density, 5.0, 0.0)
    truth.density = lambda f, t: torch.log_softmax(f, 0)[t]
    start, ones = nn.utils.parameters_to_vector(module.parameters()).detach(), torch.ones(len(y)).double()
    held = truth.gradient(start, x, y, ones)
    assert held.abs().max() > 0.1
    found = ntkl.laplace(module, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(5.0))
    assert relative_error(found.remove([], linearization="moving").network.theta, start) < 1e-12
    ones[0] = 0.0
    moved = found.remove(0, linearization="moving")
    assert (truth.gradient(moved.network.theta, x, y, ones) - held).abs().max() < 1e-7
    back = moved.reweight(0, 1.0, linearization="moving")  # what was left is kept through chained changes
    assert relative_error(back.network.theta, start) < 1e-8
    ones[0] = 1.0
    plain = found.refit().reweight(0, 1.0, linearization="moving")  # after a refit no gradient is left
    assert truth.gradient(plain.network.theta, x, y, ones).abs().max() < 1e-7
    assert torch.equal(nn.utils.parameters_to_vector(module.parameters()).detach(), start), "the caller's has moved"


@pytest.mark.filterwarnings("ignore:the network is not at a minimum")
@pytest.mark.slow
def test_changes_can_follow_fixed_ones():
    """From a displaced posterior, exact or not, the moving one is that of both changes."""
    module, x, y = network(), inputs(), labels()
    for structure in ("gp", "kfac"):
        found = ntkl.laplace(module, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(3.0), structure)
        at_once = found.remove([0, 4], linearization="moving").network.theta
        for after in (found.remove(0).remove(4, linearization="moving"),
                      found.remove(0, linearization="moving").remove(4, linearization="moving"),
                      found.add(x[:1], y[:1]).remove([0, 4, 9], linearization="moving")):
            assert relative_error(after.network.theta, at_once) < 1e-7


@pytest.mark.filterwarnings("ignore:the network is not at a minimum")
def test_a_loader_is_read_again_and_arrays_are_not_copied():
    module, x, y = network(), inputs(), labels()
    data = TensorDataset(x, y)
    prior = ntkl.GaussianPrior(2.0)
    whole = ntkl.laplace(module, (x, y), ntkl.Categorical(), prior).remove(2, linearization="moving")
    batched = ntkl.laplace(module, DataLoader(data, batch_size=4), ntkl.Categorical(), prior)
    assert relative_error(batched.remove(2, linearization="moving").network.theta, whole.network.theta) < 1e-9
    assert whole.network.theta.dtype == torch.float64
    kept = ntkl.laplace(module, (x, y), ntkl.Categorical(), prior).fitted.structure.source
    assert next(iter(kept))[0].data_ptr() == x.data_ptr()


@pytest.mark.filterwarnings("ignore:the network is not at a minimum")
def test_data_that_are_gone(tmp_path):
    module, x, y = network(), inputs(), labels()
    own = x.clone()
    found = ntkl.laplace(module, (own, y), ntkl.Categorical(), ntkl.GaussianPrior(2.0))
    before = found.remove(2, linearization="moving").network.theta
    found.save(tmp_path / "fit.pt", include_data=True)
    with refused(ntkl.DataError, "training inputs x", "none", "[Ll]oad the checkpoint with its data"):
        ntkl.load(tmp_path / "fit.pt", module).remove(2, linearization="moving")
    again = ntkl.load(tmp_path / "fit.pt", module, data=(x, y)).remove(2, linearization="moving")
    assert torch.equal(again.network.theta, before)
    own.zero_()  # the caller has changed the data in place
    with refused(ntkl.DataError, "the inputs of the fit", "differ by", "same inputs"):
        found.remove(2, linearization="moving")


@pytest.mark.filterwarnings("ignore:the network is not at a minimum")
@pytest.mark.slow
def test_float32_networks_and_kinks():
    """A float32 network reaches its rounding; one with kinks is told where it ends early."""
    module, x, y = network().float(), inputs().float(), labels()
    found = ntkl.laplace(module, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(2.0)).remove(2, linearization="moving")
    double = ntkl.laplace(copy.deepcopy(module).double(), (x.double(), y), ntkl.Categorical(), ntkl.GaussianPrior(2.0))
    want = double.remove(2, linearization="moving").network.theta
    assert relative_error(found.network.theta, want) < 1e-4 and found.network.theta.dtype == torch.float32
    x, y = torch.ones(3, 1).double(), torch.tensor([[0.5], [-1.0], [-1.0]]).double()
    kinked = nn.Sequential(nn.Linear(1, 1, bias=False), Distance()).double()
    with torch.no_grad():
        kinked[0].weight.fill_(0.5)
    with pytest.warns(ntkl.NTKLaplaceWarning, match="not at its optimum.*kinks"):
        posterior = ntkl.laplace(kinked, (x, y), ntkl.Gaussian(0.1), ntkl.GaussianPrior())
        posterior.refit().remove(0, linearization="moving")


@pytest.mark.filterwarnings("ignore:the network is not at its optimum")
def test_inputs_on_a_kink_are_no_missing_second_derivative():
    """As at an optimum of ReLU units: there a difference of gradients is no derivative."""
    x, y = torch.ones(6, 1).double(), torch.tensor([0, 1, 1, 0, 1, 1])
    relu = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 2)).double()
    with torch.no_grad():
        relu[0].bias.copy_(-relu[0].weight[0])
    posterior = ntkl.laplace(relu, (x, y), ntkl.Categorical())
    found = posterior.remove(0, linearization="moving")
    assert found.log_marginal_likelihood().isfinite()
    theta, likelihood = posterior.network.theta, likelihood_of(posterior.fitted, "nn", x, 1)
    noise = torch.randn(len(theta), generator=torch.Generator().manual_seed(0)).double()
    assert likelihood.hessian_gap(theta, noise) > 0.2 > likelihood.hessian_gap(theta + 0.01, noise)


def test_strong_curvature_in_float32_is_no_missing_second_derivative():
    """As behind a normalization of inputs that a prior has made small: large differences of gradients are wrong."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 3))
    with torch.no_grad():
        module[0].weight.mul_(0.01)
    found = ntkl.laplace(module, (inputs()[:, :4].float(), labels()), ntkl.Categorical())
    theta, likelihood = found.network.theta, likelihood_of(found.fitted, "nn", inputs()[:, :4].float(), 1)
    likelihood.require_second_derivatives(theta)


@pytest.mark.parametrize("smaller", [1.0, 20.0])
def test_kinks_in_float32_are_no_missing_second_derivative(smaller: float):
    """ReLU units of a training put examples on their kinks, and a prior may make the weights of one layer small.

    A backward pass that cannot be differentiated is refused behind them all the same.
    """
    torch.manual_seed(1)
    x = torch.randn(200, 10)
    y = (x[:, 0] * x[:, 1] > 0).long()
    module = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(module.parameters(), 1e-2, weight_decay=1e-3)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        module[0].weight.div_(smaller)
        module[0].bias.div_(smaller)
        module[2].weight.mul_(smaller)
    found = ntkl.laplace(module, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(0.2))
    likelihood_of(found.fitted, "nn", x, 1).require_second_derivatives(found.network.theta)
    fused = ntkl.laplace(nn.Sequential(module, Lost()), (x, y), ntkl.Categorical(), ntkl.GaussianPrior(0.2))
    with refused(ntkl.UnsupportedError, "second derivatives", "differ by", "relinearize"):
        likelihood_of(fused.fitted, "nn", x, 1).require_second_derivatives(fused.network.theta)


@pytest.mark.filterwarnings("ignore:the network is not at a minimum")
def test_a_network_far_from_a_minimum_is_told(monkeypatch: pytest.MonkeyPatch):
    """Not that its objective has kinks, which it has not."""
    monkeypatch.setattr(tuning, "NEWTON_STEPS", 1)
    monkeypatch.setattr(tuning, "MOST_QUASI_NEWTON_STEPS", 1)
    posterior = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(), ntkl.GaussianPrior(2.0))
    with pytest.warns(ntkl.NTKLaplaceWarning, match="still falls.*train the network to convergence"):
        posterior.remove([0, 1, 2, 3], linearization="moving")
    with pytest.warns(ntkl.NTKLaplaceWarning, match="for 2 of 3 changes after up to .* still falls"):
        posterior.what_ifs([[0, 1, 2, 3], [], [4, 5, 6]])
    with pytest.warns(ntkl.NTKLaplaceWarning, match="still falls") as told:
        posterior.refit(linearization="moving")  # which changes no data, and is no remedy of itself
    assert "at a minimum" in str(told[0].message)
    assert not any(words in str(told[0].message) for words in ("changed data", "refit"))


@pytest.mark.slow
def test_the_corrected_preconditioner_is_made_once(monkeypatch: pytest.MonkeyPatch):
    """And anew where the hyperparameters have changed: of the other fit, it has the other fit's minima."""
    made: list[int] = []

    class Counted(Deflated):
        def __init__(self, *arguments: Any) -> None:
            made.append(1)
            super().__init__(*arguments)

    monkeypatch.setattr(objectives, "Deflated", Counted)
    posterior = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(), ntkl.GaussianPrior(2.0)).refit()
    posterior.relabel(0, labels()[1], linearization="moving")  # preconditioned by the Hessian of the fit's labels too
    first = posterior.remove(2, linearization="moving").network.theta
    assert torch.equal(posterior.what_ifs([[2]]).thetas[0], first) and len(made) == 1
    posterior.what_ifs([[2]], linearization="fixed")
    assert len(made) == 1  # the fit is the Hessian of the linearized model
    posterior.prior.precision = 3.0
    again = posterior.remove(2, linearization="moving").outputs(inputs())
    assert len(made) == 2
    monkeypatch.setattr(tuning, "DEFLATION", 0)
    other = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(), ntkl.GaussianPrior(2.0)).refit()
    other.prior.precision = 3.0
    assert relative_error(again, other.remove(2, linearization="moving").outputs(inputs())) < 1e-7  # of a symmetric one


class Distance(nn.Module):
    """|w x - 0.2|: the kink is where the objective is least."""

    def forward(self, f):
        return (f - 0.2).abs()


class Once(torch.autograd.Function):
    """Without a second derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient * (1 - ctx.saved_tensors[0].tanh() ** 2)


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        return Once.apply(self.inner(x))


class Lost(nn.Module):
    """Hyperbolic tangents, whose backward pass cannot be differentiated."""

    def forward(self, f):
        return Once.apply(f)


class Length(nn.Module):
    """|0 f| + f: the length has a subgradient at zero, and NaN as its second derivative."""

    def forward(self, f):
        return f + (0.0 * f).norm(dim=1, keepdim=True)


def test_what_makes_no_sense():
    found = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical())
    with refused(ntkl.UnsupportedError, 'linearization="fixed" or "moving"', "'other'", "moving"):
        found.remove(0, linearization="other")
    for steps in (3, 0, "all"):
        with refused(ntkl.HyperparameterError, "no steps=", "steps", "relinearize"):
            found.relabel(0, 1, steps=steps, linearization="moving")
    for layers in ([Fused()], [network(), Length()]):
        fused = ntkl.laplace(nn.Sequential(*layers), (inputs(), labels()), ntkl.Categorical())
        with refused(ntkl.UnsupportedError, "second derivatives", "differ by", "relinearize"):
            fused.remove(0, linearization="moving")
    for half in (torch.bfloat16, torch.float16):
        coarse = ntkl.laplace(network().to(half), (inputs().to(half), labels()), ntkl.Categorical())
        with refused(ntkl.UnsupportedError, "float32 or float64", f"one in {half}", r"network\.float"):
            coarse.remove(0, linearization="moving")
    with refused(ntkl.MemoryBudgetError, "fit into", "predicted need", "Take fewer"):
        small = replace(found.fitted.model, settings=ntkl.Settings(memory_budget=100))
        type(found)(found.fitted.derived(found.fitted.structure, small)).remove(0, linearization="moving")


def test_products_are_with_the_exact_hessian():
    """Gradients and Hessians of weighted data at several weights, by autograd over one value at a time."""
    module, x, y = network(), inputs(), labels()
    fitted = ntkl.laplace(module, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(2.0)).fitted
    truth = Brute(module, lambda f, t: torch.log_softmax(f, 0)[t], 2.0 * torch.ones_like(fitted.theta), 0.0)
    weights = torch.stack([torch.ones(9), torch.arange(9) % 3]).double()
    thetas = fitted.theta + 0.3 * torch.randn(2, len(fitted.theta), generator=torch.Generator().manual_seed(1)).double()
    vectors = torch.randn(2, len(fitted.theta), generator=torch.Generator().manual_seed(2)).double()
    likelihood, inverse = NetworkLikelihood.of(fitted, None, 2), fitted.solver.solve
    objective = ChangedObjectives(fitted, likelihood, weights, 0.1 * vectors[0], inverse)
    local = objective.local(thetas, torch.arange(2))
    products, (values, gradients) = local.products(vectors), objective.values_and_gradients(thetas, torch.arange(2))
    turned = objective.values_and_gradients(thetas.flip(0), torch.tensor([1, 0]))  # the data of other rows
    assert torch.equal(turned[0].flip(0), values) and relative_error(turned[1].flip(0), gradients) < 1e-14
    for i in range(2):
        value = functools.partial(truth.value, x=x, y=y, weights=weights[i])
        assert relative_error(values[i], value(thetas[i]) - 0.1 * vectors[0] @ thetas[i]) < 1e-12
        gradient = truth.gradient(thetas[i], x, y, weights[i]) - 0.1 * vectors[0]
        assert relative_error(local.gradients[i], gradient) < 1e-12 > relative_error(gradients[i], gradient)
        assert relative_error(products[i], hessian(value)(thetas[i]) @ vectors[i]) < 1e-12


def test_layers_that_may_be_rotated_against_each_other_converge():
    """A minimum is a whole orbit of weights; the outputs are those of training from the same ones."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y, chosen = torch.randn(40, 5).double(), torch.randint(3, (40,)), list(module.parameters())

    def train(weights: Tensor) -> Tensor:
        """Outputs where L-BFGS ends, which the module has then."""
        def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
            nn.utils.vector_to_parameters(torch.from_numpy(theta), chosen)
            loss = weights @ nn.functional.cross_entropy(module(x), y, reduction="none")
            loss = loss + 0.25 * sum(p.square().sum() for p in chosen)
            return loss.item(), nn.utils.parameters_to_vector(torch.autograd.grad(loss, chosen)).numpy()

        start = nn.utils.parameters_to_vector(chosen).detach().numpy()
        options = {"ftol": 0.0, "gtol": 1e-8, "maxiter": 5000, "maxfun": 5000, "maxcor": 50}
        objective(scipy.optimize.minimize(objective, start, jac=True, method="L-BFGS-B", options=options).x)
        return module(x).detach()

    train(torch.ones(40).double())
    trained, groups = copy.deepcopy(module.state_dict()), [[3], [8, 11], list(range(10))]
    posterior = ntkl.laplace(module, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(0.5))
    found = posterior.what_ifs(groups)
    assert bool(found.converged.all()) and bool((found.steps < 200).all())
    for group, f in zip(groups, found.outputs(x), strict=True):
        module.load_state_dict(trained)
        want = train(torch.ones(40).double().index_fill(0, torch.tensor(group), 0.0))
        assert relative_error(f, want) < 1e-6
