"""One family of errors: each names what was expected, what came, and what to do."""

from __future__ import annotations

from numbers import Integral

__all__ = [
    "DataError",
    "FitInterrupted",
    "HyperparameterError",
    "MemoryBudgetError",
    "MixedExamplesError",
    "NTKLaplaceError",
    "NTKLaplaceWarning",
    "NetworkError",
    "NonDeterministicError",
    "NonFiniteError",
    "NumericalError",
    "TargetError",
    "TrainingInterrupted",
    "UnsupportedError",
]


class NTKLaplaceError(Exception):
    """Base of every error the library raises on purpose.

    Parameters
    ----------
    expected : str
        What the library needs.
    got : str
        What it was given.
    remedy : str
        What the caller can do about it, a whole sentence.
    """

    def __init__(self, expected: str, got: str, remedy: str) -> None:
        super().__init__(expected, got, remedy)
        self.expected, self.got, self.remedy = expected, got, remedy

    def __str__(self) -> str:
        return f"expected {self.expected}; got {self.got}. {self.remedy}"


class DataError(NTKLaplaceError, ValueError):
    """The data cannot be read as pairs of inputs and targets."""


class TargetError(DataError):
    """The targets do not fit the likelihood or the network's outputs."""


class NonFiniteError(DataError):
    """A NaN or an infinity where a number is needed; the first bad example is named."""


class NetworkError(NTKLaplaceError):
    """The network cannot be linearized as it stands."""


class MixedExamplesError(NetworkError):
    """One example's output depends on other examples of its batch."""


class NonDeterministicError(NetworkError):
    """Two evaluations of the network on the same batch differ."""


class HyperparameterError(NTKLaplaceError, ValueError):
    """A precision, a noise, a temperature or their grouping makes no sense."""


class MemoryBudgetError(NTKLaplaceError, MemoryError):
    """The predicted memory exceeds the budget; nothing was allocated."""


class UnsupportedError(NTKLaplaceError, NotImplementedError):
    """The request has no meaning for this structure, likelihood or input."""


class NumericalError(NTKLaplaceError, ArithmeticError):
    """A factorization broke down; nothing was repaired in silence."""


class FitInterrupted(KeyboardInterrupt):
    """A fit was interrupted; what it had gathered is kept.

    Attributes
    ----------
    state : object
        Pass it as ``Settings(resume=error.state)`` to go on with the same data.
    """

    def __init__(self, state: object, done: int, total: int | None) -> None:
        of = f" of {total:,}" if total else ""
        super().__init__(f"interrupted after {done:,}{of} examples; laplace(..., settings=Settings("
                         "resume=error.state)) goes on from there")
        self.state = state


class TrainingInterrupted(KeyboardInterrupt):
    """A training with evidence was interrupted; the network is left at the best evidence so far.

    Attributes
    ----------
    state : dict
        The end of the last epoch, or of one a second before: pass it as ``Settings(resume=error.state)``.
    """

    def __init__(self, state: dict, done: int, total: int) -> None:
        super().__init__(f"interrupted after {done:,} of {total:,} epochs; train_with_evidence(..., settings=Settings("
                         "resume=error.state)) goes on from there")
        self.state = state


class NTKLaplaceWarning(UserWarning):
    """Something the caller should know: a fallback in use, a costly choice."""


def is_whole(value: object, least: int) -> bool:
    """Whether a value is a whole number, Python's or NumPy's, of at least `least`; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= least


def require_whole(what: str, value: object, least: int, remedy: str) -> int:
    """A whole number of at least `least`, as it is.

    Raises
    ------
    HyperparameterError
        If it is something else.
    """
    if not is_whole(value, least):
        raise HyperparameterError(f"{what} as a whole number, at least {least}", f"{value!r}", remedy)
    return int(value)
