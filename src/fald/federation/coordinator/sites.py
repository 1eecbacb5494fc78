"""The coordinator's side: open a study at all sites, ask rounds, check what comes back.

It knows no engine; a ``Link`` carries the messages. Replies are checked before they are used: the right
session, round and attempt, shapes, types, finite numbers within bounds. A site that breaks a rule is named.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fald.core.errors import ConfigError, FederationError, PolicyError, PrivacyError, printable
from fald.core.files import write_atomically
from fald.core.reveals import KINDS
from fald.core.version import __version__, differences, library_versions
from fald.federation import wire
from fald.federation.folder import CLOCK
from fald.federation.link import Arrival, Link
from fald.federation.secure import shares
from fald.federation.secure.session import FEWEST_SITES, unmask_sum
from fald.federation.wire import PASSED, PREPARED, PROTOCOL, SHARE
from fald.fewround.site import ARRAYS
from fald.problem.data import FederatedData
from fald.problem.families import versions
from fald.study.schema import FederationSection, Study

Array = NDArray[Any]

_SPARE_BYTES = 1 << 16
_AGAIN = 2.0  # seconds between two tries to reach a site that is gone
_LARGEST = 1e12  # numbers of an upload beyond this are not parameters of anything
_COMPARE = "let the site, and every site where none is named, compare its rows with the study"
_REFUSALS = {"PolicyError": PolicyError, "PrivacyError": PrivacyError}  # with an exit code of their own


class Replies(NamedTuple):
    """What one round brought.

    Attributes
    ----------
    arrays
        Arrays of each site that answered, in the order of the sites.
    status
        By site: seconds, and how it answered.
    """

    arrays: dict[str, dict[str, Array]]
    status: dict[str, dict[str, Any]]


class _Passed(NamedTuple):
    """What sites are shown of a round: to all alike by name, and uploads of which each sees its share."""

    round: int
    alike: dict[str, Array]
    uploads: list[Array]


class Federation:
    """A study that is open at all sites of a federation.

    Parameters
    ----------
    link
        What carries the messages.
    study
        The study; its ``[federation]`` section says how to treat silent sites.
    run
        Name of the run, 16 hexadecimal digits, the same when it is resumed.
    tell
        Called with a line of news.
    kept
        File for what the sites are shown of the latest round, so that a resumed run can show it; None: none.

    Attributes
    ----------
    data
        Names, sizes and columns of the sites; the rows stay where they are.
    secure
        Whether uploads that are sums go through the secure sum.
    """

    def __init__(
        self, link: Link, study: Study, run: str, tell: Callable[[str], None] = lambda line: None,
        *, kept: Path | None = None,
    ):  # fmt: skip
        self.link, self.study, self.run = link, study, run
        self.options: FederationSection = study.federation
        self.session = secrets.token_hex(8)
        self._tell, self._kept = tell, kept
        self._passed = self._to_keep = _Passed(0, {}, [])
        if kept is not None and kept.exists():
            stored = wire.unpack(kept.read_bytes())
            uploads = [a for name, a in stored.arrays.items() if not name.startswith(PASSED)]
            alike = {name: a for name, a in stored.arrays.items() if name.startswith(PASSED)}
            self._passed = _Passed(stored.values["round"], alike, uploads)
        self._status: dict[str, dict[str, Any]] = {}
        self.dropouts: list[dict[str, Any]] = []
        self.versions: dict[str, list[str]] = {}  # by site, libraries and clocks that differ from those here
        self.names = sorted(link.names)
        self.secure = self._choose_secure()
        self.identities = self._greet()
        opened = self._open()
        self.data = _described(opened, study)
        self.offers = self._offered(opened)
        self.hellos = {name: m.values["hello"] for name, m in opened.items()}
        self.sizes = [int(n) for n in self.data.sizes]
        self.audited = any(m.values.get("audits") is True for m in opened.values())

    def _offered(self, opened: Mapping[str, wire.Message]) -> dict[str, Array]:
        """What the sites send before the first round: by name, sites in front."""
        if self.study.sampler is None:
            return {}
        wanted = self.study.sampler.build_method().about.reveals.preparation
        dim = self.study.build_model(self.data.features).dim
        for site, message in opened.items():
            for name, kind in wanted.items():
                a = message.arrays.get(PREPARED + name)
                if a is None or a.shape != (1, *(dim,) * KINDS[kind].axes) or not np.all(np.isfinite(a)):
                    raise FederationError(f"site {site!r}: its preparation is not what the method declares")
        return {n: np.concatenate([m.arrays[PREPARED + n] for m in opened.values()]) for n in wanted}

    def _choose_secure(self) -> bool:
        asked, few = self.options.secure_sum, len(self.names) < FEWEST_SITES
        sampler = self.study.sampler
        sums = sampler is None or sampler.build_method().about.reveals.sums
        partial = sampler is not None and sampler.participation != "full"
        arrival = self.options.first_replies is not None or self.options.dropout == "reweight"
        obstacles = {
            f"a secure sum needs {FEWEST_SITES} sites; the federation has {len(self.names)}": few,
            "the uploads of this method are more than sums": not sums,
            "not all sites take part in every round": partial or arrival,
        }
        found = next((why for why, holds in obstacles.items() if holds), "")
        if asked and found:
            raise ConfigError(f"secure-sum cannot be used: {found}", hint="leave it out of [federation]")
        self.why_not_secure = found or ("secure-sum = false in the study" if asked is False else "")
        return asked is not False and not found

    def _greet(self) -> dict[str, str]:
        identities, began = {}, time.time()
        for name, message in self._from_all(wire.pack("hello"), wire.MOST_BYTES).items():
            v = message.values
            if v.get("site") != name:
                raise FederationError(f"site {name!r} answers under the name {v.get('site')!r}")
            if v.get("version") != __version__ or v.get("protocol") != PROTOCOL:
                other = {"fald": v.get("version"), "protocol": v.get("protocol")}
                differ = differences(other, {"fald": __version__, "protocol": str(PROTOCOL)})
                raise FederationError(
                    f"site {name!r} has {' and '.join(differ)}", hint="install the same version everywhere"
                )
            differ = differences(v.get("versions"), library_versions())
            told = v.get("time")
            clock = told if isinstance(told, float) else began  # a whole number may be too large for one
            off = clock - min(max(clock, began), time.time())  # it answered at some time in between
            if abs(off) > CLOCK:
                differ = [*differ, f"a clock that is {off:+.0f} s off"]
            if differ:
                self.versions[name] = differ
            identities[name] = str(v.get("identity"))
        return identities

    def _open(self) -> dict[str, wire.Message]:
        tree = self.study.as_settings()
        tree["data"] = {k: v for k, v in tree["data"].items() if k not in ("file", "files", "site")}
        tree = {k: v for k, v in tree.items() if k not in ("folder", "federation")}
        values = {"study": tree, "secure": self.secure, "names": self.names, **self._ids()}
        values["version"] = versions(self.study.model.family)
        opened = self._from_all(wire.pack("open", values), wire.MOST_BYTES)
        for name, m in opened.items():
            self._same(name, m, {})
            rows, columns, hello = (m.values.get(key) for key in ("rows", "features", "hello"))
            if not (type(rows) is int and 0 < rows < 2**31):
                raise FederationError(f"site {name!r} gives no number of rows")
            if not (isinstance(columns, list) and isinstance(hello, dict)):
                raise FederationError(f"site {name!r} does not say its columns, or who it is")
        return opened

    def begin(self) -> None:
        """Tell all sites of each other, and what they sent beforehand."""
        values = {
            "names": self.names,
            "sizes": self.sizes,
            "hellos": self.hellos if self.secure else None,
            "identities": self.identities,
            **self._ids(),
        }
        told = {PREPARED + name: a for name, a in self.offers.items()}
        for name, message in self._from_all(wire.pack("begin", values, told), _SPARE_BYTES).items():
            self._same(name, message, {})

    def _from_all(self, message: bytes, most: int) -> dict[str, wire.Message]:
        """What all sites reply to one message before the first round: they may still be starting."""
        arrivals = self._reach(dict.fromkeys(self.names, message), self.options.opening_timeout)
        return {name: self._read(name, arrival, most) for name, arrival in arrivals.items()}

    def _reach(
        self, messages: Mapping[str, bytes], seconds: float, *, in_round: bool = False
    ) -> dict[str, Arrival]:
        """Send messages, and again to sites that are gone until the time is over: they may be restarting.

        A site that was reached and failed is asked again in a round alone: before it, it says why at once.
        """
        began = time.monotonic()
        enough = self.options.first_replies if in_round else None
        found = self.link.send(messages, timeout=seconds, enough=enough)
        while True:
            gone = [n for n, a in found.items() if a.content is None and _is_gone(a, in_round)]
            left = began + seconds - time.monotonic()
            replies = sum(a.content is not None for a in found.values())
            if not gone or left <= 0 or (in_round and self._enough(replies)):
                return found
            time.sleep(min(_AGAIN, left))
            gone_for = time.monotonic() - began
            again = self.link.send({n: messages[n] for n in gone}, timeout=max(seconds - gone_for, 0.1))
            found |= {n: a._replace(seconds=a.seconds + gone_for) for n, a in again.items()}

    def end(self) -> None:
        """Let the sites forget the keys of the run; a site that is gone keeps them until the next one."""
        self.link.send(dict.fromkeys(self.names, wire.pack("end", self._ids())), timeout=10.0)

    def pass_on(self, number: int, sums: Mapping[str, Array]) -> None:
        """Remember what a round gave, as sites that audit will see it with the next request."""
        if self.audited:
            self._passed = _Passed(number, {PASSED + name: a for name, a in sums.items()}, [])

    def pass_on_masked(self, number: int, replies: Replies, summed: Array) -> None:
        """Remember a sum under masks, and what the sites need to check it."""
        if self.audited:
            each = replies.arrays.values()
            alike = {
                "sum": np.append(summed, float(len(each))),
                "hashes": np.stack([a["hashes"] for a in each]),
            }
            uploads = [a["masked"] for a in each]
            self._passed = _Passed(number, {PASSED + name: a for name, a in alike.items()}, uploads)

    def hold_passed(self) -> None:
        """What the latest round gave belongs to the rounds that the next ``keep_passed`` saves."""
        self._to_keep = self._passed

    def keep_passed(self) -> None:
        """Write down what was held, before the run is saved: a resumed one shows it again.

        Rounds since the last saved one are asked again then, and give again what is to be shown.
        """
        passed = self._to_keep
        if self._kept is not None and passed.round:
            uploads = {f"upload_{i}": a for i, a in enumerate(passed.uploads)}
            content = wire.pack("passed", {"round": passed.round}, {**passed.alike, **uploads})
            write_atomically(self._kept, content)

    def replies(self) -> dict[str, dict[str, Any]]:
        """How the sites answered in the latest round."""
        return self._status

    def ask(
        self,
        kind: str,
        number: int,
        values: Mapping[str, Any],
        arrays: Mapping[str, Array],
        *,
        among: Sequence[str] | None = None,
        expect: Callable[[dict[str, Array]], None],
        most: int,
    ) -> Replies:
        """Ask a round, with the time-outs, retries and cut-offs of the study.

        Parameters
        ----------
        kind, number, values, arrays
            The task; every site gets the same bytes, and then its share of the sum before.
        among
            Sites to ask; default: all.
        expect
            Raises ``FederationError`` if a reply's arrays are not what was asked for.
        most
            Bytes that a reply may have, a little more is let through.
        """
        names = self.names if among is None else sorted(among)
        passed = self._passed if self._passed.round == number - 1 else _Passed(0, {}, [])
        arrays = {**arrays, **passed.alike}
        arrived: dict[str, dict[str, Array]] = {}
        self._status = {}
        for attempt in range(1, self._attempts() + 1):
            missing = names if self.secure else [n for n in names if n not in arrived]
            if self.secure:
                arrived = {}
            told = {"round": number, "attempt": attempt, **self._ids(), **values}
            if passed.uploads:
                share = {n: shares.share(passed.uploads, self.names.index(n)) for n in missing}
                messages = {n: wire.pack(kind, told, {**arrays, SHARE: share[n]}) for n in missing}
            else:
                messages = dict.fromkeys(missing, wire.pack(kind, told, arrays))
            found = self._reach(messages, self.options.timeout, in_round=True)
            for name, arrival in found.items():
                self._status[name] = {"seconds": arrival.seconds, "status": arrival.problem or "answered"}
                if arrival.content is None:
                    continue
                reply = self._read(name, arrival, most + _SPARE_BYTES)
                self._same(name, reply, {"round": number, "attempt": attempt})
                self._checked(name, reply.arrays, expect)
                arrived[name] = reply.arrays
            if len(arrived) == len(names) or self._enough(len(arrived)):
                break
            self._tell(f"round {number}: waiting for {', '.join(n for n in names if n not in arrived)}")
        silent = [n for n in names if n not in arrived]
        if silent:
            self.dropouts.append({"round": number, "silent": silent})
            if not self._enough(len(arrived)):
                raise FederationError(
                    f"no answer from {', '.join(map(repr, silent))} in round {number}",
                    hint="when the site is back: fald run --resume; or set dropout in [federation]",
                )
        return Replies({name: arrived[name] for name in sorted(arrived)}, dict(self._status))

    @property
    def arrival_based(self) -> bool:
        """Whether who takes part depends on who answers in time."""
        return self.options.first_replies is not None or self.options.dropout == "reweight"

    @property
    def minimum(self) -> int:
        """Replies without which a round fails."""
        o = self.options
        if not self.arrival_based:
            return len(self.names)
        return min(
            o.minimum_replies or o.first_replies or max(1, (len(self.names) + 1) // 2), len(self.names)
        )

    def _enough(self, count: int) -> bool:
        return self.arrival_based and count >= self.minimum

    def _attempts(self) -> int:
        return 1 if self.options.dropout == "fail" else 1 + self.options.retries

    def _ids(self) -> dict[str, str]:
        return {"run": self.run, "session": self.session}

    def _read(self, name: str, arrival: Arrival, most: int) -> wire.Message:
        if arrival.content is None:
            raise FederationError(
                f"no answer from site {name!r} ({arrival.problem or 'late'})",
                hint="is it running? 'fald federation status' shows who is there",
            )
        try:
            message = wire.unpack(arrival.content, most)
        except FederationError as error:
            raise FederationError(f"site {name!r}: {error.message}", hint=error.hint) from None
        if message.kind == "refusal":
            kind = _REFUSALS.get(str(message.values.get("error")), FederationError)
            apart = f"; it has {' and '.join(self.versions[name])}" if name in self.versions else ""
            hint = f"{_text(message, 'hint')}{apart}".removeprefix("; ")
            raise kind(f"site {name!r} refuses: {_text(message, 'message')}", hint=hint)
        if message.kind != "reply":
            raise FederationError(f"site {name!r} sent no reply but {message.kind!r}")
        return message

    def _same(self, name: str, message: wire.Message, wanted: Mapping[str, Any]) -> None:
        for key, value in {"site": name, **self._ids(), **wanted}.items():
            if message.values.get(key) != value:
                raise FederationError(
                    f"site {name!r} sent a stale or foreign reply ({key} is not that of the request)"
                )

    def _checked(
        self, name: str, arrays: dict[str, Array], expect: Callable[[dict[str, Array]], None]
    ) -> None:
        try:
            expect(arrays)
        except FederationError as error:
            raise FederationError(f"site {name!r}: {error.message}", hint=error.hint) from None

    def about(self) -> dict[str, Any]:
        """What a result says of its federation."""
        return {
            "run": self.run,
            "sites": self.names,
            "sizes": self.sizes,
            "secure_sum": self.secure,
            "why_not": self.why_not_secure,
            "seen": "sums over sites only" if self.secure else "the upload of every single site",
            "arrival_based": self.arrival_based,
            "dropouts": self.dropouts,
            "versions": self.versions,
        }


def _is_gone(arrival: Arrival, in_round: bool) -> bool:
    return arrival.problem != "late" if in_round else arrival.problem == "absent"


def check_finite(arrays: Mapping[str, Array], places: Sequence[str]) -> None:
    """Refuse numbers that no honest upload has."""
    for name in places:
        a = arrays[name]
        if a.dtype.kind == "f" and not np.all(np.abs(a) < _LARGEST):
            raise FederationError(
                f"its upload has numbers that are not finite or beyond {_LARGEST:g}",
                hint="a smaller step-size, if its chain diverged; otherwise ask the site",
            )


def check_summed(flat: Array, number: int) -> None:
    """Refuse the sum of a round's uploads where no honest uploads add up to it.

    Raises
    ------
    FederationError
        That names no site: a secure sum does not show whose upload it was.
    """
    if not np.all(np.abs(flat) < _LARGEST):
        raise FederationError(
            f"the sum of the sites' uploads left the finite numbers in round {number}; "
            "a secure sum cannot say at which site",
            hint=f"try a smaller step-size; if no chain diverges, {_COMPARE}",
        )


def check_likelihoods(arrays: Mapping[str, Array], whose: str) -> None:
    """Refuse answers of the few-round methods that no rows give, of one site or summed.

    Single values may well be −∞ or no number: far out no likelihood can be evaluated.
    """
    everything = np.concatenate([a.ravel() for a in arrays.values()]) if arrays else np.zeros(0)
    if everything.size and not np.isfinite(everything).any():
        raise FederationError(f"{whose} no finite number", hint=_COMPARE)
    values = [a.ravel() for name, a in arrays.items() if ARRAYS[name][0] == "value"]
    if np.any(everything == np.inf) or any(np.any(a > _LARGEST) for a in values):
        raise FederationError(
            f"{whose} infinities, or log likelihoods beyond {_LARGEST:g}, which no rows have", hint=_COMPARE
        )


def check_arrays(arrays: Mapping[str, Array], wanted: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
    """Refuse arrays of other names, shapes or types than those wanted."""
    found = {name: (a.shape, a.dtype) for name, a in arrays.items()}
    expected = {name: (tuple(shape), np.dtype(dtype)) for name, (shape, dtype) in wanted.items()}
    if found != expected:
        raise FederationError("its reply does not have the shapes that were asked for")


def masked_sum(replies: Replies) -> Array:
    """The sum of masked uploads."""
    return unmask_sum([arrays["masked"] for arrays in replies.arrays.values()])


def _text(message: wire.Message, key: str) -> str:
    return printable(" ".join(str(message.values.get(key, "")).split()))[:500]


def _described(opened: Mapping[str, wire.Message], study: Study) -> FederatedData:
    """Names, sizes and columns of the sites as data whose rows are elsewhere."""
    names = sorted(opened)
    features = {name: tuple(opened[name].values.get("features", ())) for name in names}
    shapes = {
        name: [(a.shape[1:], a.dtype) for key, a in sorted(opened[name].arrays.items()) if key[:4] == "row_"]
        for name in names
    }
    for name in names[1:]:
        if features[name] != features[names[0]] or shapes[name] != shapes[names[0]]:
            raise FederationError(
                f"the columns of site {name!r} are not those of site {names[0]!r}",
                hint="declare categories and scaling in the study, so that all sites encode alike",
            )
    parts = tuple(np.zeros((1, *shape), dtype) for shape, dtype in shapes[names[0]])
    one = FederatedData(
        parts[0] if len(parts) == 1 else parts,
        np.array([0, 1]),
        (names[0],),
        features[names[0]],
        study.data.target,
    )
    if study.data.bounds is not None:
        one = one.bounded(*study.data.bounds)
    return one.elsewhere(names, [opened[name].values["rows"] for name in names])
