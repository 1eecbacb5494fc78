"""A result for a terminal: the judgement first, then the table, then what there is to say of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fald.results.examine import Examined
from fald.results.text import align, labelled, number, percent

if TYPE_CHECKING:
    import xarray as xr


def text(found: Examined) -> str:
    """A result as text: its first line is the worst of its checks in plain words."""
    run, kind = found.document, found.kind
    lines = [
        run["judgement"]["first"],
        "",
        run["title"] or f"{run['model']} model",
        _where(found.tree, kind.exchanged),
        f"{run['rounds_done']} rounds of {run['method']}" if kind.certified else _chain_line(run),
        *_federation_lines(found.facts["federation"]),
        "",
        *_table(found),
        "",
        *(_verdict_lines(run) if kind.certified else ()),
        *(_chain_lines(run) if kind.chains else ()),
        *_check_lines(run["judgement"]),
        *(found.tree.attrs["privacy_statement"].splitlines()[:1] if kind.private else ()),
    ]
    lines += [run["note"]] if kind.unseen else []
    return "\n".join([*lines, *(_beside_lines(run) if kind.chains else ())])


def _where(tree: xr.DataTree, exchanged: str) -> str:
    sites = tree.children["constant_data"].to_dataset()
    rows, count = int(sites["size"].sum()), len(sites["client"])
    pairs = zip(sites["client"].values, sites["size"].values)
    sizes = f" ({', '.join(f'{n} {s}' for n, s in pairs)})" if count <= 8 else ""
    return f"{count} sites, {rows:,} rows{sizes}; sites exchanged {exchanged}"


def _chain_line(run: Mapping[str, Any]) -> str:
    settings, done = run["settings"], run["rounds_done"]
    chains, asked = settings["num_chains"], settings["num_rounds"]
    rounds = f"{asked:,} rounds" if done + settings["thinning"] > asked else f"{done:,} of {asked:,} rounds"
    return f"{rounds} of {settings['local_steps']} local steps, {chains} chain{'s' if chains > 1 else ''}"


def _table(found: Examined) -> list[str]:
    run = found.document
    if not found.kind.draws:
        cells = [[labelled(k, run["units"]), number(v)] for k, v in run["estimate"].items()]
        return [align(["parameter", "estimate"], cells)]
    ratio = _ratio(run)
    return [summary_text(run), *([f"The {ratio} is the posterior median."] if ratio else [])]


def _ratio(run: Mapping[str, Any]) -> str | None:
    """What the model calls the exponential of a parameter, by its column in the summary; None: nothing."""
    low = f" {100 * (1 - run['level']) / 2:g}%"
    return next((key.removesuffix(low) for key in run["summary"][0] if key.endswith(low)), None)


def summary_text(run: Mapping[str, Any]) -> str:
    """The table of the posterior; ratios first, because they answer the question."""
    rows, level = run["summary"], run["level"]
    tail = 100 * (1 - level) / 2
    low, high = f"{tail:g}%", f"{100 - tail:g}%"
    name = _ratio(run)
    header = ["parameter"]
    interval = f"{100 * level:g}% interval"
    if name:
        log = f"log {name.removesuffix(' ratio')}"
        header += [name, interval, log, "sd", f"{interval} ({log})", "ESS", "R-hat"]
    else:
        header += ["mean", "sd", interval, "ESS", "R-hat"]
    mixing = any(row["r_hat"] is not None for row in rows)  # weighted draws have none
    table = []
    for row in rows:
        cells = [labelled(row["parameter"], run["units"])]
        if name:
            known = row[name] is not None
            ends = f"{_shown(row[f'{name} {low}'])} to {_shown(row[f'{name} {high}'])}"
            cells += [_shown(row[name]), ends] if known else ["", ""]
        cells += [
            _shown(row["mean"]),
            _shown(row["sd"]),
            f"{_shown(row[low])} to {_shown(row[high])}",
            "-" if row["ess_bulk"] is None else f"{row['ess_bulk']:.0f}",
            "-" if row["r_hat"] is None else f"{row['r_hat']:.3f}",
        ]
        table.append(cells if mixing else cells[:-1])
    return align(header if mixing else header[:-1], table)


def _shown(value: float | None) -> str:
    return "-" if value is None else number(value)


def _verdict_lines(run: Mapping[str, Any]) -> list[str]:
    """The verdict, and who is exposed."""
    tolerance, khat = run["accuracy"], run["khat"]
    if run["verdict"] == "reached":
        weighed = f"k-hat {khat:.2f}, " if khat is not None else ""
        counted = f"{run['effective_draws']:,.0f} effective of {run['num_proposed']:,} draws"
        lines = [
            f"Reached: means within {tolerance:g} posterior sd and sds within {100 * tolerance:g}%, all at "
            f"once at 95% ({weighed}{counted})."
        ]
    else:
        lines = [f"NOT REACHED: {run['reason']}.", f"What to do: {run['advice']}."]
    names = run["exposed"]
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        few = "So few rows that sums over them describe single rows"
        lines.append(
            f"{few}: {shown}. A secure sum has hidden them among those of the other sites."
            if run["hidden"]
            else f"Exposed: {shown}. {few}, and no secure sum has hidden them."
        )
    return lines


def _chain_lines(run: Mapping[str, Any]) -> list[str]:
    predicted = (run["foreseen"] or {}).get("predicted")
    if not predicted:
        return []
    return [
        f"Predicted for these settings: means off by up to {predicted['bias']:.2g} posterior sd, "
        f"sds by up to {percent(predicted['sd_error'])}."
    ]


def _beside_lines(run: Mapping[str, Any]) -> list[str]:
    """Planned FA-LD beside the few-round posterior."""
    found = run["beside"]
    if found is None:
        return []
    goal = found["planned"]
    aim = f"planned for means within {goal:g} posterior sd and sds within {100 * goal:g}%"
    if "missing" in found:
        return ["", f"FA-LD was {aim}. No few-round posterior to compare with: {found['missing']}."]
    predicted = (run["foreseen"] or {}).get("predicted")
    bias, wide = (f"{predicted[k]:.3f}" if predicted else "-" for k in ("bias", "sd_error"))
    mean_of, sd_of = (labelled(found[k], run["units"]) for k in ("shift_parameter", "sd_parameter"))
    known = {k: [r[k] for r in run["summary"] if r[k] is not None] for k in ("r_hat", "ess_bulk")}
    rows = [
        [f"largest shift of a mean ({mean_of}), in posterior sd", f"{found['shift']:.3f}", bias],
        [f"ratio of sds farthest from 1 ({sd_of})", f"{found['sd_ratio']:.3f}", f"1 ± {wide}"],
        ["rounds", f"{run['rounds_done']:,}", ""],
        ["largest R-hat", f"{max(known['r_hat'], default=np.nan):.3f}", ""],
        ["smallest ESS", f"{min(known['ess_bulk'], default=np.nan):,.0f}", ""],
    ]
    return [
        "",
        f"FA-LD, {aim}, beside the few-round posterior ({found['rounds']} rounds, {found['verdict']})",
        align(["", "measured", "predicted"], rows),
        f"Chance alone moves the shift by {found['standard_error']:.3f} and the ratio by "
        f"{found['sd_standard_error']:.3f} (standard errors).",
        "Where rounds are dear: --method corrected, Langevin dynamics that ends certified after a handful.",
    ]


def _check_lines(judged: Mapping[str, Any]) -> list[str]:
    """Checks that are not fine with a sentence and what to do, the others by their names."""
    checks = judged["checks"]
    lines = []
    for check in (c for colour in ("red", "amber") for c in checks if c["colour"] == colour):
        lines.append(f"{check['word']}: {check['name']}. {check['sentence']}")
        if check["advice"]:
            lines.append(f"      What to do: {check['advice']}.")
    fine = [c["name"] for c in checks if c["colour"] == "green"]
    unknown = [c["name"] for c in checks if c["colour"] == "none"]
    lines += [f"fine: {', '.join(fine)}."] if fine else []
    lines += [f"not checked: {', '.join(unknown)} (the report says why)."] if unknown else []
    return lines


def _federation_lines(about: Mapping[str, Any] | None) -> list[str]:
    """What a result says of the federation it came from; nothing for a run in one process."""
    if about is None:
        return []
    if about["secure_sum"]:
        lines = ["Secure sum: the coordinator saw sums over sites only."]
    else:
        lines = [f"No secure sum ({about['why_not']}): the coordinator saw the upload of every single site."]
    if about["arrival_based"]:
        lines.append(
            "Participants were those who answered in time: slow sites count for less than they should."
        )
    if about["dropouts"]:
        rounds = len(about["dropouts"])
        sites = sorted({site for d in about["dropouts"] for site in d["silent"]})
        lines.append(f"Sites that were silent in {rounds} rounds: {', '.join(sites)}.")
    return lines


def rounds_text(run: Mapping[str, Any]) -> str:
    """The rounds of a few-round method as a table."""
    cells = []
    for row in run["rounds"]:
        shown = [
            "-" if row[name] is None else number(row[name]) if name == "khat" else f"{row[name]:,.0f}"
            for name in ("draws", "khat", "ess", "explorers", "bytes_down", "bytes_up")
        ]
        cells.append([str(row["round"]), *shown])
    return align(["round", "draws", "k-hat", "ESS", "searches", "bytes down", "bytes up"], cells)


def drift_text(run: Mapping[str, Any]) -> str:
    """The table of sites of a chain."""
    rows = [
        [
            site["client"],
            f"{site['rows']:.0f}",
            f"{site['share']:.3f}",
            f"{site['took_part']:.0f}",
            *(number(np.nan if site[key] is None else site[key]) for key in ("mean_drift", "max_drift")),
        ]
        for site in run["sites"]
    ]
    return align(["site", "rows", "share", "times drawn", "mean drift", "largest drift"], rows)
