"""Commands of those who study methods: experiments, comparisons, speed, and pages in the browser."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fald.cli.options import Json, Quiet, Settings, StudyFile


def reproduce(
    panels: Annotated[list[str], typer.Argument(help="Panels to run; all: every one.", show_default=False)],
    quick: Annotated[bool, typer.Option("--quick", help="All within two minutes; says what it cut.")] = False,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of the image panels (default: 2000).", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for figures, points and records.")] = Path(
        "fald-reproduce"
    ),
    seed: Annotated[int, typer.Option(help="The same seed gives the same points.")] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the experiments of the paper, with a verdict on each claim.

    Panels: all; fig1a to fig1e, fig2a to fig2e, fig3, fig4; beyond the paper: communication, calibration.

    Example: fald reproduce fig1a

    Example: fald reproduce all --quick --out experiments
    """
    from fald.lab.reproduce import runner  # what it needs is of no use to the other commands

    def report(record: Any) -> None:
        if not as_json:
            print(runner.text(record, out), end="\n\n", flush=True)

    records = runner.reproduce(
        panels,
        out,
        size="quick" if quick else "full",
        seed=seed,
        image_rounds=rounds,
        progress=not quiet,
        report=report,
    )
    if as_json:
        print(json.dumps({"folder": str(out), "panels": records}, indent=1, ensure_ascii=False))
    else:
        print(runner.closing(records))


def _tell(quiet: bool) -> Any:
    return None if quiet else lambda line: print(line, file=sys.stderr, flush=True)


def compare(
    study: StudyFile,
    methods: Annotated[
        str | None, typer.Option(help="Names with commas between (default: all).", show_default=False)
    ] = None,
    budget_rounds: Annotated[
        int | None, typer.Option(help="Rounds for every method (default: 2000).", show_default=False)
    ] = None,
    target_error: Annotated[
        float | None, typer.Option(help="Run each until its error is this small.", show_default=False)
    ] = None,
    chains: Annotated[int, typer.Option(help="Chains of every run.")] = 8,
    reference: Annotated[
        str, typer.Option(help="nuts, longest, or auto: nuts if NumPyro is installed.")
    ] = "auto",
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder (default: comparisons/STUDY).", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a comparison.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare methods on a study, by rounds, bytes and seconds.

    Example: fald compare study.toml --methods fa-ld,sgld,laplace --budget-rounds 1000
    """
    from fald.lab import compare_report
    from fald.study.schema import load_study

    chosen, asked = load_study(study, settings or []), {"budget_rounds": budget_rounds, "num_chains": chains}
    plan = compare_report.plan_of(chosen, methods, target_error=target_error, **asked)
    folder, options = out or Path("comparisons") / study.stem, {"resume": resume, "report": _tell(quiet)}
    document = compare_report.run(chosen, plan, folder, reference=reference, **options)
    print(json.dumps(document, indent=1) if as_json else compare_report.text(document))


def bench(
    workloads: Annotated[
        list[str] | None, typer.Argument(help="Some of the workloads (default: all).", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for figures and their history.")] = Path("fald-bench"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: to see it work, not to measure.")
    ] = False,
    repeats: Annotated[
        int | None,
        typer.Option(help="Timed calls of each contender (default: about five).", show_default=False),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure speed here, beside PyTorch, BlackJAX and NumPy.

    Example: fald bench simulation images
    """
    from fald.lab import bench as speed

    document = speed.run(workloads or [], out, quick=quick, repeats=repeats, report=_tell(quiet))
    print(json.dumps(document, indent=1) if as_json else (out / "bench.md").read_text(), end="")
