"""What the Flower adapter does with replies, silence and names, on a grid that is scripted."""

from __future__ import annotations

import contextlib
import email.utils
import itertools
import os
import re
import sqlite3
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fald[flower]'")

from flower_loopback import free_ports
from flwr.app import Error, Message
from flwr.supercore.constant import TaskType
from flwr.supercore.task_identity import TaskIdentity

from fald.core.errors import ConfigError, FederationError
from fald.federation import commands
from fald.federation.engines import flower as engine
from fald.federation.engines.flower import link as module
from fald.federation.engines.flower import submit, supernode
from fald.federation.engines.flower.app import read_job
from fald.federation.engines.flower.deployment import deployment
from fald.federation.engines.flower.link import ASK_NAME, FlowerLink, unwrap, wrap
from fald.federation.folder import read_settings
from fald.study.schema import load_study


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Node:
    """A node of a site; ``delay`` seconds until it replies, None: never."""

    def __init__(self, name: str, delay: float | None = 1.0, *, since=0.0, until=1e9, error=None, tag=""):
        self.name, self.delay, self.since, self.until, self.error = name, delay, since, until, error
        self.tag = tag or name


class ScriptedGrid:
    """Nodes by number, with times at which they come and go."""

    def __init__(self, clock: Clock, nodes: dict[int, Node]):
        self.clock, self.nodes = clock, nodes
        self.sent: dict[str, tuple[float, Message]] = {}
        self.counter = itertools.count()

    def get_node_ids(self):
        return [n for n, node in self.nodes.items() if node.since <= self.clock.now < node.until]

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            assert message.metadata.ttl > 0
            numbers.append(f"message-{next(self.counter)}")
            self.sent[numbers[-1]] = (self.clock.now, message)
        return numbers

    def pull_messages(self, message_ids):
        return [reply for number in message_ids if (reply := self._reply(number)) is not None]

    def _reply(self, number):
        sent, message = self.sent.get(number, (0.0, None))
        if message is None:
            return None
        node = self.nodes[message.metadata.dst_node_id]
        due = None if node.delay is None else max(sent, node.since) + node.delay
        if due is None or self.clock.now < due or due >= node.until:
            return None
        del self.sent[number]
        message.metadata.__dict__["_message_id"] = number
        if node.error is not None:
            return Message(Error(node.error, "patient 17, 43 years"), reply_to=message)
        asked = message.metadata.message_type == ASK_NAME
        content = node.name.encode() if asked else node.tag.encode() + b" got " + (unwrap(message) or b"")
        return Message(wrap(content), reply_to=message)


@pytest.fixture
def make(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    for name in ("run_id", "node_id", "task_id"):  # what Flower sets before it calls an app
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)

    def make_link(nodes, sites=("a", "b"), wait=60.0):
        grid = ScriptedGrid(clock, nodes)
        return FlowerLink(grid, sites, wait=wait), grid, clock

    return make_link


def test_every_site_gets_its_own_message_and_replies_are_sorted(make):
    link, _, _ = make({7: Node("b", 0.5), 3: Node("a", 2.0), 9: Node("someone else")})
    found = link.send({"b": b"two", "a": b"one"}, timeout=10)
    assert link.names == ["a", "b"]
    assert list(found) == ["a", "b"]
    assert [arrival.content for arrival in found.values()] == [b"a got one", b"b got two"]
    assert found["b"].seconds < found["a"].seconds


def test_nothing_reaches_nodes_of_other_names(make):
    link, grid, _ = make({1: Node("a"), 2: Node("b"), 3: Node("c")})
    link.send({"a": b"x", "b": b"x"}, timeout=10)
    kinds = [m.metadata.message_type for _, m in grid.sent.values() if m.metadata.dst_node_id == 3]
    assert set(kinds) <= {ASK_NAME}


def test_silence_is_late_and_later_rounds_do_not_suffer(make):
    link, grid, clock = make({1: Node("a"), 2: Node("b", 8.0)})
    assert link.send({"a": b"1", "b": b"1"}, timeout=30)["b"].content == b"b got 1"
    grid.nodes[2].delay = None
    found, began = link.send({"a": b"2", "b": b"2"}, timeout=5), clock.now
    assert (found["a"].content, found["b"]) == (b"a got 2", (None, found["b"].seconds, "late"))
    grid.nodes[2].delay = 1.0
    assert link.send({"b": b"3"}, timeout=5)["b"].content == b"b got 3"
    assert clock.now - began < 3


def test_enough_replies_end_the_wait(make):
    link, _, clock = make({1: Node("a", 1.0), 2: Node("b", 20.0), 3: Node("c", 2.0)}, sites=("a", "b", "c"))
    link.send(dict.fromkeys("abc", b"0"), timeout=60)
    began = clock.now
    found = link.send(dict.fromkeys("abc", b"1"), timeout=60, enough=2)
    assert clock.now - began < 4
    assert [found[s].content is not None for s in "abc"] == [True, False, True]
    assert found["b"].problem == "late"


def test_a_site_that_comes_back_under_another_number_gets_its_message(make):
    """Killed at 20 s while the SuperLink still lists it; restarted at 30 s."""
    link, _, clock = make({1: Node("a"), 2: Node("b")})
    link.send({"a": b"0", "b": b"0"}, timeout=10)
    clock.now = 20.0
    link._grid.nodes[2].delay = None
    link._grid.nodes[2].until = 75.0
    link._grid.nodes[5] = Node("b", since=30.0, tag="new b")
    found = link.send({"a": b"1", "b": b"1"}, timeout=60)
    assert found["b"].content == b"new b got 1"
    assert clock.now < 45
    assert link.send({"b": b"2"}, timeout=60)["b"].content == b"new b got 2"


def test_a_site_that_is_gone_is_waited_for_once(make):
    link, grid, clock = make({1: Node("a"), 2: Node("b")})
    link.send({"a": b"0", "b": b"0"}, timeout=10)
    grid.nodes[2].until = clock.now
    clock.now += 5
    began = clock.now
    assert link.send({"a": b"1", "b": b"1"}, timeout=40)["b"].problem == "absent"
    assert 40 <= clock.now - began < 42
    began = clock.now
    assert link.send({"b": b"2"}, timeout=40)["b"].problem == "absent"
    assert clock.now - began < 1
    grid.nodes[2].until = 1e9  # with node authentication it is back under its old number
    clock.now += 5
    assert link.send({"b": b"3"}, timeout=40)["b"].content == b"b got 3"


def rounds(link: FlowerLink, count: int) -> None:
    for _ in range(count):
        link.send({"a": b"1", "b": b"1"}, timeout=10)


def test_two_nodes_of_one_name_are_refused_at_the_start(make):
    link, _, _ = make({1: Node("a"), 2: Node("b", 1.0), 3: Node("b", 2.0)})
    with pytest.raises(FederationError, match="two nodes say that they are site b"):
        rounds(link, 3)


def test_a_second_node_of_one_name_is_refused_later(make):
    link, grid, clock = make({1: Node("a"), 2: Node("b")})
    link.send({"a": b"0", "b": b"0"}, timeout=10)
    grid.nodes[3] = Node("b", since=clock.now)
    with pytest.raises(FederationError, match="two nodes"):
        rounds(link, 10)


def test_missing_sites_are_named_with_what_went_wrong(make):
    link, _, clock = make({1: Node("a"), 2: Node("b", error=1)}, wait=30)
    with pytest.raises(
        FederationError, match=r"no node of b appeared within 30 s; present: a; node 2: its app"
    ):
        link.send({"a": b"0", "b": b"0"}, timeout=10)
    assert 30 <= clock.now < 32


def test_words_of_an_exception_stay_out_of_the_coordinators_messages(make):
    link, grid, _ = make({1: Node("a"), 2: Node("b")})
    link.send({"a": b"0", "b": b"0"}, timeout=10)
    grid.nodes[2].error = 2
    found = link.send({"a": b"1", "b": b"1"}, timeout=10)
    assert found["b"].problem == "its app failed (Flower's error 2)"


@pytest.mark.parametrize("code", [3, 4, 5])
def test_a_lost_message_is_sent_again(make, code):
    link, grid, _ = make({1: Node("a"), 2: Node("b")})
    link.send({"a": b"0", "b": b"0"}, timeout=10)
    grid.nodes[2].error = code
    replies = iter([code, None])
    original = grid._reply

    def once(number):
        sent, message = grid.sent.get(number, (0, None))
        if message is not None and message.metadata.dst_node_id == 2:
            grid.nodes[2].error = next(replies, None) if grid.clock.now >= sent + 1 else None
        return original(number)

    grid._reply = once
    assert link.send({"a": b"1", "b": b"1"}, timeout=10)["b"].content == b"b got 1"


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({}, "sites must name two or more"),
        ({"sites": "a"}, "sites must name two or more"),
        ({"sites": "a, a"}, "sites must name two or more"),
        ({"sites": "a,b", "wait": 0}, "wait must be a number of seconds"),
        ({"sites": "a,b", "wait": "soon"}, "wait must be a number of seconds"),
        ({"sites": "a,b"}, "study must be an absolute path"),
        ({"sites": "a,b", "job": "job.json"}, "job must be an absolute path"),
        ({"sites": "a,b", "study": "/no/such/study.toml", "out": "/tmp/x"}, "no/such/study.toml"),
    ],
)
def test_a_wrong_run_config_is_explained(config, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read_job(config)


def test_the_example_makes_the_rows_of_a_file_from_a_database(tmp_path, monkeypatch):
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.syspath_prepend(examples / "flower-own-rows")
    from hospital.rows import load

    study = load_study(examples / "two-sites" / "study.toml", [])
    table = examples / "two-sites" / "north.csv"
    monkeypatch.setenv("HOSPITAL_DB", str(tmp_path / "rows.db"))
    with contextlib.closing(sqlite3.connect(tmp_path / "rows.db")) as database:
        pd.read_csv(table).to_sql("patients", database, index=False)
    expected = study.read_files({"north": table}).client("north")
    found = load(study)
    assert found.num_clients == 1
    for ours, theirs in zip(found.rows, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_examples_and_submitted_app_name_the_same_parts():
    """An app by hand and one of ``fald run --federation`` differ in nothing that Flower runs."""
    examples = Path(__file__).parents[2] / "examples"
    thin = tomllib.loads((examples / "flower" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    own = tomllib.loads((examples / "flower-own-rows" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    submitted = tomllib.loads(submit._APP)["tool"]["flwr"]["app"]
    assert thin["components"] == submitted["components"]
    assert set(submitted["config"]) <= set(thin["config"])
    assert own["config"] == thin["config"]
    assert own["components"]["serverapp"] == thin["components"]["serverapp"]
    assert not list((examples / "flower").rglob("*.py"))


@pytest.fixture
def folder(tmp_path):
    text = 'name = "trial"\nengine = "flower"\nsites = ["north", "south"]\nhost = "{host}"\nport = 8000\n'
    (tmp_path / "federation.toml").write_text(text.format(host="127.0.0.1"))
    return tmp_path


def test_nothing_is_sent_in_the_clear_to_another_machine(folder):
    text = (folder / "federation.toml").read_text()
    (folder / "federation.toml").write_text(text.replace("127.0.0.1", "fald.example.org"))
    with pytest.raises(ConfigError, match=r"ca\.crt is missing, and the SuperLink is on another machine"):
        submit.submit(folder, {"study": {}, "out": "/tmp/out"})
    (folder / "ca.crt").write_text("a certificate")
    connection = submit._connection(folder, read_settings(folder))
    assert "root-certificates" in connection
    assert "insecure" not in connection


def test_a_superlink_that_is_not_there_is_said(folder, monkeypatch):
    (port,) = free_ports(1)
    text = (folder / "federation.toml").read_text()
    (folder / "federation.toml").write_text(text.replace("8000", str(port)))
    monkeypatch.setattr(submit, "_PATIENCE", 60.0)
    with pytest.raises(FederationError, match="flwr run failed"):
        submit.submit(folder, {"study": {}, "out": "/tmp/out"})


def test_another_engines_folder_is_refused(folder):
    text = (folder / "federation.toml").read_text()
    (folder / "federation.toml").write_text(text.replace('"flower"', '"nvflare"'))
    with pytest.raises(ConfigError, match="is 'nvflare', not 'flower'"):
        submit.job_state(folder, "1")


@pytest.mark.parametrize("off", [0, 600, -600])
def test_the_clock_of_the_superlink_is_compared(folder, monkeypatch, off):
    said = email.utils.formatdate(time.time() + off, usegmt=True)
    answer = contextlib.nullcontext(SimpleNamespace(headers={"Date": said}))
    monkeypatch.setattr(submit.urllib.request, "urlopen", lambda *a, **k: answer)
    monkeypatch.setattr(submit, "unfinished", lambda folder: [])
    assert abs(submit.clock(folder) - off) < 2
    found = {f.about: f for f in deployment.examine(folder)}
    assert {about: f.level for about, f in found.items()} == {"server": "ok", "clock": "bad" if off else "ok"}
    if off:
        assert re.search(r"is \d+ s " + ("ahead" if off > 0 else "behind"), found["clock"].said)
    # nor does its status tell who is not approved: fald has no kits of these sites
    assert commands.status_text(commands.status(folder)).count("the engine's own commands tell") == 2


def test_a_supernode_needs_a_site(tmp_path):
    with pytest.raises(ConfigError, match="the site's folder is missing"):
        supernode.main(["--superlink", "127.0.0.1:8000"])
    with pytest.raises(ConfigError, match=r"site\.toml"):
        supernode.main([str(tmp_path), "--superlink", "127.0.0.1:8000"])
    (tmp_path / "site.toml").write_text('name = "north"\n')
    with pytest.raises(ConfigError, match="--node-config"):
        supernode.main([str(tmp_path), "--node-config", 'site="elsewhere"'])
    added = supernode.prepare(tmp_path)
    first = Path(added["PATH"].split(os.pathsep)[0])
    # a thread of ours runs the apps, and no program of Flower's that would unpack one can be started
    assert {p.name for p in first.iterdir()} == {"flower-superexec", *(t.value for t in TaskType)}
    assert all("runs no other apps" in p.read_text() for p in first.iterdir())


@pytest.mark.parametrize(("version", "fits"), [("1.41.0", True), ("1.42.0", False), ("1.4.1", False)])
def test_a_version_that_was_never_tried_is_named(monkeypatch, version, fits):
    monkeypatch.setattr(engine.importlib.metadata, "version", lambda name: version)
    expected = contextlib.nullcontext() if fits else pytest.raises(ConfigError, match=f"Flower {version} is")
    with expected:
        engine.require_flower()
