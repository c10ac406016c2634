"""Result of a comparison of structures, as a table, a data frame, JSON or a figure."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ntk_laplace.runtime.resources import format_bytes
from ntk_laplace.tools.comparison.rows import Rows, aligned, notes_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_FORMS = {
    "evidence": ("evidence", "{:.3f}"), "standard_error": ("±", "{:.2g}"), "difference": ("difference", "{:+.4g}"),
    "log_det": ("log det B", "{:.3f}"), "log_joint": ("log joint", "{:.3f}"), "correction": ("correction", "{:.3g}"),
    "elbo": ("ELBO", "{:.3f}"), "elbo_error": ("ELBO ±", "{:.2g}"), "importance": ("importance", "{:.3f}"),
    "importance_error": ("imp. ±", "{:.2g}"), "fit_seconds": ("fit s", "{:.2f}"),
    "evidence_seconds": ("evid. s", "{:.2f}"),
}


@dataclass(frozen=True)
class StructureEvidence:
    """One structure's evidence with its time and memory, or the reason why there is none.

    Attributes
    ----------
    structure : str
        The requested structure, with its non-default options.
    evidence : float or None
        Log marginal likelihood in nats, summed over the data. Like all fields below it is None if there is no value.
    difference : float or None
        Evidence minus that of the comparison's exact structure.
    log_det : float or None
        log det B, in nats.
    log_joint : float or None
        Log likelihood minus the prior's energy, in nats; the same for all structures.
    correction : float or None
        ½ gᵀH⁻¹g in nats, if requested.
    fit_seconds, evidence_seconds : float or None
        Wall time of `laplace`, which includes the factorization, and of the evidence after it.
    peak_memory : int or None
        Peak bytes beyond the memory before the fit: counted by torch on CUDA, elsewhere an estimate from the
        process's resident memory.
    standard_error : float or None
        Of the evidence, if it is a stochastic estimate; 0 if it is not.
    elbo, elbo_error : float or None
        Evidence lower bound of the linearized model, if requested, and its standard error.
    importance, importance_error : float or None
        Evidence of the linearized model by importance sampling from this structure's Gaussian, if requested, and its
        standard error; a note says where it is not to be trusted.
    note : str
        Empty, or "refused: ..." or "failed: ..." with the reason, or "note: ..." with warnings of the fit that no
        earlier row reports.
    """

    structure: str
    evidence: float | None = None
    difference: float | None = None
    log_det: float | None = None
    log_joint: float | None = None
    correction: float | None = None
    fit_seconds: float | None = None
    evidence_seconds: float | None = None
    peak_memory: int | None = None
    standard_error: float | None = None
    elbo: float | None = None
    elbo_error: float | None = None
    importance: float | None = None
    importance_error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class EvidenceComparison(Rows[StructureEvidence]):
    """Evidence of one network under several structures; print it for a table.

    Attributes
    ----------
    rows : tuple of StructureEvidence
        In the requested order.
    exact : str or None
        Structure that the differences refer to: the first of "gp" and "full" with a value, or None.
    num_examples, num_outputs, num_parameters : int or None
        N, C and P.
    model : str
        A description of likelihood, prior and curvature.
    """

    _row = StructureEvidence
    exact: str | None
    num_examples: int | None
    num_outputs: int | None
    num_parameters: int
    model: str

    def columns(self) -> list[list[str]]:
        """Columns of the table, each with its heading first, without those that are empty."""
        columns = [["structure", *(row.structure for row in self.rows)]]
        for name, (heading, form) in _FORMS.items():
            values = [getattr(row, name) for row in self.rows]
            cells = self._cells(name, form.format)
            if name == "evidence":  # "refused" or "failed"; the full reason is below the table
                cells = [row.note.partition(":")[0] if row.evidence is None else cell
                         for row, cell in zip(self.rows, cells, strict=True)]
            if name == "difference":
                cells = ["exact" if row.structure == self.exact else cell
                         for row, cell in zip(self.rows, cells, strict=True)]
            if name.endswith("_error"):
                values = [value or None for value in values]  # not a column of zeros
                cells = ["" if value is None else form.format(value) for value in values]
            if name == "evidence" or any(value is not None for value in values):
                columns.append([heading, *cells])
        return [*columns, ["memory", *self._cells("peak_memory", format_bytes)]]

    def plot(self) -> Figure:
        """Evidence, time and memory side by side, one row per structure."""
        from ntk_laplace.plotting import evidence_comparison

        return evidence_comparison(
            [row.structure for row in self.rows],
            [row.evidence for row in self.rows],
            [None if row.fit_seconds is None or row.evidence_seconds is None
             else (row.fit_seconds, row.evidence_seconds) for row in self.rows],
            [row.peak_memory for row in self.rows],
            None if self.exact is None else self[self.exact].evidence,
            [row.standard_error for row in self.rows],
        )

    def __str__(self) -> str:
        """A table of at most 80 columns if labels are short, followed by notes and reasons for missing values."""
        sizes = (("N", self.num_examples), ("C", self.num_outputs), ("P", self.num_parameters))
        head = ", ".join(f"{letter} = {count:,}" for letter, count in sizes if count is not None)
        lines = ["Log marginal likelihood, in nats", textwrap.fill(f"{head}; {self.model}", 80), "",
                 *aligned(self.columns()), ""]
        if self.exact is not None:
            lines.append(f"difference: from {self.exact}, which is exact for this curvature")
        return "\n".join([*lines, *notes_of(self.rows)]).rstrip("\n")
