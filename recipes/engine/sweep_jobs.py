"""Runs of a sweep as Slurm jobs, through submitit: one job array with one job per run.

A job that is preempted or reaches its time limit is queued again and continues from the run's newest checkpoint.
"""

import time
from pathlib import Path

from looped_recipes.common.errors import CommandError
from looped_recipes.common.progress import progress_bar
from looped_recipes.settings.recipe import RecipeError
from looped_recipes.settings.sweep_files import JOBS

from .interruption import Interrupted
from .sweep_runs import Run
from .sweeps import outcome, train


DEFAULTS = {"time": 24 * 60, "gpus_per_node": 1}
SUBMITTED = "_submitted.pkl"  # how the names of submitit's files of jobs end, behind the id
MOST_SECONDS = 600  # upper limit between the first signal and the end of a job
MOST_REQUEUES = 1000  # for a run that is longer than the time limit of a job


class TrainingJob:
    """The callable that submitit runs on the cluster."""

    def __call__(self, run: Run):
        from submitit import JobEnvironment
        from submitit.helpers import TorchDistributedEnvironment

        if JobEnvironment().num_tasks > 1:  # the run has several processes: one per task of the job
            TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        try:
            train(run)
        except Interrupted:  # saved; now Slurm ends the job, or sends the signal that makes submitit requeue it
            time.sleep(MOST_SECONDS)
            raise

    def checkpoint(self, run: Run):
        """Return the same call to submit again; submitit calls this when the job must end before the run."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, run)


def train_on_slurm(runs: list[Run], settings: dict):
    """Train the runs that are missing in parallel, and return when they are done. settings: job settings under
    submitit's names."""
    runs = [run for run in runs if run.same_as is None and outcome(run) is None]
    if not runs:
        return
    folder = Path(runs[0].recipe.training.output_dir).absolute().parent / JOBS
    executor = executor_of(folder, {"job_name": folder.parent.name, **DEFAULTS, **settings})
    jobs = jobs_under_way(folder, runs)
    missing = [run for run in runs if run.name not in jobs]
    if missing:
        try:
            submitted = executor.map_array(TrainingJob(), missing)
        except RuntimeError as error:  # of submitit, with what sbatch says
            raise CommandError(
                f"Slurm took no jobs: {' '.join(str(error).split())}; correct slurm.KEY=VALUE of the command"
            ) from error
        jobs |= {run.name: job for run, job in zip(missing, submitted)}
    print(
        f"{len(missing)} jobs submitted, {len(jobs) - len(missing)} under way already; what they say is in {folder}. "
        "Ctrl-C leaves them running; the same command again waits for them"
    )
    failed = []
    for run in progress_bar(runs, desc="runs", unit="run"):
        jobs[run.name].wait()
        if outcome(run) is None:
            failed.append(f"{run.name} (see {jobs[run.name].paths.stderr})")
    if failed:
        raise CommandError(
            f"{len(failed)} of {len(runs)} jobs ended before their runs did: {', '.join(failed)}; the same command "
            "submits these again, and they go on"
        )


def executor_of(folder: Path, settings: dict):
    try:
        from submitit import SlurmExecutor
    except ModuleNotFoundError:
        raise RecipeError(
            "--runner slurm needs submitit: pip install 'modeling-looped[cluster]', or leave it out to train here"
        ) from None
    try:
        executor = SlurmExecutor(folder, max_num_timeout=MOST_REQUEUES)
    except RuntimeError:
        raise RecipeError(
            "--runner slurm: there is no srun here: type the command on a machine of the cluster, or leave it out to "
            "train here"
        ) from None
    try:
        executor.update_parameters(**settings)
    except ValueError as error:
        raise RecipeError(f"slurm.KEY=VALUE: {' '.join(str(error).split())}") from None
    return executor


def jobs_under_way(folder: Path, runs: list[Run]) -> dict:
    """Return the jobs that were submitted before and have not ended, by run name. What submitit keeps of a job tells
    them: without it a job trains nothing, so none is missed if a command was killed while it submitted them."""
    from submitit import SlurmJob

    jobs = [SlurmJob(folder, path.name.removesuffix(SUBMITTED)) for path in folder.glob(f"*{SUBMITTED}")]
    # Slurm deletes its records of jobs after a while
    jobs = [job for job in jobs if not job.done() and job.state != "UNKNOWN"]
    under_way = {job.submission().args[0].name: job for job in jobs}
    return {run.name: under_way[run.name] for run in runs if run.name in under_way}
