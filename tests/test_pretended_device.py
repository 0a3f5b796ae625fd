"""The tests marked gpu on a device that is not the CPU, in a process of their own: torch does not forget a device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers_processes import import_paths


ROOT = Path(__file__).parent.parent
PREMISE = """
import copy, torch
from tests.pretended_device import install
install()
here, there = torch.arange(6.0).view(2, 3).to("pretended"), torch.ones(2, 3)
assert here.device == torch.device("pretended", 0) and (here + 1).device == here.device
assert here.tolist() == [[0, 1, 2], [3, 4, 5]]
for meeting in (lambda: here + there, lambda: there.copy_(here).add_(here), lambda: torch.cat([here, there])):
    try:
        meeting()
    except RuntimeError as error:
        assert "same device" in str(error)
    else:
        raise AssertionError("tensors of two devices met")
here.t()[1:].zero_()
assert torch.equal(here.cpu(), torch.tensor([[0.0, 0, 0], [3, 0, 0]])) and torch.equal(copy.deepcopy(here), here)
tied = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
tied[1].weight = tied[0].weight
tied.to("pretended")
assert tied[1].weight is tied[0].weight
weight = torch.nn.Parameter(here.clone())
with torch.autocast("pretended", torch.bfloat16):
    product = here @ weight.t()
product.float().square().sum().backward()
assert product.dtype == torch.bfloat16 and weight.grad.device == here.device and weight.grad.dtype == torch.float32
"""
TRAINING = """
from tests.gpu.test_training import test_gradient_checkpointing_changes_nothing as train
train("loops", "plain", [2, 4], "pretended")
"""


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": import_paths(), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1700
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout


def test_tensors_of_two_devices_do_not_meet_and_a_model_trains_on_one():
    run("-c", PREMISE + TRAINING)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tests_of_a_gpu():
    said = run("-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider", "--device", "pretended")
    assert int(re.search(r"(\d+) passed", said)[1]) >= 100
