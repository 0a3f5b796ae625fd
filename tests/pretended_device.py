"""A device beside the CPU, on machines that have none: `pytest tests/gpu --device pretended`.

Its tensors hold their numbers on the CPU and compute there, so results are those of the CPU to the last bit. But as on
a GPU, tensors of the two places do not meet: an operation that is given both is an error, but for numbers without
dimensions and for indices. (CUDA refuses a little more, as generators of the other place.) To torch it is a backend
of its own, which it lets Python define (torch.utils.backend_registration). Installed once, it stays for the whole
process.
"""

import types
from collections.abc import Callable

import torch
from accelerate import PartialState
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing


NAME = "pretended"
# operators that take tensors of both places: copies, and what is looked up or put by an index
COPIES = ("_to_copy", "copy_")
INDEXED = ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_")
# computed with few bits under autocast; of what CUDA's autocast lists, as far as our models use it
FEW_BITS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")


class Pretended(torch.Tensor):
    """A tensor of the device, whose numbers are in `held`, on the CPU."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return compute(operator, args, kwargs or {})

    def __repr__(self):
        return f"Pretended({self.held!r})"

    def __deepcopy__(self, memo: dict):
        if id(self) not in memo:
            copy = Pretended(self.held.clone())
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(copy, self.requires_grad) if is_parameter else copy
        return memo[id(self)]

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> list:
        return self.held.tolist()


def compute(operator, args: tuple, kwargs: dict):
    name = operator.overloadpacket.__name__
    values, tree = pytree.tree_flatten((args, kwargs))
    is_here = any(isinstance(value, Pretended) for value in values)
    if is_here:
        check_places(name, args, values)
    if name == "_fused_sdp_choice":
        return 0  # attention in elementary operations: torch has no kernel of it for this device
    device = kwargs.get("device")
    stays = is_here if device is None else torch.device(device).type == NAME
    args_held, kwargs_held = pytree.tree_unflatten([held(value) for value in values], tree)
    if stays:
        kwargs_held.pop("pin_memory", None)
    found = operator(*args_held, **kwargs_held)
    if not stays:
        return found
    placed = pytree.tree_map_only(torch.Tensor, lambda t: t if isinstance(t, Pretended) else Pretended(t), found)
    return return_and_correct_aliasing(operator, args, kwargs, placed)


def held(value):
    if isinstance(value, Pretended):
        return value.held
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def check_places(name: str, args: tuple, values: list):
    """Raises where the two places meet in a way that CUDA refuses."""
    if name in COPIES:
        return
    if name in INDEXED:
        is_there = not isinstance(args[0], Pretended)
        if is_there or (len(args) > 2 and not isinstance(args[2], Pretended) and args[2].dim() > 0):
            raise RuntimeError(f"{name}: indices or values on {NAME}, but not the tensor, or the other way round")
        return
    joins = name in ("cat", "stack")  # elsewhere numbers may lie on the CPU
    for value in values:
        is_there = isinstance(value, torch.Tensor) and not isinstance(value, Pretended)
        if is_there and (joins or value.dim() > 0):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {name} found {NAME}:0 and {value.device}"
            )


class Module(types.ModuleType):
    """What torch asks of `torch.pretended`."""

    class Stream:
        def __init__(self, *args, **kwargs):
            pass

        def wait_stream(self, stream):
            pass

        def wait_event(self, event):
            pass

        def record_event(self, event=None):
            return event or Module.Event()

        def synchronize(self):
            pass

    class Event:
        def __init__(self, *args, **kwargs):
            pass

        def record(self, stream=None):
            pass

        def wait(self, stream=None):
            pass

        def synchronize(self):
            pass

        def query(self) -> bool:
            return True

    class _Place:
        def __init__(self, place):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    device = stream = _Place

    def is_available(self) -> bool:
        return True

    is_initialized = is_bf16_supported = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def current_stream(self, device=None):
        return self.Stream()

    def synchronize(self, device=None):
        pass

    set_device = manual_seed = manual_seed_all = empty_cache = _lazy_init = synchronize

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_rng_state(self, device=None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device=None):
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class Generator(torch.Generator):
    """torch has none for such a device: the CPU's, which says where its numbers go."""

    def __new__(cls, device="cpu"):
        is_pretended = torch.device(device).type == NAME
        made = super().__new__(cls, "cpu" if is_pretended else device)
        made.is_pretended = is_pretended
        return made

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0) if self.is_pretended else super().device


class Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return False  # so that nothing asks for streams


class Guard(torch._C._acc.DeviceGuard):
    def type_(self):
        return torch._C._autograd.DeviceType.PrivateUse1


registered: list = []  # torch does not keep them alive


def install():
    if registered:
        return
    module, hooks, guard = Module(f"torch.{NAME}"), Hooks(), Guard()
    torch.utils.rename_privateuse1_backend(NAME)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch._register_device_module(NAME, module)
    torch._C._acc.register_python_privateuseone_hook(hooks)
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    anything = torch.library.Library("_", "IMPL")
    anything.fallback(lambda operator, *args, **kwargs: compute(operator, args, kwargs), "PrivateUse1")
    anything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name in FEW_BITS:
        aten.impl(name, with_few_bits(getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor([1, 2], device=NAME) makes it on the CPU, then moves it
    torch.__future__.set_swap_module_params_on_conversion(True)  # else tied weights would part
    torch.autograd.set_multithreading_enabled(False)  # a thread of the device would not know of Python's operators
    torch.Generator = Generator
    PartialState.default_device = torch.device(NAME, 0)  # where trainings run
    registered.extend([module, hooks, guard, anything, aten])


def with_few_bits(operator) -> Callable:
    def cast_and_compute(*args, **kwargs):
        dtype = torch.get_autocast_dtype(NAME)
        outside = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(outside):
            casted = [
                value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value
                for value in args
            ]
            return operator(*casted, **kwargs)

    return cast_and_compute
