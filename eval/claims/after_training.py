"""Increments and norms over loops of trained models: figures 6 to 8 of the residual scaling paper, in small."""

from pathlib import Path

from looped_eval.common.held_out import held_out_rows
from looped_eval.diagnose.dynamics import norm_trajectory
from looped_eval.diagnose.growth import loop_cosine
from modeling_looped import LoopedForCausalLM


ROWS, LENGTH = 16, 64  # of held-out text


def after_training(runs: dict[str, Path]) -> dict:
    """By trained loops: cosines of the loops' increments, and norms from the embedding to the last state."""
    found = {}
    for run in runs.values():
        model = LoopedForCausalLM.from_pretrained(run / "final").eval()
        batch = {"input_ids": held_out_rows(run, ROWS, LENGTH)[0]}
        cosines = loop_cosine(model, batch, copies=0)["model"]["cosine"]
        found[str(model.trained_depth)] = {"cosine": cosines, "norm": norm_trajectory(model, batch)["norm"]}
    return {"by_loops": found}
