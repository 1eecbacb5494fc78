"""Hosts with their own addresses, one of them cut off and healed in the middle of a run.

``sudo python -m benchmarks.namespaces`` makes a network namespace for the coordinator and for every hospital
of the bundled trial, joined by a bridge; runs plain FA-LD on NVIDIA FLARE between them; takes one hospital's
cable out for a while; and compares the draws with those of a run in one process. Linux only, as root.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.federation import journal, run_alone, write_study
from benchmarks.loopback import Loopback, split_trial
from fald.results.tree import load

HUB, NETWORK = "fald-hub", "10.77.0"
ROUNDS, CUT_AFTER, SECONDS = 300, 40, 30
OPTIONS = "\n[federation]\ntimeout = 10\nretries = 20\n"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def say(text: str, began: float) -> None:
    print(f"{time.monotonic() - began:5.0f} s  {text}", flush=True)


class Hosts(Loopback):
    """The coordinator and every site in a network namespace of its own."""

    def __init__(self, folder: Path, tables: dict[str, Path]):
        super().__init__(folder, tables, host=f"{NETWORK}.1")
        self.hosts = {site: f"fald-{site.lower()}" for site in self.tables}

    def __enter__(self) -> Hosts:
        try:
            self._connect()
            super().__enter__()
        except BaseException:
            self._disconnect()
            raise
        return self

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        self._disconnect()

    def prefix(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", self.hosts.get(name, HUB)]

    def _connect(self) -> None:
        ip("netns", "add", HUB)
        ip("-n", HUB, "link", "add", "bridge", "type", "bridge")
        ip("-n", HUB, "address", "add", f"{NETWORK}.1/24", "dev", "bridge")
        for device in ("lo", "bridge"):
            ip("-n", HUB, "link", "set", device, "up")
        for number, host in enumerate(self.hosts.values(), start=2):
            ip("netns", "add", host)
            cable = f"cable{number}"
            ip("link", "add", cable, "netns", HUB, "type", "veth", "peer", "name", "net0", "netns", host)
            ip("-n", HUB, "link", "set", cable, "master", "bridge", "up")
            ip("-n", host, "address", "add", f"{NETWORK}.{number}/24", "dev", "net0")
            for device in ("lo", "net0"):
                ip("-n", host, "link", "set", device, "up")

    def _disconnect(self) -> None:
        for host in (HUB, *self.hosts.values()):
            subprocess.run(["ip", "netns", "del", host], capture_output=True)

    def cable(self, site: str, state: str) -> None:
        """Set a site's connection ``up`` or ``down``."""
        number = 2 + list(self.hosts).index(site)
        ip("-n", HUB, "link", "set", f"cable{number}", state)


def drill(folder: Path) -> bool:
    tables = split_trial(folder)
    study, out = write_study(folder, ROUNDS), folder / "out"
    study.write_text(study.read_text() + OPTIONS)
    site = sorted(tables)[-1]

    def reached() -> int:
        lines = journal(out)
        return lines[-1]["round"] if lines else 0

    with Hosts(folder, tables) as hosts:
        began = time.monotonic()
        say(f"coordinator at {hosts.host}, sites: {', '.join(hosts.hosts)}", began)
        run = hosts.begin(study, out, "--quiet")
        hosts.wait_for(lambda: reached() >= CUT_AFTER, 600)
        hosts.cable(site, "down")
        say(f"round {reached()}: {site} is cut off", began)
        time.sleep(SECONDS / 2)
        stopped = reached()
        time.sleep(SECONDS / 2)
        say(f"round {reached()}: the others wait; {reached() - stopped} rounds in {SECONDS // 2} s", began)
        hosts.cable(site, "up")
        healed = reached()
        hosts.wait_for(lambda: reached() > healed or run.poll() is not None, 300)
        say(f"round {reached()}: {site} is back, the run goes on", began)
        code = run.wait(1200)
        say(f"the run ended with exit code {code}", began)
        if code:
            print(hosts.said("run"))
            return False
    alone = run_alone(folder, tables, study)
    same = load(out / "posterior.nc")["posterior"].to_dataset().identical(alone["posterior"].to_dataset())
    say(f"the same draws as in one process, to the last bit: {'yes' if same else 'NO'}", began)
    return bool(same)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(0 if drill(Path(folder)) else 1)


if __name__ == "__main__":
    main()
