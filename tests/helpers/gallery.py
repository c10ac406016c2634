"""The gallery of the docs: one picture for each script, kept from the run that the tests make anyway.

``GALLERY=docs/images/gallery pytest tests/test_examples.py tests/test_short_examples.py tests/test_study_*.py`` keeps
the pictures, and ``python tests/helpers/gallery.py`` writes the page.
"""

from __future__ import annotations

import ast
import io
import os
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

__all__ = ["GALLERY", "PAGE", "SCRIPTS", "keep", "page", "picture_of", "title_of"]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "gallery.md"
GALLERY = ROOT / "docs" / "images" / "gallery"
SCRIPTS = sorted(path for path in EXAMPLES.rglob("*.py") if not path.name.startswith("_"))
SECTIONS = {
    "short": "First steps", "predictions": "Predictions", "selection": "Which model?",
    "selection/exact": "Exact evidence", "attribution": "Explanations", "active": "Active learning",
    "structures": "Structures", "toys": "Toys", "uci": "UCI data", "variational": "Variational inference",
    "benchmarks": "Benchmarks",
}  # fmt: skip
SIZE, COLORS = (560, 400), 48
FONT, LINES, COLUMNS, INK = 13, 18, 68, "#1c2127"


def picture_of(script: Path) -> str:
    """Name of the picture's file."""
    return "_".join(script.relative_to(EXAMPLES).with_suffix("").parts) + ".png"


def title_of(script: Path) -> str:
    """The first paragraph of the docstring."""
    text = ast.get_docstring(ast.parse(script.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split())


def keep(script: Path, folder: Path, printed: str) -> None:
    """Keep a picture of a run if the variable GALLERY names a folder: one that it drew, or what it printed."""
    where = os.environ.get("GALLERY")
    if where is None or not script.is_relative_to(EXAMPLES):
        return
    drawn = sorted(folder.rglob("*.png"))
    if not drawn and not printed.strip():
        return
    image = Image.open(drawn[0]).convert("RGB") if drawn else _text(printed)
    image.thumbnail(SIZE)
    buffer = io.BytesIO()
    image.quantize(COLORS).save(buffer, "PNG", optimize=True)
    target = ROOT / where
    target.mkdir(parents=True, exist_ok=True)
    (target / picture_of(script)).write_bytes(buffer.getvalue())


def _text(printed: str) -> Image.Image:
    """The first lines of a text as a picture."""
    lines = [line.expandtabs(4)[:COLUMNS] for line in printed.strip().splitlines() if not line.startswith("written to")]
    font = ImageFont.load_default(FONT)
    mono = _monospaced() or font
    image = Image.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(image)
    draw.multiline_text((14, 12), "\n".join(lines[:LINES]), fill=INK, font=mono, spacing=6)
    return image


def _monospaced() -> ImageFont.FreeTypeFont | None:
    """That of matplotlib, which the library draws with."""
    from matplotlib import font_manager

    return ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono"), FONT)


def page() -> str:
    """The page: a card for each script, with its picture if there is one."""
    folders = sorted({script.parent.relative_to(EXAMPLES).as_posix() for script in SCRIPTS})
    assert set(folders) == set(SECTIONS), set(folders) ^ set(SECTIONS)
    return "\n".join([HEAD, *(line for folder in SECTIONS for line in _section(folder))])


HEAD = """# Gallery

Each picture was made by a script in miniature: the tests run it with `--small`. Where a script draws nothing, the
picture has the first lines that it prints. The figures of the other pages come from full runs, with the commands beside
them. The pictures here are written by this command, and the page by the second:

```bash
GALLERY=docs/images/gallery pytest tests/test_examples.py tests/test_short_examples.py tests/test_study_*.py
python tests/helpers/gallery.py
```
"""


def _section(folder: str) -> Iterator[str]:
    own = [script for script in SCRIPTS if script.parent == EXAMPLES / folder]
    yield f"## {SECTIONS[folder]}\n\n::::{{div}} gallery\n"
    for script in own:
        name = script.relative_to(EXAMPLES).as_posix()
        picture = GALLERY / picture_of(script)
        yield ":::{div} card"
        if picture.exists():
            yield f"![What {name} shows](images/gallery/{picture.name})"
            yield ""
        yield f"[{name}](../examples/{name})\n\n{title_of(script)}\n:::\n"
    yield "::::\n"


if __name__ == "__main__":
    PAGE.write_text(page())
