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

from ntk_laplace.model.data.pictures import pictures_of, shades

_LARGEST = 64  # maximum side in pixels; larger images are subsampled


def images_of(x: Tensor, shape: Sequence[int] | None) -> NDArray[np.uint8] | None:
    """`pictures_of` in at most 64 pixels a side, dark on light; None if the inputs are no images."""
    images = pictures_of(x, shape)
    if images is None:
        return None
    step = max(1, math.ceil(max(images.shape[1:3]) / _LARGEST))
    found = (shades(images[:, ::step, ::step]) * 255).round().numpy().astype(np.uint8)
    return 255 - found if found.ndim == 3 else found  # gray images become dark on light


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
