"""The cards of the gallery: for each script of examples/ its picture, if there is one, its name and its title."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["cards", "names_of", "picture_of", "scripts", "title_of"]

# folders of examples/; others come at the end, under their own names
SECTIONS = {
    "short": "First steps", "predictions": "Predictions", "selection": "Which model?",
    "selection/exact": "Exact evidence", "attribution": "Explanations", "active": "Active learning",
    "bayesian_optimization": "Bayesian optimization", "structures": "Structures", "toys": "Toys", "uci": "UCI data",
    "variational": "Variational inference",
}


def scripts(examples: Path) -> list[Path]:
    """All scripts that are run, below a folder."""
    return sorted(path for path in examples.rglob("*.py") if not path.name.startswith("_"))


def picture_of(script: Path, examples: Path) -> str:
    """Name of the picture's file."""
    return "_".join(script.relative_to(examples).with_suffix("").parts) + ".png"


def title_of(script: Path) -> str:
    """The first paragraph of the docstring."""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def names_of(script: Path) -> str:
    """A digest of the strings in the code, which name its methods, columns and data.

    A picture holds that of the script that made it, so that a test sees an older one. Comments, docstrings and numbers
    may change: otherwise each correction would ask for a new picture.
    """
    tree = ast.parse(script.read_text(encoding="utf-8"))
    remarks = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = [node.value for node in ast.walk(tree)
             if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in remarks]
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()[:16]


def cards(examples: Path, pictures: Path) -> str:
    """Markdown of the cards, in sections, for a page beside the folder images/."""
    found: dict[str, list[Path]] = {}
    for script in scripts(examples):
        found.setdefault(script.parent.relative_to(examples).as_posix(), []).append(script)
    order = [folder for folder in SECTIONS if folder in found] + [folder for folder in found if folder not in SECTIONS]
    return "\n".join(line for folder in order for line in _section(folder, found[folder], examples, pictures))


def _section(folder: str, own: list[Path], examples: Path, pictures: Path) -> Iterator[str]:
    heading = SECTIONS.get(folder, folder.replace("_", " ").capitalize())
    yield f"## {heading}\n\n````{{container}} gallery\n"
    for script in own:
        name, picture = script.relative_to(examples).as_posix(), pictures / picture_of(script, examples)
        yield "```{container} card"
        if picture.exists():
            yield f"![What {name} shows](images/gallery/{picture.name})\n"
        yield f"[{name}](../examples/{name})\n\n{title_of(script)}\n```\n"
    yield "````\n"
