"""The loop of variational inference: steps, history, interruption and resuming."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.errors import HyperparameterError, NonFiniteError, NumericalError, warn
from ntk_laplace.errors import VariationalInterrupted as Interrupted
from ntk_laplace.runtime.progress import track
from ntk_laplace.runtime.serialization import FileFormat, Snapshots, require_same
from ntk_laplace.structures import Settings
from ntk_laplace.variational_inference.iteration import Iteration
from ntk_laplace.variational_inference.result import Callback, VariationalHistory, VariationalStep

_FORMAT = FileFormat(
    "ntk_laplace variational", 1, "the state of variational inference",
    "Pass Settings(resume=error.state) of a VariationalInterrupted, or the path of Settings(checkpoint=path).",
)
_RUN = "run of variational inference"
_LATEST = 5  # steps whose natural gradients are averaged for the tolerance
_COLLAPSE = 5.0  # nats per example by which the ELBO falls below its best before a warning

Bound = Callable[[Tensor, Any], tuple[float, float, float, float]]
"""ELBO of the network with its standard error, then of the linearized one, for μ and H."""


@dataclass(frozen=True)
class StepSizes:
    """γ_t = γ0 (1 + t/τ)^-0.6 for t = 0, 1, ...; constant without τ."""

    first: float  # γ0
    decay: float | None  # τ, in steps

    def at(self, step: int) -> float:
        """γ after `step` steps."""
        return self.first if self.decay is None else self.first * (1.0 + step / self.decay) ** -0.6

    def kept(self, steps: int, tolerance: float) -> tuple[int, bool]:
        """The most steps whose rows are kept, and whether those of the start are, too.

        Their weight, Π(1-γ) over the steps since, is above the tolerance.
        """
        weight, count = 1.0, 0
        for step in reversed(range(steps)):  # step sizes decrease: the latest steps keep the most
            count += 1
            weight *= 1.0 - self.at(step)
            if weight <= tolerance:
                return count, False
        return count, True


class Run:
    """Variational inference under way: so many steps in all, of N examples, or of their weights' sum.

    The run ends when half the squared norm of the natural gradient, over N and averaged over the last five steps, is
    within the tolerance, in nats per example. With `average`, the result has the average of μ over the second half of
    the steps. `bound` estimates the ELBO of μ and H, after `every` so many steps; 0 for none. A run that resumes must
    share the signature of the interrupted one.
    """

    def __init__(
        self, iteration: Iteration, step_sizes: StepSizes, steps: int, num_examples: float, tolerance: float | None,
        average: bool, bound: Bound, every: int, signature: Mapping[str, str],
    ) -> None:
        self.iteration, self.history, self.stopped = iteration, VariationalHistory(), ""
        self._step_sizes, self._steps, self._n, self._tolerance = step_sizes, steps, num_examples, tolerance
        self._bound, self._every, self._signature = bound, every, dict(signature)
        self._sum = torch.zeros_like(iteration.mean) if average else None
        self._summed, self._warned = 0, False

    @property
    def mean(self) -> Tensor:
        """μ of the result."""
        return self.iteration.mean if self._sum is None or not self._summed else self._sum / self._summed

    def go(self, settings: Settings, callbacks: Sequence[Callback]) -> None:
        """Take all steps. VariationalInterrupted is raised on Ctrl-C, and a NumericalError if the run diverges."""
        if settings.resume is not None:
            self._restore(_FORMAT.state(settings.resume, self.iteration.mean.device, _RUN))
        snapshots = Snapshots(self._snapshot, settings.checkpoint)
        try:
            if not len(self.history) and not self.history.steps:
                self._evaluate()
            self._stop_if_converged()  # of a run that resumes
            remaining = range(len(self.history), len(self.history) if self.stopped else self._steps)
            for _ in track(remaining, self._words, len(remaining), settings.progress):
                self._step()
                for callback in callbacks:
                    seen = VariationalStep(len(self.history), self._steps, self.iteration.mean.clone(), self.history,
                                           self.stopped)
                    callback(seen)
                    self.stopped = seen.stopped
                snapshots.after_step()
                if self.stopped:
                    break
            self.stopped = self.stopped or "all were asked for"
            if self._sum is not None and not self._summed:
                warn("the run ended before its second half: nothing was averaged, and the mean is that of the "
                     "last step; pass fewer steps=")
            snapshots.finish()
            if self._every and self.history.steps[-1] != len(self.history):
                self._evaluate()
        except KeyboardInterrupt as cause:
            snapshots.save()
            raise Interrupted(snapshots.latest, len(snapshots.latest["history"]["step_size"]), self._steps) from cause

    def _step(self) -> None:
        done = len(self.history)
        size = self._step_sizes.at(done)
        try:
            norm = self.iteration.step(size)
        except (NumericalError, NonFiniteError) as error:
            raise self._diverged(done + 1, size, str(error)) from error
        if not math.isfinite(norm) or not bool(self.iteration.mean.isfinite().all()):
            raise self._diverged(done + 1, size, "weights or a natural gradient that are not finite")
        history = self.history
        history.step_size.append(size)
        history.natural_gradient.append(norm)
        rows = self.iteration.rows_kept
        if rows is not None:
            history.rows.append(rows)
        if self._sum is not None and 2 * len(history) > self._steps:
            self._sum, self._summed = self._sum + self.iteration.mean, self._summed + 1
        if self._every and len(history) % self._every == 0:
            self._evaluate()
        self._stop_if_converged()

    def _stop_if_converged(self) -> None:
        if self._tolerance is not None and self._decrement() <= self._tolerance:
            self.stopped = f"the natural gradient is within the tolerance of {self._tolerance:g} nats an example"

    def _decrement(self) -> float:
        """Half the squared norm of the natural gradient per example, over the last steps."""
        latest = self.history.natural_gradient[-_LATEST:]
        return math.inf if len(latest) < _LATEST else 0.5 * sum(norm**2 for norm in latest) / len(latest) / self._n

    def _diverged(self, step: int, size: float, words: str) -> NumericalError:
        return NumericalError("steps of variational inference that stay finite",
                              f"in step {step:,}, of size {size:.3g}: {words.rstrip('.')}",
                              f"Pass a smaller step_size, such as {size / 10:.2g}, or start=\"map\".")

    def _evaluate(self) -> None:
        """Estimate the ELBO, and warn once if it collapses."""
        if not self._every:
            return
        history = self.history
        try:
            found = self._bound(self.mean, self.iteration.precision)
        except NonFiniteError as error:
            if not len(history):
                raise NumericalError("a start with a finite ELBO", str(error).rstrip("."),
                                     'Pass start="map", or a larger precision.') from error
            raise self._diverged(len(history), self._step_sizes.at(len(history)), str(error)) from error
        history.steps.append(len(history))
        for values, value in zip((history.elbo_nn, history.elbo_nn_error, history.elbo_glm, history.elbo_glm_error),
                                 found, strict=True):
            values.append(value)
        best = max(value + 3.0 * error for value, error in zip(history.elbo_nn, history.elbo_nn_error, strict=True))
        if not self._warned and best - history.elbo_nn[-1] > _COLLAPSE * self._n + 6.0 * history.elbo_nn_error[-1]:
            self._warned = True
            warn(f"the ELBO of the network fell from {best:.6g} to {history.elbo_nn[-1]:.6g} nats in "
                 f"{len(history):,} steps: the steps diverge; pass a step_size below {self._step_sizes.first:g}, more "
                 'samples, or start="map"')

    def _words(self) -> str:
        found = f"{self.history.elbo_nn[-1]:.6g} nats" if self.history.steps else "not estimated"
        return f"ntk_laplace: step {len(self.history):,}, ELBO {found}"

    # --- snapshots

    def _snapshot(self) -> dict[str, Any]:
        """All that another process needs to continue after this step."""
        return {
            **_FORMAT.header, "signature": dict(self._signature), "iteration": self.iteration.record(),
            "history": copy.deepcopy(self.history.to_dict()), "stopped": self.stopped,
            "sum": None if self._sum is None else self._sum.clone(), "summed": self._summed, "warned": self._warned,
        }

    def _restore(self, saved: Mapping[str, Any]) -> None:
        require_same(saved["signature"], self._signature, _RUN)
        done = len(saved["history"]["step_size"])
        if self._steps < done:
            raise HyperparameterError(f"at least the {done:,} steps that the interrupted run has taken",
                                      f"steps={self._steps}", f"Pass steps={done} or more.")
        self.iteration.restore(saved["iteration"])
        self.history, self.stopped = VariationalHistory(**copy.deepcopy(saved["history"])), saved["stopped"]
        self._sum, self._summed, self._warned = saved["sum"], saved["summed"], saved["warned"]
