"""Every structure's matrix against the dense one it stands for, identities 4 and 5, and the lemmas of [S20]."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import ntk_laplace as ntkl
from networks.case import Lambda
from ntk_laplace.curvature import FactorEigen, diagonal_block
from ntk_laplace.curvature.inf import chosen_rank
from ntk_laplace.curvature.parameter_blocks import SummedRows, find_parameter_blocks
from ntk_laplace.curvature.spectral import DenseParameterBlock, SpectralBlock
from ntk_laplace.jacobian import JacobianPass, Outer
from ntk_laplace.model.network import Network
from ntk_laplace.runtime.meter import PeakMemory
from ntk_laplace.runtime.reflections import Basis
from pairwise import pairwise
from reference import jacobian, relative_error
from reference_structures import Block, Kronecker, Structured, parts_of
from registry import LIKELIHOODS, NETWORKS, PRIORS, problem, targets
from registry_cases import jacobians, offered, tolerance
from structured_cases import (
    BY_CALLS,
    CURVATURES,
    STRUCTURES,
    admits,
    fit,
    fraction,
    fresh_fit,
    ids,
    information,
    output_curvature,
    structured,
)
from structured_cases import CASES as COMPUTED

# the fallback, large tensors and INF's shrinking announce themselves; that they do so is held where they are covered
pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")

# networks of every kind of layer, for what is held of all parts
CROSSED = (
    "deep_mlp", "cnn_groups", "resnet_batchnorm", "transformer_tied", "frozen_part", "layer_twice", "scalar_outputs",
    "decoder_dict", "conv1d", "conv_transpose2d", "shared_positions",
)
# Reduced factors of few examples are singular in directions that the examples' rows do have: whatever eigenvectors
# LAPACK picks there are EKFAC's. In these networks they are regular, or positions are single.
DETERMINED = (
    "deep_mlp", "linear_model", "scalar_outputs", "frozen_part", "conv1d", "conv_transpose1d", "layer_twice",
    "shared_positions", "direct_parameters", "prelu_bilinear", "embedding_as_head", "self_attention_sequence_first",
)
# with a Gaussian likelihood the last layer's eigenvalues are tied, and a tie decides what INF keeps
CHOSEN = {name: [each for each in offered(name) if each != "gaussian"] for name in NETWORKS}


def covered(network: str, likelihood: str, prior: str, curvature: str, structure: str) -> bool:
    return (
        admits(network, likelihood, prior, curvature, structure) and likelihood in CHOSEN[network]
        and (structure != "ekfac reduce" or network in DETERMINED)
        # one cotangent for each example: the outputs' factor is singular too
        and (network, curvature, structure) != ("self_attention_sequence_first", "ef", "ekfac reduce")
    )


# every network with every structure, every curvature, and every likelihood and prior that these take; with this seed,
# the main structures have every curvature together with every prior as well. The cases of test_structured_posterior
# are among them, whose fits and dense matrices both files need.
CASES = pairwise(NETWORKS, LIKELIHOODS, PRIORS, CURVATURES, STRUCTURES, allowed=covered, seed=100, given=COMPUTED)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_information_is_the_dense_matrix(case):
    found = fit(*case).posterior_precision.information()
    assert relative_error(found, information(*case)) < tolerance(case[0], 1e-9)


@pytest.mark.slow
def test_the_table_covers_what_it_claims():
    assert {(case[0], case[4]) for case in CASES} == {
        (network, structure) for network in NETWORKS for structure in STRUCTURES
        if structure != "ekfac reduce" or network in DETERMINED
    }
    assert {case[2:] for case in CASES} >= {
        (prior, curvature, structure)
        for structure in ("kfac", "ekfac", "inf", "diag") for curvature in CURVATURES
        for prior in ("scalar", "tensor", "layer")
    }
    assert {case[4] for case in CASES} == set(STRUCTURES)
    parts = [part for name in CROSSED for part in structured(name, CHOSEN[name][0], "scalar", "ggn").parts]
    assert {type(part) for part in parts} == {Kronecker, Block}
    assert any(part.one_hot for part in parts if isinstance(part, Kronecker))


@pytest.mark.parametrize("network", BY_CALLS)
def test_networks_by_calls_are_the_networks(network):
    case = problem(network)
    for n in range(3):
        x = case.x[n : n + 1]
        assert relative_error(BY_CALLS[network](case.network)(x), case.network(x)) < 1e-12


# ------------------------------------------------------------------------------------------------------- the partition

# weights (and biases) that are Kronecker parts, and what is kept exactly; G parts of a grouped convolution
PARTITIONS = {
    "cnn_groups": (["0", "3", "8"], ["1.weight", "1.bias", "4.weight", "4.bias"]),
    "conv_transpose2d": (["0", "2"], ["0.bias"]),
    "frozen_part": (["2", "4"], []),
    "layer_twice": (["first", "shared", "head"], []),
    "embedding_bag": (["out"], ["table", "bag.weight"]),
    "self_attention_batch_first": (["attention", "attention.out_proj", "out"], []),
    "encoder_sequence_first": (
        ["lift", "layer.self_attn", "layer.self_attn.out_proj", "layer.linear1", "layer.linear2", "out"],
        [f"layer.norm{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")],
    ),
    "decoder_dict": (
        [
            "embedding", "layer.self_attn", "layer.self_attn.out_proj", "layer.multihead_attn",
            "layer.multihead_attn.out_proj", "layer.linear1", "layer.linear2", "out",
        ],
        # its weight is used in slices, queries apart from keys and values
        ["layer.multihead_attn.in_proj_bias"]
        + [f"layer.norm{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")],
    ),
    "transformer_tied": (
        [
            "encoder.layers.0.self_attn", "encoder.layers.0.self_attn.out_proj", "encoder.layers.0.linear1",
            "encoder.layers.0.linear2", "out",
        ],
        [
            "positions", "embedding.weight",
            *[f"encoder.layers.0.norm{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")],
        ],
    ),
}


@pytest.mark.parametrize("network", PARTITIONS)
def test_every_parameter_has_its_part(network):
    """Kronecker where it fits, the exact block where it does not, nothing dropped."""
    found = fit(network, CHOSEN[network][0], "scalar", "ggn", "kfac").parameter_blocks
    layers, blocks = PARTITIONS[network]
    assert {part.kind for part in found} <= {"kronecker", "block", "diagonal"}
    kronecker = [part for part in found if part.kind == "kronecker"]
    assert {name.rpartition(".")[0] for part in kronecker for name in part.names} == set(layers)
    assert sorted(name for part in found if part.kind == "block" for name in part.names) == sorted(blocks)
    assert {name for part in found for name in part.names} == set(problem(network).names)
    assert sum(part.size for part in found) == problem(network).theta.numel()


@pytest.mark.parametrize("prior", ["scalar", "layer", "tensor"])
def test_a_bias_is_fused_where_one_precision_covers_both(prior):
    found = {part.names: part.kind for part in fit("deep_mlp", "categorical", prior, "ggn", "kfac").parameter_blocks}
    if prior == "tensor":
        assert found[("0.weight",)] == "kronecker" and found[("0.bias",)] == "block"
    else:
        assert found[("0.weight", "0.bias")] == "kronecker"


@pytest.mark.slow
def test_a_tensor_beyond_the_largest_block_keeps_its_diagonal_and_is_named():
    """1,024 entries are a block, more are a diagonal, and a warning says which."""

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = (nn.Parameter(0.1 * torch.randn(n).double()) for n in (1024, 1025))
            self.head = nn.Linear(2, 2).double()

        def forward(self, x):
            scale = (torch.tanh(self.small) * x[:, :1]).sum(1, keepdim=True)
            return self.head(x) * (scale + (torch.tanh(self.large) * x[:, 1:]).mean(1, keepdim=True))

    network, x = Direct(), torch.randn(3, 2).double()
    with pytest.warns(ntkl.NTKLaplaceWarning, match="large") as caught:
        posterior = ntkl.laplace(network, (x, torch.randn(3, 2).double()), ntkl.Gaussian(), structure="kfac")
    assert len([each for each in caught if "large" in str(each.message)]) == 1
    assert not any("small" in str(each.message) for each in caught)
    kinds = {part.names: part.kind for part in posterior.parameter_blocks}
    assert kinds[("small",)] == "block" and kinds[("large",)] == "diagonal"
    curvature = torch.eye(2).double().expand(3, 2, 2)
    dense = Structured(parts_of(network, x, lambda *_: True), jacobian(network, x), curvature)
    assert relative_error(posterior.posterior_precision.information(), dense.kfac()) < 1e-10


def test_a_bias_apart_that_is_too_large_for_a_block_keeps_its_diagonal(monkeypatch):
    """Also where its layer's output gradients come added up, as those of many examples do."""
    monkeypatch.setattr("ntk_laplace.runtime.tuning.LARGEST_EXACT_BLOCK", 3)
    torch.manual_seed(2)
    network, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.randn(30, 3).double()
    prior = ntkl.GaussianPrior(groups="tensor")
    posterior = ntkl.laplace(network, (x, torch.randn(30, 2).double()), ntkl.Gaussian(), prior, structure="kfac")
    kinds = {part.names: part.kind for part in posterior.parameter_blocks}
    assert kinds[("0.bias",)] == "diagonal" and kinds[("2.bias",)] == "block"
    exact = torch.einsum("ncp,ncq->pq", jacobian(network, x), jacobian(network, x))
    found, first, last = posterior.posterior_precision.information(), slice(12, 16), slice(24, 26)
    assert relative_error(found[first, first], exact[first, first].diagonal().diag()) < 1e-12
    assert relative_error(found[last, last], exact[last, last]) < 1e-12


# -------------------------------------------------------------------------------------------------------- identities


@pytest.mark.parametrize(
    ("network", "curvature", "structure"), pairwise(CROSSED, CURVATURES, ("diag", ntkl.INF(rank=1), ntkl.INF(rank=0.7)))
)
def test_diagonal_is_the_diagonal_of_the_full_matrix(network, curvature, structure):
    """Identity 4, for "diag" and for INF at every rank, even one."""
    likelihood = CHOSEN[network][0]
    exact = structured(network, likelihood, "scalar", curvature).exact.diagonal()
    found = fresh_fit(network, likelihood, "scalar", curvature, structure).posterior_precision.information()
    assert relative_error(found.diagonal(), exact) < 1e-9


@pytest.mark.parametrize(
    ("network", "sharing"),
    [(name, "expand") for name in ("deep_mlp", "cnn_groups", "transformer_tied", "conv_transpose2d")]
    + [(name, "reduce") for name in ("conv1d", "shared_positions", "layer_twice")],
)
def test_ekfac_has_the_exact_second_moments_in_kfacs_basis(network, sharing):
    """Identity 4: in the basis that diagonalizes KFAC's block, EKFAC's diagonal is that of the exact block."""
    likelihood = CHOSEN[network][0]
    dense = structured(network, likelihood, "scalar", "ggn")
    options = ntkl.KFAC(sharing=sharing), ntkl.EKFAC(sharing=sharing)
    kfac, ekfac = (
        fresh_fit(network, likelihood, "scalar", "ggn", each).posterior_precision.information() for each in options
    )
    for part in dense.parts:
        index = part.index.flatten()
        block, moments, exact = (matrix[index][:, index] for matrix in (kfac, ekfac, dense.exact))
        if isinstance(part, Block):
            assert relative_error(block, exact) < 1e-10 and relative_error(moments, exact) < 1e-10
            continue
        basis = torch.kron(*dense.basis(part, sharing))
        rotated = basis.T @ moments @ basis
        assert relative_error(rotated.diagonal(), (basis.T @ exact @ basis).diagonal()) < 1e-9
        assert (rotated - torch.diag(rotated.diagonal())).abs().max() < 1e-9 * rotated.abs().max()
        assert relative_error(moments.trace(), exact.trace()) < 1e-10


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_kfac_of_one_example_is_exact(curvature, sharing):
    """Identity 5: with one example and one position a single product b bᵀ ⊗ a aᵀ is all there is."""
    case, y = problem("deep_mlp"), targets(LIKELIHOODS["categorical"], problem("deep_mlp"))
    data = case.x[:1], y[:1]
    posterior = fresh_fit("deep_mlp", "categorical", "scalar", curvature, ntkl.KFAC(sharing=sharing), data=data)
    jac, found = jacobians("deep_mlp")[0][:1], posterior.posterior_precision.information()
    weight = output_curvature("deep_mlp", "categorical", curvature)[:1] if curvature != "mc" else None
    for part in structured("deep_mlp", "categorical", "scalar", "ggn").parts:
        index = part.index.flatten()
        block = found[index][:, index]
        if weight is None:  # other labels than those of all seven: the block has the ranks of b bᵀ ⊗ a aᵀ at least
            assert torch.linalg.matrix_rank(block) <= 2
            continue
        exact = torch.einsum("ncp,ncd,ndq->pq", jac[:, :, index], weight, jac[:, :, index])
        assert relative_error(block, exact) < 1e-10


@pytest.mark.parametrize("groups", ["all", "tensor"])
def test_kfac_of_a_linear_model_is_exact(groups):
    """Identity 5: one linear layer, one position, Λ constant."""
    case, y = problem("linear_model"), targets(LIKELIHOODS["gaussian"], problem("linear_model"))
    prior = ntkl.GaussianPrior(groups=groups)
    noise = torch.tensor([[1.0, 0.3, 0.0], [0.3, 0.5, 0.1], [0.0, 0.1, 0.4]]).double()
    posterior = ntkl.laplace(case.network, (case.x, y), ntkl.Gaussian(noise=noise), prior=prior, structure="kfac")
    jac = jacobians("linear_model")[0]
    exact = torch.einsum("ncp,cd,ndq->pq", jac, torch.linalg.inv(noise), jac)
    if groups == "tensor":  # weight and bias apart, and independent
        exact[:12, 12:] = exact[12:, :12] = 0.0
    assert relative_error(posterior.posterior_precision.information(), exact) < 1e-12


def test_sharing_is_exact_in_its_setting():
    """A linear layer on positions: expansion is exact if each position is an output, reduction if they average."""
    layer, x = nn.Linear(3, 2).double(), torch.randn(5, 4, 3).double()
    heads = {"expand": nn.Flatten(), "reduce": Lambda(lambda h: h.mean(1))}
    for setting, head in heads.items():
        network = nn.Sequential(layer, head)
        y = torch.randn(5, 8 if setting == "expand" else 2).double()
        jac = jacobian(network, x).flatten(0, 1)
        errors = {}
        for sharing in heads:
            posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(noise=0.5), structure=ntkl.KFAC(sharing=sharing))
            errors[sharing] = relative_error(posterior.posterior_precision.information(), 2.0 * jac.T @ jac)
        assert errors.pop(setting) < 1e-12
        assert min(errors.values()) > 1e-2


# ------------------------------------------------------------------------------------------------------------- lemmas

RANKS = (1, 3, 0.25, 0.5, 0.75, 1.0, "trace:0.5", "trace:0.95")


def raising(network: str, curvature: str, rank) -> torch.Tensor:
    """INF as the paper has it: nothing shrunk, and a prior strong enough for every D_ii + δ."""
    case, likelihood = problem(network), CHOSEN[network][0]
    data = case.x, targets(LIKELIHOODS[likelihood], case)
    return ntkl.laplace(
        case.network, data, LIKELIHOODS[likelihood].build(), prior=ntkl.GaussianPrior(precision=1e4),
        structure=ntkl.INF(rank=rank, violation="raise"), curvature=curvature,
    ).posterior_precision.information()


LEMMAS = ("deep_mlp", "cnn_groups", "resnet_batchnorm", "transformer_tied", "layer_twice")


@pytest.mark.parametrize("curvature", ["ggn", "ef"])
@pytest.mark.parametrize("network", LEMMAS)
def test_errors_are_in_the_order_of_lemma_one(network, curvature):
    """[S20] Lemma 1, Corollary 1: ‖I - I_inf‖ <= ‖I - I_efb‖ <= ‖I - I_kfac‖ in every part, at full rank."""
    dense = structured(network, CHOSEN[network][0], "scalar", curvature)
    found = [raising(network, curvature, 1.0)]
    found += [fit(network, CHOSEN[network][0], "scalar", curvature, each).posterior_precision.information()
              for each in ("ekfac", "kfac")]
    norms = []
    for part in dense.parts:
        index = part.index.flatten()
        exact = dense.exact[index][:, index]
        norms.append(torch.stack([(exact - matrix[index][:, index]).norm() for matrix in found]))
        slack = 1e-12 * exact.norm()
        assert norms[-1][0] <= norms[-1][1] + slack and norms[-1][1] <= norms[-1][2] + slack
    total = torch.stack(norms).square().sum(0).sqrt()
    assert total[0] < 0.999 * total[1] and total[1] < 0.999 * total[2], "nothing was compared"


@pytest.mark.slow
@pytest.mark.parametrize("network", LEMMAS)
def test_diagonals_are_exact_at_every_rank(network):
    """[S20] Proposition 1, Lemma 2; and the matrix is UΛ_LUᵀ + D with the eigenvectors that the top K hit."""
    dense = structured(network, CHOSEN[network][0], "scalar", "ggn")
    diagonal = dense.exact.diagonal()
    efb = fit(network, CHOSEN[network][0], "scalar", "ggn", "ekfac").posterior_precision.information().diagonal()
    assert (efb - diagonal).norm() > 1e-3 * diagonal.norm(), "EKFAC's diagonal is exact as well: nothing to correct"
    for rank in RANKS[LEMMAS.index(network) % 2 :: 2]:  # half of them, the others with the next network
        found = raising(network, "ggn", rank)
        assert relative_error(found.diagonal(), diagonal) < 1e-9
        assert relative_error(found, dense.inf(count(rank), violation="raise")) < 1e-9


def count(rank):
    """K by number, by fraction and by captured trace."""
    if isinstance(rank, str):
        share = float(rank.removeprefix("trace:"))
        return lambda values: int((values.cumsum(0) < share * values.sum()).sum()) + 1
    return fraction(rank) if isinstance(rank, float) else lambda values: min(rank, len(values))


@pytest.mark.parametrize(("rank", "kept"), [
    (1, 1), (9, 3), (0.1, 1), (0.4, 2), (1.0, 3), ("trace:0.5", 1), ("trace:0.6", 2), ("trace:0.95", 3),
])
def test_a_rank_is_a_number_of_eigenvalues_none_of_them_zero(rank, kept):
    assert chosen_rank(torch.tensor([[3.0, 0.0], [5.0, 0.0], [2.0, 1e-20]]).double()[:, :, None], rank) == kept


def test_a_diagonal_that_agrees_but_for_rounding_is_not_exceeded():
    """All eigenvalues of a linear model's factors: INF is exact, and [S20] lemma 3 has nothing to warn of."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 5).double(), torch.randn(30, 3).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ntkl.laplace(nn.Linear(5, 3).double(), (x, y), ntkl.Gaussian(0.1), structure=ntkl.INF(rank=1.0))


def test_all_non_zero_eigenvalues_are_as_good_as_all():
    """[S20] Lemma 2, second part: eigenvalues of zero add nothing, so I_inf of the others is I_inf of all."""
    dense = structured("conv3d", "bernoulli", "scalar", "ef")  # its head has 50 weights and 7 rows
    part = next(part for part in dense.parts if isinstance(part, Kronecker) and "5.weight" in part.names)
    basis = torch.kron(*dense.basis(part))
    values = (basis * (dense.block_exact(part) @ basis)).sum(0)
    alive = int((values > 1e-12 * values.max()).sum())
    assert alive < 0.6 * len(values)
    index = part.index.flatten()
    found = [
        fresh_fit("conv3d", "bernoulli", "scalar", "ef",
                  ntkl.INF(rank=rank)).posterior_precision.information()[index][:, index]
        for rank in (alive / len(values), 1.0)
    ]
    assert relative_error(*found) < 1e-9
    assert relative_error(found[1], dense.block_exact(part)) > 1e-3


@pytest.mark.slow
def test_a_long_vocabulary_costs_inf_its_columns_alone():
    """Of the table's side only the kept tokens are written: nothing is as large as a vocabulary squared."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(6000, 2), nn.Flatten(), nn.Linear(6, 2)).double()
    data = torch.randint(6000, (40, 3)), torch.randint(2, (40,))
    with PeakMemory(torch.device("cpu")) as memory:
        posterior = ntkl.laplace(network, data, ntkl.Categorical(), structure=ntkl.INF(rank=30))
        posterior.sample(1)
    assert posterior.parameter_blocks[0].table and memory.bytes < 6000**2 * 8 / 4
    short = nn.Sequential(nn.Embedding(120, 2), nn.Flatten(), nn.Linear(6, 2)).double()
    tokens, numbers = data[0].unique(return_inverse=True)
    with torch.no_grad():
        short[0].weight[: len(tokens)] = network[0].weight[tokens]
        short[2].weight.copy_(network[2].weight)
        short[2].bias.copy_(network[2].bias)
    same = ntkl.laplace(short, (numbers, data[1]), ntkl.Categorical(), structure=ntkl.INF(rank=30))
    assert relative_error(posterior.log_det(), same.log_det()) < 1e-10


class Bare(nn.Module):
    """A perceptron with another shift of its hidden units; `layers` brings it in as layers without entries would."""

    def __init__(self, layers: bool) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(3, 4), nn.Linear(4, 2)
        self.shift = nn.Linear(0, 4) if layers else nn.Parameter(torch.empty(4))
        if layers:
            self.nothing, self.table, self.norm = nn.Linear(3, 0), nn.Embedding(5, 0), nn.LayerNorm(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.shift, nn.Parameter):
            return self.out(torch.tanh(self.hidden(x) + self.shift))
        none = self.norm(self.nothing(x) + self.table(torch.zeros(len(x), dtype=torch.long, device=x.device)))
        return self.out(torch.tanh(self.hidden(x) + self.shift(none)))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("n", "structure", "groups"), pairwise([1, 12], ["gp", "full", *STRUCTURES], ["all", "layer"])
)
def test_layers_without_entries_change_nothing(structure, groups, n):
    """nn.Linear(3, 0) has no parameters at all, nn.Linear(0, 4) a bias alone."""
    x, y = torch.randn(12, 3).double(), torch.randn(n, 2).double()
    found = []
    for layers in (False, True):
        network = Bare(layers).double()
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                start = len(name.replace("shift.bias", "shift"))
                parameter.copy_(torch.sin(start + torch.arange(parameter.numel())).view_as(parameter))
        form = STRUCTURES[structure][0]() if structure in STRUCTURES else structure
        prior = ntkl.GaussianPrior(2.0, groups=groups)
        posterior = ntkl.laplace(network, (x[:n], y), ntkl.Gaussian(0.3), prior, form)
        mean, blocks = posterior.latent_moments(x, "posterior")
        evidence, joint = posterior.log_marginal_likelihood(correction=True), posterior.latent(x).covariance_matrix
        found.append((evidence, joint, mean, blocks))
    for own, expected in zip(found[1], found[0], strict=True):
        assert relative_error(own.detach(), expected.detach()) < 1e-10


def test_a_block_with_one_precision_per_entry_is_recorded() -> None:
    """H = P0 U (λ + 1) Uᵀ P0 of an exact block is that of its record, also of one whose U had no factor P0^-½."""
    block = diagonal_block("weight", 2)
    a = torch.randn(2, 2, dtype=torch.float64)
    precision = torch.tensor([0.5, 2.0], dtype=torch.float64).view(1, 1, 2)
    scale = precision.rsqrt()
    side = FactorEigen(a @ a.T * scale.flatten() * scale.flatten()[:, None])
    record = DenseParameterBlock(block, side, precision).record() or {}
    older = {key: value for key, value in record.items() if key != "relative"}
    older |= {"right": side.vectors.unsqueeze(0), "scale": scale}
    v = torch.randn(3, 1, 1, 2, dtype=torch.float64)
    wanted = torch.linalg.solve(a @ a.T + precision.flatten().diag(), v.flatten(1).T).T.view_as(v)
    for one in (record, older):
        assert relative_error(SpectralBlock.from_record(one).solve(v), wanted) < 1e-12


@pytest.mark.parametrize("network", ["deep_mlp", "cnn_groups", "shared_positions"])
@pytest.mark.parametrize("panel", [1, 2**20])
def test_rows_that_are_summed_turn_as_factors_do(network: str, panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a layer that a batch uses in another operation too have no factors, and the bases of the fit."""
    monkeypatch.setattr("ntk_laplace.runtime.tuning.WRITTEN_BYTES", panel)
    case = problem(network)
    rows = JacobianPass(Network(case.network), torch.float64, keep_factors=True).rows(case.x)
    prior = ntkl.GaussianPrior(1.0)
    prior.bind({name: p.shape for name, p in case.network.named_parameters()})
    generator, seen = torch.Generator().manual_seed(0), 0
    for block in find_parameter_blocks(rows, prior, "kronecker"):
        factored = block.rows(rows)
        if not isinstance(factored, Outer):
            continue
        seen += 1
        summed = SummedRows(block, rows.f, rows.num_cotangents, tuple(
            one for one in rows.blocks if set(one.names) & set(block.names)))
        g, o, i = block.entries
        left, right = (torch.randn(g, width, max(1, width - 1), dtype=torch.float64, generator=generator)
                       for width in (o, i))
        for sides in ((left, right), (left, None), (None, right), (None, None)):
            one, other = (own.rotated(Basis(*sides)) for own in (summed, factored))
            assert one.entries == other.entries
            assert relative_error(one.written(slice(None)), other.written(slice(None))) < 1e-12
            assert relative_error(one.squares(), other.squares()) < 1e-12
            vectors = torch.randn(2, *one.entries, dtype=torch.float64, generator=generator)
            assert relative_error(one.products(vectors), other.products(vectors)) < 1e-12
            assert relative_error(one.inner(vectors[0].square()), other.inner(vectors[0].square())) < 1e-12
        again = summed.rotated(Basis(left, None)).rotated(Basis(None, right))
        whole = factored.rotated(Basis(left, right))
        assert relative_error(again.written(slice(None)), whole.written(slice(None))) < 1e-12
    assert seen
