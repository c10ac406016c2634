"""Weight samples shared by all chunks of inputs: stored, or drawn again from the same random state."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Generator, Tensor

from ntk_laplace.runtime.sampling import draw_sizes

Sampler = Callable[[int, Generator | None], Tensor]


class WeightDraws:
    """Weight samples that are the same in every iteration: `count` of `numbers` parameters, of the dtype of `like`.

    They are drawn with the generator, the global state of the device by default.
    """

    def __init__(
        self, draw: Sampler, count: int, numbers: int, like: Tensor, generator: Generator | None = None
    ) -> None:
        self._draw, self.count, self._generator = draw, count, generator
        self._sizes = draw_sizes(count, numbers, like)
        self._source = generator if generator is not None else _default_generator(like.device)
        self._start: Tensor | None = None
        self._kept: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        if self._kept is not None:
            yield from self._kept
            return
        if self._source is None or len(self._sizes) == 1:
            self._kept = torch.cat([self._draw(size, self._generator) for size in self._sizes])
            yield from self._kept
            return
        if self._start is None:
            self._start = self._source.get_state()
        else:
            self._source.set_state(self._start)
        for size in self._sizes:
            yield from self._draw(size, self._generator)


def _default_generator(device: torch.device) -> Generator | None:
    """The global random generator of a device; None if torch does not expose it."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator if device.type == "cpu" else None
