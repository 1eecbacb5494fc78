"""A run at a site: what is kept of it between two messages, and the answers to rounds."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fald.calculus.sums import Site, make_site
from fald.core.errors import FederationError, PolicyError
from fald.core.files import write_atomically
from fald.core.reveals import check_preparation, shows_curvature
from fald.core.types import float_dtype
from fald.federation import wire
from fald.federation.secure import shares
from fald.federation.secure.session import Identity, Session, check_shares, split
from fald.federation.site.account import Account, check_weights, open_account
from fald.federation.site.answers import Answers, Kept, Last
from fald.federation.site.audit import FewRoundAudit, digest_of, public_root, same, start_of
from fald.federation.site.langevin import LangevinSite, Task
from fald.federation.site.ledger import SiteLedger
from fald.federation.site.policy import Policy
from fald.federation.wire import PASSED, PREPARED
from fald.fewround.methods import requests_of
from fald.fewround.rounding import rounded
from fald.fewround.site import ANSWERS, ARRAYS, Answer, answer, asked, check_answer, check_request, expand
from fald.langevin.fald import private
from fald.privacy.protection import bounded_sensitivity
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.study.schema import Study

Array = NDArray[Any]
UNSAID = "its rows or settings do not fit the study, or cannot be evaluated"


class Owner(NamedTuple):
    """The site a run is at."""

    name: str
    state: Path
    identity: Identity
    policy: Policy


class Frozen(NamedTuple):
    """What a run is, from its first opening on: whatever asks under its id for something else is refused.

    Attributes
    ----------
    study
        Hash of the study, but for its title and its number of rounds.
    names, secure
        The sites of the run, and whether a secure sum carries their uploads.
    sizes
        Rows of each site; empty before they were told of each other.
    fingerprint
        Of this site's rows.
    secret
        Root of what only this site may know; a round that is asked again after a crash gets the same noise.
    """

    study: str
    names: list[str]
    secure: bool
    sizes: list[int]
    fingerprint: str
    secret: str

    def save(self, folder: Path) -> None:
        """Write it where only its owner reads."""
        write_atomically(folder / "run.json", json.dumps(self._asdict()).encode(), mode=0o600)

    @classmethod
    def read(cls, folder: Path) -> Frozen | None:
        """What is known of a run; None: nothing."""
        path = folder / "run.json"
        return cls(**json.loads(path.read_text())) if path.exists() else None


def study_digest(tree: Mapping[str, Any]) -> str:
    """A hash of what a study asks; a run may go on for more rounds under the same id."""
    sampler = {k: v for k, v in (tree.get("sampler") or {}).items() if k != "num-rounds"}
    rest = {k: v for k, v in tree.items() if k not in ("title", "sampler")}
    return hashlib.sha256(json.dumps([rest, sampler], sort_keys=True).encode()).hexdigest()


class SiteRun:
    """One run at one site: its rows, its keys, and what it has answered."""

    def __init__(
        self, site: Owner, folder: Path, about: dict[str, Any], *, study: Study, data: FederatedData
    ):
        frozen = Frozen.read(folder)
        assert frozen is not None
        self.site, self.folder, self.about, self.study, self.data = site, folder, about, study, data
        self.frozen: Frozen = frozen
        self.model: Model = study.build_model(data.features)
        # of a method that is carried out in rounds of its own; requests are declared one by one
        self.reveals = None if study.sampler is None else study.sampler.build_method().about.reveals
        self.hello: dict[str, str] = {}
        self.answers = Answers(folder)
        self._broadcast = ""  # hash of what the last answer was to, where the site found it itself
        self._shown = ""  # hash of what the site was shown of the rounds before it
        self._masks = ""  # hash that its masks were bound to
        self.left: dict[str, int] = {}  # kinds of numbers that the last answer made leave, and how many
        self.epsilon: float | None = None  # charged so far
        self._session: Session | None = None
        self._rows: Site | None = None
        self._langevin: LangevinSite | None = None
        self._account: Account | None = None
        self._audit = (
            FewRoundAudit(study, data.features, folder, lambda: sum(self.frozen.sizes))
            if study.sampler is None
            else None
        )

    @property
    def wants_sums(self) -> bool:
        """Whether the site needs to see what a round gave: to audit, or for priors relative to scales."""
        return self.site.policy.audit or (self._audit is not None and self._audit.scales is not None)

    def introduce(self) -> None:
        """Make the keys of the session."""
        self.answers.forget_last()
        if self.frozen.secure:
            purpose = f"{self.about['run']} {self.about['session']}"
            self._session = Session(self.site.identity, self.site.name, purpose)
            self.hello = self._session.hello()
        self._save()

    def begin(
        self, sizes: list[int], hellos: dict[str, Any], pins: dict[str, str], arrays: Mapping[str, Array],
        *, pin: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Freeze how many rows the sites have, and share keys with them, which ``pin`` keeps.

        It does so before the run is written down: no crash leaves one that goes on and has pinned nobody.
        """
        if self.frozen.sizes not in ([], sizes):
            raise FederationError("the sites of a run cannot change their rows")
        if self._session is not None:
            self._session.accept(hellos, {name: pins.get(name, "") for name in self.frozen.names})
        self.frozen = self.frozen._replace(sizes=sizes)
        if self.reveals is not None:
            self.about["prepared"] = self._prepared(arrays, len(sizes))
        if self.study.privacy is not None:
            self.epsilon = self._open_account().begin()
        pin()
        self.frozen.save(self.folder)
        self._save()

    def _open_account(self) -> Account:
        """What the site charges for a private run."""
        if self._account is None:
            limits = self.site.policy.privacy
            self._account = open_account(
                SiteLedger(self.site.state / "ledger.jsonl", limits.max_epsilon, limits.delta),
                f"{self.about['run']}-{self.frozen.study[:16]}",
                self.folder,
                self.study,
                sizes=self.frozen.sizes,
                site=self._place,
                sensitivity=bounded_sensitivity(self.model, self.data),
                colluders=limits.colluders if self.frozen.secure else None,
            )
        return self._account

    def offer(self) -> dict[str, Array]:
        """What this site sends before the first round, if its method has such a preparation."""
        if self.reveals is None or not self.reveals.preparation:
            return {}
        if self.frozen.secure:
            raise PolicyError("nothing leaves beside a secure sum (secure-sum)")
        method = self.study.require_any_sampler().build_method()
        found = {name: np.asarray(a) for name, a in method.offer(self.model, self.data).items()}
        check_preparation(self.reveals, found, self.model.dim)
        self._tell({self.reveals.preparation[name]: a.size for name, a in found.items()})
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
            raise FederationError("what was told of all sites' preparation does not fit the study")
        return {name: a.tolist() for name, a in given.items()}

    @property
    def _place(self) -> int:
        return self.frozen.names.index(self.site.name)

    def _save(self) -> None:
        session = None if self._session is None else self._session.export()
        content = json.dumps({**self.about, "keys": session}).encode()
        write_atomically(self.folder / "session.json", content, mode=0o600)

    def restore(self) -> None:
        """Go on in another process."""
        keys = self.about.pop("keys", None)
        if keys is not None:
            last = self.answers.last_under(self.about["session"])
            self._session = Session.restore(self.site.identity, keys, last)

    # -- rounds -----------------------------------------------------------------------------------------

    def answer(
        self, message: wire.Message, digest: bytes, reply: Callable[[dict[str, Array]], bytes]
    ) -> bytes:
        """Answer a round and attempt once; the same message again gets the same reply.

        Parameters
        ----------
        message, digest
            What was asked, and the hash of its bytes.
        reply
            Makes the bytes that leave.
        """
        self.left, self._broadcast, self._masks = {}, "", ""
        number, attempt = message.values["round"], message.values["attempt"]
        task, last = self._task(message), self.answers.last()
        if last is not None and digest == last.digest:
            self.left = last.left  # once more
            return last.reply
        again = self._check_order(number, attempt, task, last)
        self._shown = self._seen(message, number, task)
        arrays = (self._ask if message.kind == "ask" else self._round)(message, digest, task, again)
        upload = ""
        if "masked" in arrays:
            arrays["hashes"] = shares.hashes(arrays["masked"], len(self.frozen.names))
            upload = shares.owner_hash(arrays["hashes"])
        content = reply(arrays)
        shapes = {n.removeprefix("shape_"): a.tolist() for n, a in arrays.items() if n.startswith("shape_")}
        session = self.about["session"] if self._masks else ""
        about = {"broadcast": self._broadcast, "shown": self._shown, "session": session, "masks": self._masks}
        kept = Kept(number, attempt, task.hex(), upload, shapes, **about)
        self.answers.add(kept, Last(number, attempt, self.left, digest, content))
        return content

    def _seen(self, message: wire.Message, number: int, task: bytes) -> str:
        """Hash of what the site has been shown of all rounds before; of a round asked again, then or now.

        Masks are bound to it: sites that were each shown something else give no sum later either, when the
        round is asked again and nothing is shown.
        """
        shown = {n: found for n, found in message.hashes.items() if n.startswith(PASSED)}
        if not shown:
            return next((a.shown for a in reversed(self.answers.of(number)) if a.task == task.hex()), "")
        before = next((a.shown for a in reversed(self.answers.of(number - 1))), "")
        return wire.digest(json.dumps([before, shown], sort_keys=True).encode()).hex()

    def _task(self, message: wire.Message) -> bytes:
        """Hash of what is asked, whatever the session, the attempt, and what is passed on with it."""
        values = {k: v for k, v in message.values.items() if k not in ("session", "attempt", "saved")}
        hashes = {k: found for k, found in message.hashes.items() if not k.startswith(PASSED)}
        return wire.digest(json.dumps([message.kind, values, hashes]).encode() + self._agreed)

    def _check_order(self, number: int, attempt: int, task: bytes, last: Last | None) -> bool:
        """Refuse rounds out of their order; whether this one was answered before, in all its parts."""
        if not self.frozen.sizes:
            raise FederationError("a round before the sites were told of each other")
        most = self._audit.most_rounds if self._audit else self.study.require_any_sampler().num_rounds
        if number > most:
            raise FederationError(f"the study has no round {number}: it ends after {most}")
        known = {a.task for a in self.answers.of(number)}
        once = self._audit is not None or self._session is not None
        over = last is not None and (number, attempt) <= (last.round, last.attempt)
        fixed = once or (last is not None and number == last.round)
        if over or (known and task.hex() not in known and fixed):
            raise FederationError(
                f"round {number} was answered before, and is now asked with another task",
                hint="two answers to one round would show more than one does",
            )
        if once and number > self.answers.highest + 1:
            raise FederationError(f"round {number} before round {self.answers.highest + 1}")
        limit = self.site.policy.max_rounds
        again = task.hex() in known
        if not again and self.answers.distinct >= limit:
            raise PolicyError(f"it answers at most {limit} rounds (max-rounds of its policy)")
        return again

    def _ask(self, message: wire.Message, digest: bytes, task: bytes, again: bool) -> dict[str, Array]:
        """Answer a request of the few-round methods: sums over this site's rows."""
        if self._audit is None:
            raise FederationError("the study that was agreed on takes no such requests")
        request = {name: a for name, a in message.arrays.items() if not name.startswith(PASSED)}
        allowed = requests_of(self.study.fit.method, self.study.fit.curvature)
        odd = [kind for kind in asked(request) if kind not in allowed]
        if odd:
            raise PolicyError(f"the study's method declares no request for {ANSWERS[odd[0]].says}")
        check_request(request, self.model.dim)
        most = self.site.policy.max_draws
        if int(request.get("proposal_count", 0)) > most:
            raise PolicyError(f"it evaluates at most {most:,} draws a round (max-draws of its policy)")
        number = message.values["round"]
        shown = any(name.startswith(PASSED) for name in message.arrays)
        # the sums of a round of scales shape the prior, whether the site audits or not
        needed = self.site.policy.audit or (number == 2 and self._audit.scales is not None)
        # only an answer binds masks to what was shown: what came with a refused request must come again
        if needed and number > 1 and (shown or not again):
            self._audit.take(number - 1, self._sums(message, number - 1))
        if self.site.policy.audit:
            request = self._audit.check(number, request)
        model = self._audit.model(number)
        with about_rows():
            if self._rows is None or self._rows.model is not model:
                self._rows = make_site(model, self.data.rows, self.site.name)
            found = answer(self._rows, expand(request))
        kinds = check_answer(found, self.model.dim)
        if shows_curvature(kinds) and not self.site.policy.curvature:
            raise PolicyError(
                "curvature may not leave it (curvature of its policy)",
                hint="set curvature = false in [fit] of the study",
            )
        # masked they are one row of numbers, in the order in which a message lists its arrays
        arrays = dict(sorted(rounded(model, self.site.name, request, found).items()))
        self._tell({ARRAYS[name][0]: a.size for name, a in arrays.items()})
        if self._session is None:
            return arrays
        flat = np.concatenate([a.ravel() for a in arrays.values()])
        shapes = {f"shape_{name}": np.asarray(a.shape, np.int64) for name, a in arrays.items()}
        return {"masked": self._masked(message, flat, digest), **shapes}

    def _sums(self, message: wire.Message, number: int) -> Answer:
        """What the round before gave, as far as the coordinator passed it on."""
        passed = {n.removeprefix(PASSED): a for n, a in message.arrays.items() if n.startswith(PASSED)}
        if self._session is None:
            for name, array in passed.items():
                if array.dtype != np.float64 or name not in ARRAYS:
                    raise FederationError("what was passed on of the round before is no sum")
            return passed
        shapes = next((a.shapes for a in self.answers.of(number)), {})
        return split(self._summed(passed, number), {n: tuple(s) for n, s in shapes.items()})

    def _summed(self, passed: Mapping[str, Array], number: int) -> Array:
        """The sum of all masked uploads of a round, this site's own among them."""
        known = {a.upload for a in self.answers.of(number)}
        return shares.check(passed, self.frozen.names, self._place, known, number=number)

    def _round(self, message: wire.Message, digest: bytes, task: bytes, again: bool) -> dict[str, Array]:
        """Take the local steps of a round; with a secure sum only the masked weighted part leaves."""
        sampler = self.study.sampler
        if sampler is None:
            raise FederationError("the study that was agreed on takes no such rounds")
        if self._langevin is None:
            with about_rows():
                self._langevin = self._prepare()
        number, weights = message.values["round"], message.arrays.get("weight", np.zeros(()))
        if weights.ndim != 2 or weights.shape != (sampler.num_chains, len(self.frozen.names)):
            raise FederationError("the coordinator's weights do not fit the roster")
        if self._session is not None:
            weights = check_shares(weights, self.frozen.sizes).astype(float_dtype())
        weight = weights[:, self._place]
        leaves = self._langevin.read(message)
        if self._session is not None and self.site.policy.audit:
            leaves = self._audited(message, number, leaves, task)
        if self.study.privacy is not None:
            releases = check_weights(self.study, self.frozen.sizes, self._place, weight)
            self._langevin.check_noise(number, weight, leaves)
            if not again:
                self.epsilon = self._open_account().pay(releases)
        own = self._noise_root(task)
        with about_rows():
            upload = self._langevin.answer(Task(number - 1, weight, leaves, message.values["saved"], own))
        self._tell(dict(zip(self._langevin.kinds, (np.size(a) for a in (upload.position, upload.energy)))))
        if self._session is None:
            return {f"leaf_{i}": a for i, a in enumerate(jax.tree.leaves(upload))}
        parts = [upload.position.astype(float) * weight[:, None], upload.energy.astype(float) * weight]
        # what a round has cost follows from the rows where an upload was compressed, so it is summed as well
        parts += jax.tree.leaves(upload.spent)
        flat = np.concatenate([np.asarray(part, float).ravel() for part in parts])
        return {"masked": self._masked(message, flat, digest)}

    def _audited(self, message: wire.Message, number: int, leaves: list[Array], task: bytes) -> list[Array]:
        """The broadcast that the sum of the round before gives, after what came was compared with it."""
        assert self._langevin is not None
        passed = {n.removeprefix(PASSED): a for n, a in message.arrays.items() if n.startswith(PASSED)}
        before = {a.broadcast for a in self.answers.of(number) if a.task == task.hex()}
        told = _joined_digest(message.hashes[f"leaf_{i}"] for i in range(len(leaves)))
        if number == 1:
            own = self._langevin.start
        elif not passed and told in before:
            own = leaves  # asked again after a crash by a coordinator that has forgotten the round before
        else:
            own = self._langevin.after(number, self._summed(passed, number - 1))
        mine, theirs = ({f"leaf_{i}": a for i, a in enumerate(each)} for each in (own, leaves))
        exact = [[(a.shape, a.dtype, a.tobytes()) for a in each] for each in (own, leaves)]
        alike = exact[0] == exact[1]
        if not alike and not same(mine, theirs):
            raise FederationError(
                f"the broadcast of round {number} is not the average of the uploads before: its digest is "
                f"{digest_of(theirs)}, and that of the average {digest_of(mine)}",
                hint="the same versions of fald and JAX are needed everywhere; or the coordinator asks for "
                "something else",
            )
        self._broadcast = told if alike else _joined_digest(map(wire.hash_of, own))
        if before - {self._broadcast}:  # with the same noise, their difference would have none
            raise FederationError(
                f"round {number} was answered before, and follows now from another sum of round {number - 1}",
                hint="a site changed its upload of that round; begin a new run, without --resume",
            )
        return own

    def _noise_root(self, task: bytes) -> Array:
        """Root of this site's own randomness in a round; in a private run only the site can know it.

        It depends on all that is asked, so that no two tasks ever get the same noise.
        """
        privacy = self.study.privacy
        if privacy is None or privacy.client_noise != "entropy":
            return self._root
        mixed = hmac.digest(bytes.fromhex(self.frozen.secret), task, "sha256")
        return np.frombuffer(mixed[:8], np.uint32)

    def _masked(self, message: wire.Message, flat: Array, digest: bytes) -> Array:
        """The values under masks that fit only if all sites were asked the same, and all audit or none.

        A site that audits answers its own question, and another what was asked: the difference would be one's
        alone. What is no number becomes a fixed value, and its sum is none: a refusal would name the site.
        """
        assert self._session is not None
        audits = bytes([self.site.policy.audit])
        bound = wire.digest(digest + self._agreed + self._shown.encode() + audits)
        self._masks = bound.hex()
        return self._session.mask(
            flat,
            round=message.values["round"],
            attempt=message.values["attempt"],
            digest=bound,
            saturate=True,
        )

    @functools.cached_property
    def _root(self) -> Array:
        return public_root(self.study.require_any_sampler())

    @functools.cached_property
    def _agreed(self) -> bytes:
        """Hash of what the round rests on: sites that were told different things must not get a sum."""
        return wire.digest(json.dumps([self.frozen.study, self.frozen.names, self.frozen.sizes]).encode())

    def _prepare(self) -> LangevinSite:
        sampler = self.study.require_any_sampler()
        everybody = self.data.elsewhere(self.frozen.names, self.frozen.sizes)
        answers = {name: np.asarray(a) for name, a in self.about["prepared"].items()}
        method = sampler.build_method().prepare(self.model, everybody, answers)
        if self.study.privacy is not None:
            method = private(method)
        return LangevinSite(
            self.model,
            method,
            self.data,
            scheme=sampler.participation,
            place=(self._place, self.frozen.sizes),
            root=self._root,
            start=start_of(sampler, self.model),
            folder=self.folder,
        )

    def _tell(self, sizes: Mapping[str, int]) -> None:
        """What the record says that left."""
        for kind, count in sizes.items():
            if kind != "nothing":
                self.left[kind] = self.left.get(kind, 0) + int(count)


@contextlib.contextmanager
def about_rows() -> Iterator[None]:
    """Whatever goes wrong with rows is told in the same words, because a difference would tell of them."""
    try:
        yield
    except Exception as error:
        raise RowsError(UNSAID, hint="the site's own log says what") from error


class RowsError(FederationError):
    """Something about the rows of a site, which is not told."""


def _joined_digest(hashes: Iterable[str]) -> str:
    return wire.digest("".join(hashes).encode()).hex()
