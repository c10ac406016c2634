"""The command ``ntk-laplace plan``: memory and time of structures for the user's network and data, before a fit."""

from __future__ import annotations

import argparse

import ntk_laplace as ntkl
from ntk_laplace.tools.cli.files import require_writable
from ntk_laplace.tools.cli.model import bring


def run(options: argparse.Namespace) -> None:
    """Load, forecast, print, write."""
    require_writable(options, options.json)
    model = bring(options)
    found = ntkl.plan(*model.given, options.structures, processes=options.processes, **model.options)
    print(found)
    if options.json is not None:
        options.json.write_text(found.to_json() + "\n", encoding="utf-8")
