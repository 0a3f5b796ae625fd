"""What torch does slowly on a CPU, done faster, to rounding the same. Layers ask here first and else do the usual.

Decoding: MKL multiplies few rows with fp32 weights at a third of the speed of memory, oneDNN orders bfloat16 weights
anew at every product, and the attention kernel is slow for single queries in bfloat16. Training: autograd takes a norm
apart into a dozen passes over memory, and the attention kernel is slow backwards.
"""

import math
import platform
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn
from torch.nn import functional as F


FEW_ROWS = 8
WORTH_ORDERING = 2**16  # elements
READS_BEFORE_ORDER = 8  # to order weights takes as long as some ten products with them
SMALL = 2**17  # elements
BLOCK = 64  # queries whose scores are made at once in the backward pass of attention
SCORES = 2**19  # of so many heads that these stay in the processor's cache


def learns_slowly(x: torch.Tensor) -> bool:
    """Whether autograd of torch alone would be slow: for small tensors it is not."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) and x.numel() >= SMALL


# by layer: how often this generation has read its weights; then their ordered copy, or None where there can be none
_reads: ContextVar[dict[nn.Module, int | torch.Tensor | None] | None] = ContextVar("reads", default=None)


@contextmanager
def decoding():
    """Around `generate`: here weights are read again and again, and few rows may be rounded otherwise."""
    if _reads.get() is not None:  # an assistant's, inside that of the model it helps
        yield
        return
    token = _reads.set({})
    try:
        yield
    finally:
        _reads.reset(token)


class Linear(nn.Linear):
    """nn.Linear; in a generation by a faster way to the same product.

    Few rows of fp32 are multiplied with the weights on the left. bfloat16 weights that are read often are kept a
    second time, in the order that oneDNN reads, which takes about two thirds of the time and gives equal results;
    until the generation ends they take their memory twice.
    """

    def forward(self, x):
        reads = None if torch.compiler.is_compiling() else _reads.get()
        if reads is None or x.device.type != "cpu":
            return F.linear(x, self.weight, self.bias)
        if self.is_faster_from_the_left(x):
            return self.from_the_left(x)
        ordered = None
        if x.dtype == torch.bfloat16 and not torch.is_grad_enabled():
            ordered = self.ordered_weight(reads)
        if ordered is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, ordered, self.bias, "none", [], "")

    def is_faster_from_the_left(self, x) -> bool:
        is_plain = x.dtype == torch.float32 and type(self.weight) is nn.Parameter
        return is_plain and x.numel() <= FEW_ROWS * self.in_features

    def from_the_left(self, x):
        rows = x.reshape(-1, self.in_features)
        if len(rows) == 1:
            rows = rows.repeat(2, 1)  # one row is the slow case, and two are the fastest
        y = torch.mm(self.weight, rows.t()).t()[: x.shape[:-1].numel()].contiguous()
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], self.out_features)

    def ordered_weight(self, reads: dict) -> torch.Tensor | None:
        """None as long as this is not worth its price, and where it cannot be."""
        known = reads.get(self, 0)
        if not isinstance(known, int):
            return known
        if known < READS_BEFORE_ORDER:
            reads[self] = known + 1
            return None
        can_be = self.can_be_ordered()
        reads[self] = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), FEW_ROWS) if can_be else None
        return reads[self]

    def can_be_ordered(self) -> bool:
        """Plain weights that stay what they are: not those that hooks, offloading or parametrizations make anew."""
        if type(self) is not Linear or self._forward_pre_hooks or "forward" in vars(self):
            return False
        if type(self.weight) is not nn.Parameter or self.weight.dtype != torch.bfloat16:
            return False
        if self.weight.numel() < WORTH_ORDERING:
            return False
        mkldnn = torch.backends.mkldnn
        if platform.machine() not in ("x86_64", "AMD64") or not (mkldnn.is_available() and mkldnn.enabled):
            return False
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def is_slow_alone(queries: torch.Tensor) -> bool:
    """Whether these are single queries of a kind for which the kernel takes three times as long as for two."""
    if queries.shape[2] != 1 or queries.dtype != torch.bfloat16:
        return False
    return queries.device.type == "cpu" and not torch.compiler.is_compiling()


def is_slow_to_learn(queries: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether this is causal attention over lengths for which the kernel's backward pass takes too small blocks."""
    is_slow = queries.dtype == torch.bfloat16 and 192 <= queries.shape[2] == keys.shape[2] < 768
    return is_slow and learns_slowly(queries)


def attend(queries, keys, values, mask, scaling: float) -> torch.Tensor | None:
    """Attention of [rows, heads, length, head_dim], causal if there is no mask; None where torch does as well."""
    groups = queries.shape[1] // keys.shape[1]
    if is_slow_alone(queries):
        return attend_alone(queries, keys, values, mask, scaling, groups)
    if mask is None and is_slow_to_learn(queries, keys):
        if groups > 1:
            keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
        return CausalAttention.apply(queries, keys, values, scaling)
    return None


def attend_alone(queries, keys, values, mask, scaling: float, groups: int) -> torch.Tensor:
    """One query per row, asked twice; or those that share keys asked together."""
    if groups == 1:
        asked = queries.repeat(1, 1, 2, 1)  # repeated and not expanded, which takes half as long again
        return F.scaled_dot_product_attention(asked, keys, values, attn_mask=mask, scale=scaling)[:, :, :1]
    asked = queries.reshape(len(queries), -1, groups, queries.shape[-1])
    if mask is not None and mask.shape[1] > 1:  # one per head
        mask = mask.reshape(len(mask), -1, groups, mask.shape[-1])
    return F.scaled_dot_product_attention(asked, keys, values, attn_mask=mask, scale=scaling).reshape(queries.shape)


class CausalAttention(torch.autograd.Function):
    """softmax(scaling Q K^T) V under a causal mask, all [rows, heads, length, head_dim] in bfloat16.

    Forward is torch's kernel. Backward makes the probabilities again from the log of their denominators, for a block
    of queries at a time:

        P = exp(scaling Q K^T - lse)      dV = P^T dO
        dS = P * (dO V^T - sum(dO * O))   dQ = scaling dS K      dK = scaling dS^T Q
    """

    @staticmethod
    def forward(ctx, queries, keys, values, scaling: float):
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
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
        for heads, now, seen, p, d_scores, rounded in blocks(len(keys), length):
            torch.sub(torch.bmm(queries[heads, now], keys[heads, seen].mT, out=rounded), lse[heads, now], out=p).exp_()
            p[:, :, now].tril_()
            d_values[heads, seen].baddbmm_(rounded.copy_(p).mT, grad[heads, now])
            torch.bmm(grad[heads, now], values[heads, seen].mT, out=rounded)
            rounded.copy_(torch.sub(rounded, overlap[heads, now], out=d_scores).mul_(p))
            d_queries[heads, now] = torch.bmm(rounded, keys[heads, seen])
            d_keys[heads, seen].baddbmm_(rounded.mT, queries[heads, now])
        return d_queries.mul_(ctx.scaling).view(shape), d_keys.view(shape), d_values.view(shape), None


def blocks(num_heads: int, length: int):
    """Slices: some heads, a block of queries, the keys they see; and buffers for their scores, two of them in fp32."""
    step = max(1, SCORES // (BLOCK * length))
    buffers = [torch.empty(step * BLOCK * length, dtype=dtype) for dtype in (torch.float32,) * 2 + (torch.bfloat16,)]
    for head in range(0, num_heads, step):
        for start in range(0, length, BLOCK):
            end = min(start + BLOCK, length)
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
        if torch.is_grad_enabled():  # create_graph: by torch's own, which has further derivatives
            inputs = [x] if weight is None else [x, weight]
            y = F.rms_norm(x, x.shape[-1:], weight, ctx.eps)
            return *torch.autograd.grad(y, inputs, grad, create_graph=True), *[None] * (3 - len(inputs))
        size = x.shape[-1:]
        exact, exact_grad = x.float(), grad.float().contiguous()
        exact_weight = None if weight is None else weight.float()
        r = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        r = r.square_().div_(size[0]).add_(ctx.eps).rsqrt_()
        wanted = [True, ctx.needs_input_grad[1], False]
        d_x, d_weight, _ = torch.ops.aten.native_layer_norm_backward(
            exact_grad, exact, size, torch.zeros_like(r), r, exact_weight, None, wanted
        )
        taken = exact_grad.sum(-1) if weight is None else exact_grad @ exact_weight
        d_x.add_(r.mul_(taken.unsqueeze(-1)).div_(size[0]))
        return d_x.to(x.dtype), None if d_weight is None else d_weight.to(weight.dtype), None
