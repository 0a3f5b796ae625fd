"""Optimizer groups under which hyperparameters transfer over depth (residual scaling, appendix 8.2)."""

from typing import Any

from transformers.modeling_utils import PreTrainedModel


def depth_correction(config) -> float:
    """Return the factor of the blocks' lr and eps: if "factored", m^(-1/2) with m = L / residual_reference_layers."""
    if config.residual_scaling != "factored":
        return 1.0
    return (config.num_layers / config.residual_reference_layers) ** -0.5


def parameter_groups(
    model: PreTrainedModel,
    lr: float,
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    keep_decay_product: bool = False,
    correct_for_depth: bool = True,
) -> list[dict]:
    """Return groups for AdamW. With residual_scaling "factored", every parameter inside a block gets lr and eps times
    m^(-1/2), m = L / residual_reference_layers; embeddings, head, final norm, gate and injection keep the base rate.
    Nothing depends on the number of loops. `weight_decay` stays the same, or with `keep_decay_product` the product
    lr * weight_decay does (the workshop version). Without `correct_for_depth` all groups keep the base rate.
    """
    factor = depth_correction(model.config) if correct_for_depth else 1.0
    trunk: Any = getattr(model, model.base_model_prefix, model)
    block_ids = {id(p) for section in (trunk.prelude, trunk.core, trunk.coda) for p in section.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    block_decay = weight_decay / factor if keep_decay_product else weight_decay
    groups = [
        {
            "name": "base",
            "params": [p for p in trained if id(p) not in block_ids],
            "lr": lr,
            "weight_decay": weight_decay,
            "eps": eps,
        },
        {
            "name": "blocks",
            "params": [p for p in trained if id(p) in block_ids],
            "lr": lr * factor,
            "weight_decay": block_decay,
            "eps": eps * factor,
        },
    ]
    return [group for group in groups if group["params"]]
