"""Pictures of the gallery of the docs, kept from the runs of the scripts that the tests make anyway."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from matplotlib import font_manager
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from ntk_laplace import plotting

__all__ = ["EXAMPLES", "PICTURES", "SIZE", "keep"]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, PICTURES = ROOT / "examples", ROOT / "docs" / "images" / "gallery"
SIZE, COLORS = (560, 400), 48
FONT, LEADING, MARGIN, LINES, COLUMNS, CELL, INK = 18, 8, 12, 14, 49, 18, "#1c2127"


def keep(script: Path, folder: Path, printed: str, made: Mapping[str, Any] | None = None) -> None:
    """Keep a picture of a run if the variable GALLERY names a folder.

    The first picture that the script drew; else one of its results; else the first lines that it printed.

    Parameters
    ----------
    script : Path
    folder : Path
        Where it wrote its files.
    printed : str
    made : mapping, optional
        Its variables at the end.
    """
    where = os.environ.get("GALLERY")
    if where is None or not script.is_relative_to(EXAMPLES):
        return
    drawn = sorted(folder.rglob("*.png"))
    if not drawn and not printed.strip():
        return
    result = None if drawn else _result(made or {})
    source = drawn[0] if drawn else None if result is None else io.BytesIO(plotting.png(result))
    image = _text(printed) if source is None else Image.open(source).convert("RGB")
    image.thumbnail(SIZE)
    buffer = io.BytesIO()
    image.quantize(COLORS, Image.Quantize.MAXCOVERAGE).save(buffer, "PNG", optimize=True)
    target = ROOT / where
    target.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from cards import picture_of
    finally:
        sys.path.remove(str(ROOT / "docs"))
    (target / picture_of(script, EXAMPLES)).write_bytes(buffer.getvalue())


def _result(made: Mapping[str, Any]) -> Figure | None:
    """A figure of a variable that has one: a result with a method `plot`, or a posterior over one input."""
    for name, value in made.items():
        if hasattr(value, "plot") and not name.startswith("_"):
            return value.plot()
    posterior, x = made.get("posterior"), made.get("x")
    if posterior is None or x.ndim != 2 or x.shape[1] > 1 or posterior.num_outputs > 1:
        return None
    margin = 0.3 * (x.max() - x.min())
    grid = torch.linspace(float(x.min() - margin), float(x.max() + margin), 200).to(x).unsqueeze(1)
    found = posterior.predict(grid)
    columns = (found.mean, found.epistemic.sqrt(), found.variance.sqrt())
    return plotting.predictive_1d(grid, *(column.detach().squeeze(1) for column in columns), (x, made["y"]))


def _narrow(line: str) -> str:
    """What fits; of the row of a wide table, the beginning of each cell, so that some figures are seen."""
    if line.startswith("|") and len(line) > COLUMNS:
        line = "|".join(cell[:CELL] for cell in line.split("|"))
    return line[:COLUMNS]


def _text(printed: str) -> Image.Image:
    """The first lines of a text as a picture."""
    lines = [_narrow(line.expandtabs(4)) for line in printed.strip().splitlines() if not line.startswith("written to")]
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono"), FONT)  # matplotlib's own
    image = Image.new("RGB", (SIZE[0], 2 * MARGIN + (FONT + LEADING) * min(len(lines), LINES)), "white")
    place = MARGIN, MARGIN
    ImageDraw.Draw(image).multiline_text(place, "\n".join(lines[:LINES]), fill=INK, font=font, spacing=LEADING)
    return image
