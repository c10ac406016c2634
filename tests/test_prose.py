"""Plain English, checked: words that hide a technical term, and lines of prose that are too long to review."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 120
# pictures in place of a technical term, and British spellings
BANNED = re.compile(
    r"\b(doors?|house|toward|normalis\w+|linearis\w+|factoris\w+|optimis(e|ing|ation|er)\w*|generalis\w+|behaviour|honoured|colour(?!\b.*=))\b",
    re.IGNORECASE,
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted((ROOT / "ntk_laplace").rglob("*.py"))


def prose_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Lines of a page that are prose: no code, formula, table, picture, heading or command mark."""
    fenced = formula = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        elif line.strip() == "$$" or (line.startswith("$$") and line.count("$$") == 1):
            formula = not formula
        elif not fenced and not formula and not line.lstrip().startswith(("|", "![", "<", "#", "$$")):
            yield number, line


def prose_of_module(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings and comments of a module."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        docstring = token.type == tokenize.STRING and token.string.lstrip("rR").startswith('"""')
        if docstring or token.type == tokenize.COMMENT:
            for offset, line in enumerate(token.string.split("\n")):
                yield token.start[0] + offset, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages(page: Path) -> None:
    for number, line in prose_of_page(page.read_text()):
        assert not BANNED.search(line), f"{page}:{number}: {line}"
        words = re.sub(r"\]\([^)]*\)", "]", line)  # a link's target cannot be wrapped
        assert len(words) <= COLUMNS, f"{page}:{number} has {len(words)} columns"


@pytest.mark.slow
def test_docstrings_and_comments() -> None:
    found = [
        f"{module.relative_to(ROOT)}:{number}: {line.strip()}"
        for module in MODULES
        for number, line in prose_of_module(module.read_text())
        if BANNED.search(line)
    ]
    assert found == []


def test_every_claim_of_l22_begins_with_a_verdict() -> None:
    """The words that the page defines above its table; details follow a colon."""
    page, _ = (ROOT / "docs" / "reproduction" / "l22.md").read_text().split("\n## ")
    rows = [line.strip("| ").split(" | ") for line in page.split("\n") if line.startswith("| ")][1:]
    assert len(rows) > 35 and all(len(row) == 4 for row in rows)
    verdicts = {row[1].split(":")[0] for row in rows}
    assert verdicts == {"holds", "holds on average", "does not hold"} and all(f"*{word}*" in page for word in verdicts)


def test_the_checks_find_what_they_look_for() -> None:
    page = "# A house\n\n```python\ndoor = 1\n```\n\n$$\n\\text{house}\n$$\n\nThe linearised model.\n"
    assert [line for _, line in prose_of_page(page) if line] == ["The linearised model."]
    assert BANNED.search("The linearised model.") and BANNED.search("At the door") and not BANNED.search("indoor")
    module = '"""One.\n\nTwo."""\nx = "door"  # three\n'
    assert [line for _, line in prose_of_module(module) if line] == ['"""One.', 'Two."""', "# three"]


def test_public_methods_are_documented() -> None:
    """In their class, or in a class of the library that it derives from."""
    classes = {node.name: node for module in MODULES for node in ast.walk(ast.parse(module.read_text()))
               if isinstance(node, ast.ClassDef)}

    def documented(owner: str, method: str) -> bool:
        own = [node for node in classes[owner].body if isinstance(node, ast.FunctionDef) and node.name == method]
        bases = [re.split(r"[.\[]", ast.unparse(base))[0] for base in classes[owner].bases]
        return any(map(ast.get_docstring, own)) or any(documented(base, method) for base in bases if base in classes)

    missing = [f"{name}.{node.name}" for name, owner in classes.items() for node in owner.body
               if isinstance(node, ast.FunctionDef) and not name.startswith("_") and not node.name.startswith("_")
               and not documented(name, node.name)]
    assert missing == []
