"""Messages that nobody would think of: each ends in a refusal or an honest answer, and is in the record."""

import json

import numpy as np
import pytest
from hostile import FEW_ROUND, IDS, NAMES, PRIVATE, SIZES, START, Coordinator, honest_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fald.core.version import __version__
from fald.federation import wire
from fald.federation.site.messages import MESSAGES
from fald.federation.site.record import read_record
from fald.fewround.site import PARTS

odd = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8),
    st.lists(st.integers(-3, 3), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip
numbers = st.sampled_from(
    [0.0, 1.0, -1.0, 1e-310, 1e8, -1e8, 1e150, 1.7e308, float("inf"), float("-inf"), float("nan")]
)
types = st.sampled_from(["float64", "float32", "int64", "uint64", "bool", "uint8"])


@st.composite
def arrays(draw):
    """A named array of any type and shape, among those that requests have or beside them."""
    name = draw(
        st.one_of(
            st.sampled_from([*PARTS, "weight", "leaf_0", "passed_masked", "start"]), st.text(max_size=6)
        )
    )
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5]), max_size=3))
    with np.errstate(invalid="ignore"):
        return name, np.full(shape, draw(numbers)).astype(draw(types))


@st.composite
def messages(draw):
    """A message of any kind, most of it as it should be."""
    kind = draw(st.sampled_from([*MESSAGES, "ask", "round", "ask", "round", "shutdown"]))
    values = {
        **IDS, "version": __version__, "study": FEW_ROUND, "secure": True, "names": NAMES, "sizes": SIZES,
        "hellos": {}, "identities": {}, "attempt": 1, "leaves": 1, "saved": 0,
        "round": draw(st.integers(-1, 3)),
    }  # fmt: skip
    known = set(MESSAGES[kind].values) if kind in MESSAGES else set(values)
    told = {k: v for k, v in values.items() if k in known}
    for key in draw(st.lists(st.sampled_from([*values, "among", "extra"]), max_size=2)):
        told[key] = draw(odd)
    return kind, told, dict(draw(st.lists(arrays(), max_size=4)))


def plain(value):
    """As it goes through JSON; what does not is another test's."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return None


@pytest.fixture(params=["few rounds", "private chains"])
def opened(request, tmp_path):
    coordinator = Coordinator(tmp_path)
    coordinator.begin(coordinator.open(FEW_ROUND if request.param == "few rounds" else PRIVATE))
    return coordinator


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(messages(), min_size=1, max_size=3))
def test_any_message_is_refused_or_answered_honestly(opened, sent):
    worker = opened.workers["a"]
    for kind, values, given_arrays in sent:
        before = len(read_record(worker.settings.state))
        paid = charged(worker)
        reply = wire.unpack(worker.handle(wire.pack(kind, plain(values) or {}, given_arrays)))
        assert reply.kind in ("reply", "refusal")
        log = read_record(worker.settings.state)
        assert len(log) == before + 1
        if reply.kind == "refusal":
            assert not reply.arrays
            assert len(reply.values["message"]) < 1000
            assert charged(worker) == paid
        elif kind in ("ask", "round"):  # then it must be what the protocol asks
            assert values["round"] == 1
            honest = next(honest_server(FEW_ROUND)) if kind == "ask" else {"leaf_0": START}
            assert all(np.array_equal(given_arrays[name], honest[name]) for name in honest)


def charged(worker):
    path = worker.settings.state / "ledger.jsonl"
    return path.read_text() if path.exists() else ""


def test_bytes_that_are_no_message_are_refused(opened):
    worker = opened.workers["a"]
    for content in (b"", b"FALD", b"FALD\x01\xff\xff\xff\xff", bytes(1000)):
        reply = wire.unpack(worker.handle(content))
        assert "not a message" in reply.values["message"]
