"""Compile each block separately: one graph serves all loops and all layers with the same code, so that compiling takes
no longer for a deeper model. The injection, if it has weights, and the cross-entropy of a chunk of logits are compiled
too, because they read whole streams or logits.

With CUDA graphs, every pass through a block within a step is recorded once and then replayed, which requires shapes
that never change. The outputs of a block in each loop stay valid until the end of the step.
"""

import signal
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from looped_recipes.settings.recipe import TrainingConfig
from modeling_looped.compatibility import look_up
from modeling_looped.tensors import wide_dtype

from .activations import keep_fewer_activations
from .float8 import take_float8
from .interruption import SIGNALS
from .kernels import take_kernels


def blocks_of(model) -> list[nn.Module]:
    return [*model.model.prelude, *model.model.core, *model.model.coda]


def take_options(model, training: TrainingConfig, precision: str):
    """Apply the recipe's options to a model. The order matters: compiling comes last, as it wraps the others."""
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
    """Start torch's compile workers early, with the signals blocked that end a run. Schedulers, terminals and
    `timeout` signal all processes of a run, and torch waits forever for workers that have ended. They end with this
    process."""
    start = getattr(look_up("torch._inductor.async_compile", "AsyncCompile", None), "warm_pool", None)
    if start is None or not hasattr(signal, "pthread_sigmask"):  # another version of torch, or Windows
        return
    ours = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # workers inherit the mask
    try:
        start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, ours)


def compile_parts(model, cuda_graphs: bool = False, **options):
    """Compile blocks, injection and cross-entropy. options: for torch.compile. Only blocks become CUDA graphs: the
    gradient buffers of the other parts have no fixed address."""
    compile_blocks(blocks_of(model), cuda_graphs, **options)
    if list(model.model.injection.parameters()):
        model.model.injection.compile(**options)
    model.compiled_cross_entropy = CompiledCrossEntropy(options)


def fusible_cross_entropy_of(logits, labels, weights, gradient: torch.Tensor | None) -> torch.Tensor:
    """Compute what the model's own `cross_entropy_of` does, in operations that a compiler fuses: its kernel reads the
    logits twice and writes the gradient once."""
    log_p = F.log_softmax(logits.to(wide_dtype(logits)), dim=-1)
    target = labels.unsqueeze(-1)
    if gradient is not None:
        weight = weights.detach().unsqueeze(-1).to(log_p.dtype)
        is_target = torch.arange(logits.shape[-1], device=logits.device) == target
        gradient.copy_((log_p.exp() - is_target.to(log_p.dtype)) * weight)
    return -log_p.gather(-1, target).squeeze(-1).to(weights.dtype)


class CompiledCrossEntropy:
    """Compiled cross-entropy of a chunk of logits; the number of rows is dynamic, so that the shorter last chunk needs
    no second graph."""

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
    """Compile each block. options: for torch.compile. Sections, row counts and gradients need variants of the same
    code; variants beyond torch's limit of 8 would run uncompiled, so the limit is raised."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    if cuda_graphs:
        options["mode"] = "reduce-overhead"
    for block in blocks:
        block.compile(**options)


def begin_step(cuda_graphs: bool):
    """Mark the start of a step: the outputs of CUDA graphs from the step before may be overwritten from here on.
    Without the mark, a pass would be recorded as a continuation of that step."""
    if cuda_graphs:
        torch.compiler.cudagraph_mark_step_begin()
