"""Federations on this machine, with the real commands: what it takes to join, to begin, and for a round.

Processor seconds are read from the system several times a second; what a process spends after the last look
before its end is missed. Those to join are of a site's own processes; the process that it then makes ready
for a run is counted apart, and a run begins when nothing is left to make ready. Sites are parts of the
bundled trial.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fald.core.errors import FederationError
from fald.federation.engines.nvflare.process import end_family
from fald.study.datasets import study_path

_LOOK, _REST = 0.2, 3.0  # seconds between looks, and of rest before a run
_READY = "fald.federation.engines.nvflare.launcher"  # in the command of a process that waits for a run
_MOST = 1200.0  # seconds that a federation may take to begin
LIMITS = {"join_cpu": 3.0, 4: 12.0, 20: 60.0, "round": 5.0}
_FALD = [sys.executable, "-m", "fald.cli"]


class Costs:
    """Processor seconds of commands and all that they start, those of sites apart."""

    def __init__(self) -> None:
        self._commands: list[subprocess.Popen[bytes]] = []
        self._sites: set[int] = set()
        self._seen: dict[tuple[int, float], tuple[str, float]] = {}
        self._done = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def start(
        self,
        call: list[str],
        folder: Path,
        *,
        site: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command in a folder and count what it spends."""
        with open(folder / "commands.txt", "ab") as said:
            self._commands.append(
                subprocess.Popen(
                    call,
                    cwd=folder,
                    env={**os.environ, **(environment or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                )
            )
        if site:
            self._sites.add(self._commands[-1].pid)
        return self._commands[-1]

    def total(self, kind: str = "") -> float:
        """Seconds so far, of one kind of process or of all."""
        self._look()
        return sum(seconds for is_a, seconds in list(self._seen.values()) if kind in ("", is_a))

    def settle(self, count: int) -> None:
        """Wait until nothing goes on but what always does."""
        before = float("-inf")
        while (now := self.total()) - before > _REST * (0.1 + 0.03 * count):
            before = now
            time.sleep(_REST)

    def stop(self) -> None:
        """End everything that was started."""
        self._done.set()
        for command in reversed(self._commands):
            end_family(command.pid)
            command.wait()

    def _watch(self) -> None:
        while not self._done.wait(_LOOK):
            self._look()

    def _look(self) -> None:
        import psutil

        for command in self._commands:
            try:
                family = psutil.Process(command.pid)
                kind = "site" if command.pid in self._sites else "other"
                for process in (family, *family.children(recursive=True)):
                    used, ready = process.cpu_times(), _READY in process.cmdline()
                    said = "ready" if ready and kind == "site" else kind
                    self._seen[process.pid, process.create_time()] = said, used.user + used.system
            except psutil.Error:
                continue


def measure(quick: bool) -> list[dict[str, Any]]:
    """For each engine that is installed and each number of sites: seconds, and processor seconds."""
    engines = {"nvflare": ("nvflare", _nvflare), "flower": ("flwr", _flower)}
    found = []
    for name, (package, begin) in engines.items():
        if importlib.util.find_spec(package) is not None:
            found += [_measured(name, begin, count) for count in ((3,) if quick else (4, 20))]
    return found


def _measured(engine: str, begin: Callable[..., Path], count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fald-bench-") as place:
        folder, costs, load = Path(place), Costs(), os.getloadavg()[0]
        try:
            tables = _split(folder, count)
            federation = begin(folder, tables, costs)
            joined = costs.total("site") / count
            costs.settle(count)
            ready, before = costs.total("ready") / count, costs.total()
            out, began = folder / "out", time.time()
            study = ["run", "study.toml", "--federation", str(federation), "--out", str(out)]
            run = costs.start([*_FALD, *study], folder)
            _until(lambda: bool(_rounds(out)) or run.poll() is not None, folder)
            first_cpu = costs.total() - before
            if run.wait(_MOST):
                raise FederationError("the run failed", hint=_said(folder))
            rounds = _rounds(out)
        finally:
            costs.stop()
    later = [b - a for a, b in itertools.pairwise(rounds)]
    return {
        "engine": engine,
        "sites": count,
        "load": round(load, 1),
        "join_cpu": joined,
        "ready_cpu": ready,
        "first": rounds[0] - began,
        "first_cpu": first_cpu,
        "round": sum(later) / max(1, len(later)),
    }


def _split(folder: Path, count: int) -> dict[str, Path]:
    import pandas as pd

    source = study_path("indo")
    rows = pd.read_csv(source.with_name("indo.csv")).drop(columns="site").sample(frac=1, random_state=0)
    text = source.read_text().replace('file = "indo.csv"\nsite = "site"\n', "")
    (folder / "study.toml").write_text(f"{text}\n[federation]\ntimeout = 600.0\nopening-timeout = 600.0\n")
    tables = {f"site{i:02d}": folder / f"site{i:02d}.csv" for i in range(count)}
    for i, path in enumerate(tables.values()):
        rows.iloc[i::count].to_csv(path, index=False)
    return tables


def _nvflare(folder: Path, tables: dict[str, Path], costs: Costs) -> Path:
    trial, names = folder / "trial", ",".join(tables)
    call = ["federation", "init", str(trial), "--sites", names, "--host", "127.0.0.1"]
    costs.start([*_FALD, *call, "--port", str(_free_port())], folder).wait()
    costs.start([*_FALD, "federation", "serve", str(trial)], folder)
    for site, table in tables.items():
        kit = str(trial / "sites" / site)
        costs.start([*_FALD, "federation", "join", kit, "--data", str(table)], folder, site=True)
    _until(lambda: f"{len(tables)} of {len(tables)} sites joined" in _said(folder), folder)
    return trial


def _flower(folder: Path, tables: dict[str, Path], costs: Costs) -> Path:
    port, trial = _free_port(), folder / "trial"
    quiet = {"FLWR_HOME": str(folder / "home")}
    link = ["--insecure", "--host", "127.0.0.1", "--port", str(port), "--database", str(folder / "link.db")]
    ours = "fald.federation.engines.flower"
    costs.start([sys.executable, "-m", f"{ours}.superlink", *link], folder, environment=quiet)
    _until(lambda: _listens(port), folder)
    for site, table in tables.items():
        (folder / site).mkdir()
        (folder / site / "site.toml").write_text(f'name = "{site}"\ndata = {json.dumps(str(table))}\n')
        call = [sys.executable, "-m", f"{ours}.supernode", str(folder / site)]
        call += ["--insecure", "--superlink", f"127.0.0.1:{port}"]
        costs.start(call, folder, site=True, environment=quiet)
    trial.mkdir()
    about = f'name = "trial"\nengine = "flower"\nsites = {json.dumps(list(tables))}\nhost = "127.0.0.1"\n'
    (trial / "federation.toml").write_text(f"{about}port = {port}\n")
    _until(lambda: _said(folder).count("fald: ready") == len(tables), folder)
    return trial


def _rounds(out: Path) -> list[float]:
    """When the rounds of a run ended."""
    path = out / "rounds.jsonl"
    lines = [json.loads(x) for x in path.read_text().splitlines() if x.endswith("}")] if path.exists() else []
    return [line["time"] for line in lines if line.get("round") and "event" not in line]


def _said(folder: Path) -> str:
    return (folder / "commands.txt").read_text(errors="replace")


def _until(holds: Callable[[], bool], folder: Path) -> None:
    end = time.monotonic() + _MOST
    while not holds():
        if time.monotonic() > end:
            raise FederationError(f"nothing after {_MOST:g} s", hint=_said(folder)[-2000:])
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def table(found: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown, with what was wanted."""
    heads = ["engine", "sites", "load", "CPU s per site to join", "to be ready", "s to round 1", "CPU s"]
    lines = ["", f"| {' | '.join([*heads, 's per round after'])} |", "|---" * 8 + "|"]
    for one in found:
        keys = ("join_cpu", "ready_cpu", "first", "first_cpu", "round")
        numbers = " | ".join(f"{one[key]:.1f}" for key in keys)
        lines.append(f"| {one['engine']} | {one['sites']} | {one['load']:g} | {numbers} |")
    wanted = ", ".join(f"{LIMITS[n]:g} s with {n} sites" for n in (4, 20))
    each = f"{LIMITS['join_cpu']:g} CPU-seconds per site to join, {LIMITS['round']:g} s per round"
    return [*lines, "", f"Wanted on two idle cores: at most {wanted} from `fald run` to round 1; {each}."]
