"""What somebody meets who types the command for the first time."""

import os
import pty
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from command import FALD, FITTED, run
from fald.cli.main import app
from fald.study.folder import next_steps

COMMANDS = ["", *[info.name or info.callback.__name__ for info in app.registered_commands]]
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen_and_shows_an_example(name):
    arguments = [name, "--help"] if name else ["--help"]
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments, prog_name="fald", terminal_width=80)
    assert result.exit_code == 0
    assert len(result.output.strip().splitlines()) <= 30
    assert f"Example: fald {name}".strip() in result.output


def test_examples_of_the_help_are_commands_with_known_options():
    for info in app.registered_commands:
        name, text = info.name or info.callback.__name__, info.callback.__doc__
        examples = re.findall(r"^ *Example: fald (\S+)(.*)$", text, re.MULTILINE)
        assert examples
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [name, "--help"], terminal_width=200)
        for command, rest in examples:
            assert command == name
            assert all(f"{option} " in result.output for option in re.findall(r"--[a-z-]+", rest))


def test_fald_alone_says_what_to_do_next_here(tmp_path):
    said = run(cwd=tmp_path)
    assert "fald demo" in said
    assert "fald new study.toml" in said
    (tmp_path / "trial.toml").write_text(FITTED)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    steps = next_steps(tmp_path)
    assert f"fald run {tmp_path / 'trial.toml'}" in steps
    assert "pyproject" not in steps
    done, cut = tmp_path / "runs" / "done", tmp_path / "runs" / "cut"
    for folder in (done, cut):
        (folder / "checkpoint").mkdir(parents=True)
        (folder / "study.json").write_text("{}")
    (done / "posterior.nc").touch()
    steps = next_steps(tmp_path)
    assert f"fald report {done}" in steps
    assert f"--out {cut} --resume" in steps


def test_a_wrong_command_suggests_the_right_one(tmp_path):
    assert "Did you mean 'run'" in run("rnu", cwd=tmp_path, code=2)


def test_shells_complete_commands_and_study_keys():
    start = "import sys; sys.argv[0] = 'fald'; from fald.cli.main import main; main()"
    ask = {"_FALD_COMPLETE": "complete_bash", "COMP_WORDS": "fald run --set sampler.s", "COMP_CWORD": "3"}
    done = subprocess.run(
        [sys.executable, "-c", start], env={**os.environ, **ask}, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.split() == ["sampler.step-size=", "sampler.seed="]


def on_a_terminal(arguments, **variables):
    """Output of the command when it believes that it writes to a terminal."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **variables}
    process = subprocess.Popen([*FALD, *arguments], stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the other end was closed
            break
        if not part:
            break
        shown += part
    os.close(leader)
    process.wait(timeout=600)
    return shown.decode()


def colours(text):
    """Colours among the escape sequences: 30 to 38, 40 to 48, 90 to 107; bold and italic are none."""
    codes = [int(c) for codes in COLOUR.findall(text) for c in re.findall(r"\d+", codes)]
    return [c for c in codes if 30 <= c <= 38 or 40 <= c <= 48 or 90 <= c <= 107]


def test_colour_only_on_a_terminal_that_wants_it():
    assert colours(on_a_terminal(["--help"]))  # the twin: there it is
    assert not colours(on_a_terminal(["--help"], NO_COLOR="1"))
    assert "\x1b" not in CliRunner().invoke(app, ["--help"]).output
