"""Python files of the command, run to build the network or a likelihood from a function in them."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ntk_laplace.errors import NetworkError, NTKLaplaceError, UnsupportedError, first_line
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.tools.cli.files import require_file
from ntk_laplace.tools.cli.words import first_few


def load_network(path: Path, factory: str) -> nn.Module:
    """Run a Python file and call its function that returns the network (NetworkError if that fails)."""
    return _made(path, factory, "network", nn.Module, {}).eval()


def load_likelihood(path: Path, factory: str, options: Mapping[str, Any]) -> Likelihood:
    """Run a Python file and call its likelihood class, or a function that returns one (NTKLaplaceError if it fails)."""
    return _made(path, factory, "likelihood", Likelihood, options)


def run_file(path: Path) -> None:
    """Run a Python file of a network, so that pickle finds its classes (NetworkError if it fails)."""
    require_file(path, "a Python file with the classes of the network")
    _run(path, "network", NetworkError)


def _made(path: Path, factory: str, what: str, kind: type, options: Mapping[str, Any]) -> Any:
    """Run the file and call the function; return an object of the kind."""
    fail = NetworkError if kind is nn.Module else UnsupportedError
    require_file(path, f"a Python file with a function that returns the {what}")
    module = _run(path, what, fail)
    if not hasattr(module, factory):
        own = [name for name, value in vars(module).items()
               if callable(value) and getattr(value, "__module__", None) == module.__name__]
        there = f"a file with {first_few(own)}" if own else "a file without functions"
        example = own[0] if own else factory
        raise fail(f"a function {factory!r} in {path}", there, f"Name the function: {path}:{example}")
    made = getattr(module, factory)
    if not isinstance(made, kind) or options:
        if not callable(made) or isinstance(made, kind):
            raise fail(f"{factory!r} in {path} to be a function", f"a {type(made).__name__}",
                       f"Name a function without arguments that returns the {what}.")
        made = _called(made, f"{factory}()", path, fail, options)
    if not isinstance(made, kind):
        raise fail(f"{factory}() in {path} to return a {_NAMES[what]}", f"a {type(made).__name__}", _REMEDIES[what])
    return made


_NAMES = {"network": "torch.nn.Module", "likelihood": "ntk_laplace.Likelihood"}
_REMEDIES = {
    "network": "Let it return the network itself, untrained; the weights come from the checkpoint.",
    "likelihood": "Name a subclass of Likelihood, or a function that returns an object of one.",
}


def _run(path: Path, what: str, fail: type[NTKLaplaceError]) -> ModuleType:
    if path.suffix != ".py":
        raise fail("a Python file, whose name ends with .py", f"{path}", "Rename it.")
    module = ModuleType(f"_ntk_laplace_{what}_{path.stem}")
    module.__file__ = str(path)

    def run() -> None:
        # not through the import system, whose cache beside the file would match another text of one second and length
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))

    # as Python does for a script: the file can import its neighbors, and pickle and dataclasses find the module
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        _called(run, "the file", path, fail, {})
    except NTKLaplaceError:
        del sys.modules[module.__name__]
        raise
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _called(
    function: Callable[..., Any], what: str, path: Path, fail: type[NTKLaplaceError], options: Mapping[str, Any]
) -> Any:
    """The function's return value; exceptions become an error message with the line in the file."""
    try:
        return function(**options)
    except (Exception, SystemExit) as cause:
        frames = traceback.extract_tb(cause.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
        if isinstance(cause, SyntaxError):
            lines = [cause.lineno]
        where = f" in line {lines[-1]} of {path}" if lines else f" in {path}"
        arguments = f"with {', '.join(options)}" if options else "without arguments"
        raise fail(f"{what} to run {arguments}", f"{type(cause).__name__}: {first_line(cause)}{where}",
                   'Training and the reading of arguments belong below if __name__ == "__main__".') from cause
