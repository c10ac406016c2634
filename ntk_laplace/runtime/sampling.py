"""Random draws: the generator that a caller gives, how many at a time, and evenly spread points."""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.quasirandom import SobolEngine

from ntk_laplace.errors import UnsupportedError
from ntk_laplace.runtime import tuning


def require_generator(given: object) -> None:
    """Refuse what is neither None nor a generator (UnsupportedError)."""
    if given is not None and not isinstance(given, Generator):
        raise UnsupportedError("a torch.Generator", repr(given)[:80], "Pass torch.Generator().manual_seed(0).")


def normal(shape: tuple[int, ...], like: Tensor, generator: Generator | None) -> Tensor:
    """Standard normal numbers with dtype and device of `like`, drawn on the generator's device, which may be another.

    Without a generator they are drawn from the global random state of the device of `like`.
    """
    device = like.device if generator is None else generator.device
    return torch.randn(*shape, generator=generator, dtype=like.dtype, device=device).to(like.device)


def draw_sizes(count: int, numbers: int, like: Tensor, most: int | None = None) -> list[int]:
    """Sizes of the parts in which `count` draws of so many numbers are made, each within the buffer of draws.

    `like` has the dtype of the draws, of which a part has `most` at most.
    """
    step = max(1, min(tuning.WEIGHT_SAMPLE_BYTES // (numbers * like.element_size()), count if most is None else most))
    return [min(step, count - first) for first in range(0, count, step)]


def scrambled_sobol(count: int, dimension: int, seed: int) -> Tensor:
    """Points of a scrambled Sobol sequence in the unit cube, (count, dimension), float64."""
    engine = SobolEngine(dimension, scramble=True, seed=seed)
    found = engine.draw(count, dtype=torch.float64)
    found[:1] = engine.shift.double() * 2.0**-engine.MAXBIT  # torch rounds the first point to its default dtype
    return found
