"""The command ``ntk-laplace evidence``: comparison of structures for the user's network and data."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

import ntk_laplace as ntkl
from ntk_laplace import plotting
from ntk_laplace.tools.cli.estimator_file import load_estimator
from ntk_laplace.tools.cli.files import is_estimator, require_writable
from ntk_laplace.tools.cli.model import bring, settings_of


def run(options: argparse.Namespace) -> None:
    """Load, compare, print, write. Finished rows are printed before a `ComparisonInterrupted` goes on."""
    require_writable(options, options.json, options.plot)
    first = settings_of(options).reducer.rank == 0  # of several processes one prints and writes
    try:
        found = (_of_estimator if is_estimator(options.network[0]) else _of_network)(options)
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


def _of_network(options: argparse.Namespace) -> ntkl.EvidenceComparison:
    model = bring(options)
    return ntkl.compare_evidence(*model.given, options.structures, options.correction, **model.options)


def _of_estimator(options: argparse.Namespace) -> ntkl.EvidenceComparison:
    """Evidence of an estimator's training data, of targets in their own units."""
    estimator = load_estimator(options)
    model, posterior = estimator.model, estimator.model.posterior_
    found = ntkl.compare_evidence(model.network_, estimator.data, posterior.likelihood, posterior.prior,
                                  options.structures, options.correction, curvature=model.curvature,
                                  settings=settings_of(options))
    units = float(np.asarray(model.log_marginal_likelihood_value_)) - posterior.log_marginal_likelihood().item()
    if units == 0.0:
        return found
    return replace(found, rows=tuple(_shifted(row, units) for row in found.rows),
                   model=f"{found.model}; of standardized targets, the evidence in their own units")


def _shifted(row: ntkl.StructureEvidence, units: float) -> ntkl.StructureEvidence:
    """The row with a constant added to its log densities of the targets."""
    if row.evidence is None or row.log_joint is None:
        return row
    return replace(row, evidence=row.evidence + units, log_joint=row.log_joint + units)
