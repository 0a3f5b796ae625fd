"""Where a GPU would be waited for, counted on a CPU."""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_looped import tensors


READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")  # their size or value is asked for
COPIES = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)  # of Python's numbers to the device
INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def is_list(index) -> bool:
    return any(isinstance(part, list) for part in (index if isinstance(index, tuple) else (index,)))


class Waits:
    """Inside, `reads` counts what is read back from the device, `copies` the tensors that are made of lists there, but
    for those by `on_device`, which waits for nothing."""

    def __init__(self):
        self.reads, self.copies = Counter(), Counter()

    def __enter__(self):
        self.modes = [_Calls(self), _Operators(self)]
        for mode in self.modes:
            mode.__enter__()
        return self

    def __exit__(self, *error):
        for mode in reversed(self.modes):
            mode.__exit__(*error)


class _Operators(TorchDispatchMode):
    def __init__(self, waits: Waits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        has_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in READS or has_mask:
            self.waits.reads[name] += 1
        return operator(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """What reads or makes tensors without an operator of its own on a CPU."""

    def __init__(self, waits: Waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.tolist:
            self.waits.reads["tolist"] += 1
        elif function in COPIES or (function in INDEXING and is_list(args[1])):
            caller = sys._getframe(1).f_code
            if (caller.co_filename, caller.co_name) != (tensors.__file__, "on_device"):
                self.waits.copies[f"{Path(caller.co_filename).stem}.{caller.co_name}"] += 1
        return function(*args, **(kwargs or {}))
