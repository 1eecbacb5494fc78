"""Shared settings: the federation of the reference table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fald.privacy import RunSettings
from fald.settings.participation import without_replacement


def _run(**changes) -> RunSettings:
    table = {
        "sizes": [6000] * 10,
        "local_steps": 1,
        "num_rounds": 10_000,
        "step_size": 1e-7,
        "batch_size": 200,
        "sensitivity": 2.0,
        "noise": "paper",
    }
    return RunSettings(**{**table, **changes})


@pytest.fixture
def run():
    """Settings of the reference table, with changes."""
    return _run


@pytest.fixture
def small():
    """A short run, quick to account for, with changes."""
    base = _run(sizes=[500] * 6, local_steps=3, num_rounds=20, step_size=1e-4, batch_size=25)
    return lambda **changes: replace(base, **changes)


@pytest.fixture
def drawn():
    """Scheme II with S devices."""
    return without_replacement
