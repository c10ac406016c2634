"""Grouping: which parameters share a precision; maps between values per group and per parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ntk_laplace.errors import HyperparameterError
from ntk_laplace.model.priors.names import Value, assign, flatten, shorten, unknown
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.runtime.parameter_layout import ParameterLayout


@dataclass(frozen=True)
class Grouping:
    """Groups of the parameters of one network.

    If `by_parameter`, every scalar parameter is a group. Otherwise every tensor belongs to one group, but for the one
    that is `by_input`, if any: each index of its second axis, an input of its layer, has a group of its own, or shares
    one with others.
    """

    by_parameter: bool = False
    shapes: ParameterLayout = field(default_factory=lambda: ParameterLayout({}))  # empty before a network is known
    group_of: dict[str, int] = field(default_factory=dict)  # of each tensor; of the one that is `by_input` its first
    names: list[str] = field(default_factory=list)
    by_input: str | None = None
    shared: tuple[int, ...] | None = None  # group of each of its inputs, the first groups; None: each has its own

    @classmethod
    def of(
        cls, groups: str | Mapping[str, Sequence[str]], shapes: ParameterLayout, shared: tuple[int, ...] | None = None
    ) -> Grouping:
        """Determine the groups of a network; those of its inputs, if they are given.

        HyperparameterError if a mapping does not contain every parameter once, if no weight has inputs, or if it has
        other numbers of them.
        """
        if groups == "input":
            return cls._of_inputs(shapes, shared)
        group_of, names = assign(groups, list(shapes))
        return cls(groups == "parameter", shapes, group_of, names)

    @classmethod
    def _of_inputs(cls, shapes: ParameterLayout, shared: tuple[int, ...] | None) -> Grouping:
        """Groups of the inputs of the first weight, and one for the other parameters of each layer."""
        first = next((name for name, shape in shapes.items() if len(shape) > 1 and shape.numel()), None)
        if first is None:
            raise HyperparameterError('a weight of shape (outputs, inputs, ...), for groups="input"',
                                      f"parameters of shapes {[tuple(shape) for shape in shapes.values()]}",
                                      'Use groups "tensor" or "parameter".')
        count = shapes[first][1]
        own = range(count) if shared is None else shared
        if len(own) != count:
            raise HyperparameterError(f"input_groups of the {count} inputs of {first!r}", f"{len(own)} numbers",
                                      "Pass one number for each.")
        members: list[list[int]] = [[] for _ in range(1 + max(own, default=-1))]
        for column, group in enumerate(own):
            members[group].append(column)
        inputs = [f"{first}[:, {_columns(each)}]" for each in members]
        group_of, names = assign("layer", [name for name in shapes if name != first])
        later = {name: len(inputs) + group for name, group in group_of.items()}
        return cls(False, shapes, {first: 0} | later, inputs + names, first, shared)

    @property
    def group_names(self) -> list[str]:
        """One name per precision."""
        if self.by_parameter:
            return [f"{name}[{i}]" for name, size in self.shapes.sizes.items() for i in range(size)]
        return list(self.names)

    @property
    def inputs(self) -> slice:
        """The groups of the tensor that is `by_input`; none if there is none."""
        return slice(0, 1 + max(self.of_inputs, default=-1))

    @property
    def of_inputs(self) -> Sequence[int]:
        """Group of each input of the tensor that is `by_input`."""
        if self.shared is not None:
            return self.shared
        return range(0 if self.by_input is None else self.shapes[self.by_input][1])

    def place(self, name: str) -> int | Tensor:
        """Group of a tensor; if it has several, the group of each entry, (numel,), int64."""
        if name not in self.group_of:
            raise unknown("parameter", name, self.shapes)
        if self.by_parameter:
            entries = self.shapes.slices()[name]
            return torch.arange(entries.start, entries.stop, device="cpu")
        if name == self.by_input:
            return self._over_inputs(torch.arange(self.inputs.stop, device="cpu"))
        return self.group_of[name]

    def counts(self, device: torch.device) -> Tensor:
        """Count the parameters in each group, (G,), int64."""
        if self.by_parameter:
            return torch.ones(self.shapes.num_parameters, dtype=torch.int64, device=device)
        groups, sizes = self._members(device)
        return torch.zeros(len(self.names), dtype=torch.int64, device=device).index_add(0, groups, sizes)

    def expand(self, values: Tensor) -> Tensor:
        """Values per parameter (P,) from values per group (G,)."""
        if self.by_parameter:
            return values
        if self.by_input is None:
            groups, sizes = self._members(values.device)
            return values[groups].repeat_interleave(sizes, output_size=self.shapes.num_parameters)
        return torch.cat([self._over_inputs(values[self.inputs]) if name == self.by_input
                          else values[self.group_of[name]].expand(size) for name, size in self.shapes.sizes.items()])

    def sums(self, values: Tensor) -> Tensor:
        """Sum values per parameter (P,) over each group, (G,)."""
        if self.by_parameter:
            return values
        parts = [part.view(self.shapes[name]).transpose(0, 1).flatten(1).sum(1) if name == self.by_input
                 else part.sum().view(1) for name, part in self.shapes.parts(values).items()]
        groups, _ = self._members(values.device)
        return values.new_zeros(len(self.names)).index_add(0, groups, torch.cat(parts))

    def _members(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Group and size of each tensor, or of each input of the one that is `by_input`, in order."""
        groups: list[int] = []
        sizes: list[int] = []
        for name, size in self.shapes.sizes.items():
            own = self.of_inputs if name == self.by_input else (self.group_of[name],)
            groups += own
            sizes += [size // len(own)] * len(own)
        return torch.tensor(groups, device=device), torch.tensor(sizes, device=device)

    def _over_inputs(self, values: Tensor) -> Tensor:
        """One value for each group of inputs to one for each entry of the tensor that is `by_input`, flat."""
        assert self.by_input is not None
        shape = self.shapes[self.by_input]
        if self.shared is not None:
            values = values[torch.tensor(self.shared, device=values.device)]
        return values.view(1, -1, *(1,) * (len(shape) - 2)).expand(shape).flatten()

    def values(self, given: Value | Mapping[str, Value]) -> Tensor:
        """Precisions of the groups, (G,), from any accepted input.

        HyperparameterError if number, shape or names do not match.
        """
        size = self.shapes.num_parameters if self.by_parameter else len(self.names)
        if isinstance(given, Mapping):
            return self._from_parameters(given) if self.by_parameter else self._from_groups(given)
        values = to_tensor(given, dtype=torch.float64)
        if values.numel() != 1 and values.shape != (size,):
            raise HyperparameterError(f"one precision, or one per group, ({size},)", f"shape {tuple(values.shape)}",
                                      f"The groups are {shorten(self.group_names)}.")
        return values.flatten().expand(size).clone()

    def _from_groups(self, given: Mapping[str, Value]) -> Tensor:
        values: dict[str, float] = {}
        for key, value in self._with_each_input(given).items():
            group = self._group_named(key)
            if group in values or to_tensor(value).numel() != 1:
                got = "two" if group in values else f"shape {tuple(to_tensor(value).shape)}"
                raise HyperparameterError(f"one precision for group {group!r}", got,
                                          'Tensors of precisions want groups="parameter".')
            values[group] = float(value)
        missing = [name for name in self.names if name not in values]
        if missing:
            raise HyperparameterError(f"a precision for every group, {shorten(self.names)}",
                                      f"none for {shorten(missing)}", "Name each group once.")
        return torch.tensor([values[name] for name in self.names], dtype=torch.float64, device="cpu")

    def _with_each_input(self, given: Mapping[str, Value]) -> dict[str, Value]:
        """The mapping with the name of the tensor that is `by_input` replaced by the names of its groups."""
        found = dict(given)
        if self.by_input is None or self.by_input not in found:
            return found
        names, value = self.names[self.inputs], to_tensor(found.pop(self.by_input))
        count = len(names)
        if value.numel() != 1 and value.shape != (count,):
            each = "input" if self.shared is None else "group of inputs"
            raise HyperparameterError(f"one precision for {self.by_input!r}, or one for each {each}, ({count},)",
                                      f"shape {tuple(value.shape)}", "Pass a number, or a tensor of this shape.")
        twice = next((name for name in names if name in found), None)
        if twice is not None:
            raise HyperparameterError(f"one precision for group {twice!r}", f"another in that of {self.by_input!r}",
                                      "Name each group once.")
        return found | dict(zip(names, value.flatten().expand(count), strict=True))

    def _group_named(self, key: str) -> str:
        if key in self.names:
            return key
        if key not in self.group_of:
            raise unknown("group", key, self.names)
        group = self.group_of[key]
        if list(self.group_of.values()).count(group) > 1:
            raise HyperparameterError(f"the name of a group, such as {self.names[group]!r}",
                                      f"{key!r}, one of several parameters in it",
                                      'Name the group, or use groups="tensor".')
        return self.names[group]

    def _from_parameters(self, given: Mapping[str, Value]) -> Tensor:
        for key in given:
            if key not in self.shapes:
                raise unknown("parameter", key, self.shapes)
        return flatten(given, self.shapes, "precision")


def _columns(numbers: Sequence[int]) -> str:
    """Ascending numbers as an index: 3, 3:5 or [3, 5]."""
    if len(numbers) == 1:
        return f"{numbers[0]}"
    together = numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{numbers[0]}:{numbers[-1] + 1}" if together else f"{list(numbers)}"
