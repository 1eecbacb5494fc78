"""Runs the loops of a SuperLink's runs: the installed app, in processes that have loaded it before.

``python -m fald.federation.engines.flower.loop …`` takes what ``flower-superexec`` takes, which the SuperLink
would start. It keeps one process that has loaded fald and waits on its standard input for the token of a run,
as with the other engine; a run has a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import subprocess
import sys
import time
from typing import Any

_IDLE = 1.0  # seconds between two looks for a run; a SuperLink of ours waits longer by itself
_LATER = (
    20.0  # seconds after the beginning of a run before the next process is made ready, if it still goes on
)
_WAIT = "--wait"  # in the command of a process that waits
_NEEDED = (
    "fald.federation.engines.flower.app",
    "fald.federation.coordinator.run",
    "fald.fewround.importance",
    "xarray",
    "flwr.superlink.grid",
)


class Ready:
    """A process that waits for a run, and those that have one."""

    def __init__(self, arguments: list[str]):
        self._command = [sys.executable, "-P", "-m", __spec__.name, _WAIT, *arguments]
        self._waiting: subprocess.Popen[bytes] | None = None
        self._running: list[subprocess.Popen[bytes]] = []
        self._began = float("-inf")

    def prepare(self, *, now: bool = False) -> subprocess.Popen[bytes]:
        """Start a process, unless there is one or, without ``now``, a run has just begun."""
        self._running = [process for process in self._running if process.poll() is None]
        early = self._running and time.monotonic() - self._began < _LATER
        if (self._waiting is None or self._waiting.poll() is not None) and (now or not early):
            self._waiting = subprocess.Popen(self._command, stdin=subprocess.PIPE)
        return self._waiting  # type: ignore[return-value]

    def begin(self, token: str) -> None:
        """Give a run to the process that waits, whether it has loaded everything or not."""
        process = self.prepare(now=True)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has just ended: the run fails, and no other one
            process.stdin.write(f"{token}\n".encode())
            process.stdin.close()
        self._running.append(process)
        self._waiting, self._began = None, time.monotonic()


def main(arguments: list[str]) -> None:
    """Look for runs until the SuperLink has gone."""
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.app_utils import start_parent_process_monitor
    from flwr.supercore.constant import TaskType
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.retry import make_simple_http_retry_invoker
    from flwr.supercore.runtime import RuntimeHttpClient

    asked, trusted = _asked(arguments)
    if asked.parent_pid is not None:
        start_parent_process_monitor(asked.parent_pid)
    ready = Ready(arguments)
    ready.prepare()
    with RuntimeHttpClient.from_server_address(
        server_address=asked.runtime_api_address,
        insecure=asked.insecure,
        root_certificates=trusted,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")],
        retry_invoker=make_simple_http_retry_invoker(),
    ) as client:
        question = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        while True:
            looked = time.monotonic()
            found = client.AcquireTask(question)
            if found.HasField("task") and found.token:
                ready.begin(found.token)
            else:
                ready.prepare()
                time.sleep(max(0.0, looked + _IDLE - time.monotonic()))


def wait(arguments: list[str]) -> None:
    """Load what a run needs, wait for one, and be its process; end where none comes any more."""
    asked, trusted = _asked(arguments)
    for module in _NEEDED:
        importlib.import_module(module)
    token = sys.stdin.readline().strip()
    if token:
        serve(asked.runtime_api_address, token, asked.insecure, trusted)


def serve(address: str, token: str, insecure: bool, trusted: bytes | None) -> None:
    """Be the loop of one run; the SuperLink is told how it ended."""
    import httpx
    from flwr.common.config import get_fused_config_from_fab
    from flwr.common.constant import SubStatus
    from flwr.common.serde import context_from_proto, context_to_proto, fab_from_proto, run_from_proto
    from flwr.proto.runtime_pb2 import PullTaskInputRequest, PushTaskOutputRequest
    from flwr.supercore.app_utils import start_parent_process_monitor
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supercore.run import RunNotRunningException
    from flwr.supercore.task_identity import TaskIdentity

    from fald.federation.engines.flower.app import server_app

    start_parent_process_monitor(os.getppid())
    grid = _grid(address, token, insecure, trusted)
    client, context = grid._runtime_client, None
    alive = HeartbeatSender(make_task_heartbeat_fn_http(client))
    ended = PushTaskOutputRequest(sub_status=SubStatus.FAILED, details="the loop was ended")
    alive.start()
    try:
        task = client.PullTaskInput(PullTaskInputRequest())
        context, run = context_from_proto(task.context), run_from_proto(task.run)
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, run.run_id
        TaskIdentity.node_id = context.node_id
        grid.set_run(run)
        context.run_config = get_fused_config_from_fab(fab_from_proto(task.fab).content, run)
        server_app(grid=grid, context=context)
        ended = PushTaskOutputRequest(context=context_to_proto(context), sub_status=SubStatus.COMPLETED)
    except Exception as error:
        ended.details = str(error)
        raise
    finally:
        with contextlib.suppress(httpx.HTTPError, RunNotRunningException):  # of a run that was stopped
            client.PushTaskOutput(ended)
        alive.stop()
        grid.close()


def _grid(address: str, token: str, insecure: bool, trusted: bytes | None) -> Any:
    """Flower's grid, with messages that travel in one piece."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.superlink.grid import HttpGrid

    from fald.federation.engines.flower.parts import Carrier

    carrier = Carrier(understood=True)

    class Grid(HttpGrid):
        def _connect(self) -> None:
            super()._connect()
            client: Any = self._client
            client._interceptors += (carrier,)

        def _try_push_messages(self, run_id: int, messages: Any) -> list[str]:
            messages = list(messages)
            parts = [part for message in messages for part in get_all_nested_objects(message).items()]
            carrier.outgoing = {number: part.deflate() for number, part in parts}
            return super()._try_push_messages(run_id, messages)

    return Grid(address, insecure, trusted, token=token)


def _asked(arguments: list[str]) -> tuple[Any, bytes | None]:
    from flwr.supercore.tls import validate_and_resolve_root_certificates

    parser = argparse.ArgumentParser()
    for name in ("--runtime-api-address", "--root-certificates"):
        parser.add_argument(name)
    parser.add_argument("--parent-pid", type=int)
    parser.add_argument("--insecure", action="store_true")
    asked, _ = parser.parse_known_args(arguments)
    return asked, validate_and_resolve_root_certificates(asked.root_certificates, asked.insecure)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # the SuperLink has gone
        wait(sys.argv[2:]) if sys.argv[1] == _WAIT else main(sys.argv[1:])
