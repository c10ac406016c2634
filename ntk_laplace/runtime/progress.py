"""Progress bars, shown only on a terminal by default."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["track"]

T = TypeVar("T")


def track(
    items: Iterable[T], description: str | Callable[[], str], total: int | None, enabled: bool | None = None,
    size: Callable[[T], int] = lambda item: 1,
) -> Iterator[T]:  # fmt: skip
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
    """
    show = sys.stderr.isatty() if enabled is None else enabled
    if not show:
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(_words(description), total=total)
        for item in items:
            yield item
            bar.update(task, advance=size(item), description=_words(description))


def _words(description: str | Callable[[], str]) -> str:
    return description if isinstance(description, str) else description()
