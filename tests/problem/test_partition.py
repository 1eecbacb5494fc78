"""One data set split into clients: every row once, no client empty, seeds reproducible."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fald import partition
from fald.core.errors import ConfigError, DataError

ROWS = np.arange(200)
LABELS = np.random.default_rng(0).choice(5, 200, p=[0.4, 0.3, 0.2, 0.09, 0.01])

SPLITS = {
    "iid": lambda n, seed: partition.iid((ROWS, LABELS), n, seed=seed),
    "dirichlet 0.01": lambda n, seed: partition.dirichlet(
        (ROWS, LABELS), LABELS, n, concentration=0.01, seed=seed
    ),
    "dirichlet 100": lambda n, seed: partition.dirichlet(
        (ROWS, LABELS), LABELS, n, concentration=100.0, seed=seed
    ),
    "pathological": lambda n, seed: partition.pathological(
        (ROWS, LABELS), LABELS, n, classes_per_client=1, seed=seed
    ),
}


@pytest.mark.parametrize("name", SPLITS)
@given(num_clients=st.integers(1, 200), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_every_row_once_no_client_empty_labels_stay_with_rows(name, num_clients, seed):
    data = SPLITS[name](num_clients, seed)
    rows, labels = data.rows
    assert data.num_clients == num_clients
    assert data.sizes.min() >= 1
    assert np.array_equal(np.sort(rows), ROWS)
    assert np.array_equal(labels, LABELS[rows])
    assert SPLITS[name](num_clients, seed).fingerprint() == data.fingerprint()


@pytest.mark.parametrize("name", SPLITS)
def test_seeds_matter(name):
    assert SPLITS[name](10, 0).fingerprint() != SPLITS[name](10, 1).fingerprint()


def test_rows_of_one_class_are_dealt_by_chance():
    parts = [partition.pathological(ROWS, 0 * LABELS, 4, classes_per_client=1, seed=s) for s in (0, 1)]
    first, second = ({frozenset(p.client(n)[0].tolist() if isinstance(p.client(n), tuple)
                                else p.client(n).tolist()) for n in p.names} for p in parts)  # fmt: skip
    assert not first & second


def test_names_are_in_the_order_of_numbers():
    data = partition.iid(ROWS, 101)
    assert data.names[:3] == ("client-000", "client-001", "client-002")
    assert data.names[-1] == "client-100"
    assert partition.iid(ROWS, 10).names[-1] == "client-9"
    assert partition.iid(ROWS, 11).names[-1] == "client-10"


def test_as_many_shards_as_rows_give_each_client_single_rows():
    data = partition.pathological(np.arange(6.0), np.zeros(6), 3, classes_per_client=2)
    assert data.sizes.tolist() == [2, 2, 2]


def test_the_last_client_has_its_share_of_every_class():
    """Large parameters make equal shares, of which the last is as large as the others."""
    data = partition.dirichlet(np.arange(4000.0), np.repeat([0, 1], 2000), 4, concentration=1e6)
    for name in data.names:
        rows = np.asarray(data.client(name))
        assert len(rows) == pytest.approx(1000, abs=12)
        assert np.sum(rows < 2000) == pytest.approx(500, abs=6)


def test_iid_sizes_differ_by_at_most_one():
    sizes = partition.iid(ROWS, 7).sizes
    assert sizes.max() - sizes.min() <= 1


def majority_share(data):
    """Share of the most common class at a client, averaged over rows."""
    counts = [np.bincount(data.client(n)[1], minlength=5).max() for n in data.names]
    return sum(counts) / data.num_rows


def test_concentration_sets_how_different_clients_are():
    alike, apart = SPLITS["dirichlet 100"](8, 0), SPLITS["dirichlet 0.01"](8, 0)
    overall = np.bincount(LABELS).max() / len(LABELS)
    assert majority_share(alike) < overall + 0.1
    assert majority_share(apart) > majority_share(alike) + 0.2
    assert apart.sizes.max() > 2 * alike.sizes.max()


def test_pathological_clients_have_few_classes():
    labels = np.repeat(np.arange(10), 60)
    data = partition.pathological((labels, labels), labels, 10, classes_per_client=2)
    assert all(len(np.unique(data.client(n)[1])) <= 2 for n in data.names)
    assert set(data.sizes.tolist()) == {60}


def test_rows_may_be_any_tree():
    rows = {"x": np.random.default_rng(0).normal(size=(200, 3)), "id": ROWS}
    data = partition.iid(rows, 4)
    assert np.array_equal(data.rows["x"], rows["x"][data.rows["id"]])


@pytest.mark.parametrize("num_clients", [0, -1, 201, 2.5])
@pytest.mark.parametrize("name", SPLITS)
def test_bad_numbers_of_clients(name, num_clients):
    with pytest.raises(ConfigError, match="num-clients must be a whole number from 1 to the 200 rows"):
        SPLITS[name](num_clients, 0)


@pytest.mark.parametrize("concentration", [0.0, -1.0, np.nan, np.inf])
def test_bad_concentrations(concentration):
    with pytest.raises(ConfigError, match="concentration must be a finite number > 0"):
        partition.dirichlet(ROWS, LABELS, 4, concentration=concentration)


@pytest.mark.parametrize("classes_per_client", [0, -2, 51, 0.3])
def test_bad_shards(classes_per_client):
    with pytest.raises(ConfigError, match="classes-per-client must be a whole number from 4"):
        partition.pathological(ROWS, LABELS, 4, classes_per_client=classes_per_client)


def test_labels_and_rows_must_match():
    for labels in (LABELS[:-1], LABELS[:, None]):
        with pytest.raises(ConfigError, match="labels must be one per row"):
            partition.dirichlet(ROWS, labels, 4, concentration=1.0)
        with pytest.raises(ConfigError, match="labels must be one per row"):
            partition.pathological(ROWS, labels, 4)
    with pytest.raises(ConfigError, match=r"same number of rows; got \[199, 200\]"):
        partition.iid((ROWS, LABELS[:-1]), 4)


def test_by_column_is_a_client_per_value():
    frame = pd.DataFrame({"region": ["n", "s", "n", "w"], "sex": list("fmfm"), "y": [0, 1, 1, 0]})
    data = partition.by_column(frame, "region", target="y", features=["sex"], categories={"sex": ["f", "m"]})
    assert data.names == ("n", "s", "w")
    assert data.features == ("sex=m",)
    assert data.client("n")[1].tolist() == [0, 1]
    with pytest.raises(DataError, match="no column 'regio'"):
        partition.by_column(frame, "regio", target="y", features=["sex"])
