"""B in panels of rows: the same posterior for panels of any height, and what is computed where no square fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ntk_laplace as ntkl
from ntk_laplace.curvature import posterior_precision
from ntk_laplace.jacobian import JacobianPass
from ntk_laplace.jacobian import gram as engine
from ntk_laplace.model.network import Network
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.lower_triangle import LowerTriangle
from reference import relative_error
from registry import LIKELIHOODS, NETWORKS, PRIORS, problem, targets

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")


def fit(network: str, likelihood: str, prior: str, structure: str = "gp", **options: Any) -> ntkl.Posterior:
    case = problem(network)
    y = targets(LIKELIHOODS[likelihood], case)
    return ntkl.laplace(case.network, (case.x, y), LIKELIHOODS[likelihood].build(), prior=PRIORS[prior].build(case),
                        structure=structure, **options)


def slopes(posterior: ntkl.Posterior) -> Tensor:
    """Of the evidence, in all hyperparameters."""
    moving = [*posterior.prior.parameters(), *posterior.likelihood.parameters()]
    return torch.cat([g.flatten() for g in torch.autograd.grad(posterior.log_marginal_likelihood(), moving)])


def drawn(posterior: ntkl.Posterior) -> Tensor:
    return posterior.posterior_precision.sample(2, torch.Generator().manual_seed(0))


VERBS: dict[str, Callable[[ntkl.Posterior, Any], Tensor]] = {
    "evidence": lambda p, x: p.log_marginal_likelihood(correction=True),
    "slopes": lambda p, x: slopes(p),
    "used": lambda p, x: p.effective_parameters(),
    "moments": lambda p, x: p.latent_moments(x)[1],
    "joint": lambda p, x: p.latent(x).covariance_matrix,
    "samples": lambda p, x: drawn(p),
    "left out": lambda p, x: p.leave_one_out().log_density,
    "removal": lambda p, x: p.removal_effects(x),
    "curve": lambda p, x: p.evidence_curve(torch.tensor([0.1, 1.0, 30.0])),
}
CASES = [("deep_mlp", "categorical", "scalar"), ("cnn_groups", "gaussian", "layer"),
         ("direct_parameters", "categorical", "parameter")]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_posterior_is_the_same_for_panels_of_any_height(case, monkeypatch):
    """Whole examples in each panel, so that 7 rows are 6 of two cotangents; several verbs cross the panels' bounds."""
    x_new = problem(case[0]).x_new
    whole = fit(*case)
    assert len(whole.posterior_precision.factor.panels) == 1
    wanted = {verb: ask(whole, x_new).detach() for verb, ask in VERBS.items()}
    monkeypatch.setattr(tuning, "PANEL_ROWS", 7)
    monkeypatch.setattr(tuning, "SOLVE_ROWS", 3)
    cut = fit(*case)
    assert len(cut.posterior_precision.factor.panels) > 2
    for verb, ask in VERBS.items():
        assert relative_error(ask(cut, x_new), wanted[verb]) < 1e-9, verb


@pytest.mark.parametrize("name", NETWORKS)
def test_gram_matrices_in_panels(name, monkeypatch):
    case = problem(name)
    rows = JacobianPass(Network(case.network), torch.float64).rows(case.x)
    delta = {key: torch.full((1,), 0.5 + i).double() for i, key in enumerate(case.parameters)}
    want = engine.gram(rows, delta).tril()
    k = rows.num_cotangents
    for height in (1, 2 * k + 1):
        monkeypatch.setattr(tuning, "PANEL_ROWS", height)
        found = engine.gram_lower(rows, delta)
        assert relative_error(found.to_dense(), want) < 1e-13
        assert all(len(panel) % k == 0 for panel in found.panels) and len(found.panels) > 1


# --- without a square matrix


@pytest.mark.parametrize("structure", ["gp", "full"])
def test_no_eigenvalues_above_a_size(structure, monkeypatch):
    """Hyperparameters and curve come from factorizations, and are the same; the spectrum is not listed."""
    factors = torch.tensor([0.2, 1.0, 5.0]).double()
    small, large = (fit("deep_mlp", "gaussian", "scalar", structure=structure) for _ in range(2))
    rows = len(large.posterior_precision.factor)
    curve, found = small.evidence_curve(factors), small.fit_hyperparameters()
    monkeypatch.setattr(tuning, "LARGEST_SPECTRUM", rows)
    assert len(large.spectrum()) == rows
    monkeypatch.setattr(tuning, "LARGEST_SPECTRUM", rows - 1)
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda *_, **__: pytest.fail("eigenvalues"))
    assert large.spectrum() is None and large.log_det_terms() is None
    assert relative_error(large.evidence_curve(factors), curve) < 1e-12
    again = large.fit_hyperparameters()
    assert abs(again.evidence[-1] - found.evidence[-1]) < 1e-6
    assert relative_error(large.prior.precision, small.prior.precision) < 1e-3


@pytest.mark.parametrize("structure", ["gp", "full"])
def test_no_eigenvalues_where_two_squares_do_not_fit(structure, monkeypatch):
    posterior = fit("deep_mlp", "gaussian", "scalar", structure=structure)
    square = len(posterior.posterior_precision.factor) ** 2 * 8
    for free, listed in ((2 * square, True), (2 * square - 1, False)):
        monkeypatch.setattr(posterior_precision, "available_memory", lambda device, free=free: free)
        assert (posterior.spectrum() is not None) is listed


def test_half_the_memory_of_a_square_is_enough(monkeypatch):
    """A budget below n² numbers, and one below the triangle's."""
    monkeypatch.setattr(tuning, "PANEL_ROWS", 8)
    rows = len(fit("deep_mlp", "categorical", "scalar").posterior_precision.factor)
    posterior = fit("deep_mlp", "categorical", "scalar")
    triangle = posterior.posterior_precision.factor.nbytes
    rows_and_outputs = posterior.fitted.structure.rows
    factors = 2 * (rows_and_outputs.nbytes + rows_and_outputs.f.nbytes)
    assert triangle < 0.8 * rows * rows * 8
    fit("deep_mlp", "categorical", "scalar", settings=ntkl.Settings(memory_budget=int(1.05 * (triangle + factors))))
    words = rf"expected B of {rows} x {rows} \(N = "
    with pytest.raises(ntkl.MemoryBudgetError, match=words):
        fit("deep_mlp", "categorical", "scalar", settings=ntkl.Settings(memory_budget=triangle - 1))


# --- what a device would wait for


class Numbers(TorchDispatchMode):
    """Counts the numbers that are read from tensors: each is a wait for a device."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += operation is torch.ops.aten._local_scalar_dense.default
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["deep_mlp", "cnn_groups", "transformer_tied", "direct_parameters"])
def test_tiles_read_no_number(name, monkeypatch):
    """As many reads for many tiles as for few, of one number and of several at once."""
    case = problem(name)
    rows = JacobianPass(Network(case.network), torch.float64).rows(case.x)
    root = torch.randn(*rows.f.shape, 2, dtype=torch.float64)
    delta = {key: torch.full((1,), 0.5 + i).double() for i, key in enumerate(case.parameters)}
    weighted, counts, together = rows.weighted(root), [], Tensor.tolist

    def counted(values: Tensor) -> Any:
        numbers.count += 1
        return together(values)

    monkeypatch.setattr(Tensor, "tolist", counted)
    for height in (1024, 2):
        monkeypatch.setattr(tuning, "TILE_ROWS", height)
        monkeypatch.setattr(tuning, "PANEL_ROWS", height)
        with Numbers() as numbers:
            engine.gram_lower(weighted, delta)
            engine.diagonal_blocks(weighted, delta)
            engine.cross_gram(weighted, weighted, delta)
        counts.append(numbers.count)
    assert counts[0] == counts[1], counts


def test_a_setting_of_few_digits_reaches_gram_and_factor():
    """Refused where float32 would be multiplied, and only there."""
    case = problem("deep_mlp")
    before = torch.backends.mkldnn.matmul.fp32_precision
    rows = JacobianPass(Network(case.network), torch.float32).rows(case.x)
    delta = {key: torch.ones(1) for key in case.parameters}
    triangle = LowerTriangle.empty(3, 1, torch.empty(0))
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        for work in (lambda: engine.gram(rows, delta), lambda: engine.gram_lower(rows, delta),
                     lambda: engine.cross_gram(rows, rows, delta), lambda: engine.diagonal_blocks(rows, delta),
                     lambda: next(engine.gram_tiles(rows, None, delta)), triangle.cholesky_):
            with pytest.raises(ntkl.UnsupportedError, match="float32 matrix products with all digits"):
                work()
        double = rows.to(torch.float64)
        engine.gram(double, delta)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
