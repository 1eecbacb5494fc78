"""The example package in a fresh environment: its models on real federations, equal to one process."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest
from benchmarks.installed import IMAGES, POLICY, PRESSURE, environment, write_rows

from fald.results.tree import load

pytestmark = pytest.mark.slow

SITES = ["north", "south"]
ENDINGS = {"pressure": "csv", "images": "npz"}


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return environment(tmp_path_factory.mktemp("environment") / "venv")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("own-models")
    write_rows(place / "rows", SITES)
    (place / "policy.toml").write_text(POLICY)
    return place


def files(folder, model):
    return {site: folder / "rows" / f"{site}.{ENDINGS[model]}" for site in SITES}


def text_of(model, num_rounds=0):
    return PRESSURE if model == "pressure" else IMAGES.format(num_rounds=num_rounds)


@pytest.fixture(scope="module")
def in_process(python, folder):
    """The draws of a model with all rows in one process of the same environment."""

    def run(model, num_rounds=0):
        out = folder / f"{model}-{num_rounds}-here"
        if not out.exists():
            named = ", ".join(f'{site} = "{path}"' for site, path in files(folder, model).items())
            study = folder / f"{model}-{num_rounds}.toml"
            study.write_text(text_of(model, num_rounds).replace("[data]", f"[data]\nfiles = {{ {named} }}"))
            command = [python, "-m", "fald.cli", "run", study, "--out", out, "--quiet"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=folder)
            assert done.returncode == 0, done.stderr
        return load(out / "posterior.nc")["posterior"].to_dataset()

    return run


def assert_equal(out, expected):
    """To 1e-10, which of float32 draws is to the bit."""
    found = load(out / "posterior.nc")["posterior"].to_dataset()
    for name, wanted in expected.data_vars.items():
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=1e-10)
        assert not np.allclose(np.asarray(wanted)[..., :1] * 1.001, wanted, rtol=0, atol=1e-10)


def use(home, path):
    """Let a site's next worker read another file."""
    about = home / "site.toml"
    about.write_text(re.sub('data = ".*"', f'data = "{path}"', about.read_text()))


def test_nvflare_equals_one_process_also_after_kill_9(python, folder, in_process):
    pytest.importorskip("nvflare")
    from benchmarks.loopback import Loopback

    loopback = Loopback(folder, files(folder, "pressure"), policy=folder / "policy.toml")
    loopback.program = [str(python), "-m", "fald.cli"]
    study = folder / "study.toml"
    with loopback as federation:
        study.write_text(text_of("pressure"))
        assert federation.begin(study, folder / "out").wait(900) == 0, federation.said("run")
        assert_equal(folder / "out", in_process("pressure"))

        for site, path in files(folder, "images").items():
            use(federation.folder / "sites" / site / "site", path)
        out = folder / "drilled"
        study.write_text(text_of("images", 100_000))
        run = federation.begin(study, out)
        federation.wait_for(
            lambda: (out / "checkpoint" / "state.npz").exists() and federation.worker("north"), 900
        )
        federation.kill(federation.worker("north"))
        assert run.wait(900) != 0, federation.said("run")
        with np.load(out / "checkpoint" / "state.npz") as state:
            num_rounds = int(state["round"]) + 20
        study.write_text(text_of("images", num_rounds))
        assert federation.begin(study, out, "--resume").wait(900) == 0, federation.said("run")
        assert_equal(out, in_process("images", num_rounds))


def test_flower_equals_one_process(python, folder, in_process):
    pytest.importorskip("flwr")
    from flower_loopback import Loopback, wait_for

    place, app = folder / "flower", Path(__file__).parents[2] / "examples" / "flower"
    shutil.rmtree(place, ignore_errors=True)
    start = Loopback(
        place, files(folder, "pressure"), guarded=SITES, place=python.parent, policy=folder / "policy.toml"
    )
    with start as federation:
        for model, num_rounds in (("pressure", 0), ("images", 4)):
            for site, path in files(folder, model).items():
                use(place / site, path)
            out, job = place / f"out-{model}", place / f"{model}.json"
            tree = tomllib.loads(text_of(model, num_rounds))
            job.write_text(json.dumps({"study": tree, "out": str(out), "resume": False}))
            config = f'job="{job}" sites="north,south" wait=600'
            federation.flwr("run", str(app), "loop", "--run-config", config)
            wait_for((out / "outcome.json").exists, 900, f"the outcome; {federation.logs()}")
            outcome = json.loads((out / "outcome.json").read_text())
            assert outcome["status"] == "done", (outcome, federation.logs())
            assert_equal(out, in_process(model, num_rounds))
