"""The command ``ntk-laplace fit``: a network trained on the user's data, and its posterior, scored on held-out rows."""

from __future__ import annotations

import argparse
import pickle
import sys
import textwrap
import warnings
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import joblib
import numpy as np
import pandas
import torch
from numpy.typing import NDArray
from torch import distributions, nn

import ntk_laplace as ntkl
from ntk_laplace import metrics
from ntk_laplace.tools.cli.examples import Examples, read_examples
from ntk_laplace.tools.cli.images import ImageNetwork
from ntk_laplace.tools.cli.model import require_writable
from ntk_laplace.tools.cli.predictions import NETWORK, score_table
from ntk_laplace.tools.cli.python_files import first_line, load_network
from ntk_laplace.tools.explorer import ExplorerPage, Naming, explore

__all__ = ["run"]

_POSTERIOR = "posterior"
_HELD_OUT = 0.2
_SHOWN = 5  # predictions that are printed
_COLUMNS = 10  # of the largest relevance, that are printed
_EXPLAINED = 200  # held-out rows on the page at most

Model = ntkl.LaplaceRegressor | ntkl.LaplaceClassifier


@dataclass(frozen=True)
class _Fitted:
    """The estimator, scores of the held-out rows by name, columns of their predictions, and what else to tell."""

    model: Model
    scores: dict[str, dict[str, float]]
    columns: dict[str, Any]
    note: str = ""


def run(options: argparse.Namespace) -> None:
    """Read, split, train, score, write.

    Raises
    ------
    NTKLaplaceError
        If the data or an option is invalid.
    OSError
        If the files cannot be written; raised before the computation.
    """
    table, saved, page = (options.out / name for name in ("predictions.csv", "model.joblib", "explanations.html"))
    for file in (table, saved, page):
        require_writable(file, options, made=True)
    if options.data.is_dir() and options.out.resolve().is_relative_to(options.data.resolve()):
        raise ntkl.DataError("a folder outside of the data for the results", f"--out {options.out}",
                             "Name another: the next run would read the results as images.")
    examples = read_examples(options)
    settings = _settings(options, examples)
    order = np.random.default_rng(options.seed).permutation(len(examples.y))
    held_out, rest = (np.sort(part) for part in np.split(order, [round(_HELD_OUT * len(order))]))
    training, new = examples.subset(rest), examples.subset(held_out)
    print(f"{examples}: {len(rest):,} rows to train, {len(held_out):,} held out")
    fitted = (_fit_classes if examples.classes else _fit_numbers)(training, new, settings, options.level)
    predictions = pandas.concat([new.named.reset_index(drop=True), pandas.DataFrame(fitted.columns)], axis=1)
    _tell_scores(fitted, len(held_out))
    _tell_relevance(fitted.model)
    _tell_first(predictions, options.level)
    sources = _sources(fitted.model, training, new)
    explained = _page(fitted.model, training, new, sources)
    options.out.mkdir(parents=True, exist_ok=True)
    predictions.to_csv(table, index=False)
    joblib.dump(fitted.model, saved)
    explained.write(page)
    if sources is not None:
        print(f"\n{sources}")
    print(f"\nPredictions of the held-out rows are in {table}; {page} explains them in a browser.\n"
          f"The model is in {saved}:\n"
          f"joblib.load({str(saved)!r}).predict({_call(examples)}.")  # fmt: skip


def _call(examples: Examples) -> str:
    """How the estimator is called."""
    if examples.features is not None:
        return "frame) takes a pandas table of the inputs"
    return f"x) takes an array of the inputs, (n, {examples.x.shape[1]})"


def _settings(options: argparse.Namespace, examples: Examples) -> dict[str, Any]:
    """Arguments of the estimator; what is not asked for is left to its defaults."""
    shape, hidden = examples.shape, options.hidden
    found = {"random_state": options.seed, "verbose": sys.stderr.isatty()}
    found |= {} if options.epochs is None else {"epochs": options.epochs}
    own = None if options.network is None else load_network(*options.network).double()
    if own is not None:
        _require_saved(own)
    if shape is None and own is None:
        return found | ({} if hidden is None else {"hidden_layer_sizes": hidden})
    if shape is None:
        return found | {"network": own, "standardize": True}
    if own is None and len(shape) != 3:
        raise ntkl.DataError("X of shape (N, features), or (N, channels, height, width) of images",
                             f"shape (N, {', '.join(map(str, shape))})", "Pass --network FILE.py.")  # fmt: skip
    # pixels are from 0 to 1, and neighbors share the weights: standardizing each would undo that
    network = ImageNetwork(shape, hidden or (8, 16), own)
    return found | {"network": network, "standardize": False}


def _require_saved(network: nn.Module) -> None:
    """Refuse, before the training, a network that model.joblib could not contain."""
    try:
        pickle.dumps(network)
    except Exception as cause:  # __reduce__ of a layer may raise anything
        raise ntkl.NetworkError("a network that pickle can save, for model.joblib",
                                f"{type(cause).__name__}: {first_line(cause).rstrip('.')}",
                                "Define its classes and functions at the top of the file, without lambda.") from cause


def _tell_scores(fitted: _Fitted, count: int) -> None:
    print(f"\nScores of the {count:,} held-out rows")
    print(score_table(fitted.scores))
    if fitted.note:
        print(f"\n{fitted.note}")
    print(f"\nLog marginal likelihood of the training rows: {fitted.model.log_marginal_likelihood_value_:.3f} nats")
    fit = fitted.model.predictive_fit_
    if fit is not None and not fit.trusted:
        print(f"\nWARNING: the posterior is used as it is, without calibration: {'; '.join(fit.reasons)}.")


def _tell_relevance(model: Model) -> None:
    """The columns on which the network depends most, if it has learned that."""
    relevance = getattr(model, "relevance_", None)
    if relevance is None:
        return
    names = getattr(model, "feature_names_in_", np.arange(len(relevance)).astype(str))
    order = np.argsort(-relevance)[:_COLUMNS]
    told = ", ".join(f"{names[column]} {relevance[column]:.3g}" for column in order)
    more = f" and {len(relevance) - len(order)} more columns" if len(order) < len(relevance) else ""
    text = f"Relevance, the standard deviation of a column's weights under the prior: {told}{more}"
    print("\n" + textwrap.fill(text, 100))


def _tell_first(predictions: pandas.DataFrame, level: float) -> None:
    """The first predictions with their intervals or sets."""
    wanted = ("row", "file", "mean", "lower", "upper", "predicted", "set", "target")
    shown = [name for name in predictions if name.partition("_")[0] in wanted]
    what = "sets of labels" if "set" in predictions else "intervals"
    print(f"\nThe first of them, with {what} of {level:.0%}")
    print(predictions[shown].head(_SHOWN).to_string(index=False, float_format="{:.4g}".format))


def _fit_numbers(training: Examples, new: Examples, settings: dict[str, Any], level: float) -> _Fitted:
    model = ntkl.LaplaceRegressor(**settings).fit(training.x, training.y)
    mean, sd = (_columns(values) for values in model.predict(new.x, return_std=True))
    y, noise = _columns(new.y), np.broadcast_to(np.sqrt(model.noise_), mean.shape)
    half = NormalDist().inv_cdf(0.5 + level / 2) * sd
    scores, columns = {}, dict[str, Any]()
    for index, target in enumerate(new.targets):
        one = slice(None), index
        ending, of = ("", "") if len(new.targets) == 1 else (f"_{target}", f", {target}")
        for name, own in {NETWORK: noise[one], _POSTERIOR: sd[one]}.items():
            response = distributions.Normal(torch.as_tensor(mean[one]), torch.as_tensor(own.copy()))
            (covered,) = metrics.interval_coverage(mean[one], own**2, y[one], [level])
            scores[name + of] = metrics.held_out_scores(response, torch.as_tensor(y[one].copy()))
            scores[name + of][f"coverage of {level:.0%}"] = covered
        parts = {"mean": mean, "sd": sd, "lower": mean - half, "upper": mean + half, "target": y}
        columns |= {part + ending: values[one] for part, values in parts.items()}
    return _Fitted(model, scores, columns)


def _fit_classes(training: Examples, new: Examples, settings: dict[str, Any], level: float) -> _Fitted:
    unknown = np.setdiff1d(new.y, training.y)
    if len(unknown):
        raise ntkl.DataError("each class among the training rows", f"{unknown[0]!r} in held-out rows alone",
                             "Add rows of this class, or pass another --seed.")  # fmt: skip
    model = ntkl.LaplaceClassifier(**settings).fit(training.x, training.y)
    p, x = model.predict_proba(new.x), model.network_inputs(new.x)
    alone = model.posterior_.predict(x, "map").mean.detach().cpu().double()
    labels = model.network_targets(new.y)
    scores = {
        name: metrics.held_out_scores(distributions.Categorical(probs=probs), labels)
        for name, probs in {NETWORK: alone, _POSTERIOR: torch.as_tensor(p)}.items()
    }
    with warnings.catch_warnings():  # the reasons of predictive_fit_, which are told, and too few points
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)
        sets = model.posterior_.predict_set(x, level, never_empty=True)
    names = [str(name) for name in model.classes_]
    columns = {"predicted": model.classes_[p.argmax(1)]}
    columns["set"] = ["{" + ", ".join(map(str, one)) + "}" for one in sets.labels(names)]
    each = {f"probability_{name}": p[:, index] for index, name in enumerate(names)}
    inside = float(sets.mask.cpu()[torch.arange(len(labels)), labels].double().mean())
    size = float(sets.size.double().mean())
    note = f"Sets of labels of level {level:.0%}: {inside:.1%} contain the label; {size:.2f} labels on average"
    return _Fitted(model, scores, {**columns, **each, "target": new.y}, note)


def _sources(model: Model, training: Examples, new: Examples) -> ntkl.SourceEffects | None:
    """Effects of the sources of the training rows on the held-out rows of the page."""
    if training.sources is None:
        return None
    few = _explained(new)
    return model.posterior_.source_effects(model.network_inputs(few.x), training.sources[model.training_index_],
                                           y=model.network_targets(few.y))  # fmt: skip


def _explained(new: Examples) -> Examples:
    return new.subset(np.arange(min(_EXPLAINED, len(new.y))))


def _page(model: Model, training: Examples, new: Examples, sources: ntkl.SourceEffects | None) -> ExplorerPage:
    """Explanations of held-out rows by training rows; features are shown in their own units."""
    few = _explained(new)
    rows = training.subset(model.training_index_)
    classes = [str(name) for name in getattr(model, "classes_", ())]
    target = f"{', '.join(new.targets)} (standardized)"
    names = classes or (new.targets if len(new.targets) > 1 else None)
    naming = Naming(names, new.features, _picture(new), target)
    page = explore(model.posterior_, model.network_inputs(few.x), model.network_inputs(rows.x),
                   model.network_targets(few.y), naming=naming, sources=sources)  # fmt: skip
    shown = page.content["rows"]
    if shown is None:
        return page
    own = {str(index): _four_digits(rows.x.iloc[int(index)]) for index in shown["training"]}
    points = [_four_digits(row) for _, row in few.x.iterrows()]
    return replace(page, content=page.content | {"rows": shown | {"points": points, "training": own}})


def _picture(examples: Examples) -> tuple[int, ...] | None:
    """The shape of images that the page can show."""
    shape = examples.shape
    return shape if shape is not None and (len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))) else None


def _four_digits(row: pandas.Series) -> list[float]:
    return [float(f"{value:.4g}") for value in row]


def _columns(values: NDArray[Any]) -> NDArray[Any]:
    return values.reshape(len(values), -1)
