"""The coordinator's end of Flower: messages to named sites through the grid of a ServerApp.

Flower knows nodes by numbers, and a node that restarts without node authentication gets another number. So
every new node is asked for its site's name, and messages go to names.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import RunNotRunningException

from fald.core.errors import FederationError
from fald.federation.link import Arrival

ASK_NAME = "query.name"  # kinds of message, as Flower spells them
WORK = "train.message"
_RECORD = "fald"  # the one record of a message
_POLL = 0.2  # seconds between two looks for replies
_LOOK = 3.0  # seconds between two looks for new nodes; a node looks for messages as often
_LOST = (3, 4, 5)  # Flower's codes of messages, replies and nodes that are gone: no answer of the site itself


class _Envelope(NamedTuple):
    """A message under way."""

    site: str
    node: int


class FlowerLink:
    """Sites that are nodes of a Flower federation.

    The first call of ``send`` waits for the nodes of all sites; ``call`` asks for them before.

    Parameters
    ----------
    grid
        What Flower hands to a ServerApp.
    sites
        Names of the sites; nodes with other names are left alone.
    wait
        Seconds within which the nodes of all sites must have appeared.
    """

    def __init__(self, grid: Grid, sites: Sequence[str], *, wait: float = 120.0):
        self._grid, self._sites, self._wait = grid, sorted(sites), wait
        self._nodes: dict[str, int] = {}  # node by site
        self._asked: dict[int, str] = {}  # by node, the open question for its name; "" after the answer
        self._replaced: set[int] = set()  # nodes whose place another took; one that still answers is a twin
        self._unnamed: dict[int, str] = {}  # nodes that could not tell their name, and why
        self._given_up: set[str] = set()  # sites that were waited for in vain
        self._online: set[int] = set()
        self._looked = float("-inf")
        self._found = False

    @property
    def names(self) -> Sequence[str]:
        """All sites of the federation, sorted."""
        return self._sites

    def send(
        self, messages: Mapping[str, bytes], *, timeout: float, enough: int | None = None
    ) -> dict[str, Arrival]:
        """Send one message to each of some sites and wait for replies.

        A site whose node has gone is waited for until the time-out, and gets its message when it is back;
        if it is not, it is absent at once in later calls, until it is back.

        Raises
        ------
        FederationError
            If a site does not appear at all, or two nodes claim to be one.
        """
        if not self._found:
            self._find_all()
        began, wanted = time.monotonic(), len(messages) if enough is None else enough
        arrivals: dict[str, Arrival] = {}
        under_way: dict[str, _Envelope] = {}
        while True:
            self._look()
            elapsed = time.monotonic() - began
            self._push(messages, arrivals, under_way, timeout - elapsed)
            self._pull(arrivals, under_way, began)
            replies = sum(arrival.content is not None for arrival in arrivals.values())
            missing = [site for site in messages if site not in arrivals]
            hopeless = not under_way and self._given_up.issuperset(missing)
            if replies >= wanted or hopeless or elapsed >= timeout:
                break
            time.sleep(_POLL)
        sent = {envelope.site for envelope in under_way.values()}
        for site in missing:
            arrivals[site] = Arrival(None, elapsed, "late" if site in sent else "absent")
        if elapsed >= timeout:
            self._given_up.update(set(missing) - sent)
        return {site: arrivals[site] for site in sorted(arrivals)}

    def call(self) -> None:
        """Ask the nodes that are there for their names, and do not wait: they look for messages by and by."""
        self._look()

    def _find_all(self) -> None:
        """Wait until every site has a node, and then a little for others that might claim its name."""
        began = complete = time.monotonic()
        while not self._found:
            self._look()
            self._pull({}, {}, began)
            now = time.monotonic()
            missing = [site for site in self._sites if site not in self._nodes]
            complete = now if missing else complete
            if missing and now - began >= self._wait:
                raise FederationError(self._who_is_missing(missing), hint="start their SuperNodes")
            silent = any(self._asked.get(node) for node in self._online)
            self._found = not missing and (not silent or now - complete >= 3 * _LOOK)
            time.sleep(_POLL)

    def _who_is_missing(self, missing: Sequence[str]) -> str:
        told = f"no node of {', '.join(missing)} appeared within {self._wait:g} s"
        if self._nodes:
            told += f"; present: {', '.join(sorted(self._nodes))}"
        return told + "".join(f"; node {node}: {why}" for node, why in sorted(self._unnamed.items()))

    def _look(self) -> None:
        """See which nodes are online, and ask those that are new for their names."""
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        with _reaching_superlink():
            self._looked, self._online = now, set(self._grid.get_node_ids())
        self._ask(*sorted(self._online - set(self._asked)))

    def _ask(self, *nodes: int) -> None:
        numbers = self._post(dict.fromkeys(nodes, b""), ASK_NAME, self._wait)
        self._asked.update({node: number for node, number in zip(nodes, numbers, strict=True) if number})

    def _post(self, contents: Mapping[int, bytes], kind: str, seconds: float) -> list[str | None]:
        """Hand messages for some nodes to Flower; their numbers, None for a node that has just gone."""
        ttl = max(seconds, 1.0)
        letters = [Message(wrap(content), node, kind, ttl=ttl) for node, content in contents.items()]
        if not letters:
            return []
        with _reaching_superlink():
            numbers = list(self._grid.push_messages(letters))
        return [number or None for number in numbers] or [None] * len(letters)

    def _push(
        self,
        messages: Mapping[str, bytes],
        arrivals: Mapping[str, Arrival],
        under_way: dict[str, _Envelope],
        left: float,
    ) -> None:
        """Send what has not gone to a site's present node yet."""
        present = {self._nodes[site]: site for site in sorted(set(messages) - set(arrivals))}
        new = [
            node
            for node, site in present.items()
            if node in self._online and _Envelope(site, node) not in under_way.values() and left > 0
        ]
        numbers = self._post({node: messages[present[node]] for node in new}, WORK, left)
        for node, number in zip(new, numbers, strict=True):
            if number:
                under_way[number] = _Envelope(present[node], node)
                self._given_up.discard(present[node])

    def _pull(self, arrivals: dict[str, Arrival], under_way: dict[str, _Envelope], began: float) -> None:
        """Take in replies and names."""
        asking = {number: node for node, number in self._asked.items() if number}
        numbers = [*under_way, *asking]
        with _reaching_superlink():
            replies = list(self._grid.pull_messages(numbers)) if numbers else []
        for reply in replies:
            number = reply.metadata.reply_to_message_id
            lost = reply.has_error() and reply.error.code in _LOST
            content, problem = _open(reply)
            if number in asking:
                self._name(asking[number], content, problem, lost)
            elif number in under_way:
                site = under_way.pop(number).site
                if site in arrivals and content is not None:
                    raise _twins(site)
                if not lost:
                    arrivals.setdefault(site, Arrival(content, time.monotonic() - began, problem))

    def _name(self, node: int, content: bytes | None, problem: str, lost: bool) -> None:
        """Learn which site a node is."""
        self._asked[node] = ""
        if content is None:
            self._unnamed[node] = problem
            if lost or not self._found:
                del self._asked[node]  # ask again: what was wrong there may have been mended
            return
        self._unnamed.pop(node, None)
        site = content.decode("utf-8", "replace")
        if site not in self._sites:
            return
        if node in self._replaced:
            raise _twins(site)
        former = self._nodes.get(site)
        if former is not None and former in self._online:  # dead since a moment, or a twin: it is asked again
            self._replaced.add(former)
            self._ask(former)
        self._nodes[site] = node


@contextlib.contextmanager
def _reaching_superlink() -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, RunNotRunningException) as error:
        raise FederationError(
            f"the SuperLink takes no messages of this run any more ({type(error).__name__})",
            hint="if nobody has stopped it, the log of the SuperLink says why",
        ) from error


def _twins(site: str) -> FederationError:
    return FederationError(
        f"two nodes say that they are site {site}", hint="stop one of them; every site has its own site.toml"
    )


def wrap(content: bytes) -> RecordDict:
    """The content of a message or reply as Flower carries it; nothing: the site could not answer.

    Examples
    --------
    >>> wrap(b"any bytes")["fald"]["content"]
    b'any bytes'
    """
    return RecordDict({_RECORD: ConfigRecord({"content": content})})


def unwrap(message: Message) -> bytes | None:
    """Undo ``wrap``; None for a message that is not ours."""
    record = message.content.get(_RECORD)
    content = record.get("content") if isinstance(record, ConfigRecord) else None
    return content if isinstance(content, bytes) else None


def _open(reply: Message) -> tuple[bytes | None, str]:
    """Content of a reply, or why there is none; never the words of an exception at the site."""
    if reply.has_error():
        return None, f"its app failed (Flower's error {reply.error.code})"
    content = unwrap(reply)
    if content is None:
        return None, "its reply is no message of fald"
    if not content:
        return None, "its settings cannot be read; the log of its SuperNode says why"
    return content, ""
