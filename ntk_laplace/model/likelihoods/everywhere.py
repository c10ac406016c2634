"""Everywhere: the same likelihood at each of many positions, such as pixels or tokens."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Size, Tensor
from typing_extensions import Self

from ntk_laplace.errors import (
    HyperparameterError,
    NetworkError,
    NonFiniteError,
    TargetError,
    UnsupportedError,
    is_whole,
)
from ntk_laplace.model.data import Batches
from ntk_laplace.model.likelihoods.base import Likelihood
from ntk_laplace.model.likelihoods.covariances import diagonal_blocks
from ntk_laplace.model.likelihoods.mixture import plug_in
from ntk_laplace.model.likelihoods.number_mixture import NumberMixture
from ntk_laplace.model.likelihoods.registry import built, record_to_build, register_likelihood
from ntk_laplace.model.likelihoods.responses import Response
from ntk_laplace.model.likelihoods.targets import MISSING_LABEL, read
from ntk_laplace.model.network import channels_fit
from ntk_laplace.runtime.conversion import to_tensor


def positions_of(likelihood: Likelihood, batches: Batches) -> Size | None:
    """Positions of a likelihood, which takes them from the first batch if it was given none."""
    if likelihood.positions == Size():
        with torch.inference_mode(False):
            likelihood.place(batches.first()[1])
    return likelihood.positions


@register_likelihood
class Everywhere(Likelihood):
    """Independent responses at L positions, each with `likelihood`: segmentation, token labels, images as targets.

    The network returns ``(N, C, *positions)`` or ``(N, *positions, C)``, with C outputs at each position. In the
    library f has shape (N, L C), with the outputs of one position side by side. Targets have shape ``(N, *positions)``
    where one position has one number, such as a class; else ``(N, *positions, D)`` or ``(N, D, *positions)``. A shape
    of outputs or targets that fits both layouts is refused.

    Predictions are distributions with events of shape ``positions``: `log_prob` is the sum over the observed positions
    of the log density of each one's own marginal; `mean`, `variance` and `probs` have shape ``(n, *positions, C)``.

    Parameters
    ----------
    likelihood : Likelihood
        Of one position. Its hyperparameters are those of this likelihood, the same at all positions.
    positions : int or sequence of int, optional
        Shape of the positions, such as (height, width), or the length of a sequence. By default that of one example's
        targets in the first batch of a fit, with one number at each position. All examples have it: pad shorter ones,
        with `ignore_index` as their targets.
    ignore_index : int
        Targets of a type of whole numbers, and class labels of any type, that have this value are missing and
        contribute nothing; as in torch.nn.CrossEntropyLoss.

    Raises
    ------
    UnsupportedError
        If `likelihood` is none, has noise per point, or is itself one of many positions.
    HyperparameterError
        If `positions` or `ignore_index` are not whole numbers.

    Examples
    --------
    >>> import ntk_laplace as ntkl
    >>> likelihood = ntkl.Everywhere(ntkl.Categorical(), positions=(16, 16), ignore_index=255)
    >>> of_the_data = ntkl.Everywhere(ntkl.Categorical())
    """

    positions: Size
    """Empty until the first targets, if they were not given."""

    def __init__(
        self, likelihood: Likelihood, positions: int | Sequence[int] | None = None, ignore_index: int = MISSING_LABEL
    ) -> None:
        super().__init__()
        shape = () if positions is None else positions if isinstance(positions, Sequence) else [positions]
        if not (shape or positions is None) or not all(is_whole(length, 1) for length in shape):
            raise HyperparameterError("positions as a whole number, or a shape such as (height, width)",
                                      repr(positions)[:80], "Leave it out for the shape of one example's targets.")
        if not is_whole(ignore_index, -sys.maxsize):
            raise HyperparameterError("ignore_index as a whole number", repr(ignore_index)[:80],
                                      "Leave it out for -100.")
        own = Likelihood.of(likelihood)
        if own.positions is not None or own.weight != 1.0 or own.at(slice(0, 1)) is not own:
            raise UnsupportedError("the likelihood of one position, the same everywhere, without a weight", f"{own!r}",
                                   "Pass for instance Categorical(); temper the result, Tempered(Everywhere(...), w).")
        self.likelihood, self.positions, self.ignore_index = own, Size(shape), int(ignore_index)
        self.classifies, self.is_density = own.classifies, own.is_density
        self.scales_noise = own.scales_noise

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """The hyperparameters of `likelihood`, under their own names."""
        return self.likelihood.named_parameters(prefix, recurse, remove_duplicate)

    def extra_repr(self) -> str:
        """The shape of the positions."""
        return f"positions={tuple(self.positions) or None}"

    # --- positions

    def place(self, y: Any) -> None:
        """Take the shape of one example's targets, if none was given."""
        if self.positions:
            return
        shape = to_tensor(y).shape[1:]
        if not shape.numel() or not shape:
            raise TargetError("targets (N, *positions), one number for each position", f"shape {(len(y), *shape)}",
                              "Pass the shape of the positions, Everywhere(likelihood, positions).")
        self.positions = shape

    def num_positions(self, num_outputs: int) -> int:
        """L."""
        if not self.positions:
            raise UnsupportedError("a likelihood whose positions are known", f"{self!r} before the first targets",
                                   "Fit with it first, or pass Everywhere(likelihood, positions).")
        count = math.prod(self.positions)
        if num_outputs % count:
            raise NetworkError(f"a multiple of {count} outputs, the same number at each of {tuple(self.positions)}",
                               f"{num_outputs}", "Pass the positions of the network's outputs.")
        return count

    def at_position(self) -> Likelihood:
        return self.likelihood

    def apart(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (n L, C) and targets (n L, ...) of positions."""
        return self._flat(f), self._flat_targets(y)

    def together(self, marginals: Response) -> EverywhereResponse:
        return EverywhereResponse(self, marginals)

    def _per_position(self, num_outputs: int) -> int:
        """C."""
        return num_outputs // self.num_positions(num_outputs)

    def _flat(self, f: Tensor) -> Tensor:
        """Outputs (..., n, L C) as those of positions, (..., n L, C)."""
        return f.reshape(*f.shape[:-2], -1, self._per_position(f.shape[-1]))

    def _flat_targets(self, y: Tensor) -> Tensor:
        """Canonical targets (n, *positions, ...) as those of positions, (n L, ...)."""
        return y.reshape(-1, *y.shape[1 + len(self.positions) :])

    def _spread(self, blocks: Tensor) -> Tensor:
        """Matrices (n L, a, b) of positions as block-diagonal ones, (n, L a, L b)."""
        count, (a, b) = math.prod(self.positions), blocks.shape[-2:]
        apart = torch.diag_embed(blocks.unflatten(0, (-1, count)).permute(0, 2, 3, 1))  # (n, a, b, L, L)
        return apart.permute(0, 3, 1, 4, 2).reshape(-1, count * a, count * b)

    def _blocks(self, covariance: Tensor) -> Tensor:
        """Diagonal blocks of (n, L C, L C), (n L, C, C)."""
        return diagonal_blocks(covariance, self._per_position(covariance.shape[-1])).flatten(0, 1)

    # --- validation

    def bind(self, num_examples: int, num_outputs: int) -> None:
        """Check the number of outputs, and the likelihood of one position."""
        self.likelihood.bind(num_examples * self.num_positions(num_outputs), self._per_position(num_outputs))

    def targets(self, y: Any, num_examples: int, num_outputs: int) -> Tensor:
        """Check targets, ``(N, *positions)`` or ``(N, *positions, D)``; ``(N, D, *positions)`` becomes the latter."""
        y = read(y, num_examples, missing=True)
        self.place(y)
        own, axes, shape = self.likelihood, len(self.positions), tuple(self.positions)
        first, last = channels_fit(y.shape, self.positions)
        if first and last:
            raise TargetError("targets whose layout their shape tells", f"shape {tuple(y.shape)}, which is both (N, D, "
                              "*positions) and (N, *positions, D)",
                              "Flatten the positions into one axis, in outputs too, or pad them with missing targets.")
        if first:
            y = y.movedim(1, -1)
        if y.shape[1 : 1 + axes] != self.positions or y.dim() > axes + 2:
            raise TargetError(f"targets of shape ({num_examples}, {', '.join(map(str, shape))}), with an axis of "
                              "responses if a position has several", f"shape {tuple(y.shape)}",
                              "Pass one target for each position; pad examples of other shapes.")
        flat = self._flat_targets(y)
        per_output = own.event_shape(self._per_position(num_outputs)) != Size()
        whole = not flat.is_floating_point()
        if whole:  # in a type that holds what marks a missing target: bytes do not
            flat = flat.double() if per_output else flat.long()
        if (whole or (not per_output and flat.dim() == 1)) and bool((missing := flat == self.ignore_index).any()):
            flat = own.hidden(flat, ~missing)
        try:
            found = own.targets(flat, len(flat), self._per_position(num_outputs))
        except (TargetError, NonFiniteError) as error:
            remedy = error.remedy
            if whole and "missing label" in remedy:
                remedy += " Everywhere(..., ignore_index=255), for instance, names another number for missing ones."
            raise type(error)(error.expected, self._placed(error.got), remedy) from error
        return found.reshape(num_examples, *shape, *found.shape[1:])

    def _placed(self, words: str) -> str:
        """Words of an error with the position in the example in place of the number among all positions."""
        def place(found: re.Match[str]) -> str:
            number, count = int(found[1].replace(",", "")), math.prod(self.positions)
            position = torch.tensor(number % count, device="cpu")
            where = ", ".join(str(int(i)) for i in torch.unravel_index(position, self.positions))
            return f"at position ({where}) of example {number // count:,}"

        return re.sub(r"at example ([\d,]*\d)", place, words)

    def num_responses(self, num_outputs: int) -> int:
        """L D."""
        return self.num_positions(num_outputs) * self.likelihood.num_responses(self._per_position(num_outputs))

    def event_shape(self, num_outputs: int) -> Size | None:
        """Positions, then the event of one."""
        own = self.likelihood.event_shape(self._per_position(num_outputs))
        return None if own is None else self.positions + own

    def scaled_noise(self, factor: float) -> Likelihood:
        """A copy with the noise at each position multiplied by `factor`."""
        return Everywhere(self.likelihood.scaled_noise(factor), self.positions or None, self.ignore_index)

    def log_curvature_scale(self) -> Tensor | None:
        """The likelihood's."""
        return self.likelihood.log_curvature_scale()

    def log_residual_scale(self) -> Tensor | None:
        """The likelihood's."""
        return self.likelihood.log_residual_scale()

    # --- missing targets

    def observed(self, y: Tensor) -> Tensor | None:
        """Mask of observed targets, (N, L) or (N, L D); None if all are observed."""
        found = self.likelihood.observed(self._flat_targets(y))
        return None if found is None else found.reshape(len(y), -1)

    def hidden(self, y: Tensor, observed: Tensor) -> Tensor:
        """Targets marked as missing where `observed` is false: (N,), or the mask of `observed`."""
        flat = self._flat_targets(y)
        if observed.dim() == 1:
            observed = observed.unsqueeze(1).expand(len(y), len(flat) // len(y))
        mask = observed.reshape(len(flat), -1)
        return self.likelihood.hidden(flat, mask.squeeze(1) if flat.dim() == 1 else mask).view_as(y)

    def in_form_of(self, y: Tensor, other: Tensor) -> Tensor:
        """Canonical targets `y` in the format of `other`."""
        found = self.likelihood.in_form_of(self._flat_targets(y), self._flat_targets(other))
        return found.reshape(len(y), *self.positions, *found.shape[1:])

    # --- the density and its derivatives in f

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log density of each example, the sum over its positions, (N,), nats."""
        return self.likelihood.log_prob(self._flat(f), self._flat_targets(y)).view(len(f), -1).sum(1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Gradient in f, (N, L C)."""
        return self.likelihood.residual(self._flat(f), self._flat_targets(y)).reshape(f.shape)

    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Λ, one block per position, (N, L C, L C)."""
        return self._spread(self.likelihood.curvature(self._flat(f), None if y is None else self._flat_targets(y)))

    def root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """S, one block per position, (N, L C, L R)."""
        return self._spread(self.likelihood.root(self._flat(f), None if y is None else self._flat_targets(y)))

    def left_inverse(self, f: Tensor) -> Tensor | None:
        """One block per position."""
        found = self.likelihood.left_inverse(self._flat(f))
        return None if found is None else self._spread(found)

    def rank(self, num_outputs: int) -> int:
        """L R."""
        return self.num_positions(num_outputs) * self.likelihood.rank(self._per_position(num_outputs))

    def identified(self, num_outputs: int) -> Tensor | None:
        """Those of each position."""
        found = self.likelihood.identified(self._per_position(num_outputs))
        if found is None:
            return None
        return torch.kron(torch.eye(self.num_positions(num_outputs), dtype=found.dtype, device=found.device), found)

    # --- the response

    def mean(self, f: Tensor) -> Tensor:
        """Mean response, (N, L D)."""
        return self.likelihood.mean(self._flat(f)).reshape(len(f), -1)

    def mean_jacobian(self, f: Tensor) -> Tensor:
        """Derivative of `mean`, one block per position, (N, L D, L C)."""
        return self._spread(self.likelihood.mean_jacobian(self._flat(f)))

    def response_covariance(self, f: Tensor) -> Tensor:
        """Covariance of the responses given f, one block per position, (N, L D, L D)."""
        return self._spread(self.likelihood.response_covariance(self._flat(f)))

    def response_variance(self, f: Tensor) -> Tensor:
        """Variance of each response given f, (N, L D)."""
        return self.likelihood.response_variance(self._flat(f)).reshape(len(f), -1)

    def additive_noise(self, f: Tensor) -> Tensor | None:
        """The likelihood's, one block per position."""
        found = self.likelihood.additive_noise(self._flat(f))
        return None if found is None else self._spread(found)

    def distribution(self, f: Tensor, scalar: bool = False) -> Response:
        """Responses given f."""
        return self.together(plug_in(self.likelihood, self._flat(f)))

    def average(self, f: Tensor, scalar: bool = False) -> Response:
        """Average each position's response over samples of f (S, n, L C)."""
        return self.together(self.likelihood.average(self._flat(f)))

    def keeps_samples(self, num_outputs: int) -> bool:
        """As the likelihood of one position."""
        return self.likelihood.keeps_samples(self._per_position(num_outputs))

    def linearize(self, mean: Tensor, covariance: Tensor, scalar: bool = False) -> Response:
        """Moments of each position's response, linearized through the link."""
        return self.together(self.likelihood.linearize(self._flat(mean), self._blocks(covariance)))

    def probit(self, mean: Tensor, covariance: Tensor, scalar: bool = False) -> Response:
        """Each position's class probabilities by MacKay's probit approximation."""
        return self.together(self.likelihood.probit(self._flat(mean), self._blocks(covariance)))

    def expected(self, mean: Tensor, covariance: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """From the expectations at each position."""
        blocks, flat = self._blocks(covariance), self._flat_targets(y)
        found = self.likelihood.expected(self._flat(mean), blocks, flat)
        if found is None:
            return None
        log_prob, residual, curvature = found
        return log_prob.view(len(mean), -1).sum(1), residual.reshape(mean.shape), self._spread(curvature)

    # --- saving

    def record(self) -> dict[str, Any]:
        """The record of the likelihood, and the shape."""
        return {"likelihood": record_to_build(self.likelihood), "positions": list(self.positions),
                "ignore_index": self.ignore_index}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Likelihood:
        """Build the likelihood of one position, and this one."""
        return cls(built(**record["likelihood"]), record["positions"] or None, record["ignore_index"])


class EverywhereResponse(Response):
    """Responses at all positions, from the `marginals` of each: n L responses, those of one example side by side.

    Draws are independent over positions; `Posterior.sample` draws f jointly.

    Attributes
    ----------
    marginals : Response
        Batch shape (n L,).
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012  # torch's name for it

    def __init__(self, likelihood: Everywhere, marginals: Response) -> None:
        self.marginals = marginals
        self._positions = likelihood.positions
        count = math.prod(likelihood.positions)
        own = likelihood.event_shape(count * marginals.num_outputs)
        event = likelihood.positions + marginals.event_shape if own is None else own
        torch.distributions.Distribution.__init__(self, Size((marginals.batch_shape[0] // count,)), event,
                                                  validate_args=False)
        parts = self._apart(marginals.epistemic), self._apart(marginals.aleatoric)
        self._own(likelihood, count * marginals.num_outputs, *parts)

    def _apart(self, values: Tensor) -> Tensor:
        """Values of positions (n L, ...) as (n, *positions, ...)."""
        return values.unflatten(0, (-1, *self._positions))

    @property
    def mean(self) -> Tensor:
        """Mean response, ``(n, *positions, D)``: the probabilities of classes."""
        return self._apart(self.marginals.mean)

    @property
    def probs(self) -> Tensor:
        """Probability of each class at each position, ``(n, *positions, C)``."""
        return self._apart(self.marginals.probs)

    @property
    def mode(self) -> Tensor:
        """The most probable response at each position, ``(n, *positions, ...)``."""
        return self._apart(self.marginals.mode)

    def entropy(self) -> Tensor:
        """Entropy of each position's response, ``(n, *positions, ...)``, nats."""
        return self._apart(self.marginals.entropy())

    def log_prob(self, value: Tensor) -> Tensor:
        """Sum over observed positions of the marginal log density, one number per input; see `Response.log_prob`."""
        y, n = torch.as_tensor(value, device=self._like.device), self.batch_shape[0]
        inner = self.batch_shape + self.event_shape
        front = max(y.dim() - len(inner), 0)
        if y.shape[front:] != inner:  # one number per position, or (n, D, *positions): the likelihood reads them
            front = 0
        canonical = self.likelihood.targets(y.reshape(-1, *y.shape[front + 1 :]), y.shape[: front + 1].numel(),
                                            self.num_outputs)
        if y.shape[front : front + 1] != self.batch_shape:
            raise TargetError(f"targets for {n} inputs", f"{len(y)}", "Pass one target for each predicted input.")
        rest = canonical.shape[1 + len(self._positions) :]
        return self.marginals.log_prob(canonical.reshape(*y.shape[:front], -1, *rest)).unflatten(-1, (n, -1)).sum(-1)

    def by_position(self, value: Tensor) -> tuple[Response, Tensor]:
        """The marginals, and targets (n, *positions, ...) as those of the n L positions."""
        canonical = self.likelihood.targets(value, self.batch_shape[0], self.num_outputs)
        return self.marginals, canonical.flatten(0, len(self._positions))

    def univariate(self) -> NumberMixture:
        """Those of all positions, ``(n, *positions, ...)``."""
        return self.marginals.univariate().reshaped(*self.mean.shape)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]  # torch declares a class attribute
        """Whether draws at each position are differentiable."""
        return self.marginals.has_rsample

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw responses, independently at each position."""
        return self._at_positions(self.marginals.sample(Size(sample_shape)), sample_shape)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """The same draws, differentiable in the parameters; refused where `has_rsample` is False."""
        return self._at_positions(self.marginals.rsample(Size(sample_shape)), sample_shape)

    def _at_positions(self, drawn: Tensor, sample_shape: Any) -> Tensor:
        """Draws of the marginals (*sample_shape, n L, ...) as (*sample_shape, n, *positions, ...)."""
        return drawn.unflatten(len(Size(sample_shape)), (-1, *self._positions))

    def tempered(self, temperature: float | Tensor) -> Response:
        """Each position's class probabilities to the power 1/T, normalized."""
        return type(self)(self.likelihood, self.marginals.tempered(temperature))  # type: ignore[arg-type]

    @classmethod
    def _join(cls, parts: Sequence[Self]) -> Self:
        first = parts[0].marginals
        return cls(parts[0].likelihood, type(first).join([part.marginals for part in parts]))  # type: ignore[arg-type]
