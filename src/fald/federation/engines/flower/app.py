"""The two halves of a Flower app: what runs at the SuperLink, and what runs at every SuperNode.

An app needs no code of its own; its ``pyproject.toml`` names the installed package::

    [tool.flwr.app.components]
    serverapp = "fald.federation.engines.flower.app:server_app"
    clientapp = "fald.federation.engines.flower.app:client_app"
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fald.core.compiled import keep_compiled
from fald.core.errors import ConfigError, ExitCode, FaldError
from fald.federation.engines.flower.link import FlowerLink, unwrap, wrap
from fald.federation.site.settings import read_site

# either half loads what it needs by itself, and the coordinator's after it has called the sites
if TYPE_CHECKING:
    from fald.federation.site.worker import SiteWorker
    from fald.problem.data import FederatedData
    from fald.study.schema import Study


class RunFailed(Exception):  # noqa: N818 - a name for Flower's list of runs
    """A run that did not finish; Flower shows the text."""


server_app = ServerApp()
_kept: dict[str, Any] = {}  # the worker of the last message, and what it was made by


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run a study; Flower calls this where the SuperLink is."""
    job, sites, wait = read_job(context.run_config)
    out, link = Path(job["out"]), FlowerLink(grid, sites, wait=wait)
    with contextlib.suppress(FaldError):  # of which the first message tells
        link.call()
    keep_compiled()
    from fald.federation.coordinator.run import serve_job, write_outcome

    with _interruptible():
        try:
            code = serve_job(link, job)
        except Exception as error:
            told = f"internal error ({type(error).__name__})"
            write_outcome(out, {"status": "failed", "exit_code": int(ExitCode.INTERNAL), "message": told})
            raise
    if code:
        raise RunFailed(f"the run ended with exit code {code}; {out / 'outcome.json'} says why")


def read_job(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], float]:
    """Read a run's configuration: what to run, at which sites, and how long to wait for them.

    Parameters
    ----------
    config
        ``sites`` (names with commas between), ``wait`` (seconds), and either ``job`` (a file that
        ``fald run --federation`` wrote) or ``study`` (a study file), ``out`` (a folder) and ``resume``. Paths
        are absolute, because a SuperLink may have been started anywhere.

    Raises
    ------
    ConfigError
        If one is missing or wrong.

    Examples
    --------
    >>> read_job({"sites": "north,south", "study": "study.toml", "out": "/tmp/out"})
    Traceback (most recent call last):
    fald.core.errors.ConfigError: run-config study must be an absolute path; got 'study.toml'
      hint: a path at the SuperLink's host
    """
    sites = [name.strip() for name in str(config.get("sites") or "").split(",") if name.strip()]
    if len(sites) < 2 or len(set(sites)) < len(sites):
        raise ConfigError(
            f"run-config sites must name two or more different sites; got {config.get('sites')!r}",
            hint="""--run-config 'sites="north,south" …'""",
        )
    wait = config.get("wait", 120)
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not wait > 0:
        raise ConfigError(f"run-config wait must be a number of seconds; got {wait!r}")
    if config.get("job"):
        return json.loads(_path(config, "job").read_text(encoding="utf-8")), sites, float(wait)
    from fald.study.schema import load_study

    study = load_study(_path(config, "study"), [])
    job = {
        "study": study.as_settings(),
        "out": str(_path(config, "out")),
        "resume": config.get("resume") is True,
    }
    return job, sites, float(wait)


def _path(config: Mapping[str, Any], key: str) -> Path:
    path = Path(str(config.get(key) or ""))
    if not path.is_absolute():
        raise ConfigError(
            f"run-config {key} must be an absolute path; got {config.get(key)!r}",
            hint="a path at the SuperLink's host",
        )
    return path


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let a run that is stopped save itself; Flower's own handlers would end the process on the spot."""
    before = {s: signal.signal(s, signal.default_int_handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_client_app(load: Callable[[Study], FederatedData] | None = None) -> ClientApp:
    """Make the half of an app that runs at a site.

    Flower starts a new process for every message, so all that a site knows between two messages is in its
    state folder. Nothing that goes wrong here reaches the coordinator in words: Flower would send it the text
    of an exception, which may quote rows.

    Parameters
    ----------
    load
        Makes the site's rows for a study; default: reads the table that ``site.toml`` names. The site's
        folder is the ``site`` of the SuperNode's ``--node-config``, or the environment variable
        ``FALD_SITE``.
    """
    app = ClientApp()

    @app.query("name")
    def tell_name(message: Message, context: Context) -> Message:
        return _reply(message, lambda: read_site(_folder(context)).name.encode())

    @app.train("message")
    def work(message: Message, context: Context) -> Message:
        def handle() -> bytes:
            return _worker(_folder(context), load).handle(unwrap(message) or b"")

        return _reply(message, handle)

    return app


def _worker(folder: Path, load: Callable[[Study], FederatedData] | None) -> SiteWorker:
    """The site's worker: that of the message before, if this process has answered one by the same files."""
    from fald.federation.site.worker import SiteWorker

    settings = read_site(folder)
    paths = (folder / "site.toml", settings.data, settings.policy, settings.pins)
    stamps = [(p, p.stat().st_mtime_ns if p.exists() else 0) for p in paths if p is not None]
    if _kept.get("by") != [folder, load, stamps]:
        keep_compiled()
        _kept.update(by=[folder, load, stamps], worker=SiteWorker(settings, load))
    return _kept["worker"]


def _reply(message: Message, work: Callable[[], bytes]) -> Message:
    try:
        content = work()
    except Exception as error:  # the site's own console may have the words; the coordinator may not
        text = str(error) if isinstance(error, FaldError) else traceback.format_exc()
        print(f"fald: {text}", file=sys.stderr, flush=True)
        content = b""
    return Message(wrap(content), reply_to=message)


def _folder(context: Context) -> Path:
    folder = context.node_config.get("site") or os.environ.get("FALD_SITE")
    if not folder:
        raise ConfigError(
            "this SuperNode does not know its site",
            hint="""start it with --node-config 'site="/folder/of/site.toml"'""",
        )
    return Path(str(folder))


client_app = make_client_app()
