"""Probes of the models of table 2 (readout.py): what readouts see of the state's scale, how the scale grows, and what
depth and halting are worth."""

from pathlib import Path

from looped_eval.common.held_out import held_out_rows, run_data
from looped_eval.diagnose.dynamics import losses_at_every_depth
from looped_eval.diagnose.readout_probes import (
    SETTLED,
    future_signal,
    radial_clamp,
    radial_gradient,
    scale_sweep,
    token_norms,
    update_decomposition,
)
from looped_eval.halting.calibration import calibrate, exit_loops, mean_perplexity, perplexity_at
from looped_eval.halting.scoring import measure
from modeling_looped import LoopedForCausalLM
from modeling_looped.exit_criteria import ExitRule

from .slope import slope


ROWS, LENGTH = 32, 64  # of held-out text
HALTED_ROWS, BUDGET = 160, 0.01  # as in appendix H; 160 sequences for calibration and 160 others for the measurement
DEEPEST = 8  # twice the trained depth, as in figure 7
FAR = 30  # loops, as in figure 3


def probes(runs: dict[str, Path]) -> dict:
    """Measure trained runs. runs: name -> folder; the result has the same names."""
    found = {}
    for name, run in runs.items():
        model = LoopedForCausalLM.from_pretrained(run / "final").eval()
        batch = {"input_ids": held_out_rows(run, ROWS, LENGTH)[0]}
        clamped, radial = radial_clamp(model, batch)["freeze"], radial_gradient(model, batch)
        norms = token_norms(model, batch)
        found[name] = {
            "radial_fraction": radial["final_r"],
            "radial_fraction_of_first": radial["r"][0],
            "radial_derivative": radial["final_g"],
            "clamp_cost": clamped["delta_ce"],
            "clamp_norm_ratio": clamped["norm_ratio"],
            **growth(model, batch),
            "future_slope": future_slope(model, batch),
            "mean_over_median_norm": norms["mean"] / norms["median"],
            "p99_over_median_norm": norms["p99"] / norms["median"],
            "scale_range": scale_sweep(model, batch)["ce_range"],
            "loss_by_loop": losses_at_every_depth(model, batch, DEEPEST),
            "halting": None if model.config.reads_run_depth else halting(model, run),
        }
    return found


def growth(model, batch: dict) -> dict:
    """Return the growth of scale per loop that the radial update predicts, its relative error against the measured
    growth, the size of the whole update, and the relative error of the leading order of the turn (figure 3, table
    12)."""
    found = update_decomposition(model, batch, num_loops=FAR)
    table, increment = found["table"], found["table"]["measured_increment"]
    settled = slice(SETTLED - 1, None)
    turns = zip(found["turn_times_scale"][settled], found["b_perp"][settled])
    return {
        "growth_per_loop": table["a_rad"],
        "update": table["b"],
        "growth_error": abs(table["a_rad"] / increment - 1) if increment else None,
        "turn_error": max(abs(across / turn - 1) for turn, across in turns),
    }


def future_slope(model, batch: dict) -> float | None:
    """Return the exponent with which the derivatives of the loss one loop later by log scale depend on the scale
    (equation 4), over loops where it grows evenly; None where a norm between loops keeps it constant."""
    found = future_signal(model, batch, num_loops=FAR, horizon=1)
    settled = slice(SETTLED - 1, FAR - 1)
    scales = found["scale"][settled]
    return slope(scales, [sizes[1] for sizes in found["size"][settled]]) if max(scales) > min(scales) else None


def halting(model, run: Path, rows: int = HALTED_ROWS) -> dict:
    """Return the mean loops and the perplexity ratio of sequences that exit at a margin of logits (appendix H).

    Sequences are as long as those of the training. The margin is calibrated on other sequences, to cost 1 % of
    perplexity.
    """
    drawn = held_out_rows(run, 2 * rows, run_data(run).sequence_length + 1, seed=0)[0]
    loops = model.trained_depth
    known, asked = (measure(model, part, loops, ["logit_margin"], 32).sequences() for part in drawn.chunk(2))
    rule = ExitRule("logit_margin", calibrate("logit_margin", known, BUDGET, min_loops=1)).checked(model.config, loops)
    stops = exit_loops(rule, asked.scores["logit_margin"])
    full = mean_perplexity(asked.losses[-1])
    return {"loops": stops.double().mean().item(), "perplexity_ratio": perplexity_at(stops, asked.losses) / full}
