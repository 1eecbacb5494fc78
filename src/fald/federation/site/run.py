"""A run at a site: what is kept of it between two messages, and the answers to rounds."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fald.calculus.sums import Site, make_site
from fald.core.errors import FederationError, PolicyError
from fald.core.files import write_atomically
from fald.core.reveals import check_preparation, shows_curvature
from fald.federation import wire
from fald.federation.secure.session import Identity, Session, check_shares
from fald.federation.site.account import Account, check_weights, open_account
from fald.federation.site.langevin import LangevinSite, Task
from fald.federation.site.ledger import Ledger
from fald.federation.site.policy import Policy
from fald.federation.wire import PREPARED
from fald.fewround.methods import requests_of
from fald.fewround.site import ANSWERS, answer, asked, check_answer, expand
from fald.langevin.fald import private
from fald.privacy.protection import bounded_sensitivity
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.study.schema import Study

Array = NDArray[Any]


class Owner(NamedTuple):
    """The site a run is at."""

    name: str
    state: Path
    identity: Identity
    policy: Policy


class Last(NamedTuple):
    """The request answered last: all its bytes and its task by their hashes, and the reply."""

    round: int
    attempt: int
    digest: bytes
    task: bytes
    reply: bytes


class SiteRun:
    """One run at one site: its rows, its keys, and what it has answered."""

    def __init__(self, site: Owner, folder: Path, about: dict[str, Any], study: Study, data: FederatedData):
        self.site, self.folder, self.about, self.study, self.data = site, folder, about, study, data
        self.model: Model = study.build_model(data.features)
        # of a method that is carried out in rounds of its own; requests are declared one by one
        self.reveals = None if study.sampler is None else study.sampler.build_method().about.reveals
        self.hello: dict[str, str] = {}
        self._session: Session | None = None
        self._rows: Site | None = None
        self._langevin: LangevinSite | None = None
        self._last: Last | None = None
        self._account: Account | None = None

    def introduce(self) -> None:
        """Make the keys of the session, and write down what the run is."""
        known = {key: self.about[key] for key in ("run", "fingerprint")}
        write_atomically(self.folder / "run.json", json.dumps(known).encode())
        (self.folder / "last.bin").unlink(missing_ok=True)
        if self.about["secure"]:
            purpose = f"{self.about['run']} {self.about['session']}"
            self._session = Session(self.site.identity, self.site.name, purpose)
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
        if self.reveals is not None:
            self.about["prepared"] = self._prepared(arrays, len(names))
        if self.study.privacy is not None:
            self._open_account().begin()
        self._save()

    def _open_account(self) -> Account:
        """What the site charges for a private run."""
        if self._account is None:
            limits = self.site.policy.privacy
            self._account = open_account(
                Ledger(self.site.state / "ledger.jsonl", limits.max_epsilon, limits.delta),
                self.about["run"],
                self.folder,
                self.study,
                self.about["sizes"],
                self._place,
                sensitivity=bounded_sensitivity(self.model, self.data),
                summed=self.about["secure"],
            )
        return self._account

    def offer(self) -> dict[str, Array]:
        """What this site sends before the first round, if its method has such a preparation."""
        if self.reveals is None or not self.reveals.preparation:
            return {}
        method = self.study.require_any_sampler().build_method()
        found = {name: np.asarray(a) for name, a in method.offer(self.model, self.data).items()}
        check_preparation(self.reveals, found, self.model.dim)
        return {f"{PREPARED}{name}": a for name, a in found.items()}

    def _prepared(self, arrays: Mapping[str, Array], count: int) -> dict[str, Any]:
        """What all sites sent, as the coordinator passes it on: by name, sites in front."""
        assert self.reveals is not None
        given = {n.removeprefix(PREPARED): a for n, a in arrays.items() if n.startswith(PREPARED)}
        try:
            check_preparation(self.reveals, given, self.model.dim)
            fits = all(len(a) == count for a in given.values())
        except PolicyError:
            fits = False
        if not fits:
            raise FederationError(
                "what the coordinator says of all sites' preparation does not fit the study"
            )
        return {name: a.tolist() for name, a in given.items()}

    @property
    def _place(self) -> int:
        return self.about["names"].index(self.site.name)

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
            self._session = Session.restore(self.site.identity, keys)

    def last(self) -> Last | None:
        """What was answered last."""
        path = self.folder / "last.bin"
        if self._last is None and path.exists():
            kept = wire.unpack(path.read_bytes())
            parts = {name: a.tobytes() for name, a in kept.arrays.items()}
            self._last = Last(kept.values["round"], kept.values["attempt"], **parts)
        return self._last

    def remember(self, last: Last) -> None:
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
        if self.study.sampler is not None:
            raise FederationError("the study that was agreed on takes no such requests")
        if self._rows is None:
            self._rows = make_site(self.model, self.data.rows, self.site.name)
        allowed = requests_of(self.study.fit.method, self.study.fit.curvature)
        odd = [kind for kind in asked(message.arrays) if kind not in allowed]
        if odd:
            raise PolicyError(f"the study's method declares no request for {ANSWERS[odd[0]].says}")
        found = answer(self._rows, expand(message.arrays))
        kinds = check_answer(found, self.model.dim)
        if shows_curvature(kinds) and not self.site.policy.curvature:
            raise PolicyError(
                "curvature may not leave it (curvature of its policy)",
                hint="set curvature = false in [fit] of the study",
            )
        arrays = {name: np.asarray(a, np.float64) for name, a in sorted(found.items())}
        if self._session is None:
            return arrays
        flat = np.concatenate([a.ravel() for a in arrays.values()])
        return {"masked": self._masked(message, flat, digest, saturate=True), **_shapes(arrays)}

    def round(self, message: wire.Message, digest: bytes, again: bool) -> dict[str, Array]:
        """Take the local steps of a round; with a secure sum only the masked weighted part leaves."""
        self._require_begun()
        if self._langevin is None:
            self._langevin = self._prepare()
        leaves = [message.arrays[f"leaf_{i}"] for i in range(int(message.values["leaves"]))]
        v, weights = message.values, message.arrays["weight"]
        if weights.ndim != 2 or weights.shape[1] != len(self.about["names"]):
            raise FederationError("the coordinator's weights do not fit the roster")
        if self._session is not None:
            check_shares(weights, self.about["sizes"])
        weight = weights[:, self._place]
        if self.study.privacy is not None and not again:
            releases = check_weights(self.study, self.about["sizes"], self._place, weight)
            self._open_account().pay(releases)
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
            digest=wire.digest(digest + self._agreed),
            among=v.get("among"),
            saturate=saturate,
        )

    @functools.cached_property
    def _agreed(self) -> bytes:
        """Hash of what the round rests on: sites that were told different things must not get a sum."""
        parts = {key: self.about.get(key) for key in ("study", "names", "sizes", "start", "root")}
        return wire.digest(json.dumps(parts, sort_keys=True).encode())

    def _prepare(self) -> LangevinSite:
        sampler = self.study.require_any_sampler()
        everybody = self.data.elsewhere(self.about["names"], self.about["sizes"])
        answers = {name: np.asarray(a) for name, a in self.about["prepared"].items()}
        method = sampler.build_method().prepare(self.model, everybody, answers)
        if self.study.privacy is not None:
            method = private(method)
        root = np.asarray(self.about["root"], np.uint32)
        entropy = self.study.privacy is not None and self.study.privacy.client_noise == "entropy"
        own = np.frombuffer(bytes.fromhex(self.about["secret"]), np.uint32) if entropy else root
        return LangevinSite(
            self.model,
            method,
            sampler.participation,
            self.data,
            self._place,
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
