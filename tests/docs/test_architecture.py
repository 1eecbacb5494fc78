"""The page on where things are names files that exist, in the rooms of the import contract."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
WALKS = [re.findall(r"^\d+\. `(\S+)`", part, re.M) for part in re.split(r"^\*\*", PAGE, flags=re.M)[1:]]


def test_every_file_that_the_page_names_exists():
    named = re.findall(r"`([a-z_]+/[a-z_/.]*)`", PAGE)
    assert len(named) > 40
    assert [n for n in named if not (ROOT / "src" / "fald" / n).exists()] == []


@pytest.mark.parametrize("walk", WALKS, ids=lambda w: w[0])
def test_a_walk_has_at_most_eight_files_and_returns_to_none(walk):
    assert 5 <= len(walk) <= 8
    assert len(set(walk)) == len(walk)


def test_there_are_four_walks():
    assert len(WALKS) == 4


def test_the_picture_shows_the_rooms_of_the_contract():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import make_diagrams
    finally:
        sys.path.pop(0)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    assert [" | ".join(sorted(n for n, _ in floor)) for floor in make_diagrams.ROOMS] == [
        " | ".join(sorted(layer.split(" | "))) for layer in layers
    ]
    assert len(layers) <= 14
    picture = (make_diagrams.IMAGES / "rooms.svg").read_text(encoding="utf-8")
    assert picture == make_diagrams.rooms()
