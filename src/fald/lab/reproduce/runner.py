"""Run panels into a folder, and recognise those that are already there."""

from __future__ import annotations

import difflib
import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from fald.core.errors import ConfigError, Interrupted, StorageError
from fald.core.files import write_atomically
from fald.core.version import __version__
from fald.lab.reproduce import plots
from fald.lab.reproduce.base import FAILS, HOLDS, SIZES, UNKNOWN, Panel, PanelRun, Size, cuts, read_settings
from fald.lab.reproduce.images import at_the_edge
from fald.lab.reproduce.panels import PANELS

_LIBRARIES = ("jax", "numpy", "pandas", "matplotlib")
_OF_THE_PAGE = ("title", "paper", "shows", "differs", "claims")  # words, which change no number


def choose(names: Sequence[str]) -> list[Panel]:
    """Panels by name, in the order of the collection; ``all`` means every one.

    Examples
    --------
    >>> [panel.name for panel in choose(["fig2a", "fig1a"])]
    ['fig1a', 'fig2a']
    """
    for name in names:
        if name not in PANELS and name != "all":
            near = difflib.get_close_matches(name, PANELS, 1)
            known = f"there are: all, {', '.join(PANELS)}"
            raise ConfigError(f"no experiment {name!r}", hint=f"did you mean {near[0]}?" if near else known)
    return [panel for panel in PANELS.values() if "all" in names or panel.name in names]


def reproduce(
    names: Sequence[str],
    out: str | Path,
    *,
    size: Size = "full",
    seed: int = 0,
    image_rounds: int | None = None,
    progress: bool = True,
    report: Callable[[Mapping[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Run experiments and write figure, points and record of each into a folder.

    Parameters
    ----------
    names
        Panels such as ``"fig1a"``, or ``"all"``.
    out
        Folder. A panel that it holds with the same settings, seed and version is not run again.
    size
        ``"full"``, or ``"quick"`` for all within two minutes.
    seed
        The same seed gives the same points, to the last byte on one machine.
    image_rounds
        Rounds of the image panels, if not those of the size.
    progress
        Whether to report on standard error.
    report
        Called with the record of each panel as it is finished.

    Returns
    -------
    list of dict
        The record of each panel: settings, seed, versions, times, verdicts, facts.

    Raises
    ------
    ConfigError
        If there is no such panel or size, or nothing to draw with.
    DataError
        If an image set cannot be found.
    Interrupted
        If the user stops; finished panels, and finished chains of image panels, are kept.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (record,) = reproduce(["fig1d"], folder, size="quick", progress=False)
    >>> record["panel"], record["size"]
    ('fig1d', 'quick')
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("the figures of the experiments need Matplotlib", hint="pip install 'fald[lab]'")
    panels, out = choose(names), Path(out)
    if size not in SIZES:
        raise ConfigError(f"size must be one of {', '.join(SIZES)}; got {size!r}")
    if not (isinstance(seed, int) and 0 <= seed < 2**31):
        raise ConfigError(f"seed must be a whole number from 0 to 2^31 − 1; got {seed!r}")
    chosen = {panel.name: read_settings(panel.name, size, image_rounds) for panel in panels}
    if image_rounds is not None and not any("rounds-per-sample" in s for s in chosen.values()):
        hint = "fig3, fig4 and calibration take them"
        raise ConfigError(f"rounds are for image panels; got {', '.join(chosen)}", hint=hint)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "choose another with --out"
        raise StorageError(f"cannot make the folder {out}: {error.strerror}", hint=hint) from error
    records = []
    for panel in panels:
        run = PanelRun(panel.name, chosen[panel.name], seed, out / "cache", progress)
        try:
            record = _one(panel, run, out, size)
        except KeyboardInterrupt:
            hint = "the same command goes on: what is finished is not run again"
            raise Interrupted(f"interrupted during {panel.name}", hint=hint) from None
        records.append(record)
        if report is not None:
            report(record)
    return records


def identity(name: str, settings: Mapping[str, Any], seed: int) -> str:
    """A hash of all that decides a panel's numbers: settings, seed and version."""
    numbers = {k: v for k, v in settings.items() if k not in _OF_THE_PAGE}
    text = json.dumps([name, numbers, seed, __version__], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _one(panel: Panel, run: PanelRun, out: Path, size: Size) -> dict[str, Any]:
    settings, known = run.settings, identity(panel.name, run.settings, run.seed)
    earlier = _finished(panel.name, out, known)
    words = {key: settings[key] for key in ("title", "paper", "shows", "differs")}
    words |= {"size": size, "cut": cuts(panel.name, settings)}
    if earlier is not None:
        record = {**earlier, **words}
        if record != earlier:  # the words about a panel may change without a number changing
            _write_record(out, record)
        return {**record, "reused": True}
    began, cpu = time.monotonic(), time.process_time()
    outcome = panel.measure(run)
    points = outcome.table.to_csv(index=False, float_format="%.10g", lineterminator="\n").encode()
    libraries = {name: version_of(name) for name in _LIBRARIES}
    record = {
        "panel": panel.name,
        **words,
        "seed": run.seed,
        "settings": {k: v for k, v in settings.items() if k not in _OF_THE_PAGE},
        "versions": {"fald": __version__, "python": platform.python_version(), **libraries},
        "verdicts": [vars(v) for v in outcome.verdicts],
        "facts": outcome.facts,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "identity": known,
        "csv_sha256": hashlib.sha256(points).hexdigest(),
    }
    write_atomically(out / f"{panel.name}.csv", points)
    redraw(panel, out, record)
    # last, because it says that the panel is finished
    _write_record(out, record)
    return {**record, "reused": False}


def _write_record(out: Path, record: Mapping[str, Any]) -> None:
    content = json.dumps(record, indent=1, ensure_ascii=False)
    write_atomically(out / f"{record['panel']}.json", content.encode())


def redraw(panel: Panel, out: Path, record: Mapping[str, Any], kinds: Sequence[str] = ("svg", "png")) -> None:
    """Draw a panel from its stored points."""
    table = pd.read_csv(out / f"{panel.name}.csv")
    with plots.style():
        figure = panel.draw(table, record)
        for kind in kinds:
            write_atomically(out / f"{panel.name}.{kind}", plots.rendered(figure, kind))


def _finished(name: str, out: Path, known: str) -> dict[str, Any] | None:
    """The record of a panel that is finished with these settings and whose points are unchanged."""
    try:
        record = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
        points = (out / f"{name}.csv").read_bytes()
    except (OSError, ValueError):
        return None
    same = record.get("identity") == known and record.get("csv_sha256") == hashlib.sha256(points).hexdigest()
    return record if same else None


def text(record: Mapping[str, Any], out: str | Path) -> str:
    """A record as text for a terminal."""
    name = record["panel"]
    lines = [f"{name}: {record['title']} ({record['paper']})"]
    lines += [f"  cut: {', '.join(record['cut'])}"] if record["cut"] else []
    for v in record["verdicts"]:
        lines += [f"  {v['verdict'].upper():<15} {v['claim']}", f"  {'':<15} measured: {v['measured']}"]
    edge = at_the_edge(record)
    lines += [f"  note: tuned to the edge of the grid, so not fully tuned: {'; '.join(edge)}"] if edge else []
    files = ", ".join(f"{name}.{kind}" for kind in ("svg", "png", "csv", "json"))
    took = (
        "finished before with the same settings, seed and version; not run again"
        if record["reused"]
        else f"{record['seconds']:,.0f} s ({record['cpu_seconds']:,.0f} CPU-seconds)"
    )
    return "\n".join([*lines, f"  {took}; in {out}: {files}"])


def closing(records: Sequence[Mapping[str, Any]]) -> str:
    """How many claims hold, in one line.

    Examples
    --------
    >>> closing([{"verdicts": [{"verdict": "holds"}, {"verdict": "cannot be told"}], "size": "full"}])
    '2 claims: 1 holds, 0 do not hold, 1 cannot be told'
    """
    found = [v["verdict"] for record in records for v in record["verdicts"]]
    counts = [found.count(word) for word in (HOLDS, FAILS, UNKNOWN)]
    words = ("holds" if counts[0] == 1 else "hold", "does not hold" if counts[1] == 1 else "do not hold")
    line = f"{len(found)} claims: {counts[0]} {words[0]}, {counts[1]} {words[1]}, {counts[2]} cannot be told"
    if any(record["size"] == "quick" for record in records):
        line += "\nQuick runs are cut short, as said above; for verdicts that count, run without --quick."
    return line
