"""Optimizers, learning rate schedules, and other optimizer settings that change with the step.

AdamW takes all parameters, or with `name: muon` or `normuon` those that are not matrices of a block: embeddings, head,
norms, gates, biases, injection and readout projection (Parcae, table 20). Settings that change with the step depend on
the step number only, so that a resumed run needs no other state.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from looped_recipes.common.flops import block_matrices
from looped_recipes.common.measures import by_mesh
from looped_recipes.settings.recipe import OptimizerConfig, Recipe, RecipeError, ScheduleConfig
from looped_recipes.settings.relations import decay_steps_of
from modeling_looped.loop_parameters import parameters_by_loop

from .muon import NorMuon, SharedMuon
from .stable_adamw import StableAdamW


def build_optimizers(model: nn.Module, config: OptimizerConfig, total_steps: int) -> list[torch.optim.Optimizer]:
    """Build [AdamW] or [Muon, AdamW], without an optimizer that has nothing to train. `model` is not wrapped in DDP
    yet."""
    check_head(model, config)
    groups = adamw_groups(model, config)
    optimizers = []
    if config.name in MUONS:
        matrices = block_matrices(model, config.muon_value_gates)
        group = muon_group(model, config, matrices)
        if group["params"]:
            optimizers.append(MUONS[config.name]([group], lr=config.muon_lr, momentum=config.muon_momentum))
        groups = without(groups, matrices)
    if groups:
        optimizers.append(adamw(groups, config, clipped_together(model, config)))
    if not optimizers:
        raise RecipeError("the model has no parameter that requires gradients: there is nothing to train")
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["initial_lr"] = group["lr"]
    apply_step_settings(optimizers, 0, config, total_steps)
    return optimizers


# both multiply the update by sqrt(max(1, rows / columns)), as the rates of the papers expect
MUONS = {"muon": partial(SharedMuon, adjust_lr_fn="original"), "normuon": NorMuon}


def adamw(groups: list[dict], config: OptimizerConfig, together: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
    settings = {"lr": config.lr, "betas": tuple(config.betas), "eps": config.eps}
    groups = [{**group, "params": of_mesh} for group in groups for of_mesh in by_mesh(group["params"])]
    if not (config.update_clipping or config.atan2):
        # fused: one kernel for all tensors. The model is moved to the GPU only after the optimizer is made
        return torch.optim.AdamW(groups, **settings, fused=True if torch.cuda.is_available() else None)
    return StableAdamW(groups, **settings, clipping=config.update_clipping, atan2=config.atan2, together=together)


def clipped_together(model: nn.Module, config: OptimizerConfig) -> list[list[nn.Parameter]]:
    """Return the sets of parameters that the code of a paper keeps in one tensor, and so clips as one."""
    projections = {
        None: [],
        "mlp": [("gate_proj", "up_proj")],
        "attention_and_mlp": [("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj")],
    }[config.clip_as_one]
    sets = [
        [getattr(getattr(module, name, None), kind, None) for name in names]
        for module in model.modules()
        for names in projections
        for kind in ("weight", "bias")
    ]
    sets = [[parameter for parameter in each if parameter is not None] for each in sets]
    return [each for each in sets if len(each) > 1]


def adamw_groups(model: nn.Module, config: OptimizerConfig) -> list[dict]:
    """Return `model.parameter_groups`, with separate groups for embeddings and head if their rates differ, and for
    parameters without decay."""
    groups = groups_by_rate(model, config)
    if config.decay_all:
        return groups
    exempt = not_to_decay(model)
    others = [parameter for group in without(groups, exempt) for parameter in group["params"]]
    lasting = [
        {**group, "name": f"{group['name']}, no decay", "weight_decay": 0.0} for group in without(groups, others)
    ]
    return without(groups, exempt) + lasting


def not_to_decay(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters without decay: norms, biases and other vectors, also per-loop ones; B and C of Parcae."""
    matrices = [
        module.weight for module in model.modules() if getattr(module, "init_role", None) in ("identity", "readout")
    ]
    vectors = [parameter for parameter in parameters_by_loop(model) if parameter.ndim == 2]
    return matrices + vectors + [parameter for parameter in model.parameters() if parameter.ndim < 2]


def groups_by_rate(model: nn.Module, config: OptimizerConfig) -> list[dict]:
    groups = model.parameter_groups(
        config.lr, config.weight_decay, config.eps, config.keep_decay_product, config.correct_for_depth
    )
    if config.embedding_lr is None and config.head_lr is None and config.reference_width is None:
        return groups
    width_factor = 1.0
    if config.reference_width is not None:
        width_factor = (config.reference_width / model.config.hidden_size) ** 0.5
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    head = without([{"params": list(model.lm_head.parameters())}], embeddings)  # a tied head is an embedding
    head = head[0]["params"] if head else []
    own_rates = [
        ("embedding", embeddings, config.lr if config.embedding_lr is None else config.embedding_lr),
        ("head", head, config.lr if config.head_lr is None else config.head_lr),
    ]
    for name, parameters, rate in own_rates:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        groups = without(groups, trained)
        if trained:
            rate = rate * width_factor
            decay = config.weight_decay * config.lr / rate if config.keep_decay_product else config.weight_decay
            groups.append({"name": name, "params": trained, "lr": rate, "weight_decay": decay, "eps": config.eps})
    return groups


def muon_group(model: nn.Module, config: OptimizerConfig, matrices: list[nn.Parameter]) -> dict:
    """Return the group of Muon. Rate and decay are corrected for depth like AdamW's; `decay_factor` multiplies the
    decay, which changes with the step."""
    blocks = model.parameter_groups(
        config.muon_lr,
        1.0,
        keep_decay_product=config.keep_decay_product,
        correct_for_depth=config.correct_for_depth,
    )
    blocks = {group["name"]: group for group in blocks}.get("blocks", {"lr": config.muon_lr, "weight_decay": 1.0})
    return {"name": "muon", "params": matrices, "lr": blocks["lr"], "decay_factor": blocks["weight_decay"]}


def without(groups: list[dict], parameters: list[nn.Parameter]) -> list[dict]:
    """Return `groups` without `parameters`, and without groups that become empty."""
    gone = {id(parameter) for parameter in parameters}
    groups = [{**group, "params": [p for p in group["params"] if id(p) not in gone]} for group in groups]
    return [group for group in groups if group["params"]]


def apply_step_settings(optimizers: list[torch.optim.Optimizer], step: int, config: OptimizerConfig, total_steps: int):
    """Set momentum and weight decay of Muon for `step`, counted from 0. Called before every optimizer step."""
    warmed = 1.0 if config.muon_momentum_steps < 1 else min(1.0, step / config.muon_momentum_steps)
    momentum = (1 - warmed) * config.muon_momentum_start + warmed * config.muon_momentum
    decay = config.muon_weight_decay
    if config.muon_weight_decay_end is not None:
        done = min(1.0, step / total_steps)
        decay = (1 - done) * decay + done * config.muon_weight_decay_end
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("name") == "muon":
                group["momentum"] = momentum
                group["weight_decay"] = decay * group["decay_factor"]


def rate_factor(config: ScheduleConfig, total_steps: int, step: int) -> float:
    """Return the part of the base rates that a schedule gives at a step, counted from 0."""
    if step < config.warmup_steps:
        return step / config.warmup_steps
    if config.name == "constant":
        return 1.0
    if config.name == "cosine":
        done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
        left = (1 + math.cos(math.pi * done)) / 2
    else:
        decay_steps = decay_steps_of(config, total_steps)
        begin = total_steps - decay_steps
        if step < begin:
            return 1.0
        left = 1 - (step - begin) / max(1, decay_steps)
    return left * (1 - config.final_ratio) + config.final_ratio


def set_learning_rates(optimizers: list[torch.optim.Optimizer], config: ScheduleConfig, total_steps: int, step: int):
    """Set the learning rates of `step`; they do not depend on the step before."""
    factor = rate_factor(config, total_steps, step)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = group["initial_lr"] * factor


def learning_rates(optimizers: list[torch.optim.Optimizer]) -> dict[str, float]:
    """Return the learning rates to log, by the names of their settings; of several `lr` that of the first group."""
    rates: dict[str, float] = {}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        kind = group.get("name", "").partition(",")[0]  # without "no decay"
        rates.setdefault(f"{kind}_lr" if kind in ("muon", "embedding", "head") else "lr", group["lr"])
    return rates


def refuse_idle_rate(recipe: Recipe, given: Iterable[str]):
    """Refuse `optimizer.lr` among the settings that are `given` if every parameter has another rate."""
    config = recipe.optimizer
    if "optimizer.lr" not in given or config.name not in MUONS:
        return
    with torch.device("meta"):
        model = recipe.model_class(recipe.model_config())

    def rates(lr: float) -> list[tuple]:
        groups = adamw_groups(model, replace(config, lr=lr))
        return [
            (group["lr"], group["weight_decay"])
            for group in without(groups, block_matrices(model, config.muon_value_gates))
        ]

    if rates(config.lr) == rates(2 * config.lr):
        named = {f"optimizer.{name}": getattr(config, name) for name in ("muon_lr", "embedding_lr", "head_lr")}
        own = ", ".join(f"{name}={value:g}" for name, value in named.items() if value is not None)
        raise RecipeError(
            f"optimizer.lr={config.lr:g} would have no effect, as all parameters have rates of their own, {own}: "
            "change these, or leave it out"
        )


def check_head(model: nn.Module, config: OptimizerConfig):
    """Refuse a rate for a tied head. This check needs the model: for a recipe that starts from a saved model, earlier
    checks do not know whether the head is tied."""
    if config.head_lr is not None and model.config.tie_word_embeddings:
        raise RecipeError(
            f"optimizer.head_lr={config.head_lr} has no weight of its own to act on: the head is tied to the "
            "embedding (tie_word_embeddings), whose rate is optimizer.embedding_lr"
        )
