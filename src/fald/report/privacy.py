"""What ``fald privacy`` does, without a terminal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from fald.core.errors import ConfigError, FaldError, PrivacyError, StorageError
from fald.privacy.accountant import Ledger, account
from fald.privacy.calibration import Budget, Vary, calibrate, pareto_front
from fald.privacy.paper import paper_bound
from fald.privacy.protection import bounded_sensitivity
from fald.privacy.settings import RunSettings
from fald.privacy.statements import statement
from fald.report.lines import write_lines
from fald.results.kinds import kind_of
from fald.results.text import align, number
from fald.settings.fald import Setting
from fald.study.folder import open_run, read_study
from fald.study.schema import Study

_CORRELATIONS = (0.0, 0.5, 0.8, 0.95)


def study_settings(study: Study) -> tuple[RunSettings, dict[str, Any]]:
    """Privacy-relevant settings of a study, and what a statement says of its sites and its model."""
    data = study.read_data()
    model = study.build_model(data.features)
    sampler = study.require_sampler()
    arguments = sampler.arguments()
    if "method" in arguments:
        what = f"there is no privacy accounting for the method {sampler.method!r}"
        raise PrivacyError(what, hint="use FA-LD")
    setting = Setting(**{name: arguments[name] for name in Setting.__dataclass_fields__})
    run = {"sizes": data.sizes, "num_rounds": sampler.num_rounds, "num_chains": sampler.num_chains}
    return RunSettings.of(setting, sensitivity=bounded_sensitivity(model, data), **run), {
        "clients": data.names,
        "origin": model.origin,
    }


def choose_delta(study: Study, delta: float | None) -> float:
    """δ of the command line, or of the study's privacy section."""
    if delta is not None:
        return delta
    if study.privacy is None:
        raise ConfigError(
            "delta is needed: the study has no privacy section",
            hint="add --delta 1e-5, or a [privacy] section",
        )
    return study.privacy.delta


def study_document(study: Study, delta: float) -> dict[str, Any]:
    """ε of a study before it runs: tight, by Rényi divergences, and by the corrected published bound."""
    settings, told = study_settings(study)
    ledger = Ledger(settings, delta=delta)
    warmup = study.require_sampler().num_warmup
    simulation = study.privacy is None or study.privacy.client_noise == "seeded"
    said = statement(ledger.report(), simulation=simulation, preparation_rounds=warmup, **told)
    budget = study.privacy.max_epsilon if study.privacy else None
    try:
        published = paper_bound(settings, delta=delta).epsilon
    except FaldError as error:
        published = f"not defined: {error.message}"
    return {
        **said.data,
        "text": said.text,
        "epsilon_rdp": account(settings, delta=delta, method="rdp").worst,
        "epsilon_published_bound": published,
        "max_epsilon": budget,
        "rounds_within_budget": None if budget is None else ledger.max_rounds(budget),
    }


def study_text(document: dict[str, Any]) -> str:
    """The same for a terminal."""
    shown = ("name", "rows", "noise_multiplier", "epsilon")
    rows = [[_value(c[key]) for key in shown] for c in document["clients"]]
    bound = document["epsilon_published_bound"]
    published = bound if isinstance(bound, str) else f"ε = {number(bound)}"
    lines = [
        document["text"],
        "",
        align(["site", "rows", "noise multiplier", "ε"], rows),
        "",
        f"tight (privacy loss distributions)  ε = {_value(document['epsilon'])}",
        f"Rényi divergences                   ε = {_value(document['epsilon_rdp'])}",
        f"published bound, corrected          {published}",
    ]
    if document["rounds_within_budget"] is not None:
        rounds, asked = document["rounds_within_budget"], document["settings"]["num_rounds"]
        verdict = "all of them" if rounds >= asked else "the run would stop there"
        lines.append(f"rounds within ε = {document['max_epsilon']:g}: {rounds} of {asked}, {verdict}")
    return "\n".join(lines)


def _value(value: Any) -> str:
    return str(value) if isinstance(value, str | int) else number(value)


def plot_study(study: Study, delta: float, path: Path) -> Path:
    """ε against rounds for several correlations, as an HTML figure."""
    settings, _ = study_settings(study)
    rounds = np.unique(np.geomspace(1, settings.num_rounds, 12).astype(int))
    series = {}
    for correlation in sorted({*_CORRELATIONS, settings.correlation} - {1.0}):
        ledger = Ledger(replace(settings, correlation=correlation), delta=delta)
        series[f"ρ = {correlation:g}"] = (rounds, [ledger.worst(int(r)) for r in rounds])
    budget = study.privacy.max_epsilon if study.privacy else None
    return write_lines(
        path,
        series,
        title=f"Privacy loss at δ = {delta:g}, worst site",
        x="rounds",
        y="ε",
        logarithmic=(True, True),
        level=None if budget is None else (f"budget ε = {budget:g}", budget),
    )


def run_document(folder: Path) -> dict[str, Any]:
    """The privacy of a finished, stopped or killed run."""
    try:
        _, tree = open_run(folder)
    except StorageError:
        begun = folder / "checkpoint" / "begun.json"
        if not begun.exists():
            raise
        return _killed_document(folder, begun)
    kind = kind_of(tree)
    if not kind.private:
        return {
            "guarantee": False,
            "label": "no privacy",
            "text": f"No privacy: the run had no privacy section. {kind.unprotected}",
        }
    return {**json.loads(tree.attrs["privacy"]), "text": tree.attrs["privacy_statement"]}


def _killed_document(folder: Path, begun: Path) -> dict[str, Any]:
    """What a run that was killed had spent: every round its clients began to answer."""
    study = read_study(folder)
    settings, told = study_settings(study)
    rounds = int(json.loads(begun.read_text())["rounds"])
    if rounds > settings.num_rounds:  # rounds that were answered twice, at most at the largest step
        settings = replace(settings, num_rounds=rounds, step_size=float(np.max(settings.step_size)))
    report = Ledger(settings, delta=choose_delta(study, None)).report(rounds)
    warmup = min(rounds, study.require_sampler().num_warmup)
    simulation = study.privacy is not None and study.privacy.client_noise == "seeded"
    said = statement(report, simulation=simulation, preparation_rounds=warmup, **told)
    return {**said.data, "text": f"{said.text}\nThe run was killed; all rounds it had begun are counted."}


def calibrate_document(study: Study, budget: Budget) -> dict[str, Any]:
    """Largest correlation, step size, rounds and participants within a budget, each given the others."""
    settings, _ = study_settings(study)
    found, front, drawn = {}, [], settings.scheme != "full"
    kinds = get_args(Vary) if drawn else [kind for kind in get_args(Vary) if kind != "num_participants"]
    for kind in kinds:
        try:
            result = calibrate(budget, settings, vary=kind)
            found[kind] = {"value": result.value, "epsilon": result.report.worst, "at_limit": result.at_limit}
        except PrivacyError as error:
            found[kind] = {"value": None, "infeasible": error.message, "hint": error.hint}
    if drawn and settings.num_clients <= 50:
        front = [vars(p) for p in pareto_front(budget, settings)]
    now = "infinite"
    if settings.correlation < 1:
        now = account(settings, delta=budget.delta).to_dict()["epsilon"]
    return {**vars(budget), "now": now, "largest": found, "front": front}


def calibrate_text(document: dict[str, Any]) -> str:
    """The same for a terminal."""
    rows = []
    for kind, result in document["largest"].items():
        name = kind.replace("_", "-")
        if result["value"] is None:
            rows.append([name, "none", result["infeasible"]])
        else:
            limit = " (end of the search; more may fit)" if result["at_limit"] else ""
            shown = _value(result["value"])
            rows.append([name, shown, f"ε = {number(result['epsilon'])}{limit}"])
    lines = [
        f"Budget ε = {document['epsilon']:g} at δ = {document['delta']:g}; "
        f"the study as written spends ε = {_value(document['now'])}.",
        "Largest value of each setting within the budget, the others as written:",
        "",
        *("  ".join((a.ljust(18), b.rjust(10), c)) for a, b, c in rows),
    ]
    if document["front"]:
        lines += ["", "Largest correlation for each number of participants:"]
        lines += [
            f"  S = {p['num_participants']}: "
            + ("none fits" if p["correlation"] is None else f"ρ ≤ {p['correlation']:.3f}")
            for p in document["front"]
        ]
    return "\n".join(lines)
