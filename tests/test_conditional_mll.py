"""The conditional marginal likelihood of GPyTorch models, against conditioned Gaussians by dense algebra."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import InducingPointKernel, MultitaskKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, MultitaskMean
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from gpytorch.priors import GammaPrior
from gpytorch.utils.grid import ScaleToBounds
from linear_operator.operators import BlockDiagLinearOperator
from torch import Tensor, nn

import ntk_laplace as ntkl
from exact_cases import TURNS, fit, ids
from ntk_laplace import errors
from ntk_laplace.gp import ConditionalMarginalLogLikelihood, LaplaceGP
from ntk_laplace.posterior.scores import orders
from refusals import inputs, labels, network, refused
from registry_cases import tolerance

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")
N = 12


class Model(gpytorch.models.ExactGP):
    """An exact GP of any mean and kernel, of features of the inputs if there are any."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, mean: Any, kernel: Any, features: Any = None) -> None:
        super().__init__(x, y, likelihood)
        self.mean, self.kernel, self.features = mean, kernel, nn.Identity() if features is None else features

    def forward(self, x: Tensor) -> Any:
        z = self.features(x)
        if not isinstance(self.mean, MultitaskMean):
            return gpytorch.distributions.MultivariateNormal(self.mean(z), self.kernel(z))
        if isinstance(self.kernel, MultitaskKernel):
            return gpytorch.distributions.MultitaskMultivariateNormal(self.mean(z), self.kernel(z))
        covariance = BlockDiagLinearOperator(self.kernel(z))
        return gpytorch.distributions.MultitaskMultivariateNormal(self.mean(z), covariance, interleaved=False)


def data(*batch: int, tasks: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(*batch, N, 2, generator=generator).double()
    y = torch.randn(*batch, N, *([tasks] if tasks else []), generator=generator).double() + 0.7
    return x, y


def moved(model: Model) -> Model:
    """Every hyperparameter at a value of its own."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double()


def plain() -> Model:
    return moved(Model(*data(), GaussianLikelihood(), ConstantMean(), ScaleKernel(RBFKernel(ard_num_dims=2))))


def noises() -> Model:
    likelihood = FixedNoiseGaussianLikelihood(torch.linspace(0.1, 0.9, N).double(), learn_additional_noise=True)
    return moved(Model(*data(), likelihood, ConstantMean(), ScaleKernel(RBFKernel())))


def batches() -> Model:
    shape = torch.Size([3])
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2, batch_shape=shape), batch_shape=shape)
    return moved(Model(*data(3), GaussianLikelihood(batch_shape=shape), ConstantMean(batch_shape=shape), kernel))


def tasks() -> Model:
    kernel = MultitaskKernel(RBFKernel(), num_tasks=2, rank=1)
    likelihood = MultitaskGaussianLikelihood(num_tasks=2)
    return moved(Model(*data(tasks=2), likelihood, MultitaskMean(ConstantMean(), num_tasks=2), kernel))


def apart() -> Model:
    """Independent tasks, whose joint covariance has all examples of a task together."""
    mean, shape = MultitaskMean(ConstantMean(), num_tasks=2), torch.Size([2])
    kernel = ScaleKernel(RBFKernel(batch_shape=shape), batch_shape=shape)
    return moved(Model(*data(tasks=2), MultitaskGaussianLikelihood(num_tasks=2), mean, kernel))


def priors() -> Model:
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(3.0, 6.0)), outputscale_prior=GammaPrior(2.0, 0.15))
    return moved(Model(*data(), GaussianLikelihood(noise_prior=GammaPrior(1.1, 0.05)), ConstantMean(), kernel))


def inducing() -> Model:
    """Its kernel adds a loss term."""
    likelihood = GaussianLikelihood()
    kernel = InducingPointKernel(ScaleKernel(RBFKernel()), data()[0][:4].clone(), likelihood)
    return moved(Model(*data(), likelihood, ConstantMean(), kernel))


class Counted(ScaleToBounds):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def deep() -> Model:
    features = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2), Counted(-1.0, 1.0))
    return moved(Model(*data(), GaussianLikelihood(), ConstantMean(), ScaleKernel(RBFKernel()), features))


MODELS: dict[str, Callable[[], Model]] = {
    "plain": plain, "noises": noises, "batches": batches, "tasks": tasks, "apart": apart, "priors": priors, 
    "inducing": inducing, "deep": deep,
}


def conditional(mean: Tensor, covariance: Tensor, y: Tensor, given: Tensor, asked: Tensor) -> Tensor:
    """log N(y asked; its mean and covariance given the others), by inverses."""
    gain = covariance[asked][:, given] @ torch.linalg.inv(covariance[given][:, given])
    centre = mean[asked] + gain @ (y - mean)[given]
    spread = covariance[asked][:, asked] - gain @ covariance[given][:, asked]
    return torch.distributions.MultivariateNormal(centre, 0.5 * (spread + spread.T)).log_prob(y[asked])


def others(mll: ExactMarginalLogLikelihood) -> Tensor:
    """Log densities of priors and added loss terms, by hand."""
    terms = [prior.log_prob(closure(module)).sum() for _, module, prior, closure, _ in mll.model.named_priors()]
    terms += [term.loss().sum() for term in mll.model.added_loss_terms()]
    return torch.stack([torch.zeros(()).double(), *terms]).sum()


@pytest.mark.parametrize("name", MODELS)
def test_the_value_is_the_density_of_the_others_given_the_first(name):
    """[L22] Eq. 5, 19 by conditioning, order for order, example for example with all its tasks; per number asked."""
    model = MODELS[name]()
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, share=0.6, orders=3, fresh=False, seed=5)
    output, y = model(*model.train_inputs), model.train_targets
    value, noisy = mll(output, y), model.likelihood(output, *model.train_inputs)
    assert value.shape == output.batch_shape
    assert mll.num_given(N) == 7
    per = 2 if name in ("tasks", "apart") else 1
    rows = torch.arange(N * per).view(N, per)
    covariance = noisy.covariance_matrix.reshape(-1, N * per, N * per)
    if name == "apart":
        covariance = covariance.view(per, N, per, N).permute(1, 0, 3, 2).reshape(1, N * per, N * per)
    means, targets = noisy.mean.reshape(-1, N * per), y.reshape(-1, N * per)
    for mean, matrix, target, found in zip(means, covariance, targets, value.reshape(-1), strict=True):
        each = [
            conditional(mean, matrix, target, rows[order[:7]].flatten(), rows[order[7:]].flatten())
            for order in orders(N, 3, 5)
        ]
        expected = (torch.stack(each).mean() + others(mll)) / (5 * per)
        assert found.item() == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"apart"}))
def test_given_no_points_it_is_the_exact_marginal_likelihood_of_gpytorch(name):
    """Not of "apart": GPyTorch 1.15.2 reads the targets of a covariance that is not interleaved in a wrong order."""
    model = MODELS[name]()
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, share=0.0, orders=2)
    output = model(*model.train_inputs)
    exact = ExactMarginalLogLikelihood(model.likelihood, model)(output, model.train_targets, *model.train_inputs)
    assert torch.allclose(mll(output, model.train_targets, *model.train_inputs), exact, rtol=1e-10)


def test_given_all_but_one_point_it_is_leave_one_out():
    """Each order asks for its last point: GPyTorch's pseudo likelihood is the mean over all points."""
    model = plain()
    output = model(*model.train_inputs)
    model.kernel.zero_grad()
    found = {}
    for seed in range(80):  # until each point was the last one
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model, share=1 - 1 / N, seed=seed)
        last = int(torch.randperm(N, generator=torch.Generator().manual_seed(seed))[-1])
        found[last] = mll(output, model.train_targets)
    assert len(found) == N
    pseudo = LeaveOneOutPseudoLikelihood(model.likelihood, model)(output, model.train_targets)
    assert torch.stack(list(found.values())).mean().item() == pytest.approx(pseudo.item(), rel=1e-10)


@pytest.mark.parametrize("name", ["plain", "batches", "tasks", "priors", "deep"])
def test_the_gradient_is_that_of_finite_differences(name):
    """In every hyperparameter, and in the weights through the bounds of all points; no cached covariance takes part."""
    model = MODELS[name]()
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, share=0.5, orders=2, fresh=False, seed=1)

    def value() -> Tensor:
        return mll(model(*model.train_inputs), model.train_targets).sum()

    value().backward()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        step = torch.randn(parameter.shape, generator=generator).double()
        with torch.no_grad():
            ends = []
            for sign in (1, -1):
                parameter.add_(step, alpha=sign * 1e-5)
                ends.append(value().item())
                parameter.add_(step, alpha=-sign * 1e-5)
        slope = float((parameter.grad * step).sum())
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_features_are_scaled_once_for_all_points():
    model = deep()
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, orders=4)
    mll(model(*model.train_inputs), model.train_targets)
    assert model.features[-1].calls == 1


@pytest.mark.parametrize("size", [1, 10_000])
def test_no_iterative_method_takes_part(size):
    model = plain()
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, fresh=False)
    reference = mll(model(*model.train_inputs), model.train_targets)
    with gpytorch.settings.max_cholesky_size(size), gpytorch.settings.fast_computations(log_prob=size == 1):
        assert mll(model(*model.train_inputs), model.train_targets) == reference


def test_orders_are_fresh_or_fixed_and_are_reproducible():
    model = plain()
    torch.manual_seed(4)
    before = torch.get_rng_state()

    def values(mll: ConditionalMarginalLogLikelihood, count: int = 3) -> list[float]:
        return [mll(model(*model.train_inputs), model.train_targets).item() for _ in range(count)]

    fresh = ConditionalMarginalLogLikelihood(model.likelihood, model, share=0.7)
    first = values(fresh)
    assert len(set(first)) == 3
    assert values(copy.deepcopy(fresh), 1) == values(fresh, 1)
    assert values(ConditionalMarginalLogLikelihood(model.likelihood, model, share=0.7)) == first
    assert values(ConditionalMarginalLogLikelihood(model.likelihood, model, share=0.7, fresh=False)) == [first[0]] * 3
    assert values(ConditionalMarginalLogLikelihood(model.likelihood, model, share=0.7, seed=1)) != first
    mean = ConditionalMarginalLogLikelihood(model.likelihood, model, share=0.7, orders=3)
    assert values(mean, 1)[0] == pytest.approx(sum(first) / 3, rel=1e-12)
    assert torch.equal(torch.get_rng_state(), before)


def test_given_orders():
    """Two permutations of the caller's: the mean of both, at every call."""
    model, n = plain(), torch.arange(N)
    both = torch.stack([n, n.flip(0)])
    y = model.train_targets

    def value(orders: Tensor) -> float:
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model, share=0.6, orders=orders)
        return mll(model(*model.train_inputs), y).item()

    noisy = model.likelihood(model(*model.train_inputs))
    expected = [conditional(noisy.mean, noisy.covariance_matrix, y, order[:7], order[7:]).item() / 5 for order in both]
    assert [value(both[:1]), value(both[1:])] == pytest.approx(expected, rel=1e-9)
    assert value(both) == pytest.approx(sum(expected) / 2, rel=1e-9)
    for wrong in (n, n[None].double(), torch.zeros(1, N, dtype=torch.long), both[:0]):
        with refused(errors.HyperparameterError, "a permutation", "shape", "arange"):
            value(wrong)
    with refused(errors.HyperparameterError, "12 examples", "orders of 11", "all training examples"):
        value(torch.arange(11)[None])


@pytest.mark.parametrize(("share", "n", "m"), [(0.9, 100, 90), (0.29, 100, 29), (0.9, 5, 4), (0, 3, 0), (0.9, 1, 0)])
def test_the_number_of_points_given(share, n, m):
    model = plain()
    assert ConditionalMarginalLogLikelihood(model.likelihood, model, share=share).num_given(n) == m


# --- LaplaceGP


def laplace_value(gp: LaplaceGP, **options: Any) -> tuple[Tensor, int, int]:
    """The value, m, and the number by which it was divided."""
    mll = ConditionalMarginalLogLikelihood(gp.likelihood, gp, fresh=False, **options)
    n = gp.posterior.num_examples
    m = mll.num_given(n)
    value = mll(gp.train()(*gp.train_inputs), gp.train_targets)
    return value, m, (n - m) * (len(gp.train_targets) // n)


@pytest.mark.parametrize("case", TURNS[::3], ids=ids)
def test_of_a_laplace_gp_it_is_the_conditional_evidence_of_the_posterior(case):
    posterior = fit(*case, "gp")
    gp = LaplaceGP(posterior)
    if not len(gp.train_targets):
        pytest.skip("no rows at all")
    limit = tolerance(case[0], 1e-9)
    for share in (0.0, 0.5):
        value, m, numbers = laplace_value(gp, share=share, orders=2, seed=3)
        expected = float(posterior.conditional_log_marginal_likelihood(m, 2, 3))
        assert value.item() * numbers == pytest.approx(expected, rel=limit, abs=limit)


@pytest.mark.parametrize("observed", ["gaussian", "categorical"])
def test_its_gradient_in_the_hyperparameters_is_that_of_finite_differences(observed):
    y, likelihood = {"gaussian": (inputs()[:, :3], ntkl.Gaussian(torch.tensor([0.3, 0.4, 0.5]))),
                     "categorical": (labels(), ntkl.Categorical(1.3))}[observed]
    prior = ntkl.GaussianPrior(0.7, groups="layer")
    gp = LaplaceGP(network(), (inputs(), y), likelihood, prior)
    laplace_value(gp, share=0.5, orders=2)[0].backward()
    checked = 0
    for parameter in gp.parameters():
        for place in range(parameter.numel()):
            ends = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    parameter.view(-1)[place] += step
                    ends.append(laplace_value(gp, share=0.5, orders=2)[0].item())
                    parameter.view(-1)[place] -= step
            slope = float(parameter.grad.view(-1)[place])
            assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(slope, rel=1e-6, abs=1e-9)
            checked += 1
    assert checked == (5 if observed == "gaussian" else 3)


def test_leave_one_out_of_gpytorch_cannot_train_a_laplace_gp():
    """Whitened rows are no examples: its value means nothing, and its gradient is refused."""
    gp = LaplaceGP(network(), (inputs(), labels()), ntkl.Categorical()).train()
    value = LeaveOneOutPseudoLikelihood(gp.likelihood, gp)(gp(*gp.train_inputs), gp.train_targets)
    with refused(errors.UnsupportedError, "through the evidence", "solve", "loo_log_density"):
        value.backward()


# --- errors


class Approximate(gpytorch.models.ApproximateGP):
    def __init__(self) -> None:
        q = gpytorch.variational.CholeskyVariationalDistribution(3)
        super().__init__(gpytorch.variational.VariationalStrategy(self, torch.zeros(3, 1), q))


@pytest.mark.parametrize("share", [-0.1, 1, 1.5, math.nan, True, "0.9"])
def test_a_share_out_of_range(share):
    with refused(errors.HyperparameterError, "less than 1", r"True|nan|\d|0.9", "such as 0.9"):
        ConditionalMarginalLogLikelihood(plain().likelihood, plain(), share=share)


def test_a_share_of_numpy():
    assert ConditionalMarginalLogLikelihood(plain().likelihood, plain(), share=np.float32(0.5)).num_given(8) == 4


@pytest.mark.parametrize("orders", [0, -1, 1.5])
def test_too_few_orders(orders):
    with refused(errors.HyperparameterError, "at least 1", r"\d", "number of random orders"):
        ConditionalMarginalLogLikelihood(plain().likelihood, plain(), orders=orders)


def test_nothing_left_to_predict():
    mll = ConditionalMarginalLogLikelihood(plain().likelihood, plain(), share=1 - 1e-12)
    with refused(errors.HyperparameterError, "at least one point", "5 of 5", "smaller share"):
        mll.num_given(5)


def test_models_and_outputs_that_are_not_exact():
    model, labels_only = plain(), gpytorch.likelihoods.BernoulliLikelihood()
    for wrong, likelihood in ((Approximate(), GaussianLikelihood()), (model, labels_only)):
        with refused(errors.UnsupportedError, "an ExactGP", "Approximate|Bernoulli", "conditional_from_samples"):
            ConditionalMarginalLogLikelihood(likelihood, wrong)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model)
    with refused(errors.UnsupportedError, "Gaussian output", "Tensor", "train_inputs"):
        mll(torch.zeros(N), model.train_targets)
    with gpytorch.settings.observation_nan_policy("mask"):
        with refused(errors.UnsupportedError, "all observed", "mask", "without a target"):
            mll(model(*model.train_inputs), model.train_targets)
    for wrong in (model.train_targets[:, None], model.train_targets[:4]):
        with refused(errors.DataError, rf"targets \(\.\.\., {N}\)", rf"\({len(wrong)},", "train_targets"):
            mll(model(*model.train_inputs), wrong)
    output = model.eval()(torch.zeros(3, 2).double())
    with refused(errors.UnsupportedError, "training mode", "eval", "train"):
        mll(output, model.train_targets)
    gp = LaplaceGP(network(), (inputs(), labels()), ntkl.Categorical()).train()
    mll = ConditionalMarginalLogLikelihood(gp.likelihood, gp)
    with refused(errors.UnsupportedError, "zero", "others", "gp.train_targets"):
        mll(gp(*gp.train_inputs), gp.train_targets + 1)


def test_a_second_derivative_is_refused() -> None:
    x, y = data()
    likelihood = GaussianLikelihood().double()
    model = Model(x, y, likelihood, ConstantMean(), ScaleKernel(RBFKernel())).double()
    posterior = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical())
    laplace = LaplaceGP(posterior)
    for gp, parameter in ((model, model.kernel.raw_outputscale), (laplace, laplace.prior.log_precision)):
        value = ConditionalMarginalLogLikelihood(gp.likelihood, gp, 0.5)(gp(*gp.train_inputs), gp.train_targets)
        with refused(errors.UnsupportedError, "first derivative", "create_graph", "finite differences"):
            torch.autograd.grad(value, parameter, create_graph=True)
