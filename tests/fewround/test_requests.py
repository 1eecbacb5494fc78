"""What a site looks at in a request before any row: type, shape and size of every part, at their borders."""

import numpy as np
import pytest

from fald.core.errors import PolicyError
from fald.fewround.site import ANSWERS, PARTS, answer_shapes, asked, check_answer, check_request

DIM = 3
LARGEST = {"P": 262_144, "M": 65_536, "E": 1024, "C": 4096, "k": 64}
COUNTS = {"proposal_count": 262_144, "smooth": 1024, "step_count": 64}
FIXED = {"d": DIM, "D": 2 * DIM, "2": 2}


def array(kind, shape):
    """Zeros that take no memory, whatever their size."""
    return np.broadcast_to(np.zeros((), {"f": np.float64, "i": np.int64}[kind]), shape)


def whole(group):
    """All parts of a group; the others stand alone."""
    kinds = {name: PARTS[name] for name in PARTS if name.startswith(group)}
    return {
        name: array(kind, tuple(FIXED.get(letter, 1) for letter in shape))
        for name, (kind, shape) in kinds.items()
    }


GROUPS = {
    name: next((g for g in ("proposal_", "step_", "leverage_") if name.startswith(g)), name) for name in PARTS
}


def with_part(name, value):
    request = {**whole(GROUPS[name]), name: value}
    return {**whole("proposal_"), **request} if name == "smooth" else request


def refused(request, words):
    with pytest.raises(PolicyError, match=words):
        check_request(request, DIM)


@pytest.mark.parametrize("name", PARTS)
def test_every_part_has_a_type_and_a_shape(name):
    kind, shape = PARTS[name]
    least = tuple(FIXED.get(letter, 1) for letter in shape)
    most = tuple(FIXED.get(letter) or LARGEST[letter] for letter in shape)
    for right in (least, most):
        check_request(with_part(name, array(kind, right)), DIM)
    wrong = [(*least, 1), (1, *least)] + ([least[1:]] if least else [])
    for i in range(len(shape)):
        wrong += [(*most[:i], most[i] + 1, *most[i + 1 :]), (*least[:i], least[i] - 1, *least[i + 1 :])]
    for other in wrong:
        refused(with_part(name, array(kind, other)), f"'{name}' of a request does not have the shape")
    for other in (np.zeros(least, bool), np.zeros(least, np.uint8), array("if"[kind == "i"], least)):
        refused(with_part(name, other), f"'{name}' of a request does not have the shape")


@pytest.mark.parametrize("name", COUNTS)
def test_counts_have_bounds(name):
    for right in (0, 1, COUNTS[name]):
        check_request(with_part(name, np.asarray(right)), DIM)
    for wrong in (-1, COUNTS[name] + 1):
        refused(with_part(name, np.asarray(wrong)), f"'{name}' of a request asks for more than")


@pytest.mark.parametrize("name", [name for name in PARTS if GROUPS[name] != name])
def test_a_group_of_parts_comes_whole(name):
    group = whole(GROUPS[name])
    check_request(group, DIM)
    refused({key: part for key, part in group.items() if key != name}, f"parts {GROUPS[name]}")


def test_smoothing_takes_draws_and_other_parts_are_unknown():
    refused({"smooth": np.asarray(5)}, "smooths draws that it does not make")
    check_request({**whole("proposal_"), "smooth": np.asarray(5)}, DIM)
    check_request({}, DIM)
    for odd in ("draws", "point", "proposal_", "step_other", "leverage", ""):
        with pytest.raises(PolicyError):
            check_request({odd: np.zeros(1)}, DIM)


@pytest.mark.parametrize("name", PARTS)
def test_every_part_belongs_to_one_kind_of_request(name):
    kinds = [kind for kind, a in ANSWERS.items() if any(name.startswith(p) for p in a.asks)]
    assert asked({name: np.zeros(1)}) == kinds
    assert len(kinds) == 1


def test_answers_have_the_declared_arrays_and_shapes():
    request = {
        "points": array("f", (4, DIM)), "states": array("f", (5, DIM)), "anchors": array("f", (6, DIM)),
        "local_start": array("f", (DIM,)), **whole("proposal_"), "proposal_count": np.asarray(7),
        "smooth": np.asarray(2), **whole("step_"), "step_states": array("f", (2, 8, DIM)),
        **whole("leverage_"),
    }  # fmt: skip
    shapes = answer_shapes(request, DIM)
    assert shapes == {
        "point_values": (4,), "draw_values": (7,), "state_values": (5,), "state_gradients": (5, 3),
        "anchor_values": (6,), "anchor_gradients": (6, 3), "anchor_hessians": (6, 3, 3),
        "smooth_gradient": (3,), "smooth_hessian": (3, 3), "local_precision": (3, 3), "local_shift": (3,),
        "local_mode": (3,), "local_square": (3, 3), "local_sites": (), "step_leverage": (),
        "step_positions": (2, 8, 3),
    }  # fmt: skip
    answer = {name: np.zeros(shape) for name, shape in shapes.items()}
    assert "hessian" in check_answer(answer, DIM)
    assert check_answer({"point_values": np.zeros(4)}, DIM) == ["value"]
    with pytest.raises(PolicyError, match="'rows' of its answer is not declared"):
        check_answer({**answer, "rows": np.zeros(3)}, DIM)
    for name, right in answer.items():
        with pytest.raises(PolicyError):
            check_answer({**answer, name: right[..., None]}, DIM)
    without = {k: v for k, v in request.items() if not k.startswith("leverage_")}
    assert set(shapes) - set(answer_shapes(without, DIM)) == {"step_leverage"}
    none = answer_shapes({**request, "smooth": np.asarray(0)}, DIM)
    assert set(shapes) - set(none) == {"smooth_gradient", "smooth_hessian"}
