"""The notebooks: code that compiles, no path of a machine, no output; and each runs from top to bottom."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[str]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_all_are_there():
    names = {path.stem for path in NOTEBOOKS}
    assert names == {"train", "depth", "exits", "retrofit", "diagnose", "fine_tune", "serve"}
    listed = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    assert [name for name in names if f"({name}.ipynb)" not in listed] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert all(not cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    code, text = cells(path, "code"), cells(path, "markdown")
    for number, cell in enumerate(code):
        compile(cell, f"{path.name}, code cell {number}", "exec")
    assert text[0].startswith("# ")
    assert not [
        each for each in code + text if any(place in each for place in ("/home/", "/tmp/", "/work/", "/Users/"))
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_imports_of_ours_is_there(path):
    if path.stem == "serve":
        pytest.importorskip("openai")
    for each in ast.walk(ast.parse("\n".join(cells(path, "code")))):
        if isinstance(each, ast.ImportFrom) and each.module.startswith(("looped_", "modeling_looped")):
            exec(f"from {each.module} import {', '.join(name.name for name in each.names)}")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    """As one script in a folder of its own, with no network."""
    (tmp_path / "script.py").write_text("\n\n".join(cells(path, "code")), encoding="utf-8")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
