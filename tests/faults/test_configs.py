"""Saved models whose config.json is wrong: refused, and no memory is taken for what they do not have."""

import pytest

from tests.faults.campaign import assert_good
from tests.faults.campaign_configs import trials


def test_sizes_that_a_saved_model_does_not_have_are_refused(tmp_path):
    assert_good(trials(0, tmp_path), 16, least_right=0)


@pytest.mark.slow
def test_many_sizes_that_a_saved_model_does_not_have_are_refused(tmp_path):
    assert_good(trials(1, tmp_path), 600, least_right=0)
