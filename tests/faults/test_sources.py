"""Sources that are not as they should be: read as they are, or refused in one line."""

import pytest

from tests.faults.campaign import assert_good
from tests.faults.campaign_sources import trials


def test_faulty_sources_are_read_as_they_are_or_refused(tmp_path):
    assert_good(trials(0, tmp_path), 24, least_right=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_many_faulty_sources_are_read_as_they_are_or_refused(seed, tmp_path):
    assert_good(trials(seed, tmp_path), 600, least_right=100)
