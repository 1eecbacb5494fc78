"""The process in which models of other packages run, by a stand-in that starts in no time: limits, ends."""

import json
import mmap
import os
import resource
import runpy
import signal
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from fald.core.errors import FederationError, PolicyError
from fald.federation.site import confined, worker
from fald.federation.site.confined import Confined, Limits

STAND_IN = """
import json, os, subprocess, sys, time
from multiprocessing.connection import Connection
pipe, letters = Connection(int(sys.argv[1])), int(sys.argv[2])
about = json.loads(pipe.recv_bytes())
if about["name"] == "ends":
    sys.exit(3)
if about["name"] == "late":
    time.sleep(2)
pipe.send_bytes(b"no" if about["name"] == "rude" else b"ready")
while True:
    content = os.pread(letters, int.from_bytes(pipe.recv_bytes(), "little"), 0)
    print("words of a model", flush=True)
    if content == b"end":
        os._exit(1)
    if content == b"wait":
        time.sleep(60)
    if content == b"cut":
        os.ftruncate(letters, 0)
    if content == b"long":
        content = b"x" * 101
    if content == b"print":
        print("x" * 10**6 + "the end", flush=True)
    if content == b"child":
        kept = [1, 2, int(sys.argv[1]), letters]
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=kept)
        content = b"%d" % child.pid
    if content == b"twice":
        pipe.send_bytes((5).to_bytes(8, "little"))
    if content == b"who":
        who = {"pid": os.getpid(), "session": os.getsid(0), "stdin": sys.stdin.read(), "about": about}
        content = json.dumps({**who, "safe": sys.flags.safe_path}).encode()
    os.pwrite(letters, content, 0)
    pipe.send_bytes(len(content).to_bytes(8, "little"))
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes what would be the process of a site; all are ended with the test."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(confined, "__name__", "stand_in")
    all_of_them = []

    def make(name="a", seconds=20.0):
        all_of_them.append(Confined({"name": name}, Limits(seconds, 77), tmp_path / "log"))
        return all_of_them[-1]

    yield make
    for each in all_of_them:
        each.stop()


def who(process):
    return json.loads(process.handle(b"who", "m"))


def gone(pid):
    """Whether a process has ended; of one that is not ours, somebody else may not have noticed yet."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except (ProcessLookupError, FileNotFoundError) as error:
        return isinstance(error, ProcessLookupError) or os.path.isdir("/proc/self")


def test_one_process_answers_all_messages(made, tmp_path):
    process = made()
    first = who(process)
    assert process.handle(b"hello", "m") == b"hello"
    assert who(process) == first
    assert first["about"] == {"name": "a", "seconds": 20.0, "megabytes": 77}
    assert first["session"] == first["pid"] != os.getpid()  # what ends the site's terminal does not end it
    assert first["stdin"] == ""
    assert first["safe"]  # nothing is imported from the folder it is started in
    process.stop()
    assert gone(first["pid"])
    assert (tmp_path / "log").read_text().startswith("words of a model\n" * 3)
    process.stop()  # again, which is no error
    assert who(process)["pid"] != first["pid"]
    process.stop()
    # what the first one says when its pipe closes, before it is killed, may stand between
    assert (tmp_path / "log").read_text().count("words of a model\n") == 4


def test_a_model_that_takes_too_long_is_ended(made):
    process = made(seconds=0.2)
    pid = who(process)["pid"]
    with pytest.raises(
        PolicyError, match=r"the model 'm' takes more than 0.2 s for a request \(max-seconds\)"
    ):
        process.handle(b"wait", "m")
    assert gone(pid)
    assert process.handle(b"hello", "m") == b"hello"  # by another


@pytest.mark.parametrize("word", [b"wait", b"end"])
def test_what_a_model_has_started_ends_with_it(made, word):
    """It may hold the site's locks, its end of the pipe, and a processor."""
    process = made(seconds=5.0)
    child = int(process.handle(b"child", "m"))
    assert not gone(child)
    process._limits = Limits(0.2, 77)
    with pytest.raises(PolicyError):
        process.handle(word, "m")
    for _ in range(1000):  # it was ended; when, is the system's to say
        if gone(child):
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    pytest.fail("it runs on")


def test_a_log_takes_the_beginning_of_endless_words(made, tmp_path, monkeypatch):
    monkeypatch.setattr(confined, "_MOST_PRINTED", 300_000)
    process = made()
    for _ in range(3):
        assert process.handle(b"print", "m") == b"print"
    process.stop()
    log = (tmp_path / "log").read_bytes()
    assert log.count(b"the model prints more, which is not kept\n") == 1
    assert log.startswith(b"words of a model\nxxx")
    assert log.count(b"x") == 300_000 - len("words of a model\n")
    assert b"the end" not in log


def test_an_answer_that_nobody_asked_for_ends_a_process(made):
    """Of a model that has copied itself, the second answer is none to the next message."""
    process = made()
    assert process.handle(b"twice", "m") == b"twice"
    while not process._pipe.poll():
        time.sleep(0.01)
    with pytest.raises(PolicyError, match="has ended"):
        process.handle(b"hello", "m")
    assert process.handle(b"hello", "m") == b"hello"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not list open files")
def test_a_process_that_was_ended_leaves_nothing_open(made):
    process = made()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        pid = who(process)["pid"]
        pipe = process._pipe  # held, so that nothing but the end closes it
        assert len(os.listdir("/proc/self/fd")) > before
        process.stop()
        assert len(os.listdir("/proc/self/fd")) == before
        assert pipe.closed
        assert gone(pid)


def test_a_process_that_ends_is_noticed_at_once_and_replaced(made):
    process = made()
    with pytest.raises(PolicyError, match=r"process of the model 'm' has ended.* 77 MB \(max-megabytes\)"):
        process.handle(b"end", "m")
    assert process._process is process._pipe is None
    first = who(process)["pid"]
    os.kill(first, signal.SIGKILL)  # between two messages, as the kernel may when memory runs out
    while process._process.poll() is None:
        time.sleep(0.01)
    assert who(process)["pid"] != first


@pytest.mark.parametrize("name", ["ends", "rude", "late"])
def test_a_process_that_does_not_start_says_so(made, name, monkeypatch):
    process = made(name)
    if name == "late":
        monkeypatch.setattr(confined, "_START", 0.5)
    with pytest.raises(FederationError, match="the process for its model does not start"):
        process.handle(b"hello", "m")
    assert process._process is process._pipe is None


def test_a_site_that_is_interrupted_leaves_no_process(made, monkeypatch):
    process = made()
    pid = who(process)["pid"]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "_answered", interrupted)
    with pytest.raises(KeyboardInterrupt):
        process.handle(b"hello", "m")
    assert gone(pid)


def test_answers_have_a_largest_size(made, monkeypatch):
    monkeypatch.setattr(confined, "MOST_BYTES", 100)
    process = made()
    assert process.handle(b"x" * 100, "m") == b"x" * 100
    for content in (b"long", b"x" * 101):
        with pytest.raises(PolicyError, match="has ended"):
            process.handle(content, "m")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files that cannot be cut off")
def test_nobody_takes_the_memory_away_that_both_use(made):
    """Who reads where a file has been cut off is ended by the system: that would be the site."""
    process = made()
    with pytest.raises(PolicyError, match="has ended"):
        process.handle(b"cut", "m")
    assert "PermissionError" in process._log.read_text()
    assert process.handle(b"hello", "m") == b"hello"


# -- inside ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [True, False])
def test_the_process_limits_itself_before_it_reads_a_message(tmp_path, monkeypatch, cached):
    """Limits, then a worker's answers to what comes, each under the kernel's own clock."""
    told, threads = [], []

    class Worker:
        def __init__(self, settings, *, confined):
            self.settings = settings
            told.append(("worker", confined))

        def handle(self, content):
            told.append(content)
            return content[::-1]

    class Thread:
        def __init__(self, **given):
            self.given = given

        def start(self):
            threads.append(self.given)

    monkeypatch.setattr(worker, "SiteWorker", Worker)
    monkeypatch.setattr(confined, "_limit_memory", lambda megabytes: told.append(("memory", megabytes)))
    monkeypatch.setattr(signal, "signal", lambda *given: told.append(given))
    monkeypatch.setattr(signal, "setitimer", lambda *given: told.append(given))
    monkeypatch.setattr(confined, "threading", SimpleNamespace(Thread=Thread))
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine") if cached else None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 9.0)
    mine, theirs = Pipe()
    about = {
        "name": "a", "state": str(tmp_path), "data": None, "policy": "p", "pins": None, "coordinator": "",
        "sites": ["a", "b"], "seconds": 5.0, "megabytes": 77,
    }  # fmt: skip
    answers = []

    def speak():
        mine.send_bytes(json.dumps(about).encode())
        answers.append(mine.recv_bytes())
        told.append("ready")
        for content in (b"one", b"two"):
            confined._put(mine, letters, content)
            answers.append(confined._take(mine, letters))
        mine.close()

    speaker, shared = threading.Thread(target=speak, daemon=True), confined._open_letters()
    letters = mmap.mmap(shared, confined.MOST_BYTES)
    speaker.start()
    try:
        confined.main(str(os.dup(theirs.fileno())), shared)
        theirs.close()
        found = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
        os.close(shared)
    speaker.join()
    assert found == ((str(tmp_path / "mine"), 9.0) if cached else (str(tmp_path / "compiled"), 0.0))
    assert answers == [b"ready", b"eno", b"owt"]
    on, off = (signal.ITIMER_REAL, 15.0), (signal.ITIMER_REAL, 0.0)
    assert told == [
        ("worker", True), ("memory", 77), (signal.SIGALRM, signal.SIG_DFL), "ready",
        on, b"one", off, on, b"two", off,
    ]  # fmt: skip
    (thread,) = threads
    assert thread["daemon"]
    assert (thread["target"], thread["args"]) == (confined._end_with, (os.getppid(),))


def test_settings_reach_the_process_as_they_were(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(worker, "SiteWorker", lambda settings, confined: seen.append(settings))
    monkeypatch.setattr(confined, "_limit_memory", lambda megabytes: None)
    for name in ("signal", "setitimer"):
        monkeypatch.setattr(signal, name, lambda *_: None)
    watching = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(confined, "threading", SimpleNamespace(Thread=lambda **_: watching))
    mine, theirs = Pipe()
    about = {
        "name": "a", "state": "s", "data": "d", "policy": None, "pins": "q", "coordinator": "c",
        "sites": ["a"], "seconds": 1.0, "megabytes": 1,
    }  # fmt: skip
    mine.send_bytes(json.dumps(about).encode())
    number = os.dup(theirs.fileno())
    theirs.close()
    threading.Timer(0, lambda: (mine.recv_bytes(), mine.close())).start()
    confined.main(str(number), -1)
    expected = worker.SiteSettings("a", Path("s"), Path("d"), None, Path("q"), "c", ("a",))
    assert seen == [expected]


def test_memory_is_limited_to_so_much_more_than_there_is(monkeypatch):
    limits = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: limits.append((kind, both)))
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    confined._limit_memory(1000)
    ((kind, (soft, hard)),) = limits
    assert kind == resource.RLIMIT_AS
    assert soft == hard
    assert abs(soft - now - 1000 * 2**20) < 100 * 2**20


def test_the_process_ends_with_its_site(monkeypatch):
    parents, slept, ended = [7, 7, 1], [], []
    monkeypatch.setattr(os, "getppid", lambda: parents.pop(0))
    monkeypatch.setattr(confined.time, "sleep", slept.append)
    monkeypatch.setattr(os, "killpg", lambda *given: ended.append(given))
    confined._end_with(7)
    assert (slept, ended, parents) == ([1.0, 1.0], [(0, signal.SIGKILL)], [])


def test_the_module_is_a_program(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["confined", "1", "no number"])
    monkeypatch.delitem(sys.modules, confined.__name__)
    with pytest.raises(ValueError, match="no number"):
        runpy.run_module("fald.federation.site.confined", run_name="__main__")
