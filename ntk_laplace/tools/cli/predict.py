"""The command ``ntk-laplace predict``: a table and a page of predictions by the user's network."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas
from torch import Tensor

import ntk_laplace as ntkl
from ntk_laplace.errors import untold
from ntk_laplace.model.likelihoods import PerOutput
from ntk_laplace.posterior.fit import spec_of
from ntk_laplace.tools.cli.described import describe, tell_first, tell_scores
from ntk_laplace.tools.cli.estimator_file import load_estimator
from ntk_laplace.tools.cli.files import is_estimator, require_writable
from ntk_laplace.tools.cli.model import bring
from ntk_laplace.tools.cli.new_examples import read_new
from ntk_laplace.tools.cli.predictions import Judged, Predictions
from ntk_laplace.tools.cli.predictions_page import build, doubts, summary
from ntk_laplace.tools.cli.scores import score_table, scored_words

_SHOWN = 8  # precisions or noises that are told


def run(options: argparse.Namespace) -> None:
    """Load, fit, calibrate, predict, write."""
    (_of_estimator if is_estimator(options.network[0]) else _of_network)(options)


def _of_network(options: argparse.Namespace) -> None:
    page_path = options.out.with_suffix(".html")
    require_writable(options, options.out, page_path)
    model = bring(options)
    new, held_out = model.read(options.inputs, "inputs to predict"), None
    if options.held_out is not None:
        held = model.read(options.held_out, "held-out data", labeled=True)
        held_out = held.x, held.y
    _require_exact(options)
    _tell("fitting the posterior")
    posterior = ntkl.laplace(*model.given, options.structure, **model.options)
    sentences: list[str] = []
    warned: list[str] = []
    if options.retrain:
        _tell("training on")
        posterior, warned = _retrained(posterior, model.data)
        sentences.append(_hyperparameters(posterior))
    _tell("calibrating on held-out data" if held_out else "predicting each training point from all others")
    fit, judged = _calibrated(posterior, held_out)
    _tell("predicting the inputs")
    if isinstance(posterior.likelihood, PerOutput):
        posterior.likelihood.missing = "nan"  # of the inputs: those of other data were read
    found = Predictions.of(posterior, new.x, new.y, options.level, held_out,
                           options.classes or model.training.classes)
    sentences += summary(fit, found)
    warned += doubts(fit, found)
    page = build(posterior, judged, found, sentences, warned, options.out.name)
    if new.names is not None:
        found.frame.insert(1, "file", new.names)
    found.frame.to_csv(options.out, index=False)
    page.write(page_path)
    print("\n".join(sentences))
    _tell_scores(found, new.others)
    for text in warned:
        print(f"\nWARNING: {text}")
    print(f"\n{len(found.frame):,} predictions written to {options.out}; {page_path} is a page, which a browser opens")


def _tell_scores(found: Predictions, others: Sequence[str]) -> None:
    """Scores, if there are known targets, and which inputs have none; `others` stand in place of targets."""
    known = np.zeros((len(found.frame), 1), bool) if found.judged is None else found.judged.known
    if others or found.judged is not None:
        kind = "class of the training data" if found.labels else "number"
        print(f"\n{scored_words(known, found.names, others, kind)}")
    if found.judged is not None:
        print(score_table(found.judged.scores(found.level)))


def _of_estimator(options: argparse.Namespace) -> None:
    """The table of ``ntk-laplace fit`` for other inputs."""
    require_writable(options, options.out)
    estimator = load_estimator(options)
    new = read_new(estimator, options, "inputs to predict")
    found = describe(estimator.model, new.x, new.y, estimator.targets, options.level)
    predictions = pandas.concat([new.named, pandas.DataFrame(found.columns)], axis=1)
    new.whole(predictions).to_csv(options.out, index=False)
    if new.skipped:
        print(f"\n{new.skipped_words}")
    kind = "class of the training data" if estimator.classifies else "number"
    heading = scored_words(new.known.reshape(len(new.x), -1), estimator.targets, new.others, kind)
    if found.scores:
        tell_scores(found, heading)
    elif new.others:
        print(f"\n{heading}")
    tell_first(predictions, options.level)
    print(f"\n{len(predictions):,} predictions written to {options.out}")


def _require_exact(options: argparse.Namespace) -> None:
    """Refuse, before the fit, what has no intervals and sets from leave-one-out."""
    spec = spec_of(options.structure)
    if options.held_out is None and not (spec.exact and options.curvature == "ggn"):
        raise ntkl.UnsupportedError(
            "--held-out, or --structure gp, full or iterative, and --curvature ggn: intervals and sets come from "
            "leave-one-out",
            f"--structure {options.structure} and --curvature {options.curvature} without --held-out",
            "Pass data that training did not use: --held-out FILE.",
        )


def _calibrated(posterior: ntkl.Posterior, held_out: Any) -> tuple[ntkl.PredictiveFit, Judged]:
    """The fit of the predictive, and versions of predictions at the points that it was fitted to."""
    with untold():  # the result has the reasons, which are told in the command's words
        fit = posterior.fit_predictive(strict=False) if held_out is None else posterior.calibrate(held_out)
    if held_out is None:
        return fit, Judged.without_themselves(posterior, fit.calibration)
    return fit, Judged.of(posterior, *held_out)


def _retrained(posterior: ntkl.Posterior, data: Any) -> tuple[ntkl.Posterior, list[str]]:
    """The posterior of the network trained on, and what there was to warn of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ntkl.NTKLaplaceWarning)
        found = posterior.retrain(data, predictive=None)
    return found, list(dict.fromkeys(str(one.message) for one in caught))


def _hyperparameters(posterior: ntkl.Posterior) -> str:
    found, noise = {"prior precision": posterior.prior.precision}, getattr(posterior.likelihood, "noise", None)
    if isinstance(noise, Tensor):
        found["noise variance"] = noise
    texts = []
    for name, tensor in found.items():
        values = tensor.detach().flatten().tolist()
        few = ", ".join(f"{value:.3g}" for value in values[:_SHOWN])
        texts.append(f"{name} {few}{', ...' if len(values) > _SHOWN else ''}")
    return (
        "The network was trained on from the checkpoint's weights, at hyperparameters that the evidence chose: "
        f"{'; '.join(texts)}. The checkpoint did not change."
    )


def _tell(what: str) -> None:
    """Progress, on a terminal alone."""
    if sys.stderr.isatty():
        print(f"ntk-laplace: {what}", file=sys.stderr)
