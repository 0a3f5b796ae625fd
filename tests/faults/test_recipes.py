"""Recipes that are not as they should be: refused in one line, never run in silence."""

import pytest

from tests.faults.campaign import assert_good
from tests.faults.campaign_recipes import trials


def test_mutated_recipes_are_refused_or_make_sense(tmp_path):
    assert_good(trials(0, tmp_path), 60, least_right=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_many_mutated_recipes_are_refused_or_make_sense(seed, tmp_path):
    assert_good(trials(seed, tmp_path), 2000, least_right=80)
