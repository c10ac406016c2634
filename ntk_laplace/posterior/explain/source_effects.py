"""Effects of sources: groups of training points with one label, such as a file, an annotator or a month."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from ntk_laplace.errors import DataError, warn
from ntk_laplace.posterior.explain.quantity import Quantity

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Sources = Sequence[Any] | NDArray[Any] | Tensor
"""The source of each training point: names or numbers, as a list, an array, a Series or a tensor."""

_REMEDY = "Pass one label for each, in the order of the data of the fit."


@dataclass(frozen=True, repr=False)
class SourceEffects:
    """What changes if all training points of one source are left out together, for each of S sources and n inputs.

    Attributes
    ----------
    names : tuple of str
        The S sources.
    num_points : Tensor, (S,)
        Training points of each source whose weight is not 0.
    f : Tensor, (n, C)
        Outputs before.
    outputs : Tensor, (n, S, C)
        Outputs without each source.
    quantity : Quantity
        What is explained of each input: `by`, its `output` (n,), the targets.
    effect : Tensor, (n, S)
        Change of the quantity without the source, as in `explain`: its value without the source, less that with it.
    single : Tensor, (n, S)
        Sum of the effects of the source's points if each were left out alone, `removal_effects`.
    log_prob_change : Tensor or None, (n, S)
        Change of log p(y | f) in nats, if targets of the inputs were given.
    own_log_prob : Tensor, (S,)
        Mean of log p(y_i | f_i) over the source's points, in nats, each counted once; NaN where none counts.
    own_log_prob_without : Tensor, (S,)
        The same, predicted without the source: how well the other sources explain this one.
    converged : Tensor of bool, (S,)
        Whether the optimum without the source was reached, as in `WhatIfs`.
    linearization : str
        "fixed" or "moving".
    guarantees : tuple of str
        What is exact, and what is not.
    """

    names: tuple[str, ...]
    num_points: Tensor
    f: Tensor
    outputs: Tensor
    quantity: Quantity
    effect: Tensor
    single: Tensor
    log_prob_change: Tensor | None
    own_log_prob: Tensor
    own_log_prob_without: Tensor
    converged: Tensor
    linearization: str
    guarantees: tuple[str, ...]

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "f": ("input", "output"), "outputs": ("input", "source", "output"), "effect": ("input", "source"),
        "single": ("input", "source"), "log_prob_change": ("input", "source"),
        **dict.fromkeys(("num_points", "own_log_prob", "own_log_prob_without", "converged"), ("source",)),
    }

    def __len__(self) -> int:
        return len(self.names)

    @property
    def by(self) -> str:
        """The quantity whose change is the effect."""
        return self.quantity.by

    @property
    def order(self) -> Tensor:
        """The sources in the order of the table, (S,).

        With targets of the inputs, those whose removal raises log p most come first; otherwise those with the largest
        mean absolute effect.
        """
        key = self.effect.abs() if self.log_prob_change is None else self.log_prob_change
        return key.mean(0).argsort(descending=True, stable=True)

    @property
    def explained(self) -> str:
        """The quantity in words."""
        one = self.quantity.words(0)
        same = all(self.quantity.words(i) == one for i in range(1, len(self.f)))
        return one if same else "the explained " + {"logit": "output"}.get(self.by, self.by.replace("_", " "))

    def table(self) -> pandas.DataFrame:
        """One row for each source, in the order of `order`; effects are means over the inputs."""
        import pandas

        columns = {
            "source": list(self.names), "points": self.num_points.tolist(), "effect": self.effect.mean(0).tolist(),
            "sum of single effects": self.single.mean(0).tolist(),
        }
        if self.log_prob_change is not None:
            columns["change of log p(y)"] = self.log_prob_change.mean(0).tolist()
        columns["own log p"] = self.own_log_prob.tolist()
        columns["own log p without"] = self.own_log_prob_without.tolist()
        return pandas.DataFrame(columns).iloc[self.order.tolist()].reset_index(drop=True)

    def to_dataframe(self) -> pandas.DataFrame:
        """One row for each input and source, for each input the largest absolute effect first."""
        import pandas

        records = []
        for i in range(len(self.f)):
            for s in self.effect[i].abs().argsort(descending=True, stable=True).tolist():
                effect = float(self.effect[i, s])
                meaning = self.quantity.meaning(i, effect).replace("it", "them", 1)
                record: dict[str, Any] = {
                    "input": i, "output": int(self.quantity.output[i]), "source": self.names[s],
                    "points": int(self.num_points[s]), "removal_effect": effect, "meaning": meaning,
                    "sum_of_single_effects": float(self.single[i, s]),
                }
                if self.log_prob_change is not None:
                    record["log_prob_change"] = float(self.log_prob_change[i, s])
                records.append(record)
        return pandas.DataFrame.from_records(records)

    def plot(self) -> Figure:
        """Draw the effects, the changes of log p if targets were given, and how each source is predicted."""
        from ntk_laplace.plotting import source_effects

        return source_effects(self)

    def __repr__(self) -> str:
        return (f"SourceEffects({len(self)} sources, {len(self.f)} input(s), linearization={self.linearization!r}, "
                f"{int(self.converged.sum())} converged)")

    def __str__(self) -> str:
        mean = "" if len(self.f) == 1 else f", mean over {len(self.f)} inputs"
        left = [self.names[s] for s in (~self.converged).nonzero().squeeze(1).tolist()]
        lines = [
            f"Without each source (linearization={self.linearization!r}): the effect is the change of {self.explained}"
            f"{self.quantity.unit and ' in' + self.quantity.unit}{mean}",
            self.table().to_string(index=False, float_format="{:.4g}".format),
            "own log p: mean over the source's points, in nats; without: as the other sources predict them",
        ]
        return "\n".join(lines + ([f"not converged: {', '.join(left)}"] if left else []))


def numbered(sources: Sources, counts: Tensor) -> tuple[tuple[str, ...], Tensor]:
    """Names of the sources, sorted, and the number of each training point's source, (N,), of N labels and weights.

    DataError if they are not one label for each training point, a label is missing, two labels differ in type alone,
    all points are of one source, or each point is a source of its own.
    """
    import pandas

    n = len(counts)
    labels = source_labels(sources, n)
    missing = [i for i, label in enumerate(labels) if pandas.isna(label)]
    if missing:
        raise DataError("a source for each training point", f"none for point {missing[0]}"
                        f"{f' and {len(missing) - 1:,} more' if len(missing) > 1 else ''}",
                        'Give the points without a source a label of their own, such as "unknown".')
    values = set(labels)
    try:
        ordered = sorted(values)
    except TypeError:  # of several types
        ordered = sorted(values, key=str)
    place = {label: number for number, label in enumerate(ordered)}  # equal labels, 1 and 1.0, are one source
    names = [str(label) for label in ordered]
    alike, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise DataError("labels that differ in print", f"several that print as {alike}, of different types",
                        "Convert the labels to one type.")
    number = torch.tensor([place[label] for label in labels], device=counts.device)
    _check(names, number, counts)
    return tuple(names), number


def source_labels(sources: Sources, n: int, what: str = "training points") -> list[Any]:
    """One label for each of n training points, or of what the caller counts.

    DataError if they are not as many, or one is neither a name nor a number.
    """
    import pandas

    shape = tuple(sources.shape) if hasattr(sources, "shape") else None
    if isinstance(sources, (str, bytes)) or shape not in (None, (n,)):
        got = f"shape {shape}" if shape is not None else f"{sources!r}"[:80]
        raise DataError(f"the sources of {n:,} {what}", got, _REMEDY)
    try:
        labels = sources.tolist() if shape is not None and hasattr(sources, "tolist") else list(sources)
    except TypeError as error:
        raise DataError(f"the sources of {n:,} {what}", f"{sources!r}"[:80], _REMEDY) from error
    if len(labels) != n:
        raise DataError(f"the sources of {n:,} {what}", f"{len(labels):,} labels", _REMEDY)
    labels = [label.item() if isinstance(label, Tensor) and label.ndim == 0 else label for label in labels]
    wrong = [label for label in labels if not pandas.api.types.is_scalar(label)]
    if wrong:
        raise DataError("names or numbers of sources", f"{wrong[0]!r}"[:80], _REMEDY)
    return labels


def _check(names: Sequence[str], number: Tensor, counts: Tensor) -> None:
    """Refuse sources without which no point remains, and sources of single points."""
    n, counting = len(counts), number[counts > 0]
    own = counting.unique()
    if len(own) < 2:
        raise DataError("at least two sources", f"{names[int(own[0])]!r} for all of {len(counting):,} training points",
                        "Pass labels that tell parts of the data apart; without a source, others must remain.")
    if len(names) == n:
        raise DataError("sources of several training points", f"a label of its own for each of {n:,}",
                        "Use removal_effects(x) or explain(x) for the effects of single points.")
    if 2 * len(names) > n:
        warn(f"{len(names):,} sources for {n:,} training points: most are single points, whose effects "
             "removal_effects(x) gives much faster")
