"""All that runs at a site: it reads messages, decides by its own policy, works on its rows, and replies.

A worker keeps what it needs between two messages in its state folder, so that it may be another process for
every message. What leaves a site are replies and refusals; a refusal says which rule was broken, never a
value from the rows. The details are in the site's own log.
"""

from __future__ import annotations

import json
import re
import secrets
import time
import tomllib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fald.core.errors import (
    ConfigError,
    FaldError,
    FederationError,
    NonFiniteError,
    PolicyError,
    PrivacyError,
    SecureSumError,
)
from fald.core.files import write_atomically
from fald.core.reveals import shows_curvature
from fald.core.version import __version__
from fald.federation import wire
from fald.federation.secure.session import Identity
from fald.federation.site.account import private_parts
from fald.federation.site.policy import Policy, Proposal, read_policy
from fald.federation.site.run import Last, Owner, SiteRun
from fald.federation.wire import PROTOCOL
from fald.fewround.methods import requests_of
from fald.fewround.site import answer_kinds
from fald.langevin.sampling import check_model
from fald.problem.data import FederatedData
from fald.study.precision import set_precision
from fald.study.schema import Study, make_study

Array = NDArray[Any]
_ID = re.compile(r"[0-9a-f]{16}")
# whose words never come from rows
_TELLS = (PolicyError, SecureSumError, FederationError, PrivacyError, NonFiniteError)


@dataclass(frozen=True)
class SiteSettings:
    """What a site is and where its things are.

    Attributes
    ----------
    name
        The site's name in the federation.
    state
        Folder for what must outlive the process, readable by its owner only.
    data
        The site's table, CSV or Parquet; None where a program hands over the rows.
    policy
        What the site allows; None: the default policy.
    pins
        Public keys of all sites; None: those seen in the first run are kept, and later ones must match.
    """

    name: str
    state: Path
    data: Path | None = None
    policy: Path | None = None
    pins: Path | None = None

    @property
    def identity(self) -> Path:
        """The file of the site's own key."""
        return self.state / "identity.pem"


def read_site(folder: str | Path) -> SiteSettings:
    """Read ``site.toml`` of a site's folder; relative paths start there.

    Raises
    ------
    ConfigError
        If it is missing or wrong.
    """
    path = Path(folder) / "site.toml"
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", hint="'fald federation join' writes it") from error
    unknown = sorted(set(tree) - {"name", "state", "data", "policy", "pins"})
    if unknown or not isinstance(tree.get("name"), str):
        raise ConfigError(f"{path}: {'unknown key ' + repr(unknown[0]) if unknown else 'name is missing'}")
    paths = {key: Path(folder) / tree[key] for key in ("data", "policy", "pins") if key in tree}
    return SiteSettings(tree["name"], Path(folder) / tree.get("state", "state"), **paths)


class SiteWorker:
    """Answers the messages of one site.

    Parameters
    ----------
    settings
        The site.
    load
        Makes the site's rows for a study, ``{name: rows}`` as ``FederatedData.from_arrays`` takes them or a
        ``FederatedData`` of one client. Default: the study's columns of the site's table.
    """

    def __init__(self, settings: SiteSettings, load: Callable[[Study], FederatedData] | None = None):
        self.settings = settings
        self._load = load or self._read_table
        settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        exists = settings.identity.exists()
        self.identity = (Identity.load if exists else Identity.create)(settings.identity)
        self.policy: Policy = read_policy(settings.policy)
        self._owner = Owner(settings.name, settings.state, self.identity, self.policy)
        self._run: SiteRun | None = None

    def handle(self, content: bytes) -> bytes:
        """Answer a message; whatever goes wrong becomes a refusal that names no value."""
        about: dict[str, Any] = {}
        try:
            message = wire.unpack(content)
            about = {key: message.values.get(key) for key in ("run", "session", "round", "attempt")}
            work = {"hello": self._hello, "open": self._open, "begin": self._begin, "end": self._end}
            if message.kind in work:
                values, arrays = work[message.kind](message)
                return self._reply(about, values, arrays)
            if message.kind in ("ask", "round"):
                return self._once(about, message, content)
            raise FederationError(f"unknown kind of message {message.kind!r}")
        except Exception as error:  # nothing may leave but a refusal
            return self._refuse(about, error)

    def _reply(self, about: dict[str, Any], values: dict[str, Any], arrays: Mapping[str, Any]) -> bytes:
        return wire.pack("reply", {"site": self.settings.name, **about, **values}, arrays)

    def _refuse(self, about: dict[str, Any], error: Exception) -> bytes:
        self.log("".join(traceback.format_exception(error)).rstrip())
        if isinstance(error, _TELLS):
            said, hint = error.message, error.hint
        elif isinstance(error, FaldError):
            said, hint = f"its rows or settings do not fit ({type(error).__name__})", "its log says what"
        else:
            said, hint = f"an internal error ({type(error).__name__})", "its log says more"
        self._note(refused=said)
        values = {"site": self.settings.name, **about, "error": type(error).__name__, "message": said}
        return wire.pack("refusal", {**values, "hint": hint})

    def log(self, text: str) -> None:
        """Add to the site's own log."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with open(self.settings.state / "site.log", "a", encoding="utf-8") as file:
            file.write(f"{stamp} {text}\n")

    def _note(self, **fields: Any) -> None:
        """What 'fald federation join' shows."""
        line = {"time": time.time(), "site": self.settings.name, **fields}
        write_atomically(self.settings.state / "status.json", json.dumps(line).encode())

    # -- before the rounds ------------------------------------------------------------------------------

    def _hello(self, message: wire.Message) -> tuple[dict[str, Any], dict[str, Array]]:
        return {"version": __version__, "protocol": PROTOCOL, "identity": self.identity.public}, {}

    def _open(self, message: wire.Message) -> tuple[dict[str, Any], dict[str, Array]]:
        """Decide whether to take part, count the rows, and introduce the session."""
        v = message.values
        if v.get("version") != __version__:
            raise FederationError(
                f"it has fald {__version__}, the coordinator {v.get('version')}",
                hint="install the same version everywhere",
            )
        ids = [_checked_id(v.get("run")), _checked_id(v.get("session"))]
        study = _remote_study(v["study"])
        set_precision(study)
        data = self._rows(study)
        model = study.build_model(data.features)
        check_model(model, data)
        proposal = _proposal(study, bool(v["secure"]), data.num_rows, model.dim)
        if study.privacy is not None:
            private_parts(study)  # before anything leaves
        self.policy.check(proposal)
        folder = self._folder(ids[0])
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        known = _read_json(folder / "run.json")
        print_now = data.fingerprint()
        if known and known["fingerprint"] != print_now:
            raise FederationError(
                "its rows have changed since the run began", hint="begin a new run, without --resume"
            )
        about = {
            "run": ids[0],
            "session": ids[1],
            "study": v["study"],
            "secure": bool(v["secure"]),
            "fingerprint": print_now,
            "secret": secrets.token_hex(8),
        }
        run = SiteRun(self._owner, folder, about, study, data)
        run.introduce()
        self._run = run
        self.log(f"run {ids[0]}: accepted, {data.num_rows} rows")
        warnings = self.policy.warnings(proposal)
        for line in warnings:
            self.log(f"warning: {line}")
        self._note(run=ids[0], round=0, warnings=warnings)
        told = {"rows": data.num_rows, "features": list(data.features), "hello": run.hello}
        types = {f"row_{i}": np.zeros((0, *a.shape[1:]), a.dtype) for i, a in enumerate(_leaves(data))}
        return told, types | run.offer()

    def _begin(self, message: wire.Message) -> tuple[dict[str, Any], dict[str, Array]]:
        """Take the frozen sizes and, for a secure sum, the other sites' keys."""
        run, v = self._current(message), message.values
        names, sizes = [str(n) for n in v["names"]], [int(n) for n in v["sizes"]]
        mine = self.settings.name
        if names != sorted(set(names)) or mine not in names or len(names) != len(sizes):
            raise FederationError("the roster must name this site once, in order")
        if sizes[names.index(mine)] != run.data.num_rows:
            raise FederationError("the roster gives this site another number of rows")
        run.begin(names, sizes, v.get("hellos") or {}, self._pins(v.get("identities") or {}), message.arrays)
        return {}, {}

    def _end(self, message: wire.Message) -> tuple[dict[str, Any], dict[str, Array]]:
        """Forget the keys of a run."""
        folder = self._folder(_checked_id(message.values.get("run")))
        for name in ("session.json", "last.bin"):
            (folder / name).unlink(missing_ok=True)
        self._run = None
        self._note(finished=message.values.get("run"))
        return {}, {}

    def _pins(self, announced: Mapping[str, str]) -> dict[str, str]:
        """Public keys of the sites: those of the site's own file, else those seen first."""
        if self.settings.pins is not None:
            return _read_json(self.settings.pins) or {}
        path = self.settings.state / "pins.json"
        known = _read_json(path)
        if known is None:
            write_atomically(path, json.dumps(dict(announced), indent=1, sort_keys=True).encode())
            self.log(f"pinned the keys of {', '.join(sorted(announced))} as announced in the first run")
            return dict(announced)
        return known

    def _rows(self, study: Study) -> FederatedData:
        data = self._load(study)
        if data.num_clients != 1 or not data.present:
            raise FederationError("the program that loads this site's rows must give one client's rows")
        return replace(data, part=True)

    def _read_table(self, study: Study) -> FederatedData:
        from fald.problem.data import read_table

        if self.settings.data is None:
            raise FederationError("no table was given to this site", hint="fald federation join --data FILE")
        columns = {str(c) for c in read_table(self.settings.data).columns}
        missing = sorted({study.data.target, *study.data.features} - columns)
        if missing:
            raise FederationError(f"its table has no column {', '.join(map(repr, missing))}")
        return study.read_files({self.settings.name: self.settings.data})

    # -- rounds -----------------------------------------------------------------------------------------

    def _once(self, about: dict[str, Any], message: wire.Message, content: bytes) -> bytes:
        """Answer a round and attempt once; the same message again gets the same reply."""
        run = self._current(message)
        number, attempt = int(about["round"]), int(about["attempt"])
        digest = wire.digest(content)
        task = wire.digest(wire.pack(message.kind, {**message.values, "attempt": 0}, message.arrays))
        last = run.last()
        if last is not None and (number, attempt) <= (last.round, last.attempt) and digest == last.digest:
            return last.reply
        if last is not None and (
            (number, attempt) <= (last.round, last.attempt) or (number == last.round and task != last.task)
        ):
            raise FederationError(
                f"round {number} was answered before, and is now asked with another task",
                hint="two answers to one round would show more than one does",
            )
        if self.policy.max_rounds is not None and number > self.policy.max_rounds:
            raise PolicyError(
                f"it answers at most {self.policy.max_rounds} rounds (max-rounds of its policy)"
            )
        again = last is not None and number == last.round  # the same numbers under other masks
        arrays = run.ask(message, digest) if message.kind == "ask" else run.round(message, digest, again)
        reply = self._reply(about, {}, arrays)
        run.remember(Last(number, attempt, digest, task, reply))
        self._note(run=run.about["run"], round=number)
        return reply

    def _current(self, message: wire.Message) -> SiteRun:
        """The run a message belongs to, read back from disk if this process has not opened it."""
        run_id, session = (message.values.get(key) for key in ("run", "session"))
        if self._run is None or self._run.about["run"] != run_id:
            folder = self._folder(_checked_id(run_id))
            about = _read_json(folder / "session.json")
            if about is None:
                raise FederationError("this site knows no such run", hint="submit it again with --resume")
            study = _remote_study(about["study"])
            set_precision(study)
            self._run = SiteRun(self._owner, folder, about, study, self._rows(study))
            self._run.restore()
        if self._run.about["session"] != session:
            raise FederationError("the message belongs to an earlier session of this run")
        return self._run

    def _folder(self, run: str) -> Path:
        return self.settings.state / "runs" / run


def _leaves(data: FederatedData) -> list[Array]:
    return [np.asarray(a) for a in jax.tree.leaves(data.rows)]


def _checked_id(value: Any) -> str:
    if not (isinstance(value, str) and _ID.fullmatch(value)):
        raise FederationError("the message names no run")
    return value


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _remote_study(tree: Mapping[str, Any]) -> Study:
    """The study as a site may read it: without files, which are the coordinator's."""
    data = {k: v for k, v in tree["data"].items() if k not in ("file", "files", "site")}
    return make_study({**tree, "data": data, "folder": "."}, "the coordinator's study")


def _proposal(study: Study, secure: bool, rows: int, dim: int) -> Proposal:
    s = study.sampler
    if s is None:
        kinds, sums, declared = answer_kinds(requests_of(study.fit.method, study.fit.curvature)), True, True
    else:
        reveals = s.build_method().about.reveals
        kinds, sums, declared = reveals.kinds, reveals.sums, reveals.declared
    return Proposal(
        columns=(study.data.target, *study.data.features),
        family=study.model.family,
        method=study.fit.method if s is None else s.method,
        few_round=s is None,
        curvature=shows_curvature(kinds),
        sums=sums,
        declared=declared,
        secure_sum=secure,
        rounds=study.fit.max_rounds if s is None else s.num_rounds,
        chains=1 if s is None else s.num_chains,
        rows=rows,
        dim=dim,
        epsilon=None if study.privacy is None else study.privacy.max_epsilon,
        delta=None if study.privacy is None else study.privacy.delta,
    )
