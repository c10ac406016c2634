"""The gallery, the notebooks, the page for users of laplace-torch, and the files of a release."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import gallery
import ntk_laplace as ntkl

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

# ------------------------------------------------------------------------------------------------------------- gallery


def test_the_page_of_the_gallery_is_that_of_the_scripts() -> None:
    """Written by the helper, from the docstrings and the pictures that there are."""
    assert gallery.PAGE.read_text() == gallery.page(), "run: python tests/helpers/gallery.py"
    for script in gallery.SCRIPTS:
        assert gallery.title_of(script), f"{script} has no docstring"


# the tests do not run them: they take peers, or much memory
WITHOUT_PICTURE = {"evidence_digits", "evidence_large", "gram", "optimizations", "prediction", "versions"}


def test_every_script_that_the_tests_run_has_a_picture() -> None:
    known = {gallery.picture_of(script): script for script in gallery.SCRIPTS}
    kept = {path.name for path in gallery.GALLERY.glob("*.png")}
    assert kept <= set(known), f"pictures of no script: {kept - set(known)}"
    assert {known[name].stem for name in set(known) - kept} == WITHOUT_PICTURE
    for path in gallery.GALLERY.glob("*.png"):
        with Image.open(path) as image:
            assert image.size[0] <= gallery.SIZE[0] and image.size[1] <= gallery.SIZE[1]
            assert image.convert("L").getextrema()[0] < 128, f"{path} is empty"
        assert path.stat().st_size < 60_000


def test_pictures_are_kept_from_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was drawn, else what was printed; nothing without the variable."""
    script = gallery.EXAMPLES / "short" / "01_fit.py"
    gallery.keep(script, tmp_path, "nothing")
    monkeypatch.setenv("GALLERY", str(tmp_path / "kept"))
    gallery.keep(script, tmp_path / "none", " \n")
    assert not (tmp_path / "kept").exists()
    kept = tmp_path / "kept" / "short_01_fit.png"
    gallery.keep(script, tmp_path / "none", "a table\n| 1 | 2 |\n")
    text = kept.read_bytes()
    (tmp_path / "out").mkdir()
    Image.new("RGB", (2000, 1000), "red").save(tmp_path / "out" / "figure.png")
    gallery.keep(script, tmp_path / "out", "a table\n")
    with Image.open(kept) as image:
        assert kept.read_bytes() != text and image.size == (560, 280)
        assert image.convert("RGB").getpixel((5, 5)) == (255, 0, 0)


# ----------------------------------------------------------------------------------------------------------- notebooks


@pytest.fixture
def notebooks(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("nbformat")
    monkeypatch.syspath_prepend(str(DOCS))
    import notebooks

    yield notebooks
    del sys.modules["notebooks"]


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
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = nbformat.reads(notebooks.notebook(DOCS / "from_laplace_torch.md"), 4)
    nbclient.NotebookClient(found, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [output.text for cell in found.cells if cell.cell_type == "code" for output in cell.outputs]
    assert re.search(r"^-\d+\.\d+ tensor\(\[\[", "".join(printed))


# -------------------------------------------------------------------------------------------------- from laplace-torch


def calls_of_ours() -> list[str]:
    """Pieces of code in the right column of the table."""
    page = (DOCS / "from_laplace_torch.md").read_text()
    rows = re.findall(r"^\| .* \| (.*) \|$", page.partition("| laplace-torch | ntk_laplace |")[2].partition("\n\n")[0],
                      re.MULTILINE)  # fmt: skip
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
    assert citation["version"] == ntkl.__version__ and citation["title"] == metadata("ntk_laplace")["Name"]
    assert citation["license"] == "MIT"
    changes = re.findall(r"^## (\S+)", (DOCS / "changelog.md").read_text(), re.MULTILINE)
    assert changes[0] == ntkl.__version__ and changes == sorted(changes, reverse=True)
    for name in ("contributing", "gallery", "from_laplace_torch"):
        assert f"\n{name}\n" in (DOCS / "index.md").read_text()


def test_every_extra_is_in_the_readme() -> None:
    extras = set(metadata("ntk_laplace").get_all("Provides-Extra") or ())
    text = (ROOT / "README.md").read_text()
    assert {name for name in extras if f"| `{name}`" not in text} == set()
