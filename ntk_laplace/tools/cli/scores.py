"""Scores and sets of labels of the command, as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntk_laplace import metrics
from ntk_laplace.runtime.means import error_of_mean
from ntk_laplace.tools.explorer import in_digits

NETWORK = "network alone"
"""The prediction beside which others are scored."""
ERROR = "±"
"""The score after the log likelihood: its standard error, as a mean over the points."""


def scores_of(response: Any, targets: Tensor) -> dict[str, float]:
    """`metrics.held_out_scores`, with the standard error of the log likelihood."""
    scores, terms = metrics.held_out_scores(response, targets), metrics.log_likelihoods(response, targets).double()
    shares = torch.full_like(terms, 1 / max(len(terms), 1))
    return {"log_likelihood": scores.pop("log_likelihood"), ERROR: error_of_mean(shares * terms, shares), **scores}


def score_words(score: str, value: float) -> str:
    """A score; an RMSE has the unit of the targets, and may be of any size; the error of a single point is unknown."""
    if score == ERROR:
        return f"{value:.2g}" if np.isfinite(value) else ""
    return in_digits(value) if score == "rmse" else f"{value:.4f}"


def score_table(scores: Mapping[str, Mapping[str, float]]) -> str:
    """Scores as text, a row for each version."""
    table = pandas.DataFrame(scores).T
    return table.to_string(formatters={score: partial(score_words, score) for score in table})


def scored_words(known: NDArray[np.bool_], names: Sequence[str], others: Sequence[str], kind: str) -> str:
    """Heading of scores: which inputs have some, and what the others have in place of a target.

    `known`, (n, targets), says whether an input has the target; several targets have names. The `others` stand in place
    of targets, and are none of this kind.
    """
    count, scored = f"{len(known):,}", known.sum(0)
    if known.all():
        return f"Scores of the {count} inputs"
    which = [f"{scored[0]:,}"]
    if len(scored) > 1 and len(names) == len(scored):
        which = [f"{name} in {number:,}" for name, number in zip(names, scored, strict=True)]
    missing = int((~known).sum()) - len(others)
    why = [f"{missing:,} {'target is' if missing == 1 else 'targets are'} missing"] if missing else []
    if others:
        why.append(f"{len(others):,} {'is' if len(others) == 1 else 'are'} no {kind}, such as {others[0]!r}")
    of = f"Scores of {' and '.join(which)} of {count}" if known.any() else f"No scores of the {count}"
    return f"{of} inputs; {' and '.join(why)}"


def as_set(names: Iterable[object]) -> str:
    """Names in braces; one that has what separates them is quoted, as in JSON."""
    texts = (json.dumps(text, ensure_ascii=False) if set(text) & set(',{}"') else text for text in map(str, names))
    return "{" + ", ".join(texts) + "}"
