"""The types that a program of a user sees: the package has py.typed."""

import subprocess
import sys
from pathlib import Path

import pytest


PROGRAM = """
import torch
from transformers import AutoModelForCausalLM
from typing_extensions import assert_type

from modeling_looped import LoopedConfig, LoopedForCausalLM, LoopedForSequenceClassification

config = LoopedConfig.from_preset("flt", num_loops=4)
assert_type(config, LoopedConfig)
model = LoopedForCausalLM(config)
model.save_pretrained("folder")
assert_type(LoopedForCausalLM.from_pretrained("folder", num_loops=2), LoopedForCausalLM)
assert_type(LoopedForCausalLM.from_dense("folder", num_loops=2), LoopedForCausalLM)
assert_type(LoopedForSequenceClassification.from_pretrained("folder"), LoopedForSequenceClassification)
prompt = torch.ones(1, 2, dtype=torch.long, device=model.device)
print(model(prompt, num_loops=2).logits, model.generate(prompt, num_loops=2, max_new_tokens=1))
print(AutoModelForCausalLM.from_pretrained("folder").generate(prompt, num_loops=2))
"""


def test_a_program_of_a_user_has_no_error_of_types(tmp_path):
    pytest.importorskip("pyrefly")
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = ["check", "--preset", "default", "--python-interpreter-path", sys.executable]
    paths = ["--search-path", str(Path(__file__).parent.parent), "program.py"]
    command = [sys.executable, "-m", "pyrefly", *arguments, *paths]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
