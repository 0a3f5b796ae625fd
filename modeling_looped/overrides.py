"""Whether somebody has changed what a module does, or where: hooks, replaced methods, wrapped calls, devices."""

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


PACKAGE = __name__.rpartition(".")[0]  # this one, also where it lies beside a saved model
KNOWN_PACKAGES = "torch.", "transformers.", "peft.tuners.", f"{PACKAGE}."
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def has_hooks(module) -> bool:
    return any(getattr(module, name) for name in HOOKS)


def has_global_hooks() -> bool:
    """Whether torch has hooks for all modules; where torch does not say, it may have some."""
    try:
        return bool(nn.modules.module._has_any_global_hook())
    except AttributeError:
        return True


def is_as_written(module, *methods: str) -> bool:
    """Whether these methods of a module are of this package: no other function has replaced them."""
    own = vars(module)

    def is_ours(name: str) -> bool:
        if name in own and not is_wrapped(module, own[name]):
            return False
        return all(each.rpartition(".")[0] == PACKAGE for each in modules_of_method(type(module), name))

    return all(map(is_ours, methods))


def modules_of_method(cls: type, name: str) -> tuple[str, str]:
    """Where the class is defined that has it, and where the function: functools.wraps gives a function the module of
    what it wraps, but not a class."""
    owner = next(each for each in cls.__mro__ if name in vars(each))
    return owner.__module__, vars(owner)[name].__module__


def is_wrapped(module, method) -> bool:
    """Whether a method of an instance does what that of its class does: accelerate's moves tensors or sets their
    precision, torch's is compiled."""
    is_of_accelerate = hasattr(module, "_hf_hook") or hasattr(module, "_original_forward")
    return is_of_accelerate or hasattr(method, "_torchdynamo_orig_callable")


def is_changed(module: nn.Module) -> bool:
    """Whether it carries hooks of others, of its own or of its parameters, or runs or reads other than it was built
    with."""
    own, weights = vars(module), module.parameters(recurse=False)
    is_other = any(torch.is_tensor(value) or replaces_method(module, name) for name, value in own.items())
    is_other |= not all(each.startswith(KNOWN_PACKAGES) for each in modules_of_method(type(module), "forward"))
    return has_foreign_hooks(module) or is_other or any(weight._backward_hooks for weight in weights)


def replaces_method(module, name: str) -> bool:
    """Whether an attribute of the instance hides a method of its class."""
    return callable(getattr(type(module), name, None))


def has_foreign_hooks(module) -> bool:
    """Those of this package watch the prompts of single calls, and change nothing; those by which transformers records
    what blocks return do nothing outside of the model's own forward."""
    packages = PACKAGE, "transformers.utils"
    hooks = (hook for name in HOOKS for hook in getattr(module, name).values())
    return any(getattr(hook, "__module__", "").rpartition(".")[0] not in packages for hook in hooks)


def sdpa_is_as_written() -> bool:
    """Whether "sdpa" is transformers' own function: another may have been registered under that name."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def is_split(model) -> bool:
    """Whether layers run on more than one device; those that are offloaded run on the device of the others."""
    return len({*getattr(model, "hf_device_map", {}).values()} - {"cpu", "disk"}) > 1
