"""The page of ``ntk-laplace predict``: what was fitted, whether it is right, and the least certain inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

import ntk_laplace as ntkl
from ntk_laplace import plotting
from ntk_laplace.tools.cli.predictions import Judged, Predictions
from ntk_laplace.tools.cli.scores import score_words
from ntk_laplace.tools.explorer import in_digits, spread_of
from ntk_laplace.tools.report import Page

_LEVELS = tuple(np.linspace(0.05, 0.95, 19))
_LISTED = 15  # inputs in each list
_DEVIATIONS = 4.0  # standard deviations of a coverage by chance, of which 1 in 30,000 is as low
_CLASSES = 3  # the most probable ones in a list, and the largest set that is spelled out


def summary(fit: ntkl.PredictiveFit, found: Predictions) -> Iterator[str]:
    """What was fitted, and how large the regions are, one sentence each."""
    yield f"Fitted to {_points(fit.num_points, fit.reliability is not None)}: {fit.calibration}."
    yield (
        f"Mean log density of these points, nats a point: network alone {fit.network:.4f}, posterior as it is "
        f"{fit.before:.4f}, calibrated posterior {fit.after:.4f} ± {fit.standard_error:.2g}, which gains "
        f"{fit.gain:.2g} ± {fit.gain_error:.2g} over the network."
    )
    if isinstance(found.regions, ntkl.PredictionSets):
        size = found.regions.size
        yield (
            f"Sets of labels of level {100 * found.level:g}%: {float(size.double().mean()):.2f} labels on average, "
            f"just one for {int((size == 1).sum()):,} of {len(size):,} inputs."
        )
    elif found.regions is not None:
        width = found.regions.width.reshape(len(found.frame), -1).median(0).values
        widths = ", ".join(f"{float(one):.3g}" for one in width)
        yield f"Intervals of level {100 * found.level:g}%: median width {widths}."
    if len(found.covered):
        yield f"They contain {found.covered.mean():.1%} of the {len(found.covered):,} known targets."


def doubts(fit: ntkl.PredictiveFit, found: Predictions) -> Iterator[str]:
    """What is not to be trusted, in sentences."""
    regions = "sets" if found.labels else "intervals"
    if not fit.trusted and fit.reliability is not None:
        yield (
            "leave-one-out is not to be trusted for this network. The calibration was fitted to it, and the pictures "
            f"of training points and the {regions} come from it. Reasons: {'; '.join(fit.reasons)}. Check that "
            "--precision and --noise are those of the training. Give data that training did not use with --held-out, "
            "train the network on with --retrain, or train it with evidence (ntk_laplace.train_with_evidence)."
        )
    elif not fit.trusted:
        yield f"the calibration is not to be trusted: {'; '.join(fit.reasons)}."
    if not found.enough:
        everything = "sets have all labels" if found.labels else "intervals are the whole line"
        yield f"there are too few points for level {found.level:g}: the {everything}."
    inside, level = found.covered, found.level
    if len(inside) and inside.mean() < level - _DEVIATIONS * np.sqrt(level * (1 - level) / len(inside)):
        why = (
            "They are unlike the held-out data."
            if fit.reliability is None
            else "Either they are unlike the training data, or the network knows its training points by heart, which "
            "leave-one-out does not see. Calibrate on data like them, with --held-out."
        )
        yield f"the {regions} of level {100 * level:g}% contain {inside.mean():.1%} of the known targets. {why}"


def build(
    posterior: ntkl.Posterior, judged: Judged, found: Predictions, sentences: Sequence[str], warned: Sequence[str],
    table: str,
) -> Page:
    """Assemble the page beside the CSV file `table`.

    The versions are `judged` at the points that the predictive was fitted to. The sentences say what was fitted, and
    what is to be warned of.
    """
    trust = "Read the warning below." if warned else "Nothing speaks against these numbers."
    page = Page(
        "Predictions, and how sure they are",
        f"{len(found.frame):,} inputs, predicted by a network of {posterior.num_parameters:,} parameters and "
        f"{posterior.num_examples:,} training points. {trust}",
        f"ntk_laplace {ntkl.__version__}; {posterior!r}",
    )
    page.section("What was fitted")
    for text in warned:
        page.paragraph(f"Warning: {text}")
    for text in sentences:
        page.paragraph(text)
    page.paragraph(
        "The posterior gives the network's outputs a covariance. The scale multiplies it: 0 is the network alone. The "
        "temperature divides the outputs: above 1 makes probabilities more cautious. The noise factor multiplies the "
        "variance of the noise."
    )
    _calibration(page, judged, found)
    _regions(page, found)
    _lists(page, found)
    if found.judged is not None:
        page.section("Scores of the inputs with known targets")
        _scores(page, found.judged, found.level, "Scores of the inputs")
        _pictures(page, found.judged, "the inputs of this page")
    page.link(f"All numbers: {table}", table)
    return page


def _calibration(page: Page, judged: Judged, found: Predictions) -> None:
    page.section("Is the uncertainty right?")
    source = (
        "Each training point is predicted from all others, in closed form. Features that the network learned have seen "
        "the point."
        if judged.left_out
        else "These points were not trained on; the numbers above were fitted to them."
    )
    where = _points(judged.count, judged.left_out)
    page.paragraph(f"The pictures are of {where}. {source}")
    _pictures(page, judged, where)
    _scores(page, judged, found.level, f"Scores of {where}")


def _pictures(page: Page, judged: Judged, where: str) -> None:
    reliability, coverage = judged.reliability(), judged.coverage(_LEVELS)
    if reliability is not None:
        errors = ", ".join(f"{name} {one.error:.3f}" for name, one in reliability.items())
        page.picture(
            plotting.png(plotting.reliability_diagram({"Confidence and accuracy": reliability})),
            f"Accuracy against confidence of {where} for the network alone, the posterior as it is and the calibrated "
            "posterior, with the number of points in each bin below.",
            "On the dashed line, predictions are right as often as they say. Above it they are too cautious, below it "
            f"too sure. Expected calibration error: {errors}.",
        )
    if coverage is None:
        page.paragraph("There is no picture of coverage for targets that are several or soft labels.")
        return
    region = "interval" if reliability is None else "set"
    what = "The set of a level has the most probable classes, until their probabilities sum to the level"
    if reliability is None:
        what = "The interval of a level leaves out as much on either side" if judged.central else (
            "The interval of a level is the mean plus and minus z standard deviations")
    page.picture(
        plotting.png(plotting.coverage_diagram(_LEVELS, coverage, "Coverage against level", region)),
        f"Fraction of the targets of {where} inside {region}s of each level, for the network alone, the posterior as "
        "it is and the calibrated posterior.",
        f"{what}. On the dashed line, it contains as many targets as it says; below it the prediction is too sure.",
    )


def _scores(page: Page, judged: Judged, level: float, caption: str) -> None:
    found = judged.scores(level)
    columns = list(next(iter(found.values())))
    names = {"log_likelihood": "log likelihood (nats)", "ece": "calibration error (ECE)", "rmse": "RMSE"}
    page.table(caption, ["prediction", *(names.get(one, one) for one in columns)],
               [[name, *(score_words(one, row[one]) for one in columns)] for name, row in found.items()])


def _regions(page: Page, found: Predictions) -> None:
    regions = found.regions
    if regions is None:
        return
    sets = isinstance(regions, ntkl.PredictionSets)
    page.section("Sets of labels" if sets else "Intervals")
    kind = "sets" if sets else "intervals"
    page.paragraph(f"The {kind} of level {100 * found.level:g}% need no distribution to be right, only errors at "
                   "points that the model does not know. What is known of their coverage:")
    for text in regions.guarantees:
        page.paragraph(f"{text[0].upper()}{text[1:]}.")
    if isinstance(regions, ntkl.PredictionSets):
        page.paragraph("A set without any label takes the most probable one, which can only add coverage.")
        size = regions.size.cpu().numpy()
        counts = {int(one): int((size == one).sum()) for one in np.unique(size)}
        page.table("Size of the sets", ["labels in the set", "inputs"],
                   [[str(one), f"{count:,}"] for one, count in counts.items()])


def _lists(page: Page, found: Predictions) -> None:
    page.section("The least certain inputs")
    page.paragraph(
        "Epistemic is what more training data would remove; aleatoric is noise, or classes that overlap. Both are "
        "standard deviations" + (" of the predicted class." if found.labels else " in the unit of the target.")
    )
    uncertain, unfamiliar = (np.argsort(-one, kind="stable")[:_LISTED] for one in
                             (found.uncertainty, found.unfamiliarity))
    _list(page, found, uncertain, "By the calibrated posterior, least certain first")
    text = (
        "Unfamiliarity is the uncertainty of the posterior as it is, which grows away from the training data. The "
        "calibrated one does so less, because its scale is fitted to familiar points."
    )
    if (uncertain == unfamiliar).all():
        page.paragraph(f"{text} The least familiar inputs are the same.")
        return
    page.paragraph(text)
    _list(page, found, unfamiliar, "Least like the training data first")


def _list(page: Page, found: Predictions, rows: np.ndarray, caption: str) -> None:
    """A table of some inputs; of labels the most probable ones, without the others' columns."""
    frame, probabilities = found.frame, [f"probability_{name}" for name in found.names] if found.labels else []
    hidden = {*probabilities, "predicted", "probability", "set_size"} if found.labels else set()
    first, *others = (name for name in frame.columns if name not in hidden)
    columns = [first, *(["most probable"] if found.labels else []), *(name.replace("_", " ") for name in others)]
    cells, spreads = [], {name: spread_of(frame[name].tolist()) for name in others}
    for row in frame.iloc[rows].to_dict("records"):
        best = sorted(probabilities, key=row.__getitem__, reverse=True)[:_CLASSES]
        words = ", ".join(f"{name.removeprefix('probability_')}: {row[name]:.2f}" for name in best)
        if row.get("set_size", 0) > _CLASSES:
            row["set"] = f"{row['set_size']} labels"
        shown = [_cell(row[name], spreads[name]) for name in others]
        cells.append([str(row[first]), *([words] if found.labels else []), *shown])
    page.table(f"{caption} ({len(rows)} of {len(frame):,})", columns, cells)


def _cell(value: object, spread: float) -> str:
    """A value; a number in digits of its size, or of the range of its column."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return ""
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if not isinstance(value, (float, np.floating)):
        return str(value)
    return in_digits(float(value), spread)


def _points(count: int, left_out: bool) -> str:
    return f"{count:,} {'training points, each left out' if left_out else 'held-out points'}"
