"""Every campaign: a few faults in every run of the tests, many in the slow ones."""

import importlib
from typing import NamedTuple

import pytest

from tests.faults.campaign import assert_good, campaigns


class Count(NamedTuple):
    trials: int
    right: int  # so many at least are right


class Amounts(NamedTuple):
    few: Count
    many: Count
    seeds: tuple[int, ...] = (1,)  # of many


AMOUNTS = {
    "configs": Amounts(Count(16, 0), Count(600, 0)),
    "disk": Amounts(Count(5, 1), Count(300, 60)),
    "kills": Amounts(Count(2, 2), Count(100, 100)),
    "names": Amounts(Count(40, 0), Count(2000, 0), seeds=(0,)),
    "overrides": Amounts(Count(300, 15), Count(5000, 250)),
    "recipes": Amounts(Count(60, 2), Count(2000, 80), seeds=(1, 2, 3)),
    "sources": Amounts(Count(24, 4), Count(600, 100), seeds=(1, 2)),
}
OF_RUNS = ("disk", "kills")  # share the runs that they fault


def check(name: str, seed: int, folder, count: Count):
    trials = importlib.import_module(f"tests.faults.campaign_{name}").trials
    assert_good(trials(seed, folder), count.trials, least_right=count.right)


@pytest.mark.parametrize("name", campaigns())
def test_a_few_faults(name, runs, tmp_path):
    check(name, 0, runs.folder if name in OF_RUNS else tmp_path, AMOUNTS[name].few)


@pytest.mark.slow
@pytest.mark.parametrize("name, seed", [(name, seed) for name, found in AMOUNTS.items() for seed in found.seeds])
def test_many_faults(name, seed, tmp_path):
    check(name, seed, tmp_path, AMOUNTS[name].many)
