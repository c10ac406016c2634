"""Reading the training data behind a progress bar, and what must not change between two readings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from torch import Tensor

from ntk_laplace.data import Batches, Inputs, Joined
from ntk_laplace.progress import track
from ntk_laplace.structures.base import Trained

__all__ = ["digest", "model_signature", "read_batches"]


def read_batches(
    trained: Trained, batches: Batches | Joined, what: str
) -> Iterator[tuple[Inputs, Tensor]]:
    """One pass over the data; `what` is being computed."""
    return track(batches, f"ntk_laplace: {what}", batches.num_batches, trained.settings.progress)


def digest(*tensors: Tensor) -> str:
    """Fingerprint of numbers."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def model_signature(trained: Trained) -> dict[str, str]:
    """Fingerprints of all that the sums over the data depend on, by name."""
    likelihood = trained.likelihood
    return {
        "network": digest(trained.network.theta),
        "parameters": repr({name: tuple(shape) for name, shape in trained.network.shapes.items()}),
        "likelihood": type(likelihood).__name__ + digest(*likelihood.parameters(), *likelihood.buffers()),
        "curvature": repr(trained.root),
        "prior groups": repr(trained.prior.groups),
        "dtype": repr(trained.factors.dtype),
    }
