"""Checks that refuse arguments of a forward pass, with the reason."""

import torch
from transformers.utils import logging

from .compatibility import PagedAttentionCache
from .depth import DepthPlan
from .overrides import runs_own


logger = logging.get_logger(__name__)


# fields that a model reads while it is built; passes read a few of them too
FIELDS_OF_BUILDING = (
    "injection", "injection_norm", "loop_embedding", "loop_damping", "loop_change_gate", "prelude_norm", "block_norm",
    "norm_affine", "norm_offset", "norm_rounding", "rms_norm_eps", "window_pattern", "sliding_window", "qk_norm",
    "attention_bias", "attention_softcap", "attention_scale", "hidden_act", "mlp_gated", "mlp_activation_scale",
    "position_embedding", "rope_parameters", "rope_pattern", "rope_rounding", "exit_gate", "head_dim",
    "num_attention_heads", "readout_norm", "readout_alpha", "round_embedding_scale", "inter_loop_norm",
)  # fmt: skip


def check_inputs(input_ids, inputs_embeds) -> torch.Tensor:
    """Return input_ids or inputs_embeds, whichever is passed; refuse both, neither, or a wrong dimension."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(
            f"pass exactly one of input_ids and inputs_embeds, got {'neither' if input_ids is None else 'both'}"
        )
    if input_ids is None:
        name, given, dimensions = "inputs_embeds", inputs_embeds, ("batch", "length", "width")
    else:
        name, given, dimensions = "input_ids", input_ids, ("batch", "length")
    if getattr(given, "ndim", None) != len(dimensions):
        found = f"shape {tuple(given.shape)}" if torch.is_tensor(given) else type(given).__name__
        raise ValueError(f"{name} must be a tensor [{', '.join(dimensions)}], got {found}")
    return given


def check_mask(mask, inputs: torch.Tensor, cached: int = 0):
    """Refuse a mask that is neither of the inputs nor of `cached` tokens and the inputs after them."""
    if not torch.is_tensor(mask) or mask.ndim > 2 or mask.shape == inputs.shape[:2]:
        return
    if mask.shape != (len(inputs), cached + inputs.shape[1]):  # a compiler formats no shapes of its graph
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, but the input {tuple(inputs.shape[:2])} behind {cached} "
            "cached tokens: give a row to each prompt, and a column to each token"
        )


def check_computes_again(config, checkpoints_loops: bool):
    if checkpoints_loops and config.shares_keys:
        raise ValueError(
            "checkpoints_loops computes a loop again by itself, but here loops read keys of others "
            f"(key_value_interval={config.key_value_interval}, num_key_value_loops={config.num_key_value_loops}): use "
            "gradient_checkpointing_enable() alone, which computes blocks again"
        )


def check_hooks_of_weights(blocks: list):
    """Refuse hooks that reentrant checkpointing would call several times in one backward, with parts of a gradient.

    blocks: as often as they run."""
    seen = set()
    for block in filter(is_reentrant, blocks):
        hooked = set(filter(may_step_in_backward, block.parameters()))
        if not hooked.isdisjoint(seen):
            raise ValueError(
                "use_reentrant=True computes the gradient of a block that runs several times in several parts, and "
                "hooks on its weights (register_post_accumulate_grad_hook), such as the step of an optimizer within "
                "backward (optim='galore_adamw_layerwise', 'lomo' and their like), would run after each of them: pass "
                'gradient_checkpointing_kwargs={"use_reentrant": False}'
            )
        seen |= hooked


def may_step_in_backward(weight) -> bool:
    """Return whether a hook may be the step of an optimizer. Others of a gradient, such as masks, may get parts of it,
    but LOMO and AdaLomo step in theirs."""
    hooks = (weight._backward_hooks or {}).values()
    is_lomo = any(getattr(hook, "__module__", "").startswith("lomo_optim.") for hook in hooks)
    return is_lomo or bool(weight._post_accumulate_grad_hooks)


def is_reentrant(block) -> bool:
    if not getattr(block, "gradient_checkpointing", False):
        return False
    keywords = getattr(block._gradient_checkpointing_func, "keywords", {})  # a framework's own function has none
    return keywords.get("use_reentrant") is not False  # without it torch's are reentrant


def leave_out_cache(cache):
    """Refuse a filled cache, warn that an empty one is unused: a pass that recomputes blocks would fill it twice."""
    if cache is None:
        return
    if cache.get_seq_length() > 0:
        raise ValueError(
            "gradient checkpointing computes blocks again and goes without a cache, but the one that is given holds "
            "what the pass must see, as that of prefix tuning does: turn gradient checkpointing off"
        )
    logger.warning_once("With gradient checkpointing a pass has no cache: the empty one is left out.")


def why_no_cache(config, plan: DepthPlan, reads_out_every_loop: bool) -> str | None:
    """Return the reason why this pass cannot fill a cache, or None."""
    if reads_out_every_loop and config.num_coda_layers:
        return "the coda runs after every loop, and no slot is meant for the keys and values of more than one run"
    if plan.ends_together:
        return f"with backprop_loops, rows of depths {plan.depths} are aligned at their last loops, not their first"
    return None


def warn_of_changes(config, built_with: dict, consequence: str):
    """Warn, once for each set of them, of fields that were assigned after the model had been built."""
    changed = {name: getattr(config, name) for name in FIELDS_OF_BUILDING if getattr(config, name) != built_with[name]}
    if changed:
        values = ", ".join(f"{name}={value!r} (built with {built_with[name]!r})" for name, value in changed.items())
        logger.warning_once(
            f"Since this model was built its config has changed: {values}. This model may follow that in part or not "
            f"at all{consequence}."
        )


def check_layers(config, prelude, core, coda):
    """Refuse numbers of layers that differ from the config: caches have a slot for each layer of the config."""
    for name, blocks in (("prelude", prelude), ("core", core), ("coda", coda)):
        counted = getattr(config, f"num_{name}_layers")
        if len(blocks) != counted:
            raise ValueError(
                f"this model has {len(blocks)} layers in its {name}, but config.num_{name}_layers={counted}: set that "
                f"to {len(blocks)} too where layers were added or taken away"
            )


def check_windows(config, built_with: dict):
    """Refuse windows that the config got or lost since the model was built: caches follow it, layers do not."""
    pattern, window = config.window_pattern, config.sliding_window
    had_pattern, had_window = built_with["window_pattern"], built_with["sliding_window"]
    if pattern != had_pattern or (window is None) != (had_window is None):
        raise ValueError(
            f"config.window_pattern={pattern!r} and config.sliding_window={window} were assigned after this model was "
            f"built with {had_pattern!r} and {had_window}, and a model gets its windows when it is built: save it and "
            "open it again, or set them in the config before"
        )


@torch.no_grad()
def check_last_state(name: str, final, states: list, plan: DepthPlan):
    """Refuse a `loop` of a subclass whose states of every loop do not end with the state that it returns."""
    if torch.compiler.is_compiling() or final.is_meta:  # without values
        return
    final, last = plan.unsort(final), plan.spread(states)[-1] if states else None
    if last is None or not torch.allclose(final.to(last), last, rtol=0, atol=0, equal_nan=True):
        raise ValueError(
            f"{name}.loop returns another state than the last of its {len(states)} states of every loop, so what is "
            "made of these (losses and logits of every loop, an auxiliary_loss) would be of another model than its "
            "logits: put a mixture over loops into the list too, after every loop, or make it in core_pass"
        )


def check_serves_deeper_loops(site, slot: int, loop: int):
    """Refuse a site whose `forward` was replaced where another loop needs one: what replaced it reads this slot."""
    if "forward" in vars(site) and not runs_own(site, "forward"):
        raise ValueError(
            f"the forward of attention_sites[{slot}] was replaced, and loop {loop + 1} has no site of its own: run no "
            "more loops than the model was built with, build it with a larger num_loops, or put a subclass of "
            "AttentionSite in its place, which deeper loops call too"
        )


def check_starts_from_noise(config):
    if config.state_init != "normal":
        raise ValueError(
            "noise to start from, and so state_seed, is for models with state_init='normal'; this one starts from "
            f"{config.state_init!r}: leave it out"
        )


def check_length(config, length: int, position_ids: torch.Tensor | None = None):
    """Refuse more positions than were learned. position_ids: if passed; they start again at each document of a row."""
    if config.position_embedding != "learned" or length <= config.max_position_embeddings:
        return
    if position_ids is not None:
        length = int(position_ids.max()) + 1
    if length > config.max_position_embeddings:
        raise ValueError(
            f"{length} tokens are more than the max_position_embeddings={config.max_position_embeddings} positions "
            "that this model has learned: shorten the input"
        )


def packs_requests(implementation: str | None, cache) -> bool:
    """Return whether a row holds tokens of many requests, whose lengths an engine has checked."""
    is_of_engine = implementation is not None and implementation.startswith(("paged|", "vllm", "sglang"))
    return is_of_engine or isinstance(cache, PagedAttentionCache)


def check_softcap(softcap: float | None, implementation: str):
    """Refuse kernels without a softcap on scores; some of them would leave it out silently."""
    if softcap is not None and ("sdpa" in implementation or implementation in ("paged|eager", "sglang")):
        raise ValueError(
            f"attn_implementation={implementation!r} has no softcap, which attention_softcap={softcap} needs: use "
            "'eager' (continuous batching: use generate), 'flex_attention', or a flash attention that has one"
        )


def recorded(config, options: dict) -> dict:
    """Return which outputs of blocks transformers records: by the keyword arguments of a pass, else by the config."""
    names = ("output_hidden_states", "output_attentions")
    return {name: options.get(name, getattr(config, name, False)) for name in names}


def is_recorded(config, options: dict) -> bool:
    return any(recorded(config, options).values())


def check_trunk(
    trunk, plan: DepthPlan, inputs_embeds, attention_mask, position_ids, cache, initial_state, every_loop, options
):
    """Refuse a call of the trunk that does not fit its layers, or whose arguments do not fit together."""
    config = trunk.config
    check_layers(config, trunk.prelude, trunk.core, trunk.coda)
    check_windows(config, trunk.built_with)
    if cache is None:  # else the mask may be as long as the cache has room
        check_mask(attention_mask, inputs_embeds)
        if not torch.compiler.is_compiling():
            warn_of_changes(config, trunk.built_with, ": build another from the config, or set it back")
    check_pass(config, plan, inputs_embeds, position_ids, cache, initial_state, every_loop, options)


def check_pass(
    config, plan: DepthPlan, inputs_embeds, position_ids, cache, initial_state, every_loop: bool, options: dict
):
    """Refuse arguments of a pass that do not fit together, or do not fit this model.

    options: the keyword arguments of transformers."""
    if not packs_requests(config._attn_implementation, cache):
        past = 0 if cache is None else cache.get_seq_length()
        length = inputs_embeds.shape[1] + (0 if torch.is_tensor(past) else past)  # a static cache's is on the device
        check_length(config, length, position_ids)
    if initial_state is not None and initial_state.shape[:-1] != inputs_embeds.shape[:-1]:
        raise ValueError(
            f"initial_state has shape {tuple(initial_state.shape)}, but the input has the tokens "
            f"{tuple(inputs_embeds.shape[:-1])}: pass a state for each"
        )
    first_with_gradient = sum(not tick.has_gradient for tick in plan.ticks)
    if torch.is_grad_enabled() and not any(map(config.makes_keys, range(first_with_gradient, plan.max_depth))):
        raise ValueError(
            f"none of the last {plan.max_depth - first_with_gradient} loops of {plan.max_depth} computes keys and "
            f"values (key_value_interval={config.key_value_interval}, "
            f"num_key_value_loops={config.num_key_value_loops}), so their weights would get no gradient: raise "
            "backprop_loops, or leave it out"
        )
    if every_loop and config.reads_run_depth:
        raise ValueError(
            f"with {config.reads_run_depth} the first k loops of a deeper run are not a run of depth k, so states and "
            "logits of every loop mean nothing; run each depth by itself"
        )
    if plan.is_mixed and is_recorded(config, options):
        raise ValueError(
            f"output_hidden_states and output_attentions need one depth for all rows, got {plan.depths}; run rows of "
            "one depth together, or call the model with output_loop_hidden_states"
        )
    selected = recorded(config, options)["output_hidden_states"]
    num_blocks = config.num_prelude_layers + config.num_core_layers * plan.max_depth + config.num_coda_layers
    if isinstance(selected, (list, tuple)) and num_blocks != config.num_hidden_layers:
        raise ValueError(
            f"output_hidden_states={selected} selects from num_hidden_layers={config.num_hidden_layers} layers, but "
            f"this pass runs {num_blocks}: pass True, and select from what is returned"
        )
