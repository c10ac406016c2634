"""The studies of [L22] in miniature: each runs from its command line, and its parts are what its text says they are."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import gpytorch
import pytest
import torch
from gpytorch.utils.grid import ScaleToBounds

from scripts import run_script

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "selection"


def run(script: str, folder: Path, *arguments: str) -> str:
    """Run a script in an empty folder; what it printed."""
    return run_script(FOLDER / script, folder, "--small", "--threads", "1", "--out", "out", *arguments)


def figures(path: Path) -> Any:
    found = json.loads(path.read_text())
    assert found["machine"]["threads"] == 1
    return found["results"]


def test_deep_kernels(tmp_path: Path) -> None:
    """Two splits of made data; a second run reads what the first one kept."""
    printed = run("deep_kernels.py", tmp_path, "--sets", "boston")
    found = figures(tmp_path / "out" / "deep_kernels.json")
    assert len(found) == 2 * 6 * 2  # numbers of steps, objectives, scores
    assert all(math.isfinite(one["mean"]) and one["n"] == 20 for one in found)
    for one in found:
        assert (one["difference"] == 0.0) == (one["objective"] == "LML")
    assert "boston, n = 20: 2 splits x 2 initializations" in printed
    assert (tmp_path / "out" / "deep_kernels.png").read_bytes().startswith(b"\x89PNG")
    with mock.patch("torch.optim.Adam", side_effect=AssertionError("trained again")):
        assert run("deep_kernels.py", tmp_path, "--sets", "boston") == printed


def test_a_batch_of_deep_kernels_is_each_alone() -> None:
    """Networks, bounds, the LML and the released objective, against GPyTorch's pieces one model at a time."""
    with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
        deep = importlib.import_module("_deep")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 20, 2, generator=generator).double()
    y = torch.randn(3, 20, generator=generator).double()
    state = torch.get_rng_state()
    model = deep.DeepKernel(x, y, deep.Networks((2, 5, 2), [4, 5, 6]), 2, zero_mean=True).double()
    assert torch.equal(torch.get_rng_state(), state)
    values = {name: deep.objective(name, model, seed=3)() for name in deep.OBJECTIVES}
    part = torch.randperm(20, generator=torch.Generator().manual_seed(3))[:18]
    for place, seed in enumerate((4, 5, 6)):
        torch.manual_seed(seed)
        network = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2)).double()
        kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2)).double()
        noise = torch.nn.functional.softplus(torch.zeros(()).double()) + 1e-4

        def log_density(features, targets, kernel=kernel, noise=noise):
            matrix = kernel(features).to_dense() + noise * torch.eye(len(targets))
            return torch.distributions.MultivariateNormal(torch.zeros(len(targets)).double(), matrix).log_prob(targets)

        raw, bounds = network(x[place]), ScaleToBounds(-1.0, 1.0)
        whole, given = log_density(bounds(raw), y[place]), log_density(bounds(raw)[part], y[place][part])
        assert values["LML"][place].item() == pytest.approx(whole.item() / 20, rel=1e-6)
        assert values["CLML, one order"][place].item() == pytest.approx((whole - given).item() / 2, rel=1e-6)
        assert values["LML, new subset"][place].item() == pytest.approx(given.item() / 18, rel=1e-6)
        released = whole - log_density(bounds(raw[part]), y[place][part])
        assert values["released"][place].item() == pytest.approx(released.item(), rel=1e-6)


def test_transfer(tmp_path: Path) -> None:
    """Sines, and digits to digits: without a folder there is no MNIST."""
    printed = run("transfer.py", tmp_path)
    found = figures(tmp_path / "out" / "transfer.json")
    problems = {one["problem"] for one in found}
    assert problems == {"sines", "trained on digits, RBF", "trained on digits, cosine"}
    assert all(math.isfinite(one["difference"]) and 0 <= one["better"] <= 2 for one in found)
    assert all(0 <= one["lml"] <= 1 for one in found if one["score"] == "accuracy")
    assert "digits, 5 shot" in printed


def test_spectral_mixture(tmp_path: Path) -> None:
    """Three draws: the kernel that made the data predicts best, inside and beyond."""
    printed = run("spectral_mixture.py", tmp_path)
    found = figures(tmp_path / "out" / "spectral_mixture.json")
    assert set(found) == {"LML", "CLML", "CLML, one order", "CLML, in time", "LOO", "truth"}
    for score in ("inside RMSE", "inside NLL", "beyond RMSE", "beyond NLL"):
        assert found["truth"][score]["mean"] == min(own[score]["mean"] for own in found.values())
    assert "3 data sets" in printed
