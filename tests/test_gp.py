"""NTKKernel: GPyTorch's own test case, dense references for values and gradients, and life among other kernels."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
import unittest
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import Kernel, MultitaskKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from gpytorch.test.base_kernel_test_case import BaseKernelTestCase
from packaging.version import Version
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.gp import NTKKernel
from ntk_laplace.jacobian import JacobianPass
from reference import jacobian, jacobian_by_func, relative_error
from registry import NETWORKS, PRIORS, Problem, fresh
from registry_cases import jacobians

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")

VALUES = ("deep_mlp", "cnn_groups", "resnet_batchnorm", "transformer_tied", "lstm", "scalar_outputs", "layer_twice",
          "frozen_part", "direct_parameters")


class AnyWidth(nn.Module):
    """A network of as many features as the case has."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.lift, self.out = nn.Parameter(torch.randn(5)), nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x.sum(1, keepdim=True) * self.lift))


class _Suite(BaseKernelTestCase):
    outputs: int

    def create_kernel_no_ard(self, **kwargs: Any) -> NTKKernel:
        return NTKKernel(AnyWidth(self.outputs), ntkl.GaussianPrior(2.0, groups="layer"), **kwargs)


class TestGPyTorchsOwnCasesWithOneOutput(_Suite, unittest.TestCase):
    outputs = 1


class TestGPyTorchsOwnCasesWithThreeOutputs(_Suite, unittest.TestCase):
    outputs = 3


# --- values and gradients


def flat(x: Tensor) -> Tensor:
    """Rows of floats, as GPyTorch carries inputs, token ids included."""
    return x.flatten(1).double() if x.dim() > 1 else x.double().unsqueeze(1)


def kernel_of(case: Problem, prior: str, **options: Any) -> NTKKernel:
    ids = None if case.x.is_floating_point() else case.x.dtype
    return NTKKernel(case.network, PRIORS[prior].build(case), case.x.shape[1:], ids, **options)


def dense_gram(one: Tensor, two: Tensor, precision: Tensor) -> Tensor:
    return (one.flatten(0, 1) / precision) @ two.flatten(0, 1).T


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("name", VALUES)
def test_values_are_the_dense_ones(name: str, prior: str) -> None:
    case = fresh(name)
    kernel, precision = kernel_of(case, prior), PRIORS[prior].dense(case)[0]
    x, z = flat(case.x), flat(case.x_new)
    j, k = jacobians(name)
    assert relative_error(kernel(x).to_dense(), dense_gram(j, j, precision)) < 1e-10
    assert relative_error(kernel(x, z).to_dense(), dense_gram(j, k, precision)) < 1e-10
    assert relative_error(kernel(x, diag=True), dense_gram(j, j, precision).diagonal()) < 1e-10
    m = len(z)
    assert relative_error(kernel(x[:m], z, diag=True), dense_gram(j[:m], k, precision).diagonal()) < 1e-10
    assert kernel.num_outputs_per_input(x, z) == NETWORKS[name].outputs


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("name", ("deep_mlp", "transformer_tied", "cnn_groups"))
def test_gradients_are_those_of_the_dense_expression(name: str, prior: str) -> None:
    case = fresh(name)
    kernel = kernel_of(case, prior)
    x, z = flat(case.x), flat(case.x_new)
    j, k = jacobian(case.network, case.x), jacobian(case.network, case.x_new)
    m = len(z)

    def both(values: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
        upstream = torch.randn_like(dense)
        (mine,) = torch.autograd.grad(values, kernel.prior.log_precision, upstream)
        (truth,) = torch.autograd.grad(dense, kernel.prior.log_precision, upstream)
        return mine, truth

    precision = kernel.prior.flat_precision()
    for values, dense in (
        (kernel(x).to_dense(), dense_gram(j, j, precision)),
        (kernel(x, z).to_dense(), dense_gram(j, k, kernel.prior.flat_precision())),
        (kernel(x, diag=True), dense_gram(j, j, kernel.prior.flat_precision()).diagonal()),
        (kernel(x[:m], z, diag=True), dense_gram(j[:m], k, kernel.prior.flat_precision()).diagonal()),
    ):
        assert relative_error(*both(values, dense)) < 1e-10


@pytest.mark.slow
def test_gradients_over_many_tiles() -> None:
    """Tiles below the diagonal stand for both triangles."""
    case = fresh("deep_mlp")
    kernel = kernel_of(case, "tensor")
    x = torch.randn(600, case.x.shape[1]).double()  # 3,000 rows: three tiles each way
    upstream, j = torch.randn(3000, 3000).double(), jacobian_by_func(case.network, x)
    (mine,) = torch.autograd.grad(kernel(x).to_dense(), kernel.prior.log_precision, upstream)
    dense = dense_gram(j, j, kernel.prior.flat_precision())
    (truth,) = torch.autograd.grad(dense, kernel.prior.log_precision, upstream)
    assert relative_error(mine, truth) < 1e-10


def test_a_second_derivative_is_refused() -> None:
    kernel, x = NTKKernel(AnyWidth(2).double()), torch.randn(4, 3).double()
    for value in (kernel(x).to_dense().square().sum(), kernel(x).to_dense().sum()):
        with pytest.raises(ntkl.errors.UnsupportedError, match="first derivative of the kernel"):
            torch.autograd.grad(value, kernel.prior.log_precision, create_graph=True)


def test_batches_are_one_kernel_after_another() -> None:
    kernel = NTKKernel(AnyWidth(2).double(), ntkl.GaussianPrior(3.0, groups="tensor"))
    x, z, shared = torch.randn(2, 3, 5, 4).double(), torch.randn(3, 6, 4).double(), torch.randn(5, 4).double()
    cross = kernel(x, z).to_dense()
    assert cross.shape == (2, 3, 10, 12)
    for i in range(2):
        for j in range(3):
            assert relative_error(cross[i, j], kernel(x[i, j], z[j]).to_dense()) < 1e-12
    whole, cut = x[0, 0].view(1, 5, 4)[:, :4], x[0, 0, :4].view(2, 2, 4)  # one content, two ways of cutting it
    assert relative_error(kernel(whole, cut).to_dense()[1], kernel(whole[0], cut[1]).to_dense()) < 1e-12
    upstream = torch.randn(3, 10, 10).double()
    assert relative_error(kernel(shared, z[:, :5]).to_dense()[1], kernel(shared, z[1, :5]).to_dense()) < 1e-12
    (mine,) = torch.autograd.grad(kernel(x[0]).to_dense(), kernel.prior.log_precision, upstream)
    parts = [torch.autograd.grad(kernel(a).to_dense(), kernel.prior.log_precision, g)[0]
             for a, g in zip(x[0], upstream, strict=True)]
    assert relative_error(mine, sum(parts)) < 1e-12


def test_kernels_cut_from_a_batch_share_the_precisions() -> None:
    kernel = NTKKernel(AnyWidth(1).double(), batch_shape=torch.Size([2]))
    x = torch.randn(2, 4, 3).double()
    (slope,) = torch.autograd.grad(kernel(x)[0].to_dense().sum(), kernel.prior.log_precision)
    assert relative_error(slope, -kernel[0](x[0]).to_dense().sum().reshape(1)) < 1e-12
    with pytest.raises(RuntimeError, match="Cannot expand"):
        kernel.expand_batch(torch.Size([3]))


# --- Jacobians are made once


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of examples whose Jacobians were computed, call by call."""
    seen: list[int] = []
    original = JacobianPass.rows

    def counted(self: JacobianPass, x: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(len(x))
        return original(self, x, *arguments, **options)

    monkeypatch.setattr(JacobianPass, "rows", counted)
    return seen


class Regression(gpytorch.models.ExactGP):
    """An ordinary multitask model of GPyTorch."""

    def __init__(self, x: Tensor, y: Tensor, kernel: Kernel) -> None:
        super().__init__(x, y, MultitaskGaussianLikelihood(num_tasks=y.shape[1], rank=0, has_task_noise=False))
        self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ZeroMean(), num_tasks=y.shape[1])
        self.covar_module = kernel

    def forward(self, x: Tensor) -> MultitaskMultivariateNormal:
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


class Exact(gpytorch.models.ExactGP):
    """The same with one output."""

    def __init__(self, x: Tensor, y: Tensor, kernel: Kernel) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), kernel

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def combined(kind: str, tasks: int) -> tuple[Kernel, NTKKernel]:
    torch.manual_seed(7)
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, tasks)).double()
    ntk = NTKKernel(network, ntkl.GaussianPrior(2.0, groups="layer"))
    rbf = MultitaskKernel(RBFKernel(), num_tasks=tasks, rank=1).double()
    kernels = {
        "alone": lambda: ntk,
        "sum": lambda: rbf + ntk,
        "sum, first": lambda: ntk + rbf,
        "scale": lambda: ScaleKernel(ntk),
        "product": lambda: ntk * rbf,
        "scaled product and sum": lambda: ScaleKernel(ntk * rbf) + ntk,
    }
    return kernels[kind]().double(), ntk


KINDS = ("alone", "sum", "sum, first", "scale", "product", "scaled product and sum")


def log_normal(y: Tensor, covariance: Tensor) -> Tensor:
    factor = torch.linalg.cholesky(covariance)
    half = torch.linalg.solve_triangular(factor, y.reshape(-1, 1), upper=False)
    log_det = 2 * factor.diagonal().log().sum()
    return -0.5 * (half.square().sum() + log_det + y.numel() * math.log(2 * math.pi))


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_models_train_and_predict(kind: str, passes: list[int]) -> None:
    """The objective, its gradients and the prediction are those of dense algebra; training makes no new Jacobian."""
    x, z = torch.randn(12, 3).double(), torch.randn(5, 3).double()
    y = torch.stack([x.sum(1), x.prod(1)], 1) + 0.1 * torch.randn(12, 2).double()
    kernel, _ = combined(kind, 2)
    model = Regression(x, y, kernel).double().train()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    value = objective(model(x), y) * y.numel()
    named = dict(model.named_parameters())
    slopes = torch.autograd.grad(value, list(named.values()))

    # the same from plain matrices of the same parts
    noise = model.likelihood.noise
    covariance = kernel(x).to_dense() + noise * torch.eye(24).double()
    truth = log_normal(y, covariance)
    assert relative_error(value, truth) < 1e-9
    for mine, true in zip(slopes, torch.autograd.grad(truth, list(named.values())), strict=True):
        assert relative_error(mine, true) < 1e-8

    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(8):
        optimizer.zero_grad()
        loss = -objective(model(x), y)
        loss.backward()
        optimizer.step()
    assert -loss.item() * y.numel() > value.item()
    assert sum(passes) == 12, "training made Jacobians anew"

    model.eval()
    with torch.no_grad():
        latent = model(z)
        covariance = kernel(x).to_dense() + model.likelihood.noise * torch.eye(24).double()
        cross, joint = kernel(z, x).to_dense(), kernel(z).to_dense()
        solved = torch.linalg.solve(covariance, cross.T)
        assert relative_error(latent.mean.reshape(-1), solved.T @ y.reshape(-1)) < 1e-8
        assert relative_error(latent.covariance_matrix, joint - cross @ solved) < 1e-8
    again = Version(gpytorch.__version__) < Version("1.15.2")  # which evaluates all inputs together too
    assert sum(passes) == 12 + 5 + 17 * again


def test_changing_inputs_in_place_is_seen(passes: list[int]) -> None:
    kernel, x = NTKKernel(AnyWidth(2).double()), torch.randn(6, 3).double()
    first, before = kernel(x).to_dense(), x.clone()
    x.mul_(3.0)
    assert relative_error(kernel(x).to_dense(), first) > 1e-3
    assert torch.equal(kernel(before).to_dense(), first), "rows of the first inputs went along"
    assert passes == [6, 6]


def test_only_the_latest_inputs_are_kept(passes: list[int]) -> None:
    kernel = NTKKernel(AnyWidth(1).double())
    batches = torch.randn(6, 4, 3).double()
    train = torch.randn(5, 3).double()
    for x in batches:
        kernel(x, train).to_dense()
    assert passes.count(5) == 1, "the inputs in use were dropped"
    assert len(kernel._rows._kept) == 4


# --- the network is no part of the kernel, the prior is


def test_parameters_state_and_mode() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
    prior = ntkl.GaussianPrior(2.0, groups="layer")
    kernel = NTKKernel(network, prior)
    assert [name for name, _ in kernel.named_parameters()] == ["prior.log_precision"]
    assert list(kernel.state_dict()) == ["prior.log_precision"]
    assert kernel.prior is prior and len(list(kernel.modules())) == 2
    x = torch.randn(5, 3).double()
    before = kernel(x).to_dense()
    kernel.train()
    kernel._rows._kept.clear()
    assert torch.equal(kernel(x).to_dense(), before)
    with torch.no_grad():
        prior.log_precision.add_(1.0)
    assert relative_error(kernel(x).to_dense(), before) > 1e-3, "a change of the prior is not seen"

    other = NTKKernel(network, ntkl.GaussianPrior(1.0, groups="layer"))
    other.load_state_dict(kernel.state_dict())
    assert torch.equal(other(x).to_dense(), kernel(x).to_dense())


def test_copies_have_precisions_of_their_own(passes: list[int]) -> None:
    kernel, x = NTKKernel(AnyWidth(2).double()), torch.randn(4, 3).double()
    before = kernel(x).to_dense()
    twin = copy.deepcopy(kernel)
    with torch.no_grad():
        twin.prior.log_precision.add_(1.0)
    assert torch.equal(kernel(x).to_dense(), before)
    assert relative_error(twin(x).to_dense(), before / torch.e) < 1e-12
    assert passes == [4], "the network did not change, nor did its Jacobians"


def test_a_pickle_contains_no_inputs() -> None:
    kernel, x = NTKKernel(AnyWidth(2).double()), torch.randn(1000, 3).double()
    empty = len(pickle.dumps(kernel))
    values = kernel(x[:5]).to_dense()
    kernel(x, diag=True)
    assert len(pickle.dumps(kernel)) < empty + 500  # shape and type of one; 24,000 bytes are in the inputs
    assert torch.equal(pickle.loads(pickle.dumps(kernel))(x[:5]).to_dense(), values)
    file = io.BytesIO()
    torch.save(kernel, file)


def test_floating_types() -> None:
    x = torch.randn(4, 3)
    network, prior = AnyWidth(2), ntkl.GaussianPrior(2.0)
    kernel = NTKKernel(network, prior)
    assert kernel.dtype == kernel(x).to_dense().dtype == prior.log_precision.dtype == torch.float32
    with_rbf = MultitaskKernel(RBFKernel(), num_tasks=2) + kernel
    assert with_rbf(x).to_dense().dtype == torch.float32
    with_rbf.double()
    assert kernel.dtype == with_rbf(x.double()).to_dense().dtype == torch.float64
    assert next(network.parameters()).dtype == torch.float32
    exact = NTKKernel(network, dtype=torch.float64)
    assert exact(x).to_dense().dtype == torch.float64
    assert relative_error(exact(x).to_dense(), ntkl.empirical_ntk(network, x, dtype=torch.float64)) < 1e-14


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_devices() -> None:
    x = torch.randn(6, 3).double()
    kernel = NTKKernel(AnyWidth(2).double(), ntkl.GaussianPrior(2.0, groups="layer"))
    here = kernel(x).to_dense()
    there = kernel.cuda()(x.cuda()).to_dense()
    assert there.is_cuda and relative_error(there.cpu(), here) < 1e-12


# --- bad input


def test_inputs_that_do_not_fit() -> None:
    conv = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)).double()
    kernel = NTKKernel(conv, input_shape=(1, 4, 4))
    assert kernel(torch.randn(3, 16).double()).shape == (6, 6)
    with pytest.raises(ntkl.errors.DataError, match=r"rows of 16 features.*got shape \(12, 4\).*flatten"):
        kernel(torch.randn(3, 1, 4, 4).double()).to_dense()
    words = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2)).double()
    tokens = NTKKernel(words, input_shape=(2,), input_dtype=torch.long)
    assert tokens(torch.tensor([[0.0, 1.0], [3.0, 4.0]])).shape == (4, 4)
    with pytest.raises(ntkl.errors.DataError, match=r"whole numbers.*example 1.*input_dtype"):
        tokens(torch.tensor([[0.0, 1.0], [3.0, 0.5]])).to_dense()
    with pytest.raises(ntkl.errors.UnsupportedError, match=r"no gradient.*detach.*locations=False.*LaplaceModel"):
        kernel(torch.randn(3, 16).double().requires_grad_()).to_dense()
    with pytest.raises(ntkl.errors.UnsupportedError, match="active_dims"):
        kernel.forward(torch.randn(3, 16).double(), torch.randn(3, 16).double(), last_dim_is_batch=True)
    with pytest.raises(ntkl.errors.NonFiniteError, match="NaN at example 2"):
        kernel(torch.tensor([[0.0] * 16] * 2 + [[torch.nan] * 16]).double()).to_dense()
    for other in ({"x": torch.zeros(3, 16)}, (torch.zeros(3, 16),), [[0.0] * 16], torch.zeros(3, 16).numpy()):
        for arguments in ((other,), (torch.zeros(3, 16).double(), other)):
            with pytest.raises(ntkl.errors.DataError, match=rf"one tensor.*got a {type(other).__name__}\. Join"):
                kernel(*arguments)
    with pytest.raises(ntkl.errors.DataError, match="at least one input; got none"):  # whose outputs nobody knows
        NTKKernel(conv, input_shape=(1, 4, 4))(torch.zeros(0, 16).double()).to_dense()


def test_no_inputs() -> None:
    """As of GPyTorch's kernels, of which BoTorch asks it where there are no points to add."""
    kernel = NTKKernel(nn.Linear(3, 2).double(), batch_shape=torch.Size([4]))
    kernel(torch.zeros(1, 3).double()).to_dense()
    for one, two in ((0, 3), (3, 0), (0, 0)):
        found = kernel(torch.zeros(one, 3).double(), torch.zeros(two, 3).double()).to_dense()
        assert found.shape == (4, 2 * one, 2 * two) and found.dtype == torch.float64
    assert kernel(torch.zeros(5, 1, 0, 3).double(), diag=True).shape == (5, 4, 0)
    model = Exact(torch.rand(4, 3).double(), torch.rand(4).double(), NTKKernel(nn.Linear(3, 1).double())).eval()
    assert model(torch.zeros(0, 3).double()).variance.shape == (0,)


@pytest.mark.parametrize(
    "wrong", [{"input_shape": 3}, {"input_shape": "16"}, {"input_shape": (4, 0)}, {"input_dtype": "long"},
              {"dtype": torch.int64}, {"dtype": "float64"}],
)
def test_shapes_and_types_that_are_none(wrong: dict[str, Any]) -> None:
    (name, value), = wrong.items()
    with pytest.raises(ntkl.errors.UnsupportedError, match=rf"^expected {name} as .*got {re.escape(repr(value))}\."):
        NTKKernel(nn.Linear(16, 2), **wrong)


def test_fantasies_of_sums_and_products_are_models_of_all_the_data() -> None:
    """``get_fantasy_model`` of an ExactGP with this kernel among others, and `add` of the Laplace posterior."""
    network, parts = AnyWidth(1).double(), torch.randn(3, 9, 4, generator=torch.Generator().manual_seed(1)).double()
    (x, z, new), y = parts, parts.sum(-1)
    for kernel in (NTKKernel(network), ScaleKernel(NTKKernel(network)) + RBFKernel(), NTKKernel(network) * RBFKernel()):
        given = Exact(x, y[0], kernel).double().eval()
        whole = Exact(torch.cat([x, z]), y[:2].flatten(), kernel).double().eval()
        with torch.no_grad():
            given(new)
            found, want = given.get_fantasy_model(z, y[1])(new), whole(new)
        assert relative_error(found.mean, want.mean) < 1e-9
        assert relative_error(found.covariance_matrix, want.covariance_matrix) < 1e-9
    model = Exact(x, y[0], NTKKernel(network)).double().eval()
    noise = model.likelihood.noise.item()
    posterior = ntkl.laplace(network, (x, y[0].unsqueeze(1)), ntkl.Gaussian(noise))
    laplace = ntkl.gp.LaplaceGP(posterior.add(z, y[1].unsqueeze(1))).eval()
    with torch.no_grad():
        model(new)
        fantasy = model.get_fantasy_model(z, y[1])(new)
    assert relative_error(laplace(new).covariance_matrix, fantasy.covariance_matrix) < 1e-9


def test_active_dims_inside_sums() -> None:
    """A sum asks its first kernel how many outputs it has, with all features."""
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    ntk = NTKKernel(network, active_dims=[0, 2])
    x = torch.randn(5, 4).double()
    total = ntk + MultitaskKernel(RBFKernel(), num_tasks=3).double()
    assert total(x).shape == (15, 15)
    alone = NTKKernel(network)(x[:, [0, 2]]).to_dense()
    assert relative_error(total(x).to_dense() - total.kernels[1](x).to_dense(), alone) < 1e-12
