"""The linearized model at inputs that require gradients: f, J and H⁻¹ with their autograd graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ntk_laplace.curvature import PosteriorPrecision
from ntk_laplace.errors import DataError, UnsupportedError
from ntk_laplace.jacobian.differentiable import DifferentiableRows
from ntk_laplace.model.data import as_tensors, leaves, num_examples, to_device
from ntk_laplace.structures import FittedModel

_COPIES = 4  # of J: the rows, H⁻¹Jᵀ, and what their backward passes keep


class DifferentiableModel:
    """f and J of a fitted model at inputs, and products with H⁻¹, all differentiable in the inputs.

    J is written out, (n, C, P), whatever the structure. H is a constant: a prediction's gradient needs no more of the
    training data than H⁻¹ v, which every structure has. UnsupportedError if the structure estimates covariances by
    random draws, or several processes share the fit.
    """

    def __init__(self, fitted: FittedModel) -> None:
        model = fitted.model
        model.settings.reducer.require_one("gradients in the inputs", "Save the posterior, and load it on one process.")
        if not fitted.precision.solves_covariance:
            raise UnsupportedError(
                "a structure whose covariances have no error of sampling, for gradients in the inputs",
                f"structure={fitted.structure.name!r}", 'Fit with structure="gp", "full" or "kfac", for instance.')
        self.fitted = fitted
        self._rows = DifferentiableRows(model.network, model.jacobian_pass.dtype)

    @property
    def precision(self) -> PosteriorPrecision:
        """H at the present hyperparameters."""
        return self.fitted.precision

    def rows(self, x: Any, step: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (n, C) and rows of J (n, C, P) at `x`, at weights from which the step (P,) is subtracted.

        DataError if `x` has no examples; MemoryBudgetError if J does not fit in memory.
        """
        model = self.fitted.model
        network = model.network
        n = num_examples(x)
        if n == 0:
            raise DataError("at least one input", "none", "Pass one or more inputs.")
        needed = _COPIES * n * network.num_outputs * network.num_parameters * self._rows.dtype.itemsize
        model.require_memory(needed, f"J at {n:,} inputs with its graph", "Ask for fewer inputs at a time.")
        f, jac = self._rows(to_device(x, network.device, network.input_dtype))
        moves = [move for move in (model.displacement, None if step is None else -step) if move is not None]
        return (f + jac @ sum(moves[1:], start=moves[0]) if moves else f), jac

    def solve(self, rows: Tensor) -> Tensor:
        """H⁻¹ v for rows v (..., P)."""
        return self.precision.differentiable_solve(rows)


def wants_gradients(x: Any) -> bool:
    """Whether a gradient in `x` is wanted: a tensor of it requires one, and gradients are enabled.

    DataError if it is a loader or a dataset, whose inputs nobody holds.
    """
    if isinstance(x, (DataLoader, Dataset)):
        raise DataError("a tensor, or a tuple or dict of tensors, for differentiable=True", f"a {type(x).__name__}",
                        "Pass the inputs themselves, batch by batch.")
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in leaves(as_tensors(x)))
