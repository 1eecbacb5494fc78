"""A sum that its sites check together: what each is shown, and that no changed number passes all of them."""

import numpy as np
import pytest

from fald.core.errors import SecureSumError
from fald.federation.secure import shares
from fald.federation.secure.fixed_point import add, decode, encode, total

NAMES = ["a", "b", "c", "d"]
COLUMNS = [2, 4096, 8192, 8193, 14_001, 40_000]


def uploads(columns):
    """Uploads whose masks cancel: noise, and what makes up for it."""
    rng = np.random.default_rng(columns)
    values = rng.normal(size=(4, columns))
    values[:, -1] = 1
    noise = rng.integers(0, 2**63, (3, 2, columns), dtype=np.uint64)
    masks = [*noise, (~total(noise)).copy()]
    masks[3] = add(masks[3], np.stack([np.ones(columns, np.uint64), np.zeros(columns, np.uint64)]))  # −Σ
    return [add(encode(v), m) for v, m in zip(values, masks)], values


def shown(sent, place):
    told = {"sum": decode(total(sent)), "hashes": np.stack([shares.hashes(u, len(sent)) for u in sent])}
    return {**told, "share": shares.share(sent, place)}


def checked(told, sent, place):
    return shares.check(told, NAMES, place, {shares.owner_hash(shares.hashes(sent[place], 4))}, number=7)


def refusal(told, sent, place):
    """What a site says of it; nothing where it believes it."""
    try:
        checked(told, sent, place)
    except SecureSumError as error:
        return error.message
    return ""


@pytest.mark.parametrize("columns", COLUMNS)
def test_each_site_gets_the_sum_from_its_share(columns):
    sent, values = uploads(columns)
    for place in range(4):
        told = shown(sent, place)
        found = checked(told, sent, place)
        np.testing.assert_allclose(found, values.sum(0)[:-1], rtol=0, atol=1e-12)
        assert shares.shown_bytes(4, columns) == sum(a.nbytes for a in told.values())
        assert shares.hashes_shape(4, columns) == told["hashes"].shape[1:]
    if columns == 40_000:  # a share is as large as an upload, and not as all of them
        assert told["share"].nbytes == sent[0].nbytes


@pytest.mark.parametrize("columns", COLUMNS)
def test_every_number_of_a_sum_is_checked_by_a_site(columns):
    sent, _ = uploads(columns)
    for at in {0, 1, columns // 4, columns // 2, columns - 2}:
        told = [shown(sent, place) for place in range(4)]
        for each in told:
            each["sum"] = each["sum"].copy()
            each["sum"][at] += 1e-9
        refused = [said for place in range(4) if (said := refusal(told[place], sent, place))]
        assert refused
        assert all("not the sum of the uploads of round 7" in said for said in refused)


@pytest.mark.parametrize("columns", COLUMNS)
def test_an_upload_that_was_changed_is_noticed_by_its_owner_or_by_its_hash(columns):
    sent, _ = uploads(columns)
    changed = [upload.copy() for upload in sent]
    changed[1][0, columns // 3] += np.uint64(1)
    with pytest.raises(SecureSumError, match="upload of round 7 is not its own"):
        checked(shown(changed, 1), sent, 1)
    refused = []
    for place in (0, 2, 3):  # the right hashes, and another upload: the hash of its block shows it
        told = shown(changed, place) | {"hashes": shown(sent, place)["hashes"]}
        refused += filter(None, [refusal(told, sent, place)])
        checked(shown(changed, place), sent, place)  # the twin: with its hashes the others believe it
    assert shares.hashes_shape(4, columns)[0] > 1 or len(refused) == 3
    assert all("site 'b' of round 7 does not have its hash" in said for said in refused)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sum": np.ones(4)}, {"sum": np.ones((1, 3))}, {"sum": np.ones(3, np.float32)}, {"sum": np.zeros(0)},
        {"hashes": np.zeros((3, 1, 32), np.uint8)}, {"hashes": np.zeros((4, 2, 32), np.uint8)},
        {"hashes": np.zeros((4, 1, 31), np.uint8)}, {"hashes": np.zeros((4, 1, 32), np.int64)},
        {"share": np.zeros((4, 2, 2), np.uint64)}, {"share": np.zeros((4, 2, 3), np.int64)},
        {"share": np.zeros((3, 2, 3), np.uint64)},
        {"sum": np.zeros(0), "share": np.zeros((4, 2, 0), np.uint64)},
        {"sum": np.ones((1, 3)), "share": np.zeros((4, 2, 1), np.uint64)},
    ],
)  # fmt: skip
def test_what_does_not_have_its_shape_was_not_passed_on(wrong):
    sent, _ = uploads(3)
    told = shown(sent, 0)
    checked(told, sent, 0)
    for changed in (told | wrong, {name: a for name, a in told.items() if name not in wrong}):
        with pytest.raises(SecureSumError, match="sum of round 7 was not passed on"):
            checked(changed, sent, 0)


def test_a_sum_of_other_columns_than_the_uploads_have_is_refused():
    """Blocks that overlap would fit a shorter sum, where two columns that are neighbours have one value."""
    sent = uploads(12_000)[0]
    for upload in sent:
        upload[:, 5_999] = upload[:, 6_000]  # the last column of one block, the first of the next
    for place in range(4):
        told = shown(sent, place)
        checked(told, sent, place)
        told["sum"] = np.delete(told["sum"], 6_000)
        assert "does not have its hash" in refusal(told, sent, place)


def test_uploads_of_two_sites_that_were_exchanged_are_refused_by_both():
    sent, _ = uploads(3)
    changed = [sent[1], sent[0], *sent[2:]]
    for place in (0, 1):
        assert "upload of round 7 is not its own" in refusal(shown(changed, place), sent, place)
    assert refusal(shown(changed, 2), sent, 2) == ""  # the sum is right, and so is its own upload


def test_masks_that_do_not_cancel_and_sums_of_no_terms_are_refused():
    sent, _ = uploads(3)
    odd = [*sent[:3], add(sent[3], encode([0.0, 0.0, 1.0]))]
    with pytest.raises(SecureSumError, match="masks of the 4 uploads of round 7 do not cancel"):
        checked(shown(odd, 0), sent, 0)
    far = sent[3].copy()
    far[1, 0] += np.uint64(2**46)
    told = shown([*sent[:3], sent[3]], 0)
    told["share"] = shares.share([*sent[:3], far], 0)
    told["hashes"] = np.stack([shares.hashes(u, 4) for u in [*sent[:3], far]])
    with pytest.raises(SecureSumError, match="an upload is wrong"):
        checked(told, sent, 0)


def test_marks_of_terms_that_are_no_numbers_pass(tmp_path):
    sent = [encode([-np.inf, np.nan, float(i), 1.0], saturate=True) for i in range(4)]
    found = checked(shown(sent, 2), sent, 2)
    np.testing.assert_array_equal(found, [-np.inf, np.nan, 6.0])
