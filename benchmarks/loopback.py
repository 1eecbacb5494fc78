"""A federation on this machine: the real commands, as processes of its own, which never outlive it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from fald.federation.engines.nvflare.process import end_family
from fald.study.datasets import study_path

FALD = [sys.executable, "-m", "fald.cli"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def split_trial(folder: Path) -> dict[str, Path]:
    """The bundled trial as one table per hospital, named like the sites of a federation."""
    rows = pd.read_csv(study_path("indo").with_name("indo.csv"))
    paths = {}
    for name, part in rows.groupby("site"):
        paths[str(name).split()[0]] = folder / f"{name}.csv"
        part.drop(columns="site").to_csv(paths[str(name).split()[0]], index=False)
    return paths


def _end_with_parent() -> None:
    """Ask the kernel to end this process when the one that started it is gone, even by a kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def start(call: list[str], folder: Path, said: Path, **options: Any) -> subprocess.Popen:
    """Start a command that ends with this process; what it prints is added to a file."""
    with open(said, "ab") as output:
        return subprocess.Popen(
            call,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=_end_with_parent,  # one thread starts all of them
            **options,
        )


class Loopback:
    """Server and sites on 127.0.0.1, from ``fald federation init`` on.

    Parameters
    ----------
    folder
        An empty folder.
    tables
        Table by site.
    policy
        Policy of every site; None: the default.
    """

    def __init__(
        self, folder: Path, tables: dict[str, Path], host: str = "127.0.0.1", policy: Path | None = None
    ):
        self.program, self.policy = FALD, policy
        self.folder, self.tables = folder / "trial", dict(sorted(tables.items()))
        self.host, self.port = host, free_port()
        self.commands: dict[str, subprocess.Popen] = {}
        self.environment = {**os.environ, "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}

    def __enter__(self) -> Loopback:
        sites = ",".join(self.tables)
        self.fald(
            "federation", "init", self.folder, "--sites", sites, "--host", self.host, "--port", self.port
        )
        try:
            self.start("server", "serve", self.folder)
            rules = [] if self.policy is None else ["--policy", self.policy]
            for site, table in self.tables.items():
                self.start(site, "join", self.folder / "sites" / site, "--data", table, *rules)
            self.wait_for(self.is_complete, 600)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception) -> None:
        for command in self.commands.values():
            end_family(command.pid)
            command.wait()

    def prefix(self, name: str) -> list[str]:
        """What comes before a party's command; a program that replaces itself by it."""
        return []

    def start(self, name: str, *arguments) -> None:
        """Start ``fald federation ARGUMENTS`` and remember it under a name."""
        self._start(name, ["federation", *arguments])

    def _start(self, name: str, arguments: list) -> subprocess.Popen:
        call = [*self.prefix(name), *self.program, *map(str, arguments)]
        place = self.folder.parent
        self.commands[name] = start(call, place, place / f"{name}.txt", env=self.environment)
        return self.commands[name]

    def begin(self, study: Path, out: Path, *options: str) -> subprocess.Popen:
        """Start ``fald run STUDY --federation`` into a folder."""
        return self._start("run", ["run", study, "--federation", self.folder, "--out", out, *options])

    def said(self, name: str) -> str:
        """What a command has printed."""
        return (self.folder.parent / f"{name}.txt").read_text()

    def fald(self, *arguments, code: int = 0) -> str:
        """Run a command to its end and return what it printed."""
        call = [*self.prefix("fald"), *self.program, *map(str, arguments)]
        done = subprocess.run(call, capture_output=True, text=True, timeout=600, env=self.environment)
        if done.returncode != code:
            raise AssertionError(f"{call} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def is_complete(self) -> bool:
        """Whether all sites have joined, by the last line that ``serve`` has printed."""
        count = len(self.tables)
        return f"{count} of {count} sites joined" in self.said("server").splitlines()[-1:]

    def wait_for(self, holds, seconds: float) -> None:
        """Wait until something holds; fail with the commands' output when it does not."""
        end = time.monotonic() + seconds
        while not holds():
            for name, command in self.commands.items():
                if command.poll() not in ((None, 0) if name == "run" else (None,)):
                    raise AssertionError(f"{name} ended with {command.returncode}: {self.said(name)}")
            if time.monotonic() > end:
                said = "\n".join(f"{name}: {self.said(name)}" for name in self.commands)
                raise AssertionError(f"nothing after {seconds} s; the commands said\n{said}")
            time.sleep(0.25)

    def engine(self, name: str) -> psutil.Process | None:
        """The engine's long-lived process of a party; None while it is restarted."""
        return next(iter(psutil.Process(self.commands[name].pid).children()), None)

    def worker(self, name: str) -> psutil.Process | None:
        """The process that works on a run at a party, if there is one."""
        engine = self.engine(name)
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in engine.children(recursive=True) if engine else ():
                words = " ".join(child.cmdline())
                if "worker_process" in words or "runner_process" in words:
                    return child
        return None

    def kill(self, process: psutil.Process | None) -> None:
        """kill -9."""
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
