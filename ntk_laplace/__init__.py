"""Trained networks as Gaussian processes: exact evidence, posteriors and explanations."""

import sys
from typing import TYPE_CHECKING, Any

from ntk_laplace import gp, selection
from ntk_laplace.curvature import CurvatureType, PosteriorPrecision
from ntk_laplace.errors import (
    DataError,
    FitInterrupted,
    HyperparameterError,
    MemoryBudgetError,
    MissingPackageError,
    MixedExamplesError,
    NetworkError,
    NonDeterministicError,
    NonFiniteError,
    NTKLaplaceError,
    NTKLaplaceWarning,
    NumericalError,
    ProcessLostError,
    RetrainingInterrupted,
    TargetError,
    TrainingInterrupted,
    UnsupportedError,
    VariationalInterrupted,
)
from ntk_laplace.gp.ntk import empirical_ntk
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.calibration import Calibration
from ntk_laplace.model.likelihoods import (
    Bernoulli,
    Categorical,
    CountMixture,
    CustomLikelihood,
    Everywhere,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    LogNormalMixture,
    NegativeBinomial,
    NormalMixture,
    Poisson,
    StudentT,
    Tempered,
    register_likelihood,
)
from ntk_laplace.model.network import FourierFeatures, PiecewiseLinearFeatures, SmoothClipping
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.calibrate import PredictiveFit
from ntk_laplace.posterior.conformal import PredictionIntervals, PredictionSets
from ntk_laplace.posterior.estimates import AnnealedEvidence, ApproximationErrors, EvidenceEstimate
from ntk_laplace.posterior.explain import Explanation, LeaveOneOut, Ranking, Reliability, Reranking, SourceEffects
from ntk_laplace.posterior.fit import gaussian_posterior, laplace, load
from ntk_laplace.posterior.hyperparameters import HyperparameterHistory
from ntk_laplace.posterior.lack_of_fit import LackOfFit
from ntk_laplace.posterior.scores import LearningCurve
from ntk_laplace.posterior.what_ifs import CrossValidation, WhatIfs
from ntk_laplace.runtime.distributed import process_group
from ntk_laplace.selection.risk import RiskBound, risk_bound
from ntk_laplace.structures import (
    EKFAC,
    INF,
    KFAC,
    Diagonal,
    FullWeightSpace,
    FunctionSpace,
    Iterative,
    LinearizedModel,
    Nystrom,
    Settings,
    StructureSpec,
    SummedSpec,
    register_structure,
)
from ntk_laplace.structures.bounds import EvidenceBound
from ntk_laplace.structures.elbo import Divergence, LowerBound
from ntk_laplace.structures.evidence import Evidence
from ntk_laplace.tools import active, attribution, botorch, callbacks
from ntk_laplace.tools.comparison import (
    ComparisonInterrupted,
    EvidenceComparison,
    ModelComparison,
    ModelScores,
    Plan,
    StructureEvidence,
    StructurePlan,
    compare_evidence,
    compare_models,
    plan,
)
from ntk_laplace.tools.explorer import ExplorerPage, Naming, explore
from ntk_laplace.training import (
    EvidenceHistory,
    EvidenceSchedule,
    EvidenceTraining,
    TrainingState,
    train_from_starts,
    train_with_evidence,
)
from ntk_laplace.variational_inference.result import VariationalFit, VariationalHistory, VariationalStep
from ntk_laplace.variational_inference.variational import variational

if TYPE_CHECKING:
    from ntk_laplace.tools.estimators import LaplaceClassifier, LaplaceRegressor

__version__ = "0.2.0"


# As os does with os.path: `from ntk_laplace.active import score` works, though the package lies in tools.
sys.modules.update({f"{__name__}.{tool.__name__.split('.')[-1]}": tool
                    for tool in (active, attribution, botorch, callbacks)})


def __getattr__(name: str) -> Any:
    """Import on first use: scikit-learn changes warning filters when it is imported."""
    if name in ("LaplaceClassifier", "LaplaceRegressor"):
        from ntk_laplace.tools import estimators

        return getattr(estimators, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "EKFAC",
    "INF",
    "KFAC",
    "AnnealedEvidence",
    "ApproximationErrors",
    "Bernoulli",
    "Calibration",
    "Categorical",
    "ComparisonInterrupted",
    "CountMixture",
    "CrossValidation",
    "CurvatureType",
    "CustomLikelihood",
    "DataError",
    "Diagonal",
    "Divergence",
    "Everywhere",
    "Evidence",
    "EvidenceBound",
    "EvidenceComparison",
    "EvidenceEstimate",
    "EvidenceHistory",
    "EvidenceSchedule",
    "EvidenceTraining",
    "Explanation",
    "ExplorerPage",
    "FitInterrupted",
    "FourierFeatures",
    "FullWeightSpace",
    "FunctionSpace",
    "Gaussian",
    "GaussianPrior",
    "HeteroscedasticGaussian",
    "HyperparameterError",
    "HyperparameterHistory",
    "Iterative",
    "Jacobian",
    "LackOfFit",
    "LaplaceClassifier",
    "LaplaceRegressor",
    "LearningCurve",
    "LeaveOneOut",
    "Likelihood",
    "LinearizedModel",
    "LogNormalMixture",
    "LowerBound",
    "MemoryBudgetError",
    "MissingPackageError",
    "MixedExamplesError",
    "ModelComparison",
    "ModelScores",
    "NTKLaplaceError",
    "NTKLaplaceWarning",
    "Naming",
    "NegativeBinomial",
    "NetworkError",
    "NonDeterministicError",
    "NonFiniteError",
    "NormalMixture",
    "NumericalError",
    "Nystrom",
    "PiecewiseLinearFeatures",
    "Plan",
    "Poisson",
    "Posterior",
    "PosteriorPrecision",
    "PredictionIntervals",
    "PredictionSets",
    "PredictiveFit",
    "ProcessLostError",
    "Ranking",
    "Reliability",
    "Reranking",
    "RetrainingInterrupted",
    "RiskBound",
    "Settings",
    "SmoothClipping",
    "SourceEffects",
    "StructureEvidence",
    "StructurePlan",
    "StructureSpec",
    "StudentT",
    "SummedSpec",
    "TargetError",
    "Tempered",
    "TrainingInterrupted",
    "TrainingState",
    "UnsupportedError",
    "VariationalFit",
    "VariationalHistory",
    "VariationalInterrupted",
    "VariationalStep",
    "WhatIfs",
    "active",
    "attribution",
    "botorch",
    "callbacks",
    "compare_evidence",
    "compare_models",
    "empirical_ntk",
    "explore",
    "gaussian_posterior",
    "gp",
    "laplace",
    "load",
    "plan",
    "process_group",
    "register_likelihood",
    "register_structure",
    "risk_bound",
    "selection",
    "train_from_starts",
    "train_with_evidence",
    "variational",
]
