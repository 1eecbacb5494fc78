"""The ledger of a site: charges add up, survive crashes, and are never forgotten."""

import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from fald.core.errors import ConfigError, ExitCode, PrivacyError, StorageError
from fald.federation.site.ledger import Charge, SiteLedger


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "ledger.jsonl"


def budget(path, max_epsilon=2.0, delta=1e-5):
    return SiteLedger(path, max_epsilon, delta)


def test_studies_add_up(path):
    ledger = budget(path)
    assert ledger.spent(1e-5) == 0.0
    ledger.reserve("a", 0.5, 1e-6, rounds=10)
    ledger.reserve("b", 0.7, 2e-6, rounds=10)
    assert ledger.spent(1e-5) == pytest.approx(1.2, rel=1e-15)
    assert ledger.spent(3e-6) == pytest.approx(1.2, rel=1e-15)
    assert ledger.spent(2.9e-6) == math.inf
    assert SiteLedger(path).spent(1e-5) == ledger.spent(1e-5)


def test_a_continued_study_is_charged_only_for_what_is_added(path):
    ledger = budget(path, 1.0)
    ledger.reserve("a", 0.6, 1e-6, rounds=100)
    assert ledger.reserve("a", 0.9, 1e-6, rounds=200) == Charge(0.9, 1e-6, 200)
    assert ledger.spent(1e-6) == 0.9
    with pytest.raises(PrivacyError, match=r"would spend more ε = 0.2 .* ε = 0.1 "):
        ledger.reserve("a", 1.1, 1e-6, rounds=300)
    assert ledger.charged("a") == Charge(0.9, 1e-6, 200)


def test_what_was_charged_is_not_given_back(path):
    ledger = budget(path)
    ledger.reserve("a", 0.6, 1e-6, rounds=100)
    size = path.stat().st_size
    assert ledger.reserve("a", 0.2, 1e-7, rounds=50) == Charge(0.6, 1e-6, 100)
    assert ledger.reserve("a", 0.6, 1e-6, rounds=100) == Charge(0.6, 1e-6, 100)
    assert path.stat().st_size == size


def test_of_several_lines_of_a_study_the_largest_numbers_count(path):
    lines = [(0.4, 1e-6, 9), (0.9, 2e-6, 5), (0.2, 3e-6, 7)]
    path.parent.mkdir()
    path.write_text(
        "".join(json.dumps({"study": "a", "epsilon": e, "delta": d, "rounds": n}) + "\n" for e, d, n in lines)
    )
    assert SiteLedger(path).charged("a") == Charge(0.9, 3e-6, 9)


def test_budget_is_kept_to_its_end_and_no_further(path):
    ledger = budget(path, 0.3)
    for i in range(3):
        ledger.reserve(f"study {i}", 0.1, 1e-6)
    with pytest.raises(PrivacyError, match=r"ε = 0 and δ = 7e-06 are left") as caught:
        ledger.reserve("study 3", 1e-6, 1e-6)
    assert caught.value.exit_code == ExitCode.PRIVACY
    assert "study 3" not in ledger.charges()


def test_deltas_are_a_budget_of_their_own(path):
    ledger = budget(path)
    ledger.reserve("a", 0.1, 9e-6)
    with pytest.raises(PrivacyError, match="δ = 1e-06 are left"):
        ledger.reserve("b", 0.1, 2e-6)


def test_without_a_budget_charges_are_recorded(path):
    ledger = SiteLedger(path)
    ledger.reserve("a", 50.0, 1e-3)
    ledger.reserve("b", 50.0, 1e-3)
    assert ledger.spent(0.01) == 100.0


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(math.inf, 1e-6), (math.nan, 1e-6), (-1, 1e-6), (1, 0), (1, 1)]
)
def test_what_is_no_privacy_is_refused(path, epsilon, delta):
    with pytest.raises(PrivacyError, match="gives no privacy"):
        SiteLedger(path).reserve("a", epsilon, delta)
    assert not path.exists()


def test_half_a_budget_is_refused(path):
    with pytest.raises(ConfigError, match="both max-epsilon and delta"):
        SiteLedger(path, max_epsilon=1.0)


def test_file_is_for_its_owner_and_one_charge_a_line(path):
    budget(path).reserve("étude", 0.5, 1e-6, rounds=10)
    assert path.stat().st_mode & 0o777 == 0o600
    (line,) = path.read_text(encoding="utf-8").splitlines()
    entry = json.loads(line)
    assert {k: entry[k] for k in ("study", "epsilon", "delta", "rounds")} == {
        "study": "étude",
        "epsilon": 0.5,
        "delta": 1e-6,
        "rounds": 10,
    }


@pytest.mark.parametrize("cut", [1, 2, 20, 60])
def test_a_torn_last_line_was_never_confirmed(path, cut):
    ledger = budget(path)
    ledger.reserve("a", 0.5, 1e-6)
    whole = path.read_bytes()
    ledger.reserve("b", 0.7, 1e-6)
    path.write_bytes(path.read_bytes()[:-cut])
    assert ledger.charges() == {"a": Charge(0.5, 1e-6, 0)}
    ledger.reserve("c", 0.9, 1e-6)
    assert set(ledger.charges()) == {"a", "c"}
    assert path.read_bytes().startswith(whole)


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"3",
        b"",
        b'{"study": "a", "epsilon": 0.1, "delta": 1e-6}',
        b'{"study": "a", "epsilon": NaN, "delta": 1e-6, "rounds": 1}',
        b'{"study": "a", "epsilon": -1, "delta": 1e-6, "rounds": 1}',
        b'{"study": 1, "epsilon": 0.1, "delta": 1e-6, "rounds": 1}',
        b"\xff",
    ],
)
def test_a_damaged_file_stops_everything(path, line):
    ledger = budget(path)
    ledger.reserve("a", 0.5, 1e-6)
    path.write_bytes(path.read_bytes() + line + b"\n")
    before = path.read_bytes()
    for question in (ledger.charges, lambda: ledger.spent(1e-5), lambda: ledger.reserve("b", 0.1, 1e-6)):
        with pytest.raises(StorageError, match="line 2 is no charge"):
            question()
    assert path.read_bytes() == before


def test_a_place_that_cannot_be_written_stops_the_study(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        SiteLedger(tmp_path / "file" / "ledger.jsonl").reserve("a", 0.1, 1e-6)


def test_a_charge_waits_for_another_that_is_being_made(path):
    ledger = budget(path)
    ledger.reserve("a", 1.0, 1e-6)
    with ThreadPoolExecutor(1) as pool, open(path, "rb+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        late = pool.submit(ledger.reserve, "b", 0.8, 1e-6)
        assert wait([late], timeout=0.3).not_done
        line = json.loads(path.read_text())
        other.seek(0, os.SEEK_END)
        other.write(json.dumps({**line, "study": "c", "epsilon": 0.5}).encode() + b"\n")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_UN)
        with pytest.raises(PrivacyError, match=r"ε = 0.5 and .* are left"):
            late.result(timeout=600)


_FOREVER = """
import sys
from fald.federation.site.ledger import SiteLedger
ledger = SiteLedger(sys.argv[1])
for i in range(10**9):
    ledger.reserve(f"study {i}", 1.0, 1e-9)
    print(i, flush=True)
"""


def test_a_charge_that_was_confirmed_survives_kill(path):
    process = subprocess.Popen([sys.executable, "-c", _FOREVER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    confirmed = len((first + process.stdout.read()).splitlines())
    process.stdout.close()
    process.wait()
    charges = SiteLedger(path).charges()
    assert confirmed >= 1
    assert len(charges) in (confirmed, confirmed + 1)
    assert {f"study {i}" for i in range(confirmed)} <= set(charges)
