"""A posterior precision H that is given: it does not follow from the prior, nor from the curvature of the data.

log det B = log det H - log det P0 and γ_g = n_g - δ_g tr_g(H⁻¹) are those of the prior's present precisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature.full import FullPrecision
from ntk_laplace.curvature.function_space import FunctionSpacePrecision
from ntk_laplace.curvature.posterior_precision import CrossCovariance, PosteriorPrecision
from ntk_laplace.curvature.spectral import SpectralBlock
from ntk_laplace.curvature.structured import BlockDiagonalPrecision
from ntk_laplace.errors import HyperparameterError, NumericalError, UnsupportedError
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.gram import diagonal_blocks, gram
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime.linalg import cholesky_, cholesky_log_det, solve_lower, solve_spd
from ntk_laplace.runtime.lower_triangle import LowerTriangle
from ntk_laplace.runtime.parameter_layout import ParameterLayout
from ntk_laplace.runtime.resources import require_memory

__all__ = [
    "BlockwisePrecision",
    "GivenPrecision",
    "given_precision",
    "moved_precision",
    "no_record",
    "restored_precision",
]

_FORMS = "a tensor (P, P), a diagonal (P,), a mapping from parameter names to these, or a PosteriorPrecision"


class BlockwisePrecision(PosteriorPrecision):
    """H, block diagonal over whole parameters: diagonals and dense blocks, or one of all. Its own prior is N(0, I).

    Parameters
    ----------
    diagonals : mapping of str to Tensor, (p,)
        Diagonal of H for these parameters.
    factors : sequence of (names, Tensor)
        Cholesky factors, (p, p), of which only the lower triangles are read, of the blocks of consecutive parameters.
    shapes : mapping of str to torch.Size
        The parameters, in order; each has a diagonal or belongs to one block.
    """

    def __init__(
        self, diagonals: Mapping[str, Tensor], factors: Sequence[tuple[tuple[str, ...], Tensor]],
        shapes: Mapping[str, torch.Size],
    ) -> None:
        like = next(iter(diagonals.values())) if diagonals else factors[0][1]
        super().__init__(GaussianPrior(1.0, groups="parameter").bind(shapes).to(like.device), shapes, like)
        self.diagonals, self.factors = dict(diagonals), list(factors)
        self._variances = {name: own.reciprocal() for name, own in self.diagonals.items()}
        places = self.shapes.slices()
        self._diagonal_places = [(places[name], own) for name, own in self.diagonals.items()]
        self._blocks = [
            (slice(places[names[0]].start, places[names[-1]].stop), factor,
             ParameterLayout({name: self.shapes[name] for name in names})) for names, factor in self.factors
        ]

    # --- storage

    def record(self) -> dict[str, Any]:
        """Diagonals and factors."""
        return {
            "kind": "blocks",
            "diagonals": [{"weight": name, "values": own} for name, own in self.diagonals.items()],
            "factors": [{"spans": list(names), "values": factor.tril()} for names, factor in self.factors],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], shapes: ParameterLayout) -> BlockwisePrecision:
        """Restore what `record` returned."""
        diagonals = {one["weight"]: one["values"] for one in record["diagonals"]}
        return cls(diagonals, [(tuple(one["spans"]), one["values"]) for one in record["factors"]], shapes)

    # --- algebra

    def log_det(self) -> Tensor:
        """log det H, in double precision."""
        parts = [own.double().log().sum() for own in self.diagonals.values()]
        return torch.stack(parts + [cholesky_log_det(factor).double() for _, factor in self.factors]).sum()

    def effective_parameters(self) -> Tensor:
        """1 - [H⁻¹]_pp, (P,)."""
        used = torch.ones_like(self.prior_precision)
        for place, own in self._diagonal_places:
            used[place] -= own.reciprocal()
        for place, factor, _ in self._blocks:
            used[place] -= LowerTriangle.of(factor).inverse_diagonal(1).flatten()
        return used

    def solve(self, vectors: Tensor) -> Tensor:
        """H⁻¹ v for vectors (..., P)."""
        return self._by_block(vectors, lambda own, v: v / own, solve_spd)

    def multiply(self, vectors: Tensor) -> Tensor:
        """H v for vectors (..., P)."""
        return self._by_block(vectors, lambda own, v: v * own, lambda factor, v: (low := factor.tril()) @ (low.T @ v))

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws from N(0, H⁻¹), (count, P)."""
        like = self.prior_precision
        noise = torch.randn(len(like), count, dtype=like.dtype, device=like.device, generator=generator)
        return self._by_block(noise.T, lambda own, v: v * own.rsqrt(), lambda factor, v: solve_lower(factor, v, True))

    def _by_block(
        self, vectors: Tensor, along: Callable[[Tensor, Tensor], Tensor], block: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Apply functions of a diagonal and vectors (k, p), and of a factor and columns (p, k), to vectors (..., P)."""
        flat = vectors.reshape(-1, self.num_parameters)
        found = torch.empty_like(flat)
        for place, own in self._diagonal_places:
            found[:, place] = along(own, flat[:, place])
        for place, factor, _ in self._blocks:
            found[:, place] = block(factor, flat[:, place].T).T
        return found.view_as(vectors)

    # --- covariance of f

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        """V = J H⁻¹ Jᵀ, diagonal blocks (n, C, C)."""
        k, n = rows.num_cotangents, rows.num_examples
        blocks = diagonal_blocks(rows, self._variances) if self._variances else rows.f.new_zeros(n, k, k)
        for part in self._panels(rows) if self._blocks else ():
            for half in self._halves(rows.subset(part)):
                own = half.view(len(half), k, -1).permute(2, 1, 0)
                blocks[part] += own @ own.mT
        return blocks

    def covariance(self, rows: Jacobian) -> Tensor:
        """V = J H⁻¹ Jᵀ, joint and interleaved, (nC, nC)."""
        k, n = rows.num_cotangents, rows.num_examples
        joint = gram(rows, None, self._variances) if self._variances else rows.f.new_zeros(n * k, n * k)
        for half in self._halves(rows):
            own = half.view(-1, k, n).transpose(1, 2).reshape(-1, n * k)
            joint.addmm_(own.T, own)
        return joint

    def _halves(self, rows: Jacobian) -> Iterator[Tensor]:
        """L⁻¹Jᵀ of each dense block, (p, K*n), cotangents first."""
        for _, factor, names in self._blocks:
            yield solve_lower(factor, rows.dense(names).flatten(0, 1).T)


class GivenPrecision(PosteriorPrecision):
    """A given H beside the present prior.

    Parameters
    ----------
    inner : PosteriorPrecision
        H, relative to a prior of its own: its `log_det` is log det H less the log determinant of its diagonal
        `prior_precision`.
    prior : GaussianPrior
        Of the posterior.

    Attributes
    ----------
    inner : PosteriorPrecision
    """

    homogeneous = False

    def __init__(self, inner: PosteriorPrecision, prior: GaussianPrior) -> None:
        super().__init__(prior, inner.shapes, inner.prior_precision)
        self.inner = inner
        with torch.no_grad():
            logs = (one.double().log().sum() for one in (inner.prior_precision, self.prior_precision))
            own, present = logs
        self._log_det = inner.log_det().detach().double() + own - present
        self.standard_error = inner.standard_error  # known once `log_det` is

    def log_det(self) -> Tensor:
        """log det B = log det H - log det P0, in double precision."""
        return self._log_det

    def effective_parameters(self) -> Tensor:
        """γ_g = n_g - δ_g tr_g(H⁻¹) for each group of the present prior, (G,)."""
        groups, inner = self.groups, self.inner
        count = int(inner.groups.max()) + 1
        ends = [torch.full((count,), value, device=groups.device) for value in (-1, self._num_groups)]
        most = ends[0].scatter_reduce(0, inner.groups, groups, "amax")
        least = ends[1].scatter_reduce(0, inner.groups, groups, "amin")
        if not (torch.equal(most, least) and inner.homogeneous):  # the inner groups are no finer
            return super().effective_parameters()
        sizes = torch.bincount(inner.groups, minlength=count).double()
        inside = torch.zeros_like(sizes).scatter_(0, inner.groups, inner.prior_precision.double())
        traces = (sizes - inner.effective_parameters().double()) / inside  # tr_g(H⁻¹) in the groups of the inner prior
        total = torch.zeros(self._num_groups, dtype=torch.float64, device=groups.device)
        total.index_add_(0, least, traces).mul_(-self._by_group.double())
        return total + torch.bincount(groups, minlength=self._num_groups)

    @property
    def effective_error(self) -> float:
        """That of the inner precision, if one number is the ratio of the two priors; else an upper bound."""
        if not self.inner.effective_error:
            return 0.0
        return self.inner.effective_error * float((self.prior_precision / self.inner.prior_precision).max())

    def solve(self, vectors: Tensor) -> Tensor:
        """H⁻¹ v for vectors (..., P)."""
        return self.inner.solve(vectors)

    def multiply(self, vectors: Tensor) -> Tensor:
        """H v for vectors (..., P)."""
        return self.inner.multiply(vectors)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws from N(0, H⁻¹), (count, P)."""
        return self.inner.sample(count, generator)

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        """V = J H⁻¹ Jᵀ, diagonal blocks (n, C, C)."""
        return self.inner.covariance_blocks(rows)

    def covariance(self, rows: Jacobian) -> Tensor:
        """V = J H⁻¹ Jᵀ, joint and interleaved, (nC, nC)."""
        return self.inner.covariance(rows)

    def cross_covariance(self, rows: Jacobian) -> CrossCovariance:
        """V between later rows and these, which have one cotangent."""
        return self.inner.cross_covariance(rows)


# --- storage


def restored_precision(record: Mapping[str, Any], shapes: ParameterLayout) -> PosteriorPrecision:
    """The precision of which `PosteriorPrecision.record` returned this, factorized where it was."""
    kind = record["kind"]
    if kind == "blocks":
        return BlockwisePrecision.from_record(record, shapes)
    prior = _prior(record["prior"], shapes)
    if kind == "rows":
        return FunctionSpacePrecision(Jacobian.from_record(record["rows"]), None, prior, shapes)
    blocks = [SpectralBlock.from_record(block) for block in record["blocks"]]
    like = blocks[0].values if blocks else record["prior"]["log_precision"]
    return BlockDiagonalPrecision(blocks, prior, shapes, like)


def _prior(record: Mapping[str, Any], shapes: ParameterLayout) -> GaussianPrior:
    groups = record["groups"]
    named = groups if isinstance(groups, str) else {one["group"]: one["spans"] for one in groups}
    return GaussianPrior.from_record(dict(record) | {"groups": named, "mean": 0.0}, shapes).to(
        record["log_precision"].device)


def moved_precision(precision: PosteriorPrecision, device: torch.device, dtype: torch.dtype) -> PosteriorPrecision:
    """The same H on another device, with another dtype.

    Raises
    ------
    UnsupportedError
        If it has no record.
    """
    record = precision.record()
    if record is None:
        raise no_record(precision, "to move")

    def moved(content: Any) -> Any:
        if isinstance(content, Mapping):  # hyperparameters are float64 in every dtype
            return {key: one.to(device) if key == "log_precision" else moved(one) for key, one in content.items()}
        if isinstance(content, (list, tuple)):
            return [moved(one) for one in content]
        if not isinstance(content, Tensor):
            return content
        return content.to(device, dtype if content.is_floating_point() else None)

    return restored_precision(moved(record), precision.shapes)


def no_record(precision: PosteriorPrecision, what: str) -> UnsupportedError:
    """The error of a precision that is no container of tensors."""
    return UnsupportedError(f"a precision in tensors, {what}", f"a {type(precision).__name__}",
                            "Save or move the posterior that it is from, or give a tensor.")


# --- what a caller gives


def given_precision(
    given: object, shapes: Mapping[str, torch.Size], like: Tensor, budget: int | None = None
) -> PosteriorPrecision:
    """H from what a caller gives, checked and factorized.

    Parameters
    ----------
    given : Tensor, mapping or PosteriorPrecision
        (P, P), symmetric; (P,), a diagonal; for every parameter a diagonal of its shape or a dense block (p, p); or a
        factorized precision of these parameters.
    shapes : mapping of str to torch.Size
        The parameters, in order.
    like : Tensor
        Gives dtype and device.
    budget : int, optional
        Bytes that may be used.

    Raises
    ------
    HyperparameterError
        If shapes, names or values do not fit.
    NumericalError
        If it is not positive definite.
    MemoryBudgetError
        If the factors do not fit in memory; nothing was allocated.
    UnsupportedError
        If it is something else.
    """
    layout = ParameterLayout.of(shapes)
    if isinstance(given, PosteriorPrecision):
        return _factorized_already(given, layout, like)
    if isinstance(given, Tensor):
        p = layout.num_parameters
        _require_form("precision", given, given.shape == (p,) or given.shape == (p, p), f"({p}, {p}) or ({p},)")
        if given.shape == (p, p) and p > 1:
            return BlockwisePrecision({}, [(tuple(layout), _factor("precision", given, like, budget))], layout)
        return BlockwisePrecision(layout.parts(_diagonal("precision", given.reshape(-1), like)), [], layout)
    if isinstance(given, Mapping):
        return _by_name(given, layout, like, budget)
    posterior = hasattr(given, "posterior_precision")
    raise UnsupportedError(_FORMS, f"a {type(given).__name__}",
                           "Pass its posterior_precision." if posterior else "Pass one of these.")


def _by_name(
    given: Mapping[Any, Any], layout: ParameterLayout, like: Tensor, budget: int | None
) -> BlockwisePrecision:
    """Diagonals and dense blocks by parameter name."""
    missing = [name for name in layout if name not in given]
    unknown = [name for name in given if name not in layout]
    if missing or unknown:
        raise HyperparameterError(f"a precision for each of the parameters {', '.join(layout)}",
                                  f"none for {', '.join(missing)}" if missing else f"{', '.join(map(str, unknown))}",
                                  "Name the parameters of the posterior, all of them.")
    diagonals, factors = {}, []
    for name, shape in layout.items():
        value, p = given[name], shape.numel()
        if not isinstance(value, Tensor):
            raise UnsupportedError(f"a tensor for {name!r}", f"a {type(value).__name__}", "Pass torch tensors.")
        form = f"{tuple(shape)}, a diagonal, or ({p}, {p}), a dense block"
        _require_form(f"precision[{name!r}]", value, value.shape in (shape, (p, p)), form)
        if value.shape == shape:
            diagonals[name] = _diagonal(f"precision[{name!r}]", value.reshape(-1), like)
        else:
            factors.append(((name,), _factor(f"precision[{name!r}]", value, like, budget)))
    return BlockwisePrecision(diagonals, factors, layout)


def _require_form(what: str, value: Tensor, fits: bool, form: str) -> None:
    if not fits:
        raise HyperparameterError(f"{what} of shape {form}", f"shape {tuple(value.shape)}",
                                  "Order its entries as the network's parameters are flattened.")
    if value.layout != torch.strided or value.is_meta:
        raise HyperparameterError(f"{what} as a dense tensor with values",
                                  f"{'a meta tensor' if value.is_meta else value.layout}", "Call its to_dense().")
    if value.dtype not in (torch.float32, torch.float64):
        raise HyperparameterError(f"{what} in torch.float64 or torch.float32", f"{value.dtype}", "Convert it.")


def _diagonal(what: str, value: Tensor, like: Tensor) -> Tensor:
    value = value.detach().to(like)
    if not bool((value.isfinite() & (value > 0)).all()):
        bad = int((~(value.isfinite() & (value > 0))).int().argmax())
        raise HyperparameterError(f"positive finite numbers in {what}", f"{float(value[bad]):.4g} at entry {bad}",
                                  "Pass precisions, one over variances.")
    return value.clone()


def _factor(what: str, value: Tensor, like: Tensor, budget: int | None) -> Tensor:
    """L with H = L Lᵀ, of a symmetric matrix."""
    p = len(value)
    require_memory(p * p * like.element_size(), like.device, f"the factor of {what}, {p:,} x {p:,}",
                   "Give a diagonal, or dense blocks by parameter.", budget)
    value = value.detach()
    size, step = float(value.abs().max()), 512
    if not bool(torch.isfinite(value).all()):
        raise HyperparameterError(f"finite numbers in {what}", "NaN or infinity", "Check how it was computed.")
    gap = max(float((value[i : i + step] - value[:, i : i + step].T).abs().max()) for i in range(0, p, step))
    if gap > torch.finfo(value.dtype).eps ** 0.5 * size:
        raise HyperparameterError(f"a symmetric {what}", f"entries that differ by {gap:.3g} from their mirror images",
                                  "Pass (H + H.T) / 2 if the difference is rounding.")
    try:
        return cholesky_(value.to(like, copy=True).contiguous())
    except NumericalError as error:
        raise NumericalError(f"a positive definite {what}", f"a matrix without a Cholesky factor ({error.got})",
                             "Pass a precision, the inverse of a covariance.") from error


def _factorized_already(given: PosteriorPrecision, layout: ParameterLayout, like: Tensor) -> PosteriorPrecision:
    if isinstance(given, GivenPrecision):
        given = given.inner
    if list(given.shapes.items()) != list(layout.items()):
        raise HyperparameterError(f"a precision of the parameters {dict(layout)!r}"[:200],
                                  f"one of {dict(given.shapes)!r}"[:200],
                                  "Linearize the same parameters of the same network, parameters=....")
    own = given.prior_precision
    if (own.dtype, own.device) != (like.dtype, like.device):
        raise HyperparameterError(f"a precision in {like.dtype} on {like.device}", f"{own.dtype} on {own.device}",
                                  "Move the posterior that it is from, posterior.to(device, dtype).")
    if isinstance(given, FullPrecision):
        return BlockwisePrecision({}, [(tuple(layout), given.factor)], layout)
    if isinstance(given, BlockDiagonalPrecision) and all(part.block.kind == "diagonal" for part in given.algebras):
        return BlockwisePrecision(layout.parts(given.multiply(torch.ones_like(own))), [], layout)
    return given
