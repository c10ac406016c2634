"""Files of records, written atomically and read without executing code.

An object that can be saved returns its record, plain containers of tensors, from a method ``record``; its class builds
it again in ``from_record``. This package reads and writes records, and knows no other class of the library.
"""

from ntk_laplace.runtime.serialization.autosave import Autosave, Snapshots
from ntk_laplace.runtime.serialization.files import FileFormat, require_same, require_writable, write
from ntk_laplace.runtime.serialization.process_state import (
    load_optimizer,
    load_random,
    load_tensors,
    module_tensors,
    random_state,
)
from ntk_laplace.runtime.serialization.safetensors_file import is_safetensors, read_tensors

__all__ = [
    "Autosave",
    "FileFormat",
    "Snapshots",
    "is_safetensors",
    "load_optimizer",
    "load_random",
    "load_tensors",
    "module_tensors",
    "random_state",
    "read_tensors",
    "require_same",
    "require_writable",
    "write",
]
