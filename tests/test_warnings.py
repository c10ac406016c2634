"""Warnings name the line of the caller's code, however deep in the library they are raised."""

from __future__ import annotations

import inspect
import linecache
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_laplace as ntkl
from ntk_laplace.errors import told_later, untold, warn
from ntk_laplace.runtime import tuning
from refusals import inputs, labels, network

ROOT = Path(__file__).resolve().parents[1]


class Products(nn.Module):
    """A layer that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(4, 4, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x)


def far() -> ntkl.Posterior:
    """Of a network that is not trained, with labels that it cannot predict."""
    return ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(), ntkl.GaussianPrior(1e-3))


DEEP: dict[str, Callable[[], object]] = {
    "a fit": lambda: ntkl.laplace(Products(), (inputs(), labels()), ntkl.Categorical()),
    "a what-if": lambda: far().remove(0, linearization="moving"),
    "many what-ifs": lambda: far().what_ifs([[0], [1]]),
    "under no_grad": lambda: torch.no_grad()(far().what_ifs)([[0], [1]]),
    "a predictive": lambda: far().fit_predictive("loo", strict=False),
    "an estimate": lambda: far().importance_evidence(samples=20, model="nn"),
}


@pytest.mark.parametrize("name", DEEP)
def test_the_line_is_the_callers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "NEWTON_STEPS", 1)  # what-ifs end early
    monkeypatch.setattr(tuning, "MOST_QUASI_NEWTON_STEPS", 1)
    with pytest.warns(ntkl.NTKLaplaceWarning) as caught:
        DEEP[name]()
    own = [one for one in caught if one.category is ntkl.NTKLaplaceWarning]
    for one in own:
        line = linecache.getline(one.filename, one.lineno)
        assert one.filename == __file__ and inspect.getsource(DEEP[name]).count(line.strip()) > 0, (one, line)


def test_warnings_that_are_told_later() -> None:
    """Those of a block are kept back in a list; an error tells them."""
    with told_later() as kept, untold(pattern="never"):
        warn("never told")
        warn("told later")
    assert kept == ["told later"]
    with pytest.warns(ntkl.NTKLaplaceWarning, match="told at once"), pytest.raises(ValueError), told_later():
        warn("told at once")
        raise ValueError


@pytest.mark.filterwarnings("ignore:leave-one-out is not to be trusted")
def test_numbers_of_points_that_a_loader_shuffles() -> None:
    loader = DataLoader(TensorDataset(inputs(), labels()), batch_size=4, shuffle=True)
    posterior = ntkl.laplace(network(), loader, ntkl.Categorical(), ntkl.GaussianPrior(3.0))
    for verb in (
        lambda: posterior.explain(inputs(2)),
        lambda: posterior.add(inputs(1), labels(1)).removal_effects(inputs(2)),
        lambda: posterior.leave_one_out(),
        lambda: posterior.subset([0, 1, 2]),
        lambda: posterior.relabel(0, 1),
        lambda: ntkl.explore(posterior, inputs(2)),
        lambda: posterior.cross_validate(2, linearization="fixed"),
    ):
        with pytest.warns(ntkl.NTKLaplaceWarning, match="DataLoader of the fit shuffles.*shuffle=False"):
            verb()
    with pytest.warns(ntkl.NTKLaplaceWarning) as told:
        posterior.rerank(inputs(2), 1, groups=[[0, 1]])
    assert sum("shuffles" in str(one.message) for one in told) == 1


@pytest.mark.parametrize("likelihood", [ntkl.Categorical(), ntkl.Tempered(ntkl.Categorical(), 2.0)],
                         ids=lambda likelihood: type(likelihood).__name__)
def test_outputs_that_are_probabilities(likelihood: ntkl.Likelihood) -> None:
    """A network that ends in a softmax; one that ends in log_softmax has logits."""
    for last, told in ((nn.Softmax(1), True), (nn.LogSoftmax(1), False), (nn.Sigmoid(), False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ntkl.laplace(nn.Sequential(network(), last), (inputs(), labels()), likelihood)
        assert [str(one.message)[:44] for one in caught] == ["the outputs of the network are probabilities"] * told


@pytest.mark.parametrize("likelihood", [ntkl.Bernoulli(), ntkl.Tempered(ntkl.Bernoulli(), 2.0)],
                         ids=lambda likelihood: type(likelihood).__name__)
@pytest.mark.parametrize("outputs", [1, 2])
def test_outputs_that_are_probabilities_of_one(likelihood: ntkl.Likelihood, outputs: int) -> None:
    """A network that ends in a sigmoid; logits between 0 and 1 that were trained as such are none."""
    x = torch.linspace(-2, 2, 40, dtype=torch.float64, device="cpu")[:, None].expand(40, outputs)
    steep, flat = (nn.Linear(outputs, outputs).double() for _ in range(2))
    with torch.no_grad():
        for layer, slope, bias in ((steep, 3.0, 0.0), (flat, 0.2, 0.5)):
            layer.weight.copy_(slope * torch.eye(outputs))
            layer.bias.fill_(bias)
    assert 0 < flat(x).min() < flat(x).max() < 1
    frequencies = flat(x).detach().sigmoid()  # soft labels that these logits predict exactly
    for layers, y, told in (
        (nn.Sequential(steep, nn.Sigmoid()), (x > 0).double(), True),
        (steep, (x > 0).double(), False),
        (flat, frequencies, False),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ntkl.laplace(layers, (x, y), likelihood)
        assert [str(one.message)[:44] for one in caught] == ["the outputs of the network are probabilities"] * told


@pytest.mark.parametrize(("structure", "width", "most", "told"), [
    ("gp", 2, 1e5, True),  # B has 800 rows, H has 17
    ("gp", 2, None, False),
    ("gp", 200, 1e5, False),  # H has 1,403
    ("auto", 2, 1e5, False),
    ("full", 2, 1e5, False),
])
def test_work_of_function_space(
    structure: str, width: int, most: float | None, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit tells of weight space that takes a small part of the operations."""
    if most is not None:
        monkeypatch.setattr(tuning, "LONG_OPERATIONS", most)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, dtype=torch.float64, device="cpu", generator=generator)
    y = torch.randint(3, (400,), device="cpu", generator=generator)
    layers = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 3)).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ntkl.laplace(layers, (x, y), ntkl.Categorical(), structure=structure)
    assert [str(one.message)[:20] for one in caught] == ["structure='gp' takes"] * told


def test_all_warnings_go_one_way() -> None:
    """`errors.warn` finds the line; a fixed depth would be wrong after the next change."""
    calling = [path.name for path in (ROOT / "ntk_laplace").rglob("*.py") if "warnings.warn(" in path.read_text()]
    assert calling == ["errors.py"]
