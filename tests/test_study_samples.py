"""The studies of [L22], in miniature: each runs from its command line, and shows what its page says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ntk_laplace as ntkl
from scripts import run_script

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "selection"


def run(script: str, folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What a study printed in an empty folder, and the figures that it wrote."""
    printed = run_script(FOLDER / script, folder, "--small", "--threads", "1", "--out", "out", *arguments)
    name = Path(script).stem
    found = json.loads((folder / "out" / f"{name}.json").read_text())
    picture = folder / "out" / f"{name}.png"
    assert not picture.exists() or picture.read_bytes().startswith(b"\x89PNG")
    return printed, found


def test_the_temperature_of_the_two_forms(tmp_path: Path) -> None:
    printed, found = run("temperature.py", tmp_path)
    toy = found["toy"]["one"]
    # a temperature closes the gap, and the noise of 20 samples with it; the marginals are those of a fair coin
    cold, warm = (toy[t]["marginal"] - toy[t]["exact"][0] for t in ("0.5", "6.0"))
    assert cold > 2.0 and warm < -0.2
    assert toy["0.5"]["few_sd"] > 5 * toy["6.0"]["few_sd"]
    assert all(abs(one["marginal"] + 27.73) < 0.2 for one in toy.values())
    digits = found["digits"]["0.1"]["calibrations"]
    assert all(one["map_unchanged"] for one in digits.values())
    assert "gap" in digits["scale, draws"] and "gap" not in digits["scale, average"]
    assert digits["scale, draws"]["few_sd"] < digits["none"]["few_sd"]
    sampled = found["sampled"]
    assert {cell["name"] for cell in sampled["cells"]} == {"linear", "16-16"} and sampled["library"] in printed
    assert all(0 < cell["virial"] < 1.5 for cell in sampled["cells"])
    tempered, average = (sampled["summary"]["calibrations"][f"temperature of {of}"] for of in ("draws", "the average"))
    assert tempered["temperature"] != 1.0 == tempered["average"] and average["temperature"] == 1.0 != average["average"]
    assert "prior precision 0.1" in printed


def test_underdamped_chains_of_a_linear_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean and covariance are those of Bayesian linear regression; the virial and the momenta are 1."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(FOLDER.parent / "structures"))
    samplers = importlib.import_module("_samplers")
    torch.manual_seed(0)
    x, y = torch.randn(50, 4).double(), torch.randn(50, 1).double()
    problem = samplers.Problem("linear", x, y, 40, nn.Linear(4, 1, bias=False).double(), ntkl.Gaussian(0.5), 2.0)
    chains = samplers.underdamped(problem, torch.zeros(64, 4).double(), 1000, 5, 1000)
    precision = 2.0 * torch.eye(4).double() + x[:40].T @ x[:40] / 0.5
    mean = torch.linalg.solve(precision, x[:40].T @ y[:40, 0] / 0.5)
    draws = chains.draws.flatten(0, 1)
    assert torch.allclose(draws.mean(0), mean, atol=0.01)
    root = torch.linalg.cholesky(precision)
    assert torch.allclose(root.T @ draws.T.cov() @ root, torch.eye(4).double(), atol=0.08)
    assert abs(chains.virial - 1) < 0.05 and abs(chains.kinetic - 1) < 0.08
    largest, _ = samplers.curvature(problem, torch.zeros(1, 4).double(), torch.randn(1, 4).double(), 200)
    assert largest == pytest.approx(float(torch.linalg.eigvalsh(precision)[-1]), rel=1e-6)


def test_samplers_of_the_conditional_evidence(tmp_path: Path) -> None:
    printed, found = run("sampling.py", tmp_path)
    assert found["library"] in printed or "posteriors is not installed" in printed
    for one in found["results"]["conjugate"]:
        for form in ("joint", "marginal"):
            exact = one["exact"][form][0]
            assert abs(one["HMC"][form][0] - exact) < 0.6 and abs(one["Laplace, linearized"][form][0] - exact) < 0.1
        assert abs(one["Laplace, closed form"]["joint"][0] - one["exact"]["joint"][0]) < 1e-9
    assert "annealed" in found["results"]["toy"][0] and "exact" not in found["results"]["digits"][0]
