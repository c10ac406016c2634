"""Inputs as pictures: which inputs are images, in which order their axes are, and in which shades they are shown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ntk_laplace.errors import DataError, is_whole

_SMALLEST = 4  # sides of an image, at least; a shorter axis is one of features


def pictures_of(x: Tensor, shape: Sequence[int] | None) -> Tensor | None:
    """Inputs as images (n, height, width), or (n, height, width, 3) in color; None if they are no images.

    Parameters
    ----------
    x : Tensor
        (n, h, w), (n, 1 or 3, h, w), or any inputs that `shape` reshapes to images.
    shape : sequence of int, optional
        As `require_picture` demands it.

    Raises
    ------
    DataError
        If the shape is none of an image, or the number of entries of an input differs from its.
    """
    x = x.detach().cpu().double()
    if shape is not None:
        require_picture(shape)
        if x[0].numel() != math.prod(shape):
            raise DataError(f"inputs of {math.prod(shape):,} numbers, for images of {tuple(shape)}",
                            f"inputs of {x[0].numel():,}", "Pass the images' own height and width.")
        x = x.reshape(len(x), *shape)
    elif not (x.ndim == 4 and x.shape[1] in (1, 3)) and not (x.ndim == 3 and min(x.shape[1:]) >= _SMALLEST):
        return None
    if x.ndim == 4 and x.shape[1] in (1, 3) and (shape is None or x.shape[1] == 1 or x.shape[3] != 3):
        x = x.permute(0, 2, 3, 1)
    return x[..., 0] if x.ndim == 4 and x.shape[3] == 1 else x


def require_picture(shape: Sequence[int]) -> None:
    """Refuse a shape that is not that of an image.

    Raises
    ------
    DataError
        If it is not (height, width), (height, width, 1 or 3) or (1 or 3, height, width).
    """
    sides = tuple(shape) if isinstance(shape, Sequence) else ()
    good = len(sides) == 2 or (len(sides) == 3 and (sides[0] in (1, 3) or sides[2] in (1, 3)))
    if not (good and all(is_whole(side, 1) for side in sides)):
        raise DataError("a shape (height, width) of images, (height, width, 3) or (3, height, width)", f"{shape!r}",
                        "Pass for example shape=(28, 28).")


def shades(images: Tensor) -> Tensor:
    """The numbers of images, scaled to [0, 1] all together."""
    low, high = images.min(), images.max()
    return (images - low) / (high - low).clamp_min(1e-300)
