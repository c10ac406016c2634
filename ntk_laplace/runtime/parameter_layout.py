"""The parameters of a network in a flat vector: names, shapes and order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ntk_laplace.errors import DataError


class ParameterLayout(Mapping[str, torch.Size]):
    """Mapping from parameter name to shape, in the order that flattens θ; converts flat vectors to tensors by name.

    Attributes
    ----------
    num_parameters : int
        P, the length of a flat vector.
    sizes : dict of str to int
        Number of entries p of each parameter.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self._shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.sizes = {name: shape.numel() for name, shape in self._shapes.items()}
        self.num_parameters = sum(self.sizes.values())

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]]) -> ParameterLayout:
        """The layout of any mapping of shapes; a layout is returned as it is."""
        return shapes if isinstance(shapes, cls) else cls(shapes)

    def __getitem__(self, name: str) -> torch.Size:
        return self._shapes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({ {name: tuple(shape) for name, shape in self.items()} })"

    def slices(self) -> dict[str, slice]:
        """Slice of each parameter in a flat vector."""
        found, start = {}, 0
        for name, size in self.sizes.items():
            found[name] = slice(start, start + size)
            start += size
        return found

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """Split flat vectors (..., P) into views (..., p) by name (DataError for another length)."""
        if flat.ndim == 0 or flat.shape[-1] != self.num_parameters:
            raise DataError(f"flat vectors of shape (..., {self.num_parameters})", f"shape {tuple(flat.shape)}",
                            "Concatenate the flattened parameters in the network's order.")
        return dict(zip(self.sizes, flat.split(list(self.sizes.values()), dim=-1), strict=True))

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Split flat vectors (..., P) into views (..., *shape) by name (DataError for another length)."""
        return {name: part.view((*part.shape[:-1], *self[name])) for name, part in self.parts(flat).items()}

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        """Join tensors (..., *shape) by name to flat vectors (..., P); the inverse of `named`."""
        found = [(named[name], shape) for name, shape in self.items()]
        return torch.cat([value.reshape(*value.shape[: value.ndim - len(shape)], -1) for value, shape in found], -1)
