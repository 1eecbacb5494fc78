"""What carries messages between the coordinator and the sites.

A message is bytes that only ``fald.federation.wire`` reads. An engine's adapter implements ``Link`` at the
coordinator and hands every message that reaches a site to ``SiteWorker.handle`` there; it never looks inside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol


class Arrival(NamedTuple):
    """What came back from a site.

    Attributes
    ----------
    content
        The reply; None when there is none.
    seconds
        Time from sending to arrival.
    problem
        Why there is no reply, in a few words without data values: ``"late"`` after the time-out,
        ``"absent"`` when the engine knows that the site is gone.
    """

    content: bytes | None
    seconds: float
    problem: str = ""


class Link(Protocol):
    """One way to reach the sites of a federation."""

    @property
    def names(self) -> Sequence[str]:
        """All sites of the federation, sorted."""
        ...

    def send(
        self, messages: Mapping[str, bytes], *, timeout: float, enough: int | None = None
    ) -> dict[str, Arrival]:
        """Send one message to each of some sites and wait for replies.

        Parameters
        ----------
        messages
            Message by site.
        timeout
            Seconds after which a site counts as late.
        enough
            Return as soon as so many replies have arrived; None: all. Replies that come later are dropped.

        Returns
        -------
        dict
            An arrival for every site that was asked, in the order of the sites' names.
        """
        ...


class LocalLink:
    """Sites in this process, one after the other: the federation that simulations and tests use.

    Parameters
    ----------
    handlers
        By site, what answers a message, usually ``SiteWorker.handle``.
    """

    def __init__(self, handlers: Mapping[str, Callable[[bytes], bytes]]):
        self._handlers = dict(handlers)

    @property
    def names(self) -> Sequence[str]:
        """All sites, sorted."""
        return sorted(self._handlers)

    def send(
        self, messages: Mapping[str, bytes], *, timeout: float, enough: int | None = None
    ) -> dict[str, Arrival]:
        """Hand each message to its site."""
        arrivals: dict[str, Arrival] = {}
        for name in sorted(messages):
            if enough is not None and len(arrivals) >= enough:
                arrivals[name] = Arrival(None, 0.0, "late")
                continue
            began = time.monotonic()
            content = self._handlers[name](messages[name])
            arrivals[name] = Arrival(content, time.monotonic() - began)
        return arrivals
