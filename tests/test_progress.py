"""Progress of long work: a bar for who looks at it, few lines for a file."""

import errno
import os
import pty
import signal
import subprocess
import sys

import pytest

from looped_recipes.common import command_line, progress
from looped_recipes.common.progress import progress_bar
from tests.helpers_processes import import_paths


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


LONG = """
import sys
from looped_recipes.common import command_line, progress
from looped_recipes.common.command_line import run_command

def main(arguments):
    progress.RARELY = 0
    with progress.progress_bar(total=100) as bar:
        for step in range(100):
            bar.update(1)
            print("step", step, flush=True)
    open(arguments[0], "w").close()
    print("saved")
    raise SystemExit(int(arguments[1]))

run_command(main)
"""


@pytest.mark.parametrize(
    "gone,status,options",
    [(["stdout"], 0, []), (["stderr"], 130, []), (["stdout", "stderr"], 143, ["-u"]), (["terminal"], 129, [])],
)
def test_work_goes_on_to_its_own_status_without_a_reader(gone, status, options, tmp_path):
    kept, unread = pty.openpty() if gone == ["terminal"] else os.pipe()
    os.close(kept)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    streams |= dict.fromkeys(streams if gone == ["terminal"] else gone, unread)
    done = subprocess.run(
        [sys.executable, *options, "-c", LONG, tmp_path / "saved", str(status)],
        env={**os.environ, "PYTHONPATH": import_paths()}, **streams, timeout=100,
    )  # fmt: skip
    os.close(unread)
    assert done.returncode == status and (tmp_path / "saved").exists()
    assert done.stdout is None or done.stdout.endswith(b"step 99\nsaved\n")
    assert done.stderr is None or b"100/100" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_a_command_clean_up(number):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        command_line.end_on_signals()
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(number)
        assert ended.value.code == 128 + number
    finally:
        signal.signal(number, before)


def test_a_disk_that_fails_is_no_reader_that_leaves():
    with open("/proc/self/mem", "w") as disk:  # whose writes fail as those of a broken disk
        output = command_line.LastingOutput(disk)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            output.write(b"a result")
