"""Growth of the state and of its updates, and cosines of increments, at the width and depth of the residual scaling
paper, one seed at a time: figures 2, 3, 4 and 9."""

import torch

from looped_eval.common.hooks import last_state, own_randomness, trace
from looped_eval.common.progress import progress
from looped_eval.diagnose.growth import (
    built,
    early_training,
    increments,
    looped,
    random_tokens,
    unshared,
    with_fields,
)
from modeling_looped import LoopedConfig


LOOPS = (1, 2, 4, 8, 16, 32, 64)
RULES = ("none", "sqrt", "linear")
STEPS, RATE, TOKENS = 10, 1e-4, 32
VOCABULARY = 1024  # of random tokens; the state is as wide as the paper's


def paper_config(**fields) -> LoopedConfig:
    """12 layers of width 768."""
    return LoopedConfig.from_preset("residual_scaling", vocab_size=VOCABULARY, **fields)


def growth(seed: int, config: LoopedConfig | None = None, loops: tuple[int, ...] = LOOPS, steps: int = STEPS) -> dict:
    """Return curves over N: R before each step and after the last, and the change of h_N by each step."""
    config, rules = config or paper_config(), {}
    for rule in RULES:
        runs = [early_training(looped(config, n, rule), seed, steps, RATE, TOKENS) for n in progress(loops, rule)]
        rules[rule] = {
            "R": [list(step) for step in zip(*(each.norms for each in runs))],
            "updates": [list(step) for step in zip(*(each.updates for each in runs))],
        }
    return {"loops": list(loops), "steps": steps, "lr": RATE, "tokens": TOKENS, "rules": rules}


@torch.no_grad()
def unshared_states(config: LoopedConfig, copies: int, seed: int, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the stream after every copy of the core. Only one copy is in memory at a time."""
    one = with_fields(unshared(config, copies, "none"), num_core_layers=config.num_core_layers)
    states = [built(one, seed).model.embed_tokens(ids)]
    for copy in progress(range(copies), "copies"):
        model = built(one, seed + 1000 * (copy + 1)).eval()
        with last_state(model) as state:
            model(inputs_embeds=states[-1], use_cache=False, output_logits=False)
        states.append(state[0])
    return states


def cosines(seed: int, config: LoopedConfig | None = None, copies: int = 64) -> dict:
    """Return cosines of the increments of 64 passes through 12 layers, with shared weights and without, at
    initialisation and without residual scaling."""
    config = config or paper_config()
    ids = random_tokens(config, 1, TOKENS, seed)
    with own_randomness(seed):
        shared = trace(built(looped(config, copies, "none"), seed), {"input_ids": ids}, copies).trajectory
        apart = unshared_states(config, copies, seed, ids)
    found = {name: increments(states, 1.0) for name, states in (("looped", shared), ("unshared", apart))}
    return {"copies": copies, "tokens": TOKENS, **{name: summary(one) for name, one in found.items()}}


def summary(found: dict) -> dict:
    """Drop the products, and keep every eighth cosine, which is enough to draw."""
    few = [row[::8] for row in found["cosine"][::8]]
    return {"off_diagonal": found["off_diagonal"], "energy": found["energy"], "cosine_of_every_eighth": few}
