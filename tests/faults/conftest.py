"""Runs that the tests of this folder share."""

import pytest

from tests.faults.tiny_run import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))
