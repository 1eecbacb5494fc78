"""What a message to a site looks like, as a table: for every kind its values and arrays, and their rules.

Nothing of a message is used before it is compared with this table, and nothing that it does not name is let
through. The rules say nothing about rows, so a refusal by them may say which was broken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fald.core.errors import FederationError
from fald.federation.wire import PASSED, PREPARED, Message

_ID = re.compile(r"[0-9a-f]{16}")
_MOST_SITES = 512


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and bool(_ID.fullmatch(value))


def _is_count(value: Any, least: int = 1) -> bool:
    return type(value) is int and least <= value < 2**31


def _is_start(value: Any) -> bool:
    return _is_count(value, 0)


def _are_names(value: Any) -> bool:
    plain = isinstance(value, list) and all(isinstance(n, str) and 0 < len(n) <= 200 for n in value)
    return plain and 1 <= len(value) <= _MOST_SITES and value == sorted(set(value))


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= _MOST_SITES and all(map(_is_count, value))


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


Rule = tuple[Callable[[Any], bool], str]
_RUN: dict[str, Rule] = {
    "run": (_is_id, "16 hexadecimal digits"),
    "session": (_is_id, "16 hexadecimal digits"),
}
_ROUND: dict[str, Rule] = {
    **_RUN,
    "round": (_is_count, "a number of rounds"),
    "attempt": (_is_count, "a number of attempts"),
}
_NAMES: Rule = (_are_names, "names of sites, in order")


class Schema(NamedTuple):
    """What one kind of message has.

    Attributes
    ----------
    values
        By name, whether a value will do, and what it must be in words. All must be there.
    arrays
        Names of its arrays, or how they begin where they end in ``_``; None: what a request may have.
    """

    values: Mapping[str, Rule]
    arrays: tuple[str, ...] | None = ()


MESSAGES: Mapping[str, Schema] = {
    "hello": Schema({}),
    "open": Schema(
        {
            **_RUN,
            "version": (_is(str), "a version"),
            "study": (_is(dict), "a study"),
            "secure": (_is(bool), "true or false"),
            "names": _NAMES,
        }
    ),
    "begin": Schema(
        {
            **_RUN,
            "names": _NAMES,
            "sizes": (_are_sizes, "rows of every site"),
            "hellos": (_is(dict, type(None)), "what sites say of themselves"),
            "identities": (_is(dict), "public keys"),
        },
        (PREPARED,),
    ),
    "ask": Schema(_ROUND, None),
    "round": Schema(
        {**_ROUND, "leaves": (_is_count, "a number of arrays"), "saved": (_is_start, "a number of rounds")},
        ("weight", "leaf_", PASSED),
    ),
    "end": Schema({"run": _RUN["run"], "session": _RUN["session"]}),
}


def check_message(message: Message) -> None:
    """Refuse a message that is not in the table.

    Raises
    ------
    FederationError
        With the kind, the name and the rule; never with what came in its place.

    Examples
    --------
    >>> check_message(Message("end", {"run": "0" * 16, "session": "1" * 16}, {}))
    >>> check_message(Message("end", {"run": "0" * 16}, {}))
    Traceback (most recent call last):
    fald.core.errors.FederationError: session of a message 'end' must be 16 hexadecimal digits
    """
    schema = MESSAGES.get(message.kind)
    if schema is None:
        raise FederationError(f"unknown kind of message {message.kind[:40]!r}")
    for name, (holds, rule) in schema.values.items():
        if name not in message.values or not holds(message.values[name]):
            raise FederationError(f"{name} of a message {message.kind!r} must be {rule}")
    if set(message.values) - set(schema.values):
        raise FederationError(f"a message {message.kind!r} has a value that it should not have")
    for name in message.arrays:
        known = (name,) if schema.arrays is None else schema.arrays
        if not any(name == each or (each[-1] == "_" and name.startswith(each)) for each in known):
            raise FederationError(f"a message {message.kind!r} has an array that it should not have")
    for name, array in message.arrays.items():
        if not name.startswith(PASSED) and not np.isfinite(array).all():
            raise FederationError(f"an array of a message {message.kind!r} has numbers that are not finite")
