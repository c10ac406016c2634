"""What structured weight space refuses, held by its text."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

import ntk_laplace as ntkl
from ntk_laplace.curvature import Summary
from ntk_laplace.errors import DataError, HyperparameterError, NonFiniteError, NumericalError, UnsupportedError
from registry import LIKELIHOODS, fresh, problem, targets
from streams import interrupted_kfac, loader
from structured_cases import fresh_fit

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")


def refused(error: type[Exception], expected: str, got: str, remedy: str):
    """Hold an error to its class and to the three parts of its text (regular expressions)."""
    return pytest.raises(error, match=rf"(?s)expected .*{expected}.*; got .*{got}.*\. .*{remedy}")


def kfac(**options):
    return fresh_fit("deep_mlp", "categorical", "layer", "ggn", options.pop("structure", "kfac"), **options)


@pytest.mark.parametrize("structure", ["kfac", "ekfac"])
def test_precisions_by_parameter_do_not_fit_kronecker_factors(structure):
    with refused(HyperparameterError, f"precision per layer or tensor.*{structure}", 'groups="parameter"', '"inf"'):
        fresh_fit("deep_mlp", "categorical", "parameter", "ggn", structure)


@pytest.mark.parametrize("structure", ["ekfac", ntkl.KFAC(rank=2), ntkl.KFAC(damped=True)], ids=str)
def test_precisions_by_input_need_the_whole_undamped_input_factor(structure):
    with refused(HyperparameterError, "per layer or tensor.*kfac", 'groups="input" with E?KFAC', '"kfac" without'):
        fresh_fit("deep_mlp", "categorical", "input", "ggn", structure)


def test_precisions_by_input_need_inputs_on_the_second_axis():
    with refused(HyperparameterError, "inputs on the second axis of '0.weight'", "outputs there", '"gp", "full"'):
        fresh_fit("conv_transpose1d", "categorical", "input", "ggn", "kfac")


@pytest.mark.parametrize("rank", [0, -1, 0.0, 1.5, True, "trace:0", "trace:1.5", "trace:many", "half", None])
def test_ranks_that_mean_nothing(rank):
    with refused(HyperparameterError, "a rank", re.escape(repr(rank)), "INF"):
        ntkl.INF(rank=rank)


@pytest.mark.parametrize("form", [ntkl.KFAC, ntkl.EKFAC, ntkl.INF])
def test_unknown_sharing(form):
    with refused(UnsupportedError, "expand, reduce", "'average'", "averaged"):
        form(sharing="average")


def test_unknown_words():
    with refused(UnsupportedError, "shrink", "'clip'", "Choose"):
        ntkl.INF(violation="clip")
    with refused(UnsupportedError, "kfac, ekfac, inf, diag", "'kronecker'", "kfac"):
        kfac(structure="kronecker")
    with refused(HyperparameterError, "positive finite factors", "0.0", "logarithms"):
        kfac().evidence_curve(torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize("basis", ["gp", "diag", "other", "nothing"])
def test_a_basis_of_something_else(basis):
    found = {
        "gp": lambda: kfac(structure="gp"), "diag": lambda: kfac(structure="diag"), "nothing": lambda: "kfac",
        "other": lambda: fresh_fit("far_from_optimum", "categorical", "layer", "ggn", "kfac"),
    }[basis]()
    got = {"gp": "gp", "diag": "diag", "nothing": "kfac", "other": "other parameters"}[basis]
    with refused(UnsupportedError, "basis=", got, "Fit"):
        kfac(structure=ntkl.EKFAC(basis=found))


def test_what_cannot_be_merged():
    case = problem("deep_mlp")
    y = targets(LIKELIHOODS["categorical"], case)
    half = case.x[:3], y[:3]
    moved = fresh("deep_mlp").network
    with torch.no_grad():
        moved[0].weight.add_(0.1)
    others = {
        "structure": kfac(structure="diag", data=half),
        "curvature": fresh_fit("deep_mlp", "categorical", "layer", "ef", "kfac", data=half),
        "weights": ntkl.laplace(moved, half, ntkl.Categorical(), structure="kfac"),
        "network": fresh_fit("far_from_optimum", "categorical", "layer", "ggn", "kfac"),
        "parts": fresh_fit("deep_mlp", "categorical", "tensor", "ggn", "kfac", data=half),
        "sharing": kfac(structure=ntkl.KFAC(sharing="reduce"), data=half),
        "dtype": kfac(data=half, dtype=torch.float32),
    }
    posterior = kfac()
    for other in others.values():
        with refused(UnsupportedError, "two.*posteriors", ".", "Fit both"):
            posterior.merge(other)
    gp, full = (ntkl.laplace(case.network, half, ntkl.Categorical(), structure=name) for name in ("gp", "full"))
    with refused(UnsupportedError, "two.*posteriors", "structure='gp'.*structure='full'", "Fit both"):
        gp.merge(full)
    with refused(UnsupportedError, "one eigenbasis", "two", r"EKFAC\(basis="):
        kfac(structure="ekfac").merge(kfac(structure="ekfac", data=half))
    with refused(UnsupportedError, "one eigenbasis", "two", r"INF\(basis="):
        kfac(structure="inf").merge(kfac(structure="inf", data=half))


def test_a_diagonal_that_the_low_rank_part_exceeds():
    """[S20] lemma 3: named in a warning and repaired, or refused where the prior does not make up for it."""
    case = problem("deep_mlp")
    data = case.x, targets(LIKELIHOODS["categorical"], case)
    weak = ntkl.GaussianPrior(precision=1e-6)
    with pytest.warns(ntkl.NTKLaplaceWarning, match=r"exceeds the exact diagonal .*0\.weight \(\d+ of 24 entries"):
        shrunk = ntkl.laplace(case.network, data, ntkl.Categorical(), prior=weak, structure=ntkl.INF(rank=1.0))
    precision = shrunk.posterior_precision.information() + 1e-6 * torch.eye(case.theta.numel(), dtype=torch.float64)
    assert torch.linalg.eigvalsh(precision).min() > 0
    with warnings.catch_warnings(record=True) as told:  # of all points, not of the new ones alone
        warnings.simplefilter("always")
        more = shrunk.condition((case.x[:1], data[1][:1])).condition((case.x[1:3], data[1][1:3]))
        assert not told
        more.predict(case.x_new)
        more.predict(case.x_new)
    assert len(told) == 1 and "exceeds the exact diagonal" in str(told[0].message)
    asked = ntkl.INF(rank=1.0, violation="raise")
    with refused(NumericalError, "positive diagonal correction", r"\d+ of \d+ entries", "shrink"):
        ntkl.laplace(case.network, data, ntkl.Categorical(), prior=weak, structure=asked)


def test_kept_eigenvalues_that_are_zero_are_named():
    """[S20] lemma 3's other condition: each hidden unit sees one of the two inputs, and pairs of both are empty."""
    network = torch.nn.Sequential(
        torch.nn.Linear(2, 2, bias=False), torch.nn.ReLU(), torch.nn.Linear(2, 1, bias=False)
    ).double()
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor([[1.0, -5.0], [-5.0, 1.0]]))
        network[2].weight.copy_(torch.tensor([[1.0, 3.0]]))
    data = torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double(), torch.zeros(2, 1).double()
    with pytest.warns(ntkl.NTKLaplaceWarning, match=r"eigenvalues that are zero .*0\.weight \(2 of 4\): .*prior"):
        posterior = ntkl.laplace(network, data, ntkl.Gaussian(), structure="inf")
    ekfac = ntkl.laplace(network, data, ntkl.Gaussian(), structure="ekfac")
    assert posterior.log_det().item() == pytest.approx(ekfac.log_det().item())


def test_wrong_data_of_a_later_batch_are_named():
    case = problem("deep_mlp")
    y = targets(LIKELIHOODS["categorical"], case).clone()
    y[5] = 17
    with pytest.raises(DataError, match=r"17"):
        kfac(data=loader(case.x, y, batch_size=2))
    with pytest.raises(DataError, match=r"(?s)features|shape|size|inputs"):
        kfac().condition((torch.randn(3, 3).double(), torch.tensor([0, 1])))


def test_resuming_wants_the_same_fit():
    case = problem("deep_mlp")
    data = case.x, targets(LIKELIHOODS["categorical"], case)
    settings = interrupted_kfac()
    with refused(UnsupportedError, "KFAC.*expand", "EKFAC", "same structure"):
        ntkl.laplace(case.network, data, ntkl.Categorical(), structure="ekfac", settings=settings)
    with refused(UnsupportedError, "kfac.*resume", "gp", "resume="):
        ntkl.laplace(case.network, data, ntkl.Categorical(), structure="gp", settings=settings)
    with refused(DataError, "interrupted fit", "int", "FitInterrupted"):
        ntkl.laplace(case.network, data, ntkl.Categorical(), structure="kfac", settings=ntkl.Settings(resume=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("structure", ["kfac", "ekfac", "inf", "diag"])
def test_sums_that_do_not_fit_name_what_takes_less(structure, dtype):
    with refused(ntkl.MemoryBudgetError, f"structure='{structure}'", "a predicted need", "last_layer") as caught:
        kfac(structure=structure, dtype=dtype, settings=ntkl.Settings(memory_budget=100))
    assert ('structure="diag"' in caught.value.remedy) == (structure != "diag")
    assert ("float32" in caught.value.remedy) == (dtype != torch.float32)


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diag"])
def test_sums_that_overflow_are_named(structure):
    """Finite inputs and outputs whose squares are not: said at the fit, with the type that bears them."""
    network, x = nn.Linear(3, 2), torch.randn(20, 3) * 1e25
    data = x, torch.randint(2, (20,))
    with torch.no_grad():
        network.weight.mul_(1e-25)
    with refused(NonFiniteError, "sums over the data for 'weight'", "overflow", "float64"):
        ntkl.laplace(network, data, ntkl.Categorical(), structure=structure, dtype=torch.float32)
    posterior = ntkl.laplace(network, data, ntkl.Categorical(), structure=structure)
    assert bool(torch.isfinite(posterior.log_det()))
    near = torch.tensor([1.5e308, 1.5e308], dtype=torch.float64)
    Summary(posterior.parameter_blocks[0], {"left": near}).require_finite()  # their own sum alone overflows


def test_a_softmax_has_no_negative_curvature_along_equal_outputs():
    """diag(p) - ppᵀ has the null vector (1, 1, ...), where rounding gives either sign."""
    p = torch.softmax(torch.randn(500, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), 1)
    basis = torch.linalg.qr(torch.cat([torch.ones(3, 1), torch.randn(3, 2)], 1).double())[0]
    form = ntkl.Categorical().diagonal_form(p.log()).detach()
    dense = torch.einsum("ca,nc,cb->nab", basis, p, basis) - torch.einsum("na,nb->nab", p @ basis, p @ basis)
    assert float(form.squares(basis).min()) >= 0.0
    torch.testing.assert_close(form.squares(basis), dense.diagonal(dim1=1, dim2=2), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(form.squares(), p * (1 - p), rtol=1e-12, atol=1e-15)


def test_a_list_of_two_batches_is_no_pair():
    x, y = torch.randn(9, 3), torch.arange(9) % 2
    words = r"targets as one tensor .* a tuple\. .* pass DataLoader.* if these are batches"
    with pytest.raises(ntkl.DataError, match=words):
        ntkl.laplace(torch.nn.Linear(3, 2), [(x[:5], y[:5]), (x[5:], y[5:])], ntkl.Categorical(), structure="diag")
