"""The evidence during a training by another library, and the weights of the highest one."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ntk_laplace.curvature import CurvatureType
from ntk_laplace.errors import (
    DataError,
    HyperparameterError,
    NetworkError,
    UnsupportedError,
    require_flags,
    require_whole,
    warn,
)
from ntk_laplace.model.data import generators_of
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.network import ParameterChoice, require_module
from ntk_laplace.model.objective import in_mode
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.posterior.fit import laplace, spec_of
from ntk_laplace.runtime.serialization import (
    is_safetensors,
    load_random,
    random_state,
    read_tensors,
    require_writable,
    write,
)
from ntk_laplace.structures import Settings, StructureSpec


@dataclass(frozen=True)
class TrackedEvidence:
    """The evidence after one epoch.

    Attributes
    ----------
    epoch : int
        Counted from 1.
    log_evidence : float
        In nats, summed over the data.
    num_examples : int
        N.
    prior : GaussianPrior
    likelihood : Likelihood
        Those of this evidence: the given ones, or those fitted after this epoch.
    """

    epoch: int
    log_evidence: float
    num_examples: int
    prior: GaussianPrior
    likelihood: Likelihood

    @property
    def per_example(self) -> float:
        """The log evidence divided by N, nats."""
        return self.log_evidence / self.num_examples


class EvidenceTracker:
    """Fits the posterior during a training, records its evidence, and keeps the weights of the highest one.

    The callbacks of trainers share it. In a training loop of your own, call `evaluate` after an epoch, and `restore`
    at the end. The fit leaves weights, gradients, modes and random states as they were.

    Parameters
    ----------
    data
        The training data of the evidence, without augmentation; see `laplace`.
    likelihood : Likelihood
    prior : GaussianPrior, optional
        By default precision 1 for each layer. A mean loss with weight decay w has the precision N·w.
    structure : str or StructureSpec
        See `laplace`.
    every : int
        Epochs between two evaluations.
    metric : str
        Name of the log evidence in the logs; the name of the log evidence per example ends in ``_per_example``.
    restore_best : bool
        Whether the network has the weights of the highest evidence after the training.
    path : path, optional
        File of the best state dict, instead of memory. An earlier file is replaced.
    network : str or callable, optional
        Which network maps inputs to the likelihood's outputs: the name of a submodule of the trained module, or a
        function that takes the trained module and returns a network. By default the trained module itself.
    hyperparameters : bool
        Whether the precisions and the noise are fitted by the evidence before each is recorded. Each fit starts from
        the last one.
    correction : bool
        Whether ½ gᵀH⁻¹g is added to the evidence; see `Posterior.log_marginal_likelihood`.
    curvature, parameters, dtype, settings, output, targets : optional
        See `laplace`.

    Attributes
    ----------
    history : list of TrackedEvidence
        One for each evaluation of the present training.
    best : TrackedEvidence or None
        The one of the highest evidence.

    Raises
    ------
    NTKLaplaceError
        If an argument is invalid; what depends on the network and the data is checked at the first evaluation.

    Notes
    -----
    Evidences of one model can be compared over epochs if the data stay the same. The recorded states contain buffers
    and frozen parameters.
    """

    def __init__(
        self, data: Any, likelihood: Likelihood, prior: GaussianPrior | None = None,
        structure: str | StructureSpec = "kfac", *, every: int = 1, metric: str = "log_evidence",
        restore_best: bool = False, path: str | os.PathLike[str] | None = None,
        network: str | Callable[[Any], nn.Module] | None = None, hyperparameters: bool = False,
        correction: bool = False, curvature: str | CurvatureType = "ggn", parameters: ParameterChoice = None,
        dtype: torch.dtype | None = None, settings: Settings | None = None, output: str | int | None = None,
        targets: str | None = None,
    ) -> None:
        if data is None:
            raise DataError("the training data of the evidence", "None", "Pass (X, y), a dataset or a DataLoader.")
        if not isinstance(metric, str) or not metric:
            raise HyperparameterError("a name as metric", repr(metric), 'Pass metric="log_evidence", for instance.')
        if isinstance(network, nn.Module) or not (network is None or isinstance(network, str) or callable(network)):
            raise NetworkError("the name of a submodule, or a function of the trained module, as network",
                               f"a {type(network).__name__}", 'Pass network="model", for instance.')
        if path is not None:
            require_writable(path)
        require_flags(restore_best=restore_best, hyperparameters=hyperparameters, correction=correction)
        spec_of(structure)
        own = copy.deepcopy(Likelihood.of(likelihood)), copy.deepcopy(GaussianPrior.of(prior, groups="layer"))
        self.every = require_whole("every", every, 1, "Pass every=1 for each epoch.")
        self.metric, self.restore_best, self.path = metric, restore_best, path
        self.history: list[TrackedEvidence] = []
        self.best: TrackedEvidence | None = None
        self._data, self._network, self._given = data, network, own
        self._hyperparameters, self._correction = hyperparameters, correction
        self._fit = partial(laplace, structure=structure, curvature=CurvatureType.of(curvature), parameters=parameters,
                            dtype=dtype, settings=Settings.of(settings), output=output, targets=targets)
        self._state: dict[str, Any] | None = None

    def start(self) -> None:
        """Forget an earlier training."""
        self.history, self.best, self._state = [], None, None

    def due(self, epoch: int) -> bool:
        """Whether an evaluation follows this epoch, counted from 1."""
        return epoch % self.every == 0

    def evaluate(self, module: nn.Module, epoch: int) -> dict[str, float]:
        """Fit the posterior at the present weights, record its evidence, and keep the weights if it is the highest.

        Parameters
        ----------
        module : nn.Module
            The trained module. It does not change.
        epoch : int
            Finished epochs.

        Returns
        -------
        dict
            The log evidence and the log evidence per example, nats, by their names in the logs.

        Raises
        ------
        NTKLaplaceError
            As `laplace`.
        """
        network = self._network_of(module)
        likelihood, prior = (self.history[-1].likelihood, self.history[-1].prior) if self.history else self._given
        with torch.inference_mode(False), torch.enable_grad(), _untouched(module, network, self._data):
            posterior = self._fit(network, self._data, likelihood, prior)
            if self._hyperparameters:
                posterior.fit_hyperparameters()
            value = float(posterior.log_marginal_likelihood(self._correction).detach())
        own = copy.deepcopy(posterior.prior), copy.deepcopy(posterior.likelihood)
        found = TrackedEvidence(epoch, value, posterior.num_examples, *own)
        self.history.append(found)
        if self.best is None or value > self.best.log_evidence:
            self.best = found
            self._keep(module)
        return {self.metric: value, f"{self.metric}_per_example": found.per_example}

    def restore(self, module: nn.Module) -> None:
        """Load the weights and buffers of the highest evidence; a warning if there was no evaluation."""
        if self.best is None:
            warn(f"no evidence was computed, so no weights are restored: every={self.every} is more than "
                 "the number of epochs")
            return
        module.load_state_dict(self._saved())

    def _network_of(self, module: nn.Module) -> nn.Module:
        if self._network is None:
            return require_module(module)
        if callable(self._network):
            return require_module(self._network(module))
        try:
            return module.get_submodule(self._network)
        except AttributeError as cause:
            children = ", ".join(name for name, _ in module.named_children())
            raise NetworkError("the name of a submodule", repr(self._network), f"There are: {children}.") from cause

    def _saved(self) -> dict[str, Any]:
        if self.path is None:
            return self._state or {}
        if is_safetensors(self.path):
            return read_tensors(self.path)
        return torch.load(self.path, map_location="cpu", weights_only=True)

    def _keep(self, module: nn.Module) -> None:
        state = {name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
                 for name, value in module.state_dict().items()}
        if self.path is None:
            self._state = state
        else:
            write(state, self.path)


class TracksEvidence:
    """What the callbacks of all trainers do with their tracker."""

    tracker: EvidenceTracker

    @property
    def best(self) -> TrackedEvidence | None:
        """The highest evidence so far, with its epoch."""
        return self.tracker.best

    def start(self, processes: int, remedy: str) -> None:
        """Forget an earlier training (UnsupportedError if several processes train: none of them has all data)."""
        if processes > 1:
            raise UnsupportedError("a training by one process", f"{processes} processes", remedy)
        self.tracker.start()

    def end(self, module: nn.Module) -> None:
        """Restore the best weights, if that was asked for."""
        if self.tracker.restore_best:
            self.tracker.restore(module)


@contextmanager
def _untouched(module: nn.Module, network: nn.Module, data: Any) -> Iterator[None]:
    """Run a block in eval mode, then restore modes and random states, those of a loader too."""
    first = next(network.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    generators = generators_of(data) if isinstance(data, DataLoader) else []
    before = random_state(device, generators)
    try:
        with in_mode(module, training=False), in_mode(network, training=False):
            yield
    finally:
        load_random(before, device, generators)
