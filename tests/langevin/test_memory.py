"""Memory of a large federation: rows are read where they lie, not copied or padded."""

from __future__ import annotations

import sys

import pytest

from helpers import run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# VmHWM, not ru_maxrss: the latter starts at the size of the process that started this one
SCRIPT = """
import sys
import numpy as np, jax, fald
from fald.langevin import inprocess

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

num_clients, num_rows, features = int(sys.argv[1]), int(sys.argv[2]), 784
before = status("VmRSS")
rng = np.random.default_rng(0)
x, y = np.empty((num_rows, features), np.uint8), np.arange(num_rows, dtype=np.uint8) % 10
block = rng.integers(0, 256, (10_000, features), dtype=np.uint8)
for start in range(0, num_rows, len(block)):
    x[start : start + len(block)] = block[: num_rows - start]
cuts = np.sort(rng.choice(num_rows - 1, num_clients - 1, replace=False)) + 1
offsets = np.concatenate([[0], cuts, [num_rows]])
data = fald.FederatedData((x, y), offsets, tuple(f"{c:06d}" for c in range(num_clients)))
model = fald.models.softmax_regression(features, 10)

def run(participation):
    tree = fald.sample(
        0, model, data, num_rounds=3, local_steps=2, step_size=1e-9, batch_size=20,
        participation=participation, num_chains=2, progress=False,
    )
    assert np.isfinite(tree["posterior"]["coefficient"].values).all()
    print((status("VmHWM") - before) / (x.nbytes + y.nbytes))

run(fald.with_replacement(50))
"""


def available():
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


@pytest.mark.slow
def test_a_hundred_thousand_clients_take_at_most_half_as_much_again_as_their_rows():
    if available() < 5 * 2**30:
        pytest.skip("needs 5 GB of memory")
    other = "run(fald.without_replacement(50, allow_unequal=True))"
    found = [float(line) for line in run_python(SCRIPT + other, "100000", "3000000").split()]
    assert max(found) <= 1.5


@pytest.mark.slow
def test_a_copy_of_the_rows_would_be_noticed():
    copying = "inprocess._IN_PLACE_BYTES = float('inf'); run(fald.with_replacement(50))"
    usual, copied = (float(line) for line in run_python(SCRIPT + copying, "10000", "600000").split())
    assert copied - usual > 0.9


MAPPED = """
import sys
import numpy as np, fald

def anonymous():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

rows, width = 3_500_000, 100
np.lib.format.open_memmap(sys.argv[1], "w+", np.uint8, (rows, width)).flush()  # takes no room on the disk
x = np.load(sys.argv[1], mmap_mode="r")
if sys.argv[2] == "copied":
    x = np.array(x)
labels, offsets = (np.arange(rows) % 2).astype(np.uint8), np.arange(11) * (rows // 10)
data = fald.FederatedData((x, labels), offsets, tuple("0123456789"))
seen = []
fald.sample(
    0, fald.models.softmax_regression(width, 2), data, num_rounds=6, local_steps=2, step_size=1e-9,
    batch_size=20, num_chains=1, progress=False, callback=lambda *about: seen.append(anonymous()),
)
print(max(seen) / x.nbytes)
"""


@pytest.mark.slow
def test_mapped_files_are_read_where_they_lie(tmp_path):
    mapped, copied = (float(run_python(MAPPED, str(tmp_path / "x.npy"), how)) for how in ("mapped", "copied"))
    assert copied - mapped > 0.9  # of the rows: the twin has them in memory, once
