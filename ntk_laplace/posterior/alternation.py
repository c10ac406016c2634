"""Evidence and weights in turn: hyperparameter steps at fixed weights, and minibatches at fixed hyperparameters."""

from __future__ import annotations

from collections.abc import Callable

from ntk_laplace.errors import untold
from ntk_laplace.model.objective import Objective
from ntk_laplace.model.optimum import Annealing, Held
from ntk_laplace.posterior.hyperparameters import Ascent, maximize
from ntk_laplace.posterior.hyperparameters.objectives import Evidence
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.progress import track

_RATE = 2e-2  # of Adam; it falls to 0 as a cosine
_LOG_RATE = 0.1  # of the ascent on the evidence, in log units
_BOUNDS = (1e-10, 1e10)  # of precisions and variances
_FIRST = 10  # times as many steps of L-BFGS at the first weights


def alternate(
    fit: Callable[[], Evidence], objective: Objective, data: Held, rounds: int, steps: int, progress: bool | None
) -> None:
    """Train a network together with its hyperparameters, from the weights that it has: [I21] Algorithm 1.

    Where precisions are fitted at weights that have learned the noise, they keep it. Here they change while it is
    forgotten.

    `fit` is at the network's present weights, with the objective's own prior and likelihood. Minibatches follow the
    evidence in each of the rounds, and it has the last word. A round takes `steps` ascent steps on it; before the first
    at most ten times as many of L-BFGS.
    """
    annealing = Annealing(objective, data, _RATE, tuning.RETRAINING_STEPS, tuning.MINIBATCH, rounds)
    ascent = Ascent(None, _LOG_RATE, _BOUNDS)
    with untold():  # of hyperparameters and weights that go on
        # not by Adam: its later steps would be too short, after the slopes of hyperparameters that are far off
        first = maximize(fit(), steps=_FIRST * steps, bounds=_BOUNDS, progress=False)
        found = [first.evidence[-1]]
        for _ in track(range(rounds), lambda: f"ntk_laplace: retraining, evidence {found[-1]:.6g} nats", rounds,
                       progress):
            objective.settle()
            annealing.advance()
            found.append(ascent.climb(fit(), steps)[1])
    objective.settle()
