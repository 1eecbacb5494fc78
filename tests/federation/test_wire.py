"""The bytes of messages: what is accepted means one thing, and all else is refused."""

import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from fald.core.errors import FederationError
from fald.federation import wire

MARK = b"FALD\x01"
TYPES = ["bool", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64"]
HEADER = {"kind": "ask", "values": {"round": 3}, "arrays": [["x", "int32", [2]], ["y", "bool", [3]]]}
ARRAYS = np.array([7, -8], "<i4").tobytes() + b"\x00\x01\x00"
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def written(header=HEADER, rest=ARRAYS, *, text=None, length=None, mark=MARK):
    """A message put together by hand; ``text`` in place of the header, ``length`` in place of its own."""
    text = json.dumps(header).encode() if text is None else text
    return mark + struct.pack("<I", len(text) if length is None else length) + text + rest


def read(content):
    """What a message says, read by the letter of the layout."""
    assert content[:5] == MARK
    (length,) = struct.unpack("<I", content[5:9])
    header = json.loads(content[9 : 9 + length])
    found, place = {}, 9 + length
    for name, kind, shape in header["arrays"]:
        count, width = math.prod(shape), {"bool": 1, "uint8": 1}.get(kind, 4 if kind.endswith("32") else 8)
        found[name] = (kind, shape, content[place : place + count * width])
        place += count * width
    assert place == len(content)
    return header["kind"], header["values"], found


def same(message, content):
    """Whether a message that was accepted says what its bytes say, to the last bit."""
    kind, values, arrays = read(content)
    assert (message.kind, message.values) == (kind, values)
    assert list(message.arrays) == list(arrays)
    for name, (dtype, shape, raw) in arrays.items():
        a = message.arrays[name]
        assert (a.dtype.name, list(a.shape)) == (dtype, shape)
        assert a.dtype == np.dtype(dtype)  # in the order of bytes of this machine
        assert a.astype(a.dtype.newbyteorder("<")).tobytes() == raw
    return True


def refused(content):
    with pytest.raises(FederationError, match="not a message of this version"):
        wire.unpack(content)


def test_a_message_by_hand_is_read_by_the_letter():
    message = wire.unpack(written())
    assert message.arrays["x"].tolist() == [7, -8]
    assert message.arrays["y"].tolist() == [False, True, False]
    assert message.kind == "ask"
    assert message.values == {"round": 3}
    assert same(message, written())
    message.arrays["x"][0] = 1  # a copy, which whoever reads it may change


@pytest.mark.parametrize("dtype", [*TYPES, ">f8", ">i4", "float16", "complex64", "int16", "U3", "O"])
def test_types_are_those_of_the_layout_and_no_others(dtype):
    array = np.array([[1, 0, 1]]).astype(dtype)[:, ::2]
    if np.dtype(dtype).name not in TYPES:
        with pytest.raises(FederationError, match=r"'x' of type .* cannot be sent"):
            wire.pack("ask", {}, {"x": array})
        return
    content = wire.pack("ask", {}, {"x": array})
    assert same(wire.unpack(content), content)
    assert wire.unpack(content).arrays["x"].tolist() == array.tolist()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    kind=st.text(max_size=8),
    values=st.dictionaries(st.text(max_size=5), plain, max_size=3),
    arrays=st.dictionaries(
        st.text(max_size=4),
        st.sampled_from(TYPES).flatmap(
            lambda t: arrays_of.arrays(t, arrays_of.array_shapes(min_dims=0, min_side=0, max_side=3))
        ),
        max_size=3,
    ),
)  # fmt: skip
def test_what_is_packed_is_unpacked(kind, values, arrays):
    content = wire.pack(kind, values, arrays)
    found = wire.unpack(content)
    assert same(found, content)
    assert (found.kind, found.values) == (kind, values)
    for name, a in arrays.items():
        assert (found.arrays[name].dtype, found.arrays[name].shape) == (a.dtype, a.shape)
        assert found.arrays[name].tobytes() == a.tobytes()
    refused(content + b"\x00")
    refused(content[:-1])


def test_every_end_but_the_right_one_is_refused():
    content = written()
    for stop in range(len(content)):
        refused(content[:stop])
    for more in (b"\x00", b"FALD", content):
        refused(content + more)


HEADERS = {
    "a name of an array twice": {**HEADER, "arrays": [["x", "int32", [2]], ["x", "bool", [3]]]},
    "a name that is no text": {**HEADER, "arrays": [[5, "int32", [2]], ["y", "bool", [3]]]},
    "a list for a name": {**HEADER, "arrays": [[["x"], "int32", [2]], ["y", "bool", [3]]]},
    "a type that is not of the layout": {**HEADER, "arrays": [["x", "int16", [4]], ["y", "bool", [3]]]},
    "an object": {**HEADER, "arrays": [["x", "O", [1]], ["y", "bool", [3]]]},
    "a negative length": {**HEADER, "arrays": [["x", "int32", [-2]], ["y", "bool", [3]]]},
    "a length that leads back": {**HEADER, "arrays": [["x", "int32", [-1]], ["y", "uint8", [15]]]},
    "two negative lengths": {**HEADER, "arrays": [["x", "int32", [-1, -2]], ["y", "bool", [3]]]},
    "a length that is no whole number": {**HEADER, "arrays": [["x", "int32", [2.0]], ["y", "bool", [3]]]},
    "a truth for a length": {**HEADER, "arrays": [["x", "uint8", [8, True]], ["y", "bool", [3]]]},
    "more than there is": {**HEADER, "arrays": [["x", "int32", [2]], ["y", "bool", [4]]]},
    "less than there is": {**HEADER, "arrays": [["x", "int32", [2]], ["y", "bool", [2]]]},
    "so much that it overflows": {**HEADER, "arrays": [["x", "int32", [2**62, 4]]]},
    "nothing, of a huge shape": {**HEADER, "arrays": [["z", "int32", [0, 2**70]], *HEADER["arrays"]]},
    "more axes than an array has": {**HEADER, "arrays": [["z", "int32", [1] * 70], ["y", "bool", [7]]]},
    "a part of the header that nobody knows": {**HEADER, "more": 1},
    "no kind": {k: v for k, v in HEADER.items() if k != "kind"},
    "no values": {k: v for k, v in HEADER.items() if k != "values"},
    "no arrays": {k: v for k, v in HEADER.items() if k != "arrays"},
    "a kind that is no text": {**HEADER, "kind": 3},
    "values that have no names": {**HEADER, "values": [1]},
    "an array of two parts": {**HEADER, "arrays": [["x", "int32"]]},
    "half a character in a name": {**HEADER, "values": {"\ud800": 1}},
    "half a character in a value": {**HEADER, "values": {"a": ["\udfff"]}},
    "a list for a header": [HEADER],
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_say_something_else_are_refused(case):
    refused(written(HEADERS[case]))


def test_names_twice_anywhere_in_the_header_are_refused():
    text = json.dumps(HEADER)
    for old, new in (
        ('"kind": "ask"', '"kind": "ask", "kind": "round"'),
        ('{"round": 3}', '{"round": 3, "round": 4}'),
        ('{"round": 3}', '{"round": [{"a": 1, "a": 1}]}'),
        ('"arrays"', '"arrays": [], "arrays"'),
    ):
        changed = text.replace(old, new)
        assert changed != text
        refused(written(text=changed.encode()))


def test_other_marks_versions_and_lengths_are_refused():
    for mark in (b"FALD\x00", b"FALD\x02", b"fald\x01", b"XALD\x01", b"FALE\x01"):
        refused(written(mark=mark))
    text = json.dumps(HEADER).encode()
    for length in (len(text) - 1, len(text) + 1, 0, 2**32 - 1):
        refused(written(length=length))
    refused(written(rest=ARRAYS[:-1] + b"\x02"))  # a truth value that is neither
    refused(written(text=b"[" * 100_000))
    refused(written(text=b"\xff" + text))


def test_sizes_are_limited_at_the_border():
    content = written()
    assert wire.unpack(content, most=len(content)).kind == "ask"
    with pytest.raises(FederationError, match=f"has {len(content)} bytes; at most {len(content) - 1} are"):
        wire.unpack(content, most=len(content) - 1)
    header = {**HEADER, "values": {"padding": ""}}
    room = 4 * 2**20 - len(json.dumps(header).encode())
    assert wire.unpack(written({**HEADER, "values": {"padding": "a" * room}})).kind == "ask"
    refused(written({**HEADER, "values": {"padding": "a" * (room + 1)}}))
    assert wire.MOST_BYTES == 2**30
    assert wire.PROTOCOL == 3  # another protocol is another version: sites of different releases must not mix


@settings(max_examples=300, deadline=None, derandomize=True)
@given(place=st.integers(0, len(written()) - 1), byte=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_means_what_it_says(place, byte):
    content = bytearray(written())
    content[place] = byte
    try:
        message = wire.unpack(bytes(content))
    except FederationError:
        return
    assert same(message, bytes(content))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=60))
def test_nonsense_is_refused(content):
    refused(content)
    refused(MARK + content)


def test_a_digest_is_that_of_the_bytes():
    assert wire.digest(b"a").hex().startswith("ca978112ca1bbdca")


@pytest.mark.parametrize(
    "shape", [[2**70, 0], [2**62, 4, 0], [1] * 33, [-1], [2**63], [True], "12", {"1": 1}]
)
def test_shapes_that_no_array_has_are_no_message(shape):
    refused(written({"kind": "ask", "values": {}, "arrays": [["x", "uint8", shape]]}, b"\x00"))
    refused(written({"kind": "ask", "values": {}, "arrays": [["x", "uint8", shape]]}, b""))


@pytest.mark.parametrize("more", range(9))
def test_arrays_begin_where_numbers_of_eight_bytes_may(more):
    content = wire.pack("k" * more, {}, {"x": np.arange(3.0)})
    (length,) = struct.unpack("<I", content[5:9])
    assert (9 + length) % 8 == 0
    assert content[9 : 9 + length].rstrip(b" ").endswith(b"}")
    assert len(content) == 9 + length + 24


def test_a_digest_of_a_task_leaves_out_what_one_site_is_shown_alone():
    def digest(kind="ask", values=None, **arrays):
        content = wire.pack(kind, values, {"x": np.arange(4.0), wire.SHARE: np.arange(2.0), **arrays})
        return wire.digest(content, wire.unpack(content))

    assert digest(**{wire.SHARE: np.array([5.0, 7.0])}) == digest()
    others = [
        digest(x=np.array([0.0, 1, 2, 4])), digest(x=np.arange(4)), digest(x=np.arange(4.0)[None]),
        digest(values={"round": 1}), digest("asj"), digest(y=np.zeros(0)),
        digest(**{wire.SHARE: np.zeros(3)}), digest(**{f"{wire.PASSED}sum": np.zeros(2)}),
    ]  # fmt: skip
    assert len({digest(), *others}) == len(others) + 1
