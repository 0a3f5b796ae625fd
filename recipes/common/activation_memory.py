"""What layers keep of a token for the backward pass: by formulas, in vectors of the width d and of the inner width f.

In fp32 ten of d (inputs and outputs of norms; queries and keys before and after their rotation, values, what attention
gives), four more where branches have norms behind them; of f four, or two without a gate. So passes were seen to keep
them. Under bf16 autocast 32 d + 8 f bytes. `training.gradient_checkpointing` keeps less, and computes the rest again.
"""

from collections.abc import Callable


def numbers(config, section: str) -> tuple[float, float, float]:
    """Of a layer in fp32: all, those of products and attention, and its input."""
    width = config.block_sizes(section)
    d, f = width.hidden_size, width.intermediate_size
    of_norms = 4 * ("sandwich" in config.block_norm)
    return (10 + of_norms) * d + (4 if config.mlp_gated else 2) * f, 6 * d + (2 if config.mlp_gated else 1) * f, d


def bytes_under_bf16(config, section: str) -> tuple[float, float, float]:
    """The same, in bytes; the stream beside the blocks stays in fp32."""
    width = config.block_sizes(section)
    d, f = width.hidden_size, width.intermediate_size
    return 32 * d + 8 * f, 12 * d + (4 if config.mlp_gated else 2) * f, 4 * d


def kept_of_token(
    config, loops: float, readouts: float, checkpointing: bool | str, of_layer: Callable = numbers
) -> float:
    """loops, readouts: applications of the core and of the coda that have gradients."""
    total, again = 0.0, 0.0
    for section, times in (("prelude", 1), ("core", loops), ("coda", readouts)):
        layers = getattr(config, f"num_{section}_layers")
        whole, products, state = of_layer(config, section)
        is_looped = checkpointing == "loops" and section == "core"
        if not checkpointing or (checkpointing == "loops" and not is_looped):
            total += times * layers * whole
        elif is_looped:
            total += times * state
        else:
            total += times * layers * {"selective": products + state, "offload": 0}.get(checkpointing, state)
        if layers and checkpointing:
            again = max(again, whole * (layers if is_looped else 1))  # what is computed again at a time
    return total + again
