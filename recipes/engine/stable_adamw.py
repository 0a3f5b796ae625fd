"""AdamW with update clipping and without epsilon, as used to train recurrent-depth models (Huginn; Parcae's table 3).

Update clipping (StableAdamW; Wortsman et al., 2023): the rate of a tensor is divided by the root mean square of
g / sqrt(v) if that is above 1, so that a gradient much larger than those before does not cause a larger update.
Projections that a public code keeps in one tensor have one such root there, so here their parameters can share it.
Without epsilon (Everett et al., 2024): atan2(m, sqrt(v)) replaces m / (sqrt(v) + eps). It is close to m / sqrt(v) if
that is small, and there is no epsilon to choose.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from looped_recipes.common.measures import whole


class StableAdamW(torch.optim.Optimizer):
    """AdamW with optional update clipping and atan2. With `clipping`, v is at least eps^2; with `atan2`, `eps` has no
    other use. together: sets of parameters that are clipped as one tensor; the others are clipped alone."""

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clipping: bool = True,
        atan2: bool = True,
        together: Iterable[Sequence[torch.Tensor]] = (),
    ):
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "clipping": clipping, "atan2": atan2})
        # by number and not by tensor, because what shards a model may put other tensors into the groups
        numbers = {id(parameter): number for number, (parameter, _) in enumerate(self.members())}
        sets = [[numbers[id(parameter)] for parameter in each if id(parameter) in numbers] for each in together]
        self.first_of = {number: each[0] for each in sets for number in each}

    def members(self) -> list[tuple[torch.Tensor, dict]]:
        return [(parameter, group) for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        moved = [
            (self.first_of.get(number, number), parameter, group)
            for number, (parameter, group) in enumerate(self.members())
            if parameter.grad is not None
        ]
        squares = defaultdict(list)
        for first, parameter, group in moved:
            self.average(parameter, group)
            if group["clipping"]:
                ratio = parameter.grad.square() / self.state[parameter]["exp_avg_sq"]
                squares[first].append((whole(ratio.mean()), parameter.numel()))
        sizes = {first: mean_of_all(parts).sqrt().clamp(min=1.0) for first, parts in squares.items()}
        for first, parameter, group in moved:
            self.move(parameter, group, sizes.get(first, 1.0))

    def average(self, parameter: torch.Tensor, group: dict):
        """Add the gradient to both moments."""
        gradient, state = parameter.grad, self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(gradient)
            state["exp_avg_sq"] = torch.zeros_like(gradient)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if group["clipping"]:
            second.clamp_(min=max(group["eps"] ** 2, torch.finfo(second.dtype).tiny))

    def move(self, parameter: torch.Tensor, group: dict, size: torch.Tensor | float):
        """Change the parameter by its moments, at a rate divided by `size`."""
        state, (beta1, beta2), eps = self.state[parameter], group["betas"], group["eps"]
        step, first, second = state["step"].item(), state["exp_avg"], state["exp_avg_sq"]
        rate = group["lr"] / (1 - beta1**step) / size
        deviation = second.sqrt() / (1 - beta2**step) ** 0.5
        update = torch.atan2(first, deviation) if group["atan2"] else first / (deviation + eps)
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(rate * update)


def mean_of_all(parts: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """Return the mean over all elements of some tensors, from the mean and the number of elements of each."""
    total = sum(count for _, count in parts)
    return sum(mean * (count / total) for mean, count in parts)
