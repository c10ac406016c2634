"""The command ``ntk-laplace``."""

from ntk_laplace.tools.cli.command import main

__all__ = ["main"]
