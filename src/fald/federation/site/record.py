"""The site's record of every request and of what left: lines that only grow, each sealed by the one before.

A line holds the hash of the line before it, so that no line can be changed, removed or put in between without
breaking all that follow. The end is sealed by the site's own key in a second file, so that no lines can be
cut off either. Whoever holds that key can write a new record: it is a witness for the site, not against it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fald.core.errors import StorageError
from fald.core.files import append_line, locked, write_atomically
from fald.federation.secure.identity import Identity, check_signature

RECORD, SEAL = "record.jsonl", "record.seal"
_FIRST = "0" * 64


class Record:
    """The record of a site.

    Parameters
    ----------
    state
        The site's folder.
    identity
        The site's key, which seals the end.
    """

    def __init__(self, state: Path, identity: Identity):
        self._state, self._identity = state, identity
        self._files = [str(state / name) for name in (RECORD, SEAL)]
        self._known: tuple[list[tuple[int, int, int]], int, str] | None = None  # the end, by the two files

    def add(self, entry: Mapping[str, Any]) -> None:
        """Write a line; what it tells of may leave the site when this returns.

        Raises
        ------
        StorageError
            If it cannot be written, or the seal is not that of this site.
        """
        with locked(self._state / f"{RECORD}.lock"):
            known = self._known is not None and self._known[0] == self._stamps() and self._known[1:]
            number, before = known or self._end()
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            line = _text({"line": number + 1, "time": now, **_short(dict(entry)), "before": before})
            append_line(self._state / RECORD, line.encode() + b"\n")
            self._seal(number + 1, _hash(line))
            self._known = (self._stamps(), number + 1, _hash(line))

    def _seal(self, lines: int, last: str) -> None:
        end = {"lines": lines, "hash": last}
        seal = {**end, "signature": self._identity.sign(_text(end).encode())}
        write_atomically(self._state / SEAL, _text(seal).encode())

    def _stamps(self) -> list[tuple[int, int, int]]:
        """What tells whether another process has added a line since, or a file was changed."""
        try:
            found = [os.stat(path) for path in self._files]
        except FileNotFoundError:
            return []
        return [(f.st_ino, f.st_size, f.st_mtime_ns) for f in found]

    def _end(self) -> tuple[int, str]:
        """The number of the last line and its hash; a line that a crash left without a seal gets one."""
        number, before = _sealed(self._state, self._identity.public)
        last = _last_line(self._state / RECORD)
        if (last is None and number == 0) or (last is not None and _hash(last) == before):
            return number, before
        try:
            entry = json.loads(last or "")
            follows = entry["line"] == number + 1 and entry["before"] == before
        except (ValueError, KeyError, TypeError):
            follows = False
        if not follows or last is None:
            raise _broken(self._state, "its last line is not the one that was sealed")
        self._seal(number + 1, _hash(last))  # before another is added: two without are refused ever after
        return number + 1, _hash(last)


def _short(value: Any) -> Any:
    """A value without what is too long to read: no request may make a line that cannot be read back."""
    if isinstance(value, str):
        return value if len(value) <= 1000 else f"{value[:1000]}…"
    if isinstance(value, list):
        more = [f"and {len(value) - 200} more"] if len(value) > 200 else []
        return [_short(each) for each in value[:200]] + more
    return {key: _short(each) for key, each in value.items()} if isinstance(value, dict) else value


def _last_line(path: Path) -> str | None:
    if not path.exists():
        return None
    size, lines = path.stat().st_size, [b""]
    with open(path, "rb") as file:
        for length in (1 << 12, 1 << 20, size):  # of a usual line, of a long one, and of any
            file.seek(max(0, size - length))
            lines = file.read().split(b"\n")
            if len(lines) > 2 or length >= size:
                break
    return lines[-2].decode(errors="replace") if len(lines) > 1 else None


def read_record(state: Path) -> list[dict[str, Any]]:
    """All lines of a site's record, after they were checked.

    Raises
    ------
    StorageError
        If a line was changed, removed or added, naming the first place where it shows.
    """
    identity = Identity.load(state / "identity.pem")
    lines = (state / RECORD).read_text(encoding="utf-8").split("\n")[:-1] if (state / RECORD).exists() else []
    number, end = _sealed(state, identity.public)
    before, entries = _FIRST, []
    for place, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            whole = entry["line"] == place and entry["before"] == before and _text(entry) == line
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise _broken(state, f"line {place} or the one before it was changed, removed or added")
        before = _hash(line)
        entries.append(entry)
    # a crash may leave one line more than was sealed, and what it tells of did not leave
    if len(lines) not in (number, number + 1) or (number and _hash(lines[number - 1]) != end):
        raise _broken(state, f"{number} lines were sealed, and {len(lines)} are there")
    return entries


def _sealed(state: Path, public: str) -> tuple[int, str]:
    """Lines that were sealed, and the hash of the last."""
    path = state / SEAL
    if not path.exists():
        if (state / RECORD).exists() and (state / RECORD).read_bytes().count(b"\n") > 1:
            raise _broken(state, f"{SEAL} is missing")
        return 0, _FIRST
    try:
        seal = json.loads(path.read_text(encoding="utf-8"))
        end = {"lines": int(seal["lines"]), "hash": str(seal["hash"])}
        right = check_signature(public, str(seal["signature"]), _text(end).encode())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _broken(state, f"{SEAL} cannot be read ({type(error).__name__})") from error
    if not right:
        raise _broken(state, f"{SEAL} is not signed by this site's key")
    return end["lines"], end["hash"]


def _text(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, sort_keys=True, ensure_ascii=True)


def _hash(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()


def _broken(state: Path, why: str) -> StorageError:
    return StorageError(
        f"the record {state / RECORD} is broken: {why}",
        hint="compare it with a copy; the site answers nothing until the files are moved away or restored",
    )


def as_rows(entries: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """A table of the record for people: heads and cells."""
    heads = [
        "line", "time", "asked", "by", "study", "sites", "round", "columns", "what left", "ε charged",
        "answer", "digest",
    ]  # fmt: skip
    rows = []
    for e in entries:
        left = ", ".join(f"{kind} ({count:,})" for kind, count in e.get("left", {}).items())
        spent = e.get("epsilon")
        rows.append(
            [
                str(e["line"]), e["time"], str(e.get("asked", "")), str(e.get("by", "")),
                str(e.get("title") or e.get("run") or ""), ", ".join(e.get("sites", [])),
                str(e.get("round") or ""), ", ".join(e.get("columns", [])), left or "nothing",
                "" if spent is None else f"{spent:.4g}",
                "answered" if not e.get("refused") else f"refused: {e['refused']}", e.get("digest", "")[:16],
            ]
        )  # fmt: skip
    return heads, rows
