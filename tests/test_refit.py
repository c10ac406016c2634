"""mean="posterior": the optimum of the linearized model, beside the same model trained by L-BFGS; and what refuses."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from reference import jacobian, outputs, relative_error

LIKELIHOODS = {
    "bernoulli": (ntkl.Bernoulli, lambda f: (f > 0).double(),
                  lambda f, y: nn.functional.binary_cross_entropy_with_logits(f, y, reduction="sum")),
    "categorical": (ntkl.Categorical, lambda f: f.argmax(1),
                    lambda f, y: nn.functional.cross_entropy(f, y, reduction="sum")),
    "poisson": (ntkl.Poisson, lambda f: f.exp().round(), lambda f, y: (f.exp() - y * f).sum()),
}


X_NEW = torch.linspace(-1, 1, 12).view(4, 3).double()


@functools.cache
def case(likelihood: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A network far from the optimum, and saturated: where an undamped Newton step overshoots."""
    torch.manual_seed(3)
    x, teacher = torch.randn(25, 3).double(), nn.Linear(3, 3 if likelihood == "categorical" else 1).double()
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, teacher.out_features)).double()
    with torch.no_grad():
        y = LIKELIHOODS[likelihood][1](teacher(x) + 0.3 * torch.randn(25, teacher.out_features).double())
        network[2].weight.mul_(2.0 if likelihood == "poisson" else 12.0)
    return network.eval(), x, y


def fitted(likelihood: str, structure: str = "gp", **options) -> ntkl.Posterior:
    network, x, y = case(likelihood)
    prior = ntkl.GaussianPrior(torch.tensor([0.2, 1.5]), mean=0.1, groups="layer")
    return ntkl.laplace(network, (x, y), LIKELIHOODS[likelihood][0](), prior, structure, **options)


@functools.cache
def trained_linear_model(likelihood: str) -> Tensor:
    """Outputs at `X_NEW` of f + J(θ-θ*), θ by L-BFGS from θ*, and by Newton's steps to a vanishing gradient."""
    network, x, y = case(likelihood)
    theta = nn.utils.parameters_to_vector(network.parameters()).detach()
    precision = torch.tensor([0.2] * 20 + [1.5] * (len(theta) - 20)).double()
    f, jac, loss = outputs(network, x), jacobian(network, x), LIKELIHOODS[likelihood][2]
    scaled = torch.zeros_like(theta).requires_grad_()  # P0^½ (θ-θ*), whose Hessian is at least 1

    def objective(at: Tensor) -> Tensor:
        move = at / precision.sqrt()
        return loss(f + jac @ move, y) + 0.5 * (precision * (theta + move - 0.1).square()).sum()

    def closure() -> Tensor:
        scaled.grad = None
        value = objective(scaled)
        value.backward()
        return value

    options = {"max_iter": 500, "history_size": 60, "tolerance_grad": 1e-6, "tolerance_change": 0.0}
    torch.optim.LBFGS([scaled], line_search_fn="strong_wolfe", **options).step(closure)
    for _ in range(4):  # near the optimum values no longer differ, and a line search ends
        closure()
        with torch.no_grad():
            scaled -= torch.linalg.solve(torch.autograd.functional.hessian(objective, scaled.detach()), scaled.grad)
    closure()
    assert scaled.grad.norm() < 1e-11, "the reference did not converge"
    return outputs(network, X_NEW) + jacobian(network, X_NEW) @ (scaled.detach() / precision.sqrt())


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["gp", "full"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_mean_is_the_optimum_of_the_linear_model(likelihood: str, structure: str) -> None:
    posterior, x_new, expected = fitted(likelihood, structure), X_NEW, trained_linear_model(likelihood)
    assert relative_error(posterior.latent_moments(x_new, mean="posterior")[0], expected) < 1e-8
    assert relative_error(posterior.latent(x_new, mean="posterior").mean, expected) < 1e-8
    # one step alone overshoots from here
    rows = posterior.jacobian(x_new)
    once = rows.f - rows.jvp(posterior.network.unflatten(posterior.fitted.newton_step()))
    assert relative_error(once, expected) > 0.05
    # the covariance is that of the posterior, at the trained outputs
    covariances = [posterior.latent_moments(x_new, mean=mean)[1] for mean in ("map", "posterior")]
    assert torch.equal(*covariances)


def test_the_optimum_is_found_once_and_follows_the_hyperparameters(monkeypatch) -> None:
    posterior, (_, x, _), calls = fitted("categorical"), case("categorical"), []
    structure = type(posterior.fitted.structure)
    whole = structure.solve_at

    def counted(*arguments):
        calls.append(1)
        return whole(*arguments)

    monkeypatch.setattr(structure, "solve_at", counted)
    first = posterior.latent_moments(x, mean="posterior")[0]
    count = len(calls)
    assert torch.equal(posterior.latent_moments(x, mean="posterior")[0], first) and len(calls) == count > 2
    posterior.prior.precision = torch.tensor([2.0, 3.0])
    assert relative_error(posterior.latent_moments(x, mean="posterior")[0], first) > 0.01


@pytest.mark.slow
def test_a_what_if_is_refitted_to_its_own_points() -> None:
    """Nothing is held in `mean="posterior"`: of the posterior without points it is that of the rest of the data."""
    network, x, y = case("bernoulli")
    kept = torch.arange(25) % 6 != 2
    prior = ntkl.GaussianPrior(torch.tensor([0.2, 1.5]), mean=0.1, groups="layer")
    rest = ntkl.laplace(network, (x[kept], y[kept]), ntkl.Bernoulli(), prior)
    expected = rest.latent_moments(x, mean="posterior")[0]
    for steps in (1, None):
        changed = fitted("bernoulli").remove((~kept).nonzero().squeeze(1), steps=steps)
        assert relative_error(changed.latent_moments(x, mean="posterior")[0], expected) < 1e-8


@pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")
def test_what_has_no_optimum_of_its_own_refuses(tmp_path) -> None:
    network, x, _ = case("categorical")
    for options in ({"structure": "kfac"}, {"structure": "diag"}, {"curvature": "ef"}):
        posterior = fitted("categorical", **options)
        with pytest.raises(ntkl.UnsupportedError, match=r'"full" or "iterative" and curvature="ggn".*leave mean='):
            posterior.predict(x, mean="posterior")
        assert posterior.predict(x).probs.isfinite().all()
    posterior = fitted("categorical", "full")
    posterior.save(tmp_path / "full.pt")
    with pytest.raises(ntkl.UnsupportedError, match="training data"):
        ntkl.load(tmp_path / "full.pt", network).latent_moments(x, mean="posterior")


class Wavy(ntkl.Likelihood):
    """A score of f that grows without end, with a curvature that is always 1."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return f.abs().sqrt().sum(1) + f.abs().sum(1) ** 3

    def targets(self, y, n, c):
        return y.to(torch.float64).reshape(n, c)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda one: one.abs().sqrt().sum() + one.abs().sum() ** 3))(f)

    def curvature(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.eye(f.shape[1], dtype=f.dtype).expand(len(f), -1, -1)

    def root(self, f: Tensor, y: Tensor) -> Tensor:
        return self.curvature(f, y)


def test_an_objective_without_an_optimum_raises_an_error() -> None:
    network, x, _ = case("bernoulli")
    posterior = ntkl.laplace(network, (x, torch.zeros(25, 1).double()), Wavy())
    with pytest.raises(ntkl.NumericalError, match=r"optimum within|objective fall"):
        posterior.latent_moments(x, mean="posterior")


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_a_noise_that_goes_to_zero_is_no_optimum(seed: int) -> None:
    torch.manual_seed(seed)
    network, x, y = nn.Linear(8, 2).double(), torch.randn(6, 8).double(), torch.randn(6, 1).double()
    posterior = ntkl.laplace(network, (x, y), ntkl.HeteroscedasticGaussian(), ntkl.GaussianPrior(0.1))
    with pytest.raises(ntkl.NumericalError, match="noise of zero"):
        posterior.refit()


def test_an_empty_change_warns_that_it_is_no_refit() -> None:
    posterior, (_, x, y) = fitted("categorical"), case("categorical")
    for steps in (None, 3):
        with pytest.warns(ntkl.NTKLaplaceWarning, match=r"is unchanged; refit\(\) goes"):
            same = posterior.remove([], steps=steps)
        assert relative_error(same.outputs(x), posterior.outputs(x)) < 1e-12
        with pytest.warns(ntkl.NTKLaplaceWarning, match="no training point is changed"):
            posterior.relabel([2], y[2], steps=steps)
        with pytest.warns(ntkl.NTKLaplaceWarning, match="no training point is changed"):
            posterior.reweight([2, 3], 1.0, steps=steps)
    posterior.remove([])  # one step is what it says: nothing is held back
    once = posterior.remove([1, 4])
    exact = once.remove([], steps=None)  # the earlier change goes on to its optimum
    assert relative_error(exact.outputs(x), posterior.remove([1, 4], steps=None).outputs(x)) < 1e-9
