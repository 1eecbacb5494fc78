"""Lines of lookouts: where they stand, and what they take for another hill."""

import numpy as np
import pytest

from fald.fewround import lookouts


@pytest.mark.parametrize("dim", [1, 2, 30, 60, 61])
def test_lines_lead_from_the_bulk_to_where_the_prior_ends(dim):
    lines = lookouts.outward(dim, 1000.0, np.random.default_rng(0))
    assert lines.shape[1:] == (16, dim)
    assert lines[:, :, 0].size <= min(1024 * dim, 2**19 // dim, 16384)
    assert (len(lines) == 0) == (dim in (1, 61))
    radii = np.linalg.norm(lines, axis=2)
    np.testing.assert_allclose(np.log(radii[:, 1:] / radii[:, :-1]), np.log(500) / 16)
    np.testing.assert_allclose(lines / radii[:, :, None], lines[:, :1] / radii[:, :1, None] + 0 * lines)
    for reach, end in ((1000.0, 1000.0), (3.0, 20.0)) if len(lines) else ():
        far = np.linalg.norm(lookouts.outward(dim, reach, np.random.default_rng(0)), axis=2)
        step = (end / 2) ** (1 / 16)
        assert 2 <= far[:, 0].min() <= far[:, 0].max() <= 2 * step
        assert end / step <= far[:, -1].min() <= far[:, -1].max() <= end
        assert far[:, -1].std() > 0


ONE_HILL = {
    "normal": lambda x: -np.sum((x - 3.0) ** 2, axis=-1) / 2,
    "laplace": lambda x: -np.abs(x).sum(axis=-1),
    "student": lambda x: -6 * np.log1p(np.sum(x**2, axis=-1) / 4),
    "gumbel": lambda x: np.sum(x - np.exp(x), axis=-1),
    "flat top": lambda x: -(np.linalg.norm(x, axis=-1) ** 4),
    "edge": lambda x: np.where(np.linalg.norm(x, axis=-1) < 10, -(x[..., 0] ** 2), -np.inf),
    "undefined": lambda x: np.where(x[..., 0] < 10, -(x[..., 0] ** 2), np.nan),
}


@pytest.mark.parametrize("name", ONE_HILL)
def test_lines_over_one_hill_show_no_other(name):
    lines = lookouts.outward(3, 100.0, np.random.default_rng(1))
    with np.errstate(over="ignore"):
        assert lookouts.risen(lines, ONE_HILL[name](lines)).shape == (0, 3)


@pytest.mark.parametrize("name", ["normal", "gumbel", "flat top"])
def test_lines_show_where_another_hill_begins(name):
    centre = np.r_[-40.0, 0.0, 0.0]
    lines = lookouts.outward(3, 100.0, np.random.default_rng(1))
    with np.errstate(over="ignore"):
        known = ONE_HILL[name](lines)
    other = -2 * np.sum((lines - centre) ** 2, axis=-1)
    found = lookouts.risen(lines, np.logaddexp(known, other))
    assert 0 < len(found) <= 32
    here = [int(np.argmin(np.linalg.norm(lines.reshape(-1, 3) - place, axis=1))) for place in found]
    assert np.mean((other > known).ravel()[here]) > 0.9
