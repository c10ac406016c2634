"""Settings of the Sphinx build; the API pages come from the code through autosummary."""

import sys
from importlib.util import find_spec as _find
from inspect import isroutine
from pathlib import Path

import ntk_laplace

sys.path.insert(0, str(Path(__file__).parent))

project = "ntk_laplace"
author = "the ntk_laplace authors"
copyright = author
version = release = ntk_laplace.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
if "without_sources" not in tags:  # noqa: F821 -- Sphinx's; the pages of source code take longest
    extensions.append("sphinx.ext.viewcode")
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build"]
templates_path = ["_templates"]

myst_enable_extensions = ["amsmath", "deflist", "dollarmath", "html_image"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_typehints = "signature"
autodoc_use_type_comments = False  # looking for them takes a tenth of the time
autodoc_mock_imports = [package for package in ("botorch", "lightning", "transformers") if not _find(package)]
autodoc_member_order = "bysource"
# classes whose members the pages of their subclasses leave out
_DOCUMENTED = ["object", "Exception", "ImportError", "OSError", "EvidenceEstimate", "Likelihood", "StructureSpec",
               "StructuredSpec", "SketchSpec"]
autodoc_default_options = {"members": True, "inherited-members": ",".join(_DOCUMENTED)}
napoleon_google_docstring = False
napoleon_numpy_docstring = True
napoleon_use_rtype = False
napoleon_use_ivar = True
default_role = "code"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["page.css"]
html_title = "ntk_laplace"
html_show_copyright = False
pygments_style = "friendly"


_AS_POSTERIOR = ("LaplaceModel.num_outputs", "LaplaceEnsemble.num_outputs", "LaplaceEnsemble.likelihood")


def _of_host_libraries(app, what, name, member, skip, options):
    """Leave out what torch, scikit-learn and BoTorch define, whose docstrings refer to their pages, and BoTorch's m."""
    own = next((getattr(member, part) for part in ("fget", "func", "__func__") if hasattr(member, part)), member)
    if getattr(own, "__qualname__", "") in _AS_POSTERIOR:
        return True  # other pages refer to those of `Posterior`
    where = getattr(own, "__module__", None) or getattr(getattr(own, "__objclass__", own), "__module__", None)
    if what in ("class", "exception") and isroutine(own) and not (where or "").startswith("ntk_laplace"):
        return True
    return True if (name.startswith("set_") and name.endswith("_request")) or name == "get_metadata_routing" else None


def _gallery(app):
    """Write the cards of the gallery, which its page includes."""
    import cards

    source = Path(app.srcdir)
    made = cards.cards(source.parent / "examples", source / "images" / "gallery")
    (source / "_gallery.txt").write_text(made, encoding="utf-8")


def _notebooks(app):
    """Write the pages with code as notebooks, if nbformat is installed."""
    import notebooks

    there = app.builder.format == "html" and _find("nbformat") is not None
    app.notebooks = notebooks.write(Path(app.srcdir), Path(app.outdir, "notebooks")) if there else []


def _link(app, page, template, context, doctree):
    """Link a page to its notebook."""
    if page in app.notebooks:
        context["body"] += f'<p><a href="notebooks/{page}.ipynb" download>This page as a notebook</a></p>'


def setup(app):
    """Sphinx calls this once."""
    app.connect("builder-inited", _gallery)
    app.connect("builder-inited", _notebooks)
    app.connect("html-page-context", _link)
    app.connect("autodoc-skip-member", _of_host_libraries)
