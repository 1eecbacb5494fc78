"""What a run has answered, on the disk of its site, so that no process and no restart forgets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from fald.core.files import append_line, damaged, overwrite


class Kept(NamedTuple):
    """One answer.

    Attributes
    ----------
    round, attempt
        What it answered.
    task
        Hash of what was asked, whichever session and attempt it was.
    upload
        Hash of the numbers that left under masks; empty without.
    shapes
        Shapes of what left, by name.
    broadcast
        Hash of the broadcast that the site found itself and answered; empty where it does not audit chains.
    shown
        Hash of what the site was shown of the rounds before; empty where it was shown nothing.
    session, masks
        Session under whose masks the numbers left, and the hash that these were bound to; empty without.
    """

    round: int
    attempt: int
    task: str
    upload: str
    shapes: dict[str, list[int]]
    broadcast: str = ""
    shown: str = ""
    session: str = ""
    masks: str = ""


class Last(NamedTuple):
    """The request answered last: round and attempt, a hash of its bytes, its reply, and what left with it."""

    round: int
    attempt: int
    left: dict[str, int]
    digest: bytes
    reply: bytes


class Answers:
    """The answers of one run: a line for each, and the last reply of the session.

    Parameters
    ----------
    folder
        The run's folder at the site.
    """

    def __init__(self, folder: Path):
        self._folder, self._lines = folder, folder / "answers.jsonl"
        self.known: list[Kept] = []
        self._size = -1
        self._last: tuple[int, Last] | None = None  # by the number of answers: others may add to them
        self.read()

    def read(self) -> None:
        """Take over what another process has added."""
        size = self._lines.stat().st_size if self._lines.exists() else 0
        if size == self._size:
            return
        content = self._lines.read_bytes() if size else b""
        try:
            lines = content.split(b"\n")[:-1]  # after the last end of line: an answer that never left
            self.known = [Kept(**json.loads(line)) for line in lines]
        except (ValueError, TypeError) as error:
            raise damaged(self._lines, error) from error
        self._size = size

    @property
    def highest(self) -> int:
        """The highest round that was answered."""
        return max((a.round for a in self.known), default=0)

    @property
    def distinct(self) -> int:
        """Answers that were not a repetition."""
        return len({(a.round, a.task) for a in self.known})

    def of(self, number: int) -> list[Kept]:
        """The answers to one round."""
        return [a for a in self.known if a.round == number]

    def last_under(self, session: str) -> tuple[int, int, bytes] | None:
        """Round, attempt and hash of the latest masks of a session; None where it has used none."""
        used = [(a.round, a.attempt, bytes.fromhex(a.masks)) for a in self.known if a.session == session]
        return max(used, default=None)

    def add(self, answered: Kept, last: Last) -> None:
        """Write an answer down; it may leave when this returns.

        Raises
        ------
        StorageError
            If it cannot be written: then nothing may leave.
        """
        about = {"round": last.round, "attempt": last.attempt, "left": last.left, "digest": last.digest.hex()}
        overwrite(self._place(len(self.known) + 1), json.dumps(about).encode(), b"\n", last.reply)
        append_line(self._lines, (json.dumps(answered._asdict()) + "\n").encode())
        self.known.append(answered)
        self._size = self._lines.stat().st_size
        self._last = len(self.known), last

    def last(self) -> Last | None:
        """What was answered last in this session."""
        number = len(self.known)
        if not self._place(number).exists():
            return None
        if self._last is None or self._last[0] != number:
            head, _, reply = self._place(number).read_bytes().partition(b"\n")
            about = json.loads(head)
            self._last = number, Last(**{**about, "digest": bytes.fromhex(about["digest"]), "reply": reply})
        return self._last[1]

    def _place(self, number: int) -> Path:
        """Where a reply is kept: not over the one before, which counts until the line is there."""
        return self._folder / f"last-{number % 2}.bin"

    def forget_last(self) -> None:
        """A new session begins, or the run ends: replies are void."""
        self._last = None
        for number in (0, 1):
            self._place(number).unlink(missing_ok=True)
