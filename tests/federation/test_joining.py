"""What keeps a site from joining, in a sentence with a way out; and what a federation leaves behind."""

import datetime
import json
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fald[nvflare]'")

from typer.testing import CliRunner

from fald.cli.main import app
from fald.core.errors import ConfigError, FederationError
from fald.core.files import sole_owner
from fald.core.version import differences, library_versions
from fald.federation import commands, doctor
from fald.federation.engines.nvflare import certificates, door, kits, process
from fald.federation.engines.nvflare.deployment import odd_sites
from fald.federation.engines.nvflare.probe import probe
from fald.federation.folder import OWN, note_own, read_settings
from fald.federation.secure.identity import Identity, key_fingerprint
from fald.federation.site import worker as site_worker
from fald.federation.site.worker import SiteSettings, SiteWorker


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A federation whose two sites are approved."""
    place = tmp_path_factory.mktemp("made") / "trial"
    commands.init(place, "north,south", "127.0.0.1", 8102)
    for site in ("north", "south"):
        certificates.make_request(place / "sites" / site, "trial", site, Identity.generate().public)
    kits.approve_waiting(place, read_settings(place))
    return place


@pytest.fixture
def trial(made, tmp_path):
    place = shutil.copytree(made, tmp_path / "trial")
    for kit in (place / "sites").iterdir():
        (kit / "site").mkdir()
        note_own(kit / "site", kit / "startup" / "client.key")
    return place


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "rows.csv").write_text("x,y\n1,2\n")
    return tmp_path / "rows.csv"


def join(kit, rows):
    """Join until the site would begin to run."""
    said = []
    commands.join(kit, rows, None, None, report=said.append, patience=0.1)
    return said


@pytest.fixture
def idle(monkeypatch):
    """Sites that join and end at once."""
    monkeypatch.setattr("fald.federation.engines.nvflare.deployment.keep_running", lambda *a, **k: None)


def reissue(trial, site, days=1000.0, name=None, maker=None):
    """Give a site another certificate for its key."""
    startup, settings = trial / "sites" / site / "startup", read_settings(trial)
    authority = maker or certificates.Authority.read(trial / "authority", settings.name)
    request = json.loads((trial / "sites" / site / certificates.REQUEST).read_text())
    from cryptography import x509

    key = x509.load_pem_x509_csr(request["request"].encode()).public_key()
    before = certificates.MEMBER_DAYS
    certificates.MEMBER_DAYS = days
    try:
        (startup / "client.crt").write_bytes(authority.certify(key, name or site))
    finally:
        certificates.MEMBER_DAYS = before


def test_a_certificate_that_no_server_takes_is_named_at_once(trial, rows, idle):
    kit = trial / "sites" / "north"
    said = join(kit, rows)  # the twin: a good one is taken
    assert any("This site's key has the fingerprint" in line for line in said)
    reissue(trial, "north", days=-0.01)
    with pytest.raises(FederationError, match="is over since") as caught:
        join(kit, rows)
    assert "remove" in caught.value.hint
    reissue(trial, "north", maker=certificates.Authority.make("trial"))
    with pytest.raises(FederationError, match="not given by the authority of this kit"):
        join(kit, rows)
    reissue(trial, "north", name="south")
    with pytest.raises(FederationError, match="is of 'south', not of site 'north'"):
        join(kit, rows)
    # the way out: without it a request is made, which the coordinator approves
    (kit / "startup" / "client.crt").unlink()
    with pytest.raises(FederationError, match="no certificate came"):
        join(kit, rows)
    kits.approve(trial, read_settings(trial), kit / certificates.REQUEST, again=True)
    join(kit, rows)


def test_a_clock_that_is_behind_is_named(trial, rows, idle, monkeypatch):
    class Earlier(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) - datetime.timedelta(days=400)

    monkeypatch.setattr(certificates.datetime, "datetime", Earlier)
    with pytest.raises(FederationError, match="is valid from") as caught:
        join(trial / "sites" / "north", rows)
    assert "clock" in caught.value.hint


def test_a_kit_is_joined_once(trial, rows, idle):
    kit = trial / "sites" / "north"
    with (
        sole_owner(kit / "site", "join.lock"),
        pytest.raises(FederationError, match=rf"joined already: .*process {os.getpid()}"),
    ):
        join(kit, rows)
    join(kit, rows)


@pytest.mark.parametrize("secret", ["site/state/identity.pem", "startup/client.key"])
def test_keys_that_come_with_a_kit_are_not_used(trial, rows, idle, secret):
    """Whoever put them there knows them, and a secure sum hides nothing from who knows all identities."""
    kit = trial / "sites" / "north"
    join(kit, rows)
    join(kit, rows)  # the twin: its own keys are used again
    path, before = kit / secret, (kit / secret).read_bytes()
    path.unlink()
    path.touch(mode=0o600)
    path.write_bytes(before)  # as an archive unpacks it
    with pytest.raises(FederationError, match="came with the kit") as caught:
        join(kit, rows)
    commands.join(kit, rows, None, kit / "site", report=print, patience=0.1)  # the way out of the hint
    assert f"--state {kit / 'site'}" in caught.value.hint
    join(kit, rows)
    (kit / "site" / OWN).unlink()
    with pytest.raises(FederationError, match="came with the kit"):
        join(kit, rows)


def test_two_processes_with_one_kit_are_told_from_a_restart(tmp_path):
    """By what the engine's log says when a copied kit joins on another machine."""
    server = tmp_path / "server"
    server.mkdir()
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    line = "INFO endpoint: Connection CN41 is evicted for CN42 from endpoint north for exceeding limit 1"
    (server / "log.txt").write_text(f"{now},123 {line}\n")  # a restart
    assert odd_sites(tmp_path) == []
    (server / "log.txt").write_text(f"2020-01-01 00:00:00,123 {line}\n" * 5)  # long ago
    assert odd_sites(tmp_path) == []
    (server / "log.txt").write_text(f"{now},123 {line}\n" * 3)
    assert odd_sites(tmp_path) == ["two processes join as north: its kit is in use twice, stop one"]
    door.note_registration(server, "south", {door._SAID: {"versions": library_versions(), "time": 0}})
    assert any("the clock of south" in line for line in odd_sites(tmp_path))


def test_versions_are_compared_when_a_site_joins(tmp_path, trial, rows, idle):
    (tmp_path / "server").mkdir(exist_ok=True)
    older = {**library_versions(), "fald": "0.0.9"}
    door.note_registration(tmp_path / "server", "north", {door._SAID: {"versions": older}})
    (line,) = odd_sites(tmp_path)
    assert line.startswith("north has fald 0.0.9, older than")
    door.note_registration(tmp_path / "server", "north", "nonsense")
    assert "unknown" in odd_sites(tmp_path)[0]
    kit = trial / "sites" / "north"
    about = json.loads((kit / "kit.json").read_text())
    (kit / "kit.json").write_text(json.dumps({**about, "versions": {**library_versions(), "jax": "99.1"}}))
    assert any("made with jax 99.1, newer than" in line for line in join(kit, rows))
    assert differences(library_versions(), library_versions()) == []


def test_strangers_with_a_certificate_are_not_let_in(trial, monkeypatch):
    from nvflare.apis.fl_context import FLContext
    from nvflare.private.defs import CellMessageHeaderKeys, ClientType
    from nvflare.private.fed.server.client_manager import ClientManager

    monkeypatch.setattr(ClientManager, "authenticated_client", lambda *arguments: "let in")
    door.keep_door(trial / "server")

    class Request:
        def __init__(self, name):
            self.name = name

        def get_header(self, key):
            assert key == CellMessageHeaderKeys.CLIENT_NAME
            return self.name

    context = FLContext()
    site, user = ClientType.REGULAR, ClientType.ADMIN
    assert ClientManager.authenticated_client(None, Request("east"), context, site) is None
    assert ClientManager.authenticated_client(None, Request("north"), context, site) == "let in"
    assert ClientManager.authenticated_client(None, Request("a user"), context, user) == "let in"
    assert list(door.read_joined(trial / "server")) == ["north"]


def test_what_stands_between_a_site_and_its_server_is_said(trial):
    startup = trial / "sites" / "north" / "startup"
    with socket.socket() as idle:  # nobody listens
        idle.bind(("127.0.0.1", 0))
        assert "nothing answers" in probe("127.0.0.1", idle.getsockname()[1], startup)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        assert "127.0.0.1" in probe("127.0.0.1", server.getsockname()[1], startup)
    stranger = certificates.Authority.make("trial")
    assert "no certificate of this federation's authority" in answered(trial, stranger)
    assert "does not take this" in answered(trial, None, trusts=stranger)
    assert answered(trial, None) == ""


def answered(trial, maker, trusts=None):
    """What the probe says of a server with a certificate of an authority, which trusts another."""
    import ssl

    own = certificates.Authority.read(trial / "authority", "trial")
    place = trial / f"server-{len(list(trial.iterdir()))}"
    place.mkdir()
    (maker or own).issue(place, "server", "127.0.0.1", host="127.0.0.1")
    (place / "trusted.pem").write_bytes((trusts or own).pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place / "server.crt", place / "server.key")
    context.load_verify_locations(place / "trusted.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])

    def serve(server):
        try:
            with context.wrap_socket(server.accept()[0], server_side=True) as connection:
                connection.recv(64)
                connection.sendall(b"\0" * 9)
        except OSError:
            pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        return probe("127.0.0.1", server.getsockname()[1], trial / "sites" / "north" / "startup")


def test_a_new_key_is_taken_after_its_fingerprint_was_compared(tmp_path):
    old, new, own = (Identity.generate().public for _ in range(3))
    kit, roster = tmp_path / "north", tmp_path / "roster.json"
    commands.write_site(kit / "site", "north", {}, coordinator="", sites=())
    pins = kit / "site" / "state" / "pins.json"
    pins.parent.mkdir()
    pins.write_text(json.dumps({"north": own, "south": old, "west": old}))
    roster.write_text(json.dumps({"north": own, "south": new, "east": new}))
    shown = commands.repin(kit, "south", roster, "")
    assert key_fingerprint(old) in shown
    assert key_fingerprint(new) in shown
    assert json.loads(pins.read_text())["south"] == old
    with pytest.raises(ConfigError, match="is not the fingerprint"):
        commands.repin(kit, "south", roster, key_fingerprint(old))
    commands.repin(kit, "south", roster, key_fingerprint(new))
    commands.repin(kit, "east", roster, key_fingerprint(new))
    commands.repin(kit, "west", roster, commands.GONE)
    assert json.loads(pins.read_text()) == {"north": own, "south": new, "east": new}
    assert "Nothing to do" in commands.repin(kit, "south", roster, "")
    done = CliRunner().invoke(app, ["federation", "repin", str(kit), "south", str(tmp_path / "none.json")])
    assert isinstance(done.exception, ConfigError)


def test_logs_and_folders_of_jobs_stay_within_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_LARGEST_LOG", 100)
    log = tmp_path / process.ENGINE_LOG
    names = [f"{i:08x}-0000-4000-8000-000000000000" for i in range(9)]
    for i, name in enumerate(names):
        (tmp_path / name / "app").mkdir(parents=True)
        os.utime(tmp_path / name, (i, i))
    (tmp_path / "startup").mkdir()
    with open(log, "ab") as writer:  # as the engine's process, which goes on writing
        writer.write(b"x" * 200)
        writer.flush()
        process.tidy(tmp_path)
        writer.write(b"new")
        writer.flush()
        assert log.read_bytes() == b"new"
    assert (tmp_path / "engine.1.txt").stat().st_size == 200
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == [*names[-5:], "startup"]

    monkeypatch.setattr(site_worker, "_LARGEST_LOG", 100)
    site = SiteWorker(SiteSettings("north", tmp_path / "state"))
    for number in range(30):
        site.log(f"line {number} {'.' * 20}")
    assert (tmp_path / "state" / "site.log").stat().st_size < 200
    assert (tmp_path / "state" / "site.1.log").stat().st_size < 200


def test_the_doctor_names_what_will_fail(trial, rows, idle):
    north = trial / "sites" / "north"
    join(north, rows)
    found = doctor.examine(trial)
    assert [f.about for f in found if f.level == "bad"] == ["port"]  # nobody serves
    assert any("never joined: north, south" in f.said for f in found)
    reissue(trial, "north", days=30)
    assert any(f.level == "warn" and "north: 30 days" in f.said for f in doctor.examine(trial))
    reissue(trial, "north", days=-0.01)
    assert any(f.level == "bad" and "is over since" in f.said for f in doctor.examine(north))
    reissue(trial, "north")
    key = north / "site" / "state" / "identity.pem"
    assert not [f for f in doctor.examine(north) if f.about == "keys" and f.level != "ok"]
    key.chmod(0o644)
    assert [f for f in doctor.examine(north) if f.level == "bad" and f"others may read {key}" in f.said]
    rows.unlink()
    assert [f for f in doctor.examine(north) if f.about == "table" and f.mend]
    shown = CliRunner().invoke(app, ["federation", "doctor", str(trial)]).stdout.splitlines()
    (port,) = [f for f in doctor.examine(trial) if f.about == "port"]
    place = next(i for i, line in enumerate(shown) if line.startswith("WRONG"))
    assert shown[place].endswith(f"  {port.said}")
    assert shown[place + 1].strip() == f"-> {port.mend}"
    done = CliRunner().invoke(app, ["federation", "doctor", str(trial), "--json"])
    assert done.exit_code == 7
    assert {"level", "about", "said", "mend"} == set(json.loads(done.stdout)[0])
    with pytest.raises(ConfigError, match="neither the folder of a federation nor that of a site"):
        doctor.examine(trial / "authority")


@pytest.mark.parametrize(("free", "level"), [(1e7, "bad"), (1e9, "warn"), (1e11, "ok")])
def test_the_doctor_sees_a_disk_that_fills(tmp_path, monkeypatch, free, level):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    (found,) = doctor._disk(tmp_path)
    assert (found.level, bool(found.mend)) == (level, level != "ok")


def test_the_doctor_sees_a_key_that_join_would_not_take(trial, rows, idle):
    """As after a copy, which has the key of another file."""
    north = trial / "sites" / "north"
    join(north, rows)
    assert not [f for f in doctor.examine(north) if "was not made by" in f.said]
    key = north / "site" / "state" / "identity.pem"
    copy = key.with_name("copy")
    shutil.copy2(key, copy)
    copy.rename(key)
    (found,) = [f for f in doctor.examine(north) if "was not made by" in f.said]
    assert found.level == "bad"
    assert "--state" in found.mend


def test_the_doctor_sees_a_disk_for_the_state_alone(trial, rows, idle, monkeypatch):
    north = trial / "sites" / "north"
    join(north, rows)
    state, stat = north / "site" / "state", Path.stat

    def mounted(path, **given):
        found = stat(path, **given)
        return SimpleNamespace(st_dev=-1, st_mode=found.st_mode) if path == state else found

    def disks():
        return [f.said.partition(" free at ")[2] for f in doctor.examine(north) if f.about == "disk"]

    assert disks() == [str(north)]
    monkeypatch.setattr(Path, "stat", mounted)
    assert disks() == [str(north), str(state)]


def test_the_doctor_sees_a_key_that_the_others_do_not_know(trial, rows, idle):
    north = trial / "sites" / "north"
    join(north, rows)
    pins = north / "site" / "state" / "pins.json"
    own = Identity.load(north / "site" / "state" / "identity.pem").public
    for known, levels in ((own, set()), (Identity.generate().public, {"bad"})):
        pins.write_text(json.dumps({"north": known}))
        found = [f for f in doctor.examine(north) if f.about == "keys" and "another key" in f.said]
        assert {f.level for f in found} == levels
        assert all("repin" in f.mend for f in found)
