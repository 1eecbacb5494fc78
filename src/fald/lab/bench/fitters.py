"""One tool fits one set of rows, twice, in a process of its own: what ``fald bench fit`` starts.

``python -m fald.lab.bench.fitters '{"tool": …}'`` prints a line of JSON: CPU-seconds of the first call and of
the second, the largest memory, the largest Monte-Carlo error of a mean in posterior sds, and means.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PRIOR = 2.5
CHAINS, DRAWS = 4, 1000
_COUNT = 8  # features that count where few do
PATIENCE = 30.0  # seconds of a first call after which there is no second


class Fitted(NamedTuple):
    """Means and sds of coefficients and intercept, the largest error of a mean in sds, and the verdict."""

    mean: Any
    sd: Any
    error: float
    verdict: str = ""


def rows(family: str, count: int, features: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Features (count, features) in float64 and outcomes, with moderate effects."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, features))
    if family == "horseshoe":  # a linear regression in which few features count
        y = x[:, :_COUNT] @ np.linspace(1.0, 0.3, _COUNT) + 0.3 + rng.standard_normal(count)
        return x, y
    eta = x @ (rng.standard_normal(features) / np.sqrt(features + 1)) + 0.3
    if family == "logistic":
        return x, (rng.random(count) < 1 / (1 + np.exp(-eta))).astype(float)
    if family == "poisson":
        return x, rng.poisson(np.exp(eta / 2)).astype(float)
    return x, eta + rng.standard_normal(count)


def fald_fit(family: str, x: np.ndarray, y: np.ndarray, sites: int) -> Callable[[], Fitted]:
    """``fald.fit`` with its defaults, rows divided over sites."""
    import xarray  # noqa: F401 - other tools too are loaded before the clock starts

    import fald
    import fald.study.fit

    edges = np.linspace(0, len(x), sites + 1).astype(int)
    data = fald.FederatedData((x, y), edges, tuple(f"site {i:06d}" for i in range(sites)))
    if family == "horseshoe":
        model = _horseshoe(x.shape[1])
    else:
        model = getattr(fald.models, f"{family}_regression")(x.shape[1], prior_scale=PRIOR)

    def fit() -> Fitted:
        tree = fald.fit(0, model, data, progress=False)
        own = tree["posterior"].dataset
        draws = np.concatenate([own["coefficient"].values, own["intercept"].values[..., None]], axis=-1)
        draws = draws.reshape(-1, draws.shape[-1])
        errors = [one["mcse"] for name, one in json.loads(tree.attrs["precision"]).items()]
        sd = draws.std(axis=0)
        said = ": ".join(filter(None, [tree.attrs["verdict"], tree.attrs["reason"]]))
        return Fitted(draws.mean(axis=0), sd, float(np.max(errors[: len(sd)] / sd)), said)

    return fit


def _horseshoe(features: int) -> Any:
    """A linear regression with a horseshoe prior, coefficients in units of their scales."""
    import jax.numpy as jnp

    import fald

    def coefficients(position: Any) -> Any:
        return position["raw"] * jnp.exp(position["log_local"] + position["log_global"])

    def logprior_fn(position: Any) -> Any:
        normal = jnp.sum(position["raw"] ** 2) + (position["intercept"] / PRIOR) ** 2
        scales = jnp.append(position["log_local"], position["log_global"])  # half-Cauchy
        noise = position["log_noise"] - jnp.exp(2 * position["log_noise"]) / 50  # half-normal with scale 5
        return noise - normal / 2 + jnp.sum(scales - jnp.logaddexp(0.0, 2 * scales))

    def loglikelihood_fn(position: Any, row: Any) -> Any:
        x, y = row
        left = y - position["intercept"] - x @ coefficients(position)
        return -position["log_noise"] - 0.5 * (left * jnp.exp(-position["log_noise"])) ** 2

    start = {name: jnp.zeros(features) for name in ("raw", "log_local")}
    start |= {name: jnp.zeros(()) for name in ("intercept", "log_global", "log_noise")}
    reported = lambda p: {"coefficient": coefficients(p), "intercept": p["intercept"]}  # noqa: E731
    return fald.Model(logprior_fn, loglikelihood_fn, start, constrain_fn=reported)


def numpyro_fit(family: str, x: np.ndarray, y: np.ndarray, sites: int) -> Callable[[], Fitted]:
    """NUTS of NumPyro on pooled rows, in float32, one chain after the other."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    features, outcome = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)

    def model(features: Any, outcome: Any) -> None:
        a = numpyro.sample("intercept", dist.Normal(0, PRIOR))
        each = [features.shape[1]]
        if family == "horseshoe":
            scales = numpyro.sample("local", dist.HalfCauchy(1.0).expand(each).to_event(1))
            scales = scales * numpyro.sample("global", dist.HalfCauchy(1.0))
            raw = numpyro.sample("raw", dist.Normal(0, 1).expand(each).to_event(1))
            b = numpyro.deterministic("coefficient", raw * scales)
        else:
            b = numpyro.sample("coefficient", dist.Normal(0, PRIOR).expand(each).to_event(1))
        eta = a + features @ b
        if family == "logistic":
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=outcome)
        elif family == "poisson":
            numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=outcome)
        else:
            s = numpyro.sample("noise_scale", dist.HalfNormal(5.0))
            numpyro.sample("y", dist.Normal(eta, s), obs=outcome)

    def fit() -> Fitted:
        kernel = numpyro.infer.NUTS(model)
        chains = numpyro.infer.MCMC(
            kernel,
            num_warmup=DRAWS,
            num_samples=DRAWS,
            num_chains=CHAINS,
            chain_method="sequential",
            progress_bar=False,
        )
        chains.run(jax.random.key(0), features, outcome)
        found = chains.get_samples(group_by_chain=True)
        draws = np.concatenate([found["coefficient"], found["intercept"][..., None]], axis=-1)
        size = numpyro.diagnostics.effective_sample_size(np.asarray(draws, float))
        return Fitted(draws.mean(axis=(0, 1)), draws.std(axis=(0, 1)), float(np.min(size) ** -0.5))

    return fit


def blackjax_fit(family: str, x: np.ndarray, y: np.ndarray, sites: int) -> Callable[[], Fitted]:
    """NUTS of BlackJAX with window adaptation on pooled rows, in float32, one chain after the other."""
    import blackjax
    import jax
    import jax.numpy as jnp

    features, outcome = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)

    def log_density(position: Any) -> Any:
        eta, scale = position["intercept"] + features @ position["coefficient"], position["log_scale"]
        prior = -sum(jnp.sum(position[name] ** 2) for name in ("intercept", "coefficient")) / 2 / PRIOR**2
        if family == "logistic":
            return prior - scale**2 / 2 + jnp.sum(outcome * eta - jnp.logaddexp(0, eta))
        if family == "poisson":
            return prior - scale**2 / 2 + jnp.sum(outcome * eta - jnp.exp(eta))
        own = -jnp.exp(2 * scale) / 50 + scale  # half-normal with scale 5
        return prior + own - len(x) * scale - jnp.sum((outcome - eta) ** 2) / 2 / jnp.exp(2 * scale)

    @jax.jit
    def run(key_of_chain: Any) -> Any:
        warm_key, key = jax.random.split(key_of_chain)
        start = {"intercept": 0.0, "coefficient": jnp.zeros(x.shape[1]), "log_scale": 0.0}
        adaptation: Any = blackjax.window_adaptation(blackjax.nuts, log_density)
        adapted, _ = adaptation.run(warm_key, start, DRAWS)
        kernel = blackjax.nuts(log_density, **adapted.parameters)

        def step(state: Any, key: Any) -> Any:
            state, _ = kernel.step(key, state)
            return state, state.position

        return jax.lax.scan(step, adapted.state, jax.random.split(key, DRAWS))[1]

    def fit() -> Fitted:
        chains = [run(key) for key in jax.random.split(jax.random.key(0), CHAINS)]
        draws = np.stack(
            [np.concatenate([c["coefficient"], c["intercept"][:, None]], axis=-1) for c in chains]
        )
        size = np.asarray(blackjax.diagnostics.effective_sample_size(draws))
        return Fitted(draws.mean(axis=(0, 1)), draws.std(axis=(0, 1)), float(np.min(size) ** -0.5))

    return fit


_R = """
given <- commandArgs(TRUE); n <- as.integer(given[2]); d <- as.integer(given[3])
table <- matrix(readBin(given[1], "double", n * (d + 1)), n, d + 1)
frame <- data.frame(table); names(frame) <- c(paste0("x", seq_len(d)), "y")
suppressPackageStartupMessages(library(rstanarm))
seconds <- c()
for (call in 1:2) {
  before <- proc.time()
  fit <- stan_glm(y ~ ., data = frame, family = FAMILY, chains = 4, iter = 2000, cores = 1, refresh = 0,
    prior = normal(0, 2.5, autoscale = FALSE), prior_intercept = normal(0, 2.5, autoscale = FALSE))
  used <- proc.time() - before
  seconds <- c(seconds, sum(used[c(1, 2, 4, 5)], na.rm = TRUE))
  if (seconds[1] > PATIENCE) break
}
told <- as.data.frame(fit$stan_summary)[c(seq_len(d) + 1, 1), ]
cat(seconds[1], rev(seconds)[1], min(told$n_eff), told$mean, told$sd, sep = " ")
"""
_R_FAMILIES = {"logistic": "binomial()", "poisson": "poisson()", "linear": "gaussian()"}


def rstanarm(family: str, x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """``stan_glm`` of rstanarm on pooled rows, both calls in one process of R."""
    with tempfile.TemporaryDirectory(prefix="fald-bench-") as folder:
        path, script = Path(folder) / "rows", Path(folder) / "fit.R"
        np.column_stack([x, y]).T.tofile(path)  # R keeps columns together
        script.write_text(_R.replace("FAMILY", _R_FAMILIES[family]).replace("PATIENCE", str(PATIENCE)))
        call = ["Rscript", str(script), str(path), str(len(x)), str(x.shape[1])]
        said = subprocess.run(call, check=True, capture_output=True, text=True).stdout.split()
    numbers = np.array(said, float)
    mean, sd = numbers[3:].reshape(2, -1)
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return _told(numbers[:2], memory, Fitted(mean, sd, float(numbers[2] ** -0.5)))


def _told(seconds: Any, memory: float, found: Fitted) -> dict[str, Any]:
    return {
        "cold": float(seconds[0]),
        "warm": float(seconds[-1]),
        "memory": memory,
        "error": found.error,
        "verdict": found.verdict,
        "mean": np.asarray(found.mean, float).tolist(),
        "sd": np.asarray(found.sd, float).tolist(),
    }


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Fit as ``spec`` says: ``tool``, ``family``, ``rows``, ``dim`` with intercept, ``sites``, ``once``."""
    family = spec["family"]
    x, y = rows(family, spec["rows"], spec["dim"] - 1)
    if spec["tool"] == "rstanarm":
        return rstanarm(family, x, y)
    makers = {"fald": fald_fit, "numpyro": numpyro_fit, "blackjax": blackjax_fit}
    fit, seconds, found = makers[spec["tool"]](family, x, y, spec["sites"]), [], None
    patience = 0.0 if spec.get("once") else PATIENCE
    while len(seconds) < (1 if seconds and seconds[0] > patience else 2):
        began = time.process_time()
        found = fit()
        seconds.append(time.process_time() - began)
    assert found is not None
    return _told(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, found)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
