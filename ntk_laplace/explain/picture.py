"""The picture of an explanation: bars of removal effects, with images of the training points where there are any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ntk_laplace.explain.explanation import Explanation

__all__ = ["draw"]

_FOR, _AGAINST = "#0072B2", "#D55E00"  # Okabe-Ito blue and vermilion


def draw(
    explanation: Explanation, inputs: Tensor | None, training: Tensor | None, shape: Sequence[int] | None
) -> Figure:
    """One row per input: bars, or the input and its training points as images."""
    from matplotlib.figure import Figure

    images = _images(inputs, shape), _images(training, shape)
    rows = len(explanation.f)
    with_images = images[0] is not None and images[1] is not None
    shown = min(explanation.k, 6) if with_images else explanation.k
    width = 1.15 * (2 * shown + 1) + 0.6 if with_images else 7.0
    figure = Figure(figsize=(width, (1.75 if with_images else 0.32 * 2 * shown + 1.0) * rows), layout="constrained")
    if with_images:
        axes = figure.subplots(rows, 2 * shown + 1, squeeze=False)
        for i in range(rows):
            _image_row(axes[i], explanation, i, images, shown)
    else:
        axes = figure.subplots(rows, 1, squeeze=False)
        for i in range(rows):
            _bars(axes[i, 0], explanation, i, shown)
    return figure


def _images(x: Tensor | None, shape: Sequence[int] | None) -> Tensor | None:
    if x is None or not isinstance(x, Tensor):
        return None
    x = x.detach().cpu()
    if shape is not None:
        return x.reshape(len(x), *shape)
    if x.ndim == 4 and x.shape[1] in (1, 3):
        return x[:, 0] if x.shape[1] == 1 else x.permute(0, 2, 3, 1)
    return x if x.ndim == 3 else None


def _image_row(axes: Any, explanation: Explanation, i: int, images: tuple, shown: int) -> None:
    inputs, training = images
    order = [("for", explanation.supporting(shown)[i]), ("against", explanation.opposing(shown)[i])]
    _show(axes[0], inputs[i], f"input {i}\noutput {int(explanation.output[i])}", "black")
    column = 1
    for side, chosen in order:
        for j in chosen.tolist():
            effect = float(explanation.effect[i, j])
            mark = " !" if bool(explanation.flagged[j]) else ""
            title = f"#{j} y={explanation._target(j)}\n{-effect:+.2g}{mark}"
            _show(axes[column], training[j], title, _FOR if side == "for" else _AGAINST)
            column += 1


def _show(axes: Axes, image: Tensor, title: str, color: str) -> None:
    axes.imshow(image.numpy(), cmap="gray_r")
    axes.set_title(title, fontsize=8, color=color)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(color)


def _bars(axes: Axes, explanation: Explanation, i: int, shown: int) -> None:
    chosen = torch.cat([explanation.supporting(shown)[i], explanation.opposing(shown)[i].flip(0)])
    chosen = list(dict.fromkeys(chosen.tolist()))
    support = [-float(explanation.effect[i, j]) for j in chosen]
    labels = [f"#{j}, y = {_short(explanation._target(j))}" + (" !" if explanation.flagged[j] else "") for j in chosen]
    axes.barh(range(len(chosen)), support, color=[_FOR if v > 0 else _AGAINST for v in support])
    axes.set_yticks(range(len(chosen)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_xlabel(f"fall of output {int(explanation.output[i])} if the point were left out")
    axes.set_title(f"input {i}: training points for (right) and against (left)", fontsize=10)


def _short(target: Any) -> str:
    return f"{target:.3g}" if isinstance(target, float) else str(target)
