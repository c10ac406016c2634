"""The gallery, the notebooks, the page for users of laplace-torch, and the files of a release."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

import gallery
import ntk_laplace as ntkl
from scripts import run_script

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

# ------------------------------------------------------------------------------------------------------------- gallery


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield from imported("cards", monkeypatch)


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of the docs."""
    monkeypatch.syspath_prepend(str(DOCS))
    yield importlib.import_module(name)
    del sys.modules[name]


@pytest.mark.slow
def test_every_script_has_a_card_and_a_picture(cards: Any) -> None:
    text, scripts = cards.cards(gallery.EXAMPLES, gallery.PICTURES), cards.scripts(gallery.EXAMPLES)
    for script in scripts:
        name = script.relative_to(gallery.EXAMPLES).as_posix()
        title = cards.title_of(script)
        assert title and text.count(f"[{name}](../examples/{name})\n\n{title}\n```") == 1
    shown, kept = set(re.findall(r"images/gallery/(\S+)\)", text)), {path.name for path in gallery.PICTURES.iterdir()}
    assert shown == kept == {cards.picture_of(script, gallery.EXAMPLES) for script in scripts}
    assert text.count("````{container} gallery") == len({script.parent for script in scripts})
    for path in gallery.PICTURES.iterdir():
        with Image.open(path) as image:
            assert image.size[0] <= gallery.SIZE[0] and image.size[1] <= gallery.SIZE[1]
            assert image.convert("L").getextrema()[0] < 128, f"{path} is empty"
        assert path.stat().st_size < 60_000


@pytest.mark.slow
def test_pictures_are_of_the_scripts_as_they_are(cards: Any) -> None:
    """Each holds the text on it and the names in its script; docs/gallery.md has the command for new ones."""
    for script in cards.scripts(gallery.EXAMPLES):
        with Image.open(gallery.PICTURES / cards.picture_of(script, gallery.EXAMPLES)) as image:
            assert not re.search(r"Error|Traceback|Warning", image.info["text"]), script
            assert image.info["names"] == cards.names_of(script), f"{script} names other things than its picture"


def test_other_names_are_seen(cards: Any, tmp_path: Path) -> None:
    found = []
    for number, text in enumerate((
        '"""Of three."""\nWAYS = ["random", "bald"]\n', '"""Of two."""\nWAYS = [\n    "random", "bald",  # ways\n]\n',
        '"""Of three."""\nWAYS = ["random", "bald", "epig"]\n',
    )):
        script = tmp_path / f"{number}.py"
        script.write_text(text)
        found.append(cards.names_of(script))
    assert found[0] == found[1] != found[2]


WIDE = f"""\
progress: {{'seconds': 0.123}}

| a peer | time |
|--------|------|
| ours   | -    |

digits, {"a long title " * 3}
| {"work " * 30} | {"time it takes " * 9} | same | peer | {"w" * 60} | {"w" * 60} |
|---|---|---|---|---|---|
| {"one of many long names " * 3} | 1.25 ± 0.01 | 7 | | 1 | 3 |
| peer of another package | ModuleNotFoundError | | | | |
| another | 3.50 ± 0.02 | 7 | | 2 | 4 |
"""


def test_the_figures_of_a_printed_table_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first table with figures; cells are wrapped and never cut; neither failures nor what all rows share."""
    monkeypatch.setenv("GALLERY", str(tmp_path))
    script, long = gallery.EXAMPLES / "short" / "01_fit.py", "w" * 60
    wide = [f"digits, {'a long title ' * 3}", f"{'work ' * 30}|{'time it takes ' * 9}|{long}",
            f"{'one of many long names ' * 3}|1.25±0.01|1", "another|3.50±0.02|2"]
    for printed, lines in (
        (WIDE, wide),
        ("| a | b |\n|---|---|\n| x | 1 |\n", ["a|x", "b|1"]),
        (f"loss {'9' * 100}\n", [f"loss {'9' * 100}"]),
    ):
        gallery.keep(script, tmp_path / "none", printed)
        with Image.open(tmp_path / "short_01_fit.png") as image:
            shown = ["".join(line.split()) for line in image.info["text"].splitlines()]
            assert shown == ["".join(line.split()) for line in lines]
            edge = image.convert("L").crop((image.width - gallery.MARGIN + 1, 0, image.width, image.height))
            assert edge.getextrema()[0] > 200  # nothing is written to the edge


class Result:
    def plot(self) -> Figure:
        figure = Figure(figsize=(3, 2))
        figure.add_axes((0, 0, 1, 1), facecolor="blue")
        return figure


def test_a_result_is_drawn_where_the_script_draws_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GALLERY", str(tmp_path / "kept"))
    kept, script = tmp_path / "kept" / "short_01_fit.png", gallery.EXAMPLES / "short" / "01_fit.py"
    gallery.keep(script, tmp_path / "none", "text", {"x": torch.zeros(3, 1), "found": Result()})
    with Image.open(kept) as image:
        assert image.convert("RGB").getpixel((image.width // 2, image.height // 2)) == (0, 0, 255)
    x = torch.linspace(0, 1, 5).double().unsqueeze(1)
    posterior = ntkl.laplace(torch.nn.Linear(1, 1).double(), (x, x), ntkl.Gaussian(noise=1.0))
    gallery.keep(script, tmp_path / "none", "text", {"posterior": posterior, "x": x, "y": x})
    with Image.open(kept) as image:
        assert len(image.convert("RGB").getcolors()) > 10  # bands, points and a line


# ----------------------------------------------------------------------------------------------------------- notebooks


@pytest.fixture
def notebooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("nbformat")
    yield from imported("notebooks", monkeypatch)


def test_cells_of_a_notebook_are_the_blocks_of_the_page(notebooks: Any, tmp_path: Path) -> None:
    import nbformat

    names = notebooks.write(DOCS, tmp_path)
    assert {"quickstart", "sklearn", "tables", "from_laplace_torch"} <= set(names)
    for name in names:
        found = nbformat.read(tmp_path / f"{name}.ipynb", 4)
        nbformat.validate(found)
        text = (DOCS / f"{name}.md").read_text()
        code = [cell.source for cell in found.cells if cell.cell_type == "code"]
        assert len(code) == text.count("```python\n") - text.count("<!-- not run:") > 0
        assert all(f"```python\n{source}\n```" in text for source in code)
        words = "".join(cell.source for cell in found.cells if cell.cell_type == "markdown")
        assert "{doc}" not in words and "```{" not in words and words.startswith("# ")


@pytest.mark.slow
def test_a_notebook_runs(notebooks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them: the cells are blocks of pages, all of which run in tests/test_docs.py."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = nbformat.reads(notebooks.notebook(DOCS / "from_laplace_torch.md"), 4)
    nbclient.NotebookClient(found, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in found.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert re.search(r"^-\d+\.\d+ tensor\(\[\[", printed, re.MULTILINE), printed


# -------------------------------------------------------------------------------------------------- from laplace-torch


@pytest.mark.slow
def test_the_script_of_the_page_runs_without_the_peer(tmp_path: Path) -> None:
    script = gallery.EXAMPLES / "benchmarks" / "laplace_torch.py"
    printed = run_script(script, tmp_path, "--small", "--threads", "1")
    found = json.loads((tmp_path / "laplace_torch.json").read_text())["evidence"]
    page = (DOCS / "from_laplace_torch.md").read_text()
    assert set(found) == set(re.findall(r"^\| (\w+/\w+/\w+) ", page, re.MULTILINE)) and "| -" in printed
    for task in ("regression", "classification"):  # approximations of the same network's evidence
        assert found[f"{task}/all/full"] > found[f"{task}/all/diag"]


def calls_of_ours() -> list[str]:
    """Pieces of code in the right column of the table."""
    page = (DOCS / "from_laplace_torch.md").read_text()
    rows = re.findall(r"^\| .* \| (.*) \|$", page.partition("| laplace-torch | ntk_laplace |")[2].partition("\n\n")[0],
                      re.MULTILINE)
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row)]


def test_the_table_of_calls_names_what_exists() -> None:
    """Each name and each argument, by the signature; a lone argument is one of `laplace`, `predict` or a prior."""
    checked = []
    for code in calls_of_ours():
        if code.startswith('"'):
            assert ast.literal_eval(code) in ntkl.structures.structure_names(), code
            continue
        lone = re.match(r"\w+=", code) and not code.startswith("posterior =")
        tree = ast.parse(f"call({code})" if lone else code)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert hasattr({"ntkl": ntkl, "posterior": ntkl.Posterior}[node.value.id], node.attr) or (
                    node.attr in FIELDS
                ), code
                checked.append(node.attr)
            if isinstance(node, ast.Call):
                for keyword in node.keywords:
                    assert any(keyword.arg in inspect.signature(one).parameters for one in called(node)), code
                    if keyword.arg == "structure":
                        assert ast.literal_eval(keyword.value) in ntkl.structures.structure_names(), code
    assert len(checked) > 25


FIELDS = {"likelihood", "prior"}


def called(node: ast.Call) -> list[Callable[..., Any]]:
    """What may take the arguments of a call on the page."""
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        owner = {"ntkl": ntkl, "posterior": ntkl.Posterior}[node.func.value.id]
        return [getattr(owner, node.func.attr)]
    return [ntkl.laplace, ntkl.GaussianPrior]


# ------------------------------------------------------------------------------------------------------------- release


def test_the_files_of_a_release_agree() -> None:
    """One version in the package, the citation and the changelog."""
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((DOCS / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "license", "version", "date-released"} <= set(citation)
    assert citation["version"] == ntkl.__version__ and citation["title"] == "ntk_laplace"
    assert citation["license"] == "MIT"
    changes = re.findall(r"^## (\S+)", (DOCS / "changelog.md").read_text(), re.MULTILINE)
    assert changes[0] == ntkl.__version__ and changes == sorted(changes, reverse=True)
    for name in ("contributing", "gallery", "from_laplace_torch"):
        assert f"\n{name}\n" in (DOCS / "index.md").read_text()


def test_the_readme_names_extras_that_exist() -> None:
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    named = re.findall(r"^\| `(\w+)` \|.* \| 3\.1\d \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(named) >= 4 and set(named) <= set(re.findall(r"^(\w+) = ", extras, re.MULTILINE))
