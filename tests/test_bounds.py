"""Lower bounds of the evidence ([I23] theorems 1 to 3) against dense P x P determinants, on every network."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from exact_cases import TURNS, fit, ids, truth
from reference import Dense
from registry import LIKELIHOODS, problem
from registry_cases import offered

TOLERANCE = 1e-10
F64 = torch.float64


def log_det(terms: Tensor, precision: Tensor, parts: list[Tensor]) -> Tensor:
    """Σ_p log det(I + P0_p^-½ h_pp P0_p^-½) of a matrix h (P, P) over blocks of the parameters."""
    scale = precision.rsqrt()
    scaled = scale[:, None] * terms * scale
    if len(parts) == len(terms):
        return (1 + scaled.diagonal()).log().sum()
    return torch.stack([torch.linalg.slogdet(torch.eye(len(p), dtype=F64) + scaled[p][:, p]).logabsdet
                        for p in parts]).sum()  # fmt: skip


def bound(truth: Dense, precision: Tensor, blocks: list[Tensor], parts: list[Tensor], hessian: Tensor) -> Tensor:
    """The bound of a partition of the examples and one of the parameters, in weight space."""
    terms = [torch.einsum("ncp,ncd,ndq->pq", truth.jac[b], hessian[b], truth.jac[b]) for b in blocks]
    joint = truth.log_prob.sum() - 0.5 * (precision * truth.offset**2).sum()
    return joint - 0.5 * sum(log_det(each, precision, parts) for each in terms)


def partition(network: str, parameters: str | None) -> list[Tensor]:
    case, start = problem(network), 0
    found: dict[Any, list[int]] = {}
    for name, p in case.parameters.items():
        for i in range(start, start + p.numel()):
            key = {None: "", "layers": name.rpartition(".")[0], "diagonal": i}[parameters]
            found.setdefault(key, []).append(i)
        start += p.numel()
    return [torch.tensor(indices) for indices in found.values()]


@functools.cache
def case(turn: tuple[str, str, str], structure: str) -> tuple[ntkl.Posterior, Dense, float]:
    """A fit, its dense reference, and the tolerance: the networks in float32 have Jacobians of their own rounding."""
    return fit(*turn, structure), truth(*turn), TOLERANCE if problem(turn[0]).case.dtype == F64 else 1e-5


def turns() -> Iterator[tuple[tuple[str, str, str], str]]:
    """Every network, with the two exact structures and KFAC in turn."""
    for number, turn in enumerate(TURNS):
        yield turn, ("gp", "full", "kfac")[number % 3]


CASES = list(turns())
THEOREMS = {"1": (None, "layers"), "1, diagonal": (None, "diagonal"), "2": (3, None), "3": (3, "layers"),
            "3, diagonal": (2, "diagonal")}  # fmt: skip


@pytest.mark.parametrize(("turn", "structure"), CASES, ids=lambda value: value if isinstance(value, str) else ids(value))
def test_the_theorems_are_those_of_dense_matrices(turn: tuple[str, str, str], structure: str) -> None:
    posterior, dense, tolerance = case(turn, structure)
    exact, n = dense.evidence(), posterior.num_examples
    whole = posterior.evidence_bound(gradient=True)
    assert math.isclose(float(whole), float(exact), rel_tol=tolerance) and whole.num_blocks == 1  # tight in its limit
    values = {}
    for name, (examples, parameters) in THEOREMS.items():
        found = posterior.evidence_bound(examples, parameters, gradient=True, seed=1)
        assert sorted(torch.cat(found.used).tolist()) == list(range(n)) and found.standard_error == 0
        assert max(map(len, found.used)) == found.examples <= (examples or n)
        precision = posterior.prior.flat_precision()
        expected = bound(dense, precision, list(found.used), partition(turn[0], parameters), dense.hessian)
        assert math.isclose(float(found), expected.item(), rel_tol=tolerance), name
        slope, = torch.autograd.grad(expected, posterior.prior.log_precision)
        torch.testing.assert_close(found.gradient, slope, rtol=10 * tolerance, atol=tolerance * float(slope.abs().max()))
        assert float(found) <= exact + tolerance * abs(exact)
        values[name] = float(found)
    least = tolerance * abs(float(exact))
    assert values["1, diagonal"] <= values["1"] + least and values["3"] <= min(values["2"], values["1"]) + least


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_theorems_with_every_likelihood(likelihood: str) -> None:
    network = next(name for name in ("deep_mlp", "far_from_optimum") if likelihood in offered(name))
    for structure in ("gp", "full"):
        test_the_theorems_are_those_of_dense_matrices((network, likelihood, "layer"), structure)
