"""Private runs: clipping, budgets, secret noise, statements, and an audit by attack."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fald
from fald.calculus.gradients import Batch, gradient_fn
from fald.core.errors import PrivacyError
from fald.privacy import Ledger, Protection, RunSettings, account
from fald.results.predict import flat_positions

SLOPE = fald.Model(
    logprior_fn=lambda p: 0.0 * p["theta"],
    loglikelihood_fn=lambda p, x: x * p["theta"],
    initial_position={"theta": jnp.array(0.0)},
)


def regression_data(seed=0):
    rng = np.random.default_rng(seed)
    return fald.FederatedData.from_arrays(
        {f"s{i}": (rng.normal(size=(n, 2)), rng.integers(0, 2, n)) for i, n in enumerate((40, 20, 8))}
    )


LOGISTIC = fald.models.logistic_regression(2)
RUN = {"local_steps": 2, "step_size": 1e-4, "num_chains": 1, "clip_norm": 1.0, "progress": False}


# clipping


def test_clipped_gradient_is_the_sum_of_clipped_rows_and_the_prior_is_not_clipped():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(12, 2)) * 5, rng.integers(0, 2, 12).astype(float)
    theta = jnp.asarray(rng.normal(size=3))
    rows = (jnp.asarray(x), jnp.asarray(y))
    found = gradient_fn(LOGISTIC, 30, 0.7)(theta, Batch(rows, None, jnp.asarray(12)))
    residual = y - 1 / (1 + np.exp(-(x @ theta[:2] + theta[2])))
    each = residual[:, None] * np.column_stack([x, np.ones(12)])
    norms = np.linalg.norm(each, axis=1)
    assert norms.min() < 0.7 < norms.max()
    clipped = each * np.minimum(1, 0.7 / norms)[:, None]
    prior = np.asarray(theta) / 2.5**2
    np.testing.assert_allclose(found, prior - 30 / 12 * clipped.sum(axis=0), rtol=2e-4, atol=1e-4)
    # the twin: without clipping, or with the batch clipped as a whole, the answer is another
    assert np.max(np.abs(found - (prior - 30 / 12 * each.sum(axis=0)))) > 0.1


def test_masked_rows_do_not_enter_the_clipped_gradient():
    rows = (jnp.array([[1.0, 2.0], [3.0, -1.0], [9.0, 9.0]]), jnp.array([1.0, 0.0, 1.0]))
    theta = jnp.array([0.3, -0.2, 0.1])
    masked = Batch(rows, jnp.array([True, True, False]), jnp.asarray(2))
    short = Batch(jax.tree.map(lambda a: a[:2], rows), None, jnp.asarray(2))
    gradient = gradient_fn(LOGISTIC, 10, 0.5)
    np.testing.assert_allclose(gradient(theta, masked), gradient(theta, short), rtol=1e-6)


@pytest.mark.slow
def test_a_huge_clip_norm_changes_nothing_and_a_small_one_is_labelled():
    data = regression_data()
    free = fald.sample(0, LOGISTIC, data, num_rounds=30, **{**RUN, "clip_norm": None})
    wide = fald.sample(0, LOGISTIC, data, num_rounds=30, **{**RUN, "clip_norm": 1e6})
    tight = fald.sample(0, LOGISTIC, data, num_rounds=30, **{**RUN, "clip_norm": 0.1})
    a, b, c = (t["posterior"]["coefficient"].values for t in (free, wide, tight))
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert np.max(np.abs(a - c)) > 1e-3
    assert free.attrs["pseudo_posterior"] == 0
    assert tight.attrs["pseudo_posterior"] == 1


# secrets


def test_private_noise_cannot_be_repeated_from_the_seed():
    data, privacy = regression_data(), Protection(delta=1e-4)
    first, again = (fald.sample(0, LOGISTIC, data, num_rounds=20, privacy=privacy, **RUN) for _ in range(2))
    assert not np.array_equal(first["posterior"]["coefficient"], again["posterior"]["coefficient"])
    assert "energy" not in first["sample_stats"]
    assert "data" not in first.attrs  # a hash of the rows would tell the last unknown one
    assert data.fingerprint() not in str(first.attrs)
    assert json.loads(first.attrs["privacy"])["guarantee"] is True
    seeded = Protection(delta=1e-4, client_noise="seeded")
    one, two = (fald.sample(0, LOGISTIC, data, num_rounds=20, privacy=seeded, **RUN) for _ in range(2))
    np.testing.assert_array_equal(one["posterior"]["coefficient"], two["posterior"]["coefficient"])
    assert one.attrs["privacy_statement"].startswith("Simulation, no privacy")
    assert json.loads(one.attrs["privacy"])["guarantee"] is False


def test_no_secret_is_written_to_disk(tmp_path, monkeypatch):
    words = np.array([0xDEADBEEF, 0x12345678], np.uint32)
    monkeypatch.setattr("fald.langevin.sampling.secret_words", lambda: words)
    privacy = Protection(delta=1e-4)
    data = regression_data()
    tree = fald.sample(0, LOGISTIC, data, num_rounds=20, privacy=privacy, checkpoint=tmp_path / "c", **RUN)
    fald.save(tree, tmp_path / "t.nc")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert words.tobytes() not in content
            assert str(words[0]).encode() not in content


# budgets


def test_the_run_stops_before_the_round_that_exceeds_the_budget():
    data = regression_data()
    step = float(np.float32(1e-4))  # as the sampler has it
    settings = RunSettings(sizes=data.sizes, local_steps=2, num_rounds=400, step_size=step, clip_norm=1.0)
    ledger = Ledger(settings, delta=1e-4)
    limit = ledger.worst(150)
    privacy = Protection(delta=1e-4, max_epsilon=limit * (1 + 1e-9))
    with pytest.raises(PrivacyError, match="stopped after round 150 of 400") as caught:
        fald.sample(0, LOGISTIC, data, num_rounds=400, privacy=privacy, **RUN)
    assert caught.value.exit_code == 6
    stats = caught.value.tree["sample_stats"]
    assert stats["round"].values[-1] == 150
    epsilon = stats["epsilon"].values
    assert np.all(np.diff(epsilon) >= 0)
    assert epsilon[-1] == pytest.approx(limit, rel=1e-6)
    assert ledger.worst(151) > limit
    for r in (1, 40, 150):
        assert epsilon[r - 1] >= ledger.worst(r) * (1 - 1e-9)


def test_a_budget_without_room_for_one_round_spends_nothing():
    privacy = Protection(delta=1e-4, max_epsilon=1e-4)
    with pytest.raises(PrivacyError, match="does not allow one more round"):
        fald.sample(0, LOGISTIC, regression_data(), num_rounds=10, privacy=privacy, **RUN)


def test_a_result_can_be_accounted_for_again():
    data = regression_data()
    privacy = Protection(delta=1e-4)
    schedule = fald.paper_decay(5000.0, 10.0)
    for change in ({}, {"step_size": schedule}, {"participation": fald.with_replacement(2), "num_chains": 2}):
        tree = fald.sample(
            0, LOGISTIC, data, num_rounds=10, num_warmup=4, privacy=privacy, **{**RUN, **change}
        )
        stated = json.loads(tree.attrs["privacy"])["epsilon"]
        assert account(tree, delta=1e-4).worst == pytest.approx(stated, rel=1e-3)
    assert account(tree, delta=1e-4, method="rdp").worst > stated


@pytest.mark.parametrize("view", ["server", "summed"])
def test_a_result_shows_of_a_site_no_more_than_its_epsilon_counts(view):
    """How far each site moved is seen by a server, and not by somebody who sees sums alone."""
    how = Protection(delta=1e-5, view=view)
    stats = fald.sample(0, LOGISTIC, regression_data(), num_rounds=3, privacy=how, **RUN)["sample_stats"]
    assert bool(np.isnan(stats["drift"].values).all()) == (view == "summed")


def test_chains_are_counted():
    data = regression_data()
    said = []
    for chains in (1, 4):
        tree = fald.sample(
            0, LOGISTIC, data, num_rounds=10, privacy=Protection(delta=1e-4), **{**RUN, "num_chains": chains}
        )
        said.append(json.loads(tree.attrs["privacy"])["epsilon"])
    assert said[1] > 1.5 * said[0]


def test_rounds_lost_in_a_crash_are_counted(tmp_path):
    data, privacy = regression_data(), Protection(delta=1e-4)
    folder = tmp_path / "c"
    fald.sample(0, LOGISTIC, data, num_rounds=30, privacy=privacy, checkpoint=folder, **RUN)
    begun = folder / "begun.json"
    assert json.loads(begun.read_text())["rounds"] == 30
    # as if twenty more rounds had been answered and then lost
    begun.write_text(json.dumps({"rounds": 50}))
    tree = fald.sample(0, LOGISTIC, data, num_rounds=60, privacy=privacy, checkpoint=folder, **RUN)
    counted = json.loads(tree.attrs["privacy"])["settings"]["num_rounds"]
    assert counted == 80
    assert json.loads(begun.read_text())["rounds"] == 80


# refusals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"correlation": 1.0}, "correlation of a private run must be"),
        ({"clip_norm": None}, "no bound on a row's gradient"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_runs_without_privacy_are_refused(change, words):
    with pytest.raises(PrivacyError, match=words):
        fald.sample(
            0, LOGISTIC, regression_data(), num_rounds=5, privacy=Protection(delta=1e-4), **{**RUN, **change}
        )


def test_declared_bounds_replace_clipping_and_are_enforced():
    data = regression_data().bounded(-1.5, 1.5)
    assert np.max(np.abs(data.rows[0])) == 1.5
    free = {**RUN, "clip_norm": None}
    tree = fald.sample(0, LOGISTIC, data, num_rounds=5, privacy=Protection(delta=1e-4), **free)
    document = json.loads(tree.attrs["privacy"])
    assert document["settings"]["sensitivity"] == pytest.approx(2 * np.sqrt(1 + 2 * 1.5**2))
    assert document["pseudo_posterior"] is False
    # no two rows within the bounds have gradients further apart, whatever the position
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(300):
        theta = rng.normal(size=3) * 5
        x = rng.uniform(-1.5, 1.5, (2, 2)).round(0) * 1.5
        y = rng.integers(0, 2, 2)
        g = [np.append(x[i], 1) * (y[i] - 1 / (1 + np.exp(-(x[i] @ theta[:2] + theta[2])))) for i in range(2)]
        worst = max(worst, np.linalg.norm(g[0] - g[1]))
    assert worst <= document["settings"]["sensitivity"]
    # a model with unbounded gradients cannot lean on bounded features
    linear = fald.models.linear_regression(2, noise_scale=1.0)
    with pytest.raises(PrivacyError, match="no bound"):
        fald.sample(0, linear, data, num_rounds=5, privacy=Protection(delta=1e-4), **free)


# the audit


AUDIT = {"local_steps": 2, "step_size": 0.05, "num_rounds": 3, "clip_norm": 1.0}
DELTA = 1e-3
RUNS = 20_000


def final_positions(canary, seed, **change):
    """Where independent runs end on a client whose first row is the canary; the server sees that."""
    rows = np.concatenate([[canary], np.full(9, 0.2)])
    data = fald.FederatedData.from_arrays({"only": rows})
    settings = {**AUDIT, **change}
    tree = fald.sample(seed, SLOPE, data, **settings, num_chains=RUNS, num_warmup=2, progress=False)
    return flat_positions(SLOPE, tree)[:, 0].astype(float)


def empirical_epsilon(one, other):
    """A lower bound on ε that holds with 97.5% confidence, from a threshold chosen on separate runs."""
    half = len(one) // 2
    grid = np.quantile(np.concatenate([one[:half], other[:half]]), np.linspace(0.01, 0.99, 99))

    def log_ratio(threshold, a, b):
        hits, alarms = np.sum(a > threshold), np.sum(b > threshold)
        return np.log(max(hits / len(a) - DELTA, 1e-9) / ((alarms + 1) / len(b)))

    best = max(grid, key=lambda t: log_ratio(t, one[:half], other[:half]))
    hits, alarms, n = np.sum(one[half:] > best), np.sum(other[half:] > best), len(one) - half
    least_hits = stats.beta.ppf(0.0125, hits, n - hits + 1)
    most_alarms = stats.beta.ppf(0.9875, alarms + 1, n - alarms)
    return np.log(max(least_hits - DELTA, 1e-9) / most_alarms)


@pytest.mark.parametrize("batch_size", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_an_attack_stays_below_the_stated_epsilon_and_breaks_weak_noise(batch_size):
    stated = account(RunSettings(sizes=[10], batch_size=batch_size, **AUDIT), delta=DELTA).worst
    canaries = (100.0, -100.0)
    honest = [final_positions(c, seed, batch_size=batch_size) for seed, c in enumerate(canaries)]
    found = empirical_epsilon(*honest)
    assert 0.2 * stated < found < stated
    # a quarter of the noise under the same statement
    weak = [
        final_positions(c, seed, batch_size=batch_size, temperature=1 / 16) for seed, c in enumerate(canaries)
    ]
    assert empirical_epsilon(*weak) > stated
    # and no clipping
    unclipped = [
        final_positions(c, seed, batch_size=batch_size, clip_norm=None) for seed, c in enumerate(canaries)
    ]
    assert empirical_epsilon(*unclipped) > stated
