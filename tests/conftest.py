"""Shared set-up: compiled programs are kept between test runs, which saves most of their time."""

import os
from pathlib import Path

_CACHE = Path(__file__).parents[1] / ".pytest_cache" / "compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


def pytest_terminal_summary(terminalreporter):
    """Say it when the tests in a browser did not run: a line of dots would hide it."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = {r.longrepr[2] for r in skipped if isinstance(r.longrepr, tuple)}
    for reason in sorted(r for r in reasons if "no Chromium" in r):
        terminalreporter.write_line(reason.removeprefix("Skipped: "))
