"""The tables of docs/structures.md: what each structure can do, at once and after it was loaded."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ntk_laplace as ntkl

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "structures.md").read_text()
Row = tuple[str, str, str]


def rows_under(title: str) -> list[Row]:
    """A call, a structure and the cell, of a table whose first column has the calls and whose head the structures."""
    lines = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0].splitlines()
    head, _, *body = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line[:1] == "|"]
    columns = [(number, structure) for number, cell in enumerate(head) for structure in re.findall(r'`"(\w+)"`', cell)]
    return [(call, structure, cells[number].strip("` "))
            for cells in body for call in re.findall(r"`([^`]+)`", cells[0]) for number, structure in columns]


CAN, LOADED = rows_under("What each structure can do"), rows_under("Checkpoints")


@functools.cache
def model() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A network at the optimum."""
    torch.manual_seed(0)
    x = torch.randn(12, 2, dtype=torch.float64)
    data, likelihood = (x, torch.sin(x[:, :1])), ntkl.Gaussian(noise=0.1)
    network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=500, line_search_fn="strong_wolfe",
                                  tolerance_grad=1e-10)

    def objective() -> torch.Tensor:
        optimizer.zero_grad()
        energy = sum(p.square().sum() for p in network.parameters()) / 2
        loss = energy - likelihood.log_prob(network(data[0]), data[1]).sum()
        loss.backward()
        return loss

    optimizer.step(objective)  # type: ignore[arg-type]
    return network.eval(), data


def posterior(structure: str) -> ntkl.Posterior:
    network, data = model()
    return ntkl.laplace(network, data, ntkl.Gaussian(noise=0.1), ntkl.GaussianPrior(1.0), structure)


@functools.cache
def saved(structure: str, include: bool) -> bytes:
    """A checkpoint, made once for all calls."""
    with tempfile.TemporaryDirectory() as folder:
        posterior(structure).save(path := Path(folder, "posterior.pt"), include_data=include)
        return path.read_bytes()


def works(of: ntkl.Posterior, call: str) -> bool:
    """Whether the call of the table gives something, and no refusal."""
    names: dict[str, Any] = {"posterior": of, "x": model()[1][0][:2], "data": model()[1]}
    try:
        eval(f"posterior.{call}", names)
    except (ntkl.UnsupportedError, ntkl.DataError):
        return False
    return True


def test_the_tables_have_all_structures() -> None:
    own = {"gp", "full", "iterative", "kfac", "ekfac", "inf", "diag"}
    assert {structure for _, structure, _ in CAN} == {structure for _, structure, _ in LOADED} == own
    assert {cell for *_, cell in CAN} == {"yes", "no"}
    assert {cell for *_, cell in LOADED} == {"yes", "include_data=True", "data="}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("call", "structure", "cell"), CAN)
def test_what_each_structure_can_do(call: str, structure: str, cell: str) -> None:
    assert works(posterior(structure), call) == (cell == "yes")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("call", "structure", "cell"), LOADED)
def test_what_a_loaded_posterior_can_do(call: str, structure: str, cell: str, tmp_path: Path) -> None:
    network, data = model()
    path = tmp_path / "posterior.pt"
    ways = ("yes", structure == "gp", None), ("include_data=True", True, None), ("data=", structure == "gp", data)

    def answers(include: bool, given: Any) -> bool:
        path.write_bytes(saved(structure, include))
        return works(ntkl.load(path, network, data=given), call)

    assert next(words for words, *way in ways if answers(*way)) == cell
