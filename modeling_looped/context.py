"""Masks, positions and cache, which every block of a pass receives beside the residual stream."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .compiled_blocks import run_as_region, slot_of_region
from .depth import take_rows
from .tensors import first_rows


def rotary_by_kind(trunk, stacked: torch.Tensor | None) -> dict[str, tuple[torch.Tensor, ...]]:
    """The tables of `trunk.rotary`, of [rows, length, tables, head_dim]."""
    if stacked is None:
        return {}
    tables = stacked.unbind(2)
    return dict(zip(trunk.ropes, zip(tables[::2], tables[1::2])))


@dataclass
class PassContext:
    """What is the same for all blocks of one pass; `run` runs a block with it."""

    num_rows: int
    masks: dict  # per kind of attention
    position_ids: torch.Tensor | None  # read by nothing but some attention kernels
    position_embeddings: dict[str, tuple[torch.Tensor, ...]]  # the two of `rotary_tables`, by kind
    value_embeddings: dict[int, torch.Tensor]  # by layer
    cache: Any  # a cache, or a view with the same `update`
    site: Callable[[int], Any]  # where a slot attends
    slots_per_loop: int = 0  # cache slots of one loop; 0 if a view knows at which loop each row is
    # by first slot of layers whose loops share them: keys and values of the last loop, of at least these rows
    kept: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    options: dict = field(default_factory=dict)  # of transformers, its attention kernels and blocks of others
    has_regions: bool = False  # blocks are compiled once for all loops

    def run(
        self,
        block,
        x,
        residual_factor,
        first_slot: int,
        slots_before: int = 0,
        query_states=None,
        time=None,
        loop_set=None,
        makes_keys: bool | torch.Tensor = True,
    ):
        """One block on the stream, [rows, length, hidden]. first_slot: of the cache, that of its place in the first
        loop; slots_before: those of earlier loops; time, loop_set, makes_keys: as the block takes them."""
        keeps_keys = first_slot in self.kept
        kept = self.kept[first_slot] if keeps_keys and makes_keys is not True else (None, None)
        query_states = None if query_states is x else query_states  # to a region no tensor is given twice
        if getattr(block, "gradient_checkpointing", False) and not x.requires_grad and torch.is_grad_enabled():
            x = x.detach().requires_grad_()  # reentrant checkpoints have no gradient where their input has none
        args = (
            x,
            residual_factor,
            query_states,
            self.value_embeddings.get(block.layer),
            time,
            loop_set,
            *(None if states is None else first_rows(states, self.num_rows) for states in kept),
        )
        kwargs = {
            "makes_keys": makes_keys,
            "keeps_keys": keeps_keys,
            "attention_mask": self.masks[block.layer_type],
            "position_ids": self.position_ids,
            "position_embeddings": self.position_embeddings.get(block.rope),
            **self.options,
        }
        slot = first_slot + slots_before
        held = slot_of_region(self.cache, slot) if self.has_regions else None
        if held is None:
            output = block(*args, site=self.site(slot), cache=self.cache, **kwargs)
            output, *states = output if keeps_keys else (output,)
        else:
            kwargs["site"] = self.site(first_slot)  # the same in every loop
            output, states = run_as_region(block, held, args, kwargs), held[:2]
        if keeps_keys:
            self.kept[first_slot] = tuple(states)
        return output

    def of_first_rows(self, count: int) -> "PassContext":
        return self.of_rows(slice(count), count)

    def of_rows(self, rows: slice | torch.Tensor, count: int) -> "PassContext":
        """The context of `count` rows: the first ones (a slice) or those at these places."""
        if count == self.num_rows:
            return self

        def select(batched):  # what is the same for all rows has a batch size of 1
            return take_rows(batched, rows) if batched is not None and batched.shape[0] > count else batched

        def has_rows(option) -> bool:
            return isinstance(option, torch.Tensor) and option.shape[:1] == (self.num_rows,)

        return replace(
            self,
            num_rows=count,
            masks={kind: select(mask) for kind, mask in self.masks.items()},
            position_ids=select(self.position_ids),
            position_embeddings={
                kind: tuple(map(select, tables)) for kind, tables in self.position_embeddings.items()
            },
            value_embeddings={layer: select(values) for layer, values in self.value_embeddings.items()},
            options={name: select(value) if has_rows(value) else value for name, value in self.options.items()},
            # the first rows keep theirs for all contexts of this pass
            kept=self.kept
            if isinstance(rows, slice)
            else {i: tuple(x[rows] for x in k) for i, k in self.kept.items()},
        )


def context_of_tokens(trunk, ids, rotary, view, masks: dict | None = None) -> PassContext:
    """Of tokens that stand at places and loops of their own, which `view` knows. rotary: of `rotary_by_kind`."""
    return PassContext(
        num_rows=len(ids),
        masks=dict.fromkeys(trunk.layer_types) if masks is None else masks,
        position_ids=None,
        position_embeddings=rotary_by_kind(trunk, rotary),
        value_embeddings=trunk.value_embeddings(ids),
        cache=view,
        site=trunk.site,
        options={"row_attention": view.row_attention},
    )
