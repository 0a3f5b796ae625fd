"""The tests marked `gpu`, file by file. Tests that compile take as long as all others and are a separate piece."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from looped_recipes.common.provenance import ROOT

from .ledger import Ledger
from .pieces import Measurement, Setting


MARK = re.compile(r"^(@|pytestmark = \[?)pytest\.mark\.gpu\b", re.MULTILINE)
OUTCOME = re.compile(r"::.* (PASSED|FAILED|SKIPPED|ERROR)\b.*%\]$")  # line that pytest prints as a test ends
COMPILING = "test_compiled"


def measurements(setting: Setting, piece: str, compiling: bool) -> Iterator[Measurement]:
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARK.search(path.read_text())]
    if not files:
        raise FileNotFoundError(f"{ROOT / 'tests'} holds no test marked gpu: run this in a clone of the project")
    for path in files:
        compiles = path.stem.startswith(COMPILING)
        is_left_out = setting.tiny and (compiles or path.stem == "test_numbers")  # a CPU compiles for minutes
        if compiles == compiling and not is_left_out:
            yield Measurement(path.stem, lambda path=path: run_file(path, setting, piece))


def run_file(path: Path, setting: Setting, piece: str) -> dict:
    """Run the tests of a file. Until the last test has ended, the ledger keeps the counts so far."""
    # addopts is emptied because of --strict-config: a plugin to which a setting belongs may be missing
    options = ["-v", "-rfEs", "--tb=line", "-o", "addopts=", "-p", "no:logging", "-p", "no:cacheprovider"]
    options += ["-m", "gpu", "--device", setting.device]
    command = [sys.executable, "-m", "pytest", str(path), *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines, ended, ledger = [], Counter(), Ledger(setting.out)
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip())
        if found := OUTCOME.search(lines[-1]):
            ended[found[1]] += 1
            ledger.write_result(piece, path.stem, {"broke": "cut off", **counts(ended)})
    if process.wait() not in (0, 1) or not ended:
        said = " ".join(lines[-5:])[-400:]
        raise RuntimeError(f"pytest ended with {process.returncode} after {counts(ended)}: {said}")
    said = [line[:300] for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    return {**counts(ended), "said": said}


def counts(ended: Counter) -> dict[str, int]:
    return {
        "passed": ended["PASSED"],
        "failed": ended["FAILED"] + ended["ERROR"],
        "skipped": ended["SKIPPED"],
    }
