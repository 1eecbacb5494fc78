"""Rounds that are stored, resumed, interrupted, and carried between processes."""

import io
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald.core.errors import ConfigError, Interrupted, StorageError
from fald.federation.secure.session import fixed_point_sum, split
from fald.fewround.exchange import InProcessExchange, total
from fald.fewround.rounding import rounded
from fald.fewround.site import answer, expand
from helpers import federation, linear_model

ROWS = federation().data


def model():
    return linear_model(2.0)


class Failing(InProcessExchange):
    """Sites that stop answering in a round, as at Ctrl-C or a crash."""

    def __init__(self, *args, after, error):
        super().__init__(*args)
        self.left, self.error, self.asked = after, error, 0

    def ask(self, request):
        if self.left == 0:
            raise self.error
        self.left -= 1
        self.asked += 1
        return super().ask(request)


def fit(exchange=None, **settings):
    return fald.fit(3, model(), ROWS, progress=False, exchange=exchange, **settings)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), pytest.param(OSError("gone"), marks=pytest.mark.slow)]
)
def test_a_resumed_run_gives_the_draws_of_an_uninterrupted_one(tmp_path, error):
    whole = fit()
    expected = Interrupted if isinstance(error, KeyboardInterrupt) else OSError
    with pytest.raises(expected):
        fit(Failing(model(), ROWS, after=2, error=error), checkpoint=tmp_path)
    rest = Failing(model(), ROWS, after=99, error=error)
    resumed = fit(rest, checkpoint=tmp_path)
    assert rest.asked == whole.attrs["rounds_done"] - 2
    assert resumed["posterior"].to_dataset().equals(whole["posterior"].to_dataset())
    # finished: nobody is asked again
    again = Failing(model(), ROWS, after=0, error=error)
    assert fit(again, checkpoint=tmp_path)["posterior"].to_dataset().equals(whole["posterior"].to_dataset())


def test_another_run_and_damaged_rounds_are_refused(tmp_path):
    fit(checkpoint=tmp_path)
    with pytest.raises(ConfigError, match="belongs to another run"):
        fald.fit(4, model(), ROWS, progress=False, checkpoint=tmp_path)
    first, second = sorted(tmp_path.glob("round-*.npz"))[:2]
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(StorageError, match="another question"):
        fit(checkpoint=tmp_path)
    first.write_bytes(kept[:100])
    with pytest.raises(StorageError, match="damaged"):
        fit(checkpoint=tmp_path)


SITE = """
import io, sys, struct
import numpy as np
from helpers import federation, linear_model
from fald.calculus.sums import make_site
from fald.fewround.rounding import rounded
from fald.fewround.site import answer, expand

name = sys.argv[1]
site = make_site(linear_model(2.0), federation().data.client(name), name)
pipe_in, pipe_out = sys.stdin.buffer, sys.stdout.buffer
while True:
    head = pipe_in.read(8)
    if len(head) < 8:
        break
    with np.load(io.BytesIO(pipe_in.read(struct.unpack("<q", head)[0]))) as message:
        request = {key: message[key] for key in message.files}
    buffer = io.BytesIO()
    np.savez(buffer, **rounded(site.model, name, request, answer(site, expand(request))))
    pipe_out.write(struct.pack("<q", len(buffer.getvalue())) + buffer.getvalue())
    pipe_out.flush()
"""


class Processes:
    """Every site a process of its own, reached by bytes over pipes alone."""

    def __init__(self, data, folder):
        self.names, self.sizes = data.names, [int(n) for n in data.sizes]
        (folder / "site.py").write_text(SITE)
        path = ":".join([str(p) for p in sys.path if p])
        self.sites = [
            subprocess.Popen(
                [sys.executable, str(folder / "site.py"), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**__import__("os").environ, "PYTHONPATH": path},
            )
            for name in self.names
        ]

    def ask(self, request):
        buffer = io.BytesIO()
        np.savez(buffer, **request)
        message = len(buffer.getvalue()).to_bytes(8, "little") + buffer.getvalue()
        for site in self.sites:
            site.stdin.write(message)
            site.stdin.flush()
        return total(self._read(site) for site in self.sites)

    def _read(self, site):
        size = int.from_bytes(site.stdout.read(8), "little")
        with np.load(io.BytesIO(site.stdout.read(size))) as message:
            return {key: message[key] for key in message.files}

    def close(self):
        for site in self.sites:
            site.stdin.close()
            site.wait(timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "corrected"])
def test_sites_in_processes_of_their_own_give_the_same_posterior(tmp_path, method):
    exchange = Processes(ROWS, tmp_path)
    try:
        far = fit(exchange, method=method)
    finally:
        exchange.close()
    near = fit(method=method)
    assert far.attrs["rounds_done"] == near.attrs["rounds_done"]
    for name, values in near["posterior"].data_vars.items():
        np.testing.assert_allclose(far["posterior"][name].values, values.values, atol=1e-6)


class Masked(InProcessExchange):
    """Sums as the secure sum makes them."""

    def ask(self, request):
        full = expand(request)
        each = [rounded(s.model, s.name, request, answer(s, full)) for s in self._sites]
        flat = [np.concatenate([a[name].ravel() for name in sorted(a)]) for a in each]
        return split(fixed_point_sum(flat, saturate=True), {name: a.shape for name, a in each[0].items()})


@pytest.mark.parametrize("carried", [pytest.param(InProcessExchange, marks=pytest.mark.slow), Masked])
@pytest.mark.parametrize(("edge", "verdict"), [(3.02, "not reached"), (99.0, "reached")])
def test_a_likelihood_that_is_no_number_is_told_whichever_way_sums_are_carried(carried, edge, verdict):
    """NaN beyond an edge that the draws pass, at one of the sites, and no site is named."""

    def loglikelihood(theta, row):
        return -((row["y"] - theta) ** 2) / 2 + row["odd"] * jnp.sqrt(edge - theta)

    y = np.random.default_rng(0).normal(3.0, 1.0, 300)
    parts = {
        name: {"y": y[i::3], "odd": np.where(np.arange(100) == 5, float(name == "b"), 0.0)}
        for i, name in enumerate("abc")
    }
    own = fald.Model(lambda theta: -(theta**2) / 200, loglikelihood, jnp.zeros(()))
    data = fald.FederatedData.from_arrays(parts)
    found = fald.fit(0, own, data, progress=False, exchange=carried(own, data))
    assert found.attrs["verdict"] == verdict
    assert verdict == "reached" or "not a number" in found.attrs["reason"]
