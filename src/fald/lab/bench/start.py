"""Start-up: import, compilation with and without the cache, and the demo, each in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from fald.lab.bench.timing import Case, Contender, Mark, times_faster

_COMPILE = """
import fald
data = fald.datasets.load("indo")
model = fald.models.logistic_regression(list(data.features))
fald.sample(0, model, data, num_rounds=1, local_steps=1, step_size=1e-4, progress=False)
"""


_FIT = """
from fald.lab.bench.fitters import fald_fit, rows
fald_fit("logistic", *rows("logistic", 1000, 9), 5)()
"""


def _process(*arguments: str, cache: Callable[[], str] | None = None) -> Callable[[], None]:
    def run() -> None:
        environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        environment["FALD_CACHE"] = cache() if cache else "off"
        subprocess.run(arguments, check=True, capture_output=True, env=environment)

    return run


def cases(quick: bool) -> list[Case]:
    """F: seconds to the first result."""
    python = sys.executable
    kept = tempfile.TemporaryDirectory(prefix="fald-bench-")
    fresh: list[tempfile.TemporaryDirectory] = []

    def new() -> str:
        fresh.append(tempfile.TemporaryDirectory(prefix="fald-bench-"))
        return fresh[-1].name

    def demo(cache: Callable[[], str]) -> Callable[[], None]:
        out = str(Path(kept.name) / "demo")
        return _process(python, "-m", "fald.cli", "demo", "--out", out, "--quiet", cache=cache)

    imports = {
        f"import {module}": Contender(_process(python, "-c", f"import {module}"), 1)
        for module in ("jax", "fald")
    }
    cached = _process(python, "-c", _COMPILE, cache=lambda: kept.name)
    starts = {
        "first sample, no cache": Contender(_process(python, "-c", _COMPILE), 1),
        "first sample, cached": Contender(cached, 1),
    }
    demos = {
        "fald demo, cold": Contender(demo(new), 1),
        "fald demo, warm": Contender(demo(lambda: kept.name), 1),
    }
    asked = _process(python, "-m", "fald.cli", "--help")
    helps = {"import jax": imports["import jax"], "fald --help": Contender(asked, 1)}
    fits = {
        "fald.fit, 1,000 rows, cold": Contender(_process(python, "-c", _FIT, cache=new), 1),
        "fald.fit, 1,000 rows, cached": Contender(_process(python, "-c", _FIT, cache=lambda: kept.name), 1),
    }
    out = Path(kept.name) / "study"
    runs = {
        "fald run, cold": Contender(_fresh(out, new), 1),
        "fald run, warm": Contender(_fresh(out, lambda: kept.name), 1),
    }
    helped = Mark("seconds", lambda t, limits: t["fald --help"].median, 0.3, at_most=True)
    ran = [
        Mark("seconds, cold", lambda t, limits: t["fald run, cold"].median, 5.0, at_most=True),
        Mark("seconds, warm", lambda t, limits: t["fald run, warm"].median, 2.5, at_most=True),
    ]
    slower = Mark("times import jax", times_faster("import jax", "import fald"), 1.3, at_most=True)
    warm = Mark("seconds", lambda t, limits: t["fald demo, warm"].median, 3.0, at_most=True)
    return [
        Case("F, import", "import, in a process of its own", "process", "import jax", imports, [slower]),
        Case("F, compile", "one round from a new process", "process", "first sample, no cache", starts),
        Case("F, help", "fald --help", "process", "import jax", helps, [helped]),
        *([] if quick else [Case("F, demo", "fald demo", "process", "fald demo, cold", demos, [warm])]),
        *([] if quick else [Case("F, fit", "whole process", "process", next(iter(fits)), fits)]),
        *([] if quick else [Case("F, run", "bundled study", "process", "fald run, cold", runs, ran)]),
    ]


def _fresh(out: Path, cache: Callable[[], str]) -> Callable[[], None]:
    """``fald run`` of the bundled trial, from its beginning."""
    from fald.study.datasets import study_path

    study = str(study_path("indo"))
    run = _process(sys.executable, "-m", "fald.cli", "run", study, "--out", str(out), "--quiet", cache=cache)

    def begin() -> None:
        shutil.rmtree(out, ignore_errors=True)
        run()

    return begin
