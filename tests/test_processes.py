"""Several processes that are given all data: each takes a share, and what one of them leaves undone is dealt anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

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
from ntk_laplace.model.data.parts import dealt
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.reduction import Reducer
from processes import commands, on_processes
from ranks import on_ranks


def fit(data: Any, likelihood: ntkl.Likelihood, structure: Any, curvature: str = "ggn", **settings: Any) -> Any:
    return ntkl.laplace(small(), data, likelihood, ntkl.GaussianPrior(2.0, groups="layer"), structure, curvature,
                        settings=ntkl.Settings(batch_size=2, **settings))


def compare(data: Callable[[], Any], structure: Any, likelihood: Callable[[], ntkl.Likelihood] = ntkl.Categorical,
            ranks: int = 3, curvature: str = "ggn") -> None:
    expected = quantities(fit(data(), likelihood(), structure, curvature))
    found = on_ranks(ranks, lambda reducer: quantities(fit(data(), likelihood(), structure, curvature,
                                                           reducer=reducer)))
    require_same(found, expected)


# --- shares


@pytest.mark.parametrize(("structure", "ranks"), [(each, 3 if each == "gp" else 2) for each in STRUCTURES], ids=str)
@pytest.mark.filterwarnings("ignore:INF")
def test_processes_share_the_data_that_all_are_given(structure: Any, ranks: int) -> None:
    compare(lambda: (inputs(), labels()), structure, ranks=ranks)


@pytest.mark.parametrize("structure", ["gp", "ekfac"])
def test_noise_per_point_weights_and_drawn_labels_have_global_numbers(structure: str) -> None:
    compare(lambda: (inputs(), real(), numbers()), structure, noise_per_point, 2)
    compare(lambda: (inputs(), labels()), structure, curvature="mc")


class Counted(Dataset):
    """Counts how often each example is read."""

    def __init__(self, *tensors: Tensor) -> None:
        self.data, self.reads = TensorDataset(*tensors), torch.zeros(len(tensors[0]), dtype=torch.long)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, n: int) -> tuple[Tensor, ...]:
        self.reads[n] += 1
        return self.data[n]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(inputs(), real(), strict=True)


def shuffled() -> DataLoader:
    data = TensorDataset(inputs(), real())
    return DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("data", [
    lambda: TensorDataset(inputs(), real()), lambda: DataLoader(Stream(), batch_size=2), shuffled,
    lambda: DataLoader(TensorDataset(inputs(), real()), batch_size=3),
    lambda: DataLoader(TensorDataset(inputs(), real()), batch_size=3, shuffle=True),
], ids=["dataset", "stream", "shuffled", "loader", "shuffled by the library"])
def test_any_kind_of_data_is_shared(data: Callable[[], Any]) -> None:
    """In the order of one process: the labels that are drawn for each number tell."""
    compare(data, "ekfac", ntkl.Gaussian, curvature="mc")


def test_a_process_reads_its_share_alone() -> None:
    datas = [Counted(inputs(), labels()) for _ in range(3)]
    on_ranks(3, lambda reducer: fit(DataLoader(datas[reducer.rank], batch_size=2), ntkl.Categorical(), "kfac",
                                    reducer=reducer))
    read = torch.stack([data.reads > 0 for data in datas])
    assert (read.sum(0) == 1).all() and read.any(1).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_examples_are_dealt_once_in_whole_batches(ranks: int) -> None:
    left = torch.tensor([0, 1, 4, 5, 6, 9, 10, 11])
    assert torch.equal(torch.cat(dealt(left, None, ranks)), left)
    assert max(map(len, dealt(torch.arange(100), None, ranks))) <= -(-100 // ranks)
    sizes = [2, 2, 3, 2, 3]
    parts = dealt(left, sizes, ranks)
    assert torch.equal(torch.cat(parts), left)
    batch = torch.repeat_interleave(torch.arange(5), torch.tensor(sizes))
    owners = [set(batch[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == len(set().union(*owners)) == 3
    with pytest.raises(ntkl.DataError, match="batches that end where the interrupted fit stopped"):
        dealt(left[1:], sizes, ranks)


def test_too_few_examples_and_other_loaders_are_refused() -> None:
    def few(reducer: Reducer) -> None:
        with pytest.raises(ntkl.DataError, match="at least one of the examples for each of 3 processes; got 2"):
            fit((inputs(2), labels(2)), ntkl.Categorical(), "kfac", reducer=reducer)

    def other(reducer: Reducer) -> None:
        order = torch.Generator().manual_seed(reducer.rank)
        data = DataLoader(TensorDataset(inputs(), labels()), batch_size=2, shuffle=True, generator=order)
        with pytest.raises(ntkl.DataError, match="the same batches in the same order in every process"):
            fit(data, ntkl.Categorical(), "kfac", reducer=reducer)

    on_ranks(3, few)
    on_ranks(2, other)


# --- a process that dies


class Killed(Exception):
    pass


class Dying(Counted):
    """The process dies when it reads its n-th example; from time to time it is interrupted instead."""

    def __init__(self, *tensors: Tensor, at: int | None, error: type[BaseException]) -> None:
        super().__init__(*tensors)
        self.at, self.error = at, error

    def __getitem__(self, n: int) -> tuple[Tensor, ...]:
        if self.at is not None and int(self.reads.sum()) == self.at:
            raise self.error
        return super().__getitem__(n)


def disturbed(
    path: Path, ranks: int, victim: int, at: int, structure: Any, error: type[BaseException] = Killed,
    curvature: str = "ggn", **settings: Any,
) -> None:
    """Fit on several ranks, one of which dies."""

    def run(reducer: Reducer) -> None:
        data = Dying(inputs(), labels(), at=at if reducer.rank == victim else None, error=error)
        fit(data, ntkl.Categorical(), structure, curvature, reducer=reducer, checkpoint=path, **settings)

    with pytest.raises((Killed, ntkl.FitInterrupted)):
        on_ranks(ranks, run)


def resumed(path: Path, ranks: int, structure: Any, curvature: str = "ggn", **settings: Any) -> list[dict[str, Tensor]]:
    data = inputs(), labels()
    return on_ranks(ranks, lambda reducer: quantities(
        fit(TensorDataset(*data), ntkl.Categorical(), structure, curvature, reducer=reducer, resume=path, **settings)))


@pytest.fixture
def saved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "AUTOSAVE_SECONDS", -1.0)


@pytest.mark.usefixtures("saved_at_once")
@pytest.mark.parametrize(("structure", "at", "ranks"), [
    *(("ekfac", at, ranks) for at in (3, 8) for ranks in (1, 2, 3)), ("kfac", 3, 3), ("diag", 4, 1), ("diag", 5, 2),
])
def test_any_number_of_processes_resumes(structure: str, at: int, ranks: int, tmp_path: Path) -> None:
    """A rank of two reads at most 7 examples in a pass: example 8 is in the second one."""
    path = tmp_path / "fit.pt"
    disturbed(path, 2, 1, at, structure)
    require_same(resumed(path, ranks, structure), quantities(fit((inputs(), labels()), ntkl.Categorical(), structure)))


@pytest.mark.slow
@pytest.mark.usefixtures("saved_at_once")
@pytest.mark.parametrize(("curvature", "at"), [("ggn", (2, 4, 4)), ("mc", (6, 9, 15))])
def test_a_resumed_fit_can_die_too(curvature: str, at: tuple[int, ...], tmp_path: Path) -> None:
    """Of three, then of two, then of one that is interrupted; files of the earlier runs stay in the folder."""
    path = tmp_path / "fit.pt"
    disturbed(path, 3, 2, at[0], "ekfac", curvature=curvature)
    assert "fit.pt.2" in {one.name for one in tmp_path.iterdir()}
    disturbed(path, 2, 0, at[1], "ekfac", resume=path, curvature=curvature)
    disturbed(path, 1, 0, at[2], "ekfac", KeyboardInterrupt, resume=path, curvature=curvature)
    expected = quantities(fit((inputs(), labels()), ntkl.Categorical(), "ekfac", curvature))
    require_same(resumed(path, 2, "ekfac", curvature), expected)


@pytest.mark.usefixtures("saved_at_once")
def test_files_of_a_resumed_run_without_its_first_one_do_not_count(tmp_path: Path) -> None:
    """They have what was done since, and the first process's file has what was done before."""
    path = tmp_path / "fit.pt"
    disturbed(path, 2, 1, 3, "kfac")
    before = path.read_bytes()
    disturbed(path, 2, 1, 4, "kfac", resume=path)
    later = torch.load(f"{path}.1", weights_only=True)
    assert later["resumed"] and len(later["accumulation"]["done"])
    path.write_bytes(before)
    require_same(resumed(path, 1, "kfac"), quantities(fit((inputs(), labels()), ntkl.Categorical(), "kfac")))
    path.unlink()
    with pytest.raises(ntkl.DataError, match="the first process's file"):
        resumed(path, 1, "kfac")


@pytest.mark.usefixtures("saved_at_once")
def test_a_resumed_run_begins_with_a_file_of_all_that_was_done(tmp_path: Path) -> None:
    """Or its other files would take the place of earlier ones, and their work would be lost."""
    path = tmp_path / "fit.pt"
    disturbed(path, 2, 1, 4, "kfac")
    files = [torch.load(one, weights_only=True)["accumulation"]["done"] for one in tmp_path.iterdir()]
    disturbed(path, 2, 0, 2, "kfac", resume=path)  # in its first batch
    again = torch.load(path, weights_only=True)
    assert again["resumed"] and torch.equal(again["accumulation"]["done"].sort().values, torch.cat(files).sort().values)


@pytest.mark.slow
@pytest.mark.usefixtures("saved_at_once")
def test_own_shares_are_resumed_too(tmp_path: Path) -> None:
    path, parts = tmp_path / "fit.pt", [slice(0, 5), slice(5, N)]

    def run(reducer: Reducer, at: int | None, **settings: Any) -> dict[str, Tensor]:
        part = parts[reducer.rank]
        data = Dying(inputs()[part], labels()[part], at=at if reducer.rank else None, error=Killed)
        return quantities(fit(data, ntkl.Categorical(), "ekfac", reducer=reducer, sharded=True, **settings))

    with pytest.raises(Killed):
        on_ranks(2, lambda reducer: run(reducer, 4, checkpoint=path))
    expected = quantities(fit((inputs(), labels()), ntkl.Categorical(), "ekfac"))
    require_same(on_ranks(2, lambda reducer: run(reducer, None, resume=path)), expected)
    require_same(resumed(path, 3, "ekfac"), expected)


def test_the_states_of_interrupted_processes_are_resumed(tmp_path: Path) -> None:
    states: dict[int, Any] = {}

    def run(reducer: Reducer) -> None:
        data = Dying(inputs(), labels(), at=2 + reducer.rank, error=KeyboardInterrupt)
        with pytest.raises(ntkl.FitInterrupted) as stop:
            fit(data, ntkl.Categorical(), "kfac", reducer=reducer)
        states[reducer.rank] = stop.value.state

    on_ranks(2, run)
    found = on_ranks(2, lambda reducer: quantities(
        fit((inputs(), labels()), ntkl.Categorical(), "kfac", reducer=reducer, resume=states[reducer.rank])))
    require_same(found, quantities(fit((inputs(), labels()), ntkl.Categorical(), "kfac")))


@pytest.mark.usefixtures("saved_at_once")
def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fit.pt"
    disturbed(path, 2, 1, 3, "kfac")
    with pytest.raises(ntkl.UnsupportedError, match="to resume KFAC"):
        resumed(path, 2, "diag")
    with pytest.raises(ntkl.DataError, match=r"at least \d+ examples, as in the interrupted fit; got 7"):
        fit((inputs(7), labels(7)), ntkl.Categorical(), "kfac", resume=path)
    path.with_name("fit.pt.2").write_bytes(path.read_bytes())
    with pytest.raises(ntkl.DataError, match="each example in the file of one process"):
        resumed(path, 2, "kfac")


# --- torch.distributed


def test_a_group_has_to_be_initialized() -> None:
    for asked in ({"distributed": True}, {"process_group": object()}):
        with pytest.raises(ntkl.UnsupportedError, match=r"none\. Start .* torchrun .*init_process_group"):
            ntkl.Settings(**asked)
    with ntkl.process_group() as group:  # runs alone
        assert group is None and ntkl.Settings(process_group=group) == ntkl.Settings()


@pytest.mark.slow
def test_two_processes_share_all_data(tmp_path: Path) -> None:
    """Tensors that are not contiguous, a group made by hand, and all structures with a collective of their own."""
    require_same(on_processes(2, _share_all, tmp_path), _share_all(None))


def _share_all(reducer: Reducer | None) -> dict[str, Tensor]:
    found, asked = {}, {}
    if reducer is not None:
        turned = torch.arange(6.0).reshape(2, 3).T
        reducer.sum_(turned)
        assert torch.equal(turned, 2 * torch.arange(6.0).reshape(2, 3).T)
        assert torch.equal(reducer.sum(turned), 2 * turned) and float(reducer.broadcast(turned[1, 1])) == 8.0
        with ntkl.process_group() as group:  # the one that there is
            asked = {"process_group": group}
    for structure in ("gp", "ekfac"):
        posterior = fit((inputs(), labels()), ntkl.Categorical(), structure, "mc", **asked)
        found |= {f"{structure} {name}": value for name, value in quantities(posterior).items()}
    return found


@pytest.mark.slow
def test_the_command_in_processes_that_torchrun_started(tmp_path: Path) -> None:
    """The first prints and writes; the others compute. What needs one process is refused on all."""
    (tmp_path / "net.py").write_text("from torch import nn\n\n\ndef make_network():\n    return nn.Linear(4, 3)\n")
    torch.manual_seed(0)
    torch.save(torch.nn.Linear(4, 3).state_dict(), tmp_path / "net.pt")
    np.savez(tmp_path / "data.npz", X=inputs().numpy(), y=labels().numpy())
    model = [f"{tmp_path}/net.py", "--checkpoint", f"{tmp_path}/net.pt", "--data", f"{tmp_path}/data.npz",
             "--likelihood", "categorical"]
    calls = [["evidence", *model, "--structures", "kfac", "--json", f"{tmp_path}/found.json"],
             ["explain", *model, "--inputs", f"{tmp_path}/data.npz"]]
    (first, refused), (second, also) = commands(2, calls, tmp_path)
    network = torch.nn.Linear(4, 3).double()
    network.load_state_dict(torch.load(tmp_path / "net.pt"))
    expected = ntkl.compare_evidence(network, (inputs(), labels()), ntkl.Categorical(), structures=["kfac"])
    found = json.loads((tmp_path / "found.json").read_text())
    for row, other in zip(found["rows"], expected.rows, strict=True):
        assert row["evidence"] == pytest.approx(other.evidence, rel=1e-12)
    assert first[0] == second[0] == 0 and "kfac" in first[1] and second[1] == ""
    for number, (code, out, err) in enumerate((refused, also)):
        assert code == 1 and out == "" and "expected one process for explain; got 2" in err
        assert ("(process 1)" in err) == bool(number)
