"""The command ``ntk-laplace explain``: a page of explanations for the user's network and data."""

from __future__ import annotations

import argparse

from torch import Tensor

import ntk_laplace as ntkl
from ntk_laplace.model.data import take
from ntk_laplace.model.likelihoods import MISSING_LABEL
from ntk_laplace.tools.cli.estimator_file import load_estimator
from ntk_laplace.tools.cli.estimator_page import estimator_page, in_words
from ntk_laplace.tools.cli.files import is_estimator, require_writable
from ntk_laplace.tools.cli.model import bring
from ntk_laplace.tools.cli.new_examples import read_new
from ntk_laplace.tools.cli.table_columns import require_sources
from ntk_laplace.tools.explorer import ExplorerPage, Naming, explore


def run(options: argparse.Namespace) -> None:
    """Load, fit, explain, write."""
    require_writable(options, options.out)
    page, sources = (_of_estimator if is_estimator(options.network[0]) else _of_network)(options)
    page.write(options.out)
    if sources:
        print(f"{sources}\n")
    print(f"{page!r}; written to {options.out}, which a browser opens")


def _of_network(options: argparse.Namespace) -> tuple[ExplorerPage, str]:
    model = bring(options)
    training, labels = model.training, model.training.sources
    if labels is not None:
        require_sources(labels, options)
    new = model.read(options.inputs, "inputs to explain")
    x, y = take(new.x, slice(options.most)), None if new.y is None else new.y[: options.most]
    posterior = ntkl.laplace(*model.given, options.structure, **model.options)
    classes = options.classes or training.classes
    if options.classes is None and not model.likelihood.classifies and len(classes or ()) != posterior.num_outputs:
        classes = None  # names of responses, which are fewer than the outputs
    names = None if new.names is None else new.names[: options.most]
    naming = Naming(classes, options.features or training.features, options.shape, (options.target or ["target"])[0],
                    names, training.names)
    known = None if y is None or _missing(y, model.likelihood) else y
    sources = None if labels is None else posterior.source_effects(x, labels, y=known)
    page = explore(posterior, x, training.x, y, options.k, naming, options.title,
                   candidates=options.candidates, sources=sources)
    outputs = naming.classes if posterior.num_outputs > 1 else [naming.target]
    return page, "" if sources is None else in_words(sources, outputs)


def _missing(y: Tensor, likelihood: ntkl.Likelihood) -> bool:
    """Whether a target is missing: NaN, or the mark of a missing label."""
    return bool(y.isnan().any() or (isinstance(likelihood, ntkl.Categorical) and (y == MISSING_LABEL).any()))


def _of_estimator(options: argparse.Namespace) -> tuple[ExplorerPage, str]:
    estimator = load_estimator(options)
    new = read_new(estimator, options, "inputs to explain")
    if new.skipped:
        print(f"{new.skipped_words}\n")
    new = new.subset(slice(options.most))
    model, output = estimator.model, estimator.number(options.output)
    y = new.y if new.known.all() else None
    sources = None if estimator.sources is None else model.source_effects(new.x, estimator.sources, y, output=output)
    page = estimator_page(estimator, new, options.shape, sources, k=options.k, title=options.title,
                          candidates=options.candidates, output=output)
    return page, "" if sources is None else in_words(sources, estimator.outputs)
