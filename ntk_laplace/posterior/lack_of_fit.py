"""Lack of fit: whether residuals of training points with similar inputs are alike, and the network misses something."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, UnsupportedError, require_whole
from ntk_laplace.model.data import InputData
from ntk_laplace.posterior.explain import left_out_means
from ntk_laplace.posterior.periods import strongest_wave
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels
from ntk_laplace.structures import FittedModel
from ntk_laplace.structures.training_inputs import training_inputs

# correlations of numbers and of classes, and standard deviations above that of random pairs
_CLEAR, _OF_CLASSES, _DEVIATIONS = 0.2, 0.33, 3.0
_STANDS_OUT = 2.0  # standard deviations of a single input, less their bound, from which it is looked at
_LARGEST = 3.0  # residual that counts, in root mean squares: two outliers that are neighbors by chance show nothing


@dataclass(frozen=True)
class LackOfFit:
    """Moran's I of residuals: how alike those of neighbors are, beside those of random pairs (Moran 1950).

    Attributes
    ----------
    correlation : float
        Mean product of residuals of neighbors over the mean square of all: 1 if neighbors have equal residuals,
        -1/(n - 1) in the mean of all orders of the residuals. A network that follows its targets closely has negative
        ones.
    deviations : float
        The correlation less that mean, in standard deviations over all orders of the residuals (Mantel 1967). Along one
        of d inputs less √(2 log d), which bounds the mean of the largest of d standard normal numbers.
    neighbors : int
        Nearest points of each.
    num_points : int
        Points that were looked at, n.
    left_out : bool
        Whether each residual is that of a prediction from all other points.
    classes : bool
        Whether responses are classes. Neighbors mostly have the same one, so their residuals are a little alike where
        predictions are cautious.
    input : int or None
        Number of the one input among whose values neighbors are nearest; None where they are nearest among several.
    period, explained : float or None, float
        Period, in units of this one input, of the wave that explains most of the residuals along it
        (`FourierFeatures`), and the share of their squares that it explains; None and 0 where it may be chance, or
        there are fewer than eight different values.
    """

    correlation: float
    deviations: float
    neighbors: int
    num_points: int
    left_out: bool
    classes: bool = False
    input: int | None = None
    period: float | None = None
    explained: float = 0.0

    def above(self, correlation: float, deviations: float = 1.0) -> bool:
        """Whether both numbers are larger than these."""
        return self.correlation > correlation and self.deviations > deviations

    @property
    def clear(self) -> bool:
        """Whether the correlation is above 0.2 (0.33 of classes) and more than 3 deviations, or there is a wave."""
        return self.period is not None or self.above(_OF_CLASSES if self.classes else _CLEAR, _DEVIATIONS)

    def __str__(self) -> str:
        return self.described("" if self.input is None else f"input {self.input}")

    def described(self, name: str) -> str:
        """In words, with a name of the one input; it is empty if neighbors are nearest among several."""
        beside = "above" if self.deviations >= 0 else "below"
        along = f" along {name}" if name else ""
        wave = "" if self.period is None else (
            f", and a wave of period {self.period:.4g} explains {self.explained:.0%} of their squares")
        return (f"residuals of {self.num_points:,} points and their {self.neighbors} nearest neighbors{along} "
                f"correlate by {self.correlation:.3g}, {abs(self.deviations):.2g} standard deviations {beside} that of "
                f"random pairs{wave}")


def lack_of_fit(fitted: FittedModel, x: InputData | None, neighbors: int) -> LackOfFit:
    """As `Posterior.lack_of_fit`."""
    require_whole("neighbors", neighbors, 1, "Leave it out for 3.")
    fitted.settings.reducer.require_one("lack_of_fit", "Fit in one process.")
    points, likelihood = fitted.points, fitted.likelihood
    chosen = (points.observed_counts(likelihood) > 0).nonzero().squeeze(1).cpu()
    if len(chosen) > tuning.NEIGHBOR_POINTS:
        order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0), device="cpu")
        chosen = chosen[order[:tuning.NEIGHBOR_POINTS]].sort().values
    if len(chosen) < neighbors + 4:
        raise DataError(f"at least {neighbors + 4} training points, for {neighbors} neighbors of each",
                        f"{len(chosen)}", "Ask for fewer neighbors.")
    inputs, table = _inputs(fitted, x, chosen)
    left_out = fitted.exact and not fitted.precision.reads_data
    with torch.no_grad():
        index = chosen.to(points.f.device)
        f = left_out_means(fitted, index) if left_out else points.f[index]
        residual = _bounded(likelihood.at(index).residual(f, points.targets[index]).double())
        inputs = inputs.to(f.device)
        single = 0 if table and inputs.shape[1] == 1 else None
        metrics = _metrics(fitted, _standardized(inputs) if table else inputs)
        found = [LackOfFit(*moran(residual, _nearest(one, neighbors)), neighbors, len(chosen), left_out,
                           likelihood.classifies, single) for one in metrics]
        found += _along_each(found[0], residual, inputs) if table else []
    waves = [one for one in found if one.period is not None]  # say more than what all inputs show
    return max(waves, key=attrgetter("explained")) if waves else max(found, key=attrgetter("deviations"))


def _bounded(residual: Tensor) -> Tensor:
    """Centered residuals, none larger than three root mean squares of its output; 1 at most, or squares overflow."""
    residual = residual - residual.mean(0)
    largest = residual.abs().amax(0)
    residual = residual / torch.where(largest > 0, largest, torch.inf)
    most = _LARGEST * residual.square().mean(0).sqrt()
    return residual.clamp(-most, most)


def _along_each(like: LackOfFit, residual: Tensor, inputs: Tensor) -> list[LackOfFit]:
    """What stands out along each input: `like` that of all, with its own correlation, deviations and wave.

    Residuals at equal numbers are added up, so that neighbors differ: what a category or a row of equal examples has
    in common is no function of the number.
    """
    columns = []
    for column in range(inputs.shape[1]):
        numbers, place, count = inputs[:, column].unique(return_inverse=True, return_counts=True)
        if len(numbers) >= like.neighbors + 4:
            sums = residual.new_zeros(len(numbers), residual.shape[1]).index_add_(0, place, residual)
            columns.append((column, numbers.double(), sums / count.to(sums).sqrt().unsqueeze(1)))
    largest, found = math.sqrt(2.0 * math.log(max(1, len(columns)))), []
    for column, numbers, sums in columns:
        correlation, deviations = moran(sums, _nearest_sorted(numbers, like.neighbors))
        own = replace(like, correlation=correlation, deviations=deviations - largest, input=column)
        wave = strongest_wave(numbers.cpu().numpy(), sums.cpu().numpy(), len(columns))
        if wave is not None:
            own = replace(own, period=wave.period, explained=wave.share)
        if wave is not None or (own.deviations > _STANDS_OUT and not own.classes):  # neighbors mostly have one class
            found.append(own)
    return found


def moran(residual: Tensor, nearest: Tensor) -> tuple[float, float]:
    """Moran's I of residuals (n, C) and the numbers (n, k) of each point's neighbors, and its standard score.

    Each output counts alike. I is the mean of r_iᵀr_j over neighbors j of i, over that of r_iᵀr_i. The score is over
    all n! orders of the residuals: mean and second moment of Γ = Σ_ij A_ij S_ij, with A_ij = 1 for neighbors and
    S_ij = r_iᵀr_j for i ≠ j, are those of Mantel (1967), from A_0 = Σ A_ij, A_1 = ½ Σ (A_ij + A_ji)² and
    A_2 = Σ_i (Σ_j A_ij + A_ji)², and from the same sums of S. 0 where there are no residuals.
    """
    residual = residual - residual.mean(0)
    size = residual.square().mean(0).sqrt()
    residual = residual / torch.where(size > 0, size, torch.inf)
    (n, k), square = nearest.shape, residual.square().sum(1)
    number = torch.arange(n, device=nearest.device).unsqueeze(1)
    both = torch.isin(number * n + nearest, nearest * n + number).sum()  # pairs whose reverse is one too
    degree = k + torch.bincount(nearest.flatten(), minlength=n)
    a = [n * k, n * k + int(both), int(degree.square().sum())]
    fourth = float(square.square().sum())
    s = [-float(square.sum()), 2.0 * (float((residual.mT @ residual).square().sum()) - fourth), 4.0 * fourth]
    if not s[0]:
        return 0.0, 0.0
    found = float(torch.einsum("nc,nkc->", residual, residual[nearest]))
    mean = a[0] * s[0] / (n * (n - 1))
    second = (a[1] * s[1] / (2 * n * (n - 1)) + (a[2] - 2 * a[1]) * (s[2] - 2 * s[1]) / (4 * n * (n - 1) * (n - 2))
              + (a[0] ** 2 + a[1] - a[2]) * (s[0] ** 2 + s[1] - s[2]) / (n * (n - 1) * (n - 2) * (n - 3)))
    variance = max(second - mean**2, 0.0)
    return -found / (k * s[0]), (found - mean) / variance**0.5 if variance else 0.0


def _inputs(fitted: FittedModel, x: InputData | None, chosen: Tensor) -> tuple[Tensor, bool]:
    """Inputs of these training points, (n, d), and whether they are a table's."""
    source = training_inputs(fitted.model, fitted.structure, x, "lack_of_fit(x)")
    wanted = torch.zeros(fitted.num_examples, dtype=torch.bool, device="cpu")
    wanted[chosen], start, found, table = True, 0, [], True
    for inputs, y in source:
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            raise UnsupportedError("inputs that are one array of real numbers, among which there are nearest ones",
                                   f"a {type(inputs).__name__}" if not isinstance(inputs, Tensor) else
                                   f"an array of {inputs.dtype}", "Look at the residuals of leave_one_out.")
        found.append(inputs.detach().flatten(1)[wanted[start:start + len(y)].to(inputs.device)])
        start, table = start + len(y), inputs.ndim == 2
    return torch.cat(found), table


def _standardized(inputs: Tensor) -> Tensor:
    """Each column divided by its standard deviation; 0 if it is constant."""
    deviation = inputs.std(0)
    return inputs / torch.where(deviation > 0, deviation, torch.inf)


def _metrics(fitted: FittedModel, inputs: Tensor) -> list[Tensor]:
    """The inputs, and those times the prior deviation of their weights if each has a precision of its own."""
    prior = fitted.prior
    own = prior.precision_of_inputs.detach()
    return [inputs, inputs * own.rsqrt().to(inputs)] if len(own) == inputs.shape[1] > 1 else [inputs]


def _nearest(x: Tensor, neighbors: int) -> Tensor:
    """Numbers of the nearest rows of each, (n, k)."""
    numbers, found = torch.arange(len(x), device=x.device), []
    for rows in panels(len(x), len(x), tuning.AVERAGED_OUTPUTS):
        distance = torch.cdist(x[rows], x)
        distance.masked_fill_(numbers[rows].unsqueeze(1) == numbers, torch.inf)
        found.append(distance.topk(neighbors, largest=False).indices)
    return torch.cat(found)


def _nearest_sorted(numbers: Tensor, neighbors: int) -> Tensor:
    """The same among different numbers (n,) in ascending order."""
    n = len(numbers)
    own, steps = (torch.arange(count, device=numbers.device) for count in (n, 2 * neighbors + 1))
    places = own.unsqueeze(1) + steps[steps != neighbors] - neighbors  # both sides of each
    outside = (places < 0) | (places >= n)
    places = places.clamp(0, n - 1)
    distance = (numbers[places] - numbers.unsqueeze(1)).abs().masked_fill(outside, torch.inf)
    return places.gather(1, distance.topk(neighbors, largest=False).indices)
