"""A run reads its tables once, summarises once and judges once, whatever is then made of it."""

import json
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from fald.cli.main import app
from fald.results import document, examine
from fald.study.schema import Study
from reports import FITTED, SAMPLED, write_tables

SHORT = ["--set", "num-rounds=200", "--set", "num-warmup=0"]


@pytest.fixture
def counted(monkeypatch):
    """How often tables were read, results summarised and checks made."""
    counts = {"read": 0, "summarised": 0, "judged": 0}

    def count(place, name, what):
        original = getattr(place, name)

        def counting(*args, **kwargs):
            counts[what] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(place, name, counting)

    count(Study, "read_data", "read")
    count(document, "summary", "summarised")
    count(examine, "made_checks", "judged")
    return counts


@pytest.mark.parametrize("study", [FITTED, SAMPLED], ids=["fitted", "sampled"])
def test_a_run_looks_once(tmp_path, monkeypatch, counted, study):
    write_tables(tmp_path)
    (tmp_path / "study.toml").write_text(study)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fald", "run"])
    more = SHORT if study is SAMPLED else []
    done = CliRunner().invoke(app, ["run", "study.toml", "-q", "--level", "0.9", *more])
    assert done.exit_code == 0, done.output
    assert counted == {"read": 1, "summarised": 1, "judged": 1}
    assert (tmp_path / "runs/study/report.html").exists()
    # and what it wrote is what it printed
    judged = json.loads((tmp_path / "runs/study/summary.json").read_text())["judgement"]
    assert done.output.startswith(judged["first"])
    for command in ("diagnose", "report"):
        counted |= dict.fromkeys(counted, 0)
        done = CliRunner().invoke(app, [command, "runs/study", "--level", "0.9", "--doubling", "0"])
        assert done.exit_code == 0, done.output
        assert counted == {"read": 1, "summarised": 1, "judged": 1}
        assert judged["first"].partition(": ")[2] in done.output


def test_the_demo_reads_once(tmp_path, monkeypatch, counted):
    monkeypatch.setattr(sys, "argv", ["fald", "demo"])
    done = CliRunner().invoke(app, ["demo", "-q", "--out", str(tmp_path / "demo")])
    assert done.exit_code == 0, done.output
    assert counted["read"] == 1
    assert done.output.startswith("Use with care: Outcomes at Michigan lie above what the model expects")
    assert np.isclose(json.loads((tmp_path / "demo/summary.json").read_text())["level"], 0.95)
