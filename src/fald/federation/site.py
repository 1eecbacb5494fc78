"""All that runs at a site: it reads messages, decides by its own policy, works on its rows, and replies.

A worker keeps what it needs between two messages in its state folder, so that it may be another process for
every message. What leaves a site are replies and refusals; a refusal says which rule was broken, never a value
from the rows. The details are in the site's own log.
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
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fald.checkpoint import write_atomically
from fald.commands import set_precision
from fald.data import FederatedData
from fald.errors import ConfigError, FaldError, FederationError, PolicyError, SecureSumError
from fald.federation import account, wire
from fald.federation.langevin import LangevinSite, Task
from fald.federation.policy import Policy, Proposal, read_policy
from fald.federation.secure import Identity, Session
from fald.fewround.evaluate import Site, make_site
from fald.fewround.site import answer, expand
from fald.models.base import Model
from fald.sampling import check_model
from fald.study import Study, make_study
from fald.version import __version__

Array = NDArray[Any]
PROTOCOL = 1
_ID = re.compile(r"[0-9a-f]{16}")
_CURVATURE = ("hessian", "hessians", "precision", "square", "leverage")
_TELLS = (PolicyError, SecureSumError, FederationError)  # whose words never come from rows


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
        self._run: _Run | None = None

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
        self.policy.check(_proposal(study, bool(v["secure"]), data.num_rows))
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
        run = _Run(self, folder, about, study, data)
        check_model(run.model, data)
        run.introduce()
        self._run = run
        self.log(f"run {ids[0]}: accepted, {data.num_rows} rows")
        if data.num_rows <= max(run.model.dim, 5) and not (about["secure"] or study.privacy):
            self.log("warning: so few rows that unsummed uploads describe them; ask for a secure sum")
        self._note(run=ids[0], round=0)
        told = {"rows": data.num_rows, "features": list(data.features), "hello": run.hello}
        types = {f"row_{i}": np.zeros((0, *a.shape[1:]), a.dtype) for i, a in enumerate(_leaves(data))}
        return told, types

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
        if run.study.privacy is not None:
            account.reserve(self.settings, self.policy, run.study, names, sizes, run.about["session"])
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
        from fald.data import read_table

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
            raise PolicyError(f"it answers at most {self.policy.max_rounds} rounds (max-rounds of its policy)")
        arrays = run.ask(message, digest) if message.kind == "ask" else run.round(message, digest)
        reply = self._reply(about, {}, arrays)
        run.remember(_Last(number, attempt, digest, task, reply))
        self._note(run=run.about["run"], round=number)
        return reply

    def _current(self, message: wire.Message) -> _Run:
        """The run a message belongs to, read back from disk if this process has not opened it."""
        run_id, session = (message.values.get(key) for key in ("run", "session"))
        if self._run is None or self._run.about["run"] != run_id:
            folder = self._folder(_checked_id(run_id))
            about = _read_json(folder / "session.json")
            if about is None:
                raise FederationError("this site knows no such run", hint="submit it again with --resume")
            study = _remote_study(about["study"])
            set_precision(study)
            self._run = _Run(self, folder, about, study, self._rows(study))
            self._run.restore()
        if self._run.about["session"] != session:
            raise FederationError("the message belongs to an earlier session of this run")
        return self._run

    def _folder(self, run: str) -> Path:
        return self.settings.state / "runs" / run


class _Last(NamedTuple):
    """The request answered last: all its bytes and its task by their hashes, and the reply."""

    round: int
    attempt: int
    digest: bytes
    task: bytes
    reply: bytes


class _Run:
    """One run at one site."""

    def __init__(
        self, worker: SiteWorker, folder: Path, about: dict[str, Any], study: Study, data: FederatedData
    ):
        self.worker, self.folder, self.about, self.study, self.data = worker, folder, about, study, data
        self.model: Model = study.build_model(data.features)
        self.hello: dict[str, str] = {}
        self._session: Session | None = None
        self._site: Site | None = None
        self._langevin: LangevinSite | None = None
        self._last: _Last | None = None

    def introduce(self) -> None:
        """Make the keys of the session, and write down what the run is."""
        known = {key: self.about[key] for key in ("run", "fingerprint")}
        write_atomically(self.folder / "run.json", json.dumps(known).encode())
        (self.folder / "last.bin").unlink(missing_ok=True)
        if self.about["secure"]:
            purpose = f"{self.about['run']} {self.about['session']}"
            self._session = Session(self.worker.identity, self.worker.settings.name, purpose)
            self.hello = self._session.hello()
        self._save()

    def begin(
        self, names: list[str], sizes: list[int], hellos: dict[str, Any], pins: dict[str, str],
        arrays: Mapping[str, Array],
    ) -> None:  # fmt: skip
        """Freeze who takes part with how many rows."""
        before = (self.about.get("names"), self.about.get("sizes"))
        if before not in ((None, None), (names, sizes)):
            raise FederationError("the roster of a session cannot change")
        if self._session is not None:
            roster = {name: pins.get(name, "") for name in names}
            self._session.accept(hellos, pins if set(pins) == set(names) else roster)
        self.about |= {"names": names, "sizes": sizes}
        if "start" in arrays:
            self.about |= {"start": arrays["start"].tolist(), "root": arrays["root"].tolist()}
        self._save()

    def _save(self) -> None:
        session = None if self._session is None else self._session.export()
        content = json.dumps({**self.about, "keys": session}).encode()
        path = self.folder / "session.json"
        path.touch(mode=0o600, exist_ok=True)
        write_atomically(path, content)
        path.chmod(0o600)

    def restore(self) -> None:
        """Go on in another process."""
        keys = self.about.pop("keys", None)
        if keys is not None:
            self._session = Session.restore(self.worker.identity, keys)

    def last(self) -> _Last | None:
        """What was answered last."""
        path = self.folder / "last.bin"
        if self._last is None and path.exists():
            kept = wire.unpack(path.read_bytes())
            parts = {name: a.tobytes() for name, a in kept.arrays.items()}
            self._last = _Last(kept.values["round"], kept.values["attempt"], **parts)
        return self._last

    def remember(self, last: _Last) -> None:
        """Keep a reply, should the same message come again."""
        self._last = last
        parts = {name: np.frombuffer(getattr(last, name), np.uint8) for name in ("digest", "task", "reply")}
        values = {"round": last.round, "attempt": last.attempt}
        if self._session is not None:
            self._save()
        write_atomically(self.folder / "last.bin", wire.pack("last", values, parts))

    def ask(self, message: wire.Message, digest: bytes) -> dict[str, Array]:
        """Answer a request of the few-round methods: sums over this site's rows."""
        self._require_begun()
        if self._site is None:
            self._site = make_site(self.model, self.data.rows, self.worker.settings.name)
        found = answer(self._site, expand(message.arrays))
        shown = [name for name in found if name.rpartition("_")[2] in _CURVATURE]
        if shown and not self.worker.policy.curvature:
            raise PolicyError(
                "curvature may not leave it (curvature of its policy)",
                hint="set curvature = false in [fit] of the study",
            )
        arrays = {name: np.asarray(a, np.float64) for name, a in sorted(found.items())}
        if self._session is None:
            return arrays
        flat = np.concatenate([a.ravel() for a in arrays.values()])
        return {"masked": self._masked(message, flat, digest, saturate=True), **_shapes(arrays)}

    def round(self, message: wire.Message, digest: bytes) -> dict[str, Array]:
        """Take the local steps of a round; with a secure sum only the masked weighted part leaves."""
        self._require_begun()
        if self._langevin is None:
            self._langevin = self._prepare()
        leaves = [message.arrays[f"leaf_{i}"] for i in range(int(message.values["leaves"]))]
        v, weights = message.values, message.arrays["weight"]
        if weights.ndim != 2 or weights.shape[1] != len(self.about["names"]):
            raise FederationError("the coordinator's weights do not fit the roster")
        weight = weights[:, self.about["names"].index(self.worker.settings.name)]
        upload = self._langevin.answer(Task(int(v["round"]) - 1, weight, leaves, int(v["saved"])))
        if self._session is None:
            return {f"leaf_{i}": a for i, a in enumerate(jax.tree.leaves(upload))}
        parts = (upload.position.astype(float) * weight[:, None], upload.energy.astype(float) * weight)
        flat = np.concatenate([part.ravel() for part in parts])
        spent = {f"spent_{i}": a for i, a in enumerate(jax.tree.leaves(upload.spent))}
        return {"masked": self._masked(message, flat, digest, saturate=False), **spent}

    def _masked(self, message: wire.Message, flat: Array, digest: bytes, saturate: bool) -> Array:
        """The values under masks that fit only if all sites were asked the same, to the last byte."""
        assert self._session is not None
        v = message.values
        return self._session.mask(
            flat,
            round=int(v["round"]),
            attempt=int(v["attempt"]),
            digest=digest,
            among=v.get("among"),
            saturate=saturate,
        )

    def _prepare(self) -> LangevinSite:
        sampler = self.study.require_any_sampler()
        method = sampler.build_method().prepare(self.model, self.data)
        if self.study.privacy is not None:
            method = method.without_energy()
        root = np.asarray(self.about["root"], np.uint32)
        entropy = self.study.privacy is not None and self.study.privacy.client_noise == "entropy"
        own = np.frombuffer(bytes.fromhex(self.about["secret"]), np.uint32) if entropy else root
        names = self.about["names"]
        return LangevinSite(
            self.model,
            method,
            sampler.participation,
            self.data,
            names.index(self.worker.settings.name),
            self.about["sizes"],
            (root, own),
            np.asarray(self.about["start"]),
            self.folder,
        )

    def _require_begun(self) -> None:
        if "names" not in self.about:
            raise FederationError("a round before the sites were told of each other")


def _shapes(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {f"shape_{name}": np.asarray(a.shape, np.int64) for name, a in arrays.items()}


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


def _proposal(study: Study, secure: bool, rows: int) -> Proposal:
    s = study.sampler
    return Proposal(
        columns=(study.data.target, *study.data.features),
        family=study.model.family,
        method=study.fit.method if s is None else s.method,
        few_round=s is None,
        curvature=s is None and study.fit.curvature,
        secure_sum=secure,
        rounds=study.fit.max_rounds if s is None else s.num_rounds,
        chains=1 if s is None else s.num_chains,
        rows=rows,
        epsilon=None if study.privacy is None else study.privacy.max_epsilon,
        delta=None if study.privacy is None else study.privacy.delta,
    )
