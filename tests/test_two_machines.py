"""Two launchers with addresses of their own, as on two machines: one is lost, the job is queued again, and the end is
the same bit for bit."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers_pretrain import SMOKE, logged_losses, smoke_settings
from tests.helpers_processes import ROOT, import_paths


FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "false",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def machine(number: int, port: int, arguments: list[str]) -> subprocess.Popen:
    """A launcher and its process, in a session of their own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    command += ["--rdzv_backend", "c10d", "--rdzv_id", "job", "--rdzv_endpoint", f"127.0.0.1:{port}"]
    command += ["--local_addr", f"127.0.0.{number + 1}", "-m", "recipes.pretrain", str(SMOKE / "parcae.yaml")]
    environment = {**os.environ, **FSDP, "OMP_NUM_THREADS": "1", "PYTHONPATH": import_paths()}
    return subprocess.Popen(
        [*command, *arguments], cwd=ROOT, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def switch_off(launcher: subprocess.Popen):
    """With its process, which has a session of its own and would save when its launcher is gone."""
    children = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True)
    for number in [launcher.pid, *map(int, children.stdout.split())]:
        os.kill(number, signal.SIGKILL)


def job(arguments: list[str], lose=None) -> tuple[list[int], str]:
    """Exit codes of both machines, and what they said. lose: asked until it says that the second is to be lost."""
    port = free_port()
    machines = [machine(number, port, arguments) for number in range(2)]
    try:
        while lose is not None and not lose():
            assert all(each.poll() is None for each in machines), machines[0].communicate()[0]
            time.sleep(0.02)
        if lose is not None:
            switch_off(machines[1])
        said = "".join(each.communicate(timeout=200)[0] for each in machines)
        return [each.returncode for each in machines], said
    finally:
        for each in machines:
            if each.poll() is None:
                switch_off(each)


@pytest.mark.slow
@pytest.mark.timeout(900)  # three launches
def test_a_lost_machine_costs_the_steps_since_the_last_checkpoint(training_text, tmp_path):
    def arguments(name):
        more = ["training.steps=12", "training.save_in_background=true", "logging.trackers=[tensorboard]"]
        return smoke_settings(training_text, tmp_path / name, *more)

    codes, said = job(arguments("whole"))
    assert codes == [0, 0], said
    codes, said = job(arguments("lost"), lose=lambda: len(logged_losses(tmp_path / "lost")) > 4)
    assert codes[0] != 0 and codes[1] == -signal.SIGKILL and "another process of this launch has ended" in said
    codes, said = job(arguments("lost"))
    assert codes == [0, 0] and "continuing from" in said, said
    assert logged_losses(tmp_path / "lost") == logged_losses(tmp_path / "whole")
    whole, lost = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "lost"))
    assert whole.keys() == lost.keys() and all(torch.equal(whole[name], lost[name]) for name in whole)
