"""One family of errors: each states what was expected, what was given, and what to do."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, TypeGuard

import numpy as np
import torch

__all__ = [
    "DataError",
    "FitInterrupted",
    "HyperparameterError",
    "MemoryBudgetError",
    "MissingPackageError",
    "MixedExamplesError",
    "NTKLaplaceError",
    "NTKLaplaceWarning",
    "NetworkError",
    "NonDeterministicError",
    "NonFiniteError",
    "NumericalError",
    "ProcessLostError",
    "RetrainingInterrupted",
    "TargetError",
    "TrainingInterrupted",
    "UnsupportedError",
    "VariationalInterrupted",
    "warn",
]


class NTKLaplaceError(Exception):
    """Base class of the library's own errors.

    Parameters
    ----------
    expected : str
        What the library needs.
    got : str
        What was given.
    remedy : str
        What the caller can do about it, as a full sentence.
    """

    def __init__(self, expected: str, got: str, remedy: str) -> None:
        super().__init__(expected, got, remedy)
        self.expected, self.got, self.remedy = expected, got, remedy

    def __str__(self) -> str:
        got = f"an {self.got[2:]}" if self.got[:2] == "a " and self.got[2:3] in "AEIOaeio" else self.got
        return f"expected {self.expected}; got {got}. {self.remedy}"


class DataError(NTKLaplaceError, ValueError):
    """The data cannot be read as pairs of inputs and targets."""


class TargetError(DataError):
    """The targets do not fit the likelihood or the network's outputs."""


class NonFiniteError(DataError):
    """A NaN or an infinity where a finite number is needed; the message names the first bad example."""


class NetworkError(NTKLaplaceError):
    """The network cannot be linearized."""


class MixedExamplesError(NetworkError):
    """One example's output depends on other examples of its batch."""


class NonDeterministicError(NetworkError):
    """Two evaluations of the network on the same batch differ."""


class HyperparameterError(NTKLaplaceError, ValueError):
    """A precision, a noise, a temperature or their grouping is invalid."""


class MemoryBudgetError(NTKLaplaceError, MemoryError):
    """The predicted memory exceeds the budget; nothing was allocated."""


class UnsupportedError(NTKLaplaceError, NotImplementedError):
    """The request is not supported for this structure, likelihood or input."""


class MissingPackageError(NTKLaplaceError, ImportError):
    """An optional package is not installed."""


class NumericalError(NTKLaplaceError, ArithmeticError):
    """A factorization or another computation failed numerically; nothing was repaired silently."""


class ProcessLostError(NTKLaplaceError, ConnectionError):
    """Another process of the group died, or does not answer within the group's timeout."""


class FitInterrupted(KeyboardInterrupt):
    """A fit was interrupted; its partial results are kept.

    Attributes
    ----------
    state : object
        Pass it as ``Settings(resume=error.state)`` to continue with the same data.
    """

    def __init__(self, state: object, done: int, total: int | None) -> None:
        of = f" of {total:,}" if total else ""
        super().__init__(f"interrupted after {done:,}{of} examples; laplace(..., settings=Settings("
                         "resume=error.state)) continues from there")
        self.state = state


class TrainingInterrupted(KeyboardInterrupt):
    """Training with evidence was interrupted; the network has the weights of the best evidence so far.

    Attributes
    ----------
    state : dict
        State at the end of the last epoch, or of one up to a second earlier. Pass it as
        ``Settings(resume=error.state)``.
    """

    def __init__(self, state: dict, done: int, total: int) -> None:
        super().__init__(f"interrupted after {done:,} of {total:,} epochs; train_with_evidence(..., settings=Settings("
                         "resume=error.state)) continues from there")
        self.state = state


class RetrainingInterrupted(KeyboardInterrupt):
    """A retraining was interrupted; its best weights so far are kept.

    Attributes
    ----------
    network : nn.Module
        The private copy of the network, at the best weights.
    likelihood, prior
        Those of the training.
    """

    def __init__(self, network: object, likelihood: object, prior: object) -> None:
        super().__init__("interrupted; error.network has the best weights so far: laplace(error.network, data, "
                         "error.likelihood, error.prior) fits it, and its retrain(data, evidence_steps=0) continues")
        self.network, self.likelihood, self.prior = network, likelihood, prior


class VariationalInterrupted(KeyboardInterrupt):
    """Variational inference was interrupted.

    Attributes
    ----------
    state : dict
        State after the last step, or after one up to a second earlier. Pass it as ``Settings(resume=error.state)``.
    """

    def __init__(self, state: dict, done: int, total: int) -> None:
        super().__init__(f"interrupted after {done:,} of {total:,} steps; variational(..., settings=Settings("
                         "resume=error.state)) continues from there")
        self.state = state


class NTKLaplaceWarning(UserWarning):
    """A warning that the caller should read, such as a fallback in use or a costly choice."""


_FOLDERS = (os.path.dirname(file) + os.sep for file in (__file__, torch.__file__))
_INSIDE = (*_FOLDERS, contextlib.__file__, functools.__file__)


class _Filters(threading.local):
    """Functions that get each warning of this thread, the innermost first; it is not shown if one returns True."""

    functions: tuple[Callable[[str], bool], ...] = ()


_FILTERS = _Filters()


def warn(message: str) -> None:
    """Show an `NTKLaplaceWarning` at the line of the caller's code that led to it.

    That is the first frame outside of this package and of what runs its functions, torch and decorators.
    """
    if any(drops(message) for drops in _FILTERS.functions):
        return
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, NTKLaplaceWarning, stacklevel=level)


@contextmanager
def untold(when: bool = True, pattern: str = "") -> Iterator[None]:
    """Without the warnings of this library that begin so, where the caller tells otherwise what they say.

    Filters of `warnings` are those of the process: threads that change them leave some of them behind.
    """
    with _filtered(lambda message: when and re.match(pattern, message) is not None):
        yield


@contextmanager
def told_later() -> Iterator[list[str]]:
    """The warnings of this library in a list, of which the caller tells those that are still true; an error, all."""
    kept: list[str] = []

    def keep(message: str) -> bool:
        kept.append(message)
        return True

    try:
        with _filtered(keep):
            yield kept
    except Exception:
        for message in kept:
            warn(message)
        raise


@contextmanager
def _filtered(drops: Callable[[str], bool]) -> Iterator[None]:
    outer = _FILTERS.functions
    _FILTERS.functions = (drops, *outer)
    try:
        yield
    finally:
        _FILTERS.functions = outer


@contextmanager
def optional_package(name: str, remedy: str) -> Iterator[None]:
    """Import an optional package in the block.

    Raises
    ------
    MissingPackageError
        If it is not installed. Packages that it misses itself keep their own error.
    """
    try:
        yield
    except ModuleNotFoundError as cause:
        if cause.name is None or cause.name.split(".")[0] != name:
            raise
        raise MissingPackageError(f"the package {name}", "none installed", remedy) from cause


def first_line(cause: BaseException) -> str:
    """First line of an exception's message without its period, or its class if it has none."""
    return (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")


def is_choice(value: object, choices: Iterable[object]) -> bool:
    """Whether an option is one of its choices, names or None. No array is, whatever its comparison returns."""
    return any(value is choice or (isinstance(value, str) and value == choice) for choice in choices)


def require_choice(
    value: object, choices: Iterable[object], expected: str, remedy: str = "Choose one of them.",
    error: type[NTKLaplaceError] = UnsupportedError,
) -> None:
    """Refuse an option that is none of its choices.

    Raises
    ------
    NTKLaplaceError
        Of the type `error`.
    """
    if not is_choice(value, choices):
        raise error(expected, repr(value)[:80], remedy)


def is_number(value: object, above: float = -math.inf, below: float = math.inf) -> TypeGuard[float]:
    """Whether a value is a real number of Python or NumPy strictly between two bounds; booleans do not count."""
    return isinstance(value, Real) and not isinstance(value, bool) and above < float(value) < below


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Whether a value is an integer of Python or NumPy that is at least `least`; booleans do not count."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def require_whole(what: str, value: object, least: int, remedy: str) -> int:
    """Return an integer of at least `least` as one of Python: generators and files take no other.

    Raises
    ------
    HyperparameterError
        If `value` is not such an integer.
    """
    if not is_whole(value, least):
        raise HyperparameterError(f"{what} as a whole number, at least {least}", repr(value).splitlines()[0][:80],
                                  remedy)
    if int(value) >= 2**63:
        raise HyperparameterError(f"{what} below 2**63", f"{value!r}", remedy)
    return int(value)


def require_number(
    expected: str, value: object, remedy: str, above: float = -math.inf, below: float = math.inf
) -> float:
    """Return a number strictly between two bounds as one of Python.

    Raises
    ------
    HyperparameterError
        If `value` is not such a number; `expected` says in words what it would be.
    """
    if not is_number(value, above, below):
        raise HyperparameterError(expected, repr(value)[:80], remedy)
    return float(value)


def require_bounds(bounds: Any) -> None:
    """Refuse what is no pair of positive numbers in increasing order (HyperparameterError)."""
    pair = isinstance(bounds, Sequence) and len(bounds) == 2 and all(map(is_number, bounds))
    if not pair or not 0 < bounds[0] < bounds[1]:
        raise HyperparameterError("positive bounds (low, high)", f"{bounds}", "Leave them out for (1e-10, 1e10).")


def require_callables(callbacks: object, argument: str) -> Sequence[Callable[..., object]]:
    """Return callbacks, of which one may be given alone, as a sequence; they take an `argument`.

    Raises
    ------
    UnsupportedError
        If one is not callable.
    """
    listed = [callbacks] if callable(callbacks) else callbacks
    if not isinstance(listed, Sequence) or not all(map(callable, listed)):
        raise UnsupportedError("a callable, or a sequence of them, as callbacks", repr(callbacks)[:80],
                               f"Pass a function that takes a {argument}.")
    return listed


def is_flag(value: object) -> bool:
    """Whether a value is True or False; 0, 1 and NumPy's booleans count as these."""
    return isinstance(value, (Integral, np.bool_)) and value in (0, 1)


def require_flags(**given: object) -> None:
    """Refuse options, by name, that are neither True nor False (UnsupportedError)."""
    for name, value in given.items():
        if not is_flag(value):
            raise UnsupportedError(f"{name} True or False", repr(value)[:80], "Choose one of the two.")
