"""The inputs of the training points, to read them again: those a structure keeps, or those a caller passes."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset

from ntk_laplace.errors import DataError
from ntk_laplace.model.data import InputBatches, InputData, Source, as_tensors, concatenate, fill_buffer, num_examples
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.points import coarsest
from ntk_laplace.structures.structure import Structure


def training_inputs(
    model: LinearizedModel, structure: Structure, x: InputData | None = None, verb: str | None = None
) -> Source:
    """Inputs of the points in batches, checked against the known outputs; `verb` takes them as `x`, if it can.

    Raises
    ------
    DataError
        If the structure does not keep them and `x` is None, or if they are not those of the fit.
    """
    count, targets = structure.points.num_examples, structure.points.targets
    network, settings = model.network, model.settings
    if x is not None:
        if isinstance(x, (DataLoader, Dataset)):
            inputs = concatenate([part for part, in InputBatches(
                x, network.input_format, settings.batch_size, network.device, network.input_dtype)])
        else:
            inputs = as_tensors(x)
        given = num_examples(inputs)
        given = sum(settings.reducer.gather(given)) if settings.sharded else given
        if given != count:
            raise DataError(f"inputs of the {count:,} training points, with those that were added at the end",
                            f"{given:,}", "Pass them in the order of the fit.")
        if settings.sharded:  # the points are those of all processes
            targets = torch.zeros(num_examples(inputs), device="cpu")
        source: Source = settings.own(network.batches((inputs, targets), settings.batch_size))
    elif structure.source is None:
        raise DataError("the training inputs x, which this posterior does not have", "none",
                        "Load the checkpoint with its data, ntk_laplace.load(path, network, data=...)" +
                        ("." if verb is None else f"; or pass {verb}, in the order of the fit."))
    else:
        source = structure.source
    base = structure.base
    known = structure.points if model.displacement is None or base is None else base
    found = fill_buffer((network.with_parameters(network.theta, x) for x, _ in source), source.length or 0)
    f = found.rows.to(model.jacobian_pass.dtype)
    numbers = source.numbers(settings.reducer)[0].to(f.device)
    there = numbers < len(known.f)  # points that were added have no outputs at these weights
    gap = max(settings.reducer.gather(float((f[there] - known.f[numbers[there]]).abs().max()) if len(f) else 0.0))
    size = 1.0 + float(known.f.abs().max())
    if not gap <= 1e3 * torch.finfo(coarsest(model.network.precision, known.precision)).eps * size:
        raise DataError("the inputs of the fit, in its order", f"outputs that differ by {gap:.2g} from those known",
                        "Pass the same inputs in the same order.")
    return source
