"""Data reading and validation: inputs, and batches of inputs and targets."""

from ntk_laplace.model.data.batches import BATCH_BYTES, Batches
from ntk_laplace.model.data.input_batches import InputBatches
from ntk_laplace.model.data.input_format import describe_inputs, format_of, input_remedy, same_input_format
from ntk_laplace.model.data.inputs import (
    InputData,
    InputDtype,
    Inputs,
    alike,
    as_tensor,
    as_tensors,
    check_finite,
    concatenate,
    differentiable,
    leaves,
    map_tensors,
    num_bytes,
    num_examples,
    refuse_input_gradients,
    take,
    to_device,
)
from ntk_laplace.model.data.loaders import dropped_by, generators_of, loader_of
from ntk_laplace.model.data.readers import as_pair
from ntk_laplace.model.data.row_buffer import RowBuffer, fill_buffer
from ntk_laplace.model.data.sources import Joined, Missing, Replaced, Selected, Source
from ntk_laplace.model.data.weights import example_weights

__all__ = [
    "BATCH_BYTES",
    "Batches",
    "InputBatches",
    "InputData",
    "InputDtype",
    "Inputs",
    "Joined",
    "Missing",
    "Replaced",
    "RowBuffer",
    "Selected",
    "Source",
    "alike",
    "as_pair",
    "as_tensor",
    "as_tensors",
    "check_finite",
    "concatenate",
    "describe_inputs",
    "differentiable",
    "dropped_by",
    "example_weights",
    "fill_buffer",
    "format_of",
    "generators_of",
    "input_remedy",
    "leaves",
    "loader_of",
    "map_tensors",
    "num_bytes",
    "num_examples",
    "refuse_input_gradients",
    "same_input_format",
    "take",
    "to_device",
]
