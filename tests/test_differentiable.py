"""Gradients in the inputs: the moments of f with differentiable=True, against differences of those without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import ntk_laplace as ntkl
from ntk_laplace.jacobian import JacobianPass, differentiable
from ntk_laplace.model.data import leaves
from ntk_laplace.model.network import Network
from reference import outputs
from refusals import inputs, network, refused
from registry import problem

STRUCTURES = ["gp", "full", "kfac", "ekfac", "inf", "diag", "nystrom"]
# plain layers, convolutions, no rule for vmap, recurrent, attention, several tensors, a dict, outputs of shape (N,)
FEW = ["deep_mlp", "cnn_groups", "custom_function", "lstm", "self_attention_batch_first", "cross_attention_tuple",
       "decoder_dict", "scalar_outputs", "resnet_batchnorm"]
CASES = [*((name, "gp") for name in FEW), *(("deep_mlp", structure) for structure in STRUCTURES[1:]),
         ("cnn_groups", "kfac"), ("lstm", "full")]


def moved(x: Any, direction: Any, by: float) -> Any:
    """x + by * direction."""
    if isinstance(x, dict):
        return {key: moved(x[key], direction[key], by) for key in x}
    if isinstance(x, tuple):
        return tuple(moved(*pair, by) for pair in zip(x, direction, strict=True))
    return x + by * direction if x.is_floating_point() else x


def watched(x: Any) -> Any:
    return tree_map(lambda t: t.clone().requires_grad_() if t.is_floating_point() else t, x)


def drawn(x: Any) -> Any:
    """A tensor of normal numbers for each of x."""
    generator = torch.Generator().manual_seed(3)
    return tree_map(lambda t: torch.randn(t.shape, generator=generator, dtype=torch.float64), x)


def fitted(name: str, structure: str) -> ntkl.Posterior:
    case = problem(name)
    f = outputs(case.network, case.x)
    y = f + torch.randn(f.shape, generator=torch.Generator().manual_seed(0)).double()
    return ntkl.laplace(case.network, (case.x, y), ntkl.Gaussian(0.3), ntkl.GaussianPrior(2.0), structure)


@pytest.mark.filterwarnings("ignore:INF's low-rank part exceeds")
@pytest.mark.filterwarnings("ignore:no factor rule covers:ntk_laplace.NTKLaplaceWarning")
@pytest.mark.parametrize(("name", "structure"), CASES)
def test_moments_and_their_gradients(name: str, structure: str) -> None:
    """The values are those of the other path, which has another Jacobian; gradients are its central differences."""
    posterior, x = fitted(name, structure), problem(name).x_new
    weights = [torch.randn(1, generator=torch.Generator().manual_seed(k)).double() for k in range(3)]

    def total(f: Tensor, blocks: Tensor, joint: Tensor) -> Tensor:
        """One number of mean, blocks and joint covariance."""
        numbers = [torch.arange(1.0, t.numel() + 1).double().cos().view_as(t) for t in (f, blocks, joint)]
        return sum(w * (t * c).sum() for w, t, c in zip(weights, (f, blocks, joint), numbers, strict=True))

    def plain(by: float) -> Tensor:
        at = moved(x, direction, by)
        return total(*posterior.latent_moments(at), posterior.latent(at).covariance_matrix)

    direction, point = drawn(x), watched(x)
    f, blocks = posterior.latent_moments(point, differentiable=True)
    joint = posterior.latent(point, differentiable=True)
    for found, wanted in ((f, posterior.outputs(x)), (blocks, posterior.latent_moments(x)[1]), (joint.mean, f),
                          (joint.covariance_matrix, posterior.latent(x).covariance_matrix)):
        assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-10 * float(wanted.detach().abs().max()))
    total(f, blocks, joint.covariance_matrix).backward()
    slope = sum((part.grad * d).sum() for part, d in zip(leaves(point), leaves(direction), strict=True)
                if part.requires_grad)
    numeric = (plain(1e-5) - plain(-1e-5)) / 2e-5
    assert torch.allclose(slope, numeric, rtol=1e-6, atol=1e-7), (slope, numeric)
    assert all(parameter.grad is None for parameter in posterior.network.module.parameters())


def small(structure: str = "gp") -> tuple[ntkl.Posterior, Tensor]:
    x = inputs()
    return ntkl.laplace(network(), (x, x[:, :3].sin()), ntkl.Gaussian(0.1), structure=structure), inputs(3)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
def test_gradcheck_twice(structure: str) -> None:
    """Second derivatives too: a backward pass through H⁻¹ is another solve."""
    posterior, x = small(structure)
    x, one = (x[:n].requires_grad_() for n in (2, 1))
    assert torch.autograd.gradcheck(lambda x: posterior.latent_moments(x, differentiable=True), x, atol=1e-6)
    assert torch.autograd.gradgradcheck(lambda x: posterior.latent_moments(x, differentiable=True), one, atol=1e-6)


@pytest.mark.parametrize("what", ["refitted", "removed", "added"])
def test_at_other_weights(what: str) -> None:
    """mean="posterior", and the weights after a what-if."""
    posterior, x = small()
    mean = "posterior" if what == "refitted" else "map"
    posterior = posterior.remove([1, 4]) if what == "removed" else posterior
    posterior = posterior.add(inputs(2) + 1, torch.ones(2, 3).double()) if what == "added" else posterior
    wanted = posterior.latent_moments(x, mean)
    point = x.clone().requires_grad_()
    found = posterior.latent_moments(point, mean, differentiable=True)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    direction = torch.ones_like(x)
    slope = (torch.autograd.grad(found[0].sum(), point)[0] * direction).sum()
    numeric = sum(s * posterior.latent_moments(x + s * 1e-5 * direction, mean)[0].sum() for s in (1, -1)) / 2e-5
    assert torch.allclose(slope, numeric, rtol=1e-7)


def test_float32_and_no_gradient() -> None:
    posterior, x = small()
    net = network().float()
    coarse = ntkl.laplace(net, (inputs().float(), inputs()[:, :3].sin().float()), ntkl.Gaussian(0.1))
    point = x.float().requires_grad_()
    coarse.latent_moments(point, differentiable=True)[1].sum().backward()
    fine = x.clone().requires_grad_()
    posterior.latent_moments(fine, differentiable=True)[1].sum().backward()
    assert point.grad.dtype == torch.float32 and torch.allclose(point.grad.double(), fine.grad, rtol=1e-3, atol=1e-4)
    with torch.no_grad():  # the ordinary path
        assert torch.equal(posterior.latent_moments(fine, differentiable=True)[1], posterior.latent_moments(x)[1])
    assert torch.equal(posterior.latent_moments(x, differentiable=True)[0], posterior.latent_moments(x)[0])


def test_wrong_batching_rules_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """vmap of layer normalization has wrong second derivatives; without our own form of it the loop takes over."""
    case, slopes = problem("encoder_sequence_first"), []
    for plain in (True, False):
        if not plain:
            monkeypatch.setattr(differentiable, "_PLAIN", {})
        frozen, point = Network(case.network), watched(case.x_new)
        rows = differentiable.DifferentiableRows(frozen, torch.float64)
        rows(point)[1].square().sum().backward()
        assert rows.vectorized is plain
        slopes.append(point.grad)
    assert torch.allclose(*slopes, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", ["biases alone", "token ids"])
def test_rows_without_a_gradient(case: str) -> None:
    ids = case == "token ids"
    net = nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.Linear(6, 2)) if ids else network()
    x = torch.tensor([[0, 1], [2, 3]]) if ids else inputs(2).requires_grad_()
    frozen = Network(net, None if ids else ["0.bias", "2.bias"])
    found = differentiable.DifferentiableRows(frozen, frozen.dtype)(x)[1]
    assert torch.equal(found.transpose(0, 1), JacobianPass(frozen, frozen.dtype).rows(x).dense(frozen.shapes))


def test_refusals() -> None:
    posterior, x = small()
    point = x.requires_grad_()
    for call in (posterior.latent, posterior.latent_moments, posterior.predict, posterior.outputs, posterior.jacobian,
                 posterior.prior_latent):
        with refused(ntkl.UnsupportedError, "require no gradient", "requires_grad", "differentiable=True"):
            call(point)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x.detach()))
    with refused(ntkl.DataError, "differentiable=True", "DataLoader", "inputs themselves"):
        posterior.latent_moments(loader, differentiable=True)
    with refused(ntkl.UnsupportedError, "no error of sampling", "iterative", "kfac"):
        small("iterative")[0].latent_moments(point, differentiable=True)
    with refused(ntkl.DataError, "at least one input", "none", "Pass one"):
        posterior.latent(torch.zeros(0, 4).double().requires_grad_(), differentiable=True)
    with refused(ntkl.UnsupportedError, '"map" or "posterior"', "mode", "Choose"):
        posterior.latent(point, "mode", differentiable=True)
    tight = ntkl.laplace(network(), (inputs(), inputs()[:, :3]), ntkl.Gaussian(0.1),
                         settings=ntkl.Settings(memory_budget=30_000))
    with refused(ntkl.MemoryBudgetError, "J at 900 inputs", "3.5 MiB", "fewer inputs"):
        tight.latent(inputs(900).requires_grad_(), differentiable=True)


def test_the_network_stays_as_it_is() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)).double()
    net.eval()
    before = [value.clone() for value in net.state_dict().values()]
    posterior = ntkl.laplace(net, (inputs(), inputs()[:, :3]), ntkl.Gaussian(0.1))
    state = torch.get_rng_state()
    posterior.latent_moments(inputs(2).requires_grad_(), differentiable=True)[0].sum().backward()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, net.state_dict().values(), strict=True))
    assert not net.training and all(parameter.grad is None for parameter in net.parameters())
