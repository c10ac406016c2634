"""Trained networks as Gaussian processes: exact evidence, posteriors and explanations."""

from ntk_laplace import attribution, gp
from ntk_laplace.checkpoint import load
from ntk_laplace.comparison import (
    ComparisonInterrupted,
    EvidenceComparison,
    ModelComparison,
    ModelScores,
    StructureEvidence,
    compare_evidence,
    compare_models,
)
from ntk_laplace.curvature import EKFAC, INF, KFAC, Diagonal, Root
from ntk_laplace.errors import (
    DataError,
    FitInterrupted,
    HyperparameterError,
    MemoryBudgetError,
    MixedExamplesError,
    NetworkError,
    NonDeterministicError,
    NonFiniteError,
    NTKLaplaceError,
    NTKLaplaceWarning,
    NumericalError,
    TargetError,
    TrainingInterrupted,
    UnsupportedError,
)
from ntk_laplace.explain import Explanation, LeaveOneOut, Ranking
from ntk_laplace.explorer import ExplorerPage, Naming, explore
