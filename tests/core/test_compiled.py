"""Where compiled programs are kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fald.core.compiled import cache_folder

_ASK = """
import {first}
from fald.core.compiled import keep_compiled
keep_compiled()
import jax
print(jax.config.jax_compilation_cache_dir)
"""


def test_the_folder_follows_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FALD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/fald/compiled")
    monkeypatch.setenv("FALD_CACHE", "/elsewhere")
    assert cache_folder() == Path("/elsewhere")
    monkeypatch.setenv("FALD_CACHE", "off")
    assert cache_folder() is None


@pytest.mark.parametrize("first", ["sys", "jax"])  # before JAX is loaded, and after
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"FALD_CACHE": "/elsewhere"}, "/elsewhere"),
        ({"FALD_CACHE": "off"}, "None"),
        ({"FALD_CACHE": "/elsewhere", "JAX_COMPILATION_CACHE_DIR": "/own"}, "/own"),
    ],
)
@pytest.mark.slow
def test_jax_is_told_unless_it_knows(first: str, given: dict[str, str], found: str) -> None:
    call = [sys.executable, "-c", _ASK.format(first=first)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", **given}
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split()[-1] == found


def test_help_does_not_load_what_it_does_not_need() -> None:
    code = "import sys, fald.cli.main; print(sorted({'jax', 'pandas', 'scipy', 'xarray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


_COUNT = """
import collections, sys
import jax
import numpy as np
import fald

found = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **about: found.update([name.rsplit("/", 1)[-1]]))
rows = {name: np.ones((int(sys.argv[1]), 1), np.float32) for name in "ab"}
fald.sample(int(sys.argv[2]), fald.models.gaussian_location([[1.0]]), fald.FederatedData.from_arrays(rows),
            num_rounds=5, local_steps=2, step_size=0.01, num_chains=2, progress=False)
print(found["cache_hits"], found["cache_misses"])
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing_that_the_first_did(tmp_path: Path) -> None:
    def run(rows: int, seed: int) -> tuple[int, int]:
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        call = [sys.executable, "-c", _COUNT, str(rows), str(seed)]
        done = subprocess.run(call, env=environment, capture_output=True, text=True, check=True)
        hits, misses = done.stdout.split()[-2:]
        return int(hits), int(misses)

    assert run(7, 1)[1] > 0
    hits, misses = run(7, 2)  # another seed, and so other draws, by the same programs
    assert (hits > 0, misses) == (True, 0)
    assert run(8, 1)[1] > 0  # the twin: other shapes are other programs
