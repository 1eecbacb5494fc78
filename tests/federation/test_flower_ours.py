"""A SuperLink and a SuperNode of ours: what they do beside Flower's, in one process."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fald[flower]'")

import httpx
from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse, PushMessagesResponse
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.message_pb2 import (
    Message as Letter,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesRequest, PushAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink import extensions

from fald.core.errors import ConfigError
from fald.federation.engines.flower import loop, standin, superlink
from fald.federation.engines.flower.link import unwrap, wrap
from fald.federation.engines.flower.parts import HEADER, Carrier, join, split


class Ended(BaseException):
    """The process of a node is ended."""


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    for name in ("run_id", "node_id", "task_id"):  # what Flower sets before it calls an app
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


def letter(content: bytes, kind: str = "train.message") -> Message:
    message = Message(wrap(content), 2, kind, ttl=60.0)
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


def contents(message: Message) -> dict[str, bytes]:
    return {number: part.deflate() for number, part in get_all_nested_objects(message).items()}


class SuperLinkOfOneNode:
    """What a node's connection reaches; ``letters`` may hold exceptions that a question ends in."""

    def __init__(self, *letters: Any):
        self.letters, self.sent, self.confirmed = list(letters), [], []
        self.parts: dict[str, bytes] = {}
        self.connection = standin.Connection(
            Carrier(), 2, self.receive, self.send, self.never, self.never, self.pull, self.push, self.confirm
        )

    def receive(self):
        found = self.letters.pop(0) if self.letters else Ended()
        if found is None or isinstance(found, BaseException):
            if found is None:
                return None
            raise found
        self.parts |= contents(found)
        return found, get_object_tree(found)

    def send(self, message, tree, seconds):
        self.sent.append((message.metadata.reply_to_message_id, message.has_error(), {}))
        return set(self.connection.carrier.outgoing), "session"

    def push(self, run, session, number, content):
        self.sent[-1][2][number] = content

    def pull(self, run, number):
        return self.parts[number]

    def confirm(self, run, number):
        self.confirmed.append(number)

    def never(self, *args):
        raise AssertionError("the submitted app is not fetched")


def echo() -> ClientApp:
    app = ClientApp()

    @app.train("message")
    def work(message, context):
        return Message(wrap(b"got " + (unwrap(message) or b"")), reply_to=message)

    @app.train("wrong")
    def fail(message, context):
        raise ValueError("patient 17, 43 years")

    return app


def test_a_node_answers_without_fetching_the_submitted_app(monkeypatch):
    slept = []
    monkeypatch.setattr(standin, "time", SimpleNamespace(monotonic=time.monotonic, sleep=slept.append))
    ours = SuperLinkOfOneNode(None, letter(b"one"), None, letter(b"two"))
    with pytest.raises(Ended):
        standin.answer_all(echo(), ours.connection)
    assert [
        any(b"got " + word in part for part in sent.values())
        for word, (_, _, sent) in zip((b"one", b"two"), ours.sent, strict=True)
    ] == [True, True]
    assert [number for number, _, _ in ours.sent] == ours.confirmed
    # it looks less often while no run goes on
    assert len(slept) == 2
    assert slept[0] > 2 > 0.3 >= slept[1]


def test_nothing_that_a_message_does_ends_a_node_or_tells_words(monkeypatch, capsys):
    monkeypatch.setattr(standin.time, "sleep", lambda seconds: None)
    gone, lost = letter(b"of a run that has ended"), letter(b"whose parts are lost")
    ours = SuperLinkOfOneNode(
        letter(b"", "train.wrong"), RunNotRunningException(), gone, lost, letter(b"last")
    )
    find = ours.pull

    def pull(run, number):
        if number == gone.object_id:
            raise RunNotRunningException
        if number == lost.object_id:
            raise RuntimeError("patient 17")
        return find(run, number)

    with pytest.raises(Ended):
        standin.answer_all(echo(), ours.connection._replace(pull=pull))
    assert [error for _, error, _ in ours.sent] == [True, False]
    said = capsys.readouterr()
    assert "a message was not understood (ValueError)" in said.err
    assert "a message was not answered (RuntimeError)" in said.err
    assert b"patient" not in b"".join(part for _, _, sent in ours.sent for part in sent.values())
    assert "patient" not in said.out + said.err


def test_parts_are_split_as_they_were_joined():
    parts = {f"{i:064x}": bytes(i) for i in (0, 1, 700)}
    whole = join(b"asked", parts)
    assert split(whole, 5) == (b"asked", parts)
    assert split(b"asked", 5) == (b"asked", {})
    for cut, length in (
        (whole[:-1], 5),
        (whole[: 5 + 71], 5),
        (whole[:4], 5),
        (whole, -5),
        (whole, -(10**6)),
    ):
        with pytest.raises(ValueError, match="cut off"):
            split(cut, length)


def asked(kind: str, message: Any) -> ProtobufRequestContext:
    request = httpx.Request("POST", "http://link/v1", content=message.SerializeToString())
    return ProtobufRequestContext(f"/flwr.proto.Fleet/{kind}", message, request)


def test_a_carrier_asks_for_no_part_that_has_come():
    carrier, seen = Carrier(), []
    first, parts = b"answer", {"a" * 64: b"content"}

    def link(context):
        seen.append(context)
        headers = {HEADER: str(len(first))} if context.rpc_method.endswith("PullMessages") else {}
        return httpx.Response(200, content=join(first, parts), headers=headers, request=context.request)

    assert carrier.intercept(asked("PullMessages", PullMessagesRequest()), link).content == first
    found = carrier.intercept(asked("PullObject", PullObjectRequest(object_id="a" * 64)), link)
    assert PullObjectResponse.FromString(found.content).object_content == b"content"
    confirmed = asked("ConfirmMessageReceived", ConfirmMessageReceivedRequest(message_object_id="a" * 64))
    ConfirmMessageReceivedResponse.FromString(carrier.intercept(confirmed, link).content)
    assert len(seen) == 1
    carrier.intercept(asked("PullObject", PullObjectRequest(object_id="b" * 64)), link)
    assert len(seen) == 2
    carrier.outgoing = {"c" * 64: b"reply"}
    carrier.intercept(asked("PushMessages", PushAppMessagesRequest()), link)
    assert split(seen[-1].request.content, int(seen[-1].request.headers[HEADER]))[1] == carrier.outgoing
    assert int(seen[-1].request.headers["content-length"]) == len(seen[-1].request.content)


def test_a_carrier_sends_flowers_superlink_nothing_more():
    carrier, seen = Carrier(), []

    def link(context):
        seen.append(context.request.content)
        return httpx.Response(200, content=b"answer", request=context.request)

    carrier.intercept(asked("PullMessages", PullMessagesRequest()), link)
    carrier.outgoing = {"c" * 64: b"reply"}
    carrier.intercept(asked("PushMessages", PushAppMessagesRequest()), link)
    assert seen == [b"", b""]


class SuperLinkInside:
    """What stands behind our middleware: one box of messages for a node, and the parts of all."""

    def __init__(self):
        self.box: list[Message] = []
        self.parts: dict[str, bytes] = {}
        self.deleted: list[str] = []
        self.status, self.asked, self.missing = 200, 0, []
        state = SimpleNamespace(
            get_object=lambda run, number: self.parts.get(number),
            store_object=self.store,
            object_store=SimpleNamespace(delete=self.deleted.append),
        )
        factory = SimpleNamespace(state=lambda: state)
        self.app = SimpleNamespace(state=SimpleNamespace(linkstate_factory=factory))
        self.around = superlink.Around(self.answer)

    def store(self, run, session, number, content):
        self.parts[number] = content
        return session == "session"

    async def answer(self, scope, receive, send):
        body, self.asked = (await receive())["body"], self.asked + 1
        answer: Any = PullMessagesResponse()
        if scope["path"] == "/v1/runtime/push-messages":
            self.received = PushAppMessagesRequest.FromString(body)
            answer = PushAppMessagesResponse(objects_to_push=self.missing, session_id="session")
        elif scope["path"] == "/v1/fleet/push-messages":
            answer = PushMessagesResponse(objects_to_push=self.missing, session_id="session")
        elif self.status == 200 and self.box:
            message = self.box.pop()
            answer.messages_list.append(about(message))
            answer.message_object_trees.append(get_object_tree(message))
        headers = [(b"content-type", b"x"), (b"content-length", b"9")]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.SerializeToString()})

    async def post(self, path, body, *, header=None, gone=None):
        """Status, headers and body of an answer; ``gone``: when the asker leaves."""
        events, left = [], [{"type": "http.request", "body": body}]

        async def receive():
            if left:
                return left.pop()
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(event):
            events.append(event)

        headers = [] if header is None else [(HEADER.encode(), str(header).encode())]
        await self.around({"type": "http", "path": path, "headers": headers, "app": self.app}, receive, send)
        return events[0]["status"], dict(events[0]["headers"]), events[1]["body"]


def about(message: Message) -> Letter:
    found = Letter()
    found.metadata.run_id, found.metadata.message_id = 1, message.metadata.message_id
    found.metadata.dst_node_id = message.metadata.dst_node_id
    return found


PULL, PUSH = "/v1/fleet/pull-messages", "/v1/runtime/push-messages"
OF_NODE = PullMessagesRequest(node=Node(node_id=2)).SerializeToString()


def given(*messages: Message) -> tuple[bytes, int]:
    request = PushAppMessagesRequest(
        messages_list=[about(m) for m in messages],
        message_object_trees=[get_object_tree(m) for m in messages],
    )
    first = request.SerializeToString()
    return join(first, {n: part for m in messages for n, part in contents(m).items()}), len(first)


def test_a_node_that_waits_is_told_when_its_message_has_come_and_gets_it_whole():
    async def go():
        inside, message = SuperLinkInside(), letter(b"one")
        inside.missing = list(contents(message))
        asking = asyncio.create_task(inside.post(PULL, OF_NODE, header=0))
        other = asyncio.create_task(
            inside.post(PULL, PullMessagesRequest(node=Node(node_id=3)).SerializeToString())
        )
        await asyncio.sleep(0.05)
        assert (inside.asked, asking.done()) == (2, False)
        inside.box.append(message)
        body, length = given(message)
        status, _, answer = await inside.post(PUSH, body, header=length)
        # nothing is left to send one by one, and Flower has seen its own request only
        assert not PushAppMessagesResponse.FromString(answer).objects_to_push
        assert inside.received.SerializeToString() == body[:length]
        status, headers, answer = await asyncio.wait_for(asking, 5)
        first, parts = split(answer, int(headers[HEADER.encode()]))
        assert status == 200
        assert parts == contents(message)
        assert inside.deleted == [message.object_id]
        assert (
            PullMessagesResponse.FromString(first).messages_list[0].metadata.message_id == message.object_id
        )
        assert int(headers[b"content-length"]) == len(answer)
        assert inside.asked == 4  # twice by the node that waited; no other was woken
        assert not other.done()
        other.cancel()

    asyncio.run(go())


def test_a_node_that_has_left_takes_no_message():
    async def go():
        inside, gone = SuperLinkInside(), asyncio.Event()
        asking = asyncio.create_task(inside.post(PULL, OF_NODE, header=0, gone=gone))
        await asyncio.sleep(0.05)
        gone.set()
        await asyncio.wait_for(asking, 2)
        inside.box.append(letter(b"one"))
        body, length = given(letter(b"one"))
        await inside.post(PUSH, body, header=length)
        assert inside.box  # it is still there for the node when it is back

    asyncio.run(go())


def test_what_flower_turns_away_does_not_wait_and_has_no_parts(monkeypatch):
    async def go():
        inside = SuperLinkInside()
        inside.status, inside.missing = 401, list(contents(letter(b"one")))
        status, headers, _ = await asyncio.wait_for(inside.post(PULL, OF_NODE, header=0), 2)
        assert status == 401
        assert HEADER.encode() not in headers
        assert inside.asked == 1
        body, length = given(letter(b"one"))
        monkeypatch.setattr(superlink, "split", None)  # nor are its parts looked at
        status, *_ = await inside.post(PUSH, body, header=length)
        assert status == 401
        assert not inside.parts
        assert (await inside.post(PULL, OF_NODE, header="9" * 5000))[0] == 401

    asyncio.run(go())


def test_strangers_leave_nothing_behind_and_nobody_misses_news():
    async def go():
        inside = SuperLinkInside()
        inside.status = 401
        for number in range(50):
            await inside.post(PULL, PullMessagesRequest(node=Node(node_id=number)).SerializeToString())
        assert not list(inside.around._news)
        # what is asked in between, in the name of a node that waits, takes no news away from it
        inside.status, answer = 200, inside.answer

        async def between(scope, receive, send):
            await answer(scope, receive, send)
            if scope["path"] == PULL and not inside.box and inside.asked == 51:
                inside.box.append(letter(b"one"))
                body, length = given(letter(b"one"))
                await inside.post(PUSH, body, header=length)
                inside.status = 401
                await inside.post(PULL, OF_NODE)
                inside.status = 200

        inside.around._app = between
        await asyncio.wait_for(inside.post(PULL, OF_NODE, header=0), 2)
        assert not inside.box

    asyncio.run(go())


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
def test_what_is_no_request_is_left_to_flower(kind):
    async def go():
        seen = []

        async def app(*given):
            seen.append(given)

        given = ({"type": kind, "path": PULL}, object(), object())
        await superlink.Around(app)(*given)
        assert seen == [given]

    asyncio.run(go())


def test_a_request_that_was_cut_off_is_not_asked():
    async def go():
        inside, events = SuperLinkInside(), []
        body = given(letter(b"one"))[0]
        left = [{"type": "http.disconnect"}, {"type": "http.request", "body": body, "more_body": True}]

        async def receive():
            return left.pop()

        async def send(event):
            events.append(event)

        await inside.around({"type": "http", "path": PUSH, "headers": [], "app": inside.app}, receive, send)
        assert (inside.asked, events) == (0, [])

    asyncio.run(go())


def test_parts_that_have_not_come_are_fetched_as_flower_does(monkeypatch):
    monkeypatch.setattr(superlink, "_STORED", 0.05)

    async def go():
        inside, message = SuperLinkInside(), letter(b"one")
        inside.box.append(message)
        inside.parts = dict(list(contents(message).items())[1:])
        _, headers, answer = await inside.post(PULL, OF_NODE, header=0)
        assert split(answer, int(headers[HEADER.encode()]))[1] == {}
        assert inside.deleted == []
        # a node of Flower's own gets what Flower gives
        inside.box.append(message)
        inside.parts = contents(message)
        _, headers, answer = await inside.post(PULL, OF_NODE)
        assert HEADER.encode() not in headers
        assert inside.deleted == []
        assert PullMessagesResponse.FromString(answer).messages_list

    asyncio.run(go())


def test_a_question_that_waits_in_vain_is_answered(monkeypatch):
    monkeypatch.setitem(superlink._HOLD, PULL, 0.02)
    inside = SuperLinkInside()
    status, _, answer = asyncio.run(inside.post(PULL, OF_NODE, header=0))
    assert (status, answer, inside.asked) == (200, b"", 2)
    broken = PushAppMessagesRequest().SerializeToString() + b"neither"
    with pytest.raises(Exception, match=r"parsing|[Dd]ecod"):  # Flower's own complaint about a broken request
        asyncio.run(inside.post(PUSH, broken, header=10**6))


def test_a_superlink_of_ours_runs_no_submitted_app(monkeypatch):
    with pytest.raises(ConfigError, match="--isolation: not for this SuperLink"):
        superlink.main(["--insecure", "--isolation=process"])
    command = importlib.import_module("flwr.superlink.cli.flower_superlink")
    for module, name in ((command, "_get_superexec_command"), (extensions, "get_middleware")):
        monkeypatch.setattr(module, name, getattr(module, name))  # is put back afterwards
    started = []
    monkeypatch.setattr(command, "flower_superlink", lambda: started.append(sys.argv))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(superlink.os, "environ", dict(superlink.os.environ))
    theirs = command._get_superexec_command("here:1", None, None, 7, False)
    superlink.main(["--insecure"])
    ours = command._get_superexec_command(
        runtime_address="here:1",
        runtime_certificates=None,
        runtime_root_certificates_path=None,
        parent_pid=7,
        runtime_dependency_install=False,
    )
    assert started == [["flower-superlink", "--insecure"]]
    assert theirs[0] == "flower-superexec"
    assert ours == [sys.executable, "-P", "-m", loop.__name__, *theirs[1:]]
    assert [part.cls for part in extensions.get_middleware()] == [superlink.Around]


class Process:
    """A process that waits for a token."""

    made: list[Process]

    def __init__(self, command, stdin):
        self.command, self.said = command, []
        self.ended: int | None = None
        self.stdin = SimpleNamespace(write=self.said.append, close=lambda: None)
        self.made.append(self)

    def poll(self):
        return self.ended


def test_a_process_waits_for_every_run_and_the_next_one_later(monkeypatch):
    Process.made = []
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(loop, "subprocess", SimpleNamespace(Popen=Process, PIPE=-1))
    monkeypatch.setattr(loop, "time", clock)
    ready = loop.Ready(["--insecure"])
    ready.prepare()
    ready.prepare()
    assert len(Process.made) == 1
    ready.begin("token 1")
    ready.prepare()
    assert [p.said for p in Process.made] == [[b"token 1\n"]]  # the run needs the processors now
    ready.begin("token 2")  # another run does not wait
    assert [p.said for p in Process.made] == [[b"token 1\n"], [b"token 2\n"]]
    assert all("token" not in " ".join(p.command) for p in Process.made)  # which other users could read
    clock.now = 30.0
    ready.prepare()
    assert len(Process.made) == 3
    Process.made[-1].ended = 1  # killed while it waits
    ready.prepare()
    assert len(Process.made) == 4

    def broken(said):
        raise BrokenPipeError

    Process.made[-1].stdin.write = broken  # and after the last look
    ready.begin("token 3")
    ready.begin("token 4")
    assert Process.made[-1].said == [b"token 4\n"]
