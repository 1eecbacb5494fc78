"""What a model of somebody else must make of every row before a site goes on with it."""

import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald.core.errors import DataError
from fald.problem.data import FederatedData
from fald.problem.model import LARGEST_TERM, check_terms

# of a at 0 and the one row that is marked: the term, its gradient, and whether they will do
TERMS = {
    "numbers": (lambda a: a + 1.0, True),
    "as large as may be": (lambda a: 0.9 * LARGEST_TERM + a, True),
    "too large": (lambda a: 1.1 * LARGEST_TERM + a, False),
    "too far down": (lambda a: -1.1 * LARGEST_TERM + a, False),
    "no number": (lambda a: jnp.nan + 0.0 * a, False),
    "infinite": (lambda a: -jnp.inf + a, False),
    "as steep as may be": (lambda a: 0.9 * LARGEST_TERM * a, True),
    "too steep": (lambda a: 1.1 * LARGEST_TERM * a, False),
    "infinitely steep": (jnp.sqrt, False),
}


@pytest.mark.parametrize("place", [0, 700])
@pytest.mark.parametrize("kind", TERMS)
def test_terms_and_gradients_are_moderate_at_the_start(kind, place):
    """In whichever part of the rows it stands."""
    term, fits = TERMS[kind]
    rows = np.zeros(701)
    rows[place] = 1.0

    def loglikelihood(position, x):
        return jnp.where(x > 0, term(position["a"]), 0.0)

    model = fald.Model(lambda p: -0.5 * p["a"] ** 2, loglikelihood, {"a": jnp.array(0.0)})
    data = FederatedData.from_arrays({"a": rows})
    if fits:
        check_terms(model, data)
        return
    with pytest.raises(DataError, match="not finite, or beyond 1e12, at the start"):
        check_terms(model, data)
