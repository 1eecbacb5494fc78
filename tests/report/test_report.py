"""Reports: every number is that of the files, and a bad run says so at the top."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

import fald
from command import run
from fald.report import report_document
from fald.report.page import FORMATS, html, look_up, markdown
from fald.results.examine import examine, made_checks
from fald.results.judgement import judgement
from fald.results.predictive import SMALLEST_CELL, compare
from fald.study.schema import load_study
from reports import document_of, make_runs

ROW = {"parameter": "x", "r_hat": 1.0, "ess_bulk": 1000.0}
SITE = {"client": "a", "took_part": 5, "seldom": False}
CHECK = {
    key: {"p_value": 0.5, "distance": 0.1} for key in ("site_means", "squared_error", "calibration_error")
}
CHECK |= {"sites": [], "outcome": "mean outcome"}
PREDICTED = {"bias": 0.01, "bias_parameter": "x", "sd_error": 0.01, "sd_parameter": "x"}
HEALTHY = {
    "run": {
        "kind": "chain", "summary": [ROW], "rounds_done": 10, "settings": {"num_rounds": 10},
        "foreseen": {"predicted": PREDICTED}, "step_times_curvature": 0.1, "pseudo_posterior": False,
    },
    "ended": "", "chains": 4, "modes": None, "sites": [SITE], "predictive": CHECK, "no_predictive": "",
    "federation": None, "reference": None, "prior": [{"parameter": "x", "prior": 0.01, "likelihood": 0.1}],
    "columns": {"outcome": [], "constant": [], "copies": [], "dependent": [], "inflated": []}, "values": [],
    "doubling": {"shift": 0.01, "standard_error": 0.01, "shift_parameter": "x"},
}  # fmt: skip


class Page(HTMLParser):
    """What a page shows: its text, its marked numbers, the cells of its tables."""

    def __init__(self, text):
        super().__init__()
        self.numbers, self.cells, self.words, self.outside = [], [], [], []
        self.headings, self._within = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag in ("meta", "link", "wbr", "br"):
            return
        self._within.append((tag, dict(attrs)))
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        while self._within and self._within.pop()[0] != tag:
            pass

    def handle_data(self, data):
        tags = [tag for tag, _ in self._within]
        if not tags or {"script", "style"} & set(tags):
            return
        self.words.append(data)
        if tags[-1] == "th":
            self.headings.append(data)
        if tags[-1] == "data":
            self.numbers.append((self._within[-1][1], data))
        if "td" in tags:
            self.cells[-1] += data
            if tags[-1] == "td":
                self.outside.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))


def read(path):
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A fitted and a sampled run of the same tables."""
    return make_runs(tmp_path_factory.mktemp("report"))


@pytest.mark.parametrize("name", ["fitted", "sampled"])
def test_every_number_of_the_page_is_that_of_the_document(fitted, name):
    page = read(fitted / name / "report.html")
    document = json.loads(run("report", name, "--json", cwd=fitted))
    assert len(page.numbers) > 60
    for attributes, shown in page.numbers:
        value = look_up(document, attributes["data-key"])
        assert float(attributes["value"]) == value
        assert FORMATS[attributes["data-how"]](value) == shown
    # a number in a table that is not marked would escape the check above
    assert not [text for text in page.outside if re.search(r"\d", text)]
    assert sum(bool(re.search(r"\d", cell)) for cell in page.cells) > 50


@pytest.mark.parametrize("name", ["fitted", "sampled"])
def test_the_document_is_that_of_the_files(fitted, name):
    document = json.loads(run("report", name, "--json", cwd=fitted))
    assert document["run"] == json.loads((fitted / name / "summary.json").read_text())
    tree = fald.load(fitted / name / "posterior.nc")
    draws = tree["posterior"]["coefficient"].sel(feature="age").values.astype(float).ravel()
    (effect,) = [e for e in document["effects"] if e["label"] == "age (per 10)"]
    ends = np.exp(np.quantile(draws, [0.5, 0.025, 0.975]))
    np.testing.assert_allclose([effect["estimate"], effect["low"], effect["high"]], ends, rtol=1e-6)
    assert effect["above"] == pytest.approx(np.mean(draws > 0))
    assert effect["excluded"] == (not ends[1] <= 1 <= ends[2])
    rows = {site["client"]: site["rows"] for site in document["sites"]}
    assert rows == dict(zip(tree["constant_data"]["client"].values, tree["constant_data"]["size"].values))
    if name == "sampled":
        sent = tree["cost"]["bytes_up"].sum("chain").values
        largest = max(row["r_hat"] for row in document["run"]["summary"])
        (mixing,) = [
            light for light in document["run"]["judgement"]["checks"] if light["name"].startswith("Mixing")
        ]
        assert mixing["shown"] == f"{largest:.3f}"
    else:
        sent = [tree["rounds"]["bytes_up"].values.sum()] * 3
    assert [site["bytes_up"] for site in document["sites"]] == list(sent)


@pytest.mark.parametrize("name", ["fitted", "sampled"])
def test_the_page_is_one_small_file_and_markdown_says_the_same(fitted, name):
    path = fitted / name / "report.html"
    assert path.stat().st_size < 6e6
    content = path.read_text(encoding="utf-8")
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"'](?!data:)", content)
    page, text = read(path), (fitted / name / "report.md").read_text(encoding="utf-8")
    document = document_of(fitted / name)
    for part in ("run/judgement/headline", "effects/0/label", "command"):
        value = look_up(document, "/" + part)
        assert value in page.text
        assert value in text
    assert document["command"] == f"fald run {name}.toml -q --out {name}"
    for light in document["run"]["judgement"]["checks"]:
        assert light["sentence"] in page.text
    table = re.search(r"^\| parameter .*?\n\n", text, re.MULTILINE | re.DOTALL).group()
    widths = {line.count("|") for line in table.strip().splitlines()}
    assert len(widths) == 1, table


def test_the_study_of_a_report_runs_again(fitted):
    text = (fitted / "sampled" / "report.md").read_text(encoding="utf-8")
    (fitted / "again.toml").write_text(re.search(r"```toml\n(.*?)```", text, re.DOTALL).group(1))
    assert load_study(fitted / "again.toml") == load_study(fitted / "sampled.toml")


def test_averages_over_few_rows_are_not_shown(fitted):
    checked = document_of(fitted / "fitted")["predictive"]
    seen = {site["client"]: site["seen"] for site in checked["sites"]}
    assert seen["tiny"] is None
    table = pd.read_csv(fitted / "north.csv")
    assert seen["north"] == pytest.approx(table["ill"].mean())
    assert all(group["rows"] >= SMALLEST_CELL for group in checked["bins"])
    assert sum(group["rows"] for group in checked["bins"]) == 89


def test_tables_that_moved_or_changed_are_said(fitted, tmp_path):
    table = fitted / "south.csv"
    whole = table.read_text()
    try:
        table.write_text(whole + "placebo,44,1\n")
        assert "changed since the run" in document_of(fitted / "fitted")["no_predictive"]
        table.unlink()
        assert "cannot be read" in document_of(fitted / "fitted")["no_predictive"]
        run("report", "fitted", "--out", tmp_path, cwd=fitted)
    finally:
        table.write_text(whole)
    assert "Not checked" in read(tmp_path / "report.html").text


def test_a_reference_is_compared_with(fitted):
    document = document_of(fitted / "sampled", reference=fitted / "fitted" / "posterior.nc")
    found = document["reference"]
    ours, theirs = (
        fald.load(fitted / n / "posterior.nc")["posterior"]["intercept"].values.astype(float)
        for n in ("sampled", "fitted")
    )
    assert found["shift"] >= abs(ours.mean() - theirs.mean()) / theirs.std() - 1e-9
    (light,) = [x for x in document["run"]["judgement"]["checks"] if x["name"] == "Distance to a reference"]
    assert light["colour"] in ("green", "amber")
    # the twin: the same draws, a posterior sd away
    moved = fald.load(fitted / "sampled" / "posterior.nc")
    moved["posterior"]["intercept"] = moved["posterior"]["intercept"] + float(theirs.std())
    far = report_document(examine(moved, reference=("nuts", fald.load(fitted / "fitted" / "posterior.nc"))))
    (light,) = [x for x in far["run"]["judgement"]["checks"] if x["name"] == "Distance to a reference"]
    assert light["colour"] == "red"
    assert far["run"]["judgement"]["colour"] == "red"


def top(page):
    """What a reader sees before the answer."""
    return page.text.partition("The answer")[0]


@pytest.mark.slow
def test_the_report_of_a_diverged_run_says_so_at_the_top(tmp_path):
    rng = np.random.default_rng(0)
    for name in "ab":
        x = rng.normal(size=60)
        frame = pd.DataFrame({"x": x, "count": rng.poisson(np.exp(0.5 + 0.6 * x))})
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    sampler = "num-rounds = 300\nlocal-steps = 3\nstep-size = 6e-3\nnum-chains = 4\n"
    (tmp_path / "study.toml").write_text(
        '[data]\nfiles = { a = "a.csv", b = "b.csv" }\ntarget = "count"\nfeatures = ["x"]\n'
        f'[model]\nfamily = "poisson"\n[sampler]\n{sampler}'
    )
    said = run("run", "study.toml", "-q", "--out", "run", cwd=tmp_path, code=4)
    assert "report.html" in said
    page = read(tmp_path / "run" / "report.html")
    assert "Do not use this result." in top(page)
    assert "The run ended early" in top(page)
    assert "non-finite" in top(page)
    assert "A check failed" in page.text


def test_chains_that_disagree_and_a_silent_site_stand_at_the_top(fitted, tmp_path):
    tree = fald.load(fitted / "sampled" / "posterior.nc")
    assert report_document(examine(tree))["run"]["judgement"]["colour"] != "red"
    stats, posterior = tree["sample_stats"].to_dataset(), tree["posterior"].to_dataset()
    silent = list(tree["constant_data"]["client"].values).index("tiny")
    stats["weight"] = stats["weight"].where(stats["participant"] != silent, 0.0)
    sd = posterior["intercept"].std()
    posterior["intercept"] = posterior["intercept"] + 0.5 * sd * posterior["chain"]
    tree["sample_stats"].dataset, tree["posterior"].dataset = stats, posterior
    path = fald.write_report(tree, tmp_path)
    page = read(path)
    assert "Do not use this result." in top(page)
    assert re.search(r"The chains disagree: R-hat of intercept is 1\.[1-9]", top(page))
    assert "Site tiny never took part" in top(page)
    assert "tiny (silent)" in page.text
    assert "Do not use this result." in (tmp_path / "report.md").read_text().partition("## The answer")[0]


def test_a_verdict_that_says_no_stands_at_the_top(fitted, tmp_path):
    tree = fald.load(fitted / "fitted" / "posterior.nc")
    tree.attrs |= {
        "verdict": "not reached",
        "reason": "the weights are uneven",
        "advice": "allow more rounds",
    }
    page = read(fald.write_report(tree, tmp_path))
    assert "Do not use this result." in top(page)
    assert "not reached: the weights are uneven. What to do: allow more rounds." in top(page)


def test_a_point_estimate_has_a_report_without_intervals(fitted, tmp_path):
    tree = fald.load(fitted / "sampled" / "posterior.nc")
    tree.attrs["kind"] = "point estimate"
    page, estimate = read(fald.write_report(tree, tmp_path)), examine(tree).document["estimate"]
    assert "there is no posterior" in top(page)
    assert "interval" not in page.text.partition("The answer")[2].replace("no interval", "")
    assert {float(a["value"]) for a, _ in page.numbers} >= set(estimate.values())


def test_a_private_run_shows_its_statement_and_no_sums_over_rows(fitted):
    private = '[privacy]\ndelta = 1e-3\nmethod = "rdp"\n'
    (fitted / "private.toml").write_text((fitted / "sampled.toml").read_text() + private)
    short = (
        "--set",
        "num-rounds=30",
        "--set",
        "num-warmup=0",
        "--set",
        "clip-norm=1",
        "--set",
        "num-chains=1",
    )
    run("run", "private.toml", "-q", "--out", "private", *short, cwd=fitted)
    page = read(fitted / "private" / "report.html")
    document = document_of(fitted / "private")
    assert document["predictive"] is None
    assert "pseudo-posterior" in top(page)
    statement = fald.load(fitted / "private" / "posterior.nc").attrs["privacy_statement"]
    assert all(line in page.text for line in statement.splitlines())
    # ε is an upper bound, and what is shown of it stays one
    shown = [(a, s) for a, s in page.numbers if a["data-key"].endswith("/epsilon")]
    assert len(shown) == 3
    assert all(float(s) >= float(a["value"]) for a, s in shown)


def rates(rng, rate_fn=lambda rng, n: np.ones(n), factor=1.0):
    """Counts at three sites under a Poisson model with one rate, whose posterior is exactly a gamma law."""
    parts = {"a": slice(0, 60), "b": slice(60, 90), "c": slice(90, 150)}
    rate = 3.0 * rate_fn(rng, 150)
    rate[parts["c"]] *= factor
    seen = rng.poisson(rate).astype(float)
    draws = rng.gamma(seen.sum(), 1 / 150, 400)
    simulated = rng.poisson(np.broadcast_to(draws, (150, 400))).astype(float)
    return compare(seen, np.full(150, draws.mean()), simulated, parts=parts, tail=0.025)


CHECKS = ("site_means", "squared_error", "calibration_error")


def test_predictive_p_values_are_small_no_more_often_than_they_say():
    rng = np.random.default_rng(0)
    small = np.zeros(3)
    for _ in range(100):
        found = rates(rng)
        small += [found[key]["p_value"] < 0.05 for key in CHECKS]
    # 5 of 100 expected, three standard deviations 6.5; posterior predictive p-values are rather too large
    assert np.all(small <= 11)
    # the twin: rates that scatter by half are found far more often
    wide = [rates(rng, lambda r, n: r.gamma(4, 1 / 4, n))["squared_error"]["p_value"] for _ in range(20)]
    assert np.mean(np.array(wide) < 0.05) > 0.5


def checks_of(facts):
    return judgement(made_checks(facts))["checks"]


def fit_of(found):
    return next(
        c
        for c in checks_of({**HEALTHY, "predictive": {"outcome": "counts", **found}})
        if c["name"] == "Fit of the model"
    )


def test_a_model_that_fits_passes_and_one_that_does_not_fails():
    rng = np.random.default_rng(3)
    assert fit_of(rates(rng))["colour"] == "green"
    scattered = fit_of(rates(rng, lambda r, n: r.gamma(1, 1, n)))
    assert scattered["colour"] == "red"
    assert "scatter" in scattered["sentence"]
    apart = fit_of(rates(rng, factor=2.5))
    assert apart["colour"] == "red"
    assert "(worst at c)" in apart["sentence"]


def test_every_light_can_be_green_and_red():
    base, row, site, check, predicted = HEALTHY, ROW, SITE, CHECK, PREDICTED
    assert judgement(made_checks(base))["colour"] == "green"
    broken = {
        "Run complete": {"ended": "stopped"},
        "Mixing (R-hat)": {"run": {**base["run"], "summary": [{**row, "r_hat": 1.5}]}},
        "Effective draws (ESS)": {"run": {**base["run"], "summary": [{**row, "ess_bulk": 20.0}]}},
        "Predicted bias": {"run": {**base["run"], "foreseen": {"predicted": {**predicted, "bias": 0.5}}}},
        "Step size": {"run": {**base["run"], "step_times_curvature": 1.5}},
        "Twice the step size": {"doubling": {**base["doubling"], "shift": 0.5}},
        "Sites": {
            "federation": {"dropouts": [{"round": 3, "silent": ["b"]}]},
            "sites": [{**site, "took_part": 0}],
        },
        "Fit of the model": {"predictive": {**check, "squared_error": {"p_value": 0.002, "distance": 9.0}}},
    }
    for name, change in broken.items():
        found = {light["name"]: light["colour"] for light in checks_of({**base, **change})}
        assert [n for n, colour in found.items() if colour == "red"] == [name]
        assert judgement(made_checks({**base, **change}))["colour"] == "red"


def test_names_cannot_write_into_the_page(fitted):
    site, feature = "<script>alert(1)</script>|*x*", "<b>&'\"|x"
    tree = fald.load(fitted / "fitted" / "posterior.nc")
    names = [site, *tree["constant_data"]["client"].values[1:]]
    tree["constant_data"].dataset = tree["constant_data"].to_dataset().assign_coords(client=names)
    posterior = tree["posterior"].to_dataset()
    tree["posterior"].dataset = posterior.assign_coords(feature=[feature, "age"])
    known = json.loads(tree.attrs["precision"])
    known[feature] = known.pop("drug=verum")
    tree.attrs |= {"title": "</title><script>alert(2)</script>", "precision": json.dumps(known)}
    document = report_document(examine(tree))
    page = html(document, tree)
    assert "<script>alert" not in page
    assert {site, feature} <= set(Page(page).headings)
    lines = [line for line in markdown(document).splitlines() if line.startswith("|") and "alert" in line]
    assert lines
    assert all("<script>" not in line.replace("\\<", "") for line in lines)


def test_bad_input_is_refused(fitted, tmp_path):
    assert "no such folder" in run("report", "nowhere", cwd=fitted, code=2)
    assert "level must be between" in run("report", "fitted", "--level", "95", cwd=fitted, code=2)
    (tmp_path / "x.nc").write_text("nonsense")
    bad = run("report", "fitted", "--reference", tmp_path / "x.nc", cwd=fitted, code=8)
    assert "not a readable result" in bad
    (tmp_path / "file").write_text("")
    assert "cannot make the folder" in run("report", "fitted", "--out", tmp_path / "file", cwd=fitted, code=8)
