"""The studies of [L22], in miniature: each runs from its command line, and shows what its page says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
    assert "prior precision 0.1" in printed


def test_samplers_of_the_conditional_evidence(tmp_path: Path) -> None:
    printed, found = run("sampling.py", tmp_path)
    assert found["library"] in printed or "posteriors is not installed" in printed
    for one in found["results"]["conjugate"]:
        for form in ("joint", "marginal"):
            exact = one["exact"][form][0]
            assert abs(one["HMC"][form][0] - exact) < 0.6 and abs(one["Laplace, linearized"][form][0] - exact) < 0.1
        assert abs(one["Laplace, closed form"]["joint"][0] - one["exact"]["joint"][0]) < 1e-9
    assert "annealed" in found["results"]["toy"][0] and "exact" not in found["results"]["digits"][0]
