"""The page in one file: complete, escaped, with nothing to fetch, and readable without sight."""

from __future__ import annotations

import base64
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from matplotlib.figure import Figure

from ntk_laplace.errors import DataError
from ntk_laplace.plotting import png
from ntk_laplace.tools.report import Page

VOID = {"meta", "img", "br", "link"}


class Reader(HTMLParser):
    """Collects tags with their attributes and text, and holds every tag to be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def image() -> bytes:
    figure = Figure(figsize=(1, 0.5))
    figure.add_subplot().plot([0, 1])
    return png(figure, dpi=50)


@pytest.fixture
def page(image: bytes) -> Page:
    page = Page("A <title>", "lead & more", "the end")
    page.section("First").paragraph("1 < 2").table("A 'caption'", ["run", "x"], [["a", "<b>"], ["c", "2"]])
    return page.section("Second").picture(image, 'what "it" shows', "below")


def test_long_cells_take_several_lines() -> None:
    text = Page("A").table("B", ["run", "short", "long"], [["a", "word", "a word " * 9]]).html()
    assert '<td class="words">word' in text and '<td class="words long">a word' in text


def test_page_is_well_formed_and_escaped(page: Page) -> None:
    reader = Reader(page.html())
    text = "".join(reader.words)
    for words in ("A <title>", "lead & more", "1 < 2", "A 'caption'", "<b>", "below", "the end"):
        assert words in text
    assert not reader.all("b") and len(reader.all("title")) == 1


def test_nothing_is_fetched(page: Page) -> None:
    html = page.html()
    assert "http://" not in html and "https://" not in html and "url(" not in html
    reader = Reader(html)
    assert not any(reader.all(tag) for tag in ("script", "link", "iframe", "object"))
    policies = [meta["content"] for meta in reader.all("meta") if "http-equiv" in meta]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_picture_is_embedded_whole_with_size_and_words(page: Page, image: bytes) -> None:
    (picture,) = Reader(page.html()).all("img")
    prefix, _, data = picture["src"].partition(",")
    assert prefix == "data:image/png;base64" and base64.b64decode(data) == image
    assert (picture["width"], picture["height"]) == ("50", "25")
    assert picture["alt"] == 'what "it" shows'


@pytest.mark.parametrize("name", ["predictions.csv", "fold #1.csv", "50%25.csv", "a:b?.csv",
                                  "Müller's \"new\" <1>.csv"])
def test_a_link_leads_to_a_file_of_any_name(name: str) -> None:
    (link,) = Reader(Page("A").link("numbers", name).html()).all("a")
    address = urlsplit(link["href"])
    assert unquote(address.path) == name
    assert not (address.scheme or address.netloc or address.query or address.fragment)


def test_page_can_be_navigated(page: Page) -> None:
    reader = Reader(page.html())
    anchors = [heading["id"] for heading in reader.all("h2")]
    assert [link["href"] for link in reader.all("a")] == [f"#{anchor}" for anchor in anchors] and len(anchors) == 2
    assert [section["aria-labelledby"] for section in reader.all("section")] == anchors
    assert [html["lang"] for html in reader.all("html")] == ["en"]
    assert len(reader.all("h1")) == len(reader.all("main")) == len(reader.all("caption")) == 1
    assert {cell["scope"] for cell in reader.all("th")} == {"col", "row"} and len(reader.all("td")) == 2


def test_dark_and_light_are_followed(page: Page) -> None:
    assert "prefers-color-scheme: dark" in page.html() and "color-scheme: light dark" in page.html()


def test_empty_page_has_no_contents() -> None:
    reader = Reader(Page("Only a title").html())
    assert not reader.all("nav") and not reader.all("footer") and not reader.all("section")


def test_page_is_written_in_utf8(page: Page, tmp_path: Path) -> None:
    page.paragraph("θ ± σ")
    assert "θ ± σ" in page.write(tmp_path / "page.html").read_text(encoding="utf-8")


def test_bad_input_is_named(image: bytes) -> None:
    page = Page("t").section("s")
    with pytest.raises(DataError, match="bytes of a PNG file"):
        page.picture(b"GIF89a", "alt", "caption")
    with pytest.raises(DataError, match="text alternative"):
        page.picture(image, "  ", "caption")
    with pytest.raises(DataError, match="2 cells in each row; got 1"):
        page.table("c", ["a", "b"], [["only one"]])
