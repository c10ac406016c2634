"""The command ``ntk-laplace fit``: a network trained on the user's data, and its posterior, scored on held-out rows."""

from __future__ import annotations

import argparse
import pickle
import shlex
import textwrap
from typing import Any

import numpy as np
import pandas
from numpy.typing import NDArray
from torch import nn

import ntk_laplace as ntkl
from ntk_laplace.errors import first_line
from ntk_laplace.tools.cli.described import Model, describe, fitted_words, tell_first, tell_scores
from ntk_laplace.tools.cli.estimator_file import save_estimator
from ntk_laplace.tools.cli.estimator_page import estimator_page, in_words
from ntk_laplace.tools.cli.examples import TrainingExamples, read_examples
from ntk_laplace.tools.cli.files import require_writable
from ntk_laplace.tools.cli.images import ImageNetwork
from ntk_laplace.tools.cli.python_files import load_network
from ntk_laplace.tools.cli.table_columns import require_sources
from ntk_laplace.tools.cli.values import FIRST_DAY
from ntk_laplace.tools.cli.words import first_few
from ntk_laplace.tools.estimators.regressor import LOG_NORMAL

_HELD_OUT = 0.2
_COLUMNS = 10  # of the largest relevance, that are printed
_WIDTH = 100  # of a printed line
_EXPLAINED = 200  # held-out rows on the page at most


def run(options: argparse.Namespace) -> None:
    """Read, split, train, score, write."""
    table, saved, page = (options.out / name for name in ("predictions.csv", "model.joblib", "explanations.html"))
    require_writable(options, table, saved, page, made=True)
    if options.data.is_dir() and options.out.resolve().is_relative_to(options.data.resolve()):
        raise ntkl.DataError("a folder outside of the data for the results", f"--out {options.out}",
                             "Name another: the next run would read the results as images.")
    examples = read_examples(options)
    settings = _settings(options, examples)
    held_out = _held_out(examples, options.seed)
    rest = np.setdiff1d(np.arange(len(examples.y)), held_out)
    training, new = examples.subset(rest), examples.subset(held_out)
    if training.sources is not None:
        require_sources(training.sources, options)
    print(f"{examples}: {len(rest):,} rows to train, {len(held_out):,} held out")
    if examples.columns is not None and str(examples.columns):
        print(textwrap.fill(str(examples.columns), _WIDTH))
    if examples.numbering:
        drop = " ".join(f"--drop {shlex.quote(name)}" for name in examples.numbering[:3])
        print(f"Another whole number in each row, an input too: {first_few(examples.numbering, quote=False)}. Leave "
              f"out what only numbers the rows: {drop}.")
    estimator = ntkl.LaplaceClassifier if examples.classes else ntkl.LaplaceRegressor
    model = estimator(**settings).fit(training.x, training.y)
    found = describe(model, new.x, new.y, new.targets, options.level)
    predictions = pandas.concat([new.named.reset_index(drop=True), pandas.DataFrame(found.columns)], axis=1)
    tell_scores(found, f"Scores of the {len(held_out):,} held-out rows")
    _tell_evidence(model)
    _tell_network(model)
    _tell_relevance(model)
    tell_first(predictions, options.level)
    options.out.mkdir(parents=True, exist_ok=True)
    predictions.to_csv(table, index=False)
    file = save_estimator(model, saved, training, options)
    few = new.subset(slice(_EXPLAINED))
    sources = None if training.sources is None else model.source_effects(few.x, training.sources, few.y)
    estimator_page(file, few, sources=sources).write(page)
    if sources is not None:
        print(f"\n{in_words(sources, file.outputs)}")
    print(f"\nPredictions of the held-out rows are in {table}; {page} explains them in a browser.\n"
          f"The model is in {saved}: ntk-laplace predict {saved} --inputs FILE predicts new rows, and\n"
          f"joblib.load({str(saved)!r}).predict({_call(examples)}.")


def _held_out(examples: TrainingExamples, seed: int) -> NDArray[np.intp]:
    """Random rows, in order; of classes the same share of each, which keeps one row for the training at least."""
    order = np.random.default_rng(seed).permutation(len(examples.y))
    if not examples.classes:
        return np.sort(order[: round(_HELD_OUT * len(order))])
    labels = np.unique(examples.y[order], return_inverse=True)[1]
    grouped, sizes = order[np.argsort(labels, kind="stable")], np.bincount(labels)
    ends = np.cumsum(sizes)
    counts = np.diff(np.round(_HELD_OUT * ends).astype(int), prepend=0)  # their sum is rounded once
    counts = np.minimum(counts, sizes - 1)
    counts[sizes.argmax()] += not counts.any()
    parts = zip(ends - sizes, counts, strict=True)
    return np.sort(np.concatenate([grouped[first : first + count] for first, count in parts]))


def _call(examples: TrainingExamples) -> str:
    """How the estimator is called."""
    if examples.columns is not None:
        others = [name for name in examples.columns.features if name not in examples.columns.names]
        also = [f"columns of 0 and 1 such as {name!r}" for name in others[:1]]
        also += [f"days since {FIRST_DAY} for dates such as {name!r}" for name in examples.columns.dates[:1]]
        return "frame) takes a pandas table of the inputs" + (f",\nwith {' and '.join(also)}" if also else "")
    return f"x) takes an array of the inputs, (n, {examples.x.shape[1]})"


def _settings(options: argparse.Namespace, examples: TrainingExamples) -> dict[str, Any]:
    """Arguments of the estimator; what is not asked for is left to its defaults."""
    shape, hidden = examples.shape, options.hidden
    found = {"random_state": options.seed, "verbose": True, "predictive": options.predictive}
    given = {"epochs": options.epochs, "likelihood": options.likelihood, "exposure": options.exposure}
    found |= {name: value for name, value in given.items() if value is not None}
    for name in ("likelihood", "exposure"):
        if examples.classes and name in found:
            raise ntkl.UnsupportedError(f"targets that are numbers, for --{name}", "classes",
                                        "Leave it out, or pass --task regression.")
    own = None if options.network is None else load_network(*options.network).double()
    if own is not None:
        _require_saved(own)
        if hidden is not None:
            raise ntkl.UnsupportedError("--hidden without --network", "both", "The file has the layers of its network.")
    if shape is None and own is None:
        return found | ({} if hidden is None else {"hidden_layer_sizes": hidden})
    if shape is None:
        return found | {"network": own, "standardize": True}
    if own is None and len(shape) != 3:
        raise ntkl.DataError("X of shape (N, features), or (N, channels, height, width) of images",
                             f"shape (N, {', '.join(map(str, shape))})", "Pass --network FILE.py.")
    # pixels are from 0 to 1, and neighbors share the weights: standardizing each would undo that
    network = ImageNetwork(shape, hidden or (8, 16), own)
    return found | {"network": network, "standardize": False}


def _require_saved(network: nn.Module) -> None:
    """Refuse, before the training, a network that model.joblib could not contain."""
    try:
        pickle.dumps(network)
    except Exception as cause:  # __reduce__ of a layer may raise anything
        raise ntkl.NetworkError("a network that pickle can save, for model.joblib",
                                f"{type(cause).__name__}: {first_line(cause)}",
                                "Define its classes and functions at the top of the file, without lambda.") from cause


def _tell_evidence(model: Model) -> None:
    print(f"\nLog marginal likelihood of the training rows: {model.log_marginal_likelihood_value_:.3f} nats")
    likelihood = model.posterior_.likelihood
    if isinstance(likelihood, ntkl.StudentT):
        print(f"\nNoise with heavy tails: Student's t of {float(likelihood.df):.3g} degrees of freedom")
    elif isinstance(likelihood, ntkl.HeteroscedasticGaussian):
        print("\nNoise whose variance depends on the inputs: the second output for each target is its logarithm")
    elif isinstance(likelihood, ntkl.NegativeBinomial):
        print(f"\nCounts of variance μ + {float(likelihood.dispersion):.3g} μ² at the mean μ (negative binomial)")
    elif getattr(model, "likelihood_", "") == LOG_NORMAL:
        print("\nThe logarithm of the target has normal noise: predictions are off by factors (log-normal)")
    fit = model.predictive_fit_
    if fit is not None and not fit.trusted:
        print(f"\nWARNING: the posterior is used as it is, without calibration: {'; '.join(fit.reasons)}.")
    elif fit is not None:
        print(f"\n{textwrap.fill(fitted_words(fit), _WIDTH)}")


def _tell_network(model: Model) -> None:
    """Whether it has a linear part, and the columns that it gets in pieces, clipped, or as sines and cosines."""
    if model.linear_part_:
        print("\nThe network is a perceptron and a linear function of the columns, added")
    names = getattr(model, "feature_names_in_", np.arange(model.n_features_in_).astype(str))
    if model.piecewise_features_:
        pieces = first_few([names[column] for column in model.piecewise_features_], quote=False)
        print("\n" + textwrap.fill(f"Left-out rows are predicted better with columns in pieces, between quantiles, as "
                                   f"inputs of the network too: {pieces}", _WIDTH))
    if model.clipped_features_:
        clipped = first_few([names[column] for column in model.clipped_features_], quote=False)
        print("\n" + textwrap.fill(f"Values far from the others are clipped smoothly in columns {clipped}", _WIDTH))
    told = ", ".join(f"{names[column]} of period {period:.4g}" for column, period in model.fourier_features_)
    if told:
        text = f"Left-out residuals had waves, whose sines and cosines are inputs of the network too: {told}"
        print("\n" + textwrap.fill(text, _WIDTH))


def _tell_relevance(model: Model) -> None:
    """The columns on which the network depends most, if it has learned that, and those that are constant."""
    relevance = getattr(model, "relevance_", None)
    if relevance is None:
        return
    names = getattr(model, "feature_names_in_", np.arange(len(relevance)).astype(str))
    ranked = np.argsort(-relevance)[: np.count_nonzero(relevance)]
    order = ranked[:_COLUMNS]
    told = ", ".join(f"{names[column]} {relevance[column]:.3g}" for column in order)
    others = len(ranked) - len(order)
    more = f" and {others} more column{'s' * (others > 1)}" if others else ""
    text = f"Relevance, the standard deviation of a column's weights under the prior: {told}{more}"
    print("\n" + textwrap.fill(text, _WIDTH) if len(ranked) else "")
    constant = names[(relevance == 0.0) & (names != getattr(model, "exposure", None))]
    if len(constant):
        print(f"Constant in the training rows: {first_few(constant, quote=False)}")

