"""The command ``ntk-laplace`` before its imports, which take seconds: an interruption of them is one line too."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command with the arguments of the process; return its exit code."""
    try:
        from ntk_laplace.tools.cli import main as run
    except KeyboardInterrupt:
        print("ntk-laplace: interrupted; no file was written", file=sys.stderr)
        return 130
    return run()
