"""When structure "gp" factors one matrix per output: for the last linear layer of a network with many outputs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from ntk_laplace.curvature import LastLayerPrecision, last_layer
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.runtime import tuning
from ntk_laplace.structures.forecast import Forecast, Problem, Work
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.points import TrainingPoints


def by_output(model: LinearizedModel, rows: Jacobian) -> bool:
    """Whether rows are those of a last linear layer, Λ has a diagonal form, and one matrix per output is smaller."""
    c, kind = rows.f.shape[1], model.curvature_type
    if model.settings.reducer.world_size > 1 or kind.columns(model.likelihood, c) ** 2 <= 2 * c:
        return False
    if last_layer(rows, model.prior.variances()) is None:
        return False
    return has_form(model)


def has_form(model: LinearizedModel) -> bool:
    """Whether Λ has a `DiagonalForm`."""
    one = model.theta.new_zeros(1, model.network.num_outputs)
    return model.curvature_type.diagonal_form(model.likelihood.at(slice(0, 1)), one) is not None


def precision_by_output(
    model: LinearizedModel, rows: Jacobian, points: TrainingPoints, index: Tensor | None = None
) -> LastLayerPrecision | None:
    """The factorization of B with one matrix per output, where `by_output` is true; `rows` are those of `index`."""
    if index is not None:
        model, points = model.at(index), points.subset(index)
    form = points.diagonal_form(model.curvature_type, model.likelihood) if by_output(model, rows) else None
    if form is None:
        return None
    columns = model.curvature_type.columns(model.likelihood, points.num_outputs)
    return LastLayerPrecision(rows, form.detach(), partial(_root, model, points), columns, model.prior)


def _root(model: LinearizedModel, points: TrainingPoints, part: slice) -> Tensor:
    return points.subset(part).root(model.curvature_type, model.likelihood.at(part)).detach()


def forecast_by_output(problem: Problem) -> Forecast:
    """The covariance of each output's weights, (C, r, r) with r = min(N, D + 1), M (N, N), and rows of J."""
    n, c = problem.num_examples, problem.num_outputs
    inputs = sum(size for block in problem.sample.blocks for size in block.sizes().values()) // c
    r = min(n, inputs)
    each, rows = 8 * c * r * r, problem.row_bytes(n)
    stored = {"covariances by output": each, "M": 8 * n * n, "rows of J": rows, "Λ": 16 * n * c}
    work = Work(passes=n, matmul=float(2 * c * n * r * (2 * r + n)), cholesky=c * r**3 + n**3 / 3)
    temporary = max(2 * 8 * n * n, rows)
    whole = sum(stored.values()) + temporary
    # gradients of the evidence and predictions take the marginal covariances beside the conditional ones
    found = Forecast.of_phases(
        stored, {"evidence": whole + each, "responses": whole},
        {"evidence": 2 * tuning.OUTPUTS_BYTES + problem.batch_bytes, "responses": problem.response_bytes})
    return replace(found, work=work, least=whole, note="one matrix per output")
