"""Checks whether a module was changed from outside: hooks, replaced methods, wrapped calls, other devices."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import getclosurevars, unwrap
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


PACKAGE = __name__.rpartition(".")[0]  # this package, also where its code lies beside a saved model
KNOWN_PACKAGES = "torch.", "transformers.", "peft.tuners.", f"{PACKAGE}."
AUTOCAST = "torch.amp.autocast_mode"
# modules whose functions run what they hold in `__wrapped__`, with the same result up to rounding: they move tensors,
# set the precision, or compile
WRAPPERS = "accelerate.hooks", "accelerate.utils.operations", AUTOCAST, "torch._dynamo.eval_frame"
OFFLOADED = "compressed_tensors.offload.module"  # of llm-compressor, on every module; it, too, may run another
FUSED_HEAD = "trl.trainer.utils"  # may return log-probabilities; its `__wrapped__` is the class's, whatever it runs
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def has_hooks(module) -> bool:
    return any(getattr(module, name) for name in HOOKS)


def has_global_hooks() -> bool:
    """Return whether torch has hooks for all modules; True if this torch cannot tell."""
    try:
        return bool(nn.modules.module._has_any_global_hook())
    except AttributeError:
        return True


def uncompiled(module):
    """Return what torch.compile has wrapped, or the module itself."""
    return getattr(module, "_orig_mod", module)


def is_as_written(module, *methods: str) -> bool:
    """Return whether these methods of a module are those of this package, replaced by no other function."""
    module = uncompiled(module)
    own = vars(module)

    def is_ours(name: str) -> bool:
        if name in own and not runs_own(module, name):
            return False
        return all(each.rpartition(".")[0] == PACKAGE for each in modules_of_method(type(module), name))

    return all(map(is_ours, methods))


def modules_of_method(cls: type, name: str) -> tuple[str, str]:
    """Return the modules that define the class with this method, and the function. Both are needed: functools.wraps
    gives a function the module of the function it wraps, but does not change a class."""
    owner = next(each for each in cls.__mro__ if name in vars(each))
    return owner.__module__, vars(owner)[name].__module__


def runs_own(module, name: str) -> bool:
    """Return whether a method that was set on an instance runs that of its class, within wrappers that are known."""
    *_, innermost = unwrapped(vars(module)[name])
    own = getattr(type(module), name)
    of_class = own, unwrap(own)  # accelerate takes off decorators, too, where it unwraps a model
    return innermost in (*of_class, *(MethodType(function, module) for function in of_class))


def unwrapped(method: Callable | None) -> Iterator[Callable]:
    """Yield a method, what it wraps, and so on down to the first that is no known wrapper."""
    while method is not None:
        yield method
        home = home_of(method)
        if home == FUSED_HEAD:
            method = getclosurevars(method).nonlocals.get("original_forward")
        elif home == OFFLOADED:
            module: Any = getattr(method, "__self__", None)
            method = MethodType(module._original_forward_func, module)
        else:
            method = getattr(method, "__wrapped__", None) if home in WRAPPERS else None


def home_of(method: Callable) -> str:
    """Return the module in whose code a function is written; functools.wraps gives it the `__module__` of another."""
    function = method.func if isinstance(method, partial) else getattr(method, "__func__", method)
    return getattr(function, "__globals__", {}).get("__name__", type(function).__module__)


def autocast_around(module) -> AbstractContextManager:
    """Return the autocast in which accelerate runs the `forward` of a module, for callers of its parts."""
    context = nullcontext()
    for method in unwrapped(vars(module).get("forward")):
        if home_of(method) == AUTOCAST:  # copied, since one that is entered twice stays on
            context = copy.copy(getclosurevars(method).nonlocals["autocast_instance"])
    return context


def is_changed(module: nn.Module) -> bool:
    """Return whether a module or its parameters have foreign hooks, or it runs or reads anything that it was not built
    with."""
    own, weights = vars(module), module.parameters(recurse=False)
    # a tensor that is no parameter, or an attribute that hides a method of the class
    is_other = any(
        torch.is_tensor(value) or callable(getattr(type(module), name, None)) for name, value in own.items()
    )
    is_other |= not all(each.startswith(KNOWN_PACKAGES) for each in modules_of_method(type(module), "forward"))
    return has_foreign_hooks(module) or is_other or any(weight._backward_hooks for weight in weights)


def has_changed_call(module) -> bool:
    """Return whether a call of a module has hooks of others, or a `forward` that replaces that of its class."""
    return has_foreign_hooks(module) or ("forward" in vars(module) and not runs_own(module, "forward"))


def has_foreign_hooks(module) -> bool:
    """Return whether a module has hooks that may change it. Hooks of this package only watch the prompts of single
    calls; those with which transformers records outputs of blocks do nothing outside the model's own forward."""
    packages = PACKAGE, "transformers.utils"
    hooks = (hook for name in HOOKS for hook in getattr(module, name).values())
    return any(getattr(hook, "__module__", "").rpartition(".")[0] not in packages for hook in hooks)


def sdpa_is_as_written() -> bool:
    """Return whether "sdpa" is transformers' own function: another may have been registered under that name."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def attention_is_as_written(name: str) -> bool:
    """Return whether "sdpa" is transformers' own function, and so is what a model uses in its place: rows that decode
    call neither."""
    used = ALL_ATTENTION_FUNCTIONS.get(name) if name in ("eager", "flex_attention") else None
    return sdpa_is_as_written() and (used is None or used.__module__.startswith("transformers."))


def is_split(model) -> bool:
    """Return whether layers run on more than one device; offloaded layers run on the device of the other layers."""
    return len({*getattr(model, "hf_device_map", {}).values()} - {"cpu", "disk"}) > 1
