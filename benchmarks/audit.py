"""``python -m benchmarks.audit``: what auditing at the sites needs and costs.

``tolerance`` runs a study, then replays its server on the same sums in processes with other kernels of BLAS,
NumPy and XLA, and says by how much their requests differ, relative to the largest number of each array.
``cost`` runs a federation of workers in this process over their real messages, with and without the audit.
``replay`` says what it takes to bring a server to each request again, as a new process must.
``grid`` runs ``fald.fit`` with and without the grid to which sites round, and compares both with NUTS; its
lines are kept in ``benchmarks/rounds/results/grid.jsonl``.
``precision`` runs ``fald.fit`` on all studies whose family adds up in float32, and again in float64 alone;
its lines are kept in ``benchmarks/rounds/results/precision.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

VARIANTS = {
    "the same": {},
    "BLAS for Haswell": {"OPENBLAS_CORETYPE": "Haswell"},
    "BLAS for Prescott": {"OPENBLAS_CORETYPE": "Prescott"},
    "BLAS for SkylakeX": {"OPENBLAS_CORETYPE": "SkylakeX"},
    "NumPy without AVX": {"NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL X86_V3"},
    "XLA for SSE4.2": {"XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"},
    "XLA for AVX2": {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"},
    "all of an older processor": {
        "OPENBLAS_CORETYPE": "Prescott",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL X86_V3",
        "XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2",
    },
}
STUDIES = ("indo", "opt", "bacteria", "breast-cancer-31", "quine")
GRID_STUDIES = (
    "wilms", "indo", "bacteria", "insurance", "breast-cancer-11", "lung", "respiratory", "unequal-scales",
    "one-parameter", "empty-category", "intercept-only", "site-is-outcome", "separable-normal",
    "gaussian-exact", "conflicting-effects", "attainment", "single-rows", "melanoma", "cattle",
    "few-events", "separable-wide", "near-collinear", "bone-marrow", "azpro", "medpar", "opt",
)  # fmt: skip


def record(name: str, curvature: bool, path: Path) -> None:
    """Requests and sums of a run in this process."""
    import fald
    from benchmarks.rounds import studies
    from fald.fewround.exchange import InProcessExchange

    study, kept = studies.load(name), []

    class Recorded(InProcessExchange):
        def ask(self, request):
            sums = super().ask(request)
            kept.append(({k: np.asarray(v) for k, v in request.items()}, sums))
            return sums

    exchange = Recorded(study.model, study.data)
    fald.fit(0, study.model, study.data, exchange=exchange, curvature=curvature, progress=False)
    path.write_bytes(pickle.dumps(kept))


def replay(name: str, curvature: bool, path: Path) -> float:
    """The largest difference of a request from the recorded one; infinite where shapes differ."""
    from benchmarks.rounds import studies
    from fald.core.threads import one_thread
    from fald.fewround.fit import few_round_settings, server_of

    model = studies.load(name).model
    settings = few_round_settings(model, accuracy="high", max_rounds=12, method="auto", curvature=curvature)
    server, worst = server_of(settings, model, 0, []), 0.0
    kept = pickle.loads(path.read_bytes())

    @one_thread
    def compare() -> float:
        worst, request = 0.0, next(server)
        for number, (before, sums) in enumerate(kept, 1):
            for key, a in before.items():
                b = np.asarray(request[key])
                if a.shape != b.shape:
                    return np.inf
                if a.size and a.dtype.kind == "f":
                    worst = max(worst, float(np.max(np.abs(a - b)) / max(np.abs(a).max(), 1e-300)))
                elif not np.array_equal(a, b):
                    return np.inf
            if number < len(kept):
                request = server.send(sums)
        return worst

    return compare() if kept else worst


def tolerance(names: list[str]) -> None:
    """A table: how far requests of other processors differ."""
    for name in names:
        for curvature in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "run.bin"
                _child("record", name, curvature, path, {})
                found = {v: _child("replay", name, curvature, path, env) for v, env in VARIANTS.items()}
            print(json.dumps({"study": name, "curvature": curvature, **found}), flush=True)


def _child(what: str, name: str, curvature: bool, path: Path, env: dict[str, str]) -> float:
    code = f"from benchmarks.audit import *; print({what}({name!r}, {curvature}, Path({str(path)!r})))"
    # flags that are set already stay, and what was compiled for another processor is not reused
    flags = " ".join(filter(None, [os.environ.get("XLA_FLAGS", ""), env.get("XLA_FLAGS", "")]))
    own = {**os.environ, **env, "XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=own, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    said = done.stdout.split()[-1]
    return 0.0 if said == "None" else float(said)


class Metered:
    """A worker that keeps what its messages take, by round."""

    def __init__(self, worker, spent):
        self._worker, self._spent = worker, spent

    def handle(self, content: bytes) -> bytes:
        """Answer a message."""
        from fald.federation import wire

        began = time.process_time()
        reply = self._worker.handle(content)
        number = wire.unpack(content).values.get("round")
        self._spent.setdefault(number, []).append((time.process_time() - began, len(content), len(reply)))
        return reply


def cost(num_sites: int, features: int, rows: int, audit: bool) -> dict[str, Any]:
    """Bytes and seconds per round of a few-round study over workers in this process."""
    from fald.federation.coordinator.run import run_federated
    from fald.federation.link import LocalLink
    from fald.federation.site.worker import SiteSettings, SiteWorker
    from fald.study.schema import make_study

    columns = [f"x{j}" for j in range(features)]
    rng, spent, handlers = np.random.default_rng(0), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "policy.toml").write_text(f"audit = {str(audit).lower()}\n")
        for name in (f"site{i:02d}" for i in range(num_sites)):
            x = rng.normal(size=(rows, features))
            y = (rng.random(rows) < 1 / (1 + np.exp(-x.sum(axis=1) / 2))).astype(int)
            pd.DataFrame(x, columns=columns).assign(y=y).to_csv(root / f"{name}.csv", index=False)
            site = SiteSettings(name, root / name, root / f"{name}.csv", root / "policy.toml")
            handlers[name] = Metered(SiteWorker(site), spent).handle
        tree = {"data": {"target": "y", "features": columns}, "model": {"family": "logistic"}}
        began = time.process_time()
        result = run_federated(make_study(tree, "benchmark"), LocalLink(handlers), root / "out")
        whole = time.process_time() - began
    rounds = [np.mean(spent[n], axis=0) for n in sorted(n for n in spent if n)]
    return {
        "sites": num_sites,
        "parameters": features + 1,
        "rows each": rows,
        "audit": audit,
        "verdict": result.attrs["verdict"],
        "rounds": len(rounds),
        "CPU-seconds of a site, per round": [round(float(r[0]), 3) for r in rounds],
        "bytes to a site, per round": [int(r[1]) for r in rounds],
        "bytes from a site, per round": [int(r[2]) for r in rounds],
        "CPU-seconds of everybody": round(whole, 1),
    }


def replays(name: str) -> None:
    """CPU-seconds in which the server is brought to each request again, after what it needs was compiled."""
    from benchmarks.rounds import studies
    from fald.fewround.fit import few_round_settings, server_of

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.bin"
        record(name, True, path)
        kept = pickle.loads(path.read_bytes())
    model = studies.load(name).model
    settings = few_round_settings(model, accuracy="high", max_rounds=12, method="auto", curvature=True)
    server, spent = server_of(settings, model, 0, []), []
    began = time.process_time()
    next(server)
    for _, sums in kept[:-1]:
        server.send(sums)
        spent.append(round(time.process_time() - began, 2))
    print(json.dumps({"study": name, "CPU-seconds to the request of rounds 2, 3, …": spent}), flush=True)


def grid(names: list[str], seeds: int) -> None:
    """Verdict, rounds and errors with and without rounding at the sites."""
    from benchmarks.rounds.measure import measure
    from fald.fewround.rounding import Grid

    rounding = Grid._on_grid
    for seed in range(seeds):
        for name in names:
            row: dict[str, Any] = {"study": name, "seed": seed}
            for way, rounded in (("grid", rounding), ("exact", lambda self, array, values, own: values)):
                Grid._on_grid = rounded
                found = measure(name, "auto", seed)
                # studies that must not be reached have no mean and sd to compare with
                kept = [k for k in ("verdict", "rounds", "mean_error", "sd_error") if k in found]
                row[way] = {
                    k: found[k] if isinstance(found[k], str | int) else round(found[k], 4) for k in kept
                }
            print(json.dumps(row), flush=True)


def precision(names: list[str], seeds: int) -> None:
    """Verdicts with sums in float32 and in float64, and how far means and sds lie apart, in posterior sds."""
    import fald
    from benchmarks.rounds import studies
    from fald.calculus import predicted

    def run(study: Any, seed: int, exact: bool) -> tuple[str, np.ndarray, np.ndarray]:
        kept = predicted._SINGLE
        predicted._SINGLE = sys.maxsize if exact else kept
        try:
            tree = fald.fit(seed, study.model, study.data, progress=False)
        finally:
            predicted._SINGLE = kept
        rounds: Any = tree["rounds"]
        return tree.attrs["verdict"], rounds["mean"].values[-1], rounds["sd"].values[-1]

    for name in names or studies.names():
        study = studies.load(name)
        small = max(study.data.sizes) < predicted._SINGLE
        if small or study.model.predictor is None or not study.model.predictor.single:
            continue  # all its sums are in float64
        for seed in range(seeds):
            verdict, mean, sd = run(study, seed, exact=False)
            other, exact_mean, exact_sd = run(study, seed, exact=True)
            row = {"study": name, "seed": seed, "float32": verdict, "float64": other}
            row["means apart"] = float(np.max(np.abs(mean - exact_mean) / exact_sd))
            row["sds apart"] = float(np.max(np.abs(sd / exact_sd - 1)))
            print(json.dumps(row), flush=True)


def main() -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("tolerance", "cost", "grid", "replay", "precision"))
    parser.add_argument("studies", nargs="*")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--features", type=int, default=9)
    parser.add_argument("--rows", type=int, default=200)
    given = parser.parse_args()
    if given.what == "tolerance":
        tolerance(given.studies or list(STUDIES))
    elif given.what == "replay":
        for name in given.studies or ["indo", "breast-cancer-11", "unequal-scales"]:
            replays(name)
    elif given.what == "grid":
        grid(given.studies or list(GRID_STUDIES), given.seeds)
    elif given.what == "precision":
        precision(given.studies, given.seeds)
    else:
        for num_sites in (4, 20):
            for audit in (False, True, False, True):  # the first of each compiles
                print(json.dumps(cost(num_sites, given.features, given.rows, audit)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
