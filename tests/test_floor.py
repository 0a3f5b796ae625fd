"""The constraints of `make test-floor` are the oldest versions that pyproject.toml declares."""

import re
from pathlib import Path


ROOT = Path(__file__).parent.parent
NOT_PINNED = {"ruff", "pyrefly", "jupyterlab"}  # what tests do not need


def versions(text: str, sign: str) -> dict[str, list[str]]:
    """Name, as the package index spells it, and the parts of its version without zeros at the end."""
    found = re.findall(rf'^[ "]*(\w[\w.-]*){sign}([\d.]+)', text.replace(", ", "\n"), flags=re.MULTILINE)
    found += re.findall(rf'\["(\w[\w.-]*){sign}([\d.]+)', text)
    return {
        re.sub(r"[-_.]+", "-", name).lower(): re.sub(r"(\.0)+$", "", version).split(".") for name, version in found
    }


def test_floor():
    declared = versions((ROOT / "pyproject.toml").read_text(), ">=")
    pinned = versions((ROOT / "constraints-floor.txt").read_text(), "==")
    assert len(declared) > 20 and NOT_PINNED <= declared.keys()
    del declared["setuptools"], pinned["numpy"]  # of what builds the wheel; of what others declare
    assert {name: version for name, version in declared.items() if name not in NOT_PINNED} == pinned
