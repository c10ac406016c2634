"""Single inputs of a network, for modules that make features of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntk_laplace.errors import DataError, HyperparameterError, NetworkError, is_number


def with_fractions(x: Tensor) -> Tensor:
    """The inputs; whole numbers and truth values in torch's default floating type."""
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())


def selected(x: Tensor, numbers: Tensor, features: str) -> Tensor:
    """Inputs (..., d) of these numbers (m,), (..., m); NetworkError, which names the features, if there are fewer."""
    try:  # to read the numbers at each call would wait for a GPU
        return x[..., numbers]
    except IndexError as cause:
        raise NetworkError(f"inputs of at least {1 + int(numbers.max())} numbers", f"shape {tuple(x.shape)}",
                           f"Number the inputs of {features} from 0.") from cause


def checked_table(x: Tensor) -> NDArray[np.float64]:
    """Training inputs (n, d) in double precision on the CPU; DataError if they are not finite numbers."""
    table = isinstance(x, Tensor) and x.ndim == 2
    if not (table and x.isfinite().all()):
        got = "NaN or infinity" if table else f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)[:80]
        raise DataError("inputs x of shape (n, d), finite numbers", got, "Pass the training inputs as a tensor.")
    found: NDArray[np.float64] = x.detach().cpu().double().numpy()
    return found


def numbers_of_each(
    name: str, given: float | Sequence[float], count: int, device: torch.device, remedy: str
) -> Tensor:
    """One number for each feature, (m,); HyperparameterError if they are others than so many finite ones."""
    numbers = [given] * count if is_number(given) else given
    if not (isinstance(numbers, Sequence) and len(numbers) == count and all(is_number(one) for one in numbers)):
        raise HyperparameterError(f"a finite {name}, or {count}, one for each", repr(given)[:80], remedy)
    return torch.tensor([float(one) for one in numbers], dtype=torch.float64, device=device)
