"""Plans that split the layers of a config over devices, for transformers' tensor parallelism and FSDP."""

from .config_layers import DerivedFields


def existing_sections(config: DerivedFields) -> list[str]:
    sizes = {"prelude": config.num_prelude_layers, "core": config.num_core_layers, "coda": config.num_coda_layers}
    return [section for section, size in sizes.items() if size > 0]


def tensor_parallel_plan(config: DerivedFields) -> dict[str, str]:
    """Return how the matrices of the existing layers are split over ranks."""
    styles = {"mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
    if config.mlp_gated:
        styles["mlp.gate_proj"] = "colwise"
    # a norm over all heads needs all of them on one rank, and a plan cannot name the value tables of single layers
    has_whole_layers = config.value_embeddings and config.loop_lora_rank is not None
    splits_attention = config.qk_norm != "all_heads" and not has_whole_layers
    if splits_attention:
        styles |= dict.fromkeys(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "colwise")
        styles["self_attn.o_proj"] = "rowwise"
        if config.qk_norm == "learned":  # a rank has the gradient from its own heads only
            styles |= dict.fromkeys(["self_attn.q_norm", "self_attn.k_norm"], "replicated_with_grad_allreduce")
    # the matrices that each loop adds to a layer stay whole, and cannot be added to a part of its matrix
    sections = [name for name in existing_sections(config) if name != "core" or config.loop_lora_rank is None]
    plan = {f"{section}.*.{name}": style for section in sections for name, style in styles.items()}
    if config.value_embeddings and splits_attention:  # each rank reads its own heads of a table
        gated = config.by_section([config.has_value_embedding(layer) for layer in range(config.num_layers)])
        names = [name for name, layers in zip(("prelude", "core", "coda"), gated) if any(layers)]
        plan |= {f"{section}.*.self_attn.value_gate": "colwise" for section in names}
        plan["value_embeds.*"] = "replicated_with_grad_allreduce"
    if not plan and config.tie_word_embeddings:  # transformers adds this only to plans that name layers
        plan["embed_tokens"] = "embedding_rowwise"
    return plan


def fsdp_plan(config: DerivedFields) -> dict[str, str]:
    """Return the modules that FSDP gathers and frees as one unit each."""
    modules = ["embed_tokens", *(f"{section}.*" for section in existing_sections(config))]
    return dict.fromkeys(modules, "free_full_weight")
