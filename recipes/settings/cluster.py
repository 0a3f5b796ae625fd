"""Estimate a run on many GPUs: time, memory, communication, checkpoints and cost, each number with its formula.

The numbers are calculated, not measured. P: parameters; M: parameters in matrices that Muon updates, with one moment
each instead of AdamW's two; T: parameters in lookup tables, without matrix products. Under DDP every GPU stores fp32
weights, gradients and moments; under FSDP2 it stores its share of them and, from the forward pass to the end of the
backward pass, all weights and gradients.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from looped_recipes.common.activation_memory import bytes_under_bf16
from looped_recipes.common.flops import block_matrices, sizes, validation_flops_per_token
from modeling_looped import LoopedConfig, LoopedForCausalLM

from .estimates import kept_by_layers
from .recipe import Recipe


GIGA = 1e9
LOGITS_AT_ONCE = 3 * 4 * 2**25  # bytes: logits, probabilities and gradients of a chunk of the loss


@dataclass(frozen=True)
class Cluster:
    """Assumptions about the machines."""

    gpus: int
    peak: float = 989e12  # bf16 operations per second of one GPU
    mfu: float = 0.45
    memory: float = 80e9  # bytes of one GPU
    network: float = 50e9  # bytes per second of one GPU in each direction
    disk: float = 5e9  # bytes per second of the shared folder
    dollars: float = 2.5  # price of one GPU hour


class Line(NamedTuple):
    what: str
    value: str
    formula: str


def cluster_plan(cluster: Cluster, recipe: Recipe, flops: float, steps: int) -> list[Line]:
    """flops, steps: of the whole run."""
    reckoned = Reckoned(cluster, recipe, flops, steps)
    return [*lines_of_a_step(reckoned), *lines_of_memory(reckoned), *lines_of_the_run(reckoned)]


class Reckoned:
    """Calculates seconds and bytes of a run on a cluster."""

    def __init__(self, cluster: Cluster, recipe: Recipe, flops: float, steps: int):
        self.cluster, self.recipe, self.flops, self.steps = cluster, recipe, flops, steps
        self.config, gpus, rate = recipe.model_config(), cluster.gpus, cluster.peak * cluster.mfu
        optimizer, training, evaluation = recipe.optimizer, recipe.training, recipe.evaluation
        self.parameters, self.multiplied = sizes(self.config).total, sizes(self.config).multiplied
        self.rows, self.length = training.rows_per_step / gpus, recipe.data.sequence_length
        self.micro = min(training.micro_batch_size, self.rows)
        # per step
        shapes = [] if optimizer.name == "adamw" else muon_shapes(self.config, optimizer.muon_value_gates)
        self.muon_size, self.muon_flops = sum(rows * columns for rows, columns in shapes), muon_flops(shapes, gpus)
        self.sent = 2 * self.muon_size * (gpus - 1) / gpus
        self.compute = flops / steps / gpus / rate
        self.muon = self.muon_flops / rate + self.sent / cluster.network
        self.moved = (2 * 4 * self.parameters + 4 * self.muon_size) * (gpus - 1) / gpus
        self.traffic = self.moved / cluster.network
        self.step = self.compute + self.muon
        loops = evaluation.loops or list(range(1, self.config.num_loops + 1))
        self.flops_of_held_out_row = self.length * validation_flops_per_token(self.config, self.length, loops)
        held_out = self.flops_of_held_out_row * math.ceil(evaluation.rows / gpus)  # of one GPU
        self.validation = held_out / rate / evaluation.every
        # memory and disk
        self.state = 16 * self.parameters - 4 * self.muon_size
        self.checkpoint = 12 * self.parameters - 4 * self.muon_size
        self.sharded = self.state / gpus + 8 * self.parameters
        self.kept_of_token = kept_by_layers(recipe, self.config, bytes_under_bf16)
        self.row = self.kept_of_token * self.length
        self.kept = self.row * self.micro
        self.passing = 2 * self.multiplied + self.kept + LOGITS_AT_ONCE
        self.saving = self.checkpoint / cluster.disk

    def fits(self, micro: float) -> bool:
        """Return whether a GPU has memory for a micro batch of `micro` rows under FSDP2."""
        return self.sharded + self.passing + self.row * (micro - self.micro) <= self.cluster.memory

    def hours(self, traffic: float) -> float:
        """Return the hours of the run. traffic: seconds per step in which the GPUs wait for communication."""
        step = self.step + traffic + self.validation + self.saving / self.recipe.training.save_every
        return self.steps * step / 3600


def lines_of_a_step(reckoned: Reckoned) -> list[Line]:
    cluster, n = reckoned.cluster, reckoned.cluster.gpus
    return [
        Line(
            "rows of a GPU and step",
            f"{reckoned.rows:g}",
            f"{reckoned.recipe.training.rows_per_step} rows / {n} GPUs, {reckoned.micro:g} at a time",
        ),
        Line(
            "products of a step",
            f"{reckoned.compute:.3f} s",
            f"{reckoned.flops:.4g} FLOPs / {reckoned.steps:,} steps / ({n} x {cluster.peak:.3g} x {cluster.mfu} MFU)",
        ),
        Line(
            "Muon's iterations of a step",
            f"{reckoned.muon:.3f} s",
            f"{reckoned.muon_flops:.3g} FLOPs at that rate: 5 (4 r^2 c + 2 r^3) for an r x c matrix, of {n} at a time "
            "each GPU takes one; and 2 M (n - 1) / n bytes, bf16 updates",
        ),
        Line(
            "communication of a step",
            f"{reckoned.moved / GIGA:.1f} GB, {reckoned.traffic:.3f} s",
            "(8 P + 4 M) (n - 1) / n bytes in fp32: FSDP2 gathers weights, reduces gradients and gathers what Muon "
            f"iterates on; DDP sends gradients there and back, 8 P; / {cluster.network / GIGA:g} GB/s",
        ),
    ]


def lines_of_memory(reckoned: Reckoned) -> list[Line]:
    config, memory, tables = reckoned.config, reckoned.cluster.memory, reckoned.parameters - reckoned.multiplied
    return [
        Line(
            "weights, gradients, moments",
            f"{reckoned.state / GIGA:.1f} GB",
            f"DDP: 16 P - 4 M bytes, fp32 weights, gradients and two moments, of M = {reckoned.muon_size:,} one",
        ),
        Line(
            "the same under FSDP2",
            f"{reckoned.sharded / GIGA:.1f} GB",
            "a share of it, and 8 P of gathered weights and gradients: the model is one unit",
        ),
        Line(
            "bf16 weights of autocast",
            f"{2 * reckoned.multiplied / GIGA:.1f} GB",
            f"2 (P - T) bytes, T = {tables:,} in tables",
        ),
        Line(
            "activations",
            f"{reckoned.kept / GIGA:.1f} GB",
            f"{reckoned.kept_of_token:,.0f} bytes x {reckoned.micro:g} x {reckoned.length} tokens: 32 d + 8 f of a "
            f"layer with gradients, d = {config.hidden_size}, f = {config.intermediate_size}, or what gradient "
            "checkpointing keeps of it, and 4 d of each state beside layers",
        ),
        Line(
            "memory of a GPU, DDP",
            f"{(reckoned.state + reckoned.passing) / GIGA:.0f} of {memory / GIGA:.0f} GB",
            "the sum, and 3 x 4 x 2^25 bytes of logits",
        ),
        Line(
            "memory of a GPU, FSDP2",
            f"{(reckoned.sharded + reckoned.passing) / GIGA:.0f} of {memory / GIGA:.0f} GB",
            "the same",
        ),
        *([] if reckoned.fits(reckoned.micro) else [Line("does not fit", "", advice_of_memory(reckoned))]),
    ]


def advice_of_memory(reckoned: Reckoned) -> str:
    """Advise on settings with which a step fits into a GPU under FSDP2."""
    halves = [reckoned.micro / 2**i for i in range(1, 10)]
    rows = next((int(micro) for micro in halves if micro >= 1 and reckoned.fits(micro)), None)
    fewer = [] if rows is None else [f"training.micro_batch_size={rows}"]
    ways = [*fewer, "more of training.gradient_checkpointing (selective, true, loops)", "more GPUs"]
    return f"it needs {' or '.join(ways)}"


def lines_of_the_run(reckoned: Reckoned) -> list[Line]:
    cluster, training, evaluation = reckoned.cluster, reckoned.recipe.training, reckoned.recipe.evaluation
    saving, step, validation = reckoned.saving, reckoned.step, reckoned.validation
    best, worst = reckoned.hours(0.0), reckoned.hours(reckoned.traffic)
    of_gpus = [cluster.gpus * hours for hours in (best, worst)]
    return [
        Line(
            "checkpoint",
            f"{reckoned.checkpoint / GIGA:.1f} GB, {saving:.1f} s",
            f"12 P - 4 M bytes: weights and moments; / {cluster.disk / GIGA:g} GB/s",
        ),
        Line(
            "time in checkpoints",
            f"{saving / (saving + training.save_every * step):.1%}",
            f"{training.save_every} steps between two; 1 % from training.save_every={least_between(saving, step)} on",
        ),
        Line(
            "time in validation",
            f"{validation / (validation + step):.1%}",
            f"{reckoned.flops_of_held_out_row:.3g} FLOPs for a row at all depths, {evaluation.rows:,} rows every "
            f"{evaluation.every} steps",
        ),
        Line(
            "the run, communication hidden",
            f"{best:.1f} h",
            "steps x (products + Muon) + validation + checkpoints: DDP, at best",
        ),
        Line("the run, nothing hidden", f"{worst:.1f} h", "the same with communication: FSDP2 as one unit"),
        Line("GPU hours", " to ".join(f"{hours:,.0f}" for hours in of_gpus), f"{cluster.gpus} x hours"),
        Line(
            "cost",
            " to ".join(f"{hours * cluster.dollars:,.0f}" for hours in of_gpus) + " dollars",
            f"at {cluster.dollars:g} dollars for a GPU and hour",
        ),
    ]


def least_between(saving: float, step: float) -> int:
    """Return the least number of steps between checkpoints so that saving takes at most 1 % of the time."""
    return math.ceil(99 * saving / step)


def muon_shapes(config: LoopedConfig, value_gates: bool) -> list[tuple[int, ...]]:
    """Return the two sizes of every matrix that Muon updates, the smaller first."""
    with torch.device("meta"):
        model = LoopedForCausalLM(config)
    return [tuple(sorted(matrix.shape)) for matrix in block_matrices(model, value_gates)]


def muon_flops(shapes: list[tuple[int, ...]], gpus: int = 1) -> float:
    """Return the operations of Muon's five iterations on the critical path: `gpus` matrices are processed at a time,
    one per GPU, and the largest of them counts."""
    of_matrices = [5.0 * (4 * r * r * c + 2 * r**3) for r, c in shapes]
    return sum(max(of_matrices[i : i + gpus]) for i in range(0, len(of_matrices), gpus))
