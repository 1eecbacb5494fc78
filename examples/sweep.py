"""Sweep local steps and participation, and compare the sampler with its exact law.

Fifty clients hold twenty rows (a, y) each, y = a·θ + noise, so every energy is a parabola. Its curvature
differs from client to client, because the sizes of a do. For such energies `fald.gaussian` knows mean and sd.
"""

import numpy as np

import fald
from fald import gaussian

rng = np.random.default_rng(0)
NUM_CLIENTS, ROWS = 50, 20

clients = {}
for c in range(NUM_CLIENTS):
    a = rng.uniform(0.5, 1.5) * rng.normal(size=ROWS)
    clients[f"client-{c:02d}"] = (a, rng.normal(0.0, 0.5) * a + rng.normal(size=ROWS))

data = fald.FederatedData.from_arrays(clients)
model = fald.Model(
    logprior_fn=lambda theta: 0.0 * theta,  # flat
    loglikelihood_fn=lambda theta, row: -0.5 * (row[1] - row[0] * theta) ** 2,
    initial_position=0.0,
)

a, y = data.rows
square, product = (sum_.reshape(NUM_CLIENTS, ROWS).sum(1) for sum_ in (a * a, a * y))
energies = (square / data.weights)[:, None, None], (product / square)[:, None], data.weights
target = gaussian.target(*energies)
centre, sd = target.mean[0], target.covariance[0, 0] ** 0.5

print("shift of the mean and sd of the draws, in posterior sd (law: exact, draws: sampled)")
print(f"{'participants':>12}  {'K':>3}  {'shift: law':>10}  {'draws':>6}  {'sd: law':>8}  {'draws':>6}")
for participation in (fald.full(), fald.without_replacement(10)):
    for local_steps in (1, 10, 50):
        settings = {
            "local_steps": local_steps,
            "step_size": 2e-5,
            "correlation": 0.5,
            "participation": participation,
        }
        law = gaussian.stationary(*energies, **settings)
        draws = fald.sample(
            0, model, data, num_rounds=2500, num_warmup=500, num_chains=16, progress=False, **settings
        )["posterior"]["position"]
        print(
            f"{participation.num_participants or 'all':>12}  {local_steps:>3}  "
            f"{(law.mean[0] - centre) / sd:>10.2f}  {(float(draws.mean()) - centre) / sd:>6.2f}  "
            f"{law.covariance[0, 0] ** 0.5 / sd:>8.2f}  {float(draws.std()) / sd:>6.2f}"
        )
