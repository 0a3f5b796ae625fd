"""Embeddings of the loop number: added to the stream, or turned into factors on the branches of the core.

Every embedding takes `loop`, the loop t counted from 0, and `depth`, the number of loops of the run; each is an int
for all rows, or a list of one per row. It returns [rows, 1, state], with one row if all rows agree.
"""

import torch
from torch import nn
from transformers import initialization as init

from .cpu import project
from .layers import linear
from .loop_parameters import select_set
from .tensors import on_device, wide_dtype


NUM_FEATURES = 256  # sinusoids per point in time
LONGEST_PERIOD = 10000.0


def per_row(values: int | float | list, like: torch.Tensor) -> torch.Tensor:
    """Return the values as a tensor [rows] in at least float32; one row if there is one value."""
    values = values if isinstance(values, list) else [values]
    return on_device(values, like.device, wide_dtype(like))


def sinusoids(points: torch.Tensor, size: int) -> torch.Tensor:
    """Return cos and sin of points [rows] at frequencies from 1 to 1 / 10000: [rows, size]; an odd size ends in 0."""
    half = size // 2
    powers = torch.arange(half, device=points.device, dtype=points.dtype) / max(half, 1)
    angles = points[:, None] * LONGEST_PERIOD**-powers
    return nn.functional.pad(torch.cat([angles.cos(), angles.sin()], dim=-1), (0, size % 2))


class LearnedLoopEmbedding(nn.Module):
    """A learned vector for each loop, zero in a new model; deeper loops take the last vector."""

    is_by_loop = True

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.num_loop_sets, config.state_size))

    def init_parameters(self):
        init.zeros_(self.weight)

    def forward(self, loop, depth, like: torch.Tensor) -> torch.Tensor:
        vector = self.weight[select_set(loop, len(self.weight), like.device)]
        # a copy: torch's FLOP counter refuses a module that returns a view inside no_grad
        return vector.view(-1, 1, vector.shape[-1]).to(like.dtype, copy=True)


class SinusoidalLoopEmbedding(nn.Module):
    """Fixed sinusoids of t, of amplitude 1."""

    def __init__(self, config):
        super().__init__()
        self.size = config.state_size

    def forward(self, loop, depth, like: torch.Tensor) -> torch.Tensor:
        return sinusoids(per_row(loop, like), self.size).unsqueeze(1).to(like.dtype)


class TimeEmbedding(nn.Module):
    """f(t / K) + g(1 / K), two small MLPs on sinusoids: the time that a run of K loops has reached, and the time per
    loop (LoopFormer). `last`: the role of the MLPs' last layers, "zero" if the embedding is added to the stream."""

    def __init__(self, config, last: str):
        super().__init__()
        size = config.state_size
        self.time_in, self.step_in = (linear(NUM_FEATURES, size, "time", bias=True) for _ in range(2))
        self.time_out, self.step_out = (linear(size, size, last, bias=True) for _ in range(2))

    def forward(self, loop, depth, like: torch.Tensor) -> torch.Tensor:
        step = 1 / per_row(depth, like)
        time = per_row(loop, like) * step
        of_time = self.embed(self.time_in, self.time_out, time, like)
        return of_time + self.embed(self.step_in, self.step_out, step, like)  # may broadcast one row

    def embed(self, enter: nn.Linear, leave: nn.Linear, points: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        features = sinusoids(points, NUM_FEATURES).to(like.dtype).unsqueeze(1)
        return project(leave, nn.functional.silu(project(enter, features)))


LOOP_EMBEDDINGS = {
    "none": lambda config: None,
    "learned": LearnedLoopEmbedding,
    "sinusoidal": SinusoidalLoopEmbedding,
    "time": lambda config: TimeEmbedding(config, "zero"),
    "modulation": lambda config: TimeEmbedding(config, "time"),
}
