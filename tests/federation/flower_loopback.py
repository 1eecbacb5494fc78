"""A Flower federation on this machine: one SuperLink and a SuperNode per site, each in its own process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection
from pathlib import Path

BIN = Path(sys.executable).parent


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Loopback:
    """Starts and stops the processes; ``folder`` gets their logs, states and Flower's home."""

    def __init__(
        self, folder: Path, data: dict[str, Path], guarded: Collection[str] = (), *, place: Path = BIN,
        policy: Path | None = None, ours: bool = False,
    ):  # fmt: skip
        self.ours = ours  # the SuperLink as well
        self.folder, self.data, self.guarded, self.bin, self.policy = folder, data, guarded, place, policy
        self.home = folder / "home"
        self.port, *self.node_ports = free_ports(1 + len(data))
        self.processes: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> Loopback:
        self.home.mkdir(parents=True)
        connection = f'[superlink.loop]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (self.home / "config.toml").write_text(connection)
        self.start_link()
        for site in self.data:
            self.start_site(site)
        return self

    def __exit__(self, *exception) -> None:
        for process in reversed(self.processes.values()):
            stop(process)

    def environment(self) -> dict[str, str]:
        quick = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2", "FLWR_TELEMETRY_ENABLED": "0"}
        one = {"OPENBLAS_NUM_THREADS": "1", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"  # Flower starts its parts by name
        return {**os.environ, **quick, **one, "FLWR_HOME": str(self.home), "PATH": path}

    def start_link(self) -> None:
        command = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--database", str(self.folder / "link.db")]
        if self.ours:
            command[:1] = ["python", "-m", "fald.federation.engines.flower.superlink"]
        else:
            command += ["--disable-runtime-dependency-installation"]
        self.spawn("link", command)
        wait_for(lambda: _healthy(self.port), 600, "the SuperLink")

    def start_site(self, site: str) -> None:
        place = self.folder / site
        place.mkdir(exist_ok=True)
        values = {"name": site, "data": str(self.data[site].absolute()), "sites": list(self.data)}
        if self.policy is not None:
            values["policy"] = str(self.policy.absolute())
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        (place / "site.toml").write_text(text)
        port = self.node_ports[list(self.data).index(site)]
        common = ["--insecure", "--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1"]
        common += ["--port", str(port)]
        if site in self.guarded:
            start = ["python", "-m", "fald.federation.engines.flower.supernode", str(place)]
        else:
            start = ["flower-supernode", "--node-config", f'site="{place}"']
        self.spawn(site, [*start, *common])

    def spawn(self, name: str, command: list[str]) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(self.bin / command[0]), *command[1:]],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.environment(),
                cwd=self.folder,
                start_new_session=True,
            )

    def flwr(self, *arguments: str) -> dict:
        """Run a command of ``flwr`` and read its JSON."""
        command = [str(self.bin / "flwr"), *arguments, "--format", "json"]
        done = subprocess.run(
            command, env=self.environment(), cwd=self.folder, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout[done.stdout.index("{") :])

    def logs(self) -> str:
        """The last lines of every process."""
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)


def stop(process: subprocess.Popen) -> None:
    """Stop a process and what it started: all are in a session of their own."""
    for number, patience in ((signal.SIGTERM, 8), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # children that outlived their parent


def wait_for(condition, seconds: float, what: str):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.2)
    raise TimeoutError(f"{what} did not appear within {seconds} s")


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False
