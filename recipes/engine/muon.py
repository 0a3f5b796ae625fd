"""Muon as used to train Parcae; `torch.optim.Muon` is the plain version.

It adds three things: the iterations of Polar Express (Amsel et al., 2025), with different coefficients in each
iteration; a factored second moment, which gives the updates of all neurons the same size (NorMuon; Li et al., 2025);
and weight decay only where it has the same sign as the update (cautious weight decay).

Each process orthogonalizes a share of the matrices and sends the results to all: the same result as one process.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.optim._muon import _zeropower_via_newtonschulz as newton_schulz

from looped_recipes.common.measures import whole


# (a, b, c) of x -> a x + b x^3 + c x^5: each is optimal after the ones before it for singular values from 1e-3 to 1,
# and all except the last have a safety margin of 2 % for larger values
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
MARGIN = 1.02
SMALLEST = 1e-10  # least value of divisors


class SharedMuon(torch.optim.Muon):
    """torch's Muon, with the iterations distributed: each process works on some of the matrices, gathered whole."""

    @torch.no_grad()
    def step(self, closure=None):
        if num_processes() == 1:
            return super().step(closure)
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            averages = (with_momentum(self.state[matrix], matrix.grad, group["momentum"]) for matrix in matrices)
            rule = {name: group[name] for name in ("ns_coefficients", "ns_steps", "eps")}
            updates = shared_out(averages, partial(newton_schulz, **rule), torch.bfloat16)
            for matrix, update in zip(matrices, updates):
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                update = sharded_as(matrix, update.to(matrix.dtype))
                matrix.add_(update, alpha=-group["lr"] * factor_of_shape(matrix))
        return None


class NorMuon(torch.optim.Optimizer):
    """Optimizer for matrices. beta: decay of the second moment's average. dtype: type of the iterations, by default
    bf16, as published, and fp32 on CPUs, because many CPUs are a hundred times slower at products in bf16."""

    def __init__(
        self,
        params,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        beta: float = 0.95,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "beta": beta})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            averages = (with_momentum(self.state[matrix], matrix.grad, group["momentum"]) for matrix in matrices)
            for matrix, update in zip(matrices, self.made_orthogonal(averages, matrices)):
                self.move(matrix, update.to(matrix.dtype), group)

    def made_orthogonal(self, updates: Iterable[torch.Tensor], matrices: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        on_cpu = bool(matrices) and matrices[0].device.type == "cpu"
        dtype = self.dtype or (torch.float32 if on_cpu else torch.bfloat16)
        return shared_out(updates, lambda update: orthogonal(update.to(dtype)), dtype)

    def move(self, matrix: torch.Tensor, update: torch.Tensor, group: dict):
        state, gradient = self.state[matrix], matrix.grad
        if "second_moment" not in state:
            state["second_moment"] = torch.zeros(factored_shape(matrix), dtype=gradient.dtype, device=gradient.device)
        update = sharded_as(matrix, evened(update, state["second_moment"], group["beta"]))
        rate = group["lr"] * factor_of_shape(matrix)
        decay = group["weight_decay"] * matrix * (update * matrix >= 0)
        matrix.sub_(rate * (update + decay))


def with_momentum(state: dict, gradient: torch.Tensor, momentum: float) -> torch.Tensor:
    """Mix the gradient with the running average of gradients, which is kept in `state` (Nesterov's momentum)."""
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
    return gradient.lerp(average, momentum)


def factor_of_shape(matrix: torch.Tensor) -> float:
    """Return the factor of a matrix's learning rate: sqrt(rows / columns) if there are more rows, else 1."""
    rows, columns = matrix.shape
    return max(1.0, rows / columns) ** 0.5


def num_processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def shared_out(matrices: Iterable[torch.Tensor], function: Callable, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield `function` of every whole matrix, with the same shape and this dtype, on all processes; each process
    computes a share of them."""
    world, rank = num_processes(), dist.get_rank() if dist.is_initialized() else 0
    remaining = iter(matrices)
    while part := list(islice(remaining, world)):
        whole_ones = map(whole, part)  # all processes gather each matrix in turn
        own = [function(matrix).contiguous() for owner, matrix in enumerate(whole_ones) if owner == rank]
        for owner, matrix in enumerate(part):
            result = own[0] if owner == rank else torch.empty(matrix.shape, dtype=dtype, device=matrix.device)
            if world > 1:
                dist.broadcast(result, src=owner)
            yield result


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Approximate U V^T of matrix = U S V^T: the singular values of the result are close to 1."""
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (MARGIN * x.norm() + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def factored_shape(matrix: torch.Tensor) -> tuple[int, int]:
    """Return the shape of the second moment: one number per row, or per column if there are more columns."""
    rows, columns = matrix.shape
    return (rows, 1) if rows >= columns else (1, columns)


def evened(update: torch.Tensor, second_moment: torch.Tensor, beta: float) -> torch.Tensor:
    """Divide `update` by the root of the mean square of each row (or column), averaged over steps; keep its norm."""
    along = -1 if second_moment.shape[1] == 1 else -2
    second_moment.lerp_(update.square().mean(along, keepdim=True), 1 - beta)
    scaled = update * second_moment.clamp(min=SMALLEST).rsqrt()
    return scaled * (update.norm() / scaled.norm().clamp(min=SMALLEST))


def sharded_as(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Shard `tensor`, which every process has whole, like `parameter`."""
    if not isinstance(parameter, DTensor):
        return tensor
    mesh = parameter.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(
        placements=parameter.placements
    )
