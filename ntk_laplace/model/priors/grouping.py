"""Grouping: which parameters share a precision; maps between values per group and per parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Size, Tensor

from ntk_laplace.errors import HyperparameterError
from ntk_laplace.model.priors.names import Value, assign, flatten, shorten, unknown

__all__ = ["Grouping"]


@dataclass(frozen=True)
class Grouping:
    """Groups of the parameters of one network.

    Attributes
    ----------
    by_parameter : bool
        Every scalar parameter is a group; otherwise every tensor belongs to one group.
    shapes : dict of str to Size
        The network's parameters in the order that flattens θ; empty before a network is known.
    group_of : dict of str to int
        Group of each tensor.
    names : list of str
        Names of the groups.
    """

    by_parameter: bool = False
    shapes: dict[str, Size] = field(default_factory=dict)
    group_of: dict[str, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, groups: str | Mapping[str, Sequence[str]], shapes: dict[str, Size]) -> Grouping:
        """Determine the groups of a network.

        Raises
        ------
        HyperparameterError
            If a mapping does not contain every parameter once.
        """
        group_of, names = assign(groups, list(shapes))
        return cls(groups == "parameter", shapes, group_of, names)

    @property
    def num_parameters(self) -> int:
        """P, the number of parameters."""
        return sum(shape.numel() for shape in self.shapes.values())

    @property
    def group_names(self) -> list[str]:
        """One name per precision."""
        if self.by_parameter:
            return [f"{name}[{i}]" for name, shape in self.shapes.items() for i in range(shape.numel())]
        return list(self.names)

    def place(self, name: str) -> int | slice:
        """Index, or slice, of a tensor's precisions."""
        if name not in self.group_of:
            raise unknown("parameter", name, self.shapes)
        if not self.by_parameter:
            return self.group_of[name]
        ends = accumulate((shape.numel() for shape in self.shapes.values()), initial=0)
        start = dict(zip(self.shapes, ends, strict=False))[name]
        return slice(start, start + self.shapes[name].numel())

    def counts(self, device: torch.device) -> Tensor:
        """Count the parameters in each group, (G,), int64."""
        if self.by_parameter:
            return torch.ones(self.num_parameters, dtype=torch.int64, device=device)
        index, sizes = self._index(device)
        return torch.zeros(len(self.names), dtype=torch.int64, device=device).index_add(0, index, sizes)

    def spread(self, values: Tensor) -> Tensor:
        """Expand values per group (G,) to values per parameter (P,)."""
        if self.by_parameter:
            return values
        index, sizes = self._index(values.device)
        return values[index].repeat_interleave(sizes, output_size=self.num_parameters)

    def sums(self, values: Tensor) -> Tensor:
        """Sum values per parameter (P,) over each group, (G,)."""
        if self.by_parameter:
            return values
        index, sizes = self._index(values.device)
        sums = torch.stack([part.sum() for part in values.split(sizes.tolist())])
        return sums.new_zeros(len(self.names)).index_add(0, index, sums)

    def values(self, given: Value | Mapping[str, Value]) -> Tensor:
        """Precisions of the groups, (G,), from any accepted input.

        Raises
        ------
        HyperparameterError
            If number, shape or names do not match.
        """
        size = self.num_parameters if self.by_parameter else len(self.names)
        if isinstance(given, Mapping):
            return self._from_parameters(given) if self.by_parameter else self._from_groups(given)
        values = torch.as_tensor(given, dtype=torch.float64)
        if values.numel() != 1 and values.shape != (size,):
            raise HyperparameterError(
                f"one precision, or one per group, ({size},)",
                f"shape {tuple(values.shape)}",
                f"The groups are {shorten(self.group_names)}.",
            )
        return values.flatten().expand(size).clone()

    def _index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Group and size of each parameter tensor, in order."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        return torch.tensor(list(self.group_of.values()), device=device), torch.tensor(sizes, device=device)

    def _from_groups(self, given: Mapping[str, Value]) -> Tensor:
        values: dict[str, float] = {}
        for key, value in given.items():
            group = self._group_named(key)
            if group in values or torch.as_tensor(value).numel() != 1:
                got = "two" if group in values else f"shape {tuple(torch.as_tensor(value).shape)}"
                raise HyperparameterError(
                    f"one precision for group {group!r}", got, 'Tensors of precisions want groups="parameter".'
                )
            values[group] = float(value)
        missing = [name for name in self.names if name not in values]
        if missing:
            raise HyperparameterError(
                f"a precision for every group, {shorten(self.names)}",
                f"none for {shorten(missing)}",
                "Name each group once.",
            )
        return torch.tensor([values[name] for name in self.names], dtype=torch.float64)

    def _group_named(self, key: str) -> str:
        if key in self.names:
            return key
        if key not in self.group_of:
            raise unknown("group", key, self.names)
        group = self.group_of[key]
        if list(self.group_of.values()).count(group) > 1:
            raise HyperparameterError(
                f"the name of a group, such as {self.names[group]!r}",
                f"{key!r}, one of several parameters in it",
                'Name the group, or use groups="tensor".',
            )
        return self.names[group]

    def _from_parameters(self, given: Mapping[str, Value]) -> Tensor:
        for key in given:
            if key not in self.shapes:
                raise unknown("parameter", key, self.shapes)
        return flatten(given, self.shapes, "precision")
