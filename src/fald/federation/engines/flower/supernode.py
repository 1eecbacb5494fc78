"""A SuperNode that runs the installed package and nothing else.

A SuperNode runs the code of whatever app is submitted to its SuperLink. Started through this module, it
answers every message with the installed ``fald`` and never unpacks the app::

    python -m fald.federation.engines.flower.supernode SITE --superlink HOST:PORT --root-certificates ca.crt …

``SITE`` is the folder with ``site.toml``; the rest goes to ``flower-supernode``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from fald.core.errors import ConfigError, FaldError
from fald.federation.engines.flower import require_flower
from fald.federation.site.settings import read_site

_MODULE = "fald.federation.engines.flower.supernode"  # as a program its name is another
_REFUSED = ("flwr-agentapp", "flwr-clientapp", "flwr-connector", "flwr-model", "flwr-serverapp")
_REFUSED += ("flower-superexec", "flwr-simulation")
_UNFIT = ("--isolation", "--node-config", "--trusted-entities")
_STANDIN = Path(__file__).with_name("standin.py")


def prepare(folder: Path) -> dict[str, str]:
    """Let nothing that Flower starts by name run at the site; returns what its environment needs.

    Raises
    ------
    ConfigError
        If the folder is none of a site, or Flower is not installed.
    """
    require_flower()
    settings = read_site(folder)
    place = settings.state.absolute() / "bin"
    place.mkdir(parents=True, exist_ok=True)
    settings.state.chmod(0o700)
    refuse = "echo 'fald: this SuperNode runs no other apps' >&2\nexit 1"
    for name in _REFUSED:
        path = place / name
        path.write_text(f"#!/bin/sh\n{refuse}\n")
        path.chmod(0o700)
    return {
        "PATH": os.pathsep.join([str(place), str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "FALD_SITE": str(folder.absolute()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }


def main(arguments: list[str]) -> NoReturn:
    """Become a SuperNode."""
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(
            "the site's folder is missing",
            hint=f"python -m {_MODULE} SITE --superlink HOST:PORT --root-certificates ca.crt",
        )
    folder, *rest = arguments
    if unfit := sorted({word.split("=")[0] for word in rest} & {*_UNFIT}):
        raise ConfigError(
            f"{', '.join(unfit)}: not for this SuperNode, which runs no submitted app", hint="leave it out"
        )
    environment = prepare(Path(folder))
    os.execve(sys.executable, [sys.executable, "-P", str(_STANDIN), *rest], {**os.environ, **environment})


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except FaldError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(int(error.exit_code))
