"""Passes over the training data with a progress bar, and fingerprints of what must not change between them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.data import Inputs, RowBuffer, Selected, Source, fill_buffer, num_examples
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.progress import track
from ntk_laplace.structures.batch_merging import merged_batches
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.points import TrainingPoints, present_values, unmoved

T = TypeVar("T")


def read_batches(
    model: LinearizedModel, batches: Source, what: str
) -> Iterator[tuple[Inputs, Tensor]]:
    """One pass over the data; the progress bar shows `what`."""
    merged = merged_batches(batches, model.network)
    return shown(model, merged, what, batches.length, lambda pair: num_examples(pair[0]))


def shown(
    model: LinearizedModel, items: Iterable[T], what: str | Callable[[], str], total: int | None,
    size: Callable[[T], int] = lambda item: 1,
) -> Generator[T, None, None]:
    """Parts of a pass, with a progress bar on the first process; a callable `what` is called after each part."""
    enabled = model.settings.progress if model.settings.reducer.rank == 0 else False
    words = (lambda: f"ntk_laplace: {what()}") if callable(what) else f"ntk_laplace: {what}"
    return track(items, words, total, enabled, size, tuning.PROGRESS_DELAY)


# --- examples of all processes, in their global order


def own_rows(model: LinearizedModel, batches: Source, values: Tensor) -> Tensor:
    """The rows of `values` (N, ...) that belong to the examples this process reads."""
    reducer = model.settings.reducer
    return values if reducer.world_size == 1 else values[batches.numbers(reducer)[0].to(values.device)]


def collected(model: LinearizedModel, batches: Source, rows: Tensor) -> Tensor:
    """Rows (N, ...) of all examples, from the rows of those that this process reads."""
    reducer = model.settings.reducer
    if reducer.world_size == 1:
        return rows
    numbers = reducer.concat(batches.numbers(reducer)[0])
    rows = reducer.concat(rows).to(model.network.device)
    return rows[numbers.argsort().to(rows.device)]


def collected_jacobian(model: LinearizedModel, batches: Source, parts: list[Jacobian]) -> Jacobian:
    """Rows of J of all examples, from the rows of those that this process reads."""
    reducer = model.settings.reducer
    if reducer.world_size == 1:
        return Jacobian.concatenate(parts)
    device, numbers = model.network.device, reducer.concat(batches.numbers(reducer)[0])
    whole = Jacobian.concatenate([part.to(model.jacobian_pass.dtype, device)
                                  for own in reducer.gather(parts) for part in own])  # freed before the next copy
    return whole.subset(numbers.argsort().to(device))


def collected_points(
    model: LinearizedModel, batches: Source, f: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs, targets and weights of all examples, from those that this process has read."""
    weights, reducer = batches.weights, model.settings.reducer
    if any(reducer.gather(weights is not None)):  # 1 on a process whose data have no weights
        weights = f.new_ones(len(f), dtype=torch.float64) if weights is None else weights
        weights = collected(model, batches, weights)
    return collected(model, batches, f), collected(model, batches, targets), weights


def read_points(model: LinearizedModel, batches: Source) -> TrainingPoints:
    """Outputs in the algebra's dtype, targets and weights of all examples, in one pass."""
    f, targets = RowBuffer(batches.length or 0), RowBuffer(batches.length or 0)
    for x, y in read_batches(model, batches, "outputs"):
        f.append(model.network.without_grad(x, len(f)).to(model.jacobian_pass.dtype))
        targets.append(y)
    return TrainingPoints.checked(model.likelihood, *collected_points(model, batches, f.rows, targets.rows))


def read_rows(
    model: LinearizedModel, batches: Source, root: Tensor | None, max_batch: int | None, what: str
) -> Iterator[Jacobian]:
    """Rows of J, or of SᵀJ for S (N, C, R), of the examples that this process reads, at most `max_batch` at a time."""
    seen, root = 0, None if root is None else own_rows(model, batches, root)
    for x, _ in read_batches(model, batches, what):
        n = num_examples(x)
        yield from model.jacobian_pass.batches(x, None if root is None else root[seen : seen + n], max_batch, seen)
        seen += n


def selected(model: LinearizedModel, batches: Source, index: Tensor, total: int) -> Selected:
    """The examples at `index` of a source with `total` examples."""
    keep = torch.zeros(total, dtype=torch.bool, device="cpu")
    keep[index.cpu()] = True
    return Selected.of(batches, keep, model.settings.reducer)


def vjp(model: LinearizedModel, batches: Source, residual: Tensor, max_batch: int | None) -> Tensor:
    """Jᵀr, (P,), for r (N, C): one backward pass per batch, with cotangent r."""
    total, seen, own = torch.zeros_like(model.theta), 0, own_rows(model, batches, residual)
    for x, _ in read_batches(model, batches, "gradient"):
        n = num_examples(x)
        total += model.jacobian_pass.vjp(x, own[seen : seen + n], max_batch, seen)
        seen += n
    model.settings.reducer.sum_(total)
    return total


def jvp(model: LinearizedModel, batches: Source, vector: Tensor, max_batch: int | None) -> Tensor:
    """J v, (N, C), for v (P,)."""
    named = model.network.unflatten(vector)
    return per_example(model, batches, max_batch, "directional derivatives", lambda rows: rows.jvp(named))


def per_example(
    model: LinearizedModel, batches: Source, max_batch: int | None, what: str, function: Callable[[Jacobian], Tensor]
) -> Tensor:
    """A function (n, ...) of rows of J, for all N examples."""
    rows = read_rows(model, batches, None, max_batch, what)
    return collected(model, batches, fill_buffer((function(part) for part in rows), batches.length or 0).rows)


def digest(*tensors: Tensor) -> str:
    """Fingerprint of tensors."""
    found = hashlib.blake2b(digest_size=32)
    for tensor in tensors:
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)  # NumPy has no bfloat16
    return found.hexdigest()


def _settings(record: Any) -> str:
    """Names, and what is no tensor, of a likelihood's record."""
    if isinstance(record, Mapping):
        return "(" + ", ".join(f"{name}={_settings(value)}" for name, value in record.items()) + ")"
    return "" if isinstance(record, Tensor) else f"{record}"


_WEIGHTS = ("network", "frozen parameters and buffers")


class ModelSignature(Mapping[str, str]):
    """Fingerprints, by name, of everything that the sums over the data depend on.

    Those of the weights, which are constant, are computed on access: only an interrupted fit is compared.
    """

    def __init__(self, model: LinearizedModel) -> None:
        likelihood = model.likelihood
        self._network = model.network
        self._found = {
            "parameters": repr({name: tuple(shape) for name, shape in model.network.shapes.items()}),
            "likelihood": type(likelihood).__name__ + _settings(likelihood.record())
                          + digest(*likelihood.parameters(), *likelihood.buffers()),
            "curvature": repr(model.curvature_type),
            "prior groups": model.prior.group_words,
            "dtype": repr(model.jacobian_pass.dtype),
        }

    def __getitem__(self, what: str) -> str:
        if what in _WEIGHTS and what not in self._found:
            output = self._network.output
            own = digest(self._network.theta) + ("" if output is None else f" {output!r}")
            self._found |= dict(zip(_WEIGHTS, (own, digest(*self._network.fixed)), strict=True))
        return self._found[what]

    def __iter__(self) -> Iterator[str]:
        yield from _WEIGHTS
        yield from (what for what in self._found if what not in _WEIGHTS)

    def __len__(self) -> int:
        return len(self._found.keys() | set(_WEIGHTS))


def common_factor(model: LinearizedModel, before: Likelihood, points: TrainingPoints) -> float | None:
    """c with Λ_n now = c Λ_n under the likelihood `before`, for all n; None if there is no such number."""
    if unmoved(present_values(before), model.likelihood):
        return 1.0
    factor: float | None = None
    tolerance = 64 * torch.finfo(points.f.dtype).eps
    for part in panels(len(points.f), points.num_outputs**2 * points.f.element_size(), tuning.HESSIAN_BYTES):
        new, old = (
            model.curvature_type.curvature(likelihood.at(part), points.f[part], points.targets[part]).detach()
            for likelihood in (model.likelihood, before)
        )
        if factor is None and bool(old.any()):  # targets of the first examples may be missing
            factor = float((new * old).sum() / old.square().sum())
        # each entry beside the diagonal of its own example: others may be larger by any factor
        root = new.diagonal(dim1=1, dim2=2).clamp_min(0.0).sqrt()
        size = root.unsqueeze(2) * root.unsqueeze(1)
        if bool(((new - (factor or 0.0) * old).abs() > tolerance * size).any()):
            return None
    return 1.0 if factor is None else factor
