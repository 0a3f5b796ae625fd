"""Recipes in other encodings, and settings of a command line: read as they are written, or refused."""

import pytest

from tests.faults.campaign import assert_good
from tests.faults.campaign_overrides import trials


def test_overrides_and_encodings_are_read_as_they_are_written_or_refused(tmp_path):
    assert_good(trials(0, tmp_path), 300)


@pytest.mark.slow
def test_many_overrides_and_encodings_are_read_as_they_are_written_or_refused(tmp_path):
    assert_good(trials(1, tmp_path), 5000)
