"""Who may join: the sites of the federation, one process each; and what they say when they do."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

from fald.core.files import write_atomically
from fald.core.version import library_versions
from fald.federation.folder import read_settings

JOINED = "joined.json"  # in the server's folder
_TAIL, _RECENT, _OFTEN = 100_000, 120.0, 3  # bytes of the log, seconds, and how often is no restart
_EVICTED = re.compile(r"is evicted for \S+ from endpoint (\S+) for exceeding limit")
_SAID = "fald"  # what a site says when it registers


def introduction() -> dict[str, Any]:
    """What a site says of itself when it registers: versions, and its clock."""
    return {_SAID: {"versions": library_versions(), "time": time.time()}}


def read_joined(server: Path) -> dict[str, Any]:
    """What each site said when it registered last."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((server / JOINED).read_text())
    return {}


def note_registration(server: Path, site: str, said: Any) -> None:
    """Keep what a site said."""
    joined, now = read_joined(server), time.time()
    about = said.get(_SAID, {}) if isinstance(said, dict) else {}
    about = about if isinstance(about, dict) else {}
    clock = about.get("time")
    apart = clock - now if isinstance(clock, int | float) else None
    joined[site] = {"versions": about.get("versions"), "clock": apart, "time": now}
    write_atomically(server / JOINED, json.dumps(joined, indent=1).encode())


def contended(server: Path) -> list[str]:
    """Sites as which two processes join: the engine closes each one's connection for the other's.

    It says so in its log alone, several times a minute.
    """
    try:
        with open(server / "log.txt", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - _RECENT))
    found = [_EVICTED.search(line) for line in lines if line[: len(since)] > since]
    names = [match.group(1) for match in found if match]
    return sorted({name for name in names if names.count(name) >= _OFTEN})


def keep_door(server: Path) -> None:
    """In the server's process: let in whom ``federation.toml`` lists, whatever else has a certificate."""
    from nvflare.apis.fl_constant import FLContextKey
    from nvflare.private.defs import CellMessageHeaderKeys, ClientType
    from nvflare.private.fed.server.client_manager import ClientManager

    sites, register = set(read_settings(server.parent).sites), ClientManager.authenticated_client
    log = logging.getLogger("fald")

    def authenticated_client(self: Any, request: Any, fl_ctx: Any, client_type: Any) -> Any:
        name = request.get_header(CellMessageHeaderKeys.CLIENT_NAME)
        if client_type == ClientType.ADMIN:  # users, whose role the engine looks at
            return register(self, request, fl_ctx, client_type)
        if name not in sites:
            told = f"{name!r} has a certificate, but is no site of this federation"
            fl_ctx.set_prop(FLContextKey.UNAUTHENTICATED, told, sticky=False)
            log.warning(told)
            return None
        client = register(self, request, fl_ctx, client_type)
        if client is not None:
            note_registration(server, name, fl_ctx.get_prop(FLContextKey.CLIENT_SITE_CONFIG))
        return client

    ClientManager.authenticated_client = authenticated_client
