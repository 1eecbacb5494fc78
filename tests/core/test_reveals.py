"""The vocabulary of what leaves, written down again: a slip in it would weaken every check made from it."""

import numpy as np
import pytest

from fald.core.errors import PolicyError
from fald.core.reveals import (
    KINDS,
    UNDECLARED,
    Reveals,
    check_kind,
    check_preparation,
    check_upload,
    shows_curvature,
)
from fald.fewround.methods import FIT_METHODS
from fald.fewround.site import ANSWERS
from fald.langevin.registry import METHODS, declared

# axes of the length of the parameters, whether it is made of second derivatives over rows, binary digits that
# leave in a sum, and the power of the parameters' units that each axis has
MEANT = {
    "nothing": (0, False, None, 0), "count": (0, False, None, 0), "value": (0, False, 12, 0),
    "point": (1, False, None, 0), "position": (1, False, None, 0), "quantised": (1, False, None, 0),
    "whitened": (1, False, 20, 0), "squares": (1, True, None, -2), "gradient": (1, False, 12, -1),
    "shift": (1, False, 12, -1), "mode": (1, False, 12, 1), "hessian": (2, True, 12, -1),
    "precision": (2, True, 12, -1), "square": (2, True, 12, 1), "leverage": (0, True, 30, 0),
}  # fmt: skip
CURVED_METHODS = {"fsgld", "consensus", "consensus-parametric", "laplace"}
CURVED_REQUESTS = {"anchor", "smooth", "local", "step"}


def test_kinds_are_those_that_are_meant():
    assert {kind: (k.axes, k.curvature, k.grid, k.power) for kind, k in KINDS.items()} == MEANT
    for kind, (_, curved, _, _) in MEANT.items():
        assert shows_curvature([kind]) == shows_curvature(["value", kind]) == curved
    assert not shows_curvature([])


def test_methods_and_requests_that_send_curvature_are_those():
    known = {name for name in METHODS if declared(name) is not None}
    assert {name for name in known if declared(name).reveals.curvature} == CURVED_METHODS
    found = {
        kind for kind, a in ANSWERS.items() if shows_curvature(number for number, _ in a.arrays.values())
    }
    assert found == CURVED_REQUESTS
    for method in FIT_METHODS.values():
        assert not CURVED_REQUESTS & set(method.without_curvature)


def test_a_declaration_must_make_sense():
    with pytest.raises(ValueError, match="no kind of number is called 'rows'"):
        Reveals(("position", "rows"))
    with pytest.raises(ValueError, match="no kind of number is called 'rows'"):
        Reveals(preparation={"x": "rows"})
    with pytest.raises(ValueError, match="at least a position and an energy"):
        Reveals(("position",))
    for more in ({"uploads": ("position", "value", "gradient")}, {"preparation": {"x": "mode"}}):
        with pytest.raises(ValueError, match="only positions and energies are summed"):
            Reveals(**more, sums=True)
    Reveals(("position", "value"), sums=True)


def test_a_declaration_says_what_it_holds():
    plain = Reveals()
    assert (plain.uploads, plain.sums, plain.accounted, plain.declared) == (
        ("position", "value"),
        False,
        False,
        True,
    )
    assert (plain.energy, plain.curvature, plain.kinds) == (True, False, ("value", "position"))
    quiet = Reveals(("position", "nothing"), preparation={"x": "hessian"})
    assert (quiet.energy, quiet.curvature) == (False, True)
    assert quiet.kinds == ("nothing", "position", "hessian")
    assert quiet.sentences() == ["where its own steps ended", "second derivatives over its rows"]
    assert UNDECLARED.curvature  # as far as anybody knows
    assert not UNDECLARED.declared
    assert hash(quiet) == hash(Reveals(("position", "nothing"), preparation={"y": "mode"}))  # for caches


@pytest.mark.parametrize("place", range(3))
def test_every_array_of_an_upload_is_looked_at(place):
    """Costs, position and energy each with a shape of its own, and the wrong one anywhere is seen."""
    reveals = Reveals(("position", "nothing"))
    right = [np.ones(2), np.ones((2, 3)), np.zeros(2)]
    check_upload(reveals, right[1:], right[:1], 3)
    wrong = [*right[:place], np.ones((2, 4)), *right[place + 1 :]]
    with pytest.raises(PolicyError, match=f"of the kind '{('count', 'position', 'nothing')[place]}'"):
        check_upload(reveals, wrong[1:], wrong[:1], 3)
    with pytest.raises(PolicyError, match="declares to keep"):
        check_upload(reveals, [right[1], np.array([0.0, 1e-300])], [], 3)
    for few in (right[1:2], [], [*right[1:], right[2]]):
        with pytest.raises(PolicyError, match=f"would send {len(few)} arrays where it declares 2"):
            check_upload(reveals, few, [], 3)


def test_what_is_not_declared_does_not_leave():
    arrays = [np.zeros((2, 3)), np.zeros(2)]
    check_upload(Reveals(), arrays, [np.zeros(2)], 3)
    with pytest.raises(PolicyError, match="does not declare what it sends"):
        check_upload(UNDECLARED, arrays, [], 3)
    with pytest.raises(PolicyError, match=r"does not send what the method declares$"):
        check_preparation(UNDECLARED, {}, 3)
    with pytest.raises(PolicyError, match="does not send what the method declares: 'x'"):
        check_preparation(Reveals(), {"x": np.zeros((1, 3))}, 3)
    check_preparation(Reveals(), {}, 3)
    prepares, sent = Reveals(preparation={"x": "point"}), {"x": np.zeros((1, 3))}
    check_preparation(prepares, sent, 3)
    for wrong in ({}, sent | {"y": np.zeros((1, 3))}, {"x": np.zeros((1, 3, 3))}):
        with pytest.raises(PolicyError):
            check_preparation(prepares, wrong, 3)


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_number_has_its_shape(kind):
    axes = KINDS[kind].axes
    right = np.zeros((4, *(3,) * axes))
    check_kind(kind, right, 3)
    check_kind(kind, right[None], 3, many=2)
    for wrong in (right[..., None], np.zeros((4, *(4,) * (axes or 1))), np.zeros(()), right[None]):
        with pytest.raises(PolicyError, match=f"cannot be of the kind '{kind}'"):
            check_kind(kind, wrong, 3)
    if kind == "nothing":
        with pytest.raises(PolicyError, match="declares to keep"):
            check_kind(kind, right + np.eye(4)[3] * 1e-300, 3)
    else:
        check_kind(kind, right + 1, 3)
