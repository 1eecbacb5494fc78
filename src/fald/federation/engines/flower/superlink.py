"""A SuperLink that runs the installed package and nothing else, and that lets its nodes wait.

``python -m fald.federation.engines.flower.superlink …`` takes what ``flower-superlink`` takes. Two things are
different. A run's loop is the installed fald, whatever app was submitted, in a process that has loaded it
before the run came. And nobody needs to ask often: a node that asks for messages when there are none gets its
answer when one comes, or after a while, and messages to and from fald have their parts with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakValueDictionary

from fald.core.errors import ConfigError, FaldError
from fald.federation.engines.flower import require_flower
from fald.federation.engines.flower.parts import HEADER, join, split

_TAKE = ("/v1/fleet/pull-messages", "/v1/runtime/pull-messages")
_GIVE = ("/v1/fleet/push-messages", "/v1/runtime/push-messages")
_RUNS, _BEGIN = "/v1/runtime/acquire-task", "/v1/control/start-run"
# seconds for which a question waits; a SuperLink that is stopped waits for it as well
_HOLD = {_TAKE[0]: 5.0, _TAKE[1]: 1.0, _RUNS: 5.0}
_STORED = 1.0  # seconds for which parts may be on their way into the store, behind their message
_RUN, _REPLY = 0, -1  # what is waited for, beside messages for a node
_LOOP = "fald.federation.engines.flower.loop"
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Around:
    """Middleware around a SuperLink: empty answers wait, and messages have their parts with them.

    Every request passes all of the SuperLink's own checks before anything is done for it, and one that has
    waited passes them again.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self._app = app
        # what is next for a node, or one of the others; kept by those who wait for it alone
        self._news: WeakValueDictionary[int, asyncio.Event] = WeakValueDictionary()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = scope["path"] if scope["type"] == "http" else None
        if path not in (*_TAKE, *_GIVE, _RUNS, _BEGIN):
            await self._app(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:
            return
        if path in _HOLD:
            answer = await self._wait(scope, body, receive)
        else:
            answer = await self._asked(scope, body)
        if path == _BEGIN:
            self._wake(_RUN)
        for event in answer:
            await send(event)

    async def _wait(self, scope: Any, body: bytes, receive: Receive) -> list[Any]:
        """Ask until there is something, or for a while; nothing is taken out for somebody who has left."""
        who = _wanted(scope, body)
        gone, clock = asyncio.ensure_future(receive()), asyncio.get_running_loop().time
        end = clock() + _HOLD[scope["path"]]
        while True:
            news = self._news.setdefault(who, asyncio.Event())
            answer = await self._asked(scope, body)
            left = end - clock()
            if answer[0]["status"] != 200 or answer[1]["body"] or left <= 0:
                break
            some = asyncio.ensure_future(news.wait())
            await asyncio.wait((some, gone), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            some.cancel()
            if gone.done():
                break
        gone.cancel()
        return answer

    async def _asked(self, scope: Any, body: bytes) -> list[Any]:
        """The SuperLink's answer, as a beginning and a body."""
        path, length = scope["path"], _header(scope["headers"])
        asked = body[:length] if path in _GIVE else body
        events: list[Any] = []

        async def into(event: Any) -> None:
            events.append(event)

        await self._app({**scope, "state": dict(scope.get("state", {}))}, _again(asked), into)
        found = b"".join(event.get("body", b"") for event in events)
        headers = [pair for pair in events[0]["headers"] if pair[0] != b"content-length"]
        if events[0]["status"] == 200 and path in _GIVE:
            found = await asyncio.to_thread(_stored, scope, asked, found, body)
            for message in _asked_for(path).FromString(asked).messages_list:
                self._wake(message.metadata.dst_node_id if path == _GIVE[1] else _REPLY)
        elif events[0]["status"] == 200 and path in _TAKE and length is not None and found:
            headers.append((HEADER.encode(), str(len(found)).encode()))
            found = await asyncio.to_thread(_whole, scope, found)
        headers.append((b"content-length", str(len(found)).encode()))
        return [{**events[0], "headers": headers}, {"type": "http.response.body", "body": found}]

    def _wake(self, who: int) -> None:
        news = self._news.pop(who, None)
        if news is not None:
            news.set()


def _asked_for(path: str) -> Any:
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.runtime_pb2 import PushAppMessagesRequest

    return PushMessagesRequest if path == _GIVE[0] else PushAppMessagesRequest


def _stored(scope: Any, asked: bytes, found: bytes, body: bytes) -> bytes:
    """Store the parts that came with messages, as if they had come one by one; what the sender is told."""
    from flwr.proto.fleet_pb2 import PushMessagesResponse
    from flwr.proto.runtime_pb2 import PushAppMessagesResponse

    kind = PushMessagesResponse if scope["path"] == _GIVE[0] else PushAppMessagesResponse
    answer = kind.FromString(found)
    run, parts = _asked_for(scope["path"]).FromString(asked).messages_list[0].metadata.run_id, {}
    with contextlib.suppress(ValueError):  # parts that were cut off are sent again, one by one
        parts = split(body, len(asked))[1]
    state = scope["app"].state.linkstate_factory.state()
    with _at_once(state):
        missing = [
            number
            for number in answer.objects_to_push
            if number not in parts or not state.store_object(run, answer.session_id, number, parts[number])
        ]
    answer.objects_to_push[:] = missing
    return answer.SerializeToString()


def _whole(scope: Any, found: bytes) -> bytes:
    """Messages with all of their parts behind them; one that is not complete is fetched as Flower does."""
    from flwr.proto.fleet_pb2 import PullMessagesResponse
    from flwr.proto.runtime_pb2 import PullAppMessagesResponse
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    kind = PullMessagesResponse if scope["path"] == _TAKE[0] else PullAppMessagesResponse
    answer = kind.FromString(found)
    state, parts = scope["app"].state.linkstate_factory.state(), {}
    end = time.monotonic() + _STORED
    for message, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
        run, numbers = message.metadata.run_id, [part.object_id for part in iterate_object_tree(tree)]
        own = [state.get_object(run, number) for number in numbers]
        while not all(own) and time.monotonic() < end:
            time.sleep(0.02)
            own = [state.get_object(run, number) for number in numbers]
        if all(own):
            parts.update(zip(numbers, own, strict=True))
            state.object_store.delete(tree.object_id)  # what a receiver's confirmation would do
    return join(found, parts)


def _at_once(state: Any) -> Any:
    """One transaction, where there is a database."""
    return state.session() if hasattr(state, "session") else contextlib.nullcontext()


def _header(headers: Any) -> int | None:
    value = dict(headers).get(HEADER.encode(), b"")
    return int(value) if value.isdigit() and len(value) < 20 else None


def _wanted(scope: Any, body: bytes) -> int:
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from google.protobuf.message import DecodeError

    try:
        if scope["path"] == _TAKE[0]:
            return PullMessagesRequest.FromString(body).node.node_id
    except DecodeError:
        pass  # Flower says what is wrong with it
    return _RUN if scope["path"] == _RUNS else _REPLY


async def _body(receive: Receive) -> bytes | None:
    """What was asked; None: the asker has left in the middle of it."""
    parts, more = [], True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            return None
        parts.append(event.get("body", b""))
        more = event.get("more_body", False)
    return b"".join(parts)


def _again(body: bytes) -> Receive:
    """Read a body that has been read."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return left.pop() if left else await asyncio.Event().wait()

    return receive


def main(arguments: list[str]) -> None:
    """Be a SuperLink until the process is ended."""
    require_flower()
    if any(word.split("=")[0] == "--isolation" for word in arguments):
        raise ConfigError(
            "--isolation: not for this SuperLink, which runs no submitted app", hint="leave it out"
        )
    os.environ |= {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }
    from flwr.superlink import extensions
    from starlette.middleware import Middleware

    command: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    runner = command._get_superexec_command
    command._get_superexec_command = lambda **about: [sys.executable, "-P", "-m", _LOOP, *runner(**about)[1:]]
    extensions.get_middleware = lambda: (Middleware(Around),)  # type: ignore[arg-type]
    sys.argv = ["flower-superlink", *arguments]
    command.flower_superlink()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except FaldError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(int(error.exit_code))
