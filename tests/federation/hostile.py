"""A coordinator that speaks to three sites by hand, so that it can lie to each."""

import numpy as np
import pandas as pd

from fald.core.version import __version__
from fald.federation import wire
from fald.federation.secure import shares
from fald.federation.secure.fixed_point import decode, total
from fald.federation.secure.session import split, unmask_sum
from fald.federation.site.worker import SiteSettings, SiteWorker
from fald.fewround.fit import few_round_settings, server_of
from fald.study.schema import make_study

NAMES = ["a", "b", "c"]
SIZES = [20, 30, 50]
SHARES = np.array(SIZES) / sum(SIZES)
IDS = {"run": "0" * 16, "session": "1" * 16}
START = np.zeros((2, 3))
STUDY = {
    "data": {"target": "y", "features": ["u", "v"]},
    "model": {"family": "logistic"},
    "sampler": {
        "num-rounds": 10,
        "local-steps": 2,
        "step-size": 1e-3,
        "num-chains": 2,
        "precision": "float64",
    },
}
PRIVATE = {**STUDY, "sampler": {**STUDY["sampler"], "clip-norm": 1.0}, "privacy": {"delta": 1e-5}}
FEW_ROUND = {**STUDY, "sampler": None}


class Coordinator:
    """Speaks to three sites by hand, so that it can lie to each."""

    def __init__(self, folder, secure=True, policy=None):
        rng, self.rows = np.random.default_rng(0), {}
        self.workers, self.secure, self.ids = {}, secure, dict(IDS)
        for name, size in zip(NAMES, SIZES):
            place = folder / name
            place.mkdir()
            rows = pd.DataFrame(rng.normal(size=(size, 2)), columns=["u", "v"])
            rows.assign(y=rng.integers(0, 2, size)).to_csv(place / "rows.csv", index=False)
            self.rows[name] = rows
            if policy is not None:
                (place / "POLICY.toml").write_text(policy)
            settings = SiteSettings(
                name, place / "state", place / "rows.csv", None if policy is None else place / "POLICY.toml"
            )
            self.workers[name] = SiteWorker(settings)

    def say(self, name, kind, values=None, arrays=None):
        return wire.unpack(self.workers[name].handle(wire.pack(kind, {**self.ids, **(values or {})}, arrays)))

    def open(self, study=STUDY, for_others=None):
        """Open a study; ``for_others`` is what all sites but the first are told."""
        replies = {}
        for name in NAMES:
            told = study if name == "a" or for_others is None else for_others
            values = {"version": __version__, "study": without_none(told), "secure": self.secure}
            values["names"] = NAMES
            replies[name] = self.say(name, "open", values)
        return replies

    def begin(self, opened, *, sizes=None):
        """Introduce the sites; ``sizes`` by site where they are told different ones."""
        identities = {name: worker.identity.public for name, worker in self.workers.items()}
        hellos = {name: reply.values["hello"] for name, reply in opened.items()}
        replies = {}
        for name in NAMES:
            values = {
                "names": NAMES,
                "sizes": (sizes or {}).get(name, SIZES),
                "hellos": hellos if self.secure else None,
                "identities": identities,
            }
            replies[name] = self.say(name, "begin", values)
        return replies

    def again(self, name):
        """Another process at a site takes over."""
        self.workers[name] = SiteWorker(self.workers[name].settings)

    def round(self, weights=SHARES, position=START, number=1, attempt=1, passed=None):
        arrays = {"weight": np.tile(np.asarray(weights, float), (2, 1)), "leaf_0": position}
        values = {"round": number, "attempt": attempt, "leaves": 1, "saved": 0}
        return {name: self.say(name, "round", values, {**arrays, **shown(passed, name)}) for name in NAMES}

    def ask(self, request, number=1, attempt=1, passed=None):
        """A few-round request to all sites, with the uploads of the round before."""
        arrays = {name: np.asarray(a) for name, a in request.items()}
        values = {"round": number, "attempt": attempt}
        return {name: self.say(name, "ask", values, {**arrays, **shown(passed, name)}) for name in NAMES}


def shown(passed, name):
    """What a coordinator shows a site of a round: of uploads (sites, 2, columns), or of each site's own."""
    if passed is None:
        return {}
    if isinstance(passed, dict):
        return shown(passed[name], name)
    told = {"sum": decode(total(passed)), "hashes": np.stack([shares.hashes(u, len(NAMES)) for u in passed])}
    told["share"] = shares.share(list(passed), NAMES.index(name))
    return {f"passed_{key}": a for key, a in told.items()}


def uploads(replies):
    """Masked uploads as a coordinator passes them on."""
    return np.stack([reply.arrays["masked"] for reply in replies.values()])


def sums(replies):
    """What a few-round server gets of masked replies."""
    first = next(iter(replies.values()))
    shapes = {n.removeprefix("shape_"): tuple(a) for n, a in first.arrays.items() if n.startswith("shape_")}
    return split(unmask_sum(list(uploads(replies))), shapes)


def honest_server(study):
    """The few-round server of a study, as an honest coordinator runs it."""
    made = make_study(without_none(study), "test")
    model = made.build_model(tuple(made.data.features))
    settings = few_round_settings(model, **made.fit.arguments())
    return server_of(settings, model, made.fit.seed, [])


def without_none(tree):
    return {key: value for key, value in tree.items() if value is not None}


def kinds(replies):
    return [reply.kind for reply in replies.values()]


def summed(replies):
    assert kinds(replies) == ["reply"] * 3, [r.values for r in replies.values()]
    return unmask_sum([reply.arrays["masked"] for reply in replies.values()])


def said(reply):
    assert reply.kind == "refusal", reply.values
    assert not reply.arrays
    return reply.values["message"]
