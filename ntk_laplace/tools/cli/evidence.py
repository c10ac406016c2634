"""The command ``ntk-laplace evidence``: comparison of structures for the user's network and data."""

from __future__ import annotations

import argparse

import ntk_laplace as ntkl
from ntk_laplace import plotting
from ntk_laplace.tools.cli.model import bring, require_writable

__all__ = ["run"]


def run(options: argparse.Namespace) -> None:
    """Load, compare, print, write.

    Raises
    ------
    NTKLaplaceError
        If the network, the data or an option is invalid.
    OSError
        If a file cannot be written; raised before the computation.
    ComparisonInterrupted
        After the finished rows have been printed.
    """
    for path in (options.json, options.plot):
        require_writable(path, options)
    model = bring(options)
    first = model.settings.reducer.rank == 0  # of several processes one prints and writes
    try:
        found = ntkl.compare_evidence(
            model.network, (model.x, model.y), model.likelihood, model.prior, options.structures, options.correction,
            curvature=options.curvature, dtype=model.dtype,
            settings=model.settings, output=model.output,
        )  # fmt: skip
    except ntkl.ComparisonInterrupted as stop:
        if stop.comparison.rows and first:
            print(stop.comparison)
        raise
    if not first:
        return
    print(found)
    if options.json is not None:
        options.json.write_text(found.to_json() + "\n", encoding="utf-8")
    if options.plot is not None:
        options.plot.write_bytes(plotting.png(found.plot()))
