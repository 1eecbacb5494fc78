"""Run in place of Flower's programs at a site: the installed app, whatever app was submitted.

``standin.py …`` is a SuperNode that looks for messages more often while a run goes on. In place of the
program ``flower-superexec`` it has a thread, which answers every message with the installed package: Flower
and JAX are loaded, and programs are compiled, once for a site, not for every message.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
import traceback
from types import SimpleNamespace
from typing import Any

_POLL, _IDLE = 0.1, 1.0  # seconds between looks for a task, and while no run goes on
_QUICK, _BUSY = 0.3, 60.0  # seconds between a node's looks for messages, for so long after the last one
_heard = [float("-inf")]  # when the last message came


def supernode(arguments: list[str]) -> None:
    """Do what ``flower-supernode`` does, without its pauses of three seconds between the rounds of a run."""
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli import flower_supernode

    pull = loop._pull_and_store_message

    def pull_and_note(*args: Any, **named: Any) -> Any:
        found = pull(*args, **named)
        if found is not None:
            _heard[0] = time.monotonic()
        return found

    def sleep(seconds: float) -> None:
        time.sleep(min(seconds, _QUICK) if _is_busy() else seconds)

    loop._pull_and_store_message = pull_and_note
    loop.time = SimpleNamespace(**{**vars(time), "sleep": sleep})  # type: ignore[attr-defined]
    loop.subprocess = SimpleNamespace(Popen=_start)  # type: ignore[attr-defined]
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def _start(command: list[str]) -> None:
    """Answer messages in a thread, in place of the program that Flower would start."""
    threading.Thread(target=_superexec, args=(command[1:],), daemon=True, name="fald-site").start()


def _superexec(arguments: list[str]) -> None:
    """Answer until the process ends; it ends where no more answers would come."""
    try:
        answer_all(arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # whatever keeps sites running starts it again


def answer_all(arguments: list[str]) -> None:
    """Answer the messages that reach this SuperNode, one after the other, until it ends."""
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType
    from flwr.supercore.tls import validate_and_resolve_root_certificates

    parser = argparse.ArgumentParser()
    for name in ("--runtime-api-address", "--root-certificates"):
        parser.add_argument(name)
    parser.add_argument("--insecure", action="store_true")
    asked, _ = parser.parse_known_args(arguments)
    trusted = validate_and_resolve_root_certificates(asked.root_certificates, asked.insecure)
    node = SimpleNamespace(address=asked.runtime_api_address, insecure=asked.insecure, trusted=trusted)
    client = _client(node, "SuperExec")
    # takes its time, before the first message
    from fald.federation.engines.flower.app import client_app
    from fald.federation.site import worker  # noqa: F401

    print("fald: ready", file=sys.stderr, flush=True)
    while True:
        found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        if found.HasField("task") and found.token:
            answer(client_app, _client(node, "flwr-clientapp", found.token))
            _heard[0] = time.monotonic()
        else:
            time.sleep(_POLL if _is_busy() else _IDLE)


def _is_busy() -> bool:
    return time.monotonic() - _heard[0] < _BUSY


def _client(node: Any, name: str, token: str = "") -> Any:
    """A connection to the SuperNode, for looking for tasks, or for one task."""
    from flwr.supercore import interceptors
    from flwr.supercore.retry import make_simple_http_retry_invoker
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supercore.runtime.tracing import RuntimeTracingInterceptor

    parts: list[Any] = [
        RuntimeTracingInterceptor(),
        interceptors.RuntimeVersionHttpInterceptor(component_name=name),
    ]
    if token:
        parts.append(interceptors.RuntimeTokenHttpInterceptor(token))
    return RuntimeHttpClient.from_server_address(
        server_address=node.address,
        insecure=node.insecure,
        root_certificates=node.trusted,
        interceptors=parts,
        retry_invoker=make_simple_http_retry_invoker(),
    )


def answer(app: Any, client: Any) -> None:
    """One task: take the message, answer it, hand the reply over; the submitted app is not unpacked."""
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode, SubStatus
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supernode.runtime import run_clientapp as runtime

    alive, context, status = HeartbeatSender(make_task_heartbeat_fn_http(client)), None, SubStatus.FAILED
    alive.start()
    try:
        message, context, *_ = runtime.pull_task_input(client)
        try:
            reply = app(message=message, context=context)
        except Exception as error:  # such as a message of another app
            print(f"fald: a message was not understood ({type(error).__name__})", file=sys.stderr, flush=True)
            refusal = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "the site does not understand the message")
            reply = Message(refusal, reply_to=message)
        runtime.push_message(client, reply, context)
        status = SubStatus.COMPLETED
    except Exception as error:  # one message that cannot be answered must not end the site
        print(f"fald: a message was not answered ({type(error).__name__})", file=sys.stderr, flush=True)
    finally:
        runtime.push_task_output(client=client, context=context, sub_status=status, details="")
        alive.stop()
        client.close()


if __name__ == "__main__":
    supernode(sys.argv[1:])
