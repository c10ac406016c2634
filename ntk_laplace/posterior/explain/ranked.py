"""Base of all explanations: training points for and against as a table, a figure and HTML."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor

from ntk_laplace.errors import DataError, UnsupportedError, is_whole
from ntk_laplace.model.data import RowBuffer
from ntk_laplace.posterior.explain.quantity import SPREADS, Quantity
from ntk_laplace.structures.what_if import HIGH_LEVERAGE

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

R = TypeVar("R", bound="Ranked")
AT_OPTIMUM = ("contributions are those of the optimum of the linearized network, where they and the offset add up to "
              "its output exactly; the gap leads from there to the prediction")
_GAP = 0.1  # of what the decomposition explains, above which its guarantees speak of the gap


@dataclass(frozen=True)
class Entry:
    """The effect of one training point on one prediction.

    Attributes
    ----------
    training_index : int
    target : number or list
    removal_effect : float
        Change of the quantity if the point were left out.
    support : float
        The effect with a sign such that positive speaks for the prediction.
    leverage : float
    flagged : bool
    more : dict
        Further columns of the pair, by name.
    """

    training_index: int
    target: Any
    removal_effect: float
    support: float
    leverage: float
    flagged: bool
    more: dict[str, float]


@dataclass(frozen=True, repr=False)
class Ranked:
    """Table, figure and HTML of ranked training points.

    Attributes
    ----------
    f : Tensor, (n, C)
    quantity : Quantity
        What was requested.
    offset, gap : Tensor, (n, C)
    importance : Tensor, (N, C)
        Residuals of the training points, of which contributions are made.
    at_optimum : bool
        Whether they are those of the optimum of the linearized network, and not of the weights.
    leverage : Tensor, (N,)
    targets : Tensor
    k : int
    guarantees : tuple of str
        What is exact, and what is not.
    """

    f: Tensor
    quantity: Quantity
    offset: Tensor
    gap: Tensor
    importance: Tensor
    at_optimum: bool
    leverage: Tensor
    targets: Tensor
    k: int
    guarantees: tuple[str, ...]

    AXES: ClassVar[dict[str, tuple[str, ...]]]

    def by_input(self) -> dict[tuple[str, str], Tensor]:
        """Tensors whose first axis is the inputs, by field and side ("" without sides)."""
        found: dict[tuple[str, str], Tensor] = {}
        for field in fields(self):
            values = getattr(self, field.name)
            if self.AXES.get(field.name, ("",))[0] == "input":
                sides = values if isinstance(values, dict) else {"": values}
                found |= {(field.name, side): value for side, value in sides.items()}
        return found

    @property
    def output(self) -> Tensor:
        """Which output is explained, (n,)."""
        return self.quantity.output

    @property
    def by(self) -> str:
        """The quantity whose change ranks the training points."""
        return self.quantity.by

    @property
    def flagged(self) -> Tensor:
        """Training points whose leverage is too close to 1 for one Newton step to be trusted, (N,)."""
        return self.leverage > HIGH_LEVERAGE

    def entries(self, i: int, side: str, k: int | None = None) -> list[Entry]:
        """The training points on one side of input i, strongest first; fewer than k if no more are on it.

        Raises
        ------
        DataError, UnsupportedError
            If the input or the side does not exist.
        """
        if not is_whole(i, 0) or i >= len(self.f):
            raise DataError(f"an input from 0 to {len(self.f) - 1}", f"{i!r}", "Choose one of those explained.")
        self._require_side(side)
        sign = 1 if side == "for" else -1
        return [entry for entry in self._entries(i, side, k) if sign * entry.support > 0]

    def _entries(self, i: int, side: str, k: int | None) -> list[Entry]:
        raise NotImplementedError

    def _require_side(self, side: str) -> None:
        if side not in self.quantity.sides:
            raise UnsupportedError(f"the side {' or '.join(map(repr, self.quantity.sides))}", repr(side),
                                   "No training point makes a prediction less sure: see supporting()."
                                   if self.by in SPREADS else "Choose one of the two.")

    def contributed(self) -> Tensor:
        """Sum of all contributions, (n, C)."""
        raise NotImplementedError

    def to_dataframe(self, k: int | None = None) -> pandas.DataFrame:
        """One row per input and shown training point, strongest effect first on each side."""
        import pandas

        return pandas.DataFrame.from_records(list(self._records(k)))

    def _records(self, k: int | None) -> Iterator[dict[str, Any]]:
        for i in range(len(self.f)):
            for side in self.quantity.sides:
                for rank, entry in enumerate(self.entries(i, side, k)):
                    yield {
                        "input": i,
                        "output": int(self.output[i]),
                        "speaks": side,
                        "rank": rank,
                        "training_index": entry.training_index,
                        "target": entry.target,
                        "removal_effect": entry.removal_effect,
                        "meaning": self.quantity.meaning(i, entry.removal_effect),
                        **entry.more,
                        "leverage": entry.leverage,
                        "flagged": entry.flagged,
                    }

    def _entry(self, i: int, j: int, effect: float, more: dict[str, float] | None = None) -> Entry:
        target = self.quantity.shown_target(i, self.targets[j])
        value = target.item() if target.numel() == 1 else target.tolist()
        return Entry(j, value, effect, -self.quantity.good * effect, float(self.leverage[j]), bool(self.flagged[j]),
                     more or {})

    def decomposition(self) -> pandas.DataFrame:
        """One row per input and output: prediction = offset + contributions + gap."""
        import pandas

        parts = {"prediction": self.f, "offset": self.offset, "contributions": self.contributed(), "gap": self.gap}
        n, c = self.f.shape
        where = {"input": [i for i in range(n) for _ in range(c)], "output": list(range(c)) * n}
        return pandas.DataFrame(where | {name: value.flatten().tolist() for name, value in parts.items()})

    def plot(
        self, inputs: Tensor | None = None, training: Tensor | None = None, shape: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
    ) -> Figure:
        """Draw, for each input, the training points that speak for and against it.

        Parameters
        ----------
        inputs, training : Tensor, optional
            The explained inputs and all training inputs. Image inputs, or inputs with a `shape`, are drawn as images;
            a single feature is plotted against the targets; a few features are a table beside the bars.
        shape : sequence of int, optional
            Of inputs that are images: (height, width), (height, width, 3) or (3, height, width).
        names : sequence of str, optional
            Names of the features.

        Raises
        ------
        DataError
            If inputs, training inputs, shape and names do not match.
        """
        from ntk_laplace.plotting import explanation

        return explanation(self, inputs, training, shape, names)

    def to_html(
        self, k: int | None = None, inputs: Tensor | None = None, training: Tensor | None = None,
        shape: Sequence[int] | None = None, names: Sequence[str] | None = None,
    ) -> str:
        """Self-contained HTML fragment: the figure of `plot`, the table, and the decomposition of each prediction."""
        buffer = io.BytesIO()
        self.plot(inputs, training, shape, names).savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        picture = base64.b64encode(buffer.getvalue()).decode()
        tables = [
            table.to_html(index=False, float_format=lambda v: f"{v:.4g}", border=0)
            for table in (self.to_dataframe(k), self.decomposition())
        ]
        promises = "".join(f"<li>{html.escape(words)}</li>" for words in self.guarantees)
        return (
            f'<section class="ntk-laplace-explanation"><p>{html.escape(repr(self))}</p><ul>{promises}</ul>'
            f'<img alt="Training points for and against each prediction" src="data:image/png;base64,{picture}">'
            f"{tables[0]}<h3>How each prediction is made up</h3>{tables[1]}</section>"
        )


def joined(parts: Iterable[R], room: int = 0) -> R:
    """Concatenate explanations of consecutive inputs, consumed one at a time; `room` inputs are expected, if known."""
    first: R | None = None
    questions: list[Quantity] = []
    rows: dict[tuple[str, str], RowBuffer] = {}
    parts = iter(parts)
    for part in parts:
        if len(part.f) == room:
            for _ in parts:  # what is checked after the last chunk
                pass
            return _telling_gap(part)
        first = part if first is None else first
        questions.append(part.quantity)
        for key, values in part.by_input().items():
            rows.setdefault(key, RowBuffer(room)).append(values)
        del part, values  # before the next is computed
    found: dict[str, Any] = {}
    for (name, side), gathered in rows.items():
        if side:
            found.setdefault(name, {})[side] = gathered.rows
        else:
            found[name] = gathered.rows
    if first is None:
        raise DataError("at least one input to explain", "none", "Pass one or more inputs.")
    return _telling_gap(replace(first, quantity=Quantity.joined(questions), **found))


def _telling_gap(found: R) -> R:
    """The same; its guarantees say so where the decomposition leaves much to the gap."""
    gap, explained = (float(part.abs().max()) for part in (found.gap, found.f - found.offset))
    if gap <= _GAP * explained or found.at_optimum:
        return found
    share = f"{gap / explained:.0%} of" if explained else "more than"
    words = (f"the gap is up to {share} the largest difference of a prediction from its offset: training has left a "
             "gradient, and the contributions are not those of an optimum, as they are with "
             'decomposition="optimum", or after refit(linearization="moving") of an approximation; removal effects '
             "keep that gradient, and do not contain it")
    return replace(found, guarantees=(*found.guarantees, words))


def counted(k: Any, default: int) -> int:
    """The validated number of training points to show; by default so many."""
    return default if k is None else whole(k)


def whole(k: Any) -> int:
    """The validated number of training points to show (DataError if it is no integer of at least 1)."""
    if not is_whole(k, 1):
        raise DataError("k of at least 1, a whole number", f"{k!r}", "Ask for one or more training points.")
    return int(k)


def strongest(values: Tensor, k: int) -> Tensor:
    """Indices of the largest entries of each row (n, N), largest first; ties in the order of the data, (n, k)."""
    return values.argsort(dim=1, descending=True, stable=True)[:, :k]

