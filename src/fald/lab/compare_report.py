"""``fald compare``: run a comparison of a study, print it and draw it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fald.core.errors import ConfigError
from fald.core.files import write_atomically
from fald.lab.compare import ComparePlan, compare
from fald.report.lines import write_lines
from fald.results.text import align, number
from fald.study.precision import set_precision
from fald.study.schema import Study

_AXES = {
    "rounds": "communication rounds",
    "bytes": "bytes up and down per client",
    "seconds": "seconds in this process, without any network",
}
_COMPACT = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def plan_of(study: Study, methods: str | None = None, **asked: Any) -> ComparePlan:
    """What to compare on a study: what was asked for, the rest from its ``[sampler]``, if it has one."""
    if asked.get("budget_rounds") is not None and asked.get("target_error") is not None:
        raise ConfigError("give --budget-rounds or --target-error, not both")
    sampler = study.sampler
    if sampler is not None and sampler.temperature != 1:
        raise ConfigError(
            f"methods are compared at temperature 1; got {sampler.temperature:g}", hint="--set temperature=1"
        )
    own = {"seed": study.fit.seed}
    if sampler is not None:
        own = {name: getattr(sampler, name) for name in ("local_steps", "batch_size", "seed")}
    named = {} if methods is None else {"methods": tuple(m.strip() for m in methods.split(",") if m.strip())}
    return ComparePlan(**named, **own, **{k: v for k, v in asked.items() if v is not None})


def run(study: Study, plan: ComparePlan, out: Path, **options: Any) -> dict[str, Any]:
    """Compare methods on a study, and write ``comparison.json`` and three figures into a folder.

    Options are those of ``compare``; the precision is the study's.
    """
    if study.privacy is not None:
        raise ConfigError(
            "a comparison looks at all rows together and is not private", hint="remove the [privacy] section"
        )
    set_precision(study)
    data = study.read_data()
    found = compare(study.build_model(data.features), data, folder=out, plan=plan, **options)
    document = {"title": study.title, **found, "folder": str(out)}
    write_atomically(out / "comparison.json", json.dumps(document, indent=1).encode())
    plot(document, out)
    return document


def plot(document: dict[str, Any], out: Path) -> None:
    """Draw error against rounds, bytes and seconds; point estimates by the error of their means."""
    title = document["title"] or "Error against what it costs"
    for name, label in _AXES.items():
        lines = {}
        for method, found in document["methods"].items():
            points = [(_along(p, name), p["error"]) for p in found.get("curve", [])]
            points = [p for p in points if min(p) > 0]
            if points:
                lines[f"{method} (point)" if found["point_estimate"] else method] = tuple(zip(*points))
        if lines:
            words = {"title": title, "x": label, "y": "error, in posterior sds"}
            write_lines(out / f"error-{name}.html", lines, logarithmic=(True, True), **words)


def _along(point: dict[str, Any], key: str) -> float:
    return point["bytes_up"] + point["bytes_down"] if key == "bytes" else point[key]


def size(count: float) -> str:
    """Bytes in a unit that is short to read.

    Examples
    --------
    >>> size(31_400), size(12)
    ('31.4 kB', '12 B')
    """
    for unit, name in _COMPACT:
        if count >= unit:
            return f"{number(count / unit)} {name}"
    return f"{count:.0f} B"


def rows(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table, best first, point estimates and refusals last."""
    header = ["method", "step·L", "rounds", "up", "down", "gradients", "seconds"]
    header += ["mean error", "sd error", "error"]
    order, last = [], []
    ran = {name: found for name, found in document["methods"].items() if "refused" not in found}
    for name, found in ran.items():
        end = found["curve"][-1]
        cells = [
            name,
            "-" if found["step_factor"] is None else f"{found['step_factor']:g}",
            f"{end['rounds']:,.0f}",
            size(end["bytes_up"]),
            size(end["bytes_down"]),
            "-" if end["gradients"] is None else f"{end['gradients']:,.0f}",
            number(end["seconds"]),
            number(end["mean_error"]),
            "none" if end["sd_error"] is None else number(end["sd_error"]),
            "point" if found["point_estimate"] else number(end["error"]),
        ]
        (last if found["point_estimate"] else order).append((end["error"], cells))
    return header, [cells for _, cells in [*sorted(order), *sorted(last)]]


def text(document: dict[str, Any]) -> str:
    """The comparison for a terminal."""
    rule, (header, cells) = document["rule"], rows(document)
    target = rule["target_error"]
    lines = [
        document["title"] or "Comparison of methods",
        f"{document['num_clients']} sites, {document['num_rows']:,} rows, "
        f"{document['num_parameters']} parameters; K = {rule['local_steps']} where a method has local steps",
        f"reference: {document['reference']['name']}",
        f"step sizes tuned alike: {len(rule['step_factors'])} tried for {rule['pilot_rounds']} rounds, "
        "lowest Stein score kept, reference unseen",
        "",
        align(header, cells) if cells else "no method could run",
        "",
        "Errors in posterior sds, root mean square over parameters; up and down per site and chain.",
    ]
    if target is not None:
        for words, wanted in ((f"reached {target:g}", True), ("did not reach it", False)):
            names = [n for n, found in document["methods"].items() if found.get("reached") is wanted]
            lines.append(f"{words}: {', '.join(names) or 'none'}")
    unsure = document["reference"]["uncertainty"]
    lines.append(f"Means of the reference are themselves uncertain by {unsure:.2g}.")
    lines += [f"{n} did not run: {f['refused']}" for n, f in document["methods"].items() if "refused" in f]
    lines.append(f"Figures and numbers are in {document['folder']}.")
    return "\n".join(lines)
