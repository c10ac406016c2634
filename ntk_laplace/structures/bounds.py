"""Lower bounds of the evidence from blocks of examples and of parameters ([I23] theorems 1 to 3).

Fischer's inequality: the determinant of a positive definite matrix is at most the product of those of its diagonal
blocks, for B in function space and for H in weight space. Every bound here is one of the exact evidence of the
linearized model, whatever the structure: it needs rows of the Jacobian alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.curvature import FullPrecision, FunctionSpacePrecision, PosteriorPrecision, accumulate_ggn
from ntk_laplace.errors import HyperparameterError, require_choice, require_whole
from ntk_laplace.jacobian import Jacobian, placed
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.model.priors.names import assign
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.parameter_layout import ParameterLayout
from ntk_laplace.structures.data_passes import read_rows, selected
from ntk_laplace.structures.evidence import log_likelihood, log_prior
from ntk_laplace.structures.fitted_model import FittedModel
from ntk_laplace.structures.structure import require_one_process

_PARAMETERS = (None, "layers", "diagonal")
_OUTPUTS = ("all", "one")


@dataclass(frozen=True, repr=False)
class EvidenceBound:
    """A lower bound of the evidence from blocks of examples and parameters, or an estimate of one from some blocks.

    Attributes
    ----------
    value : Tensor, ()
        In nats: log joint - ½ log_det. It carries no graph; `gradient` is its derivative.
    standard_error : float
        Of `value` as an estimate of the bound from all blocks of the partition: 0 if all were used, NaN if one was.
    log_det : Tensor, ()
        An upper bound of log det B.
    gradient : Tensor, (G,), or None
        ∂ value/∂ log δ_g for each prior group, if it was asked for.
    used : tuple of Tensor
        Indices of the examples of each block that was used.
    num_blocks : int
        Blocks of the partition.
    examples : int
        M, the largest number of examples in a block.
    parameters : str or None
        "layers" or "diagonal", if the parameters are partitioned too.
    outputs : str
        "one" if each output of the curvature's root is a block of its own, else "all".
    """

    value: Tensor
    standard_error: float
    log_det: Tensor
    gradient: Tensor | None
    used: tuple[Tensor, ...]
    num_blocks: int
    examples: int
    parameters: str | None
    outputs: str

    def __float__(self) -> float:
        return float(self.value)

    def __repr__(self) -> str:
        whole = len(self.used) == self.num_blocks
        kind = "lower bound of the evidence" if whole else "estimate of a lower bound of the evidence"
        error = "" if whole else f" ± {self.standard_error:.3g}"
        columns = "" if self.outputs == "all" else ", one output each"
        split = {None: "all parameters", "layers": "layer by layer", "diagonal": "parameter by parameter"}
        return (
            f"{kind}: {float(self):,.3f}{error} nats ({len(self.used)} of {self.num_blocks} block"
            f"{'s' * (self.num_blocks > 1)}, at most {self.examples} examples each{columns}; {split[self.parameters]})"
        )


def evidence_bound(
    fitted: FittedModel, examples: int | None, parameters: str | None, outputs: str, blocks: int | None, seed: int,
    gradient: bool,
) -> EvidenceBound:
    """A lower bound of the evidence; see `Posterior.evidence_bound`."""
    require_choice(parameters, _PARAMETERS, 'parameters None, "layers" or "diagonal"')
    require_choice(outputs, _OUTPUTS, 'outputs "all" or "one"')
    n = fitted.num_examples
    if examples is not None:
        require_whole("examples", examples, 1, "Leave it out for all examples in one block.")
    seed = require_whole("seed", seed, 0, "Leave it out for 0.")
    count = -(-n // min(n, examples or n))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed), device="cpu")
    device = fitted.network.device
    parts = [part.sort().values.to(device) for part in order.tensor_split(count)]
    with torch.no_grad():
        root = fitted.root()
    if outputs == "one":
        root = _principal(root)
    columns = [slice(None)] if outputs == "all" else [slice(r, r + 1) for r in range(root.shape[-1])]
    whole = [(part, own) for part in parts for own in columns]
    if blocks is not None and not 0 < require_whole("blocks", blocks, 1, "Leave it out for all.") <= len(whole):
        raise HyperparameterError(f"at most {len(whole)} blocks, as many as there are", f"{blocks}",
                                  "Leave blocks= out for all of them.")
    chosen = whole
    if blocks is not None and blocks < len(whole):
        drawn = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed + 1), device="cpu")[:blocks]
        chosen = [whole[i] for i in drawn.tolist()]
    layouts = _layouts(fitted, parameters)
    with torch.inference_mode(False), torch.no_grad():
        found = [_of_block(fitted, layouts, parameters == "diagonal", index, root[index][..., own], gradient)
                 for index, own in chosen]
        return _summed(fitted, found, [index for index, _ in chosen], len(whole), len(parts[0]), parameters, outputs)


def _summed(
    fitted: FittedModel, found: list[tuple[Tensor, Tensor | None]], used: list[Tensor], total: int, examples: int,
    parameters: str | None, outputs: str,
) -> EvidenceBound:
    """The bound from log det and γ of each block used, scaled to all of them."""
    count, log_dets = len(found), torch.stack([value for value, _ in found])
    scale, error = total / count, 0.0
    if count < total:  # simple random sampling without replacement
        spread = float(log_dets.std()) if count > 1 else math.nan
        error = 0.5 * total * spread * math.sqrt((1 - count / total) / count)
    log_det = scale * log_dets.sum()
    fit = log_likelihood(fitted).detach()
    value = fit + log_prior(fitted).detach().to(fit) - 0.5 * log_det.to(fit)
    slope, own = None, [gamma for _, gamma in found if gamma is not None]
    if own:
        prior = fitted.prior
        pulled = prior.precision * prior.group_distances(fitted.theta)
        slope = 0.5 * (scale * torch.stack(own).sum(0).to(pulled) - pulled)
    return EvidenceBound(value, error, log_det, slope, tuple(used), total, examples, parameters, outputs)


def _layouts(fitted: FittedModel, parameters: str | None) -> list[ParameterLayout]:
    """The parameters of each block of the partition; all together where single parameters are blocks."""
    shapes = fitted.network.shapes
    group_of, names = assign("layer" if parameters == "layers" else "all", list(shapes))
    return [ParameterLayout({name: shapes[name] for name in shapes if group_of[name] == g}) for g in range(len(names))]


def _principal(root: Tensor) -> Tensor:
    """S U with orthogonal columns, largest first, for UᵀSᵀS U diagonal: the eigenvectors of Λ, (N, C, R).

    Any root gives a bound by columns. Columns of like curvature, in one block, leave out the least.
    """
    return root @ torch.linalg.eigh(root.mT @ root).eigenvectors.flip(-1)


def _of_block(
    fitted: FittedModel, layouts: list[ParameterLayout], diagonal: bool, index: Tensor, root: Tensor, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Σ_p log det(I + A_p P0_p⁻¹ A_pᵀ) over blocks of parameters, A the rows of SᵀJ of some examples; γ_g of it, (G,).

    Each determinant is taken in the smaller of the two spaces. Rows are kept only where one is in function space.
    """
    prior, size, like = fitted.prior, len(index) * root.shape[-1], fitted.theta
    in_weights = [diagonal or layout.num_parameters < size for layout in layouts]
    _require_memory(fitted, [] if diagonal else [w for w, own in zip(layouts, in_weights, strict=True) if own],
                    0 if all(in_weights) else size)
    shape = 1 if diagonal else 2
    sums = {i: like.new_zeros([layout.num_parameters] * shape) for i, layout in enumerate(layouts) if in_weights[i]}
    kept: list[Jacobian] = []
    for rows in _weighted_rows(fitted, index, root):
        if len(sums) < len(layouts):
            kept.append(rows)
        for i, total in sums.items():
            for part in _pieces(rows, layouts[i]):
                if diagonal:
                    total += part.dense(layouts[i]).square_().sum((0, 1))
                else:
                    accumulate_ggn(total, part, layouts[i])
    log_det, gammas = like.new_zeros((), dtype=torch.float64), []
    together = Jacobian.concatenate(kept) if kept else None
    for i, layout in enumerate(layouts):
        precision: PosteriorPrecision | _Diagonal
        if together is not None and i not in sums:
            precision = FunctionSpacePrecision(together.restricted(layout), None, prior, shapes=layout)  # of SᵀJ
        else:
            precision = _Diagonal(sums.pop(i), prior) if diagonal else FullPrecision(sums.pop(i), prior, layout)
        log_det += precision.log_det()
        if gradient:
            gammas.append(precision.effective_parameters())
    return log_det, torch.stack(gammas).sum(0) if gammas else None


class _Diagonal:
    """P0 + diag(JᵀΛJ), as far as the evidence needs it.

    Parameters
    ----------
    squares : Tensor, (P,)
        The diagonal of JᵀΛJ.
    prior : GaussianPrior
    """

    def __init__(self, squares: Tensor, prior: GaussianPrior) -> None:
        self.groups = prior.flat_groups().to(squares.device)
        self.by_group = prior.precision.to(squares)
        self.ratio = squares / self.by_group[self.groups]

    def log_det(self) -> Tensor:
        """Σ log(1 + h_i/δ_i)."""
        return self.ratio.log1p().sum()

    def effective_parameters(self) -> Tensor:
        """γ_g, (G,)."""
        return torch.zeros_like(self.by_group).index_add_(0, self.groups, self.ratio / (1 + self.ratio))


def _weighted_rows(fitted: FittedModel, index: Tensor, root: Tensor) -> Iterator[Jacobian]:
    """Rows of SᵀJ at some of the points, ascending: stored rows times S, or one backward pass for each column."""
    model, structure = fitted.model, fitted.structure
    if structure.source is None or structure.spec.keeps_jacobian:
        yield from (rows.weighted(root[here]) for here, rows in placed(fitted.rows_at(index)))
        return
    require_one_process(model)
    source = selected(model, structure.source, index, fitted.num_examples)
    yield from read_rows(model, source, root, model.settings.batch_size, "bound of the evidence")


def _pieces(rows: Jacobian, layout: ParameterLayout) -> Iterator[Jacobian]:
    """The rows of some parameters in pieces that fit in memory when written out."""
    own = rows.restricted(layout)
    each = layout.num_parameters * rows.num_cotangents * rows.dtype.itemsize
    for part in panels(rows.num_examples, each, tuning.FULL_ROWS_BYTES):
        yield own.subset(part)


def _require_memory(fitted: FittedModel, summed: list[ParameterLayout], size: int) -> None:
    """Refuse the matrices of a block of `size` rows, and those of the parameters in weight space, if too large."""
    squares = [layout.num_parameters**2 for layout in summed]
    fitted.model.require_memory((sum(squares) + max([size**2, *squares])) * fitted.theta.element_size(),
                                f"the matrices of a block ({size:,} rows, {len(squares)} in weight space)",
                                'Pass fewer examples=, or parameters="layers" or "diagonal".')
