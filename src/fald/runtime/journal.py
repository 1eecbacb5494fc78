"""The journal of a run: ``rounds.jsonl``, one line of JSON per round or few, for whoever watches it.

Lines are only ever appended, so a run may be followed while it goes and after it was killed. The file is
locked while its run lives; a journal that has begun, has not ended and is not locked belongs to a dead run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from fald.core.errors import ConfigError, FaldError, Interrupted, StorageError
from fald.core.files import lock, storage_error

NAME = "rounds.jsonl"
MOST_PARAMETERS = 30  # whose intervals a line carries
_QUICKEST = 0.5  # seconds between lines of fast rounds
_SHARE = 20  # a summary of the draws may take 1/20 of the time


class Journal:
    """Writes down how a run goes.

    Parameters
    ----------
    folder
        Folder of the run, where ``rounds.jsonl`` grows; None: nothing is written.

    Attributes
    ----------
    about
        What the first line of the run says besides what the run itself knows.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     journal = Journal(folder)
    ...     with journal.running(round=0, rounds_total=2):
    ...         journal.write(round=1, energy=3.5, draws=4)
    ...     [line.get("event") or line["round"] for line in read(folder)]
    ['start', 1, 'end']
    """

    def __init__(self, folder: str | Path | None):
        self.path = None if folder is None else Path(folder) / NAME
        self.about: dict[str, Any] = {}
        self._file: IO[bytes] | None = None
        self._last = self._next_summary = time.monotonic()
        self._summaries = 0

    @property
    def due(self) -> bool:
        """Whether enough time has passed for another line of a fast run."""
        return self.path is not None and time.monotonic() - self._last >= _QUICKEST

    def write(self, **fields: Any) -> None:
        """Append a line; ``time`` and ``seconds`` since the line before are added.

        Fields are those that the documentation of ``rounds.jsonl`` lists, as far as they are known. Numbers
        that are not finite become null.
        """
        if self.path is None:
            return
        now = time.monotonic()
        line = {**fields, "time": round(time.time(), 3), "seconds": round(now - self._last, 3)}
        self._last = now
        try:
            if self._file is None:
                self._file = _open(self.path)
            self._file.write(json.dumps(_plain(line), ensure_ascii=False, default=str).encode() + b"\n")
        except OSError as error:
            raise storage_error(self.path, error) from error

    def summary_due(self) -> bool:
        """Whether a summary of the draws so far would take only a small part of the time."""
        return self.path is not None and time.monotonic() >= self._next_summary

    def summarised(self, seconds: float) -> None:
        """Note that a summary took so long; the first loads and compiles, and does not count."""
        self._next_summary = time.monotonic() + max(2.0, _SHARE * seconds if self._summaries else 0.0)
        self._summaries += 1

    @contextlib.contextmanager
    def running(self, **start: Any) -> Iterator[None]:
        """Write the first and the last line of a run, whatever ends it, and hold the lock in between.

        ``start`` is what is known then: ``round`` (0 unless resumed), ``rounds_total``, ``sites`` and others.
        """
        self.write(event="start", **self.about, **start)
        status: dict[str, Any] = {"status": "finished"}
        try:
            yield
        except BaseException as error:
            stopped = isinstance(error, Interrupted | KeyboardInterrupt)
            said = getattr(error, "message", "") or str(error) or type(error).__name__
            status = {"status": "interrupted" if stopped else "failed", "message": said}
            if isinstance(error, FaldError):
                status["exit_code"] = int(error.exit_code)
            raise
        finally:
            with contextlib.suppress(StorageError):  # what ended the run is what matters
                self.write(event="end", **status)
            self.close()

    def close(self) -> None:
        """Close the file, and give its lock back."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def as_journal(journal: str | Path | Journal | None) -> Journal:
    """A journal from what a user may give: a folder, a journal, or None for none."""
    if journal is None or isinstance(journal, str | Path):
        return Journal(journal)
    if not isinstance(journal, Journal):
        raise ConfigError(f"journal must be a folder or a fald.runtime.journal.Journal; got {journal!r}")
    return journal


def read(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's journal in the order written; what a kill has torn is left out.

    A run that was begun anew in the same folder hides what an earlier one wrote.

    Raises
    ------
    StorageError
        If there is no journal.
    """
    path = Path(folder) / NAME
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"cannot read {path}: {error.strerror}", hint="give the folder of a run, the --out of 'fald run'"
        ) from error
    return since_start(parse(content))


def parse(content: bytes) -> list[dict[str, Any]]:
    """Whole lines of a piece of a journal."""
    lines = []
    for raw in content.split(b"\n"):
        try:
            line = json.loads(raw)
        except ValueError:  # torn by a kill, or still being written
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def since_start(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of the newest run: those since it was begun, the parts it was resumed in included."""
    begun = [i for i, line in enumerate(lines) if line.get("event") == "start" and not line.get("round")]
    return lines[begun[-1] :] if begun else lines


def alive(folder: str | Path) -> bool | None:
    """Whether a process is writing the journal now; None where locks cannot tell."""
    try:
        with open(Path(folder) / NAME, "rb") as file:
            free = lock(file, shared=True)
    except OSError:
        return None
    return None if free is None else not free


def replies(carrier: Any) -> Mapping[str, Any] | None:
    """How the sites answered in the latest round, if an engine or an exchange can tell.

    Such a carrier has a method ``replies()`` that returns, by the name of the site, ``{"seconds": …,
    "status": "answered" | "late" | "refused" | "absent"}``.
    """
    told = getattr(carrier, "replies", None)
    return None if told is None else told()


def _open(path: Path) -> IO[bytes]:
    """The file, locked and ready for a new line after whatever a kill left behind."""
    file = open(path, "ab+", buffering=0)  # noqa: SIM115 - it stays open as long as the run
    for _ in range(20):  # whoever asks whether the run is alive has the lock for a moment
        if lock(file) is not False:
            break
        time.sleep(0.01)
    if file.seek(0, os.SEEK_END) > 0:
        file.seek(-1, os.SEEK_END)
        file.write(b"" if file.read(1) == b"\n" else b"\n")
    return file


def _plain(value: Any) -> Any:
    """The value as JSON can hold it; numbers with six digits, because nobody looks closer."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(part) for part in value]
    if isinstance(value, float | np.floating):
        number = float(value)
        if not math.isfinite(number):
            return None
        return number if abs(number) >= 1e6 else float(f"{number:.6g}")
    return value.item() if isinstance(value, np.generic) else value
