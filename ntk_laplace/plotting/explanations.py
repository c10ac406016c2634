"""Plots of an explanation: bars, images, a table of features, or points along a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from torch import Tensor

from ntk_laplace.errors import DataError
from ntk_laplace.model.data.pictures import pictures_of, shades
from ntk_laplace.plotting.style import BLUE, LIGHT_GREY, VERMILION, in_brackets, literal
from ntk_laplace.posterior.explain import Entry, Ranked
from ntk_laplace.runtime.conversion import to_tensor

_FOR, _AGAINST = BLUE, VERMILION
_FEATURES = 8  # maximum columns of a feature table in a figure


def explanation(
    ranked: Ranked, inputs: Tensor | None = None, training: Tensor | None = None, shape: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> Figure:
    """Draw, for each input, the training points for and against it: as bars, as images, in a table, or along a line.

    Parameters
    ----------
    ranked : Explanation or Ranking
    inputs, training, shape, names
        As in `Explanation.plot`.

    Raises
    ------
    DataError
        If inputs, training inputs, shape and names do not match.
    """
    inputs = _fitting(inputs, len(ranked.f), "inputs that were explained")
    training = _fitting(training, len(ranked.leverage), "training inputs of the fit")
    shown, shown_training = _images(inputs, shape), _images(training, shape)
    if shown is not None and shown_training is not None:
        return _image_rows(ranked, (shown, shown_training))
    own, theirs = _features(inputs), _features(training)
    if own is not None and theirs is not None:
        features, width = (own, theirs), theirs.shape[1]
        if own.shape[1] != width or (names is not None and len(names) != width):
            raise DataError(f"inputs and names of the {width} features of the training inputs",
                            f"{own.shape[1]} features, {'no' if names is None else len(names)} names",
                            "Pass inputs of one kind, and one name for each feature.")
        return (_lines if width == 1 else _bar_rows)(ranked, features, names)
    return _bar_rows(ranked, None, names)


def _fitting(x: Any, count: int, what: str) -> Tensor | None:
    """Inputs as a tensor of `count` examples; a tuple or dict cannot be drawn."""
    if x is None or isinstance(x, (tuple, dict)):
        return None
    try:
        x = to_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"the {count:,} {what}, as an array", f"{type(x).__name__}", "Pass a tensor.") from error
    if x.ndim == 0 or len(x) != count:
        raise DataError(f"the {count:,} {what}", f"shape {tuple(x.shape)}", "Pass all of them, in their order.")
    return x


def _images(x: Tensor | None, shape: Sequence[int] | None) -> Tensor | None:
    """Images, those in color with numbers in [0, 1]."""
    images = None if x is None else pictures_of(x, shape)
    return images if images is None or images.ndim == 3 else shades(images)


def _features(x: Tensor | None) -> Tensor | None:
    """Features (n, d) of tabular or scalar inputs."""
    if x is None or x.ndim > 2:
        return None
    x = x.detach().cpu().reshape(len(x), -1)
    return x if x.is_floating_point() else x.double()  # integers have no mean


# --- images


def _image_rows(ranked: Ranked, images: tuple[Tensor, Tensor]) -> Figure:
    shown, sides, rows = min(ranked.k, 6), ranked.quantity.sides, len(ranked.f)
    columns = len(sides) * shown + 1
    figure = Figure(figsize=(1.15 * columns + 0.6, 1.75 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for i in range(rows):
        words = ranked.quantity.place_words(i, "\n")
        _show(axes[i, 0], images[0][i], f"input {i}\noutput {words}", "black")
        *position, _ = ranked.quantity.place(i)
        if ranked.quantity.likelihood.positions == images[0][i].shape[:2]:
            axes[i, 0].plot(*reversed(position), "s", mfc="none", mec=VERMILION, ms=5)
        column = 1
        for side in sides:
            for entry in ranked.entries(i, side, shown):
                support = f"{entry.support:+.2g}".replace("-", "\N{MINUS SIGN}")
                title = f"#{entry.training_index} y={_short(entry.target)}\n{support}{_mark(entry)}"
                color = _FOR if side == "for" else _AGAINST
                _show(axes[i, column], images[1][entry.training_index], title, color)
                column += 1
        for empty in axes[i, column:]:
            empty.set_axis_off()
    return figure


def _show(axes: Axes, image: Tensor, title: str, color: str) -> None:
    axes.imshow(image.numpy(), cmap="gray_r")
    axes.set_title(title, fontsize=8, color=color)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(color)


# --- bars, with a table if there are features


def _bar_rows(ranked: Ranked, features: tuple[Tensor, Tensor] | None, names: Sequence[str] | None) -> Figure:
    rows, most = len(ranked.f), len(ranked.quantity.sides) * ranked.k
    width = 7.0 if features is None else 7.0 + 0.75 * min(_FEATURES, features[1].shape[1])
    figure = Figure(figsize=(width, (0.32 * most + 1.15) * rows), layout="constrained")
    axes = figure.subplots(rows, 1 if features is None else 2, squeeze=False,
                           width_ratios=None if features is None else (7.0, width - 7.0))
    for i in range(rows):
        chosen = _both_sides(ranked, i)
        _bars(axes[i, 0], ranked, i, chosen)
        if features is not None:
            _table(axes[i, 1], features, names, i, chosen)
    return figure


def _both_sides(ranked: Ranked, i: int) -> list[Entry]:
    """All entries of an input, each once, from the strongest for it to the strongest against it."""
    found = {entry.training_index: entry for side in ranked.quantity.sides for entry in ranked.entries(i, side)}
    return sorted(found.values(), key=lambda entry: -entry.support)


def _bars(axes: Axes, ranked: Ranked, i: int, chosen: list[Entry]) -> None:
    support = [entry.support for entry in chosen]
    labels = [f"#{e.training_index}, y = {_short(e.target)}{_mark(e)}" for e in chosen]
    axes.barh(range(len(chosen)), support, color=[_FOR if v > 0 else _AGAINST for v in support])
    axes.set_yticks(range(len(chosen)), labels, fontsize=8)
    axes.set_ylim(len(chosen) - 0.5, -0.5)
    axes.axvline(0.0, color="black", linewidth=0.8)
    quantity = ranked.quantity
    change = "fall" if quantity.good > 0 else "rise"
    axes.set_xlabel(f"{change} of {quantity.words(i)} if the point were left out{in_brackets(quantity.unit)}")
    sides = "for (right) and against (left)" if len(quantity.sides) == 2 else "that make it sure"
    axes.set_title(f"input {i}: training points {sides}", fontsize=10)


def _table(
    axes: Axes, features: tuple[Tensor, Tensor], names: Sequence[str] | None, i: int, chosen: list[Entry]
) -> None:
    """Table of features beside the bars, the input's in the top row; features that differ most are shown."""
    inputs, training = features
    points = training[[entry.training_index for entry in chosen]]
    spread = (points - inputs[i]).abs().mean(0) / training.std(0).clamp_min(1e-12)
    columns = spread.argsort(descending=True)[:_FEATURES].sort().values.tolist()
    heads = [literal(names[c]) if names is not None else f"x{c}" for c in columns]
    body = [[f"{float(v):.3g}" for v in row[columns]] for row in points]
    axes.set_axis_off()
    height = 1.0 / len(chosen)  # the height of a bar's row
    axes.text(0.5, -0.03, "first line: the input itself", transform=axes.transAxes, ha="center", va="top", fontsize=8)
    table = axes.table(body, loc="center", bbox=Bbox.from_bounds(0, 0, 1, 1), cellLoc="center")
    head = axes.table([[f"{float(v):.3g}" for v in inputs[i][columns]]], colLabels=heads, cellLoc="center",
                      bbox=Bbox.from_bounds(0, 1.0, 1, 2 * height))
    for each in (table, head):
        each.auto_set_font_size(False)
        each.set_fontsize(8)
        for cell in each.get_celld().values():
            cell.set(edgecolor="#D9DEE4", linewidth=0.6)


# --- along a line


def _lines(ranked: Ranked, features: tuple[Tensor, Tensor], names: Sequence[str] | None) -> Figure:
    inputs, training = (values[:, 0] for values in features)
    rows = len(ranked.f)
    figure = Figure(figsize=(8.6, 2.7 * rows), layout="constrained")
    for i, axes in enumerate(figure.subplots(rows, 1, squeeze=False)[:, 0]):
        output = int(ranked.output[i])
        targets = ranked.targets.detach().cpu().double()
        targets = targets if targets.ndim == 1 else targets[:, min(output, targets.shape[1] - 1)]
        axes.plot(training, targets, "o", ms=3.5, color=LIGHT_GREY, label="training points")
        chosen = _both_sides(ranked, i)
        largest = max((abs(entry.support) for entry in chosen), default=1.0) or 1.0
        for side, color, marker in (("for", _FOR, "o"), ("against", _AGAINST, "s")):
            own = [e for e in chosen if (e.support > 0) == (side == "for") and e.support]
            if own:
                at = torch.tensor([e.training_index for e in own], device="cpu")
                sizes = [16 + 130 * abs(e.support) / largest for e in own]
                axes.scatter(training[at], targets[at], s=sizes, marker=marker, color=color, alpha=0.7, label=side)
        axes.axvline(float(inputs[i]), color="black", lw=1.0, ls=(0, (4, 2)))
        if ranked.targets.is_floating_point():  # class labels are not heights
            mean = ranked.quantity.likelihood.mean(ranked.f[i : i + 1]).detach()
            axes.plot(float(inputs[i]), float(mean[0, output]), "*", ms=13, color="black", label="prediction")
        axes.set(xlabel=literal(names[0]) if names else "input", ylabel="target")
        axes.set_title(f"input {i}: training points behind {ranked.quantity.words(i)}, area as effect", fontsize=10)
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


# --- text


def _short(target: Any) -> str:
    return f"{target:.3g}" if isinstance(target, float) else str(target)


def _mark(entry: Entry) -> str:
    return " !" if entry.flagged else ""
