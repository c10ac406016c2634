"""The Gram matrix of whitened training rows for GPyTorch: SᵀKS with noise 1, with the posterior's Cholesky factor of B.

Log determinants and solves are exact for all `gpytorch.settings`: no conjugate gradients, no stochastic log
determinant, no second Cholesky factorization.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DenseLinearOperator, LinearOperator, RootLinearOperator, TriangularLinearOperator
from torch import Size, Tensor

from ntk_laplace.curvature import FunctionSpacePrecision
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.jacobian.gram import diagonal_blocks, gram, multiply
from ntk_laplace.posterior import Posterior
from ntk_laplace.runtime.lower_triangle import LowerTriangle


class WhitenedGram(LinearOperator):
    """SᵀKS over the training rows in the order n*R + r, or B = I + SᵀKS, at the posterior's current hyperparameters.

    The posterior's precision stores SᵀJ and the Cholesky factor of B. From the `anchor`, a hyperparameter, GPyTorch
    reads whether gradients are required. The size is N*R, and `noise` adds the identity.
    """

    def __init__(self, anchor: Tensor, *, posterior: Posterior, size: int, noise: bool = False) -> None:
        super().__init__(anchor, posterior=posterior, size=size, noise=noise)
        self._anchor, self._posterior, self._side, self._noise = anchor, posterior, size, noise

    def with_noise(self) -> WhitenedGram:
        """B = I + SᵀKS, whose factor is already computed."""
        return WhitenedGram(self._anchor, posterior=self._posterior, size=self._side, noise=True)

    @property
    def _precision(self) -> FunctionSpacePrecision:
        return self._posterior.fitted.function_space

    # --- exact operations that GPyTorch calls

    def inv_quad_logdet(
        self, inv_quad_rhs: Tensor | None = None, logdet: bool | None = False, reduce_inv_quad: bool | None = True
    ) -> tuple[Tensor, Tensor]:
        """Quadratic form in B⁻¹, and log det B with its exact gradient in every hyperparameter."""
        factor = self._factor("a quadratic form or a log determinant")
        quadratic = determinant = factor.like.new_zeros(())
        if inv_quad_rhs is not None:
            right = inv_quad_rhs.unsqueeze(-1) if inv_quad_rhs.dim() == 1 else inv_quad_rhs
            quadratic = factor.solve_lower(right).square().sum(-2)
            quadratic = quadratic.sum(-1) if reduce_inv_quad else quadratic
            # with the model's zero targets the quadratic form has no gradient
            quadratic = self._value_alone(quadratic) if bool(right.any()) else quadratic
        if logdet:
            determinant = self._posterior.log_det().to(factor.like)
        return quadratic, determinant

    def logdet(self) -> Tensor:
        """Log det B, with its exact gradient."""
        return self.inv_quad_logdet(logdet=True)[1]

    def solve(self, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
        """B⁻¹ right, or left B⁻¹ right."""
        right = right_tensor.unsqueeze(-1) if right_tensor.dim() == 1 else right_tensor
        solved = self._factor("a solve").solve(right)
        solved = self._value_alone(solved.squeeze(-1) if right_tensor.dim() == 1 else solved)
        return solved if left_tensor is None else left_tensor @ solved

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        """Samples (num_samples, N*R): for B from its factor, for SᵀKS as SᵀJ times weights drawn from the prior."""
        if self._noise:
            lower = self._lower()
            return (lower @ torch.randn(self._side, num_samples, dtype=self.dtype, device=self.device)).T
        precision = self._precision
        scale = precision.prior_precision.rsqrt()
        draws = []
        for _ in range(num_samples):
            weights = precision.shapes.named(scale * torch.randn_like(scale))
            draws.append(precision.weighted.jvp(weights).reshape(-1))
        return self._value_alone(torch.stack(draws))

    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        """B = L Lᵀ from the stored factor; SᵀKS from SᵀJ divided by √precision."""
        if self._noise:
            return RootLinearOperator(TriangularLinearOperator(self._lower()))
        precision = self._precision
        rows = precision.weighted.dense(precision.shapes).transpose(0, 1).flatten(0, 1)
        return RootLinearOperator(self._value_alone(rows * precision.prior_precision.rsqrt()))

    def to_dense(self) -> Tensor:
        """The matrix, (N*R, N*R); a backward pass through it raises an error."""
        matrix = gram(self._precision.weighted, self._precision.variances)
        if self._noise:
            matrix.diagonal().add_(1.0)
        return self._value_alone(matrix)

    # --- operations that the base class builds on

    def _cholesky(self, upper: bool = False) -> LinearOperator:
        lower = self._lower()
        return TriangularLinearOperator(lower.mT if upper else lower, upper=upper)

    def _lower(self) -> Tensor:
        return self._value_alone(self._factor("a Cholesky factor").to_dense())

    def _matmul(self, rhs: Tensor) -> Tensor:
        right = rhs.unsqueeze(-1) if rhs.dim() == 1 else rhs
        weighted = self._precision.weighted
        product = multiply(weighted, weighted, self._precision.variances, right)
        product = product + right if self._noise else product
        return product.squeeze(-1) if rhs.dim() == 1 else product

    def _diagonal(self) -> Tensor:
        blocks = diagonal_blocks(self._precision.weighted, self._precision.variances)
        return self._value_alone(blocks.diagonal(dim1=-2, dim2=-1).reshape(-1) + float(self._noise))

    def _size(self) -> Size:
        return Size((self._side, self._side))

    def _transpose_nonbatch(self) -> LinearOperator:
        return self

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        return DenseLinearOperator(self.to_dense())._getitem(row_index, col_index, *batch_indices)

    def _get_indices(self, row_index: Any, col_index: Any, *batch_indices: Any) -> Tensor:
        return self.to_dense()[row_index, col_index]

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        raise _no_gradient()

    def evaluate_kernel(self) -> LinearOperator:
        """Return this operator."""
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the linear algebra, not of the hyperparameters."""
        return self._posterior.f.dtype

    @property
    def device(self) -> torch.device:
        """Device of the factor."""
        return self._posterior.f.device

    def _factor(self, what: str) -> LowerTriangle:
        if not self._noise:
            raise UnsupportedError(f"{what} of B = I + SᵀKS", f"{what} of SᵀKS, which may be singular",
                                   "Pass the distribution through gp.likelihood first.")
        return self._precision.factor

    def _value_alone(self, value: Tensor) -> Tensor:
        return _Refuse.apply(value, self._anchor)


class _Refuse(torch.autograd.Function):
    """A value without a gradient in the hyperparameters: backward raises an error instead of returning zero."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, None]:
        raise _no_gradient()


def _no_gradient() -> UnsupportedError:
    return UnsupportedError(
        "gradients through the evidence", "a gradient through a matrix, solve or sample of whitened rows",
        "Use ExactMarginalLogLikelihood(gp.likelihood, gp) or ConditionalMarginalLogLikelihood(gp.likelihood, gp); "
        "posterior.loo_log_density() is the value of leave-one-out.",
    )


class WhitenedNormal(MultivariateNormal):
    """Zero-mean Gaussian over whitened rows, with an exact log density under all GPyTorch settings."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of rows (..., N*R), nats."""
        covariance = self.lazy_covariance_matrix
        if not isinstance(covariance, WhitenedGram):
            return super().log_prob(value)
        offset = value - self.loc
        columns = offset.reshape(-1, offset.shape[-1]).T
        quadratic, determinant = covariance.inv_quad_logdet(columns, logdet=True, reduce_inv_quad=False)
        constant = offset.shape[-1] * math.log(2 * math.pi)
        return -0.5 * (quadratic.reshape(offset.shape[:-1]) + determinant + constant)
