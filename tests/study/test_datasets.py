"""Image sets: from a folder, from mirrors, and what is said when neither has them."""

import functools
import http.server
import os
import threading

import numpy as np
import pytest

from fald import datasets
from fald.core.errors import ConfigError, DataError
from images import FILES, write_set


@pytest.fixture
def originals(tmp_path, monkeypatch):
    """A folder whose files count as the originals; the cache is empty and FALD_DATA is not set."""
    folder = tmp_path / "originals"
    hashes = {name: write_set(folder / name, seed) for seed, name in enumerate(datasets.IMAGE_SETS)}
    monkeypatch.setattr(datasets, "_HASHES", hashes)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FALD_DATA", raising=False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def server(originals):
    """Serves the originals on the loopback interface; ``asked`` records the paths."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *arguments):
            pass

    serving = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(originals))
    )
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_address[1]}", asked
    serving.shutdown()
    serving.server_close()
    thread.join()


def mirrors(monkeypatch, *addresses):
    monkeypatch.setattr(datasets, "_MIRRORS", {name: addresses for name in datasets.IMAGE_SETS})


def test_local_folder(originals, monkeypatch):
    monkeypatch.setenv("FALD_DATA", str(originals))
    mirrors(monkeypatch)  # nothing to download from
    images = datasets.load("mnist")
    assert images.train_images.shape == (400, 784)
    assert images.test_images.shape == (200, 784)
    assert images.train_images.dtype == np.uint8
    assert sorted(np.unique(images.test_labels)) == list(range(10))
    other = datasets.load("fashion-mnist")
    assert not np.array_equal(images.train_labels, other.train_labels)


def test_download_falls_back_to_the_next_mirror_and_is_kept(server, monkeypatch):
    address, asked = server
    mirrors(monkeypatch, f"{address}/nowhere/", f"{address}/mnist/")
    first = datasets.load("mnist")
    assert len(asked) == 8  # four files, each refused once
    again = datasets.load("mnist")
    assert len(asked) == 8
    assert all(np.array_equal(a, b) for a, b in zip(first, again))


def test_file_with_another_hash_is_not_taken_from_a_mirror(server, originals, monkeypatch):
    address, _ = server
    mirrors(monkeypatch, f"{address}/mnist/")
    path = originals / "mnist" / FILES[2]
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(DataError, match=r"t10k-images.*wrong SHA-256") as caught:
        datasets.load("mnist")
    assert caught.value.exit_code == 3


def test_offline_says_where_to_put_the_files(originals, monkeypatch):
    mirrors(monkeypatch, "http://127.0.0.1:9/")
    with pytest.raises(DataError, match=r"could not be downloaded \(http://127.0.0.1:9/: ") as caught:
        datasets.load("mnist")
    assert "FALD_DATA=FOLDER" in caught.value.hint
    assert all(name in caught.value.hint for name in FILES)


def test_missing_file_of_the_local_folder(originals, monkeypatch):
    monkeypatch.setenv("FALD_DATA", str(originals))
    path = originals / "fashion-mnist" / FILES[3]
    path.unlink()
    with pytest.raises(DataError, match=r"no file .*t10k-labels") as caught:
        datasets.load("fashion-mnist")
    assert str(path.parent) in caught.value.hint


def test_changed_file_of_the_local_folder(originals, monkeypatch):
    monkeypatch.setenv("FALD_DATA", str(originals))
    path = originals / "mnist" / FILES[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="not the original file"):
        datasets.load("mnist")


def test_cache_that_cannot_be_written(server, monkeypatch, tmp_path):
    address, _ = server
    mirrors(monkeypatch, f"{address}/mnist/")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="cannot keep") as caught:
        datasets.load("mnist")
    assert "XDG_CACHE_HOME" in caught.value.hint


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="no data set 'minst'") as caught:
        datasets.load("minst")
    assert "fashion-mnist" in caught.value.hint


@pytest.mark.skipif("FALD_DATA" not in os.environ, reason="FALD_DATA names no folder with the image sets")
@pytest.mark.parametrize("name", datasets.IMAGE_SETS)
def test_original_sets(name):
    images = datasets.load(name)
    assert images.train_images.shape == (60_000, 784)
    assert images.test_images.shape == (10_000, 784)
    counts = np.bincount(images.test_labels)
    assert len(counts) == 10
    assert counts.sum() == 10_000
    assert images.train_images.max() == 255
