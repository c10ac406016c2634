"""Pictures of the gallery of the docs, kept from the runs of the scripts that the tests make anyway."""

from __future__ import annotations

import io
import math
import os
import sys
import textwrap
from collections.abc import Mapping
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib import font_manager
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin

from ntk_laplace import plotting

__all__ = ["EXAMPLES", "PICTURES", "SIZE", "keep"]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, PICTURES = ROOT / "examples", ROOT / "docs" / "images" / "gallery"
SIZE, COLORS = (560, 400), 48
FONT, LEADING, MARGIN, GAP, INK = 16, 7, 12, 16, "#1c2127"


def keep(script: Path, folder: Path, printed: str, made: Mapping[str, Any] | None = None) -> None:
    """Keep a picture of a run if the variable GALLERY names a folder.

    The first picture that the script drew; else one of its results; else what it printed. The file says which text is
    on it, and by which names in the script it was made: no test could read them from the picture.

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
    image, text = _text(printed) if source is None else (Image.open(source).convert("RGB"), "")
    image.thumbnail(SIZE)
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from cards import names_of, picture_of
    finally:
        sys.path.remove(str(ROOT / "docs"))
    about = PngImagePlugin.PngInfo()
    about.add_itxt("text", text)
    about.add_text("names", names_of(script))
    target = ROOT / where
    target.mkdir(parents=True, exist_ok=True)
    small = image.quantize(COLORS, Image.Quantize.MAXCOVERAGE)
    small.save(target / picture_of(script, EXAMPLES), "PNG", optimize=True, pnginfo=about)


def _result(made: Mapping[str, Any]) -> Figure | None:
    """A figure of a variable that has one: a result with a method `plot`, or a posterior over one input."""
    for name, value in made.items():
        if hasattr(value, "plot") and not name.startswith("_"):
            return value.plot()
    posterior, x = made.get("posterior"), made.get("x")
    if posterior is None or x is None or x.ndim != 2 or x.shape[1] > 1 or posterior.num_outputs > 1:
        return None
    margin = 0.3 * (x.max() - x.min())
    grid = torch.linspace(float(x.min() - margin), float(x.max() + margin), 200).to(x).unsqueeze(1)
    found = posterior.predict(grid)
    columns = (found.mean, found.epistemic.sqrt(), found.variance.sqrt())
    return plotting.predictive_1d(grid, *(column.detach().squeeze(1) for column in columns), (x, made["y"]))


class Table(NamedTuple):
    """A table of the text: the line above it, if that stands alone, its header and its rows."""

    title: str
    header: list[str]
    rows: list[list[str]]


def _table(lines: list[str]) -> Table | None:
    """The first table with figures, without the rows and columns that have none."""
    for start, (line, below) in enumerate(pairwise(lines)):
        if not line.startswith("|") or not below.startswith("|-"):
            continue
        header, *rows = map(_cells, [line, *takewhile(lambda one: one.startswith("|"), lines[start + 2 :])])
        rows = [row for row in rows if _figures(row[1:])]  # a peer that is missing has none
        if not rows:
            continue
        told = [column for column in range(len(header)) if any(row[column] not in ("", "-") for row in rows)]
        if len(rows) == 1:  # stands better upright
            found = ["", ""], [[header[column], rows[0][column]] for column in told]
        else:
            found = [header[column] for column in told], [[row[column] for column in told] for row in rows]
        before, title = ["", "", *(lines[: start - 1] if start and not lines[start - 1] else lines[:start])][-2:]
        return Table("" if before else title, *found)
    return None


def _varied(found: Table) -> Table:
    """Without what all rows share."""
    columns = [both for both in zip(found.header, *found.rows, strict=True) if len(set(both[1:])) > 1]
    if len(columns) < 2:
        return found
    header, *rows = map(list, zip(*columns, strict=True))
    return Table(found.title, header, rows)


def _cells(line: str) -> list[str]:
    """A figure and its error are not parted."""
    return [cell.strip().replace(" ± ", "\xa0±\xa0") for cell in line.strip()[1:-1].split("|")]


def _figures(cells: list[str]) -> bool:
    return any(character.isdigit() for cell in cells for character in cell)


def _text(printed: str) -> tuple[Image.Image, str]:
    """A text as a picture, and what of it is shown: the first table with figures, else the first lines.

    Nothing is cut: what is too wide is wrapped, and rows and columns are shown whole or not at all.
    """
    lines = [line.expandtabs(4).rstrip() for line in printed.strip().splitlines() if not line.startswith("written to")]
    found = _table(lines)
    image = Image.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(image)
    if found is None:
        font = _font("DejaVu Sans Mono")
        room = SIZE[0] - 2 * MARGIN
        shown, bottom = _rows(draw, [[wrapped(line, font, room)] for line in lines], [room], font, MARGIN)
    else:
        shown, bottom = _drawn(draw, found)
    return image.crop((0, 0, SIZE[0], bottom + MARGIN)), "\n".join(shown)


def _drawn(draw: ImageDraw.ImageDraw, found: Table) -> tuple[list[str], int]:
    """Draw a table: the columns from the left that fit, and as many rows as fit."""
    font, bold = _font("DejaVu Sans"), _font("DejaVu Sans:bold")
    room = SIZE[0] - 2 * MARGIN
    columns, widths = _columns(found, font, bold, room)
    if len(columns) < len(found.header):
        columns, widths = _columns(_varied(found), font, bold, room)
    header, *rows = [list(row) for row in zip(*columns, strict=True)]
    title = wrapped(found.title, font, room)
    shown, bottom = _rows(draw, [[title]] if found.title and len(title) < 3 else [], [room], font, MARGIN)
    if any(found.header):
        names, bottom = _rows(draw, [header], widths, bold, bottom)
        draw.line((MARGIN, bottom, SIZE[0] - MARGIN, bottom), fill=INK)
        shown, bottom = shown + names, bottom + LEADING // 2
    # some are empty, or the same, without the columns that did not fit
    rows = [row for place, row in enumerate(rows) if row not in rows[:place] and any(map(any, row[1:]))]
    figures, bottom = _rows(draw, rows, widths, font, bottom)
    return shown + figures, bottom


def _columns(
    found: Table, font: ImageFont.FreeTypeFont, bold: ImageFont.FreeTypeFont, room: int
) -> tuple[list[list[list[str]]], list[int]]:
    """The cells of the columns that fit, as lines, and the widths."""
    columns, widths, left = [], [], room
    for name, *cells in zip(found.header, *found.rows, strict=True):
        limit = room // 4 if columns and len(found.header) > 2 else room * 2 // 5
        limit = max(limit, min(_width(" ".join(cells).split(" "), font), room // 2))  # for long words
        column = [wrapped(name, bold, limit), *(wrapped(cell, font, limit) for cell in cells)]
        width = max(_width(lines, font if place else bold) for place, lines in enumerate(column))
        if width > left:
            break
        columns, widths, left = [*columns, column], [*widths, width], left - width - GAP
    return columns, widths


def _rows(
    draw: ImageDraw.ImageDraw, rows: list[list[list[str]]], widths: list[int], font: ImageFont.FreeTypeFont, top: int
) -> tuple[list[str], int]:
    """Draw as many rows of cells, which are lines, as there is room for; their text and where they end."""
    shown = []
    for row in rows:
        height = max(map(len, row)) * (FONT + LEADING)
        if top + height > SIZE[1] - MARGIN:
            break
        left = MARGIN
        for cell, width in zip(row, widths, strict=True):
            for place, line in enumerate(cell):
                draw.text((left, top + place * (FONT + LEADING)), line, fill=INK, font=font)
            left += width + GAP
        shown, top = [*shown, " | ".join(" ".join(cell) for cell in row)], top + height
    return shown, top


def _font(name: str) -> ImageFont.FreeTypeFont:
    """One of matplotlib's own, so that it is the same everywhere."""
    return ImageFont.truetype(font_manager.findfont(name), FONT)


def _width(lines: list[str], font: ImageFont.FreeTypeFont) -> int:
    return max((math.ceil(font.getlength(line)) for line in lines), default=0)


def wrapped(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Lines of at most this width in pixels, broken between words if these fit."""
    for whole in (True, False):
        for letters in range(len(text), 1, -1):
            lines = textwrap.wrap(text, letters, break_long_words=not whole, replace_whitespace=False)
            if _width(lines, font) <= width:
                return lines
    return [text]
