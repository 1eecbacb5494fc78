"""A convolutional network over ten clients: FedAvg as a start, cyclical FA-LD, calibration along the run.

    python examples/network.py --rows 60000 --rounds 200     # Fashion-MNIST
    python examples/network.py --rows 500 --rounds 12        # to see that it works
"""  # fmt: skip

import argparse

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fald

ask = argparse.ArgumentParser()
ask.add_argument("--rows", type=int, default=60_000)
ask.add_argument("--rounds", type=int, default=200)
ask.add_argument("--out", default="network.png")
asked = ask.parse_args()
CYCLE = max(2, asked.rounds // 6)

images = fald.datasets.load("fashion-mnist")
rows = images.train_images[: asked.rows], images.train_labels[: asked.rows]
data = fald.partition.dirichlet(rows, rows[1], 10, concentration=0.3)
keys = jax.random.split(jax.random.key(0), 4)
shapes = {"a": (5, 5, 1, 16), "b": (3, 3, 16, 32), "c": (7 * 7 * 32, 64), "d": (64, 10)}
position = {
    name: {"w": jax.random.normal(k, s) * np.sqrt(2 / np.prod(s[:-1])), "b": jnp.zeros(s[-1])}
    for k, (name, s) in zip(keys, shapes.items())
}


def logits(p, image):
    x = jnp.asarray(image, jnp.float32).reshape(1, 28, 28, 1) / 255
    for layer in (p["a"], p["b"]):
        x = jax.lax.conv_general_dilated(
            x, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + layer["b"])
        x = x.reshape(1, x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).max(axis=(2, 4))
    return jax.nn.relu(x.reshape(-1) @ p["c"]["w"] + p["c"]["b"]) @ p["d"]["w"] + p["d"]["b"]


model = fald.Model(
    logprior_fn=lambda p: -5.0 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)),
    loglikelihood_fn=lambda p, row: jax.nn.log_softmax(logits(p, row[0]))[row[1]],
    initial_position=position,
    predict_fn=lambda p, image: jax.nn.softmax(logits(p, image)),
)
eta, Phase = 0.05 / data.num_rows, fald.schedules.Phase
start = Phase(asked.rounds - 4 * CYCLE, eta, temperature=0.0)  # FedAvg
explore = Phase(CYCLE // 2, eta, last_step_size=eta / 10, temperature=0.0)
collect = Phase(CYCLE - CYCLE // 2, eta / 10, temperature=0.1, draws=max(1, CYCLE // 10))
probe = fald.sinks.ProbeCurve(images.test_images[:2000], images.test_labels[:2000])
fald.sample(0, model, data, phases=[start, *4 * [explore, collect]], local_steps=10, batch_size=32,
            num_chains=1, sinks=[probe])  # fmt: skip
probe.curve().plot(x="round", y=["accuracy", "nll", "ece"], subplots=True, marker="o")
plt.savefig(asked.out)
print(probe.curve().tail(1).to_string(index=False))
