"""The tests marked `gpu`, file by file, so that each has its line when the time ends."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from looped_recipes.common.provenance import ROOT

from .pieces import Measurement, Setting


MARK = re.compile(r"pytest\.mark\.gpu\b")
COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


def measurements(setting: Setting) -> Iterator[Measurement]:
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARK.search(path.read_text())]
    if not files:
        raise FileNotFoundError(f"{ROOT / 'tests'} holds no test marked gpu: run this in a clone of the project")
    for path in files:
        if not (setting.tiny and path.stem in ("test_compiled", "test_numbers")):  # a CPU compiles for minutes
            yield Measurement(path.stem, lambda path=path: run_file(path, setting))


def run_file(path: Path, setting: Setting) -> dict:
    options = ["-q", "-rfEs", "--tb=line", "-p", "no:cacheprovider", "-m", "gpu", "--device", setting.device]
    command = [sys.executable, "-m", "pytest", str(path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    counts = {kind: int(number) for number, kind in COUNT.findall(lines[-1] if lines else "")}
    if done.returncode not in (0, 1) or not counts:
        raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
    print(done.stdout, flush=True)
    return {
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
        "skipped": counts.get("skipped", 0),
        "said": [line[:300] for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))],
    }
