"""Scripts run as from the shell, each in a process of its own, forked from one that has imported the large packages.

Importing torch, its optimizers, matplotlib and pandas takes longer than most of the examples in miniature.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

__all__ = ["run_script"]

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([
    "torch._dynamo",  # what an optimizer imports
    "matplotlib.pyplot", "pandas", "sklearn.datasets", "sklearn.ensemble", "scipy.optimize", "ntk_laplace",
])  # fmt: skip


def run_script(script: Path, folder: Path, *arguments: str) -> str:
    """What a script prints with these arguments in this folder; one thread.

    Raises
    ------
    AssertionError
        With the end of its standard error, if it fails.
    """
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    child = _FORKS.Process(target=_main, args=(script, folder, arguments, out, err))
    child.start()
    child.join()
    printed, said = (path.read_text(errors="replace") for path in (out, err))
    out.unlink()
    err.unlink()
    assert child.exitcode == 0, f"{script.name} ended with {child.exitcode}\n{said[-4000:]}"
    return printed


def _main(script: Path, folder: Path, arguments: tuple[str, ...], out: Path, err: Path) -> None:
    for path, number in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
