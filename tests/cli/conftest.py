"""A folder with a small study and its tables."""

import pytest

from command import two_clinics


@pytest.fixture
def folder(tmp_path):
    return two_clinics(tmp_path)
