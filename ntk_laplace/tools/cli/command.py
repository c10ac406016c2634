"""The command: it runs what the options ask for, and errors become one line."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import ntk_laplace as ntkl
from ntk_laplace.errors import first_line
from ntk_laplace.runtime.distributed import process_group
from ntk_laplace.runtime.resources import is_about_memory
from ntk_laplace.tools.cli.faults import fault_of
from ntk_laplace.tools.cli.options import command_parser

OK, FAILED, INTERRUPTED = 0, 1, 130  # 2, wrong usage, is that of argparse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, with the arguments of the process by default.

    The exit code is returned: 0 for success, 1 for an error, 130 if interrupted. Wrong usage exits with 2.
    """
    parser = command_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return OK
    if fault := fault_of(options):
        parser.error(fault)
    try:
        code = _run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails when it flushes at the end
        return _complain("its output was closed before the end, as by head; files that come after it were not written. "
                         "Send the output to a file.")
    return code


def _run(options: argparse.Namespace) -> int:
    """Run a command; errors become one line."""
    demo = options.command == "demo"
    try:
        if demo:
            from ntk_laplace.tools.demo import run_demo  # here: its imports are slow, and --help does not need them

            run_demo(options.out, options.seed, small=options.small)
        else:
            _own(options)
    except KeyboardInterrupt:
        left = "files of an earlier run are as they were" if demo else "no file was written"
        return _complain(f"interrupted; {left}", INTERRUPTED)
    except ntkl.NTKLaplaceError as cause:
        return _complain(str(cause))
    except BrokenPipeError:
        raise
    except OSError as cause:
        path, other = (options.out, "--out") if demo else (cause.filename, "name")
        return _complain(f"cannot write to {path}: {cause.strerror or cause}. Choose another {other}.")
    except (MemoryError, RuntimeError) as cause:
        if not is_about_memory(cause):
            raise
        return _complain(f"expected more memory; got {type(cause).__name__}: {first_line(cause)}. "
                         "Take fewer examples, or a smaller network.")
    return OK


def _own(options: argparse.Namespace) -> None:
    """Run a command on the user's network, in one process or in those that torchrun started."""
    from ntk_laplace.tools.cli import evidence, explain, fit, plan, predict  # here, as that of the demo

    with process_group() as options.group, _warnings_in_words():
        if options.group is not None and options.group.size() > 1 and options.command != "evidence":
            raise ntkl.UnsupportedError(f"one process for {options.command}", f"{options.group.size()}",
                                        "Start it without torchrun; evidence takes several.")
        runs = {"evidence": evidence, "explain": explain, "fit": fit, "plan": plan, "predict": predict}
        runs[options.command].run(options)


@contextlib.contextmanager
def _warnings_in_words() -> Iterator[None]:
    """Warnings of the library in one line each, without a place in its code."""
    with warnings.catch_warnings():  # it restores what shows them
        others = warnings.showwarning

        def shown(message: Warning | str, category: type[Warning], *place: Any, **named: Any) -> None:
            if issubclass(category, ntkl.NTKLaplaceWarning):
                print(f"ntk-laplace: warning: {message}", file=sys.stderr)
            else:
                others(message, category, *place, **named)

        warnings.showwarning = shown
        yield


def _complain(message: str, code: int = FAILED) -> int:
    process = os.environ.get("RANK", "0")
    print(f"ntk-laplace{f' (process {process})' if process != '0' else ''}: {message}", file=sys.stderr)
    return code
