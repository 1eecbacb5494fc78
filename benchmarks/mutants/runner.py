"""One process that has imported everything but the tests; every mutant is a fork of it."""

from __future__ import annotations

import dis
import gc
import importlib
import importlib.abc
import importlib.util
import json
import os
import pkgutil
import resource
import shutil
import signal
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_TESTS = ("tests", "helpers", "conftest", "command", "reports", "images", "hostile", "stopping")
_WALL = 20.0  # times the limit of CPU seconds: other work may share the machine
_STUCK = 30.0  # seconds without using the CPU at all: it waits for what will not come
_MEMORY = 12 * 2**30
_FUNCTIONS: dict[str, list[types.FunctionType]] = {}  # those that were imported, by their file


class Verdict(NamedTuple):
    """What became of a run of tests: "passed", "failed" or "slow", which test said so, CPU seconds."""

    state: str
    test: str
    seconds: float


class Warm:
    """Forks that run tests with one module of fald changed.

    Parameters
    ----------
    tests
        Test files and cases that will be run: what they import is imported here once.
    """

    def __init__(self, tests: list[str]):
        cache = ROOT / ".cache" / "mutants"
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
            "XLA_FLAGS": "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        os.chdir(ROOT)
        warnings.filterwarnings("ignore", message="os.fork")
        sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests")]
        for name in self._used_by(tests):
            try:
                importlib.import_module(name)
            except Exception:  # only a name that some package made up for itself
                continue
        tasks = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
        if tasks > 1 and "jax" in sys.modules:
            from jax._src import xla_bridge

            if xla_bridge._backends:
                raise RuntimeError("a package starts JAX when it is imported: forks would hang")
        for thing in gc.get_objects():
            if isinstance(thing, types.FunctionType) and thing.__code__.co_filename.startswith(str(ROOT)):
                _FUNCTIONS.setdefault(thing.__code__.co_filename, []).append(thing)
        gc.freeze()  # no fork looks through all of this again

    @staticmethod
    def _used_by(tests: list[str]) -> list[str]:
        """Modules of other packages that the tests import, found out in a fork."""
        return json.loads(_in_fork(lambda: _imports(tests)))

    def run(self, tests: list[str], seconds: float, path: str = "", text: str = "") -> Verdict:
        """Run tests until one fails, with the module at ``path`` (from ``src``) replaced by ``text``."""
        folder = tempfile.mkdtemp(prefix="mutant-")
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            code = 70
            try:
                code = _tests(tests, seconds, folder, writing, path, text)
            finally:
                os._exit(code)
        os.close(writing)
        try:
            return _waited(child, seconds, reading)
        finally:
            os.close(reading)
            shutil.rmtree(folder, ignore_errors=True)


def _in_fork(work) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            pipe.write(work())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def _imports(tests: list[str]) -> str:
    import hypothesis  # noqa: F401
    import pytest

    class Listed:
        def pytest_collection_finish(self, session):
            session.items.clear()

    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", *tests], plugins=[Listed()])
    import fald

    for found in pkgutil.walk_packages(fald.__path__, "fald."):
        if not found.name.startswith(("fald.lab", "fald.federation.engines", "fald.cli")):
            importlib.import_module(found.name)
    names = [n for n in list(sys.modules) if n.split(".")[0] not in _TESTS and not n.startswith("test_")]
    return json.dumps([n for n in names if n != "__main__" and not n.startswith("benchmarks")])


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Finds one module, and gives it another text."""

    def __init__(self, path: str, text: str):
        self._path, self._text = str(ROOT / "src" / path), text
        self._name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self._package = path.endswith("__init__.py")

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self._name:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=self._path, is_package=self._package)

    def get_filename(self, fullname):
        return self._path

    def get_data(self, path):
        return self._text.encode()


def _replaced(path: str, text: str) -> bool:
    """Give the functions of an imported module the code of another text, where only their bodies differ."""
    where = str(ROOT / "src" / path)
    original = Path(where).read_text(encoding="utf-8")
    new: dict[tuple[str, int], types.CodeType] = {}
    if not _paired(compile(original, where, "exec"), compile(text, where, "exec"), new):
        return False
    for thing in _FUNCTIONS.get(where, []):
        code = new[thing.__code__.co_qualname, thing.__code__.co_firstlineno]
        if code.co_freevars != thing.__code__.co_freevars:
            return False
        thing.__code__ = code
    return True


def _paired(old: types.CodeType, new: types.CodeType, found: dict[tuple[str, int], types.CodeType]) -> bool:
    """Collect the code of functions by where they stood; False where more than their bodies differ."""
    inside = [[c for c in code.co_consts if isinstance(c, types.CodeType)] for code in (old, new)]
    if [c.co_name for c in inside[0]] != [c.co_name for c in inside[1]]:
        return False
    if _ran(old):  # with the import: modules, classes, and their comprehensions
        if _words(old) != _words(new):
            return False
        called = _reached(old)
        if any(a.co_name in called and _words(a) != _words(b) for a, b in zip(*inside)):
            return False
    else:
        key = (old.co_qualname, old.co_firstlineno)
        if key in found:  # two of one name in one line
            return False
        found[key] = new
    return all(_paired(a, b, found) for a, b in zip(*inside))


def _ran(code: types.CodeType) -> bool:
    """Whether code runs when its module is imported."""
    comprehension = code.co_name.startswith("<") and code.co_name != "<lambda>"
    return "<locals>" not in code.co_qualname and (comprehension or not code.co_flags & 0x2)


def _reached(code: types.CodeType) -> set[str]:
    """Names that a module uses when it is imported, also by way of functions of its own."""
    inside = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_NAME", "LOAD_GLOBAL")}
    names |= {name for c in inside if _ran(c) for name in _reached(c)}
    while more := {n for c in inside if c.co_name in names for n in c.co_names} - names:
        names |= more
    return names


def _words(code: types.CodeType) -> tuple:
    """What code does, without the lines it stands on and without the functions in it."""
    constants = [repr(c) for c in code.co_consts if not isinstance(c, types.CodeType)]
    return code.co_code, constants, code.co_names


def _tests(tests: list[str], seconds: float, folder: str, pipe: int, path: str, text: str) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    import pytest
    from hypothesis import HealthCheck, Phase, settings

    settings.register_profile(
        "mutants",
        phases=[Phase.explicit, Phase.generate],  # which example failed is of no interest
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutants")
    if path and not _replaced(path, text):
        for name in [n for n in sys.modules if n.split(".")[0] == "fald"]:
            del sys.modules[name]
        sys.meta_path.insert(0, _Changed(path, text))

    class First:
        """Tells the first test that fails."""

        def pytest_runtest_logreport(self, report):
            if report.failed:
                os.write(pipe, report.nodeid.encode()[:400])

        def pytest_collectreport(self, report):
            if report.failed:
                os.write(pipe, b"import of " + report.nodeid.encode()[:300])

    # which line failed, and what was never closed, is of no interest
    without = [f"-pno:{name}" for name in ("cacheprovider", "unraisableexception", "threadexception")]
    options = ["-q", "-x", *without, "-n", "0", "--assert=plain", "--tb=no", f"--basetemp={folder}/t"]
    return int(pytest.main([*options, "-m", "not slow", *tests], plugins=[First()]))


def _ticks(child: int) -> str:
    """CPU time that a process has used, as the system counts it; empty where it does not tell."""
    try:
        return " ".join(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:15])
    except OSError:
        return ""


def _waited(child: int, seconds: float, pipe: int) -> Verdict:
    began = moved = time.monotonic()
    ticks, stopped = "", False
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            break
        now = time.monotonic()
        if (latest := _ticks(child)) != ticks:
            ticks, moved = latest, now
        if not stopped and (now - moved > _STUCK or now - began > _WALL * seconds + 60):
            os.kill(child, signal.SIGKILL)
            stopped = True
        time.sleep(0.02)
    os.set_blocking(pipe, False)
    try:
        said = os.read(pipe, 4000).decode(errors="replace")
    except BlockingIOError:
        said = ""
    total = used.ru_utime + used.ru_stime
    if os.WIFSIGNALED(status):
        late = stopped or os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
        return Verdict("slow" if late else "failed", said or f"signal {os.WTERMSIG(status)}", total)
    code = os.WEXITSTATUS(status)
    # unchanged the tests pass, so whatever else pytest ends with is a change that was noticed
    return Verdict("failed" if code else "passed", said or f"exit code {code}", total)
