"""The page about all experiments, made from their stored outputs and from nothing else.

    python docs/make_reproduction.py RESULTS    # the --out of fald reproduce

copies records, points and figures into docs/reproduction and writes docs/reproduction.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fald.core.errors import StorageError
from fald.core.files import write_atomically
from fald.lab.reproduce.images import at_the_edge
from fald.lab.reproduce.panels import PANELS

PAGE = Path(__file__).with_name("reproduction.md")
STORED = PAGE.with_suffix("")

_HEAD = """\
# The paper's experiments

Every panel of the simulations and image experiments of "On Convergence of Federated Averaging Langevin
Dynamics", and two panels beyond them, run by `fald reproduce`. This page is generated from the outputs of
that command, which lie beside it; numbers, verdicts and figures are theirs.

```sh
fald reproduce all --quick               # two minutes, and says what it cut
fald reproduce fig1a                     # one panel as described here
fald reproduce fig3 fig4 --rounds 500    # image panels with fewer rounds than our 2000
```

Each panel leaves a figure (SVG and PNG), every plotted point (CSV) and a record of settings, seeds, versions,
times and verdicts (JSON). The same seed gives the same CSV, byte for byte on one machine. A panel that is
finished with the same settings, seed and version is not run again. Image panels need MNIST and Fashion-MNIST,
which are downloaded once, or taken from the folder that `FALD_DATA` names.

A verdict is `holds`, `does not hold` or `cannot be told`. "Monte Carlo follows the exact law" compares means
and covariances of all runs with `fald.gaussian`, with a chance of one in a thousand of a false alarm per
panel. Orders between values of K must exceed 95% limits over seeds. "Runs" are estimates: the W2 of a finite
sample is too large on average, so a small law value goes with a larger estimate. Where the paper's text
prints no number of rounds, accuracy or step size, those here are ours, and the panels say so.
"""


def records(folder: Path) -> list[dict[str, Any]]:
    """Stored records, in the order of the collection."""
    found = [folder / f"{name}.json" for name in PANELS]
    read = [json.loads(path.read_text(encoding="utf-8")) for path in found if path.is_file()]
    if not read:
        raise StorageError(f"no results of fald reproduce in {folder}")
    return read


def page(folder: Path) -> str:
    """The page as Markdown, from the records in a folder."""
    known = records(folder)
    parts = [_HEAD, "## Verdicts", _verdicts(known), "## Time", _times(known)]
    for record in known:
        parts += _panel(record)
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _row(*cells: Any) -> str:
    return f"| {' | '.join(str(c).replace('|', chr(92) + '|') for c in cells)} |"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return "\n".join([_row(*head), "|" + "---|" * len(head), *(_row(*row) for row in rows)])


def _verdicts(known: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (f"[{r['panel']}](#{r['panel']})", v["claim"], f"**{v['verdict']}**", v["measured"])
        for r in known
        for v in r["verdicts"]
    ]
    return _table(("panel", "claim", "verdict", "measured"), rows)


def _times(known: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for r in known:
        seconds = [f"{r[key]:,.0f}" for key in ("seconds", "cpu_seconds")]
        rows.append((r["panel"], r["size"], *seconds, ", ".join(r["cut"]) or "nothing"))
    versions = ", ".join(f"{name} {number}" for name, number in known[0]["versions"].items())
    said = (
        "Wall-clock seconds depend on what else the machine does; CPU-seconds count both cores. Chains that "
        "an earlier panel, or an interrupted run, has finished are not counted again."
    )
    table = _table(("panel", "size", "seconds", "CPU-seconds", "cut from the full experiment"), rows)
    return f"{said}\n\n{table}\n\nMade with {versions}."


def _panel(record: Mapping[str, Any]) -> list[str]:
    name = record["panel"]
    settings = [(f"`{key}`", f"`{_value(value)}`") for key, value in record["settings"].items()]
    edge = at_the_edge(record)
    warning = (
        f"Tuned to the edge of the grid, so not fully tuned: {'; '.join(edge)}. A wider grid might change "
        "these step sizes, and verdicts that compare values of K with them."
    )
    differs = "\n".join(f"- {line}" for line in [*record["differs"], *([warning] if edge else [])])
    cut = f"Cut from the full experiment: {', '.join(record['cut'])}." if record["cut"] else ""
    return [
        f"## {name}",
        f"**{record['title']}** ({record['paper']}). {record['shows']}",
        *([cut] if cut else []),
        f"```{{image}} reproduction/{name}.svg\n:alt: {record['title']}\n```",
        f"What differs from the paper, and why:\n\n{differs}",
        f"Settings (seed {record['seed']}); points: [CSV](reproduction/{name}.csv), record: "
        f"[JSON](reproduction/{name}.json).",
        _table(("setting", "value"), settings),
    ]


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{k}: {_value(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(_value(v) for v in value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if value in (True, False) else str(value)


def publish(results: Path) -> None:
    """Copy the outputs of a results folder beside the page and write the page."""
    STORED.mkdir(exist_ok=True)
    for record in records(results):
        for kind in ("json", "csv", "svg"):
            name = f"{record['panel']}.{kind}"
            write_atomically(STORED / name, (results / name).read_bytes())
    write_atomically(PAGE, page(STORED).encode())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    publish(Path(sys.argv[1]))
    print(f"wrote {PAGE}")
