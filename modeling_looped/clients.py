"""Integration with PEFT and with trainers: registration, checks, and a warning about what GRPO samples."""

import sys

import torch
from transformers.utils import logging

from .compatibility import look_up


logger = logging.get_logger(__name__)

HOOKS_OF_ROWS = ("_adapter_names_pre_forward_hook", "_alora_offsets_pre_forward_hook")  # names in PEFT
ADAPTERS_OF_ROWS = "adapters of single rows (PEFT's adapter_names and aLoRA)"


def register_with_trainer(model_type: str):
    """Add the language model to the table of classes whose labels the Trainer shifts with label smoothing."""
    names = look_up("transformers.models.auto.modeling_auto", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {})
    names.setdefault(model_type, "LoopedForCausalLM")


def register_with_peft(model_type: str):
    """Register PEFT's defaults for Llama, which has the same layer names, if peft was imported before the model is
    made."""
    constants = sys.modules.get("peft.utils.constants")
    for name, targets in vars(constants).items() if constants else ():
        if name.endswith("_MODULES_MAPPING") and isinstance(targets, dict) and "llama" in targets:
            targets.setdefault(model_type, targets["llama"])
    tuners = getattr(sys.modules.get("peft.mapping"), "PEFT_TYPE_TO_TUNER_MAPPING", {})
    if (tuner := tuners.get("LN_TUNING")) and not hasattr(tuner, "has_weight"):
        tuners["LN_TUNING"] = tuner_of_weights(tuner)


def tuner_of_weights(tuner: type) -> type:
    """Return a subclass of PEFT's tuner of norms that skips norms without a weight, at which PEFT's tuner fails."""

    class NormTuner(tuner):
        def has_weight(self, name: str) -> bool:
            return getattr(self.model.get_submodule(name), "weight", None) is not None

        def _check_target_module_exists(self, peft_config, key):
            found = super()._check_target_module_exists(peft_config, key)
            return found if not found or self.has_weight(key) else False

        def _prepare_model(self, peft_config, model):
            super()._prepare_model(peft_config, model)
            names = [name for name, _ in model.named_modules()]
            named = [name for name in names if super(NormTuner, self)._check_target_module_exists(peft_config, name)]
            if named and not any(map(self.has_weight, named)):
                raise ValueError(
                    f"LNTuningConfig trains the weights of norms, but those of this model have none ({named[0]} and "
                    f"{len(named) - 1} more), as norm_affine=False says: use another method, such as LoraConfig"
                )

    return NormTuner


def gives_rows_adapters(model: torch.nn.Module) -> bool:
    """Whether PEFT runs rows of the batch with different adapters, by hooks that identify a row by its index."""
    if "peft" not in sys.modules or torch.compiler.is_compiling():
        return False
    hooks = (getattr(hook, "func", None) for part in model.modules() for hook in part._forward_pre_hooks.values())
    return any(getattr(hook, "__name__", "") in HOOKS_OF_ROWS for hook in hooks)


def refuse_adapters_of_rows(model: torch.nn.Module):
    if gives_rows_adapters(model):
        raise ValueError(
            f"{ADAPTERS_OF_ROWS} follow the places of rows in the batch, which rows of different depths and exits "
            "change: run the rows of each adapter by themselves, or all rows at one depth"
        )


def has_prefix(model) -> bool:
    """Whether the model generates through PEFT, which puts a prefix in the place of the cache."""
    return getattr(config_in_charge(model), "peft_type", None) == "PREFIX_TUNING"


def adds_virtual_tokens(model) -> bool:
    """Whether the model generates through PEFT, which puts virtual tokens before a prompt."""
    return getattr(config_in_charge(model), "is_prompt_learning", False)


def config_in_charge(model):
    """Return PEFT's config if the model generates through PEFT, else None."""
    peft = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    return getattr(peft, "active_peft_config", None)


def warn_of_another_policy(fields: dict):
    """Warn of fields of the generation config that change what generate samples in training mode."""
    if fields:
        shown = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        logger.warning_once(
            f"generate() of a model in training mode samples as its generation config says ({shown}), while training "
            "runs every token as deep as its config says, from a state without noise: GRPO and its like then train on "
            f"samples of another model. Set model.generation_config.{next(iter(fields))} to None before (or leave it "
            "out of the trainer's generation_kwargs), or call model.eval() where nothing is trained."
        )
