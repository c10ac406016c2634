"""What the exact studies share: scores of batches of Gaussian processes, averages, the authors' files."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2] / "structures"))

from _shared import machine, once, parser, table, write

__all__ = [
    "LOG_2PI",
    "ask",
    "authors",
    "conditional",
    "left_out",
    "log_density",
    "machine",
    "means",
    "normal",
    "once",
    "orders",
    "predictive",
    "shown",
    "spearman",
    "table",
    "write",
]

LOG_2PI = math.log(2 * math.pi)


def ask(description: str | None, out: str, sets: int) -> argparse.ArgumentParser:
    """Arguments every exact study takes."""
    arguments = parser(description, out)
    arguments.add_argument("--data", type=Path, help="folder with l22/*.npz, the files behind the paper's figures")
    arguments.add_argument("--sets", type=int, default=sets, help=f"data sets of the averages (default {sets})")
    return arguments


def authors(folder: Path | None, name: str) -> dict[str, Tensor] | None:
    """Arrays of a file behind the paper's figures in double precision, or None without a folder."""
    if folder is None:
        return None
    with np.load(folder / "l22" / f"{name}.npz") as found:
        return {key: torch.as_tensor(found[key]).double() for key in found.files}


def normal(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Log density of N(mean, variance), elementwise."""
    return -0.5 * (LOG_2PI + variance.log() + (y - mean).square() / variance)


def log_density(covariance: Tensor, y: Tensor) -> Tensor:
    """log N(y; 0, covariance) of a batch, (...,): (..., n, n) and (..., n)."""
    factor = torch.linalg.cholesky(covariance)
    z = torch.linalg.solve_triangular(factor, y.unsqueeze(-1), upper=False).squeeze(-1)
    logs = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * y.shape[-1] * LOG_2PI - logs - 0.5 * z.square().sum(-1)


def orders(n: int, count: int, seed: int) -> Tensor:
    """Random orders of n points, (count, n)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(n, generator=generator) for _ in range(count)])


def conditional(covariance: Tensor, y: Tensor, m: int, asked: Tensor) -> Tensor:
    """log p(other points given the first m), averaged over orders (K, n); of a batch, (...,)."""
    whole = log_density(covariance, y)
    known = [log_density(covariance[..., i[:, None], i], y[..., i]) for i in asked[:, :m]]
    return whole - torch.stack(known).mean(0)


def left_out(covariance: Tensor, y: Tensor) -> Tensor:
    """Σ log p(y_n given all others) of a batch, (...,)."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(covariance))
    variance = 1 / inverse.diagonal(dim1=-2, dim2=-1)
    error = (inverse @ y.unsqueeze(-1)).squeeze(-1) * variance
    return normal(error, torch.zeros_like(error), variance).sum(-1)


def predictive(covariance: Tensor, y: Tensor, cross: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of new points: those of the data (..., n, n), (..., t, n) and of the points (..., t, t)."""
    factor = torch.linalg.cholesky(covariance)
    half = torch.linalg.solve_triangular(factor, cross.mT, upper=False)
    z = torch.linalg.solve_triangular(factor, y.unsqueeze(-1), upper=False)
    return (half.mT @ z).squeeze(-1), own - half.mT @ half


def means(values: Tensor) -> tuple[float, float]:
    """Mean over data sets and its standard error."""
    return float(values.mean()), float(values.std() / len(values) ** 0.5)


def shown(values: Tensor, digits: int = 2) -> str:
    """Mean and standard error for a table."""
    mean, error = means(values)
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def spearman(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's ρ of rows without ties, (...,)."""
    ranks = [values.argsort(-1).argsort(-1).double() for values in (first, second)]
    centered = [rank - rank.mean(-1, keepdim=True) for rank in ranks]
    return (centered[0] * centered[1]).sum(-1) / (centered[0].norm(dim=-1) * centered[1].norm(dim=-1))
