"""The model of a command on the user's network: loaded, checked and built from the options."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.model.data import Inputs, to_device
from ntk_laplace.tools.cli.inputs import Data, Files, TrainingData
from ntk_laplace.tools.cli.likelihood import build_likelihood
from ntk_laplace.tools.cli.python_files import load_network
from ntk_laplace.tools.cli.weights import check_forward, load_weights


@dataclass(frozen=True)
class Model:
    """A trained network, its data, likelihood and prior."""

    network: nn.Module  # on its device, in eval mode
    training: TrainingData
    likelihood: ntkl.Likelihood
    prior: ntkl.GaussianPrior
    options: dict[str, Any]  # `curvature`, `dtype`, `settings` and `output`, as in `laplace`
    files: Files

    @property
    def data(self) -> tuple[Inputs, Tensor]:
        """Inputs and targets of the training."""
        return self.training.x, self.training.y

    @property
    def given(self) -> tuple[nn.Module, tuple[Inputs, Tensor], ntkl.Likelihood, ntkl.GaussianPrior]:
        """The first arguments of `laplace`."""
        return self.network, self.data, self.likelihood, self.prior

    def read(self, path: Path, what: str, labeled: bool = False) -> Data:
        """Other data like those of the training, which the network takes (DataError, NetworkError)."""
        found = self.files.like(self.training, path, what, labeled)
        check_forward(self.network, to_device(found.x, next(self.network.parameters()).device), self.options["output"])
        return found


def bring(options: argparse.Namespace) -> Model:
    """Load, build and check the model that the options describe (NTKLaplaceError if one of them is invalid)."""
    dtype = torch.float32 if options.float32 else torch.float64
    network = load_network(*options.network)
    load_weights(network.to(dtype=dtype), options.checkpoint)
    likelihood = build_likelihood(options)
    files = Files(dtype, likelihood, options.targets, options.target, options.source, options.drop)
    training = files.training(options.data)
    check_forward(network, training.x, options.output)
    network.to(_device(options.device, dtype))
    prior = ntkl.GaussianPrior(options.precision, groups=options.groups)
    own = {"curvature": options.curvature, "dtype": dtype, "settings": settings_of(options), "output": options.output}
    return Model(network, training, likelihood, prior, own, files)


def settings_of(options: argparse.Namespace) -> ntkl.Settings:
    """Memory, processes, and progress: of long work also in a file."""
    budget = None if options.memory is None else int(options.memory * 2**30)
    progress = None if sys.stderr.isatty() else True
    return ntkl.Settings(memory_budget=budget, process_group=options.group, progress=progress)


def _device(name: str, dtype: torch.dtype) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device, dtype=dtype)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as cause:
        raise ntkl.UnsupportedError(f"a device that torch can use here for {dtype}", repr(name),
                                    "Pass --device cpu, or install a torch for that device.") from cause
    return device
