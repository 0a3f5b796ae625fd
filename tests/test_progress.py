"""Progress of long work: a bar for who looks at it, few lines for a file."""

import sys

from looped_recipes.common import progress
from looped_recipes.common.progress import progress_bar


def work(num_steps: int):
    with progress_bar(total=num_steps) as bar:
        for step in range(num_steps):
            bar.set_postfix_str(f"loss {step}", refresh=False)
            bar.update(1)


def test_a_file_gets_whole_lines_at_the_begin_and_the_end(capsys):
    work(1000)
    said = capsys.readouterr().err
    assert "\r" not in said and said.endswith("\n")
    first, last = said.splitlines()
    assert "0/1000" in first and "1000/1000" in last and "loss 999" in last


def test_a_file_gets_a_line_every_so_often(capsys, monkeypatch):
    monkeypatch.setattr(progress, "RARELY", 0)
    work(1000)
    assert len(capsys.readouterr().err.splitlines()) > 10


def test_a_terminal_gets_a_bar_that_moves(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    work(10)
    assert "\r" in capsys.readouterr().err
