"""Models whose states, updates, gradients and spectra are known in closed form."""

import math

import torch
from torch import nn

from modeling_looped import LoopedForCausalLM
from tests.helpers import random_ids, tiny_config


class KnownBlock(nn.Module):
    """F(H) = H + along * u + across * turned(u), u = H / rms(H): lemma 2 with a_rad and |b_perp| chosen."""

    layer, layer_type, rope = 0, "full_attention", None

    def __init__(self, along: float, across: float):
        super().__init__()
        self.along, self.across = along, across
        self.mlp, self.self_attn = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, hidden_states, *args, **kwargs):
        unit = hidden_states / hidden_states.square().mean(-1, keepdim=True).sqrt()
        pairs = unit.unflatten(-1, (-1, 2))
        turned = torch.stack([-pairs[..., 1], pairs[..., 0]], dim=-1).flatten(-2)
        return hidden_states + self.along * unit + self.across * turned


def known_model(along: float = 0.0, across: float = 0.0, **fields) -> LoopedForCausalLM:
    """One core layer, which is known; in float64."""
    model = LoopedForCausalLM(tiny_config(num_core_layers=1, **fields)).double().eval()
    model.model.core[0] = KnownBlock(along, across)
    return model


def linear_model(decay: torch.Tensor) -> LoopedForCausalLM:
    """h_{t+1} = decay * h_t from h_0 = e: diagonal injection, no input, a block that does nothing."""
    model = known_model(injection="diagonal")
    injection = model.model.injection
    with torch.no_grad():
        injection.input_proj.weight.zero_()
        injection.dt_bias.fill_(math.log(math.e - 1))  # step 1
        injection.log_rate.copy_((-decay.log()).log())
    return model


BATCH = {"input_ids": random_ids(2, 7)}


DECAY = torch.linspace(0.3, 0.9, 32, dtype=torch.float64)


def embedded(model):
    return model.model.embed_tokens(BATCH["input_ids"]).detach()
