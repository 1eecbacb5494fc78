"""Studies over a link, with all sites in this process: equal to the in-process run, and suspicious."""

import json

import numpy as np
import pandas as pd
import pytest

from fald.core.errors import ConfigError, FederationError, Interrupted, PolicyError, PrivacyError
from fald.federation import wire
from fald.federation.coordinator.run import run_federated, serve_job
from fald.federation.coordinator.sites import Federation
from fald.federation.link import Arrival, LocalLink
from fald.federation.site.worker import SiteSettings, SiteWorker
from fald.study.run import run_study
from fald.study.schema import make_study

SIZES = {"a": 12, "b": 20, "c": 12}  # two sizes: each is compiled for itself


class Place:
    """Three hospitals with a table each, and studies of them."""

    def __init__(self, root, sizes=SIZES):
        self.root = root
        rng = np.random.default_rng(0)
        for name, size in sizes.items():
            x = rng.normal(size=size)
            y = 1 + x + rng.normal(size=size)
            pd.DataFrame({"x": x, "y": y}).to_csv(root / f"{name}.csv", index=False)
        self.files = {name: f"{name}.csv" for name in sizes}
        # methods whose uploads are more than sums are compared here as well
        (root / "open.toml").write_text("unsummed = true\n")

    def study(self, sampler=None, **sections):
        data = {"files": self.files, "target": "y", "features": ["x"]}
        tree = {
            "data": data,
            "model": {"family": "linear", "noise-scale": 1.0},
            "folder": str(self.root),
            **sections,
        }
        if sampler is not None:
            common = {
                "num-rounds": 12,
                "num-warmup": 4,
                "num-chains": 2,
                "seed": 1,
                "precision": "float64",
                "local-steps": 3,
                "step-size": 1e-3,
            }
            tree["sampler"] = {k: v for k, v in {**common, **sampler}.items() if v is not None}
        return make_study(tree, "test")

    def worker(self, name, **settings):
        own = {"policy": self.root / "open.toml", **settings}
        return SiteWorker(SiteSettings(name, self.root / "state" / name, self.root / f"{name}.csv", **own))

    def link(self, **settings):
        return LocalLink({name: self.worker(name, **settings).handle for name in self.files})


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def difference(one, other):
    names = one["posterior"].data_vars
    return max(float(np.abs(one["posterior"][n].values - other["posterior"][n].values).max()) for n in names)


def test_few_rounds_are_those_of_the_in_process_run(place, tmp_path):
    study = place.study()
    here = run_study(study, tmp_path / "here", resume=False, progress=False).tree
    # a worker of its own for every message, as on engines that start a process each time
    link = LocalLink({name: lambda content, n=name: place.worker(n).handle(content) for name in SIZES})
    there = run_federated(study, link, tmp_path / "there")
    assert difference(here, there) < 1e-7
    assert there.attrs["verdict"] == "reached"
    told = json.loads(there.attrs["federation"])
    assert told["secure_sum"]
    assert told["sizes"] == list(SIZES.values())
    assert not (tmp_path / "state" / "a" / "runs" / told["run"] / "session.json").exists()


METHODS = {
    "fa-ld": {},
    "fa-ld unsummed": {"federation": {"secure-sum": False}},
    "fa-ld drawn": {"participation": "with-replacement", "num-participants": 2, "batch-size": 5},
    "scaffold-2": {},
    "qlsd": {"local-steps": None},
    "qlsd++": {"local-steps": None},
    "fsgld": {},
    "de-sgld": {"local-steps": None},
    "laplace": {"local-steps": None, "step-size": None, "options": {"newton-rounds": 4}},
    "consensus": {"options": {"num-burn": 5, "num-fit": 40}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_methods_give_the_chains_of_the_in_process_run(place, tmp_path, name):
    settings = dict(METHODS[name])
    sections = {"federation": settings.pop("federation")} if "federation" in settings else {}
    study = place.study({"method": name.split()[0], **settings}, **sections)
    here = run_study(study, tmp_path / "here", resume=False, progress=False).tree
    there = run_federated(study, place.link(), tmp_path / "there")
    assert difference(here, there) < 1e-12
    summed = json.loads(there.attrs["federation"])["secure_sum"]
    for cost in here["cost"].data_vars:
        if not (summed and cost.startswith("bytes")):  # masks and audits travel as well
            np.testing.assert_array_equal(here["cost"][cost], there["cost"][cost])
    assert summed == (name in ("fa-ld", "qlsd"))
    assert bool(np.isnan(there["sample_stats"]["drift"].values).all()) == summed


class Stopping(LocalLink):
    """Ctrl-C when a round is asked for."""

    round = 7

    def send(self, messages, **how):
        for content in messages.values():
            if wire.unpack(content).values.get("round") == self.round:
                raise KeyboardInterrupt
        return super().send(messages, **how)


@pytest.mark.slow
def test_interrupted_runs_resume_to_the_same_chains_with_other_workers(place, tmp_path):
    study = place.study({"method": "scaffold-2"})
    whole = run_federated(study, place.link(), tmp_path / "whole")
    with pytest.raises(Interrupted):
        run_federated(study, Stopping({n: place.worker(n).handle for n in SIZES}), tmp_path / "parts")
    resumed = run_federated(study, place.link(), tmp_path / "parts", resume=True)
    assert difference(whole, resumed) == 0


@pytest.mark.slow
@pytest.mark.parametrize("audit", [True, False])
def test_few_rounds_resume_after_their_round_of_scales(place, tmp_path, audit):
    """Priors are left open, so that the first round asks for scales."""
    study, rules = place.study(), tmp_path / "policy.toml"
    rules.write_text(f"audit = {str(audit).lower()}\n")
    assert study.open_scales
    whole = run_federated(study, place.link(policy=rules), tmp_path / "whole")
    link = Stopping({n: place.worker(n, policy=rules).handle for n in SIZES})
    link.round = 3
    with pytest.raises(Interrupted):
        run_federated(study, link, tmp_path / "parts")
    resumed = run_federated(study, place.link(policy=rules), tmp_path / "parts", resume=True)
    assert difference(whole, resumed) == 0


class Silent(LocalLink):
    """A site that does not answer rounds."""

    name, only = "b", range(1, 100)

    def send(self, messages, *, timeout, enough=None):
        rounds = {wire.unpack(content).values.get("round") for content in messages.values()}
        kept = {n: m for n, m in messages.items() if n != self.name or not rounds & set(self.only)}
        found = super().send(kept, timeout=timeout, enough=enough)
        return {n: found.get(n, Arrival(None, timeout, "late")) for n in sorted(messages)}


def test_a_silent_site_is_named_and_what_was_done_is_kept(place, tmp_path):
    study = place.study({}, federation={"dropout": "retry", "retries": 1})
    link = Silent({n: place.worker(n).handle for n in SIZES})
    link.only = range(9, 100)
    with pytest.raises(FederationError, match="no answer from 'b' in round 9"):
        run_federated(study, link, tmp_path / "out")
    assert (tmp_path / "out" / "partial.nc").exists()
    resumed = run_federated(study, place.link(), tmp_path / "out", resume=True)
    assert difference(run_federated(study, place.link(), tmp_path / "whole"), resumed) == 0


def test_a_late_reply_is_waited_for(place, tmp_path):
    study = place.study({}, federation={"dropout": "retry", "retries": 2})

    class Late(Silent):
        missed = 0

        def send(self, messages, **how):
            told = [wire.unpack(content).values for content in messages.values()]
            late = told[0].get("round") == 6 and told[0]["attempt"] == 1
            self.only = [6] if late else []
            return super().send(messages, **how)

    tree = run_federated(study, Late({n: place.worker(n).handle for n in SIZES}), tmp_path / "out")
    assert difference(run_federated(study, place.link(), tmp_path / "whole"), tree) == 0


class Random(LocalLink):
    """Sites that answer in an order drawn anew in every round."""

    def __init__(self, sites, seed=3):
        super().__init__(sites)
        self.rng, self.answered = np.random.default_rng(seed), []

    def send(self, messages, *, timeout, enough=None):
        order = [str(n) for n in self.rng.permutation(sorted(messages))]
        late = order[enough:] if enough else []
        if enough:
            self.answered.append(sorted(set(order) - set(late)))
        found = super().send({n: m for n, m in messages.items() if n not in late}, timeout=timeout)
        return {n: found.get(n, Arrival(None, timeout, "late")) for n in sorted(messages)}


ARRIVALS = {"num-rounds": 220, "num-warmup": 60, "num-chains": 400, "thinning": 20, "local-steps": 2}


def first_two(place, out):
    """Draws (chain, draw, parameter) of chains whose participants are the first two replies, and these."""
    study = place.study({**ARRIVALS, "step-size": 2e-2}, federation={"first-replies": 2})
    link = Random({n: place.worker(n).handle for n in place.files})
    tree = run_federated(study, link, out)
    told = json.loads(tree.attrs["federation"])
    assert told["arrival_based"]
    assert not told["secure_sum"]
    weights = tree["sample_stats"]["weight"].values
    assert ((weights > 0).sum(axis=-1) == 2).all()
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-9)
    drawn = tree["posterior"]
    return np.stack([drawn["intercept"], drawn["coefficient"][..., 0]], axis=-1), link.answered


def exact_laws(place, answered, topped=1.0, step=2e-2, steps=2, prior=2.5):
    """Mean and covariance after each round, given who answered: rounds are affine with Gaussian noise.

    A site's steps have noise of variance 2 step / w̄, w̄ the largest weight it can end with; what the average
    lacks of 2 step per step is added to it, times ``topped``.
    """
    tables = {name: pd.read_csv(place.root / file) for name, file in place.files.items()}
    shares = {name: len(t) / sum(map(len, tables.values())) for name, t in tables.items()}
    mean, covariance, laws = np.zeros(2), np.zeros((2, 2)), []
    moves = {}
    for name, table in tables.items():
        X = np.stack([np.ones(len(table)), table["x"]], axis=1)
        H = X.T @ X / shares[name] + np.eye(2) / prior**2
        powers = [np.linalg.matrix_power(np.eye(2) - step * H, j) for j in range(steps + 1)]
        largest = shares[name] / (shares[name] + min(v for n, v in shares.items() if n != name))
        moved = step * sum(powers[:-1]) @ X.T @ table["y"] / shares[name]
        moves[name] = powers[-1], moved, 2 * step / largest * sum(m @ m for m in powers[:-1]), largest
    for names in answered:
        weight = {name: shares[name] / sum(shares[n] for n in names) for name in names}
        pull = sum(weight[n] * moves[n][0] for n in names)
        noise = sum(weight[n] ** 2 * moves[n][2] for n in names)
        lacking = 1 - sum(weight[n] ** 2 / moves[n][3] for n in names)
        mean = pull @ mean + sum(weight[n] * moves[n][1] for n in names)
        covariance = pull @ covariance @ pull.T + noise + topped * lacking * 2 * step * steps * np.eye(2)
        laws.append((mean, covariance))
    return laws


def spread(draws, laws):
    """Variance of draws over the exact one, for each parameter, and its standard error."""
    kept = laws[ARRIVALS["num-warmup"] + ARRIVALS["thinning"] - 1 :: ARRIVALS["thinning"]]
    means, variances = np.array([m for m, _ in kept]), np.array([np.diag(c) for _, c in kept])
    assert draws.shape[1:] == means.shape
    return ((draws - means) ** 2 / variances).mean(axis=(0, 1)), np.sqrt(2 / draws[..., 0].size)


@pytest.mark.slow
def test_first_replies_keep_their_temperature(tmp_path, monkeypatch):
    # one strong site and two weak ones: sites scale their noise by the largest weight they can end with
    place = Place(tmp_path, {"a": 40, "b": 10, "c": 10})
    draws, answered = first_two(place, tmp_path / "warm")
    warm, error = spread(draws, exact_laws(place, answered))
    assert np.abs(warm - 1).max() < 4.5 * error
    # the same draws are too wide for a law without the noise that is added, and too narrow for twice of it
    assert (spread(draws, exact_laws(place, answered, topped=0))[0] > 1 + 4.5 * error).all()
    assert (spread(draws, exact_laws(place, answered, topped=2))[0] < 1 - 4.5 * error).all()
    from fald.federation.coordinator.engine import RemoteEngine

    monkeypatch.setattr(RemoteEngine, "_missing_noise", lambda self, asked, drawn: np.zeros(len(asked)))
    draws, answered = first_two(place, tmp_path / "cold")
    assert (spread(draws, exact_laws(place, answered))[0] < 1 - 4.5 * error).all()


def altered(change):
    """A link whose site b answers rounds by something else."""

    class Altered(LocalLink):
        earlier = b""

        def send(self, messages, **how):
            found = super().send(messages, **how)
            if "b" in found and wire.unpack(messages["b"]).kind in ("ask", "round"):
                content = change(wire.unpack(found["b"].content), self)
                found["b"] = found["b"]._replace(content=content)
            return found

    return Altered


def repacked(reply, arrays=None, **values):
    return wire.pack(reply.kind, {**reply.values, **values}, reply.arrays if arrays is None else arrays)


def replayed(reply, link):
    link.earlier, again = repacked(reply), link.earlier or repacked(reply)
    return again


HOSTILE = {
    "shapes": (lambda r, k: repacked(r, {n: a[:1] for n, a in r.arrays.items()}), "shapes"),
    "not a number": (lambda r, k: repacked(r, {n: a * np.nan for n, a in r.arrays.items()}), "not finite"),
    "absurd": (lambda r, k: repacked(r, {n: a + 1e20 for n, a in r.arrays.items()}), "not finite or beyond"),
    "types": (lambda r, k: repacked(r, {n: a.astype(np.float32) for n, a in r.arrays.items()}), "shapes"),
    "replay": (replayed, "stale"),
    "another site": (lambda r, k: repacked(r, site="a"), "stale or foreign"),
    "oversized": (lambda r, k: repacked(r, {**r.arrays, "more": np.zeros(10**6)}), "bytes"),
    "garbage": (lambda r, k: b"\x80\x04nonsense", "not a message"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_replies_are_refused_and_the_site_is_named(place, tmp_path, kind):
    change, said = HOSTILE[kind]
    study = place.study({}, federation={"secure-sum": False})
    link = altered(change)({n: place.worker(n).handle for n in SIZES})
    with pytest.raises(FederationError, match=f"site 'b'.*{said}"):
        run_federated(study, link, tmp_path / "out")


def test_a_chain_that_diverges_behind_masks_is_said_to(place, tmp_path):
    study = place.study({"step-size": 1e6, "num-rounds": 80, "local-steps": 30})
    with pytest.raises(FederationError, match="left the finite numbers"):
        run_federated(study, place.link(), tmp_path / "out")


def test_another_version_is_refused(place, tmp_path):
    def old(content):
        reply = wire.unpack(place.worker("b").handle(content))
        return repacked(reply, version="0.0.1")

    link = LocalLink({**{n: place.worker(n).handle for n in SIZES}, "b": old})
    with pytest.raises(FederationError, match=r"site 'b' has fald 0\.0\.1"):
        run_federated(place.study(), link, tmp_path / "out")


@pytest.mark.parametrize("off", [1000.0, -1000.0, 60.0])
def test_a_clock_that_is_off_is_told(place, off):
    def late(content):
        reply = wire.unpack(place.worker("b").handle(content))
        hello = {"time": reply.values["time"] + off} if "time" in reply.values else {}
        return repacked(reply, **hello)

    link = LocalLink({**{n: place.worker(n).handle for n in SIZES}, "b": late})
    told = {"b": [f"a clock that is {off:+.0f} s off"]} if abs(off) > 120 else {}
    assert Federation(link, place.study(), "0" * 16).versions == told


STRANGE = [
    ("hello", {"version": "9.\x1b[2J²"}, "fald 9"),
    ("hello", {"version": None}, "fald None"),
    ("open", {"rows": 10**30}, "number of rows"),
    ("open", {"rows": True}, "number of rows"),
    ("open", {"hello": None}, "who it is"),
    ("open", {"features": 3}, "its columns"),
    ("open", {"features": [["x"], {}]}, "columns of site"),
]


@pytest.mark.parametrize(("kind", "values", "said"), STRANGE)
def test_strange_introductions_are_refused_and_move_no_terminal(place, tmp_path, kind, values, said):
    def strange(content):
        reply = place.worker("b").handle(content)
        return repacked(wire.unpack(reply), **values) if wire.unpack(content).kind == kind else reply

    link = LocalLink({**{n: place.worker(n).handle for n in SIZES}, "b": strange})
    with pytest.raises(FederationError, match=said) as refused:
        run_federated(place.study({}), link, tmp_path / "out")
    assert "'b'" in refused.value.message
    assert refused.value.message.isprintable()


def test_a_policy_refuses_at_both_ends_and_says_why(place, tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text('allowed-models = ["logistic"]\n')
    with pytest.raises(PolicyError, match=r"site 'a' refuses: .*allowed-models"):
        run_federated(place.study(), place.link(policy=policy), tmp_path / "out")
    assert "allowed-models" in (tmp_path / "state" / "a" / "site.log").read_text()
    assert not (tmp_path / "out" / "checkpoint").exists()


def test_curvature_stays_where_the_policy_says_so(place, tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text("curvature = false\n")
    with pytest.raises(PolicyError, match="curvature"):
        run_federated(place.study(), place.link(policy=policy), tmp_path / "out")


def test_refusals_carry_no_value_of_the_rows(place, tmp_path):
    secret = "Mrs Miller 1.2.1950"
    frame = pd.read_csv(tmp_path / "b.csv").astype(object)
    frame.loc[3, "x"] = secret
    frame.to_csv(tmp_path / "b.csv", index=False)
    with pytest.raises(FederationError, match="site 'b' refuses") as caught:
        run_federated(place.study(), place.link(), tmp_path / "out")
    assert "Miller" not in str(caught.value)
    assert "1950" not in str(caught.value)
    assert secret in (tmp_path / "state" / "b" / "site.log").read_text()


def test_a_missing_column_is_named(place, tmp_path):
    pd.DataFrame({"x": [1.0], "z": [2.0]}).to_csv(tmp_path / "b.csv", index=False)
    with pytest.raises(FederationError, match="site 'b' refuses: its table has no column 'y'"):
        run_federated(place.study(), place.link(), tmp_path / "out")


def test_a_round_is_not_answered_with_other_parameters(place, tmp_path):
    worker = place.worker("a")
    seen = []

    def listening(content):
        seen.append(content)
        return worker.handle(content)

    link = LocalLink({**{n: place.worker(n).handle for n in SIZES}, "a": listening})
    run_federated(place.study({"num-rounds": 6}, federation={"secure-sum": False}), link, tmp_path / "out")
    rounds = [wire.unpack(c) for c in seen if wire.unpack(c).kind == "round"]
    opened = [c for c in seen if wire.unpack(c).kind in ("open", "begin")]
    for content in opened:  # the same session once more
        worker.handle(content)
    first = wire.pack("round", rounds[0].values, rounds[0].arrays)
    assert wire.unpack(worker.handle(first)).kind == "reply"
    assert worker.handle(first) == worker.handle(first)
    moved = {**rounds[0].arrays, "leaf_0": rounds[0].arrays["leaf_0"] + 1}
    for attempt in (1, 2):
        again = wire.pack("round", {**rounds[0].values, "attempt": attempt}, moved)
        refusal = wire.unpack(worker.handle(again))
        assert refusal.kind == "refusal"
        assert "another task" in refusal.values["message"]


def test_changed_rows_are_noticed_when_a_run_resumes(place, tmp_path):
    study = place.study({})
    link = Stopping({n: place.worker(n).handle for n in SIZES})
    with pytest.raises(Interrupted):
        run_federated(study, link, tmp_path / "out")
    frame = pd.read_csv(tmp_path / "c.csv")
    frame.loc[0, "x"] += 1
    frame.to_csv(tmp_path / "c.csv", index=False)
    with pytest.raises(FederationError, match="site 'c' refuses: its rows have changed"):
        run_federated(study, place.link(), tmp_path / "out", resume=True)


@pytest.mark.slow
def test_private_runs_are_charged_at_the_sites_and_stated_for_what_is_seen(place, tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text("[privacy]\nmax-epsilon = 1.5\ndelta = 1e-2\n")
    private = {"privacy": {"delta": 1e-3, "max-epsilon": 1.0}}
    sampler = {"clip-norm": 0.05, "num-chains": 1, "step-size": 1e-4, "num-rounds": 6}
    study = place.study(sampler, **private)
    tree = run_federated(study, place.link(policy=policy), tmp_path / "out")
    assert json.loads(tree.attrs["privacy"])["view"] == "summed"
    assert (tmp_path / "state" / "a" / "ledger.jsonl").stat().st_size > 0

    def many():  # more than the budget has room for
        for number in range(40):
            run_federated(study, place.link(policy=policy), tmp_path / f"again{number}")

    with pytest.raises(PrivacyError, match="refuses"):
        many()


def test_two_sites_have_no_secure_sum(tmp_path):
    place = Place(tmp_path, {"a": 12, "b": 20})
    with pytest.raises(ConfigError, match="needs 3 sites"):
        run_federated(place.study(federation={"secure-sum": True}), place.link(), tmp_path / "out")


def test_a_job_leaves_its_outcome(place, tmp_path):
    study = {**place.study().as_settings(), "model": {"family": "linear", "noise-scale": -1}}
    job = {"study": study, "out": str(tmp_path / "out"), "resume": False}
    assert serve_job(place.link(), job) == 2
    outcome = json.loads((tmp_path / "out" / "outcome.json").read_text())
    assert outcome["status"] == "failed"
    assert "noise-scale" in outcome["message"]


def test_bytes_from_anybody_are_read_with_suspicion():
    rng = np.random.default_rng(0)
    whole = wire.pack("ask", {"round": 1}, {"x": np.arange(6.0).reshape(2, 3), "y": np.zeros(0)})
    assert wire.unpack(whole).arrays["x"].shape == (2, 3)
    for _ in range(300):
        broken = bytearray(whole[: rng.integers(1, len(whole) + 1)])
        for place in rng.integers(0, len(broken), rng.integers(0, 4)):
            broken[place] = rng.integers(0, 256)
        try:
            wire.unpack(bytes(broken))
        except FederationError:
            continue
    with pytest.raises(FederationError, match="at most"):
        wire.unpack(whole, 10)
