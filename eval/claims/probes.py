"""What readouts see of the state's scale, and how it grows, of the models of the core 2 x 2 (readout.py)."""

from pathlib import Path

from looped_eval.common.held_out import held_out_rows
from looped_eval.diagnose.readout_probes import radial_clamp, radial_gradient, update_decomposition
from modeling_looped import LoopedForCausalLM


ROWS, LENGTH = 32, 64  # of held-out text


def probes(runs: dict[str, Path]) -> dict:
    """Of trained runs by name: radial gradient after the last loop, what holding the scale costs, growth per loop."""
    found = {}
    for name, run in runs.items():
        model = LoopedForCausalLM.from_pretrained(run / "final").eval()
        batch = {"input_ids": held_out_rows(run, ROWS, LENGTH)[0]}
        clamped = radial_clamp(model, batch)["freeze"]
        found[name] = {
            "radial_fraction": radial_gradient(model, batch)["final_r"],
            "clamp_cost": clamped["delta_ce"],
            "clamp_norm_ratio": clamped["norm_ratio"],
            "growth_per_loop": update_decomposition(model, batch)["table"]["a_rad"],
        }
    return found
