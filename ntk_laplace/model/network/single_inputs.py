"""Single inputs of a network, for modules that make features of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ntk_laplace.errors import NetworkError


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
