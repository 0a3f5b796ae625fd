"""Checkpoints that are written while the training goes on are whole or not there, as all others."""

import errno
import os
import signal
import time
import warnings
from threading import Event, Timer
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from looped_recipes.engine import checkpoint
from looped_recipes.engine.background import Background
from looped_recipes.engine.checkpoint import METRICS, load_checkpoint, save_checkpoint, whole_checkpoints
from looped_recipes.engine.run_checkpoints import RunCheckpoints
from looped_recipes.engine.saving import CheckpointError
from looped_recipes.settings.recipe import load_recipe
from tests.faults.tiny_run import STEPS, metrics_of
from tests.helpers import tiny_model
from tests.helpers_pretrain import SMOKE
from tests.helpers_processes import run_and_kill
from tests.test_checkpoint import advance, assert_same, contents, model_and_optimizers


BACKGROUND = ["training.save_in_background=true", "training.save_every=1", "training.keep_last=10"]


def steps_of(place) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in whole_checkpoints(place / "run" / "checkpoints")]


@pytest.mark.slow
def test_every_checkpoint_is_whole_and_the_run_the_same(runs):
    place = runs.copy(runs.half, "background")
    runs.train(place, *BACKGROUND, "training.stop_after=5")
    assert steps_of(place)[-2:] == [4, 5]
    runs.train(place, *BACKGROUND)
    assert steps_of(place)[-1] == STEPS and runs.why_other(place) is None


def test_a_kill_while_a_checkpoint_is_written(runs, monkeypatch):
    """The training has gone on by then; the checkpoint is not there, and nothing else is lost."""
    place = runs.copy(runs.half, "killed")
    folder, write_marker = place / "run" / "checkpoints", checkpoint.write_marker

    def slowly(folder, marker, checksums):
        if marker["step"] == 5:
            time.sleep(60)
        write_marker(folder, marker, checksums)

    def is_time():
        return (folder / ".saving-step-00000005").is_dir() and any(each["step"] == 5 for each in metrics_of(place))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_marker", slowly)
        run_and_kill(lambda: runs.train(place, *BACKGROUND), is_time)
    assert steps_of(place)[-1] == 4
    runs.train(place)
    assert runs.why_other(place) is None


def test_what_is_written_is_as_it_was_when_the_step_was_saved(tmp_path):
    """Not as the training has made it by the time of the writing."""
    model, optimizers = model_and_optimizers()
    metrics, work, extra = tmp_path / "metrics.jsonl", [], {"monitor": {"history": {"state_change": [1.0]}}}
    advance(model, optimizers, 0)
    metrics.write_text("before")
    expected = contents(model, optimizers)
    background = SimpleNamespace(wait=lambda: None, start=work.append, group=None)
    path = save_checkpoint(tmp_path / "c", 1, model, optimizers, extra, metrics=metrics, background=background)
    advance(model, optimizers, 1)
    extra["monitor"]["history"]["state_change"] = [1.0, 2.0]
    metrics.write_text("after")
    work[0]()
    other, others = model_and_optimizers()
    loaded = load_checkpoint(path, other, others)
    assert loaded["monitor"] == {"history": {"state_change": [1.0]}}
    assert_same(contents(other, others), expected)
    assert (path / METRICS).read_text() == "before"


def test_filters_of_warnings_that_end_meanwhile_do_not_come_back(tmp_path, monkeypatch):
    """They are of all threads."""
    model, background, begun, may_end = tiny_model(), Background(), Event(), Event()
    monkeypatch.setattr(checkpoint.dcp, "save", lambda *_, **__: begun.set() or may_end.wait())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="of this block")
        save_checkpoint(tmp_path, 1, model, [torch.optim.AdamW(model.parameters())], {}, background=background)
        assert begun.wait(60)
    may_end.set()
    background.wait()
    assert not any(each[1] is not None and "of this block" in each[1].pattern for each in warnings.filters)


def test_a_wait_that_ctrl_c_breaks_off_can_be_made_again():
    background, may_end, done = Background(), Event(), []
    background.start(lambda: done.append(may_end.wait(60)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a script it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            background.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    Timer(0.1, may_end.set).start()
    background.wait()
    assert done == [True]


@pytest.mark.slow
def test_an_error_of_writing_ends_the_run(runs, monkeypatch):
    place = runs.copy(runs.half, "full")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_marker", full)
        with pytest.raises(CheckpointError, match="no space left on the disk"):
            runs.train(place, *BACKGROUND)
    assert steps_of(place)[-1] == 3


@pytest.mark.parametrize("minutes, seconds", [("1.5", 90), ("120", 7200), ("null", 1800)])
def test_processes_wait_for_each_other_in_the_background_as_long_as_in_a_step(minutes, seconds):
    """null: as long as torch does."""
    settings = ["training.save_in_background=true", f"training.timeout_minutes={minutes}"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        background = RunCheckpoints(load_recipe(SMOKE / "lt.yaml", settings), *[None] * 7).background
        assert background.group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == seconds
    finally:
        dist.destroy_process_group()
