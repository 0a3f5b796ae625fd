"""One table of the device tensors of all rows that decode."""

from collections import ChainMap
from collections.abc import Iterable, Mapping

import torch

from .exit_criteria import INITIAL
from .tensors import on_device


# first value for a new token, by name. exit_loop: the loop at which it passed a check that has not been read back
AT_FIRST: ChainMap[str, float] = ChainMap({"exit_loop": 0}, INITIAL)  # follows later additions to INITIAL


class RowTable(dict):
    """Tensors of all rows by name, [rows, ...] each: the current tokens, what criteria remember of them, and the loop
    at which they passed a check.

    Nothing is written in place, so a copy of the dict is enough for `go_back`. Where layers lie on several devices, so
    may the tensors: a new state comes from the embedding's device, the state after a loop from the last layer's.
    """

    num_rows = 0

    def add(self, count: int) -> int:
        """Append rows. Return the index of the first one."""
        new = {name: held.new_full((count, *held.shape[1:]), AT_FIRST.get(name, 0)) for name, held in self.items()}
        self.update({name: torch.cat([held, new[name]]) for name, held in self.items()})  # all, or none without memory
        self.num_rows += count
        return self.num_rows - count

    def remove(self, first: int, count: int):
        self.update({name: torch.cat([held[:first], held[first + count :]]) for name, held in self.items()})
        self.num_rows -= count

    def take(self, rows: list[int], names: Iterable[str]) -> dict[str, torch.Tensor]:
        held = {name: self[name] for name in names if name in self}
        if not held or len(rows) == self.num_rows:
            return held
        index = on_device(rows, next(iter(held.values())).device)
        return {name: tensor[index.to(tensor.device)] for name, tensor in held.items()}

    def put(self, rows: list[int], tensors: Mapping[str, torch.Tensor | None]):
        given = {name: values for name, values in tensors.items() if values is not None}
        if not given or len(rows) == self.num_rows:
            self.update(given)
            return
        index = on_device(rows, next(iter(given.values())).device)
        for name, values in given.items():
            if name not in self:
                self[name] = values.new_full((self.num_rows, *values.shape[1:]), AT_FIRST.get(name, 0))
            place = self[name].device
            self[name] = self[name].index_copy(0, index.to(place), values.to(place))

    def forget(self, rows: list[int]):
        """Reset what criteria remember of these rows, and the loops at which they passed a check."""
        for name in self.keys() & AT_FIRST.keys():
            self[name] = self[name].index_fill(0, on_device(rows, self[name].device), AT_FIRST[name])

    def go_back(self, before: dict[str, torch.Tensor], but_for: list[int]):
        """Restore the contents `before`, except in the rows `but_for`."""
        kept = self.take(but_for, self) if but_for else {}
        self.clear()
        self.update(before)
        self.put(but_for, kept)
