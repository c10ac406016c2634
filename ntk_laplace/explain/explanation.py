"""Explanation: which training points make a prediction, as numbers, a table, a picture and a page."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ntk_laplace.curvature import FunctionSpace
from ntk_laplace.errors import DataError
from ntk_laplace.explain.algebra import contributions, leverage_blocks, leverages, removal_effects
from ntk_laplace.explain.picture import draw
from ntk_laplace.factors import Rows
from ntk_laplace.structures import Structure, Trained

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

__all__ = ["Explanation", "explain"]

HIGH_LEVERAGE = 0.9
"""Above it one Newton step without the point is an extrapolation: the score is flagged."""


@dataclass(frozen=True)
class Explanation:
    """Shares and effects of the training points on predictions, in units of the network's outputs.

    Axes are named: n inputs explained, N training points, C outputs.

    Attributes
    ----------
    f : Tensor, (n, C)
        The predictions: network outputs (logits, for classes).
    output : Tensor, (n,)
        Which output is explained.
    offset : Tensor, (n, C)
        What the linearized network says at the prior mean.
    contributions : Tensor, (n, N, C)
        k(x, x_i) r_i. ``f = offset + contributions.sum(1) + gap`` exactly.
    gap : Tensor, (n, C)
        How far the weights are from a stationary point, in outputs.
    removal : Tensor, (n, N, C)
        Change of each output if one training point were left out (posterior covariance, one Newton step).
        Positive: removing the point raises the output, it speaks against it.
    leverage : Tensor, (N,)
        In [0, 1). Near 1 the removal effect is an extrapolation; see `flagged`.
    targets : Tensor
        Training targets.
    k : int
        Training points shown for and against.
    """

    f: Tensor
    output: Tensor
    offset: Tensor
    contributions: Tensor
    gap: Tensor
    removal: Tensor
    leverage: Tensor
    targets: Tensor
    k: int

    @property
    def effect(self) -> Tensor:
        """Change of the explained output on removal, (n, N)."""
        index = self.output[:, None, None].expand(-1, self.removal.shape[1], 1)
        return self.removal.gather(2, index).squeeze(2)

    @property
    def share(self) -> Tensor:
        """Contribution to the explained output, (n, N)."""
        index = self.output[:, None, None].expand(-1, self.contributions.shape[1], 1)
        return self.contributions.gather(2, index).squeeze(2)

    @property
    def flagged(self) -> Tensor:
        """Training points whose leverage is too near 1 for one step to be trusted, (N,)."""
        return self.leverage > HIGH_LEVERAGE

    def supporting(self, k: int | None = None) -> Tensor:
        """Indices of the training points whose removal lowers the explained output most, (n, k)."""
        return self.effect.argsort(dim=1)[:, : k or self.k]

    def opposing(self, k: int | None = None) -> Tensor:
        """Indices of the training points whose removal raises the explained output most, (n, k)."""
        return self.effect.argsort(dim=1, descending=True)[:, : k or self.k]

    def to_dataframe(self, k: int | None = None) -> pandas.DataFrame:
        """One row per input and training point shown, strongest effect first on each side."""
        import pandas

        records = []
        for i in range(len(self.f)):
            for side, chosen in (("for", self.supporting(k)[i]), ("against", self.opposing(k)[i])):
                records += [self._record(i, side, rank, int(j)) for rank, j in enumerate(chosen)]
        return pandas.DataFrame.from_records(records)

    def _record(self, i: int, side: str, rank: int, j: int) -> dict[str, Any]:
        effect = float(self.effect[i, j])
        words = "lowers" if effect < 0 else "raises"
        return {
            "input": i,
            "output": int(self.output[i]),
            "speaks": side if (effect < 0) == (side == "for") else "neither",
            "rank": rank,
            "training_index": j,
            "target": self._target(j),
            "removal_effect": effect,
            "meaning": f"removing it {words} output {int(self.output[i])} by {abs(effect):.3g}",
            "contribution": float(self.share[i, j]),
            "leverage": float(self.leverage[j]),
            "flagged": bool(self.flagged[j]),
        }

    def _target(self, j: int) -> Any:
        target = self.targets[j]
        return target.item() if target.numel() == 1 else target.tolist()

    def __repr__(self) -> str:
        n, count, c = self.removal.shape
        worst = float(self.gap.abs().max())
        return (
            f"Explanation({n} input(s), {count} training points, {c} output(s); largest gap {worst:.2g}; "
            f"{int(self.flagged.sum())} point(s) of leverage above {HIGH_LEVERAGE})"
        )

    def plot(
        self, inputs: Tensor | None = None, training: Tensor | None = None, shape: Sequence[int] | None = None
    ) -> Figure:
        """Draw, for each input, the training points that speak for and against it.

        Parameters
        ----------
        inputs, training : Tensor, optional
            The explained inputs and all training inputs; drawn as images where they are, or where `shape` says how.
        shape : (height, width), optional
            Of the images.
        """
        return draw(self, inputs, training, shape)

    def to_html(self, k: int | None = None) -> str:
        """A self-contained fragment: the picture and the table."""
        buffer = io.BytesIO()
        self.plot().savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        picture = base64.b64encode(buffer.getvalue()).decode()
        table = self.to_dataframe(k).to_html(index=False, float_format=lambda v: f"{v:.4g}", border=0)
        return (
            f'<section class="ntk-laplace-explanation"><p>{html.escape(repr(self))}</p>'
            f'<img alt="Training points for and against each prediction" src="data:image/png;base64,{picture}">'
            f"{table}</section>"
        )


def explain(
    trained: Trained, structure: Structure, space: FunctionSpace, test: Rows, k: int, output: int | None
) -> Explanation:  # fmt: skip
    """Decompose predictions and rank the training points behind them.

    Parameters
    ----------
    test : Rows
        Rows of J at the inputs to explain.
    k : int
        Training points to show on each side.
    output : int, optional
        Output to explain for every input; by default each input's largest one.
    """
    n, c = space.rows.num_examples, test.num_seeds
    if not 1 <= k:
        raise DataError("k of at least 1", f"{k}", "Ask for one or more training points.")
    if output is not None and not 0 <= output < c:
        raise DataError(f"an output from 0 to {c - 1}", f"{output}", "Choose one of the network's outputs.")
    points = structure.points
    with torch.no_grad():
        residual = trained.likelihood.residual(points.f, points.targets)
        centered = trained.theta - trained.prior.flat_mean().to(trained.theta)
    parts = contributions(space, test, residual, centered)
    chosen = test.f.argmax(1) if output is None else torch.full((test.num_examples,), output, device=test.f.device)
    return Explanation(
        f=test.f, output=chosen, offset=parts.offset, contributions=parts.contributions, gap=parts.gap,
        removal=removal_effects(space, test, residual, parts.contributions),
        leverage=leverages(leverage_blocks(space))[:, -1], targets=points.targets, k=min(k, n),
    )  # fmt: skip
