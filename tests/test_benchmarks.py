"""Benchmarks in miniature: what has two ways to be computed agrees, and the tables have all lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import run_script

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[1] / "examples" / "benchmarks"


def run(name: str, folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Figures and text of a benchmark."""
    printed = run_script(BENCHMARKS / f"{name}.py", folder, "--small", "--threads", "1", *arguments)
    return json.loads((folder / f"{name}.json").read_text()), printed


def test_exact_evidence_and_prediction(tmp_path: Path) -> None:
    found, printed = run("evidence_digits", tmp_path)
    assert found["ours_float64"]["gp"] == pytest.approx(found["ours_float64"]["full"], rel=1e-10)
    assert all(found[key]["predict_glm_seconds"] > 0 for key in ("ours", "ours_float64_algebra"))
    assert printed.count(">= 100x") == 2


def test_exact_evidence_of_many_rows(tmp_path: Path) -> None:
    found, printed = run("evidence_large", tmp_path)
    values = {work: one["evidence"] for work, one in found["memory"].items()}
    assert values["gradients"] == pytest.approx(values["evidence"], rel=1e-10)
    assert values["layers"] == pytest.approx(values["evidence"], rel=1e-10)
    assert set(found["time_ratios"]) == set(values) and printed.count("peak memory") == 3


def test_gram_matrices(tmp_path: Path) -> None:
    found, printed = run("gram", tmp_path)
    networks = {name: one for name, one in found.items() if name != "machine"}
    assert set(networks) == {"mlp", "cnn", "resnet", "transformer"} and "ours/floor" in printed
    assert all(one["error_ours"] < 1e-5 and one["floor"] > 0 for one in networks.values())


def test_optimizations_and_their_plain_versions(tmp_path: Path) -> None:
    found, _ = run("optimizations", tmp_path)
    names = [row[0] for row in found["rows"]]
    assert len(names) == 6 and set(names) == {"fused accumulation", "shared products", "side by side",
                                              "gradient buffers"}


def test_the_memory_of_predictions(tmp_path: Path) -> None:
    found, printed = run("prediction", tmp_path, "--structures", "gp", "kfac", "--methods", "glm", "nn")
    pairs = [(one["structure"], one["method"]) for one in found["predictions"]]
    assert pairs == [("gp", "glm"), ("kfac", "glm"), ("kfac", "nn")] and "peak, 40 images" in printed
    runs = [run for one in found["predictions"] for run in one["runs"]]
    assert all(one["peak_bytes"] >= one["base_bytes"] > 2**20 and one["seconds"] > 0 for one in runs)
