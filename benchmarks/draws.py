"""``python -m benchmarks.draws``: what Sobol points, mirrored pairs and control variates do to errors.

A logistic regression of ten parameters; draws of a proposal around its mode, weighted. Errors of means and
sds are those over many seeds, root mean squares over parameters, in posterior sds. Control variates are what
is known of the Gaussian at the mode: its mass, and its mean and variance along every axis.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np

import fald
from fald.calculus.sums import hessians, log_likelihoods, make_site, prior_derivatives, prior_values
from fald.fewround import proposal
from fald.lab.bench.fitters import PRIOR, rows

RESULTS = Path(__file__).parent / "speed" / "draws.jsonl"
FEATURES, DRAWS = 9, 2048


def _plain(count: int, dim: int, seed: int, part: int) -> np.ndarray:
    """Independent points in the place of Sobol's."""
    return np.random.Generator(np.random.Philox([seed, 100 + part])).random((count, dim))


def _independent(current: proposal.Proposal, count: int, seed: int) -> np.ndarray:
    """As many draws of the same proposal, no two of them mirrored."""
    with mock.patch.object(proposal, "_uniforms", _plain):
        return np.concatenate([proposal.draw(current, count, 2 * seed + i)[i::2] for i in (0, 1)])


def _pairs(current: proposal.Proposal, count: int, seed: int) -> np.ndarray:
    with mock.patch.object(proposal, "_uniforms", _plain):
        return proposal.draw(current, count, seed)


WAYS: dict[str, Callable[[proposal.Proposal, int, int], np.ndarray]] = {
    "independent draws": _independent,
    "mirrored pairs": _pairs,
    "mirrored pairs of Sobol points": proposal.draw,
}


def measure(count: int, seeds: int) -> dict[str, object]:
    """Errors with so many rows, by way of drawing, without and with control variates."""
    model = fald.models.logistic_regression(FEATURES, prior_scale=PRIOR)
    site = make_site(model, rows("logistic", count, FEATURES))
    mode, second = np.zeros(model.dim), -np.eye(model.dim)
    for _ in range(20):
        parts = zip(hessians(site, mode[None])[1:], prior_derivatives(model, mode[None])[1:])
        gradient, second = (a[0] + b[0] for a, b in parts)
        mode = mode - np.linalg.solve(second, gradient)
    current = proposal.gaussian(mode, np.linalg.inv(-second))
    factor = current.factors[0]
    found: dict[str, list[np.ndarray]] = {}
    for seed in range(seeds):
        for way, draw in WAYS.items():
            x = draw(current, DRAWS, seed)
            z = np.linalg.solve(factor, (x - mode).T).T
            density = proposal.log_density(current, DRAWS, x)
            values = log_likelihoods(site, x) + prior_values(model, x) - density
            weights = np.exp(values - values.max())
            weights /= weights.mean()
            normal = -np.sum(z**2, axis=1) / 2 - np.sum(np.log(np.diag(factor)))
            surrogate = np.exp(normal - model.dim / 2 * np.log(2 * np.pi) - density)[:, None]
            known = np.concatenate([surrogate - 1, surrogate * z, surrogate * (z**2 - 1)], axis=1)
            mean = np.mean(weights[:, None] * z, axis=0)
            square = np.mean(weights[:, None] * (z - mean) ** 2, axis=0)
            own = np.concatenate([z - mean, (z - mean) ** 2 - square], axis=1) * weights[:, None]
            slopes = np.linalg.lstsq(known - known.mean(axis=0), own, rcond=None)[0]
            shift = np.mean(known, axis=0) @ slopes
            both = np.append(mean, square)
            found.setdefault(way, []).append(both)
            found.setdefault(f"{way}, control variates", []).append(both - shift)
    out: dict[str, object] = {"rows": count, "seeds": seeds, "draws": DRAWS}
    for way, estimates in found.items():
        each = np.array(estimates)
        of_mean, of_square = np.split(each.std(axis=0, ddof=1), 2)
        size = each[:, model.dim :].mean(axis=0)
        errors = of_mean / np.sqrt(size), of_square / size / 2
        out[way] = [float(np.sqrt(np.mean(error**2))) for error in errors]
    return out


def main() -> None:
    """Measure, and keep a line for each number of rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draws", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", type=int, default=[100, 1000])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    lines = [json.dumps(measure(count, given.seeds)) for count in given.rows]
    given.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
