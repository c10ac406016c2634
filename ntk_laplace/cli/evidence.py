"""The command ``ntk-laplace evidence``: the comparison of structures for one's own network and data."""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path

import torch

import ntk_laplace as ntkl
from ntk_laplace import plotting
from ntk_laplace.cli.inputs import check_forward, load_data, load_network, load_weights

__all__ = ["run"]


def run(options: argparse.Namespace) -> None:
    """Load, compare, print, write.

    Raises
    ------
    NTKLaplaceError
        If something that was brought does not fit.
    OSError
        If a file cannot be written; before the work.
    ComparisonInterrupted
        After what was finished has been printed.
    """
    for path in (options.json, options.plot):
        _require_writable(path)
    dtype = torch.float32 if options.float32 else torch.float64
    network = load_network(*options.network)
    load_weights(network.to(dtype=dtype), options.checkpoint)
    x, y = load_data(options.data, dtype)
    check_forward(network, x)
    network.to(_device(options.device, dtype))
    budget = None if options.memory is None else int(options.memory * 2**30)
    try:
        found = ntkl.compare_evidence(
            network, (x, y), _likelihood(options), ntkl.GaussianPrior(options.precision, groups=options.groups),
            options.structures, options.correction, curvature=options.curvature,
            dtype=dtype, settings=ntkl.Settings(memory_budget=budget),
        )  # fmt: skip
    except ntkl.ComparisonInterrupted as stop:
        if stop.comparison.rows:
            print(stop.comparison)
        raise
    print(found)
    if options.json is not None:
        options.json.write_text(found.to_json() + "\n", encoding="utf-8")
    if options.plot is not None:
        options.plot.write_bytes(plotting.png(found.plot()))


def _likelihood(options: argparse.Namespace) -> ntkl.Likelihood:
    if options.likelihood == "gaussian":
        return ntkl.Gaussian(noise=1.0 if options.noise is None else options.noise)
    return {"categorical": ntkl.Categorical, "bernoulli": ntkl.Bernoulli, "poisson": ntkl.Poisson}[options.likelihood]()


def _device(name: str, dtype: torch.dtype) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device, dtype=dtype)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as cause:
        raise ntkl.UnsupportedError(f"a device that torch can use here for {dtype}", repr(name),
                                    "Pass --device cpu, or install a torch for that device.") from cause
    return device


def _require_writable(path: Path | None) -> None:
    """Now, not after the work."""
    if path is None:
        return
    place = path if path.exists() else path.resolve().parent
    code = 0
    if path.is_dir():
        code = errno.EISDIR
    elif not place.exists():
        code = errno.ENOENT
    elif not os.access(place, os.W_OK):
        code = errno.EACCES
    if code:
        raise OSError(code, os.strerror(code), str(path))
