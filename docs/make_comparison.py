"""Run the comparisons of docs/comparison.md and write its tables and pictures from what they stored.

    python docs/make_comparison.py run trial logistic mnist    # hours or minutes, resumable
    python docs/make_comparison.py page                        # from docs/comparisons/*.json

The problem ``mnist`` reads the original files train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz from
the folder in the environment variable FALD_MNIST.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import sys
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

import fald
from fald.lab.compare import ComparePlan, compare
from fald.lab.compare_report import rows, size
from fald.lab.reference import Reference, pooled_nuts

HERE = Path(__file__).parent
STORED = HERE / "comparisons"
PAGE = HERE / "comparison.md"
NO_MATRICES = ("fa-ld", "sgld", "fedavg", "scaffold-2", "qlsd", "qlsd++", "marina", "elf")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#777777")


def trial():
    """The bundled trial: four hospitals, two of them tiny."""
    data = fald.datasets.load("indo")
    model = fald.datasets.load_bundled_study("indo").build_model(data.features)
    return model, data, ComparePlan(budget_rounds=1000, local_steps=5), "auto"


def logistic():
    """A made-up logistic regression whose labels differ between ten clients (Dirichlet 0.3)."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1500, 6)).astype(np.float32)
    chance = 1 / (1 + np.exp(-(x @ np.array([1.0, -0.5, 0.5, 0.0, 0.8, -1.0]) - 0.5)))
    y = (rng.random(1500) < chance).astype(np.int32)
    data = fald.partition.dirichlet((x, y), y, 10, concentration=0.3, seed=0)
    model = fald.models.logistic_regression([f"x{i}" for i in range(6)])
    return model, data, ComparePlan(budget_rounds=1000, local_steps=5), "auto"


def few_nuts(model, data, kept: Path) -> Reference:
    """A shorter run of NUTS than usual, kept in a file: its gradients are dear."""
    if not kept.exists():
        made = pooled_nuts(model, data, model.flat_initial_position, num_warmup=200, num_draws=250)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(made.to_json()))
    return Reference.from_json(json.loads(kept.read_text()))


def mnist():
    """Softmax regression on 500 digits at ten clients, 7,850 parameters, prior sd 0.05."""
    folder = Path(os.environ["FALD_MNIST"])
    images = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / "train-labels-idx1-ubyte.gz").read_bytes())
    x = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 784)[:500].astype(np.float32) / 255
    y = np.frombuffer(labels, np.uint8, offset=8)[:500].astype(np.int32)
    data = fald.partition.iid((x, y), 10, seed=0)
    model = fald.models.softmax_regression([f"p{i}" for i in range(784)], 10, prior_scale=0.05)
    plan = ComparePlan(methods=NO_MATRICES, budget_rounds=256, local_steps=5, num_chains=2)
    return model, data, plan, few_nuts


PROBLEMS = {"trial": trial, "logistic": logistic, "mnist": mnist}


def run(name: str) -> None:
    """Run one comparison and store its numbers."""
    model, data, plan, reference = PROBLEMS[name]()
    work = HERE / "_build" / "comparisons" / name
    if callable(reference):
        reference = reference(model, data, work.with_suffix(".reference.json"))
    found = compare(
        model,
        data,
        folder=work,
        plan=plan,
        reference=reference,
        resume=work.exists(),
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )
    STORED.mkdir(exist_ok=True)
    (STORED / f"{name}.json").write_text(json.dumps(rounded(found), indent=1) + "\n")


def rounded(value):
    """Numbers with four digits, so that files stay readable."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def table(document) -> str:
    """The comparison as a Markdown table."""
    header, cells = rows(document)
    lines = [header, ["---"] * len(header), *cells]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    refused = [f"{n} did not run: {f['refused']}." for n, f in document["methods"].items() if "refused" in f]
    rule = document["rule"]
    about = (
        f"{document['num_clients']} clients, {document['num_rows']:,} rows, {document['num_parameters']:,} "
        f"parameters; K = {rule['local_steps']}, {rule['num_chains']} chains, "
        f"{rule['budget_rounds']:,} rounds; reference: {document['reference']['name']}."
    )
    return "\n".join([about, "", *text, "", *refused]).rstrip()


def picture(name: str, document) -> str:
    """Error against bytes per client as SVG, both axes logarithmic."""
    lines = {}
    for method, found in document["methods"].items():
        points = [(p["bytes_up"] + p["bytes_down"], p["error"]) for p in found.get("curve", [])]
        if len(points) > 1 and not found["point_estimate"]:
            lines[method] = points
    xs, ys = zip(*[point for points in lines.values() for point in points])
    limits = [(math.log10(min(v)) - 0.05, math.log10(max(v)) + 0.05) for v in (xs, ys)]

    def place(point):
        along = [(math.log10(v) - low) / (high - low) for v, (low, high) in zip(point, limits)]
        return 60 + 460 * along[0], 330 - 290 * along[1]

    body = ["<rect width='720' height='390' rx='6' fill='#ffffff'/>"]
    for axis, (low, high) in enumerate(limits):
        powers = range(math.floor(low), math.ceil(high) + 1)
        ticks = [k * 10.0**power for power in powers for k in ((1,) if axis == 0 else (1, 2, 5))]
        for tick in [t for t in ticks if low <= math.log10(t) <= high]:
            x, y = place((tick, 10 ** limits[1][0]) if axis == 0 else (10 ** limits[0][0], tick))
            label = size(tick) if axis == 0 else f"{tick:g}"
            end = (x, 40) if axis == 0 else (520, y)
            line = f"<line x1='{x:.0f}' y1='{y:.0f}' x2='{end[0]:.0f}' y2='{end[1]:.0f}' "
            body.append(f"{line}stroke='#dddddd'/>")
            at = (x, 348, "middle") if axis == 0 else (54, y + 4, "end")
            body.append(f"<text x='{at[0]:.0f}' y='{at[1]:.0f}' text-anchor='{at[2]}'>{label}</text>")
    for i, (method, points) in enumerate(lines.items()):
        colour, dash = COLOURS[i % 8], ("", "6 3", "2 3")[i // 8 % 3]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, points))
        style = f"fill='none' stroke='{colour}' stroke-width='2' stroke-dasharray='{dash}'"
        body.append(f"<polyline points='{path}' {style}/>")
        body.append(f"<line x1='535' x2='560' y1='{50 + 18 * i}' y2='{50 + 18 * i}' {style}/>")
        body.append(f"<text x='566' y='{54 + 18 * i}'>{escape(method)}</text>")
    body.append("<text x='290' y='376' text-anchor='middle'>bytes up and down per client</text>")
    body.append("<text x='60' y='26'>error, in posterior standard deviations</text>")
    title = f"<title>Error against bytes, problem {name}</title>"
    head = "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 720 390' role='img' "
    head += "font-family='sans-serif' font-size='13'>"
    return "\n".join([head, title, *body, "</svg>", ""])


def page() -> None:
    """Replace the tables of the page, and draw the pictures."""
    text = PAGE.read_text(encoding="utf-8")
    for name in PROBLEMS:
        path = STORED / f"{name}.json"
        if not path.exists():
            continue
        document = json.loads(path.read_text())
        begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{table(document)}\n{end}{after}"
        (HERE / "images" / f"comparison-{name}.svg").write_text(picture(name, document), encoding="utf-8")
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    """Do what the words say."""
    words = sys.argv[1:]
    if words[:1] == ["run"] and set(words[1:]) <= set(PROBLEMS) and len(words) > 1:
        for name in words[1:]:
            run(name)
    elif words == ["page"]:
        page()
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
