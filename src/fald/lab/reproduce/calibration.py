"""Beyond the paper: what the posterior adds to the point of FedAvg, on known and on foreign images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fald.lab.reproduce import plots
from fald.lab.reproduce.base import Findings, Meter, PanelRun, Table, Verdict, frame, paired
from fald.lab.reproduce.images import (
    ImageChain,
    chain_settings,
    each_chain,
    image_model,
    positions,
    probabilities,
    rows,
    tune,
)
from fald.results.probabilities import auroc, entropy, scores
from fald.study import datasets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TRAINED, _FOREIGN = "mnist", "fashion-mnist"
_METHODS = {"fa-ld": "posterior (FA-LD)", "fedavg": "point estimate (FedAvg)"}
_SHORT = {"fa-ld": "FA-LD", "fedavg": "FedAvg"}
_BETTER = {"accuracy": 1, "brier": -1, "ece": -1, "auroc": 1}
_WORDS = {
    "accuracy": "is more accurate",
    "brier": "has a smaller Brier score",
    "ece": "is better calibrated",
    "auroc": "tells foreign images better from known ones by entropy",
}


def _work(chain: ImageChain, meter: Meter, stopped: Any) -> dict[str, Any]:
    """Scores of one chain: averaged predictions after the warm-up, or the last iterate of an optimiser."""
    model = image_model(chain.prior_scale)
    known, labels = rows(chain, "test")
    foreign = datasets.load(_FOREIGN).test_images
    pixels = [part.astype(np.float32) / np.float32(255) for part in (known, foreign)]
    total: list[Any] = [0.0, 0.0]
    for i, position in enumerate(positions(chain, meter, stopped)):
        last = (i + 1) * chain.rounds_per_sample == chain.num_rounds
        used = last if chain.temperature == 0 else (i + 1) * chain.rounds_per_sample > chain.num_warmup
        if used:
            total = [t + probabilities(model, position, p) for t, p in zip(total, pixels)]
    predicted = [t / t.sum(1, keepdims=True) for t in total]
    found = scores(predicted[0], labels)
    inside, outside = (entropy(p) for p in predicted)
    edges = np.linspace(0, np.log(10), 24)
    return {
        **found._asdict(),
        "entropy_known": float(inside.mean()),
        "entropy_foreign": float(outside.mean()),
        "auroc": auroc(inside, outside),
        "histogram_known": (np.histogram(inside, edges)[0] / len(inside)).tolist(),
        "histogram_foreign": (np.histogram(outside, edges)[0] / len(outside)).tolist(),
    }


def measure(run: PanelRun) -> Findings:
    """Both methods with the same K, the same tuned step size and the same seeds."""
    s = run.settings
    K = s["compared-local-steps"]
    eta = tune(run, _TRAINED, s["local-steps"])[K]["step-size"]
    common = {**chain_settings(s)}
    chains = {
        (method, run.seed + i): ImageChain(
            _TRAINED, K, eta, s["num-rounds"], s["num-warmup"], run.seed + i, "test",
            **{**common, "temperature": common["temperature"] if method == "fa-ld" else 0.0},
        )
        for method in _METHODS for i in range(s["num-seeds"])
    }  # fmt: skip
    results = each_chain(run, list(chains.values()), "energy", work=_work, kind="calibration")
    lines, bars = [], []
    for (method, seed), result in zip(chains, results):
        for where in ("known", "foreign"):
            share = result.pop(f"histogram_{where}")
            bars += [
                {"method": method, "seed": seed, "quantity": f"entropy bin {b}", "images": where, "value": v}
                for b, v in enumerate(share)
            ]
        lines += [
            {"method": method, "seed": seed, "quantity": q, "images": "", "value": v}
            for q, v in result.items()
        ]
    table = frame(lines + bars)
    return Findings(table, [_verdict(table, q) for q in _BETTER], {"step-size": eta, "local-steps": K})


def _values(table: Table, quantity: str) -> Table:
    return table[table["quantity"] == quantity].pivot(index="seed", columns="method", values="value")


def _verdict(table: Table, quantity: str) -> Verdict:
    values = _values(table, quantity)
    gap, limits = paired(_BETTER[quantity] * (values["fa-ld"] - values["fedavg"]))
    word = "better" if gap >= 0 else "worse"
    told = (
        "one seed"
        if np.isinf(limits)
        else f"the posterior is {word} by {abs(gap):.4f} (95% limits ±{limits:.4f})"
    )
    said = f"posterior {values['fa-ld'].mean():.4f}, point estimate {values['fedavg'].mean():.4f}; {told}"
    claim = f"Trained on MNIST, the posterior {_WORDS[quantity]} than the FedAvg point"
    return Verdict.of(claim, said, None if abs(gap) <= limits else gap > 0)


def draw(table: Table, record: Mapping[str, Any]) -> Figure:
    """Scores of both methods with their range over seeds; entropies on known and foreign images."""
    figure, axes = plots.grid(1, 4, width=7.4, height=2.6)
    for ax, quantity in zip(axes[0], ("accuracy", "brier", "ece")):
        values = _values(table, quantity)
        for i, method in enumerate(_METHODS):
            color, _, marker = plots.look(i)
            low, mean, high = values[method].min(), values[method].mean(), values[method].max()
            ax.errorbar(i, mean, [[mean - low], [high - mean]], color=color, marker=marker, capsize=4)
        ax.set_xlim(-0.6, 1.6)
        ax.set_xticks([0, 1], list(_SHORT.values()))
        ax.set_title({"accuracy": "accuracy", "brier": "Brier score", "ece": "calibration error"}[quantity])
        ax.ticklabel_format(axis="y", useOffset=False)
    ax = axes[0, 3]
    bars = table[table["quantity"].str.startswith("entropy bin")]
    edges = np.linspace(0, np.log(10), 24)
    for i, method in enumerate(_METHODS):
        for where, dash in (("known", "-"), ("foreign", (0, (1, 1)))):
            part = bars[(bars["method"] == method) & (bars["images"] == where)]
            share = part.groupby("quantity", sort=False)["value"].mean().to_numpy()
            name = f"{_SHORT[method]}, {'MNIST' if where == 'known' else 'Fashion'}"
            ax.stairs(share, edges, color=plots.look(i).color, linestyle=dash, label=name)
    ax.set_title("entropy")
    ax.set_xlabel("nats")
    ax.set_ylabel("share of images")
    ax.set_yscale("log")
    plots.legend_below(figure, ax)
    return figure
