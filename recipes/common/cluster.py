"""What a run asks of many GPUs: time, memory, communication, checkpoints and cost, each number with its formula.

Reckoned, not measured. P: parameters; M: those in matrices that Muon moves, by one moment each, where AdamW keeps two;
T: those that are looked up in tables, not multiplied. Under DDP every GPU holds fp32 weights, gradients and moments,
under FSDP2 its share of them and, from the forward pass to the end of the backward pass, all weights and gradients.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from modeling_looped import LoopedForCausalLM

from .flops import Sizes


GIGA = 1e9
LOGITS_AT_ONCE = 3 * 4 * 2**25  # bytes: logits, probabilities and gradients of a chunk of the loss


@dataclass(frozen=True)
class Cluster:
    """What is assumed of the machines."""

    gpus: int
    peak: float = 989e12  # bf16 operations per second of one GPU
    mfu: float = 0.45
    memory: float = 80e9  # bytes of one GPU
    network: float = 50e9  # bytes per second of one GPU in each direction
    disk: float = 5e9  # bytes per second of the folder that all see
    dollars: float = 2.5  # of a GPU for an hour


class Line(NamedTuple):
    what: str
    value: str
    formula: str


def cluster_plan(
    cluster: Cluster,
    config,
    sizes: Sizes,
    flops: float,
    steps: int,
    rows_per_step: int,
    micro_batch: int,
    length: int,
    layers_with_gradients: float,
    save_every: int,
    muon: bool,
) -> list[Line]:
    """layers_with_gradients: layers of the unrolled model whose activations are kept."""
    p, n, rows = sizes.total, cluster.gpus, rows_per_step / cluster.gpus
    micro = min(micro_batch, rows)
    compute = flops / steps / n / (cluster.peak * cluster.mfu)
    moved = 2 * 4 * p * (n - 1) / n
    traffic = moved / cluster.network
    shapes = muon_shapes(config) if muon else []
    of_muon, m = muon_flops(shapes), sum(rows * columns for rows, columns in shapes)
    orthogonal = of_muon / (cluster.peak * cluster.mfu)
    d, f = config.hidden_size, config.intermediate_size
    kept = layers_with_gradients * activation_bytes(config) * micro * length
    state, checkpoint = 16 * p - 4 * m, 12 * p - 4 * m
    multiplied = sizes.without_embedding - sizes.value_tables
    step = compute + orthogonal
    at_worst = step + traffic
    saving = checkpoint / cluster.disk
    passing = 2 * multiplied + kept + LOGITS_AT_ONCE
    sharded = state / n + 8 * p
    hours = steps * (step + saving / save_every) / 3600
    worst_hours = steps * (at_worst + saving / save_every) / 3600
    return [
        Line("rows of a GPU and step", f"{rows:g}", f"{rows_per_step} rows / {n} GPUs, {micro:g} at a time"),
        Line(
            "products of a step",
            f"{compute:.3f} s",
            f"{flops:.4g} FLOPs / {steps:,} steps / ({n} x {cluster.peak:.3g} x {cluster.mfu} MFU)",
        ),
        Line(
            "Muon's iterations of a step",
            f"{orthogonal:.3f} s",
            f"{of_muon:.3g} FLOPs on every GPU at that rate: 5 (4 r^2 c + 2 r^3) for each r x c matrix",
        ),
        Line(
            "communication of a step",
            f"{moved / GIGA:.1f} GB, {traffic:.3f} s",
            f"8 P (n - 1) / n bytes, fp32 gradients or weights there and back; / {cluster.network / GIGA:g} GB/s",
        ),
        Line(
            "weights, gradients, moments",
            f"{state / GIGA:.1f} GB",
            f"DDP: 16 P - 4 M bytes, fp32 weights, gradients and two moments, of M = {m:,} one",
        ),
        Line(
            "the same under FSDP2",
            f"{sharded / GIGA:.1f} GB",
            "a share of it, and 8 P of gathered weights and gradients: the model is one unit",
        ),
        Line(
            "bf16 weights of autocast",
            f"{2 * multiplied / GIGA:.1f} GB",
            f"2 (P - T) bytes, T = {p - multiplied:,} in tables",
        ),
        Line(
            "activations",
            f"{kept / GIGA:.1f} GB",
            f"{layers_with_gradients:g} layers x (32 d + 8 f) bytes x {micro:g} x {length} tokens; d = {d}, f = {f}",
        ),
        Line(
            "memory of a GPU, DDP",
            f"{(state + passing) / GIGA:.0f} of {cluster.memory / GIGA:.0f} GB",
            "the sum, and 3 x 4 x 2^25 bytes of logits",
        ),
        Line(
            "memory of a GPU, FSDP2",
            f"{(sharded + passing) / GIGA:.0f} of {cluster.memory / GIGA:.0f} GB",
            "the same",
        ),
        Line(
            "checkpoint",
            f"{checkpoint / GIGA:.1f} GB, {saving:.1f} s",
            f"12 P - 4 M bytes: weights and moments; / {cluster.disk / GIGA:g} GB/s",
        ),
        Line(
            "time in checkpoints",
            f"{saving / (saving + save_every * step):.1%}",
            f"{save_every} steps between two; 1 % from training.save_every={least_between(saving, step)} on",
        ),
        Line(
            "the run, communication hidden", f"{hours:.1f} h", "steps x (products + Muon) + checkpoints: DDP, at best"
        ),
        Line("the run, nothing hidden", f"{worst_hours:.1f} h", "the same with communication: FSDP2 as one unit"),
        Line("GPU hours", f"{n * hours:,.0f} to {n * worst_hours:,.0f}", f"{n} x hours"),
        Line(
            "cost",
            f"{n * hours * cluster.dollars:,.0f} to {n * worst_hours * cluster.dollars:,.0f} dollars",
            f"at {cluster.dollars:g} dollars for a GPU and hour",
        ),
    ]


def activation_bytes(config) -> int:
    """Of a token and layer under bf16 autocast: 16 vectors of the width and four of the MLP, some of them in fp32."""
    return 32 * config.hidden_size + 8 * config.intermediate_size


def least_between(saving: float, step: float) -> int:
    """Steps between checkpoints that take a hundredth of the time."""
    return math.ceil(99 * saving / step)


def muon_shapes(config) -> list[tuple[int, int]]:
    """(rows, columns) of every matrix of a block, the smaller first."""
    with torch.device("meta"):
        trunk = LoopedForCausalLM(config).model
    sections = (trunk.prelude, trunk.core, trunk.coda)
    linear = [m for section in sections for m in section.modules() if isinstance(m, torch.nn.Linear)]
    return [(min(shape), max(shape)) for shape in (module.weight.shape for module in linear)]


def muon_flops(shapes: list[tuple[int, int]]) -> float:
    """Of the five iterations on every matrix."""
    return float(sum(5 * (4 * r * r * c + 2 * r**3) for r, c in shapes))
