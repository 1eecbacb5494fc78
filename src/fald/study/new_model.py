"""The package that ``fald new-model`` writes: a model, its entry point, a test, and a study with data."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template

import numpy as np

from fald.core.errors import ConfigError
from fald.core.files import write_atomically

SITES = {"north": 160, "south": 90, "east": 50}
_PACKAGE = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "0.1.0"
description = "A model for studies of fald"
requires-python = ">=3.11"
dependencies = ["fald"]

[project.optional-dependencies]
test = ["numpyro>=0.19", "pytest>=8"]

# what a study calls "$name:survival"
[project.entry-points."fald.models"]
survival = "$module:survival"

[tool.setuptools]
packages = ["$module"]
"""
_MODEL = '''\
"""Survival times that may be censored, with a constant hazard: replace it by your own model."""

import jax.numpy as jnp

import fald


def survival(features, *, prior_scale=2.5):
    """Make the model of a study; ``features`` are the names of its encoded columns, the rest are options.

    The target is a time, and the first feature says whether it ended in the event (1) or was censored (0).
    An example is one row, ``(x, time)`` with x its encoded features.
    """
    _, *names = features

    def log_hazard(position, x):
        return position["log_hazard"] + x[1:] @ position["coefficient"]

    def loglikelihood(position, example):
        x, time = example
        return x[0] * log_hazard(position, x) - jnp.exp(log_hazard(position, x)) * time

    def logprior(position):
        return -0.5 * sum(jnp.sum(value**2) for value in position.values()) / prior_scale**2

    return fald.Model(
        logprior_fn=logprior,
        loglikelihood_fn=loglikelihood,
        initial_position={"log_hazard": jnp.array(0.0), "coefficient": jnp.zeros(len(names))},
        predict_fn=lambda position, x: jnp.exp(-log_hazard(position, x)),
        dims={"coefficient": ["feature"]},
        coords={"feature": names, "input": list(features)},
        ratios={"coefficient": "hazard ratio"},
        prior=f"log hazard and every coefficient Normal(0, {prior_scale:g})",
        name="survival",
    )
'''
_TEST = '''\
"""The few-round posterior of the study against NUTS on the pooled rows."""

from pathlib import Path

import jax
import numpy as np
from numpyro.infer import MCMC, NUTS

import fald
from fald.study.schema import load_study


def test_the_posterior_is_that_of_nuts():
    study = load_study(Path(__file__).parents[1] / "study.toml")
    data = study.read_data()
    model = study.build_model(data.features)
    tree = fald.fit(0, model, data, progress=False)
    assert tree.attrs["verdict"] == "reached"

    def energy(position):
        return -model.logprior_fn(position) - model.loglikelihoods(position, data.rows).sum()

    nuts = MCMC(NUTS(potential_fn=energy), num_warmup=500, num_samples=2000, progress_bar=False)
    nuts.run(jax.random.key(1), init_params=model.initial_position)
    for name, draws in nuts.get_samples().items():
        found = tree["posterior"][name].mean(("chain", "draw")).values
        np.testing.assert_allclose(found, draws.mean(0), rtol=0, atol=0.15 * float(draws.std(0).max()))
'''
_STUDY = """\
title = "Time to relapse at three hospitals"

[data]
files = { $files }
target = "years"
features = ["relapsed", "treated"]

[model]
family = "$name:survival"

[model.options]
prior-scale = 2.5
"""
_POLICY = """\
# What a site allows: it runs no model that is not part of fald unless it is named here.
allowed-models = ["$name:survival"]
max-seconds = 120         # for one request
max-megabytes = 4096      # beyond what fald itself takes
"""


def write_model(folder: Path) -> list[Path]:
    """Write the package into a new folder, whose name it gets; returns the files.

    Raises
    ------
    ConfigError
        If the folder exists, or its name is none for a package.
    """
    name = folder.name
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ConfigError(
            f"{name!r} is no name for a package", hint="small letters, digits and single hyphens: my-model"
        )
    if folder.exists():
        raise ConfigError(f"{folder} already exists", hint="choose another name")
    files = ", ".join(f'{site} = "{site}.csv"' for site in SITES)
    words = {"name": name, "module": name.replace("-", "_"), "files": files}
    texts = {
        "pyproject.toml": Template(_PACKAGE).substitute(words),
        f"{words['module']}/__init__.py": _MODEL,
        "tests/test_model.py": _TEST,
        "study.toml": Template(_STUDY).substitute(words),
        "policy.toml": Template(_POLICY).substitute(words),
        **_tables(),
    }
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / path, text.encode())
    return [folder / path for path in texts]


def _tables() -> dict[str, str]:
    """Made-up patients, followed for five years; treatment halves the hazard."""
    rng, tables = np.random.default_rng(1), {}
    for site, count in SITES.items():
        treated = rng.integers(0, 2, count)
        years = rng.exponential(3.0 * 2.0**treated)
        rows = zip(np.minimum(years, 5.0), (years < 5.0).astype(int), treated)
        lines = [f"{time:.3f},{event},{arm}" for time, event, arm in rows]
        tables[f"{site}.csv"] = "\n".join(["years,relapsed,treated", *lines, ""])
    return tables
