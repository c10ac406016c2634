"""The model of a command on the user's network: loaded, checked and built from the options."""

from __future__ import annotations

import argparse
import errno
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.model.data import Inputs, to_device
from ntk_laplace.tools.cli.inputs import Files
from ntk_laplace.tools.cli.likelihood import build_likelihood
from ntk_laplace.tools.cli.python_files import load_network
from ntk_laplace.tools.cli.weights import check_forward, load_weights


@dataclass(frozen=True)
class Model:
    """A trained network, its data, likelihood and prior.

    Attributes
    ----------
    network : nn.Module
        The network on its device, in eval mode.
    data : (Tensor, Tensor)
        The training data; several input arrays are a dict.
    likelihood : Likelihood
    prior : GaussianPrior
    options : dict
        `curvature`, `dtype`, `settings` and `output`, as in `laplace`.
    files : Files
        Reads more data as the training data were read.
    """

    network: nn.Module
    data: tuple[Inputs, Tensor]
    likelihood: ntkl.Likelihood
    prior: ntkl.GaussianPrior
    options: dict[str, Any]
    files: Files

    @property
    def given(self) -> tuple[nn.Module, tuple[Inputs, Tensor], ntkl.Likelihood, ntkl.GaussianPrior]:
        """The first arguments of `laplace`."""
        return self.network, self.data, self.likelihood, self.prior

    def check(self, x: Inputs) -> None:
        """Run the network on two other inputs, to report errors in them clearly (NetworkError)."""
        device = next(self.network.parameters()).device
        check_forward(self.network, to_device(x, device), self.options["output"])


def bring(options: argparse.Namespace) -> Model:
    """Load and check the model from the options of `add_model_options`.

    Raises
    ------
    NTKLaplaceError
        If the network, the data or an option is invalid.
    """
    dtype = torch.float32 if options.float32 else torch.float64
    network = load_network(*options.network)
    load_weights(network.to(dtype=dtype), options.checkpoint)
    likelihood = build_likelihood(options)
    files = Files(dtype, likelihood, options.targets, options.target, options.source, options.drop)
    x, y = files.training(options.data)
    check_forward(network, x, options.output)
    network.to(_device(options.device, dtype))
    prior = ntkl.GaussianPrior(options.precision, groups=options.groups)
    own = {"curvature": options.curvature, "dtype": dtype, "settings": settings_of(options), "output": options.output}
    return Model(network, (x, y), likelihood, prior, own, files)


def settings_of(options: argparse.Namespace) -> ntkl.Settings:
    """Memory and processes."""
    budget = None if options.memory is None else int(options.memory * 2**30)
    return ntkl.Settings(memory_budget=budget, process_group=options.group)


def _device(name: str, dtype: torch.dtype) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device, dtype=dtype)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as cause:
        raise ntkl.UnsupportedError(f"a device that torch can use here for {dtype}", repr(name),
                                    "Pass --device cpu, or install a torch for that device.") from cause
    return device


def require_writable(path: Path | None, options: argparse.Namespace, made: bool = False) -> None:
    """Check before the computation that the path can be written, and is none of the files that the command reads.

    Parameters
    ----------
    path : Path, optional
    options : Namespace
        Of the command.
    made : bool
        Whether the command makes missing directories on the way to the path.

    Raises
    ------
    OSError
        If the path cannot be written.
    DataError
        If it names a file that the options give as an input.
    """
    if path is None:
        return
    network = options.network[0] if options.network else None
    given = (network, *(getattr(options, name, None) for name in ("data", "checkpoint", "inputs", "held_out")))
    if path.exists() and any(file.exists() and path.samefile(file) for file in given if file is not None):
        raise ntkl.DataError("another name for what is written", f"{path}, which is an input",
                             "It would be overwritten: choose another --out, --json or --plot.")
    place = path if path.exists() else path.resolve().parent
    while made and not place.exists():
        place = place.parent
    code = 0
    if path.is_dir():
        code = errno.EISDIR
    elif not place.exists():
        code = errno.ENOENT
    elif place != path and not place.is_dir():
        code = errno.ENOTDIR
    elif not os.access(place, os.W_OK):
        code = errno.EACCES
    elif place != path:
        try:
            with tempfile.TemporaryFile(dir=place):  # some systems of files take none, whatever access says
                pass
        except OSError as cause:
            code = cause.errno or errno.EACCES
    if code:
        raise OSError(code, os.strerror(code), str(path))
