"""Scripts run as from the shell: arguments, folder, modules and warnings are their own, and are put back afterwards.

They share this process, because importing torch takes longer than most of the examples in miniature.
"""

from __future__ import annotations

import gc
import io
import os
import runpy
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from matplotlib.figure import Figure

from gallery import keep

__all__ = ["run_script", "sketches"]


def run_script(script: Path, folder: Path, *arguments: str) -> str:
    """What a script prints with these arguments in this folder; what it warns of is no error, as from the shell."""
    printed = io.StringIO()
    argv, path = [str(script), *arguments], [str(script.parent), *sys.path]
    with (
        mock.patch.object(sys, "argv", argv), mock.patch.object(sys, "path", path), _inside(folder),
        _own_modules(script.parents[1]), warnings.catch_warnings(record=True), redirect_stdout(printed), sketches(),
    ):
        warnings.simplefilter("default")
        gc.freeze()  # the library looks for garbage before it measures memory: of this script alone
        runpy.run_path(str(script), run_name="__main__")
    keep(script, folder, printed.getvalue())
    return printed.getvalue()


@contextmanager
def sketches() -> Iterator[None]:
    """Draw pictures in few pixels, and with nothing moved to make room: a tenth of the time went into that.

    Those that are kept for the gallery are as a user sees them.
    """
    if "GALLERY" in os.environ:
        yield
        return
    save = Figure.savefig

    def sketched(figure: Figure, *given: Any, **options: Any) -> None:
        figure.set_layout_engine("none")
        save(figure, *given, **options | {"dpi": 50, "bbox_inches": None})

    with mock.patch.object(Figure, "savefig", sketched):
        yield


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _own_modules(root: Path) -> Iterator[None]:
    """Import the modules below `root` anew, so that nothing of another script is left in them."""
    before = _modules_below(root)
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in _modules_below(root):
            del sys.modules[name]
        sys.modules.update(before)


def _modules_below(root: Path) -> dict[str, object]:
    below = f"{root}{os.sep}"  # text: thousands of modules stand there, and a path of each takes a tenth of a second
    return {name: module for name, module in sys.modules.items()
            if (getattr(module, "__file__", None) or "").startswith(below)}
