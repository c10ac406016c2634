"""Fits of two forms of the same data, in every structure, and what has to agree between them."""

from __future__ import annotations

from typing import Any

import torch

import ntk_laplace as ntkl
from ntk_laplace.model.likelihoods import Likelihood
from pairwise import one_each
from reference import relative_error
from registry import PRIORS, problem

STRUCTURES = {
    "gp": "gp", "full": "full", "kfac": "kfac", "reduce": ntkl.KFAC(sharing="reduce"), "ekfac": "ekfac",
    "inf": ntkl.INF(rank=0.4), "diag": "diag",
}


def fit(name: str, likelihood: Likelihood, data: tuple[Any, ...], structure: Any = "gp", **options: Any):
    """A network of the registry under precisions by layer."""
    own = problem(name)
    return ntkl.laplace(own.network, data, likelihood, PRIORS["layer"].build(own), structure, **options)


def assert_same(found: Any, want: Any, x_new: Any, limit: float = 1e-9) -> None:
    """Evidence with correction and its gradients in all hyperparameters, what it is made of, and moments."""
    for score in ("log_joint", "log_det", "bic", "effective_parameters"):
        assert relative_error(getattr(found, score)(), getattr(want, score)()) < limit
    values = [p.log_marginal_likelihood(correction=True) for p in (found, want)]
    assert relative_error(*values) < limit
    gradients = [
        torch.autograd.grad(value, [p.prior.log_precision, *p.likelihood.parameters()])
        for value, p in zip(values, (found, want), strict=True)
    ]
    for one, other in zip(*gradients, strict=True):
        assert relative_error(one, other) < 1e2 * limit
    # the linear model's optimum takes its own curvature
    exact = found.structure in ("gp", "full") and found.curvature_type.kind == "ggn"
    for mean in ("map", "posterior") if exact or isinstance(found.likelihood, ntkl.Gaussian) else ("map",):
        for one, other in zip(found.latent_moments(x_new, mean), want.latent_moments(x_new, mean), strict=True):
            assert relative_error(one, other) < 10 * limit


def dealt(cases: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Every structure with two of the cases, drawn so that every case comes about as often."""
    twice = [name for name in STRUCTURES for _ in range(2)]
    return [(name, *case) for name, case in one_each(twice, cases)]
