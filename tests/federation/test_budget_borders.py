"""The ledger and the secure sum at their borders, and the protocol of the sum written out."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256, Hash
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
from hostile import STUDY
from test_secure import TASK, Sites, numbers

from fald.core.errors import ConfigError, PolicyError, PrivacyError, SecureSumError, StorageError
from fald.federation.secure import session
from fald.federation.secure.fixed_point import LIMIT, MOST_TERMS, decode, encode, fixed_point_sum
from fald.federation.secure.identity import Identity, check_public, check_signature
from fald.federation.secure.session import split
from fald.federation.site.ledger import Charge, SiteLedger
from fald.federation.site.opening import enquiry_of
from fald.federation.site.policy import make_policy
from fald.study.schema import make_study


def reserve(ledger, *charges):
    for study, epsilon, delta in charges:
        ledger.reserve(study, epsilon, delta)


def test_a_study_that_goes_on_pays_for_what_is_added_of_both(tmp_path):
    ledger = SiteLedger(tmp_path / "l.jsonl", 1.0, 1e-5)
    reserve(ledger, ("a", 0.6, 6e-6), ("a", 0.9, 9e-6))
    assert ledger.charged("a") == Charge(0.9, 9e-6, 0)
    with pytest.raises(PrivacyError, match="spend more ε"):
        ledger.reserve("a", 1.1, 9e-6)
    with pytest.raises(PrivacyError, match="δ = 1e-06 are left"):
        ledger.reserve("b", 0.05, 2e-6)
    with pytest.raises(PrivacyError, match="would spend ε"):
        ledger.reserve("b", 0.2, 1e-6)
    reserve(ledger, ("b", 0.1, 1e-6))  # to the end of both
    assert ledger.spent(1e-5) == pytest.approx(1.0)


def test_sums_of_deltas_are_compared_up_to_rounding(tmp_path):
    ledger = SiteLedger(tmp_path / "l.jsonl")
    reserve(ledger, *((f"study {i}", 0.1, 1e-6) for i in range(3)))
    assert ledger.spent(3e-6 * (1 - 1e-13)) == pytest.approx(0.3)
    assert ledger.spent(3e-6 * (1 - 1e-6)) == np.inf


@pytest.mark.parametrize(
    "change",
    [{"delta": 0.0}, {"delta": 1.0}, {"epsilon": -1e-9}, {"epsilon": "inf"}, {"study": 5}, {"rounds": None}],
)
def test_lines_that_are_no_charges(tmp_path, change):
    path = tmp_path / "l.jsonl"
    good = {"study": "a", "epsilon": 0.0, "delta": 1e-6, "rounds": 1}
    path.write_text(json.dumps(good) + "\n")
    assert SiteLedger(path).charged("a") == Charge(0.0, 1e-6, 1)
    path.write_text(json.dumps(good) + "\n" + json.dumps({**good, **change}) + "\n")
    with pytest.raises(StorageError, match="line 2 is no charge") as caught:
        SiteLedger(path).charges()
    assert "restore it from a copy" in caught.value.hint


def test_a_charge_is_on_the_disk_before_it_is_confirmed(tmp_path, monkeypatch):
    ledger, synced = SiteLedger(tmp_path / "l.jsonl"), []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), real(file))[1])
    ledger.reserve("a", 0.1, 1e-6)
    assert synced == [(tmp_path / "l.jsonl").stat().st_ino, tmp_path.stat().st_ino]
    for broken in (
        lambda file, raw: len(raw) - 1,
        lambda file, raw: (_ for _ in ()).throw(OSError(5, "broken")),
    ):
        monkeypatch.setattr(os, "write", broken)
        with pytest.raises(StorageError):
            ledger.reserve("b", 0.1, 1e-6)
        assert "b" not in ledger.charges()


# -- the secure sum ------------------------------------------------------------------------------------------


def joined(*fields):
    raw = [f if isinstance(f, bytes) else str(f).encode() for f in fields]
    return b"".join(len(r).to_bytes(8, "big") + r for r in raw)


def sha256(raw):
    made = Hash(SHA256())
    made.update(raw)
    return made.finalize()


def test_an_upload_is_what_the_protocol_says():
    """Two sites of different versions must not disagree on a single bit, so it is written out once more."""
    sites = Sites("abc").accept()
    values = [1.5, -2.25, 0.0]
    upload = sites.sessions["b"].mask(values, round=3, attempt=2, digest=TASK)
    keys = {name: bytes.fromhex(hello["key"]) for name, hello in sites.hellos.items()}
    fields = [part for name in "abc" for part in (name, sites.pins[name], keys[name])]
    salt = sha256(joined(session.PROTOCOL, "run 1", *fields))
    own = X25519PrivateKey.from_private_bytes(bytes.fromhex(sites.sessions["b"].export()["key"]))
    words = [int(v * 2**56) for v in [*values, 1.0]]
    for name, sign in (("a", -1), ("c", 1)):
        secret = own.exchange(X25519PublicKey.from_public_bytes(keys[name]))
        info = joined(session.PROTOCOL, *sorted(["b", name]))
        pair = HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(secret)
        use = joined(session.PROTOCOL, 3, 2, 4, TASK, "a", "b", "c")
        key = HKDFExpand(algorithm=SHA256(), length=32, info=use).derive(pair)
        raw = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(16 * 4))
        stream = np.frombuffer(raw, "<u8").reshape(2, 4)
        words = [w + sign * (int(low) + (int(high) << 64)) for w, (low, high) in zip(words, stream.T)]
    assert [int(low) + (int(high) << 64) for low, high in upload.T] == [w % 2**128 for w in words]
    assert sites.hellos["b"]["signature"] == sites.identities["b"].sign(
        joined(session.PROTOCOL, "hello", "run 1", "b", keys["b"])
    )


@pytest.mark.parametrize(
    "change", [{"name": "c"}, {"signature": 5}, {"signature": None}, {"key": 5}, {"key": "zz"}, {"key": "00"}]
)
def test_an_introduction_with_one_field_changed_is_refused(change):
    sites = Sites("abc")
    hellos = {**sites.hellos, "b": {**sites.hellos["b"], **change}}
    with pytest.raises(SecureSumError, match="'b' is not signed for this run"):
        sites.sessions["a"].accept(hellos, sites.pins)


def test_weights_are_shares_of_rows_to_a_millionth():
    shares = np.array([0.2, 0.3, 0.5])
    assert session.check_shares(np.stack([shares, shares]), [20, 30, 50]).tolist() == [shares.tolist()] * 2
    assert session.check_shares(shares * (1 + 0.9e-6), [20, 30, 50]).tolist() == shares.tolist()
    for wrong in (shares * (1 + 2e-6), shares[:2], shares[::-1], [shares, shares[::-1]], shares * np.nan):
        with pytest.raises(SecureSumError, match="shares of the rows"):
            session.check_shares(wrong, [20, 30, 50])


def test_numbers_of_uploads_are_bounded(monkeypatch):
    sites = Sites("abc").accept()
    uploads = sites.uploads(numbers(3))
    assert session.unmask_sum(uploads).shape == (50,)
    with pytest.raises(SecureSumError, match="64-bit words"):
        session.unmask_sum([])
    bare = np.column_stack([encode([2.5]), encode([1.0])])
    assert session.unmask_sum([bare]).tolist() == [2.5]  # the sum over one is the number itself
    monkeypatch.setattr(session, "MOST_TERMS", 3)
    assert session.unmask_sum(uploads).shape == (50,)
    monkeypatch.setattr(session, "MOST_TERMS", 2)
    with pytest.raises(SecureSumError, match="64-bit words"):
        session.unmask_sum(uploads)
    assert (LIMIT, MOST_TERMS) == (2.0**47, 255)  # so that sums of honest terms leave 16 bits for marks
    assert decode(encode([0.0, -0.0, 2.0**-56, -(2.0**-56)])).tolist() == [0.0, 0.0, 2.0**-56, -(2.0**-56)]


def test_between_one_and_255_arrays_are_summed():
    assert [fixed_point_sum([[0.5]] * n).tolist() for n in (1, 2, 255)] == [[0.5], [1.0], [127.5]]
    for terms in ([], [[0.5]] * 256):
        with pytest.raises(ValueError, match=f"between 1 and 255 arrays can be summed; got {len(terms)}"):
            fixed_point_sum(terms)


def test_mistakes_in_a_policy_show_a_value_and_never_a_whole_section():
    for tree, words in (({"max-rounds": 0}, "; got 0 "), ({"curvature": "perhaps"}, "; got 'perhaps' ")):
        with pytest.raises(ConfigError, match=words):
            make_policy(tree)
    for tree in ({"privacy": {"max-epsilon": 1.0}}, {"allowed-models": ["nonsense"]}):
        with pytest.raises(ConfigError) as caught:
            make_policy(tree)
        assert "; got" not in caught.value.message
    with pytest.raises(ConfigError, match="unknown key 'max-round'") as caught:
        make_policy({"max-rounds": 0, "max-round": 5})  # before what is out of range
    assert caught.value.hint == "did you mean 'max-rounds'?"
    with pytest.raises(ConfigError) as caught:
        make_policy({"zzz": 5})
    assert caught.value.hint.startswith("keys: allowed-columns, ")


def test_a_method_that_declares_nothing_is_refused_by_every_policy():
    study = make_study(STUDY, "study.toml")
    proposal = enquiry_of(study, True, 3)
    make_policy({}).check(proposal)
    with pytest.raises(PolicyError, match=r"does not declare what it sends \(reveals\)"):
        make_policy({}).check(replace(proposal, declared=False))


def test_a_key_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    happened, link, fsync = [], os.link, os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (happened.append("disk"), fsync(file))[1])
    monkeypatch.setattr(os, "link", lambda *a: (happened.append("name"), link(*a))[1])
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    made = Identity.create(tmp_path / "key")
    assert happened == ["disk", "name"]
    assert os.listdir(tmp_path) == ["key"]
    assert before is None or len(os.listdir("/proc/self/fd")) == before
    assert Identity.load(tmp_path / "key").public == made.public
    with pytest.raises(StorageError, match="key"):
        Identity.create(tmp_path / "nowhere" / "key")
    with pytest.raises(ConfigError, match="already a key"):
        Identity.create(tmp_path / "key")
    assert Identity.load(tmp_path / "key").public == made.public


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601])
def test_a_key_that_anybody_else_may_touch_is_refused(tmp_path, mode):
    Identity.create(tmp_path / "key")
    os.chmod(tmp_path / "key", mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}"):
        Identity.load(tmp_path / "key")
    os.chmod(tmp_path / "key", 0o400)
    Identity.load(tmp_path / "key")


@pytest.mark.parametrize("pinned", [7, None, b"a" * 32, "", "zz" * 32, "ab" * 31, "ab" * 33])
def test_a_pinned_key_is_32_bytes_in_digits(pinned):
    with pytest.raises(SecureSumError, match="pinned for site 'a'"):
        check_public("a", pinned)
    assert check_public("a", "AB" * 32) == "ab" * 32


def test_signatures_hold_for_their_message_and_key_alone():
    one, other = Identity.generate(), Identity.generate()
    signed = one.sign(b"message")
    assert check_signature(one.public, signed, b"message")
    for public, signature, message in (
        (other.public, signed, b"message"), (one.public, signed, b"massage"),
        (one.public, "00" * 64, b"message"), (one.public, "no digits", b"message"),
        ("ab", signed, b"message"),
    ):  # fmt: skip
        assert not check_signature(public, signature, message)


def test_arrays_are_taken_out_of_a_sum_in_the_order_of_their_names():
    shapes = {"c": (2, 2), "a": (3,), "b": ()}
    found = split(np.arange(8.0), shapes)
    assert found["a"].tolist() == [0, 1, 2]
    assert found["b"].shape == ()
    assert float(found["b"]) == 3
    assert found["c"].tolist() == [[4, 5], [6, 7]]
    for length in (7, 9):
        with pytest.raises(SecureSumError, match="shapes of its terms"):
            split(np.arange(float(length)), shapes)
