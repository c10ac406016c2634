"""Structured weight space over the registry: fits beside their dense references, computed once for all tests."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

import ntk_laplace as ntkl
from ntk_laplace.curvature import Root
from reference import differentiate, jacobian, outputs
from reference_structures import Structured, StructuredModel, parts_of
from registry import LIKELIHOODS, NETWORKS, PRIORS, problem, targets

CURVATURES = ("ggn", "ef", "mc")
MC = Root("mc", samples=2, seed=3)


def half(values: Tensor) -> int:
    """The rank of the case "inf": two fifths of a part's eigenvalues."""
    return -(-2 * len(values) // 5)


# name -> (what the library is asked for, the dense matrix)
STRUCTURES = {
    "kfac": (lambda: "kfac", lambda dense: dense.kfac()),
    "kfac reduce": (lambda: ntkl.KFAC(sharing="reduce"), lambda dense: dense.kfac("reduce")),
    "ekfac": (lambda: "ekfac", lambda dense: dense.ekfac()),
    "ekfac reduce": (lambda: ntkl.EKFAC(sharing="reduce"), lambda dense: dense.ekfac("reduce")),
    "inf": (lambda: ntkl.INF(rank=0.4), lambda dense: dense.inf(half)),
    "diag": (lambda: "diag", lambda dense: dense.diagonal),
}


def offered(network: str) -> list[str]:
    """Likelihoods that a network's number of outputs admits."""
    return [name for name, case in LIKELIHOODS.items() if NETWORKS[network].outputs >= case.least_outputs]


def tolerance(name: str, double: float) -> float:
    """A float32 network rounds its own outputs and Jacobians."""
    return double if NETWORKS[name].dtype == torch.float64 else 2e-5


@functools.cache
def jacobians(network: str) -> tuple[Tensor, Tensor]:
    case = problem(network)
    return jacobian(case.network, case.x), jacobian(case.network, case.x_new)


@functools.cache
def derivatives(network: str, likelihood: str) -> tuple[Tensor, Tensor, Tensor]:
    case = problem(network)
    y = targets(LIKELIHOODS[likelihood], case)
    return differentiate(LIKELIHOODS[likelihood].log_density, outputs(case.network, case.x), y)


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


@functools.cache
def parts(network: str, fusing: str):
    """Parts with weights and biases fused where their prior groups are one."""
    case = problem(network)
    return parts_of(case.network, case.x, lambda weight, bias: fusing in ("scalar", "layer"))


@functools.cache
def structured(network: str, likelihood: str, prior: str, curvature: str) -> Structured:
    fusing = "scalar" if prior in ("scalar", "layer") else "tensor"
    return Structured(
        parts(network, fusing), jacobians(network)[0], output_curvature(network, likelihood, curvature)
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
    )  # fmt: skip


@functools.cache
def fit(network: str, likelihood: str, prior: str, curvature: str, structure: str):
    return fresh_fit(network, likelihood, prior, curvature, structure)


def fresh_fit(network: str, likelihood: str, prior: str, curvature: str, structure, **options):
    """Fit with hyperparameters of its own; `structure` is a name of `STRUCTURES` or an object of the library."""
    case = problem(network)
    data = options.pop("data", None) or (case.x, targets(LIKELIHOODS[likelihood], case))
    return ntkl.laplace(
        case.network, data, LIKELIHOODS[likelihood].build(), prior=PRIORS[prior].build(case),
        structure=STRUCTURES[structure][0]() if structure in STRUCTURES else structure,
        curvature=MC if curvature == "mc" else curvature, **options,
    )  # fmt: skip
