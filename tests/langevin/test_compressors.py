"""Compressors: unbiased or contractive as they promise, and as short as they say."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald.core.errors import ConfigError
from fald.langevin.compressors import QSGD, qsgd, send, top_k

LIMIT = 4.5
VECTOR = np.array([0.3, -1.2, 0.01, 2.0, 0.0, -0.4], np.float32)


def repeated(compressor, vector, count=4000):
    keys = jax.random.split(jax.random.key(3), count)
    return np.asarray(jax.vmap(lambda key: send(compressor, key, jnp.asarray(vector))[0])(keys), float)


def deviation_of_mean(sample, mean):
    spread = sample.std(0) / math.sqrt(len(sample))
    return np.abs((sample.mean(0) - mean) / np.where(spread > 0, spread, np.inf)).max()


def rounding_variance(vector, levels):
    norm = np.linalg.norm(vector.astype(float))
    scaled = levels * np.abs(vector.astype(float)) / norm
    chance = scaled - np.floor(scaled)
    return float(np.sum((norm / levels) ** 2 * chance * (1 - chance)))


def excess(sample, vector, variance):
    """Mean squared error against ``variance``, in standard errors."""
    squares = ((sample - vector) ** 2).sum(1)
    return abs(squares.mean() - variance) / (squares.std() / math.sqrt(len(squares)))


class Twice(QSGD):
    """The mistake of quantising what was quantised."""

    def compress(self, rng_key, vector, step=0):
        once = super().compress(rng_key, vector, step)
        return super().compress(rng_key, self.restore(once, vector.shape[0]), step + 1)


class Down(QSGD):
    """The mistake of rounding down."""

    def compress(self, rng_key, vector, step=0):
        norm = jnp.linalg.norm(vector)
        level = jnp.floor(self.levels * jnp.abs(vector) / norm) * jnp.sign(vector)
        return super().compress(rng_key, vector)._replace(levels=level.astype(jnp.int32))


@pytest.mark.parametrize("levels", [1, 4, 16])
def test_quantiser_is_unbiased_with_the_variance_of_its_rounding(levels):
    sample = repeated(qsgd(levels), VECTOR)
    variance = rounding_variance(VECTOR, levels)
    assert deviation_of_mean(sample, VECTOR) < LIMIT
    assert excess(sample, VECTOR, variance) < LIMIT
    norm = np.linalg.norm(VECTOR) ** 2
    assert variance <= qsgd(levels).variance(len(VECTOR)) * norm


def test_the_bound_of_a_quantiser_is_the_smaller_of_two():
    assert qsgd(4).variance(400) == pytest.approx(np.sqrt(400) / 4)
    assert qsgd(4).variance(9) == pytest.approx(9 / 16)


@pytest.mark.parametrize(("fraction", "dim", "kept", "size"), [
    (0.07, 100, 7, 7 + 28), (0.071, 100, 8, 7 + 32), (0.001, 10, 1, 1 + 4), (0.25, 512, 128, 144 + 512),
    (0.5, 2, 1, 1 + 4), (1.0, 1, 1, 4),
])  # fmt: skip
def test_as_many_entries_as_the_fraction_says_and_no_longer_places_than_they_need(fraction, dim, kept, size):
    compressor = top_k(fraction)
    assert compressor.kept(dim) == kept
    message = compressor.compress(jax.random.key(0), jnp.arange(dim, dtype=jnp.float32))
    assert len(compressor.encode(message, dim)) == size


def test_mistaken_quantisers_are_rejected():
    assert excess(repeated(Twice(4), VECTOR), VECTOR, rounding_variance(VECTOR, 4)) > LIMIT
    down = repeated(Down(4), VECTOR)
    assert np.abs(down.mean(0) - VECTOR).max() > 0.1  # no scatter to measure it by


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_top_k_contracts(fraction):
    compressor = top_k(fraction)
    rng = np.random.default_rng(0)
    for vector in [VECTOR, np.ones(6, np.float32), *rng.normal(size=(20, 6)).astype(np.float32)]:
        sent, _ = send(compressor, jax.random.key(0), jnp.asarray(vector))
        left = float(np.sum((np.asarray(sent) - vector) ** 2))
        assert left <= (1 - compressor.kept(6) / 6) * float(np.sum(vector**2)) * (1 + 1e-6)
    # a compressor that keeps as many entries, but not the largest, does not
    kept = compressor.kept(6)
    if kept < 6:
        smallest = np.sort(np.abs(VECTOR))[: 6 - kept]
        largest = np.sort(np.abs(VECTOR))[kept:]
        assert np.sum(largest**2) > (1 - kept / 6) * np.sum(VECTOR**2) >= np.sum(smallest**2)


@pytest.mark.parametrize(
    "compressor", [qsgd(1), qsgd(16), qsgd(1000), qsgd(math.inf), top_k(0.01), top_k(0.4)]
)
@pytest.mark.parametrize("dim", [1, 2, 9, 500])
def test_bytes_are_those_of_the_encoding_and_read_back(compressor, dim):
    vector = jnp.asarray(np.random.default_rng(dim).normal(size=dim), jnp.float32)
    for case in (vector, jnp.zeros(dim), vector.at[0].set(1e6)):
        message = compressor.compress(jax.random.key(1), case)
        content = compressor.encode(message, dim)
        assert len(content) == int(compressor.num_bytes(message, dim))
        back = compressor.decode(content, dim)
        for a, b in zip(jax.tree.leaves(message), jax.tree.leaves(back)):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        np.testing.assert_array_equal(
            compressor.restore(jax.tree.map(jnp.asarray, back), dim), compressor.restore(message, dim)
        )


def test_quantised_gradients_of_a_large_model_are_four_times_shorter():
    dim = 7850
    vector = jnp.asarray(np.random.default_rng(0).normal(size=dim), jnp.float32)
    for case in (vector, vector**3, jnp.ones(dim), vector.at[0].set(1e4)):
        message = qsgd(16).compress(jax.random.key(0), case)
        assert 4 * len(qsgd(16).encode(message, dim)) <= 4 * dim


def test_double_precision_norms_are_encoded_whole():
    with jax.enable_x64(True):
        vector = jnp.asarray(np.random.default_rng(0).normal(size=50))
        message = qsgd(16).compress(jax.random.key(1), vector)
        content = qsgd(16).encode(message, 50)
        assert len(content) == int(qsgd(16).num_bytes(message, 50))
        assert qsgd(16).decode(content, 50).norm == float(message.norm)


@pytest.mark.parametrize("levels", [0, -1, 2.5, "16", True, 10**6])
def test_levels_that_make_no_sense_are_refused(levels):
    with pytest.raises(ConfigError, match="levels"):
        qsgd(levels)


@pytest.mark.parametrize("fraction", [0, 1.1, -0.5, "a", True])
def test_fractions_that_make_no_sense_are_refused(fraction):
    with pytest.raises(ConfigError, match="fraction"):
        top_k(fraction)


@pytest.mark.slow
def test_compressors_fit_the_uploads_of_fa_ld():
    data = fald.FederatedData.from_arrays({"a": np.ones((3, 2)), "b": np.zeros((2, 2))})
    model = fald.models.gaussian_location(np.eye(2))

    def run(compressor):
        method = fald.samplers.fald(local_steps=2, step_size=0.05, compressor=compressor)
        return fald.sample(0, model, data, method=method, num_rounds=5, progress=False)

    plain, free, coarse = run(None), run(qsgd(math.inf)), run(qsgd(16))
    np.testing.assert_allclose(plain["posterior"]["location"], free["posterior"]["location"], atol=1e-5)
    assert np.abs(plain["posterior"]["location"] - coarse["posterior"]["location"]).max() > 1e-4
    assert (free["cost"]["bytes_up"] == plain["cost"]["bytes_up"]).all()
    with pytest.raises(ConfigError, match="compressor"):
        fald.samplers.fald(local_steps=2, step_size=0.05, compressor="qsgd")
