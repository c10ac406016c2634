"""What a case of the table is, and the pieces that builders share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Build = Callable[[], tuple[nn.Module, Callable[[int], Any]]]


@dataclass(frozen=True)
class NetworkCase:
    """One network of the table.

    Attributes
    ----------
    name : str
    build : Callable
        Returns the module and a function that draws n examples.
    outputs : int
        C.
    scalar : bool
        Whether the outputs come as (N,).
    examples : int
        N.
    func : bool
        Whether ``vmap(jacrev)`` can differentiate it.
    dtype : torch.dtype
    train : bool
        The mode it is handed over in.
    perturb : bool
        Whether the registry moves the parameters off their initial values.

    """

    name: str
    build: Build
    outputs: int
    scalar: bool = False
    examples: int = 7
    func: bool = True
    dtype: torch.dtype = torch.float64
    train: bool = False
    perturb: bool = True


NETWORKS: dict[str, NetworkCase] = {}


def network(outputs: int, **options: Any) -> Callable[[Build], Build]:
    """Enter a builder in the table under its own name."""

    def enter(build: Build) -> Build:
        NETWORKS[build.__name__] = NetworkCase(build.__name__, build, outputs, **options)
        return build

    return enter


def real(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape)


def tokens(length: int, vocabulary: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(0, vocabulary, (n, length))


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)
