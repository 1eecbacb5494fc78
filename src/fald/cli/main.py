"""The ``fald`` command: thin wrappers over the rooms below."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fald.cli.federation import app as federation_app
from fald.cli.options import Json, Level, Method, Quiet, Run, Settings, Strict, StudyFile
from fald.core.compiled import keep_compiled
from fald.core.errors import ConfigError, ExitCode, FaldError, Interrupted
from fald.core.files import write_atomically
from fald.core.registry import Registry
from fald.core.version import __version__

# commands import what they need themselves, so that help and mistakes are answered at once
if TYPE_CHECKING:
    from fald.study.run import Run as RunOf
    from fald.study.schema import Study

COMMANDS = Registry(
    "command", "fald.commands", {"watch": "fald.cli.pages:watch", "explore": "fald.cli.pages:explore"}
)

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
    method: Method = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("fald-demo"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Analyse the bundled four-hospital trial.

    Example: fald demo

    Example: fald demo --method fa-ld
    """
    from fald.study.datasets import study_path
    from fald.study.folder import forget_run
    from fald.study.schema import load_study

    study = load_study(study_path("indo"), _chosen(method))
    ours = out.is_dir() and ((out / "study.json").exists() or not any(out.iterdir()))
    if out.exists() and not ours:
        raise ConfigError(f"{out} exists and is not an earlier demo", hint="choose another folder with --out")
    forget_run(out)
    run = _finish(study, out, as_json=as_json, quiet=quiet)
    if not as_json:
        row = next(r for r in run.examined.document["summary"] if r["parameter"] == "indomethacin")
        low, high = row["odds ratio 2.5%"], row["odds ratio 97.5%"]
        print(
            f"\nIndomethacin multiplies the odds of pancreatitis by {row['odds ratio']:.2f} "
            f"(95% credible interval {low:.2f} to {high:.2f})."
        )
        if method is None:
            print(
                "The same by federated averaging Langevin dynamics (FA-LD), the sampler for networks,\n"
                "minibatches, sites that take turns and private runs: fald demo --method fa-ld"
            )
        print(f"Next: open {out / 'report.html'} in a browser, or fald new for a study of your own.")


@app.command()
def run(
    study: StudyFile,
    method: Method = None,
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

    Example: fald run study.toml --method fa-ld

    Example: fald run study.toml --federation trial
    """
    from fald.study.schema import load_study

    loaded = load_study(study, [*(settings or []), *_chosen(method)])
    out = out or Path("runs") / study.stem
    _finish(
        loaded, out, resume=resume, as_json=as_json, quiet=quiet, strict=strict, level=level,
        federation=federation,
    )  # fmt: skip


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
    from fald.report import plan as plan_report
    from fald.results.terminal import drift_text, rounds_text, text
    from fald.study.folder import open_run
    from fald.study.review import examine_run

    study, tree = open_run(folder)
    found, measured = examine_run(study, tree, level=level, doubling=doubling)
    run = found.document
    if as_json:
        print(json.dumps({**run, "checks": measured}, indent=1))
    else:
        print(text(found))
        if found.kind.certified:
            print(f"\nWhy this method: {run['chosen']}")
            if run["proved"]:
                print(f"\nProved: {run['proved']}")
            print(f"\nRounds (bytes per site)\n{rounds_text(run)}")
            revealed = "\n".join(f"  {line}" for line in run["reveals"])
            print(f"\nWhat left a site, summed over all sites\n{revealed}")
        else:
            why = found.facts["no_rows"] or "a point estimate has no law to check"
            checked = f"none: {why}" if measured is None else plan_report.checks_text(measured)
            print(f"\nPredicted, guaranteed and measured\n{checked}")
            print("\nDistance of each site from the average at the end of a round")
            print(drift_text(run))
    if strict:
        found.require_clean()


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
    from fald import report as reports
    from fald.results.tree import check_level

    check_level(level)
    document, page = reports.report_run(
        folder, out, level=level, doubling=doubling or None, reference=reference
    )
    if as_json:
        print(json.dumps(document, indent=1, ensure_ascii=False))
    else:
        judged = document["run"]["judgement"]
        print("\n".join([judged["headline"], *[f"- {reason}" for reason in judged["reasons"]]]))
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
    from fald.results import text as tables
    from fald.study.review import predict_table

    frame = predict_table(folder, data, level)
    frame.index = frame.index + 1  # rows count from one, as in messages about tables
    frame.index.name = "row"
    content = (
        json.dumps({"level": level, "predictions": tables.records(frame)}, indent=1) + "\n"
        if as_json
        else tables.csv_text(frame.round(6))
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
    from fald.planner import Goal
    from fald.report import plan as plan_report
    from fald.study.precision import set_precision
    from fald.study.schema import load_study

    if (study is None) == (not constants):
        raise ConfigError("give a study, or --constants", hint='for example --constants "L=300 m=4 d=9"')
    if study is None:
        if write or plot is not None:
            raise ConfigError("--write and --plot need a study")
        found = plan_report.certified(plan_report.parse_constants(constants or []), epsilon)
        print(json.dumps(found, indent=1) if as_json else plan_report.certified_text(found))
        return
    loaded = load_study(study, settings or [])
    set_precision(loaded)
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
    from fald.privacy.calibration import Budget
    from fald.report import privacy as privacy_commands
    from fald.study.folder import read_study
    from fald.study.schema import load_study

    words = list(study or [])
    if folder is not None:
        if words or settings or epsilon is not None:
            raise ConfigError("--run states the privacy of a run as it was; give no study and no settings")
        document, show = privacy_commands.run_document(folder), lambda d: d["text"]
        loaded = read_study(folder)
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


for _name in COMMANDS:
    app.command(_name)(COMMANDS[_name])


@app.command()
def new(path: Annotated[Path, typer.Argument(help="File to write.")] = Path("study.toml")) -> None:
    """Write a commented study file to start from.

    Example: fald new study.toml
    """
    from fald.study.template import TEMPLATE

    if path.exists():
        raise ConfigError(f"{path} already exists", hint="choose another name")
    write_atomically(path, TEMPLATE.encode())
    print(f"Wrote {path}. Edit it, then: fald run {path}")


@app.command("new-model", short_help="Write a package with a model of your own to start from.")
def new_model(
    folder: Annotated[
        Path, typer.Argument(metavar="NAME", help="Folder and package to make.", show_default=False)
    ],
) -> None:
    """Write a small package with a model of your own, which studies and federations can name.

    It has an entry point, a model, a test against NUTS, and a study with data and a site's policy.

    Example: fald new-model my-model
    """
    from fald.study.new_model import write_model

    write_model(folder)
    print(
        f"Wrote {folder}: the model is in {folder / folder.name.replace('-', '_') / '__init__.py'}. Next:\n"
        f"  pip install --editable {folder}          here, and at every site of a federation\n"
        f"  fald run {folder / 'study.toml'}"
    )


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
    keep_compiled()
    if context.invoked_subcommand is None:
        from fald.study.folder import next_steps

        print(next_steps(Path()))


def _chosen(method: str | None) -> list[str]:
    """The method of a run as a setting of its study."""
    return [] if method is None else [f"fit.method={json.dumps(method)}"]


def _finish(
    study: Study, out: Path, *, resume: bool = False, as_json: bool, quiet: bool, strict: bool = False,
    level: float = 0.95, federation: Path | None = None,
) -> RunOf:  # fmt: skip
    """Run a study, write its report, print its result, and return the run."""
    from fald.results.tree import check_level

    check_level(level)
    how: dict[str, Any] = {
        "resume": resume,
        "progress": not quiet,
        "command": shlex.join(["fald", *sys.argv[1:]]),
    }
    try:
        if federation is None:
            from fald.study.run import run_study

            run = run_study(study, out, level=level, **how)
        else:  # submitted before anything is loaded that only its result needs
            from fald.federation.coordinator.follow import run_on

            tree = run_on(study, federation, out, **how)
            from fald.study.review import examine_run
            from fald.study.run import Run as RunOf

            run = RunOf(study, out, examine_run(study, tree, level=level)[0])
    except FaldError as error:
        if (out / "partial.nc").exists() and not isinstance(error, Interrupted):
            from fald import report as reports

            error.hint += f"; what went wrong is also in {reports.report_run(out, level=level)[1]}"
        raise
    from fald import report as reports
    from fald.results.terminal import text

    page = reports.report_finished(run)
    if as_json:
        print(json.dumps({**run.examined.document, "folder": str(out), "report": str(page)}, indent=1))
    else:
        print(f"{text(run.examined)}\n\nReport: {page}")
    if strict:
        run.examined.require_clean()
    return run


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
