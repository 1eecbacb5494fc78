"""The researcher's script of docs/how-to/networks.md, on a few rows: of the real images where they are."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

from fald import datasets
from images import write_set

SCRIPT = Path(__file__).parents[2] / "examples" / "network.py"


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) <= 60


@pytest.mark.slow
def test_the_script_runs(tmp_path, monkeypatch, capsys):
    if "FALD_DATA" not in os.environ:
        hashes = {name: write_set(tmp_path / name, seed) for seed, name in enumerate(datasets.IMAGE_SETS)}
        monkeypatch.setattr(datasets, "_HASHES", hashes)
        monkeypatch.setenv("FALD_DATA", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "agg")
    picture = tmp_path / "a.png"
    asked = ["--rows", "300", "--rounds", "12", "--out", str(picture)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *asked])
    found = runpy.run_path(str(SCRIPT), run_name="__main__")
    curve = found["probe"].curve()
    assert curve["round"].tolist() == [6, 8, 10, 12]  # the end of every cycle
    assert {"accuracy", "nll", "ece"} <= set(curve)
    assert "accuracy" in capsys.readouterr().out
    assert picture.stat().st_size > 1000
