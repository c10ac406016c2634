"""Training with evidence: the arguments are validated and combined, and the epochs are run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ntk_laplace.curvature import CurvatureType
from ntk_laplace.errors import (
    HyperparameterError,
    NumericalError,
    TrainingInterrupted,
    UnsupportedError,
    is_whole,
    require_callables,
    require_choice,
)
from ntk_laplace.model.data import Batches, Inputs, take
from ntk_laplace.model.likelihoods import Likelihood, positions_of
from ntk_laplace.model.network import Caller, Network
from ntk_laplace.model.objective import Objective, in_mode
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.posterior.fit import spec_of
from ntk_laplace.posterior.hyperparameters import Variables
from ntk_laplace.posterior.retraining import require_predictive
from ntk_laplace.runtime.progress import track
from ntk_laplace.runtime.serialization import Snapshots, require_writable
from ntk_laplace.structures import Auto, Settings, StructureSpec
from ntk_laplace.structures.forecast import Problem
from ntk_laplace.training.minibatches import Minibatches, count_examples, require_whole_data, sum_of_weights
from ntk_laplace.training.model import Model
from ntk_laplace.training.result import Callback, EvidenceTraining, TrainingState
from ntk_laplace.training.run import FORMAT, Run, required
from ntk_laplace.training.schedule import EvidenceSchedule, short_schedule
from ntk_laplace.training.step_evidence import StepEvidence, step_evidence

_RATE = 2e-2  # of the default optimizer


def train_with_evidence(
    network: nn.Module, data: Any, likelihood: Likelihood, prior: GaussianPrior | None = None,
    structure: str | StructureSpec = "kfac", curvature: str | CurvatureType = "ggn", *,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    epochs: int, predictive: str | None = None, scheduler: Any = None, scheduler_interval: str = "epoch",
    schedule: EvidenceSchedule | None = None, evidence: str = "posterior", examples: int | None = None,
    batch_size: int | None = 128, evidence_data: Any = None, callbacks: Callback | Sequence[Callback] = (),
    dtype: torch.dtype | None = None, settings: Settings | None = None, output: str | int | None = None,
    targets: str | None = None,
) -> EvidenceTraining:
    """Train a network, its prior precisions and its noise together: [I21] Algorithm 1.

    The optimizer updates the weights on the negative log joint. Every few epochs the hyperparameters take several
    ascent steps on the Laplace-GGN evidence at those weights. At the end the network, the prior and the likelihood
    are set to the best evidence found. No validation data are needed.

    For predictions pass ``predictive="loo"``: the training then ends at an optimum of the log joint of the best
    hyperparameters, with an exact posterior whose predictive is fitted to its closed-form leave-one-out densities.

    Parameters
    ----------
    network : nn.Module
        Trained in place: epochs run in train mode, the evidence in eval mode, and the original modes are restored at
        the end. Parameters with ``requires_grad=False`` do not change and have no prior.
    data : DataLoader, Dataset, (X, y), (X, y, w), or a mapping
        A loader keeps its batches and its order. The loss is divided by the number of examples, so learning rates are
        those of a mean loss with ``weight_decay`` δ/N; the optimizer must not add a ``weight_decay``. With example
        weights w (N,), or batches (x, y, w), the sum of the weights replaces N.
    likelihood : Likelihood
        The noise of a Gaussian is learned, and a temperature if the schedule includes it. ``Tempered(likelihood,
        weight)`` counts examples several times, as [I21] does under data augmentation.
    prior : GaussianPrior, optional
        By default precision 1 for each layer. Its precisions are the initial values.
    structure, curvature
        As in `laplace`.
    optimizer : torch.optim.Optimizer or callable, optional
        An optimizer over the network's parameters, or a factory that takes them: ``torch.optim.Adam``,
        ``lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)``. Clip gradients with its `register_step_pre_hook`. By
        default Adam with learning rate 0.02, which falls to 0 as a cosine over the epochs unless a scheduler is given.
    epochs : int
        Maximum number of epochs.
    predictive : str, optional
        "loo": after the epochs, the weights at the best evidence are trained on without minibatches, in eval mode and
        on the data of the evidence, until the Newton decrement is at most 0.02 nats a point: leave-one-out needs an
        optimum. The posterior is then exact ("auto", curvature "ggn") if that fits in memory and takes at most 1e12
        operations (1e14 on a GPU), else that of the training, as ``posterior.reason`` says; and
        ``posterior.fit_predictive("loo", strict=False)`` is called. Outputs with kinks may have no such optimum;
        with normal noise points are then left out of the linearized model at its own.
    scheduler : scheduler or callable, optional
        A torch learning rate scheduler over this optimizer, or a factory that takes the optimizer.
    scheduler_interval : str
        "epoch" or "batch": when the scheduler is stepped.
    schedule : EvidenceSchedule, optional
        When the evidence is computed, how the hyperparameters are updated, and when to stop early. By default
        ``EvidenceSchedule()``, and under ``predictive="loo"`` 10 evaluations of 20 steps.
    evidence : str
        What the hyperparameter steps maximize. "posterior": the evidence of the posterior, from all examples.
        "subset": a lower bound of the exact evidence, from M examples drawn anew for each evaluation, whatever the
        structure: log joint of all examples - ½ (N/M) log det B of these, whose mean over the draws is at most the
        evidence ([I23] theorem 2). M is `examples`, and doubles towards the end: the last tenth of the evaluations,
        at least two, reads all N, or as many as fit in memory; an early stop is followed by such an evaluation. The
        best state is the best of those of the largest M.
    examples : int, optional
        M of "subset", where it is required.
    batch_size : int, optional
        Maximum examples per minibatch of a dataset or of tensors; None means one batch of all. A loader has its own.
    evidence_data : optional
        Data of the evidence if they are not `data`: the examples without augmentation.
    callbacks : callable or sequence of callables
        Each is called with a `TrainingState` after every epoch, and may stop the training.
    dtype : torch.dtype, optional
        Dtype of the evidence's linear algebra; float64 by default.
    settings : Settings, optional
        Progress bar, memory, batch size of the evidence's passes. A `checkpoint` is written every minute. `resume`
        continues from a checkpoint, or from the `state` of a `TrainingInterrupted`, to the bit-identical result, given
        the same data and arguments (`epochs` may increase, if the last evaluation was on schedule).
    output, targets : optional
        As in `laplace`: which returned tensor is the output, and the key of the targets in batches that are mappings.

    Returns
    -------
    EvidenceTraining
        The posterior at the best evidence, or at the optimum of its hyperparameters, and the history.

    Raises
    ------
    TrainingInterrupted
        On Ctrl-C. The network then has the weights of the best evidence so far.
    NTKLaplaceError
        A subclass that states what was expected, what was given and what to do.
    """
    require_predictive(predictive)
    settings = Settings.of(settings)
    settings.reducer.require_one("training with evidence", "Train first, and fit the trained network on all of them.")
    called = require_callables(callbacks, "TrainingState")
    if not is_whole(epochs, 1):
        raise HyperparameterError("at least one epoch", f"{epochs!r}", "Pass epochs=100, for instance.")
    if schedule is None:
        schedule = EvidenceSchedule() if predictive is None else short_schedule(epochs)
    elif not isinstance(schedule, EvidenceSchedule):
        raise UnsupportedError("an EvidenceSchedule", repr(schedule),
                               "Use ntk_laplace.EvidenceSchedule(frequency=10, steps=100).")
    require_choice(scheduler_interval, ("epoch", "batch"), 'scheduler_interval "epoch" or "batch"')
    if settings.checkpoint is not None:
        require_writable(settings.checkpoint)
    likelihood = copy.deepcopy(Likelihood.of(likelihood))
    spec_of(structure)
    frozen = Network(network, None, output, targets)
    device, dtype_of_inputs = frozen.device, frozen.input_dtype
    prior = copy.deepcopy(GaussianPrior.of(prior, groups="layer")).bind(frozen.shapes)
    for module in (prior, likelihood):
        module.to(device)
    read = data if evidence_data is None else evidence_data
    require_whole_data(read)
    read_again = partial(Batches, read, settings.batch_size, device, dtype_of_inputs, targets)
    batches = read_again()
    frozen.caller.positions = positions_of(likelihood, batches)
    _require_dense_gradients(network)
    minibatches = Minibatches(data, batch_size, device, dtype_of_inputs, targets)
    n = count_examples(read, batches)
    strategy = step_evidence(evidence, examples, n, epochs, schedule.left(0, epochs), read_again)
    few = _probe(frozen, batches, likelihood, n)
    quiet = Settings(settings.batch_size, settings.memory_budget, progress=False)
    model = Model(network, likelihood, prior, read, structure, CurvatureType.of(curvature), dtype, quiet, output,
                  targets)
    by_batch = scheduler is not None and scheduler_interval == "batch"
    annealed = optimizer is None and scheduler is None
    optimizer = _optimizer(adam if optimizer is None else optimizer, network)
    if annealed:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    scheduler = _scheduler(scheduler, optimizer, by_batch)
    objective = Objective(Caller(network, output, targets, likelihood.positions), likelihood, prior, n,
                          frozen.num_outputs, sum_of_weights(batches))
    run = Run(model, objective, minibatches, optimizer, scheduler, by_batch, schedule, strategy,
              epochs if annealed else None)
    del frozen
    _rehearse(model, few, n, run.ascent.which, strategy)
    if settings.resume is not None:
        run.restore(FORMAT.state(settings.resume, device, "training"))
    _require_length(run, epochs)
    with torch.inference_mode(False), torch.enable_grad(), in_mode(network, training=True):
        return _go(run, epochs, called, settings, predictive)


def _go(
    run: Run, epochs: int, callbacks: Sequence[Callback], settings: Settings, predictive: str | None
) -> EvidenceTraining:
    """Run all epochs with a progress bar; after an error the network is left at the best evidence so far."""
    snapshots, remaining = Snapshots(run.snapshot, settings.checkpoint), range(run.epoch, epochs)
    try:
        for _ in track(remaining, run.words, len(remaining), settings.progress):
            if run.stopped:
                break
            run.train_epoch()
            evaluated = run.schedule.due(run.epoch, epochs)
            if evaluated:
                run.evaluate(run.schedule.left(run.epoch, epochs))
            _call(run, epochs, callbacks, evaluated)
            snapshots.after_step()
        if not run.history.epochs or (run.stopped and run.history.epochs[-1] != run.epoch):
            run.evaluate(0)  # a callback stopped it between two evaluations
        run.stopped = run.stopped or "all were asked for"
        snapshots.finish()
        return run.result() if predictive is None else run.converged_result(predictive, settings)
    except KeyboardInterrupt as cause:
        snapshots.save()
        _leave(run)
        raise TrainingInterrupted(snapshots.latest, len(snapshots.latest["history"]["loss"]), epochs) from cause
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
        seen = TrainingState(run.model.network, run.optimizer, run.epoch, epochs, run.history.loss[-1],
                             run.posterior if evaluated else None, run.history, run.stopped)
        callback(seen)
        run.stopped = seen.stopped
        run.model.network.train()  # it may have evaluated the network


def _probe(frozen: Network, batches: Batches, likelihood: Likelihood, n: int) -> tuple[Inputs, Tensor] | None:
    """Check that outputs, targets and the likelihood fit together before the first epoch.

    Return the first two examples with a target; None if the first batch has no target.
    """
    frozen.module.eval()
    x, y = next(iter(batches))
    few = take(x, slice(0, 2))
    frozen.without_grad(few)
    likelihood.bind(n, frozen.num_outputs)
    observed = likelihood.observed(likelihood.targets(y, len(y), frozen.num_outputs))
    if observed is None:
        return few, y[:2]
    there = observed.reshape(len(y), -1).any(1).nonzero().squeeze(1)[:2]
    return (take(x, there), y[there]) if len(there) else None


def _rehearse(
    model: Model, few: tuple[Inputs, Tensor] | None, n: int, moving: Sequence[str] | None, strategy: StepEvidence
) -> None:
    """Fit a posterior to two examples, to raise errors of an evidence (also of its memory) before the first epoch."""
    if few is None:
        return
    try:
        posterior = model.on(few).posterior(quietly=True)
    except NumericalError:  # two examples may be too few
        return
    Variables(posterior, moving)
    fitted, spec = posterior.fitted, model.spec
    if isinstance(spec, Auto):
        spec.require_memory(Problem(fitted.model, n, fitted.model.jacobian_pass.rows(few[0])))
    else:
        spec.require_memory(fitted.model, n, fitted.structure)
    strategy.require_memory(fitted.model, few[0])


def _require_dense_gradients(network: nn.Module) -> None:
    """Refuse embeddings with sparse gradients, which autograd cannot add to that of the prior (UnsupportedError)."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise UnsupportedError("embeddings with dense gradients, as that of the prior is",
                                   f"{name!r} with sparse=True", "Set its attribute sparse to False.")


def _require_length(run: Run, epochs: int) -> None:
    """Check that a scheduler of finite length does not end before the training."""
    total, each = getattr(run.scheduler, "total_steps", None), run.minibatches.count if run.by_batch else 1
    if total is None or each is None:
        return
    steps = run.scheduler.last_epoch + (epochs - run.epoch) * each
    if steps > total:
        raise UnsupportedError(f"a scheduler of at least {steps:,} steps, as many as it is given", f"one of {total:,}",
                               f"Pass total_steps={steps}, or fewer epochs.")


def adam(parameters: list[nn.Parameter], rate: float = _RATE) -> torch.optim.Adam:
    """Adam in one kernel where there is one, because the number of calls rules steps of small networks."""
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
    return torch.optim.Adam(parameters, lr=rate, fused=fused or None)


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
        except TypeError as error:  # a class with more required arguments
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
