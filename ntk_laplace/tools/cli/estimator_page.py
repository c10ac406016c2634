"""The page of explanations of an estimator: features are shown in their own units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import ntk_laplace as ntkl
from ntk_laplace.model.likelihoods import MISSING_LABEL
from ntk_laplace.model.likelihoods.counts import Counts
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.tools.cli.described import Model
from ntk_laplace.tools.cli.estimator_file import Estimator
from ntk_laplace.tools.cli.examples import Examples
from ntk_laplace.tools.estimators.regressor import LOG_NORMAL
from ntk_laplace.tools.explorer import MOST_FEATURES, ExplorerPage, Naming, explore


def estimator_page(
    estimator: Estimator, new: Examples, shape: Sequence[int] | None = None,
    sources: ntkl.SourceEffects | None = None, **options: Any,
) -> ExplorerPage:
    """Explain predictions by training rows; the options are those of `explore`.

    The shape of images is by default that which the estimator knows. Effects of sources are on the same target, in its
    units. With several targets, `output` is the number of that which is explained, by default the first.
    """
    model, targets, x = estimator.model, estimator.targets, new.x
    classes = [str(name) for name in getattr(model, "classes_", ())]
    target = ", ".join(targets)
    names = classes or (list(targets) if len(targets) > 1 else None)
    if getattr(model, "likelihood_", "") == "heteroscedastic-gaussian":
        names = [*targets, *(f"log noise variance of {name}" for name in targets)]
    elif getattr(model, "likelihood_", "") == LOG_NORMAL:
        target, names = f"log {target}", names and [f"log {name}" for name in names]
    elif names is not None and isinstance(model.posterior_.likelihood, Counts):
        names = [f"log {name}" for name in names]
    truths = _truths(model, new)
    values = None
    if estimator.shape is None:
        values = estimator.shown(x, MOST_FEATURES), estimator.shown(estimator.inputs, MOST_FEATURES)
    naming = Naming(names, None, _picture(shape or estimator.shape), target, new.names, estimator.names, values,
                    _units(model))
    page = explore(model.posterior_, model.network_inputs(x), estimator.data[0], truths, naming=naming,
                   sources=sources, **options)
    content = page.content
    if values is not None and content["rows"] is not None:
        columns = estimator.inputs.shape[1] if estimator.columns is None else len(estimator.columns.names)
        content["rows"]["others"] = columns - values[0].shape[1]
    return replace(page, content=content | {"evidence": model.log_marginal_likelihood_value_})


def _units(model: Model) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Scale and mean of each output, of which the posterior has ``(output - mean) / scale``; None if it has these."""
    if isinstance(model, ntkl.LaplaceClassifier):
        return None
    scale, mean = (np.asarray(part, dtype=np.float64) for part in model.output_units)
    return None if (scale == 1.0).all() and not mean.any() else (scale, mean)


def _truths(model: Model, new: Examples) -> Tensor | None:
    """Targets as the page takes them, with its marks of missing ones."""
    known = new.known
    if new.y is None or not known.any():
        return None
    if isinstance(model, ntkl.LaplaceRegressor):
        return model.network_targets(new.y)
    found = torch.full((len(known),), MISSING_LABEL, device="cpu")
    found[to_tensor(known)] = model.network_targets(new.y[known].astype(model.classes_.dtype))
    return found


def in_words(sources: ntkl.SourceEffects, names: Sequence[str] | None) -> str:
    """The table of sources, with the name of the explained output if all inputs have the same."""
    outputs = sources.quantity.output.unique().tolist()
    if names is None or len(outputs) > 1 or len(names) != sources.f.shape[1]:
        return f"{sources}"
    logit = "the logit of " if sources.quantity.likelihood.classifies else ""
    return f"{sources}".replace(sources.explained, f"{logit}{names[outputs[0]]}", 1)


def _picture(shape: Sequence[int] | None) -> Sequence[int] | None:
    """The shape of images that the page can show."""
    return shape if shape is not None and (len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))) else None
