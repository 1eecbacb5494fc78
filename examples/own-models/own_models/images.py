"""A Flax network that reads images by itself: a classifier with one hidden layer."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import fald


class Classifier(nn.Module):
    """Pixels to logits."""

    hidden: int
    classes: int

    @nn.compact
    def __call__(self, pixels):
        return nn.Dense(self.classes)(nn.tanh(nn.Dense(self.hidden)(pixels)))


def read(path, features, target):
    """Images, and their labels unless they are to be predicted: two arrays of a NumPy archive."""
    with np.load(path) as arrays:
        pictures = arrays[features[0]]
        return pictures if target is None else (pictures, arrays[target])


@fald.models.reads(read)
def images(features, *, pixels, classes=10, hidden=16, brightest=255.0):
    """Make the model of a study whose one feature is an array of images."""
    network = Classifier(hidden, classes)
    start = network.init(jax.random.key(0), jnp.zeros(pixels))["params"]

    def logits(position, picture):
        return network.apply({"params": position}, jnp.asarray(picture, float).ravel() / brightest)

    def loglikelihood(position, example):
        picture, label = example
        return jax.nn.log_softmax(logits(position, picture))[label.astype(int)]

    return fald.Model(
        logprior_fn=lambda position: -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(position)),
        loglikelihood_fn=loglikelihood,
        initial_position=start,
        predict_fn=lambda position, picture: jax.nn.softmax(logits(position, picture)),
        prior="weights and biases Normal(0, 1)",
        name="images",
    )
