"""Shared set-up: what one process has compiled no other compiles again, nor does the next run of tests."""

import os
from pathlib import Path

import pytest

# before anything imports JAX; processes that tests start inherit it. As in .ci/run
_COMPILING = {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parents[1] / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    # most tests compile more than they compute: no source lines in programs, one piece of code for each, and
    # XLA's older way from operations to code, which takes two thirds of the time
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "XLA_FLAGS": "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false",
}
for _name, _value in _COMPILING.items():
    os.environ.setdefault(_name, _value)

# files that take longest begin first, so that no process is left with one of them when the others have ended;
# before them federations, which mostly wait
_LONGEST = (
    "test_nvflare",
    "test_own_models",
    "test_exact_law",
    "test_flower",
    "test_conformance",
    "test_readme_federation",
    "test_fit",
    "test_demo",
    "test_run",
    "test_mutants",
    "test_installed",
    "test_identities_of_methods",
    "test_identities",
    "test_planner_runs",
    "test_docs",
    "test_cli",
    "test_compare",
    "test_reproduce_simulations",
    "test_divergence",
)


def pytest_collection_modifyitems(items):
    """Put the longest files first; the Makefile has one process run all tests of a file."""
    order = {name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(autouse=True)
def _precision():
    """A study may switch the whole process to double precision; the next test starts with single again."""
    yield
    import jax

    jax.config.update("jax_enable_x64", False)


def pytest_terminal_summary(terminalreporter):
    """Say it when the tests in a browser did not run: a line of dots would hide it."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = {r.longrepr[2] for r in skipped if isinstance(r.longrepr, tuple)}
    for reason in sorted(r for r in reasons if "no Chromium" in r):
        terminalreporter.write_line(reason.removeprefix("Skipped: "))
