"""Result of a model comparison: scores and rank correlations, as a table, a data frame or a figure."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ntk_laplace.errors import DataError
from ntk_laplace.tools.comparison.rows import Rows, aligned, plus_minus

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CRITERIA = ("evidence", "conditional", "loo", "bic", "aic")
BOUNDS = {"elbo": "glm", "elbo_nn": "nn"}
"""Columns with a lower bound of the evidence, and the method of each."""
SAMPLED = "importance"
"""Column of the network's evidence by importance sampling."""
_ERRORS = {name: f"{name}_error" for name in ("evidence", "loo", *BOUNDS, SAMPLED)}
_ERRORS["test_log_likelihood"] = "test_error"
_TRUST = {"loo": "loo_trusted", SAMPLED: "importance_trusted"}
LESS_IS_BETTER = ("test_brier", "test_ece", "test_rmse")
_HEADINGS = {
    "parameters": ("P", "{:,}"), "effective_parameters": ("effective", "{:.1f}"), "evidence": ("evidence", "{:.2f}"),
    "conditional": ("conditional", "{:.2f}"), "loo": ("LOO", "{:.2f}"), "bic": ("BIC", "{:.1f}"),
    "aic": ("AIC", "{:.1f}"), "elbo": ("ELBO", "{:.2f}"), "elbo_nn": ("ELBO nn", "{:.2f}"),
    "importance": ("importance", "{:.2f}"),
    "test_log_likelihood": ("test log lik.", "{:.4f}"),
    "test_accuracy": ("accuracy", "{:.4f}"), "test_rmse": ("RMSE", "{:.4g}"),
}
_WORDS = {
    "evidence": "evidence, nats", "conditional": "conditional evidence, nats", "loo": "leave-one-out log density, nats",
    "bic": "BIC as a log score, nats", "aic": "AIC as a log score, nats",
    "elbo": "evidence lower bound, linearized model, nats", "elbo_nn": "evidence lower bound, network, nats",
    "importance": "evidence by importance sampling, network, nats",
    "test_log_likelihood": "test log likelihood, nats per example", "test_accuracy": "test accuracy",
    "test_brier": "test Brier score", "test_ece": "test calibration error", "test_rmse": "test RMSE",
    "parameters": "parameters", "effective_parameters": "effective parameters",
}


@dataclass(frozen=True)
class ModelScores:
    """One model's scores.

    Attributes
    ----------
    name, structure : str
    parameters : int
        P.
    effective_parameters : float
        γ, the number of parameters that the data determine.
    evidence : float or None
        Log marginal likelihood without correction. Like all criteria below it is in nats, summed over the training
        data, and larger is better; None if it was not asked for, or the posterior is no Laplace approximation.
    conditional : float or None
        Conditional evidence, given m points.
    loo : float or None
        Leave-one-out log density; None if the structure does not support it.
    bic, aic : float or None
        As log scores; the textbook definitions are -2 times these.
    prior_gap : float
        Estimated increase of the evidence, in nats, by better precisions at these weights.
    vague, narrow : bool
        Whether the prior is much wider, or much tighter, than the weights; see `compare_models`.
    prior : str
        A description of the prior check; empty if neither.
    loo_trusted : bool or None
        Whether leave-one-out is a reliable estimate of retraining without each point; None if there is no score.
    loo_note : str
        Reasons to distrust it, or why there is no score; else empty.
    loo_error : float
        Standard error of `loo`: how far it may be from that of other data of this size.
    loo_behind : float or None
        How far `loo` is below the largest of all models, and its standard error, from the differences point by point.
    loo_behind_error : float
    evidence_error : float
        Standard error of the evidence, if it is a stochastic estimate; else 0.
    elbo, elbo_nn : float or None
        Evidence lower bounds of the linearized model and of the network, if asked for.
    elbo_error, elbo_nn_error : float
        Their standard errors.
    importance : float or None
        Evidence of the network by importance sampling, if asked for.
    importance_error : float
        Its standard error.
    importance_trusted : bool or None
        Whether it is to be trusted.
    test_log_likelihood : float or None
        In nats per test example; like all scores below None without test data.
    test_error, test_behind, test_behind_error
        As for `loo`. None is behind a model that was tested on other examples.
    test_accuracy, test_brier, test_ece : float or None
        For classification.
    test_rmse : float or None
        For regression.
    """

    name: str
    structure: str
    parameters: int
    effective_parameters: float
    evidence: float | None
    conditional: float | None
    loo: float | None
    bic: float | None
    aic: float | None
    prior_gap: float
    vague: bool
    narrow: bool
    prior: str
    loo_trusted: bool | None = None
    loo_note: str = ""
    loo_error: float = 0.0
    loo_behind: float | None = None
    loo_behind_error: float = 0.0
    evidence_error: float = 0.0
    elbo: float | None = None
    elbo_error: float = 0.0
    elbo_nn: float | None = None
    elbo_nn_error: float = 0.0
    importance: float | None = None
    importance_error: float = 0.0
    importance_trusted: bool | None = None
    test_log_likelihood: float | None = None
    test_error: float = 0.0
    test_behind: float | None = None
    test_behind_error: float = 0.0
    test_accuracy: float | None = None
    test_brier: float | None = None
    test_ece: float | None = None
    test_rmse: float | None = None


@dataclass(frozen=True)
class ModelComparison(Rows[ModelScores]):
    """Scores of several models of the same data; print it for a table.

    Attributes
    ----------
    rows : tuple of ModelScores
        In the order of the given models.
    num_examples : int
        N, the number of training points.
    m : int or None
        Number of points that the conditional evidence conditions on.
    conditional : str
        Its method, "evidence", "average" or "none".
    """

    _row = ModelScores
    _what = "model"
    num_examples: int
    m: int | None
    conditional: str

    @property
    def vague(self) -> tuple[str, ...]:
        """Models whose prior is much wider than their weights."""
        return tuple(row.name for row in self.rows if row.vague)

    @property
    def warning(self) -> str:
        """A caution about the ranking by evidence; empty if there is none."""
        words = []
        if self.vague:
            words.append(
                f"the evidence often ranks badly at fixed vague priors ([L22] sections 4.1, 7), and that concerns "
                f"{self._listed(self.vague)}: fit the precisions with fit_hyperparameters, or go by the conditional "
                "evidence"
            )
        narrow = tuple(row.name for row in self.rows if row.narrow)
        if narrow:
            words.append(f"the precisions of {self._listed(narrow)} are above what the evidence asks for")
        doubted = tuple(row.name for row in self.rows if row.loo_trusted is False)
        if doubted:
            words.append(
                f"leave-one-out is not to be trusted for {self._listed(doubted)}, marked * (see `loo_note`): train "
                "on at these hyperparameters, for instance with train_with_evidence, or go by other data"
            )
        return "; ".join(words)

    def spearman(self, criterion: str = "evidence", against: str = "test_log_likelihood") -> float:
        """Spearman's ρ of two columns over the models, negated where less is better; NaN below 3 models."""
        from scipy.stats import spearmanr

        signs = [-1.0 if name in LESS_IS_BETTER else 1.0 for name in (criterion, against)]
        pairs = [(signs[0] * x, signs[1] * y) for x, y in zip(*map(self._column, (criterion, against)), strict=True)]
        if len(pairs) < 3 or any(len({pair[side] for pair in pairs}) == 1 for side in (0, 1)):
            return float("nan")  # rank correlation is undefined
        return float(spearmanr(*zip(*pairs, strict=True)).statistic)

    def to_json(self) -> str:
        """All numbers in full precision, and the rank correlations with the test log likelihood."""
        return json.dumps(asdict(self) | {"spearman": self._correlations()}, indent=2)

    def plot(self, criterion: str = "evidence", against: str = "test_log_likelihood") -> Figure:
        """Scatter plot of two columns with Spearman's ρ, one point per model ([I21] Fig. 2, [L22] Fig. 5)."""
        from ntk_laplace.plotting import model_ranking

        across, up = self._column(criterion), self._column(against)
        return model_ranking((_WORDS[criterion], across), (_WORDS[against], up), [row.name for row in self.rows],
                             [row.parameters for row in self.rows], self.spearman(criterion, against),
                             [row.vague for row in self.rows])

    def __str__(self) -> str:
        """A table, the rank correlations with the test log likelihood, and cautions."""
        head = f"{_counted(len(self.rows), 'model')} of {_counted(self.num_examples, 'point')}"
        head += "; scores in nats, more is better"
        if self.m is not None:
            how = {"evidence": "joint", "average": "one by one"}[self.conditional]
            head += f"; conditional: given {_counted(self.m, 'point')}, the others {how}"
        columns = [["model", *(row.name for row in self.rows)], ["structure", *(row.structure for row in self.rows)]]
        for name, (heading, form) in _HEADINGS.items():
            if any(getattr(row, name) is not None for row in self.rows):
                cells = self._cells(name, form.format)
                if name in _TRUST:
                    good = [getattr(row, _TRUST[name]) for row in self.rows]
                    cells = [c + "*" * (trusted is False) for c, trusted in zip(cells, good, strict=True)]
                if name in _ERRORS:
                    errors = [getattr(row, _ERRORS[name]) for row in self.rows]
                    cells = [c + plus_minus(error)[0] for c, error in zip(cells, errors, strict=True)]
                columns.append([heading, *cells])
        lines = [head, "", *aligned(columns)]
        found = {name: rho for name, rho in self._correlations().items() if rho is not None}
        if found:
            lines += ["", "Spearman's ρ with the test log likelihood: "
                      + ", ".join(f"{name} {rho:.2f}" for name, rho in found.items())]
        notes = [*self._distances("loo", "leave-one-out", "nats"),
                 *self._distances("test", "test log likelihood", "nats per example"),
                 *(f"{row.name}: prior {row.prior}" for row in self.rows if row.prior)]
        notes += [f"{row.name}: LOO{'*' if row.loo_trusted is False else ''}: {row.loo_note}"
                  for row in self.rows if row.loo_note]
        if self.warning:
            notes.insert(0, f"Mind: {self.warning}.")
        notes = [textwrap.fill(note, 100, subsequent_indent="  ") for note in notes]
        return "\n".join([*lines, *([""] if notes else []), *notes])

    def _distances(self, prefix: str, what: str, unit: str) -> list[str]:
        """A line that says how far the others are behind the best."""
        others, best = [], ""
        for row in self.rows:
            value, error = getattr(row, f"{prefix}_behind"), getattr(row, f"{prefix}_behind_error")
            words, decimals = plus_minus(error)
            if value == 0.0 and not best:
                best = row.name
            elif value is not None:
                others.append(f"{row.name} {value:,.{decimals}f}{words}")
        return [f"Behind the best {what}, that of {best}, in {unit}: {', '.join(others)}"] if others else []

    def _listed(self, names: tuple[str, ...]) -> str:
        return f"all {len(names)} models" if len(names) == len(self.rows) > 1 else ", ".join(names)

    def _column(self, name: str) -> list[float]:
        if name not in _WORDS:
            raise DataError(f"a column among {', '.join(_WORDS)}", repr(name), "Look for a typo.")
        values = [getattr(row, name) for row in self.rows]
        if any(value is None for value in values):
            raise DataError(f"a value of {name!r} for every model", "none for some",
                            "Pass test data, or choose a criterion that every structure has.")
        return values

    def _correlations(self) -> dict[str, float | None]:
        """ρ of each criterion with the test log likelihood; None if it is undefined."""
        found: dict[str, float | None] = {}
        for name in (*CRITERIA, *BOUNDS, SAMPLED):
            columns = name, "test_log_likelihood"
            known = all(getattr(row, column) is not None for row in self.rows for column in columns)
            rho = self.spearman(name) if known else float("nan")
            found[name] = rho if rho == rho else None
        return found


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
