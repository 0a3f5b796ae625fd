"""The wheel: what lies in it, and that its console script runs where nothing else of this project is."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of what git has, or would have, so that no build folder is left here."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = "from setuptools.build_meta import build_wheel; import sys; print(build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, str(out)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


def test_everything_that_runs_is_in_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    packages = {"modeling_looped": "modeling_looped", "recipes": "looped_recipes", "eval": "looped_eval"}
    for folder, package in packages.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml") and "__pycache__" not in path.parts:
                assert f"{package}/{path.relative_to(ROOT / folder).as_posix()}" in inside, path
    assert not [name for name in inside if name.startswith(("tests", "results"))]


def test_the_console_script_runs_from_anywhere(wheel, tmp_path):
    """In an environment that has the wheel, unpacked, and what it needs, in a folder where nothing lies."""
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        [points] = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        module, function = archive.read(points).decode().split("looped = ")[1].strip().split(":")
    start = f"import sys; sys.path.insert(0, {str(site)!r}); from {module} import {function} as f; sys.exit(f())"

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def looped(*arguments: str) -> str:
        command = [sys.executable, "-c", start, *arguments]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "looped COMMAND --help" in looped()
    short = ("training.steps=2", "evaluation.every=2", "training.save_every=2")
    assert "next: looped chat runs/smoke/flt" in looped("pretrain", "smoke/flt.yaml", *short)
    assert "2.00 of 2 loops" in looped("chat", "runs/smoke/flt", "a", "--num-loops", "2", "--max-new-tokens", "2")
    assert "is the model after 2 steps" in looped("export", "runs/smoke/flt")
    assert "next: looped chat converted" in looped("convert", "runs/smoke/flt/final", "converted")
    listed = looped("plan", "own_text/looped.yaml")
    assert "time here" in listed and str(site) not in listed
