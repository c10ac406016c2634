"""The training loop: gradient descent on the negative log joint, and ascent on the evidence in hyperparameters."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, MemoryBudgetError, NonFiniteError, NumericalError, UnsupportedError, warn
from ntk_laplace.model.data import Batches
from ntk_laplace.model.objective import Objective, in_mode
from ntk_laplace.model.optimum import Held
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.convergence import WatchedFit, converged
from ntk_laplace.posterior.explain.reliability import MOST_DECREMENT
from ntk_laplace.posterior.hyperparameters import Ascent, Variables
from ntk_laplace.posterior.hyperparameters.objectives import Differentiable
from ntk_laplace.posterior.retraining import fitted_if_possible
from ntk_laplace.runtime.serialization import FileFormat, load_optimizer, load_random, random_state, require_same
from ntk_laplace.structures import FittedModel, Settings
from ntk_laplace.structures.points import present_values, unmoved
from ntk_laplace.training.history import EvidenceHistory
from ntk_laplace.training.minibatches import Minibatches
from ntk_laplace.training.model import Model
from ntk_laplace.training.result import EvidenceTraining
from ntk_laplace.training.schedule import EvidenceSchedule
from ntk_laplace.training.step_evidence import StepEvidence

FORMAT = FileFormat(
    "ntk_laplace training", 1, "a checkpoint of a training",
    "Pass Settings(resume=error.state) of a TrainingInterrupted, or the path of Settings(checkpoint=path).",
)

_STUCK = 10.0  # slope in the noise, in nats a point, of errors far larger than the noise: more epochs do not help
_SLOPE = 0.12  # gain of a Newton step in the noise, in nats a point, above which a warning is issued
# iterations of L-BFGS after the epochs, at most, and where they come no nearer: networks with kinks predict no better
_STEPS, _PATIENCE = 640, 160


class Run:
    """A running training.

    The scheduler is stepped after every epoch, or `by_batch` after every minibatch. The hyperparameter steps maximize
    the step evidence. `horizon` are the epochs over which the default learning rate falls to 0; None for one of the
    caller.
    """

    def __init__(
        self, model: Model, objective: Objective, minibatches: Minibatches, optimizer: torch.optim.Optimizer,
        scheduler: Any, by_batch: bool, schedule: EvidenceSchedule, step_evidence: StepEvidence,
        horizon: int | None = None,
    ) -> None:
        self.model, self.objective, self.minibatches = model, objective, minibatches
        self.optimizer, self.scheduler, self.by_batch, self.schedule = optimizer, scheduler, by_batch, schedule
        self.step_evidence, self.horizon = step_evidence, horizon
        self.device = next(iter(objective.parameters.values())).device
        self.ascent = Ascent(schedule.moving(model.likelihood), schedule.learning_rate, schedule.bounds)
        self.history = EvidenceHistory()
        self.posterior: Posterior | None = None
        self.best: dict[str, Tensor] = {}
        self.stopped = ""
        self._closed = "closure" in required(optimizer.step)  # L-BFGS evaluates the loss itself
        self._watched = 0 if scheduler is None else len(required(scheduler.step))  # ReduceLROnPlateau watches the loss

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return len(self.history.loss)

    def train_epoch(self) -> None:
        """One pass over the minibatches ([I21] Algorithm 1, line 4). NonFiniteError if the loss is not finite."""
        self.objective.settle()
        total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for x, y, weights in self.minibatches:
            total += self._step(x, y, weights).double()
            count += 1
            if self.by_batch:
                self.scheduler.step()
        if count == 0:
            raise DataError("at least one minibatch in an epoch", "none", "Look at drop_last and the batch size.")
        loss = float(total / count + self.objective.energy().to(total))
        if not math.isfinite(loss):
            raise NonFiniteError("a finite training loss", f"{loss} in epoch {self.epoch + 1}",
                                 "Lower the optimizer's learning rate, or look at the data.")
        self.history.loss.append(loss)
        if self.scheduler is not None and not self.by_batch:
            self.scheduler.step(*[loss] * self._watched)

    def _step(self, x: Any, y: Tensor, weights: Tensor | None) -> Tensor:
        if not self._closed:
            loss = self.objective.gradient(x, y, weights)
            self.optimizer.step()
            return loss
        losses: list[Tensor] = []

        def closure() -> Tensor:
            with torch.enable_grad():
                losses.append(self.objective.gradient(x, y, weights))
            return (losses[-1] + self.objective.energy().to(losses[-1])) / self.objective.scale

        self.optimizer.step(closure)  # type: ignore[arg-type]  # torch's own closures return the loss as a tensor
        return losses[0]

    def evaluate(self, left: int) -> None:
        """Compute the evidence, take K hyperparameter steps, keep the best ([I21] Algorithm 1, lines 6 to 10).

        `left` evaluations are to follow.
        """
        self._evaluate(left, self.epoch)
        patience = self.schedule.patience
        if patience is not None and self.history.waited >= patience:
            self.stopped = f"no better evidence in {patience} evaluations"

    def _evaluate(self, left: int, epoch: int) -> None:
        self.posterior = None  # release the old factors before new ones are allocated
        found = self.step_evidence.at(self.model, left, quietly=bool(self.history.evidence))
        before = present_values(self.model.likelihood)
        first, last = self.ascent.climb(found.evidence, self.schedule.steps)
        history, variables = self.history, Variables(found.evidence, self.ascent.which)
        history.names = variables.names
        history.epochs.append(epoch)
        if found.examples is not None:
            history.examples.append(found.examples)
        history.evidence_before.append(first)
        history.evidence.append(last)
        history.values.append(variables.shown(variables.get()))
        if history.best == len(history) - 1:
            self.best = self.model.tensors()
        # if other likelihood hyperparameters change the fitted sums, this fit is not exact for them
        exact = unmoved(before, self.model.likelihood) or found.evidence.log_scale() is not None
        self.posterior = found.posterior if exact else None

    def _settle(self) -> None:
        """Go to the best state. After an early stop, evaluate it from as many examples as a full training would."""
        self.model.load(self.best)
        if self.history.examples and self.history.examples[-1] < self.step_evidence.most:
            self._evaluate(0, self.history.epochs[self.history.best])
            self.model.load(self.best)

    def result(self) -> EvidenceTraining:
        """The result, at the best evidence."""
        self._settle()
        posterior = self.posterior if self.history.best == len(self.history) - 1 else None
        posterior = self.model.posterior(quietly=True) if posterior is None else posterior
        return EvidenceTraining(posterior, self.history, self.stopped)

    def converged_result(self, predictive: str, settings: Settings) -> EvidenceTraining:
        """The result at an optimum of the best hyperparameters, exact if that fits, with a fitted predictive."""
        self._settle()
        self.posterior = None  # release the factors
        own, network = self.model, self.model.network
        model, reason = own.exact(), ""

        def fit() -> FittedModel:
            nonlocal model, reason
            try:
                found = model.posterior(quietly=True)
            except (MemoryBudgetError, UnsupportedError) as error:  # such as a density that only "ef" takes
                if model is own:
                    raise
                model, reason = own, f"as in the training, because there is no exact one: {error}"
                found = own.posterior(quietly=True)
            reason = reason or found.reason
            return found.fitted

        watched = WatchedFit(fit)
        with in_mode(network, training=False):
            data = Held(Batches(own.data, settings.batch_size, self.device, self.minibatches.dtype, own.targets))
            try:
                fitted = converged(self.objective, data, watched, _STEPS, MOST_DECREMENT, MOST_DECREMENT,
                                   settings.progress, "in Python, call posterior.retrain(data) for more steps",
                                   _PATIENCE)
            except NumericalError as error:
                warn(f"the network stays at the weights of the best evidence: {error}")
                fitted = watched()
        watched.tell_fall(fitted, "in Python, predictive=None ends at the weights before")
        posterior = Posterior(fitted, reason)
        found = None
        if fitted.exact:
            _tell_slope(posterior, self.ascent.which, fitted.total)
            found = fitted_if_possible(posterior, predictive)
        else:
            warn("no predictive is fitted, because leave-one-out needs an exact posterior; call "
                 f"posterior.calibrate(held_out_data). The posterior is {reason}")
        training = EvidenceTraining(posterior, self.history, self.stopped, found)
        training.tell_misfit()
        return training

    def words(self) -> str:
        """Text of the progress bar."""
        found = f"{self.history.evidence[-1]:.6g} nats" if self.history.evidence else "not yet known"
        return f"ntk_laplace: epoch {self.epoch}, evidence {found}"

    # --- snapshots

    def snapshot(self) -> dict[str, Any]:
        """All state that another process needs to continue from the end of this epoch."""
        return copy.deepcopy({
            **FORMAT.header, "signature": self.signature(),
            "schedule": _schedule_record(self.schedule), "tensors": self.model.tensors(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "ascent": self.ascent.state(), "best": self.best, "history": self.history.to_dict(),
            "stopped": self.stopped, "random": random_state(self.device, self.minibatches.generators),
        })

    def signature(self) -> dict[str, str]:
        """The model's signature and the training options."""
        interval = "batch" if self.by_batch else "epoch"
        return self.model.signature() | {
            "number of examples": self.objective.words, "batch size": f"{self.minibatches}",
            "optimizer": _optimizer_words(self.optimizer),
            "scheduler": f"{type(self.scheduler).__name__} by {interval}" if self.scheduler is not None else "none",
            "evidence": self.step_evidence.words,
        } | ({} if self.horizon is None else {"learning rate": f"to 0 over {self.horizon} epochs"})

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from a snapshot. UnsupportedError if it belongs to another training."""
        # files of before there was a choice have no such entry
        require_same({"evidence": StepEvidence.words} | saved["signature"], self.signature(), "training")
        require_same(saved["schedule"], _schedule_record(self.schedule), "training")
        saved = copy.deepcopy(saved)
        load_optimizer(saved["optimizer"], self.optimizer)  # first, as it may raise
        self.model.load(saved["tensors"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved["scheduler"])
        self.ascent.restore(saved["ascent"])
        self.best, self.history = saved["best"], EvidenceHistory(**saved["history"])
        self.stopped = saved["stopped"]
        load_random(saved["random"], self.device, self.minibatches.generators)


def required(function: Callable[..., Any]) -> list[str]:
    """Names of the function's required arguments."""
    empty, starred = inspect.Parameter.empty, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = inspect.signature(function).parameters.values()
    return [argument.name for argument in own if argument.default is empty and argument.kind not in starred]


def _optimizer_words(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's class and initial options; the current learning rate is not included, nor which kernel runs."""
    plain = {name: value for name, value in optimizer.defaults.items()
             if isinstance(value, (int, float, str, tuple)) and name != "fused"}
    return f"{type(optimizer).__name__}({', '.join(f'{name}={value!r}' for name, value in plain.items())})"


def _schedule_record(schedule: EvidenceSchedule) -> dict[str, str]:
    """The schedule's numbers except the patience, which may change when a training resumes."""
    return {name: repr(value) for name, value in asdict(schedule).items() if name != "patience"}


def _tell_slope(posterior: Posterior, which: Sequence[str] | None, count: float) -> None:
    """Warn where the noise is still on its way: noise that is too large is not mended by the optimum of the weights."""
    variables = Variables(posterior, which)
    if list(variables.parameters) == ["precision"]:
        return
    with variables.alone():
        _, slopes = variables.value_and_gradient(Differentiable(posterior.log_marginal_likelihood))
    for name, slope in zip(variables.names, slopes.tolist(), strict=True):
        # the log likelihood of a log variance has the information N/2: a Newton step gains slope²/N
        if not name.startswith("precision[") and slope**2 > _SLOPE * count**2:
            # Adam remembers the first slopes, and its later steps are too short
            remedy = ("standardize the targets, or start from a noise of about their variance" if slope > _STUCK * count
                      else "train for more epochs, or in Python call posterior.retrain(data)")
            warn(f"{name} is not at the optimum of the evidence after these epochs: the slope is {slope:.4g} nats per "
                 f"unit of its logarithm; {remedy}")
