"""Training on a CPU: gradients of causal attention in bfloat16, faster than torch's kernel computes them.

Their rounding errors are 1.1 to 2.1 times those of torch's kernel. `fast_paths` in cpu.py is the switch. Forward and
backward take .69 to .88 of torch's time over 192 to 767 tokens on AMD (Zen 5), which saves 2 to 8 % of a step with 256
or 512 tokens and width 256 or 512. From 768 tokens on the kernel itself uses larger blocks, and is as fast.
"""

import math

import torch

from .cpu import fast_paths_are_on, operator
from .tensors import may_be_transformed


MIN_SIZE = 2**17  # elements of the queries
MIN_HEADS = 4  # of all rows: with two the gain is below a tenth
QUERIES_PER_BLOCK = 64  # queries whose scores the backward pass computes at once
SCORES_PER_BLOCK = 2**19  # limits the heads of a block, so that scores stay in the processor's cache


def has_slow_gradients(queries: torch.Tensor, keys: torch.Tensor) -> bool:
    """Return whether causal attention has lengths for which the kernel's backward pass uses too small blocks."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or not fast_paths_are_on():
        return False
    rows, heads, length, _ = queries.shape
    is_large = queries.numel() >= MIN_SIZE and rows * heads >= MIN_HEADS
    has_lengths = 192 <= length == keys.shape[2] < 768
    is_slow = queries.device.type == "cpu" and queries.dtype == torch.bfloat16 and has_lengths and is_large
    return is_slow and not may_be_transformed()


def attend_causally(queries, keys, values, scaling: float) -> torch.Tensor | None:
    """Return causal attention of [rows, heads, length, head_dim], or None where torch is as fast."""
    if not has_slow_gradients(queries, keys):
        return None
    groups = queries.shape[1] // keys.shape[1]
    if groups > 1:
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    try:
        return CausalAttention.apply(queries, keys, values, scaling)
    except NotImplementedError:
        return None


class CausalAttention(torch.autograd.Function):
    """softmax(scaling Q K^T) V under a causal mask, all [rows, heads, length, head_dim] in bfloat16.

    Forward is torch's kernel. Backward recomputes the probabilities from the logarithm of their denominators (lse),
    for one block of queries at a time:

        P = exp(scaling Q K^T - lse)      dV = P^T dO
        dS = P * (dO V^T - sum(dO * O))   dQ = scaling dS K      dK = scaling dS^T Q
    """

    @staticmethod
    def forward(ctx, queries, keys, values, scaling: float):
        output, lse = operator("aten", "_scaled_dot_product_flash_attention_for_cpu")(
            queries, keys, values, is_causal=True, scale=scaling
        )
        ctx.save_for_backward(queries, keys, values, output, lse)
        ctx.scaling = scaling
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        queries, keys, values, output, lse = ctx.saved_tensors
        shape, length = queries.shape, queries.shape[2]
        overlap = (grad * output).sum(-1, dtype=torch.float32)
        lse, overlap = (x.reshape(-1, length, 1) for x in (lse, overlap))
        queries, keys, values, grad = (x.flatten(0, 1) for x in (queries, keys, values, grad))
        d_queries, d_keys, d_values = (torch.zeros(keys.shape, dtype=keys.dtype) for _ in range(3))
        for heads, now, seen, p, d_scores, rounded in blocks_of_scores(len(keys), length):
            torch.bmm(queries[heads, now], keys[heads, seen].mT, out=rounded)
            torch.add(-lse[heads, now], rounded, alpha=ctx.scaling, out=p).exp_()
            p[:, :, now].tril_()
            d_values[heads, seen].baddbmm_(rounded.copy_(p).mT, grad[heads, now])
            torch.bmm(grad[heads, now], values[heads, seen].mT, out=rounded)
            rounded.copy_(torch.sub(rounded, overlap[heads, now], out=d_scores).mul_(p))
            d_queries[heads, now] = torch.bmm(rounded, keys[heads, seen])
            d_keys[heads, seen].baddbmm_(rounded.mT, queries[heads, now])
        d_queries, d_keys = (x.mul_(ctx.scaling).view(shape) for x in (d_queries, d_keys))
        return d_queries, d_keys, d_values.view(shape), None


def blocks_of_scores(num_heads: int, length: int):
    """Yield slices of heads, of a block of queries and of the keys these see; and three score buffers, two in fp32."""
    step = max(1, SCORES_PER_BLOCK // (QUERIES_PER_BLOCK * length))
    dtypes = torch.float32, torch.float32, torch.bfloat16
    buffers = [torch.empty(step * QUERIES_PER_BLOCK * length, dtype=dtype) for dtype in dtypes]
    for head in range(0, num_heads, step):
        for start in range(0, length, QUERIES_PER_BLOCK):
            end = min(start + QUERIES_PER_BLOCK, length)
            shape = (min(step, num_heads - head), end - start, end)
            views = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
            yield slice(head, head + step), slice(start, end), slice(0, end), *views
