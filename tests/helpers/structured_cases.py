"""Structured weight space over the registry: fits beside their dense references, computed once for all tests.

The references take one thing from the library: which biases share a part with their weight. What that should be is
held apart, network by network, in test_structured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.curvature import CurvatureType
from pairwise import one_each, pairwise
from reference import outputs
from reference_structures import Part, Structured, StructuredModel, parts_of
from registry import LIKELIHOODS, NETWORKS, PRIORS, problem, targets
from registry_cases import derivatives, jacobians, offered

CURVATURES = ("ggn", "ef", "mc")
MC = CurvatureType("mc", samples=2, seed=3)


def fraction(share: float):
    """A share of a part's eigenvalues, rounded, at least one."""
    return lambda values: max(1, round(share * len(values)))


# name -> (what the library is asked for, the dense matrix)
STRUCTURES = {
    "kfac": (lambda: "kfac", lambda dense: dense.kfac()),
    "kfac reduce": (lambda: ntkl.KFAC(sharing="reduce"), lambda dense: dense.kfac("reduce")),
    "ekfac": (lambda: "ekfac", lambda dense: dense.ekfac()),
    "ekfac reduce": (lambda: ntkl.EKFAC(sharing="reduce"), lambda dense: dense.ekfac("reduce")),
    "inf": (lambda: ntkl.INF(rank=0.4), lambda dense: dense.inf(fraction(0.4))),
    "diag": (lambda: "diag", lambda dense: dense.diagonal),
}


@functools.cache
def output_curvature(network: str, likelihood: str, curvature: str) -> Tensor:
    """S Sᵀ, (N, C, C): Λ, or the residual's square, or that of the gradients at the labels that the library drew."""
    _, residual, hessian = derivatives(network, likelihood)
    if curvature == "ggn":
        return hessian
    if curvature == "ef":
        return residual[:, :, None] * residual[:, None]
    case = problem(network)
    f = outputs(case.network, case.x)
    y = LIKELIHOODS[likelihood].targets(*f.shape)
    root = MC.root(LIKELIHOODS[likelihood].build(), f, y).detach()
    return root @ root.mT


# ------------------------------------------------- networks by calls of torch.nn.functional, where layers make none


def _recurrent(network: nn.Module, step: Callable[..., tuple[Tensor, ...]], state: int):
    """nn.LSTM or nn.GRU, batch first, unrolled: all layers, both directions, the last output to the head."""
    layer = network.layer

    def one_direction(x: Tensor, suffix: str) -> Tensor:
        w_ih, w_hh, b_ih, b_hh = (
            getattr(layer, f"{name}_{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        hidden = tuple(x.new_zeros(1, layer.hidden_size) for _ in range(state))
        steps = x.flip(1).unbind(1) if suffix.endswith("reverse") else x.unbind(1)
        out = []
        for each in steps:
            hidden = step(F.linear(each, w_ih, b_ih), F.linear(hidden[0], w_hh, b_hh), hidden)
            out.append(hidden[0])
        out = torch.stack(out, 1)
        return out.flip(1) if suffix.endswith("reverse") else out

    def run(x: Tensor) -> Tensor:
        for depth in range(layer.num_layers):
            suffixes = [f"l{depth}"] + [f"l{depth}_reverse"] * layer.bidirectional
            x = torch.cat([one_direction(x, suffix) for suffix in suffixes], -1)
        return network.out(x[:, -1])

    return run


def _lstm_step(inner: Tensor, outer: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    i, f, g, o = (inner + outer).chunk(4, -1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru_step(inner: Tensor, outer: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (r, z, n), (r_h, z_h, n_h) = inner.chunk(3, -1), outer.chunk(3, -1)
    r, z = torch.sigmoid(r + r_h), torch.sigmoid(z + z_h)
    return ((1 - z) * torch.tanh(n + r * n_h) + z * state[0],)


def _cell(network: nn.Module):
    cell = network.cell

    def run(x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            inner, outer = F.linear(step, cell.weight_ih, cell.bias_ih), F.linear(h, cell.weight_hh, cell.bias_hh)
            (h,) = _gru_step(inner, outer, (h,))
        return network.out(h)

    return run


def _direct(network: nn.Module):
    def joined(heads: Tensor) -> Tensor:
        return heads.transpose(1, 2).flatten(0, 1)

    def run(x: Tensor) -> Tensor:
        x = torch.cat([network.token.expand(len(x), -1, -1), x], 1) + network.positions
        h = torch.tanh(F.linear(x * network.log_scale.exp(), network.matrix.T))
        weight = joined(network.heads)
        weight.origin = network.heads, joined
        heads, table = F.linear(h, weight), network.table
        return network.gain * (torch.tanh(heads).mean(1) @ table[:4, 1:] + table[4, :3]) + table[5, 1:]

    return run


BY_CALLS = {
    "lstm": lambda network: _recurrent(network, _lstm_step, 2),
    "gru": lambda network: _recurrent(network, _gru_step, 1),
    "unrolled_cell": _cell,
    "direct_parameters": _direct,
}


# ----------------------------------------------------------------------------------------------- references and fits


@functools.cache
def _parts(network: str, fused: frozenset[tuple[str, str]]) -> list[Part]:
    case = problem(network)
    run = BY_CALLS[network](case.network) if network in BY_CALLS else None
    return parts_of(case.network, case.x, lambda weight, bias: (weight, bias) in fused, run)


def fused_biases(posterior) -> frozenset[tuple[str, str]]:
    return frozenset(part.names for part in posterior.parameter_blocks if len(part.names) == 2)


@functools.cache
def structured(network: str, likelihood: str, prior: str, curvature: str) -> Structured:
    fused = frozenset() if prior == "parameter" else fused_biases(fit(network, likelihood, prior, curvature, "kfac"))
    return Structured(
        _parts(network, fused), jacobians(network)[0], output_curvature(network, likelihood, curvature)
    )


@functools.cache
def information(network: str, likelihood: str, prior: str, curvature: str, structure: str) -> Tensor:
    return STRUCTURES[structure][1](structured(network, likelihood, prior, curvature))


@functools.cache
def truth(network: str, likelihood: str, prior: str, curvature: str, structure: str) -> StructuredModel:
    case = problem(network)
    precision, mean = PRIORS[prior].dense(case)
    return StructuredModel(
        *derivatives(network, likelihood), jacobians(network)[0], case.theta - mean, precision,
        information=information(network, likelihood, prior, curvature, structure),
    )


@functools.cache
def fit(network: str, likelihood: str, prior: str, curvature: str, structure: str):
    return fresh_fit(network, likelihood, prior, curvature, structure)


def fresh_fit(network: str, likelihood: str, prior: str, curvature: str, structure, **options):
    """Fit with hyperparameters of its own; `structure` is a name of `STRUCTURES` or an object of the library."""
    case = problem(network)
    data = options.pop("data", None)
    data = (case.x, targets(LIKELIHOODS[likelihood], case)) if data is None else data  # a stream has no truth value
    return ntkl.laplace(
        case.network, data, LIKELIHOODS[likelihood].build(), prior=PRIORS[prior].build(case),
        structure=STRUCTURES[structure][0]() if structure in STRUCTURES else structure,
        curvature=MC if curvature == "mc" else curvature, **options,
    )


# ------------------------------------------------------------------------------------------------------- the table

# its eigenvectors are LAPACK's choice in most networks: held to the dense matrix in test_structured
CHOSEN = [name for name in STRUCTURES if name != "ekfac reduce"]
# these meet every structure, the others one
MET_BY_ALL = (
    "deep_mlp", "cnn_groups", "transformer_tied", "scalar_outputs", "layer_twice", "conv_transpose1d", "decoder_dict",
)


def admits(network: str, likelihood: str, prior: str, curvature: str, structure: str) -> bool:
    """Kronecker factors take no precision by parameter, and one by input only where inputs are the second axis.

    Ties of a Gaussian's eigenvalues leave open what INF keeps.
    """
    each = {"parameter": ("inf", "diag"), "input": ("kfac", "kfac reduce", "inf", "diag")}
    outputs_second = prior == "input" and network in ("conv_transpose1d", "conv_transpose2d")
    return (
        likelihood in offered(network) and structure in each.get(prior, STRUCTURES) and not outputs_second
        and not (likelihood == "gaussian" and structure == "inf")
    )


AXES = LIKELIHOODS, PRIORS, CURVATURES, CHOSEN
CASES = [
    *pairwise(MET_BY_ALL, *AXES, allowed=admits),
    *one_each([name for name in NETWORKS if name not in MET_BY_ALL], *AXES, allowed=admits),
]


def ids(case: tuple[str, ...]) -> str:
    return "-".join(case)
