"""Callbacks of trainers that log the evidence and keep the best weights: `lightning` and `huggingface`.

Each module is imported on first use, and needs the package of its trainer.
"""

import importlib
from typing import Any

from ntk_laplace.tools.callbacks.tracker import EvidenceTracker, TrackedEvidence

__all__ = ["EvidenceTracker", "TrackedEvidence", "huggingface", "lightning"]


def __getattr__(name: str) -> Any:
    """Import a trainer's module on first use: its package may be missing, and takes seconds to import."""
    if name in ("huggingface", "lightning"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
