"""Files that a disk has changed: a few faults in every run of the tests, many in the slow ones."""

import pytest

from tests.faults.campaign import assert_good
from tests.faults.campaign_disk import trials


def test_a_few_faults(runs):
    assert_good(trials(0, runs.folder), 5, least_right=1)


@pytest.mark.slow
def test_many_faults(tmp_path):
    assert_good(trials(1, tmp_path), 300, least_right=60)
