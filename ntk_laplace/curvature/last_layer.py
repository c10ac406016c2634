"""Function space of a last linear layer: the algebra of `output_factors` in the coordinates of `layer_inputs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature.function_space import FunctionSpacePrecision
from ntk_laplace.curvature.layer_inputs import LayerInputs
from ntk_laplace.curvature.output_factors import OutputFactors, output_parts
from ntk_laplace.jacobian import Jacobian, Outer
from ntk_laplace.jacobian.contractions import read_once
from ntk_laplace.jacobian.gram import Variances
from ntk_laplace.model.likelihoods import DiagonalForm
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.lower_triangle import LowerTriangle
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.reduction import collective_property
from ntk_laplace.runtime.resources import require_memory
from ntk_laplace.runtime.sampling import normal


def last_layer(rows: Jacobian, variances: Variances) -> Outer | None:
    """The rows of J as those of a last linear layer with one prior precision for each tensor; None if they are not."""
    block = rows.last_layer
    if block is None:
        return None
    read = read_once({name: variances[name] for name in block.names})
    return block if all(isinstance(value, float) for value in read.values()) else None


class LastLayerPrecision(FunctionSpacePrecision):
    """Factorization of B, one output at a time.

    Parameters
    ----------
    rows : Jacobian
        Rows of J at the training points, of which `last_layer` is not None.
    form : DiagonalForm
        Λ.
    root : callable
        Returns S (n, C, R) with S Sᵀ = Λ of some of the training points, for methods that need it.
    num_columns : int
        R.
    prior : GaussianPrior
    """

    many_variances = True

    def __init__(
        self, rows: Jacobian, form: DiagonalForm, root: Callable[[slice], Tensor], num_columns: int,
        prior: GaussianPrior,
    ) -> None:
        self._keep(rows, prior)
        self._root_of, self._columns = root, num_columns
        layer = last_layer(rows, self.variances)
        assert layer is not None
        self.form, self._inputs = form.to(torch.float64), LayerInputs.of(layer, self.variances)
        self._factors = OutputFactors.of(self._inputs.inside(rows), self.form, self._inputs.turn is not None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_factors" not in state:  # of an earlier version
            names = ("_features", "form", "_log_det", "_inner", "_covariances")
            state["_factors"] = OutputFactors(*(state[name] for name in names))
        if "_inputs" not in state:
            state["_inputs"] = LayerInputs(state["_layer"], state["_scale"], state["_turn"])
        vars(self).update(state)

    # --- evidence

    def log_det(self) -> Tensor:
        return self._factors.log_det.to(self.rows.dtype)

    @property
    def log_det_rounding(self) -> float:
        """0, not known: B is not formed in one piece."""
        return 0.0

    def log_det_at(self, factor: float) -> Tensor:
        own = self._factors
        found = OutputFactors.of(own.features * factor**-0.5, own.form, self._inputs.turn is not None, keep=False)
        return found.log_det.to(self.rows.dtype)

    def log_det_curve(self, factors: Tensor) -> Tensor:
        return torch.stack([self.log_det_at(factor) for factor in factors.tolist()])

    def spectrum(self) -> Tensor | None:
        """Eigenvalues of SᵀKS; None where one factorization for each setting is cheaper than its eigenvalues."""
        if self.num_rows > tuning.LAST_LAYER_SPECTRUM or not self._lists_eigenvalues(self.num_rows):
            return None
        return super().spectrum()

    @property
    def num_rows(self) -> int:
        """N R, the order of B."""
        return self.rows.num_examples * self._columns

    def effective_parameters(self) -> Tensor:
        by_input = self._inputs.whole(self._used())
        total = by_input.new_zeros(self._num_groups)
        weight, *bias = self._inputs.layer.names
        total[self._group_of[weight]] += by_input[: self._inputs.layer.a.shape[3]].sum()
        for name in bias:
            total[self._group_of[name]] += by_input[-1]
        return total

    def information_gained(self) -> Tensor:
        """Σ_g γ_g."""
        return self._used().diagonal().sum(dtype=torch.float64)

    def _used(self) -> Tensor:
        """I - P0^½ H⁻¹ P0^½ summed over the outputs, between the directions of the layer's inputs, (r, r)."""
        marginals = self._factors.marginals
        c, r = marginals.shape[:2]
        return c * torch.eye(r, dtype=marginals.dtype, device=marginals.device) - marginals.sum(0)

    def form_sensitivity(self) -> Tensor:
        """∂ log det B in the numbers of the `DiagonalForm`: V_nn's diagonal, and -2 V_nn u_n."""
        if self.form.vector is None:
            return self.variances_of_outputs(self.rows)
        parts = []
        for part in self._examples(self.rows, self.rows.num_examples):
            own, half = self._moments(self.rows.subset(part))
            u = self.form.vector[part]
            diagonal = own + half.square().sum(1)
            seen = torch.einsum("nic,nc->ni", half, u)
            parts.append(torch.stack([diagonal, -2.0 * (own * u + torch.einsum("nic,ni->nc", half, seen))]))
        return torch.cat(parts, 1)

    # --- H⁻¹

    def solve(self, vectors: Tensor) -> Tensor:
        flat = (vectors / self.prior_precision).reshape(-1, self.num_parameters)
        found, inputs = flat.clone(), self._inputs
        for part in panels(len(flat), 8 * self.form.diagonal.numel(), tuning.COVARIANCE_BYTES):
            whitened = inputs.gather(flat[part], self.shapes) / inputs.deviations
            solved = inputs.solved(whitened, self._factors.solve) * inputs.deviations
            inputs.scatter_(found[part], solved, self.shapes)
        return found.view_as(vectors)

    def multiply(self, vectors: Tensor) -> Tensor:
        """H v = P0 v + JᵀΛJ v for vectors (..., P)."""
        flat, inputs = vectors.reshape(-1, self.num_parameters), self._inputs.plain(self.rows)
        pushed = self._inputs.gather(flat, self.shapes) @ inputs.T  # (m, C, N)
        seen = self.form.diagonal.T * pushed
        if self.form.vector is not None:
            u = self.form.vector.T
            seen -= u * (u * pushed).sum(1, keepdim=True)
        total = torch.zeros_like(flat)
        self._inputs.scatter_(total, seen @ inputs, self.shapes)
        return total.addcmul_(flat, self.prior_precision).view_as(vectors)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws from N(0, H⁻¹), (count, P), by Matheron's rule: H⁻¹(P0 u - JᵀS ε), u ~ N(0, P0⁻¹)."""
        rows, like = self.rows, self.rows.f
        white = partial(normal, like=like, generator=generator)
        prior = white((count, self.num_parameters)) * self.prior_precision.rsqrt()
        noise = white((count, self.num_rows)).view(count, rows.num_examples, -1)
        inputs = self._inputs.plain(rows)
        seen = like.new_zeros(count, rows.f.shape[1], inputs.shape[1], dtype=torch.float64)
        for part in self._examples(rows, self._columns):
            drawn = torch.einsum("ncr,mnr->mcn", self._root_of(part).double(), noise[:, part].double())
            seen += drawn @ inputs[part]
        back = torch.zeros_like(prior)
        self._inputs.scatter_(back, seen, self.shapes)
        return self.solve(prior * self.prior_precision - back)

    # --- covariance of f

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        block = self._block_of(rows)
        if block is None:
            return super().covariance_blocks(rows)
        found = rows.f.new_empty(rows.num_examples, rows.num_cotangents, rows.num_cotangents)
        for part in self._examples(rows, self.rows.num_examples + rows.num_cotangents):
            own, half = self._moments(rows.subset(part))
            if block.constant:
                found[part] = (half.mT @ half + torch.diag_embed(own)).to(rows.dtype)
                continue
            b = block.b[:, part, 0, 0].transpose(0, 1).double()  # (n, K, C)
            half = half @ b.mT
            found[part] = (half.mT @ half + (b * own.unsqueeze(1)) @ b.mT).to(rows.dtype)
        return found

    def variances_of_outputs(self, rows: Jacobian) -> Tensor:
        block = self._block_of(rows)
        if block is None or not block.constant:
            return super().variances_of_outputs(rows)
        (features, outside), marginals = self._inputs.split(rows), self._factors.marginals
        found = outside.square().sum(1, keepdim=True).repeat(1, len(marginals))
        for part in output_parts(self.form, 3 * features.numel()):
            found[:, part] += ((features @ marginals[part]) * features).sum(2).T
        return found.to(rows.dtype)

    def covariance(self, rows: Jacobian) -> Tensor:
        block = self._block_of(rows)
        if block is None or not block.constant:
            return super().covariance(rows)
        (features, outside), (n, c) = self._inputs.split(rows), rows.f.shape
        _, half = self._moments(rows)
        half = half.permute(1, 0, 2).flatten(1)  # (N, n C)
        found = (half.T @ half).view(n, c, n, c)
        diagonal = found.diagonal(dim1=1, dim2=3)  # (n, n, C)
        for part in output_parts(self.form, features.numel() + n * n):
            diagonal[..., part] += (features @ self._factors.covariances[part] @ features.T).permute(1, 2, 0)
        diagonal += (outside @ outside.T).unsqueeze(2)
        return found.view(n * c, n * c).to(rows.dtype)

    def _block_of(self, rows: Jacobian) -> Outer | None:
        """The layer's rows, if these are rows of that layer."""
        block = rows.blocks[0] if len(rows.blocks) == 1 else None
        if not isinstance(block, Outer) or not block.matches(self._inputs.layer) or not block.single:
            return None
        return None if block.constant and block.b.shape[0] != block.b.shape[4] else block

    def _moments(self, rows: Jacobian) -> tuple[Tensor, Tensor]:
        """`OutputFactors.moments` at other rows, with what lies outside of the r coordinates."""
        features, outside = self._inputs.split(rows)
        own, half = self._factors.moments(features)
        return own + outside.square().sum(1, keepdim=True), half

    def _examples(self, rows: Jacobian, numbers: int) -> Iterator[slice]:
        """Slices of examples of which each takes so many numbers per output."""
        return panels(rows.num_examples, 16 * numbers * rows.f.shape[1], tuning.OUTPUTS_BYTES)

    # --- at the training points

    @cached_property
    def inverse_blocks(self) -> Tensor:
        """Diagonal blocks [B⁻¹]_nn = I - SᵀV_nnS, (N, R, R)."""
        n, r = self.rows.num_examples, self._columns
        require_memory(n * r * r * self.rows.dtype.itemsize, self.rows.f.device, "the diagonal blocks of B⁻¹", _REMEDY)
        found = self.rows.f.new_empty(n, r, r)
        eye = torch.eye(r, dtype=found.dtype, device=found.device)
        for part in self._examples(self.rows, n + 2 * r):
            root = self._root_of(part)
            found[part] = eye - root.mT @ self.covariance_blocks(self.rows.subset(part)) @ root
        return found

    # --- B in one piece, for methods that need it

    @collective_property
    def root(self) -> Tensor:
        """S, (N, C, R)."""
        n, c = self.rows.f.shape
        require_memory(n * c * self._columns * self.rows.dtype.itemsize, self.rows.f.device, "S of all points", _REMEDY)
        return self._root_of(slice(0, n))

    @collective_property
    def weighted(self) -> Jacobian:
        """Rows of SᵀJ."""
        return self.rows.weighted(self.root)

    @collective_property
    def factor(self) -> LowerTriangle:
        """L with B = L Lᵀ in one piece, (N*R, N*R), for methods that need the inverse of B.

        It has to fit in memory (MemoryBudgetError).
        """
        self._require_factor()
        return self._factorized(self.variances)

    def _require_factor(self) -> None:
        needed = LowerTriangle.predicted_bytes(self.num_rows, self._columns, self.rows.dtype, self.rows.f.device)
        require_memory(needed, self.rows.f.device, f"B in one piece, of order {self.num_rows:,}", _REMEDY)

    def require_inverse(self) -> None:
        """Refuse an inverse of B that does not fit in memory, before S is computed for it (MemoryBudgetError)."""
        if "factor" not in vars(self):
            self._require_factor()
        if "inverse" not in vars(self):
            needed = self.num_rows**2 * self.rows.dtype.itemsize
            require_memory(needed, self.rows.f.device, f"the inverse of B, of order {self.num_rows:,}", _REMEDY)


_REMEDY = ("Use a method that needs no inverse of B (the evidence, predictions, samples), fewer training points, or "
           'structure="kfac".')
