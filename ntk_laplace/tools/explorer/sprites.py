"""A sprite sheet: many small images of inputs in one PNG."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ntk_laplace.errors import DataError

__all__ = ["images_of", "sheet"]

_LARGEST = 64  # maximum side in pixels; larger images are subsampled


def images_of(x: Tensor, shape: Sequence[int] | None) -> NDArray[np.uint8] | None:
    """Inputs as images (n, height, width) or (n, height, width, 3), dark on light; None if they are not images.

    Parameters
    ----------
    x : Tensor
        (n, h, w), (n, 1 or 3, h, w), or any inputs that `shape` reshapes to images.
    shape : (height, width), (height, width, 3) or (1 or 3, height, width), optional

    Raises
    ------
    DataError
        If the number of entries of an input differs from that of `shape`.
    """
    values = x.detach().cpu().double()
    if shape is not None:
        if values[0].numel() != math.prod(shape):
            raise DataError(f"inputs of {math.prod(shape)} numbers, for images of {tuple(shape)}",
                            f"inputs of {values[0].numel()}", "Pass the images' own height and width.")
        values = values.reshape(len(values), *shape)
    if values.ndim == 4 and values.shape[1] in (1, 3) and (shape is None or shape[0] == 1 or shape[-1] != 3):
        values = values[:, 0] if values.shape[1] == 1 else values.permute(0, 2, 3, 1)
    elif shape is None and (values.ndim != 3 or min(values.shape[1:]) < 4):
        return None
    step = max(1, math.ceil(max(values.shape[1:3]) / _LARGEST))
    values = values[:, ::step, ::step]
    low, high = values.min(), values.max()
    shades = ((values - low) / (high - low).clamp_min(1e-300) * 255).round().numpy().astype(np.uint8)
    return 255 - shades if shades.ndim == 3 else shades  # gray images become dark on light


def sheet(images: NDArray[np.uint8]) -> dict[str, Any]:
    """All images in one PNG for the page: its data, the number of columns, and the size of one image."""
    count, height, width = images.shape[:3]
    columns = max(1, math.isqrt(count))
    rows = math.ceil(count / columns)
    whole = np.full((rows * height, columns * width, *images.shape[3:]), 255, np.uint8)
    for slot, image in enumerate(images):
        top, left = slot // columns * height, slot % columns * width
        whole[top : top + height, left : left + width] = image
    buffer = io.BytesIO()
    Image.fromarray(whole).save(buffer, format="PNG", optimize=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"source": f"data:image/png;base64,{data}", "columns": columns, "rows": rows, "width": width,
            "height": height}
