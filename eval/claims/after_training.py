"""Increments and norms over the loops of small trained models: figures 6 to 8 of the residual scaling paper."""

from pathlib import Path

from looped_eval.common.held_out import held_out_rows
from looped_eval.diagnose.dynamics import norm_trajectory
from looped_eval.diagnose.growth import loop_cosine
from modeling_looped import LoopedForCausalLM


ROWS, LENGTH = 16, 64  # of held-out text


def after_training(runs: dict[str, Path]) -> dict:
    """Return, for each trained number of loops, the cosines between the loops' increments, and the norms of the state
    from the embedding to the last loop."""
    found = {}
    for run in runs.values():
        model = LoopedForCausalLM.from_pretrained(run / "final").eval()
        batch = {"input_ids": held_out_rows(run, ROWS, LENGTH)[0]}
        cosines = loop_cosine(model, batch, copies=0)["model"]["cosine"]
        found[str(model.trained_depth)] = {"cosine": cosines, "norm": norm_trajectory(model, batch)["norm"]}
    return {"by_loops": found}
