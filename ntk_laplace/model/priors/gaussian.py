"""The Gaussian prior: its precisions are hyperparameters, its mean is fixed."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Size, Tensor, nn

from ntk_laplace.errors import HyperparameterError, UnsupportedError, is_choice, is_number
from ntk_laplace.model.priors.grouping import Grouping
from ntk_laplace.model.priors.names import (
    GROUPS,
    Value,
    checked_input_groups,
    checked_mean,
    checked_precision,
    describe,
    flat_mean,
    names_of,
)
from ntk_laplace.runtime.parameter_layout import ParameterLayout


class GaussianPrior(nn.Module):
    """Gaussian prior ``θ ~ N(μ0, P0⁻¹)`` with diagonal P0: one precision per group of parameters.

    Weight decay δ on the summed loss finds the maximum a posteriori under precision δ.

    Parameters
    ----------
    precision : float, Tensor or mapping
        In inverse squared units of the weights: one for all groups, one per group (in the order of `group_names`), or
        a mapping from names of groups, or of parameters that are the only member of a group. With
        ``groups="parameter"`` a mapping from parameter names to a number or a tensor of the parameter's shape; with
        ``groups="input"`` the first weight's name stands for all its inputs, a number or one for each.
    mean : float, Tensor or mapping
        One for all, flat (P,) in the order of the network's parameters, or a mapping from parameter names to a number
        or a tensor of its shape. A mapping must contain every parameter, and may contain more.
    groups : {"all", "layer", "tensor", "input", "parameter"} or mapping
        Which parameters share a precision: all; those of one module (the group's name is the module's path, ""
        for the network itself); those of one tensor; none; or ``{group: [names of parameters or modules]}``, which
        must contain every parameter once. "input" is automatic relevance determination (Neal 1996): of the first
        parameter with two or more axes, (outputs, inputs, ...), the entries of each input share one, and so do the
        other parameters of each module.
    input_groups : sequence of int, optional
        Of ``groups="input"``: the number of each input's precision, all of 0, 1, ... up to the largest. Inputs with
        the same number share one, such as pixels of a region, or features that were made of one column
        (`PiecewiseLinearFeatures`). By default each input has its own.
    spread : float
        Of ``groups="input"``: standard deviation of the log precisions of the inputs around their mean, a hyperprior
        for searches of the precisions (`log_hyperprior`). Without it, ``float("inf")``, few data leave out inputs that
        matter.

    Attributes
    ----------
    log_precision : nn.Parameter, (G,), float64
        The hyperparameters; available at once for ``groups="all"``, else after `bind`.

    Raises
    ------
    HyperparameterError
        If a precision is not positive and finite, or a mean is not finite, or other groups have a spread or
        `input_groups`, or numbers of these are left out; in `bind`, if names or sizes do not match the network.
    """

    log_precision: nn.Parameter  # None before `bind`, unless there is one group
    _mean: Tensor
    input_groups: tuple[int, ...] | None = None  # in pickles of earlier versions too

    def __init__(
        self, precision: Value | Mapping[str, Value] = 1.0, mean: Value | Mapping[str, Value] = 0.0,
        groups: str | Mapping[str, Sequence[str]] = "all", spread: float = 1.0,
        input_groups: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if not (isinstance(groups, Mapping) or is_choice(groups, GROUPS)):
            raise HyperparameterError(f"groups among {GROUPS} or a mapping from group to names", f"{groups!r}",
                                      "Pass one of them.")
        if not (is_number(spread, above=0) or spread == math.inf):
            raise HyperparameterError("a positive spread", f"{spread!r}", 'Leave it out for 1, or pass float("inf").')
        if spread != 1.0 and groups != "input":
            raise HyperparameterError('groups="input" for a spread, which is that of its precisions', f"{groups!r}",
                                      "Leave the spread out.")
        self.spread = float(spread)
        self.input_groups = None if input_groups is None else checked_input_groups(input_groups, groups)
        self.groups = {g: names_of(g, m) for g, m in groups.items()} if isinstance(groups, Mapping) else groups
        self._given_precision, self._given_mean = checked_precision(precision), checked_mean(mean)
        self._grouping = Grouping(names=["all"] if groups == "all" else [])
        self._as_given: Tensor | None = None  # log precisions that the caller chose
        self.register_parameter("log_precision", None)
        if groups == "all":
            self._make(self._grouping, precision)

    # --- construction -----------------------------------------------------------------------------------

    @classmethod
    def of(cls, prior: GaussianPrior | None, groups: str = "all") -> GaussianPrior:
        """The given prior; for None a prior of precision 1 in these groups.

        Raises
        ------
        UnsupportedError
            If it is neither.
        """
        if prior is not None and not isinstance(prior, GaussianPrior):
            raise UnsupportedError("a prior object", repr(prior), "Use ntk_laplace.GaussianPrior(precision).")
        return cls(groups=groups) if prior is None else prior

    def bind(self, shapes: Mapping[str, Size]) -> GaussianPrior:
        """Determine groups and mean for parameters of these names and shapes; a repeated call changes nothing.

        Parameters
        ----------
        shapes : mapping
            From parameter name to shape, in the order that flattens θ.

        Returns
        -------
        GaussianPrior
            Itself.
        """
        layout = ParameterLayout.of(shapes)
        if self._grouping.shapes:
            return self._rebind(layout)
        if not layout:
            raise HyperparameterError("a network with at least one trainable parameter", "none",
                                      "Set requires_grad on some of them.")
        grouping = Grouping.of(self.groups, layout, self.input_groups)
        mean = flat_mean(self._given_mean, layout)
        if self.log_precision is None:
            self._make(grouping, self._given_precision)
        self._grouping = grouping
        self.register_buffer("_mean", mean.to(self.log_precision.device), persistent=False)
        return self

    def _rebind(self, shapes: ParameterLayout) -> GaussianPrior:
        own, other = list(self._grouping.shapes.items()), list(shapes.items())
        if own != other:
            expected, got = describe(self._grouping.shapes), describe(shapes)
            if expected == got:  # sizes alone would say that they are the same
                bound, given = next((a, b) for a, b in zip(own, other, strict=True) if a != b)
                got = f"one with {given[0]!r} {tuple(given[1])} in place of {bound[0]!r} {tuple(bound[1])}"
            raise HyperparameterError(f"the network this prior was bound to, {expected}", got,
                                      "Make a new GaussianPrior for each network.")
        return self

    @property
    def group_names(self) -> list[str]:
        """Names of the groups, in the order of `log_precision`."""
        return self._grouping.group_names

    @property
    def group_words(self) -> str:
        """Which parameters share a precision, in words that tell two priors apart."""
        return repr(self.groups) + ("" if self.input_groups is None else f" with input_groups={self.input_groups}")

    @property
    def shapes(self) -> ParameterLayout:
        """Shapes of the parameters by name, in the order that flattens θ."""
        return self._bound().shapes

    @property
    def num_parameters(self) -> int:
        """P, the number of parameters."""
        return self.shapes.num_parameters

    # --- precisions --------------------------------------------------------------------------------------

    @property
    def precision(self) -> Tensor:
        """Precisions δ, (G,), differentiable in `log_precision`. Assignable, with the values of `precision=`."""
        return self._log_precision().exp()

    @precision.setter
    def precision(self, value: Value | Mapping[str, Value]) -> None:
        value = checked_precision(value)
        if self.log_precision is None:
            self._given_precision = value
            return
        with torch.no_grad():
            self.log_precision.copy_(self._grouping.values(value).log())
        self._note_as_given()

    @property
    def as_given(self) -> bool:
        """Whether the precisions are those that the caller passed or assigned: False once they were optimized."""
        return self._as_given is None or torch.equal(self._as_given, self._log_precision().detach().cpu())

    def group_of(self, name: str) -> int | Tensor:
        """Index of a parameter's precision in `log_precision`; where it has several, those of its entries, (numel,)."""
        return self._bound().place(name)

    def group_counts(self) -> Tensor:
        """Count the parameters in each group, (G,), int64."""
        return self._bound().counts(self._log_precision().device)

    def tensor_precision(self, name: str) -> Tensor:
        """Precision of a parameter, 0-d; flat (numel,) where it has several. Differentiable."""
        return self._log_precision()[self.group_of(name)].exp()

    def flat_precision(self) -> Tensor:
        """Diagonal of P0, (P,), in the order of the network's parameters. Differentiable."""
        return self._bound().expand(self.precision)

    def flat_groups(self) -> Tensor:
        """Index of the precision of each entry of θ in `log_precision`, (P,), int64."""
        return self._bound().expand(torch.arange(self._log_precision().numel(), device=self._log_precision().device))

    @torch.no_grad()
    def variances(self) -> dict[str, Tensor]:
        """Diagonal of P0⁻¹ by parameter name: one number (1,), or one for each entry (p,)."""
        return {name: self.tensor_precision(name).reciprocal().reshape(-1) for name in self.shapes}

    def log_det(self) -> Tensor:
        """Log determinant of P0. Differentiable."""
        return (self.group_counts() * self._log_precision()).sum()

    @property
    def inputs(self) -> slice:
        """Indices of the inputs' precisions in `log_precision`, for ``groups="input"``; of none for others."""
        return self._bound().inputs

    @property
    def precision_of_inputs(self) -> Tensor:
        """Precision of each input of the first weight, (inputs,), for ``groups="input"``; of none for others."""
        return self.precision[list(self._bound().of_inputs)]

    @property
    def has_hyperprior(self) -> bool:
        """Whether `log_hyperprior` depends on the precisions."""
        return self.groups == "input" and math.isfinite(self.spread)

    def log_hyperprior(self) -> Tensor:
        """``-½ Σ_i (log δ_i - m)²/spread²`` over the inputs of ``groups="input"``, with their mean m; 0 for others.

        Searches of the precisions add it to the evidence; the evidence itself does not contain it. 0-d, nats.
        Differentiable.
        """
        logs = self._log_precision()[self.inputs]
        if not self.has_hyperprior:
            return logs.new_zeros(())
        return logs.var(correction=0) * (-0.5 * len(logs) / self.spread**2)

    def hyperprior_slope(self) -> Tensor:
        """Derivatives of `log_hyperprior` in the log precisions, (G,), without a graph."""
        logs = self._log_precision().detach()
        slope = torch.zeros_like(logs)
        if self.has_hyperprior:
            own = logs[self.inputs]
            slope[self.inputs] = (own.mean() - own) / self.spread**2
        return slope

    # --- mean and energy -----------------------------------------------------------------------------------

    def flat_mean(self) -> Tensor:
        """μ0, (P,), float64."""
        return self._mean.expand(self.num_parameters)

    def group_distances(self, theta: Tensor) -> Tensor:
        """``‖θ_g - μ0_g‖²`` for each group, (G,), float64, of flat θ (P,). Differentiable."""
        if theta.shape != (self.num_parameters,):
            raise HyperparameterError(f"flat weights of shape ({self.num_parameters},)", f"shape {tuple(theta.shape)}",
                                      "Concatenate all parameters in the network's order.")
        return self._grouping.sums((theta.double() - self.flat_mean().to(theta.device)).square())

    def energy(self, theta: Tensor) -> Tensor:
        """``½ (θ-μ0)ᵀ P0 (θ-μ0)`` of flat θ (P,), nats, float64. Differentiable in θ and the precisions."""
        return 0.5 * (self.precision.to(theta.device) * self.group_distances(theta)).sum()

    def extra_repr(self) -> str:
        """Groups and precisions, for `repr`."""
        kind = self.groups if isinstance(self.groups, str) else list(self.groups)
        count = "not bound" if self.log_precision is None else f"{self.log_precision.numel()} precision(s)"
        return f"groups={kind!r}, {count}"

    # --- storage -----------------------------------------------------------------------------------------------

    def scaled(self, factor: float) -> GaussianPrior:
        """A copy with all precisions multiplied by a factor."""
        found, given = copy.deepcopy(self), self._given_precision
        if found.log_precision is None:
            found._given_precision = {g: v * factor for g, v in given.items()} if isinstance(given, Mapping) else (
                given * factor)
        else:
            found.precision = self.precision.detach() * factor
        return found

    def record(self) -> dict[str, Any]:
        """A bound prior as plain containers of tensors."""
        groups = self.groups if isinstance(self.groups, str) else {g: list(names) for g, names in self.groups.items()}
        mean = self.flat_mean()
        same = bool((mean == mean[0]).all())
        return {
            "groups": groups, "spread": self.spread, "input_groups": self.input_groups,
            "mean": float(mean[0]) if same else mean.clone(),
            "log_precision": self._log_precision().detach().clone(), "as_given": self.as_given,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], shapes: Mapping[str, Size]) -> GaussianPrior:
        """Restore a prior from its record, bound to parameters of these names and shapes."""
        prior = cls(mean=record["mean"], groups=record["groups"], spread=record.get("spread", 1.0),
                    input_groups=record.get("input_groups")).bind(shapes)
        with torch.no_grad():
            prior._log_precision().copy_(record["log_precision"])
        if record.get("as_given", True):  # older records do not know
            prior._note_as_given()
        return prior

    # --- internal ----------------------------------------------------------------------------------------------

    def _make(self, grouping: Grouping, precision: Value | Mapping[str, Value]) -> None:
        self.log_precision = nn.Parameter(grouping.values(precision).log())
        self._note_as_given()

    def _note_as_given(self) -> None:
        self._as_given = self.log_precision.detach().cpu().clone()

    def _bound(self) -> Grouping:
        if not self._grouping.shapes:
            raise HyperparameterError("a prior that knows the network's parameters", "one that was not bound",
                                      "Call prior.bind(shapes) with names and shapes, as laplace() does.")
        return self._grouping

    def _log_precision(self) -> nn.Parameter:
        if self.log_precision is None:
            self._bound()
        return self.log_precision
