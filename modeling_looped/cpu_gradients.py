"""Training on a CPU: gradients of norms and of causal attention, faster than torch computes them.

They are the same to rounding. autograd takes a norm apart into a dozen passes over memory, and the attention kernel is
slow backwards. `fast_paths` in cpu.py is the switch.
"""

import math

import torch
from torch.nn import functional as F

from .cpu import fast_paths_are_on, may_be_transformed, operator


MIN_SIZE = 2**17  # elements of a tensor for which autograd of torch is slow
QUERIES_PER_BLOCK = 64  # whose scores are made at once in the backward pass of attention
SCORES_PER_BLOCK = 2**19  # of so many heads that these stay in the processor's cache


def has_slow_gradients(x: torch.Tensor) -> bool:
    """Whether autograd of torch would be slow: for small tensors it is not."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or not fast_paths_are_on():
        return False
    is_slow = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) and x.numel() >= MIN_SIZE
    return is_slow and not may_be_transformed()


def has_slow_attention_gradients(queries: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether causal attention has lengths for which the kernel's backward pass takes too small blocks."""
    is_slow = queries.dtype == torch.bfloat16 and 192 <= queries.shape[2] == keys.shape[2] < 768
    return is_slow and has_slow_gradients(queries)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """weight * x / rms(x), or without weight."""
    return RMSNorm.apply(x, weight, eps) if has_slow_gradients(x) else F.rms_norm(x, x.shape[-1:], weight, eps)


def attend_causally(queries, keys, values, scaling: float) -> torch.Tensor | None:
    """Attention of [rows, heads, length, head_dim]; None where torch is as fast."""
    if not has_slow_attention_gradients(queries, keys):
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

    Forward is torch's kernel. Backward makes the probabilities again from the log of their denominators, for a block
    of queries at a time:

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
        queries, keys, values, grad = (x.flatten(0, 1) for x in (queries * ctx.scaling, keys, values, grad))
        d_queries, d_keys, d_values = (torch.zeros(keys.shape, dtype=keys.dtype) for _ in range(3))
        for heads, now, seen, p, d_scores, rounded in blocks_of_scores(len(keys), length):
            torch.sub(torch.bmm(queries[heads, now], keys[heads, seen].mT, out=rounded), lse[heads, now], out=p).exp_()
            p[:, :, now].tril_()
            d_values[heads, seen].baddbmm_(rounded.copy_(p).mT, grad[heads, now])
            torch.bmm(grad[heads, now], values[heads, seen].mT, out=rounded)
            rounded.copy_(torch.sub(rounded, overlap[heads, now], out=d_scores).mul_(p))
            d_queries[heads, now] = torch.bmm(rounded, keys[heads, seen])
            d_keys[heads, seen].baddbmm_(rounded.mT, queries[heads, now])
        return d_queries.mul_(ctx.scaling).view(shape), d_keys.view(shape), d_values.view(shape), None


def blocks_of_scores(num_heads: int, length: int):
    """Slices: some heads, a block of queries, the keys they see; and buffers for their scores, two of them in fp32."""
    step = max(1, SCORES_PER_BLOCK // (QUERIES_PER_BLOCK * length))
    dtypes = torch.float32, torch.float32, torch.bfloat16
    buffers = [torch.empty(step * QUERIES_PER_BLOCK * length, dtype=dtype) for dtype in dtypes]
    for head in range(0, num_heads, step):
        for start in range(0, length, QUERIES_PER_BLOCK):
            end = min(start + QUERIES_PER_BLOCK, length)
            shape = (min(step, num_heads - head), end - start, end)
            views = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
            yield slice(head, head + step), slice(start, end), slice(0, end), *views


class RMSNorm(torch.autograd.Function):
    """weight * x / rms(x), or without weight.

    With r = 1 / rms(x) and g = weight * grad, backward is dx = r g - r^3 x mean(g * x): what torch's kernel for
    LayerNorm gives for a mean of 0, but for a constant per token that it takes away.
    """

    @staticmethod
    def forward(ctx, x, weight, eps: float):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        try:
            layer_norm_backward = operator("aten", "native_layer_norm_backward")
        except NotImplementedError:
            return gradients_by_autograd(ctx, x, weight, grad)
        if torch.is_grad_enabled():  # create_graph: further derivatives are wanted
            return gradients_by_autograd(ctx, x, weight, grad)
        size = x.shape[-1:]
        exact, exact_grad = x.float(), grad.float().contiguous()
        exact_weight = None if weight is None else weight.float()
        r = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        r = r.square_().div_(size[0]).add_(ctx.eps).rsqrt_()
        wanted = [True, ctx.needs_input_grad[1], False]
        d_x, d_weight, _ = layer_norm_backward(
            exact_grad, exact, size, torch.zeros_like(r), r, exact_weight, None, wanted
        )
        taken = exact_grad.sum(-1) if weight is None else exact_grad @ exact_weight
        d_x.add_(r.mul_(taken.unsqueeze(-1)).div_(size[0]))
        return d_x.to(x.dtype), None if d_weight is None else d_weight.to(weight.dtype), None


def gradients_by_autograd(ctx, x, weight, grad):
    """Those of RMSNorm by torch's own formula, which has further derivatives."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # views, since x may itself have been made with this weight, in the loop before
        x, weight = x.view_as(x), None if weight is None else weight.view_as(weight)
        y = F.rms_norm(x, x.shape[-1:], weight, ctx.eps)
    needs = ctx.needs_input_grad[:2]  # False where the weight is None
    needed = [tensor for tensor, is_needed in zip((x, weight), needs) if is_needed and tensor is not None]
    found = iter(torch.autograd.grad(y, needed, grad, create_graph=create_graph))
    return *(next(found) if is_needed else None for is_needed in needs), None
