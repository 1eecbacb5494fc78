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
