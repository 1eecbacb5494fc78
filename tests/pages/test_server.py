"""The web server of the pages: loopback, read-only, and not to be brought down by a request."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from fald.core.errors import ConfigError
from fald.pages.server import Page, address, make_server
from fald.runtime.journal import Journal


def answer(query):
    if query.get("wrong") == "value":
        raise ConfigError("wrong must be right", hint="write right")
    if query.get("wrong") == "bug":
        raise RuntimeError("a bug")
    return {"asked": dict(query), "number": float("nan") if query.get("wrong") == "nan" else 1.0}


@pytest.fixture
def server():
    made = make_server(Page("watch", {"state": answer}))
    thread = threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=600)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, content


@pytest.mark.parametrize("path", ["/", "/watch.js", "/chart.js", "/style.css", "/icon.svg"])
def test_the_page_consists_of_the_packages_own_files(server, path):
    response, content = ask(server, path)
    assert response.status == 200
    assert len(content) > 100
    assert "default-src 'self'" in response.headers["Content-Security-Policy"]


def test_answers_come_as_json_and_are_never_kept(server):
    response, content = ask(server, "/api/state?seen=3&empty=")
    assert json.loads(content)["asked"] == {"seen": "3", "empty": ""}
    assert response.headers["Cache-Control"] == "no-store"
    assert ask(server, "/api/state", "HEAD")[1] == b""


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/../../etc/passwd",
        "/%2e%2e/pyproject.toml",
        "/api/",
        "/state",
        "/explore.js",
        "/api/x",
    ],
)
def test_nothing_else_is_served(server, path):
    assert ask(server, path)[0].status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_nothing_can_be_changed(server, method):
    assert ask(server, "/api/state", method)[0].status == 501


def test_no_request_brings_the_server_down(server, capsys):
    response, content = ask(server, "/api/state?wrong=value")
    assert (response.status, json.loads(content)) == (
        400,
        {"message": "wrong must be right", "hint": "write right"},
    )
    for wrong in ("bug", "nan"):
        response, content = ask(server, f"/api/state?wrong={wrong}")
        assert response.status == 500
        assert b"a bug" not in content
    assert "RuntimeError: a bug" in capsys.readouterr().err
    with socket.create_connection(server.server_address[:2]) as raw:
        raw.sendall(b"\xff\xfe nonsense\r\n\r\n")
    with socket.create_connection(server.server_address[:2]) as raw:
        raw.sendall(b"GET /api/state HTTP/1.1\r\nHost: [::1\r\n\r\n")
        assert b"403" in raw.recv(200)
    assert ask(server, "/api/state")[0].status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:1", 200), ("localhost", 200), ("[::1]:80", 200), ("evil.example", 403), ("", 403)],
)
def test_only_requests_that_name_this_machine_are_answered(server, host, status):
    assert ask(server, "/api/state", Host=host)[0].status == status


def test_addresses_that_cannot_be_used_are_errors_with_a_hint(server):
    taken = server.server_address[1]
    with pytest.raises(ConfigError, match=f"cannot serve on 127.0.0.1, port {taken}"):
        make_server(Page("watch", {}), port=taken)
    with pytest.raises(ConfigError, match="port must be"):
        make_server(Page("watch", {}), port=70000)
    with pytest.raises(ConfigError, match="cannot serve on") as caught:
        make_server(Page("watch", {}), host="no.such.host.invalid")
    assert "--host" in caught.value.hint
    assert address(server) == f"http://127.0.0.1:{taken}/"


@pytest.mark.skipif(os.name == "nt", reason="signals are those of POSIX")
def test_the_command_says_where_it_is_and_ends_cleanly(tmp_path):
    with Journal(tmp_path).running(round=0, rounds_total=1):
        pass
    process = subprocess.Popen(
        [sys.executable, "-m", "fald.cli", "watch", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        port = int(line.split("http://127.0.0.1:")[1].split("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        connection.request("GET", "/api/state")
        assert json.loads(connection.getresponse().read())["status"] == "finished"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
        assert (process.returncode, errors) == (0, "the page has ended\n")
    finally:
        process.kill()
