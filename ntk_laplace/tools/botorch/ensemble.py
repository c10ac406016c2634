"""Several trained networks as one BoTorch model: the mixture of their posteriors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from torch import Size, Tensor, nn

from ntk_laplace.errors import UnsupportedError, require_whole
from ntk_laplace.tools.botorch.gaussian_model import GaussianModel
from ntk_laplace.tools.botorch.model import LaplaceModel
from ntk_laplace.tools.botorch.surrogate import transformed


class LaplaceEnsemble(GaussianModel):
    """The mixture of several models' posteriors, of which `posterior` is the Gaussian with the same moments.

    With weights w_k, means m_k and covariances V_k of the members,

        m = Σ_k w_k m_k,    V = Σ_k w_k (V_k + (m_k - m)(m_k - m)ᵀ).

    Networks that are trained from different initial weights end at different optima. One Laplace posterior knows its
    own optimum alone; V has the variance between them too.

    Parameters
    ----------
    members : sequence of LaplaceModel
        Of the same transformed data, without transforms of their own.
    input_transform, outcome_transform, train_X : optional
        As in `LaplaceModel`.

    Attributes
    ----------
    members : ModuleList
    train_inputs, train_targets
        As in `LaplaceModel`.

    Raises
    ------
    UnsupportedError
        If there is no member, one has a transform, or their training targets differ in shape.

    Notes
    -----
    The weights are equal after a fit. New observations y change them by Bayes' rule, w_k ∝ p_k(y), and condition each
    member. So the mean of the mixture's mean over its own fantasies is what it was, and two steps are one.
    """

    members: Any

    def __init__(
        self, members: Sequence[GaussianModel], *, input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None, train_X: Tensor | None = None,
    ) -> None:
        one_kind = all(isinstance(one, GaussianModel) for one in members)
        if not members or not one_kind or len({one.train_targets.shape for one in members}) > 1:
            got = ", ".join(str(tuple(one.train_targets.shape)) for one in members) if one_kind else (
                ", ".join(type(one).__name__ for one in members))
            raise UnsupportedError("models of the same data", got or "none", "Pass LaplaceModel objects of one fit.")
        if any(hasattr(one, name) for one in members for name in ("input_transform", "outcome_transform")):
            raise UnsupportedError("members without transforms", "one with a transform",
                                   "Pass it to the ensemble, and fit the members to what it makes of the data.")
        super().__init__(members[0].train_targets, train_X, input_transform, outcome_transform)
        self.members = nn.ModuleList(members)
        self.eval()

    @classmethod
    def fit(
        cls, network: Callable[[int, int], nn.Module] | str, train_X: Tensor, train_Y: Tensor,
        train_Yvar: Tensor | None = None, *, members: int = 4, warm_start: LaplaceEnsemble | None = None,
        input_transform: InputTransform | None = None, outcome_transform: OutcomeTransform | None = None,
        seed: int = 0, **options: Any,
    ) -> LaplaceEnsemble:
        """Train networks with their evidence from different initial weights.

        Parameters
        ----------
        network : callable or str
            ``(d, m) -> nn.Module``, which draws its weights, or "mlp".
        train_X, train_Y, train_Yvar, input_transform, outcome_transform
            As in `LaplaceModel.fit`.
        members : int
            Number of networks.
        warm_start : LaplaceEnsemble, optional
            Of the same networks fitted to fewer points: each continues.
        seed : int
            Of the first member's initial weights; each later member's is one more.
        **options
            Of `LaplaceModel.fit`, for each member.

        Returns
        -------
        LaplaceEnsemble

        Raises
        ------
        UnsupportedError
            If all members begin at the same weights, or `warm_start` is no ensemble of as many.
        NTKLaplaceError
            As `LaplaceModel.fit`.
        """
        require_whole("members", members, 1, "Leave it out for 4.")
        require_whole("seed", seed, 0, "Leave it out for 0.")
        if not (warm_start is None or (isinstance(warm_start, LaplaceEnsemble) and len(warm_start.members) == members)):
            got = f"one of {len(warm_start.members)}" if isinstance(warm_start, LaplaceEnsemble) else (
                f"a {type(warm_start).__name__}")
            raise UnsupportedError(f"warm_start as a LaplaceEnsemble of {members} members", got,
                                   "Pass as many members=, or no warm start.")
        data = transformed(train_X, train_Y, train_Yvar, input_transform, outcome_transform)
        starts = [None] * members if warm_start is None else warm_start.members
        found: list[LaplaceModel] = []
        for number, start in enumerate(starts):
            found.append(LaplaceModel.fit(network, *data, warm_start=start, seed=seed + number, **options))
            if number == 1 and torch.equal(*(one.laplace.network.theta for one in found)):
                raise UnsupportedError("members that begin at different weights", "the same weights twice",
                                       "Pass a callable (d, m) -> Module that draws its weights, or use "
                                       "LaplaceModel.fit.")
        return cls(found, input_transform=input_transform, outcome_transform=outcome_transform, train_X=train_X)

    @classmethod
    def construct_inputs(cls, training_data: Any, **options: Any) -> dict[str, Any]:
        """Refused: an ensemble comes from `fit`."""
        raise UnsupportedError("LaplaceEnsemble.fit to train an ensemble", "construct_inputs of the class",
                               "Call it with the X and Y of the dataset, or construct a LaplaceModel.")

    @property
    def num_outputs(self) -> int:
        """m."""
        return int(self.members[0].num_outputs)

    @property
    def batch_shape(self) -> Size:
        """Batch dimensions, those of the observations that were added."""
        return Size(self.members[0].batch_shape)

    @property
    def likelihood(self) -> nn.Module:
        """The first member's: BoTorch asks of what kind it is."""
        return self.members[0].likelihood

    @property
    def weights(self) -> Tensor:
        """w, (..., K), with the batch dimensions of the model first."""
        return torch.stack([one.log_density for one in self.members], -1).softmax(-1)

    def moments(self, inputs: Tensor, noise: bool | Tensor = False) -> tuple[Tensor, Tensor]:
        """As in `GaussianModel`."""
        found = [one.moments(inputs, noise) for one in self.members]
        means = torch.stack([mean for mean, _ in found], -2)  # (..., K, q m)
        weights = self.weights.unsqueeze(-1)
        mean = (weights * means).sum(-2)
        apart = weights.sqrt() * (means - mean.unsqueeze(-2))
        within = torch.stack([covariance for _, covariance in found], -3) * weights.unsqueeze(-1)
        return mean, within.sum(-3) + apart.mT @ apart

    def path(self, shape: Size, generator: torch.Generator | None) -> Callable[[Tensor], Tensor]:
        """Each draw is of a member, drawn by its weight."""
        with torch.no_grad():
            weights, count = self.weights, shape.numel()
            weights = weights.reshape(-1, len(self.members))
            which = torch.multinomial(weights, count, replacement=True, generator=generator)
            which = which.T.reshape(*shape, *self.batch_shape, 1, 1)
        if which.numel() == 1:
            return self.members[int(which)].path(shape, generator)
        paths = [one.path(shape, generator) for one in self.members]

        def values(inputs: Tensor) -> Tensor:
            found = torch.stack([path(inputs) for path in paths], -2)  # (..., K, q m)
            return found.take_along_dim(which.expand(*found.shape[:-2], 1, 1), -2).squeeze(-2)

        return values

    def _observe(self, inputs: Tensor, targets: Tensor, noise: Tensor | None) -> None:
        self.members = nn.ModuleList(one.condition_on_observations(inputs, targets, noise) for one in self.members)

    def _keep(self, outputs: list[int]) -> None:
        self.members = nn.ModuleList(one.subset_output(outputs) for one in self.members)
