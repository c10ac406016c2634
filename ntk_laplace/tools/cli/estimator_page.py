"""The page of explanations of an estimator: features are shown in their own units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas

import ntk_laplace as ntkl
from ntk_laplace.tools.cli.described import Model
from ntk_laplace.tools.cli.estimator_file import Estimator, NewExamples
from ntk_laplace.tools.explorer import ExplorerPage, Naming, explore

__all__ = ["estimator_page", "in_words"]


def estimator_page(
    estimator: Estimator, new: NewExamples, shape: Sequence[int] | None = None,
    sources: ntkl.SourceEffects | None = None, **options: Any,
) -> ExplorerPage:
    """Explain predictions by training rows.

    Parameters
    ----------
    estimator : Estimator
    new : NewExamples
        Inputs to explain, and their targets if they are known.
    shape : sequence of int, optional
        Of inputs that are images; by default that which the estimator knows.
    sources : SourceEffects, optional
        On the same target.
    **options
        Of `explore`; with several targets, `output` is the number of that which is explained, by default the first.
    """
    model, targets, rows, x = estimator.model, estimator.targets, estimator.inputs, new.x
    classes = [str(name) for name in getattr(model, "classes_", ())]
    target = ", ".join(targets) + ("" if classes else " (standardized)")
    names = classes or (list(targets) if len(targets) > 1 else None)
    truths = None if new.y is None else model.network_targets(new.y)
    naming = Naming(names, estimator.features, _picture(shape or estimator.shape), target, new.names, estimator.names)
    page = explore(model.posterior_, model.network_inputs(x), estimator.data[0], truths, naming=naming,
                   sources=sources, **options)
    # that which the other commands print, of targets in their own units
    page = replace(page, content=page.content | {"evidence": model.log_marginal_likelihood_value_})
    shown = page.content["rows"]
    if shown is None:
        return page
    own = {str(index): _four_digits(rows.iloc[int(index)]) for index in shown["training"]}
    points = [_four_digits(row) for _, row in x.iterrows()]
    return replace(page, content=page.content | {"rows": shown | {"points": points, "training": own}})


def in_words(model: Model, sources: ntkl.SourceEffects) -> str:
    """The table of sources, with the unit of its numbers if that is not the targets'."""
    if hasattr(model, "classes_"):
        return f"{sources}"
    ends = (model.network_targets(np.full((1, model.posterior_.num_outputs), end)) for end in (0.0, 1.0))
    low, high = (end.flatten().tolist() for end in ends)
    units = [f"{1 / (b - a):.4g}" for a, b in zip(low, high, strict=True)]
    if set(units) == {"1"}:
        return f"{sources}"
    return f"{sources}\nOf standardized targets: a change by 1 is one of {', '.join(units)} in the target's own unit."


def _picture(shape: Sequence[int] | None) -> Sequence[int] | None:
    """The shape of images that the page can show."""
    return shape if shape is not None and (len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))) else None


def _four_digits(row: pandas.Series) -> list[float]:
    return [float(f"{value:.4g}") for value in np.asarray(row)]
