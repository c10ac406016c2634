"""Optimizations of the Jacobian pass give the numbers of their plain versions."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import ntk_laplace as ntkl
from ntk_laplace.jacobian import Products
from reference import relative_error
from registry import LIKELIHOODS, PRIORS, problem, targets

BENCHMARKS = Path(__file__).parents[1] / "examples" / "benchmarks"
OPTIMIZATIONS = ["fused accumulation", "shared products", "side by side", "gradient buffers"]
NETWORKS = ["deep_mlp", "cnn_groups", "transformer_tied"]


def answers(network: str, structure: str) -> list[torch.Tensor]:
    case, likelihood = problem(network), LIKELIHOODS["categorical"]
    data = case.x, targets(likelihood, case)
    posterior = ntkl.laplace(case.network, data, likelihood.build(), PRIORS["tensor"].build(case), structure=structure)
    return [posterior.log_marginal_likelihood(), *posterior.latent_moments(case.x_new)]


@pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")
@pytest.mark.parametrize("structure", ["gp", "kfac", "diag"])
@pytest.mark.parametrize("network", NETWORKS)
def test_plain_versions_give_the_same_posterior(network, structure, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    versions = importlib.import_module("optimizations").PLAIN
    assert list(versions) == OPTIMIZATIONS
    fast = answers(network, structure)
    for owner, name, version in versions.values():
        with monkeypatch.context() as one:
            one.setattr(owner, name, version)
            plain = answers(network, structure)
        assert all(relative_error(a, b) < 1e-10 for a, b in zip(fast, plain, strict=True))


def test_a_product_is_shared_by_views_of_one_matrix_and_by_no_other():
    rows, other = torch.randn(2, 7, 3, dtype=torch.float64)
    products, total = Products(), torch.zeros(3, 3, dtype=torch.float64)
    for values in (rows, rows.view(7, 3), other, rows[:4]):
        products.add_to(total, values)
    truth = 2 * rows.T @ rows + other.T @ other + rows[:4].T @ rows[:4]
    assert relative_error(total.tril(), truth.tril()) < 1e-14
