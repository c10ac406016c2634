"""The posterior: one public interface for function space and weight space."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from ntk_laplace.model.network import outside_autocast
from ntk_laplace.posterior.compression import CompressionVerbs
from ntk_laplace.posterior.coverage import CoverageVerbs
from ntk_laplace.posterior.lower_bound import LowerBoundVerbs
from ntk_laplace.posterior.reranking import RerankingVerbs
from ntk_laplace.posterior.retraining import RetrainingVerbs
from ntk_laplace.posterior.sampled_evidence import SampledEvidenceVerbs
from ntk_laplace.posterior.selection import SelectionVerbs
from ntk_laplace.posterior.sources import SourceVerbs

__all__ = ["Posterior"]


_Class = TypeVar("_Class", bound=type)

_OF_LAPLACE = {
    "log_marginal_likelihood": "the evidence",
    "evidence": "the evidence",
    "approximation_errors": "what Laplace's evidence hides",
    "evidence_bound": "a bound of the evidence by blocks",
    "evidence_curve": "the evidence over many precisions",
    "spectrum": "the eigenvalues of its curvature",
    "log_det_terms": "the eigenvalues of its curvature",
    "local_log_det": "a model of its log determinant",
    "log_scale": "the scale of its curvature",
    "fit_hyperparameters": "hyperparameters that maximize the evidence",
    "conditional_log_marginal_likelihood": "the conditional evidence",
    "learning_curve": "the learning curve",
    "explain": "explanations by training points",
    "removal_effects": "the effects of removals",
    "leave_one_out": "leave-one-out",
    "loo_log_density": "leave-one-out",
    "remove": "what-ifs",
    "reweight": "what-ifs",
    "relabel": "what-ifs",
    "add": "what-ifs",
    "what_ifs": "what-ifs",
    "rerank": "what-ifs",
    "source_effects": "what-ifs",
    "cross_validate": "cross-validation",
    "refit": "what-ifs",
    "relinearize": "what-ifs",
    "merge": "the posterior of more data",
    "condition": "the posterior of more data",
    "subset": "the posterior of some of the points",
    "retrain": "training with evidence",
    "compress": "a compressed curvature",
    "eigenbasis": "eigenbases of its curvature",
}
"""Verbs that read the curvature of the data off the precision, in the words of `require_laplace`."""


def _require_laplace(cls: _Class) -> _Class:
    """Class decorator: the verbs of `_OF_LAPLACE` refuse a Gaussian that is no Laplace approximation."""

    def guarded(verb: Callable[..., Any], words: str) -> Callable[..., Any]:
        @wraps(verb)
        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            self.fitted.require_laplace(words)
            return verb(self, *arguments, **options)

        return method

    for name, words in _OF_LAPLACE.items():
        setattr(cls, name, guarded(getattr(cls, name), words))
    return cls


def _outside_autocast(cls: _Class) -> _Class:
    """Class decorator: run each public method and property outside the caller's `torch.autocast`."""
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        if name.startswith("_"):
            continue
        if inspect.isfunction(member):
            setattr(cls, name, outside_autocast()(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(cls, name, property(outside_autocast()(member.fget), member.fset, member.fdel, member.__doc__))
    return cls


@_outside_autocast
@_require_laplace
class Posterior(
    SelectionVerbs, LowerBoundVerbs, SampledEvidenceVerbs, RetrainingVerbs, CoverageVerbs, CompressionVerbs,
    RerankingVerbs, SourceVerbs,
):
    """Laplace-GGN posterior of a trained network.

    Made by `ntk_laplace.laplace`. The hyperparameters of the prior and the likelihood may change at any time; every
    later result uses the current values.

    Attributes
    ----------
    network : Network
        Private copy of the network at its trained weights θ*.
    likelihood : Likelihood
    prior : GaussianPrior
    structure : str
        "gp", "full", "iterative", "nystrom", "kfac", "ekfac", "inf", "diag", or one of your own; "gaussian" for a
        Gaussian that was found elsewhere.
    predictive : Calibration or None
        The fitted calibration that `predict` uses.
    """
