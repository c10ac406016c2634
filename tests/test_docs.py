"""Everything shown is run: the Python blocks of the README and of the docs, the examples in docstrings, the docs build.

A page's blocks run in order in one namespace, in an empty folder. A block that is a fragment by nature carries the line
``<!-- not run: why -->`` right above its fence.
"""

from __future__ import annotations

import doctest
import gc
import importlib
import io
import pkgutil
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain
from sphinx.util.docutils import docutils_namespace

import ntk_laplace
from ntk_laplace.runtime import tuning

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<mark><!-- not run: .+ -->\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
# pages whose code needs packages that are no dependencies
EXTRAS = {"docs/botorch.md": ["botorch"], "docs/tracking.md": ["lightning", "transformers"]}
NEEDS = {"ntk_laplace.tools.botorch": "botorch", "ntk_laplace.tools.callbacks.lightning": "lightning",
         "ntk_laplace.tools.callbacks.huggingface": "transformers"}
MISSING = tuple(name for name, package in NEEDS.items() if find_spec(package) is None)
MODULES = [module.name for module in pkgutil.walk_packages(ntk_laplace.__path__, "ntk_laplace.")
           if not module.name.startswith(MISSING)]


def blocks(page: Path) -> Iterator[tuple[str, bool]]:
    """The page's Python blocks, each padded so that a traceback names the page's own lines; whether it runs."""
    text = page.read_text()
    for match in FENCE.finditer(text):
        above = text.count("\n", 0, match.start("code"))
        yield "\n" * above + match["code"], match["mark"] is None


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def second_perceptron(shown: bool) -> AbstractContextManager[object]:
    """Let estimators train one in pieces only where the code is about it: half of the time of the others."""
    return nullcontext() if shown else mock.patch.object(tuning, "EXAMPLES_IN_PIECES", 0)


PAGES_WITH_CODE = [page for page in PAGES if any(runs for _, runs in blocks(page))]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=name_of)
def test_the_code_on_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name_of(page) in EXTRAS:
        with warnings.catch_warnings():  # of its import
            warnings.simplefilter("ignore")
            for package in EXTRAS[name_of(page)]:
                pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    namespace: dict[str, object] = {"__name__": "__main__"}
    registered = mock.patch.dict(ntk_laplace.structures.REGISTERED)  # a page's own structures are no other test's
    gc.freeze()  # what pages before imported: comparisons look for garbage before each measurement
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), registered:
        if name_of(page) == "docs/tracking.md":  # what trainers warn of in other packages
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", ntk_laplace.NTKLaplaceWarning)
        for code, runs in blocks(page):
            if runs:
                with second_perceptron(shown="piecewise" in code):
                    exec(compile(code, str(page), "exec"), namespace)


def test_the_pages_that_should_show_code_do() -> None:
    shown = {name_of(page) for page in PAGES_WITH_CODE}
    assert {"README.md", "docs/quickstart.md", "docs/gotchas.md", "docs/mathematics.md"} <= shown


def test_fragments_are_rare() -> None:
    marks = [runs for page in PAGES for _, runs in blocks(page)]
    assert marks.count(False) <= 3
    for page in PAGES:
        text = page.read_text()
        assert text.count("<!-- not run:") == sum(not runs for _, runs in blocks(page)), f"a stray mark in {page}"
        assert text.count("```python") == len(list(blocks(page))), f"a Python block that is not found in {page}"


@pytest.mark.slow
@pytest.mark.usefixtures("one_perceptron")
def test_examples_in_docstrings() -> None:
    modules = [importlib.import_module(module) for module in MODULES]
    found = [test for module in modules for test in doctest.DocTestFinder().find(module)]
    # a debugger is set up for each that runs, even without an example, and then every source file is looked at
    shown, runner = [test for test in found if test.examples], doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    failed = [test.name for test in shown if runner.run(test).failed]
    assert failed == [] and len(shown) > 0


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_local_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)|<img src=\"([^\"]+)\"", page.read_text())
    local = [a or b for a, b in targets if "://" not in (a or b)]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert missing == []


def test_the_readme_has_its_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    for name in ("demo", "test"):
        commands = re.findall(rf"<!-- command: {name} -->\n```bash\n([^\n]+)\n```\n", text)
        assert len(commands) == 1, f"one block of one line under '<!-- command: {name} -->'"
        assert re.match(r"python3 -m venv (--upgrade-deps )?\.venv && ", commands[0])


def test_every_public_name_has_its_place_in_the_api_pages() -> None:
    listed = set(re.findall(r"^   ([\w.]+)$", (ROOT / "docs/api.rst").read_text(), re.MULTILINE))
    public = set(ntk_laplace.__all__) - {"__version__"}
    assert public <= {name.partition(".")[0] for name in listed}, public - listed


def sidebar_of_the_first_page() -> Callable[..., None]:
    """Give every page the sidebar of the first one: they differ in one mark, and take a sixth of the time."""
    made: dict[str, str] = {}

    def before_a_page(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
        if "toctree" in context:
            own = context["toctree"]
            context["toctree"] = lambda **options: (
                made[str(options)] if str(options) in made else made.setdefault(str(options), own(**options))
            )

    return before_a_page


@pytest.mark.slow
def test_the_docs_build_without_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    gc.disable()  # which looks through all pages again and again, a fifth of the time
    request.addfinalizer(gc.enable)
    # from a copy: the API pages that autosummary writes stay out of the checkout
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("api", "_build"))
    for linked in ("tests", "examples"):
        (tmp_path / linked).symlink_to(ROOT / linked)
    said = io.StringIO()
    docs, built = tmp_path / "docs", tmp_path / "html"
    found, find = dict[Any, Any](), PythonDomain.find_obj

    def find_once(domain: PythonDomain, env: Any, *asked: Any) -> Any:
        """When pages are written: a name is looked for among all others, for each mention of it."""
        key = len(domain.objects), *asked
        return found[key] if key in found else found.setdefault(key, find(domain, env, *asked))

    monkeypatch.setattr(PythonDomain, "find_obj", find_once)
    # in this process, which has imported torch; without the pages of source code, which take a sixth of the time, and
    # without curved quotes, a twentieth
    with docutils_namespace(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's; those of Sphinx are errors
        app = Sphinx(docs, docs, built, built / ".doctrees", "html", status=None, warning=said, warningiserror=True,
                     tags=["without_sources"], confoverrides={"smartquotes": False})
        app.connect("html-page-context", sidebar_of_the_first_page(), priority=0)
        app.builder.search = False  # the index of all words
        app.env.settings["stylesheet_path"] = ""  # those of docutils, which it would look for once a page
        app.build()
    assert app.statuscode == 0 and said.getvalue() == "", said.getvalue()[-4000:]
    assert len(list(built.rglob("*.html"))) > len(PAGES) and (built / "index.html").exists()
    for name, inherited in (("Explanation", "to_dataframe"), ("LaplaceRegressor", "explain"), ("Plan", "to_json")):
        page = (built / f"api/ntk_laplace.{name}.html").read_text()
        assert f'id="ntk_laplace.{name}.{inherited}"' in page and f"{name}.register_forward_hook" not in page, name
