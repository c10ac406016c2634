"""A fit on several processes, each with its share of the data, is the fit of one process with all data."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import ntk_laplace as ntkl
from group_cases import (
    STRUCTURES,
    N,
    inputs,
    labels,
    noise_per_point,
    numbers,
    quantities,
    real,
    require_same,
    small,
)
from ntk_laplace.curvature import CurvatureType
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.reduction import Reducer, SingleProcess
from processes import on_processes
from ranks import on_ranks, shares, take_all


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def compare(
    data: tuple[Tensor, ...], world_size: int, likelihood: Callable[[], ntkl.Likelihood],
    look: Callable[[Any], dict[str, Tensor]] = quantities, network: nn.Module | None = None, **arguments: Any,
) -> None:
    """Fit on one process and on several; `look` at both."""
    network = small() if network is None else network

    def fit(data: tuple[Tensor, ...], **settings: Any) -> dict[str, Tensor]:
        return look(ntkl.laplace(network, data, likelihood(), settings=ntkl.Settings(batch_size=3, **settings),
                                 **arguments))

    parts = shares(len(data[0]), world_size)
    assert len({part.stop - part.start for part in parts}) > 1, "unequal shares"

    def run(reducer: Reducer) -> dict[str, Tensor]:
        return fit(take_all(data, parts[reducer.rank]), reducer=reducer, sharded=True)

    require_same(on_ranks(world_size, run), fit(data))


@pytest.mark.parametrize(("structure", "world_size"), [*((each, 3) for each in STRUCTURES), ("kfac", 2)], ids=str)
@pytest.mark.filterwarnings("ignore:INF")
def test_shares_are_one_data_set(structure: Any, world_size: int) -> None:
    compare((inputs(), labels()), world_size, ntkl.Categorical, structure=structure,
            prior=ntkl.GaussianPrior(2.0, groups="layer"))


@pytest.mark.parametrize("structure", ["gp", "iterative", "kfac", "ekfac"])
def test_drawn_labels_have_global_numbers(structure: str) -> None:
    compare((inputs(), labels()), 2, ntkl.Categorical, structure=structure,
            curvature=CurvatureType("mc", samples=2, seed=3))


@pytest.mark.parametrize("structure", ["gp", "full", "ekfac", "diag"])
def test_noise_per_point_has_global_numbers(structure: str) -> None:
    compare((inputs(), real()), 2, noise_per_point, structure=structure)


@pytest.mark.parametrize("structure", ["full", "iterative", "kfac", "diag"])
def test_example_weights_are_shared_out_too(structure: str) -> None:
    weights = torch.where(torch.arange(N) % 5 == 0, torch.zeros(()).double(), numbers())
    compare((inputs(), labels(), weights), 2, ntkl.Categorical, structure=structure)


# --- after the fit


def moved(posterior: Any) -> dict[str, Tensor]:
    """At other hyperparameters, which take another pass over the data where Λ is not merely scaled."""
    with torch.no_grad():
        posterior.prior.log_precision.add_(0.3)
        for parameter in posterior.likelihood.parameters():
            parameter.add_(0.2)
    return quantities(posterior)


@pytest.mark.parametrize(("structure", "likelihood"), [
    ("full", lambda: ntkl.Categorical(temperature=1.3)), ("kfac", lambda: ntkl.Categorical(temperature=1.3)),
    ("ekfac", lambda: ntkl.Categorical(temperature=1.3)), ("diag", lambda: ntkl.Gaussian(0.3)),
])
def test_changed_hyperparameters(structure: str, likelihood: Callable[[], ntkl.Likelihood]) -> None:
    targets = labels() if structure != "diag" else real()
    compare((inputs(), targets), 2, likelihood, moved, structure=structure)


@pytest.mark.parametrize("structure", ["kfac", "full"])
@pytest.mark.filterwarnings("ignore:the evidence's maximum was not reached")
def test_learned_hyperparameters(structure: str) -> None:
    def learned(posterior: Any) -> dict[str, Tensor]:
        posterior.fit_hyperparameters(steps=3, progress=False)
        return quantities(posterior)

    compare((inputs(), real()), 2, lambda: ntkl.Gaussian(0.3), learned, structure=structure)


@pytest.mark.parametrize("structure", ["full", "iterative", "ekfac", "diag", "gp"])
def test_a_subset_has_global_indices_even_where_a_process_has_none_of_them(structure: str) -> None:
    def part(posterior: Any) -> dict[str, Tensor]:
        chosen = posterior.subset([5, 6, 8, 11])  # none in the first share
        return quantities(chosen.subset([0, 3]))

    compare((inputs(), real()), 3, noise_per_point, part, structure=structure)


@pytest.mark.slow
@pytest.mark.parametrize(("structure", "curvature"), [
    *((structure, "ggn") for structure in ("gp", "full", "iterative", "ekfac", "diag")), ("full", "mc"),
    ("ekfac", "mc"),
])
def test_a_condition_takes_each_process_s_share(structure: str, curvature: str) -> None:
    """New points follow all old ones; labels that are drawn do too."""
    new = inputs(20)[N:], labels(20)[N:]

    def run(reducer: Reducer, part: slice, added: slice) -> dict[str, Tensor]:
        posterior = ntkl.laplace(small(), (inputs()[part], labels()[part]), ntkl.Categorical(), structure=structure,
                                 curvature=curvature, settings=ntkl.Settings(reducer=reducer, sharded=True))
        both = posterior.condition(take_all(new, added))
        return quantities(both) | {f"subset {n}": t for n, t in quantities(both.subset([0, 4, 9, 14, 18])).items()}

    parts, added = shares(N, 2), shares(7, 2)
    found = on_ranks(2, lambda reducer: run(reducer, parts[reducer.rank], added[reducer.rank]))
    require_same(found, run(SingleProcess(), slice(None), slice(None)))


@pytest.mark.parametrize("structure", ["full", "iterative", "kfac"])
def test_one_process_saves_what_all_have_changed(structure: str, tmp_path: Path) -> None:
    """Sums of changed points are there before one process needs them alone."""
    new = inputs(20)[N:], labels(20)[N:]

    def changed(reducer: Reducer) -> dict[str, Any]:
        posterior = ntkl.laplace(small(), (inputs(), labels()), ntkl.Categorical(), structure=structure,
                                 settings=ntkl.Settings(reducer=reducer))
        found = {"condition": posterior.condition(new), "subset": posterior.subset(range(0, N, 2))}
        for name, one in found.items() if reducer.rank == 0 and reducer.world_size > 1 else ():
            one.save(tmp_path / f"{name}.pt")
        return found

    on_ranks(2, changed)
    for name, one in changed(SingleProcess()).items():
        value = float(ntkl.load(tmp_path / f"{name}.pt", small()).log_marginal_likelihood())
        assert value == pytest.approx(float(one.log_marginal_likelihood()), rel=1e-9)


def test_a_compressed_posterior_counts_each_point_once() -> None:
    def small_one(posterior: Any) -> dict[str, Tensor]:
        found = posterior.compress(26)
        return {"log det": found.log_det().detach(), "variance": found.latent_moments(inputs(4))[1]}

    compare((inputs(), labels()), 3, ntkl.Categorical, small_one, structure="gp")


def test_an_input_at_many_positions_that_one_process_predicts() -> None:
    """Other processes have none of the one input's rows."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1)).double()
    x, y = torch.randn(13, 2, 2, 3).double(), torch.randint(3, (13, 2, 3))

    def run(reducer: Reducer) -> dict[str, Tensor]:
        posterior = ntkl.laplace(network, (x, y), ntkl.Everywhere(ntkl.Categorical()), structure="gp",
                                 settings=ntkl.Settings(reducer=reducer))
        joint = posterior.latent(x[:1])
        return {"covariance": joint.covariance_matrix, "blocks": posterior.latent_moments(x[:1])[1]}

    require_same(on_ranks(2, run), run(SingleProcess()))


@pytest.mark.parametrize("structure", ["gp", "full", "iterative"])
def test_reweighted_points_have_global_indices(structure: str) -> None:
    def reweighted(posterior: Any) -> dict[str, Tensor]:
        left = posterior.remove([1, 7]).reweight([12], 2.5)
        joint = left.latent(inputs(4))
        return {"mean": joint.mean, "covariance": joint.covariance_matrix, "evidence": left.log_det().detach()}

    compare((inputs(), real()), 2, lambda: ntkl.Gaussian(0.3), reweighted, structure=structure)


# --- where processes have to agree


class Gate(nn.Module):
    """A layer that a batch reaches only if one of its examples asks for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.common, self.rare = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        asks = x[:, :1] > 5
        out = self.common(x)
        return out + asks * self.rare(x) if bool(asks.any()) else out


def gated(*asking: int) -> Tensor:
    x = inputs()
    x[list(asking), 0] += 10
    return x


@pytest.mark.parametrize("asking", [(0,), (12,), (3, 12), (1, 10)])
def test_a_diagonal_follows_layers_that_one_process_reaches(asking: tuple[int, ...]) -> None:
    compare((gated(*asking), labels()), 3, ntkl.Categorical, network=Gate(), structure="diag")


def test_kronecker_factors_of_a_layer_that_one_process_reaches_are_refused_on_all() -> None:
    refused = []

    def run(reducer: Reducer) -> None:
        part = shares(N, 2)[reducer.rank]
        with pytest.raises(ntkl.UnsupportedError, match=r"rare\.bias.*first batch"):
            ntkl.laplace(Gate(), (gated(12)[part], labels()[part]), ntkl.Categorical(), structure="kfac",
                         settings=ntkl.Settings(reducer=reducer, sharded=True))
        refused.append(reducer.rank)

    on_ranks(2, run)
    assert sorted(refused) == [0, 1]


@pytest.mark.parametrize("basis", [False, True])
def test_eigenvectors_are_those_of_rank_0(basis: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose eigenvectors were others would add second moments in another basis."""
    x, y, own = inputs(), labels(), torch.linalg.eigh

    def fit(part: slice = slice(None), **settings: Any) -> dict[str, Tensor]:
        data, settings = (x[part], y[part]), ntkl.Settings(**settings)
        kfac = ntkl.laplace(small(), data, ntkl.Categorical(), structure="kfac", settings=settings) if basis else None
        return quantities(ntkl.laplace(small(), data, ntkl.Categorical(), structure=ntkl.EKFAC(basis=kfac),
                                       settings=settings))

    def elsewhere(matrix: Tensor, UPLO: str = "L") -> tuple[Tensor, Tensor]:
        values, vectors = own(matrix, UPLO=UPLO)
        return values, vectors.roll(1, -1) if threading.current_thread().name == "rank 1" else vectors

    expected = fit()
    monkeypatch.setattr(torch.linalg, "eigh", elsewhere)
    require_same(on_ranks(2, lambda reducer: fit(shares(N, 2)[reducer.rank], reducer=reducer, sharded=True)), expected)


def test_weights_on_one_process_alone() -> None:
    """Examples of the others count once, as in data that are joined."""
    parts, weights = shares(N, 2), numbers()

    def run(reducer: Reducer) -> dict[str, Tensor]:
        part = parts[reducer.rank]
        data = (inputs()[part], labels()[part]) + ((weights[part],) if reducer.rank else ())
        settings = ntkl.Settings(reducer=reducer, sharded=True)
        return quantities(ntkl.laplace(small(), data, ntkl.Categorical(), settings=settings))

    weights = torch.where(torch.arange(N) < parts[0].stop, 1.0, weights)
    expected = quantities(ntkl.laplace(small(), (inputs(), labels(), weights), ntkl.Categorical()))
    require_same(on_ranks(2, run), expected)


@pytest.mark.filterwarnings("ignore:the DataLoader leaves out")
def test_a_loader_is_counted_by_reading_it() -> None:
    """A sampler's share, of which the last batch is dropped: the data set's length says nothing."""
    x, y, noise = inputs(), real(), numbers()
    whole = TensorDataset(x, y)

    def run(reducer: Reducer) -> dict[str, Tensor]:
        mine = SubsetRandomSampler(range(reducer.rank, N, 2), generator=torch.Generator().manual_seed(0))
        loader = DataLoader(whole, batch_size=4, sampler=list(mine), drop_last=True)
        likelihood = ntkl.Gaussian(noise[:8], kind="point")
        return quantities(ntkl.laplace(small(), loader, likelihood, structure="ekfac",
                                       settings=ntkl.Settings(reducer=reducer, sharded=True)))

    orders = [list(SubsetRandomSampler(range(rank, N, 2), generator=torch.Generator().manual_seed(0)))[:4]
              for rank in range(2)]
    read = torch.tensor(orders).flatten()
    expected = ntkl.laplace(small(), (x[read], y[read]), ntkl.Gaussian(noise[:8], kind="point"), structure="ekfac")
    require_same(on_ranks(2, run), quantities(expected))


def test_a_checkpoint_is_restored_with_each_process_s_share(tmp_path: Path) -> None:
    path = tmp_path / "posterior.pt"
    whole = ntkl.laplace(small(), (inputs(), labels()), ntkl.Categorical(temperature=1.3), structure="ekfac")
    whole.save(path)

    def run(reducer: Reducer) -> dict[str, Tensor]:
        data = take_all((inputs(), labels()), shares(N, 2)[reducer.rank])
        return moved(ntkl.load(path, small(), data, settings=ntkl.Settings(reducer=reducer, sharded=True)))

    require_same(on_ranks(2, run), moved(whole))


def test_auto_counts_the_examples_of_all_processes() -> None:
    def chosen(reducer: Reducer) -> str:
        data = take_all((inputs(21), labels(21)), shares(21, 3)[reducer.rank])
        return ntkl.laplace(small(), data, ntkl.Categorical(), structure="auto",
                            settings=ntkl.Settings(reducer=reducer, sharded=True)).reason

    alone = ntkl.laplace(small(), (inputs(21), labels(21)), ntkl.Categorical(), structure="auto")
    assert set(on_ranks(3, chosen)) == {alone.reason}
    assert alone.structure == "gp"


def test_auto_chooses_once_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of longer examples take more operations, on one of two processes more than are not too many."""
    monkeypatch.setattr(tuning, "EXACT_OPERATIONS", 1.9e5)
    monkeypatch.setattr(tuning, "FASTER", 1e-3)
    network = nn.Sequential(nn.Embedding(6, 40), nn.Linear(40, 40), nn.Tanh(), Mean(), nn.Linear(40, 2)).double()

    def chosen(reducer: Reducer) -> str:
        data = torch.arange(180).view(6, 30)[:, : 5 + 25 * reducer.rank] % 6, torch.arange(6) % 2
        settings = ntkl.Settings(reducer=reducer, sharded=True)
        return ntkl.laplace(network, data, ntkl.Categorical(), structure="auto", settings=settings).structure

    assert on_ranks(2, chosen) == ["iterative"] * 2


# --- refusals


def test_a_reducer_is_required() -> None:
    with pytest.raises(ntkl.UnsupportedError, match="a Reducer"):
        ntkl.Settings(reducer=2)
    assert ntkl.Settings() == ntkl.Settings(reducer=SingleProcess())


def test_processes_with_different_models_are_refused() -> None:
    def fit(reducer: Reducer, network: nn.Module, precision: float, noise: float) -> None:
        with pytest.raises(ntkl.UnsupportedError, match="the same model on all processes"):
            ntkl.laplace(network, (inputs(), real()), ntkl.Gaussian(noise), ntkl.GaussianPrior(precision),
                         settings=ntkl.Settings(reducer=reducer, sharded=True))

    def other() -> nn.Module:
        network = small()
        with torch.no_grad():
            network[0].weight[0, 0] += 1e-6
        return network

    on_ranks(2, lambda reducer: fit(reducer, small() if reducer.rank else other(), 1.0, 0.3))
    on_ranks(2, lambda reducer: fit(reducer, small(), 1.0 + reducer.rank, 0.3))
    on_ranks(2, lambda reducer: fit(reducer, small(), 1.0, 0.3 + reducer.rank))


def test_processes_with_outputs_of_another_shape_are_refused() -> None:
    def run(reducer: Reducer) -> None:
        y = real(N, 3) if reducer.rank else real(N, 2)
        with pytest.raises(ntkl.DataError, match=r"rows of one shape on all processes"):
            ntkl.laplace(small(), (inputs(), y), ntkl.Gaussian(0.3), structure="full",
                         settings=ntkl.Settings(reducer=reducer, sharded=True))

    on_ranks(2, run)


def test_what_needs_one_process_is_refused() -> None:
    x, y = inputs(), real()

    def run(reducer: Reducer) -> None:
        settings = ntkl.Settings(reducer=reducer, sharded=True, progress=False)
        with pytest.raises(ntkl.UnsupportedError, match="training with evidence"):
            ntkl.train_with_evidence(small(), (x, y), ntkl.Gaussian(0.3), optimizer=torch.optim.Adam, epochs=1,
                                     settings=settings)
        posterior = ntkl.laplace(small(), (x, y), ntkl.Gaussian(0.3), structure="full", settings=settings)
        with pytest.raises(ntkl.UnsupportedError, match="one process for points to add"):
            posterior.add(x[:2], y[:2])

    on_ranks(2, run)


# --- processes


@pytest.mark.slow
def test_two_processes_of_torch_distributed(tmp_path: Path) -> None:
    """The same with gloo in place of threads."""
    require_same(on_processes(2, _fits, tmp_path), _fits(SingleProcess()))


def _fits(reducer: Reducer) -> dict[str, Tensor]:
    part = slice(None) if reducer.world_size == 1 else shares(N, reducer.world_size)[reducer.rank]
    settings = ntkl.Settings(distributed=reducer.world_size > 1, sharded=True)
    found = {}
    for structure in ("gp", "full", "ekfac", "diag"):
        posterior = ntkl.laplace(small(), (inputs()[part], real()[part]), noise_per_point(), structure=structure,
                                 settings=settings)
        found |= {f"{structure} {name}": value for name, value in quantities(posterior).items()}
    return found
