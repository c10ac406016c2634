"""Pages of the docs as notebooks: the blocks of Python are cells, and the text between them is Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["notebook", "pages", "write"]

# as in tests/test_docs.py: a block under a mark that says why it does not run stays text
_CODE = re.compile(r"^(?<!-->\n)```python\n(.*?)\n^```$", re.MULTILINE | re.DOTALL)
_SPHINX = re.compile(r"^(`{3,})\{.*?^\1$\n?", re.MULTILINE | re.DOTALL)  # directives
_ROLE = re.compile(r"\{doc\}`([^`]+)`")
_IMAGE = re.compile(r"!\[([^\]]*)\]\([^)]+\)")


def pages(docs: Path) -> Iterator[Path]:
    """Pages with a block of Python that runs."""
    for page in sorted(docs.glob("*.md")):
        if _CODE.search(page.read_text()):
            yield page


def notebook(page: Path) -> str:
    """A page as the JSON of a notebook, without results.

    Directives of Sphinx are left out. References and pictures become their names.
    """
    from nbformat import v4, writes

    cells = []
    # text and code take turns
    for index, part in enumerate(_CODE.split(page.read_text())):
        text = part if index % 2 else _IMAGE.sub(r"*\1*", _ROLE.sub(r"*\1*", _SPHINX.sub("", part))).strip()
        if text:
            cells.append((v4.new_code_cell if index % 2 else v4.new_markdown_cell)(text, id=f"cell-{index}"))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    found: str = writes(v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}))
    return found


def write(docs: Path, out: Path) -> list[str]:
    """Write a notebook for each page with code; the names of the pages."""
    out.mkdir(parents=True, exist_ok=True)
    names = []
    for page in pages(docs):
        (out / f"{page.stem}.ipynb").write_text(notebook(page), encoding="utf-8")
        names.append(page.stem)
    return names
