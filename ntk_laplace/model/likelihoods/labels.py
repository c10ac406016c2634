"""Class labels: hard (N,), soft (N, C), and missing (-100)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ntk_laplace.model.data import as_tensor
from ntk_laplace.model.likelihoods.targets import MISSING_LABEL, read_labels, read_probabilities


def read_classes(y: Any, num_examples: int, num_classes: int) -> Tensor:
    """Class labels (N,), int64, or floating rows of probabilities (N, C); see `read_labels`, `read_probabilities`."""
    try:
        soft = as_tensor(y)
    except (TypeError, ValueError, RuntimeError):
        return read_labels(y, num_examples, num_classes)
    if soft.is_floating_point() and soft.shape == (num_examples, num_classes) and num_examples:
        return read_probabilities(soft, num_examples, num_classes)
    return read_labels(y, num_examples, num_classes)


def is_observed(y: Tensor) -> Tensor:
    """Mask of observed labels, (N,)."""
    return (y if y.dim() == 1 else y[:, 0]) != MISSING_LABEL


def label_mass(y: Tensor, like: Tensor) -> Tensor:
    """Mass of each label, (N,): 1, or 0 for a missing label; Σ_c y_c for a soft label, which is 1 up to rounding."""
    return y.to(like).clamp_min(0).sum(-1) if y.dim() == 2 else is_observed(y).to(like)


def label_log_prob(log_p: Tensor, y: Tensor) -> Tensor:
    """Log probability of labels under log p (N, C): ``Σ_c y_c log p_c`` if soft, 0 if missing, (N,), nats."""
    if y.dim() == 2:
        y = y.to(log_p)
        return torch.where(y > 0, y * log_p, torch.zeros_like(log_p)).sum(-1)  # 0 log 0 is 0
    found = log_p.gather(-1, y.long().clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return torch.where(is_observed(y), found, torch.zeros_like(found))


def as_probabilities(y: Tensor, num_classes: int, like: Tensor) -> Tensor:
    """Labels (N,) as rows of probabilities (N, C) in the dtype of `like`; a missing label is a row of -100."""
    rows = one_hot(y.long().clamp_min(0), num_classes).to(like)
    return rows.masked_fill(~is_observed(y).unsqueeze(1), MISSING_LABEL)
