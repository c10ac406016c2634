"""Progress bars, shown only on a terminal by default; nested ones share a display. A file gets a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

T = TypeVar("T")
_live: list[Progress] = []  # the display, while there is one
_SECONDS = 30.0  # between two lines where there is no terminal
_told: list[float] = []  # when the last of these lines was written, while work goes on


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
        Show the bar; by default only if the error stream is a terminal. If it is none, True writes a line every 30 s.
    size : callable
        Returns the size of an item; by default all items have equal size.
    delay : float
        Seconds after which the bar appears, where `enabled` is left to the terminal: short work shows none.
    """
    show = sys.stderr.isatty() if enabled is None else enabled
    if not show:
        yield from items
        return
    console = _console()
    if not (console.is_terminal or console.is_jupyter):
        yield from _with_lines(items, description, total, size)
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
    with _display(console) as bar:
        task = bar.add_task(_words(description), total=total, completed=done)
        try:
            for item in left:
                yield item
                bar.update(task, advance=size(item), description=_words(description))
        finally:
            if nested:  # the outermost task stays until the display ends
                bar.remove_task(task)


def _console() -> Console:
    """Of the error stream."""
    from rich.console import Console

    return Console(stderr=True)


def _with_lines(
    items: Iterable[T], description: str | Callable[[], str], total: int | None, size: Callable[[T], int]
) -> Iterator[T]:
    """The items, with a line of text every so many seconds, which nested work shares."""
    done, began, first = 0, time.monotonic(), not _told
    if first:
        _told.append(began)
    try:
        for item in items:
            yield item
            done, now = done + size(item), time.monotonic()
            if now - _told[0] >= _SECONDS:
                share = f", {done / total:.0%}" if total else ""
                print(f"{_words(description)}{share} after {now - began:.0f} s", file=sys.stderr, flush=True)
                _told[0] = now
    finally:
        if first:
            _told.clear()


@contextlib.contextmanager
def _display(console: Console) -> Iterator[Progress]:
    """The display that is there, or a new one."""
    if _live:
        yield _live[0]
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        _live.append(bar)
        try:
            yield bar
        finally:
            _live.clear()


def _words(description: str | Callable[[], str]) -> str:
    return description if isinstance(description, str) else description()
