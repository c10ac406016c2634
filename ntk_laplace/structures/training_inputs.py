"""Training inputs for another evaluation of the network: those that the structure reads again, or the caller's."""

from __future__ import annotations

import torch
from torch import Tensor

from ntk_laplace.errors import DataError
from ntk_laplace.model.data import Batches, InputData, Source, as_tensors, fill_buffer, num_examples
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.structure import Structure

__all__ = ["outputs_at", "training_inputs"]


def training_inputs(model: LinearizedModel, structure: Structure, x: InputData | None) -> Source:
    """Inputs of the points in batches, checked against the known outputs.

    Parameters
    ----------
    model : LinearizedModel
    structure : Structure
    x : optional
        The inputs, in the order of the fit; needed if the structure does not keep the data.

    Raises
    ------
    DataError
        If inputs are needed and missing, or are not those of the fit.
    """
    count = structure.points.num_examples
    if x is not None:
        inputs = as_tensors(x)
        if num_examples(inputs) != count:
            raise DataError(f"inputs of the {count:,} training points, with those that were added at the end",
                            f"{num_examples(inputs):,}", "Pass them in the order of the fit.")
        network = model.network
        data = inputs, structure.points.targets
        source: Source = Batches(data, model.settings.batch_size, network.device, network.input_dtype)
    elif structure.source is None:
        raise DataError(f"the training inputs x, which structure={structure.name!r} does not keep", "none",
                        'Pass them as x, in the order of the fit; structure="full" reads its data again.')
    else:
        source = structure.source
    base = structure.base
    known = structure.points if model.displacement is None or base is None else base
    f = outputs_at(model, source, model.network.theta)[: len(known.f)]
    gap, size = float((f - known.f).abs().max()), 1.0 + float(known.f.abs().max())
    if not gap <= 1e3 * torch.finfo(model.network.precision).eps * size:
        raise DataError("the inputs of the fit, in its order", f"outputs that differ by {gap:.2g} from those known",
                        "Pass the same inputs in the same order.")
    return source


def outputs_at(model: LinearizedModel, source: Source, theta: Tensor) -> Tensor:
    """Outputs of the network at θ, (N, C)."""
    network = model.network
    found = fill_buffer((network.with_parameters(theta, x) for x, _ in source), source.length or 0)
    return found.rows.to(model.jacobian_pass.dtype)
