"""Softmax regression on image sets by FA-LD: chains, their scores along the run, and the step-size search."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import softmax

from fald.core.files import write_atomically
from fald.core.types import float_dtype
from fald.core.version import __version__
from fald.lab.reproduce.base import Meter, PanelRun
from fald.langevin.engine import Assignment
from fald.langevin.fald import fald
from fald.langevin.inprocess import InProcess
from fald.problem import partition
from fald.problem.models import Model, softmax_regression, takes_rows
from fald.results.probabilities import scores
from fald.settings.participation import full
from fald.study import datasets

_WORKERS = 2
_STEPS_AT_ONCE = 300  # local steps of one call to the engine, about a second
_SPLIT_SEED = 20_000  # the validation rows are the same for every seed


@dataclass(frozen=True)
class ImageChain:
    """One chain: which set, which settings, which seed, and the rows it is scored on."""

    data: str
    local_steps: int
    step_size: float
    num_rounds: int
    num_warmup: int
    seed: int
    scored_on: str  # "validation" or "test"
    num_clients: int
    num_rows: int
    validation_rows: int
    batch_size: int
    temperature: float
    prior_scale: float
    rounds_per_sample: int

    @property
    def steps(self) -> int:
        """Local steps in all."""
        return self.num_rounds * self.local_steps

    def digest(self) -> str:
        """A name for the chain's file."""
        text = json.dumps({**asdict(self), "version": __version__}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def chain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that all chains of an experiment share."""
    keys = ("num-clients", "num-rows", "validation-rows", "batch-size", "temperature", "prior-scale")
    return {key.replace("-", "_"): settings[key] for key in (*keys, "rounds-per-sample")}


@cache
def image_model(prior_scale: float) -> Model:
    """Softmax regression that takes pixels as bytes: a quarter of the memory that has to be moved."""
    model = softmax_regression(784, 10, prior_scale=prior_scale)

    @takes_rows
    def loglikelihood_fn(position, example):
        x, y = example
        return model.loglikelihood_fn(position, (jnp.asarray(x, float_dtype()) / 255, y))

    return replace(model, loglikelihood_fn=loglikelihood_fn, name="softmax-images")


@cache
def _split(data: str, num_rows: int, validation_rows: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Rows to train on, to choose the step size with, and to test with; the last are the set's own."""
    images: Any = datasets.load(data)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(images.train_labels))
    held, kept = order[:validation_rows], order[validation_rows : validation_rows + num_rows]
    return {
        "train": (images.train_images[kept], images.train_labels[kept]),
        "validation": (images.train_images[held], images.train_labels[held]),
        "test": (images.test_images, images.test_labels),
    }


def rows(chain: ImageChain, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one part of a chain's data."""
    return _split(chain.data, chain.num_rows, chain.validation_rows)[part]


def positions(
    chain: ImageChain, meter: Meter, stopped: threading.Event | None = None
) -> Iterator[np.ndarray]:
    """Flat positions, one every ``rounds_per_sample`` rounds, from zero, by the ordinary engine."""
    data = partition.iid(rows(chain, "train"), chain.num_clients, seed=chain.seed)
    method = fald(
        local_steps=chain.local_steps,
        step_size=chain.step_size,
        temperature=chain.temperature,
        batch_size=chain.batch_size,
    )
    model, every = image_model(chain.prior_scale), chain.rounds_per_sample
    problem = Assignment(jax.random.key(chain.seed), model, data, method, full(), 1, 0, every)
    engine = InProcess()
    state = engine.init(problem, model.flat_initial_position[None])
    samples = chain.num_rounds // every
    at_once = max(1, _STEPS_AT_ONCE // (every * chain.local_steps))
    for first in range(0, samples, at_once):
        if stopped is not None and stopped.is_set():
            raise KeyboardInterrupt
        count = min(at_once, samples - first) * every
        state, records, energy = engine.advance(problem, state, count)
        meter.add(count * chain.local_steps, energy)
        yield from records.position[:, 0]
        if not np.all(np.isfinite(records.position)):
            meter.add(chain.steps - state.round * chain.local_steps, energy)
            return


def probabilities(model: Model, position: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """Predicted class probabilities (rows, classes); ``pixels`` are scaled to 0 … 1."""
    parts = model.unravel(jnp.asarray(position))
    logits = pixels @ np.asarray(parts["coefficient"]).T + np.asarray(parts["intercept"])
    return softmax(logits, axis=1)


def score_chain(
    chain: ImageChain, meter: Meter, stopped: threading.Event | None = None
) -> list[dict[str, Any]]:
    """Scores of the averaged predictions after every sample, from the start and after the warm-up.

    A chain that leaves the finite numbers ends early; its later rounds are missing.
    """
    images, labels = rows(chain, chain.scored_on)
    pixels = images.astype(np.float32) / np.float32(255)
    model = image_model(chain.prior_scale)
    sums = {0: np.zeros((len(labels), 10)), chain.num_warmup: np.zeros((len(labels), 10))}
    found = []
    for i, position in enumerate(positions(chain, meter, stopped)):
        done = (i + 1) * chain.rounds_per_sample
        if not np.all(np.isfinite(position)):
            break
        now = probabilities(model, position, pixels)
        for warmup, total in sums.items():
            if done > warmup:
                total += now
                average = total / total.sum(1, keepdims=True)
                found.append({"warmup": warmup, "round": done, **scores(average, labels)._asdict()})
    return found


def run_chains(run: PanelRun, chains: Sequence[ImageChain], label: str) -> list[list[dict[str, Any]]]:
    """Scores of each chain; those that an earlier call has finished are read from their files."""
    return each_chain(run, chains, label, work=score_chain, kind="scores")


def each_chain(
    run: PanelRun, chains: Sequence[ImageChain], label: str, *, work: Callable[..., Any], kind: str
) -> list[Any]:
    """Do some work for each chain, two at a time, and keep its JSON result for another call."""
    stopped = threading.Event()

    def path(chain: ImageChain) -> Path:
        return run.cache / f"{kind}-{chain.digest()}.json"

    run.cache.mkdir(parents=True, exist_ok=True)
    missing = sorted({c for c in chains if not path(c).exists()}, key=lambda c: (c.seed, -c.steps))
    for data in sorted({c.data for c in missing}):  # once, before the threads ask for it
        _split(data, *next((c.num_rows, c.validation_rows) for c in missing if c.data == data))

    def one(chain: ImageChain, meter: Meter) -> None:
        result = work(chain, meter, stopped)
        content = {"chain": asdict(chain), "result": result}
        write_atomically(path(chain), json.dumps(content).encode())

    if missing:
        with (
            run.begin(sum(c.steps for c in missing), label) as meter,
            ThreadPoolExecutor(min(_WORKERS, len(missing))) as pool,
        ):
            waiting = [pool.submit(one, chain, meter) for chain in missing]
            try:
                for future in waiting:
                    future.result()
            except BaseException:
                stopped.set()
                pool.shutdown(cancel_futures=True)
                raise
    return [json.loads(path(chain).read_text())["result"] for chain in chains]


def tune(run: PanelRun, data: str, local_steps: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Choose η for each K: the smallest validation Brier score of averaged predictions on a grid.

    Scores are means over ``tuning-seeds`` seeds. The tuning chains take ``tuning-steps`` local steps, but at
    most ``tuning-rounds`` rounds.
    """
    s = run.settings
    every = s["rounds-per-sample"]
    tuning = []
    for K in local_steps:
        rounds = min(s["tuning-rounds"], max(1, s["tuning-steps"] // (K * every)) * every)
        tuning += [
            ImageChain(data, K, eta, rounds, 0, run.seed + i, "validation", **chain_settings(s))
            for eta in s["step-sizes"]
            for i in range(s["tuning-seeds"])
        ]
    tried: dict[int, dict[float, list[float]]] = {K: {} for K in local_steps}
    for chain, found in zip(tuning, run_chains(run, tuning, f"tuning on {data}, energy")):
        whole = found and found[-1]["round"] == chain.num_rounds
        brier = found[-1]["brier"] if whole else float("inf")
        tried[chain.local_steps].setdefault(chain.step_size, []).append(brier)
    chosen = {}
    for K, by_step in tried.items():
        means = {eta: float(np.mean(values)) for eta, values in by_step.items()}
        best = min(means, key=lambda eta: (means[eta], eta))
        chosen[K] = {"step-size": best, "brier": {f"{eta:g}": means[eta] for eta in means}}
    return chosen


def at_the_edge(record: Mapping[str, Any]) -> list[str]:
    """Chosen step sizes that are the first or the last of their grid: a wider grid might change them.

    Examples
    --------
    >>> tuned = {"mnist": {"1": {"step-size": 2.0}, "10": {"step-size": 1.0}}}
    >>> at_the_edge({"facts": {"tuned": tuned}, "settings": {"step-sizes": [0.5, 1.0, 2.0]}})
    ['mnist, K = 1: η = 2']
    """
    grid = record["settings"].get("step-sizes", [])
    return [
        f"{data}, K = {K}: η = {found['step-size']:g}"
        for data, by_k in record["facts"].get("tuned", {}).items()
        for K, found in by_k.items()
        if found["step-size"] in (min(grid), max(grid))
    ]
