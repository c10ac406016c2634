"""Identity 3: the Gram from factors is J P0⁻¹ Jᵀ, whole, across, on the diagonal, in tiles and as a product."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor, nn

from ntk_laplace.errors import MemoryBudgetError
from ntk_laplace.jacobian import Jacobian, JacobianPass, contractions
from ntk_laplace.jacobian import gram as engine
from ntk_laplace.jacobian.blocks import Dense, Lookup, Outer
from ntk_laplace.model.network import Network
from ntk_laplace.runtime import resources, tuning
from pairwise import one_each
from reference import jacobian, jacobian_by_func, relative_error
from registry import NETWORKS, PRIORS, Problem, problem

pytestmark = [
    pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]


@functools.cache
def jacobians(name: str) -> tuple[Tensor, Tensor]:
    """J at both sets of inputs, by ``vmap(jacrev)`` where that can differentiate the network."""
    case = problem(name)
    derive = jacobian_by_func if case.case.func else jacobian
    return derive(case.network, case.x), derive(case.network, case.x_new)


@functools.cache
def rows(name: str) -> tuple[Jacobian, Jacobian]:
    case = problem(name)
    factors = JacobianPass(Network(case.network), torch.float64)
    return factors.rows(case.x), factors.rows(case.x_new)


def variances(case: Problem, prior: str) -> dict[str, Tensor]:
    """1/δ by parameter name: a number where the prior has one for the tensor, else one per entry."""
    flat = 1 / PRIORS[prior].dense(case)[0]
    parts = flat.split([p.numel() for p in case.parameters.values()])
    return {
        name: part if prior == "parameter" or len(part.unique()) > 1 else part[:1].clone()
        for name, part in zip(case.parameters, parts, strict=True)
    }


def truth(name: str, prior: str, left: int, right: int) -> Tensor:
    """J P0⁻¹ Jᵀ, interleaved."""
    one, two = (jacobians(name)[side].flatten(0, 1) for side in (left, right))
    return (one / PRIORS[prior].dense(problem(name))[0]) @ two.T


def limit(name: str) -> float:
    return 1e-10 if NETWORKS[name].dtype == torch.float64 else 1e-6


CASES = [pytest.param(name, prior, id=f"{name}-{prior}") for name in NETWORKS for prior in PRIORS]
# between them they contract in every way
WITH_EVERY_PRIOR = ("cnn_groups", "scalar_outputs", "low_rank")


@pytest.mark.parametrize(("name", "prior"), CASES)
def test_whole_and_across(name, prior):
    one, two = rows(name)
    delta = variances(problem(name), prior)
    whole = engine.gram(one, delta)
    assert relative_error(whole, truth(name, prior, 0, 0)) < limit(name)
    assert torch.equal(whole, whole.T)
    assert relative_error(engine.gram(one, delta, two), truth(name, prior, 0, 1)) < limit(name)
    assert relative_error(engine.gram(two, delta, one), truth(name, prior, 1, 0)) < limit(name)


@pytest.mark.parametrize(("name", "prior"), CASES)
def test_diagonal_blocks_and_products(name, prior):
    one, two = rows(name)
    delta, (n, c) = variances(problem(name), prior), one.f.shape
    square = truth(name, prior, 0, 0).reshape(n, c, n, c)
    blocks = torch.stack([square[i, :, i] for i in range(n)])
    assert relative_error(engine.diagonal_blocks(one, delta), blocks) < limit(name)
    matrix = torch.randn(c * len(two.f), 3, dtype=torch.float64)
    assert relative_error(engine.multiply(one, two, delta, matrix), truth(name, prior, 0, 1) @ matrix) < limit(name)


# every prior with three networks, and one with each of the others
@pytest.mark.parametrize(("name", "prior"), [
    *itertools.product(WITH_EVERY_PRIOR, PRIORS),
    *one_each([name for name in NETWORKS if name not in WITH_EVERY_PRIOR], PRIORS),
])
def test_tiles_of_any_size_are_the_same(name, prior, monkeypatch):
    """Small tiles cut every block at every place."""
    one, two = rows(name)
    delta = variances(problem(name), prior)
    whole = engine.gram(one, delta), engine.gram(one, delta, two)
    with monkeypatch.context() as few:  # four blocks of rows
        few.setattr(tuning, "FEWEST_TILE_ROWS", 1)
        assert relative_error(engine.gram(one, delta), whole[0]) < 1e-13
    for examples in (1, 2, 5):
        monkeypatch.setattr(tuning, "TILE_ROWS", examples * one.num_cotangents)
        assert relative_error(engine.gram(one, delta), whole[0]) < 1e-13
        assert relative_error(engine.gram(one, delta, two), whole[1]) < 1e-13
        assert relative_error(engine.gram_lower(one, delta).to_dense(), whole[0].tril()) < 1e-13
    monkeypatch.setattr(tuning, "FEWEST_TILE_ROWS", 1)
    assert relative_error(engine.gram(one, delta), whole[0]) < 1e-13
    monkeypatch.setattr(tuning, "TILE_BYTES", 1)
    assert relative_error(engine.gram(one, delta), whole[0]) < 1e-13


@pytest.mark.parametrize("name", NETWORKS)
def test_weighted_rows_fold_the_root(name):
    """SᵀKS from rows of SᵀJ."""
    one, _ = rows(name)
    n, c = one.f.shape
    root = torch.randn(n, c, 2, dtype=torch.float64)
    big = torch.block_diag(*root)
    found = engine.gram(one.weighted(root), variances(problem(name), "layer"))
    assert relative_error(found, big.T @ truth(name, "layer", 0, 0) @ big) < limit(name)


@pytest.mark.parametrize("name", NETWORKS)
def test_groups_add_up(name):
    """K = Σ_g K_g: a parameter that is absent from the variances is left out."""
    one, two = rows(name)
    delta = variances(problem(name), "tensor")
    total = sum(engine.gram(one, {key: value}, two) for key, value in delta.items())
    assert relative_error(total, truth(name, "tensor", 0, 1)) < limit(name)


def test_large_parameters_have_a_matrix_of_their_own(monkeypatch):
    """Rows of one large parameter are kept as they were written; small ones share a matrix."""
    for name in ("cnn_groups", "transformer_tied"):
        case = problem(name)
        whole = engine.gram(rows(name)[0], variances(case, "layer"))
        for entries in (1, 10**9):
            monkeypatch.setattr(tuning, "SEPARATE_MATRIX_ENTRIES", entries)
            one = JacobianPass(Network(case.network), torch.float64).rows(case.x)
            wide = [block for block in one.blocks if isinstance(block, Dense)]
            assert all(len(block.spans) == 1 for block in wide) if entries == 1 else len(wide) == 1
            assert relative_error(engine.gram(one, variances(case, "layer")), whole) < 1e-13


def test_every_contraction_is_met():
    """The registry reaches each way of contracting; without this a rule could rot unseen."""
    met = set()
    for name in NETWORKS:
        one, two = rows(name)
        delta = variances(problem(name), "scalar")
        for left, right in ((one, two), (one, one)):
            met |= {type(each) for each in contractions.contractions(left.blocks, right.blocks, delta)}
    assert met >= {contractions.Hadamard, contractions.Written, contractions.Rows}
    assert {type(block) for name in NETWORKS for block in rows(name)[0].blocks} >= {Dense, Outer}


# ----------------------------------------------------------------------------- rows that stay factors, made large


class Roomy(nn.Module):
    """Few positions and wide layers, so that factors are cheaper than rows: tokens, positions, groups and a tie."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(60, 24), nn.Linear(24, 24)
        self.conv = nn.Conv1d(24, 32, 2, groups=2, stride=2)
        self.head = nn.Linear(24, 60, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.out, self.tied = nn.Linear(32, 2), tied

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(self.table(x)).tanh()
        h = h + (self.head(h).tanh() @ self.head.weight) / 8
        return self.out(self.conv(h.transpose(1, 2)).tanh().mean(2))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("cache", [tuning.INNER_SUMS_BYTES, 1], ids=["together", "one by one"])
def test_positions_and_tokens_without_rows(tied, prior, cache, monkeypatch):
    monkeypatch.setattr(tuning, "INNER_SUMS_BYTES", cache)
    torch.manual_seed(3)
    network = Roomy(tied).double()
    x, z = torch.randint(0, 60, (6, 4)), torch.randint(0, 60, (3, 6))
    case = Problem(NETWORKS["deep_mlp"], network, x, z)
    delta, precision = variances(case, prior), PRIORS[prior].dense(case)[0]
    factors = JacobianPass(Network(network), torch.float64)
    one, two = factors.rows(x), factors.rows(z)
    kinds = {type(block) for block in one.blocks}
    assert Lookup in kinds and any(isinstance(b, Outer) and not b.single for b in one.blocks)
    jac, jac_z = jacobian(network, x).flatten(0, 1), jacobian(network, z).flatten(0, 1)
    assert relative_error(engine.gram(one, delta), (jac / precision) @ jac.T) < 1e-10
    assert relative_error(engine.gram(one, delta, two), (jac / precision) @ jac_z.T) < 1e-10
    square = ((jac / precision) @ jac.T).reshape(6, 2, 6, 2)
    blocks = torch.stack([square[i, :, i] for i in range(6)])
    assert relative_error(engine.diagonal_blocks(one, delta), blocks) < 1e-10


class Several(nn.Module):
    """Rows a few times larger than their factors: with a bias and without, in groups, and of a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 24), nn.Linear(24, 20, bias=False)
        self.third = nn.Parameter(torch.randn(20, 24) / 4)
        self.conv, self.out = nn.Conv1d(24, 24, 2, groups=2), nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = (self.second(self.first(x).tanh()).tanh() @ self.third).tanh()
        return self.out(self.conv(h.transpose(1, 2)).tanh().mean(2))


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("panel", [tuning.PANEL_COLUMNS, 50])
def test_rows_written_out_a_panel_at_a_time(prior, panel, monkeypatch):
    monkeypatch.setattr(tuning, "PANEL_COLUMNS", panel)
    torch.manual_seed(5)
    network = Several().double()
    x, z = torch.randn(6, 5, 20).double(), torch.randn(3, 5, 20).double()
    case = Problem(NETWORKS["deep_mlp"], network, x, z)
    delta, precision = variances(case, prior), PRIORS[prior].dense(case)[0]
    factors = JacobianPass(Network(network), torch.float64)
    one, two = factors.rows(x), factors.rows(z)
    found = contractions.contractions(one.blocks, two.blocks, delta)
    kept = [each.left[0].weight for each in found if isinstance(each, contractions.Panels)]
    assert {"first.weight", "second.weight", "third", "conv.weight"} <= set(kept)
    jac, jac_z = jacobian(network, x).flatten(0, 1), jacobian(network, z).flatten(0, 1)
    square = (jac / precision) @ jac.T
    assert relative_error(engine.gram(one, delta), square) < 1e-10
    assert relative_error(engine.gram(one, delta, two), (jac / precision) @ jac_z.T) < 1e-10
    assert relative_error(engine.multiply(one, one, delta, torch.eye(12).double()), square) < 1e-10
    blocks = torch.stack([square.reshape(6, 2, 6, 2)[i, :, i] for i in range(6)])
    assert relative_error(engine.diagonal_blocks(one, delta), blocks) < 1e-10
    some = {name: value for name, value in delta.items() if name not in ("first.weight", "third")}
    left_out = {name: torch.zeros_like(value) if name not in some else value for name, value in delta.items()}
    assert relative_error(engine.gram(one, some), engine.gram(one, left_out)) < 1e-12


class RoomyAttention(nn.Module):
    """Cross-attention with layers wide enough to stay factors: three slices of one weight, each its own use."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(32, 2, batch_first=True), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.attention(x, x.flip(1), x.tanh(), need_weights=False)
        return self.out(h.tanh().mean(1))


def test_slices_of_one_weight():
    torch.manual_seed(4)
    network, x, z = RoomyAttention().double(), torch.randn(5, 2, 32).double(), torch.randn(4, 3, 32).double()
    factors = JacobianPass(Network(network), torch.float64)
    one, two = factors.rows(x), factors.rows(z)
    slices = [b for b in one.blocks if isinstance(b, Outer) and b.index is not None]
    assert len(slices) == 3 and {b.weight for b in slices} == {"attention.in_proj_weight"}
    jac, jac_z = jacobian(network, x).flatten(0, 1), jacobian(network, z).flatten(0, 1)
    ones = {name: torch.ones(1).double() for name, _ in network.named_parameters()}
    assert relative_error(engine.gram(one, ones), jac @ jac.T) < 1e-10
    assert relative_error(engine.gram(one, ones, two), jac @ jac_z.T) < 1e-10
    assert relative_error(engine.gram(two, ones, one), jac_z @ jac.T) < 1e-10


class HalfShared(nn.Module):
    """A layer used as it is, and its weight once more without its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(nn.functional.linear(torch.tanh(self.layer(x)), self.layer.weight)))


@pytest.mark.parametrize("left_out", [None, "layer.bias", "layer.weight"])
def test_a_weight_shared_without_its_bias(left_out):
    torch.manual_seed(7)
    network, x = HalfShared().double(), torch.randn(6, 4).double()
    delta = {name: torch.full((1,), 0.5 + i).double() for i, (name, _) in enumerate(network.named_parameters())}
    scale = torch.cat([
        delta[name].expand(p.numel()) * (name != left_out) for name, p in network.named_parameters()
    ])
    delta.pop(left_out, None)
    jac = jacobian(network, x).flatten(0, 1)
    one = JacobianPass(Network(network), torch.float64).rows(x)
    assert relative_error(engine.gram(one, delta), (jac * scale) @ jac.T) < 1e-10


def test_rows_of_other_lengths_take_other_forms():
    """Short sequences stay factors, long ones are written out; the Gram between them is the same."""
    torch.manual_seed(5)
    network = Roomy(tied=True).double()
    ones = {name: torch.ones(1).double() for name, _ in network.named_parameters()}
    factors = JacobianPass(Network(network), torch.float64)
    x, z = torch.randint(0, 60, (4, 2)), torch.randint(0, 60, (3, 60))
    one, two = factors.rows(x), factors.rows(z)
    assert [type(b) for b in one.blocks] != [type(b) for b in two.blocks]
    jac, jac_z = jacobian(network, x).flatten(0, 1), jacobian(network, z).flatten(0, 1)
    assert relative_error(engine.gram(one, ones, two), jac @ jac_z.T) < 1e-10
    assert relative_error(engine.gram(two, ones, one), jac_z @ jac.T) < 1e-10


class Routed(nn.Module):
    """The sign of the first entry of the batch chooses the layer, so rows may name different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.left if bool((x[:, 0] > 0).all()) else self.right)(x).tanh()


def test_rows_that_name_different_parameters():
    torch.manual_seed(6)
    network, x = Routed().double(), torch.randn(5, 3).double()
    x[:, 0].abs_()
    z = torch.cat([-x[:1], x[1:3]])
    z[:, 0] = -z[:, 0].abs()
    ones = {name: torch.ones(1).double() for name, _ in network.named_parameters()}
    factors = JacobianPass(Network(network), torch.float64)
    one, two = factors.rows(x), factors.rows(z)
    assert engine.gram(one, ones, two).abs().max() == 0
    jac = jacobian(network, z).flatten(0, 1)
    assert relative_error(engine.gram(two, ones), jac @ jac.T) < 1e-10


def test_a_gram_too_large_is_refused_before_it_is_allocated(monkeypatch):
    one, _ = rows("deep_mlp")
    size, delta = 35 * 35 * 8, variances(problem("deep_mlp"), "scalar")
    monkeypatch.setattr(tuning, "ASSUMED_FREE_BYTES", 0)
    monkeypatch.setattr(resources, "available_memory", lambda device: size)
    engine.gram(one, delta)
    monkeypatch.setattr(resources, "available_memory", lambda device: size - 1)
    with pytest.raises(MemoryBudgetError, match=r"expected a Gram matrix of 35 x 35 .*; got .*9\.6 KiB.*gram_tiles"):
        engine.gram(one, delta)


@pytest.mark.parametrize("name", ["deep_mlp", "transformer_tied", "scalar_outputs", "decoder_dict", "mlp_float32"])
def test_the_public_kernel(name):
    """``empirical_ntk``: interleaved, with and without a prior."""
    import ntk_laplace as ntkl

    case = problem(name)
    one, two = (each.flatten(0, 1) for each in jacobians(name))
    assert relative_error(ntkl.empirical_ntk(case.network, case.x), one @ one.T) < limit(name)
    assert relative_error(ntkl.empirical_ntk(case.network, case.x, case.x_new), one @ two.T) < limit(name)
    prior = PRIORS["layer"].build(case)
    found = ntkl.empirical_ntk(case.network, case.x, case.x_new, prior=prior)
    assert relative_error(found, truth(name, "layer", 0, 1)) < limit(name)
