"""Muon as Parcae was trained with it; `torch.optim.Muon` is the plain one.

Three things are added: the iterations of Polar Express (Amsel et al., 2025), which choose new coefficients each time;
a factored second moment, which gives every neuron's update one size (NorMuon; Li et al., 2025); and decay only where
it agrees with the update (cautious weight decay).
"""

import torch
from torch.distributed.tensor import DTensor, Replicate

from looped_recipes.common.measures import whole


# (a, b, c) of x -> a x + b x^3 + c x^5: each the best after those before it for singular values from 1e-3 to 1, and,
# but for the last, safe where they are 2 % above
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
MARGIN = 1.02
SMALLEST = 1e-10  # of what is divided by


class NorMuon(torch.optim.Optimizer):
    """For matrices. `beta` averages the second moment; `dtype` is that of the iterations, by default bf16, as
    published, and fp32 on CPUs, of which many take a hundred times as long for products in bf16."""

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
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self.move(matrix, group)

    def move(self, matrix: torch.Tensor, group: dict):
        gradient, state = matrix.grad, self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
            state["second_moment"] = torch.zeros(factored_shape(matrix), dtype=gradient.dtype, device=gradient.device)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(average, group["momentum"])
        # every process works on whole matrices: one gather, where sharded iterations would take many
        dtype = self.dtype or (torch.float32 if matrix.device.type == "cpu" else torch.bfloat16)
        update = orthogonal(whole(update).to(dtype)).to(matrix.dtype)
        update = sharded_as(matrix, evened(update, state["second_moment"], group["beta"]))
        rows, columns = matrix.shape
        rate = group["lr"] * max(1.0, rows / columns) ** 0.5
        decay = group["weight_decay"] * matrix * (update * matrix >= 0)
        matrix.sub_(rate * (update + decay))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """U V^T of matrix = U S V^T, nearly: singular values end close to 1."""
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (MARGIN * x.norm() + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def factored_shape(matrix: torch.Tensor) -> tuple[int, int]:
    """One number for each row, or for each column where there are more of these."""
    rows, columns = matrix.shape
    return (rows, 1) if rows >= columns else (1, columns)


def evened(update: torch.Tensor, second_moment: torch.Tensor, beta: float) -> torch.Tensor:
    """`update` over the root of its rows' (or columns') mean square, averaged over steps; its norm stays."""
    along = -1 if second_moment.shape[1] == 1 else -2
    second_moment.lerp_(update.square().mean(along, keepdim=True), 1 - beta)
    scaled = update * second_moment.clamp(min=SMALLEST).rsqrt()
    return scaled * (update.norm() / scaled.norm().clamp(min=SMALLEST))


def sharded_as(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, which every process has, in the shards of `parameter`."""
    if not isinstance(parameter, DTensor):
        return tensor
    mesh = parameter.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(
        placements=parameter.placements
    )
