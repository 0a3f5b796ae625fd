"""AdamW with update clipping and without epsilon, as used to train recurrent-depth models (Huginn; Parcae's table 3).

Update clipping (StableAdamW; Wortsman et al., 2023): the rate of a tensor is divided by the root mean square of
g / sqrt(v) if that is above 1, so that a gradient much larger than those before does not cause a larger update.
Without epsilon (Everett et al., 2024): atan2(m, sqrt(v)) replaces m / (sqrt(v) + eps). It is close to m / sqrt(v) if
that is small, and there is no epsilon to choose.
"""

import torch

from looped_recipes.common.measures import whole


class StableAdamW(torch.optim.Optimizer):
    """AdamW with optional update clipping and atan2. With `clipping`, v is at least eps^2; with `atan2`, `eps` has no
    other use."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clipping=True, atan2=True):
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "clipping": clipping, "atan2": atan2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, group)

    def move(self, parameter: torch.Tensor, group: dict):
        gradient, state = parameter.grad, self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(gradient)
            state["exp_avg_sq"] = torch.zeros_like(gradient)
        state["step"] += 1
        step, (beta1, beta2), eps = state["step"].item(), group["betas"], group["eps"]
        first = state["exp_avg"].lerp_(gradient, 1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        rate = group["lr"] / (1 - beta1**step)
        if group["clipping"]:
            second.clamp_(min=max(eps**2, torch.finfo(second.dtype).tiny))
            rate = rate / whole((gradient.square() / second).mean()).sqrt().clamp(min=1.0)
        deviation = second.sqrt() / (1 - beta2**step) ** 0.5
        update = torch.atan2(first, deviation) if group["atan2"] else first / (deviation + eps)
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(rate * update)
