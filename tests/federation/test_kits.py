"""Kits, certificates and the parts of the NVIDIA FLARE adapter that need no running federation."""

import json
import shutil
import stat
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fald[nvflare]'")

from typer.testing import CliRunner

from fald.cli.main import app
from fald.core.errors import ConfigError, FaldError, FederationError, StorageError
from fald.federation import commands, folder
from fald.federation.coordinator import follow
from fald.federation.coordinator.run import write_outcome
from fald.federation.engines.nvflare import adapter, certificates, jobs, kits
from fald.federation.engines.nvflare.adapter import CellLink
from fald.federation.folder import new_settings
from fald.study.datasets import study_path
from fald.study.schema import load_study

IDENTITY = "ab" * 32


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A federation of two sites that nobody has joined."""
    place = tmp_path_factory.mktemp("made") / "trial"
    commands.init(place, "north,south", "127.0.0.1", 8102)
    return place


@pytest.fixture
def trial(made, tmp_path):
    return shutil.copytree(made, tmp_path / "trial")


def ask(place, site, federation="trial"):
    return certificates.make_request(place / "sites" / site, federation, site, IDENTITY)


@pytest.mark.parametrize(
    "sites", ["", "a", "a,a", "a,A", "a,b c", "a,ä", "a,../b", "server,a", "a,1b", "a," + "b" * 41]
)
def test_bad_site_names_are_refused(sites, tmp_path):
    with pytest.raises(ConfigError):
        commands.init(tmp_path / "trial", sites, "127.0.0.1", 8102)
    assert not (tmp_path / "trial").exists()


@pytest.mark.parametrize(
    ("host", "port"),
    [("", 8102), ("0.0.0.0", 8102), ("1.2.3", 8102), ("a b", 8102), ("h:1", 8102), ("h", 0)],
)
def test_bad_addresses_are_refused(host, port, tmp_path):
    with pytest.raises(ConfigError):
        commands.init(tmp_path / "trial", "a,b", host, port)
    assert not (tmp_path / "trial").exists()


@pytest.mark.parametrize("port", [1, 443, 65535])
def test_every_port_may_be_the_servers(port):
    assert new_settings("trial", ("a", "b"), "fald.example.org", port).port == port
    with pytest.raises(ConfigError, match="from 1 to 65535"):
        new_settings("trial", ("a", "b"), "fald.example.org", port + 65535)


def test_an_existing_folder_is_left_alone(made):
    before = sorted(p.name for p in made.rglob("*"))
    with pytest.raises(ConfigError, match="exists"):
        commands.init(made, "a,b", "127.0.0.1", 8102)
    assert sorted(p.name for p in made.rglob("*")) == before


def test_private_keys_are_private_and_kits_hold_none(made):
    keys = sorted(made.rglob("*.key"))
    assert [str(k.relative_to(made)) for k in keys] == [
        "authority/authority.key",
        "coordinator/startup/client.key",
        "server/startup/server.key",
    ]
    assert {stat.S_IMODE(k.stat().st_mode) for k in keys} == {0o600}
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    text = "".join(p.read_text() for p in (made / "sites").rglob("*") if p.is_file())
    assert "PRIVATE KEY" not in text


def test_a_kit_holds_data_only(made):
    kit = made / "sites" / "north"
    files = sorted(p.relative_to(kit).as_posix() for p in kit.rglob("*") if p.is_file())
    assert files == ["kit.json", "startup/rootCA.pem"]


CHANGES = {
    "resources of the sender": ("local/resources.json.default", "{}"),
    "code of the sender": ("local/custom/sitecustomize.py", "print('owned')"),
    "a module beside": ("numpy.py", "print('owned')"),
    "another start": ("startup/sub_start.sh", "echo owned"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_changed_kit_is_refused(trial, how):
    kit = trial / "sites" / "north"
    about = kits.read_kit(kit)
    kits.settle(kit, about)
    name, text = CHANGES[how]
    (kit / name).parent.mkdir(parents=True, exist_ok=True)
    (kit / name).write_text(text)
    with pytest.raises(FederationError, match="has been changed"):
        kits.settle(kit, about)


def test_what_runs_at_a_site_is_written_by_the_site(trial):
    """Whoever alters the engine's settings in a kit would run code at the site through them."""
    kit = trial / "sites" / "north"
    (kit / "local" / "resources.json").write_text(json.dumps({"components": [{"path": "os.system"}]}))
    (kit / "startup" / "fed_client.json").write_text("{}")
    kits.settle(kit, kits.read_kit(kit))
    assert "os.system" not in (kit / "local" / "resources.json").read_text()
    assert json.loads((kit / "startup" / "fed_client.json").read_text())["client"]["fqsn"] == "north"


@pytest.mark.parametrize(
    "change", [{"site": "../north"}, {"host": "a b"}, {"port": "8102; rm"}, {"sites": ["north", "../x"]}]
)
def test_a_kit_of_nonsense_is_refused(trial, change):
    path = trial / "sites" / "north" / "kit.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(StorageError, match="damaged"):
        kits.read_kit(trial / "sites" / "north")


def test_a_site_stays_with_its_authority(trial, tmp_path):
    """The authority is shown at both ends, and a kit of another one is refused afterwards."""
    table = tmp_path / "rows.csv"
    table.write_text("y,u\n1,2\n")
    kit, heard = trial / "sites" / "north", []
    with pytest.raises(FederationError, match="no certificate came"):
        commands.join(kit, table, None, None, report=heard.append, patience=0.1)
    found = kits.authority_fingerprint(trial / "server")
    assert any(found in line for line in heard)
    assert any("Only two sites" in line for line in heard)
    said = commands.init(tmp_path / "other", "north,south", "127.0.0.1", 8102)
    assert kits.authority_fingerprint(tmp_path / "other" / "server") in said
    forged = tmp_path / "other" / "sites" / "north" / "startup" / "rootCA.pem"
    (kit / "startup" / "rootCA.pem").write_bytes(forged.read_bytes())
    with pytest.raises(FederationError, match="this site has joined"):
        commands.join(kit, table, None, None, report=heard.append, patience=0.1)


def test_a_site_runs_only_our_class_and_sends_no_logs(trial):
    made = trial
    kits.settle(made / "sites" / "north", kits.read_kit(made / "sites" / "north"))
    site = json.loads((made / "sites" / "north" / "local" / "resources.json").read_text())
    assert site["class_allow_list"] == ["fald.federation.engines.nvflare.adapter.SiteExecutor"]
    assert site["class_list_enforcement_mode"] == "enforce"
    assert site["allow_log_streaming"] is False
    assert not [c for c in site["components"] if "log" in c["path"].rsplit(".", 1)[-1].lower()]
    rights = json.loads((made / "sites" / "north" / "local" / "authorization.json").read_text())[
        "permissions"
    ]
    assert rights["lead"]["byoc"] == "none"
    assert rights["member"] == {"view": "any"}
    assert "shell_commands" not in rights["lead"]


def test_the_engine_accepts_the_roles(made):
    """Our authorization file is read by the engine's own parser, and gives and refuses what we mean."""
    from nvflare.fuel.sec.authz import AuthzContext, Person, parse_policy_config

    rights = json.loads((made / "server" / "local" / "authorization.json").read_text())
    policy, problem = parse_policy_config(rights, {})
    assert not problem

    def may(role, right):
        return policy.evaluate("trial", AuthzContext(right, Person("x", "trial", role)))[0]

    assert may("lead", "submit_job")
    assert not may("lead", "byoc")
    assert not may("lead", "shell_commands")
    assert not may("lead", "download_job")
    assert not may("member", "submit_job")
    assert not may("project_admin", "submit_job")


def test_a_site_makes_its_key_and_is_approved(trial):
    request = ask(trial, "north")
    settings = folder.read_settings(trial)
    assert kits.approve_waiting(trial, settings) == ["north"]
    startup = trial / "sites" / "north" / "startup"
    assert certificates.key_matches(startup / "client.crt", startup / "client.key")
    assert folder.read_roster(trial) == {"north": IDENTITY}
    assert kits.approve_waiting(trial, settings) == []
    assert certificates.fingerprint(ask(trial, "north")) != certificates.fingerprint(
        {**request, "site": "south"}
    )


def test_requests_that_do_not_fit_are_refused(trial, tmp_path):
    settings = folder.read_settings(trial)
    path = trial / "sites" / "north" / "request.json"
    good = ask(trial, "north")
    other = json.loads(json.dumps(good))
    ask(trial, "south")
    csr = json.loads((trial / "sites" / "south" / "request.json").read_text())["request"]
    lines = csr.splitlines()
    middle = lines[6]
    lines[6] = middle[::-1]
    for change in (
        {"federation": "another"},
        {"site": "west"},
        {"identity": "xx"},
        {"identity": "ab"},
        {"request": "nothing"},
        {"request": "\n".join(lines)},
    ):
        path.write_text(json.dumps({**other, **change}))
        with pytest.raises(FaldError):
            kits.approve(trial, settings, path)
    for content in ("", "[]", "{}", "\x00"):
        path.write_text(content)
        with pytest.raises(ConfigError):
            kits.approve(trial, settings, path)
    with pytest.raises(ConfigError, match="no such file"):
        kits.approve(trial, settings, tmp_path / "nowhere.json")
    path.write_text(json.dumps(good))
    assert kits.approve(trial, settings, path)[0] == "north"  # the twin


def test_other_keys_for_an_approved_site_need_again(trial):
    settings = folder.read_settings(trial)
    kit = trial / "sites" / "north"
    ask(trial, "north")
    kits.approve(trial, settings, kit / "request.json")
    kits.approve(trial, settings, kit / "request.json")  # the same keys: nothing changes
    certificates.make_request(kit, "trial", "north", "cd" * 32)
    with pytest.raises(FederationError, match="other keys"):
        kits.approve(trial, settings, kit / "request.json")
    (kit / "startup" / "client.key").unlink()
    ask(trial, "north")
    with pytest.raises(FederationError, match="other keys"):
        kits.approve(trial, settings, kit / "request.json")
    kits.approve(trial, settings, kit / "request.json", again=True)
    assert certificates.key_matches(kit / "startup" / "client.crt", kit / "startup" / "client.key")


def test_join_checks_before_it_asks(trial, tmp_path):
    table = tmp_path / "rows.csv"
    table.write_text("x,y\n1,0\n2,1\n")
    kit = trial / "sites" / "north"
    with pytest.raises(ConfigError, match=r"kit\.json"):
        commands.join(trial, table, None, None, report=print)
    with pytest.raises(FaldError):
        commands.join(kit, tmp_path / "none.csv", None, None, report=print)
    with pytest.raises(FaldError):
        commands.join(kit, table, tmp_path / "none.toml", None, report=print)
    for content in ("", "[]", '{"north": "ab"}', json.dumps({"south": IDENTITY})):
        (tmp_path / "roster.json").write_text(content)
        with pytest.raises(FaldError):
            commands.join(kit, table, None, None, report=print, pins=tmp_path / "roster.json")
    assert not (kit / "startup" / "client.key").exists()
    lines = []
    with pytest.raises(FederationError, match="no certificate"):
        commands.join(kit, table, None, None, report=lines.append, patience=0.1)
    assert "2 rows" in lines[0]
    request = json.loads((kit / "request.json").read_text())
    assert certificates.fingerprint(request) in lines[-1]
    south = trial / "sites" / "south"
    ask(trial, "south")
    kits.approve(trial, folder.read_settings(trial), south / "request.json")
    (kit / "startup" / "client.crt").write_bytes((south / "startup" / "client.crt").read_bytes())
    with pytest.raises(FederationError, match="does not belong"):
        commands.join(kit, table, None, None, report=print, patience=0.1)


def test_damaged_folders_are_named(trial, tmp_path):
    with pytest.raises(ConfigError, match=r"federation\.toml"):
        folder.read_settings(tmp_path)
    for content in ("name = 1 2", 'name = "x"', ""):
        (trial / "federation.toml").write_text(content)
        with pytest.raises(StorageError):
            folder.read_settings(trial)


def test_status_without_a_server_says_so(trial):
    settings = folder.read_settings(trial)
    text = settings.text().replace("8102", "1025")
    (trial / "federation.toml").write_text(text)
    admin = trial / "coordinator" / "startup" / "fed_admin.json"
    admin.write_text(admin.read_text().replace("8102", "1025"))
    result = CliRunner().invoke(app, ["federation", "status", str(trial)])
    assert result.exit_code == 7
    assert "no server answers at 127.0.0.1:1025" in result.output
    with pytest.raises(FederationError, match="no server answers"):
        jobs.submit(trial, {"out": "x"})


def test_the_last_run_is_read_from_its_folder(trial, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    folder.remember_submitted(trial, "job-1", str(out))
    (out / "rounds.jsonl").write_text('{"event": "start", "rounds_total": 9}\n{"round": 4}\n{"rou')
    (out / "outcome.json").write_text(json.dumps({"status": "failed", "message": "north refuses"}))
    document = commands.status(trial) | {"reached": True, "problem": ""}
    assert document["last_run"]["round"] == 4
    assert "failed, round 4 of 9: north refuses" in commands.status_text(document)


def test_a_job_names_two_classes_and_ships_nothing(made, tmp_path):
    job = {"out": "/x", "study": {"data": {"target": "{braces}"}}}
    path = jobs.write_job(tmp_path, folder.read_settings(made), job)
    files = sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())
    assert files == [
        "coordinator/config/config_fed_server.json",
        "meta.json",
        "site/config/config_fed_client.json",
    ]
    text = "".join((path / name).read_text() for name in files)
    assert "{braces}" not in text  # the engine would replace them
    assert "out" not in (path / "site/config/config_fed_client.json").read_text()


def link(answers, aborted=lambda: False):
    """A link whose sites answer after some seconds, or never (None)."""

    def request(name, topic, content, *, timeout, give_up):
        pause = answers[name]
        end = time.monotonic() + (1e9 if pause is None else pause)
        while time.monotonic() < end:
            if give_up.triggered:
                return None, "timeout"
            time.sleep(0.005)
        return content[::-1], "ok"

    return CellLink(list(answers), request, aborted)


def test_replies_come_back_in_order():
    found = link({"b": 0.0, "a": 0.05}).send({"b": b"xy", "a": b"z1"}, timeout=600)
    assert list(found) == ["a", "b"]
    assert [a.content for a in found.values()] == [b"1z", b"yx"]
    assert found["a"].seconds >= 0.05


def test_enough_replies_end_the_wait():
    found = link({"a": 0.0, "b": None, "c": 0.01}).send(dict.fromkeys("abc", b"x"), timeout=600, enough=2)
    assert found["b"].content is None
    assert found["b"].problem == "late"
    assert found["b"].seconds < 600


def test_a_silent_site_is_late_and_its_thread_ends():
    before = threading.active_count()
    found = link({"a": 0.0, "b": None}).send({"a": b"x", "b": b"x"}, timeout=2)
    assert (found["a"].content, found["b"].problem) == (b"x", "late")
    end = time.monotonic() + 300
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_a_site_that_is_gone_is_absent():
    def request(name, topic, content, *, timeout, give_up):
        if name == "broken":
            raise RuntimeError("the engine's own words, which may quote anything")
        return None, {"gone": "target_unreachable", "odd": "msg_too_big"}[name]

    found = CellLink(["broken", "gone", "odd"], request, lambda: False).send(
        dict.fromkeys(["broken", "gone", "odd"], b""), timeout=600
    )
    assert {n: a.problem for n, a in found.items()} == {
        "broken": "absent",
        "gone": "absent",
        "odd": "msg too big",
    }


def test_sites_may_take_their_time_to_start_a_process_and_no_longer():
    asked, clock = [], [0.0]

    def request(name, topic, content, *, timeout, give_up):
        asked.append(name)
        ready = name == "a" and asked.count("a") == 3
        return (b"", "ok") if ready else (None, "target_unreachable")

    waits = CellLink(["a", "b"], request, lambda: False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(adapter, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=later(clock)))
        waits.wait_until_ready(120.0)
    assert 120 <= clock[0] < 123
    assert asked.count("a") == 3 < asked.count("b")  # who is ready is left alone


def later(clock):
    """A sleep that takes no time."""

    def sleep(seconds):
        clock[0] += max(seconds, 1.0)

    return sleep


def test_an_aborted_job_ends_the_run():
    with pytest.raises(FederationError, match="ended the job"):
        link({"a": None}, aborted=lambda: True).send({"a": b""}, timeout=30)


def test_units_name_the_folder(made, tmp_path):
    unit = (made / "server" / "server.service").read_text()
    assert f"federation serve {made.resolve()}" in unit
    assert "Restart=always" in unit
    copy = shutil.copytree(made / "sites" / "north", tmp_path / "north")
    kits.settle(copy, kits.read_kit(copy))
    assert f"federation join {copy}" in (copy / "site.service").read_text()


def test_a_missing_engine_is_named(monkeypatch, tmp_path):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed") as raised:
        commands.init(tmp_path / "trial", "a,b", "127.0.0.1", 8102)
    assert "fald[nvflare]" in raised.value.hint


def test_a_run_ends_when_its_job_has_lost_its_process(tmp_path, monkeypatch):
    """As after a kill -9 of the server, which goes on counting the job as running."""
    monkeypatch.setattr(follow, "_ASK", 0.0)
    study = load_study(study_path("indo"))

    def ending(states, moves):
        left = iter(states)

        def job_state(place, handle):
            if moves:
                line = json.dumps({"round": 1, "time": time.time()})
                (tmp_path / "rounds.jsonl").write_text(line + "\n")
            return next(left)

        with pytest.raises(FederationError) as caught:
            follow._follow(
                SimpleNamespace(job_state=job_state), tmp_path, "job", study, out=tmp_path, progress=False
            )
        assert list(left) == []
        return str(caught.value)

    # once may be chance, and a run that has not moved may not have its process yet
    assert "'done'" in ending(["lost", "lost", "done"], moves=False)
    assert "'lost'" in ending(["lost", "running", "lost", "lost"], moves=True)


def test_a_server_that_does_not_answer_for_a_while_ends_no_run(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(follow, "_ASK", 0.0)
    study = load_study(study_path("indo"))
    asked = []

    def job_state(place, handle):
        asked.append(handle)
        if len(asked) == 4:
            write_outcome(tmp_path, {"status": "done", "exit_code": 0})
        raise FederationError("no server answers")

    def go():
        return follow._follow(
            SimpleNamespace(job_state=job_state), tmp_path, "job", study, out=tmp_path, progress=True
        )

    assert go()["status"] == "done"
    assert capfd.readouterr().err.count("no server answers; asking again for 180 s\n") == 1
    (tmp_path / "outcome.json").unlink()
    monkeypatch.setattr(follow, "_GONE", 0.0)  # the twin: one that never answers again does
    with pytest.raises(FederationError, match="no server answers") as caught:
        go()
    assert "--resume" in caught.value.hint


class Jobs:
    """A session at a server that counts one job as running for a few looks."""

    def __init__(self, looks):
        self.looks, self.aborted = looks, []

    def unfinished(self):
        return ["before"]

    def state(self, job_id):
        self.looks -= 1
        return "running" if self.looks >= 0 else "failed"

    def abort(self, job_id, patience):
        self.aborted.append(job_id)


def test_a_run_that_has_its_outcome_keeps_nobody_from_the_next(tmp_path, monkeypatch):
    """'fald run' ends with the outcome, and the engine's processes a little later."""
    monkeypatch.setattr(jobs.time, "sleep", lambda seconds: None)
    before, out = tmp_path / "before", str(tmp_path / "next")
    before.mkdir()
    folder.remember_submitted(tmp_path, "before", str(before))
    present = SimpleNamespace(jobs=("before",))
    with pytest.raises(FederationError, match=rf"another run is going on, into {before}"):
        jobs._make_way(tmp_path, Jobs(3), present, out)
    write_outcome(before, {"status": "failed", "exit_code": 7})
    session = Jobs(3)
    jobs._make_way(tmp_path, session, present, out)
    assert (session.looks, session.aborted) == (-1, [])
    monkeypatch.setattr(jobs, "_ENDING", 0.0)  # one that does not end is still there
    with pytest.raises(FederationError, match="another run is going on"):
        jobs._make_way(tmp_path, Jobs(3), present, out)
    session = Jobs(3)
    jobs._make_way(tmp_path, session, present, str(before))
    assert session.aborted == ["before"]
