"""Folders of images: one folder for each class, or images without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import nn

from ntk_laplace.errors import DataError, first_line
from ntk_laplace.tools.cli.words import first_few

_GRAY, _COLOR = ("1", "L"), ("LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # of Pillow, with 8 bits per channel
_LARGEST = 4  # side of the images that the last layer takes


@dataclass(frozen=True)
class ImageFolder:
    """Images of one size, in the order of their paths."""

    x: NDArray[np.float64]  # (N, channels, height, width), from 0 to 1; one channel if all are gray, otherwise three
    files: list[str]  # paths below the folder
    classes: list[str]  # sorted names of the folders of the classes; empty if the images are in the folder itself
    y: NDArray[np.int64] | None  # (N,), numbers of the classes; -1 for another folder than those of the training data

    @property
    def rows(self) -> pandas.DataFrame:
        """The pixels of each image in one row."""
        return pandas.DataFrame(self.x.reshape(len(self.x), -1))

    @property
    def others(self) -> list[str]:
        """Names of the other folders, one for each image in them."""
        there = () if self.y is None else zip(self.files, self.y, strict=True)
        return [Path(file).parts[0] for file, number in there if number < 0]


def require_no_sources(path: Path, group: str | None) -> None:
    """Refuse sources of a folder, which names none (DataError)."""
    if group is not None:
        raise DataError("a table or arrays, for --group", f"the folder {path}",
                        "Save X, y and the sources with numpy.savez(FILE.npz, X=..., y=..., sources=...).")


def read_images(
    path: Path, shape: Sequence[int] | None = None, known: Sequence[str] | None = None, labeled: bool = True
) -> ImageFolder:
    """Read a folder that contains one folder of images for each class; names that begin with a point are ignored.

    The shape (channels, height, width) and the known classes are those of the training data, which are to be the same
    (DataError). Unless they are to be labeled, there may be other folders, or the images are in `path` itself.
    """
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    folders = [entry for entry in entries if entry.is_dir()]
    if labeled and not folders:
        raise DataError("one folder of images for each class", f"{path} without folders",
                        "Move the images of each class to a folder with the name of the class.")
    if folders and len(folders) < len(entries):
        stray = next(entry for entry in entries if not entry.is_dir())
        raise DataError("folders of images alone", f"{stray} beside them", "Move the file to a folder, or remove it.")
    classes = [folder.name for folder in folders]
    known = classes if known is None else list(known)
    other = [name for name in classes if name not in known]
    if labeled and other:
        raise DataError(f"classes of the training data ({first_few(known)}) in {path}", repr(other[0]),
                        "Correct the folder's name, or remove it.")
    groups = [_images(folder) for folder in folders] if folders else [entries]
    files = [file for group in groups for file in group]
    if not files:
        raise DataError("a folder with images", f"{path} without one", "Check the path.")
    number = {name: index for index, name in enumerate(known)}
    y = [number.get(name, -1) for name, group in zip(classes, groups, strict=bool(folders)) for _ in group]
    names = [str(file.relative_to(path)) for file in files]
    _require_utf8(names, path)
    x = _stacked(files, shape)
    return ImageFolder(x, names, known if folders else [], np.array(y, np.int64) if folders else None)


def _require_utf8(names: Sequence[str], path: Path) -> None:
    """Refuse names that no table or page can show (DataError): a file system may have any bytes."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as cause:
            raise DataError(f"names of images in UTF-8 in {path}", ascii(name), "Rename it.") from cause


def _images(folder: Path) -> list[Path]:
    found = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    if not found:
        raise DataError("images in the folder of each class", f"none in {folder}", "Add images, or remove the folder.")
    for entry in found:
        if entry.is_dir():
            raise DataError("images alone in the folder of each class", f"the folder {entry}",
                            f"If the folders of the classes are in {folder}, pass that folder.")
    return found


def _stacked(files: Sequence[Path], shape: Sequence[int] | None) -> NDArray[np.float64]:
    """Images of one size, (N, channels, height, width), of this shape if it is given."""
    found = [_pixels(file) for file in files]
    size = found[0].shape[:2] if shape is None else tuple(shape[1:])
    for file, pixels in zip(files, found, strict=True):
        if pixels.shape[:2] != size:
            (height, width), (h, w) = size, pixels.shape[:2]
            whose = str(files[0]) if shape is None else "the training data"
            raise DataError(f"images of one size, {width} x {height} pixels as in {whose}", f"{w} x {h} in {file}",
                            "Resize them, or cut them out.")
    channels = max(pixels.ndim for pixels in found) if shape is None else (2 if shape[0] == 1 else 3)
    for file, pixels in zip(files, found, strict=True):
        if pixels.ndim > channels:
            raise DataError("gray images, as in the training data", f"the color image {file}", "Convert it to gray.")
    colors = [np.repeat(pixels[..., None], 3, 2) if pixels.ndim < channels else pixels for pixels in found]
    x = np.stack(colors).astype(np.float64) / 255.0
    return x[:, None] if channels == 2 else np.moveaxis(x, 3, 1)


def _pixels(file: Path) -> NDArray[np.uint8]:
    """(height, width) of a gray image, (height, width, 3) of another one."""
    try:
        with Image.open(file) as image:
            if image.mode not in (*_GRAY, *_COLOR):
                raise DataError("images with 8 bits per channel", f"mode {image.mode} in {file}",
                                "Convert it, or save arrays in an .npz file.")
            return np.asarray(image.convert("L" if image.mode in _GRAY else "RGB"))
    except DataError:
        raise
    except UnidentifiedImageError as cause:
        raise DataError("images alone in the folder", f"{file}, which is none", "Remove it.") from cause
    except Exception as cause:  # damaged bytes may raise anything
        raise DataError("an image that Pillow can read", f"{file} ({first_line(cause)})", "Check the file.") from cause


@dataclass(frozen=True)
class ImageNetwork:
    """A function (features, outputs) -> Module of a small network for images whose pixels are in one row."""

    shape: tuple[int, ...]  # (channels, height, width) of an image; of other inputs if there is a network of one's own
    widths: Sequence[int] = (8, 16)  # channels of convolutions of 3 x 3 pixels, each with tanh and a mean over 2 x 2
    own: nn.Module | None = None  # a network of images to take instead

    def __call__(self, features: int, outputs: int) -> nn.Module:
        """The network, in double precision."""
        unflatten = nn.Unflatten(1, self.shape)
        if self.own is not None:
            return nn.Sequential(unflatten, self.own)
        channels, layers = self.shape[0], list[Any]([unflatten])
        for width in self.widths:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2, ceil_mode=True)]
            channels = width
        sides = [min(_LARGEST, -(-side // 2 ** len(self.widths))) for side in self.shape[1:]]
        layers += [nn.AdaptiveAvgPool2d((sides[0], sides[1])), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(channels * sides[0] * sides[1], outputs)).double()
