"""The wheel and the source distribution: what lies in them, and that the wheel's script runs from anywhere."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what git has, or would have, so that no build folder is left here."""
    source = tmp_path_factory.mktemp("source")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    return source


def built(kind: str, source: Path, out: Path) -> Path:
    build = f"from setuptools.build_meta import build_{kind}; import sys; print(build_{kind}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, str(out)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "is absent from the `packages`" not in done.stderr
    return next(out.iterdir())


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    return built("wheel", source, tmp_path_factory.mktemp("wheel"))


def test_the_source_distribution_is_what_git_has(source, tmp_path):
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    expected = {name.as_posix() for name in files if not name.parts[0].startswith((".", "build", "modeling_looped."))}
    with tarfile.open(built("sdist", source, tmp_path)) as archive:
        inside = {member.name.partition("/")[2] for member in archive.getmembers()}
    assert "tests/conftest.py" in expected and not expected - inside


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
