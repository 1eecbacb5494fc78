"""Who may join: the sites of the federation, one process each; and what they say when they do."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
from pathlib import Path
from typing import Any

from fald.core.files import write_atomically
from fald.core.version import library_versions
from fald.federation.folder import read_settings

JOINED = "joined.json"  # in the server's folder
_SAID = "fald"  # what a site says when it registers


def introduction() -> dict[str, Any]:
    """What a site says of itself when it registers: versions, its clock, and a number of this start."""
    about = {"versions": library_versions(), "time": time.time(), "start": secrets.token_hex(4)}
    return {_SAID: about}


def read_joined(server: Path) -> dict[str, Any]:
    """What each site said when it registered last, and whether two processes register by turns."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((server / JOINED).read_text())
    return {}


def note_registration(server: Path, site: str, said: Any) -> None:
    """Keep what a site said; a start that comes back after another was there is a twin."""
    joined, now = read_joined(server), time.time()
    about = said.get(_SAID, {}) if isinstance(said, dict) else {}
    about = about if isinstance(about, dict) else {}
    start, earlier = str(about.get("start", ""))[:16], joined.get(site, {})
    starts = [each for each in earlier.get("starts", []) if each != start][-4:]
    twin = bool(start) and start in earlier.get("starts", []) and earlier.get("starts", [])[-1] != start
    clock = about.get("time")
    joined[site] = {
        "versions": about.get("versions"),
        "clock": clock - now if isinstance(clock, int | float) else None,
        "time": now,
        "starts": [*starts, start],
        "twin": now if twin else earlier.get("twin"),
    }
    write_atomically(server / JOINED, json.dumps(joined, indent=1).encode())


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
