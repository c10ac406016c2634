"""Fit several structures to the same model and compare evidence, time and memory."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ntk_laplace.curvature import CurvatureType
from ntk_laplace.errors import (
    HyperparameterError,
    MemoryBudgetError,
    NTKLaplaceError,
    NTKLaplaceWarning,
    NumericalError,
    UnsupportedError,
    first_line,
    is_choice,
    require_flags,
)
from ntk_laplace.model.likelihoods import Gaussian, Likelihood, positions_of
from ntk_laplace.model.network import Network, probe
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.fit import laplace, spec_of
from ntk_laplace.runtime.meter import PeakMemory, Stopwatch
from ntk_laplace.runtime.progress import track
from ntk_laplace.runtime.random_state import seeded_rng
from ntk_laplace.runtime.resources import is_about_memory
from ntk_laplace.structures import Settings, StructureSpec, structure_names
from ntk_laplace.tools.comparison.table import EvidenceComparison, StructureEvidence

_OF_STRUCTURES = (MemoryBudgetError, HyperparameterError, UnsupportedError, NumericalError)
"""Errors that may not occur with another structure."""


class ComparisonInterrupted(KeyboardInterrupt):
    """A comparison was interrupted; this contains the finished rows.

    Attributes
    ----------
    comparison : EvidenceComparison
        The rows of the finished structures.
    """

    def __init__(self, comparison: EvidenceComparison) -> None:
        done = ", ".join(row.structure for row in comparison.rows) or "no structure"
        super().__init__(f"interrupted after {done}; .comparison contains the finished rows")
        self.comparison = comparison


def compare_evidence(
    network: nn.Module, data: Any, likelihood: Likelihood, prior: GaussianPrior | None = None,
    structures: Sequence[str | StructureSpec] | None = None, correction: bool = False, scores: Sequence[str] = (),
    **options: Any,
) -> EvidenceComparison:
    """Evidence of one trained network under several structures, with time and memory of each.

    Every structure is fitted anew to the same data at the same hyperparameters, on copies: `network`, `prior` and
    `likelihood` do not change. A structure that exceeds the memory or does not support this prior gets a row with the
    reason, and the comparison continues. Warnings of a fit become a note in its row and are not issued. Each structure
    is first fitted to a toy problem, to exclude one-time loading costs from the measurement.

    Parameters
    ----------
    network, data, likelihood, prior
        As for `laplace`. A data loader is read again for each structure.
    structures : sequence
        Names, or specifications with options: ``["gp", "kfac", INF(rank=0.5)]``. By default all structures.
    correction : bool
        Add ½ gᵀH⁻¹g to each evidence.
    scores : sequence of str
        Further columns: "elbo", the evidence lower bound of the linearized model (`Posterior.elbo`), and "importance",
        its evidence by importance sampling (`Posterior.importance_evidence`). Their time is not part of the measured
        one.
    options
        `curvature`, `parameters`, `dtype`, `settings`, `output`, `targets`, as for `laplace`.

    Returns
    -------
    EvidenceComparison

    Raises
    ------
    ComparisonInterrupted
        If interrupted: a `KeyboardInterrupt` that contains the finished rows.
    NTKLaplaceError
        If the network, the data or the likelihood are invalid, or if no structure has a value for reasons other than
        memory.
    """
    require_flags(correction=correction)
    require_scores(scores, ("elbo", "importance"), 'Pass ["elbo"], or leave it out.')
    inspect.signature(laplace).bind(network, data, likelihood, **options)  # raises early for an unknown option
    options["curvature"] = curvature_type = CurvatureType.of(options.get("curvature", "ggn"))
    prior = GaussianPrior.of(prior)
    settings = Settings.of(options.get("settings"))
    if settings.checkpoint is not None or settings.resume is not None:
        raise UnsupportedError("settings without checkpoint and resume, which belong to one structure", f"{settings}",
                               "Fit the structure that takes long with laplace, and the others here.")
    structures = structure_names() if structures is None else structures
    labels = labels_of(structures)
    parameters, output, targets = (options.get(name) for name in ("parameters", "output", "targets"))
    likelihood = copy.deepcopy(Likelihood.of(likelihood))
    frozen = Network(network, parameters, output, targets)
    words = in_words(likelihood, copy.deepcopy(prior).bind(frozen.shapes), curvature_type)
    batches, device = frozen.batches(data, settings.batch_size), frozen.device
    frozen.caller.positions = positions_of(likelihood, batches)
    with torch.inference_mode(False):
        probe(frozen, batches.first()[0])
        # a stream of unknown length is counted, to make sure that all structures read the same examples
        count = batches.length if batches.length is not None else sum(len(y) for _, y in batches)
    found = EvidenceComparison((), None, count, frozen.num_outputs, frozen.num_parameters, words)
    outcomes: list[_Outcome] = []
    try:
        pairs = list(zip(labels, structures, strict=True))
        for label, structure in track(pairs, lambda: f"ntk_laplace: {_next(labels, len(outcomes))}", len(pairs),
                                      settings.progress):
            _warm_up(structure, curvature_type, correction, device, options.get("dtype"))
            fit = partial(laplace, network, batches, likelihood, prior, structure, **options)
            outcomes.append(_attempt(label, partial(_measure, label, fit, correction, scores, device), outcomes))
    except KeyboardInterrupt as stop:
        raise ComparisonInterrupted(_together(found, outcomes)) from stop
    faults = [outcome.fault for outcome in outcomes if outcome.fault and not is_about_memory(outcome.fault)]
    if faults and all(outcome.row.evidence is None for outcome in outcomes):
        raise faults[0]
    return _together(found, outcomes)


# --- before the fits


def require_scores(scores: Any, known: Sequence[str], remedy: str) -> None:
    """Refuse columns that are not all known, or no list (UnsupportedError)."""
    listed = isinstance(scores, (Sequence, Set)) and not isinstance(scores, str)
    if not listed or not all(is_choice(score, known) for score in scores):
        raise UnsupportedError(f"scores= among {', '.join(known)}", repr(scores), remedy)


def labels_of(structures: Sequence[str | StructureSpec]) -> list[str]:
    """A unique label for each structure."""
    if isinstance(structures, str) or not isinstance(structures, Sequence) or not structures:
        raise UnsupportedError("a list of structures", repr(structures), f"Pass one such as {list(structure_names())}.")
    for structure in structures:
        spec_of(structure)
    plain = [_label(structure) for structure in structures]
    many, labels = Counter(plain), []
    seen: Counter[str] = Counter()
    for label in plain:
        seen[label] += 1
        labels.append(f"{label} #{seen[label]}" if many[label] > 1 else label)
    return labels


def _label(structure: str | StructureSpec) -> str:
    """A name unchanged; a specification as its name with the non-default options."""
    if isinstance(structure, str):
        return structure
    options = []
    for entry in fields(cast(Any, structure)):  # a specification is a dataclass
        value = getattr(structure, entry.name)
        if value is not entry.default and value != entry.default:
            text = str(value)
            options.append(f"{entry.name}={text if len(text) < 20 else '...'}")
    return f"{structure.name}({', '.join(options)})" if options else structure.name


def in_words(likelihood: Likelihood, prior: GaussianPrior, curvature_type: CurvatureType) -> str:
    """Likelihood, prior and curvature of a table's heading."""
    precisions = _values(prior.precision.detach(), "prior precision", "prior precisions")
    return f"{_likelihood(likelihood)}, {precisions}, curvature {curvature_type.kind}"


def _likelihood(likelihood: Likelihood) -> str:
    """Class name and hyperparameters, which likelihoods store as logarithms."""
    told = [_values(p.detach().exp(), name.removeprefix("log_"), f"values of {name.removeprefix('log_')}")
            for name, p in likelihood.named_parameters() if name.startswith("log_") and p.numel()]
    return type(likelihood).__name__ + (f" ({', '.join(told)})" if told else "")


def _values(values: Tensor, one: str, several: str) -> str:
    if values.numel() == 1:
        return f"{one} {values.item():g}"
    return f"{values.numel():,} {several} from {values.min().item():g} to {values.max().item():g}"


def _next(labels: list[str], done: int) -> str:
    """Which structure follows so many."""
    return f"{labels[done]}, {done + 1} of {len(labels)}" if done < len(labels) else f"{done} structures"


def _warm_up(
    structure: str | StructureSpec, curvature_type: CurvatureType, correction: bool, device: torch.device,
    dtype: torch.dtype | None
) -> None:
    """Fit to a toy problem, to load libraries and start threads before the measurement."""
    with seeded_rng(device, 0), warnings.catch_warnings(), contextlib.suppress(NTKLaplaceError):
        warnings.simplefilter("ignore")
        toy = nn.Sequential(nn.Linear(2, 3, device=device), nn.Tanh(), nn.Linear(3, 1, device=device))
        data = torch.randn(4, 2, device="cpu"), torch.randn(4, 1, device="cpu")
        quiet = Settings(progress=False)
        name = structure if isinstance(structure, str) else structure.name
        posterior = laplace(toy, data, Gaussian(), None, name, curvature_type, dtype=dtype, settings=quiet)
        posterior.log_marginal_likelihood(correction)


# --- one structure


@dataclass(frozen=True)
class _Outcome:
    """A row, N, whether the structure is exact, and the error that stopped it."""

    row: StructureEvidence
    num_examples: int | None = None
    exact: bool = False
    fault: Exception | None = None


def _attempt(label: str, measure: Callable[[], _Outcome], before: Sequence[_Outcome]) -> _Outcome:
    """Measure one structure; errors that may be specific to it become the row's note."""
    try:
        with _heard([outcome.row for outcome in before]) as notes:
            outcome = measure()
    except Exception as error:
        # an error after other structures have a value affects only its own row
        late = isinstance(error, NTKLaplaceError) and any(outcome.row.evidence is not None for outcome in before)
        if not (late or isinstance(error, _OF_STRUCTURES) or is_about_memory(error)):
            raise
        error.__cause__ = error.__context__ = None
        # without its traceback, whose frames keep the fit's memory allocated
        return _Outcome(StructureEvidence(label, note=_reason(error)), fault=error.with_traceback(None))
    return replace(outcome, row=replace(outcome.row, note="; ".join(notes)))


@contextlib.contextmanager
def _heard(rows: Sequence[StructureEvidence]) -> Iterator[list[str]]:
    """Collect the library's warnings that no earlier row reports; other warnings reach the caller."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield notes
    said = " ".join(row.note for row in rows)
    for warning in caught:
        if not issubclass(warning.category, NTKLaplaceWarning):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        elif str(warning.message) not in said:
            notes.append(f"note: {warning.message}")


def _measure(
    label: str, fit: Callable[[], Posterior], correction: bool, scores: Sequence[str], device: torch.device
) -> _Outcome:
    fitting, evaluating = Stopwatch(device), Stopwatch(device)
    with PeakMemory(device) as memory, torch.inference_mode(False):
        with fitting:
            posterior = fit()
        with evaluating, torch.no_grad():
            found = posterior.evidence(correction)
    row = StructureEvidence(
        label, evidence=float(found), log_det=float(found.log_det),
        log_joint=float(found.log_likelihood + found.log_prior),
        correction=float(found.correction) if correction else None,  # [I21] A.1
        fit_seconds=fitting.seconds, evidence_seconds=evaluating.seconds, peak_memory=memory.bytes,
        standard_error=found.standard_error,
    )
    if "elbo" in scores:
        elbo = posterior.elbo()
        row = replace(row, elbo=float(elbo), elbo_error=elbo.standard_error)
    if "importance" in scores:
        drawn = posterior.importance_evidence(model="glm")
        row = replace(row, importance=drawn.value, importance_error=drawn.standard_error)
    reference = posterior.fitted.structure.spec.exact and found.standard_error == 0
    return _Outcome(row, posterior.num_examples, reference)


def _reason(error: Exception) -> str:
    if not isinstance(error, NTKLaplaceError):
        return f"failed: out of memory ({first_line(error)})"
    refused = isinstance(error, (MemoryBudgetError, HyperparameterError, UnsupportedError))
    return f"{'refused' if refused else 'failed'}: {error}"


def _together(found: EvidenceComparison, outcomes: Sequence[_Outcome]) -> EvidenceComparison:
    """All rows, with their differences from the first exact structure."""
    n = next((outcome.num_examples for outcome in outcomes if outcome.num_examples), found.num_examples)
    exact = next((outcome.row for outcome in outcomes if outcome.exact), None)
    best = None if exact is None else exact.evidence
    rows = tuple(
        outcome.row if best is None or outcome.row is exact or outcome.row.evidence is None
        else replace(outcome.row, difference=outcome.row.evidence - best) for outcome in outcomes
    )
    return replace(found, rows=rows, exact=None if exact is None else exact.structure, num_examples=n)
