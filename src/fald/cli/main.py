"""The ``fald`` command: thin wrappers over ``fald.commands``."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from fald import cli_lab, commands, diagnostics, fit_report, plan_report, privacy_commands, tables
from fald import report as reports
from fald.checkpoint import write_atomically
from fald.cli_options import Json, Level, Quiet, Run, Settings, Strict, StudyFile
from fald.datasets import load_bundled_study
from fald.errors import ConfigError, DataError, ExitCode, FaldError, Interrupted
from fald.federation.cli import app as federation_app
from fald.planner import Goal
from fald.privacy.calibration import Budget
from fald.results import check_level
from fald.study import TEMPLATE, Study, load_study
from fald.version import __version__

app = typer.Typer(
    name="fald",
    help="A Bayesian posterior over data that cannot be pooled.\n\nExample: fald demo",
    add_completion=True,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    suggest_commands=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("fald-demo"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Analyse the bundled four-hospital trial.

    Example: fald demo
    """
    study = load_bundled_study("indo")
    ours = out.is_dir() and ((out / "study.json").exists() or not any(out.iterdir()))
    if out.exists() and not ours:
        raise ConfigError(f"{out} exists and is not an earlier demo", hint="choose another folder with --out")
    commands.forget_run(out)
    found = _finish(study, out, resume=False, as_json=as_json, quiet=quiet, strict=False, level=0.95)
    if not as_json:
        row = next(r for r in found["summary"] if r["parameter"] == "indomethacin")
        low, high = row["odds ratio 2.5%"], row["odds ratio 97.5%"]
        print(
            f"\nIndomethacin multiplies the odds of pancreatitis by {row['odds ratio']:.2f} "
            f"(95% credible interval {low:.2f} to {high:.2f}).\n"
            f"{_plain_cost(study)}\n"
            f"Next: open {out / 'report.html'} in a browser, or fald new for a study of your own."
        )


def _plain_cost(study: Study) -> str:
    made = plan_report.plan_study(study)
    cost = f"about {made.best.num_rounds:,} rounds of {made.goal.num_chains} chains"
    return f"Plain FA-LD would need {cost} for this accuracy (fald plan says why)."


@app.command()
def run(
    study: StudyFile,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results (default: runs/STUDY).", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    federation: Annotated[
        Path | None,
        typer.Option(help="Run where the rows are: the folder of a federation.", show_default=False),
    ] = None,
    level: Level = 0.95,
    as_json: Json = False,
    quiet: Quiet = False,
    strict: Strict = False,
) -> None:
    """Run a study and print its posterior.

    Example: fald run study.toml --set step-size=1e-4 --out results

    Example: fald run study.toml --federation trial
    """
    loaded = load_study(study, settings or [])
    out = out or Path("runs") / study.stem
    _finish(loaded, out, resume, as_json, quiet, strict, level, federation)


@app.command(short_help="Say how far to trust a run.")
def diagnose(
    folder: Run,
    level: Level = 0.95,
    doubling: Annotated[int, typer.Option(help="Rounds to check with a doubled step.")] = 2000,
    as_json: Json = False,
    strict: Strict = False,
) -> None:
    """Say how far to trust a run: mixing, effective sample size, drift per site.

    Example: fald diagnose runs/study --strict
    """
    study, tree = commands.open_run(folder)
    found, why = None, "a point estimate has no law to check"
    if fit_report.is_fit(tree):
        why = "the draws of this method are weighted to the posterior itself"
    elif not tree.attrs["point_estimate"]:
        try:
            found = commands.check_run(study, tree, doubling)
        except DataError as error:  # the tables may have moved since the run
            why = error.message
    if as_json:
        print(json.dumps({**commands.document(tree, level), "checks": found}, indent=1))
    elif fit_report.is_fit(tree):
        print(commands.text(tree, level))
        print(f"\nWhy this method: {tree.attrs['chosen']}")
        print(f"\nRounds (bytes per site)\n{fit_report.rounds_text(tree)}")
        print(f"\nWhat left a site, summed over all sites\n{fit_report.reveals_text(tree)}")
    else:
        print(commands.text(tree, level))
        checked = f"none: {why}" if found is None else plan_report.checks_text(found)
        print(f"\nPredicted, guaranteed and measured\n{checked}")
        print("\nDistance of each site from the average at the end of a round")
        print(tables.drift_text(diagnostics.client_drift(tree)))
    if strict:
        commands.require_clean(tree)


@app.command(short_help="Write the report of a run, for a browser and for paper.")
def report(
    folder: Run,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write to (default: RUN).", show_default=False),
    ] = None,
    level: Level = 0.95,
    doubling: Annotated[int, typer.Option(help="Rounds to check with a doubled step.")] = 0,
    reference: Annotated[
        Path | None, typer.Option(help="Result to compare with (.nc).", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the report of a run: report.html for a browser or A4 paper, report.md for mail.

    The answer first; then how far to trust it, the sites, the privacy, and how to do it again.

    Example: fald report runs/study --level 0.9
    """
    check_level(level)
    document, page = reports.report_run(folder, out, level=level, doubling=doubling, reference=reference)
    if as_json:
        print(json.dumps(document, indent=1, ensure_ascii=False))
    else:
        status = document["status"]
        print("\n".join([status["headline"], *[f"- {reason}" for reason in status["reasons"]]]))
        print(f"Report: {page}")


@app.command()
def predict(
    folder: Run,
    data: Annotated[
        Path, typer.Argument(metavar="TABLE", help="CSV or Parquet with the features.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write CSV here instead of standard output.", show_default=False)
    ] = None,
    level: Level = 0.95,
    as_json: Json = False,
) -> None:
    """Predict outcomes for new rows, with intervals.

    Example: fald predict runs/study new-patients.csv --out predicted.csv
    """
    frame = commands.predict_table(folder, data, level)
    frame.index = frame.index + 1  # rows count from one, as in messages about tables
    frame.index.name = "row"
    content = (
        json.dumps({"level": level, "predictions": tables.records(frame)}, indent=1) + "\n"
        if as_json
        else frame.round(6).to_csv()
    )
    if out is None:
        print(content, end="")
    else:
        write_atomically(out, content.encode())
        print(f"{len(frame)} predictions written to {out} ({100 * level:g}% intervals)", file=sys.stderr)


@app.command(short_help="Choose local steps, step size and rounds before running.")
def plan(
    study: Annotated[Path | None, typer.Argument(metavar="[STUDY.toml]", show_default=False)] = None,
    constants: Annotated[
        list[str] | None,
        typer.Option(metavar="L=… m=… d=…", help="Plan from constants, without data.", show_default=False),
    ] = None,
    bias: Annotated[float, typer.Option(help="Wanted: shift of means, in posterior sds.")] = 0.05,
    sd_error: Annotated[float, typer.Option(help="Wanted: relative error of sds.")] = 0.05,
    rounds: Annotated[
        int | None, typer.Option(help="Best accuracy within so many rounds.", show_default=False)
    ] = None,
    epsilon: Annotated[float, typer.Option(help="With --constants: W2 to guarantee.")] = 0.1,
    settings: Settings = None,
    write: Annotated[bool, typer.Option("--write", help="Write the settings into the study.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write error against rounds (.html).", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Choose local steps, step size and rounds for a study, before running it.

    Example: fald plan study.toml --write

    Example: fald plan --constants "L=300 m=4 d=9 N=4"
    """
    if (study is None) == (not constants):
        raise ConfigError("give a study, or --constants", hint='for example --constants "L=300 m=4 d=9"')
    if study is None:
        if write or plot is not None:
            raise ConfigError("--write and --plot need a study")
        found = plan_report.certified(plan_report.parse_constants(constants or []), epsilon)
        print(json.dumps(found, indent=1) if as_json else plan_report.certified_text(found))
        return
    loaded = load_study(study, settings or [])
    commands.set_precision(loaded)
    chains = loaded.sampler.num_chains if loaded.sampler else Goal.num_chains
    goal = Goal(bias=bias, sd_error=sd_error, num_chains=chains)
    made = plan_report.plan_study(loaded, goal, rounds)
    print(
        json.dumps(plan_report.document(made, loaded.title), indent=1)
        if as_json
        else plan_report.text(made, loaded.title)
    )
    if plot is not None:
        plan_report.plot(made, plot)
        print(f"figure written to {plot}", file=sys.stderr)
    if write:
        plan_report.write_settings(study, plan_report.sampler_settings(made))
        print(f"settings written to {study}", file=sys.stderr)


@app.command(short_help="State the privacy of a study or a run, or keep a budget.")
def privacy(
    study: Annotated[
        list[str] | None, typer.Argument(metavar="[calibrate] [STUDY.toml]", show_default=False)
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--run", help="State the privacy of a run.", show_default=False)
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Budget, for calibrate.", show_default=False)] = None,
    delta: Annotated[float | None, typer.Option(help="δ, if the study has none.", show_default=False)] = None,
    settings: Settings = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write ε against rounds (.html).", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """State the differential privacy of a study or a run, or search settings within a budget.

    Example: fald privacy study.toml --delta 1e-5

    Example: fald privacy calibrate study.toml --epsilon 2 --delta 1e-5
    """
    words = list(study or [])
    if folder is not None:
        if words or settings or epsilon is not None:
            raise ConfigError("--run states the privacy of a run as it was; give no study and no settings")
        document, show = privacy_commands.run_document(folder), lambda d: d["text"]
        loaded = commands.read_study(folder)
    else:
        search = words[:1] == ["calibrate"]
        if len(words) == search and Path("study.toml").exists():
            words.append("study.toml")  # the name that "fald new" gives
        if len(words) != 1 + search:
            raise ConfigError(
                "a study file is needed", hint="fald privacy [calibrate] STUDY.toml, or --run DIR"
            )
        loaded = load_study(words[-1], settings or [])
        chosen = privacy_commands.choose_delta(loaded, delta)
        if search:
            if epsilon is None:
                raise ConfigError("calibrate needs --epsilon, the budget")
            document = privacy_commands.calibrate_document(loaded, Budget(epsilon, chosen))
            show = privacy_commands.calibrate_text
        else:
            document, show = privacy_commands.study_document(loaded, chosen), privacy_commands.study_text
    if plot is not None:
        privacy_commands.plot_study(loaded, privacy_commands.choose_delta(loaded, delta), plot)
        print(f"figure written to {plot}", file=sys.stderr)
    print(json.dumps(document, indent=1, ensure_ascii=False) if as_json else show(document))


app.command(short_help="Run the paper's experiments, with a verdict on each claim.")(cli_lab.reproduce)
app.command(short_help="Compare methods on a study, by rounds, bytes and seconds.")(cli_lab.compare)
app.command(short_help="Follow a run in the browser; only reads.")(cli_lab.watch)
app.command(short_help="See error, guarantee, cost and ε of a study by sliders.")(cli_lab.explore)
app.command(short_help="Measure speed here, beside PyTorch, BlackJAX and NumPy.")(cli_lab.bench)


@app.command()
def new(path: Annotated[Path, typer.Argument(help="File to write.")] = Path("study.toml")) -> None:
    """Write a commented study file to start from.

    Example: fald new study.toml
    """
    if path.exists():
        raise ConfigError(f"{path} already exists", hint="choose another name")
    write_atomically(path, TEMPLATE.encode())
    print(f"Wrote {path}. Edit it, then: fald run {path}")


app.add_typer(federation_app, short_help="Run one study across machines.")


def _version(value: bool) -> None:
    if value:
        print(f"fald {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    _use_compilation_cache()
    if context.invoked_subcommand is None:
        print(commands.next_steps(Path()))


def _use_compilation_cache() -> None:
    """Keep compiled programs in the user's cache folder, so that the next start is fast."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(root / "fald" / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _finish(
    study: Study, out: Path, resume: bool, as_json: bool, quiet: bool, strict: bool, level: float,
    federation: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run a study, write its report, print its result and return it as a document."""
    check_level(level)
    how: dict[str, Any] = {
        "resume": resume,
        "progress": not quiet,
        "command": shlex.join(["fald", *sys.argv[1:]]),
    }
    try:
        if federation is None:
            tree = commands.run_study(study, out, **how)
        else:
            from fald.federation.follow import run_on  # what it needs is of no use to the other commands

            tree = run_on(study, federation, out, **how)
    except FaldError as error:
        if (out / "partial.nc").exists() and not isinstance(error, Interrupted):
            error.hint += f"; what went wrong is also in {reports.report_run(out, level=level)[1]}"
        raise
    written, page = reports.report_run(out, run=(study, tree), level=level)
    found = written["run"]
    if as_json:
        print(json.dumps({**found, "folder": str(out), "report": str(page)}, indent=1))
    else:
        print(f"{commands.text(tree, level)}\n\nReport: {page}")
    if strict:
        commands.require_clean(tree)
    return found


def _stop(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point: every error becomes one message and a documented exit code."""
    # a shell starts background jobs with SIGINT ignored; both signals must stop a run cleanly
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    try:
        app()
    except FaldError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(int(ExitCode.INTERRUPTED))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(int(ExitCode.OK))


if __name__ == "__main__":
    main()
