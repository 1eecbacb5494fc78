"""All that runs at a site: it reads messages, decides by its own policy, works on its rows, and replies.

A worker keeps what it needs between two messages in its state folder, so that it may be another process for
every message. What leaves a site are replies and refusals; a refusal says which rule was broken, never a
value from the rows. The details are in the site's own log.
"""

from __future__ import annotations

import json
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
    PolicyError,
    PrivacyError,
    SecureSumError,
    StorageError,
    printable,
)
from fald.core.files import locked, write_atomically
from fald.core.reveals import shows_curvature
from fald.core.version import __version__, versions
from fald.federation import wire
from fald.federation.secure.session import Identity
from fald.federation.site.account import private_parts
from fald.federation.site.messages import check_message
from fald.federation.site.policy import Policy, Proposal, read_policy
from fald.federation.site.record import Record
from fald.federation.site.run import UNSAID, Frozen, Owner, RowsError, SiteRun, about_rows, study_digest
from fald.federation.wire import PROTOCOL
from fald.fewround.methods import requests_of
from fald.fewround.site import answer_kinds
from fald.langevin.sampling import check_model
from fald.problem.data import FederatedData, read_table
from fald.study.precision import set_precision
from fald.study.schema import Study, make_study

Array = NDArray[Any]
_TELLS = (PolicyError, SecureSumError, FederationError, PrivacyError)  # whose words never come from rows
_OWN_FILES = "a file of its own, such as its privacy ledger, is damaged or cannot be written"
_DAY = 86400.0  # seconds
_LARGEST_LOG = 5_000_000  # bytes after which a new log begins; the one before is kept


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
    coordinator
        Who can ask, as the record says it: the address of the server, and the fingerprint of its authority.
    """

    name: str
    state: Path
    data: Path | None = None
    policy: Path | None = None
    pins: Path | None = None
    coordinator: str = ""

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
    unknown = sorted(set(tree) - {"name", "state", "data", "policy", "pins", "coordinator"})
    if unknown or not isinstance(tree.get("name"), str):
        raise ConfigError(f"{path}: {'unknown key ' + repr(unknown[0]) if unknown else 'name is missing'}")
    paths = {key: Path(folder) / tree[key] for key in ("data", "policy", "pins") if key in tree}
    asks = str(tree.get("coordinator", ""))
    return SiteSettings(tree["name"], Path(folder) / tree.get("state", "state"), **paths, coordinator=asks)


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
        self._record = Record(settings.state, self.identity)
        self._run: SiteRun | None = None
        self._told: dict[str, Any] = {}

    def handle(self, content: bytes) -> bytes:
        """Answer a message; whatever goes wrong becomes a refusal that names no value."""
        about: dict[str, Any] = {}
        self._told = {"asked": "", "digest": wire.digest(content).hex(), "by": self.settings.coordinator}
        try:
            reply = self._handled(content, about)
            if self._told["asked"] != "hello":  # of which nothing but names and versions leave
                self._record.add(self._told)
            return reply
        except Exception as error:  # nothing may leave but a refusal
            return self._refuse(about, error)

    def _handled(self, content: bytes, about: dict[str, Any]) -> bytes:
        message = wire.unpack(content)
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
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(folder / "lock"):  # two processes must not answer one run
            work = {"open": self._open, "begin": self._begin, "end": self._end}
            if message.kind in work:
                return self._reply(about, *work[message.kind](message))
            run = self._current(message)
            reply = run.answer(message, wire.digest(content), lambda arrays: self._reply(about, {}, arrays))
            self._told |= {"left": dict(run.left), "epsilon": run.epsilon}
            self._note(run=about["run"], round=about["round"])
            return reply

    def _reply(self, about: dict[str, Any], values: dict[str, Any], arrays: Mapping[str, Any]) -> bytes:
        return wire.pack("reply", {"site": self.settings.name, **about, **values}, arrays)

    def _refuse(self, about: dict[str, Any], error: Exception) -> bytes:
        self.log("".join(traceback.format_exception(error)).rstrip())
        if isinstance(error, _TELLS) and not isinstance(error, RowsError):
            said, hint, kind = error.message, error.hint, type(error).__name__
        elif isinstance(error, StorageError):  # of the site's own files, not of its rows
            said, hint, kind = _OWN_FILES, "the site's own log says which", FederationError.__name__
        else:  # one sentence for all: a difference could tell of the rows
            said, hint, kind = UNSAID, "the site's own log says what", FederationError.__name__
        self._note(refused=said)
        try:
            self._record.add({**self._told, "left": {}, "refused": said})
        except FaldError as broken:
            self.log(str(broken))
        values = {"site": self.settings.name, **about, "error": kind, "message": said}
        return wire.pack("refusal", {**values, "hint": hint})

    def log(self, text: str) -> None:
        """Add to the site's own log."""
        stamp, path = time.strftime("%Y-%m-%d %H:%M:%S"), self.settings.state / "site.log"
        if path.exists() and path.stat().st_size > _LARGEST_LOG:
            path.replace(path.with_suffix(".1.log"))
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{stamp} {printable(text, lines=True)}\n")

    def _note(self, **fields: Any) -> None:
        """What 'fald federation join' shows."""
        line = {"time": time.time(), "site": self.settings.name, **fields}
        write_atomically(self.settings.state / "status.json", json.dumps(line).encode())

    # -- before the rounds ------------------------------------------------------------------------------

    def _hello(self, message: wire.Message) -> tuple[dict[str, Any], dict[str, Array]]:
        about = {"version": __version__, "versions": versions(), "protocol": PROTOCOL}
        return {**about, "identity": self.identity.public}, {}

    def _open(self, message: wire.Message) -> tuple[dict[str, Any], dict[str, Array]]:
        """Decide whether to take part, count the rows, and introduce the session: the policy first."""
        v = message.values
        if v["version"] != __version__:
            raise FederationError(
                f"it has fald {__version__}, the coordinator {printable(v['version'])[:40]}",
                hint="install the same version everywhere",
            )
        study = _remote_study(v["study"])
        self._told |= {"title": study.title, "columns": [study.data.target, *study.data.features]}
        self._told["study"] = study_digest(v["study"])
        set_precision(study)
        if study.privacy is not None:
            private_parts(study)  # before anything leaves
        proposal = _proposal(study, v["secure"], len(v["names"]))
        self.policy.check(proposal)
        self._check_sites(v["names"], v["secure"])
        data, warnings = self._opened(study, proposal)
        folder = self._folder(v["run"])
        known = Frozen.read(folder)
        now = Frozen(self._told["study"], v["names"], v["secure"], [], data.fingerprint(), "")
        if known is not None:
            if known.fingerprint != now.fingerprint:
                raise FederationError(
                    "its rows have changed since the run began", hint="begin a new run, without --resume"
                )
            if known[:3] != now[:3]:
                raise FederationError(
                    "the run is known here with another study, other sites or another kind of sum",
                    hint="begin a new run, without --resume",
                )
        (known or now._replace(secret=secrets.token_hex(32))).save(folder)
        run = SiteRun(self._owner, folder, {"run": v["run"], "session": v["session"], "study": v["study"]},
                      study, data)  # fmt: skip
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

    def _opened(self, study: Study, proposal: Proposal) -> tuple[FederatedData, list[str]]:
        """The rows of a study that the policy allows; what does not fit is counted, and told in one way."""
        path = self.settings.state / "failed.json"
        failed = [t for t in (_read_json(path) or []) if time.time() - t < _DAY]
        if len(failed) >= self.policy.max_failed_opens:
            raise PolicyError(
                f"{len(failed)} studies did not fit its rows within a day (max-failed-opens)",
                hint="wait, or ask the site to change its policy",
            )
        self._check_columns(study)
        try:
            with about_rows():
                data = self._rows(study)
                model = study.build_model(data.features)
                check_model(model, data)
                whole = replace(proposal, rows=data.num_rows, dim=model.dim)
                self.policy.check_rows(whole)
        except RowsError:
            write_atomically(path, json.dumps([*failed, time.time()]).encode())
            raise
        return data, self.policy.warnings(whole)

    def _check_sites(self, names: list[str], secure: bool) -> None:
        """Refuse a roster without this site, and sums over fewer sites than are known here."""
        if self.settings.name not in names:
            raise FederationError("the roster must name this site once, in order")
        known = self._known_pins()
        subset = names in [sorted(each) for each in self.policy.allowed_subsets]
        if secure and known is not None and set(names) != set(known) and not subset:
            raise SecureSumError(
                "the sites of the run are not those pinned here; they differ in "
                + ", ".join(map(repr, sorted(set(names) ^ set(known)))),
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
        pins = self._pins(v["identities"]) if run.frozen.secure else {}
        run.begin(v["sizes"], v["hellos"] or {}, pins, message.arrays)
        self._told["epsilon"] = run.epsilon
        return {}, {}

    def _end(self, message: wire.Message) -> tuple[dict[str, Any], dict[str, Array]]:
        """Forget the keys of a run."""
        folder = self._folder(message.values["run"])
        for name in ("session.json", "last.bin"):
            (folder / name).unlink(missing_ok=True)
        self._run = None
        self._note(finished=message.values["run"])
        return {}, {}

    def _known_pins(self) -> dict[str, str] | None:
        return _read_json(self.settings.pins or self.settings.state / "pins.json")

    def _pins(self, announced: Mapping[str, str]) -> dict[str, str]:
        """Public keys of the sites: those of the site's own file, else those seen first."""
        known = self._known_pins()
        if known is not None or self.settings.pins is not None:
            return known or {}
        path = self.settings.state / "pins.json"
        write_atomically(path, json.dumps(dict(announced), indent=1, sort_keys=True).encode())
        self.log(f"pinned the keys of {', '.join(sorted(announced))} as announced in the first run")
        return dict(announced)

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
        about = _read_json(folder / "session.json")
        if about is None:
            raise FederationError("this site knows no such run", hint="submit it again with --resume")
        if about["session"] != session:
            raise FederationError("the message belongs to an earlier session of this run")
        mine = self._run
        if mine is None or mine.about["run"] != run_id or mine.about["session"] != session:
            study = _remote_study(about["study"])
            set_precision(study)
            with about_rows():
                data = self._rows(study)
            mine = SiteRun(self._owner, folder, about, study, data)
            mine.restore()
            self._run = mine
        mine.answers.read()
        return mine

    def _folder(self, run: str) -> Path:
        return self.settings.state / "runs" / run


def _leaves(data: FederatedData) -> list[Array]:
    return [np.asarray(a) for a in jax.tree.leaves(data.rows)]


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _remote_study(tree: Mapping[str, Any]) -> Study:
    """The study as a site may read it: without files, which are the coordinator's."""
    data = {k: v for k, v in tree["data"].items() if k not in ("file", "files", "site")}
    return make_study({**tree, "data": data, "folder": "."}, "the coordinator's study")


def _proposal(study: Study, secure: bool, sites: int) -> Proposal:
    """What a study asks, as far as that can be said without a look at the rows."""
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
        local_steps=1 if s is None else s.local_steps,
        sites=sites,
        epsilon=None if study.privacy is None else study.privacy.max_epsilon,
        delta=None if study.privacy is None else study.privacy.delta,
    )
