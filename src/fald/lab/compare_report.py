"""``fald compare``: run a comparison of a study, print it and draw it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fald.core.errors import ConfigError
from fald.core.files import write_atomically
from fald.lab.compare import Plan, as_methods, compare
from fald.report.lines import write_lines
from fald.results.text import align, number
from fald.study.precision import set_precision
from fald.study.schema import Study

_AXES = {
    "rounds": ("rounds", "communication rounds"),
    "bytes": ("bytes", "bytes up and down per client"),
    "seconds": ("seconds", "seconds in this process, without any network"),
}
_COMPACT = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def run(
    study: Study,
    out: Path,
    *,
    methods: str | None = None,
    budget_rounds: int | None = None,
    target_error: float | None = None,
    num_chains: int = 8,
    reference: str = "auto",
    resume: bool = False,
    report: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Compare methods on a study, and write ``comparison.json`` and three figures into a folder.

    Local steps, batch size, seed and precision are those of the study's ``[sampler]``, if it has one.
    """
    if budget_rounds is not None and target_error is not None:
        raise ConfigError("give --budget-rounds or --target-error, not both")
    if study.privacy is not None:
        raise ConfigError(
            "a comparison looks at all rows together and is not private", hint="remove the [privacy] section"
        )
    sampler = study.sampler
    if sampler is not None and sampler.temperature != 1:
        raise ConfigError(
            f"methods are compared at temperature 1; got {sampler.temperature:g}", hint="--set temperature=1"
        )
    set_precision(study)
    plan = Plan(
        methods=as_methods(methods),
        budget_rounds=2000 if budget_rounds is None else budget_rounds,
        target_error=target_error,
        local_steps=Plan.local_steps if sampler is None else sampler.local_steps,
        batch_size=None if sampler is None else sampler.batch_size,
        num_chains=num_chains,
        seed=study.fit.seed if sampler is None else sampler.seed,
    )
    data = study.read_data()
    model = study.build_model(data.features)
    found = compare(model, data, folder=out, plan=plan, reference=reference, resume=resume, report=report)
    document = {"title": study.title, **found, "folder": str(out)}
    write_atomically(out / "comparison.json", json.dumps(document, indent=1).encode())
    plot(document, out)
    return document


def plot(document: dict[str, Any], out: Path) -> list[Path]:
    """Draw error against rounds, bytes and seconds; point estimates by the error of their means."""
    made = []
    for name, (key, label) in _AXES.items():
        lines = {}
        for method, found in document["methods"].items():
            points = [p for p in found.get("curve", []) if _along(p, key) > 0 and p["error"] > 0]
            if points:
                shown = f"{method} (point)" if found["point_estimate"] else method
                lines[shown] = ([_along(p, key) for p in points], [p["error"] for p in points])
        if lines:
            made.append(
                write_lines(
                    out / f"error-{name}.html",
                    lines,
                    title=document.get("title") or "Error against what it costs",
                    x=label,
                    y="error, in posterior sds",
                    logarithmic=(True, True),
                )
            )
    return made


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
    header = [
        "method",
        "step·L",
        "rounds",
        "up",
        "down",
        "gradients",
        "seconds",
        "mean error",
        "sd error",
        "error",
    ]
    order, last = [], []
    for name, found in document["methods"].items():
        if "refused" in found:
            continue
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
    rule, header_rows = document["rule"], rows(document)
    target = rule["target_error"]
    lines = [
        document.get("title") or "Comparison of methods",
        f"{document['num_clients']} sites, {document['num_rows']:,} rows, "
        f"{document['num_parameters']} parameters; K = {rule['local_steps']} where a method has local steps",
        f"reference: {document['reference']['name']}",
        f"step sizes tuned alike: {len(rule['step_factors'])} tried for {rule['pilot_rounds']} rounds, "
        "lowest Stein score kept, reference unseen",
        "",
        align(*header_rows) if header_rows[1] else "no method could run",
        "",
        "Errors in posterior sds, root mean square over parameters; up and down per site and chain.",
    ]
    if target is not None:
        reached = [n for n, f in document["methods"].items() if f.get("reached")]
        missed = [n for n, f in document["methods"].items() if "curve" in f and not f.get("reached")]
        lines.append(f"reached {target:g}: {', '.join(reached) or 'none'}")
        lines.append(f"did not reach it: {', '.join(missed) or 'none'}")
    lines.append(
        f"Means of the reference are themselves uncertain by {document['reference']['uncertainty']:.2g}."
    )
    lines += [f"{n} did not run: {f['refused']}" for n, f in document["methods"].items() if "refused" in f]
    lines.append(f"Figures and numbers are in {document['folder']}.")
    return "\n".join(lines)
