"""Blocks compiled each by itself: one graph serves all loops and all layers of a kind, so that compiling takes
no longer for a deeper model. Beside them, what meets whole streams or logits: the injection, where it has weights, and
the cross-entropy of a chunk of logits.

As CUDA graphs, every pass through a block of a step is recorded once and replayed: for shapes that never change. What
a block returned in one loop stays until the step is over.
"""

import signal
from collections.abc import Iterable

import torch
from torch import nn

from looped_recipes.settings.recipe import TrainingConfig
from modeling_looped.borrowed import look_up
from modeling_looped.cross_entropy import fusible_cross_entropy_of

from .activations import keep_fewer_activations
from .float8 import take_float8
from .kernels import take_kernels


def blocks_of(model) -> list[nn.Module]:
    return [*model.model.prelude, *model.model.core, *model.model.coda]


def take_options(model, training: TrainingConfig, precision: str):
    """What the recipe asks of a model, in the order that these need: compiling goes around all others."""
    take_kernels(model, training)
    if training.float8:
        take_float8(blocks_of(model), training.float8, precision)
    if training.gradient_checkpointing:
        keep_fewer_activations(model, training.gradient_checkpointing)
    if training.compile:
        if torch.cuda.is_available():
            start_compile_workers()
        compile_parts(model, cuda_graphs=training.compile == "cuda_graphs")


def start_compile_workers():
    """Torch's own, before it would: a signal to all processes of a run, as schedulers and `timeout` send it, must not
    reach them, since torch waits forever for those that are gone. They end with this process."""
    start = getattr(look_up("torch._inductor.async_compile", "AsyncCompile", None), "warm_pool", None)
    if start is None or not hasattr(signal, "pthread_sigmask"):  # another torch, or Windows
        return
    ours = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # what is blocked is inherited
    try:
        start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, ours)


def compile_parts(model, cuda_graphs: bool = False, **options):
    """options: of torch.compile. What is not a block is no CUDA graph: a buffer for gradients has no fixed place."""
    compile_blocks(blocks_of(model), cuda_graphs, **options)
    if list(model.model.injection.parameters()):
        model.model.injection.compile(**options)
    model.compiled_cross_entropy = CompiledCrossEntropy(options)


class CompiledCrossEntropy:
    """Of chunks of logits, whose last is shorter, and no graph of its own."""

    def __init__(self, options: dict):
        self.options, self.compiled = options, torch.compile(fusible_cross_entropy_of, **options)

    def __call__(self, *tensors: torch.Tensor | None):
        for tensor in tensors:
            if tensor is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self.compiled(*tensors)

    def __reduce__(self):
        return type(self), (self.options,)


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
