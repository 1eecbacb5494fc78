"""What a site's records have spent, over all studies: a file at the site that only grows.

Studies add up by basic composition: together they are (Σε, Σδ)-differentially private, also where later ones
were chosen in view of earlier results. Within a study the accountant composes its rounds tightly; between a
few studies the plain sum loses little, and it never claims too little.

Each line is one charge as JSON: the study, and what it will have spent *in total* after the rounds that are
about to begin. A charge is on the disk before a round is answered, so a crash can only charge too much.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fald.core.errors import ConfigError, PrivacyError, StorageError
from fald.core.files import storage_error

_ROUNDING = 1e-9


class Charge(NamedTuple):
    """What a study has been charged so far.

    Attributes
    ----------
    epsilon, delta
        Of all its rounds together.
    rounds
        Rounds that this covers. After a crash they all count as answered.
    """

    epsilon: float = 0.0
    delta: float = 0.0
    rounds: int = 0


class SiteLedger:
    """The privacy that a site's records have spent across studies.

    Parameters
    ----------
    path
        The file; made with the first charge.
    max_epsilon, delta
        The budget: the studies' ε may add up to ``max_epsilon`` and their δ to ``delta``. None: charges are
        only recorded.

    Notes
    -----
    Charges of studies that run at the same time exclude each other by a lock on the file. The ledger trusts
    the site: who deletes the file, or copies the rows to another site, starts with a new budget.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> ledger = SiteLedger(folder.name + "/ledger.jsonl", max_epsilon=2.0, delta=1e-5)
    >>> ledger.reserve("study 1", 0.8, 2e-6, rounds=100)
    Charge(epsilon=0.8, delta=2e-06, rounds=100)
    >>> ledger.reserve("study 1", 1.2, 2e-6, rounds=200).rounds
    200
    >>> ledger.spent(1e-5)
    1.2
    >>> ledger.reserve("study 2", 0.9, 2e-6, rounds=100)
    Traceback (most recent call last):
        ...
    fald.core.errors.PrivacyError: the study would spend ε = 0.9 and δ = 2e-06; of the site's budget of ε = 2
    and δ = 1e-05 over all studies, ε = 0.8 and δ = 8e-06 are left
      hint: ...
    """

    def __init__(self, path: str | Path, max_epsilon: float | None = None, delta: float | None = None):
        if (max_epsilon is None) != (delta is None):
            raise ConfigError("a budget has both max-epsilon and delta")
        self.path, self.max_epsilon, self.delta = Path(path), max_epsilon, delta

    def charges(self) -> dict[str, Charge]:
        """What each study has been charged, by its id.

        Raises
        ------
        StorageError
            If the file is damaged. A last line without an end is none: its charge was never confirmed.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise _unreadable(self.path, error.strerror or error) from error
        return _read(content, self.path)

    def charged(self, study_id: str) -> Charge:
        """What one study has been charged; nothing for a new one."""
        return self.charges().get(study_id, Charge())

    def spent(self, delta: float) -> float:
        """ε of all studies together at a δ; infinite where their own δ add up to more.

        Parameters
        ----------
        delta
            δ of the guarantee over all studies.
        """
        charges = self.charges().values()
        if math.fsum(c.delta for c in charges) > delta * (1 + _ROUNDING):
            return math.inf
        return math.fsum(c.epsilon for c in charges)

    def reserve(self, study_id: str, epsilon: float, delta: float, *, rounds: int = 0) -> Charge:
        """Charge a study before its next rounds are answered.

        The numbers are totals of the study, so that the same study continued after a crash is charged only
        for what is added. A smaller total than before changes nothing: what was charged is spent.

        Parameters
        ----------
        study_id
            Which study; the same when it is resumed.
        epsilon, delta
            What the site's records will have spent in this study after the rounds that are about to begin,
            those of an earlier part that a crash made void included.
        rounds
            Rounds of the study that this covers.

        Returns
        -------
        Charge
            What the study has been charged, after this.

        Raises
        ------
        PrivacyError
            If the budget does not allow it, with what is left. Nothing is charged then.
        StorageError
            If the file is damaged or cannot be written; the rounds must not be answered.
        """
        if not (0 <= epsilon < math.inf and 0 < delta < 1):
            raise PrivacyError(f"a study with ε = {epsilon} and δ = {delta} gives no privacy to charge")
        with self._locked() as file:
            charges = _read(_content(file), self.path)
            before = charges.get(study_id, Charge())
            after = _larger(before, Charge(float(epsilon), float(delta), int(rounds)))
            if after == before:
                return after
            self._check(charges, before, after)
            self._append(file, study_id, after)
        return after

    def _check(self, charges: dict[str, Charge], before: Charge, after: Charge) -> None:
        if self.max_epsilon is None or self.delta is None:
            return
        left_epsilon = self.max_epsilon - math.fsum(c.epsilon for c in charges.values())
        left_delta = self.delta - math.fsum(c.delta for c in charges.values())
        epsilon, delta = after.epsilon - before.epsilon, after.delta - before.delta
        if (
            epsilon <= left_epsilon + _ROUNDING * self.max_epsilon
            and delta <= left_delta + _ROUNDING * self.delta
        ):
            return
        again = " more" if before.rounds or before.epsilon else ""
        raise PrivacyError(
            f"the study would spend{again} ε = {epsilon:.4g} and δ = {delta:.4g}; of the site's budget of "
            f"ε = {self.max_epsilon:g} and δ = {self.delta:g} over all studies, "
            f"ε = {max(0.0, left_epsilon):.4g} and δ = {max(0.0, left_delta):.4g} are left",
            hint="ask for fewer rounds or chains, more noise, or a smaller δ, for δ adds up as well",
        )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, open, and no other process in it."""
        try:
            import fcntl
        except ImportError as error:
            raise StorageError(
                "this system cannot lock files, so no privacy ledger can be kept",
                hint="run sites with a privacy budget on Linux or macOS",
            ) from error
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise storage_error(self.path, error) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)

    def _append(self, file: int, study_id: str, charge: Charge) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        line = json.dumps({"time": now, "study": study_id, **charge._asdict()}, ensure_ascii=False) + "\n"
        raw = line.encode()
        try:
            content = _content(file)
            os.ftruncate(file, content.rfind(b"\n") + 1)  # what a crash left of a charge never confirmed
            if os.write(file, raw) != len(raw):
                raise StorageError(
                    f"cannot write {self.path}: the disk is full", hint="free space; nothing was charged"
                )
            os.fsync(file)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise storage_error(self.path, error) from error


def _content(file: int) -> bytes:
    os.lseek(file, 0, os.SEEK_SET)
    parts = []
    while part := os.read(file, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _read(content: bytes, path: Path) -> dict[str, Charge]:
    charges: dict[str, Charge] = {}
    lines = content.split(b"\n")[:-1]  # after the last end of line: nothing, or a charge never confirmed
    for number, line in enumerate(lines, 1):
        study, charge = _parse(line, number, path)
        charges[study] = _larger(charges.get(study, Charge()), charge)
    return charges


def _larger(a: Charge, b: Charge) -> Charge:
    return Charge(max(a.epsilon, b.epsilon), max(a.delta, b.delta), max(a.rounds, b.rounds))


def _parse(line: bytes, number: int, path: Path) -> tuple[str, Charge]:
    try:
        entry: dict[str, Any] = json.loads(line)
        charge = Charge(float(entry["epsilon"]), float(entry["delta"]), int(entry["rounds"]))
        study = entry["study"]
        if not isinstance(study, str) or not (0 <= charge.epsilon < math.inf and 0 < charge.delta < 1):
            raise ValueError("values out of range")
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, f"line {number} is no charge") from error
    return study, charge


def _unreadable(path: Path, why: Any) -> StorageError:
    return StorageError(
        f"cannot read the privacy ledger {path}: {why}",
        hint="restore it from a copy; without it nobody knows what was spent, and nothing may be answered",
    )
