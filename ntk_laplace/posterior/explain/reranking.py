"""A ranking of training points by the effects of their removal on the network itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ntk_laplace.posterior.explain.quantity import Quantity
from ntk_laplace.posterior.explain.ranked import counted

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_FACTOR = 2.0  # linear and moving effects that differ by more than this factor, or in sign, disagree
_NOISE = 1e-6  # of the largest effect on the input: smaller differences are rounding


@dataclass(frozen=True, repr=False)
class Reranking:
    """The k strongest training points of each of n inputs, with their effects by linearization and on the network.

    Attributes
    ----------
    f : Tensor, (n, C)
        Outputs before.
    quantity : Quantity
        What is explained of each input: `by`, its `output` (n,), the targets.
    indices : Tensor, (n, k)
        Training points, the largest moving effect first.
    linear : Tensor, (n, k)
        Change of the quantity if the point were left out, as in `explain`: its value without the point, less that with
        it, by one step of the linearized network.
    moving : Tensor, (n, k)
        The same, at the network's own optimum without the point.
    places : Tensor, (n, k)
        Place of the point by its linear effect, from 0.
    converged, comes_back : Tensor of bool, (n, k)
        Whether the optimum without the point was reached, and whether it leads back to the trained weights if the point
        is put back; see `WhatIfs`.
    groups : tuple of Tensor
        Numbers of the training points of each of G groups that are left out together.
    group_linear, group_moving : Tensor, (n, G)
        Changes of the quantity without a group, at the optimum of the linearized network and at that of the network.
    group_converged, group_comes_back : Tensor of bool, (G,)
    group_outputs : Tensor, (n, G, C)
        Outputs of the network at its optimum without each group.
    targets : Tensor
        Training targets.
    guarantees : tuple of str
        What is exact, and what is not.
    """

    f: Tensor
    quantity: Quantity
    indices: Tensor
    linear: Tensor
    moving: Tensor
    places: Tensor
    converged: Tensor
    comes_back: Tensor
    groups: tuple[Tensor, ...]
    group_linear: Tensor
    group_moving: Tensor
    group_converged: Tensor
    group_comes_back: Tensor
    group_outputs: Tensor
    targets: Tensor
    guarantees: tuple[str, ...]

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "f": ("input", "output"), "group_outputs": ("input", "group", "output"),
        **dict.fromkeys(("indices", "linear", "moving", "places", "converged", "comes_back", "disagrees"),
                        ("input", "rank")),
        **dict.fromkeys(("group_linear", "group_moving", "group_disagrees"), ("input", "group")),
        **dict.fromkeys(("group_converged", "group_comes_back"), ("group",)),
    }

    @property
    def by(self) -> str:
        """The quantity whose change ranks the training points."""
        return self.quantity.by

    @property
    def disagrees(self) -> Tensor:
        """Where linear and moving effects differ in sign, or by more than a factor of two, (n, k)."""
        return _disagree(self.linear, self.moving, self.moving)

    @property
    def group_disagrees(self) -> Tensor:
        """The same for groups, (n, G)."""
        return _disagree(self.group_linear, self.group_moving, torch.cat([self.moving, self.group_moving], 1))

    def top(self, k: int | None = None) -> Tensor:
        """Numbers of the training points with the largest moving effects of either sign, (n, k)."""
        return self.indices[:, : counted(k, self.indices.shape[1])]

    def to_dataframe(self) -> pandas.DataFrame:
        """One row for each input and training point, the largest moving effect first."""
        import pandas

        disagrees = self.disagrees
        return pandas.DataFrame.from_records([
            {"input": i, "output": int(self.quantity.output[i]), "rank": rank, "training_index": j,
             "target": self.targets[j].item() if self.targets[j].numel() == 1 else self.targets[j].tolist(),
             "linear": float(self.linear[i, rank]), "moving": float(self.moving[i, rank]),
             "place_by_linear": int(self.places[i, rank]),
             "meaning": self.quantity.meaning(i, float(self.moving[i, rank])), "disagrees": bool(disagrees[i, rank]),
             "converged": bool(self.converged[i, rank]), "comes_back": bool(self.comes_back[i, rank])}
            for i in range(len(self.f)) for rank, j in enumerate(self.indices[i].tolist())
        ])

    def groups_dataframe(self) -> pandas.DataFrame:
        """One row for each input and group."""
        import pandas

        disagrees = self.group_disagrees
        return pandas.DataFrame.from_records([
            {"input": i, "output": int(self.quantity.output[i]), "group": g, "points": len(group),
             "linear": float(self.group_linear[i, g]), "moving": float(self.group_moving[i, g]),
             "disagrees": bool(disagrees[i, g]), "converged": bool(self.group_converged[g]),
             "comes_back": bool(self.group_comes_back[g])}
            for i in range(len(self.f)) for g, group in enumerate(self.groups)
        ])

    def plot(self) -> Figure:
        """Draw moving effects against linear ones, with those that disagree or do not come back."""
        from ntk_laplace.plotting import reranking

        return reranking(self)

    def __repr__(self) -> str:
        n, k = self.indices.shape
        groups = f", {len(self.groups)} group(s)" if self.groups else ""
        return (f"Reranking({n} input(s), {k} training points each{groups}; {int(self.disagrees.sum())} effects "
                f"disagree, {int((~self.comes_back).sum())} are of points that do not come back, "
                f"{int((~self.converged).sum())} have not converged)")


def _disagree(linear: Tensor, moving: Tensor, scale: Tensor) -> Tensor:
    """Where two effects (n, m) differ; `scale` has all moving effects on the inputs, (n, ...)."""
    if linear.shape[1] == 0:
        return torch.zeros_like(linear, dtype=torch.bool)
    noise = _NOISE * torch.maximum(linear.abs().amax(1), scale.abs().amax(1)).unsqueeze(1)
    small, large = torch.minimum(linear.abs(), moving.abs()), torch.maximum(linear.abs(), moving.abs())
    return ((linear * moving < 0) | (large > _FACTOR * small)) & ((linear - moving).abs() > noise)
