"""Passes over the training data with a progress bar, and fingerprints of what must not change between them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.data import Inputs, RowBuffer, Selected, Source, fill_buffer, num_examples
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.progress import track
from ntk_laplace.structures.batch_merging import merged_batches
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.points import TrainingPoints, present_values, unmoved

__all__ = [
    "ModelSignature",
    "common_factor",
    "digest",
    "jvp",
    "read_batches",
    "read_rows",
    "selected",
    "vjp",
]


def read_batches(
    model: LinearizedModel, batches: Source, what: str
) -> Iterator[tuple[Inputs, Tensor]]:
    """One pass over the data; the progress bar shows `what`."""
    return track(
        merged_batches(batches, model.network), f"ntk_laplace: {what}", batches.length, model.settings.progress,
        lambda pair: num_examples(pair[0]),
    )  # fmt: skip


def read_outputs(model: LinearizedModel, batches: Source) -> tuple[Tensor, Tensor]:
    """The network's outputs (N, C), in the algebra's dtype, and the targets as given."""
    f, targets = RowBuffer(batches.length or 0), RowBuffer(batches.length or 0)
    for x, y in read_batches(model, batches, "outputs"):
        f.append(model.network.without_grad(x, len(f)).to(model.jacobian_pass.dtype))
        targets.append(y)
    return f.rows, targets.rows


def read_rows(
    model: LinearizedModel, batches: Source, root: Tensor | None, max_batch: int | None, what: str
) -> Iterator[Jacobian]:
    """Rows of J, or of SᵀJ for S (N, C, R), at most `max_batch` examples at a time."""
    seen = 0
    for x, _ in read_batches(model, batches, what):
        n = num_examples(x)
        yield from model.jacobian_pass.batches(x, None if root is None else root[seen : seen + n], max_batch, seen)
        seen += n


def selected(batches: Source, index: Tensor, total: int) -> Selected:
    """The examples at `index` of a source with `total` examples."""
    keep = torch.zeros(total, dtype=torch.bool)
    keep[index.cpu()] = True
    return Selected(batches, keep)


def vjp(model: LinearizedModel, batches: Source, residual: Tensor, max_batch: int | None) -> Tensor:
    """Jᵀr, (P,), for r (N, C): one backward pass per batch, with cotangent r."""
    total = torch.zeros_like(model.theta)
    for rows in read_rows(model, batches, residual.unsqueeze(-1), max_batch, "gradient"):
        total += rows.vjp(rows.f.new_ones(rows.num_examples, 1), model.network.shapes)
    return total


def jvp(model: LinearizedModel, batches: Source, vector: Tensor, max_batch: int | None) -> Tensor:
    """J v, (N, C), for v (P,)."""
    named = model.network.unflatten(vector)
    rows = read_rows(model, batches, None, max_batch, "directional derivatives")
    return fill_buffer((part.jvp(named) for part in rows), batches.length or 0).rows


def digest(*tensors: Tensor) -> str:
    """Fingerprint of tensors."""
    found = hashlib.blake2b(digest_size=32)
    for tensor in tensors:
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())  # NumPy has no bfloat16
    return found.hexdigest()


class ModelSignature(Mapping[str, str]):
    """Fingerprints, by name, of everything that the sums over the data depend on.

    The fingerprint of the weights, which are constant, is computed on access: only an interrupted fit is compared.
    """

    def __init__(self, model: LinearizedModel) -> None:
        likelihood = model.likelihood
        self._network = model.network
        self._found = {
            "parameters": repr({name: tuple(shape) for name, shape in model.network.shapes.items()}),
            "likelihood": type(likelihood).__name__ + digest(*likelihood.parameters(), *likelihood.buffers()),
            "curvature": repr(model.curvature_type),
            "prior groups": repr(model.prior.groups),
            "dtype": repr(model.jacobian_pass.dtype),
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


def common_factor(model: LinearizedModel, before: Likelihood, points: TrainingPoints) -> float | None:
    """c with Λ_n now = c Λ_n under the likelihood `before`, for all n; None if there is no such number."""
    if unmoved(present_values(before), model.likelihood):
        return 1.0
    factor: float | None = None
    tolerance = 64 * torch.finfo(points.f.dtype).eps
    for start in range(0, len(points.f), tuning.HESSIAN_EXAMPLES):
        part = slice(start, start + tuning.HESSIAN_EXAMPLES)
        new, old = (
            model.curvature_type.curvature(likelihood.at(part), points.f[part], points.targets[part]).detach()
            for likelihood in (model.likelihood, before)
        )
        if factor is None:
            size = old.square().sum()
            factor = float((new * old).sum() / size) if float(size) else 1.0
        if float((new - factor * old).abs().max()) > tolerance * float(new.abs().max()):
            return None
    return factor
