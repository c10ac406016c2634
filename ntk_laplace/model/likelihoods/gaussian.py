"""Gaussian: real responses with a noise variance (one, per output or per point) or a full noise covariance."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Size, Tensor, nn

from ntk_laplace.errors import HyperparameterError, UnsupportedError, require_choice
from ntk_laplace.model.likelihoods.base import Likelihood
from ntk_laplace.model.likelihoods.covariances import marginal_factor
from ntk_laplace.model.likelihoods.diagonal_form import DiagonalForm
from ntk_laplace.model.likelihoods.noise import (
    KINDS,
    filled,
    kind_of,
    numbers,
    one_number,
    positive,
    possible_kinds,
    unit_factors,
)
from ntk_laplace.model.likelihoods.per_output import PerOutput
from ntk_laplace.model.likelihoods.registry import register_likelihood
from ntk_laplace.model.likelihoods.responses import MultivariateNormalResponse, NormalResponse, Response
from ntk_laplace.model.likelihoods.targets import require_columns
from ntk_laplace.runtime.scalars import scalar


@register_likelihood
class Gaussian(PerOutput):
    """Gaussian likelihood ``y = f + ε``, where ε has the variance `noise` ([T20] Table 2.1).

    Targets are real numbers of shape (N, C), or (N,) for one output.

    Parameters
    ----------
    noise : float or Tensor
        A *variance*, in squared units of y: one number, one per output (C,), one per point (N,) or (N, C), or
        the covariance of the outputs (C, C).
    kind : {"auto", "scalar", "output", "point", "covariance"}
        What `noise` means; needed only if its shape is ambiguous, as when N = C.
    missing : str, optional
        "nan": a NaN target is missing. The example's density is then the marginal density of its other outputs. By
        default a NaN is an error.

    Attributes
    ----------
    log_noise : nn.Parameter
        Log variances in the shape of `noise`; for a covariance log D in Σ = U diag(D) Uᵀ.
    coupling : nn.Parameter or None
        For a covariance, the entries of the unit lower triangular U below its diagonal, row by row.

    Raises
    ------
    HyperparameterError
        If a variance is not positive, a covariance is not positive definite, the shape fits no kind, or `missing` has
        another value.
    """

    is_density = scales_noise = True
    log_noise: nn.Parameter
    coupling: nn.Parameter | None

    def __init__(self, noise: float | Tensor = 1.0, kind: str = "auto", missing: str | None = None) -> None:
        super().__init__(missing)
        require_choice(kind, KINDS, f"a kind among {KINDS}", error=HyperparameterError)
        values = numbers(noise)
        self._kinds = (kind,) if kind != "auto" else possible_kinds(values)
        if "scalar" in self._kinds:
            values = one_number(values)
        if "covariance" in self._kinds:
            log_noise, coupling = unit_factors(values)
            self.log_noise, self.coupling = nn.Parameter(log_noise), nn.Parameter(coupling)
        else:
            self.log_noise = nn.Parameter(positive(values).log())
            self.register_parameter("coupling", None)

    # --- the hyperparameter -----------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """What the noise means; "auto" until `bind` if its shape is ambiguous."""
        return "auto" if self._kinds == ("output", "point") else self._kinds[0]

    @property
    def noise(self) -> Tensor:
        """Variance(s), in the given shape; assign to change them in place."""
        if self.coupling is None:
            return scalar(self.log_noise.exp())
        factor = self._factor(self.log_noise)
        return factor @ factor.mT

    @noise.setter
    def noise(self, value: float | Tensor) -> None:
        values = numbers(value)
        with torch.no_grad():
            if self.coupling is None:
                self.log_noise.copy_(filled(positive(values), self.log_noise.shape).log())
            else:
                size = len(self.log_noise)
                if values.numel() == 1:
                    values = one_number(positive(values)) * torch.eye(size, dtype=values.dtype, device=values.device)
                log_noise, coupling = unit_factors(filled(values, Size((size, size))))
                self.log_noise.copy_(log_noise)
                self.coupling.copy_(coupling)

    def bind(self, num_examples: int, num_outputs: int) -> None:
        """Determine what the noise means for N examples and C outputs, and check its shape."""
        self._kinds = (self._resolve(num_examples, num_outputs),)

    def at(self, index: Tensor | slice) -> Likelihood:
        """Return this likelihood; for noise per point that of a subset of points, differentiable in `log_noise`.

        Without a graph it has a parameter of its own.
        """
        if self.kind != "point":
            return self
        part, found = Gaussian(torch.ones(1, device="cpu"), "point", self.missing), self.log_noise[index]
        if found.requires_grad:
            del part.log_noise
            vars(part)["log_noise"] = found  # a plain tensor: gradients reach this module's parameter
        else:
            part.log_noise = nn.Parameter(found.detach().clone(), self.log_noise.requires_grad)
        return part

    def for_new_points(self) -> Likelihood:
        """Return this likelihood; with noise per point, which belongs to the training points, raise an error."""
        if self.kind == "point":
            raise self._no_noise("new points")
        return self

    def scaled_noise(self, factor: float) -> Likelihood:
        """Return a copy with all variances, or the covariance, multiplied by `factor`."""
        scaled = copy.deepcopy(self)
        with torch.no_grad():
            scaled.log_noise.add_(math.log(factor))  # Σ = U diag(D) Uᵀ scales with D
        return scaled

    def log_curvature_scale(self) -> Tensor | None:
        """Return -log σ² for a scalar variance, where Λ = I/σ²."""
        return -self.log_noise if self.kind == "scalar" else None

    def log_residual_scale(self) -> Tensor | None:
        """Return that of the curvature: ``r = Λ (y - f)``."""
        return self.log_curvature_scale()

    # --- the density and its derivatives in f ---------------------------------------------------------------

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log density of each example's observed targets, (N,), nats."""
        # log N(y; f, Σ) = -½ (y - f)ᵀ Σ⁻¹ (y - f) - ½ log det Σ - C/2 log 2π
        error, there = self._error(f, y)
        distance = (self._solved(error, f, there) * error).sum(-1)
        count = f.shape[-1] if there is None else there.sum(-1).to(f)
        return -0.5 * (distance + (self._log_det(f, there) + count * math.log(2 * math.pi)))

    def density_by_scale(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """The density without its exponent, the number of observed targets, and ``(y - f)ᵀ Σ⁻¹ (y - f)``."""
        if type(self) is not Gaussian or self.kind != "scalar":
            return None  # a subclass may override the density
        error, there = self._error(f, y)
        count = torch.full_like(f[:, 0], f.shape[-1]) if there is None else there.sum(-1).to(f)
        constant = -0.5 * (self._log_det(f, there) + count * math.log(2 * math.pi))
        return constant, count, (self._solved(error, f, there) * error).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """``Σ⁻¹ (y - f)`` ([T20] Table 2.1) over the observed targets, 0 for the others, (N, C)."""
        error, there = self._error(f, y)
        return self._solved(error, f, there)

    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """``Σ⁻¹`` ([T20] Table 2.1) over the observed targets, 0 for the others, (N, C, C)."""
        if self.coupling is None:
            return torch.diag_embed(self._known((-self._log_variance(f)).exp(), y))
        root = self.root(f, y)
        return root @ root.mT

    def diagonal_form(self, f: Tensor, y: Tensor | None = None) -> DiagonalForm | None:
        """d = 1/σ² of independent noise, 0 where a target is missing; None for correlated noise."""
        if type(self) is not Gaussian or self.coupling is not None:
            return None  # a subclass may override the curvature
        return DiagonalForm.of(self._known((-self._log_variance(f)).exp(), y).expand(f.shape))

    def root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """``L⁻ᵀ`` with ``L Lᵀ = Σ`` over the observed targets, 0 for the others, (N, C, C)."""
        if self.coupling is None:
            return torch.diag_embed(self._known((-0.5 * self._log_variance(f)).exp(), y))
        there = None if y is None else self.observed(y)
        factor = self._factor(f) if there is None else self._marginal_factor(f, there)
        eye = torch.eye(f.shape[1], dtype=f.dtype, device=f.device)
        root = torch.linalg.solve_triangular(factor.mT, eye, upper=True)
        return root.expand(len(f), -1, -1) if there is None else root * there.unsqueeze(-1)

    def left_inverse(self, f: Tensor) -> Tensor | None:
        """``Lᵀ`` with ``L Lᵀ = Σ``, (N, C, C)."""
        if type(self) is not Gaussian:
            return None  # a subclass may override the curvature
        if self.coupling is None:
            return torch.diag_embed((0.5 * self._log_variance(f)).exp())
        return self._factor(f).mT.expand(len(f), -1, -1)

    # --- the response -----------------------------------------------------------------------------------------

    def mean(self, f: Tensor) -> Tensor:
        """Return f itself, (N, C)."""
        return f

    def mean_jacobian(self, f: Tensor) -> Tensor:
        """Identity, (N, C, C)."""
        return torch.eye(f.shape[-1], dtype=f.dtype, device=f.device).expand(*f.shape, -1)

    def response_covariance(self, f: Tensor) -> Tensor:
        """Σ, the noise, (N, C, C)."""
        if self.coupling is None:
            return torch.diag_embed(self._log_variance(f).exp())
        factor = self._factor(f)
        return (factor @ factor.mT).expand(len(f), -1, -1)

    def response_variance(self, f: Tensor) -> Tensor:
        """Diagonal of Σ, (N, C)."""
        if self.coupling is None:
            return self._log_variance(f).exp()
        return super().response_variance(f)

    def additive_noise(self, f: Tensor) -> Tensor:
        """Σ, (N, C, C)."""
        return self.response_covariance(f)

    def distribution(self, f: Tensor, scalar: bool = False) -> Response:
        """Normal response given f."""
        return self.integrate(f, f.new_zeros(*f.shape, f.shape[-1]), scalar)

    def average(self, f: Tensor, scalar: bool = False) -> Response:
        """Average over samples of f (S, n, C): an equal mixture of normals."""
        if len(self._kinds) > 1:
            self.bind(*f.shape[1:])  # the mixture looks up each sample's noise by index
        return super().average(f, scalar)

    def integrate(self, mean: Tensor, covariance: Tensor, scalar: bool = False) -> Response:
        """Normal response for f ~ N(mean, covariance); its covariance is the sum of latent covariance and noise."""
        noise = self.response_covariance(mean)
        if scalar:
            parts = (mean.squeeze(-1), covariance.flatten(), noise.flatten())
            return NormalResponse(self, *parts)
        return MultivariateNormalResponse(self, mean, covariance, noise)

    def expected(self, mean: Tensor, covariance: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """``log p(y given mean) - tr(Λ V)/2``; r is linear in f and Λ constant."""
        if type(self) is not Gaussian:
            return None  # a subclass may override the density
        curvature = self.curvature(mean, y)
        spread = (curvature * covariance).sum((-2, -1))
        return self.log_prob(mean, y) - 0.5 * spread, self.residual(mean, y), curvature

    def linearize(self, mean: Tensor, covariance: Tensor, scalar: bool = False) -> Response:
        """Return the exact response, because the link is the identity."""
        return self.integrate(mean, covariance, scalar)

    def record(self) -> dict[str, Any]:
        """The noise and its kind, and the mark of missing targets."""
        return {"noise": self.noise.detach(), "kind": self.kind, **super().record()}

    # --- private --------------------------------------------------------------------------------------------------

    def _error(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """``y - f``, zero where a target is missing, and the mask of observed targets (None if all are observed)."""
        require_columns(f, y)
        there = self.observed(y)
        if there is None:
            return y.to(f) - f, None
        return torch.where(there, y.to(f), f) - f, there

    def _solved(self, error: Tensor, f: Tensor, there: Tensor | None) -> Tensor:
        """``Σ⁻¹ error`` over the observed targets, (N, C)."""
        if self.coupling is None:
            return error * (-self._own_log_variance(f)).exp()
        if there is None:
            return torch.cholesky_solve(error.mT, self._factor(f)).mT
        return torch.cholesky_solve(error.unsqueeze(-1), self._marginal_factor(f, there)).squeeze(-1)

    def _marginal_factor(self, f: Tensor, there: Tensor) -> Tensor:
        """Cholesky factors of Σ over the observed targets and of the identity over the others, (N, C, C)."""
        factor = self._factor(f)
        return marginal_factor(factor @ factor.mT, there)

    def _log_variance(self, f: Tensor) -> Tensor:
        """Log variances for each point and output of f, (N, C)."""
        return self._own_log_variance(f).expand(f.shape)

    def _own_log_variance(self, f: Tensor) -> Tensor:
        """The log variances, in a shape that broadcasts to (N, C)."""
        if self.kind == "point" and len(self.log_noise) != len(f):
            raise self._no_noise(f"{len(f)} other points")
        kind = self._resolve(*f.shape)
        values = self.log_noise.to(f)
        column = kind == "point" and values.dim() == 1
        return values.unsqueeze(1) if column else values

    def _factor(self, like: Tensor) -> Tensor:
        """Cholesky factor U diag(√D) of the covariance, in the dtype and device of `like`, outputs (N, C) if any."""
        assert self.coupling is not None
        size = len(self.log_noise)
        if like.dim() == 2:
            kind_of((size, size), ("covariance",), *like.shape)
        rows, columns = torch.tril_indices(size, size, -1, device=like.device)
        unit = torch.eye(size, dtype=like.dtype, device=like.device)
        return unit.index_put((rows, columns), self.coupling.to(like)) * (0.5 * self.log_noise.to(like)).exp()

    def _log_det(self, f: Tensor, there: Tensor | None) -> Tensor:
        if self.coupling is None:
            values = self._log_variance(f)
            return (values if there is None else values * there).sum(-1)
        if there is None:
            return self.log_noise.to(f).sum()  # det U = 1
        return 2.0 * self._marginal_factor(f, there).diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def _resolve(self, num_examples: int, num_outputs: int) -> str:
        """What the noise means for N examples and C outputs; see `kind_of`."""
        size = tuple(self.log_noise.shape)
        shape = size if self.coupling is None else (*size, *size)
        return kind_of(shape, self._kinds, num_examples, num_outputs)

    def _no_noise(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"the {len(self.log_noise)} points that the noise per point was given for", what,
                                "Give the noise there, as predict(x, likelihood=ntkl.Gaussian(noise=...)) does.")
