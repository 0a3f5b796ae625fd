import pytest

from tests.faults.campaign import assert_good
from tests.faults.campaign_names import trials


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_name_is_passed_over_unheard(count, tmp_path):
    assert_good(trials(0, tmp_path), at_most=count, least_right=0)
