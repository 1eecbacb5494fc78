"""The wheel alone, in an environment that has never seen the checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_wheel_installs_and_runs_the_demo_without_a_checkout(tmp_path):
    def call(*command, cwd=tmp_path):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    build = [sys.executable, "-m", "build", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    call(*build)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert len(list((tmp_path / "dist").glob("*.tar.gz"))) == 1
    call(sys.executable, "-m", "venv", "env")
    python, fald = str(tmp_path / "env/bin/python"), str(tmp_path / "env/bin/fald")
    pinned = ["--constraint", str(ROOT / "constraints.txt")]
    call(python, "-m", "pip", "install", "--quiet", "--no-compile", *pinned, str(wheel))
    empty = tmp_path / "empty"
    empty.mkdir()
    found = call(fald, "demo", cwd=empty)
    assert "Reached: means within" in found
    assert (empty / "fald-demo" / "report.html").stat().st_size > 10_000
    where = call(python, "-c", "import fald; print(fald.__file__)", cwd=empty)
    assert where.startswith(str(tmp_path / "env"))
