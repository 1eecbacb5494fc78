"""``fald federation``: thin wrappers over ``fald.federation.commands``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fald.cli.options import Json
from fald.core.errors import ExitCode
from fald.federation.folder import ENGINE, PORT

app = typer.Typer(
    name="federation",
    help="One study across machines: make, serve, join a federation.",
    no_args_is_help=True,
    suggest_commands=False,
)

Folder = Annotated[Path, typer.Argument(metavar="NAME", help="Folder of the federation.", show_default=False)]


@app.command()
def init(
    name: Annotated[
        Path, typer.Argument(help="Folder to make; its name is the federation's.", show_default=False)
    ],
    sites: Annotated[str, typer.Option(help="Names of the sites, a,b,c.", show_default=False)],
    host: Annotated[
        str, typer.Option(help="Name or address at which sites reach the coordinator.", show_default=False)
    ],
    port: Annotated[int, typer.Option(help="Port of the server.")] = PORT,
    engine: Annotated[str, typer.Option(help="What carries the federation.")] = ENGINE,
) -> None:
    """Make a federation: a certificate authority, the server, and a kit for every site.

    Example: fald federation init trial --sites north,south,west --host fald.example.org
    """
    from fald.federation import commands

    print(commands.init(name, sites, host, port, engine=engine))


@app.command()
def serve(name: Folder) -> None:
    """Run the server of a federation, until Ctrl-C.

    Example: fald federation serve trial
    """
    from fald.federation import commands

    commands.serve(name, _say)


@app.command()
def join(
    kit: Annotated[Path, typer.Argument(help="The site's folder, from the coordinator.", show_default=False)],
    data: Annotated[
        Path,
        typer.Option(help="The site's table, CSV or Parquet, or what a model reads.", show_default=False),
    ],
    policy: Annotated[
        Path | None, typer.Option(help="What the site allows (TOML).", show_default=False)
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="Folder for keys, ledger and log (default: KIT/site).", show_default=False),
    ] = None,
    pins: Annotated[
        Path | None, typer.Option(help="Public keys of all sites (JSON), compared.", show_default=False)
    ] = None,
) -> None:
    """Take part in a federation with a table of rows, which stay here, until Ctrl-C.

    Example: fald federation join north --data patients.csv --policy policy.toml
    """
    from fald.federation import commands

    commands.join(kit, data, policy, state, report=_say, pins=pins)


@app.command()
def approve(
    name: Folder,
    request: Annotated[Path, typer.Argument(help="request.json that a site has sent.", show_default=False)],
    again: Annotated[bool, typer.Option("--again", help="The site has lost its earlier keys.")] = False,
) -> None:
    """Give a site the certificate that it asks for.

    Example: fald federation approve trial request.json
    """
    from fald.federation import commands

    print(commands.approve(name, request, again))


@app.command()
def status(
    name: Folder,
    as_json: Json = False,
) -> None:
    """Show sites, when they were last heard of, and the last run; exit code 7 without a server.

    Example: fald federation status trial
    """
    from fald.federation import commands

    document = commands.status(name)
    print(json.dumps(document, indent=1) if as_json else commands.status_text(document))
    if not document["reached"]:
        raise typer.Exit(int(ExitCode.FEDERATION))


@app.command()
def log(
    site: Annotated[
        Path,
        typer.Argument(help="The site's kit, or its folder of keys, ledger and log.", show_default=False),
    ],
    as_json: Json = False,
    page: Annotated[Path | None, typer.Option(help="Write a page (HTML) here.", show_default=False)] = None,
) -> None:
    """Show every request that reached a site and what left it; exit code 8 if the record was tampered with.

    Example: fald federation log north --page record.html
    """
    from fald.federation import commands

    name, entries = commands.read_log(site)
    if page is not None:
        from fald.report.record import write_record

        _say(f"Written: {write_record(entries, name, page)}")
    elif as_json:
        print(json.dumps({"site": name, "record": entries}, indent=1))
    else:
        print(commands.log_text(name, entries))


@app.command()
def repin(
    kit: Annotated[
        Path, typer.Argument(help="This site's kit, or the folder of its state.", show_default=False)
    ],
    site: Annotated[str, typer.Argument(help="The site whose key has changed.", show_default=False)],
    roster: Annotated[Path, typer.Argument(help="roster.json of the coordinator.", show_default=False)],
    fingerprint: Annotated[
        str,
        typer.Option(help="What that site has told you; without it nothing is changed.", show_default=False),
    ] = "",
) -> None:
    """At a site: take the new key of another site, which has lost its key, is new, or has left.

    Example: fald federation repin north south roster.json
    """
    from fald.federation import commands

    print(commands.repin(kit, site, roster, fingerprint))


@app.command()
def doctor(
    folder: Annotated[Path, typer.Argument(help="Folder of a federation, or of a site.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Look for what will fail: versions, clocks, ports, certificates, disk, keys; then with exit code 7.

    Example: fald federation doctor trial
    """
    from fald.federation import doctor as examination

    found = examination.examine(folder)
    print(json.dumps([f._asdict() for f in found], indent=1) if as_json else examination.text(found))
    if any(finding.level == "bad" for finding in found):
        raise typer.Exit(int(ExitCode.FEDERATION))


@app.command()
def stop(name: Folder) -> None:
    """Stop the run that is going on; 'fald run --resume' continues it.

    Example: fald federation stop trial
    """
    from fald.federation import commands

    print(commands.stop(name))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
