"""Training with evidence: what the caller brings is checked and put together, and the epochs are run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ntk_laplace.curvature import CurvatureType, StructureSpec
from ntk_laplace.data import Batches, Inputs, take
from ntk_laplace.errors import HyperparameterError, NumericalError, TrainingInterrupted, UnsupportedError, is_whole
from ntk_laplace.fit import spec_of
from ntk_laplace.hyperparameters import Variables
from ntk_laplace.likelihoods import Likelihood
from ntk_laplace.network import Caller, Network
from ntk_laplace.priors import GaussianPrior
from ntk_laplace.progress import track
from ntk_laplace.structures import FunctionSpaceStructure, Settings, require_place, write
from ntk_laplace.training import state
from ntk_laplace.training.minibatches import Minibatches, count_examples, sum_of_weights
from ntk_laplace.training.objective import Objective, in_mode
from ntk_laplace.training.result import Callback, EvidenceTraining, TrainingState
from ntk_laplace.training.run import Model, Run, required
from ntk_laplace.training.schedule import EvidenceSchedule

__all__ = ["train_with_evidence"]

_EVERY, _SNAPSHOT = 60.0, 1.0  # seconds between checkpoints, and of work that an interruption may lose


def train_with_evidence(
    network: nn.Module,
    data: Any,
    likelihood: Likelihood,
    prior: GaussianPrior | None = None,
    structure: str | StructureSpec = "kfac",
    curvature: str | CurvatureType = "ggn",
    *,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    epochs: int,
    scheduler: Any = None,
    scheduler_interval: str = "epoch",
    schedule: EvidenceSchedule | None = None,
    batch_size: int | None = 128,
    evidence_data: Any = None,
    callbacks: Callback | Sequence[Callback] = (),
    dtype: torch.dtype | None = None,
    settings: Settings | None = None,
    output: str | int | None = None,
    targets: str | None = None,
) -> EvidenceTraining:
    """Train a network, its prior precisions and its noise at once: [I21] Algorithm 1.

    The weights follow the optimizer on the negative log joint; every few epochs the hyperparameters take some steps
    up the Laplace-GGN evidence at those weights. At the end the network, the prior and the likelihood are left at
    the best evidence that was seen. No validation data are needed.

    Parameters
    ----------
    network : nn.Module
        Trained in place: its epochs in train mode, its evidence in eval mode, its own modes put back at the end.
        Parameters with ``requires_grad=False`` stay, and have no prior.
    data : DataLoader, Dataset, (X, y), (X, y, w), or a mapping
        A loader keeps its batches and its order. The loss divides by the number of examples, so that learning rates
        are those of a mean loss with ``weight_decay`` δ/N, and must not be given a ``weight_decay`` of their own. With
        example weights w (N,), in batches (x, y, w) too, the sum of them stands for N.
    likelihood : Likelihood
        Its noise is learned where it is a Gaussian's, its temperature if the schedule asks for it. ``Tempered(
        likelihood, weight)`` counts examples several times, as [I21] does under data augmentation.
    prior : GaussianPrior, optional
        By default precision 1 for each layer. Its precisions are the start.
    structure, curvature
        As in `laplace`.
    optimizer : torch.optim.Optimizer or callable
        Over the network's parameters, or what makes one of them: ``torch.optim.Adam``,
        ``lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)``. Clip gradients with its `register_step_pre_hook`.
    epochs : int
        At most.
    scheduler : scheduler or callable, optional
        Of the learning rate: one of torch's over this optimizer, or what makes it of the optimizer.
    scheduler_interval : str
        "epoch" or "batch": when it is stepped.
    schedule : EvidenceSchedule, optional
        When the evidence is computed, how the hyperparameters move, and when to stop early.
    batch_size : int, optional
        Examples per minibatch of a dataset or of tensors at most; None is all at once. A loader has its own.
    evidence_data : optional
        What the evidence reads, if it is not `data`: the examples without augmentation.
    callbacks : callable or sequence of callables
        Each is called with a `TrainingState` after every epoch, and may stop the training.
    dtype : torch.dtype, optional
        Of the evidence's algebra; float64 by default.
    settings : Settings, optional
        Progress bar, memory, batch size of the evidence's passes; `checkpoint` is written every minute, `resume`
        goes on from one, or from the `state` of a `TrainingInterrupted`, to the same result bit for bit, given the
        same data and arguments (`epochs` may grow, if the last evaluation was on schedule).
    output, targets : optional
        As in `laplace`: which tensor of what the network returns, and the key of the targets in batches that are one
        mapping.

    Returns
    -------
    EvidenceTraining
        The posterior at the best evidence, and the history.

    Raises
    ------
    TrainingInterrupted
        On Ctrl-C. The network is left at the best evidence so far.
    NTKLaplaceError
        One of its family, which names what was expected, what came and what to do.
    """
    schedule = EvidenceSchedule() if schedule is None else schedule
    settings = Settings.of(settings)
    callbacks = [callbacks] if callable(callbacks) else callbacks
    _require_kinds(schedule, callbacks)
    if not is_whole(epochs, 1):
        raise HyperparameterError("at least one epoch", f"{epochs!r}", "Pass epochs=100, for instance.")
    if scheduler_interval not in ("epoch", "batch"):
        raise UnsupportedError('scheduler_interval "epoch" or "batch"', repr(scheduler_interval), "Choose one of them.")
    if settings.checkpoint is not None:
        require_place(settings.checkpoint)
    likelihood = Likelihood.of(likelihood)
    spec_of(structure)
    frozen = Network(network, None, output, targets)
    device, dtype_of_inputs = frozen.device, frozen.input_dtype
    prior = GaussianPrior.of(prior, groups="layer").bind(frozen.shapes)
    for module in (prior, likelihood):
        module.to(device)
    read = data if evidence_data is None else evidence_data
    batches = Batches(read, settings.batch_size, device, dtype_of_inputs, targets)
    minibatches = Minibatches(data, batch_size, device, dtype_of_inputs, targets)
    n = count_examples(read, batches)
    few = _probe(frozen, batches, likelihood, n)
    quiet = Settings(settings.batch_size, settings.memory_budget, progress=False)
    model = Model(network, likelihood, prior, read, structure, CurvatureType.of(curvature), dtype, quiet, output,
                  targets)
    optimizer = _optimizer(optimizer, network)
    by_batch = scheduler is not None and scheduler_interval == "batch"
    scheduler = _scheduler(scheduler, optimizer, by_batch)
    objective = Objective(
        Caller(network, output, targets), likelihood, prior, n, frozen.num_outputs, sum_of_weights(batches)
    )
    run = Run(model, objective, minibatches, optimizer, scheduler, by_batch, schedule)
    del frozen
    _rehearse(model, few, n, run.ascent.which)
    if settings.resume is not None:
        run.restore(state.read(settings.resume, device))
    _require_length(run, epochs)
    with torch.inference_mode(False), torch.enable_grad(), in_mode(network, training=True):
        return _go(run, epochs, list(callbacks), settings)


def _require_kinds(schedule: Any, callbacks: Any) -> None:
    """What would otherwise fail in the middle of the training, in other words."""
    if not isinstance(schedule, EvidenceSchedule):
        raise UnsupportedError("an EvidenceSchedule", repr(schedule),
                               "Use ntk_laplace.EvidenceSchedule(frequency=10, steps=100).")
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise UnsupportedError("a callable, or a sequence of them, as callbacks", repr(callbacks),
                               "Pass a function that takes a TrainingState.")


def _go(run: Run, epochs: int, callbacks: Sequence[Callback], settings: Settings) -> EvidenceTraining:
    """All epochs, behind a progress bar; whatever happens, the network is left at the best evidence so far."""
    latest, saved = run.snapshot(), time.monotonic()
    taken = saved
    remaining = range(run.epoch, epochs)
    try:
        for _ in track(remaining, run.words, len(remaining), settings.progress):
            if run.stopped:
                break
            run.train_epoch()
            evaluated = run.schedule.due(run.epoch, epochs)
            if evaluated:
                run.evaluate()
            _call(run, epochs, callbacks, evaluated)
            now = time.monotonic()
            if now - taken > _SNAPSHOT:
                latest, taken = run.snapshot(), now
            if settings.checkpoint is not None and now - saved > _EVERY:
                write(run.snapshot(), settings.checkpoint)
                saved = now
        if not run.history.epochs or (run.stopped and run.history.epochs[-1] != run.epoch):
            run.evaluate()  # a callback stopped it between two evaluations
        run.stopped = run.stopped or "all were asked for"
        if settings.checkpoint is not None:
            write(run.snapshot() | {"stopped": ""}, settings.checkpoint)
        return run.result()
    except KeyboardInterrupt as cause:
        if settings.checkpoint is not None:
            write(latest, settings.checkpoint)
        _leave(run)
        raise TrainingInterrupted(latest, len(latest["history"]["loss"]), epochs) from cause
    except Exception:
        _leave(run)
        raise
    finally:
        run.optimizer.zero_grad(set_to_none=True)


def _leave(run: Run) -> None:
    if run.best:
        run.model.load(run.best)


def _call(run: Run, epochs: int, callbacks: Sequence[Callback], evaluated: bool) -> None:
    for callback in callbacks:
        seen = TrainingState(
            run.model.network, run.optimizer, run.epoch, epochs, run.history.loss[-1],
            run.posterior if evaluated else None, run.history, run.stopped,
        )  # fmt: skip
        callback(seen)
        run.stopped = seen.stopped


def _probe(frozen: Network, batches: Batches, likelihood: Likelihood, n: int) -> tuple[Inputs, Tensor] | None:
    """Hold outputs, targets and the likelihood against each other before the first epoch.

    Returns
    -------
    tuple, or None
        The first two examples that have a target; None if the first batch has none of them.
    """
    frozen.module.eval()
    x, y = next(iter(batches))
    with torch.no_grad():
        frozen.without_grad(take(x, slice(0, 2)))
    likelihood.bind(n, frozen.num_outputs)
    if likelihood.at(slice(0, 1)) is not likelihood:
        raise UnsupportedError("a likelihood that is the same for every example", "noise per point",
                               "Minibatches do not know which points they hold: give one variance, or one per output.")
    observed = likelihood.observed(likelihood.targets(y, len(y), frozen.num_outputs))
    if observed is None:
        return take(x, slice(0, 2)), y[:2]
    there = observed.reshape(len(y), -1).any(1).nonzero().squeeze(1)[:2]
    return (take(x, there), y[there]) if len(there) else None


def _rehearse(model: Model, few: tuple[Inputs, Tensor] | None, n: int, moving: Sequence[str]) -> None:
    """The posterior of two examples: what can have no evidence, or has no room for it, says so before the first epoch.

    Raises
    ------
    NTKLaplaceError
        As the first evaluation would.
    """
    if few is None:
        return
    try:
        posterior = replace(model, data=few).posterior(quietly=True)
    except NumericalError:  # two examples may be too few
        return
    Variables(posterior, moving)
    if isinstance(posterior.fitted, FunctionSpaceStructure):
        posterior.fitted.require_memory_for(posterior._model, n, posterior.fitted.rows)


def _require_length(run: Run, epochs: int) -> None:
    """A scheduler with an end must not come to it first."""
    total, each = getattr(run.scheduler, "total_steps", None), run.minibatches.count if run.by_batch else 1
    if total is None or each is None:
        return
    steps = run.scheduler.last_epoch + (epochs - run.epoch) * each
    if steps > total:
        raise UnsupportedError(f"a scheduler of at least {steps:,} steps, as many as it is given", f"one of {total:,}",
                               f"Pass total_steps={steps}, or fewer epochs.")


def _optimizer(given: Any, network: nn.Module) -> torch.optim.Optimizer:
    own = {id(p): name for name, p in network.named_parameters() if p.requires_grad}
    if not isinstance(given, torch.optim.Optimizer):
        if not callable(given):
            raise UnsupportedError("an optimizer, or what makes one of parameters", f"a {type(given).__name__}",
                                   "Pass torch.optim.Adam, or lambda p: torch.optim.SGD(p, lr=0.1).")
        given = given([p for p in network.parameters() if p.requires_grad])
        if not isinstance(given, torch.optim.Optimizer):
            raise UnsupportedError("a callable that returns a torch.optim.Optimizer", f"a {type(given).__name__}",
                                   "Pass torch.optim.Adam, or lambda p: torch.optim.SGD(p, lr=0.1).")
    held = {id(p) for group in given.param_groups for p in group["params"] if p.requires_grad}
    if held != set(own):
        missing = [name for key, name in own.items() if key not in held]
        got = f"one without {', '.join(missing[:3])}" if missing else "parameters of something else"
        raise UnsupportedError("an optimizer of all the network's parameters that require gradients", got,
                               "Freeze what is not to be trained with requires_grad_(False).")
    decays = [group["weight_decay"] for group in given.param_groups if group.get("weight_decay")]
    if decays:
        raise HyperparameterError("an optimizer without weight decay: the prior is in the loss already",
                                  f"weight_decay={decays[0]}", "Pass weight_decay=0; the precisions are its place.")
    return given


def _scheduler(given: Any, optimizer: torch.optim.Optimizer, by_batch: bool) -> Any:
    if given is None:
        return None
    expected = "a learning rate scheduler, or what makes one of an optimizer"
    remedy = "Pass lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, epochs)."
    made = given
    if isinstance(given, type) or (callable(given) and not _schedules(given)):
        try:
            made = given(optimizer)
        except TypeError as error:  # a class that must be told more
            raise UnsupportedError(expected, f"{getattr(given, '__name__', given)!r}: {error}", remedy) from error
    if not _schedules(made):
        raise UnsupportedError(expected, f"a {type(given).__name__}", remedy)
    if by_batch and required(made.step):
        raise UnsupportedError('scheduler_interval="epoch" for a scheduler that watches the loss of an epoch',
                               f'"batch" for {type(made).__name__}', "Leave scheduler_interval out.")
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise UnsupportedError("a scheduler of this training's optimizer", "one of another optimizer",
                               "Pass what makes the scheduler of the optimizer.")
    return made


def _schedules(thing: Any) -> bool:
    return not isinstance(thing, type) and hasattr(thing, "step") and hasattr(thing, "state_dict")
