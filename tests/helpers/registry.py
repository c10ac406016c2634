"""The table of cases: tiny networks, likelihoods and priors that every identity is held on.

Each network is chosen for one way of going wrong: weights used twice, rows in an order other than (example,
position), parameters that no layer owns, padding that autograd leaves out, outputs of shape (N,). Everything
is float64 unless the case says otherwise.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from networks import NETWORKS, NetworkCase

Inputs = Any  # a tensor, a tuple of tensors or a dict of tensors


@dataclass(frozen=True)
class Problem:
    """A network at its weights with training inputs ``x`` and inputs ``x_new`` that no fit has seen."""

    case: NetworkCase
    network: nn.Module
    x: Inputs
    x_new: Inputs

    @property
    def names(self) -> list[str]:
        return [name for name, parameter in self.network.named_parameters() if parameter.requires_grad]

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.network.named_parameters() if p.requires_grad}

    @property
    def theta(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.parameters.values()]).double()


def fresh(name: str) -> Problem:
    """Build the network anew, always with the same numbers."""
    case = NETWORKS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        network, inputs = case.build()
        network = network.to(case.dtype).train(case.train)
        if case.perturb:
            _make_generic(network)
        cast = functools.partial(_cast, dtype=case.dtype)
        return Problem(case, network, cast(inputs(case.examples)), cast(inputs(4)))


@functools.cache
def problem(name: str) -> Problem:
    """Build the network once for all tests; they leave it alone, as the library does."""
    return fresh(name)


def _make_generic(network: nn.Module) -> None:
    """Move parameters and statistics off their zeros and ones, which would hide terms."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
        for name, buffer in network.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
            if name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand_like(buffer))


def _cast(x: Inputs, dtype: torch.dtype) -> Inputs:
    if isinstance(x, dict):
        return {key: _cast(value, dtype) for key, value in x.items()}
    if isinstance(x, tuple):
        return tuple(_cast(value, dtype) for value in x)
    return x.to(dtype) if x.is_floating_point() else x


@dataclass(frozen=True)
class LikelihoodCase:
    """A likelihood of the library beside its log density by hand, ``log_density(f (C,), y)`` in nats."""

    name: str
    build: Callable[[], nn.Module]
    log_density: Callable[[Tensor, Tensor], Tensor]
    targets: Callable[[int, int], Tensor]
    response: Callable[[Tensor], Tensor]
    least_outputs: int = 1


NOISE, TEMPERATURE = 0.3, 1.7


def _library() -> Any:
    import ntk_laplace

    return ntk_laplace


def _draw(seed: int, draw: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return draw(*arguments, generator=torch.Generator().manual_seed(seed))


LIKELIHOODS = {
    case.name: case
    for case in (
        LikelihoodCase(
            "gaussian",
            lambda: _library().Gaussian(noise=NOISE),
            lambda f, y: (-0.5 * (y - f) ** 2 / NOISE - 0.5 * math.log(2 * math.pi * NOISE)).sum(),
            lambda n, c: _draw(1, torch.randn, n, c).double(),
            lambda f: f,
        ),
        LikelihoodCase(
            "bernoulli",
            lambda: _library().Bernoulli(),
            lambda f, y: (y * f - f.clamp_min(0) - torch.log1p(torch.exp(-f.abs()))).sum(),
            lambda n, c: _draw(2, torch.randint, 0, 2, (n, c)).double(),
            lambda f: 1 / (1 + torch.exp(-f)),
        ),
        LikelihoodCase(
            "categorical",
            lambda: _library().Categorical(temperature=TEMPERATURE),
            lambda f, y: ((torch.arange(len(f)) == y) * f).sum() / TEMPERATURE - torch.logsumexp(f / TEMPERATURE, 0),
            lambda n, c: _draw(3, torch.randint, 0, c, (n,)),
            lambda f: torch.softmax(f / TEMPERATURE, -1),
            least_outputs=2,
        ),
        LikelihoodCase(
            "poisson",
            lambda: _library().Poisson(),
            lambda f, y: (y * f - torch.exp(f) - torch.lgamma(y + 1)).sum(),
            lambda n, c: _draw(4, torch.randint, 0, 6, (n, c)).double(),
            torch.exp,
        ),
    )
}


def targets(likelihood: LikelihoodCase, problem: Problem) -> Tensor:
    """Targets as a user brings them: (N,) for classes and for outputs of shape (N,), else (N, C)."""
    y = likelihood.targets(problem.case.examples, problem.case.outputs)
    if problem.case.scalar and y.dim() == 2:
        y = y.squeeze(1)
    return y.to(problem.case.dtype) if y.is_floating_point() else y


@dataclass(frozen=True)
class PriorCase:
    """A prior of the library beside the vectors it stands for: ``dense`` = precision (P,), mean (P,)."""

    name: str
    build: Callable[[Problem], nn.Module]
    dense: Callable[[Problem], tuple[Tensor, Tensor]]


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _group_values(groups: list[str]) -> dict[str, float]:
    return {group: 0.4 * 1.7**index for index, group in enumerate(dict.fromkeys(groups))}


def _tensor_means(problem: Problem) -> dict[str, Tensor]:
    return {
        name: torch.full_like(p, 0.3 * (-1) ** i).double().detach()
        for i, (name, p) in enumerate(problem.parameters.items())
    }


def _flat(problem: Problem, value_of: Callable[[str], float]) -> Tensor:
    return torch.cat(
        [torch.full((p.numel(),), value_of(name), dtype=torch.float64) for name, p in problem.parameters.items()]
    )


def _each(problem: Problem) -> Tensor:
    return 0.5 + 2 * _draw(5, torch.rand, problem.theta.numel()).double()


def _each_mean(problem: Problem) -> Tensor:
    return 0.5 * _draw(6, torch.randn, problem.theta.numel()).double()


def _layer_precisions(problem: Problem) -> dict[str, float]:
    return _group_values([_layer(name) for name in problem.names])


def _by_input(problem: Problem) -> tuple[str, dict[str, Any]]:
    """The first parameter with inputs; its precisions by input, and those of the other parameters by layer."""
    first = next((name for name, p in problem.parameters.items() if p.ndim > 1), "")
    layers = _group_values([_layer(name) for name in problem.names if name != first])
    inputs = problem.parameters[first].shape[1] if first else 0
    return first, layers | {first: 0.6 + torch.arange(inputs, dtype=torch.float64)}


def _input_precisions(problem: Problem) -> Tensor:
    first, values = _by_input(problem)
    found = []
    for name, p in problem.parameters.items():
        one = torch.ones_like(p).double().detach()
        own = torch.einsum("oi...,i->oi...", one, values[first]) if name == first else one * values[_layer(name)]
        found.append(own.reshape(-1))
    return torch.cat(found)


PRIORS = {
    case.name: case
    for case in (
        PriorCase(
            "scalar",
            lambda problem: _library().GaussianPrior(precision=0.7),
            lambda problem: (_flat(problem, lambda name: 0.7), torch.zeros_like(problem.theta)),
        ),
        PriorCase(
            "layer",
            lambda problem: _library().GaussianPrior(precision=_layer_precisions(problem), mean=0.25, groups="layer"),
            lambda problem: (
                _flat(problem, lambda name: _layer_precisions(problem)[_layer(name)]),
                torch.full_like(problem.theta, 0.25),
            ),
        ),
        PriorCase(
            "tensor",
            lambda problem: _library().GaussianPrior(
                precision=_group_values(problem.names), mean=_tensor_means(problem), groups="tensor"
            ),
            lambda problem: (
                _flat(problem, lambda name: _group_values(problem.names)[name]),
                torch.cat([mean.reshape(-1) for mean in _tensor_means(problem).values()]),
            ),
        ),
        PriorCase(
            "input",
            lambda problem: _library().GaussianPrior(precision=_by_input(problem)[1], groups="input"),
            lambda problem: (_input_precisions(problem), torch.zeros_like(problem.theta)),
        ),
        PriorCase(
            "parameter",
            lambda problem: _library().GaussianPrior(
                precision=_each(problem), mean=_each_mean(problem), groups="parameter"
            ),
            lambda problem: (_each(problem), _each_mean(problem)),
        ),
    )
}
