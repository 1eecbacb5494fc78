"""FedAvg against averages over the posterior, for a network: run it, and write its page from what it stored.

    python docs/make_networks.py                # all runs that are not stored yet, then the page
    python docs/make_networks.py page           # the page alone, from docs/comparisons/networks.json
    python docs/make_networks.py minutes 5      # so long, to go on later
    python docs/make_networks.py seed 1         # the runs of one seed, beside another process

Fashion-MNIST and MNIST come from where ``fald.datasets`` finds them. Every run is stored when it ends, and a
second call goes on with the next.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

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
ROUNDS, STEPS, BATCH, CLIENTS = 80, 10, 64, 10
VALIDATION, TUNING, SEEDS = 5000, 100, (0, 1, 2)
RATES = (0.05, 0.1, 0.2)  # η times the number of rows: the usual learning rate
USUAL = {"rate": 0.1, "temperature": 0.1, "cycles": 1, "prior_scale": 1.0, "momentum": 0.0, "low": 0.2}
TRIED = {"temperature": (0.1, 0.01, 1.0), "cycles": (1, 4), "momentum": (0.0, 0.7), "prior_scale": (1.0, 0.3)}
ENDS = {"constant": "as it was", "cosine": "down to a fiftieth along half a cosine"}
DRAWS = 10


@functools.lru_cache(maxsize=1)
def problem(seed: int, prior_scale: float) -> tuple[fald.Model, fald.FederatedData, dict[str, Any]]:
    """The network, the clients' rows, and rows to judge by; the seed shuffles rows, clients and the start."""
    images, other = (fald.datasets.load(name) for name in ("fashion-mnist", "mnist"))
    order = np.random.default_rng(seed).permutation(len(images.train_labels))
    held, kept = order[:VALIDATION], order[VALIDATION:]
    rows = images.train_images[kept].reshape(len(kept), -1), images.train_labels[kept]
    data = fald.partition.dirichlet(rows, rows[1], CLIENTS, concentration=0.3, seed=seed)
    judged = {
        "validation": (images.train_images[held].reshape(VALIDATION, -1), images.train_labels[held]),
        "test": (images.test_images.reshape(len(images.test_images), -1), images.test_labels),
        "other": (other.test_images.reshape(len(other.test_images), -1), other.test_labels),
    }
    return networks.cnn(prior_scale=prior_scale, seed=seed), data, judged


def run(seed: int, setting: dict[str, Any], phases: list[Phase], *, start: Any = None, final=False):
    """Scores of the average over the kept draws, and the last position."""
    model, data, judged = problem(seed, setting["prior_scale"])
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
    """Cycles: half of each explores without noise, half samples."""
    rate, low, cycles = setting["rate"], setting["low"] * setting["rate"], setting["cycles"]
    length = rounds // cycles
    explore = Phase(length // 2, rate, last_step_size=low, temperature=0.0)
    collect = Phase(
        length - length // 2, low, temperature=setting["temperature"], draws=max(1, DRAWS // cycles)
    )
    return cycles * [explore, collect]


def fedavg_end(setting: dict[str, Any], rounds: int, ends: str) -> list[Phase]:
    """The second half of FedAvg: the same step, or down to a fiftieth along half a cosine."""
    last = setting["rate"] / (50 if ends == "cosine" else 1)
    return [Phase(rounds, setting["rate"], last_step_size=last, temperature=0.0, draws=1)]


class Store:
    """What was found, by name, in a file that several processes may add to."""

    def __init__(self, minutes: float) -> None:
        self.until = time.monotonic() + 60 * minutes
        self.found: dict[str, Any] = {}

    def scores(self, name: str, make) -> dict[str, Any]:
        self.found = self._stored()
        if name not in self.found:
            if time.monotonic() > self.until:
                sys.exit("more is to be run: call it again")
            self.add(name, make())
            shown = {k: round(v, 4) for k, v in self.found[name].items() if isinstance(v, float)}
            print(name, shown, flush=True)
        return self.found[name]

    def add(self, name: str, what: dict[str, Any]) -> None:
        self.found = {**self._stored(), name: what}
        STORED.parent.mkdir(exist_ok=True)
        write_atomically(STORED, (json.dumps(self.found, indent=1) + "\n").encode())

    def _stored(self) -> dict[str, Any]:
        return json.loads(STORED.read_text()) if STORED.exists() else {}


def _start_name(seed: int, setting: dict[str, Any]) -> str:
    return f"start, rate {setting['rate']:g}, prior scale {setting['prior_scale']:g}, seed {seed}"


def warm_start(store: Store, seed: int, setting: dict[str, Any]) -> np.ndarray:
    """Where FedAvg is after half of the rounds; kept in ``build``, and made again where it is not there."""
    name, half = _start_name(seed, setting), ROUNDS // 2
    path = STARTS / f"{name}.npy"

    def make() -> dict[str, Any]:
        phases = [Phase(half, setting["rate"], temperature=0.0, draws=1)]
        found, last = run(seed, {**setting, "momentum": 0.0}, phases)
        STARTS.mkdir(parents=True, exist_ok=True)
        np.save(path, last)
        return found

    if path.exists():
        store.scores(name, make)
    else:
        store.add(name, make())
    return np.load(path)


def second_half(store: Store, label: str, setting: dict[str, Any], phases: list[Phase]) -> float:
    """NLL on validation rows of a run that goes on from the start of tuning."""

    def make() -> dict[str, Any]:
        return run(TUNING, setting, phases, start=warm_start(store, TUNING, setting))[0]

    return store.scores(f"tuning, {label}", make)["nll"]


def try_fedavg(store: Store, setting: dict[str, Any], ends: str) -> float:
    """NLL of FedAvg."""
    label = f"fedavg, {ends}, momentum {setting['momentum']:g}, prior_scale {setting['prior_scale']:g}"
    return second_half(store, label, setting, fedavg_end(setting, ROUNDS // 2, ends))


def try_posterior(store: Store, setting: dict[str, Any]) -> float:
    """NLL of the average over draws."""
    label = "posterior, " + ", ".join(f"{k} {v:g}" for k, v in setting.items() if k != "rate")
    return second_half(store, label, setting, posterior_phases(setting, ROUNDS // 2))


def tuned(store: Store) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Settings with the least NLL on validation rows, one after the other: FedAvg's, then the posterior's."""
    usual = dict(USUAL)

    def least(tried: dict[Any, float]) -> Any:
        return min(tried, key=lambda value: tried[value])

    nll: dict[Any, float] = {}
    for rate in RATES:
        warm_start(store, TUNING, {**usual, "rate": rate})
        nll[rate] = store.found[_start_name(TUNING, {**usual, "rate": rate})]["nll"]
    usual["rate"] = least(nll)
    nll = {ends: try_fedavg(store, usual, ends) for ends in ENDS}
    ends, best = least(nll), min(nll.values())
    setting = dict(usual)
    for name, values in TRIED.items():
        setting[name] = least({value: try_posterior(store, {**setting, name: value}) for value in values})
    fedavg = usual
    for name in ("momentum", "prior_scale"):  # what serves the posterior may serve FedAvg
        tried = {**fedavg, name: setting[name]}
        if tried != fedavg and (found := try_fedavg(store, tried, ends)) < best:
            fedavg, best = tried, found
    return fedavg, ends, setting


def judge(store: Store, seed: int, fedavg: dict[str, Any], ends: str, setting: dict[str, Any]) -> None:
    """All ways with one seed, on test images."""
    half = ROUNDS // 2
    arms = {
        "FedAvg": (fedavg, fedavg_end(fedavg, half, ends)),
        "posterior": (setting, posterior_phases(setting, half)),
        "without noise": (setting, posterior_phases({**setting, "temperature": 0.0}, half)),
    }
    for arm, (own, phases) in arms.items():

        def make(own=own, phases=phases) -> dict[str, Any]:
            return run(seed, own, phases, start=warm_start(store, seed, own), final=True)[0]

        store.scores(f"{arm}, seed {seed}", make)


def everything(minutes: float, seeds: tuple[int, ...]) -> None:
    """All runs that are not stored."""
    store = Store(minutes)
    fedavg, ends, setting = tuned(store)
    store.add("chosen", {"fedavg": {**fedavg, "ends": ends}, "posterior": setting, "rounds": ROUNDS})
    for seed in seeds:
        judge(store, seed, fedavg, ends, setting)


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
    word = "wins" if gap > half else "loses" if gap < -half else "no difference can be told"
    return word, f"{BETTER[score] * gap:+.4f} ± {half:.4f}"


PAIRS = {
    ("posterior", "FedAvg"): "posterior average against FedAvg",
    ("without noise", "FedAvg"): "average without noise against FedAvg",
    ("posterior", "without noise"): "posterior average against the average without noise",
}


def page(found: dict[str, Any]) -> str:
    """The page, from what is stored."""
    chosen = found["chosen"]
    runs = {arm: [found[f"{arm}, seed {seed}"] for seed in SEEDS] for arm in ARMS}
    sent = {run["bytes_up"] for of_arm in runs.values() for run in of_arm}
    assert len(sent) == 1, sent  # "equal bytes" is said below
    table = {score: {arm: np.array([r[score] for r in runs[arm]]) for arm in ARMS} for score in SCORES}
    lines = []
    for arm, called in ARMS.items():
        cells = ["{:.4f} ± {:.4f}".format(*band(table[score][arm])) for score in SCORES]
        label = called.format(draws=runs[arm][0]["draws"])
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    verdicts = []
    for pair, called in PAIRS.items():
        cells = ["**{}** ({})".format(*verdict(table[score], score, *pair)) for score in BETTER]
        verdicts.append(f"| {called} | " + " | ".join(cells) + " |")
    tried = [
        f"| {name.removeprefix('tuning, ')} | {r['nll']:.4f} | {r['accuracy']:.4f} | {r['ece']:.4f} |"
        for name, r in found.items()
        if name.startswith("tuning, ") or (name.startswith("start") and f"seed {TUNING}" in name)
    ]
    own, base = chosen["posterior"], chosen["fedavg"]
    return TEXT.format(
        rounds=ROUNDS, half=ROUNDS // 2, rows=60_000 - VALIDATION, validation=VALIDATION,
        minutes=sum(r["cpu_seconds"] for r in found.values() if "cpu_seconds" in r) / 60,
        megabytes=sent.pop() / 1e6, rate=base["rate"], ends=ENDS[base["ends"]], prior=own["prior_scale"],
        fedavg_prior=base["prior_scale"], fedavg_momentum=base["momentum"], cycles=own["cycles"],
        temperature=own["temperature"], momentum=own["momentum"], scores="\n".join(lines),
        verdicts="\n".join(verdicts), tried="\n".join(tried), heads=" | ".join(SCORES.values()),
        bars="---|" * (len(SCORES) + 1),
    )  # fmt: skip


TEXT = """# FedAvg, or an average over the posterior?

<!-- written by docs/make_networks.py -->

FA-LD costs what FedAvg costs: the same rounds, the same bytes, the same gradients. What does one get for
the noise? Both train the convolutional network of 106,122 parameters (`fald.lab.networks.cnn`) on
Fashion-MNIST, with {rows:,} rows at 10 clients (Dirichlet 0.3), batches of 64, K = 10, and {rounds}
rounds. Both begin with
{half} rounds of FedAvg. FedAvg then goes on for {half} rounds, and so does FA-LD, in cycles, and averages
the predictions of its draws.

Settings were chosen by the NLL on {validation:,} rows held out of the training set, with a seed of its
own, one setting after the other: the step size (η times rows, here {rate:g}) and how it ends for FedAvg;
temperature, cycles, momentum and prior scale for FA-LD; then FedAvg was tried with the momentum and prior of
FA-LD. Test images and MNIST, the images of another kind, were not looked at.

| | {heads} |
|{bars}
{scores}

Means of three seeds (rows held out, clients, start, noise), ± half of a 95% interval by Student's t. NLL,
Brier and ECE are better when lower, accuracy and AUROC when higher. OOD AUROC is the chance that an MNIST
image has a larger predictive entropy than a test image.

## Verdicts

Differences at equal seeds, rounds and bytes ({megabytes:.0f} MB from clients to server in the second half),
with half of a 95% interval. *Wins* and *loses* are said of the first of two, and only where the interval
does not hold zero.

| | NLL | OOD AUROC |
|---|---|---|
{verdicts}

"Without noise" are the same phases at temperature 0. What it gains on FedAvg comes from averaging
predictions along the way; what the posterior average gains on it comes from Langevin noise.

## What was chosen, and tried

FA-LD: temperature {temperature:g}, {cycles} cycle(s) in the second half (each explores without noise,
then samples with a fifth of the step), momentum {momentum:g}, prior scale {prior:g}. FedAvg: step size in
the second half {ends}, momentum {fedavg_momentum:g}, prior scale {fedavg_prior:g}. On validation rows,
starts after {half} rounds and the others after {rounds}:

| run | NLL | accuracy | ECE |
|---|---|---|---|
{tried}

`python docs/make_networks.py` repeats all of it ({minutes:.0f} CPU-minutes here) and writes this page
from `docs/comparisons/networks.json`.

What this does not show: other data, other networks, more rounds, a finer search, several chains (which
cost rounds too).
"""


if __name__ == "__main__":
    asked = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    if sys.argv[1:] != ["page"]:
        seeds = (int(asked["seed"]),) if "seed" in asked else SEEDS
        everything(float(asked.get("minutes", np.inf)), seeds)
    if "seed" not in asked:
        PAGE.write_text(page(json.loads(STORED.read_text())))
