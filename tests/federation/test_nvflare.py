"""A federation of the bundled trial on this machine: mutual TLS, three sites, the real commands."""

import json
import shutil
import socket
import ssl
import time

import numpy as np
import pandas as pd
import pytest
import xarray as xr

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fald[nvflare]'")

from benchmarks.loopback import Loopback, split_trial

from fald.core.errors import ExitCode, FederationError
from fald.federation.coordinator.run import run_federated
from fald.federation.engines.nvflare import jobs, kits
from fald.federation.engines.nvflare.certificates import Authority
from fald.federation.engines.nvflare.process import Supervisor
from fald.federation.folder import read_settings
from fald.federation.link import LocalLink
from fald.federation.site.worker import SiteSettings, SiteWorker
from fald.results.tree import load
from fald.study.datasets import study_path
from fald.study.schema import load_study

pytestmark = pytest.mark.slow

LANGEVIN = """
[sampler]
num-rounds = {num_rounds}
local-steps = 2
step-size = 6e-4
num-chains = 2
num-warmup = 100
thinning = 10
seed = 3

[federation]
timeout = {timeout}
retries = 0  # who was killed for good is not waited for again
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    trial = study_path("indo").read_text().replace('file = "indo.csv"\nsite = "site"\n', "")
    (folder / "study.toml").write_text(trial)
    return folder


@pytest.fixture(scope="module")
def tables(folder):
    """The rows of the trial at three sites, as many as a secure sum needs: each site takes two processes."""
    tables = split_trial(folder)
    smallest, second = sorted(tables, key=lambda name: len(tables[name].read_text().splitlines()))[:2]
    rows = [pd.read_csv(tables[name]) for name in (second, smallest)]
    pd.concat(rows).to_csv(tables[second], index=False)
    return {name: path for name, path in tables.items() if name != smallest}


@pytest.fixture(scope="module")
def federation(folder, tables):
    loopback = Loopback(folder, tables)
    # as for users: a worker that is started again compiles nothing again
    loopback.environment |= {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    with loopback as running:
        yield running


@pytest.fixture(scope="module")
def in_process(folder, tables):
    """The same study with the sites in this process, one after the other, without any engine."""

    def run(study):
        sites = {
            name: SiteWorker(
                SiteSettings(name, folder / "local" / name / study.stem, path, sites=tuple(tables))
            )
            for name, path in tables.items()
        }
        link = LocalLink({name: worker.handle for name, worker in sites.items()})
        return run_federated(load_study(study), link, folder / f"{study.stem}-in-process")

    return run


def assert_same_draws(tree, other):
    xr.testing.assert_identical(tree["posterior"].to_dataset(), other["posterior"].to_dataset())


def test_the_trial_from_init_to_the_posterior(federation, folder, in_process):
    run = federation.begin(folder / "study.toml", folder / "out")
    assert run.wait(600) == 0, federation.said("run")
    table = federation.said("run")
    assert "3 sites, 602 rows" in table
    assert "indomethacin" in table
    found, expected = load(folder / "out" / "posterior.nc"), in_process(folder / "study.toml")
    assert_same_draws(found, expected)
    effect = found["posterior"].to_dataset()
    assert np.isfinite(effect.to_dataarray().values).all()
    status = json.loads(federation.fald("federation", "status", federation.folder, "--json"))
    assert status["last_run"]["state"] == "done"
    assert all(site["joined"] for site in status["sites"])


def journal_round(out):
    """The last round that a run has written down."""
    path = out / "rounds.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line).get("round", 0) for line in lines if line.endswith("}")), default=0)


def saved_round(out):
    """The round that a run would go on from."""
    with np.load(out / "checkpoint" / "state.npz") as state:
        return int(state["round"])


def test_a_run_survives_kill_9_of_every_process(federation, folder, in_process):
    """Site's worker, site's parent, loop, server, and the command itself: resumed, the chain is the same.

    The run has more rounds than any machine does meanwhile; how many it is to have is said at the end.
    """
    out, study, site = folder / "drills", folder / "langevin.toml", sorted(federation.tables)[0]
    trial = (folder / "study.toml").read_text()
    study.write_text(trial + LANGEVIN.format(num_rounds=100_000, timeout=75))

    def progressed(since):
        return (
            (out / "checkpoint").exists()
            and journal_round(out) > since
            and federation.worker(site) is not None
        )

    drills = {
        "worker of a site": lambda: federation.kill(federation.worker(site)),
        "parent of a site": lambda: federation.kill(federation.engine(site)),
        "loop": lambda: federation.kill(federation.worker("server")),
        "server": lambda: federation.kill(federation.engine("server")),
        "command": lambda: federation.commands["run"].kill(),
    }
    options = []
    for drill, kill in drills.items():
        since = journal_round(out)
        run = federation.begin(study, out, *options)
        federation.wait_for(lambda since=since: progressed(since), 600)
        kill()
        assert run.wait(600) != 0, f"{drill}: {federation.said('run')}"
        options = ["--resume"]
    if loop := federation.worker("server"):  # it goes on without the command
        federation.kill(loop)
        loop.wait()
    num_rounds = max(saved_round(out), 100) + 50
    study.write_text(trial + LANGEVIN.format(num_rounds=num_rounds, timeout=600))
    assert federation.begin(study, out, "--resume").wait(600) == 0, federation.said("run")
    assert_same_draws(load(out / "posterior.nc"), in_process(study))


def test_who_does_not_belong_is_refused(federation, folder):
    settings = read_settings(federation.folder)
    authority = Authority.read(federation.folder / "authority", settings.name)
    stranger = Authority.make(settings.name)  # the same name, another key
    first, second = sorted(federation.tables)[:2]
    own = federation.folder / "sites" / first / "startup"
    kits.make_site(folder / "unregistered", settings, authority, first)
    stranger.issue(folder / "unregistered" / "startup", "client", first)
    assert_handshakes(federation, refused=folder / "unregistered" / "startup", accepted=own)

    kits.make_site(folder / "borrowed", settings, authority, second)
    for name in ("client.key", "client.crt"):
        shutil.copy(own / name, folder / "borrowed" / "startup" / name)
    kits.make_site(folder / "genuine", settings, authority, second)  # the twin, which must get in
    authority.issue(folder / "genuine" / "startup", "client", second)
    sites = {
        name: Supervisor("site", folder / name, name=second, organisation=settings.name)
        for name in ("borrowed", "genuine")
    }
    for name in sites:  # as join does
        kits.settle(folder / name, kits.read_kit(folder / name))
    log = federation.folder / "server" / "log.txt"
    refusal = f"authenticated as '{first}' but claimed endpoint '{second}'"
    try:
        sites["borrowed"].start()
        assert_users_without_the_role_are_refused(folder, settings, authority, stranger, first)
        federation.wait_for(lambda: refusal in log.read_text(), 600)
        time.sleep(3)  # whatever it tries next
        assert not registered(folder / "borrowed")
        sites["borrowed"].stop()
        sites["genuine"].start()
        federation.wait_for(lambda: registered(folder / "genuine"), 600)
    finally:
        for site in sites.values():
            site.stop()


def registered(kit):
    """Whether the engine of a site says that the server has let it in."""
    path = kit / "log.txt"
    return path.exists() and "Successfully registered" in path.read_text()


def assert_users_without_the_role_are_refused(folder, settings, authority, stranger, site):
    def session(name, maker, role, user):
        kits.make_user(folder / name, settings, maker, name=user, role=role)
        return jobs.AdminSession(folder / name, user)

    job = jobs.write_job(folder / "job", settings, {"out": str(folder / "never")})
    with session("member", authority, "member", "member@fald.org") as member:
        assert site in member.situation().sites  # it may look
        with pytest.raises(FederationError, match="not authorized"):
            member.submit(job)
    with pytest.raises(FederationError):
        session("stranger", stranger, "lead", kits.COORDINATOR)
    assert not (folder / "never").exists()


def assert_handshakes(federation, refused, accepted):
    """Without a certificate, or with a stranger's, nobody is answered; with that of a site one is."""

    def answer(startup):
        context = ssl.create_default_context(cafile=federation.folder / "authority" / "authority.crt")
        context.set_alpn_protocols(["h2"])
        if startup is not None:
            context.load_cert_chain(startup / "client.crt", startup / "client.key")
        with (
            socket.create_connection(("127.0.0.1", federation.port), timeout=120) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
        ):
            secured.settimeout(120)
            secured.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
            try:
                return secured.recv(64)
            except (ssl.SSLError, ConnectionError):
                return b""

    assert answer(None) == b""
    assert answer(refused) == b""
    assert answer(accepted)


@pytest.mark.parametrize("way", ["shipped code", "another class"])
def test_a_job_with_code_or_another_class_is_refused(federation, folder, way):
    """Even the coordinator's own login cannot run anything but the two classes of the installed package."""
    settings, marker = read_settings(federation.folder), folder / f"ran {way}"
    study = load_study(folder / "study.toml").as_settings()
    job = {"study": study, "out": str(folder / f"out {way}"), "resume": False}
    path = jobs.write_job(folder / way.replace(" ", "-"), settings, job)
    config = path / "site" / "config" / "config_fed_client.json"
    if way == "shipped code":
        package = "fald.federation.engines.nvflare.adapter"
        code = f"open({str(marker)!r}, 'w')\nfrom {package} import SiteExecutor as Intruder\n"
        (path / "site" / "custom").mkdir()
        (path / "site" / "custom" / "intruder.py").write_text(code)
        other = "intruder.Intruder"
    else:
        other = "nvflare.app_common.np.np_trainer.NPTrainer"
    config.write_text(config.read_text().replace(kits.CLASSES["site"], other))
    with jobs.AdminSession(federation.folder / "coordinator") as session:
        job_id = session.submit(path)
        end = time.monotonic() + 600
        while (state := session.state(job_id)) in ("waiting", "running") and time.monotonic() < end:
            time.sleep(1)
        if state in ("waiting", "running"):
            session.abort(job_id, 30)
    assert state in ("failed", "aborted")
    assert not marker.exists()


def test_bad_requests_are_refused(federation, folder):
    """What the commands answer to nonsense, with its exit code."""
    usage, failed = int(ExitCode.USAGE), int(ExitCode.FEDERATION)
    federation.fald("federation", "init", federation.folder, "--sites", "a,b", "--host", "h", code=usage)
    federation.fald("federation", "serve", federation.folder, code=failed)  # the port is taken
    federation.fald("federation", "serve", folder / "nowhere", code=usage)
