"""Initial weights: a scheme says how the weights of each role are drawn.

A layer gets its role where it is made: "input" (q, k, v and the first MLP matrices), "output" (last matrix of a
branch), "embedding", "head", "readout" (Parcae's C), "adapter" (concat injection), "identity" (B of the diagonal
injection), "value_table", "value_gate", "position", "gate" (exit gate), "time" (layers of the time embedding), "zero"
(layers without effect in a new model).
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init


ALIKE = ("position", "gate", "time")  # roles whose weights all schemes but "torch" draw alike


def truncated_normal(weight, std: float):
    """Draw normal noise, cut at three standard deviations."""
    init.trunc_normal_(weight, mean=0.0, std=std, a=-3 * std, b=3 * std)


def orthogonal(weight, std: float):
    """Draw orthogonal rows or columns, scaled so that entries have standard deviation `std`."""
    init.orthogonal_(weight, gain=std * math.sqrt(max(weight.shape)))


def small_std(width: int) -> float:
    return math.sqrt(2 / (5 * width))


def normal(weight, role, config, width):
    truncated_normal(weight, config.initializer_range)


def scaled_zero(weight, role, config, width):
    """Parcae: orthogonal, residual outputs zero, value tables N(0, 1)."""
    if role == "output":
        init.zeros_(weight)
    elif role == "value_table":
        init.normal_(weight)
    elif role == "value_gate":
        init.kaiming_uniform_(weight, a=math.sqrt(5))  # the default of nn.Linear
    elif role in ("input", "embedding", "head", "readout"):
        orthogonal(weight, small_std(width))
    else:
        truncated_normal(weight, small_std(width))


def takase(weight, role, config, width):
    """Huginn and RDM: sqrt(2/5d) everywhere, residual outputs divided by sqrt(2 L) with L the unrolled depth."""
    std = small_std(width)
    if role == "output":
        layers = config.num_layers + config.num_core_layers * (config.trained_depth - 1)
        std /= math.sqrt(2 * layers)
    truncated_normal(weight, std)


def zero_output(weight, role, config, width):
    """FLT, table 3: embedding N(0, 1), head N(0, 0.001^2), inputs uniform with variance 1 / fan_in, outputs zero."""
    if role == "embedding":
        init.normal_(weight)
    elif role == "head":
        init.normal_(weight, std=0.001)
    elif role == "input":
        bound = math.sqrt(3 / weight.shape[1])
        init.uniform_(weight, -bound, bound)
    elif role == "output":
        init.zeros_(weight)
    else:
        normal(weight, role, config, width)


def torch_default(weight, role, config, width):
    """The defaults of nn.Embedding and nn.Linear: N(0, 1), and uniform within 1 / sqrt(fan_in)."""
    if role in ("embedding", "position", "value_table"):
        init.normal_(weight)
    else:
        init.kaiming_uniform_(weight, a=math.sqrt(5))


INIT_SCHEMES = {
    "normal": normal,
    "scaled_zero": scaled_zero,
    "takase": takase,
    "zero_output": zero_output,
    "torch": torch_default,
}


def init_module(module: nn.Module, config) -> bool:
    """Initialise a module of this package; return False if transformers must do it (LayerNorm, rotary tables)."""
    init_parameters: Any = getattr(module, "init_parameters", None)
    if init_parameters is not None:
        init_parameters()
    elif isinstance(module, (nn.Linear, nn.Embedding)):
        init_by_role(module, config)
    else:
        return False
    return True


def init_by_role(module: nn.Linear | nn.Embedding, config):
    role, scheme = getattr(module, "init_role", None), config.init_scheme
    width = getattr(module, "init_width", None) or config.hidden_size
    if role == "identity" and module.weight.shape[0] == module.weight.shape[1]:
        # not by torch's eye_, which leaves the weight's device if another one is the default
        init.copy_(module.weight, torch.eye(len(module.weight), device=module.weight.device))
    elif role == "identity":  # the state has another width: closest to an identity (Parcae)
        init.orthogonal_(module.weight)
    elif role == "zero":
        init.zeros_(module.weight)
    elif role is None or (role in ALIKE and scheme != "torch"):
        normal(module.weight, role, config, width)
    else:
        INIT_SCHEMES[scheme](module.weight, role, config, width)
    if isinstance(module, nn.Linear) and module.bias is not None:
        if scheme == "torch" and role not in (None, "zero"):
            bound = module.in_features**-0.5
            init.uniform_(module.bias, -bound, bound)
        else:
            init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        if not getattr(module.weight, "_is_hf_initialized", False):  # slicing loses the flag that init checks
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()
