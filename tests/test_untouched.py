"""The caller's network, and the state of the process, come back as they were, from every path and from every error."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, Dataset

import ntk_laplace as ntkl
from pairwise import pairwise

HOOKS = [name for name, value in vars(nn.Module()).items() if name.endswith(("hooks", "hooks_with_kwargs"))]


class Net(nn.Module):
    """Batch norm, dropout, a frozen layer, a parametrization, a tied weight, a buffer, hooks and old gradients."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.lift, self.norm, self.drop = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.frozen, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.normalized, self.out = weight_norm(nn.Linear(4, 4)), nn.Linear(4, outputs)
        self.register_buffer("shift", torch.randn(4))
        self.note = {"kept": [1, 2]}

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.drop(self.norm(self.lift(x))))
        h = torch.tanh(self.second(torch.tanh(self.first(self.frozen(h) + self.shift))))
        return self.out(torch.tanh(self.normalized(h)))


def build(outputs: int) -> tuple[Net, Tensor]:
    torch.manual_seed(3)
    network, x = Net(outputs).double(), torch.randn(8, 3).double()
    network(x).sum().backward()
    network.frozen.requires_grad_(False)
    network.out.bias.grad = None
    network.first.register_forward_hook(lambda module, args, out: None)
    network.out.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    network.lift.weight.register_hook(lambda grad: grad)
    # a mode of its own for every kind of module: nothing here behaves differently in train mode
    network.train()
    network.norm.eval()
    network.drop.eval()
    return network, x


def parameter_state(parameter: nn.Parameter) -> dict[str, Any]:
    grad = parameter.grad
    return {
        "object": id(parameter),
        "storage": parameter.data_ptr(),
        "version": parameter._version,
        "values": parameter.detach().numpy().tobytes(),
        "requires_grad": parameter.requires_grad,
        "grad": None if grad is None else (id(grad), grad._version, grad.numpy().tobytes()),
        "hooks": list(parameter._backward_hooks or {}),
        "attributes": sorted(vars(parameter)),
    }


def module_state(module: nn.Module) -> dict[str, Any]:
    return {
        "object": id(module),
        "class": type(module),
        "training": module.training,
        "attributes": sorted(vars(module)),
        "children": {name: id(child) for name, child in module.named_children()},
        **{name: {key: id(hook) for key, hook in getattr(module, name).items()} for name in HOOKS},
    }


def network_state(network: nn.Module) -> dict[str, Any]:
    return {
        "modules": {name: module_state(module) for name, module in network.named_modules()},
        "parameters": {name: parameter_state(p) for name, p in network.named_parameters(remove_duplicate=False)},
        "buffers": {name: (id(b), b._version, b.numpy().tobytes()) for name, b in network.named_buffers()},
    }


def process_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": repr(np.random.get_state()),  # noqa: NPY002 -- the global state is what must not move
        "python": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
        ),
    }


LIKELIHOODS: dict[str, tuple[Callable[[], Any], Callable[[int], Tensor], int]] = {
    "gaussian": (lambda: ntkl.Gaussian(noise=0.5), lambda n: torch.randn(n, 2).double(), 2),
    "bernoulli": (lambda: ntkl.Bernoulli(), lambda n: torch.randint(0, 2, (n, 2)).double(), 2),
    "categorical": (lambda: ntkl.Categorical(), lambda n: torch.randint(0, 3, (n,)), 3),
    "student": (lambda: ntkl.StudentT(0.5), lambda n: torch.randn(n, 2).double(), 2),
    "negative binomial": (lambda: ntkl.NegativeBinomial(), lambda n: torch.randint(0, 4, (n, 2)).double(), 2),
    "poisson": (lambda: ntkl.Poisson(), lambda n: torch.randint(0, 4, (n, 2)).double(), 2),
}
NEW = torch.randn(3, 3, generator=torch.Generator().manual_seed(7)).double()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(8)


def step(posterior: Any) -> None:
    """One step uphill on the evidence, and an answer at the new hyperparameters."""
    optimizer = torch.optim.Adam([*posterior.prior.parameters(), *posterior.likelihood.parameters()], maximize=True)
    posterior.log_marginal_likelihood().backward()
    optimizer.step()
    posterior.latent_moments(NEW)


def untrusted(posterior: Any) -> None:
    """Leave-one-out of weights that were not trained: it says so."""
    with pytest.warns(ntkl.NTKLaplaceWarning, match="not to be trusted"):
        posterior.leave_one_out()


PATHS: dict[str, Callable[[Any], Any]] = {
    "evidence": lambda p: p.log_marginal_likelihood(),
    "corrected evidence": lambda p: p.log_marginal_likelihood(correction=True),
    "gradient of the evidence": lambda p: p.log_marginal_likelihood().backward(),
    "latent": lambda p: p.latent(NEW).covariance_matrix,
    "posterior mean": lambda p: p.latent(NEW, mean="posterior").mean,
    "latent moments": lambda p: p.latent_moments(NEW),
    "glm": lambda p: p.predict(NEW, method="glm", samples=20, generator=generator()).mean,
    "blr": lambda p: p.predict(NEW, method="blr").mean,
    "nn": lambda p: p.predict(NEW, method="nn", samples=20, generator=generator()).mean,
    "probit": lambda p: p.predict(NEW, method="probit").mean,
    "map": lambda p: p.predict(NEW, method="map").mean,
    "function samples": lambda p: p.sample(4, NEW, generator=generator()),
    "weight samples": lambda p: p.sample(4, generator=generator()),
    "a step in the hyperparameters": lambda p: step(p),
    "explanation": lambda p: p.explain(NEW, k=2).to_dataframe(),
    "leave one out": lambda p: untrusted(p),
}


def anywhere(structure: str, likelihood: str) -> bool:
    return True


ONLY = {
    "leave one out": lambda structure, likelihood: structure == "gp",
    "probit": lambda structure, likelihood: likelihood in ("bernoulli", "categorical"),
}


# every path with every likelihood and in both structures, and every likelihood in both
OFFERED = pairwise(LIKELIHOODS, ("gp", "full"), PATHS,
                   allowed=lambda likelihood, structure, path: ONLY.get(path, anywhere)(structure, likelihood))


@pytest.mark.parametrize(("likelihood", "structure", "path"), OFFERED)
def test_every_path_leaves_everything_as_it_was(likelihood, structure, path):
    model, draw, outputs = LIKELIHOODS[likelihood]
    network, x = build(outputs)
    y = draw(len(x))
    before = network_state(network), process_state()
    posterior = ntkl.laplace(network, (x, y), model(), structure=structure)
    assert (network_state(network), process_state()) == before
    PATHS[path](posterior)
    assert network_state(network) == before[0]
    assert process_state() == before[1]


PREDICTIONS = ("glm", "blr", "nn", "probit", "map", "function samples", "weight samples")


@functools.cache
def kept(likelihood, structure):
    """A posterior for several predictions, of which none changes it."""
    model, draw, outputs = LIKELIHOODS[likelihood]
    network, x = build(outputs)
    return ntkl.laplace(network, (x, draw(len(x))), model(), structure=structure)


@pytest.mark.parametrize(("likelihood", "structure", "path"), [case for case in OFFERED if case[2] in PREDICTIONS])
def test_predictions_carry_no_graph(likelihood, structure, path):
    """Noise and temperature are parameters; a kept prediction must not keep what made it."""
    assert not PATHS[path](kept(likelihood, structure)).requires_grad


@pytest.mark.parametrize("structure", ["gp", "full", "auto"])
@pytest.mark.parametrize("parameters", [None, "last_layer", ["lift.weight"], lambda name, p: "first" in name])
def test_choosing_parameters_freezes_nothing_of_the_callers(parameters, structure):
    network, x = build(2)
    before = network_state(network), process_state()
    ntkl.laplace(
        network, (x, torch.randn(8, 2, generator=generator()).double()), ntkl.Gaussian(),
        structure=structure, parameters=parameters,
    ).latent(NEW)
    assert (network_state(network), process_state()) == before


def test_the_kernel_alone():
    network, x = build(2)
    before = network_state(network), process_state()
    ntkl.empirical_ntk(network, x, NEW)
    assert (network_state(network), process_state()) == before


def test_the_gpytorch_kernel():
    network, x = build(2)
    before = network_state(network), process_state()
    kernel = ntkl.gp.NTKKernel(network, ntkl.GaussianPrior(groups="layer"))
    kernel.train()
    covariance = kernel(x, NEW).to_dense()
    covariance.sum().backward()
    kernel.eval()
    assert (network_state(network), process_state()) == before
    assert not {id(p) for p in network.parameters()} & {id(p) for p in kernel.parameters()}


def test_the_gpytorch_model():
    network, x = build(3)
    y = torch.randint(0, 3, (8,), generator=generator())
    before = network_state(network), process_state()
    posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), structure="gp")
    model = ntkl.gp.LaplaceGP(posterior)
    model.train()
    model.eval()
    with torch.no_grad():
        assert model(NEW).covariance_matrix.isfinite().all()
    assert (network_state(network), process_state()) == before


def test_a_network_that_draws_random_numbers_is_refused_without_a_trace():
    network, x = build(2)
    network.drop.train()
    before = network_state(network), process_state()
    with pytest.raises(ntkl.errors.NonDeterministicError):
        ntkl.laplace(network, (x, torch.zeros(8, 2).double()), ntkl.Gaussian())
    assert (network_state(network), process_state()) == before


def test_a_network_that_mixes_examples_is_refused_without_a_trace():
    network, x = build(2)
    network.norm.train()
    before = network_state(network), process_state()
    with pytest.raises(ntkl.errors.MixedExamplesError):
        ntkl.laplace(network, (x, torch.zeros(8, 2).double()), ntkl.Gaussian())
    assert (network_state(network), process_state()) == before


class Interrupted(Dataset):
    """Someone presses Ctrl-C in the middle of the pass."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        if n == 5:
            raise KeyboardInterrupt
        return torch.full((3,), float(n)).double(), torch.zeros(2).double()


@pytest.mark.parametrize("structure", ["gp", "full"])
def test_an_interrupted_pass_leaves_no_trace(structure):
    network, _ = build(2)
    before = network_state(network), process_state()
    with pytest.raises(KeyboardInterrupt):
        ntkl.laplace(network, DataLoader(Interrupted(), batch_size=2), ntkl.Gaussian(), structure=structure)
    # the loader itself draws a seed for its workers, from torch's generator
    after = process_state()
    assert network_state(network) == before[0]
    assert {**after, "torch": None} == {**before[1], "torch": None}


@pytest.mark.parametrize("path", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("structure", ["gp", "full"])
def test_a_caller_without_gradients_gets_the_same(structure, path):
    network, x = build(2)
    y = torch.randn(8, 2, generator=generator()).double()
    want = ntkl.laplace(network, (x, y), ntkl.Gaussian(), structure=structure)
    before = network_state(network)
    with getattr(torch, path)():
        posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(), structure=structure)
        covariance = posterior.latent(NEW).covariance_matrix
        evidence = posterior.log_marginal_likelihood()
    assert network_state(network) == before
    assert torch.allclose(evidence, want.log_marginal_likelihood(), rtol=1e-12)
    assert torch.allclose(covariance, want.latent(NEW).covariance_matrix, rtol=1e-10, atol=1e-14)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")
@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "inf", "diag"])
def test_tensors_of_inference_mode_are_inputs_and_data_like_others(structure):
    """Everything asked inside that mode, of inputs and data made there, is what it is outside; and gradients go on."""
    network, x = build(2)
    y, fresh = torch.randn(8, 2, generator=generator()).double(), torch.ones(3, 2).double()

    def answers(x: Tensor, y: Tensor, new: Tensor, fresh: Tensor) -> tuple[object, list[Tensor]]:
        posterior = ntkl.laplace(network, (x, y), likelihood, structure=structure)
        found = [
            *posterior.latent_moments(new, "posterior"), posterior.predict(new).variance, posterior.outputs(new),
            posterior.removal_effects(new, 0), posterior.leave_one_out(strict=False).mean,
            posterior.subset([0, 1, 5]).log_det(),
            posterior.condition((new, fresh)).log_det(), posterior.add(new, fresh).latent_moments(new)[1],
            posterior.remove([1, 2]).latent_moments(new)[0], posterior.cross_validate(2, linearization="fixed").f,
        ]
        posterior.prior.precision = 2.0
        return posterior, [*found, posterior.log_marginal_likelihood(correction=True)]

    likelihood = ntkl.Gaussian(0.5)
    _, want = answers(x, y, NEW[:3], fresh)
    with torch.inference_mode():
        posterior, found = answers(x.clone(), y.clone(), NEW[:3].clone(), fresh.clone())
    for own, expected in zip(found, want, strict=True):
        assert torch.allclose(own, expected, rtol=1e-9, atol=1e-12)
    posterior.log_marginal_likelihood().backward()
    assert posterior.prior.log_precision.grad.abs() > 0
    with torch.inference_mode():
        before = posterior.log_marginal_likelihood()
        posterior.fit_hyperparameters(parameters="precision")
        assert posterior.log_marginal_likelihood() > before
        rigid = ntkl.laplace(network, (x, y), ntkl.Gaussian(0.5), structure=structure)
        before = rigid.log_marginal_likelihood()
        rigid.fit_hyperparameters()  # the posterior's copy of the noise is a normal tensor
        assert rigid.log_marginal_likelihood() > before


def test_changing_the_network_after_the_fit_changes_no_answer():
    """The posterior is that of the weights it was fitted at."""
    network, x = build(2)
    y = torch.randn(8, 2, generator=generator()).double()
    posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(), structure="gp")
    before = posterior.latent(NEW)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(2.0)
    network.train()
    x.mul_(3.0)
    y.add_(1.0)
    after = posterior.latent(NEW)
    assert torch.equal(before.mean, after.mean)
    assert torch.equal(before.covariance_matrix, after.covariance_matrix)


def test_fast_settings_of_attention_come_back():
    layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)
    network = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 2)).double().eval()
    x = torch.randn(5, 3, 4, generator=generator()).double()
    before = network_state(network), process_state()
    posterior = ntkl.laplace(network, (x, torch.zeros(5, 2).double()), ntkl.Gaussian(), structure="gp")
    posterior.latent_moments(x)
    assert (network_state(network), process_state()) == before


class Watched(nn.Module):
    """Keeps its activations, as one does for pictures: tensors with a graph, which copy.deepcopy refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.out = nn.Linear(3, 4), nn.Linear(4, 2)
        self.seen: list[Tensor] = []
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.lift(x))
        self.seen.append(self.hidden)
        self.kept["last"] = (self.hidden,)
        return self.out(self.hidden)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning", "ignore:no factor rule covers")
@pytest.mark.parametrize("kind", ["activations", "old weight_norm", "old spectral_norm", "TorchScript"])
def test_what_a_forward_pass_left_behind(kind):
    """A network that has been used gives the evidence of its fresh twin, and keeps what it held."""
    torch.manual_seed(0)
    made = {
        "activations": Watched,
        "old weight_norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)),
        "old spectral_norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)),
        "TorchScript": lambda: torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))),
    }[kind]().double().eval()
    data = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    made(data[0])
    posterior = ntkl.laplace(made, data, ntkl.Gaussian(0.3))
    jacobian = torch.cat([torch.stack([
        torch.cat([g.flatten() for g in torch.autograd.grad(out, list(made.parameters()), retain_graph=True)])
        for out in row]) for row in made(data[0])])
    kernel = jacobian @ jacobian.T
    assert torch.allclose(posterior.log_det(), torch.logdet(torch.eye(12) + kernel / 0.3), rtol=1e-10)
    if kind == "activations":
        assert made.hidden.grad_fn is not None
        assert [h.grad_fn is not None for h in (*made.seen, *made.kept["last"])] == [True] * 3
