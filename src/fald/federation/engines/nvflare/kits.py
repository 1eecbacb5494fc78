"""The folders from which server, sites and coordinator run: NVIDIA FLARE's files with the settings we need.

What differs from the engine's defaults, and why: a job may only name our two classes and ship no code; a site
uploads no logs; users can neither run shell commands at a site nor download what a job left there; jobs and
snapshots are stored inside the folder, not in a shared temporary one.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fald.core.errors import ConfigError, FederationError, StorageError
from fald.core.files import write_atomically
from fald.core.version import library_versions
from fald.federation.engines.nvflare.certificates import (
    REQUEST,
    Authority,
    certificate_key_is,
    fingerprint,
    read_request,
)
from fald.federation.engines.nvflare.door import introduction
from fald.federation.folder import (
    KIT,
    SETTINGS,
    FederationSettings,
    check_name,
    enter_roster,
    new_settings,
    read_roster,
)

COORDINATOR = (
    "coordinator@fald.org"  # the engine wants users named like mail addresses; nothing is sent there
)
CLASSES = {
    "server": "fald.federation.engines.nvflare.adapter.Coordinator",
    "site": "fald.federation.engines.nvflare.adapter.SiteExecutor",
}
_ROLE = "lead"
# what a kit holds when it is sent, and what joining adds
_FILES = {
    *(f"startup/{name}" for name in ("rootCA.pem", "client.crt", "client.key", "fed_client.json")),
    *(f"local/{name}" for name in ("resources.json", "authorization.json", "log_config.json")),
}
_CODE = {".py", ".pyc", ".so", ".pyd", ".pth", ".sh", ".whl", ".zip", ".egg"}
_DEAD = 120  # seconds without a heartbeat after which the server forgets a site


def make_kits(folder: Path, federation: FederationSettings) -> None:
    """Make the folder of a federation: authority, server, coordinator, and a kit without secrets per site.

    Raises
    ------
    ConfigError
        If the folder exists.
    """
    if folder.exists():
        raise ConfigError(f"{folder} already exists", hint="choose another name, or remove the folder first")
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise StorageError(f"cannot make the folder {folder}: {error.strerror}") from error
    try:
        authority = Authority.make(federation.name)
        authority.save(folder / "authority")
        _make_server(folder / "server", federation, authority)
        make_user(folder / "coordinator", federation, authority, name=COORDINATOR, role=_ROLE)
        for site in federation.sites:
            make_site(folder / "sites" / site, federation, authority, site)
        write_atomically(folder / SETTINGS, federation.text().encode())  # last: marks a whole folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def approve(
    folder: Path, federation: FederationSettings, path: Path, *, again: bool = False
) -> tuple[str, str, Path]:
    """Give a site the certificate that it asks for, and remember its identity key.

    Returns
    -------
    tuple
        Site, fingerprint of its request, and the file that the site needs.

    Raises
    ------
    FederationError
        If the site has a certificate for another key, unless ``again`` is set.
    """
    request, public_key = read_request(path, federation)
    site = request["site"]
    answer = folder / "sites" / site / "startup" / "client.crt"
    known = read_roster(folder).get(site, request["identity"])
    same = known == request["identity"] and (not answer.exists() or certificate_key_is(answer, public_key))
    if not same and not again:
        raise FederationError(
            f"site {site} was approved with other keys than those of {path}",
            hint="if the site really has lost its keys, approve it with --again",
        )
    authority = Authority.read(folder / "authority", federation.name)
    enter_roster(folder, site, request["identity"])
    write_atomically(answer, authority.certify(public_key, site))
    return site, fingerprint(request), answer


def approve_waiting(folder: Path, federation: FederationSettings) -> list[str]:
    """Approve sites whose kits lie in the federation's own folder and hold a first request.

    Whoever can write there has the authority's key as well, so nothing is given away.
    """
    done = []
    for site in federation.sites:
        kit = folder / "sites" / site
        if (kit / REQUEST).exists() and not (kit / "startup" / "client.crt").exists():
            done.append(approve(folder, federation, kit / REQUEST)[0])
    return done


def read_kit(kit: Path) -> dict[str, Any]:
    """What a site's kit says: federation, its sites, this one, host, port, and who the authority is."""
    path = kit / KIT
    if not path.is_file():
        raise ConfigError(
            f"{kit} is not the kit of a site: it has no {KIT}",
            hint="a kit is a folder sites/SITE that 'fald federation init' made",
        )
    try:
        found = json.loads(path.read_text())
        about = {key: found[key] for key in ("federation", "site", "host", "port", "sites")}
        for name in (about["site"], *about["sites"]):
            check_name(name, "site")
        new_settings(about["federation"], tuple(about["sites"]), about["host"], about["port"])
        return {**about, "authority": authority_fingerprint(kit), "versions": found.get("versions")}
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise StorageError(
            f"{path} is damaged ({error})", hint="ask the coordinator for the kit again"
        ) from error


def make_user(
    kit: Path, federation: FederationSettings, authority: Authority, *, name: str, role: str
) -> None:
    """A kit with which a user of the server logs in; only the role ``lead`` may submit runs."""
    startup = _make_folders(kit, authority)
    authority.issue(startup, "client", name, role=role)
    admin = {
        "project_name": federation.name,
        "username": name,
        "server_identity": federation.host,
        "scheme": "grpc",
        "host": federation.host,
        "port": federation.port,
        "connection_security": "mtls",
        "uid_source": "cert",
        "with_file_transfer": True,
        "upload_dir": "transfer",
        "download_dir": "transfer",
        "client_key": "client.key",
        "client_cert": "client.crt",
        "ca_cert": "rootCA.pem",
    }
    waits = {"idle_timeout": 900.0, "login_timeout": 10.0, "with_debug": False, "prompt": "> "}
    _write(startup / "fed_admin.json", {"format_version": 1, "admin": admin})
    _write(kit / "local" / "resources.json", {"format_version": 1, "admin": waits})


def _make_server(kit: Path, federation: FederationSettings, authority: Authority) -> None:
    startup = _make_folders(kit, authority)
    authority.issue(startup, "server", federation.host, host=federation.host)
    server = {
        "name": federation.name,
        "service": {"target": f"{federation.host}:{federation.port}", "scheme": "grpc"},
        "admin_server": federation.host,
        "admin_port": federation.port,
        "ssl_private_key": "server.key",
        "ssl_cert": "server.crt",
        "ssl_root_cert": "rootCA.pem",
        "connection_security": "mtls",
    }
    _write(startup / "fed_server.json", {"format_version": 2, "servers": [server]})
    place_stores(kit, federation)
    _write(kit / "local" / "authorization.json", _authorization())
    _write(kit / "local" / "log_config.json", _logging())
    command = f"federation serve {shlex.quote(str(kit.parent.resolve()))}"
    _write_unit(kit / "server.service", f"fald server of federation {federation.name}", command)


def make_site(kit: Path, federation: FederationSettings, authority: Authority, site: str) -> None:
    """The kit of a site: where the server is, and the authority's certificate. Nothing in it is executed."""
    _make_folders(kit, authority)
    about = {"federation": federation.name, "site": site, "host": federation.host, "port": federation.port}
    _write(kit / KIT, {**about, "sites": list(federation.sites), "versions": library_versions()})


def settle(kit: Path, about: Mapping[str, Any]) -> None:
    """Write all that the engine will run by at a site, from the installed package alone.

    Raises
    ------
    FederationError
        If the kit holds anything beside what a kit holds: somebody has changed it.
    """
    _check_files(kit)
    server = {
        "name": about["federation"],
        "service": {"target": f"{about['host']}:{about['port']}", "scheme": "grpc"},
        "identity": about["host"],
    }
    client = {
        "ssl_private_key": "client.key",
        "ssl_cert": "client.crt",
        "ssl_root_cert": "rootCA.pem",
        "fqsn": about["site"],
        "is_leaf": True,
        "connection_security": "mtls",
        "site_config": introduction(),
    }
    _write(kit / "startup" / "fed_client.json", {"format_version": 2, "servers": [server], "client": client})
    _write(kit / "local" / "resources.json", _site_resources())
    _write(kit / "local" / "authorization.json", _authorization())
    _write(kit / "local" / "log_config.json", _logging())
    _write_unit(
        kit / "site.service",
        f"fald site {about['site']} of federation {about['federation']}",
        f"federation join {shlex.quote(str(kit.resolve()))} --data /path/to/rows.csv",
    )


def _check_files(kit: Path) -> None:
    """Refuse files that the engine would read, or run, and that neither ``init`` nor ``join`` has made."""
    found = [p.relative_to(kit).as_posix() for d in ("startup", "local") for p in (kit / d).rglob("*")]
    found += [p.name for p in kit.iterdir() if p.suffix in _CODE]
    odd = sorted(set(found) - _FILES)
    links = sorted(p.relative_to(kit).as_posix() for p in kit.rglob("*") if p.is_symlink())
    if odd or links:
        raise FederationError(
            f"{kit} has been changed: {(odd or links)[0]} does not belong into a kit",
            hint="ask the coordinator for the kit again, and compare the fingerprint by telephone",
        )


def authority_fingerprint(kit: Path) -> str:
    """Sixteen characters that stand for the authority whose certificate a folder holds."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509 import load_pem_x509_certificate

    path = kit / "startup" / "rootCA.pem"
    try:
        digits = load_pem_x509_certificate(path.read_bytes()).fingerprint(SHA256()).hex()[:16]
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{path} is no certificate of an authority", hint="ask the coordinator for the kit again"
        ) from error
    return "-".join(digits[i : i + 4] for i in range(0, 16, 4))


def _make_folders(kit: Path, authority: Authority) -> Path:
    for name in ("startup", "local", "transfer"):
        (kit / name).mkdir(parents=True)
    write_atomically(kit / "startup" / "rootCA.pem", authority.pem)
    return kit / "startup"


def place_stores(kit: Path, federation: FederationSettings) -> None:
    """Tell the server where its stores are; again at every start, because the folder may have moved."""
    _write(kit / "local" / "resources.json", _server_resources(kit.resolve(), len(federation.sites)))


def _server_resources(kit: Path, num_sites: int) -> dict[str, Any]:
    storage = "nvflare.app_common.storages.filesystem_storage.FilesystemStorage"
    snapshots = {"path": storage, "args": {"root_dir": str(kit / "snapshots"), "uri_root": "/"}}
    return {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [CLASSES["server"]],
        "servers": [
            {
                "admin_storage": "transfer",
                "max_num_clients": num_sites,
                "heart_beat_timeout": _DEAD,
                "admin_timeout": 10.0,
            }
        ],
        "snapshot_persistor": {
            "path": "nvflare.app_common.state_persistors.storage_state_persistor.StorageStatePersistor",
            "args": {"uri_root": "/", "storage": snapshots},
        },
        "components": [
            {
                "id": "job_scheduler",
                "path": "nvflare.app_common.job_schedulers.job_scheduler.DefaultJobScheduler",
                "args": {"max_jobs": 1, "max_schedule_count": 3, "min_schedule_interval": 2.0},
            },
            {
                "id": "job_manager",
                "path": "nvflare.apis.impl.job_def_manager.SimpleJobDefManager",
                "args": {"uri_root": str(kit / "jobs"), "job_store_id": "job_store"},
            },
            {"id": "job_store", "path": storage},
            _launcher("ServerLauncher"),
        ],
    }


def _site_resources() -> dict[str, Any]:
    resources = "nvflare.app_common.resource_managers.gpu_resource_manager.GPUResourceManager"
    consumer = "nvflare.app_common.resource_consumers.gpu_resource_consumer.GPUResourceConsumer"
    return {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [CLASSES["site"]],
        "allow_log_streaming": False,
        "client": {"retry_timeout": 30},
        "components": [
            {
                "id": "resource_manager",
                "path": resources,
                "args": {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0, "expiration_period": 300},
            },
            {"id": "resource_consumer", "path": consumer, "args": {}},
            _launcher("SiteLauncher"),
        ],
    }


def _launcher(name: str) -> dict[str, Any]:
    return {"id": "process_launcher", "path": f"fald.federation.engines.nvflare.launcher.{name}", "args": {}}


def _authorization() -> dict[str, Any]:
    """One role may run studies; every other right and role is refused because it is not named."""
    rights = {"submit_job": "any", "manage_job": "n:submitter", "view": "any", "byoc": "none"}
    return {"format_version": "1.0", "permissions": {_ROLE: rights, "member": {"view": "any"}}}


def _logging() -> dict[str, Any]:
    """One file per process, within bounds; the engine's own console output would say it twice."""
    handler = {
        "class": "logging.handlers.RotatingFileHandler",
        "level": "INFO",
        "formatter": "plain",
        "filename": "log.txt",
        "mode": "a",
        "maxBytes": 5_000_000,
        "backupCount": 2,
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
        "handlers": {"file": handler},
        "loggers": {"root": {"level": "INFO", "handlers": ["file"]}},
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def _write_unit(path: Path, about: str, command: str) -> None:
    unit = f"""\
[Unit]
Description={about}
After=network-online.target
Wants=network-online.target

[Service]
ExecStart={shlex.quote(sys.executable)} -m fald.cli {command}
Restart=always
RestartSec=5
KillSignal=SIGTERM
TimeoutStopSec=30

[Install]
WantedBy=multi-user.target
"""
    write_atomically(path, unit.encode())
