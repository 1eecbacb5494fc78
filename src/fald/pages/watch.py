"""A run as its journal tells it: how far it is, how it goes, who answered, and whether it still lives."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fald.core.errors import ConfigError
from fald.runtime import journal

_SERIES = ("energy", "r_hat", "epsilon", "ess", "k_hat")
_MOST_POINTS = 400
_MOST_HISTORY = 60
_MOST_SITES = 200
_SILENCE = 30.0  # seconds that nobody calls silence


class Follower:
    """Reads a run's folder again and again, and only what is new.

    Parameters
    ----------
    folder
        Folder of a run, running or ended.
    clock
        The present, in seconds since 1970.

    Raises
    ------
    ConfigError
        If it is not the folder of a run.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time):
        if not folder.is_dir():
            raise ConfigError(f"no such folder: {folder}", hint="give the --out of 'fald run'")
        if not any((folder / name).exists() for name in ("study.json", journal.NAME)):
            raise ConfigError(
                f"{folder} is not the folder of a run: it has neither study.json nor {journal.NAME}",
                hint="give the --out of 'fald run', or the journal of fald.sample or fald.fit",
            )
        self.folder, self.clock = folder, clock
        self._lock = threading.Lock()
        self._file: tuple[int, int] = (0, 0)  # which file, and how much of it is read
        self._clear()

    def _clear(self) -> None:
        self._start: dict[str, Any] = {}
        self._end: dict[str, Any] = {}
        self._parts = self._version = 0
        self._rows: dict[int, dict[str, Any]] = {}
        self._replies: dict[str, dict[str, Any]] = {}
        self._last_time = self._began = 0.0

    def state(self, query: Mapping[str, str]) -> dict[str, Any]:
        """What the page shows; the long part only if it is newer than the version in ``seen``."""
        with self._lock:
            self._read()
            known = {"version": f"{self._began:.3f}-{self._version}-{self._result_time()}", **self._now()}
            return known if query.get("seen") == known["version"] else {**known, **self._whole()}

    def _read(self) -> None:
        path = self.folder / journal.NAME
        try:
            about = path.stat()
            inode, offset = self._file
            if inode != about.st_ino or about.st_size < offset:  # another file under the same name
                self._clear()
                offset = 0
            with open(path, "rb") as file:
                file.seek(offset)
                content = file.read()
        except OSError:
            return
        whole = content.rfind(b"\n") + 1
        self._file = (about.st_ino, offset + whole)
        for line in journal.parse(content[:whole]):
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        event = line.get("event")
        if event == "start":
            reached = int(line.get("round") or 0)
            if reached == 0:
                self._clear()
                self._began = float(line.get("time") or 0.0)
            self._start, self._end = line, {}
            self._parts += 1
            # rounds after the last checkpoint are run again
            self._rows = {number: row for number, row in self._rows.items() if number <= reached}
        elif event == "end":
            self._end = line
        elif isinstance(line.get("round"), int):
            self._rows[line["round"]] = line
            for name, reply in (line.get("sites") or {}).items():
                self._count(name, reply)
        self._version += 1
        self._last_time = float(line.get("time") or self._last_time)

    def _count(self, name: str, reply: Mapping[str, Any]) -> None:
        known = self._replies.setdefault(name, {"counts": {}, "seconds": None, "status": ""})
        status = str(reply.get("status", ""))
        known["counts"][status] = known["counts"].get(status, 0) + 1
        known["status"], known["seconds"] = status, reply.get("seconds")

    def _result_time(self) -> str:
        try:
            return f"{(self.folder / 'summary.json').stat().st_mtime:.3f}"
        except OSError:
            return ""

    def _recent(self) -> list[dict[str, Any]]:
        """The newest lines of this part of the run: enough for a rate, few enough to be recent."""
        began = float(self._start.get("time") or 0.0)
        rows = [row for row in list(self._rows.values())[-40:] if float(row.get("time") or 0.0) >= began]
        late = [row for row in rows if row["time"] >= rows[-1]["time"] - 60]
        return late if len(late) > 3 else rows[-4:]

    def _rate(self) -> float | None:
        """Rounds per second of late."""
        rows = self._recent()
        first = rows[0] if len(rows) > 1 else self._start if rows else None
        if first is None:
            return None
        rounds = rows[-1]["round"] - int(first.get("round") or 0)
        seconds = rows[-1]["time"] - float(first["time"])
        return rounds / seconds if rounds > 0 and seconds > 0 else None

    def _now(self) -> dict[str, Any]:
        """What changes with time alone: whether the run lives, and how long it will take."""
        now, last, rate = self.clock(), max(self._rows, default=0), self._rate()
        age = max(0.0, now - self._last_time) if self._version else None
        status = self._status(age)
        going = status in ("running", "stalled")
        total = self._start.get("rounds_total")
        if total is not None and last > total:  # importance sampling went over to split-HMC
            total = self._start.get("most_rounds", total)
        elapsed = max(0.0, (now if going else self._last_time) - self._began) if self._began else None
        return {
            "status": status,
            "age": age,
            "round": last,
            "rounds_total": total,
            "at_most": "most_rounds" in self._start,
            "rate": rate,
            "eta": max(0.0, (total - last) / rate - (age or 0.0)) if going and rate and total else None,
            "elapsed": elapsed,
            "message": str(self._end.get("message", "")),
        }

    def _status(self, age: float | None) -> str:
        if self._end:
            return str(self._end.get("status", "finished"))
        if age is None:
            return "finished" if self._result_time() else "waiting"
        if journal.alive(self.folder) is False:
            return "died"
        gaps = [float(row.get("seconds") or 0.0) for row in self._recent()]
        usual = statistics.median(gaps) if gaps else 0.0
        return "stalled" if age > max(_SILENCE, 10 * usual) else "running"

    def _whole(self) -> dict[str, Any]:
        rows = [self._rows[number] for number in sorted(self._rows)]
        last = rows[-1] if rows else {}
        settings = self._start.get("settings") or {}
        return {
            "title": self._title(),
            "folder": self.folder.name or str(self.folder),
            "method": self._start.get("method", ""),
            "model": self._start.get("model", ""),
            "parts": self._parts,
            "settings": settings,
            "numbers": {name: last.get(name) for name in ("draws", "bytes_up", "bytes_down")}
            | {name: _latest(rows, name) for name in _SERIES},
            "privacy": settings.get("privacy"),
            "series": _series(rows),
            "intervals": _intervals(rows),
            "sites": self._sites(),
            "sites_answer": bool(self._replies),
            "result": self._result(),
        }

    def _title(self) -> str:
        study = _load(self.folder / "study.json")
        return str(self._start.get("title") or study.get("title") or self.folder.name or "run")

    def _sites(self) -> list[dict[str, Any]]:
        sizes = self._start.get("sites") or {}
        everything = sum(sizes.values()) or 1
        rows = [
            {
                "name": name,
                "rows": size,
                "share": size / everything,
                **self._replies.get(name, {"counts": {}, "seconds": None, "status": ""}),
            }
            for name, size in sizes.items()
        ]
        if len(rows) > _MOST_SITES:  # those one must look at first
            rows.sort(key=lambda r: (r["status"] in ("answered", ""), -(r["seconds"] or 0.0)))
        return rows[:_MOST_SITES]

    def _result(self) -> dict[str, Any] | None:
        """What the finished run wrote: the verdict, and the table as it stands in ``summary.json``."""
        found = _load(self.folder / "summary.json")
        if not found:
            return None
        names = ("verdict", "reason", "advice", "complaints", "summary", "level", "estimate", "note")
        kept = {name: found[name] for name in names if name in found}
        rows = kept.get("summary")
        if isinstance(rows, list):
            kept |= {"summary": rows[: journal.MOST_PARAMETERS], "num_parameters": len(rows)}
        kept["report"] = (self.folder / "report.html").exists()
        return kept


def _load(path: Path) -> dict[str, Any]:
    """A JSON document, or nothing while it is not there or not whole."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _latest(rows: list[dict[str, Any]], name: str) -> Any:
    return next((row[name] for row in reversed(rows) if row.get(name) is not None), None)


def _series(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """For each quantity that any line has: rounds and values, thinned evenly."""
    found = {}
    for name in _SERIES:
        pairs = [(row["round"], row[name]) for row in rows if row.get(name) is not None]
        if pairs:
            taken = _spaced(pairs, _MOST_POINTS)
            found[name] = {"round": [r for r, _ in taken], "value": [v for _, v in taken]}
    return found


def _intervals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each parameter: the newest mean, low and high, and how they came about."""
    snapshots = [row for row in rows if row.get("intervals")]
    if not snapshots:
        return []
    taken = _spaced(snapshots, _MOST_HISTORY)
    table = []
    for name, (mean, low, high) in snapshots[-1]["intervals"].items():
        history = [[row["round"], *row["intervals"][name]] for row in taken if name in row["intervals"]]
        table.append({"name": name, "mean": mean, "low": low, "high": high, "history": history})
    return table


def _spaced(items: list[Any], most: int) -> list[Any]:
    if len(items) <= most:
        return items
    return [items[i] for i in np.linspace(0, len(items) - 1, most).round().astype(int)]
