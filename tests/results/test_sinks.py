"""Sinks and callbacks: they see what a run without them would have kept, and go on after an interruption."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import fald
from fald.core.errors import ConfigError, DataError, Interrupted

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 2)).astype(np.float32)
Y = (X[:, 0] + 0.5 * RNG.normal(size=40) > 0).astype(int)
DATA = fald.FederatedData.from_arrays({"a": (X[:25], Y[:25]), "b": (X[25:], Y[25:])})
MODEL = fald.models.softmax_regression(2, 2)


def sampled(**others):
    settings = {"num_rounds": 13, "num_warmup": 3, "thinning": 2, "local_steps": 2, "step_size": 5e-3,
                "num_chains": 2, "progress": False, "step_check": False}  # fmt: skip
    return fald.sample(1, MODEL, DATA, **{**settings, **others})


def sinks(folder):
    files = fald.sinks.DrawFiles(folder, rounds_per_file=2)
    return [fald.sinks.RunningMoments(rank=3), fald.sinks.ProbeCurve(X, Y, batch_size=16), files]


def test_sinks_see_the_draws_of_a_run_without_them(tmp_path):
    whole = fald.positions(sampled(), MODEL)
    moments, probe, files = given = sinks(tmp_path / "draws")
    tree = sampled(sinks=given)
    assert dict(tree["posterior"].sizes)["draw"] == 1
    for name, array in whole.arrays.items():
        np.testing.assert_array_equal(fald.positions(tree, MODEL)[:, 0][name], array[:, -1])
        every = array.reshape(-1, *array.shape[2:])
        np.testing.assert_allclose(moments.mean()[name], every.mean(0), atol=1e-6)
        np.testing.assert_allclose(moments.sd()[name], every.std(0, ddof=1), rtol=1e-4)
        stored = np.stack([p[name] for p in files.positions(MODEL)])
        np.testing.assert_array_equal(stored.reshape(5, 2, *array.shape[2:]).swapaxes(0, 1), array)
    assert [d.sizes["draw"] for d in files.datasets()] == [2, 2, 1]
    expected = fald.predictive(sampled(), MODEL, X)
    np.testing.assert_allclose(fald.predictive(files, MODEL, X).mean, expected.mean, atol=1e-6)
    np.testing.assert_allclose(probe.predictive().mean, expected.mean, atol=1e-6)
    np.testing.assert_allclose(probe.predictive().mutual_information, expected.mutual_information, atol=1e-6)
    curve = probe.curve()
    assert curve["round"].tolist() == [5, 7, 9, 11, 13]
    assert curve["draws"].tolist() == [2, 4, 6, 8, 10]
    assert curve.iloc[-1]["nll"] == pytest.approx(expected.scores(Y)["nll"], abs=1e-5)
    around = np.stack([p["weight"] if "weight" in p else next(iter(p.values()))
                       for p in moments.swag(jax.random.key(0), 3)])  # fmt: skip
    assert np.isfinite(around).all()


@pytest.mark.parametrize("place", [7, 9])
def test_an_interrupted_run_goes_on_with_its_sinks(tmp_path, place):
    def stop(round_number, positions, stats):
        if round_number == place:
            raise KeyboardInterrupt

    plain = sinks(tmp_path / "plain")
    sampled(sinks=plain)
    settings = {"checkpoint": fald.Checkpoint(tmp_path / "run", rounds=2)}
    with pytest.raises(Interrupted):
        sampled(sinks=sinks(tmp_path / "draws"), callback=stop, **settings)
    resumed = sinks(tmp_path / "draws")
    tree = sampled(sinks=resumed, **settings)
    for one, other in zip(plain, resumed):
        for name, array in one.arrays().items():
            np.testing.assert_array_equal(other.arrays()[name], array, err_msg=f"{type(one).__name__} {name}")
    assert tree.attrs["rounds_done"] == 13
    stored = [d["round"].values.tolist() for d in resumed[2].datasets()]
    assert stored == [[5, 7], [9, 11], [13]]
    with pytest.raises(ConfigError, match="without the sink"):
        sampled(sinks=[*sinks(tmp_path / "draws"), fald.sinks.RunningMoments()], num_rounds=15, **settings)


def test_a_sink_that_is_given_to_another_run_begins_anew(tmp_path):
    given, fresh = sinks(tmp_path / "a"), sinks(tmp_path / "b")
    sampled(sinks=given, num_rounds=9)
    sampled(sinks=given)
    sampled(sinks=fresh)
    for one, other in zip(given, fresh):
        for name, array in one.arrays().items():
            np.testing.assert_array_equal(other.arrays()[name], array, err_msg=f"{type(one).__name__} {name}")
    assert given[0].count == 10


def test_a_probe_set_of_another_run_is_refused(tmp_path):
    folder = fald.Checkpoint(tmp_path, rounds=2)
    sampled(sinks=[fald.sinks.ProbeCurve(X, Y)], num_rounds=9, checkpoint=folder)
    with pytest.raises(ConfigError, match="other rows or labels in ProbeCurve"):
        sampled(sinks=[fald.sinks.ProbeCurve(X, 1 - Y)], checkpoint=folder)
    probe = fald.sinks.ProbeCurve(X, Y)
    sampled(sinks=[probe], checkpoint=folder)
    assert probe.curve()["round"].tolist() == [5, 7, 9, 11, 13]


@pytest.mark.parametrize(
    ("changes", "x", "y", "said"),
    [
        ({"predict_fn": None}, X, Y, "has no predict_fn"),
        ({}, X[:, :1], Y, r"cannot predict rows of shape \[1\]"),
        ({}, X, Y[:5], r"labels must be 40 whole numbers.* got int64 of shape \(5,\)"),
        ({}, X, np.eye(2)[Y], r"labels must be .* got float64 of shape \(40, 2\)"),
        ({}, X, Y + 0.5, "labels must be .* got float64"),
        ({}, X, Y + 1, "labels must be from 0 to 1, as the model predicts 2 classes; got 1 to 2"),
        ({}, X[:0], Y[:0], "a probe set needs rows"),
        ({"predict_fn": lambda p, x: jnp.array([3.0, -1.0])}, X, Y, r"add up to 1; row 0 got \[ 3\. -1\.\]"),
        ({"predict_fn": lambda p, x: jnp.array(1.5)}, X, Y, r"add up to 1; row 0 got \[-0\.5  1\.5\]"),
    ],
)
def test_what_cannot_be_scored_is_said_before_the_first_round(changes, x, y, said):
    model, seen = dataclasses.replace(MODEL, **changes), []
    with pytest.raises(DataError, match=said):
        fald.sample(
            1, model, DATA, num_rounds=2, local_steps=1, step_size=1e-3, sinks=[fald.sinks.ProbeCurve(x, y)],
            callback=lambda *about: seen.append(about), progress=False, step_check=False,
        )  # fmt: skip
    assert not seen


def test_a_result_without_its_draws_says_where_they_are(tmp_path):
    files, probe = fald.sinks.DrawFiles(tmp_path), fald.sinks.ProbeCurve(X, Y)
    with pytest.raises(DataError, match="no draws in"):
        files.tree(MODEL)
    tree, whole = sampled(sinks=[files, probe]), sampled()
    said = "the last draw of each chain alone; the draws went to DrawFiles, ProbeCurve"
    assert said in fald.diagnostics.verdict(tree)[0]
    assert "draws went" not in " ".join(fald.diagnostics.verdict(whole))
    with pytest.raises(DataError, match=said):
        fald.summary(tree)
    tree.attrs["step_times_curvature"] = 5.0
    assert "step size times curvature is 5" in fald.diagnostics.verdict(tree)[1]
    pd.testing.assert_frame_equal(fald.summary(files.tree()), fald.summary(whole))
    assert fald.diagnostics.verdict(files.tree()) == fald.diagnostics.verdict(whole)
    found = fald.sinks.DrawFiles(tmp_path).tree(MODEL)  # of a run of another process
    assert found["sample_stats"]["round"].values.tolist() == [5, 7, 9, 11, 13]
    fald.save(found, tmp_path / "all.nc")
    assert fald.load(tmp_path / "all.nc").attrs["kind"] == "chain"


def test_rows_and_labels_that_do_not_fit_predictions_are_named():
    tree = sampled()
    for x, said in ((X[:, :1], "cannot predict rows of shape"), (X[:0], "no rows to predict")):
        with pytest.raises(DataError, match=said):
            fald.predictive(tree, MODEL, x)
    found = fald.predictive(tree, MODEL, X)
    for labels in (Y[:3], Y + 1, np.eye(2)[Y]):
        for use in (found.scores, found.reliability):
            with pytest.raises(DataError, match="labels must be"):
                use(labels)


def test_a_callback_sees_every_draw_and_may_stop():
    seen = []

    def callback(round_number, positions, stats):
        seen.append((round_number, jax.tree.leaves(positions)[0].shape[0], stats["energy"].shape))
        return round_number >= 9

    tree = sampled(callback=callback)
    assert seen == [(5, 2, (2,)), (7, 2, (2,)), (9, 2, (2,))]
    assert tree.attrs["rounds_done"] == 9
    whole = fald.positions(sampled(), MODEL)
    for name, array in fald.positions(tree, MODEL).arrays.items():
        np.testing.assert_allclose(array, whole.arrays[name][:, :3], rtol=1e-6)
    with pytest.raises(ConfigError, match="callback must be"):
        sampled(callback=3)
    with pytest.raises(ConfigError, match="callback must be"):
        sampled(callback=lambda round_number: None)
    with pytest.raises(ConfigError, match="sinks must come"):
        sampled(sinks=["draws.nc"])
    with pytest.raises(ConfigError, match="in a list"):
        sampled(sinks=fald.sinks.RunningMoments())
    with pytest.raises(ConfigError, match="or be a result of"):
        sampled(initial_position="fedavg.nc")
    with pytest.raises(ConfigError, match="the same sink is given twice"):
        sampled(sinks=2 * [fald.sinks.RunningMoments()])


def test_a_callback_that_fails_leaves_the_draws_before_it(tmp_path):
    seen = []

    def fails(round_number, positions, stats):
        seen.append(round_number)
        if round_number == 9:
            raise ValueError("of the caller's own")

    with pytest.raises(ValueError, match="of the caller's own") as caught:
        sampled(callback=fails, checkpoint=tmp_path)
    whole, kept = fald.positions(sampled(), MODEL), fald.positions(caught.value.tree, MODEL)
    for name, array in kept.arrays.items():
        np.testing.assert_array_equal(array, whole.arrays[name][:, :2])
    assert caught.value.__notes__ == ["after round 7 of 13; draws so far are in `tree`"]
    resumed = fald.positions(sampled(callback=lambda *now: seen.append(now[0]), checkpoint=tmp_path))
    assert seen == [5, 7, 9, 9, 11, 13]
    for name, array in resumed.arrays.items():
        np.testing.assert_array_equal(array, whole.arrays[name])


def test_other_files_in_the_folder_of_draws_stay(tmp_path):
    (tmp_path / "draws-of-mine.nc").write_text("")
    files = fald.sinks.DrawFiles(tmp_path)
    sampled(sinks=[files])
    assert files.tree()["posterior"].sizes["draw"] == 5
    assert (tmp_path / "draws-of-mine.nc").exists()


def test_a_sink_that_saw_nothing_says_so(tmp_path):
    for use in (fald.sinks.RunningMoments().mean, fald.sinks.DrawFiles(tmp_path).tree):
        with pytest.raises(DataError, match="seen no run yet"):
            use()
    with pytest.raises(DataError, match="no draw yet"):
        fald.sinks.ProbeCurve(X, Y).predictive()
    moments = fald.sinks.RunningMoments()
    moments.begin(MODEL)
    moments.add(1, np.zeros((1, MODEL.dim)))
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(moments.sd()))  # of one draw


def test_files_beyond_what_was_saved_are_made_again(tmp_path):
    files = fald.sinks.DrawFiles(tmp_path, rounds_per_file=1)
    files.begin(MODEL)
    for number in (1, 2, 3):
        if number == 2:
            saved = files.arrays()
        files.add(number, np.zeros((1, MODEL.dim)))
    again = fald.sinks.DrawFiles(tmp_path, rounds_per_file=1)
    again.restore(saved)
    assert [d["round"].values.tolist() for d in again.datasets()] == [[1]]


@pytest.mark.parametrize("part", ["diagonal", "low-rank"])
def test_half_of_the_variance_of_swag_is_diagonal_and_half_of_low_rank(part):
    own = np.linspace(1, 2, MODEL.dim)
    wide = np.stack([own, -own]).astype(np.float32)  # two deviations, whose covariance is 2 own ownᵀ
    zero = np.zeros_like(wide)
    moments = fald.sinks.RunningMoments(rank=2)
    moments.begin(MODEL)
    moments.restore({
        "count": np.asarray(5), "mean": 3 * own, "square": 4 * own**2 * (part == "diagonal"),
        "deviations": wide if part == "low-rank" else zero,
    })  # fmt: skip
    drawn = np.stack([np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(p)])
                      for p in moments.swag(jax.random.key(0), 600)])  # fmt: skip
    z = (drawn - 3 * own) / own
    expected = {"diagonal": 0.5, "low-rank": 1.0}[part]
    np.testing.assert_allclose(z.mean(0), 0, atol=4 * np.sqrt(expected / 600))
    np.testing.assert_allclose(z.var(0), expected, rtol=4 * np.sqrt(2 / 600))
    assert (np.abs(np.corrcoef(z.T)[0, 1]) > 0.99) == (part == "low-rank")


def test_doubt_is_that_of_the_average_less_the_average_of_doubts():
    from fald.results.probabilities import PredictiveSums, entropy

    draws = np.array([[[0.9, 0.1]], [[0.6, 0.4]], [[0.2, 0.8]]])
    sums = PredictiveSums.none(1)
    for draw in draws:
        sums = sums.plus(draw)
    found = sums.predictive()
    of_mean = entropy(draws.mean(0))
    np.testing.assert_allclose(found.entropy, of_mean)
    np.testing.assert_allclose(found.mutual_information, of_mean - np.mean([entropy(d) for d in draws], 0))
    assert found.mutual_information[0] > 0.1


def test_bins_of_reliability_hold_their_upper_ends():
    from fald.results.probabilities import Predictive, scores

    mean = np.array([[0.5, 0.5], [0.75, 0.25], [0.76, 0.24], [1.0, 0.0]])
    found = Predictive(mean, np.zeros(4), np.zeros(4), 1).reliability([1, 0, 0, 1], bins=4)
    np.testing.assert_allclose(found, [[0, 0, 0], [1, 0.5, 0], [1, 0.75, 1], [2, 0.88, 0.5]])
    assert scores(mean, np.array([1, 0, 0, 1]), bins=4).ece == pytest.approx((0.5 + 0.25 + 2 * 0.38) / 4)


def test_scores_are_their_sums():
    from fald.results.probabilities import Predictive, auroc, nll, scores

    rng = np.random.default_rng(0)
    mean = rng.dirichlet(np.ones(3), 200)
    labels = rng.integers(0, 3, 200)
    found = scores(mean, labels)
    hot = np.eye(3)[labels]
    assert found.brier == pytest.approx(np.mean(np.sum((mean - hot) ** 2, axis=1)))
    assert found.accuracy == pytest.approx(np.mean(mean.argmax(1) == labels))
    apart = 0.0
    for b in range(15):
        here = (mean.max(1) > b / 15) & (mean.max(1) <= (b + 1) / 15)
        apart += abs(np.sum((mean.argmax(1) == labels)[here]) - np.sum(mean.max(1)[here])) / 200
    assert found.ece == pytest.approx(apart)
    assert nll(mean, labels) == pytest.approx(-np.mean(np.log(np.sum(mean * hot, axis=1))))
    assert np.isfinite(nll(np.array([[0.0, 1.0]]), np.array([0])))
    low, high = rng.normal(size=50), rng.normal(0.5, 1, 60)
    assert auroc(low, high) == pytest.approx(np.mean(high[:, None] > low))
    whole = Predictive(mean, low, low, 1)
    assert whole.detects(Predictive(mean, high, high, 1)) == auroc(low, high)
    assert whole.scores(labels) == {**found._asdict(), "nll": nll(mean, labels)}
    # rows of small probabilities alone still have a line for every bin
    assert Predictive(np.full((4, 3), 1 / 3), low, low, 1).reliability([0, 1, 2, 0]).shape == (15, 3)
    for wrong in (-1, 3):
        with pytest.raises(DataError, match="labels must be from 0 to 2"):
            whole.scores(np.r_[wrong, labels[1:]])


def test_doubt_of_predictions():
    sure = np.array([[1.0, 0.0], [0.5, 0.5]])
    unsure = np.array([[0.0, 1.0], [0.5, 0.5]])
    from fald.results.probabilities import PredictiveSums

    found = PredictiveSums.none(2).plus(sure).plus(unsure).predictive()
    np.testing.assert_allclose(found.entropy, np.log(2))
    np.testing.assert_allclose(
        found.mutual_information, [np.log(2), 0], atol=1e-12
    )  # doubt of draws, of rows
    assert found.reliability([0, 0], bins=2)[0].tolist() == [2, 0.5, 1.0]
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    found.draw_reliability([0, 0], axes, bins=2)
    assert axes.collections[0].get_offsets().tolist() == [[0.5, 1.0]]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("largest probability", "share that is right")
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 1), (0, 1))
