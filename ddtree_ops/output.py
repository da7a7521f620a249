"""The one sink for everything a command prints: human (rich), ``--json`` or ``--quiet``.

Human text goes to stdout; progress, notes and errors go to stderr, so that output can be piped.
With ``--json``, stdout carries one JSON object a line: ``{"event": ..., ...}`` while work goes on and
``{"event": "result", ...}`` last. With ``--quiet`` only errors and the result's one-line form are printed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console


class OutputMode(StrEnum):
    HUMAN = "human"
    JSON = "json"
    QUIET = "quiet"


Advance = Callable[[int, str], None]


class Output:
    """Prints results, tables, notes and progress in the mode that the user asked for."""

    def __init__(
        self,
        mode: OutputMode = OutputMode.HUMAN,
        *,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mode = mode
        self._stdout = stdout
        self._stderr = stderr
        self._clock = clock
        self._bar_console: Console | None = None

    @property
    def stdout(self) -> TextIO:
        return self._stdout or sys.stdout

    @property
    def stderr(self) -> TextIO:
        return self._stderr or sys.stderr

    def line(self, text: str = "") -> None:
        """A line of the human answer."""
        if self.mode is OutputMode.HUMAN:
            self._console(self.stdout).print(text, highlight=False, soft_wrap=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table of the human answer; numbers are formatted by the caller and aligned right."""
        if self.mode is not OutputMode.HUMAN:
            return
        from rich.table import Table

        table = Table(title=title, title_justify="left", header_style="bold")
        for index, name in enumerate(columns):
            table.add_column(name, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*(str(cell) for cell in row))
        self._console(self.stdout).print(table)

    def markdown(self, text: str) -> None:
        """A text of several paragraphs for people, rendered on a terminal."""
        if self.mode is OutputMode.HUMAN:
            from rich.markdown import Markdown

            self._console(self.stdout).print(Markdown(text))

    def note(self, text: str) -> None:
        """Something that the user should know while the command goes on."""
        if self.mode is OutputMode.HUMAN:
            self._console(self.stderr).print(text, highlight=False, soft_wrap=True, style="dim")
        elif self.mode is OutputMode.JSON:
            self.event("note", text=text)

    def warning(self, text: str) -> None:
        """Something that the user should act on; shown in every mode."""
        if self.mode is OutputMode.JSON:
            self.event("warning", text=text)
            return
        self._console(self.stderr).print(f"warning: {text}", highlight=False, soft_wrap=True, style="yellow")

    def event(self, event: str, **fields: Any) -> None:
        """A progress event; printed in JSON mode only."""
        if self.mode is OutputMode.JSON:
            self._json({"event": event, **fields})

    def result(self, data: Mapping[str, Any], *, summary: str) -> None:
        """The answer of the command: an object with ``--json``, else the line ``summary``."""
        if self.mode is OutputMode.JSON:
            self._json({"event": "result", **data})
        elif self.mode is OutputMode.QUIET:
            print(summary, file=self.stdout, flush=True)
        else:
            self.line(summary)

    def error(self, message: str, *, remedy: str | None, exit_code: int) -> None:
        """A failure, in every mode."""
        if self.mode is OutputMode.JSON:
            self._json({"event": "error", "message": message, "remedy": remedy, "exit_code": exit_code})
            return
        console = self._console(self.stderr)
        console.print(f"error: {message}", highlight=False, soft_wrap=True, style="bold red")
        if remedy:
            console.print(f"  try: {remedy}", highlight=False, soft_wrap=True)

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Advance]:
        """Show progress of ``total`` units: a bar on a terminal, else plain lines, events with ``--json``.

        Yields ``advance(units, description)``.
        """
        if self.mode is OutputMode.HUMAN and self.stderr.isatty():
            with self._bar(title, total) as advance:
                yield advance
            return
        done, last = 0, self._clock() - 3600.0

        def advance_plain(units: int, description: str) -> None:
            nonlocal done, last
            done += units
            self.event("progress", title=title, done=done, total=total, description=description)
            now = self._clock()
            if self.mode is OutputMode.HUMAN and (now - last >= 5.0 or done >= total):
                last = now
                print(f"{title}: {done}/{total} {description}", file=self.stderr, flush=True)

        yield advance_plain

    @contextmanager
    def _bar(self, title: str, total: int) -> Iterator[Advance]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.fields[title]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        console = self._console(self.stderr)
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total, title=title)
            self._bar_console = console
            try:
                yield lambda units, description: bar.update(task, advance=units, description=description)
            finally:
                self._bar_console = None

    def _json(self, data: Mapping[str, Any]) -> None:
        print(json.dumps(data, ensure_ascii=False, default=str), file=self.stdout, flush=True)

    def _console(self, stream: TextIO) -> Console:
        from rich.console import Console

        if self._bar_console is not None and stream is self.stderr:
            return self._bar_console  # prints above the bar, not into it
        # Text comes from users, files and logs: a bracket in it is a bracket.
        return Console(file=stream, markup=False, emoji=False)
