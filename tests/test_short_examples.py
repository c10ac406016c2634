"""The short examples: each runs in this process, prints what it is about, fits a screen and is shown on its page."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from gallery import keep

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "short"
PAGE = ROOT / "docs" / "short_examples.md"
FILES = sorted(FOLDER.glob("*.py"))
NUMBER = r"-?\d+\.\d+"
# what each of them prints
PRINTED = {
    "01_fit": "the mean is the network: True",
    "02_uncertainty": r"network's tensor\(\[0\.0\d+, (0\.[5-9]|1\.)\d+, 0\.0\d+\]",
    "03_which_network": rf"linear +-{NUMBER} nats\ntanh +\d+\.\d+ nats",
    "04_hyperparameters": r"noise's deviation 0\.1[01]\d+",
    "05_train_with_evidence": r"noise's +tensor\(\[0\.(09|10|11)\d+",
    "06_large_data": r"correct 0\.9\d+",
    "07_last_layer": r"on digits 0\.\d+ sure, 0\.9\d+ correct\non noise  0\.[2-6]\d+ sure",
    "08_explain": r"removing it raises output 2 by [^\n]*\nthe parts add up to the output: True",
    "09_what_if": rf"(?s)as fitted .*without \[\d+, \d+, \d+\] +tensor\(\[\[{NUMBER}.*70 is of class 2",
    "10_wrong_labels": r"[678] of 8 wrong labels are among the first 16 of 120",
    "11_save_and_load": "the same variance: True",
    "12_gpytorch": rf"mean tensor\(\[{NUMBER}(?s:.*)tangent kernel \+ RBF",
    "13_relevance": r"\[:, 0\] +weights of [^\n]* 0\.[5-9]\d+\n[^\n]*\[:, 1\] +weights of [^\n]* 0\.[01]\d+\n",
    "14_preferences": r"tensor\(\[[45]\.\d+, 2\.\d+, \d\.\d+\][^\n]*\n[^\n]*\[0\.9\d+, 0\.9\d+, 0\.[5-9]",
}


def test_the_table_is_that_of_the_folder() -> None:
    assert [file.stem for file in FILES] == list(PRINTED)
    assert len(FILES) >= 10
    assert [int(file.stem[:2]) for file in FILES] == list(range(1, len(FILES) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_short_example_prints_what_it_is_about(file: Path, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = runpy.run_path(str(file), run_name="__main__")
    printed = capsys.readouterr().out
    keep(file, tmp_path, printed, made)
    assert re.search(PRINTED[file.stem], printed), printed
    assert list(tmp_path.iterdir()) == [], "it leaves a file"
    assert len(printed.splitlines()) <= 12


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_short_example_is_short_and_independent(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) <= 30
    assert re.fullmatch(r"[A-Z][^:\n]+: [^\n]+\.", ast.get_docstring(ast.parse(text)) or ""), "one line of docstring"
    assert "sys" not in text and "_fit" not in re.findall(r"import (\w+)", text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and not (FOLDER / f"{node.module}.py").exists()


def test_the_page_includes_every_file_in_order() -> None:
    """The build copies the files into the page, so that there is one text of each."""
    text = PAGE.read_text()
    included = re.findall(r"```\{literalinclude\} \.\./examples/short/(\S+)\n:language: python\n```", text)
    assert included == [file.name for file in FILES]
    for file in FILES:
        assert f"](../examples/short/{file.name})" in text
