"""The counter-based generator: known answers, laws, independence of streams."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fald.core import keys
from fald.core.keys import (
    Stream,
    chain_key,
    client_key,
    fold,
    integers,
    key_words,
    normals,
    stream_key,
    threefry,
)

KEY = jax.random.key(7)


@pytest.mark.parametrize(
    ("key", "counter", "answer"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_known_answers(key, counter, answer):
    words = threefry(jnp.asarray(key, jnp.uint32), *(jnp.asarray(c, jnp.uint32) for c in counter))
    assert tuple(int(w) for w in words) == answer


def standard_normal_problems(z):
    """Deviations in standard errors of the first four moments, and the KS p-value."""
    n = len(z)
    moments = {
        "mean": z.mean() * np.sqrt(n),
        "variance": (np.mean(z**2) - 1) / np.sqrt(2 / n),
        "third": np.mean(z**3) / np.sqrt(15 / n),
        "fourth": (np.mean(z**4) - 3) / np.sqrt(96 / n),
    }
    return [k for k, v in moments.items() if abs(v) > 4] + (
        ["ks"] if stats.kstest(z, "norm").pvalue < 1e-4 else []
    )


def test_normals_are_standard_normal():
    z = np.asarray(normals(KEY, 3, 1_000_000), np.float64)
    assert standard_normal_problems(z) == []
    assert np.all(np.isfinite(z))
    # the twins: a scale wrong by half a per cent, and a triangular law of the same variance
    assert "variance" in standard_normal_problems(z * 1.005)
    u = np.random.default_rng(0).random((2, 1_000_000))
    assert "ks" in standard_normal_problems((u[0] - u[1]) * np.sqrt(6))


def errors_of_inversion(transform):
    """Largest error against Φ⁻¹ in double precision, over words of every size and both signs."""
    small = np.arange(2000)
    spread = np.geomspace(2000, 2**32 - 1, 200_000).astype(np.uint64)
    words = np.concatenate([small, spread, 2**32 - 1 - small]).astype(np.uint32)
    chance = ((words >> 1).astype(np.float64) + 0.5) * 2.0**-32
    exact = -stats.norm.ppf(chance) * np.where(words & 1, -1.0, 1.0)
    return np.abs(np.asarray(transform(jnp.asarray(words)), np.float64) - exact).max()


def test_words_are_inverted_in_both_tails_and_between(monkeypatch):
    assert errors_of_inversion(keys.normal_of_word) < 3e-6
    # the twin: a coefficient wrong in its fifth digit
    monkeypatch.setattr(keys, "_UPPER", tuple(c * (1 + 1e-4 * (i == 2)) for i, c in enumerate(keys._UPPER)))
    assert errors_of_inversion(keys.normal_of_word) > 1e-5


def test_normals_in_double_precision():
    with jax.enable_x64(True):
        z = np.asarray(normals(KEY, 3, 200_000))
    assert z.dtype == np.float64
    assert standard_normal_problems(z) == []
    assert len(np.unique(z)) == len(z)


def streams(count=4000):
    """Normals of neighbouring addresses: chains, rounds, streams, clients and steps that differ by one."""
    out = {}
    for chain in (0, 1):
        for round_index in (0, 1):
            for stream in (Stream.SHARED_NOISE, Stream.CLIENT_NOISE):
                base = stream_key(chain_key(KEY, chain), round_index, stream)
                for client in (0, 1):
                    for step in (0, 1):
                        address = (chain, round_index, int(stream), client, step)
                        out[address] = np.asarray(normals(client_key(base, client), step, count), np.float64)
    return out


def test_streams_are_uncorrelated():
    z = np.stack(list(streams().values()))
    correlations = np.corrcoef(z)[np.triu_indices(len(z), 1)]
    assert np.max(np.abs(correlations)) * np.sqrt(z.shape[1]) < 4.5
    lagged = [np.corrcoef(row[:-1], row[1:])[0, 1] for row in z]
    assert np.max(np.abs(lagged)) * np.sqrt(z.shape[1]) < 4.5
    # the twin: two streams that share one part in five are found
    mixed = z[0] * 0.2 + z[1] * np.sqrt(0.96)
    assert abs(np.corrcoef(z[0], mixed)[0, 1]) * np.sqrt(z.shape[1]) > 4.5


def test_a_stream_does_not_depend_on_how_much_of_it_is_used():
    key = stream_key(chain_key(KEY, 0), 5, Stream.BATCH)
    np.testing.assert_array_equal(integers(key, 0, 9, 1000)[:4], integers(key, 0, 4, 1000))
    np.testing.assert_array_equal(normals(key, 0, 9)[:4], normals(key, 0, 4))
    vmapped = jax.vmap(lambda c: normals(client_key(key, c), 2, 6))(jnp.arange(3))
    np.testing.assert_array_equal(vmapped[1], normals(client_key(key, 1), 2, 6))


@pytest.mark.parametrize("span", [1, 2, 7, 1000, 65_536, 2**31 - 1])
def test_integers_are_uniform(span):
    n = 200_000
    x = np.asarray(integers(KEY, 1, n, span))
    assert x.min() >= 0
    assert x.max() < span
    bins = min(span, 50)
    counts = np.bincount((x.astype(np.int64) * bins) // span, minlength=bins)
    expected = np.diff(np.ceil(np.arange(bins + 1) * span / bins)) / span * n
    assert bins == 1 or stats.chisquare(counts, expected).pvalue > 1e-4


def test_keys_of_other_generators_are_taken():
    assert key_words(jax.random.key(0, impl="rbg")).shape == (2,)
    assert not np.array_equal(key_words(jax.random.key(0)), key_words(jax.random.key(1)))
    assert fold(key_words(KEY), 1, 2).dtype == jnp.uint32
