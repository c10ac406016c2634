"""Progress bars, shown only on a terminal by default; nested ones share a display."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")
_live: list[Progress] = []  # the display, while there is one


def track(
    items: Iterable[T], description: str | Callable[[], str], total: int | None, enabled: bool | None = None,
    size: Callable[[T], int] = lambda item: 1, delay: float = 0.0,
) -> Generator[T, None, None]:
    """Iterate over `items` with a progress bar that shows the remaining time.

    Parameters
    ----------
    items : iterable
        The items of work.
    description : str or callable
        What is being done; a callable is called again after each item.
    total : int, optional
        Sum of the items' sizes, if known.
    enabled : bool, optional
        Show the bar; by default only if the error stream is a terminal.
    size : callable
        Returns the size of an item; by default all items have equal size.
    delay : float
        Seconds after which the bar appears, where `enabled` is left to the terminal: short work shows none.
    """
    show = sys.stderr.isatty() if enabled is None else enabled
    if not show:
        yield from items
        return
    left, done, began = iter(items), 0, time.monotonic()
    if delay and enabled is None:
        for item in left:
            yield item
            done += size(item)
            if time.monotonic() - began >= delay:
                break
        else:
            return
    nested = bool(_live)
    with _display() as bar:
        task = bar.add_task(_words(description), total=total, completed=done)
        try:
            for item in left:
                yield item
                bar.update(task, advance=size(item), description=_words(description))
        finally:
            if nested:  # the outermost task stays until the display ends
                bar.remove_task(task)


@contextlib.contextmanager
def _display() -> Iterator[Progress]:
    """The display that is there, or a new one."""
    if _live:
        yield _live[0]
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        _live.append(bar)
        try:
            yield bar
        finally:
            _live.clear()


def _words(description: str | Callable[[], str]) -> str:
    return description if isinstance(description, str) else description()
