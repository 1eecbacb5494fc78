"""The federation of the README, followed literally."""

import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fald[nvflare]'")

from benchmarks.loopback import FALD, free_port, start

from fald.federation.engines.nvflare.process import end_family

pytestmark = pytest.mark.slow

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_five_commands_of_the_readme(tmp_path):
    """Followed literally, with a terminal for each command that keeps running."""
    fences = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (block,) = [content for kind, content in fences if kind == "sh" and "federation init" in content]
    (study,) = [content for kind, content in fences if kind == "toml"]
    (printed,) = [content for _, content in fences if content.startswith("$ fald run study.toml --quiet\n")]
    lines = [line.split() for line in block.splitlines()]
    assert [line[1:3] for line in lines[:4]] == [["federation", c] for c in ("init", "serve", "join", "join")]
    for table in (Path(__file__).parents[2] / "examples" / "two-sites").glob("*.csv"):
        shutil.copy(table, tmp_path)
    (tmp_path / "study.toml").write_text(study)
    init, *keep, run = [[*FALD, *line[1:]] for line in lines]
    init = [*init, "--port", str(free_port())]  # the only word that is not the README's
    kept = []
    try:
        subprocess.run(init, cwd=tmp_path, check=True, timeout=600, capture_output=True)
        kept += [start(command, tmp_path, tmp_path / f"{i}.txt") for i, command in enumerate(keep)]
        end = time.monotonic() + 600
        while "2 of 2 sites joined" not in (tmp_path / "0.txt").read_text() and time.monotonic() < end:
            time.sleep(0.5)
        done = subprocess.run(run, cwd=tmp_path, timeout=600, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    finally:
        for command in kept:
            end_family(command.pid)
            command.wait()
    rows = [line for line in printed.splitlines() if line.startswith(("treatment", "age", "intercept"))]
    assert len(rows) == 3
    for row in rows:
        (found,) = [line for line in done.stdout.splitlines() if line.startswith(row.split()[0])]
        np.testing.assert_allclose(numbers(found), numbers(row), rtol=0.02, atol=0.005)


def numbers(line):
    return [float(word) for word in re.findall(r"-?\d+\.\d+", line)]
