"""Options and arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with code 5 if a check says stop.")]


def _keys(incomplete: str) -> list[str]:
    """Study keys for the shell's completion, with the sign that a value follows."""
    from fald.study.schema import known_keys

    return [f"{key}=" for key in known_keys() if key.startswith(incomplete)]


Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; repeatable.", autocompletion=_keys),
]
Method = Annotated[
    str | None,
    typer.Option(
        help="importance, corrected, or fa-ld with planned settings (default: the study's).",
        show_default=False,
    ),
]
Level = Annotated[float, typer.Option(help="Probability of intervals.")]
Host = Annotated[str, typer.Option(help="Address to serve on; others than this machine's are open to all.")]
Port = Annotated[int, typer.Option(help="Port to serve on; 0: a free one.")]
StudyFile = Annotated[Path, typer.Argument(metavar="STUDY.toml", help="Study file.", show_default=False)]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)]
