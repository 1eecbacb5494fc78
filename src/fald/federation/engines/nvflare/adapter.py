"""The two classes that NVIDIA FLARE loads: one in the coordinator's job process, one in every site's.

They carry bytes. The coordinator's process runs the whole study; a site's process answers message by message.
Messages are pushed over the engine's own connections, so a round waits for no polling interval.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode as TaskCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply as make_cell_reply
from nvflare.fuel.f3.cellnet.utils import new_cell_message

from fald.core.errors import FederationError
from fald.federation.link import Arrival

CHANNEL, TOPIC, READY = "fald", "message", "ready"
CONTENT = "content"
_LOOK = 0.25  # seconds between looks at whether the engine has aborted the job
_PROBLEMS = {
    ReturnCode.TIMEOUT: "late",
    ReturnCode.TARGET_UNREACHABLE: "absent",
    ReturnCode.COMM_ERROR: "absent",
    ReturnCode.PROCESS_EXCEPTION: "failed; its log says why",
}


class CellLink:
    """``Link`` over the connections of a running job.

    Parameters
    ----------
    names
        Sites of the job.
    request
        Sends one message to one site and waits: ``request(site, topic, content, timeout=, give_up=)`` returns
        the reply and the engine's return code.
    is_aborted
        Whether the engine wants the job to end.
    """

    def __init__(
        self,
        names: Sequence[str],
        request: Callable[..., tuple[bytes | None, str]],
        is_aborted: Callable[[], bool],
    ):
        self._names, self._request, self._is_aborted = sorted(names), request, is_aborted

    @property
    def names(self) -> Sequence[str]:
        """All sites, sorted."""
        return list(self._names)

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until every site's job process listens; after ``seconds`` go on, and miss whoever does not."""
        waiting, end = set(self._names), time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            found = self._send(dict.fromkeys(waiting, b""), READY, timeout=2.0, needed=len(waiting))
            waiting -= {name for name, arrival in found.items() if arrival.content is not None}
            time.sleep(0.1 if waiting else 0.0)

    def send(
        self, messages: Mapping[str, bytes], *, timeout: float, enough: int | None = None
    ) -> dict[str, Arrival]:
        """Send one message to each of some sites; every request waits in a thread of its own."""
        needed = len(messages) if enough is None else min(enough, len(messages))
        return self._send(messages, TOPIC, timeout, needed)

    def _send(
        self, messages: Mapping[str, bytes], topic: str, timeout: float, needed: int
    ) -> dict[str, Arrival]:
        arrived: queue.SimpleQueue[tuple[str, Arrival]] = queue.SimpleQueue()
        give_up, began = Signal(), time.monotonic()

        def ask(name: str) -> None:
            try:
                content, code = self._request(name, topic, messages[name], timeout=timeout, give_up=give_up)
            except Exception:  # what the engine raises for a broken connection varies
                content, code = None, ReturnCode.COMM_ERROR
            problem = "" if content is not None else _PROBLEMS.get(code, code.replace("_", " "))
            arrived.put((name, Arrival(content, time.monotonic() - began, problem)))

        for name in messages:
            threading.Thread(target=ask, args=(name,), daemon=True, name=f"fald-{name}").start()
        found: dict[str, Arrival] = {}
        try:
            while len(found) < len(messages) and sum(a.content is not None for a in found.values()) < needed:
                left = began + timeout - time.monotonic()
                if self._is_aborted():
                    raise FederationError(
                        "the engine ended the job: a site's process died, or somebody stopped the run",
                        hint="go on with --resume; fald federation status shows who is there",
                    )
                if left <= 0:
                    break
                try:
                    name, arrival = arrived.get(timeout=min(left, _LOOK))
                except queue.Empty:
                    continue
                found[name] = arrival
        finally:
            give_up.trigger(True)  # threads that still wait for a reply end; it would be dropped
        seconds = time.monotonic() - began
        return {name: found.get(name, Arrival(None, seconds, "late")) for name in sorted(messages)}


class Coordinator(Controller):
    """Runs a study in the coordinator's job process.

    Parameters
    ----------
    job
        What ``serve_job`` takes, as base64 of JSON: the engine would replace braces.
    """

    def __init__(self, job: str):
        super().__init__()
        self._job: dict[str, Any] = json.loads(base64.b64decode(job))

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to prepare."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to release."""

    def process_result_of_unknown_task(
        self, client: Any, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """There are no tasks."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run the study; the engine calls this once."""
        from fald.federation.coordinator.run import serve_job
        from fald.study.schema import FederationSection

        link = _job_link(abort_signal, fl_ctx)
        options = self._job["study"].get("federation", {})
        link.wait_until_ready(options.get("opening-timeout", FederationSection().opening_timeout))
        code = serve_job(link, self._job)
        if code:
            self.system_panic(f"the run ended with exit code {code}", fl_ctx)


def _job_link(abort_signal: Signal, fl_ctx: FLContext) -> CellLink:
    engine: Any = fl_ctx.get_engine()
    cell, job_id = engine.get_cell(), str(fl_ctx.get_job_id())
    addresses = {c.name: FQCN.join([c.get_fqcn(), job_id]) for c in engine.get_clients()}

    def request(
        name: str, topic: str, content: bytes, *, timeout: float, give_up: Signal
    ) -> tuple[bytes | None, str]:
        reply = cell.send_request(
            channel=CHANNEL,
            topic=topic,
            target=addresses[name],
            request=new_cell_message({}, {CONTENT: content}),
            timeout=timeout,
            optional=True,
            abort_signal=give_up,
        )
        code = reply.get_header(MessageHeaderKey.RETURN_CODE, ReturnCode.OK)
        answer = reply.payload.get(CONTENT) if isinstance(reply.payload, dict) else None
        return (answer if code == ReturnCode.OK and isinstance(answer, bytes) else None), code

    return CellLink(list(addresses), request, lambda: bool(abort_signal.triggered))


class SiteExecutor(Executor):
    """Answers the coordinator's messages in a site's job process.

    The site's settings come from the folder that the environment variable ``FALD_SITE`` names, never from the
    job. Messages are answered one after the other, in one thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._worker: Future[Callable[[bytes], bytes]] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fald-site")
        self._coordinator = ""
        self.register_event_handler(EventType.START_RUN, self._start)
        self.register_event_handler(EventType.END_RUN, self._end)

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Refuse: work reaches a site as messages, not as tasks."""
        return make_reply(TaskCode.TASK_UNKNOWN)

    def _start(self, event_type: str, fl_ctx: FLContext) -> None:
        self._coordinator = FQCN.join([FQCN.ROOT_SERVER, str(fl_ctx.get_job_id())])
        self._worker = self._thread.submit(_site_worker)  # reads the rows before the first message comes
        engine: Any = fl_ctx.get_engine()
        cell = engine.get_cell()
        cell.register_request_cb(channel=CHANNEL, topic=TOPIC, cb=self._receive)
        cell.register_request_cb(channel=CHANNEL, topic=READY, cb=lambda request: _reply(b""))

    def _end(self, event_type: str, fl_ctx: FLContext) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _receive(self, request: Any) -> Any:
        """Take a message off the engine's thread; only the coordinator's job process is answered."""
        if request.get_header(MessageHeaderKey.ORIGIN) != self._coordinator:
            return make_cell_reply(ReturnCode.AUTHENTICATION_ERROR)
        content = request.payload.get(CONTENT) if isinstance(request.payload, dict) else None
        if not isinstance(content, bytes):
            return make_cell_reply(ReturnCode.INVALID_REQUEST)
        try:
            return self._thread.submit(self._answer, content)
        except RuntimeError:  # the job has ended
            refused: Future[Any] = Future()
            refused.set_result(make_cell_reply(ReturnCode.SERVICE_UNAVAILABLE))
            return refused

    def _answer(self, content: bytes) -> Any:
        assert self._worker is not None
        handle = self._worker.result()
        return _reply(handle(content))


def _reply(content: bytes) -> Any:
    return new_cell_message({MessageHeaderKey.RETURN_CODE: ReturnCode.OK}, {CONTENT: content})


def _site_worker() -> Callable[[bytes], bytes]:
    folder = os.environ["FALD_SITE"]
    from fald.federation.site.settings import read_site
    from fald.federation.site.worker import SiteWorker

    return SiteWorker(read_site(Path(folder))).handle
