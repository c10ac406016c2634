"""Leave-one-out: training points predicted from all others, in closed form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, UnsupportedError
from ntk_laplace.model.predictive import predictive
from ntk_laplace.posterior.explain.algebra import removal_terms, without_each
from ntk_laplace.posterior.explain.conditioned import Without, conditioned
from ntk_laplace.posterior.explain.ranked import counted
from ntk_laplace.posterior.explain.reliability import Reliability, reliability
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.means import error_of_mean
from ntk_laplace.runtime.panels import panels
from ntk_laplace.structures import FittedModel
from ntk_laplace.structures.what_if import HIGH_LEVERAGE

if TYPE_CHECKING:
    import pandas

_EXACT = (
    "means, covariances and what follows from them are exact for one Newton step of the linearized model without the "
    "point"
)
_OTHER_ROOT = (
    "each point is taken out of this precision, which is not the linearized model's: the numbers rank, and are no refit"
)
_OTHER = (
    "each point is subtracted from this posterior's own approximation of the curvature: the numbers rank, and are no "
    "refit; where the leverage exceeds 0.9 nothing is subtracted, and mean and information are of first order"
)
_REFITTED = (
    "nothing is subtracted from an approximation: the structure is fitted without a group of points, and predicts them "
    "with its own covariances; means without the group are one Newton step of the linearized model, by conjugate "
    "gradients, after which all points of the group but one are taken back in"
)
_MEANS = "means without each point"
_DRAWS = "log_density integrates over draws of f with a fixed seed where the likelihood has no closed form"


@dataclass(frozen=True, repr=False)
class LeaveOneOut:
    """Predictions at training points from all others, and each point's influence on the fit; N of all, or of some.

    Attributes
    ----------
    mean : Tensor, (N, C)
        Mean of f_i without point i.
    covariance : Tensor, (N, C, C)
        Covariance of f_i without point i; of an approximate structure, without the group that was left out with it.
    log_density : Tensor, (N,)
        log p(y_i | the others), f_i integrated out, in nats; 0 for a missing target. Not multiplied by example
        weights: a point is removed with all of its weight.
    plug_in_log_density : Tensor, (N,)
        log p(y_i | mean).
    leverage : Tensor, (N,)
        Largest eigenvalue of SᵀVS, in [0, 1): how much the fit at i depends on point i.
    self_influence : Tensor, (N,)
        Decrease of log p(y_i | f_i), in nats, if the point were removed.
    effective_parameters : Tensor, (N,)
        tr Λ_iV_ii; their sum is the effective number of parameters.
    information : Tensor, (N,)
        -½ log det(I - Λ_iV_ii): information about the weights, in nats, that the point adds to that of the others.
    importance : Tensor, (N,)
        Norm of the residual r_i ([T20] 5.2), times the example's weight.
    targets : Tensor
        Training targets.
    index : Tensor, (N,)
        Numbers of the training points, ascending.
    counts : Tensor, (N,)
        How often each point counts: its weight, 0 where it has no target.
    guarantees : tuple of str
        What is exact, and what is not.
    reliability : Reliability
        Measured diagnostics for these numbers.
    """

    mean: Tensor
    covariance: Tensor
    log_density: Tensor
    plug_in_log_density: Tensor
    leverage: Tensor
    self_influence: Tensor
    effective_parameters: Tensor
    information: Tensor
    importance: Tensor
    targets: Tensor
    index: Tensor
    counts: Tensor
    guarantees: tuple[str, ...]
    reliability: Reliability

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "mean": ("training point", "output"), "covariance": ("training point", "output", "output"),
        **dict.fromkeys(("log_density", "plug_in_log_density", "leverage", "self_influence", "effective_parameters",
                         "information", "importance", "suspicion", "flagged"), ("training point",)),
    }

    @property
    def trusted(self) -> bool:
        """Whether all diagnostics pass."""
        return self.reliability.trusted

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the numbers are not trusted, in plain words."""
        return self.reliability.reasons

    @property
    def flagged(self) -> Tensor:
        """Training points whose leverage is too close to 1 for one Newton step without them to be trusted, (N,)."""
        return self.leverage > HIGH_LEVERAGE

    @property
    def suspicion(self) -> Tensor:
        """-log p(y_i | the others), (N,): large if the label is unlikely given the others."""
        return -self.log_density

    @property
    def standard_error(self) -> float:
        """Of the mean of `log_density`, weighted by `counts`, as that of all training points, nats a point.

        NaN where a single point counts.
        """
        shares = self.counts / self.counts.sum()
        return error_of_mean(shares * self.log_density, shares)

    def ranked(self, by: str = "suspicion", k: int | None = None) -> Tensor:
        """Training points sorted by a column, largest first, (k,): "suspicion" lists likely label errors.

        Raises
        ------
        UnsupportedError
            If there is no such column.
        """
        return self.index[self._order(by, k)]

    def to_dataframe(self, by: str | None = None, k: int | None = None) -> pandas.DataFrame:
        """One row per training point, in the order of the data, or sorted by a column, largest first.

        Its ``attrs`` contain `trusted` and `reasons`.
        """
        import pandas

        count = len(self.mean)
        chosen = torch.arange(count, device="cpu")[: counted(k, count)] if by is None else self._order(by, k).cpu()
        numbers = {name: values.cpu()[chosen].tolist() for name, values in self._columns().items()}
        classes = {} if self.targets.ndim > 1 else {"most_likely": self.mean.argmax(1).cpu()[chosen].tolist()}
        frame = pandas.DataFrame({
            "training_index": self.index.cpu()[chosen].tolist(),
            "target": [t.item() if t.numel() == 1 else t.tolist() for t in self.targets.cpu()[chosen]],
            **classes, **numbers, "flagged": self.flagged.cpu()[chosen].tolist(),
        })
        frame.attrs |= {"trusted": self.trusted, "reasons": list(self.reasons)}
        return frame

    def _order(self, by: str, k: int | None) -> Tensor:
        columns = self._columns()
        if not isinstance(by, str) or by not in columns:
            raise UnsupportedError(f"one of {', '.join(columns)}", repr(by), 'Leave it out for "suspicion".')
        values = columns[by]
        return values.argsort(descending=True, stable=True)[: counted(k, len(values))]

    def _columns(self) -> dict[str, Tensor]:
        names = ("suspicion", "log_density", "plug_in_log_density", "self_influence", "leverage",
                 "effective_parameters", "information", "importance")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        n, c = self.mean.shape
        return (
            f"LeaveOneOut({n} training points, {c} output(s); log density {float(self.log_density.sum()):.4g} nats; "
            f"{float(self.effective_parameters.sum()):.3g} effective parameters; largest leverage "
            f"{float(self.leverage.max()):.3g}{'' if self.trusted else f'; {self.reliability}'})"
        )


def leave_one_out(fitted: FittedModel, samples: int = 1000) -> LeaveOneOut:
    """Compute means, covariances, log densities and leverages, from stored rows or in a pass over the data."""
    fitted.require_laplace("leave-one-out")
    everything = torch.arange(fitted.num_examples, device=fitted.points.f.device)
    words = _EXACT if fitted.exact else _OTHER_ROOT if fitted.structure.spec.exact else _OTHER
    return _predicted(fitted, everything, _without(fitted, everything), words, samples)


def leave_some_out(fitted: FittedModel, index: Tensor, samples: int = 1000) -> LeaveOneOut:
    """Leave-one-out of some training points, for every structure with the GGN; all others stay in.

    An exact posterior gives the numbers of `leave_one_out`. For any other, the structure is fitted without the points,
    in groups of at most a tenth of the data; covariances are those of this fit, and the means take back all points of
    the group but one (`conditioned`).

    `index` (m,) has different points in any order, and the result has them ascending. Errors are those of the verb.
    """
    fitted.require_laplace("leave-one-out")
    index = index.to(fitted.points.f.device).sort().values
    if len(index) == 0:
        raise DataError("one or more training points to leave out", "none", "Pass for example points=100.")
    if not fitted.exact:
        found, left = conditioned(fitted, index)
        return _predicted(fitted, index, found, _REFITTED, samples, left)
    return _predicted(fitted, index, _without(fitted, index), _EXACT, samples)


def left_out_means(fitted: FittedModel, index: Tensor) -> Tensor:
    """Means of f_i without point i, (m, C), by this posterior's own precision; known after a leave-one-out of all."""
    known = fitted.known(_MEANS)
    return _without(fitted, index).mean if known is None else known[index]


def _predicted(
    fitted: FittedModel, index: Tensor, found: Without, words: str, samples: int, unfinished: float | None = None
) -> LeaveOneOut:
    """Densities of the targets under the moments without each point; `unfinished` is as in `Reliability`."""
    measured = reliability(fitted, index, found.leverage, unfinished)
    network, points = fitted.network, fitted.points.subset(index)
    generator = torch.Generator(device=found.mean.device).manual_seed(0)
    with torch.no_grad():
        counted = fitted.likelihood.at(index)
        likelihood = counted.counted_once()
    targets = points.targets.squeeze(-1) if network.scalar and points.targets.ndim == 2 else points.targets
    integrated = []
    step = max(1, tuning.DRAWN_NUMBERS // (samples * points.num_outputs))
    with torch.no_grad():
        for part in panels(points.num_examples, 1, step):
            one = likelihood if step >= points.num_examples else likelihood.at(part)
            response = predictive(one, found.mean[part], found.covariance[part], "glm", samples, generator,
                                  network.scalar)
            integrated.append(response.log_prob(targets[part]))
        plug_in = likelihood.log_prob(found.mean, points.targets)
        own = likelihood.log_prob(points.f, points.targets)
        importance = points.residual(counted).norm(dim=1)
    density, counts = torch.cat(integrated), points.observed_counts(counted)
    measured = replace(measured, density=float((counts * density).sum() / counts.sum()))
    guarantees: tuple[str, ...] = (words, _DRAWS)
    if measured.moved:
        guarantees += ("hyperparameters have changed since the fit: the weights are "
                       f"{measured.decrement:.2g} nats a point from the optimum, by the Newton decrement, and the "
                       "remaining gradient is kept fixed",)
    return LeaveOneOut(found.mean, found.covariance, density, plug_in, found.leverage, own - plug_in,
                       found.used, found.information, importance, points.targets, index,
                       counts, guarantees, measured)


def leave_one_out_score(fitted: FittedModel) -> tuple[Tensor, LeaveOneOut]:
    """Σ w_n log p(y_n given all other points), nats, and the leave-one-out predictions it comes from.

    w_n is the example weight, times that of `Tempered`: how often the evidence counts the point. UnsupportedError if
    the structure or the curvature is not exact: a removal from an approximation ranks points and is no score.
    """
    fitted.require_laplace("leave-one-out")
    fitted.require_exact(" for a leave-one-out score", "Fit one of them, leave out some points (any structure) with "
                         "points=300, or score the model on held-out data.")
    found = leave_one_out(fitted)
    return fitted.likelihood.weight * (fitted.points.counts * found.log_density).sum(), found


def _without(fitted: FittedModel, index: Tensor) -> Without:
    """Moments without each of these points, from stored rows or in a pass over the data; means of all are kept."""
    everything = len(index) == fitted.num_examples
    if fitted.structure.spec.keeps_jacobian:
        found = _kept(fitted)
        found = found if everything else found.each(lambda values: values[index])
    else:
        found = _streamed(fitted, index)
    if everything:
        fitted.once(_MEANS, lambda: found.mean)
    return found


def _kept(fitted: FittedModel) -> Without:
    """Function space: moments from the stored rows."""
    space = fitted.function_space
    return Without.of(*without_each(space, fitted.points, fitted.likelihood), space.inverse_blocks)


def _streamed(fitted: FittedModel, index: Tensor) -> Without:
    """Weight space, batch by batch: V_-i = V_ii + V_iiS_i (I - S_iᵀV_iiS_i)⁻¹ S_iᵀV_ii."""
    outputs, own = fitted.points.num_outputs, fitted.points.f.dtype.itemsize
    # measured: 5 to 6 matrices a point
    fitted.model.require_memory(7 * len(index) * outputs**2 * own, f"leave-one-out covariances of {outputs:,} outputs",
                                "Leave out fewer points, points=10, or pass held-out data, calibrate(data).")
    points, parts = fitted.points.subset(index), []
    residual = fitted.residual()[index]
    with torch.no_grad():
        root = fitted.root()[index]
        for here, rows in fitted.own_rows(index):
            moments = fitted.precision.removal_blocks(rows, root[here])
            out = removal_terms(moments, root[here], fitted.structure.spec.exact)
            widened = out.half @ torch.linalg.solve(out.complement, out.half.mT)
            covariance = moments + widened * out.trusted.view(-1, 1, 1)
            mean = points.f[here] - (covariance @ residual[here].unsqueeze(-1)).squeeze(-1)
            used = out.inner.diagonal(dim1=1, dim2=2).sum(1)
            log_det = torch.linalg.slogdet(out.complement).logabsdet
            information = torch.where(out.trusted, -0.5 * log_det, 0.5 * used)
            parts.append(Without(mean, covariance, out.leverage, used, information))
    return Without.joined(parts, partial(fitted.collected, index))
