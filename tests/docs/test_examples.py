"""The researcher's script of docs/how-to/networks.md, on a few rows of the real images."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "network.py"


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.skipif("FALD_DATA" not in os.environ, reason="FALD_DATA names no folder with the image sets")
def test_the_script_runs(tmp_path):
    command = [
        sys.executable,
        str(SCRIPT),
        "--rows",
        "300",
        "--rounds",
        "4",
        "--out",
        str(tmp_path / "a.png"),
    ]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MPLBACKEND": "agg"})
    assert found.returncode == 0, found.stderr
    assert "accuracy" in found.stdout
    assert (tmp_path / "a.png").stat().st_size > 1000
