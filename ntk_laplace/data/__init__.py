"""The door for data: inputs, and batches of them with their targets."""

from ntk_laplace.data.batches import (
    BATCH_BYTES,
    Batches,
    Joined,
    Missing,
    Selected,
    Source,
    as_pair,
    generators_of,
    kept_or_missing,
)
from ntk_laplace.data.forms import form_of, in_words, remedy_for, same_form
from ntk_laplace.data.gathering import Gathered, gather
from ntk_laplace.data.input_batches import InputBatches
from ntk_laplace.data.inputs import (
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
from ntk_laplace.data.weights import example_weights

__all__ = [
    "BATCH_BYTES",
    "Batches",
    "Gathered",
    "InputBatches",
    "Inputs",
    "Joined",
    "Missing",
    "Selected",
    "Source",
    "alike",
    "as_pair",
    "as_tensor",
    "as_tensors",
    "check_finite",
    "concatenate",
    "differentiable",
    "example_weights",
    "form_of",
    "gather",
    "generators_of",
    "in_words",
    "kept_or_missing",
    "leaves",
    "map_tensors",
    "num_bytes",
    "num_examples",
    "refuse_input_gradients",
    "remedy_for",
    "same_form",
    "take",
    "to_device",
]
