"""The command ``ntk-laplace``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the process by default.

    Returns
    -------
    int
        Exit code: 0, 1 where something failed, 130 if interrupted. Wrong usage leaves with 2.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return OK
    return _demo(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ntk-laplace", description="A trained network as a Gaussian process: evidence, predictions, explanations."
    )
    parser.add_argument("--version", action="version", version=f"ntk-laplace {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    demo = commands.add_parser(
        "demo",
        help="see a network become a GP, on data that scikit-learn ships",
        description="Train three networks, turn each into a Gaussian process, compute its evidence in function space "
        "and in weight space, evaluate it on held-out data, and write summary.json, pictures and report.html. "
        "Takes about a minute on two cores and downloads nothing.",
    )
    demo.add_argument("--out", type=_directory, default=Path("ntk-laplace-demo"), metavar="DIR",
                      help="directory for the files, made if missing (default: %(default)s)")  # fmt: skip
    demo.add_argument("--seed", type=_seed, default=0, metavar="S",
                      help="a whole number; decides splits and initial weights (default: %(default)s)")  # fmt: skip
    demo.add_argument("--small", action="store_true", help="a few examples of each problem: seconds, rougher numbers")
    return parser


def _demo(options: argparse.Namespace) -> int:
    # here and not above: torch takes seconds to import, and --help needs none of it
    from ntk_laplace.demo import run_demo
    from ntk_laplace.errors import NTKLaplaceError

    try:
        run_demo(options.out, options.seed, small=options.small)
    except KeyboardInterrupt:
        return _complain("interrupted; files of an earlier run are as they were", INTERRUPTED)
    except OSError as cause:
        return _complain(f"cannot write to {options.out}: {cause.strerror or cause}. Choose another --out.", FAILED)
    except NTKLaplaceError as cause:
        return _complain(str(cause), FAILED)
    return OK


def _complain(message: str, code: int) -> int:
    print(f"ntk-laplace: {message}", file=sys.stderr)
    return code


def _directory(text: str) -> Path:
    path = Path(text).expanduser()
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a directory; got the file {text!r}. Choose another name.")
    return path


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to {2**31 - 1}; got {text!r}.")
    return int(text)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ntk_laplace")
    except PackageNotFoundError:
        from ntk_laplace import __version__

        return __version__
