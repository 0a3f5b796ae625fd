"""Whether somebody has changed what a module does, or where: hooks, replaced methods, wrapped calls, devices."""

import torch
from torch import nn


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
    package, own = __name__.rpartition(".")[0], vars(module)

    def is_ours(name: str) -> bool:
        if name in own and not is_wrapped(module, own[name]):
            return False
        cls = next(each for each in type(module).__mro__ if name in vars(each))
        parts = cls, vars(cls)[name]  # functools.wraps gives a function the module of what it wraps, but not a class
        return all(part.__module__.rpartition(".")[0] == package for part in parts)

    return all(map(is_ours, methods))


def is_wrapped(module, method) -> bool:
    """Whether a method of an instance does what that of its class does: accelerate's moves tensors or sets their
    precision, torch's is compiled."""
    is_of_accelerate = hasattr(module, "_hf_hook") or hasattr(module, "_original_forward")
    return is_of_accelerate or hasattr(method, "_torchdynamo_orig_callable")


def is_changed(module: nn.Module) -> bool:
    """Whether it carries hooks of others, of its own or of its parameters, or runs or reads other than it was built
    with."""
    own, weights = vars(module), module.parameters(recurse=False)
    is_other = "forward" in own or any(torch.is_tensor(value) for value in own.values())
    return has_foreign_hooks(module) or is_other or any(weight._backward_hooks for weight in weights)


def has_foreign_hooks(module) -> bool:
    """Those of this package watch the prompts of single calls, and change nothing."""
    package = __name__.rpartition(".")[0]
    hooks = (hook for name in HOOKS for hook in getattr(module, name).values())
    return any(getattr(hook, "__module__", "").rpartition(".")[0] != package for hook in hooks)


def is_split(model) -> bool:
    """Whether layers run on more than one device; those that are offloaded run on the device of the others."""
    return len({*getattr(model, "hf_device_map", {}).values()} - {"cpu", "disk"}) > 1
