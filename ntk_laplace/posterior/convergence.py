"""Training to convergence: a descent of the log joint until one more Newton step would gain next to nothing."""

from __future__ import annotations

from collections.abc import Callable

from ntk_laplace.errors import NumericalError, warn
from ntk_laplace.model.objective import Objective
from ntk_laplace.model.optimum import Descent, Held
from ntk_laplace.posterior.explain.reliability import newton_decrement
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.progress import track
from ntk_laplace.structures import FittedModel, StructureSpec
from ntk_laplace.structures.evidence import evidence

_ITERATIONS = 10  # of L-BFGS between two looks
_STALLED = 0.75  # of the decrement at half of the iterations: kinks, or a way to another optimum


class WatchedFit:
    """A fit at the network's present weights, which knows the evidence of its first result.

    Where it changes to another structure, the first result is that of the new one.
    """

    def __init__(self, fit: Callable[[], FittedModel]) -> None:
        self._fit, self._before = fit, 0.0
        self._spec: StructureSpec | None = None

    def __call__(self) -> FittedModel:
        found = self._fit()
        if found.structure.spec != self._spec:
            self._spec, self._before = found.structure.spec, float(evidence(found))
        return found

    def tell_fall(self, last: FittedModel, remedy: str) -> None:
        """Warn where training to the optimum has cost evidence: there the network fits what was left alone before."""
        after = float(evidence(last))
        if self._before - after > tuning.EVIDENCE_FALL * last.total:
            warn(f"training to the optimum of the log joint has lowered the evidence from {self._before:.4g} to "
                 f"{after:.4g} nats; {remedy}")


def converged(
    objective: Objective, data: Held, fit: Callable[[], FittedModel], steps: int, tolerance: float, aim: float,
    progress: bool | None, remedy: str, patience: int | None = None,
) -> FittedModel:
    """Train the objective's network until its Newton decrement is at most `aim`, nats per point, and fit there.

    The decrement needs a fit, so it is computed after 0, 10, 20, 40, ... iterations of L-BFGS, and where its upper
    bound from the gradient alone is small enough. Where the objective no longer falls, Adam's steps are tried once.
    Training ends before `aim` where twice the iterations took less than a quarter off the decrement, and it is within
    the tolerance or they were at least `patience`: outputs with kinks have no such optimum, and others are on the way
    to another one.

    The objective is over all examples. Its network ends at the best weights found, also after an interruption. Above
    the tolerance, and above what rounding of the log joint hides, there is a warning with the caller's `remedy`.
    NumericalError if the objective does not decrease from weights that are no optimum.
    """
    fitted = fit()
    decrement, due, annealed = newton_decrement(fitted), _ITERATIONS, False
    if decrement <= aim:
        return fitted
    descent = Descent(objective, data, steps)

    def words() -> str:
        return f"ntk_laplace: training, log joint {-descent.value:.6g} nats, decrement {decrement:.2g} nats a point"

    try:
        if data.num_examples > tuning.FULL_BATCH_EXAMPLES:
            annealed = True
            descent.anneal(tuning.ANNEALING_STEPS, tuning.MINIBATCH)
        for done in track(range(_ITERATIONS, steps + _ITERATIONS, _ITERATIONS), words, None, progress):
            falls = descent.advance(min(_ITERATIONS, steps - done + _ITERATIONS))
            if falls and descent.bound > aim and done < min(due, steps):
                continue
            del fitted  # release its factors before new ones are allocated
            descent.settle()
            fitted = fit()
            before, decrement, due = decrement, newton_decrement(fitted), 2 * done
            enough = decrement <= tolerance or (patience is not None and done >= patience)
            stalled = enough and decrement > _STALLED * before
            if decrement <= aim or (not falls and annealed) or stalled:
                break
            if not falls:
                annealed = True
                descent.anneal(tuning.ANNEALING_STEPS, tuning.MINIBATCH)
    finally:
        descent.settle()
    hidden = descent.rounding / fitted.total
    if decrement > max(tolerance, hidden):  # no step can gain what rounding hides
        _report(descent, decrement, tolerance, remedy)
    return fitted


def _report(descent: Descent, decrement: float, tolerance: float, remedy: str) -> None:
    """Raise an error if the weights have not moved, else warn."""
    if not descent.value < descent.start:
        raise NumericalError("training steps that decrease the negative log joint",
                             f"none, at weights with a Newton decrement of {decrement:.2g} nats a point",
                             "Use a network in float64, or look for outputs that jump or do not repeat.")
    warn(f"the network is not at its optimum after training: the Newton decrement is {decrement:.2g} nats a point, "
         f"above {tolerance:.2g}; {remedy}, or pass a network in float64; outputs with kinks may have no such optimum")
