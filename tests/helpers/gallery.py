"""Pictures of the gallery of the docs, kept from the runs of the scripts that the tests make anyway."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

__all__ = ["EXAMPLES", "PICTURES", "SIZE", "keep"]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, PICTURES = ROOT / "examples", ROOT / "docs" / "images" / "gallery"
SIZE, COLORS = (560, 400), 48
FONT, LEADING, MARGIN, LINES, COLUMNS, INK = 13, 6, 12, 18, 68, "#1c2127"


def keep(script: Path, folder: Path, printed: str) -> None:
    """Keep a picture of a run if the variable GALLERY names a folder: the first one that it drew, or what it printed.

    Parameters
    ----------
    script : Path
    folder : Path
        Where it wrote its files.
    printed : str
    """
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
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from cards import picture_of
    finally:
        sys.path.remove(str(ROOT / "docs"))
    (target / picture_of(script, EXAMPLES)).write_bytes(buffer.getvalue())


def _text(printed: str) -> Image.Image:
    """The first lines of a text as a picture."""
    lines = [line.expandtabs(4)[:COLUMNS] for line in printed.strip().splitlines() if not line.startswith("written to")]
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono"), FONT)  # matplotlib's own
    image = Image.new("RGB", (SIZE[0], 2 * MARGIN + (FONT + LEADING) * min(len(lines), LINES)), "white")
    place = MARGIN, MARGIN
    ImageDraw.Draw(image).multiline_text(place, "\n".join(lines[:LINES]), fill=INK, font=font, spacing=LEADING)
    return image
