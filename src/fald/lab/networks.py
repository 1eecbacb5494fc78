"""Networks for 28 × 28 images, in plain JAX: what benchmarks and comparisons run on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fald.problem.model import Model

SIDE = 28
_NUMBERS = ("NHWC", "HWIO", "NHWC")


def cnn(num_classes: int = 10, *, prior_scale: float = 1.0, seed: int = 0) -> Model:
    """Two convolutions (5 × 5 × 16, 3 × 3 × 32) with pooling, then 64 units.

    Weights ~ N(0, prior_scale²·2/fan-in), biases ~ N(0, 2 prior_scale²); the start is a draw of the weights
    with scale 1, and zero biases. Rows are (image as bytes (784,), label).

    Examples
    --------
    >>> cnn().dim
    106122
    """
    shapes = {"a": (5, 5, 1, 16), "b": (3, 3, 16, 32), "c": (7 * 7 * 32, 64), "d": (64, num_classes)}

    def logits_fn(p: Any, x: jax.Array) -> jax.Array:
        for name in "ab":
            x = _pooled(jax.nn.relu(_convolved(x, p[name]) + p[f"{name}_bias"]))
        x = jax.nn.relu(x.reshape(-1) @ p["c"] + p["c_bias"])
        return x @ p["d"] + p["d_bias"]

    return _classifier(shapes, logits_fn, prior_scale=prior_scale, seed=seed, name="cnn")


def perceptron(num_classes: int = 10, *, prior_scale: float = 1.0, seed: int = 0) -> Model:
    """A hundred units between pixels and classes; prior, start and rows as for ``cnn``.

    Examples
    --------
    >>> perceptron().dim
    79510
    """
    shapes = {"a": (SIDE**2, 100), "d": (100, num_classes)}

    def logits_fn(p: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x.reshape(-1) @ p["a"] + p["a_bias"]) @ p["d"] + p["d_bias"]

    return _classifier(shapes, logits_fn, prior_scale=prior_scale, seed=seed, name="perceptron")


def resnet(num_classes: int = 10, *, width: int = 16, prior_scale: float = 1.0, seed: int = 0) -> Model:
    """Three residual blocks of two 3 × 3 convolutions, the second and third with stride 2.

    Without normalisation: the second convolution of each block starts at a tenth of its scale.

    Examples
    --------
    >>> resnet().dim
    77418
    """
    widths = (width, width, 2 * width, 4 * width)
    shapes: dict[str, tuple[int, ...]] = {"in": (3, 3, 1, width)}
    for block, (before, after) in enumerate(pairwise(widths)):
        shapes |= {f"{block}a": (3, 3, before, after), f"{block}b": (3, 3, after, after)}
        if before != after:
            shapes[f"{block}s"] = (1, 1, before, after)
    shapes["out"] = (widths[-1], num_classes)

    def logits_fn(p: Any, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(_convolved(x, p["in"]) + p["in_bias"])
        for block in range(3):
            stride = 2 if block else 1
            inner = jax.nn.relu(_convolved(x, p[f"{block}a"], stride) + p[f"{block}a_bias"])
            if block:
                x = _convolved(x, p[f"{block}s"], stride) + p[f"{block}s_bias"]
            x = jax.nn.relu(x + 0.1 * _convolved(inner, p[f"{block}b"]) + p[f"{block}b_bias"])
        return jnp.mean(x, axis=(0, 1)) @ p["out"] + p["out_bias"]

    return _classifier(shapes, logits_fn, prior_scale=prior_scale, seed=seed, name="resnet")


def _convolved(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    out = jax.lax.conv_general_dilated(x[None], kernel, (stride, stride), "SAME", dimension_numbers=_NUMBERS)
    return out[0]


def _pooled(x: jax.Array) -> jax.Array:
    """The largest of each 2 × 2 pixels."""
    height, width, channels = x.shape
    return x.reshape(height // 2, 2, width // 2, 2, channels).max(axis=(1, 3))


def _classifier(
    shapes: dict[str, tuple[int, ...]], logits_fn: Callable, *, prior_scale: float, seed: int, name: str
) -> Model:
    fan_in = {name: int(np.prod(shape[:-1])) for name, shape in shapes.items()}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    position: dict[str, jax.Array] = {}
    for key, (layer, shape) in zip(keys, shapes.items()):
        position[layer] = jax.random.normal(key, shape) * np.sqrt(2 / fan_in[layer])
        position[f"{layer}_bias"] = jnp.zeros(shape[-1])

    def logprior_fn(p: Any) -> jax.Array:
        weights: Any = sum(fan_in[layer] * jnp.sum(p[layer] ** 2) for layer in shapes)
        biases = sum(jnp.sum(p[f"{layer}_bias"] ** 2) for layer in shapes)
        return -0.25 * (weights + biases) / prior_scale**2

    def logits(p: Any, x: jax.Array) -> jax.Array:
        return logits_fn(
            p, jnp.asarray(x, p["out" if "out" in p else "d"].dtype).reshape(SIDE, SIDE, 1) / 255
        )

    def loglikelihood_fn(p: Any, row: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jax.nn.log_softmax(logits(p, row[0]))[row[1]]

    return Model(
        logprior_fn,
        loglikelihood_fn,
        initial_position=position,
        predict_fn=lambda p, x: jax.nn.softmax(logits(p, x)),
        name=name,
    )
