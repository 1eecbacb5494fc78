"""The parts of a round, each against the same sum written out in NumPy; nothing here is compiled whole."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fald.core.errors import ConfigError, DataError, PrivacyError
from fald.core.keys import normals
from fald.core.reveals import UNDECLARED, Reveals
from fald.langevin import method as methods
from fald.langevin import noise, server
from fald.langevin.compressors import qsgd, top_k
from fald.langevin.fald import FALD, fald, fedavg, private, sgld, variant
from fald.settings.schedules import Phase, in_phases, paper_decay

SHARED, OWN, CHOICE = (jax.random.key_data(jax.random.key(i)) for i in (1, 2, 3))
START = jnp.array([1.0, -2.0, 0.5])


@pytest.fixture(autouse=True)
def by_hand():
    """Loops and conditions run as Python does, so that nothing waits for a compiler."""
    with jax.disable_jit():
        yield


def z(key, step, dim=3):
    return np.asarray(normals(key, step, dim), float)


# -- noise ----------------------------------------------------------------------------------------------


def test_the_variance_of_own_noise_follows_the_weight_or_the_share():
    assert float(noise.own_variance("paper", 0.25, 0.5)) == 4.0
    assert float(noise.own_variance("realised", 0.25, 0.5)) == 2.0
    assert float(noise.own_variance("realised", 0.25, jnp.asarray(0.0))) == 1.0


@pytest.mark.parametrize("correlation", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("step", [0, 4])
def test_injected_noise_is_its_formula(correlation, step):
    keys = SimpleNamespace(shared_key=SHARED, own_key=OWN)
    settings = {"scale": np.sqrt(2 * 0.02 * 1.5), "correlation": correlation, "variance": 4.0}
    drawn = noise.injected(keys, step, 3, **settings, uses_shared=correlation > 0, uses_own=correlation < 1)
    shared, own = correlation * z(SHARED, step), np.sqrt((1 - correlation**2) * 4.0) * z(OWN, step)
    np.testing.assert_allclose(drawn, np.sqrt(2 * 0.02 * 1.5) * (shared + own), rtol=1e-6)
    nothing = noise.injected(keys, step, 3, **settings, uses_shared=False, uses_own=False)
    assert np.asarray(nothing).tolist() == [0.0] * 3
    np.testing.assert_array_equal(noise.injected(keys, step, 3, **settings), drawn)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_steps_are_drift_and_noise_in_turn(count):
    def drift(theta, k):
        return -0.1 * (k + 1) * theta

    def shock(k):
        return jnp.array([1.0, 0.5, k])

    theta = np.array(START)
    for k in range(count):
        theta = theta + np.asarray(drift(theta, k)) + np.asarray(shock(k))
    np.testing.assert_allclose(noise.langevin_steps(count, drift, shock, START), theta, rtol=1e-6)


# -- the server -----------------------------------------------------------------------------------------


def test_what_the_server_does_with_uploads():
    given = server.Server(SHARED, CHOICE, jnp.asarray(7), jnp.array([0.25, 0.75, 0.0]))
    np.testing.assert_allclose(
        server.diffusion(given, 3, 0.02, 1.5), np.sqrt(2 * 0.02 * 1.5) * z(SHARED, 0), rtol=1e-6
    )
    positions, weights = jnp.array([[1.0, 2.0], [3.0, 5.0], [9.0, 9.0]]), jnp.array([0.25, 0.75, 0.0])
    np.testing.assert_allclose(server.average(positions, weights), [2.5, 4.25])
    np.testing.assert_allclose(server.total(positions, weights), [4.0, 7.0])
    np.testing.assert_allclose(server.total(positions[:, :1, None], weights), [[4.0]])
    assert server.total(jnp.array([[1.0], [np.nan]]), jnp.array([1.0, 0.0])).tolist() == [1.0]
    away = np.asarray(server.drift(positions, weights, jnp.array([1.0, 1.0])))
    np.testing.assert_allclose(away, [1.0, np.sqrt(20.0), np.nan])


# -- FA-LD ----------------------------------------------------------------------------------------------


def local(**changes):
    """A client with f(θ) = ½ Σ (k+1) θ², whose gradient shows which step asked for it."""
    given = {
        "grad": lambda theta, k: (k + 1.0) * theta,
        "energy": lambda theta, k: 10.0 + k + jnp.sum(theta),
        "share": 0.2, "weight": jnp.asarray(0.5), "shared_key": SHARED, "own_key": OWN,
        "choice_key": CHOICE, "first_step": 12,
    }  # fmt: skip
    return SimpleNamespace(**{**given, **changes})


def by_numpy(m, first=12):
    theta = np.asarray(START, float)
    for k in range(m.local_steps):
        eta = float(m.step_size(first + k)) if callable(m.step_size) else m.step_size
        v = 1 / 0.2 if m.noise == "paper" else 1 / 0.5
        xi = m.correlation * z(SHARED, k) + np.sqrt((1 - m.correlation**2) * v) * z(OWN, k)
        theta = theta - eta * (k + 1) * theta + np.sqrt(2 * eta * m.temperature) * xi
    return theta


SETTINGS = {
    "one step": {"local_steps": 1, "step_size": 0.05},
    "three steps": {"local_steps": 3, "step_size": 0.05, "temperature": 0.5},
    "half shared": {"local_steps": 3, "step_size": 0.05, "correlation": 0.7},
    "all shared": {"local_steps": 2, "step_size": 0.05, "correlation": 1.0},
    "noise of the paper": {"local_steps": 2, "step_size": 0.05, "noise": "paper", "correlation": 0.3},
    "no noise": {"local_steps": 3, "step_size": 0.05, "temperature": 0.0},
    "a schedule": {"local_steps": 3, "step_size": paper_decay(5.0, 1.0)},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_local_steps_are_those_of_the_method(case):
    m = fald(**SETTINGS[case])
    skeleton, hyper = m.split()
    upload, memory = skeleton.client_update(hyper, local(), START, ())
    np.testing.assert_allclose(upload.position, by_numpy(m), rtol=2e-6)
    assert float(upload.energy) == pytest.approx(10.0 + float(jnp.sum(START)))
    assert (memory, upload.extra, upload.spent) == ((), (), ())
    np.testing.assert_allclose(
        m.server_update(hyper, None, upload._replace(position=jnp.stack([START, 3 * START])),
                        SimpleNamespace(weights=jnp.array([0.5, 0.5]))),
        2 * START,
    )  # fmt: skip
    # the twin: a tenth more noise, or of step, is another place
    wrong = fald(**{**SETTINGS[case], "local_steps": m.local_steps + 1})
    assert np.max(np.abs(by_numpy(wrong) - upload.position)) > 1e-3


def by_obabo(m, root=1.0, first=12):
    """Momentum and preconditioner written out: half a kick, a move, half a kick, friction."""
    theta, u = np.asarray(START, float), np.zeros(3)
    for k in range(m.local_steps):
        a = m.momentum if k else 0.0
        eta = float(m.step_size(first + k)) if callable(m.step_size) else m.step_size
        xi = m.correlation * z(SHARED, k) + np.sqrt((1 - m.correlation**2) / 0.5) * z(OWN, k)
        u = a * u - (1 + a) * np.sqrt(eta / 2) * root**2 * (k + 1) * theta
        u += np.sqrt((1 - a**2) * m.temperature) * root * xi
        theta = theta + np.sqrt(2 * eta) * u
    return theta


@pytest.mark.parametrize(
    ("case", "momentum"),
    [("three steps", 0.8), ("half shared", 0.8), ("a schedule", 0.8), ("half shared", 0.0)],
)
def test_steps_with_momentum_and_a_preconditioner(case, momentum):
    squares = np.array([[1.0, 4.0, 0.0], [3.0, 5.0, 27.0]])
    m = fald(**SETTINGS[case], momentum=momentum, preconditioner="rms")
    m = m.prepare(None, None, {"squares": squares})
    s = np.sqrt(np.array([4.0, 9.0, 27.0]))
    mean = np.sqrt(40 / 3)
    np.testing.assert_allclose(m.root**2, mean / (s + mean / 10))
    skeleton, hyper = m.split()
    assert (skeleton.root, skeleton.momentum) == (None, 0.5 if momentum else 0.0)
    assert ("momentum" in hyper) is bool(momentum)
    upload, _ = skeleton.client_update(hyper, local(), START, ())
    np.testing.assert_allclose(upload.position, by_obabo(m, m.root), rtol=5e-6)
    plain = fald(**SETTINGS[case], momentum=momentum)
    upload, _ = plain.split()[0].client_update(plain.split()[1], local(), START, ())
    np.testing.assert_allclose(upload.position, by_obabo(plain), rtol=5e-6)
    if not momentum:
        np.testing.assert_allclose(by_obabo(plain), by_numpy(plain), rtol=1e-12)


def test_what_a_preconditioner_costs_and_shows():
    m = fald(local_steps=7, step_size=0.05, preconditioner="rms")
    assert m.cost(3) == methods.Cost(methods.Spent(1, 12, 12, 7), methods.Spent(1, 12, 12, 0, 1))
    assert m.about.reveals == Reveals(("position", "value"), preparation={"squares": "squares"})
    assert "preconditioned_by" not in m.settings()
    fitted = m.prepare(None, None, {"squares": [[1.0, 2.0]]})
    assert fitted.settings()["preconditioned_by"] == methods.digest([fitted.root])
    small = m.prepare(None, None, {"squares": [[1e-8, 2e-8]]})  # only how the squares compare matters
    np.testing.assert_allclose(small.root, fitted.root)
    for squares in ([[0.0, 0.0]], [[np.nan, 1.0]], [[np.inf, 1.0]]):
        with pytest.raises(DataError, match="cannot precondition"):
            m.prepare(None, None, {"squares": squares})
    plain = fald(local_steps=7, step_size=0.05)
    assert plain.prepare(None, None, {}) is plain
    assert plain.offer(None, None) == {}
    phases, _, _ = in_phases([Phase(2, 0.05, draws=1)], 7)
    for other in ({"momentum": 0.5}, {"step_size": phases}, {"preconditioner": "rms"}):
        unaccounted = fald(**{"local_steps": 7, "step_size": 0.05, **other})
        assert not unaccounted.about.reveals.accounted
        with pytest.raises(PrivacyError):
            private(unaccounted)


def test_squares_that_are_offered_are_those_of_the_rows():
    import fald as package

    rows = np.array([[1.0, 2.0], [3.0, -1.0], [0.5, 0.0]])
    model = package.models.gaussian_location(np.eye(2))
    data = package.FederatedData.from_arrays({"a": rows[:2], "b": rows[2:]})
    offered = fald(local_steps=1, step_size=0.05, preconditioner="rms").offer(model, data)
    # ∇ of a row at the model's start 0 is −x
    np.testing.assert_allclose(
        offered["squares"], [(rows[:2] ** 2).sum(0), (rows[2:] ** 2).sum(0)], rtol=1e-6
    )


def test_a_private_client_keeps_its_energy():
    m = private(fald(local_steps=2, step_size=0.05))
    skeleton, hyper = m.split()
    asked = []
    upload, _ = skeleton.client_update(hyper, local(energy=lambda *a: asked.append(a)), START, ())
    assert float(upload.energy) == 0.0
    assert not asked
    assert m.about.reveals == Reveals(("position", "nothing"), sums=True, accounted=True)
    assert fald(local_steps=2, step_size=0.05).about.reveals == Reveals(sums=True, accounted=True)
    assert not replace(m, temperature=0.5).shares_energy
    assert m.without_energy() == m
    squeezed = fald(local_steps=1, step_size=0.05, compressor=qsgd(4))
    assert squeezed.about.reveals == Reveals(("quantised", "value"), sums=True, accounted=False)
    with pytest.raises(PrivacyError, match="no privacy accounting for what fa-ld sends"):
        private(squeezed)

    class Other(FALD):
        def client_update(self, hyper, local, message, memory):
            return super().client_update(hyper, local, message, memory)

    with pytest.raises(PrivacyError):
        private(variant(Other, m))
    declared = variant(type("Declared", (Other,), {"reveals": FALD.reveals}), m)
    assert private(declared).shares_energy is False
    with pytest.raises(PrivacyError):  # accounted for, it says, but not one of these methods
        private(SimpleNamespace(about=m.about))


def test_a_compressed_upload_is_the_message_plus_what_is_left_of_the_move():
    m = fald(local_steps=2, step_size=0.05, compressor=top_k(0.3))
    skeleton, hyper = m.split()
    upload, _ = skeleton.client_update(hyper, local(), START, ())
    move = by_numpy(m) - np.asarray(START)
    kept = np.where(np.abs(move) == np.max(np.abs(move)), move, 0.0)
    np.testing.assert_allclose(upload.position, np.asarray(START) + kept, rtol=1e-5)
    assert (upload.spent.exchanges, int(upload.spent.batch_gradients)) == (1, 2)
    assert int(upload.spent.bytes_down) == 3 * 4
    assert 0 < int(upload.spent.bytes_up) <= 8
    assert m.cost(3) == methods.Cost()
    assert m.settings()["compressor"] == m.compressor.settings()


def test_what_a_round_costs():
    each = fald(local_steps=7, step_size=0.05).cost(3).each
    assert each == methods.Spent(1, 12, 12, 7)
    assert methods.numbers_as_bytes(5) == 20
    assert [methods.triangle(d) for d in (1, 2, 5)] == [1, 3, 15]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, {"correlation": 0.0, "temperature": 1.0, "clip_norm": None}),
        ({"correlation": 1.0, "temperature": 0.0}, {"correlation": 1.0, "temperature": 0.0}),
        ({"correlation": 0.25, "clip_norm": 3.0}, {"correlation": 0.5, "clip_norm": 1.0}),
        ({"step_size": paper_decay(5.0, 1.0)}, {"step_size": 1.0}),
    ],
)
def test_numbers_are_apart_from_what_is_compiled(changes, kept):
    m = fald(**{"local_steps": 9, "step_size": 0.05, "temperature": 2.0, **changes})
    skeleton, hyper = m.split()
    assert (skeleton.local_steps, skeleton.name) == (1, "")
    assert {name: getattr(skeleton, name) for name in kept} == kept
    numbers = {"local_steps": 9, "temperature": m.temperature, "correlation": m.correlation}
    assert skeleton.step_size == 1.0
    if callable(m.step_size):
        assert hyper.pop("step_size") == m.step_size
    else:
        numbers["step_size"] = 0.05
    if m.clip_norm is not None:
        numbers["clip_norm"] = 3.0
    assert {name: pytest.approx(float(value)) for name, value in hyper.items()} == numbers
    assert hyper["local_steps"].dtype == jnp.int32
    assert skeleton == fald(**{"local_steps": 5, "step_size": 0.01, **changes}).split()[0]


def test_a_schedule_of_the_users_own_stays_with_what_is_compiled():
    def falling(k):
        return 0.1 / (1.0 + k)

    m = fald(local_steps=2, step_size=falling)
    skeleton, hyper = m.split()
    assert "step_size" not in hyper
    assert skeleton == fald(local_steps=5, step_size=falling).split()[0]
    assert skeleton != fald(local_steps=5, step_size=lambda k: 0.2).split()[0]
    upload, _ = skeleton.client_update(hyper, local(), START, ())
    np.testing.assert_allclose(upload.position, by_numpy(m), rtol=2e-6)


def test_names_and_special_cases():
    assert sgld(step_size=0.1, temperature=0.5, batch_size=3) == fald(
        local_steps=1, step_size=0.1, temperature=0.5, batch_size=3, name="sgld"
    )
    point = fedavg(local_steps=4, step_size=0.1, batch_size=3)
    assert (point.name, point.temperature, point.local_steps, point.batch_size) == ("fedavg", 0.0, 4, 3)
    assert point.point_estimate
    assert [fald(local_steps=k, step_size=0.1).about.meets for k in (1, 2)] == ["joint", "client"]
    assert fald(local_steps=2, step_size=0.1).about.client_steps
    assert fald(local_steps=2, step_size=0.1).about.participation == "any"
    assert not sgld(step_size=0.1).point_estimate
    assert fald(local_steps=4, step_size=0.1, temperature=0).name == "fedavg"
    assert fald(local_steps=4, step_size=0.1, temperature=0, name="mine").name == "mine"
    assert fald(local_steps=4, step_size=0.1).name == "fa-ld"
    with pytest.raises(ConfigError, match=r"must come from fald\.compressors"):
        fald(local_steps=1, step_size=0.1, compressor="qsgd")


def test_settings_are_plain_values():
    made = fald(local_steps=4, step_size=0.1, correlation=0.2, noise="paper", batch_size=3, clip_norm=2.0)
    assert made.settings() == {
        "method": "fa-ld", "local_steps": 4, "step_size": 0.1, "temperature": 1.0, "correlation": 0.2,
        "noise": "paper", "batch_size": 3, "clip_norm": 2.0, "momentum": 0.0, "preconditioner": None,
    }  # fmt: skip
    step = fald(local_steps=4, step_size=paper_decay(5.0, 1.0)).settings()["step_size"]
    assert step["schedule"] == type(paper_decay(5.0, 1.0)).__name__
    assert 5.0 in step.values()
    assert fald(local_steps=1, step_size=lambda k: 0.1).settings()["step_size"] == {"schedule": "function"}


# -- what all methods are made of -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mine(methods.Peer):
    """A method of a user's own."""

    width: float = 2.0
    fitted: object = field(default=None, compare=False)
    reveals = Reveals(("position", "nothing"), sums=True)
    _numbers = ("step_size", "width")

    def client_update(self, hyper, local, message, memory):
        return None

    def server_update(self, hyper, state, uploads, server):
        return None


def test_a_method_declares_what_it_was_given():
    mine = Mine(step_size=0.1, batch_size=5, local_steps=3, name="mine", temperature=0.5, fitted=7)
    about = mine.about
    assert (about.name, about.local_steps, about.batch_size, about.step_size) == ("mine", 3, 5, 0.1)
    assert (about.point_estimate, about.all_rows, about.preparation_rounds) == (False, False, 0)
    assert (about.participation, about.client_steps, about.meets) == ("full", False, "joint")
    followed = type("Followed", (Mine,), {"client_steps": True})(step_size=0.1)
    assert followed.about.meets == "client"
    assert about.reveals is Mine.reveals
    assert about.settings == {
        "method": "mine", "step_size": 0.1, "temperature": 0.5, "batch_size": 5, "local_steps": 3,
        "width": 2.0,
    }  # fmt: skip
    assert Mine(step_size=0.1, temperature=0.0).point_estimate
    skeleton, hyper = mine.split()
    assert (skeleton.name, skeleton.local_steps, skeleton.step_size, skeleton.width) == ("", 1, 1.0, 1.0)
    assert skeleton.temperature == 0.5  # not among its numbers
    assert {n: pytest.approx(float(v)) for n, v in hyper.items()} == {
        "local_steps": 3, "step_size": 0.1, "width": 2.0,
    }  # fmt: skip
    assert (mine.cost(3), mine.offer(None, None), mine.prepare(None, None, {})) == (methods.Cost(), {}, mine)
    assert mine.init(START)[0] is START
    assert mine.init(START)[1] == ()
    assert mine.broadcast(START) is START
    assert mine.position(START) is START
    assert mine.position(SimpleNamespace(position=5)) == 5


def test_what_is_not_given_is_the_default():
    assert methods.Spent() == (0, 0, 0, 0, 0)
    assert methods.Cost() == (None, methods.Spent())
    assert methods.Upload(START, 0.0)[2:] == ((), ())
    mine = Mine(step_size=0.1)
    assert (mine.temperature, mine.batch_size, mine.local_steps, mine.name) == (1.0, None, 1, "")
    assert Mine(step_size=0.1, fitted=qsgd(4)).settings().get("fitted") is None  # not compared
    assert Mine(step_size=0.1, width=qsgd(4)).settings()["width"] == qsgd(4).settings()
    given = fald(local_steps=1, step_size=0.1)
    assert (given.temperature, given.correlation, given.noise) == (1.0, 0.0, "realised")
    assert (given.batch_size, given.clip_norm, given.compressor) == (None, None, None)
    assert (given.momentum, given.preconditioner, given.shares_energy) == (0.0, None, True)
    assert given == FALD(1, 0.1)


def test_what_a_derived_method_sends_in_another_way_it_declares_anew():
    with pytest.raises(TypeError):  # no argument of a class statement is swallowed
        type("Misspelt", (Mine,), {}, reveal=Mine.reveals)
    for changed in ("client_update", "server_update", "offer"):
        assert type("Derived", (Mine,), {changed: lambda self: None}).reveals is UNDECLARED
        declared = {changed: lambda self: None, "reveals": Mine.reveals}
        assert type("Declared", (Mine,), declared).reveals is Mine.reveals
    assert type("Same", (Mine,), {"cost": lambda self: None}).reveals is Mine.reveals
    assert methods.Method.reveals is UNDECLARED


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step_size": 0.0}, "step-size must be a number > 0"),
        ({"step_size": -1.0}, "step-size"),
        ({"temperature": -0.1}, "temperature must be a number ≥ 0"),
        ({"temperature": float("inf")}, "temperature"),
        ({"batch_size": 0}, "batch-size must be a whole number ≥ 1"),
    ],
)
def test_settings_out_of_range(change, words):
    with pytest.raises(ConfigError, match=words):
        Mine(**{"step_size": 0.1, **change})
    Mine(**{"step_size": 5e-324, "temperature": 0.0, "batch_size": 1})
    type("Stepless", (Mine,), {"_numbers": ("width",)})(step_size=None)


def test_sizes_and_hashes_of_what_is_sent():
    methods.check_dim("laplace", 500)
    with pytest.raises(DataError, match="up to 500; the model has 501"):
        methods.check_dim("laplace", 501)
    one = methods.digest([np.arange(3), np.ones(2)])
    assert len(one) == 16
    assert one == methods.digest([np.arange(3.0), np.ones(2, np.float32)])
    assert one != methods.digest([np.arange(3), np.ones(2) * 1.001])
    assert one != methods.digest([np.arange(3)])
