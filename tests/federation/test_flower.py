"""The bundled trial on a Flower federation on this machine: a SuperLink and two SuperNodes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fald[flower]'")

import pandas as pd
from flower_loopback import Loopback, wait_for

from fald.federation.engines.flower import submit
from fald.study import run as commands
from fald.study.datasets import load_bundled_study
from fald.study.folder import open_run
from fald.study.schema import make_study

pytestmark = pytest.mark.slow

APP = Path(__file__).parents[2] / "examples" / "flower"
HOSTILE = """
import os
import time
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def main(grid, context):
    end = time.monotonic() + 200
    while len(nodes := list(grid.get_node_ids())) < 2 and time.monotonic() < end:
        time.sleep(0.5)
    messages = [Message(RecordDict(), node, "query", ttl=200) for node in nodes]
    replies = list(grid.send_and_receive(messages, timeout=200))
    Path({done!r}).write_text(str([len(nodes), len(replies)]))


@client_app.query()
def steal(message, context):
    Path({loot!r}, f"node-{{context.node_id}}").write_text(os.environ.get("FALD_SITE", "a plain SuperNode"))
    return Message(RecordDict(), reply_to=message)
"""


def split_trial(folder: Path) -> dict[str, Path]:
    """The bundled trial as the tables of two sites."""
    bundled = load_bundled_study("indo")
    rows = pd.read_csv(Path(bundled.folder) / bundled.data.file)
    hospitals = sorted(rows[bundled.data.site].unique())
    data = {"north": folder / "north.csv", "south": folder / "south.csv"}
    north = rows[bundled.data.site].isin(hospitals[:2])
    rows[north].to_csv(data["north"], index=False)
    rows[~north].to_csv(data["south"], index=False)
    return data


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flower")
    with Loopback(folder / "federation", split_trial(folder), guarded={"north"}) as running:
        yield running


@pytest.fixture(scope="module")
def settings() -> dict:
    """The bundled trial as a study of these two sites."""
    tree = load_bundled_study("indo").as_settings()
    tree["data"] = {key: value for key, value in tree["data"].items() if key not in ("file", "site")}
    return {key: value for key, value in tree.items() if key != "folder"}


def test_the_trial_equals_the_run_in_one_process(federation, settings, tmp_path):
    check_trial(federation, settings, tmp_path)


def test_with_a_superlink_of_ours_too_and_it_runs_no_submitted_app(settings, tmp_path):
    """Its twin, a plain SuperLink, runs the same hostile app below."""
    data = split_trial(tmp_path)
    with Loopback(tmp_path / "federation", data, data, ours=True) as federation:
        check_trial(federation, settings, tmp_path)
        _, done = submit_hostile(federation, tmp_path)

        def states() -> list[str]:
            return [str(run["status"]) for run in federation.flwr("list", "loop")["runs"]]

        wait_for(lambda: sorted(states()) == ["finished:completed", "finished:failed"], 600, "its end")
        assert not done.exists()
        assert "run-config sites must name two or more" in (federation.folder / "link.log").read_text()


def check_trial(federation, settings, tmp_path):
    study, out = tmp_path / "study.json", tmp_path / "out"
    job = {"study": settings, "out": str(out), "resume": False}
    study.write_text(json.dumps(job))
    config = f'job="{study}" sites="north,south" wait=300'
    federation.flwr("run", str(APP), "loop", "--run-config", config)
    files = {name: str(path) for name, path in federation.data.items()}
    here = make_study({**settings, "data": {**settings["data"], "files": files}}, "a test")
    expected = commands.run_study(here, tmp_path / "here", resume=False, progress=False).tree

    outcome = read_outcome(federation, out)
    assert outcome["status"] == "done", (outcome, federation.logs())
    found = open_run(out)[1]
    for name, wanted in expected["posterior"].data_vars.items():
        np.testing.assert_allclose(found["posterior"][name], wanted, rtol=0, atol=1e-6)
        # the same check sees another run: chains in another order
        assert not np.allclose(found["posterior"][name][::-1], wanted, rtol=0, atol=1e-6)


def test_a_refusal_reaches_the_coordinator_with_the_site_and_no_values(federation, settings, tmp_path):
    """Submitted as ``fald run --federation`` does; the sites' tables have no such column."""
    folder, out = tmp_path / "trial", tmp_path / "out"
    folder.mkdir()
    about = {"name": "trial", "engine": "flower", "sites": list(federation.data), "host": "127.0.0.1"}
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in {**about, "port": federation.port}.items()]
    (folder / "federation.toml").write_text("".join(lines))
    study = {**settings, "data": {**settings["data"], "target": "survival"}}
    number = submit.submit(folder, {"study": study, "out": str(out), "resume": False})
    outcome = read_outcome(federation, out)
    assert (outcome["status"], outcome["exit_code"]) == ("failed", 7)
    assert outcome["message"] == "site 'north' refuses: its table has no column 'survival'"
    wait_for(lambda: submit._ask_state(folder, number) == "failed", 600, "the end of the run")


def read_outcome(federation: Loopback, out: Path) -> dict:
    try:
        wait_for((out / "outcome.json").exists, 600, "the outcome")
    except TimeoutError as error:
        raise AssertionError(federation.logs()) from error
    return json.loads((out / "outcome.json").read_text())


def test_a_guarded_supernode_runs_no_shipped_code(federation, tmp_path):
    """The plain SuperNode beside it does: that is Flower's way, and the twin of this test."""
    loot, done = submit_hostile(federation, tmp_path)
    wait_for(done.exists, 600, "the end of the hostile app")
    assert json.loads(done.read_text()) == [2, 2]
    assert [path.read_text() for path in loot.iterdir()] == ["a plain SuperNode"]


def submit_hostile(federation, tmp_path) -> tuple[Path, Path]:
    """Where the app leaves what it took, and that it ran at all."""
    app, loot, done = tmp_path / "app", tmp_path / "loot", tmp_path / "done"
    (app / "hostile").mkdir(parents=True)
    loot.mkdir()
    (app / "hostile" / "__init__.py").write_text("")
    (app / "hostile" / "app.py").write_text(HOSTILE.format(loot=str(loot), done=str(done)))
    text = (APP / "pyproject.toml").read_text()
    text = text.replace("fald.federation.engines.flower.app", "hostile.app").replace("fald-study", "hostile")
    (app / "pyproject.toml").write_text(text)
    federation.flwr("run", str(app), "loop")
    return loot, done
