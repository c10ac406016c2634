"""What each structure would take: memory and time of a fit, before it."""

from __future__ import annotations

import copy
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ntk_laplace.curvature import CurvatureType
from ntk_laplace.errors import NTKLaplaceError, UnsupportedError, require_whole
from ntk_laplace.jacobian import Jacobian, JacobianPass
from ntk_laplace.model.data import Inputs
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.network import ParameterChoice, outside_autocast
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.posterior.fit import linearized, spec_of
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import cholesky_of
from ntk_laplace.runtime.meter import Stopwatch
from ntk_laplace.runtime.resources import format_bytes
from ntk_laplace.structures import Auto, LinearizedModel, Settings, StructureSpec, structure_names
from ntk_laplace.structures.forecast import Forecast, Problem, Work, memory_of
from ntk_laplace.structures.problem_sample import ProblemSample
from ntk_laplace.tools.comparison.compare import in_words, labels_of
from ntk_laplace.tools.comparison.rows import Rows, aligned, notes_of


@dataclass(frozen=True)
class StructurePlan:
    """What one structure is expected to take.

    Attributes
    ----------
    structure : str
        With its non-default options.
    memory : int or None
        Peak bytes of a fit, its evidence and predictions of as many inputs as there are examples, at most 512 at a
        time; None if the structure does not say.
    stored : mapping of str to int
        What the posterior keeps of them, by what it is.
    fits : bool or None
        Whether the fit is not refused for memory.
    seconds : float or None
        Of the fit and its evidence.
    shared_memory, shared_fits, shared_seconds
        The same of each of several processes on devices like this one, without the time of communication; None for one
        process.
    communication : int or None
        Bytes that each process sends.
    note : str
        What the forecast assumes, or why there is none.
    """

    structure: str
    memory: int | None = None
    stored: Mapping[str, int] = field(default_factory=dict)
    fits: bool | None = None
    seconds: float | None = None
    shared_memory: int | None = None
    shared_fits: bool | None = None
    shared_seconds: float | None = None
    communication: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Plan(Rows[StructurePlan]):
    """Memory and time of a fit with each structure; print it for a table.

    In the table, "tight" is a fit that is not refused, and whose peak with all buffers is above the memory.

    Attributes
    ----------
    rows : tuple of StructurePlan
    memory : int
        Bytes that a fit may use, on each device.
    device : str
    processes : int
    num_examples, num_outputs, num_parameters : int
        N, C and P.
    model : str
        A description of likelihood, prior and curvature.
    """

    _row = StructurePlan
    memory: int
    device: str
    processes: int
    num_examples: int
    num_outputs: int
    num_parameters: int
    model: str

    def __str__(self) -> str:
        """A table, and what the forecasts assume."""
        lines = [*self._head(), "", *aligned(self._columns()), "", *notes_of(self.rows)]
        return "\n".join(lines).rstrip("\n")

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        heads, *rows = zip(*self._columns(), strict=True)
        notes = ["note", *(row.note for row in self.rows)]
        table = [(heads, "th"), *((row, "td") for row in rows)]
        lines = ["".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in (*row, note))
                 for (row, tag), note in zip(table, notes, strict=True)]
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        return f"<p>{'<br>'.join(map(html.escape, self._head()))}</p><table>{body}</table>"

    def _head(self) -> list[str]:
        many = "" if self.processes == 1 else f", and on {self.processes:,} such devices"
        return [
            f"What a fit would take on {self.device} with {format_bytes(self.memory)}{many}",
            f"N = {self.num_examples:,}, C = {self.num_outputs:,}, P = {self.num_parameters:,}; {self.model}",
        ]

    def _columns(self) -> list[list[str]]:
        forms: list[tuple[str, str, Callable[[Any], str]]] = [
            ("memory", "memory", format_bytes), ("fits", "fits", _yes), ("time", "seconds", duration)]
        if self.processes > 1:
            forms += [(f"each of {self.processes:,}", "shared_memory", format_bytes), ("fits", "shared_fits", _yes),
                      ("time", "shared_seconds", duration), ("sent", "communication", format_bytes)]
        columns = [["structure", *(row.structure for row in self.rows)]]
        for heading, name, form in forms:
            cells = self._cells(name, form)
            if heading == "fits":
                sizes = [getattr(row, name.replace("fits", "memory")) or 0 for row in self.rows]
                pairs = zip(cells, sizes, strict=True)
                cells = ["tight" if cell == "yes" and size > self.memory else cell for cell, size in pairs]
            columns.append([heading, *cells])
        return columns


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def duration(seconds: float) -> str:
    """Seconds, with a unit that suits them."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def plan(
    network: nn.Module, data: Any, likelihood: Likelihood, prior: GaussianPrior | None = None,
    structures: Sequence[str | StructureSpec] | None = None, curvature: str | CurvatureType = "ggn", *,
    processes: int = 1, parameters: ParameterChoice = None, dtype: torch.dtype | None = None,
    settings: Settings | None = None, output: str | int | None = None, targets: str | None = None,
) -> Plan:
    """Memory and time that a fit would take with each structure, on this device and on several, before any fit.

    Rows of J of a few examples are computed. They show the bytes of a row, which the structures' formulas use, and how
    long rows, products with them and dense linear algebra take here. A structure that the plan says fits is not refused
    by `laplace`, and one that it says does not fit is.

    Parameters
    ----------
    network, data, likelihood, prior, curvature, parameters, dtype, settings, output, targets
        As for `laplace`.
    structures : sequence
        Names, or specifications with options; all structures by default.
    processes : int
        On how many devices like this one the fit would be shared.

    Returns
    -------
    Plan

    Raises
    ------
    NTKLaplaceError
        If the network, the data or the likelihood are invalid.
    """
    require_whole("processes", processes, 1, "Leave it out for one.")
    structures = structure_names() if structures is None else structures
    names = labels_of(structures)
    with torch.inference_mode(False):
        own = copy.deepcopy(Likelihood.of(likelihood)), copy.deepcopy(GaussianPrior.of(prior))
    model, batches = linearized(network, data, *own, Auto(None, None), curvature, parameters=parameters, dtype=dtype,
                                settings=settings, output=output, targets=targets)
    with torch.inference_mode(False), outside_autocast():
        x, y = batches.first()
        count = batches.length if batches.length is not None else sum(len(part) for _, part in batches)
        model.jacobian_pass.prepare(x)
        model.likelihood.bind(count, model.network.num_outputs)
        probe = _Probe(model, x, y, count)
        rows = [_planned(name, spec_of(structure), probe, processes) for name, structure in
                zip(names, structures, strict=True)]
    batches.close()
    words = in_words(own[0], own[1], model.curvature_type)
    return Plan(tuple(rows), memory_of(model), str(model.network.device), processes, count, model.network.num_outputs,
                model.network.num_parameters, words)


def _planned(name: str, spec: StructureSpec | Auto, probe: _Probe, processes: int) -> StructurePlan:
    if isinstance(spec, Auto):
        raise UnsupportedError("structures whose cost to forecast", "'auto'", 'Name "gp" and "full".')
    try:
        spec.check(probe.model.prior)
        problem, rates = probe.measured(spec.factored_rows)
        found = [spec.forecast(replace(problem, processes=k)) for k in dict.fromkeys((1, processes))]
    except NTKLaplaceError as error:
        return StructurePlan(name, note=f"refused: {error}")
    alone, shared = found[0], found[-1]
    if alone is None or shared is None:
        return StructurePlan(name, note="this structure makes no forecast")
    memory = memory_of(probe.model)
    row = StructurePlan(name, alone.bytes, dict(alone.stored), alone.required <= memory, _seconds(alone, rates),
                        note=alone.note)
    if processes == 1:
        return row
    note = alone.note if alone.note == shared.note else f"{alone.note}; on {processes:,}, {shared.note}"
    return replace(row, shared_memory=shared.bytes, shared_fits=shared.required <= memory,
                   shared_seconds=_seconds(shared, rates), communication=shared.communication, note=note)


def _seconds(forecast: Forecast, rates: Work) -> float | None:
    return None if forecast.work is None else forecast.work.seconds(rates)


class _Probe:
    """Rows of a few examples, and what they and dense linear algebra take on this device."""

    def __init__(self, model: LinearizedModel, x: Inputs, y: Tensor, count: int) -> None:
        self.model, self._sample, self._dense = model, ProblemSample.of(model, x, y, count), _dense_rates(model)
        self._problems: dict[bool, tuple[Problem, Work]] = {}

    def measured(self, factored: bool) -> tuple[Problem, Work]:
        """The problem with rows in the storage of a structure, and work per second."""
        if factored not in self._problems:
            given, sample = self.model.jacobian_pass, self._sample
            own = JacobianPass(given.network, given.dtype, factored, given.sizes.budget)
            rows, each = _timed(lambda: own.rows(sample.x), self.model)
            passes, products = rows.num_examples / each, self._products(sample.weighted(rows))
            rates = replace(self._dense, passes=passes, products=products)
            self._problems[factored] = sample.problem(replace(self.model, jacobian_pass=own), rows), rates
        return self._problems[factored]

    def _products(self, weighted: Jacobian) -> float:
        """Examples times vectors that a product forth and back takes in a second."""
        shapes, theta = self.model.network.shapes, self.model.theta
        many = max(1, min(tuning.PRODUCT_VECTORS, tuning.FULL_ROWS_BYTES // theta.nbytes))
        vectors = theta.expand(many, -1).clone()

        def product() -> Tensor:
            return weighted.transposed_products(weighted.products(shapes.parts(vectors)), shapes)

        _, seconds = _timed(product, self.model)
        return weighted.num_examples * many / seconds


def _dense_rates(model: LinearizedModel) -> Work:
    """Rates of dense linear algebra on this device."""
    device, dtype = model.network.device, model.jacobian_pass.dtype
    n = tuning.PROBED_ORDER if device.type == "cpu" else tuning.PROBED_ORDER_DEVICE
    a = torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=dtype, device="cpu").to(device)
    _, matmul = _timed(lambda: a @ a.T, model)
    n *= 2  # a factorization reaches its rate later
    square = torch.full((n, n), 0.5, dtype=dtype, device=device)
    square.diagonal().add_(n)
    _, cholesky = _timed(lambda: cholesky_of(square), model)
    few = a[: n // 4, : n // 4] @ a[: n // 4, : n // 4].T
    _, eigh = _timed(lambda: torch.linalg.eigh(few), model)
    return Work(matmul=2 * (n // 2) ** 3 / matmul, cholesky=n**3 / 3 / cholesky, eigh=(n // 4) ** 3 / eigh)


def _timed(function: Callable[[], Any], model: LinearizedModel) -> tuple[Any, float]:
    """The result of a call, and the time of a second one: the first may load libraries."""
    function()
    with Stopwatch(model.network.device) as watch:
        found = function()
    return found, max(watch.seconds, 1e-9)
