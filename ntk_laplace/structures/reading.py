"""Reading the training data behind a progress bar, and what must not change between two readings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ntk_laplace.data import Gathered, Inputs, Selected, Source, gather, num_examples
from ntk_laplace.factors import Rows
from ntk_laplace.likelihoods import Likelihood
from ntk_laplace.points import TrainingPoints, present_values, unmoved
from ntk_laplace.progress import track
from ntk_laplace.structures.base import Trained
from ntk_laplace.structures.coalescing import coalesced

__all__ = [
    "ModelSignature",
    "backproject",
    "common_factor",
    "digest",
    "push",
    "read_batches",
    "read_rows",
    "selected",
]

_CHUNK = 4096  # examples whose output Hessians are compared at a time


def read_batches(
    trained: Trained, batches: Source, what: str
) -> Iterator[tuple[Inputs, Tensor]]:
    """One pass over the data; `what` is being computed."""
    return track(
        coalesced(batches, trained.network), f"ntk_laplace: {what}", batches.length, trained.settings.progress,
        lambda pair: num_examples(pair[0]),
    )  # fmt: skip


def read_outputs(trained: Trained, batches: Source) -> tuple[Tensor, Tensor]:
    """The network's outputs (N, C), in the algebra's floating type, and the targets as they come."""
    f, targets = Gathered(batches.length or 0), Gathered(batches.length or 0)
    for x, y in read_batches(trained, batches, "outputs"):
        f.append(trained.network.without_grad(x, len(f)).to(trained.factors.dtype))
        targets.append(y)
    return f.rows, targets.rows


def read_rows(
    trained: Trained, batches: Source, root: Tensor | None, most: int | None, what: str
) -> Iterator[Rows]:
    """Rows of J, or of SᵀJ for S (N, C, R), at most so many examples at a time; `what` is being computed."""
    seen = 0
    for x, _ in read_batches(trained, batches, what):
        n = num_examples(x)
        yield from trained.factors.batches(x, None if root is None else root[seen : seen + n], most, seen)
        seen += n


def selected(batches: Source, index: Tensor, total: int) -> Selected:
    """The examples at `index` of a source with so many."""
    keep = torch.zeros(total, dtype=torch.bool)
    keep[index.cpu()] = True
    return Selected(batches, keep)


def backproject(trained: Trained, batches: Source, residual: Tensor, most: int | None) -> Tensor:
    """Jᵀr, (P,), for r (N, C): one backward pass per batch, seeded with r."""
    total = torch.zeros_like(trained.theta)
    for rows in read_rows(trained, batches, residual.unsqueeze(-1), most, "gradient"):
        total += rows.vjp(rows.f.new_ones(rows.num_examples, 1), trained.network.shapes)
    return total


def push(trained: Trained, batches: Source, vector: Tensor, most: int | None) -> Tensor:
    """J v, (N, C), for v (P,)."""
    named = trained.network.unflatten(vector)
    rows = read_rows(trained, batches, None, most, "directional derivatives")
    return gather((part.jvp(named) for part in rows), batches.length or 0).rows


def digest(*tensors: Tensor) -> str:
    """Fingerprint of numbers."""
    found = hashlib.blake2b(digest_size=32)
    for tensor in tensors:
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())  # NumPy has no bfloat16
    return found.hexdigest()


class ModelSignature(Mapping[str, str]):
    """Fingerprints, by name, of all that the sums over the data depend on.

    That of the weights, which stay as they are, is made when it is asked for: only an interrupted fit is compared.
    """

    def __init__(self, trained: Trained) -> None:
        likelihood = trained.likelihood
        self._network = trained.network
        self._found = {
            "parameters": repr({name: tuple(shape) for name, shape in trained.network.shapes.items()}),
            "likelihood": type(likelihood).__name__ + digest(*likelihood.parameters(), *likelihood.buffers()),
            "curvature": repr(trained.root),
            "prior groups": repr(trained.prior.groups),
            "dtype": repr(trained.factors.dtype),
        }

    def __getitem__(self, what: str) -> str:
        if what == "network" and what not in self._found:
            output = self._network.output
            self._found[what] = digest(self._network.theta) + ("" if output is None else f" {output!r}")
        return self._found[what]

    def __iter__(self) -> Iterator[str]:
        yield "network"
        yield from (what for what in self._found if what != "network")

    def __len__(self) -> int:
        return len(self._found.keys() | {"network"})


def common_factor(trained: Trained, before: Likelihood, points: TrainingPoints) -> float | None:
    """c where Λ_n now is c times Λ_n under the likelihood `before`, for all n; None if there is no such number."""
    if unmoved(present_values(before), trained.likelihood):
        return 1.0
    factor: float | None = None
    tolerance = 64 * torch.finfo(points.f.dtype).eps
    for start in range(0, len(points.f), _CHUNK):
        part = slice(start, start + _CHUNK)
        new, old = (
            trained.root.hessian(likelihood.at(part), points.f[part], points.targets[part]).detach()
            for likelihood in (trained.likelihood, before)
        )
        if factor is None:
            size = old.square().sum()
            factor = float((new * old).sum() / size) if float(size) else 1.0
        if float((new - factor * old).abs().max()) > tolerance * float(new.abs().max()):
            return None
    return factor
