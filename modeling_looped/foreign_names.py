"""Unknown names of fields and arguments: for a name used by other libraries, the error suggests the name used here.

If a misspelt or foreign name were ignored, the model would silently run at its defaults. So a name that stands for a
field or argument of this package is refused. Any other unknown name only causes a warning, since tools pass arguments
that only they and their attention kernels read.
"""

import difflib
import functools
from collections.abc import Collection, Iterable

import torch
from transformers.generation import GenerationConfig
from transformers.utils import logging


logger = logging.get_logger(__name__)

GENERATION_FIELDS = frozenset(vars(GenerationConfig()))

DEPTH = """
    loop loops n_loop n_loops nloops loop_count loops_count max_loops mean_loops loop_steps num_loop_steps
    num_iterations num_iters n_iter n_iters iterations iteration_count recurrence recurrences num_recurrence
    num_recurrences mean_recurrence recurrent_depth recurrence_depth num_recurrent_steps recurrent_steps
    num_recurrent_iterations ut_steps total_ut_steps num_ut_steps num_steps n_steps num_repeats n_repeats repeats
    num_passes unroll_steps test_time_depth run_depth loop_depth num_depth
    loop_num nb_loops loop_times n_recur n_recurrence n_recurrences num_recurrent_blocks recursion_depth
    num_recursions n_recursions recursions total_steps effective_depth train_recurrence
"""
LAYERS = """
    n_layer n_layers num_layers num_layer layers num_blocks n_blocks n_block num_decoder_layers decoder_layers
    num_transformer_layers num_looped_layers num_recurrent_layers recurrent_layers looped_layers
    n_layers_in_recurrent_block core_layers n_core_layers
    nlayers num_core core share_layers
"""

# for fields of a config: the advice, and the foreign names it answers; the first word of the advice is the field
FIELDS = {
    "num_loops": DEPTH,
    "num_core_layers (unique layers inside the loop; num_prelude_layers and num_coda_layers are outside)": LAYERS,
    "num_loops for the loops, or num_core_layers for the layers inside the loop": "depth num_hidden_layer",
    "num_prelude_layers": "n_layers_in_prelude prelude_layers n_prelude n_prelude_layers num_prelude prelude preludes",
    "num_coda_layers": "n_layers_in_coda coda_layers n_coda n_coda_layers num_coda coda codas",
    "hidden_size": """
        d_model n_embd n_embed dim model_dim embed_dim emb_dim embedding_dim embedding_size hidden_dim hidden ninp
        width
    """,
    "core_hidden_size": "recurrent_embedding_dimension recurrent_dim state_dim d_state",
    "intermediate_size": """
        d_ff ff_dim ffn_dim ffn_hidden_size dim_feedforward feedforward_dim intermediate_dim mlp_dim mlp_hidden_dim
        feed_forward_dim nhid n_inner
    """,
    "intermediate_size (hidden_size times the ratio)": "mlp_ratio ff_mult ffn_mult expansion_ratio ffn_dim_multiplier",
    "num_attention_heads": "n_head n_heads nheads num_heads heads attention_heads",
    "num_key_value_heads": """
        n_kv_head n_kv_heads num_kv_heads kv_heads n_query_groups num_query_groups multi_query multi_query_group_num
    """,
    "head_dim": "head_size head_dimension d_head dim_head d_kv kv_channels attention_head_dim size_per_head",
    "max_position_embeddings": """
        n_positions n_ctx n_context block_size context_length context_size context_window ctx_len ctx_length
        max_seq_len max_seq_length max_tokens
        max_sequence_length max_context_length seq_len seq_length sequence_length
    """,
    "vocab_size": "n_vocab num_vocab vocab vocabulary_size padded_vocab_size",
    "tie_word_embeddings": """
        tie_embeddings tie_embedding tied_embeddings tie_weights tied_weights weight_tying share_embeddings
        tie_lm_head tied_lm_head
    """,
    "hidden_act": "activation activation_function activation_fn act_fn hidden_activation mlp_activation act",
    "mlp_gated": "use_swiglu swiglu glu use_glu gated_mlp gated",
    "rms_norm_eps": "norm_eps norm_epsilon layer_norm_eps layer_norm_epsilon layernorm_epsilon rms_eps",
    "attention_dropout": "attn_dropout attn_pdrop attention_probs_dropout_prob",
    "embedding_dropout": "embd_dropout embd_pdrop embed_dropout",
    "residual_dropout": "resid_dropout resid_pdrop hidden_dropout hidden_dropout_prob",
    "attention_dropout, residual_dropout and embedding_dropout": "dropout dropout_rate dropout_prob p_dropout",
    "attention_softcap": "attn_softcap attn_softcapping attn_logit_softcap attention_logit_softcap attn_soft_cap",
    "attention_scale (what scores are multiplied by: query_pre_attn_scalar**-0.5)": "query_pre_attn_scalar",
    "attention_scale": "attention_multiplier attn_scale softmax_scale attention_scaling",
    "norm_offset": "layernorm_1p norm_add_one rms_norm_offset add_unit_offset rms_norm_add_unit_offset",
    "rope_pattern": "no_rope_layers no_rope_layer_interval nope_layers nope_interval",
    "mlp_bias": "use_mlp_bias ffn_bias",
    "logit_softcap": """
        final_logit_softcap final_softcap logit_softcapping logits_softcap logits_softcapping logits_soft_cap softcap
    """,
    "attention_bias": "use_bias no_bias qkv_bias attn_bias bias add_qkv_bias",
    "qk_norm": "use_qk_norm qk_layernorm qk_layer_norm",
    "sliding_window": "window window_size sliding_window_size attn_window_size attention_window local_window_size",
    "window_pattern": "sliding_window_pattern",
    "embedding_scale": "embed_scale scale_embedding scale_embeddings embedding_multiplier",
    "initializer_range": "init_std initializer_std init_scale init_range std",
    "exit_gate": "early_exit_gate halting_gate gate",
    "loop_lora_rank": "relaxed_recursion_rank recursion_lora_rank loop_rank per_loop_lora_rank lora_rank",
    "injection": "injection_type input_injection",
    "state_init": "state_initialization initial_state_type",
    "loop_loss": "loss_mode loop_loss_type",
    "norm_penalty": "norm_penalty_weight",
    "scale_anchor": "scale_anchor_weight",
    "latent_loss": "latent_loss_weight",
    "latent_anchor": "latent_anchor_weight",
    "exit_entropy_weight": "exit_entropy entropy_weight",
    "trained_num_loops": "training_loops train_loops",
    "residual_scaling, or residual_scale": "residual_multiplier",
    "block_norm (where norms are), norm_affine or readout_norm": "norm_type layernorm_type normalization",
    "position_embedding": "learned_pos_emb position_embedding_type use_rope pos_emb",
    "eos_token_id": "eos_id",
    "bos_token_id": "bos_id",
    "pad_token_id": "pad_id",
    "loop_norms": "per_loop_norms separate_norms untied_norms unshared_norms recursive_norms",
    "loop_embedding": """
        loop_embeddings loop_position_embedding step_embedding step_embeddings timestep_embedding time_embedding
        iteration_embedding depth_embedding loop_index_embedding recurrence_embedding
    """,
    "rope_parameters={'rope_type': 'default', 'rope_theta': ...}": """
        rope_base rope_freq_base rotary_base rotary_emb_base base_theta theta
    """,
    "rope_parameters={'full_attention': {...}, 'sliding_attention': {...}}": "rope_local_base_freq local_rope_theta",
    "head_dim (all of it is rotated)": "rotary_pct rotary_dim rope_pct",
}
# the same for arguments of forward and generate
ARGUMENTS = {
    "num_loops": f"{DEPTH} depth depths steps",
    "num_loops, which counts from 1 (a step k that counts from 0 is num_loops=k + 1)": "exit_at_step early_exit_step",
    "num_loops and backprop_loops (a num_steps_pair of n, k is num_loops=n + k, backprop_loops=k)": "num_steps_pair",
    "exit_criterion (with exit_threshold; forward takes an exit_rule)": """
        early_exit early_exit_threshold exit exit_criteria halting halting_criterion criterion use_exit adaptive
        adaptive_depth adaptive_computation
    """,
    "exit_rule (that of generate is exit_criterion and fields beside it)": """
        exit_criterion exit_threshold min_loops exit_interval exit_read_interval exit_selection
    """,
    "generate(draft_loops=...)": "draft_loops draft_tokens",
    "generate(cache_sharing=..., cache_dtype=..., warm_start=..., prompt_loops=..., state_seed=...)": """
        cache_sharing cache_dtype warm_start prompt_loops state_seed
    """,
    "exit_interval": "check_criterion_every_n_steps check_every check_interval",
    "exit_threshold": """
        threshold exit_thresh halting_threshold confidence confidence_threshold margin
    """,
    "draft_loops (with draft_tokens)": """
        draft_depth draft_steps num_draft_loops draft_layers draft self_speculative speculative self_speculation
    """,
    "backprop_loops": """
        backprop_depth backprop_steps bptt bptt_steps truncate_backprop truncate gradient_loops num_grad_loops
        mean_backprop_depth
    """,
    "draft_loops, whose drafts change no output": "verification_threshold headway freeze_strategy",
    "draft_tokens": "lookahead_for_draft lookahead",
    "initial_state": "input_states init_state initial_states initial_hidden_state",
    "initial_state, or state_seed in generate, which draw with config.state_init_std": "init_scale",
    "output_loop_logits": """
        return_loop_logits all_logits return_all_logits loop_logits output_logits_per_loop logits_per_loop
    """,
    "output_exit_logits, or exit_selection='weighted' in generate": "use_weighted_exit",
    "state_seed": "init_seed initial_state_seed noise_seed",
    "min_loops": "min_depth minimum_loops",
    "min_loops, from which on exits are checked (that after a step m is min_loops=m + 1)": "min_steps",
    "prompt_loops": "prompt_depth prefill_loops prefill_depth",
    "prompt_loops, for only generated tokens exit": "do_not_exit_in_prefill",
    "cache_sharing": "cache_share share_cache kv_sharing cache_lookup_strategy",
    "cache_dtype": "kv_dtype cache_bits kv_cache_dtype",
    "warm_start": "continuous_compute",
    "return_dict_in_generate (its output has token_loops)": "return_loops output_loops return_exit_loops",
    "output_loop_hidden_states": """
        output_states output_loop_states loop_states return_loop_states output_details return_stats collect_norms
    """,
    "output_logits": "return_logits",
    "output_loop_losses, which has those of every token": "loss_reduction",
    "labels": "target targets",
    "attention_mask": "attn_mask mask padding_mask",
    "position_ids": "pos_ids",
    "cache": "past past_kv kv_cache caches",
    "inputs_embeds": "embeds embeddings",
    "input_ids": "token_ids ids tokens",
    "logits_to_keep": "keep_logits last_only",
}


def by_foreign_name(table: dict[str, str]) -> dict[str, str]:
    return {name: advice for advice, names in table.items() for name in names.split()}


FIELD_OF, ARGUMENT_OF = by_foreign_name(FIELDS), by_foreign_name(ARGUMENTS)
# tools that support all models set and save every one of these names, so they only cause a warning
SPELLINGS_OF_EPS = frozenset(FIELDS["rms_norm_eps"].split())

# keys that transformers and its tools write into any config.json, or read from the arguments of any config
KEYS_OF_TOOLS = frozenset(
    """
    attn_implementation experts_implementation auto_map custom_pipelines quantization_config torch_dtype name_or_path
    model_type num_labels rope_theta partial_rotary_factor per_layer_config tie_last_hidden_states
    transformers_weights is_decoder add_cross_attention tie_encoder_decoder torchscript pruned_heads use_bfloat16
    finetuning_task task_specific_params tokenizer_class prefix cls_token_id sep_token_id mask_token_id unk_token_id
    return_unused_kwargs decoder_start_token_id pretraining_tp unsloth_version unsloth_fixed trust_remote_code
    mlp_layer_types tf_legacy_loss
    """.split()
)

# arguments and `init_kwargs` of tokenizers: AutoTokenizer also passes them to the config, which it opens first
ARGUMENTS_OF_TOKENIZERS = frozenset(
    """
    padding_side truncation_side model_max_length bos_token eos_token unk_token sep_token pad_token cls_token
    mask_token extra_special_tokens additional_special_tokens add_bos_token add_eos_token add_prefix_space
    split_special_tokens clean_up_tokenization_spaces chat_template legacy from_slow fix_mistral_regex
    backend is_local added_tokens_decoder
    """.split()
)

# arguments of PreTrainedModel.from_pretrained: pipelines also pass them to the config, which they open first
ARGUMENTS_OF_LOADING = frozenset(
    """
    state_dict ignore_mismatched_sizes output_loading_info device_map max_memory offload_folder offload_buffers
    offload_state_dict low_cpu_mem_usage use_safetensors weights_only disable_mmap variant code_revision key_mapping
    fusion_config adapter_kwargs adapter_name generation_config distributed_config device_mesh tp_plan tp_size
    use_kernels allow_all_kernels kernel_config tqdm_class mirror from_tf from_flax
    """.split()
)

# arguments that transformers, trainers and serving engines pass to any model's forward, which need not read them
ARGUMENTS_OF_TOOLS = frozenset(
    """
    num_items_in_batch output_hidden_states output_attentions output_router_logits cu_seq_lens_q cu_seq_lens_k
    max_length_q max_length_k is_causal seq_idx return_dict return_loss cache_position token_type_ids shift_labels
    attention_instances forward_batch block_table read_index write_index logits_indices logits_processor_args
    max_seqlen_q max_seqlen_k max_batch_tokens special_tokens_mask length tokenizer assistant_tokenizer logits_to_keep
    """.split()
)


class UnknownNameError(TypeError, ValueError):
    """An argument that a model does not have: a `TypeError`, as Python raises, and also a `ValueError`."""


def meant(name: str, known: Collection[str], foreign: dict[str, str]) -> str | None:
    """Return the name here that an unknown name probably stands for, or advice; None if it is like no known name."""
    if name.lower() in foreign:
        return foreign[name.lower()]
    if close := closest(name, tuple(known), 0.85):
        return close
    foreign_close = closest(name, tuple(foreign), 0.9)
    return foreign[foreign_close] if foreign_close else None


@functools.lru_cache(1000)
def closest(name: str, known: tuple[str, ...], cutoff: float) -> str | None:
    """Every model that is opened asks of the same few names that tools write, in milliseconds."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)


def refuse_foreign(names: Iterable[str], known: Collection[str], what: str):
    """Refuse those of `names` that stand for one of `known`; any other name may mean something elsewhere."""
    for name in names:
        if name not in known and (advice := meant(name, known, ARGUMENT_OF)):
            raise UnknownNameError(f"{what} has no argument `{name}`; did you mean `{advice}`?")


def check_arguments(given: Iterable[str], known: Collection[str], what: str):
    """Refuse arguments that have another name here, and warn of other unknown ones.

    given: names of extra arguments. known: those of the signature. A compiler cannot trace the warning."""
    for name in given:
        if name not in ARGUMENTS_OF_TOOLS and name not in known:
            refuse_foreign([name], known, what)
            if not torch.compiler.is_compiling():
                # head and trunk use the same text, so that it is logged once
                logger.warning_once(
                    f"No argument is called `{name}`: it is passed on to the blocks and their attention kernel, and "
                    "to a loss_function that was set."
                )
