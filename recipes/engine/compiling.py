"""Blocks compiled each by itself: one graph serves all loops and all layers of a kind, so that compiling takes
no longer for a deeper model.

As CUDA graphs, every pass through a block of a step is recorded once and replayed: for shapes that never change. What
a block returned in one loop stays until the step is over.
"""

from collections.abc import Iterable

import torch
from torch import nn


def blocks_of(model) -> list[nn.Module]:
    return [*model.model.prelude, *model.model.core, *model.model.coda]


def compile_blocks(blocks: Iterable[nn.Module], cuda_graphs: bool = False, **options):
    """options: of torch.compile. Sections, row counts and gradients want variants of the one code: beyond torch's
    limit of 8 the rest would run uncompiled."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    if cuda_graphs:
        options["mode"] = "reduce-overhead"
    for block in blocks:
        block.compile(**options)


def begin_step(cuda_graphs: bool):
    """What graphs returned in the step before may be overwritten from here on. A pass without it would be recorded as
    what follows on the step."""
    if cuda_graphs:
        torch.compiler.cudagraph_mark_step_begin()
