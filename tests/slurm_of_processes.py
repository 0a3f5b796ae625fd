"""As much of Slurm as submitit calls: sbatch, srun, sacct and scontrol, whose jobs are processes of this machine.

What is known of a job lies in the folder $SLURM_OF_PROCESSES: pid.JOB of its command, and ended.JOB.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path


FOLDER = Path(os.environ["SLURM_OF_PROCESSES"])


def sbatch(script: str):
    number = str(100 + len(list(FOLDER.glob("script.*"))))
    text = Path(script).read_text()
    Path(FOLDER, f"script.{number}").write_text(text)
    array = re.search(r"--array=0-(\d+)%", text)
    for job in [f"{number}_{task}" for task in range(int(array[1]) + 1)] if array else [number]:
        start(job)
    print(f"Submitted batch job {number}")


def start(job: str):
    number, _, task = job.partition("_")
    own = {"SLURM_JOB_ID": number, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "JOB": job}
    if task:
        own |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": task}
    names = (f"script.{number}", f"again.{job}", f"requeued.{job}", f"ended.{job}")
    script, again, requeued, ended = (shlex.quote(str(FOLDER / name)) for name in names)
    nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = f"while bash {script}; [ -e {again} ]; do mv {again} {requeued}; done; touch {ended}"
    subprocess.Popen(["bash", "-c", command], env={**os.environ, **own}, start_new_session=True, **nothing)


def srun(*arguments: str):
    job = os.environ["JOB"]
    command = arguments[arguments.index(sys.executable) :]
    for option, descriptor in (("--output", 1), ("--error", 2)):
        name = arguments[arguments.index(option) + 1].replace("%A_%a", job).replace("%j", job).replace("%t", "0")
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    Path(FOLDER, f"pid.{job}").write_text(str(os.getpid()))
    os.execv(command[0], command)


def sacct(*_):
    print("JobID|State|NodeList")
    for path in FOLDER.glob("pid.*"):
        job = path.name.partition(".")[2]
        print(f"{job}|{'FAILED' if Path(FOLDER, f'ended.{job}').exists() else 'RUNNING'}|here")


def scontrol(_, job: str):
    Path(FOLDER, f"again.{job}").touch()


if __name__ == "__main__":
    {"sbatch": sbatch, "srun": srun, "sacct": sacct, "scontrol": scontrol}[Path(sys.argv[0]).name](*sys.argv[1:])
