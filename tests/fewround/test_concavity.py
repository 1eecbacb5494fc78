"""Log posteriors that are declared concave: what follows, what it costs, and declarations that are false."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald.fewround import certify, concavity
from fald.fewround.exchange import InProcessExchange
from fald.fewround.rays import RADII, far
from fald.fewround.target import Derivatives
from helpers import mostly_slow

CONCAVE = {
    "a Gaussian": lambda r: -(r**2) / 2,
    "a logistic tail": lambda r: -np.logaddexp(0, r) - np.logaddexp(0, -r),
    "a power": lambda r: -(r**1.3),
    "an edge": lambda r: np.where(r < 3.0, -r, -np.inf),
}


@pytest.mark.parametrize("name", CONCAVE)
@pytest.mark.parametrize("dim", [1, 10, 300])
def test_a_few_places_bound_a_concave_function_along_a_ray(name, dim):
    level, places = CONCAVE[name](RADII), concavity.near(dim)
    with np.errstate(over="ignore"):
        found = concavity.extended(level[None, places], places)[0]
    last = places[-1]
    assert RADII[last] > np.sqrt(dim + 2) + 4
    np.testing.assert_array_equal(found[places], level[places])
    assert np.all(found[: last + 1] <= level[: last + 1] + 1e-9)
    slack = 1e-9 * np.abs(found[last:])
    assert np.all(found[last:] + np.nan_to_num(slack, nan=0.0, posinf=0.0) >= level[last:])
    # the twin: the tail of a Student-t lies above what follows from its first part
    tail = -2.0 * np.log1p(RADII**2)
    assert np.any(concavity.extended(tail[None, places], places)[0][last:] < tail[last:])


def test_what_is_said_to_lie_far_out_is_never_too_little():
    levels = np.array([CONCAVE["a Gaussian"](RADII), 0.4 * CONCAVE["a logistic tail"](RADII)])
    weights = np.zeros_like(levels)
    for dim in (1, 5, 20):
        places = concavity.near(dim)
        bound = concavity.extended(levels[:, places], places)
        whole, few = (far(each, weights, dim, count=4096, quantile=2.5) for each in (levels, bound))
        assert np.all(few.share >= whole.share * (1 - 1e-9))
        assert few.share[0].max() < 1e-3  # and of a Gaussian not much more
    assert whole.share[1].max() > 0.1  # the twin: there is something to be seen


@pytest.mark.parametrize("seed", range(3))
def test_concave_functions_lie_under_tangents_and_over_chords_and_others_do_not(seed):
    rng = np.random.default_rng(seed)

    def seen(function):
        positions = 4 * rng.standard_normal((300, 3))
        places = rng.standard_normal((6, 3))
        found = [
            Derivatives(p, *(np.asarray(f(p)) for f in (function, jax.grad(function), jax.hessian(function))))
            for p in places
        ]
        rays = np.array([[function(r * u) for r in RADII[:16]] for u in np.eye(3)])
        values = np.array([function(p) for p in positions])
        top = float(values.max())
        return (
            concavity.above_tangents(found, positions, values, top),
            concavity.above_chords(rays, RADII[:16], top),
            concavity.bent_up(found, np.eye(3)),
        )

    with jax.enable_x64(True):
        slopes = rng.standard_normal((5, 3))
        right = seen(jax.jit(lambda x: -jnp.sum(jnp.logaddexp(0, slopes @ x)) - jnp.sum(x**2) / 50))
        wrong = seen(jax.jit(lambda x: -2 * jnp.sum(jnp.log1p(x**2))))
    assert max(right) <= 0
    assert min(wrong) > 0


def normals(dim, apart, share=0.5, *, declared=True):
    """A posterior of two normals so far apart, the second with a share of the mass; one where it is zero."""
    centre = np.zeros(dim)
    centre[0], weights = apart, np.array([1 - share, share])

    def loglikelihood_fn(theta, part):
        gaps = theta - jnp.stack([jnp.zeros(dim), jnp.asarray(centre)])
        return part * jax.nn.logsumexp(-0.5 * jnp.sum(gaps**2, axis=1), b=weights)

    def logprior_fn(theta):
        return -0.5 * jnp.sum(theta**2) / 1e4

    mark = fald.models.concave if declared else (lambda function: function)
    model = fald.Model(mark(logprior_fn), mark(loglikelihood_fn), np.zeros(dim))
    return model, fald.FederatedData.from_arrays({"a": np.float32([0.3]), "b": np.float32([0.7])})


FALSE = [(d, a, s) for d in (1, 2, 5, 10) for a in (5.0, 8.0) for s in (0.5, 0.2)]


@pytest.mark.parametrize(
    ("dim", "apart", "share"), mostly_slow(FALSE, [(d, 8.0, 0.5) for d in (1, 2, 5, 10)])
)
def test_a_false_declaration_is_never_called_reached(dim, apart, share):
    tree = fald.fit(0, *normals(dim, apart, share), progress=False)
    assert tree.attrs["verdict"] == "not reached"
    assert "declares its log prior and log likelihood concave, and they are not" in tree.attrs["reason"]
    assert "fald.models.concave" in tree.attrs["advice"]
    assert tree.attrs["proved"] == ""


@pytest.mark.parametrize("dim", [1, 10])
def test_a_true_declaration_is_a_proof(dim):
    tree = fald.fit(0, *normals(dim, 8.0, 0.0), progress=False)
    assert tree.attrs["verdict"] == "reached"
    assert "one mode" in tree.attrs["proved"]
    # the twin: nothing is proved of the same posterior where nothing is declared
    assert fald.fit(0, *normals(dim, 8.0, 0.0, declared=False), progress=False).attrs["proved"] == ""


def test_it_is_the_check_that_sees_a_false_declaration(monkeypatch):
    monkeypatch.setattr(certify, "concave", lambda *_: certify.Condition("concavity", True, ""))
    assert fald.fit(0, *normals(5, 30.0), progress=False).attrs["verdict"] == "reached"


class Counted(InProcessExchange):
    """Counts the places where the log posterior is asked for."""

    def ask(self, request):
        asked = getattr(self, "asked", [])
        places = sum(len(request.get(part, ())) for part in ("points", "states", "anchors"))
        self.asked = [*asked, (places, int(request.get("proposal_count", 0)))]
        return super().ask(request)


def undeclared(model):
    """The same model, whose prior says nothing of itself."""
    return replace(model, logprior_fn=lambda position: model.logprior_fn(position))


def test_a_declared_model_asks_far_less_and_answers_the_same():
    rng = np.random.default_rng(4)
    x = rng.normal(size=(900, 4)).astype("f")
    y = (rng.random(900) < 1 / (1 + np.exp(-x.sum(1)))).astype("f")
    data = fald.FederatedData.from_arrays({f"s{i}": (x[i::3], y[i::3]) for i in range(3)})
    model, found = fald.models.logistic_regression(4), {}
    for name, own in {"declared": model, "undeclared": undeclared(model)}.items():
        exchange = Counted(own, data)
        tree = fald.fit(1, own, data, exchange=exchange, progress=False)
        assert tree.attrs["verdict"] == "reached"
        draws = tree["posterior"]["coefficient"].values.reshape(-1, 4)
        found[name] = exchange.asked, draws.mean(axis=0), draws.std(axis=0)
    (few, mean, sd), (many, *other) = found["declared"], found["undeclared"]
    assert 3 * sum(map(sum, few)) < sum(map(sum, many))
    assert sum(places for places, _ in few) < sum(
        count for _, count in few
    )  # most of it is for the tolerance
    # the promise of both is 0.05
    assert np.max(np.abs(mean - other[0]) / sd) < 0.02
    assert np.max(np.abs(sd / other[1] - 1)) < 0.05


def test_a_top_with_an_edge_or_a_kink_proves_nothing_and_is_looked_at():
    fn, prior = (
        fald.models.concave(lambda t, x: -jnp.abs(x - t)),
        fald.models.concave(lambda t: -(t**2) / 2e4),
    )
    model = fald.Model(prior, fn, jnp.array(0.0))
    data = fald.FederatedData.from_arrays({"a": np.arange(4, dtype="f"), "b": np.float32([1.0])})
    tree = fald.fit(0, model, data, progress=False)
    assert tree.attrs["proved"] == ""
    assert tree.attrs["verdict"] == "reached", tree.attrs["reason"]
