"""Training with evidence: alternating updates of weights and hyperparameters ([I21] Algorithm 1)."""

from ntk_laplace.training.history import EvidenceHistory
from ntk_laplace.training.result import Callback, EvidenceTraining, TrainingState
from ntk_laplace.training.schedule import EvidenceSchedule
from ntk_laplace.training.starts import train_from_starts
from ntk_laplace.training.train import train_with_evidence

__all__ = [
    "Callback",
    "EvidenceHistory",
    "EvidenceSchedule",
    "EvidenceTraining",
    "TrainingState",
    "train_from_starts",
    "train_with_evidence",
]
