"""Warnings of passes that train, or measure, something else than a reader of the call would think."""

from itertools import chain

import torch
from transformers.utils import logging

from .depth import DepthPlan
from .overrides import is_as_written


logger = logging.get_logger(__name__)


def warn_of_training(trunk, plan: DepthPlan, num_rows: int, has_first_state: bool):
    """Warn of what a training pass leaves out. has_first_state: the caller has given one."""
    if torch.compiler.is_compiling():
        return
    warn_of_untrained_between(trunk, plan)
    if not has_first_state:
        warn_of_start_without_noise(trunk)
        warn_of_untrained_input(trunk, plan, num_rows)


def warn_of_untrained_between(trunk, plan: DepthPlan):
    """Warn if only the last of several loops has gradients, so that what stands between loops gets none."""
    if trunk.config.loop_loss == "gate" or plan.max_depth == 1:
        return
    if any(tick.has_gradient and tick.next_rows for tick in plan.ticks):
        return
    between = {"inter_loop_norm": trunk.inter_loop_norm, "loop_damping": trunk.damping}
    trained = [name for name, part in between.items() if part and any(w.requires_grad for w in part.parameters())]
    if trained:
        logger.warning_once(
            f"With backprop_loops=1 the parameters of {' and '.join(trained)}, which act between loops, get no "
            "gradient: take at least 2, or freeze them."
        )


def warn_of_start_without_noise(trunk):
    """Warn of a training pass from zeros in a model that is trained from noise, at depths that are drawn."""
    if trunk.config.state_init == "normal" and is_as_written(trunk, "initial_state"):
        logger.warning_once(
            "This training pass begins from zeros, while models of state_init='normal' are trained from noise and at "
            "depths that are drawn. Unless this is meant, train by a recipe, or by a Trainer with OwnLoss and its "
            "depths = DrawnDepths(...), both from modeling_looped.trainers, or pass num_loops and "
            "initial_state=model.sample_initial_state(...)."
        )


def warn_of_untrained_input(trunk, plan: DepthPlan, num_rows: int):
    """Warn if no row's first loop has gradients where the input reaches the loops by their first state alone: what
    comes before the loops then gets no gradient."""
    if trunk.config.injection != "none" or trunk.config.loop_loss == "gate":
        return
    if num_rows > max((tick.rows for tick in plan.ticks if not tick.has_gradient), default=0):
        return
    is_ours = is_as_written(trunk.injection, "forward", "before_layer") and is_as_written(trunk, "loop", "core_pass")
    before = chain(trunk.embed_tokens.parameters(), trunk.prelude.parameters())
    if is_ours and any(weight.requires_grad for weight in before):
        logger.warning_once(
            "With injection='none' the input reaches the loops by their first state alone, and in a training pass "
            "backprop_loops is below the depth of every row: the embedding, as input, and the prelude get no gradient "
            "from it. Choose an injection, raise backprop_loops or leave it out, or freeze what is not to be trained."
        )


def warn_of_another_loss(config, auxiliary: str | None):
    """Warn of a training pass without labels: a loss made from its outputs depends only on the last loop.

    auxiliary: the name of a loss that the language model's class adds, if any."""
    if torch.compiler.is_compiling():
        return
    own = beside_last_loop(config, auxiliary)
    if config.exit_gate != "none" and torch.distributed.is_available() and torch.distributed.is_initialized():
        logger.warning_once(
            "The exit gate of this model has no part in this training, and DistributedDataParallel fails at weights "
            "without a gradient: if it is not frozen yet, freeze it (model.exit_gate.requires_grad_(False)), or pass "
            "ddp_find_unused_parameters=True."
        )
    if own:
        logger.warning_once(
            f"{' and '.join(own)} of this model {'has' if len(own) == 1 else 'have'} no part in this training: a loss "
            "is made of the last loop's output and not by forward(labels=...) of the language model, as by TRL's "
            "trainers, by label smoothing and by other heads. For supervised fine-tuning with the model's own loss, "
            "put modeling_looped.trainers.OwnLoss before TRL's SFTTrainer; for all else this is as it should be."
        )


def warn_of_objective(config, auxiliary: str | None):
    """Warn of a loss in evaluation that is no cross-entropy of the last loop, as `eval_loss` of a Trainer is taken."""
    if (own := beside_last_loop(config, auxiliary)) and not torch.compiler.is_compiling():
        logger.warning_once(
            f"This loss of an evaluation, as a Trainer's eval_loss, is what training minimizes ({' and '.join(own)}): "
            "for a perplexity, or beside other models, take the last of loop_losses, with output_loop_losses=True."
        )


def beside_last_loop(config, auxiliary: str | None) -> list[str]:
    """Return what makes the model's own loss another than the cross-entropy of the last loop."""
    own = [f"loop_loss={config.loop_loss!r}"] * (config.loop_loss != "terminal")
    own += [f"{name}={value}" for name, value in config.state_losses.items()]
    return own + ([auxiliary] if auxiliary else [])
