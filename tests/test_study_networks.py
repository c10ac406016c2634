"""The studies of examples/selection in miniature: each runs from its command line, and says what its figures say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import run_script

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
SELECTION = ROOT / "examples" / "selection"


def run(script: str, folder: Path, *arguments: str) -> str:
    return run_script(SELECTION / script, folder, "--small", "--threads", "1", "--out", "out", *arguments)


def figures(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    assert found["machine"]["threads"] == 1
    return found


def test_the_architectures(tmp_path: Path) -> None:
    """Two priors, three networks: layerwise precisions have the most evidence, and only the fixed prior is vague."""
    printed = run("architectures.py", tmp_path)
    vague, layerwise = figures(tmp_path / "out" / "architectures.json")["results"]
    assert (vague["prior"], layerwise["prior"]) == ("1e-3", "layerwise")
    for before, after in zip(vague["rows"][0], layerwise["rows"][0], strict=True):
        fixed, tuned = before["structures"]["kfac"], after["structures"]["kfac"]
        assert tuned["lml"] > fixed["lml"] and fixed["vague"] and not tuned["vague"]
        assert fixed["kl"] > 0 and "kl" not in tuned  # no bound for precisions that the data chose
        assert before["precision"] == 1e-3 and len(after["precision"]) >= 2
    for column in (vague, layerwise):
        for score in column["scores"].values():
            for each in score.values():
                assert all(rho is None or -1.0 <= rho <= 1.0 for rho in each["rho"])
                assert all(regret >= 0.0 for regret in each["regret"])
    assert "Spearman" in printed and (tmp_path / "out" / "choice_scaled.png").read_bytes().startswith(b"\x89PNG")
    run("architectures.py", tmp_path, "--minutes", "0")  # all cells are kept
    assert figures(tmp_path / "out" / "architectures.json")["results"] == [vague, layerwise]


def test_regret_and_correlation(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: ties share the choice, and constants have no rank."""
    monkeypatch.syspath_prepend(str(SELECTION))
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "structures"))
    import _summary_l22 as summary

    shared = {"gap": 1.0, "effective": 5.0, "scale": 0.5, "vague": True, "narrow": False, "bma_validation": -1.0,
              "map_validation": -0.5, "clml": 0.0, "clml_draws": 0.0}
    rows = []
    for size, loo, lml, tested in ((3, -1.0, -5.0, -0.1), (2, -1.0, -4.0, -0.2), (1, -2.0, -3.0, -0.4)):
        test = {f"{name}_log_likelihood": tested for name in summary.TESTS}
        test |= {f"{name}_accuracy": 0.5 for name in summary.TESTS}
        rows.append({"parameters": size, "loo": loo, "structures": {"kfac": shared | test | {"lml": lml}}})
    found = summary.summary(summary.Column("toy", 10, "1", [rows]))
    own = {name: each["scaled_log_likelihood"] for name, each in found["scores"].items()}
    assert own["evidence (KFAC)"] == {"rho": [-1.0], "regret": [pytest.approx(0.3)]}
    assert own["most parameters"] == {"rho": [1.0], "regret": [0.0]}
    assert own["LOO, last layer"]["regret"] == [pytest.approx(0.05)]
    assert own["CLML, scaled and tempered"]["rho"] == [None]
    assert own["CLML, scaled and tempered"]["regret"] == [pytest.approx(0.4 / 3)]
    assert found["scores"]["evidence (KFAC)"]["scaled_accuracy"]["rho"] == [None]
    assert found["check"]["vague"] == [1.0] and found["check"]["average below network"] == [1.0]
    assert found["check"]["γ / N"] == [0.5] and found["check"]["gap / abs(evidence)"] == [0.25]
    assert "evidence (diagonal)" not in own and "PAC-Bayes bound" not in own
