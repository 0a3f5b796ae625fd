"""Sweeps on a cluster: a Slurm whose jobs are processes of this machine."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from looped_recipes.common.errors import CommandError
from looped_recipes.engine import sweep_jobs
from looped_recipes.engine.sweep_jobs import TrainingJob, jobs_under_way
from looped_recipes.engine.sweep_runs import load_sweep
from looped_recipes.settings.recipe import RecipeError
from looped_recipes.settings.sweep_files import JOBS
from looped_recipes.sweep import main
from tests.helpers_pretrain import SMOKE, logged_losses, smoke_settings
from tests.helpers_processes import ROOT, import_paths


needs_submitit = pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="submitit is not installed")
SWEEP = f"""
recipe: {SMOKE / "residual_scaling.yaml"}
grid: {{model.residual_scaling: [sqrt, linear], model.num_loops: [1, 2]}}
plot: {{x: model.num_loops, curve: model.residual_scaling}}
"""
NAMES = [
    "residual_scaling=sqrt_num_loops=1",
    "residual_scaling=sqrt_num_loops=2",
    "residual_scaling=linear_num_loops=2",
]


@pytest.fixture
def sweep(tmp_path, training_text):
    """Of four runs, two of which are the same, and what is typed behind it."""
    path = tmp_path / "four.sweep.yaml"
    path.write_text(SWEEP)
    more = ["training.steps=12", "evaluation.every=12"]
    return lambda output: [str(path), *smoke_settings(training_text, tmp_path / output, *more)]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The folder of its jobs."""
    folder, programs = tmp_path / "slurm", tmp_path / "programs"
    folder.mkdir()
    programs.mkdir()
    source = (ROOT / "tests" / "slurm_of_processes.py").read_text()
    for name in ("sbatch", "srun", "sacct", "scontrol"):
        (programs / name).write_text(f"#!{sys.executable}\n{source}")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_OF_PROCESSES", str(folder))
    monkeypatch.setenv("PYTHONPATH", import_paths())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield folder
    for path in folder.glob("pid.*"):
        job = path.name.partition(".")[2]
        if not (folder / f"ended.{job}").exists():
            os.kill(int(path.read_text()), signal.SIGKILL)


def once_it_trains(output: Path, pid: Path, number: int):
    """Sends a signal to the job of a run that is at its fifth step or later."""
    while len(logged_losses(output)) < 5:
        time.sleep(0.02)
    os.kill(int(pid.read_text()), number)


def results_of(folder: Path) -> dict:
    results = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    return {result["name"]: (result["loss"], result.get("same_as")) for result in results}


@needs_submitit
@pytest.mark.slow
def test_jobs_come_to_what_one_process_does(sweep, slurm, tmp_path):
    """One job is preempted, another one is killed: the first is queued again, the second with the next command."""
    main(sweep("here"))
    on_cluster = [*sweep("there"), "--runner", "slurm", "slurm.time=20", "slurm.gpus_per_node=0"]
    moments = [
        threading.Thread(target=once_it_trains, args=(tmp_path / "there" / NAMES[i], slurm / f"pid.100_{i}", number))
        for i, number in ((0, signal.SIGUSR2), (1, signal.SIGKILL))
    ]
    for thread in moments:
        thread.start()
    with pytest.raises(
        CommandError, match=rf"1 of 3 jobs ended before their runs did: {NAMES[1]} \(see .*100_1_0_log"
    ):
        main(on_cluster)
    assert [path.name for path in slurm.glob("requeued.*")] == ["requeued.100_0"]
    assert not (tmp_path / "there" / "results.jsonl").exists()
    main(on_cluster)
    assert sorted(path.name for path in slurm.glob("pid.*")) == ["pid.100_0", "pid.100_1", "pid.100_2", "pid.101"]
    assert "#SBATCH --time=20\n" in (slurm / "script.100").read_text()
    assert results_of(tmp_path / "there") == results_of(tmp_path / "here")
    for name in NAMES:
        assert logged_losses(tmp_path / "there" / name) == logged_losses(tmp_path / "here" / name)
    assert (tmp_path / "there" / "results.svg").read_text() == (tmp_path / "here" / "results.svg").read_text()
    main(on_cluster)  # nothing is left to submit
    assert len(list(slurm.glob("script.*"))) == 2


@needs_submitit
def test_a_job_that_is_under_way_is_not_submitted_again(sweep, slurm, tmp_path):
    """The one that Slurm knows to run is; one that ended is not, nor one that Slurm has forgotten."""
    from submitit.helpers import DelayedSubmission

    runs = [run for run in load_sweep(sweep("there")[0], sweep("there")[1:]) if run.same_as is None]
    for run, job in zip(runs, ["7_0", "7_1", "3"]):
        DelayedSubmission(TrainingJob(), run).dump(tmp_path / f"{job}_submitted.pkl")
    with subprocess.Popen(["sleep", "60"]) as job:
        for number in (0, 1):
            (slurm / f"pid.7_{number}").write_text(str(job.pid))
        (slurm / "ended.7_1").touch()
        under_way = jobs_under_way(tmp_path, runs)
        of_another_grid = jobs_under_way(tmp_path, runs[1:])
        job.kill()
    (slurm / "ended.7_0").touch()
    assert {name: job.job_id for name, job in under_way.items()} == {NAMES[0]: "7_0"} and not of_another_grid


@needs_submitit
def test_jobs_are_submitted_once(sweep, slurm, tmp_path, monkeypatch):
    """Even if the command is killed behind that, and if a grid is made smaller and larger again."""
    from submitit import SlurmJob
    from submitit.helpers import DelayedSubmission

    folder, submitted = tmp_path / "there" / JOBS, []

    def submit_and_die(job, runs):
        for run in runs:
            DelayedSubmission(job, run).dump(folder / f"7_{len(submitted)}_submitted.pkl")
            submitted.append(run.name)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_jobs, "executor_of", lambda *_: SimpleNamespace(map_array=submit_and_die))
    for name, value in {"done": lambda job: False, "state": "RUNNING", "wait": lambda job: None}.items():
        monkeypatch.setattr(SlurmJob, name, value)
    runs = [run for run in load_sweep(sweep("there")[0], sweep("there")[1:]) if run.same_as is None]
    folder.mkdir(parents=True)
    for grid in (runs[:1], runs[1:]):
        with pytest.raises(KeyboardInterrupt):
            sweep_jobs.train_on_slurm(grid, {})
    with pytest.raises(CommandError, match="3 of 3 jobs ended before their runs did"):
        sweep_jobs.train_on_slurm(runs, {})
    assert submitted == NAMES


@needs_submitit
def test_unknown_settings_of_jobs_are_refused(sweep, slurm):
    with pytest.raises(RecipeError, match=r"slurm.KEY=VALUE: Unavailable parameter\(s\): \['queue'\]"):
        main([*sweep("there"), "--runner", "slurm", "slurm.queue=gpu"])
    assert not list(slurm.iterdir())


@needs_submitit
def test_jobs_that_slurm_refuses_are_said_in_a_line(sweep, slurm, tmp_path):
    (tmp_path / "programs" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: no partition' >&2\nexit 1\n")
    with pytest.raises(CommandError, match="Slurm took no jobs: .*sbatch: error: no partition; correct slurm.KEY"):
        main([*sweep("there"), "--runner", "slurm", "slurm.partition=no"])


@needs_submitit
def test_a_machine_without_slurm_is_said(sweep):
    with pytest.raises(RecipeError, match="there is no srun here"):
        main([*sweep("there"), "--runner", "slurm"])


def test_without_submitit_what_to_install_is_said(sweep, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(RecipeError, match=r"needs submitit: pip install 'modeling-looped\[cluster\]'"):
        main([*sweep("there"), "--runner", "slurm"])


def test_settings_of_jobs_need_a_cluster(sweep):
    with pytest.raises(RecipeError, match="slurm.time=20 would have no effect: add --runner slurm"):
        main([*sweep("there"), "slurm.time=20"])
