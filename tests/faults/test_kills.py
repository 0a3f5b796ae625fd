"""Runs that are killed: a few in every run of the tests, many in the slow ones."""

import pytest

from tests.faults.campaign import assert_good
from tests.faults.campaign_kills import trials


def test_a_few_kills(runs):
    assert_good(trials(0, runs.folder), 2, least_right=2)


@pytest.mark.slow
def test_many_kills(tmp_path):
    assert_good(trials(1, tmp_path), 100, least_right=100)
