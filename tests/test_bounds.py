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
from reference import Dense, jacobian
from registry import LIKELIHOODS, problem
from registry_cases import offered, tolerance

# the fallback announces itself; that it does so, and by name, is held in test_factors
pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")
TOLERANCE = 1e-10
F64 = torch.float64


def log_det(terms: Tensor, precision: Tensor, parts: list[Tensor]) -> Tensor:
    """Σ_p log det(I + P0_p^-½ h_pp P0_p^-½) of a matrix h (P, P) over blocks of the parameters."""
    scale = precision.rsqrt()
    scaled = scale[:, None] * terms * scale
    if len(parts) == len(terms):
        return (1 + scaled.diagonal()).log().sum()
    return torch.stack([torch.linalg.slogdet(torch.eye(len(p), dtype=F64) + scaled[p][:, p]).logabsdet
                        for p in parts]).sum()


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
    return fit(*turn, structure), truth(*turn), tolerance(turn[0], TOLERANCE)


def turns() -> Iterator[tuple[tuple[str, str, str], str]]:
    """Every network, with the two exact structures and an approximation in turn."""
    for number, turn in enumerate(TURNS):
        yield turn, ("gp", "full", "diag")[number % 3]


CASES = list(turns())
THEOREMS = {"1": (None, "layers"), "1, diagonal": (None, "diagonal"), "2": (3, None), "3": (3, "layers"),
            "3, diagonal": (2, "diagonal")}


@pytest.mark.parametrize(("turn", "structure"), CASES, ids=[f"{ids(turn)}-{structure}" for turn, structure in CASES])
def test_the_theorems_are_those_of_dense_matrices(turn: tuple[str, str, str], structure: str) -> None:
    posterior, dense, error = case(turn, structure)
    exact, n = dense.evidence(), posterior.num_examples
    whole = posterior.evidence_bound(gradient=True)
    assert math.isclose(float(whole), float(exact), rel_tol=error) and whole.num_blocks == 1  # tight in its limit
    values = {}
    for name, (examples, parameters) in THEOREMS.items():
        found = posterior.evidence_bound(examples, parameters, gradient=True, seed=1)
        assert sorted(torch.cat(found.used).tolist()) == list(range(n)) and found.standard_error == 0
        assert max(map(len, found.used)) == found.examples <= (examples or n)
        precision = posterior.prior.flat_precision()
        expected = bound(dense, precision, list(found.used), partition(turn[0], parameters), dense.hessian)
        assert math.isclose(float(found), expected.item(), rel_tol=error), name
        slope, = torch.autograd.grad(expected, posterior.prior.log_precision)
        torch.testing.assert_close(found.gradient, slope, rtol=10 * error, atol=error * float(slope.abs().max()))
        assert float(found) <= exact + error * abs(exact)
        values[name] = float(found)
    least = error * abs(float(exact))
    assert values["1, diagonal"] <= values["1"] + least and values["3"] <= min(values["2"], values["1"]) + least


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_theorems_with_every_likelihood(likelihood: str) -> None:
    network = next(name for name in ("deep_mlp", "far_from_optimum") if likelihood in offered(name))
    for structure in ("gp", "full"):
        test_the_theorems_are_those_of_dense_matrices((network, likelihood, "layer"), structure)


# --- some of the blocks, and one output for each example


def small(likelihood: ntkl.Likelihood | None = None, n: int = 24, **options: Any) -> ntkl.Posterior:
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    data = torch.randn(n, 3, dtype=F64), torch.randint(0, 3, (n,))
    prior = ntkl.GaussianPrior(0.2, groups="layer")
    return ntkl.laplace(network, data, likelihood or ntkl.Categorical(), prior, **options)


@functools.cache
def small_truth() -> Dense:
    posterior = small()
    y = posterior.targets
    f = posterior.f
    p, one = torch.softmax(f, -1), torch.eye(3, dtype=F64)
    hessian = p[:, :, None] * one - p[:, :, None] * p[:, None]
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    jac = jacobian(network, torch.randn(24, 3, dtype=F64))
    theta = torch.nn.utils.parameters_to_vector(network.parameters()).detach()
    log_prob = torch.log_softmax(f, -1).gather(1, y.reshape(-1, 1)).squeeze(1)
    return Dense(log_prob, one[y.reshape(-1)] - p, hessian, jac, theta, torch.full_like(theta, 0.2))


@pytest.mark.slow
def test_an_estimate_from_some_blocks_has_their_standard_error() -> None:
    posterior = small()
    inside, errors = 0, []
    for seed in range(20):
        found, whole = posterior.evidence_bound(4, blocks=3, seed=seed), posterior.evidence_bound(4, seed=seed)
        errors.append(float(found) - float(whole))
        inside += abs(errors[-1]) < 3 * found.standard_error
    assert inside >= 17  # of a standard error from three blocks
    assert abs(sum(errors)) < 2 * math.sqrt(sum(e**2 for e in errors))  # unbiased: they cancel
    found = posterior.evidence_bound(4, blocks=3)
    parts = torch.stack([posterior.subset(index).log_det().detach() for index in found.used])  # no new mathematics
    torch.testing.assert_close(found.log_det, 6 / 3 * parts.sum(), rtol=1e-12, atol=0)
    deviation = float(((parts - parts.mean()) ** 2).sum() / 2)
    assert math.isclose(found.standard_error, 0.5 * 6 * math.sqrt(deviation / 3 * (1 - 3 / 6)))
    one = posterior.evidence_bound(4, blocks=1, gradient=True)
    assert math.isnan(one.standard_error) and len(one.used) == 1 and one.gradient is not None
    assert posterior.evidence_bound(4).gradient is None


@pytest.mark.parametrize("structure", ["gp", "kfac"])
def test_one_output_for_each_example_takes_the_eigenvectors_in_order(structure: str) -> None:
    posterior, dense = small(structure=structure), small_truth()
    values, vectors = torch.linalg.eigh(dense.hessian)
    root = (vectors * values.clamp_min(0).sqrt()[:, None]).flip(-1)  # (N, C, C), largest first; the last column is 0
    for examples, parameters in ((None, None), (8, None), (8, "layers")):
        found = posterior.evidence_bound(examples, parameters, outputs="one", gradient=True)
        assert found.num_blocks == len(found.used) == 2 * (24 // (examples or 24))  # C - 1 columns
        halves = found.used[::2]
        parts = [torch.arange(20), torch.arange(20, 38)] if parameters else [torch.arange(38)]
        precision = posterior.prior.flat_precision()
        expected = sum(bound(dense, precision, list(halves), parts, root[..., r, None] * root[..., None, :, r])
                       for r in range(3))
        joint = dense.log_prob.sum() - 0.5 * (precision * dense.offset**2).sum()
        expected = expected - 2 * joint  # it was counted three times
        assert math.isclose(float(found), expected.item(), rel_tol=TOLERANCE)
        slope, = torch.autograd.grad(expected, posterior.prior.log_precision)
        torch.testing.assert_close(found.gradient, slope, rtol=1e-9, atol=1e-9)
        assert float(found) < float(dense.evidence())
    drawn = posterior.evidence_bound(8, outputs="one", blocks=4)
    assert drawn.num_blocks == 6 and len(drawn.used) == 4 and drawn.standard_error > 0


def test_an_estimate_class_by_class_without_the_off_diagonals_is_no_bound() -> None:
    """[I23]'s own code takes p(1 - p) for each class: less than log det B where two classes are opposite."""

    class Opposite(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1, dtype=F64))  # p = 1/2

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.w * x, -self.w * x], 1)

    network, x = Opposite(), torch.full((1, 1), 2.0, dtype=F64)
    posterior = ntkl.laplace(network, (x, torch.tensor([0])), ntkl.Categorical())  # |J|^2 / delta = 4
    jac = jacobian(network, x)[0, :, 0]
    theirs = torch.log1p(0.25 * jac**2).sum()
    assert math.isclose(float(posterior.log_det()), math.log(5)) and math.isclose(float(theirs), 2 * math.log(2))
    assert float(theirs) < float(posterior.log_det())
    for outputs in ("all", "one"):
        for parameters in (None, "layers", "diagonal"):
            found = posterior.evidence_bound(1, parameters, outputs)
            assert math.isclose(float(found.log_det), math.log(5), rel_tol=1e-12)


def test_weights_of_examples_and_what_ifs_are_in_the_bound() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y, w = torch.randn(9, 2, dtype=F64), torch.randn(9, 2, dtype=F64), torch.rand(9, dtype=F64) * 3
    w[2] = 0.0
    for structure in ("gp", "full"):
        posterior = ntkl.laplace(network, (x, y, w), ntkl.Gaussian(0.1), structure=structure)
        for one in (posterior, posterior.subset([0, 2, 3, 4, 8])):
            exact = float(one.log_marginal_likelihood())
            assert math.isclose(float(one.evidence_bound()), exact, rel_tol=1e-10)
            assert float(one.evidence_bound(2)) < exact


def test_a_bound_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = small()
    assert repr(posterior.evidence_bound(6)).startswith("lower bound of the evidence: -")
    assert "(4 of 4 blocks, at most 6 examples each; all parameters)" in str(posterior.evidence_bound(6))
    words = str(posterior.evidence_bound(6, "layers", "one", blocks=3))
    assert words.startswith("estimate of a lower bound of the evidence: -") and " ± " in words
    assert words.endswith("nats (3 of 8 blocks, at most 6 examples each, one output each; layer by layer)")
    assert "1 of 1 block," in str(posterior.evidence_bound(parameters="diagonal"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"examples": 0}, "examples as a whole number, at least 1"),
        ({"examples": 6, "blocks": 5}, "at most 4 blocks"),
        ({"blocks": 0}, "blocks as a whole number"),
        ({"parameters": "layer"}, 'parameters None, "layers" or "diagonal"'),
        ({"outputs": "two"}, 'outputs "all" or "one"'),
    ],
)
def test_bad_input(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ntkl.NTKLaplaceError, match=words):
        small().evidence_bound(**options)


def test_a_block_that_does_not_fit_is_refused() -> None:
    posterior = small(structure="diag", settings=ntkl.Settings(memory_budget=5000))
    with pytest.raises(ntkl.MemoryBudgetError, match="matrices of a block"):
        posterior.evidence_bound()
    assert posterior.evidence_bound(3, "diagonal").num_blocks == 8
