"""Commands that open a page in the browser."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fald.cli.options import Host, Port, Run, Settings


def watch(
    folder: Run,
    host: Host = "127.0.0.1",
    port: Port = 0,
) -> None:
    """Follow a run in the browser, while it goes or after.

    Example: fald watch runs/study
    """
    from fald.pages.server import Page, serve
    from fald.pages.watch import Follower  # the other commands need no web server

    page = Page("watch", {"state": Follower(folder).state})
    serve(page, host=host, port=port, about=f"following {folder}")


def explore(
    study: Annotated[Path | None, typer.Argument(help="Study (default: the bundled one).")] = None,
    settings: Settings = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
) -> None:
    """Move sliders over a study's settings, in the browser.

    Example: fald explore study.toml
    """
    from fald.pages.explorer import SettingsExplorer
    from fald.pages.server import Page, serve
    from fald.study.datasets import study_path
    from fald.study.precision import set_precision
    from fald.study.schema import load_study

    loaded = load_study(study or study_path("indo"), settings or [])
    set_precision(loaded)
    print("finding the sites' local models (a few seconds)", file=sys.stderr, flush=True)
    found = SettingsExplorer(loaded)
    answers = {"about": found.about, "point": found.point, "privacy": found.privacy, "sweep": found.sweep}
    serve(Page("explore", answers), host=host, port=port, about=f"exploring {loaded.title or study}")
