"""The demo's terminal output: progress during the run, and tables at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


class Screen:
    """Shows progress in so many steps: a bar on a terminal, one line per step if the output is a file."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        columns = (
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("starting", total=steps)
        self._begin = time.perf_counter()
        self._started = False

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return time.perf_counter() - self._begin

    def step(self, what: str) -> None:
        """Start a step and mark the previous one as done."""
        self._bar.update(self._task, description=what, advance=1 if self._started else 0)
        self._started = True
        if not self.console.is_terminal:
            self.console.print(f"[{self.seconds:5.1f} s] {what}", markup=False, highlight=False, soft_wrap=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], words: int, caption: str = "") -> Table:
    """A table whose first columns are words; a first word is written once for all rows that have it."""
    found = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False,
                  collapse_padding=True, caption=caption or None, caption_justify="left")
    for index, name in enumerate(columns):
        found.add_column(name, justify="left" if index < words else "right", no_wrap=True)
    for before, row in zip([None, *rows], rows, strict=False):
        repeated = before is not None and before[0] == row[0]
        found.add_row("" if repeated else row[0], *row[1:])
    return found
