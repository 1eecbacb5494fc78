"""A federation of the bundled trial on this machine: mutual TLS, four sites, the real commands."""

import json
import shutil
import socket
import ssl
import time

import numpy as np
import pytest
import xarray as xr

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fald[nvflare]'")

from benchmarks.loopback import Loopback, split_trial  # noqa: E402
from fald.datasets import study_path  # noqa: E402
from fald.errors import ExitCode, FederationError  # noqa: E402
from fald.federation.folder import read_settings  # noqa: E402
from fald.federation.link import LocalLink  # noqa: E402
from fald.federation.nvflare import jobs, kits  # noqa: E402
from fald.federation.nvflare.certificates import Authority  # noqa: E402
from fald.federation.nvflare.process import Supervisor  # noqa: E402
from fald.federation.run import run_federated  # noqa: E402
from fald.federation.site import SiteSettings, SiteWorker  # noqa: E402
from fald.results import load  # noqa: E402
from fald.study import load_study  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.federation, pytest.mark.xdist_group("federation")]

ROUNDS = 3000
LANGEVIN = f"""
[sampler]
num-rounds = {ROUNDS}
local-steps = 2
step-size = 6e-4
num-chains = 2
num-warmup = 100
thinning = 10
seed = 3

[federation]
timeout = 20
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    trial = study_path("indo").read_text().replace('file = "indo.csv"\nsite = "site"\n', "")
    (folder / "study.toml").write_text(trial)
    (folder / "langevin.toml").write_text(trial + LANGEVIN)
    return folder


@pytest.fixture(scope="module")
def tables(folder):
    return split_trial(folder)


@pytest.fixture(scope="module")
def federation(folder, tables):
    with Loopback(folder, tables) as running:
        yield running


@pytest.fixture(scope="module")
def in_process(folder, tables):
    """The same study with the sites in this process, one after the other, without any engine."""

    def run(study):
        sites = {
            name: SiteWorker(SiteSettings(name, folder / "local" / name / study.stem, data=path))
            for name, path in tables.items()
        }
        link = LocalLink({name: worker.handle for name, worker in sites.items()})
        return run_federated(load_study(study), link, folder / f"{study.stem}-in-process")

    return run


def assert_same_draws(tree, other):
    xr.testing.assert_identical(tree["posterior"].to_dataset(), other["posterior"].to_dataset())


def test_the_trial_from_init_to_the_posterior(federation, folder, in_process):
    run = federation.begin(folder / "study.toml", folder / "out")
    assert run.wait(200) == 0, federation.said("run")
    table = federation.said("run")
    assert "4 sites, 602 rows" in table
    assert "indomethacin" in table
    found, expected = load(folder / "out" / "posterior.nc"), in_process(folder / "study.toml")
    assert_same_draws(found, expected)
    effect = found["posterior"].to_dataset()
    assert np.isfinite(effect.to_dataarray().values).all()
    status = json.loads(federation.fald("federation", "status", federation.folder, "--json"))
    assert status["last_run"]["state"] == "done"
    assert all(site["joined"] for site in status["sites"])
