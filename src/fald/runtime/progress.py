"""Progress on standard error."""

from __future__ import annotations

import sys
import time


class Progress:
    """A progress display with time left and what the run says of itself.

    On a terminal it is a live bar; elsewhere a line now and then, so that logs stay readable. ``done`` of
    ``total`` rounds were done before; where rounds are ``few`` and slow, each gets a line of its own. The
    pace of others is counted from the first update on: before it programs are compiled, and sites start.
    """

    def __init__(self, total: int, done: int, shown: bool, *, unit="round", task="sampling", few=False):
        self.total, self.start, self.shown, self.few = total, done, shown, few
        self.unit, self.task_name = unit, task
        self.last_line = time.monotonic()
        self.measured = (self.last_line, done) if few else None  # from when and where on
        self.bar = self.task = None

    def __enter__(self) -> Progress:
        if self.shown and not self.few and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self.bar = Bar(
                TextColumn(self.task_name),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(f"{self.unit}s"),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self.bar.start()
            self.task = self.bar.add_task(self.task_name, total=self.total, completed=self.start, note="")
        return self

    def __exit__(self, *exception) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, done: int, note: str, total: int | None = None) -> None:
        """Show that ``done`` rounds are complete, with a note; ``total`` where it has changed."""
        if not self.shown:
            return
        self.total = self.total if total is None else total
        now = time.monotonic()
        began, start = self.measured = self.measured or (now, done)
        pace = (now - began) / (done - start) if done > start else None  # seconds a round
        left = "" if pace is None else f"{pace * (self.total - done):,.0f} s left"
        if self.few:
            rest = f"; at most {left}" if left and done < self.total else ""
            print(f"{self.unit} {done}: {note}{rest}", file=sys.stderr, flush=True)
            return
        if pace is not None:
            quick = pace <= 1
            speed = f"{1 / max(pace, 1e-9):,.0f} {self.unit}s/s" if quick else f"{pace:,.3g} s a {self.unit}"
            note = f"{speed}, {note}"
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=done, note=note)
        elif now - self.last_line >= 10 or done == self.total:
            self.last_line = now
            task = "" if self.task_name == "sampling" else f"{self.task_name}: "
            line = f"{task}{self.unit} {done:,} of {self.total:,}: {note}{left and ', ' + left}"
            print(line, file=sys.stderr, flush=True)
