"""The bytes of a message: a JSON header, then arrays as they are in memory. Nothing in them can be executed.

Layout: ``FALD`` and a version byte, the length of the header as four bytes, the header (kind, plain values,
and name, type and shape of every array), the arrays one after the other, little-endian.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fald.core.errors import FederationError

Array = NDArray[Any]

_MARK = b"FALD\x01"
_TYPES = ("bool", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")
_NAMES = {order: kind for kind in _TYPES for order in (np.dtype(kind), np.dtype(kind).newbyteorder())}
_MOST_HEADER = 4 * 2**20
_MOST_AXES = 32  # of an array; the product of many more would take minutes
PREPARED = "prepared_"  # in front of the names of what sites send before the first round
PASSED = "passed_"  # in front of the names of what the coordinator passes on of the round before
SHARE = f"{PASSED}share"  # what each site is shown alone
PROTOCOL = 3  # of the messages; both ends must have the same
MOST_BYTES = 2**30


class _Fields(NamedTuple):
    kind: str
    values: dict[str, Any]
    arrays: dict[str, Array]


class Message(_Fields):
    """What travels.

    Attributes
    ----------
    kind
        What it asks for, or ``"reply"`` or ``"refusal"``.
    values
        Plain values by name.
    arrays
        Arrays by name.
    """

    @functools.cached_property
    def hashes(self) -> dict[str, str]:
        """Hash of every array with its type and shape, but of what is shown to this site alone."""
        return {name: hash_of(a) for name, a in self.arrays.items() if name != SHARE}


def pack(
    kind: str, values: Mapping[str, Any] | None = None, arrays: Mapping[str, Any] | None = None
) -> bytes:
    """Write a message.

    Examples
    --------
    >>> unpack(pack("ask", {"round": 3}, {"x": np.arange(2.0)})).arrays["x"].tolist()
    [0.0, 1.0]
    """
    named = {name: np.asarray(a) for name, a in (arrays or {}).items()}
    plain = {name: np.ascontiguousarray(a, a.dtype.newbyteorder("<")) for name, a in named.items()}
    for name, a in named.items():
        if a.dtype not in _NAMES:
            raise FederationError(f"array {name!r} of type {a.dtype} cannot be sent")
    shapes = [[name, _NAMES[a.dtype], list(a.shape)] for name, a in named.items()]
    header = json.dumps({"kind": kind, "values": dict(values or {}), "arrays": shapes}).encode()
    header += b" " * (-(len(_MARK) + 4 + len(header)) % 8)  # arrays can be read where they are
    return b"".join([_MARK, struct.pack("<I", len(header)), header, *(a.data for a in plain.values())])


def unpack(content: bytes, most: int = MOST_BYTES) -> Message:
    """Read a message that may come from anybody.

    Parameters
    ----------
    content
        The bytes.
    most
        Bytes that a message may have.

    Raises
    ------
    FederationError
        If it is too large or not a message.

    Notes
    -----
    Arrays are views of the bytes where they can be, and cannot be written to.
    """
    if len(content) > most:
        raise FederationError(f"the message has {len(content):,} bytes; at most {most:,} are expected")
    try:
        return _read(memoryview(content))
    except (ValueError, LookupError, TypeError, OverflowError, struct.error, RecursionError) as error:
        raise FederationError(f"not a message of this version of fald ({type(error).__name__})") from None


def _read(content: memoryview) -> Message:
    start = len(_MARK)
    (length,) = struct.unpack_from("<I", content, start)
    if content[:start] != _MARK or length > _MOST_HEADER:
        raise ValueError
    place = start + 4 + length
    header = json.loads(bytes(content[start + 4 : place]), object_pairs_hook=_once)
    json.dumps(header, ensure_ascii=False).encode()  # half a character is no text
    if set(header) != {"kind", "values", "arrays"}:
        raise ValueError
    arrays: dict[str, Array] = {}
    for name, kind, shape in header["arrays"]:
        fits = isinstance(name, str) and name not in arrays and kind in _TYPES
        if not fits or len(shape) > _MOST_AXES or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError
        dtype = np.dtype(kind).newbyteorder("<")
        size = dtype.itemsize * math.prod(shape)
        if kind == "bool" and np.any(np.frombuffer(content[place : place + size], np.uint8) > 1):
            raise ValueError
        part = np.frombuffer(content[place : place + size], dtype).reshape(shape)
        arrays[name] = part.astype(np.dtype(kind), copy=not part.flags.aligned)
        place += size
    if place != len(content) or not isinstance(header["values"], dict) or not isinstance(header["kind"], str):
        raise ValueError
    return Message(header["kind"], header["values"], arrays)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON in which no name stands twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


def hash_of(array: Array) -> str:
    """Hash of an array's numbers, type and shape."""
    plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return f"{plain.dtype.str}{list(plain.shape)}{hashlib.sha256(plain.data).hexdigest()}"


def digest(content: bytes, message: Message | None = None) -> bytes:
    """A hash by which a site recognises a task that it has answered.

    Without what a message shows this site alone, so that all sites that were asked alike have the same.
    """
    if message is None:
        return hashlib.sha256(content).digest()
    header = len(content) - sum(a.nbytes for a in message.arrays.values())
    return digest(b"".join([content[:header], *(found.encode() for found in message.hashes.values())]))
