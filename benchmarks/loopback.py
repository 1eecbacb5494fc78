"""A federation on this machine: the real commands, as processes of its own, which never outlive it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil

from fald.datasets import study_path
from fald.federation.nvflare.process import end_family

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


class Loopback:
    """Server and sites on 127.0.0.1, from ``fald federation init`` on.

    Parameters
    ----------
    folder
        An empty folder.
    tables
        Table by site.
    """

    def __init__(self, folder: Path, tables: dict[str, Path]):
        self.folder, self.tables = folder / "trial", dict(sorted(tables.items()))
        self.port = free_port()
        self.commands: dict[str, subprocess.Popen] = {}
        self.environment = {**os.environ, "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}

    def __enter__(self) -> Loopback:
        sites = ",".join(self.tables)
        self.fald("federation", "init", self.folder, "--sites", sites, "--host", "127.0.0.1", "--port", self.port)
        try:
            self.start("server", "serve", self.folder)
            for site, table in self.tables.items():
                self.start(site, "join", self.folder / "sites" / site, "--data", table)
            self.wait_for(lambda: self.joined() == sorted(self.tables), 120)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception) -> None:
        for command in self.commands.values():
            end_family(command.pid)
            command.wait()

    def start(self, name: str, *arguments) -> None:
        """Start ``fald federation ARGUMENTS`` and remember it under a name."""
        with open(self.folder.parent / f"{name}.txt", "ab") as said:
            call = [*FALD, "federation", *map(str, arguments)]
            self.commands[name] = subprocess.Popen(
                call, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=self.environment
            )

    def said(self, name: str) -> str:
        """What a command has printed."""
        return (self.folder.parent / f"{name}.txt").read_text()

    def fald(self, *arguments, code: int = 0) -> str:
        """Run a command to its end and return what it printed."""
        call = [*FALD, *map(str, arguments)]
        done = subprocess.run(call, capture_output=True, text=True, timeout=300, env=self.environment)
        if done.returncode != code:
            raise AssertionError(f"{call} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def joined(self) -> list[str]:
        """Sites that the server has heard of, by what ``serve`` prints and ``status`` says."""
        if f"{len(self.tables)} of {len(self.tables)} sites joined" not in self.said("server"):
            return []
        found = json.loads(self.fald("federation", "status", self.folder, "--json"))
        return [s["site"] for s in found["sites"] if s["joined"]]

    def wait_for(self, holds, seconds: float) -> None:
        """Wait until something holds; fail with the commands' output when it does not."""
        end = time.monotonic() + seconds
        while not holds():
            for name, command in self.commands.items():
                if command.poll() is not None:
                    raise AssertionError(f"{name} ended with {command.returncode}: {self.said(name)}")
            if time.monotonic() > end:
                said = "\n".join(f"{name}: {self.said(name)}" for name in self.commands)
                raise AssertionError(f"nothing after {seconds} s; the commands said\n{said}")
            time.sleep(0.25)

    def engine(self, name: str) -> psutil.Process:
        """The engine's long-lived process of a party."""
        return psutil.Process(self.commands[name].pid).children()[0]

    def worker(self, name: str) -> psutil.Process | None:
        """The process that works on a run at a party, if there is one."""
        for child in self.engine(name).children(recursive=True):
            words = " ".join(child.cmdline())
            if "worker_process" in words or "runner_process" in words:
                return child
        return None

    def kill(self, process: psutil.Process) -> None:
        """kill -9."""
        os.kill(process.pid, signal.SIGKILL)
