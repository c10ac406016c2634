"""Comparison of trained models by evidence, conditional evidence, leave-one-out, BIC, AIC and optional test data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, UnsupportedError, require_choice, warn
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.explain import leave_one_out_score
from ntk_laplace.posterior.scores import require_beginning
from ntk_laplace.runtime.means import error_of_mean
from ntk_laplace.tools.comparison.compare import require_scores
from ntk_laplace.tools.comparison.priors import PriorCheck, check_prior
from ntk_laplace.tools.comparison.ranking import BOUNDS, CRITERIA, SAMPLED, ModelComparison, ModelScores

_SHARE = 0.8  # default fraction of the data that the conditional evidence conditions on
_CONDITIONAL = ("auto", "evidence", "average", "none")


def compare_models(
    models: Iterable[Any] | Mapping[str, Posterior], test: Any = None, *, m: int | None = None,
    permutations: int | None = None, seed: int = 0, conditional: str = "auto", predictive: str = "glm",
    scores: Sequence[str] = CRITERIA,
) -> ModelComparison:
    """Scores of several trained models of the same data, and the agreement of their rankings.

    Evidences of different data, or of densities and probabilities, cannot be compared: the models must have the same
    training targets in the same order. A warning names models with vague priors, for which the evidence often ranks
    badly ([L22] sections 4.1 and 7). A prior is vague if 1/δ is more than twice the mean square of the weights per
    effective parameter, and MacKay's precisions would increase the evidence, estimated at fixed weights, by a tenth of
    its size and by 3 nats more than they would for weights that were drawn from the prior.

    Leave-one-out and the test log likelihood have standard errors, and so do their differences from the best model's,
    point by point: these say whether more data could change the order.

    Parameters
    ----------
    models : sequence or mapping
        Posteriors, pairs (name, posterior), or a mapping of names to posteriors.
    test : data, or mapping of name to data, optional
        As for `laplace`; a mapping of names to data if models have different inputs.
    m : int, optional
        Number of points that the conditional evidence conditions on; 80 % by default.
    permutations, seed : optional
        Orders of the data for it, the same for all models; as in `conditional_log_marginal_likelihood`.
    conditional : str
        Its method, one for all models: "evidence", "average", or "none" to omit it. "auto" is "evidence" if every
        structure supports it, else "average", or "none" for at most two points.
    predictive : str
        Method of `predict` for the test data.
    scores : sequence of str
        Which columns: "evidence", "conditional", "loo", "bic", "aic", all of them by default; and "elbo" and "elbo_nn",
        the evidence lower bounds of `Posterior.elbo`, and "importance", the network's evidence of
        `Posterior.importance_evidence` (marked * if it is not to be trusted), which every Gaussian has. A posterior
        that is no Laplace approximation has no evidence, conditional evidence and leave-one-out. "elbo_nn" and
        "importance" need the training data, which a checkpoint may lack.

    Returns
    -------
    ModelComparison

    Raises
    ------
    DataError
        If there are no models, two with the same name, models of different data, or without inputs that a score needs.
    UnsupportedError
        If the likelihoods cannot be compared, or a method or a score is unknown.
    """
    require_scores(scores, (*CRITERIA, *BOUNDS, SAMPLED), "Pass some of them, in a list.")
    named = _named(models)
    _require_same_data(named)
    _require_inputs(named, scores)
    first = next(iter(named.values()))
    m = int(_SHARE * first.num_examples) if m is None else m
    method = _method(conditional, named) if "conditional" in scores else "none"
    if method != "none":
        m = require_beginning(m, first.num_examples, 0 if method == "evidence" else 2)
    by_name = isinstance(test, Mapping) and not any(one.network.targets in test for one in named.values())
    own = {str(name): data for name, data in test.items()} if by_name else dict.fromkeys(named, test)
    if not own.keys() >= named.keys():
        raise DataError(f"test data for {', '.join(named)}", f"a mapping with {', '.join(own) or 'none'}",
                        "Give every model its own, or one (X, y) for all.")
    with torch.inference_mode(False), torch.no_grad():
        tested = {  # first, to raise errors in the test data early
            name: ({}, None) if own[name] is None else _test_scores(posterior, own[name], predictive)
            for name, posterior in named.items()
        }
        rows, left_out = [], {}
        for name, posterior in named.items():
            given = None
            if method != "none" and _is_laplace(posterior):
                given = float(posterior.conditional_log_marginal_likelihood(m, permutations, seed, method=method))
            loo, left_out[name] = _left_out(posterior) if "loo" in scores else ({"loo": None}, None)
            rows.append(_row(name, posterior, scores, given, tested[name][0] | loo))
    for prefix, points in ("loo", left_out), ("test", {name: found for name, (_, found) in tested.items()}):
        rows = [replace(row, **_behind(prefix, row.name, points)) for row in rows]
    found = ModelComparison(tuple(rows), first.num_examples, None if method == "none" else m, method)
    if found.warning:
        warn(found.warning)
    return found


def _named(models: Iterable[Any] | Mapping[str, Posterior]) -> dict[str, Posterior]:
    models = models.items() if isinstance(models, Mapping) else models
    listed = isinstance(models, Iterable) and not isinstance(models, Tensor)
    pairs: list[Any] = list(models) if listed else [(models,)]
    pairs = [
        tuple(pair) if isinstance(pair, (tuple, list)) else (f"model {number}", pair)
        for number, pair in enumerate(pairs, 1)
    ]
    bad = [pair for pair in pairs if len(pair) != 2 or not isinstance(pair[1], Posterior)]
    if bad or not pairs:
        raise DataError("posteriors, pairs (name, posterior), or a mapping of names to posteriors",
                        repr(bad[0]) if bad else "none", "Fit each model with ntk_laplace.laplace first.")
    named = {str(name): posterior for name, posterior in pairs}
    if len(named) != len(pairs):
        raise DataError("a unique name for each model", ", ".join(str(name) for name, _ in pairs), "Rename one.")
    return named


def _require_same_data(named: dict[str, Posterior]) -> None:
    """Check for the same targets in the same order, and for log probabilities of the same kind."""
    (name, first), *others = named.items()
    for other, posterior in others:
        if posterior.num_examples != first.num_examples:
            got = f"{first.num_examples:,} examples for {name!r} and {posterior.num_examples:,} for {other!r}"
        elif not _same(first.targets, posterior.targets):
            got = f"other targets, or another order of them, for {other!r} than for {name!r}"
        elif not _same(first.fitted.points.counts, posterior.fitted.points.counts):
            got = (f"points that a what-if removed or reweighted, or other example weights, for {other!r} or "
                   f"{name!r}")
        else:
            got = ""
        if got:
            raise DataError("models fitted to the same data: evidences of different data are not comparable", got,
                            "Fit all models to the same (X, y), without shuffling.")
        kinds = [one.likelihood.counted_once() for one in (first, posterior)]
        words = " and ".join(type(kind).__name__ for kind in kinds)
        # where a user's likelihood declares neither, only the targets can be compared
        if {kind.is_density for kind in kinds} == {True, False}:
            raise UnsupportedError("likelihoods that are all densities or all probabilities", words,
                                   "Their units differ: compare regressions with regressions.")
        if first.likelihood.weight != posterior.likelihood.weight:
            weights = f"{first.likelihood.weight:g} for {name!r} and {posterior.likelihood.weight:g} for {other!r}"
            raise UnsupportedError("likelihoods that count each example equally often", f"weights {weights}",
                                   "Fit all models under Tempered(likelihood, weight) of one weight, or under none.")


def _same(first: Tensor, second: Tensor) -> bool:
    if first.numel() != second.numel():
        return False
    # a float32 network stores its targets in float32
    return torch.allclose(first.flatten().double().cpu(), second.flatten().double().cpu(), rtol=1e-6, atol=1e-12,
                          equal_nan=True)  # a missing target


def _method(conditional: str, named: dict[str, Posterior]) -> str:
    require_choice(conditional, _CONDITIONAL, f"conditional= among {', '.join(_CONDITIONAL)}")
    if conditional != "auto":
        return conditional
    exact = all(one.supports_conditional_evidence for one in named.values() if _is_laplace(one))
    few = next(iter(named.values())).num_examples < 3
    return "evidence" if exact else "none" if few else "average"


def _require_inputs(named: Mapping[str, Posterior], scores: Sequence[str]) -> None:
    """Refuse scores that evaluate the network at the training inputs, of posteriors that do not keep them."""
    without = [name for name, posterior in named.items() if posterior.fitted.structure.source is None]
    asked = [score for score in ("elbo_nn", SAMPLED) if score in scores]
    if without and asked:
        raise DataError(f"models that keep their training inputs, for {' and '.join(asked)}",
                        f"{', '.join(without)} without them",
                        'Load them with their data, or ask each posterior: elbo("nn", x=x), '
                        "importance_evidence(x=x).")


def _is_laplace(posterior: Posterior) -> bool:
    """Whether the posterior has an evidence of its own."""
    return posterior.fitted.structure.spec.laplace


def _row(
    name: str, posterior: Posterior, scores: Sequence[str], given: float | None, others: dict[str, Any]
) -> ModelScores:
    used = posterior.effective_parameters()
    evidence, error, check = None, 0.0, PriorCheck(0.0, False, False, "")
    if "evidence" in scores and _is_laplace(posterior):
        found = posterior.evidence()
        evidence, error = float(found), found.standard_error
        check = check_prior(posterior, used, found)
    bounds: dict[str, Any] = {}
    for score in BOUNDS.keys() & set(scores):
        bound = posterior.elbo(BOUNDS[score])
        bounds |= {score: float(bound), f"{score}_error": bound.standard_error}
    if SAMPLED in scores:
        drawn = posterior.importance_evidence()
        bounds |= {"importance": drawn.value, "importance_error": drawn.standard_error,
                   "importance_trusted": drawn.trusted}
    return ModelScores(name=name, structure=posterior.structure, parameters=posterior.num_parameters,
                       effective_parameters=float(used.sum()), evidence=evidence, conditional=given,
                       bic=float(posterior.bic()) if "bic" in scores else None,
                       aic=float(posterior.aic()) if "aic" in scores else None, prior_gap=check.gap, vague=check.vague,
                       narrow=check.narrow, prior=check.words, evidence_error=error, **(bounds | others))


@dataclass(frozen=True)
class _Points:
    """Log densities (N,) of points, of which a score is the weighted sum or mean."""

    densities: Tensor
    weights: Tensor

    @property
    def score(self) -> float:
        return float(self.weights @ self.densities)

    @property
    def error(self) -> float:
        """Standard error of the score as that of more such points."""
        total = self.weights.sum()
        shares = self.weights / total
        return float(total) * error_of_mean(shares * self.densities, shares)


def _left_out(posterior: Posterior) -> tuple[dict[str, Any], _Points | None]:
    """The leave-one-out score and reasons to distrust it, by the names of `ModelScores`, and the points it comes from.

    None and None, with the reason, where there is no score.
    """
    try:
        score, found = leave_one_out_score(posterior.fitted)
    except (UnsupportedError, DataError) as error:  # another structure, or data no longer available
        return {"loo": None, "loo_note": f"expected {error.expected}"}, None
    note = "; ".join(found.reasons)
    points = _Points(found.log_density.double().cpu(), posterior.likelihood.weight * found.counts.double().cpu())
    return {"loo": float(score), "loo_trusted": not note, "loo_note": note}, points


def _behind(prefix: str, name: str, points: Mapping[str, _Points | None]) -> dict[str, Any]:
    """Standard error of a model's score, and how far it is behind the best, by the names of `ModelScores`."""
    own, known = points[name], [one for one in points.values() if one is not None]
    if own is None:
        return {}
    found, best = {f"{prefix}_error": own.error}, max(known, key=lambda one: one.score)
    if best is own:
        return found | {f"{prefix}_behind": 0.0}
    if len(known) < 2 or len(best.densities) != len(own.densities):  # test points of its own
        return found
    ahead = replace(best, densities=best.densities - own.densities)  # point by point
    return found | {f"{prefix}_behind": ahead.score, f"{prefix}_behind_error": ahead.error}


def _test_scores(posterior: Posterior, test: Any, method: str) -> tuple[dict[str, float], _Points]:
    """Test scores, by the names of `ModelScores`, and the points of the log likelihood."""
    from ntk_laplace.metrics import held_out_scores, log_likelihoods  # importing scikit-learn sets warning filters

    parts, targets = [], []
    batches = posterior.network.batches(test)
    for x, y in batches:
        parts.append(posterior.predict(x, method=method))
        targets.append(y)
    if batches.weights is not None:
        raise DataError("test data (X, y), every example of which counts once", "example weights",
                        "Leave them out of the test data.")
    joined, y = type(parts[0]).join(parts), torch.cat(targets)
    densities = log_likelihoods(joined, y).double().cpu()
    scores = {f"test_{name}": value for name, value in held_out_scores(joined, y).items()}
    return scores, _Points(densities, torch.full_like(densities, 1.0 / len(densities)))
