"""A small read-only web server for one page and the numbers it asks for.

It answers GET alone, serves its own files alone, and, while bound to this machine, only requests that name
this machine, so that no page from elsewhere can reach it through a name of its own.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from fald.core.errors import ConfigError, FaldError

Answer = Callable[[Mapping[str, str]], Any]

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Page(NamedTuple):
    """What a server shows.

    Attributes
    ----------
    name
        ``NAME.html`` and ``NAME.js`` among the package's files.
    answers
        What the page may ask: name -> function from the query to a value that JSON can hold.
    """

    name: str
    answers: Mapping[str, Answer]


def make_server(page: Page, host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    """A server for a page, bound and ready; port 0 takes a free one.

    Raises
    ------
    ConfigError
        If the address cannot be used.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must be between 0 and 65535; got {port}", hint="0 takes a free one")
    files = _files(page.name)

    class Handler(_Handler):
        server_page, server_files, local_only = page, files, _is_local(host)

    class Listener(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

    try:
        return Listener((host, port), Handler)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        taken = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
        raise ConfigError(
            f"cannot serve on {host}, port {port}: {reason}",
            hint="leave --port out to take a free one" if taken else "leave --host out to serve this machine",
        ) from error


def serve(page: Page, *, host: str, port: int, about: str) -> None:
    """Serve a page until Ctrl-C; the first line printed says where it is.

    Parameters
    ----------
    page, host, port
        As in ``make_server``.
    about
        What the page shows, for that line.
    """
    server = make_server(page, host, port)
    print(f"{about}: {address(server)} (Ctrl-C ends the page)", flush=True)
    if not _is_local(host):
        print(
            f"warning: whoever can reach {host} can read this page; nothing asks for a password",
            file=sys.stderr,
            flush=True,
        )
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print("the page has ended", file=sys.stderr)
    finally:
        server.server_close()


def address(server: ThreadingHTTPServer) -> str:
    """Where a server is reached."""
    host, port = str(server.server_address[0]), server.server_address[1]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _files(name: str) -> dict[str, tuple[str, bytes]]:
    """Path -> kind and content of what a page consists of."""
    folder = resources.files("fald.pages") / "static"
    names = {"/": f"{name}.html", **{f"/{n}": n for n in (f"{name}.js", "chart.js", "style.css", "icon.svg")}}
    return {
        path: (f"{_KINDS[file.rpartition('.')[2]]}; charset=utf-8", (folder / file).read_bytes())
        for path, file in names.items()
    }


class _Handler(BaseHTTPRequestHandler):
    server_page: Page
    server_files: Mapping[str, tuple[str, bytes]]
    local_only: bool
    server_version, sys_version, protocol_version = "fald", "", "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """Answer one request; nothing that it brings can stop the server."""
        place = urlsplit(self.path)
        if self.local_only and not self._names_this_machine():
            return self._send(403, "application/json", _dump({"message": "this page is for this machine"}))
        if place.path in self.server_files:
            return self._send(200, *self.server_files[place.path])
        answer = self.server_page.answers.get(place.path.removeprefix("/api/"))
        if answer is None or not place.path.startswith("/api/"):
            return self._send(404, "application/json", _dump({"message": "there is no such page"}))
        status, content = _answered(answer, dict(parse_qsl(place.query, keep_blank_values=True)))
        self._send(status, "application/json", content)

    do_HEAD = do_GET  # noqa: N815

    def _names_this_machine(self) -> bool:
        try:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            return False
        return name is not None and _is_local(name)

    def _send(self, status: int, kind: str, content: bytes) -> None:
        try:
            self.send_response(status)
            for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": len(content)}.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
        except (BrokenPipeError, ConnectionResetError):  # the browser has gone
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing about every request."""


def _answered(answer: Answer, query: Mapping[str, str]) -> tuple[int, bytes]:
    """Status and content of an answer; every failure is an answer too."""
    try:
        return 200, _dump(answer(query))
    except FaldError as error:
        return 400, _dump({"message": error.message, "hint": error.hint})
    except Exception:
        traceback.print_exc()
        return 500, _dump({"message": "this could not be computed; the terminal says why", "hint": ""})


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
