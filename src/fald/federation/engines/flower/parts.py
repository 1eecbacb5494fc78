"""Messages in one piece: the parts of a message travel with it.

Flower keeps a message as a tree of objects, and each of them is sent and fetched by a request of its own.
Where both ends are ours, a request that carries messages has their objects behind it; the header tells how
long the request itself is. An end that does not know the header is never sent more than Flower would send.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from typing import Any

HEADER = "fald-parts"
_FRAME = struct.Struct("!64sQ")  # a part's number, and how long it is


def join(first: bytes, parts: Mapping[str, bytes]) -> bytes:
    """What travels: a request or an answer of Flower's, and parts of messages behind it.

    Examples
    --------
    >>> split(join(b"request", {"a" * 64: b"one", "b" * 64: b""}), len(b"request"))
    (b'request', {'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa': b'one',
    'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb': b''})
    """
    frames = (_FRAME.pack(number.encode(), len(part)) + part for number, part in parts.items())
    return b"".join((first, *frames))


def split(body: bytes, length: int) -> tuple[bytes, dict[str, bytes]]:
    """Undo ``join``; ``ValueError`` if it is none of its results."""
    if not 0 <= length <= len(body):
        raise ValueError("a message is cut off")
    parts, place = {}, length
    while place < len(body):
        if len(body) - place < _FRAME.size:
            raise ValueError("a part of a message is cut off")
        number, size = _FRAME.unpack_from(body, place)
        place += _FRAME.size
        if len(body) - place < size:
            raise ValueError("a part of a message is cut off")
        parts[number.decode("ascii")] = body[place : place + size]
        place += size
    return body[:length], parts


class Carrier:
    """An interceptor of Flower's HTTP clients that fetches and sends messages in one piece.

    Parameters
    ----------
    understood
        The SuperLink is known to be ours; otherwise an answer in one piece shows it.
    """

    def __init__(self, *, understood: bool = False) -> None:
        self.outgoing: dict[str, bytes] = {}  # parts of the messages that are sent next
        self._come: dict[str, bytes] = {}  # parts of the messages that came last
        self._whole: set[str] = set()  # those messages; that they came, the SuperLink knows
        self._understood = understood

    def intercept(self, context: Any, call_next: Any) -> Any:
        """One request."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, PullObjectResponse

        kind, asked = context.rpc_method.rsplit("/", 1)[1], context.message
        if kind == "PullObject" and asked.object_id in self._come:
            found = PullObjectResponse(object_found=True, object_available=True)
            found.object_content = self._come[asked.object_id]
            return _answer(context, found)
        if kind == "ConfirmMessageReceived" and asked.message_object_id in self._whole:
            return _answer(context, ConfirmMessageReceivedResponse())
        if kind == "PullMessages":
            context.request.headers[HEADER] = "0"
            return self._take(context, call_next(context))
        if kind == "PushMessages" and self._understood:
            whole = join(context.request.content, self.outgoing)
            return call_next(_with(context, whole, len(context.request.content)))
        return call_next(context)

    def _take(self, context: Any, response: Any) -> Any:
        import httpx

        length = response.headers.get(HEADER)
        if response.status_code != httpx.codes.OK or length is None:
            return response
        first, self._come = split(response.content, int(length))
        self._whole, self._understood = {*self._come}, True
        return httpx.Response(httpx.codes.OK, content=first, request=context.request)


def _answer(context: Any, message: Any) -> Any:
    import httpx

    return httpx.Response(httpx.codes.OK, content=message.SerializeToString(), request=context.request)


def _with(context: Any, content: bytes, length: int) -> Any:
    """The same request with more behind it."""
    import httpx

    old = context.request
    headers = [(key, value) for key, value in old.headers.items() if key.lower() != "content-length"]
    request = httpx.Request(old.method, old.url, headers=headers, content=content, extensions=old.extensions)
    request.headers[HEADER] = str(length)
    return dataclasses.replace(context, request=request)
