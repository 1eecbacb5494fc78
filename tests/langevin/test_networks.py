"""Networks with convolutions: chains that do not change each other, and a bounded look at the step size."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald.calculus import gradients
from fald.lab import networks

PIXELS = 36


def small_network():
    """A convolution of 6 × 6 images, and two classes."""
    start = {
        "kernel": 0.3 * jax.random.normal(jax.random.key(0), (3, 3, 1, 2)),
        "out": 0.1 * jnp.ones((2, 2)),
    }

    def logits(p, image):
        x = jnp.asarray(image, jnp.float32).reshape(1, 6, 6, 1) / 255
        x = jax.lax.conv_general_dilated(
            x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.mean(jax.nn.relu(x), (0, 1, 2)) @ p["out"]

    return fald.Model(
        lambda p: -0.5 * sum(jnp.sum(a**2) for a in jax.tree.leaves(p)),
        lambda p, row: jax.nn.log_softmax(logits(p, row[0]))[row[1]],
        initial_position=start,
        predict_fn=lambda p, image: jax.nn.softmax(logits(p, image)),
    )


def small_data(sizes=(30, 30, 20)):
    rng = np.random.default_rng(0)
    return fald.FederatedData.from_arrays(
        {
            str(i): (rng.integers(0, 256, (n, PIXELS), dtype=np.uint8), rng.integers(0, 2, n, dtype=np.uint8))
            for i, n in enumerate(sizes)
        }
    )


def draws(**changes):
    settings = {"num_rounds": 4, "local_steps": 3, "step_size": 1e-4, "batch_size": 8, "num_chains": 1}
    model, data = changes.pop("model", None) or small_network(), changes.pop("data", None) or small_data()
    return fald.sample(3, model, data, progress=False, **{**settings, **changes})


@pytest.mark.slow
@pytest.mark.parametrize(
    "participation",
    [fald.full(), fald.with_replacement(2)],
    ids=["full", "drawn"],
)
def test_a_chain_is_the_same_alone_and_beside_others(participation):
    one, three = (draws(num_chains=n, participation=participation) for n in (1, 3))
    np.testing.assert_allclose(
        three["posterior"]["kernel"].values[:1], one["posterior"]["kernel"].values, rtol=1e-5, atol=1e-6
    )
    assert len(np.unique(three["posterior"]["out"].values[:, -1, 0, 0])) == 3
    assert "channels last" in one.attrs["layout"]


def test_a_step_that_is_too_large_is_said_before_the_first_round():
    with pytest.warns(UserWarning, match=r"step-size 0\.5 times the curvature .* try step-size"):
        found = draws(step_size=0.5, num_rounds=1)
    assert found.attrs["step_times_curvature"] > 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draws().attrs["step_times_curvature"] < 1
        assert "step_times_curvature" not in draws(step_size=0.5, num_rounds=1, step_check=False).attrs


def test_a_look_at_curvatures_takes_bounded_work():
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (20_000, 784), dtype=np.uint8), rng.integers(0, 10, 20_000, dtype=np.uint8)
    data = fald.FederatedData(rows, np.arange(21) * 1000, tuple(f"{i:02d}" for i in range(20)))
    every = list(range(20))
    # a regression is cheap: all is looked at; a network is not
    assert gradients.affordable(fald.models.softmax_regression(PIXELS, 2), small_data((5, 5)), [0, 1], 12)[
        0
    ] == [
        0,
        1,
    ]
    clients, taken = gradients.affordable(networks.cnn(), data, every, 12)
    cost = 12 * len(clients) * taken * gradients._operations(networks.cnn(), data) * 2.5
    assert cost <= 1.5e10
    assert 16 <= taken < 1000


PHASES = [
    fald.schedules.Phase(4, 1e-4, temperature=0.0),
    *2 * [fald.schedules.Phase(4, 1e-4, last_step_size=1e-5, temperature=0.1, draws=3)],
]


def streamed(folder, kind, *, killed_at=None):
    """A run in phases that keeps no draws in memory: its callback's rounds, and what its sinks gathered."""
    data, seen = small_data(), []
    images = data.rows
    if kind == "read":
        own = {name: data.client(name) for name in data.names}
        data = fald.FederatedData.from_read(
            lambda client, index: tuple(a[index] for a in own[client]), dict(zip(data.names, data.sizes))
        )

    def look(round_number, positions, stats):
        seen.append(round_number)
        if round_number == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sinks = [
        fald.sinks.RunningMoments(rank=2),
        fald.sinks.ProbeCurve(*images, batch_size=20),
        fald.sinks.DrawFiles(Path(folder) / "draws", rounds_per_file=4),
    ]
    fald.sample(
        3, small_network(), data, phases=PHASES, local_steps=3, batch_size=8, num_chains=2, progress=False,
        sinks=sinks, callback=look, checkpoint=fald.Checkpoint(Path(folder) / "run", rounds=3, seconds=1e9),
    )  # fmt: skip
    stored = np.concatenate([d["position"].values for d in sinks[2].datasets()])
    return seen, {**sinks[0].arrays(), **sinks[1].arrays(), "stored": stored}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "read"])
def test_a_run_with_sinks_that_was_killed_goes_on_to_the_same_draws(kind, tmp_path):
    script = "import sys; sys.path[:0] = sys.argv[1:3]; from test_networks import streamed; "
    script += "streamed(sys.argv[3], sys.argv[4], killed_at=8)"
    here = Path(__file__).parent
    command = [sys.executable, "-c", script, *map(str, (here, here.parent, tmp_path / "killed")), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    seen, found = streamed(tmp_path / "killed", kind)
    every, wanted = streamed(tmp_path / "whole", kind)
    assert every == [6, 7, 8, 10, 11, 12]
    assert seen == [7, 8, 10, 11, 12]  # the state was saved after round 6, and killed in round 8
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert wanted["stored"].shape == (6, 2, 22)
