"""The README's examples are run, and the documentation covers what the code has."""

import importlib.util
import json
import operator
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import numpy as np
import pytest

import fald
from fald.core.errors import ExitCode

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "two-sites"
REFERENCE = ROOT / "docs" / "reference"

# Another processor or version of JAX rounds differently, which moves a printed number in its last digits.
RELATIVE, ABSOLUTE = 0.02, 0.005

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CELL = re.compile(r"^```(python|sh|console|\{code-cell\})\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language, text=README):
    return [content for kind, content in _FENCE.findall(text) if kind == language]


def commands(text=README):
    """Commands of the README in their order, each with its printed output, or None where none is shown."""
    found = []
    for language, content in _FENCE.findall(text):
        if language == "console":
            command, _, output = content.partition("\n")
            found.append((command.removeprefix("$ "), output))
        elif language == "sh":
            found += [(line.partition("#")[0].strip(), None) for line in content.splitlines()]
    return found


def run(command, folder):
    program, *arguments = shlex.split(command)
    assert program == "fald"
    call = [sys.executable, "-m", "fald.cli", *arguments]
    done = subprocess.run(call, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_number(word):
    return re.fullmatch(r"-?\d[\d,]*(\.\d+)?(e[-+]\d+)?", word) is not None


def assert_same_output(printed, actual, relative=RELATIVE, absolute=ABSOLUTE):
    """Equal words, numbers equal up to a tolerance; widths of columns do not count."""

    def words(text):
        apart = re.sub(
            r"[()]|[.,](?=\s|$)|,(?!\d{3}\b)", " ", text
        )  # a comma before three digits groups them
        return [word for word in apart.split() if not re.fullmatch("-+", word)]

    expected, found = words(printed), words(actual)
    assert len(expected) == len(found), f"printed:\n{printed}\nnow:\n{actual}"
    for a, b in zip(expected, found):
        if is_number(a) and is_number(b):
            was, now = (float(word.replace(",", "")) for word in (a, b))
            # a number between two printed ones may be rounded to either
            unit = 1.01 * 10.0 ** -len(a.partition(".")[2]) if re.fullmatch(r"-?0\.\d+", a) else 0.0
            np.testing.assert_allclose(now, was, relative, max(absolute, unit), err_msg=f"{a} is now {b}")
        else:
            assert a == b


def generated_reference():
    path = ROOT / "docs" / "_ext" / "generated_reference.py"
    spec = importlib.util.spec_from_file_location("generated_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_comparison_sees_what_it_should():
    assert_same_output("odds  0.451 (0.27 to 0.75)\n---", "odds 0.452   (0.27 to 0.76)\n-----")
    assert_same_output("row,mean\n0,0.407282,0.304221", "row,mean\n0,0.407283,0.304221")
    with pytest.raises(AssertionError):
        assert_same_output("odds 0.451", "odds 0.481")
    with pytest.raises(AssertionError):
        assert_same_output("0,0.407282,0.304221", "0,0.407282,0.404221")
    with pytest.raises(AssertionError):
        assert_same_output("k-hat 0.15", "k-hat 0.17")
    with pytest.raises(AssertionError):
        assert_same_output("odds 0.451", "rate 0.451")


@pytest.mark.slow
def test_readme_python_example_prints_what_the_readme_shows(tmp_path):
    (code,), (printed, *_) = blocks("python"), blocks("text")  # the output follows the code
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert_same_output(printed, done.stdout, 1e-3, 1e-3)  # to the digits shown


@pytest.mark.slow
def test_readme_study_of_two_files(tmp_path):
    for table in EXAMPLE.glob("*.csv"):
        shutil.copy(table, tmp_path)
    (study,) = blocks("toml")
    elsewhere = re.compile("fald demo|.*federation")  # tests/federation runs those of the federation
    ours = [(c, out) for c, out in commands() if c.startswith("fald") and not elsewhere.match(c)]
    assert [c.split()[1] for c, _ in ours] == [
        "new",
        "run",
        "diagnose",
        "predict",
        "plan",
        "privacy",
        "privacy",
    ]
    for command, printed in ours:
        actual = run(command, tmp_path)
        if printed is not None:
            assert_same_output(printed, actual)
        if command.startswith("fald new"):
            assert tomllib.loads((tmp_path / "study.toml").read_text())
            (tmp_path / "study.toml").write_text(study)


def test_example_study_is_the_one_of_the_readme():
    (study,) = blocks("toml")
    assert (EXAMPLE / "study.toml").read_text() == study


@pytest.mark.slow
def test_sweep_example_agrees_with_the_law():
    call = [sys.executable, str(ROOT / "examples" / "sweep.py")]
    done = subprocess.run(call, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    shift, drawn_shift, sd, drawn_sd = np.array([row[2:] for row in rows], float).T
    # about 350 effective draws or more: four standard errors of a mean and of a relative sd
    assert np.all(np.abs(drawn_shift - shift) < 4 * sd / np.sqrt(350))
    assert np.all(np.abs(drawn_sd / sd - 1) < 4 / np.sqrt(2 * 350))


def test_readme_demo_output_and_picture(tmp_path):
    (printed,) = [out for command, out in commands() if command == "fald demo"]
    actual = run("fald demo --quiet", tmp_path)
    lines = [line for line in actual.splitlines() if line]
    for line in (line for line in printed.splitlines() if line and line != "…"):  # … leaves lines out
        alike = max(lines, key=lambda other, line=line: _common(line, other))
        assert_same_output(line, alike)
    picture = (ROOT / "docs" / "images" / "demo.svg").read_text(encoding="utf-8")
    shown = re.findall(r">(\d\.\d\d) \((\d\.\d\d) to (\d\.\d\d)\)<", picture)
    rows = re.findall(r"^\w+(?: \(per \d+\))? +(\d\.\d+) +(\d\.\d+) to (\d\.\d+)", actual, re.MULTILINE)
    assert len(shown) == len(rows) == 8
    # the picture has two digits
    np.testing.assert_allclose(np.array(shown, float), np.array(rows, float), RELATIVE, ABSOLUTE + 0.0001)


def _common(a, b):
    return len(set(a.split()) & set(b.split()))


def test_readme_make_targets_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {line.split()[1] for line, _ in commands() if line.startswith("make ")}
    assert {"demo", "test"} <= named <= set(targets)


@pytest.mark.parametrize("code", list(ExitCode))
def test_exit_code_has_an_entry(code):
    text = (REFERENCE / "exit-codes.md").read_text(encoding="utf-8")
    entries = re.split(r"^## (?=\d)", text, flags=re.MULTILINE)[1:]
    (entry,) = [e for e in entries if e.startswith(f"{int(code)}:")]
    assert code is ExitCode.OK or ("*Typical cause*" in entry and "*What to do*" in entry)


def test_every_study_key_is_described():
    reference = generated_reference()
    sections = reference.sections()
    assert {"", "data", "model", "sampler"} <= set(sections)
    for name, schema in sections.items():
        table = reference.study_keys(name)
        for key in schema["properties"]:
            assert f"| `{key}` |" in table or (name == "" and key == "folder")
    assert "{fald-study-keys}" in (REFERENCE / "study-keys.md").read_text()


def test_a_key_without_a_meaning_is_noticed():
    reference = generated_reference()
    del reference.MEANINGS["sampler"]["step-size"]
    with pytest.raises(ValueError, match="step-size"):
        reference.study_keys("sampler")


def test_every_command_is_described():
    reference = generated_reference()
    assert {"demo", "run", "diagnose", "predict", "new"} <= set(reference.command_names())
    for name in reference.command_names():
        assert f"fald {name}" in reference.command_help(name)
    assert "{fald-commands}" in (REFERENCE / "command-line.md").read_text()


def test_every_public_name_is_in_the_api_reference():
    text = (REFERENCE / "api.md").read_text(encoding="utf-8")
    missing = [n for n in fald.__all__ if n != "__version__" and f"fald.{n}" not in text]
    missing += [f"models.{n}" for n in fald.models.__all__ if n != "Model" and f"fald.models.{n}" not in text]
    missing += [f"samplers.{n}" for n in fald.samplers.__all__ if f"fald.samplers.{n}" not in text]
    assert not missing


def maker(name):
    """A script that writes a page, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_comparison_of_networks_is_what_was_stored():
    networks = maker("make_networks")
    text = networks.PAGE.read_text(encoding="utf-8")
    assert networks.page(json.loads(networks.STORED.read_text())) == text, (
        "run: python docs/make_networks.py page"
    )
    better = {"a": np.array([1.0, 1.1, 1.2]), "b": np.array([2.0, 2.2, 2.1])}
    assert networks.verdict(better, "nll", "a", "b")[0] == "wins"
    assert networks.verdict(better, "auroc", "a", "b")[0] == "loses"
    better["b"][0] = 0.5  # one seed of three says otherwise
    assert networks.verdict(better, "nll", "a", "b")[0] == "cannot be told apart"


def test_the_api_reference_reads_without_being_built():
    make_api = maker("make_api")
    text = make_api.PAGE.read_text(encoding="utf-8")
    assert make_api.page(text) == text, "run: python docs/make_api.py"
    assert "- `fald.sample(rng_key, model, data, *, num_rounds" in text
    assert "- `fald.sinks.ProbeCurve(x, y, *, every=1, batch_size=500)`" in text


FRONT = pytest.mark.parametrize("page", ["README.md", "docs/fa-ld.md"])


@FRONT
def test_names_of_a_page_are_public_and_in_the_api_reference(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    code = [content for kind, content in _CELL.findall(text) if kind != "sh"]
    names = set(re.findall(r"\bfald\.([a-zA-Z_.]*[a-zA-Z_])", "\n".join([*code, *_inline(text)])))
    assert len(names) > 5
    reference = (REFERENCE / "api.md").read_text(encoding="utf-8")
    for name in names:
        room, _, last = name.rpartition(".")
        found = operator.attrgetter(name)(fald)
        assert name.partition(".")[0] in fald.__all__, name
        listed = re.search(
            rf"auto(?:module|class):: fald\.{room}\n   :members:(?:.*\b{last}\b|$)", reference, re.MULTILINE
        )
        is_room = isinstance(found, types.ModuleType) and re.search(rf"\bfald\.{name}\b", reference)
        assert f"fald.{name}\n" in reference or listed or is_room, name


@FRONT
def test_commands_of_a_page_exist_with_their_options(page):
    text, reference = (ROOT / page).read_text(encoding="utf-8"), generated_reference()
    lines = [line for _, content in _CELL.findall(text) for line in content.splitlines()]
    typed = [line.lstrip("$! ").partition("#")[0] for line in [*lines, *_inline(text)]]
    typed = [line.removeprefix("fald ").split() for line in typed if re.match("fald [a-z]", line)]
    assert len(typed) > 5
    helps = {name: reference.command_help(name) for name in reference.command_names()}
    for words in typed:
        name = " ".join(words[:2]) if " ".join(words[:2]) in helps else words[0]
        for option in (word for word in words if word.startswith("--")):
            assert re.search(rf"{option}\b", helps[name]), " ".join(words)


def _inline(text):
    """Code within sentences; a line may end in it."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def test_file_formats_name_everything_in_a_result():
    text = (REFERENCE / "file-formats.md").read_text(encoding="utf-8")
    clients = {"a": (np.ones((3, 1)), np.arange(3.0)), "b": (np.zeros((2, 1)), np.arange(2.0))}
    tree = fald.sample(
        0,
        fald.models.linear_regression(["x"]),
        fald.FederatedData.from_arrays(clients),
        num_rounds=4,
        local_steps=1,
        step_size=1e-3,
        num_chains=2,
        progress=False,
    )
    names = set(tree.attrs)
    for name, group in tree.children.items():
        assert f"`{name}`" in text
        names |= set(group.variables) | set(group.dims)
    unnamed = {n for n in names if f"`{n}`" not in text and f", {n}" not in text and f" {n} |" not in text}
    assert not unnamed


def _pages():
    docs = [p for p in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in p.parts]
    return [*sorted(ROOT.glob("*.md")), *docs]


def _slug(heading):
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", _pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_resolve(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(_slug, headings), f"{page.name}: {link}"


def test_citation_names_the_released_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {fald.__version__}\n" in text
    assert "On Convergence of Federated Averaging Langevin Dynamics" in text
    for page in (text, README):  # where the paper was published, and where it can be read
        assert all(words in page for words in ("UAI", "2024", "244", "2112.05120"))
