"""A self-contained HTML page: headings, paragraphs, tables and images, without external resources.

Images are embedded, the style follows the browser's light or dark setting, and the page works offline.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from urllib.parse import quote

from ntk_laplace.errors import DataError

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2127; --soft: #55606c; --paper: #ffffff; --line: #d9dee4;
        --stripe: #f5f7f9; --accent: #00598c; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --soft: #a6b0bb; --paper: #14181d; --line: #343c45; --stripe: #1c2229; --accent: #7cc4f0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
       font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.4rem; margin: 3rem 0 .6rem; padding-top: 1.2rem; border-top: 1px solid var(--line); }
p { max-width: 46rem; margin: .6rem 0; }
p.lead { font-size: 1.1rem; color: var(--soft); }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; list-style: none; padding: 0; margin: 1rem 0 0; }
a { color: var(--accent); }
.scroll { overflow-x: auto; margin: 1.2rem 0; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; min-width: 60%; }
caption { text-align: left; font-weight: 600; padding: 0 0 .5rem; caption-side: top;
          position: sticky; left: 0; width: max-content; max-width: calc(100vw - 2.5rem); }
th, td { padding: .4rem .65rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: .5rem; }
td.words, th.words { text-align: left; }
td.long { white-space: normal; min-width: 16rem; }
thead th { white-space: normal; vertical-align: bottom;
           border-bottom: 2px solid var(--line); color: var(--soft); font-weight: 600; }
tbody th { font-weight: 500; }
tbody tr:nth-child(even) { background: var(--stripe); }
figure { margin: 1.4rem 0; }
figure img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: 8px;
             border: 1px solid var(--line); padding: .6rem; }
figcaption { color: var(--soft); max-width: 46rem; margin-top: .5rem; font-size: .95rem; }
footer { margin-top: 3rem; color: var(--soft); font-size: .9rem; }
@media print { h2 { break-after: avoid; } figure, table { break-inside: avoid; } }
"""

_LONG = 36  # characters of a cell on one line


def document(title: str, style: str, body: str, digest: str = "") -> str:
    """An HTML document for which the browser blocks all external resources, and all scripts of another digest."""
    scripts = f"; script-src '{digest}'" if digest else ""
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'{scripts}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>{body}</body>\n</html>\n"
    )


@dataclass
class Page:
    """A self-contained HTML page, built from top to bottom.

    Examples
    --------
    >>> page = Page("Evidence", lead="Two numbers that agree.")
    >>> page.section("Numbers").table("In nats", ["run", "evidence"], [["digits", "-61.2"]])  # doctest: +ELLIPSIS
    Page(...)
    >>> "<caption>In nats</caption>" in page.html()
    True
    """

    title: str  # of the page, and its first heading
    lead: str = ""  # one or two sentences below the title
    footer: str = ""  # the last line
    _body: list[str] = field(default_factory=list, repr=False)
    _sections: list[tuple[str, str]] = field(default_factory=list, repr=False)

    def section(self, heading: str) -> Page:
        """Start a section; the table of contents links to it."""
        anchor = f"section-{len(self._sections) + 1}"
        if self._sections:
            self._body.append("</section>")
        self._sections.append((anchor, heading))
        self._body.append(f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{escape(heading)}</h2>')
        return self

    def paragraph(self, text: str) -> Page:
        """Add a paragraph of plain text."""
        self._body.append(f"<p>{escape(text)}</p>")
        return self

    def link(self, text: str, href: str) -> Page:
        """Add a paragraph that links to a file in the page's folder."""
        self._body.append(f'<p><a href="{quote(href)}">{escape(text)}</a></p>')
        return self

    def table(self, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Page:
        """Add a table; the first cell of each row is its heading (DataError if a row is not as long as the columns)."""
        for row in rows:
            if len(row) != len(columns):
                raise DataError(f"{len(columns)} cells in each row", f"{len(row)} in {list(row)}", "Fill empty cells.")
        marks = [_mark([row[i] for row in rows]) for i in range(len(columns))]
        head = "".join(f'<th scope="col"{mark}>{escape(name)}</th>' for name, mark in zip(columns, marks, strict=True))
        lines = [
            f'<tr><th scope="row">{escape(row[0])}</th>'
            + "".join(f"<td{mark}>{escape(cell)}</td>" for cell, mark in zip(row[1:], marks[1:], strict=True))
            + "</tr>"
            for row in rows
        ]
        # focusable, to allow keyboard scrolling in a narrow window
        self._body.append(
            f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0"><table>'
            f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{''.join(lines)}</tbody></table></div>"
        )
        return self

    def picture(self, image: bytes, alt: str, caption: str) -> Page:
        """Add a PNG image with its text alternative, which says what it shows, and a caption below.

        DataError if the image is not a PNG, or `alt` is empty.
        """
        if image[:8] != b"\x89PNG\r\n\x1a\n":
            raise DataError("the bytes of a PNG file", f"bytes that start with {image[:8]!r}",
                            "Use ntk_laplace.plotting.png.")
        if not alt.strip():
            raise DataError("a text alternative for the picture", "an empty one", "Describe what the picture shows.")
        # width and height avoid layout shifts while a long page loads
        width, height = int.from_bytes(image[16:20], "big"), int.from_bytes(image[20:24], "big")
        data = base64.b64encode(image).decode()
        self._body.append(
            f'<figure><img src="data:image/png;base64,{data}" width="{width}" height="{height}" alt="{escape(alt)}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )
        return self

    def html(self) -> str:
        """Return the page as one HTML document."""
        links = "".join(f'<li><a href="#{anchor}">{escape(heading)}</a></li>' for anchor, heading in self._sections)
        contents = f'<nav aria-label="Contents"><ul>{links}</ul></nav>' if links else ""
        lead = f'<p class="lead">{escape(self.lead)}</p>' if self.lead else ""
        footer = f"<footer>{escape(self.footer)}</footer>" if self.footer else ""
        end = "</section>" if self._sections else ""
        header = f"<header><h1>{escape(self.title)}</h1>{lead}{contents}</header>"
        body = "\n".join([header, *self._body, f"{end}{footer}"])
        return document(self.title, _STYLE, f"\n<main>\n{body}\n</main>\n")

    def write(self, path: Path) -> Path:
        """Write the page to `path`, in UTF-8."""
        path.write_text(self.html(), encoding="utf-8")
        return path


def _mark(cells: Sequence[str]) -> str:
    """The class of a column: words stand at the left, and long ones take several lines."""
    if any(map(_is_number, cells)):
        return ""
    return f' class="words{" long" if any(len(cell) > _LONG for cell in cells) else ""}"'


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", "").rstrip("%"))
    except ValueError:
        return False
    return True
