"""All that runs at a site: it reads messages, decides by its own policy, works on its rows, and replies.

A worker keeps what it needs between two messages in its state folder, so that it may be another process for
every message. What leaves a site are replies and refusals; a refusal says which rule was broken, never a
value from the rows. The details are in the site's own log.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fald.core.errors import (
    FaldError,
    FederationError,
    PolicyError,
    PrivacyError,
    SecureSumError,
    StorageError,
    printable,
)
from fald.core.files import locked, storage_error, write_atomically
from fald.core.version import __version__, library_versions
from fald.federation import wire
from fald.federation.secure.session import Identity
from fald.federation.site.account import private_parts
from fald.federation.site.answers import Answers
from fald.federation.site.confined import Confined, Limits
from fald.federation.site.messages import check_message
from fald.federation.site.opening import Openings, enquiry_of, read_json, remote_study
from fald.federation.site.policy import Enquiry, Policy, read_policy
from fald.federation.site.record import Record
from fald.federation.site.run import UNSAID, Frozen, Owner, RowsError, SiteRun, about_rows, study_digest
from fald.federation.site.settings import SiteSettings
from fald.federation.wire import PROTOCOL
from fald.langevin.sampling import check_model
from fald.problem.data import FederatedData, read_table
from fald.problem.families import is_outside, versions
from fald.problem.model import check_terms
from fald.study.precision import set_precision
from fald.study.schema import Study

Array = NDArray[Any]
_TELLS = (PolicyError, SecureSumError, FederationError, PrivacyError)  # whose words never come from rows
_OWN_FILES = "a file of its own, such as its privacy ledger, is damaged or cannot be written"
_LARGEST_LOG = 5_000_000  # bytes after which a new log begins; the one before is kept
_LONGEST = 100_000  # characters of one entry of it


class SiteWorker:
    """Answers the messages of one site.

    Parameters
    ----------
    settings
        The site.
    load
        Makes the site's rows for a study, ``{name: rows}`` as ``FederatedData.from_arrays`` takes them or a
        ``FederatedData`` of one client. Default: the study's columns of the site's table.
    confined
        Whether this is the process in which models of installed packages run.
    """

    def __init__(
        self,
        settings: SiteSettings,
        load: Callable[[Study], FederatedData] | None = None,
        *,
        confined: bool = False,
    ):
        self.settings, self._is_confined = settings, confined
        self._load = load or self._read_table
        settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        exists = settings.identity.exists()
        self.identity = (Identity.load if exists else Identity.create)(settings.identity)
        self.policy: Policy = read_policy(settings.policy)
        self._owner = Owner(settings.name, settings.state, self.identity, self.policy)
        self._record = Record(settings.state, self.identity)
        self._openings = Openings(settings.state, self.policy)
        self._run: SiteRun | None = None
        self._kept: tuple[list[Any], Mapping[str, Any] | None] = [], None  # a session, and by which file
        self._told: dict[str, Any] = {}
        self._noted: dict[str, Any] = {}
        about = {
            key: str(value.absolute()) if isinstance(value, Path) else value
            for key, value in vars(settings).items()
        }
        limits = Limits(self.policy.max_seconds, self.policy.max_megabytes)
        self._confined = Confined(about, limits, settings.state / "site.log")

    def handle(self, content: bytes) -> bytes:
        """Answer a message; whatever goes wrong becomes a refusal that names no value."""
        about: dict[str, Any] = {}
        self._told = {"asked": "", "by": self.settings.coordinator}
        message: list[wire.Message] = []  # once it was read
        # of megabytes: at most once, where needed
        digest = functools.cache(lambda: wire.digest(content, *message))
        try:
            message.append(wire.unpack(content))
            reply = self._handled(content, message[0], about, digest)
            if self._told:  # another process writes its own lines
                self._record.add({**self._told, "digest": digest().hex()})
            return reply
        except Exception as error:  # nothing may leave but a refusal
            self._told["digest"] = digest().hex()
            return self._refuse(about, error)

    def _handled(
        self, content: bytes, message: wire.Message, about: dict[str, Any], digest: Callable[[], bytes]
    ) -> bytes:
        self._told["asked"] = message.kind[:40]
        check_message(message)
        keys = ("run", "session", "round", "attempt")
        about |= {key: message.values.get(key) for key in keys}
        self._told |= {key: about[key] for key in ("run", "round") if about[key] is not None}
        if message.kind == "hello":
            return self._reply(about, *self._hello(message))
        folder = self._folder(message.values["run"])
        if message.kind != "open" and not folder.is_dir():
            raise FederationError("this site knows no such run", hint="submit it again with --resume")
        family = self._family(message)
        if message.kind == "open":
            self._admit(family, message.values["version"])
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise storage_error(folder, error) from error
        if is_outside(family) and not self._is_confined:
            return self._confine(content, message, family)
        with locked(folder / "lock"):  # two processes must not answer one run
            work = {"open": self._open, "begin": self._begin, "end": self._end}
            if message.kind in work:
                return self._reply(about, *work[message.kind](message))
            run = self._current(message)
            try:
                reply = run.answer(message, digest(), lambda arrays: self._reply(about, {}, arrays))
            finally:  # what was charged is charged, whatever comes of it
                self._told["epsilon"] = run.epsilon
            self._told["left"] = dict(run.left)
            self._note(run=about["run"], round=about["round"])
            return reply

    def _reply(self, about: dict[str, Any], values: dict[str, Any], arrays: Mapping[str, Any]) -> bytes:
        return wire.pack("reply", {"site": self.settings.name, **about, **values}, arrays)

    def _refuse(self, about: dict[str, Any], error: Exception) -> bytes:
        self.log("".join(traceback.format_exception(error)).rstrip())
        if isinstance(error, _TELLS) and not isinstance(error, RowsError) and _raised_here(error):
            said, hint, kind = error.message, error.hint, type(error).__name__
        elif isinstance(error, StorageError):  # of the site's own files, not of its rows
            said, hint, kind = _OWN_FILES, "the site's own log says which", FederationError.__name__
        else:  # one sentence for all: a difference could tell of the rows
            said, hint, kind = UNSAID, "the site's own log says what", FederationError.__name__
        said = said[:1000]
        for write in (  # with a full disk as well, a refusal leaves
            lambda: self._note(refused=said),
            lambda: self._record.add({**self._told, "left": {}, "refused": said}),
        ):
            try:
                write()
            except FaldError as broken:
                self.log(str(broken))
        values = {"site": self.settings.name, **about, "error": kind, "message": said}
        return wire.pack("refusal", {**values, "hint": hint})

    def log(self, text: str) -> None:
        """Add to the site's own log; to what the process prints where that cannot be written."""
        stamp, path = time.strftime("%Y-%m-%d %H:%M:%S"), self.settings.state / "site.log"
        entry = f"{stamp} {printable(text[:_LONGEST], lines=True)}\n"
        try:
            if path.exists() and path.stat().st_size > _LARGEST_LOG:
                path.replace(path.with_suffix(".1.log"))
            with open(path, "a", encoding="utf-8") as file:
                file.write(entry)
        except OSError as error:
            print(f"{entry}{storage_error(path, error)}", file=sys.stderr)

    def _note(self, **fields: Any) -> None:
        """What 'fald federation join' shows, which is the same in every round."""
        shown = {key: value for key, value in fields.items() if key != "round"}
        if shown == self._noted:
            return
        self._noted = shown
        line = {"time": time.time(), "site": self.settings.name, **fields}
        write_atomically(self.settings.state / "status.json", json.dumps(line).encode())

    # -- before the rounds ------------------------------------------------------------------------------

    def _hello(self, message: wire.Message) -> tuple[dict[str, Any], dict[str, Array]]:
        self._told["left"] = {"versions, clock and public key": 1}
        about = {"version": __version__, "versions": library_versions(), "protocol": PROTOCOL}
        return {**about, "identity": self.identity.public, "time": time.time()}, {}

    def _family(self, message: wire.Message) -> str:
        """The model of the run that a message belongs to, by name; nothing of it is imported."""
        if message.kind == "open":
            tree = message.values["study"]
        else:
            tree = (self._session_of(message) or {}).get("study", {})
        section = tree.get("model")
        family = section.get("family") if isinstance(section, dict) else None
        return family if isinstance(family, str) else ""

    def _session_of(self, message: wire.Message) -> Mapping[str, Any] | None:
        """What is kept of the session of a run, read once while the file is the same; None: nothing."""
        path = self._folder(message.values["run"]) / "session.json"
        try:
            found = os.stat(path)
        except FileNotFoundError:
            self._kept = [], None  # private keys are among it
            return None
        stamp = [path, found.st_ino, found.st_size, found.st_mtime_ns]
        if self._kept[0] != stamp:
            self._kept = stamp, read_json(path)
        return self._kept[1]

    def _admit(self, family: str, theirs: str) -> None:
        """Refuse other versions than this site's, and packages that its policy does not name."""
        if is_outside(family):
            self.policy.check_model(family)
        mine = versions(family)
        if theirs != mine:
            raise FederationError(
                f"it has fald {mine}, the coordinator {printable(theirs)[:120]}",
                hint="install the same versions everywhere",
            )

    def _confine(self, content: bytes, message: wire.Message, family: str) -> bytes:
        """Let the process for models of installed packages answer; what exceeds its limits stays refused."""
        if self._load != self._read_table:
            raise FederationError(
                f"the model {family!r} runs in a process of its own; this site's rows come from a program",
                hint="give the site a file, and the model a read function",
            )
        session, path = message.values["session"], self._folder(message.values["run"]) / "exceeded.json"
        before = read_json(path) or {}
        if before.get("session") == session:
            raise PolicyError(before["said"], hint=before["hint"])
        if message.kind == "open":  # what is installed may have been mended since the last one
            self._confined.stop()
        try:
            reply = self._confined.handle(content, family)
        except PolicyError as error:
            said = {"session": session, "said": error.message, "hint": error.hint}
            write_atomically(path, json.dumps(said).encode())
            if message.kind == "open":
                self._openings.count_failed()
            raise
        if message.kind == "end":
            self._confined.stop()
        self._told.clear()
        return reply

    def _open(self, message: wire.Message) -> tuple[dict[str, Any], dict[str, Array]]:
        """Decide whether to take part, count the rows, and introduce the session: the policy first."""
        v = message.values
        study = remote_study(v["study"])
        own = is_outside(study.model.family)
        self._told |= {"title": study.title, "columns": [study.data.target, *study.data.features]}
        self._told["sites"] = v["names"]
        # a run does not go on with another version of its model
        self._told["study"] = study_digest({**v["study"], **({"at": v["version"]} if own else {})})
        set_precision(study)
        if study.privacy is not None:
            private_parts(study)  # before anything leaves
        proposal = enquiry_of(study, v["secure"], len(self._known_sites()))
        self.policy.check(proposal)
        self._check_sites(v["names"], v["secure"])
        folder = self._folder(v["run"])
        known, now = Frozen.read(folder), Frozen(self._told["study"], v["names"], v["secure"], [], "", "")
        if known is not None and known[:3] != now[:3]:
            raise FederationError(
                "the run is known here with another study, other sites or another kind of sum",
                hint="begin a new run, without --resume",
            )
        self._openings.count_run(v["run"], self._told["study"])
        with locked(self.settings.state / "opening.lock"):  # many at once would find one count
            data, warnings = self._opened(study, proposal)
        now = now._replace(fingerprint=data.fingerprint())
        _check_rows(known or now, data)
        (known or now._replace(secret=secrets.token_hex(32))).save(folder)
        about = {"run": v["run"], "session": v["session"], "study": v["study"]}
        run = SiteRun(self._owner, folder, about, study=study, data=data)
        run.introduce()
        self._run = run
        offered = run.offer()
        self._told["left"] = {"number of rows": 1, **run.left}
        self.log(f"run {v['run']}: accepted, {data.num_rows} rows")
        for line in warnings:
            self.log(f"warning: {line}")
        self._note(run=v["run"], round=0, warnings=warnings)
        told = {"rows": data.num_rows, "features": list(data.features), "hello": run.hello}
        told["audits"] = run.wants_sums
        types = {f"row_{i}": np.zeros((0, *a.shape[1:]), a.dtype) for i, a in enumerate(_leaves(data))}
        return told, types | offered

    def _opened(self, study: Study, proposal: Enquiry) -> tuple[FederatedData, list[str]]:
        """The rows of a study that the policy allows; what does not fit is counted, and told in one way."""
        self._openings.check_failed()
        self._check_columns(study)
        try:
            with about_rows():
                data = self._rows(study)
                model = study.build_model(data.features)
                check_model(model, data)
                if is_outside(study.model.family):
                    check_terms(model, data)
                whole = replace(proposal, rows=data.num_rows, dim=model.dim)
                self.policy.check_rows(whole)
        except RowsError:
            self._openings.count_failed()
            raise
        return data, self.policy.warnings(whole)

    def _check_sites(self, names: list[str], secure: bool) -> None:
        """Refuse a roster without this site, and sums over fewer sites than are known here."""
        if self.settings.name not in names:
            raise FederationError("the roster must name this site once, in order")
        known = self._known_sites()
        subset = names in [sorted(each) for each in self.policy.allowed_subsets]
        if secure and known and set(names) != known and not subset:
            raise SecureSumError(
                "the sites of the run are not those known here; they differ in "
                + ", ".join(map(repr, sorted(set(names) ^ known))),
                hint="sums with and without a site show that site's numbers; allowed-subsets of the policy "
                "names those that may be asked, 'fald federation repin' at this site takes in who is new",
            )

    def _begin(self, message: wire.Message) -> tuple[dict[str, Any], dict[str, Array]]:
        """Take the frozen sizes and, for a secure sum, the other sites' keys."""
        run, v = self._current(message), message.values
        if v["names"] != run.frozen.names or len(v["sizes"]) != len(v["names"]):
            raise FederationError("the sites of a run cannot change")
        if v["sizes"][v["names"].index(self.settings.name)] != run.data.num_rows:
            raise FederationError("the roster gives this site another number of rows")
        with locked(self.settings.state / "pins.lock"):  # of two first runs one pins, and the other sees it
            self._check_sites(v["names"], run.frozen.secure)  # pinned, maybe, since this run was opened
            known = self._known_pins()
            pins = {n: v["identities"].get(n, "") for n in v["names"]} if known is None else known
            self._run = None  # until it has begun: what a refusal leaves half done does not count

            def pin() -> None:  # once all is accepted: a beginning that is refused pins nobody
                if run.frozen.secure and known is None:
                    self._pin(pins)

            keys = pins if run.frozen.secure else {}
            run.begin(v["sizes"], v["hellos"] or {}, keys, message.arrays, pin=pin)
        self._run = run
        self._told["epsilon"] = run.epsilon
        return {}, {}

    def _end(self, message: wire.Message) -> tuple[dict[str, Any], dict[str, Array]]:
        """Forget the keys of a run."""
        folder = self._folder(message.values["run"])
        (folder / "session.json").unlink(missing_ok=True)
        Answers(folder).forget_last()
        self._run = None
        self._note(finished=message.values["run"])
        return {}, {}

    def _known_sites(self) -> set[str]:
        """Names of the sites, whatever a coordinator says: those pinned, else those told at joining."""
        return set(self._known_pins() or self.settings.sites)

    def _known_pins(self) -> dict[str, str] | None:
        """Public keys of the sites: those of the site's own file, else those seen first."""
        if self.settings.pins is not None:
            return read_json(self.settings.pins) or {}
        return read_json(self.settings.state / "pins.json")

    def _pin(self, keys: Mapping[str, str]) -> None:
        """Keep the keys of the first run, after each site has signed with its own."""
        path = self.settings.state / "pins.json"
        write_atomically(path, json.dumps(keys, indent=1, sort_keys=True).encode())
        self.log(f"pinned the keys of {', '.join(sorted(keys))} as announced in the first run")

    def _rows(self, study: Study) -> FederatedData:
        data = self._load(study)
        if data.num_clients != 1 or not data.present:
            raise FederationError("the program that loads this site's rows must give one client's rows")
        return replace(data, part=True)

    def _check_columns(self, study: Study) -> None:
        """Name the columns that are missing: the names of columns are no rows."""
        if self._load != self._read_table:
            return
        if self.settings.data is None:
            raise FederationError("no table was given to this site", hint="fald federation join --data FILE")
        with about_rows():
            if not study.encodes:
                return
            columns = {str(c) for c in read_table(self.settings.data).columns}
        missing = sorted({study.data.target, *study.data.features} - columns)
        if missing:
            raise FederationError(f"its table has no column {', '.join(map(repr, missing))}")

    def _read_table(self, study: Study) -> FederatedData:
        assert self.settings.data is not None
        return study.read_files({self.settings.name: self.settings.data})

    def _current(self, message: wire.Message) -> SiteRun:
        """The run a message belongs to, read back from disk if this process has not opened it."""
        run_id, session = message.values["run"], message.values["session"]
        folder = self._folder(run_id)
        about = self._session_of(message)
        if about is None:
            raise FederationError("this site knows no such run", hint="submit it again with --resume")
        if about["session"] != session:
            raise FederationError("the message belongs to an earlier session of this run")
        mine = self._run
        if mine is None or mine.about["run"] != run_id or mine.about["session"] != session:
            study = remote_study(about["study"])
            set_precision(study)
            with about_rows():
                data = self._rows(study)
            mine = SiteRun(self._owner, folder, dict(about), study=study, data=data)
            _check_rows(mine.frozen, data)
            mine.restore()
            self._run = mine
        set_precision(mine.study)  # another study may have been looked at since
        mine.answers.read()
        return mine

    def _folder(self, run: str) -> Path:
        return self.settings.state / "runs" / run


def _check_rows(known: Frozen, data: FederatedData) -> None:
    """Refuse a run with other rows than it began with: two answers would show the difference."""
    if known.fingerprint != data.fingerprint():
        raise FederationError(
            "its rows have changed since the run began", hint="begin a new run, without --resume"
        )


def _raised_here(error: BaseException) -> bool:
    """Whether fald's own code raised an error: the words of others may quote rows."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).split(".")[0] == "fald"


def _leaves(data: FederatedData) -> list[Array]:
    return [np.asarray(a) for a in jax.tree.leaves(data.rows)]
