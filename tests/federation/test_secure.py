"""The pairwise-masked sum: what it adds up to, and what it must not be talked into."""

import json
import os
from fractions import Fraction

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fald.core.errors import ConfigError, NonFiniteError, SecureSumError, StorageError
from fald.federation.secure.fixed_point import LIMIT, add, decode, encode, subtract
from fald.federation.secure.identity import check_public, check_signature, key_fingerprint
from fald.federation.secure.session import Identity, Session, _introduction, fixed_point_sum, unmask_sum

TASK = b"task"


def whole(words):
    """Fixed-point words as Python's own whole numbers."""
    return [int(low) + (int(high) << 64) for low, high in words.T]


class Sites:
    """A few sites with their keys, introduced to each other."""

    def __init__(self, names="abcd", run="run 1"):
        self.identities = {name: Identity.generate() for name in names}
        self.pins = {name: identity.public for name, identity in self.identities.items()}
        self.sessions = self.start(run)
        self.hellos = {name: session.hello() for name, session in self.sessions.items()}

    def start(self, run):
        return {name: Session(key, name, run) for name, key in self.identities.items()}

    def accept(self):
        for session in self.sessions.values():
            session.accept(json.loads(json.dumps(self.hellos)), self.pins)
        return self

    def uploads(self, values, round=1, attempt=1, digest=TASK, names=None, **options):
        names = list(self.sessions) if names is None else names
        return [
            self.sessions[name].mask(v, round=round, attempt=attempt, digest=digest, **options)
            for name, v in zip(names, values)
        ]


@pytest.fixture
def sites():
    return Sites().accept()


def numbers(num_sites=4, count=50, seed=0):
    return np.random.default_rng(seed).normal(size=(num_sites, count)) * 1e3


# exact identities


@given(st.lists(st.floats(-LIMIT, LIMIT, exclude_min=True, exclude_max=True), min_size=1, max_size=8))
@example([np.nextafter(128.0, 0), -np.nextafter(128.0, 0), -(2.0**-56), 2.0**-58])
@example([-128.0, 128.0])
@settings(max_examples=200, deadline=None)
def test_fixed_point_is_rounded_arithmetic_of_whole_numbers(values):
    words = encode(values)
    expected = [round(abs(Fraction(v)) * 2**56) * (1 if v > 0 else -1) for v in values]
    assert whole(words) == [e % 2**128 for e in expected]
    assert whole(add(words, words[:, ::-1])) == [(e + f) % 2**128 for e, f in zip(expected, expected[::-1])]
    assert whole(subtract(words, words[:, ::-1])) == [
        (e - f) % 2**128 for e, f in zip(expected, expected[::-1])
    ]
    np.testing.assert_allclose(decode(words), values, rtol=2**-51, atol=2.0**-57)
    beside = np.column_stack([words, encode([1e9])])  # small numbers alone are read in another way
    assert np.array_equal(decode(beside)[:-1], decode(words))
    assert np.array_equal(encode([*values, 1e9]), beside)


def test_addition_carries_over_all_words():
    a = np.array([[2**64 - 1, 0, 5], [2**64 - 1, 2**63, 7]], np.uint64)
    b = np.array([[1, 0, 2**64 - 5], [0, 2**63, 2**64 - 8]], np.uint64)
    assert whole(add(a, b)) == [(x + y) % 2**128 for x, y in zip(whole(a), whole(b))] == [0, 0, 0]
    assert whole(subtract(b, a)) == [(y - x) % 2**128 for x, y in zip(whole(a), whole(b))]
    assert np.array_equal(add(c := a.copy(), b, c), add(a, b))  # in place
    assert np.array_equal(subtract(c := b.copy(), a, c), subtract(b, a))


def test_long_arrays_are_encoded_and_decoded_like_short_ones():
    values = numbers(1, 10_000)[0]
    values[[5, 4096, 9_999]] = [-np.inf, np.nan, -(2.0**46)]
    words = encode(values, saturate=True)
    assert np.array_equal(words, np.concatenate([encode([v], saturate=True) for v in values], axis=1))
    assert np.array_equal(decode(words), [decode(words[:, [i]])[0] for i in range(10_000)], equal_nan=True)


@pytest.mark.parametrize("names", ["abc", "abcd", [f"site-{i}" for i in range(20)]])
def test_masked_sum_equals_fixed_point_sum(names):
    values = numbers(len(names))
    masked = unmask_sum(Sites(names).accept().uploads(values))
    np.testing.assert_array_equal(masked, fixed_point_sum(list(values)))
    np.testing.assert_array_equal(masked, fixed_point_sum(list(values[::-1])))
    np.testing.assert_allclose(masked, values.sum(axis=0), rtol=0, atol=1e-11)


def test_sums_of_large_and_small_numbers_keep_their_digits(sites):
    large, small = [1e14, -1e5, 2.5e6, 1e-9], [1e-3, 7e-7, -1e14, 2e-9]
    got = unmask_sum(sites.uploads([large, small, large, small]))
    exact = [float(2 * (Fraction(a) + Fraction(b))) for a, b in zip(large, small)]
    np.testing.assert_allclose(got, exact, rtol=1e-15, atol=2.0**-54)


def test_no_values_make_an_empty_sum(sites):
    assert unmask_sum(sites.uploads([[]] * 4)).shape == (0,)


def test_order_of_introductions_and_of_uploads_is_of_no_account(sites):
    again = Sites.__new__(Sites)
    again.identities, again.pins = sites.identities, dict(reversed(sites.pins.items()))
    again.sessions = sites.start("run 2")
    again.hellos = {name: again.sessions[name].hello() for name in "dbca"}
    values = numbers()
    uploads = again.accept().uploads(values)
    np.testing.assert_array_equal(unmask_sum(uploads[::-1]), fixed_point_sum(list(values)))


# what an upload shows


def looks_random(upload, num_sd=5.0):
    """Whether the share of ones in every bit position, and of agreeing neighbours, is that of fair coins."""
    bits = np.unpackbits(np.ascontiguousarray(upload.T).view(np.uint8), axis=None).reshape(
        upload.shape[1], 128
    )
    sd = 0.5 / np.sqrt(len(bits))
    ones = np.abs(bits.mean(axis=0) - 0.5) / sd
    agreeing = np.abs((bits[1:] == bits[:-1]).mean(axis=0) - 0.5) / sd
    return bool(max(ones.max(), agreeing.max()) < num_sd)


def test_upload_looks_random_and_an_unmasked_one_does_not(sites):
    values = numbers(count=4000)
    uploads = sites.uploads(values)
    assert all(looks_random(upload) for upload in uploads)
    assert looks_random(add(uploads[0], uploads[1]))  # the masks with the other two are still there
    assert not looks_random(encode(values[0]))
    assert not looks_random(add(add(uploads[0], uploads[1]), add(uploads[2], uploads[3])))


def test_equal_values_give_unrelated_uploads_in_every_round_attempt_and_task(sites):
    kinds = [(1, 1, b"a"), (1, 2, b"a"), (2, 1, b"a"), (3, 1, b"b")]
    uploads = [sites.uploads(np.ones((4, 2000)), r, t, d)[0] for r, t, d in kinds]
    for i, one in enumerate(uploads):
        for other in uploads[:i]:
            assert looks_random(subtract(one, other))
    same = sites.uploads(np.zeros((4, 2000)), *kinds[-1])[0]
    assert not looks_random(subtract(uploads[-1], same))


def test_masks_depend_on_the_number_of_entries(sites):
    long = sites.uploads(np.ones((4, 1001)), 1)[0]
    for session in sites.sessions.values():
        session._last = None  # what no request can reach: the same round again with fewer entries
    short = sites.uploads(np.ones((4, 1000)), 1)[0]
    assert looks_random(subtract(long[:, : short.shape[1]], short))


# attacks


def test_two_sites_are_too_few():
    with pytest.raises(SecureSumError, match="between 3 and 255 sites; got 2"):
        Sites("ab").accept()


def test_substituted_key_is_refused():
    sites = Sites()
    eve = Session(Identity.generate(), "b", "run 1")
    sites.hellos["b"] = eve.hello()
    with pytest.raises(SecureSumError, match="'b' is not signed for this run"):
        sites.sessions["a"].accept(sites.hellos, sites.pins)
    with pytest.raises(SecureSumError, match="before the sites' keys"):
        sites.sessions["a"].mask([1.0], round=1, attempt=1, digest=TASK)


def test_key_under_a_true_signature_is_refused_when_changed():
    sites = Sites()
    other = Session(Identity.generate(), "b", "run 1").hello()
    sites.hellos["b"] |= {"key": other["key"]}
    with pytest.raises(SecureSumError, match="'b' is not signed"):
        sites.sessions["a"].accept(sites.hellos, sites.pins)


def test_key_of_another_run_is_refused():
    sites = Sites()
    sites.hellos["b"] = sites.start("run 0")["b"].hello()
    with pytest.raises(SecureSumError, match="'b' is not signed for this run"):
        sites.sessions["a"].accept(sites.hellos, sites.pins)


def test_introduction_of_one_site_does_not_serve_for_another():
    sites = Sites()
    sites.hellos["b"], sites.hellos["c"] = sites.hellos["c"], sites.hellos["b"]
    with pytest.raises(SecureSumError, match="not signed"):
        sites.sessions["a"].accept(sites.hellos, sites.pins)


def test_own_introduction_must_come_back_unchanged():
    sites = Sites()
    sites.hellos["a"] = Session(sites.identities["a"], "a", "run 1").hello()
    with pytest.raises(SecureSumError, match="own introduction came back changed"):
        sites.sessions["a"].accept(sites.hellos, sites.pins)


@pytest.mark.parametrize("change", ["absent", "extra", "renamed"])
def test_roster_must_be_the_pinned_one(change):
    sites = Sites()
    hellos = dict(sites.hellos)
    if change != "extra":
        hello = hellos.pop("d")
    if change != "absent":
        hellos["e"] = hello if change == "renamed" else Session(Identity.generate(), "e", "run 1").hello()
    with pytest.raises(SecureSumError, match="not those pinned here; they differ in"):
        sites.sessions["a"].accept(hellos, sites.pins)


def test_one_site_under_two_names_is_refused():
    sites = Sites("abc")
    sites.pins["c"] = sites.pins["b"]
    sites.hellos["c"] = Session(sites.identities["b"], "c", "run 1").hello()
    with pytest.raises(SecureSumError, match="same key"):
        sites.sessions["a"].accept(sites.hellos, sites.pins)


def test_one_key_of_a_session_under_two_identities_is_refused():
    sites = Sites("abc")
    key = sites.hellos["b"]["key"]
    signature = sites.identities["c"].sign(_introduction("run 1", "c", bytes.fromhex(key)))
    sites.hellos["c"] = {"name": "c", "key": key, "signature": signature}
    with pytest.raises(SecureSumError, match="same key"):
        sites.sessions["a"].accept(sites.hellos, sites.pins)


@pytest.mark.parametrize(
    "hello", [None, [], "x", {}, {"name": "b", "key": 3, "signature": "zz"}, {"name": "b", "key": "zz"}]
)
def test_nonsense_introductions_are_refused(hello):
    sites = Sites()
    sites.hellos["b"] = hello
    with pytest.raises(SecureSumError, match="'b' is not signed"):
        sites.sessions["a"].accept(sites.hellos, sites.pins)


def test_nonsense_pins_are_refused():
    sites = Sites()
    with pytest.raises(SecureSumError, match="pinned for site 'b' is no Ed25519"):
        sites.sessions["a"].accept(sites.hellos, sites.pins | {"b": "12"})
    with pytest.raises(SecureSumError, match="'a' is not this site's own"):
        sites.sessions["a"].accept(sites.hellos, sites.pins | {"a": Identity.generate().public})


def test_key_without_secret_is_refused():
    sites = Sites()
    signature = sites.identities["b"].sign(_introduction("run 1", "b", bytes(32)))
    sites.hellos["b"] = {"name": "b", "key": bytes(32).hex(), "signature": signature}
    with pytest.raises(SecureSumError, match="gives no secret"):
        sites.sessions["a"].accept(sites.hellos, sites.pins)


def test_session_does_not_begin_twice_with_other_keys(sites):
    session = sites.sessions["a"]
    session.accept(sites.hellos, sites.pins)
    changed = sites.hellos | {"b": sites.start("run 1")["b"].hello()}
    with pytest.raises(SecureSumError, match="already begun with other keys"):
        session.accept(changed, sites.pins)


def test_absent_site_leaves_noise(sites):
    uploads = sites.uploads(numbers())
    with pytest.raises(SecureSumError, match="masks of 3 uploads do not cancel"):
        unmask_sum(uploads[:3])


@pytest.mark.parametrize("which", [{"round": 2}, {"attempt": 2}, {"digest": b"another"}])
def test_uploads_of_different_requests_leave_noise(sites, which):
    values = numbers()
    uploads = sites.uploads(values[:3])
    odd = sites.sessions["d"].mask(values[3], **({"round": 1, "attempt": 1, "digest": TASK} | which))
    with pytest.raises(SecureSumError, match="do not cancel"):
        unmask_sum([*uploads, odd])


def test_sites_that_saw_different_keys_get_noise():
    """A coordinator that shows two sessions of one site to different others learns nothing."""
    sites = Sites()
    twin = sites.start("run 1")["d"]
    for name in "abc":
        shown = sites.hellos if name != "a" else sites.hellos | {"d": twin.hello()}
        sites.sessions[name].accept(shown, sites.pins)
    sites.sessions["d"].accept(sites.hellos, sites.pins)
    with pytest.raises(SecureSumError, match="do not cancel"):
        unmask_sum(sites.uploads(numbers()))


def test_replayed_request_gets_the_same_upload_whatever_the_values(sites):
    session = sites.sessions["a"]
    first = session.mask([1.0, 2.0], round=3, attempt=1, digest=TASK)
    kept = first.copy()
    with pytest.raises(ValueError, match="read-only"):
        first[:] = 0
    np.testing.assert_array_equal(session.mask([5.0, 6.0], round=3, attempt=1, digest=TASK), kept)
    np.testing.assert_array_equal(session.again(round=3, attempt=1, digest=TASK), kept)
    assert session.again(round=3, attempt=2, digest=TASK) is None


def test_retry_with_another_task_is_refused(sites):
    session = sites.sessions["a"]
    session.mask([1.0], round=3, attempt=1, digest=TASK)
    with pytest.raises(SecureSumError, match="asked twice with different tasks"):
        session.mask([1.0], round=3, attempt=1, digest=b"another position")


def test_earlier_requests_are_refused(sites):
    session = sites.sessions["a"]
    session.mask([1.0], round=3, attempt=2, digest=TASK)
    for round, attempt in [(3, 1), (2, 5)]:
        with pytest.raises(SecureSumError, match="is over: this site has answered round 3, attempt 2"):
            session.mask([1.0], round=round, attempt=attempt, digest=TASK)


# numbers that cannot be summed


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (np.nan, "not finite"),
        (np.inf, "not finite"),
        (-np.inf, "not finite"),
        (LIMIT, "2^47"),
        (-1e16, "2^47"),
    ],
)
def test_numbers_that_cannot_be_summed_are_refused_without_showing_them(sites, bad, text):
    session = sites.sessions["a"]
    with pytest.raises(NonFiniteError) as caught:
        session.mask([1.0, bad, 2.0], round=1, attempt=1, digest=TASK)
    assert "entry 1 of 3" in str(caught.value)
    assert text in str(caught.value)
    assert session.again(round=1, attempt=1, digest=TASK) is None


def test_a_sum_of_fewer_terms_has_a_smaller_range():
    words = encode([0.999 * LIMIT, -0.999 * LIMIT])
    four = add(add(words, words), add(words, words))
    np.testing.assert_allclose(decode(four, 4), [3.996 * LIMIT, -3.996 * LIMIT])
    with pytest.raises(NonFiniteError, match="outside the range of all its terms"):
        decode(four, 3)


@pytest.mark.parametrize("num_bad", [1, 2, 4])
@pytest.mark.parametrize(
    ("bad", "read"),
    [
        *[(bad, -np.inf) for bad in (-np.inf, -1e300, -LIMIT)],
        *[(bad, np.nan) for bad in (np.nan, np.inf, 1e20)],
    ],
)
def test_marked_numbers_make_their_sum_infinite_or_none(sites, num_bad, bad, read):
    values = np.full((4, 3), 0.999 * LIMIT)
    values[:num_bad, 1] = bad
    total = unmask_sum(sites.uploads(values, saturate=True))
    np.testing.assert_array_equal(total[1], read)
    np.testing.assert_allclose(total[[0, 2]], 4 * 0.999 * LIMIT, rtol=1e-15)
    np.testing.assert_array_equal(total, fixed_point_sum(list(values), saturate=True))


def test_no_number_beside_no_density_is_no_number(sites):
    """Where one site says NaN and another −∞, nobody may take it for zero density."""
    values = np.zeros((4, 1))
    values[0], values[1] = -np.inf, np.nan
    assert np.isnan(unmask_sum(sites.uploads(values, saturate=True))).all()


def test_most_terms_at_the_limits_neither_overflow_nor_look_marked():
    top = np.nextafter(LIMIT, 0)
    terms = [[top, -top, top, -np.inf, np.nan, np.nan]] * 254
    np.testing.assert_array_equal(
        fixed_point_sum([*terms, [top, -top, -np.inf, -np.inf, np.nan, -np.inf]], saturate=True),
        [255 * top, -255 * top, -np.inf, -np.inf, np.nan, np.nan],
    )


def test_sum_that_no_honest_terms_have_is_refused(sites):
    uploads = [upload.copy() for upload in sites.uploads(numbers())]
    uploads[2][1, 0] += np.uint64(2**60)
    with pytest.raises(SecureSumError, match="an upload is wrong"):
        unmask_sum(uploads)


@pytest.mark.parametrize(
    "change",
    [lambda u: u[:, :-1], lambda u: u.astype(np.int64), lambda u: u[0], lambda u: u.T, lambda u: [1]],
)
def test_misshapen_uploads_are_refused(sites, change):
    uploads = sites.uploads(numbers())
    uploads[1] = change(uploads[1])
    with pytest.raises(SecureSumError, match="one shape"):
        unmask_sum(uploads)
    with pytest.raises(SecureSumError, match="one shape"):
        unmask_sum([])


def test_values_must_be_a_vector(sites):
    with pytest.raises(ValueError, match="one dimension"):
        sites.sessions["a"].mask(np.ones((2, 2)), round=1, attempt=1, digest=TASK)


# identities


def test_identity_file_is_for_its_owner_only(tmp_path):
    path = tmp_path / "identity.pem"
    identity = Identity.create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Identity.load(path).public == identity.public
    assert [p.name for p in tmp_path.iterdir()] == ["identity.pem"]
    with pytest.raises(ConfigError, match="already a key"):
        Identity.create(path)
    assert Identity.load(path).public == identity.public
    os.chmod(path, 0o640)
    with pytest.raises(ConfigError, match=r"others may read .* \(mode 0640\)"):
        Identity.load(path)


def test_a_key_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A crash leaves no half key that others could have pinned."""
    path, done = tmp_path / "identity.pem", []
    for name in ("write", "fsync", "close", "link"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, real=real: done.append(name) or real(*given))
    Identity.create(path)
    assert done == ["write", "fsync", "close", "link"]
    assert not path.with_name(f".identity.pem.{os.getpid()}.tmp").exists()
    monkeypatch.undo()
    with pytest.raises(StorageError, match=r"identity\.pem"):
        Identity.create(tmp_path / "nowhere" / "identity.pem")


@pytest.mark.parametrize("password", [None, b"secret"])
def test_keys_of_another_kind_are_refused(tmp_path, password):
    from cryptography.hazmat.primitives import serialization as as_text

    path = tmp_path / "other.pem"
    key = Ed25519PrivateKey.generate() if password else X25519PrivateKey.generate()
    hidden = as_text.BestAvailableEncryption(password) if password else as_text.NoEncryption()
    path.write_bytes(key.private_bytes(as_text.Encoding.PEM, as_text.PrivateFormat.PKCS8, hidden))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no Ed25519 private key"):
        Identity.load(path)


@pytest.mark.parametrize("mode", [0o601, 0o602, 0o604, 0o610, 0o620, 0o640])
def test_nobody_else_may_touch_the_key(tmp_path, mode):
    path = tmp_path / "identity.pem"
    Identity.create(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="others may read"):
        Identity.load(path)
    path.chmod(0o400)
    Identity.load(path)


@pytest.mark.parametrize("public", [None, 3, b"00" * 32, [], "", "00" * 31, "00" * 33, "zz" * 32])
def test_a_pinned_key_has_one_spelling(public):
    with pytest.raises(SecureSumError, match="pinned for site 'b' is no Ed25519"):
        check_public("b", public)
    assert check_public("b", " AB" * 32) == "ab" * 32


def test_a_signature_is_of_one_message_and_one_key():
    identity = Identity.generate()
    signature = identity.sign(b"text")
    assert check_signature(identity.public, signature, b"text") is True
    other = Identity.generate().public
    for public, signed, text in (
        (other, signature, b"text"), (identity.public, signature, b"texts"),
        (identity.public, "00" * 64, b"text"),
        (identity.public, "zz", b"text"), ("zz", signature, b"text"), (identity.public, None, b"text"),
    ):  # fmt: skip
        assert check_signature(public, signed, text) is False


def test_fingerprints_are_read_out_in_fours():
    assert key_fingerprint("00" * 32) == "6668-7aad-f862-bd77"


def test_files_without_a_key_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the site's key"):
        Identity.load(tmp_path / "nothing.pem")
    path = tmp_path / "text.pem"
    path.write_text("no key")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no Ed25519"):
        Identity.load(path)


# a site whose messages are answered by one process after another


def test_restored_session_goes_on_with_the_same_masks(sites):
    values = numbers()
    sites.uploads(values, round=1)
    restored = {}
    for name, session in sites.sessions.items():
        exported = json.loads(json.dumps(session.export()))
        restored[name] = Session.restore(sites.identities[name], exported)
        assert restored[name].hello() == session.hello()
    sites.sessions |= {name: restored[name] for name in "ac"}
    np.testing.assert_array_equal(unmask_sum(sites.uploads(values, round=2)), fixed_point_sum(list(values)))


def test_restored_session_remembers_what_was_answered(sites):
    sites.uploads(numbers(), round=2, attempt=2)
    session = Session.restore(sites.identities["a"], sites.sessions["a"].export(), (2, 2, TASK))
    for round, attempt, digest, why in [
        (2, 2, TASK, "answered by another process"),
        (2, 2, b"another", "different tasks"),
        (2, 1, TASK, "is over"),
    ]:
        with pytest.raises(SecureSumError, match=why):
            session.mask([1.0], round=round, attempt=attempt, digest=digest)
