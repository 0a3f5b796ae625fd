"""Activation memory per token for the backward pass, by formulas in the width d and the inner width f of a block.

The terms are what autograd keeps in real passes on a CPU, counted by tests. In fp32, a layer without options keeps ten
vectors of width d (inputs of norms, these normed but not yet weighted, inputs of matrix products, queries, keys,
values and the output of attention) and four of width f, or two without a gate. Under bf16 autocast it is taken to keep
32 d + 8 f bytes, whatever its norms. With `training.gradient_checkpointing` less is kept, and the rest is computed
again. Not counted: numbers per head or per row of a norm, and the weights of attention, which a CPU keeps with
`attention_dropout`.
"""

from collections.abc import Callable
from typing import NamedTuple


class Kept(NamedTuple):
    """Activations of one token that one application of a layer may keep, in numbers or in bytes."""

    everything: float
    products: float  # outputs of matrix products and of attention
    input: float


def numbers_in_fp32(config, section: str) -> Kept:
    sizes = config.block_sizes(section)
    d, f, norm = sizes.hidden_size, sizes.intermediate_size, kept_by_norm(config)
    queries, keys = (n * config.head_dim for n in (sizes.num_attention_heads, sizes.num_key_value_heads))
    latent, gates = config.kv_latent_size or 0, int(config.mlp_gated)
    of_qk_norm = {"none": 0, "free": 1}.get(config.qk_norm, 2)  # what enters, and with weights the normed heads
    dropped = {"both": 2, "attention": 1, "mlp": 1}[config.residual_dropout_on] if config.residual_dropout else 0
    reads_state = section == "core" and config.injection == "attention_all" and config.block_norm != "post"
    products_with_delta = 4 + bool(latent) + gates + 2
    everything = (
        (4 if "sandwich" in config.block_norm else 2) * norm * d  # norms
        + 2 * d  # inputs of the products of both branches
        + reads_state * norm * d  # another input for queries: the state, normed with and without the weight
        + 2 * queries + 2 * keys  # rotated queries and keys, values, output of attention
        + of_qk_norm * (queries + keys)
        + 2 * latent  # before and after its norm, which has no weight
        + (4 if config.mlp_gated else 2) * f  # before and after the activation; with a gate, `up` and the product
        + dropped * d  # masks
        + 4 * sizes.is_modulated * d  # both branches before their scales, and before their gates
        + (sizes.delta_rank or 0) * products_with_delta  # between the two matrices of a delta
    )  # fmt: skip
    products = 2 * d + 2 * queries + 2 * keys + latent + (1 + gates) * f
    return Kept(everything, products, input=d)


def kept_by_norm(config) -> int:
    """Return the vectors that a norm keeps: its input and, for the gradient of a weight, the normed input."""
    return 2 if config.norm_affine else 1


def bytes_under_bf16(config, section: str) -> Kept:
    """Return the bytes under bf16 autocast, where the residual stream stays in fp32."""
    sizes = config.block_sizes(section)
    d, f = sizes.hidden_size, sizes.intermediate_size
    return Kept(32 * d + 8 * f, products=12 * d + (4 if config.mlp_gated else 2) * f, input=4 * d)


def states_of_loop(config) -> float:
    """Return how many states a loop keeps beside its layers, from its injection to its change gate; the first loop,
    where some of these do nothing, is taken like the others."""
    norm, injection = kept_by_norm(config), config.injection
    of_injection = {
        "concat": 1 + config.hidden_size / config.state_size,  # state and input, side by side
        "diagonal": 2,  # what the decay and the step are multiplied by
        "attention_first": norm,  # the state that queries of the first layer read, normed with and without the weight
    }.get(injection, 0)
    sums = config.num_core_layers if injection == "residual_all" else 1
    return of_injection + (sums * norm if config.injection_norm else 0) + config.loop_change_gate


def states_between_loops(config) -> float:
    """Return how many states are kept from the end of one loop to the start of the next."""
    return (kept_by_norm(config) if config.inter_loop_norm != "none" else 0) + config.loop_damping


def states_of_pass(config, readouts: float) -> float:
    """Return how many vectors of the outer width a pass keeps beside the layers and loops: before and after these."""
    norm = kept_by_norm(config)
    before = (norm if config.prelude_norm else 0) + (config.injection == "diagonal")  # which reads one input each loop
    into_coda = {"none": 0, "norm": norm, "linear": config.state_size / config.hidden_size}[config.coda_input]
    normed = {"none": 0, "final_only": 1}.get(config.readout_norm, readouts)
    return before + readouts * (into_coda + 1) + normed * norm  # 1: what the head reads


def kept_of_token(
    config, loops: float, readouts: float, checkpointing: bool | str, of_layer: Callable = numbers_in_fp32
) -> float:
    """Return the activations per token that a pass keeps, without logits, plus the largest part that is recomputed at
    a time.

    loops, readouts: how often the core and the coda are applied with gradients. checkpointing: the value of
    `training.gradient_checkpointing`.
    """
    state, vector = of_layer(config, "core").input, of_layer(config, "prelude").input
    total = max(loops - 1, 0) * states_between_loops(config) * state + states_of_pass(config, readouts) * vector
    if config.value_embeddings:  # looked up once for all loops
        tables = sum(map(config.has_value_embedding, range(config.num_layers)))
        total += tables * vector * config.num_key_value_heads * config.head_dim / config.hidden_size
    recomputed = 0.0
    for section, times in (("prelude", 1), ("core", loops), ("coda", readouts)):
        layers, layer = getattr(config, f"num_{section}_layers"), of_layer(config, section)
        beside = states_of_loop(config) * state if section == "core" else 0
        is_one_unit = checkpointing == "loops" and section == "core"  # a loop is recomputed as a whole
        total += times * (layer.input if is_one_unit else layers * kept_of_layer(layer, checkpointing) + beside)
        if layers and checkpointing:
            recomputed = max(recomputed, layers * layer.everything + beside if is_one_unit else layer.everything)
    return total + recomputed


def kept_of_layer(layer: Kept, checkpointing: bool | str) -> float:
    if checkpointing == "selective":
        return layer.products + layer.input
    if checkpointing == "offload":
        return 0
    return layer.input if checkpointing is True else layer.everything  # "loops" affects only the core
