"""What a message to a site may hold, written down again: every kind and name, each rule at its border."""

import re

import numpy as np
import pytest

from fald.core.errors import FederationError
from fald.federation.site.messages import MESSAGES, check_message
from fald.federation.wire import Message

ID, OTHER = "0123456789abcdef", "f" * 16
# by name: values that will do, and values that must be refused
VALUES = {
    "run": (
        [ID, OTHER],
        ["", ID[:-1], ID + "0", ID.upper(), ID + "\n", "../" + ID[3:], 10**15, None, [ID], b""],
    ),
    "round": ([1, 2, 2**31 - 1], [0, -1, 2**31, 1.0, True, "1", None, [1]]),
    "saved": ([0, 1, 2**31 - 1], [-1, 2**31, 0.5, 0.0, False, True, "0", None, []]),
    "names": (
        [["a"], ["a", "b"], ["B", "a"], ["n" * 200], [f"{i:03}" for i in range(512)]],
        [
            [], ["b", "a"], ["a", "a"], ["", "a"], ["n" * 201], [f"{i:03}" for i in range(513)], [1],
            ["a", None], "ab", {"a": 1}, None,
        ],
    ),
    "sizes": (
        [[1], [2**31 - 1, 1], [1] * 512],
        [[], [0], [1, 0], [-1], [1.5], [True], ["1"], [2**31], [1] * 513, "1", {"a": 1}, None],
    ),
    "version": (["", "1.0"], [1.0, None, ["1.0"]]),
    "study": ([{}, {"data": 1}], [[], "study", None, 1]),
    "secure": ([True, False], [0, 1, None, "true"]),
    "hellos": ([None, {}, {"a": {}}], [[], "a", 1, False]),
    "identities": ([{}, {"a": ""}], [[], None, "a", 1]),
}  # fmt: skip
VALUES |= {"session": VALUES["run"], "attempt": VALUES["round"], "leaves": VALUES["round"]}
IDS = ("run", "session")
NAMES = {
    "hello": (),
    "open": (*IDS, "version", "study", "secure", "names"),
    "begin": (*IDS, "names", "sizes", "hellos", "identities"),
    "ask": (*IDS, "round", "attempt"),
    "round": (*IDS, "round", "attempt", "leaves", "saved"),
    "end": IDS,
}
# names of arrays that will do, and that must be refused; of a request its own table says which
ARRAYS = {
    "hello": ((), ("weight", "x", "_")),
    "open": ((), ("weight", "prepared_x", "rows")),
    "begin": (("prepared_", "prepared_mean"), ("prepared", "preparedx", "weight", "start", "passed_x", "")),
    "ask": (("points", "passed_masked", "anything", ""), ()),
    "round": (
        ("weight", "leaf_0", "leaf_", "passed_masked"),
        ("weights", "weight_", "leaf", "leafy", "passed", "prepared_x", "points", ""),
    ),
    "end": ((), ("weight", "leaf_0")),
}


def message(kind, arrays=None, **changes):
    """An honest message but for the changes; a value ``...`` leaves the name out."""
    values = {name: VALUES[name][0][0] for name in NAMES[kind]} | changes
    return Message(kind, {name: v for name, v in values.items() if v is not ...}, arrays or {})


def refused(said, words):
    with pytest.raises(FederationError, match=re.escape(words)) as caught:
        check_message(said)
    return str(caught.value)


def test_the_table_has_every_kind_and_every_name():
    assert {kind: tuple(schema.values) for kind, schema in MESSAGES.items()} == NAMES
    assert set(ARRAYS) == set(NAMES)


@pytest.mark.parametrize("kind", NAMES)
def test_every_value_has_a_rule_and_the_rule_holds(kind):
    check_message(message(kind))
    for name in NAMES[kind]:
        right, wrong = VALUES[name]
        for value in right:
            check_message(message(kind, **{name: value}))
        for value in [*wrong, ...]:
            text = refused(message(kind, **{name: value}), f"{name} of a message {kind!r} must be ")
            assert text.endswith(MESSAGES[kind].values[name][1])  # the rule, and nothing of what came
    for more in ("among", "", *(set(VALUES) - set(NAMES[kind]))):
        refused(message(kind, **{more: 1}), f"a message {kind!r} has a value that it should not have")


@pytest.mark.parametrize("kind", NAMES)
def test_arrays_have_the_names_of_the_table_and_hold_numbers(kind):
    right, wrong = ARRAYS[kind]
    for name in right:
        check_message(message(kind, {name: np.ones(2)}))
        check_message(message(kind, {name: np.ones(2, np.int64), **dict.fromkeys(right, np.zeros((0, 3)))}))
        for bad in (np.nan, np.inf, -np.inf):
            for dtype in (np.float32, np.float64):
                said = message(kind, {name: np.array([1.0, bad], dtype)})
                if name.startswith("passed_"):  # sums of the sites, which may have places without density
                    check_message(said)
                else:
                    refused(said, f"an array of a message {kind!r} has numbers that are not finite")
    for name in wrong:
        refused(message(kind, {name: np.ones(1)}), f"a message {kind!r} has an array that it should not have")
        for other in right[:1]:
            refused(message(kind, {other: np.ones(1), name: np.ones(1)}), "should not have")


@pytest.mark.parametrize("kind", ["", "Hello", "reply", "refusal", "last", "x" * 4000])
def test_other_kinds_are_not_known(kind):
    text = refused(Message(kind, {}, {}), "unknown kind of message")
    assert len(text) < 80
