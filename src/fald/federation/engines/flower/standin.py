"""A SuperNode of one process: the installed app answers every message, whatever app was submitted.

``standin.py …`` takes what ``flower-supernode`` takes. That one opens a port for programs which it starts for
every message, and both ends of it look for something to do several times a second. Here one loop takes a
message from the SuperLink, answers it, and sends the reply: Flower and JAX are loaded, and programs are
compiled, once for a site, and the submitted app is not even fetched. If the SuperLink is ours as well,
messages travel in one piece, and it keeps a question for a message until one comes.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fald.federation.engines.flower.parts import Carrier

_QUICK, _BUSY = 0.3, 60.0  # seconds between two looks for messages, for so long after the last one
_IDLE = 3.0  # and while no run goes on
_SLOW = 60.0  # seconds for an answer: one that comes too late takes its message along
_AGAIN = 0.1  # seconds before a part of a message is asked for again that has not reached the SuperLink yet


class Connection(NamedTuple):
    """What Flower's connection to the SuperLink can do, in its order, and what carries its messages."""

    carrier: Carrier
    node: int
    receive: Callable[[], tuple[Any, Any] | None]
    send: Callable[..., tuple[set[str], str]]
    get_run: Callable[..., Any]
    get_app: Callable[..., Any]
    pull: Callable[[int, str], bytes]
    push: Callable[[int, str, str, bytes], None]
    confirm: Callable[[int, str], None]


def supernode(arguments: list[str]) -> None:
    """Join, and answer until the process is ended; it ends by itself where no more answers would come."""
    from flwr.supercore.exit import register_signal_handlers
    from flwr.supercore.grpc_health import run_health_server_grpc_no_tls
    from flwr.supercore.telemetry import EventType
    from flwr.supernode import fleet_http_connection
    from flwr.supernode.start_client_internal import _init_connection

    from fald.federation.engines.flower.parts import Carrier

    sys.argv = ["flower-supernode", *arguments]
    command = importlib.import_module("flwr.supernode.cli.flower_supernode")
    asked = command._parse_supernode_lifespan_config()
    if asked.insecure and asked.authentication_keys is not None:
        sys.exit(
            "error: a node that shows its key needs TLS; give --root-certificates in place of --insecure"
        )
    health = asked.health_server_address
    servers = [] if health is None else [run_health_server_grpc_no_tls(health)]
    register_signal_handlers(EventType.RUN_SUPERNODE_LEAVE, "SuperNode ended.", grpc_servers=servers)
    carrier = Carrier()
    clients: Any = fleet_http_connection
    theirs: Any = clients.FleetHttpClient

    class Client(theirs):
        """Flower's, with one interceptor more and more patience."""

        def __init__(self, *args: Any, interceptors: Any = (), **named: Any):
            super().__init__(*args, interceptors=[*interceptors, carrier], timeout=_SLOW, **named)

    clients.FleetHttpClient = Client
    with _init_connection(
        server_address=asked.server_address,
        insecure=asked.insecure,
        root_certificates=asked.root_certificates,
        authentication_keys=asked.authentication_keys,
        max_retries=asked.max_retries,
        max_wait_time=asked.max_wait_time,
    ) as found:
        # takes its time, before the first message
        from fald.federation.engines.flower.app import client_app
        from fald.federation.site import worker  # noqa: F401

        print("fald: ready", file=sys.stderr, flush=True)
        answer_all(client_app, Connection(carrier, *found))
    sys.exit(1)  # Flower has logged why; whatever keeps sites running starts it again


def answer_all(app: Any, connection: Connection) -> None:
    """Answer the messages that reach this node, one after the other, until it ends."""
    from flwr.supercore.run import RunNotRunningException

    heard = float("-inf")
    while True:
        looked = time.monotonic()
        try:
            found = connection.receive()
            if found is not None:
                answer(app, connection, *found)
                heard = time.monotonic()
                continue
        except RunNotRunningException:
            pass  # a message of a run that has ended needs no answer
        now = time.monotonic()
        pause = _QUICK if now - heard < _BUSY else _IDLE
        time.sleep(max(0.0, looked + pause - now))  # a SuperLink of ours has already waited


def answer(app: Any, connection: Connection, message: Any, tree: Any) -> None:
    """One message: fetch its content, answer it, send the reply.

    Raises
    ------
    RunNotRunningException
        If its run has ended in the meantime.
    """
    from flwr.app import Context, Error, Message, RecordDict
    from flwr.common.constant import ErrorCode
    from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
    from flwr.supercore.run import RunNotRunningException
    from flwr.supercore.task_identity import TaskIdentity

    run = message.metadata.run_id
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, connection.node, 0
    began = time.monotonic()
    try:
        message = pull_and_inflate_object_from_tree(
            tree,
            partial(connection.pull, run),
            partial(connection.confirm, run),
            return_type=Message,
            initial_backoff=_AGAIN,
        )
        message.metadata.__dict__["_message_id"] = tree.object_id  # by which the reply names it
        context = Context(run, connection.node, {}, RecordDict(), {})
        try:
            reply = app(message=message, context=context)
        except Exception as error:  # such as a message of another app
            print(f"fald: a message was not understood ({type(error).__name__})", file=sys.stderr, flush=True)
            refusal = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "the site does not understand the message")
            reply = Message(refusal, reply_to=message)
        _send(connection, reply, time.monotonic() - began)
    except RunNotRunningException:
        raise
    except Exception as error:  # one message that cannot be answered must not end the site
        print(f"fald: a message was not answered ({type(error).__name__})", file=sys.stderr, flush=True)


def _send(connection: Connection, reply: Any, seconds: float) -> None:
    from flwr.supercore.inflatable import inflatable_object as parts

    reply.metadata.__dict__["_message_id"] = reply.object_id
    with parts.no_object_id_recompute():
        contents = {number: part.deflate() for number, part in parts.get_all_nested_objects(reply).items()}
        connection.carrier.outgoing = contents
        missing, session = connection.send(reply, parts.get_object_tree(reply), seconds)
        for number in missing:
            connection.push(reply.metadata.run_id, session, number, contents[number])


if __name__ == "__main__":
    supernode(sys.argv[1:])
