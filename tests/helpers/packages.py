"""Packages of extras that take seconds to import: read when a test first uses them, and skipped where they are not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest


class OnUse:
    """A package that stands for itself; collecting tests does not import it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for fixtures so
            raise AttributeError(name)
        with warnings.catch_warnings():  # what packages say of others when they are imported
            warnings.simplefilter("ignore")
            return getattr(pytest.importorskip(self.name), name)
