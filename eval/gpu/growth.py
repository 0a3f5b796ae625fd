"""Residual scaling at width 768: figure 2, the norm of the state over N, and figure 4, its change by a step."""

import json
import subprocess
import sys
from collections.abc import Iterator

from .pieces import Measurement, Setting


MEASURES = ("residual_norm", "update_size")
TINY = ["hidden_size=64", "intermediate_size=96", "num_attention_heads=2", "num_core_layers=1", "vocab_size=256"]


def measurements(setting: Setting) -> Iterator[Measurement]:
    for measure in MEASURES:
        for rule in ("none", "sqrt", "linear"):
            yield Measurement(f"{measure}_{rule}", lambda measure=measure, rule=rule: run(measure, rule, setting))


def run(measure: str, rule: str, setting: Setting) -> dict:
    """By the command that users have, in its own process."""
    output = setting.out / "growth" / f"{measure}_{rule}"
    command = [sys.executable, "-m", "looped_eval.diagnose", measure, "residual_scaling", *(TINY if setting.tiny else [])]
    command += ["--rules", rule, "--device", setting.device, "--output", str(output)]
    command += ["--num-loops", "1", "2"] if setting.tiny else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[2:])}: {done.stderr.strip()[-400:]}")
    return json.loads(next(output.glob("*.json")).read_text())
