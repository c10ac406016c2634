"""The studies of [L22], in miniature: each runs from its command line, and its figures are what its text says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import run_script

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "selection"


def run(script: str, folder: Path, *arguments: str) -> str:
    """Run a script in an empty folder; what it printed."""
    return run_script(EXAMPLES / script, folder, "--small", "--threads", "1", *arguments)


def figures(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_risk_bounds(tmp_path: Path) -> None:
    """The evidence ranks priors as bound (17) does, bounds hold, and the rows come in the order that the text says."""
    printed = run("risk_bounds.py", tmp_path)
    found = figures(tmp_path / "risk_bounds" / "risk_bounds.json")
    curves = found["curves"]["over breadth"]
    assert curves["same choice"] == found["curves"]["sets"] and curves["gap"] < 1e-12
    assert not any(curves["broken"].values())
    assert found["unbounded"]["violated"] > 0.8
    for runs in found["digits"].values():
        rows = runs[0]
        assert all(row["test"] < row["bound"] for row in rows.values())
        assert rows["VOGGN"]["bound"] < rows["trained on all"]["bound"] and rows["prior alone"]["kl"] == 0.0
    assert "prior alone" in printed and (tmp_path / "risk_bounds" / "risk_bounds.png").stat().st_size > 10_000
