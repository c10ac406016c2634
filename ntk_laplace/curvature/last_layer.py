"""Function space of a last linear layer: K = k ⊗ I_C, factored one output at a time.

With Λ_n = diag(d_n) - u_n u_nᵀ, u_nc = √d_nc v_nc, D_c = diag(d_nc) over the examples n, and k = X Xᵀ ([RW06] 3.3)

    B_c = I + D_c^½ k D_c^½,    M = I - Σ_c V_c (I - B_c⁻¹) V_c,    log det B = Σ_c log det B_c + log det M:

C matrices and one more instead of one matrix of order N R. X contains the layer's inputs and a one, times their prior
deviations, in r = min(N, D + 1) coordinates. Of each output only G_c = (I + XᵀD_cX)⁻¹, (r, r), is kept:
det B_c = 1/det G_c, and in these coordinates

    H⁻¹ = blockdiag(G_c) + [G_cXᵀU_c M⁻¹ U_c'XG_c'],    V(x) = φᵀ H⁻¹ φ.

The algebra is in float64: M is a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial

import torch
from torch import Tensor

from ntk_laplace.curvature.function_space import FunctionSpacePrecision, prior_variances
from ntk_laplace.curvature.posterior_precision import PosteriorPrecision
from ntk_laplace.jacobian import Jacobian, Outer
from ntk_laplace.jacobian.contractions import read_once
from ntk_laplace.jacobian.gram import Variances
from ntk_laplace.model.likelihoods import DiagonalForm
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import add_outer_lower_, cholesky_log_det, cholesky_of, mirror_lower_
from ntk_laplace.runtime.lower_triangle import LowerTriangle, require_definite
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.reduction import collective_property
from ntk_laplace.runtime.resources import require_memory
from ntk_laplace.runtime.sampling import normal

__all__ = ["LastLayerPrecision", "last_layer"]


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
    shapes : mapping of str to torch.Size
        The parameters, in order.
    """

    many_variances = True

    def __init__(
        self, rows: Jacobian, form: DiagonalForm, root: Callable[[slice], Tensor], num_columns: int,
        prior: GaussianPrior, shapes: Mapping[str, torch.Size],
    ) -> None:
        PosteriorPrecision.__init__(self, prior, shapes, rows.f)  # B is not formed in one piece
        self.rows, self._root_of, self._columns = rows, root, num_columns
        self.variances: Variances = read_once(prior_variances(prior, shapes))
        self._group_of = {name: prior.group_of(name) for name in shapes}
        layer = last_layer(rows, self.variances)
        if layer is None:
            raise ValueError("these are no rows of a last linear layer")
        self._layer, self.form = layer, form.to(torch.float64)
        self._scale = self._deviations(self.variances)
        features = self._inputs(rows) * self._scale
        self._turn = torch.linalg.qr(features.T).Q if len(features) < features.shape[1] else None
        self._features = features if self._turn is None else features @ self._turn  # X, (N, r)
        self._log_det, self._inner, self._covariances = self._factored(1.0, keep=True)

    # --- the factorization

    def _deviations(self, variances: Variances) -> Tensor:
        """Prior deviations of the layer's inputs and of the bias, (D + 1,)."""
        weight, *bias = (float(variances[name]) ** 0.5 for name in self._layer.names)
        return self._layer.a.new_tensor([weight] * self._layer.a.shape[3] + bias, dtype=torch.float64)

    def _inputs(self, rows: Jacobian) -> Tensor:
        """The layer's inputs, and a one if there is a bias, (n, D + 1)."""
        (block,) = rows.blocks
        assert isinstance(block, Outer)
        return block.inputs[:, 0, 0].double()

    def _factored(self, factor: float, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """log det B, the factor of M, and all G_c (C, r, r) if they are kept, with prior precisions times `factor`."""
        x, d = self._features * factor**-0.5, self.form.diagonal
        (n, r), c = x.shape, d.shape[1]
        total, kept = x.new_zeros((), dtype=torch.float64), x.new_empty(c if keep else 0, r, r)
        inner, direct = x.new_zeros(n, n), n < len(self._scale)
        eye = torch.eye(r, dtype=x.dtype, device=x.device)
        for part in self._parts(2 * r * (r + n) + 3 * n * n * direct):
            lower = _cholesky((x.T * d.T[part].unsqueeze(1)) @ x + eye)  # of XᵀD_cX + I
            total = total + 2.0 * lower.diagonal(dim1=1, dim2=2).log().sum()
            if self.form.vector is not None:
                self._add_inner_(inner, x, lower, part, direct)
            if keep:
                kept[part] = torch.cholesky_inverse(lower)
        if self.form.vector is None:
            return total, inner, kept
        inner.diagonal().add_(1.0 - self._unit.square().sum(1) if direct else 1.0)
        inner = cholesky_of(mirror_lower_(inner))
        return total + cholesky_log_det(inner), inner, kept

    def _add_inner_(self, inner: Tensor, x: Tensor, lower: Tensor, part: slice, direct: bool) -> None:
        """Add V_cB_c⁻¹V_c of some outputs, lower triangle; by the Woodbury identity -U_cX G_c XᵀU_c, less V_c²."""
        n, r = x.shape
        if not direct:
            half = torch.linalg.solve_triangular(lower, x.T.expand(len(lower), r, n), upper=False)
            half *= self._vector.T[part].unsqueeze(1)
            add_outer_lower_(inner, half.flatten(0, 1), scale=-1.0)
            return
        scale = self.form.diagonal.T[part].sqrt()
        small = (x @ x.T) * scale.unsqueeze(1) * scale.unsqueeze(2)
        small.diagonal(dim1=1, dim2=2).add_(1.0)
        unit = self._unit.T[part]
        inner += (torch.cholesky_inverse(_cholesky(small)) * unit.unsqueeze(1) * unit.unsqueeze(2)).sum(0)

    @property
    def _vector(self) -> Tensor:
        """u, (N, C); zero if Λ is diagonal."""
        return torch.zeros_like(self.form.diagonal) if self.form.vector is None else self.form.vector

    @cached_property
    def _unit(self) -> Tensor:
        """v = u/√d, (N, C), 0 where d is."""
        root = self.form.diagonal.sqrt()
        return torch.where(root > 0, self._vector / root, 0.0)

    def _parts(self, numbers: int) -> Iterator[slice]:
        """Slices of outputs that take so many numbers each."""
        return panels(self.form.diagonal.shape[1], 8 * numbers, tuning.OUTPUTS_BYTES)

    # --- evidence

    def log_det(self) -> Tensor:
        """log det B."""
        return self._log_det.to(self.rows.dtype)

    @property
    def log_det_rounding(self) -> float:
        """0, not known: B is not formed in one piece."""
        return 0.0

    def log_det_at(self, factor: float) -> Tensor:
        """log det B with all prior precisions multiplied by a factor."""
        return self._factored(factor, keep=False)[0].to(self.rows.dtype)

    def log_det_curve(self, factors: Tensor) -> Tensor:
        """log det B with all prior precisions multiplied by each of `factors` (m,); (m,)."""
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

    @cached_property
    def marginals(self) -> Tensor:
        """Covariance of the weights of each output, G_c + G_cXᵀU_c M⁻¹ U_cXG_c, (C, r, r)."""
        require_memory(self._covariances.nbytes, self.rows.f.device, "the covariance of each output's weights",
                       "Use fewer training points, or a structured posterior.")
        found = self._covariances.clone()
        if self.form.vector is not None:
            (n, r) = self._features.shape
            for part in self._parts(2 * n * r):
                half = self._vector.T[part].unsqueeze(2) * (self._features @ self._covariances[part])  # (m, N, r)
                half = torch.linalg.solve_triangular(self._inner, half, upper=False)
                found[part].baddbmm_(half.mT, half)
        return found

    def effective_parameters(self) -> Tensor:
        """γ_g = n_g - δ_g tr_g(H⁻¹) for each prior group, (G,)."""
        used = self._used()
        by_input = used.diagonal() if self._turn is None else ((self._turn @ used) * self._turn).sum(1)
        total = by_input.new_zeros(self._num_groups)
        weight, *bias = self._layer.names
        total[self._group_of[weight]] += by_input[: self._layer.a.shape[3]].sum()
        for name in bias:
            total[self._group_of[name]] += by_input[-1]
        return total

    def information_gained(self) -> Tensor:
        """Σ_g γ_g."""
        return self._used().diagonal().sum(dtype=torch.float64)

    def _used(self) -> Tensor:
        """I - P0^½ H⁻¹ P0^½ summed over the outputs, between the directions of the layer's inputs, (r, r)."""
        c, r = self.marginals.shape[:2]
        return c * torch.eye(r, dtype=self.marginals.dtype, device=self.marginals.device) - self.marginals.sum(0)

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
        """H⁻¹ v for vectors (..., P)."""
        flat = (vectors / self.prior_precision).reshape(-1, self.num_parameters)
        found = flat.clone()
        for part in panels(len(flat), 8 * self.form.diagonal.numel(), tuning.COVARIANCE_BYTES):
            self._scatter_(found[part], self._solved_whitened(self._gather(flat[part]) / self._scale) * self._scale)
        return found.view_as(vectors)

    def multiply(self, vectors: Tensor) -> Tensor:
        """H v = P0 v + JᵀΛJ v for vectors (..., P)."""
        flat, inputs = vectors.reshape(-1, self.num_parameters), self._inputs(self.rows)
        pushed = self._gather(flat) @ inputs.T  # (m, C, N)
        seen, u = self.form.diagonal.T * pushed, self._vector.T
        seen -= u * (u * pushed).sum(1, keepdim=True)
        total = torch.zeros_like(flat)
        self._scatter_(total, seen @ inputs)
        return total.addcmul_(flat, self.prior_precision).view_as(vectors)

    def _gather(self, flat: Tensor) -> Tensor:
        """The layer's entries of vectors (m, P) as (m, C, D + 1)."""
        named, (weight, *bias) = self.shapes.parts(flat), self._layer.names
        columns = [named[weight].view(len(flat), -1, self._layer.a.shape[3])]
        return torch.cat(columns + [named[name].unsqueeze(2) for name in bias], 2).double()

    def _scatter_(self, flat: Tensor, values: Tensor) -> None:
        """Write (m, C, D + 1) to the layer's entries of vectors (m, P)."""
        named, (weight, *bias) = self.shapes.parts(flat), self._layer.names
        named[weight].copy_(values[..., : self._layer.a.shape[3]].flatten(1))
        for name in bias:
            named[name].copy_(values[..., -1])

    def _solved_whitened(self, values: Tensor) -> Tensor:
        """P0^½ H⁻¹ P0^½ v for v (m, C, D + 1)."""
        inside = values if self._turn is None else values @ self._turn
        solved = self._by_output(inside)
        if self.form.vector is not None:
            u = self._vector.T
            seen = (u * (solved @ self._features.T)).sum(1)  # (m, N)
            back = torch.cholesky_solve(seen.T, self._inner).T.unsqueeze(1) * u
            solved = solved + self._by_output(back @ self._features)
        return solved if self._turn is None else values + (solved - inside) @ self._turn.T

    def _by_output(self, values: Tensor) -> Tensor:
        """G_c v_c for v (m, C, r)."""
        return (values.transpose(0, 1) @ self._covariances).transpose(0, 1)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws from N(0, H⁻¹), (count, P), by Matheron's rule: H⁻¹(P0 u - JᵀS ε), u ~ N(0, P0⁻¹)."""
        rows, like = self.rows, self.rows.f
        white = partial(normal, like=like, generator=generator)
        prior = white((count, self.num_parameters)) * self.prior_precision.rsqrt()
        noise = white((count, self.num_rows)).view(count, rows.num_examples, -1)
        seen = like.new_zeros(count, *self._covariances.shape[:1], len(self._scale), dtype=torch.float64)
        inputs = self._inputs(rows)
        for part in self._examples(rows, self._columns):
            drawn = torch.einsum("ncr,mnr->mcn", self._root_of(part).double(), noise[:, part].double())
            seen += drawn @ inputs[part]
        back = torch.zeros_like(prior)
        self._scatter_(back, seen)
        return self.solve(prior * self.prior_precision - back)

    # --- covariance of f

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        """V at other rows, diagonal blocks (n, K, K)."""
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
        """Diagonals of `covariance_blocks`, (n, K)."""
        block = self._block_of(rows)
        if block is None or not block.constant:
            return super().variances_of_outputs(rows)
        features, outside = self._projected(rows)
        found = outside.unsqueeze(1).repeat(1, len(self.marginals))
        for part in self._parts(3 * features.numel()):
            found[:, part] += ((features @ self.marginals[part]) * features).sum(2).T
        return found.to(rows.dtype)

    def covariance(self, rows: Jacobian) -> Tensor:
        """V at other rows, joint and interleaved, (nK, nK)."""
        block = self._block_of(rows)
        if block is None or not block.constant:
            return super().covariance(rows)
        (features, _), (n, c) = self._projected(rows), rows.f.shape
        _, half = self._moments(rows)
        half = half.permute(1, 0, 2).flatten(1)  # (N, n C)
        found = (half.T @ half).view(n, c, n, c)
        diagonal = found.diagonal(dim1=1, dim2=3)  # (n, n, C)
        for part in self._parts(features.numel() + n * n):
            diagonal[..., part] += (features @ self._covariances[part] @ features.T).permute(1, 2, 0)
        if self._turn is not None:
            left = self._inputs(rows) * self._scale
            left = left - features @ self._turn.T
            diagonal += (left @ left.T).unsqueeze(2)
        return found.view(n * c, n * c).to(rows.dtype)

    def _block_of(self, rows: Jacobian) -> Outer | None:
        """The layer's rows, if these are rows of that layer."""
        block = rows.blocks[0] if len(rows.blocks) == 1 else None
        if not isinstance(block, Outer) or not block.matches(self._layer) or not block.single:
            return None
        return None if block.constant and block.b.shape[0] != block.b.shape[4] else block

    def _projected(self, rows: Jacobian) -> tuple[Tensor, Tensor]:
        """φ in the r coordinates, (n, r), and the squared norm of what lies outside, (n,)."""
        features = self._inputs(rows) * self._scale
        if self._turn is None:
            return features, features.new_zeros(len(features))
        inside = features @ self._turn
        return inside, (features - inside @ self._turn.T).square().sum(1)

    def _moments(self, rows: Jacobian) -> tuple[Tensor, Tensor]:
        """φᵀG_cφ, (n, C), and L⁻¹U_cXG_cφ, (n, N, C), with M = L Lᵀ: V is diag of the first, and the second squared."""
        features, outside = self._projected(rows)
        solved = self._covariances @ features.T  # (C, r, n)
        own = torch.einsum("crn,nr->nc", solved, features) + outside.unsqueeze(1)
        if self.form.vector is None:
            return own, own.new_zeros(len(own), 0, own.shape[1])
        seen = self._vector.T.unsqueeze(2) * (self._features @ solved)  # (C, N, n)
        (c, n, m) = seen.shape
        seen = torch.linalg.solve_triangular(self._inner, seen.permute(1, 2, 0).reshape(n, m * c), upper=False)
        return own, seen.view(n, m, c).transpose(0, 1)

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

        Raises
        ------
        MemoryBudgetError
            If it does not fit in memory.
        """
        self._require_factor()
        return self._factorized(self.variances)

    def _require_factor(self) -> None:
        needed = LowerTriangle.predicted_bytes(self.num_rows, self._columns, self.rows.dtype, self.rows.f.device)
        require_memory(needed, self.rows.f.device, f"B in one piece, of order {self.num_rows:,}", _REMEDY)

    def require_inverse(self) -> None:
        """Refuse an inverse of B that does not fit in memory, before S of all points is computed for it.

        Raises
        ------
        MemoryBudgetError
            If L or B⁻¹ does not fit.
        """
        if "factor" not in vars(self):
            self._require_factor()
        if "inverse" not in vars(self):
            needed = self.num_rows**2 * self.rows.dtype.itemsize
            require_memory(needed, self.rows.f.device, f"the inverse of B, of order {self.num_rows:,}", _REMEDY)


_REMEDY = ("Use a method that needs no inverse of B (the evidence, predictions, samples), fewer training points, or "
           'structure="kfac".')


def _cholesky(matrices: Tensor) -> Tensor:
    """L with A = L Lᵀ, for matrices (m, p, p)."""
    lower, info = torch.linalg.cholesky_ex(matrices)
    require_definite(info.max(), 0, matrices.shape[1], matrices.dtype)
    return lower
