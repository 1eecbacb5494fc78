"""FedAvg against averages over the posterior, for two networks: run it, and write its page.

    python docs/make_networks.py                # all runs that are not stored yet, then the page
    python docs/make_networks.py page           # the page alone, from docs/comparisons/networks.json
    python docs/make_networks.py minutes 5      # so long, to go on later
    python docs/make_networks.py seed 1         # of the judged seeds that one alone, beside other processes

Fashion-MNIST and MNIST come from where ``fald.datasets`` finds them. Every run is stored when it ends, and a
second call goes on with the next.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.flatten_util import ravel_pytree

import fald
from fald.core.files import write_atomically
from fald.lab import networks
from fald.results.probabilities import PredictiveSums, predicted
from fald.settings.schedules import Phase

HERE = Path(__file__).parent
STORED = HERE / "comparisons" / "networks.json"
PAGE = HERE / "comparison-networks.md"
STARTS = HERE.parent / "build" / "networks"
STEPS, BATCH, CLIENTS = 10, 64, 10
VALIDATION, TUNING, SEEDS = 5000, 100, (0, 1, 2)
RATES = (0.05, 0.1, 0.2, 0.4)  # η times the number of rows: the usual learning rate
USUAL = {"rate": 0.1, "temperature": 0.1, "cycles": 1, "prior_scale": 1.0, "momentum": 0.0, "low": 0.2}
MOMENTUM = (0.0, 0.7)
TRIED = {"temperature": (0.1, 0.01, 1.0), "cycles": (1, 4), "prior_scale": (1.0, 0.3), "momentum": MOMENTUM}
ENDS = {"constant": "as it was", "cosine": "down to a fiftieth along half a cosine"}
LATER = ((0.25, 0.05), (0.1, 0.02))  # of the second half what samples, and of the step how much
DRAWS = 10


class Network(NamedTuple):
    """One that is compared: its model, and how many rounds a run has."""

    name: str
    model: Callable[..., fald.Model]
    rounds: int

    @property
    def half(self) -> int:
        return self.rounds // 2


PERCEPTRON = Network("perceptron", networks.perceptron, 400)
CNN = Network("convolutional", networks.cnn, 80)  # thirty times as dear


@functools.lru_cache(maxsize=1)
def rows_of(seed: int) -> tuple[fald.FederatedData, dict[str, Any]]:
    """The clients' rows, and rows to judge by."""
    images, other = (fald.datasets.load(name) for name in ("fashion-mnist", "mnist"))
    order = np.random.default_rng(seed).permutation(len(images.train_labels))
    held, kept = order[:VALIDATION], order[VALIDATION:]
    rows = images.train_images[kept].reshape(len(kept), -1), images.train_labels[kept]
    data = fald.partition.dirichlet(rows, rows[1], CLIENTS, concentration=0.3, seed=seed)
    return data, {
        "validation": (images.train_images[held].reshape(VALIDATION, -1), images.train_labels[held]),
        "test": (images.test_images.reshape(len(images.test_images), -1), images.test_labels),
        "other": (other.test_images.reshape(len(other.test_images), -1), other.test_labels),
    }


@functools.lru_cache(maxsize=4)
def model_of(network: Network, seed: int, prior_scale: float) -> fald.Model:
    """The model, with a start of the seed."""
    return network.model(prior_scale=prior_scale, seed=seed)


def run(
    network: Network,
    seed: int,
    setting: dict[str, Any],
    phases: list[Phase],
    *,
    start: Any = None,
    final=False,
):
    """Scores of the average over the kept draws, and the last position."""
    (data, judged), model = rows_of(seed), model_of(network, seed, setting["prior_scale"])
    began = time.process_time()
    total = data.num_rows
    phases = [
        replace(p, step_size=p.step_size / total, last_step_size=(p.last_step_size or p.step_size) / total)
        for p in phases
    ]
    tree = fald.sample(
        seed if start is None else seed + 1000, model, data, local_steps=STEPS, batch_size=BATCH,
        num_chains=1, phases=phases, momentum=setting["momentum"], step_check=False, progress=False,
        initial_position=None if start is None else model.unravel(start),
    )  # fmt: skip
    seconds, found = time.process_time() - began, fald.positions(tree, model)
    seen = {}
    for name in ("test", "other") if final else ("validation",):
        sums = PredictiveSums.none(len(judged[name][1]))
        for draw in range(found.shape[1]):
            sums = sums.plus(predicted(model, found[0, draw], judged[name][0]))
        seen[name] = sums.predictive()
    rows = "test" if final else "validation"
    scores = seen[rows].scores(judged[rows][1])
    if final:
        scores["auroc"] = seen["test"].detects(seen["other"])
        scores["reliability"] = seen["test"].reliability(judged["test"][1]).tolist()
    last = np.asarray(ravel_pytree(found[0, -1])[0])
    bytes_up = int(tree["cost"]["bytes_up"].sum())
    return {**scores, "draws": found.shape[1], "cpu_seconds": seconds, "bytes_up": bytes_up}, last


def posterior_phases(setting: dict[str, Any], rounds: int) -> list[Phase]:
    """Cycles: each explores without noise, and half of it, or the ``share`` of the setting, samples."""
    rate, low, cycles = setting["rate"], setting["low"] * setting["rate"], setting["cycles"]
    length = rounds // cycles
    last = length - int(length * (1 - setting.get("share", 0.5)))
    explore = Phase(length - last, rate, last_step_size=low, temperature=0.0)
    draws = min(last, max(1, DRAWS // cycles))
    collect = Phase(last, low, temperature=setting["temperature"], draws=draws)
    return cycles * [explore, collect]


def fedavg_end(setting: dict[str, Any], rounds: int, ends: str) -> list[Phase]:
    """The second half of FedAvg: the same step, or down to a fiftieth along half a cosine."""
    last = setting["rate"] / (50 if ends == "cosine" else 1)
    return [Phase(rounds, setting["rate"], last_step_size=last, temperature=0.0, draws=1)]


class Store:
    """What was found, by name, in a file that several processes may add to."""

    def __init__(self, minutes: float) -> None:
        self.until = time.monotonic() + 60 * minutes

    def scores(self, name: str, make) -> dict[str, Any]:
        if name not in self.stored():
            if time.monotonic() > self.until:
                sys.exit("more is to be run: call it again")
            self.add(name, make())
        return self.stored()[name]

    def add(self, name: str, what: dict[str, Any]) -> None:
        STORED.parent.mkdir(exist_ok=True)
        write_atomically(STORED, (json.dumps({**self.stored(), name: what}, indent=1) + "\n").encode())
        print(name, {k: round(v, 4) for k, v in what.items() if isinstance(v, float)}, flush=True)

    def choose(self, network: Network, settings: dict[str, Any]) -> None:
        """Write down what was chosen; what was judged with other settings counts no more."""
        name, stored = f"{network.name}: chosen", self.stored()
        if stored.get(name) != settings:
            old = {f"{network.name}: {arm}, seed {seed}" for arm in ARMS for seed in SEEDS}
            kept = {key: value for key, value in stored.items() if key not in old}
            write_atomically(STORED, (json.dumps(kept, indent=1) + "\n").encode())
        self.add(name, settings)

    def stored(self) -> dict[str, Any]:
        return json.loads(STORED.read_text()) if STORED.exists() else {}


def _start_name(network: Network, seed: int, setting: dict[str, Any]) -> str:
    settings = f"rate {setting['rate']:g}, prior scale {setting['prior_scale']:g}"
    return f"{network.name}: start, {settings}, seed {seed}"


def warm_start(store: Store, network: Network, seed: int, setting: dict[str, Any]) -> np.ndarray:
    """Where FedAvg is after half of the rounds; kept in ``build``, and made again where it is not there."""
    name = _start_name(network, seed, setting)
    path = STARTS / f"{name}.npy"
    if not path.exists():
        phases = [Phase(network.half, setting["rate"], temperature=0.0, draws=1)]
        found, last = run(network, seed, {**setting, "momentum": 0.0}, phases)
        STARTS.mkdir(parents=True, exist_ok=True)
        np.save(path, last)
        store.add(name, found)
    return np.load(path)


def try_rate(store: Store, network: Network, setting: dict[str, Any]) -> float:
    """NLL of FedAvg on validation rows after half of the rounds."""
    name = _start_name(network, TUNING, setting)
    if name not in store.stored():
        warm_start(store, network, TUNING, setting)
    return store.stored()[name]["nll"]


def try_half(
    store: Store, network: Network, what: str, setting: dict[str, Any], phases: list[Phase]
) -> float:
    """NLL on validation rows of a second half."""

    def make() -> dict[str, Any]:
        start = warm_start(store, network, TUNING, setting)
        return run(network, TUNING, setting, phases, start=start)[0]

    shown = ("temperature", "cycles", "momentum", "prior_scale")
    settings = [f"{key.replace('_', ' ')} {setting[key]:g}" for key in shown[2 * what.startswith("FedAvg") :]]
    return store.scores(f"{network.name}: tuning, {', '.join([what, *settings])}", make)["nll"]


def least(tried: dict[Any, float]) -> Any:
    """What has the least value."""
    return min(tried, key=lambda value: tried[value])


def best_rate(store: Store, network: Network) -> float:
    """The step size with the least NLL on validation rows after half of FedAvg's rounds."""
    nll: dict[float, float] = {}
    for rate in RATES:
        nll[rate] = try_rate(store, network, {**USUAL, "rate": rate})
        if least(nll) != rate:  # larger ones do not come back
            break
    return least(nll)


def tuned(store: Store, network: Network, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """Settings with the least NLL on validation rows, one after the other: FedAvg's, then the posterior's.

    Where another network's are ``known``, step size and momentum alone are tried, and the rest is taken over.
    """

    def fedavg(setting: dict[str, Any], ends: str) -> float:
        return try_half(store, network, f"FedAvg, {ends}", setting, fedavg_end(setting, network.half, ends))

    def posterior(setting: dict[str, Any]) -> float:
        return try_half(store, network, "FA-LD", setting, posterior_phases(setting, network.half))

    rate = {"rate": best_rate(store, network), "momentum": MOMENTUM[0]}
    if known is None:
        own, setting, tried = {**USUAL, **rate}, {**USUAL, **rate}, TRIED
        ends = least({ends: fedavg(own, ends) for ends in ENDS})
    else:
        own, setting, tried = (
            {**known["fedavg"], **rate},
            {**known["posterior"], **rate},
            {"momentum": MOMENTUM},
        )
        ends = known["ends"]
    for name, values in tried.items():
        setting[name] = least({value: posterior({**setting, name: value}) for value in values})
        if name in ("prior_scale", "momentum"):  # they may serve FedAvg as well
            also = values if name == "momentum" else (own[name], setting[name])
            own[name] = least({value: fedavg({**own, name: value}, ends) for value in also})
    return {"fedavg": own, "ends": ends, "posterior": setting}


def try_later(store: Store, network: Network, setting: dict[str, Any]) -> None:
    """NLL on validation rows where sampling begins later, with smaller steps; tried after all else."""
    for share, low in LATER:
        own = {**setting, "share": share, "low": low}
        what = f"FA-LD, sampling in the last {share:g} with {low:g} of the step"
        try_half(store, network, what, own, posterior_phases(own, network.half))


def judge(store: Store, network: Network, seed: int, chosen: dict[str, Any]) -> None:
    """All ways with one seed, on test images."""
    fedavg, setting, half = chosen["fedavg"], chosen["posterior"], network.half
    arms = {
        "FedAvg": (fedavg, fedavg_end(fedavg, half, chosen["ends"])),
        "posterior": (setting, posterior_phases(setting, half)),
        "without noise": (setting, posterior_phases({**setting, "temperature": 0.0}, half)),
    }
    for arm, (own, phases) in arms.items():

        def make(own=own, phases=phases) -> dict[str, Any]:
            start = warm_start(store, network, seed, own)
            return run(network, seed, own, phases, start=start, final=True)[0]

        store.scores(f"{network.name}: {arm}, seed {seed}", make)


def everything(minutes: float, seeds: tuple[int, ...]) -> None:
    """All runs that are not stored."""
    store = Store(minutes)
    chosen = tuned(store, PERCEPTRON)
    both = ((PERCEPTRON, chosen), (CNN, tuned(store, CNN, chosen)))
    for network, settings in both:
        store.choose(network, settings)
        try_later(store, network, settings["posterior"])
    for network, settings in both:
        for seed in seeds:
            judge(store, network, seed, settings)


ARMS = {
    "FedAvg": "FedAvg, its last position",
    "posterior": "FA-LD, average over {draws} draws",
    "without noise": "the same phases without noise, average over {draws} positions",
}
SCORES = {"accuracy": "accuracy", "nll": "NLL", "brier": "Brier", "ece": "ECE", "auroc": "OOD AUROC"}
BETTER = {"nll": -1, "auroc": 1}  # which way is better
T_OF_THREE = 4.303  # the 97.5% quantile of Student's t with two degrees of freedom


def band(values: np.ndarray) -> tuple[float, float]:
    """Mean, and half of its 95% interval."""
    return float(values.mean()), float(T_OF_THREE * values.std(ddof=1) / np.sqrt(len(values)))


def verdict(found: dict[str, np.ndarray], score: str, arm: str, base: str) -> tuple[str, str]:
    """Whether an arm is better than another, by the differences at equal seeds: in a word, and in numbers."""
    gap, half = band(BETTER[score] * (found[arm] - found[base]))
    word = "wins" if gap > half else "loses" if gap < -half else "cannot be told apart"
    return word, f"{BETTER[score] * gap:+.4f} ± {half:.4f}"


PAIRS = {
    ("posterior", "FedAvg"): "posterior average against FedAvg",
    ("without noise", "FedAvg"): "average without noise against FedAvg",
    ("posterior", "without noise"): "posterior average against the average without noise",
}


def page(found: dict[str, Any]) -> str:
    """The page, from what is stored."""
    chosen = found["perceptron: chosen"]
    tried = [
        f"| {name.replace(': tuning', '')} | {r['nll']:.4f} | {r['accuracy']:.4f} | {r['ece']:.4f} |"
        for name, r in sorted(found.items())
        if ": tuning, " in name or f", seed {TUNING}" in name
    ]
    return TEXT.format(
        short=_short(found), first=_scores(found, PERCEPTRON), second=_scores(found, CNN),
        tried="\n".join(tried),
        rows=60_000 - VALIDATION, validation=VALIDATION, ends=ENDS[chosen["ends"]],
        minutes=sum(r["cpu_seconds"] for r in found.values() if "cpu_seconds" in r) / 60,
        rounds=PERCEPTRON.rounds, cnn_rounds=CNN.rounds, chosen=_chosen(found),
    )  # fmt: skip


def _chosen(found: dict[str, Any]) -> str:
    """The settings of both networks, a line for each."""
    lines = []
    for network in (PERCEPTRON, CNN):
        own, base = (found[f"{network.name}: chosen"][key] for key in ("posterior", "fedavg"))
        both = [
            f"step size {s['rate']:g}, momentum {s['momentum']:g}, prior scale {s['prior_scale']:g}"
            for s in (base, own)
        ]
        more = f"temperature {own['temperature']:g}, {own['cycles']} cycle(s)"
        lines.append(f"| {network.name} | {both[0]} | {both[1]}, {more} |")
    return "\n".join(lines)


def _judged(found: dict[str, Any], network: Network) -> dict[str, dict[str, np.ndarray]] | None:
    """Each score of each way, one value for each seed; nothing where runs are missing."""
    runs = {arm: [found.get(f"{network.name}: {arm}, seed {seed}") for seed in SEEDS] for arm in ARMS}
    if not all(all(of_arm) for of_arm in runs.values()):
        return None
    columns = (*SCORES, "draws", "bytes_up")
    return {key: {arm: np.array([run[key] for run in runs[arm]]) for arm in ARMS} for key in columns}


def _short(found: dict[str, Any]) -> str:
    """The verdicts on the posterior average in one sentence for each network."""
    said = []
    for network in (PERCEPTRON, CNN):
        if table := _judged(found, network):
            words = {s: verdict(table[s], s, "posterior", "FedAvg")[0] for s in BETTER}
            each = ", ".join(f"by {SCORES[score]} **{word}**" for score, word in words.items())
            said.append(f"- {network.name.capitalize()}: against FedAvg the posterior average {each}.")
    return "\n".join(said)


def _scores(found: dict[str, Any], network: Network) -> str:
    """Scores of all ways with one network, and the verdicts."""
    table = _judged(found, network)
    if table is None:
        return "Its runs are not all stored yet; the command below goes on with them."
    sent = {int(sent) for of_arm in table["bytes_up"].values() for sent in of_arm}
    assert len(sent) == 1, sent  # the page says "equal bytes"
    lines = [f"| | {' | '.join(SCORES.values())} |", "|" + "---|" * (len(SCORES) + 1)]
    for arm, called in ARMS.items():
        cells = ["{:.4f} ± {:.4f}".format(*band(table[score][arm])) for score in SCORES]
        lines.append(f"| {called.format(draws=table['draws'][arm][0])} | {' | '.join(cells)} |")
    lines += ["", f"Differences, after {2 * sent.pop() / 1e6:.0f} MB from clients to server each:", ""]
    lines += [f"| | {' | '.join(SCORES[score] for score in BETTER)} |", "|" + "---|" * (len(BETTER) + 1)]
    for pair, called in PAIRS.items():
        cells = ["**{}** ({})".format(*verdict(table[score], score, *pair)) for score in BETTER]
        lines.append(f"| {called} | {' | '.join(cells)} |")
    return "\n".join(lines)


TEXT = """# FedAvg, or an average over the posterior?

<!-- written by docs/make_networks.py -->

FA-LD costs what FedAvg costs: the same rounds, the same bytes, the same gradients. What does one get for
the noise? Both train a network on Fashion-MNIST, with {rows:,} rows at 10 clients (Dirichlet 0.3), batches
of 64, K = 10. Both begin with FedAvg for half of the rounds. In the other half FedAvg goes on, and is
judged by its last position; FA-LD goes on in cycles, each of which explores without noise and then samples
with a fifth of the step, and is judged by the average of its draws' predictions. "Without noise" are the
same phases at temperature 0: what they gain on FedAvg comes from averaging predictions along the way; what
FA-LD gains on them comes from Langevin noise.

Numbers are means over three seeds (rows held out, clients, start, noise), ± half of a 95% interval by
Student's t. NLL, Brier and ECE are better when lower, accuracy and AUROC when higher. OOD AUROC is the
chance that an MNIST image has a larger predictive entropy than a test image. Differences are taken at equal
seeds; *wins* and *loses* are said of the first of two, and only where the interval does not hold zero.

{short}

## Perceptron 784-100-10, {rounds} rounds

{first}

## Convolutional network, 106,122 parameters, {cnn_rounds} rounds

{second}

## What was chosen, and tried

Settings were chosen by the NLL on {validation:,} rows held out of the training set, with a seed of its own,
one setting after the other: the step size (η times rows) for FedAvg after half of the rounds, how it ends,
then temperature, cycles and prior scale for FA-LD, and momentum in the second half for both, which costs
neither rounds nor bytes; FedAvg was also tried with the prior of FA-LD. No setting was chosen by test images
or by MNIST. All this was done with the perceptron. **The convolutional network, whose rounds cost some thirty
times as much, has its own step size and momentum only; the rest is what was best for the perceptron.** The
perceptron was judged without momentum first, with the same verdicts; what momentum does to test images was
not looked at before it was chosen.

FedAvg's step in the second half: {ends}. What was chosen:

| | FedAvg | FA-LD |
|---|---|---|
{chosen}

On validation rows:

| run | NLL | accuracy | ECE |
|---|---|---|---|
{tried}

Last of all, sampling was begun later and with smaller steps, in the rows that say so: the nearer the
average comes to FedAvg's last position, the better it is, and it stays behind. In so few rounds a network
gains more from the last steps of an optimiser than from an average. The judged settings were left as they
were.

`python docs/make_networks.py` repeats all of it ({minutes:.0f} CPU-minutes here) and writes this page from
`docs/comparisons/networks.json`.

What this does not show: other data, other networks, more rounds, a finer search, several chains (which cost
rounds too).
"""


if __name__ == "__main__":
    asked = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    if sys.argv[1:] != ["page"]:
        seeds = (int(asked["seed"]),) if "seed" in asked else SEEDS
        everything(float(asked.get("minutes", np.inf)), seeds)
    if "seed" not in asked:
        PAGE.write_text(page(json.loads(STORED.read_text())))
