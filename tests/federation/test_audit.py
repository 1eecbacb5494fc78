"""The audit at a site: its own copy of the protocol, what is the same question, and the next broadcast."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from fald.core.errors import FederationError
from fald.core.keys import as_key, chain_key, key_words
from fald.federation import wire
from fald.federation.site import audit
from fald.federation.site.audit import FewRoundAudit, digest_of, next_broadcast, public_root, same, start_of
from fald.fewround.fit import few_round_settings
from fald.langevin.server import Server
from fald.study.schema import make_study

STUDY = make_study(
    {"data": {"target": "y", "features": ["u", "v"]}, "model": {"family": "logistic"}, "fit": {"seed": 5}},
    "a test",
)
ONE = {"points": np.array([[0.0, -1.0]]), "count": np.asarray(3), "flag": np.array([True, False])}


# -- the same question ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "array", "expected"),
    [
        ("points", [[0.0, -1.0]], True),
        ("points", [[1e-8, -1.0]], True),  # the tolerance itself, of the largest number
        ("points", [[-1e-8, -1.0]], True),
        ("points", [[np.nextafter(1e-8, 1), -1.0]], False),
        ("points", [[0.0, -1.00000002]], False),
        ("points", [[0.0, 1.0]], False),
        ("points", [[np.nan, -1.0]], False),
        ("points", [[0.0, -np.inf]], False),
        ("points", [[1e-3, -1e9]], False),  # how large the asked number is gives it no room
        ("points", [[0.0], [-1.0]], False),
        ("points", np.zeros((1, 2), np.int64), False),
        ("count", np.asarray(4), False),
        ("count", np.asarray(3.0), False),
        ("count", np.asarray(3), True),
        ("flag", np.array([True, True]), False),
        ("flag", np.array([True]), False),
    ],
)
def test_questions_are_the_same_to_the_tolerance_and_whole_numbers_exactly(name, array, expected):
    assert same(ONE, {**ONE, name: np.asarray(array)}) is expected


def test_questions_have_the_same_parts():
    assert same(ONE, dict(reversed(ONE.items())))
    assert not same(ONE, {**ONE, "more": np.zeros(0)})
    assert not same({**ONE, "more": np.zeros(0)}, ONE)
    assert same({"x": np.zeros((0, 3))}, {"x": np.zeros((0, 3))})
    assert not same({"x": np.zeros((0, 3))}, {"x": np.zeros((0, 2))})
    assert not same({"x": np.full(2, np.nan)}, {"x": np.full(2, np.nan)})  # no question that a protocol asks
    large = {"x": np.array([0.0, 1e9])}
    assert same(large, {"x": np.array([9.9, 1e9])})
    assert not same(large, {"x": np.array([10.1, 1e9])})


def test_a_digest_stands_for_a_question():
    assert digest_of(ONE) == digest_of(dict(reversed(ONE.items())))
    assert len(digest_of(ONE)) == 16
    for change in (
        {"count": np.asarray(4)},
        {"points": np.array([[0.0, -1.0 - 1e-15]])},
        {"more": np.zeros(1)},
    ):
        assert digest_of({**ONE, **change}) != digest_of(ONE)


# -- the protocol, followed at the site ----------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """A protocol of three rounds, each of which asks for the sums so far; what it was made with."""
    made = []

    def server(settings, model, seed, rounds):
        made.append((settings, model, seed, rounds))
        total = np.zeros(2)
        for _ in range(3):
            sums = yield {"points": total, "count": len(made)}
            total = total + sums["values"]

    monkeypatch.setattr(audit, "server_of", server)
    return made


def site(folder, rows=lambda: 7):
    return FewRoundAudit(STUDY, ("u", "v"), folder, rows)


def sums(*values):
    return {"values": np.array(values, float), "also": np.ones(1)}


def test_each_question_follows_from_the_sums_before(tmp_path, asked):
    mine = site(tmp_path)
    assert mine.scales is None
    assert mine.request(1)["points"].tolist() == [0.0, 0.0]
    assert isinstance(mine.request(1)["count"], np.ndarray)
    with pytest.raises(FederationError, match="the sum of round 1 was not passed on"):
        mine.request(2)
    with pytest.raises(FederationError, match="the sum of round 1 was not passed on"):
        mine.take(2, sums(1, 2))
    assert not mine.knows(1)
    mine.take(1, sums(1, 2))
    assert mine.knows(1)
    assert not mine.knows(2)
    assert mine.request(2)["points"].tolist() == [1.0, 2.0]
    with pytest.raises(FederationError, match="the sum of round 2 was not passed on"):
        mine.request(3)
    with pytest.raises(FederationError, match="the sum of round 2 was not passed on"):
        mine.take(3, sums(0, 0))  # a gap
    mine.take(2, sums(10, 20))
    assert mine.request(3)["points"].tolist() == [11.0, 22.0]
    # a round that is asked again, here and in another process
    for each in (mine, site(tmp_path)):
        for number, expected in ((1, 0.0), (3, 11.0), (2, 1.0), (2, 1.0), (3, 11.0)):
            assert each.request(number)["points"][0] == expected
    mine.take(3, sums(5, 5))
    for _ in range(2):
        with pytest.raises(FederationError, match="has ended, and asks nothing more"):
            mine.request(4)
    settings, model, seed, rounds = asked[0]
    assert (seed, rounds, model.dim) == (5, [], 3)
    assert settings == few_round_settings(model, **STUDY.fit.arguments())
    assert mine.most_rounds == settings.most_rounds


def test_rounds_in_their_order_replay_nothing(tmp_path, asked):
    mine = site(tmp_path)
    for number in (1, 2, 3):
        mine.request(number)
        mine.take(number, sums(1, 1))
    assert len(asked) == 1


def test_a_round_has_one_sum(tmp_path, asked):
    mine = site(tmp_path)
    mine.take(1, sums(1, 2))
    mine.take(1, dict(reversed(sums(1, 2).items())))  # the same again
    for other in (sums(1, 3), {"values": np.array([1.0, 2.0])}, {**sums(1, 2), "more": np.ones(1)}):
        with pytest.raises(
            FederationError, match="the sum of round 1 is not the one that was passed on before"
        ):
            mine.take(1, other)
    assert mine.request(2)["points"].tolist() == [1.0, 2.0]


def test_a_site_answers_its_own_question(tmp_path, asked):
    mine = site(tmp_path)
    mine.take(1, sums(1, 2))
    own = mine.request(2)
    near = {**own, "points": own["points"] * (1 + 1e-12)}
    assert mine.check(2, near)["points"].tolist() == [1.0, 2.0]
    for number, question in ((2, {**own, "points": own["points"] * 1.001}), (1, own)):
        with pytest.raises(FederationError, match="not the one that the protocol asks here") as caught:
            mine.check(number, question)
        assert digest_of(question) in caught.value.message
        assert digest_of(mine.request(number)) in caught.value.message


def test_a_round_of_scales_comes_first_and_shapes_the_model(tmp_path, asked, monkeypatch):
    first, after, built = {"states": np.eye(3)}, SimpleNamespace(dim=3), []

    def scaled(study, model, found, rows):
        built.append((study, model.dim, found["values"].tolist(), rows))
        return SimpleNamespace(build_model=lambda features: after if features == ("u", "v") else None)

    monkeypatch.setattr(audit, "scales_request", lambda study, model: first)
    monkeypatch.setattr(audit, "scaled", scaled)
    monkeypatch.setattr(
        audit, "few_round_settings", lambda model, **_: SimpleNamespace(most_rounds=12, of=model)
    )
    mine = site(tmp_path, lambda: 41)
    assert mine.most_rounds == 13
    assert mine.request(1)["states"] is not None
    assert mine.model(1) is not after
    mine.take(1, sums(3, 4))
    assert mine.model(1) is not after
    assert mine.model(2) is after
    assert mine.model(3) is after
    assert built == [(STUDY, 3, [3.0, 4.0], 41)]  # once
    assert mine.request(2)["points"].tolist() == [0.0, 0.0]  # the first of the method's own
    assert asked[0][1] is after
    assert asked[0][0].of is after
    mine.take(2, sums(1, 1))
    assert mine.request(3)["points"].tolist() == [1.0, 1.0]


def test_without_a_round_of_scales_the_model_is_one(tmp_path, asked):
    mine = site(tmp_path)
    assert mine.model(1) is mine.model(2) is mine.model(9)


# -- chains --------------------------------------------------------------------------------------------------


def test_the_next_broadcast_is_that_of_the_server():
    """Every part of the server's own update, chain by chain; costs of rounds come last and are left out."""
    method = SimpleNamespace(
        split=lambda: (None, 10.0),
        broadcast=lambda state: {"sent": state},
        server_update=lambda hyper, state, upload, view: {
            "state": state + hyper, "position": upload.position, "energy": upload.energy,
            "noise": view.noise_key, "round": view.round, "weights": view.weights,
        },
    )  # fmt: skip
    root = np.array([3, 4], np.uint32)
    before, total = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(100, 110, dtype=np.float32)
    found = next_broadcast(method, root, 9, before=before, total=total)["sent"]
    np.testing.assert_array_equal(found["state"], before + 10)
    np.testing.assert_array_equal(found["position"], total[:6].reshape(2, 1, 3))
    np.testing.assert_array_equal(found["energy"], [[106.0], [107.0]])
    np.testing.assert_array_equal(found["weights"], np.ones((2, 1)))
    assert found["round"].tolist() == [7, 7]  # the round before, counted from zero
    for chain in range(2):
        expected = Server.at(chain_key(jnp.asarray(root), chain), 7, jnp.ones(1)).noise_key
        np.testing.assert_array_equal(found["noise"][chain], expected)
    assert not np.array_equal(found["noise"][0], found["noise"][1])


def test_root_and_start_are_those_of_the_study():
    sampler = SimpleNamespace(seed=11, num_chains=3)
    np.testing.assert_array_equal(public_root(sampler), key_words(as_key(11)[0]))
    assert not np.array_equal(public_root(sampler), public_root(SimpleNamespace(seed=12)))
    model = SimpleNamespace(flat_initial_position=jnp.array([1.0, 2.0]))
    assert start_of(sampler, model).tolist() == [[1.0, 2.0]] * 3


def test_sums_are_kept_as_messages(tmp_path, asked):
    site(tmp_path).take(1, sums(1, 2))
    (path,) = tmp_path.iterdir()
    assert wire.unpack(path.read_bytes()).arrays["values"].tolist() == [1.0, 2.0]
