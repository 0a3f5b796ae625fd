"""What other libraries are told: which layers PEFT adapts by default, and what a trainer's own loss leaves out."""

import sys

import torch
from transformers.utils import logging


logger = logging.get_logger(__name__)


def register_with_peft(model_type: str):
    """PEFT's defaults for Llama, whose names our layers have; where peft is imported before the model is made."""
    constants = sys.modules.get("peft.utils.constants")
    for name, targets in vars(constants).items() if constants else ():
        if name.endswith("_MODULES_MAPPING") and isinstance(targets, dict) and "llama" in targets:
            targets.setdefault(model_type, targets["llama"])


def warn_of_another_loss(config):
    """A training pass without labels: whoever makes a loss of what it returns sees the last loop alone."""
    if torch.compiler.is_compiling():
        return
    own = [f"loop_loss={config.loop_loss!r}"] * (config.loop_loss != "terminal")
    own += [f"{name}={value}" for name, value in config.state_losses.items()]
    if own:
        logger.warning_once(
            f"{' and '.join(own)} of this model {'has' if len(own) == 1 else 'have'} no part in this training: a loss "
            "is made of the last loop's output and not by forward(labels=...), as by TRL's trainers and "
            "by label smoothing. For supervised fine-tuning with the model's own loss, put "
            "modeling_looped.trainers.OwnLoss before TRL's SFTTrainer."
        )
