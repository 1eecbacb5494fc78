"""Clients' rows from arrays, tables and files, and every way they can be wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import fald
from fald.core.errors import ConfigError, DataError, ExitCode
from fald.problem.data import encode_features, read_table

FederatedData = fald.FederatedData


def table(**changes):
    columns = {
        "hospital": ["b", "a", "b", "b", "c"],
        "age": [50, 61, 47, 39, 70],
        "sex": ["f", "m", "m", "f", "f"],
        "dose": [0.5, 1.0, 0.0, 2.0, 1.5],
        "ill": [0, 1, 0, 1, 1],
    }
    return pd.DataFrame({**columns, **changes})


def from_table(frame=None, features=("age", "dose"), target="ill", **changes):
    frame = table() if frame is None else frame
    return FederatedData.from_frame(frame, site="hospital", target=target, features=features, **changes)


def refused(error, *words, call):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
    return caught.value


def test_arrays_are_kept_flat_in_the_order_of_names():
    rng = np.random.default_rng(0)
    sizes = {"z": 7, "m": 1, "a": 3}
    clients = {name: (rng.normal(size=(n, 2)), rng.integers(0, 2, n)) for name, n in sizes.items()}
    data = FederatedData.from_arrays(clients)
    assert data.names == ("a", "m", "z")
    assert data.sizes.tolist() == [3, 1, 7]
    assert data.offsets.tolist() == [0, 3, 4, 11]
    assert (data.num_clients, data.num_rows) == (3, 11)
    assert data.weights.tolist() == [3 / 11, 1 / 11, 7 / 11]
    for name, (X, y) in clients.items():
        assert np.array_equal(data.client(name)[0], X)
        assert np.array_equal(data.client(name)[1], y)
    again = FederatedData.from_arrays(dict(reversed(clients.items())))
    assert again.fingerprint() == data.fingerprint()


def test_rows_may_be_any_tree():
    data = FederatedData.from_arrays(
        {1: {"x": np.ones((2, 3)), "t": np.array([1, 2])}, 2: {"x": np.zeros((1, 3)), "t": np.array([3])}}
    )
    assert data.names == ("1", "2")
    assert data.client("2")["t"].tolist() == [3]


def test_unknown_client_is_answered_with_those_there_are():
    refused(DataError, "no client named 'x'", "a, b, c", call=lambda: from_table().client("x"))


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ({}, ["no clients"]),
        ({"a": np.ones((2, 1)), "b": np.ones((0, 1))}, ["'b'", "no rows", "leave out"]),
        ({"a": np.ones((2, 1)), "b": np.ones((2, 3))}, ["'b'", "(3,)", "(1,)"]),
        ({"a": (np.ones(2), np.ones(3))}, ["'a'", "different numbers of rows [2, 3]"]),
        ({"a": np.ones(2), "b": (np.ones(2),)}, ["'b'", "another structure"]),
        ({"a": np.array(1.0)}, ["'a'", "without a row axis"]),
        ({"a": (np.ones((2, 1)), [0, 1])}, ["'a'", "not lists"]),
        ({"a": np.array(["x", "y"])}, ["'a'", "numbers are needed"]),
        ({"a": np.array([1.0, np.nan])}, ["'a'", "missing or infinite value in row 1"]),
        ({"a": np.array([[1.0, 2.0], [np.inf, 0.0]])}, ["'a'", "row 1"]),
        ({1: np.ones(2), "1": np.ones(2)}, ["differ as text", "'1'"]),
    ],
)
def test_bad_arrays(clients, words):
    error = refused(DataError, *words, call=lambda: FederatedData.from_arrays(clients))
    assert error.exit_code == ExitCode.DATA == 3


@pytest.mark.parametrize(
    ("offsets", "names", "words"),
    [
        ([0, 2, 5], ("a",), "one entry more"),
        ([0, 5], (), "one entry more"),
        ([0, 2, 5], ("b", "a"), "ascending"),
        ([0, 2, 5], ("a", "a"), "distinct"),
        ([0, 0, 5], ("a", "b"), "without rows: a"),
        ([0, 2, 4], ("a", "b"), "4 rows"),
        ([1, 2, 5], ("a", "b"), "offsets"),
    ],
)
def test_bad_offsets(offsets, names, words):
    refused(DataError, words, call=lambda: FederatedData(np.ones((5, 1)), np.array(offsets), names))


def test_fingerprint_changes_with_every_part_of_the_content():
    frames = [
        table(),
        table(age=[50, 61, 47, 39, 71]),
        table(ill=[1, 1, 0, 1, 1]),
        table(hospital=["b", "a", "b", "a", "c"]),
        table(hospital=["B", "a", "B", "B", "c"]),
    ]
    prints = [from_table(f).fingerprint() for f in frames]
    prints += [from_table(features=["dose", "age"]).fingerprint(), from_table(features=["age"]).fingerprint()]
    assert len(set(prints)) == len(prints)
    assert from_table().fingerprint() == prints[0]


def test_frame_is_split_by_site_in_the_order_of_its_rows():
    data = from_table()
    assert data.names == ("a", "b", "c")
    assert data.sizes.tolist() == [1, 3, 1]
    assert data.features == ("age", "dose")
    assert data.target == "ill"
    X, y = data.client("b")
    assert X.tolist() == [[50, 0.5], [47, 0], [39, 2]]
    assert y.tolist() == [0, 0, 1]


def test_sites_may_be_numbers_but_not_both():
    assert from_table(table(hospital=[2, 1, 2, 2, 10])).names == ("1", "10", "2")
    mixed = pd.Series([2, "2", 2, 2, 1], dtype=object)
    refused(DataError, "'2' stands for several", call=lambda: from_table(table(hospital=mixed)))


@pytest.mark.parametrize("nothing", [None, np.nan, "", "  "])
def test_rows_without_a_site(nothing):
    frame = table(hospital=["b", "a", nothing, "b", "c"])
    refused(DataError, "'hospital' names no site in data row 3", call=lambda: from_table(frame))


def test_a_site_may_be_called_nan():
    assert from_table(table(hospital=["b", "nan", "b", "b", "c"])).names == ("b", "c", "nan")


def test_scaling_is_applied_as_declared():
    data = from_table(scaling={"age": (50.0, 10.0)})
    assert data.client("c")[0].tolist() == [[2.0, 1.5]]
    outcome = from_table(target="dose", features=["age"], scaling={"dose": (1.0, 0.5)})
    assert outcome.client("c")[1].tolist() == [1.0]


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        ({"scaling": {"age": (0.0, 0.0)}}, ["scaling of 'age'", "scale > 0"]),
        ({"scaling": {"age": (np.nan, 1.0)}}, ["scaling of 'age'"]),
        ({"scaling": {"weight": (0.0, 1.0)}}, ["'weight' is neither the target nor a feature"]),
        ({"categories": {"weight": ["a", "b"]}}, ["'weight' is neither the target nor a feature"]),
        ({"categories": {"age": [50, 61]}, "scaling": {"age": (0.0, 1.0)}}, ["cannot be scaled as well"]),
        ({"categories": {"age": ["only"]}}, ["two or more distinct levels"]),
        ({"categories": {"age": ["x", "x"]}}, ["two or more distinct levels"]),
        ({"categories": {"age": "xy"}}, ["two or more distinct levels"]),
        ({"categories": {"age": [1, 1.0]}}, ["two or more distinct levels"]),
    ],
)
def test_bad_encodings(encoding, words):
    error = refused(ConfigError, *words, call=lambda: from_table(**encoding))
    assert error.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("dtype", [object, "str", "string", "category", pd.StringDtype("python")])
def test_categories_become_columns_whatever_text_is_stored_as(dtype):
    frame = table(sex=table()["sex"].astype(dtype))
    data = from_table(frame, features=["age", "sex"], categories={"sex": ["m", "f", "x"]})
    assert data.features == ("age", "sex=f", "sex=x")
    assert data.client("b")[0].tolist() == [[50, 1, 0], [47, 0, 0], [39, 1, 0]]
    target = from_table(frame, target="sex", categories={"sex": ["m", "f", "x"]})
    assert target.client("b")[1].tolist() == [1, 0, 1]
    refused(
        DataError,
        "site 'a', column 'sex'",
        "'m' in data row 1",
        "categories",
        call=lambda: from_table(frame, ["sex"]),
    )


@pytest.mark.parametrize("dtype", [int, float, np.float32, "Int64", object, "category"])
@pytest.mark.parametrize("levels", [[1, 2], ["1", "2"], [1.0, 2.0]])
def test_levels_that_are_numbers(dtype, levels):
    frame = table(stage=pd.Series([1, 2, 2, 1, 2]).astype(dtype))
    data = from_table(frame, features=["stage"], categories={"stage": levels})
    assert data.features == (f"stage={levels[1]}",)
    assert data.client("b")[0].tolist() == [[0], [1], [0]]


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int8])
def test_levels_that_are_numbers_of_numpy_in_a_column_of_anything(kind):
    frame = table(stage=pd.Series([kind(v) for v in (1, 2, 2, 1, 2)], dtype=object))
    data = from_table(frame, features=["stage"], categories={"stage": [1, 2]})
    assert data.client("b")[0].tolist() == [[0], [1], [0]]


@pytest.mark.parametrize("dtype", [bool, "boolean", object])
@pytest.mark.parametrize("levels", [[False, True], ["False", "True"], ["FALSE", "TRUE"]])
def test_levels_that_are_true_and_false(dtype, levels):
    frame = table(smoker=pd.Series([True, False, False, True, True]).astype(dtype))
    data = from_table(frame, features=["smoker"], categories={"smoker": levels})
    assert data.client("b")[0].tolist() == [[1], [0], [1]]
    assert from_table(frame, features=["smoker"]).client("b")[0].tolist() == [[1], [0], [1]]


def test_undeclared_level_is_named_with_its_row_and_site():
    refused(
        DataError,
        "site 'b', column 'sex'",
        "level 'm' in data row 2 is not declared",
        "f, x",
        call=lambda: from_table(table(hospital=["b"] * 5), features=["sex"], categories={"sex": ["f", "x"]}),
    )


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ([50, 61, None, 39, 70], ["site 'b'", "'age'", "missing value in data row 2", "fill it in"]),
        ([50, 61, "NA", 39, 70], ["site 'b'", "missing value in data row 2"]),
        ([50, 61, " na ", 39, 70], ["site 'b'", "missing value in data row 2"]),
        ([50, 61, 47, np.inf, 70], ["site 'b'", "infinite value in data row 3"]),
        (
            [50, 61, 47, "old", 70],
            ["site 'b'", "'old' in data row 3 is not a number", "'age' under categories"],
        ),
        (["50", "61", "47", "1,5", "70"], ["site 'b'", "'1,5' in data row 3 is not a number"]),
        (pd.date_range("2020", periods=5), ["2020-01-02", "is not a number"]),
        (pd.array([50, 61, None, 39, 70], dtype="Int64"), ["missing value in data row 2"]),
    ],
)
def test_values_that_are_no_numbers(column, words):
    refused(DataError, *words, call=lambda: from_table(table(age=column)))


def test_numbers_stored_as_text_are_numbers():
    frame = table(age=["50", "61", "47", "39", "70"])
    assert from_table(frame).fingerprint() == from_table().fingerprint()


def test_missing_category_is_missing():
    frame = table(sex=["f", "m", None, "f", "f"])
    refused(
        DataError,
        "column 'sex': missing value in data row 2",
        call=lambda: from_table(frame, features=["sex"], categories={"sex": ["f", "m"]}),
    )


def test_wrong_columns():
    refused(DataError, "no column 'agee'", "did you mean 'age'?", call=lambda: from_table(features=["agee"]))
    refused(DataError, "no column 'qqq'", "hospital, age", call=lambda: from_table(features=["qqq"]))
    refused(ConfigError, "columns named twice: age", call=lambda: from_table(features=["age", "age"]))
    refused(ConfigError, "columns named twice: ill", call=lambda: from_table(features=["ill"]))
    refused(ConfigError, "features must be a list", "'age'", call=lambda: from_table(features="age"))
    twice = pd.concat([table(), table()[["age"]]], axis=1)
    refused(DataError, "several columns 'age'", call=lambda: from_table(twice))


def write_sites(folder):
    """The rows of ``table()``, a file per hospital: CSV and Parquet mixed."""
    files = {}
    for name, part in table().groupby("hospital"):
        files[name] = folder / f"{name}.{'parquet' if name == 'b' else 'csv'}"
        part = part.drop(columns="hospital")
        if name == "b":
            part.to_parquet(files[name], index=False)
        else:
            part.to_csv(files[name], index=False)
    return files


def from_files(files, features=("age", "dose", "sex"), **changes):
    encoding = {"categories": {"sex": ["f", "m"]}} if "sex" in features else {}
    return FederatedData.from_files(files, target="ill", features=features, **encoding, **changes)


def test_files_equal_one_table(tmp_path):
    data = from_files(write_sites(tmp_path))
    same = from_table(features=["age", "dose", "sex"], categories={"sex": ["f", "m"]})
    assert data.names == same.names
    assert data.fingerprint() == same.fingerprint()
    by_number = from_files(dict(enumerate(write_sites(tmp_path).values())))
    assert by_number.names == ("0", "1", "2")


def test_mapped_rows_are_those_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("fald.problem.encoding._PART", 2)
    files = write_sites(tmp_path)
    tables = {name: read_table(path) for name, path in files.items()}
    for name, rows in tables.items():
        files[name] = tmp_path / f"{name}.parquet"
        rows.to_parquet(files[name])
    data, whole = from_files(files, mapped=tmp_path / "mapped"), from_files(files)
    assert all(isinstance(part, np.memmap) for part in data.rows)
    for one, other in zip(data.rows, whole.rows):
        np.testing.assert_array_equal(one, other)
    assert (data.names, data.features, data.sizes.tolist()) == (
        whole.names,
        whole.features,
        whole.sizes.tolist(),
    )
    last = max(tables, key=lambda name: len(tables[name]))
    assert len(tables[last]) > 2
    tables[last].loc[len(tables[last]) - 1, "age"] = np.nan
    tables[last].to_parquet(files[last])
    refused(
        DataError, "missing value", "counted from data row", call=lambda: from_files(files, mapped=tmp_path)
    )
    refused(DataError, "Parquet", call=lambda: from_files(write_sites(tmp_path), mapped=tmp_path / "m"))


def test_names_of_files_must_differ(tmp_path):
    a, b, _ = write_sites(tmp_path).values()
    refused(DataError, "differ as text", call=lambda: from_files({1: a, "1": b}))
    refused(ConfigError, "no site files", call=lambda: from_files({}))


def test_missing_file(tmp_path):
    files = write_sites(tmp_path)
    missing = {**files, "b": tmp_path / "bb.parquet"}
    refused(
        DataError,
        "no such file",
        "bb.parquet",
        "did you mean",
        str(files["b"]),
        call=lambda: from_files(missing),
    )
    nowhere = {**files, "b": tmp_path / "none" / "x.csv"}
    refused(DataError, "no such file", "check the path", call=lambda: from_files(nowhere))
    refused(DataError, "is not a file", call=lambda: read_table(tmp_path))


def test_sites_with_different_columns(tmp_path):
    files = write_sites(tmp_path)
    pd.read_csv(files["c"]).rename(columns={"dose": "doses"}).to_csv(files["c"], index=False)
    refused(
        DataError, "site 'c'", str(files["c"]), "no column 'dose'", "'doses'", call=lambda: from_files(files)
    )
    pd.read_csv(files["c"]).assign(dose=1.0, extra="unused").to_csv(files["c"], index=False)
    assert from_files(files).num_rows == 5


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["cannot be read as a table"]),
        (b"age,dose,ill\n", ["site 'c' has no rows", "leave out"]),
        (b"\xff\xfe\x00\x01" * 50, ["c.csv"]),
        (b"age,dose,ill\n1,2,3,4,5\n", ["c.csv"]),
        (b"age,dose,ill\n1,2,3,4\n", ["c.csv", "more fields than the header"]),
        (b"age,dose,age,ill\n1,2,3,0\n", ["site 'c'", "several columns 'age'"]),
        (b"age,dos;e,ill\n1,2,0\n", ["site 'c'", "no column 'dose'", "did you mean 'dos;e'?"]),
        (b"age,dose,ill\n1,,0\n", ["site 'c'", "'dose'", "missing value in data row 1"]),
        (b"age,dose,ill\n1,2,0\n1,NA,0\n", ["site 'c'", "'dose'", "missing value in data row 2"]),
        (b"age,dose,ill\n1,inf,0\n", ["site 'c'", "infinite value in data row 1"]),
        (b"age,dose,ill\n1,high,0\n", ["site 'c'", "'high' in data row 1 is not a number", "categories"]),
    ],
)
def test_bad_csv(tmp_path, content, words):
    files = {**write_sites(tmp_path), "c": tmp_path / "c.csv"}
    files["c"].write_bytes(content)
    refused(DataError, *words, call=lambda: from_files(files, features=["age", "dose"]))


def test_columns_with_numbers_for_names_may_not_have_one_name(tmp_path):
    path = tmp_path / "c.csv"
    path.write_bytes(b"1,1,ill\n1,2,0\n")
    refused(DataError, "several columns '1'", call=lambda: from_files({"c": path}, features=["1"]))


def test_garbage_in_parquet_and_other_kinds_of_files(tmp_path):
    for name, word in {"x.parquet": "cannot be read as a table", "x.xlsx": "use .csv or .parquet"}.items():
        (tmp_path / name).write_bytes(np.random.default_rng(0).bytes(300))
        refused(DataError, name, word, call=lambda name=name: read_table(tmp_path / name))


def test_words_for_nothing_can_be_levels(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("pain,ill\nNone,0\nmild,1\nNA,0\n")
    data = FederatedData.from_files(
        {"a": path}, target="ill", features=["pain"], categories={"pain": ["None", "mild", "NA"]}
    )
    assert data.client("a")[0].tolist() == [[0, 0], [1, 0], [0, 1]]


def test_true_and_false_in_a_csv(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("smoker,ill\nTRUE,0\nFALSE,1\n")
    for levels in (["FALSE", "TRUE"], [False, True]):
        data = FederatedData.from_files(
            {"a": path}, target="ill", features=["smoker"], categories={"smoker": levels}
        )
        assert data.client("a")[0].tolist() == [[1], [0]]


def test_new_rows_are_encoded_as_in_training():
    features, encoding = ["age", "sex"], {"categories": {"sex": ["f", "m"]}, "scaling": {"age": (50.0, 10.0)}}
    training = from_table(features=features, **encoding)
    X = encode_features(table(), "new rows", features, **encoding)
    assert X[[1, 0, 2, 3, 4]].tolist() == training.rows[0].tolist()
    refused(
        DataError,
        "new rows has no column 'sex'",
        call=lambda: encode_features(table().drop(columns="sex"), "new rows", features, **encoding),
    )


def test_consecutive_views_of_one_array_are_not_copied():
    x, y = np.arange(40.0).reshape(20, 2), np.arange(20)
    cuts = {"a": slice(0, 5), "b": slice(5, 12), "c": slice(12, 20)}
    data = FederatedData.from_arrays({name: (x[cut], y[cut]) for name, cut in cuts.items()})
    assert np.shares_memory(data.rows[0], x)
    np.testing.assert_array_equal(data.rows[0], x)
    np.testing.assert_array_equal(data.rows[1], y)
    # out of order, with a gap, or from two arrays they must be copied, to a 64-byte boundary
    for parts in (
        {"a": x[5:12], "b": x[:5]},
        {"a": x[:5], "b": x[6:12]},
        {"a": x[:5].copy(), "b": x[5:12]},
    ):
        copied = FederatedData.from_arrays(parts).rows
        assert not np.shares_memory(copied, x)
        assert copied.ctypes.data % 64 == 0
        np.testing.assert_array_equal(copied, np.concatenate(list(parts.values())))


def test_what_a_run_will_do_with_the_rows_is_said():
    from fald.problem.remarks import remarks

    rng = np.random.default_rng(0)
    fine = fald.FederatedData.from_arrays({"a": rng.normal(size=(50, 2)), "b": rng.normal(size=(80, 2))})
    assert remarks(fine, None) == remarks(fine, 50) == []
    assert "the 50 rows of client 'a'" in remarks(fine, 64)[0]
    times = fald.FederatedData.from_arrays({"a": 1.7e9 + rng.normal(size=(50, 1))})
    assert "loses digits" in remarks(times, None)[0]
    assert remarks(times, None, private=True) == []
    rows = np.zeros((9 * 2**20 // 16, 16))
    rows[0] = 1.0
    assert remarks(fald.FederatedData.from_arrays({"a": rows[:100]}), None) == []
    large = fald.FederatedData.from_arrays({"a": rows})
    assert "of these 75 MB a copy of half the size" in remarks(large, None)[0]
    three = fald.FederatedData.from_arrays({name: np.ones((3, 1)) for name in "abc"})
    assert "client 'a' and 2 others" in remarks(three, 5)[0]
    two = three.elsewhere(["a", "b"], [3, 4])
    assert "client 'a' and another" in remarks(two, 5)[0]
    small = fald.FederatedData.from_arrays({"a": (1.7e9 + rng.normal(size=(50, 1))).astype(np.float32)})
    assert remarks(small, None) == []


def test_labels_that_an_own_likelihood_has_no_place_for_are_said():
    from fald.problem.remarks import remarks

    def model(wrap=lambda f: f):
        term = wrap(lambda p, row: jax.nn.log_softmax(row[0] @ p)[row[1]])
        return fald.Model(lambda p: -jnp.sum(p**2), term, jnp.zeros((2, 3)))

    x, y, offsets = np.ones((6, 2)), np.array([0, 1, 2, 0, 2, 1]), np.array([0, 4, 6])
    labelled = {by: FederatedData((x, y + by), offsets, ("a", "b")) for by in (0, 1)}
    assert remarks(labelled[0], None, model=model()) == []
    (said,) = remarks(labelled[1], None, model=model())
    assert "row 2 of client 'a' looks outside an array" in said
    read = FederatedData.from_read(lambda client, index: (x[index], y[index] + 1), {"c": 2, "d": 6})
    assert "row 2 of client 'd'" in remarks(read, None, model=model())[0]
    assert remarks(labelled[1], None, model=model(), private=True) == []  # a row is nobody's business then
    assert remarks(labelled[1], None, model=model(jax.checkpoint)) == []  # which JAX cannot look into
