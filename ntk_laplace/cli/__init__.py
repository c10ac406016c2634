"""The command ``ntk-laplace``."""

from ntk_laplace.cli.command import main

__all__ = ["main"]
