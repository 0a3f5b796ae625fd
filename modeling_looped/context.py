"""Masks, positions and cache: the inputs of every block of a pass beside the residual stream."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from .compiled_blocks import run_as_region, slot_of_region
from .depth import take_rows
from .tensors import first_rows


def rotary_by_kind(trunk, stacked: torch.Tensor | None) -> dict[str, tuple[torch.Tensor, ...]]:
    """Split stacked tables, [rows, length, tables, 1, head_dim], into those of `trunk.rotary`, by kind."""
    if stacked is None:
        return {}
    tables = stacked.unbind(2)
    return dict(zip(trunk.ropes, zip(tables[::2], tables[1::2])))


class LoopInputs(NamedTuple):
    """What the blocks of one loop get beside the stream. The defaults are those of prelude and coda."""

    residual_factor: float | torch.Tensor
    is_first: bool | torch.Tensor = True
    slots_before: int = 0  # cache slots of earlier loops
    time: torch.Tensor | None = None  # embedding of the loop, for blocks that it modulates
    loop_set: int | torch.Tensor | None = None
    makes_keys: bool | torch.Tensor = True
    number: Any = None  # the loop, counted from 0, as `core_pass` got it; None for prelude and coda


@dataclass
class PassContext:
    """The inputs that are the same for all blocks of one pass; `run` runs a block with them."""

    num_rows: int
    masks: dict  # per kind of attention
    position_ids: torch.Tensor | None  # read only by some attention kernels
    position_embeddings: dict[str, tuple[torch.Tensor, ...]]  # the pair from `rotary_tables`, by kind
    value_embeddings: dict[int, torch.Tensor]  # by layer
    cache: Any  # a cache, or a view with the same `update`
    site: Callable[[int], Any]  # returns the attention site of a slot
    slots_per_loop: int = 0  # cache slots of one loop; 0 if a view knows each row's loop
    # if loops share keys and values: those that the last loop used, of at least these rows, by a layer's first slot
    kept: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    options: dict = field(default_factory=dict)  # for transformers, attention kernels and user-made blocks
    has_regions: bool = False  # blocks are compiled once for all loops
    ran: set[tuple] = field(default_factory=set)  # with a cache: first slot and loop of each core layer that ran

    def run(self, block, x, first_slot: int, loop: LoopInputs, query_states=None):
        """Run one block on the stream, [rows, length, hidden]. first_slot: its cache slot in the first loop."""
        if self.cache is not None and loop.number is not None:
            self.note_run(first_slot, loop.number)
        makes_keys = loop.makes_keys
        keeps_keys = first_slot in self.kept
        kept = self.kept[first_slot] if keeps_keys and makes_keys is not True else (None, None)
        query_states = None if query_states is x else query_states  # a region must not get a tensor twice
        if getattr(block, "gradient_checkpointing", False) and not x.requires_grad and torch.is_grad_enabled():
            x = x.detach().requires_grad_()  # reentrant checkpoints give no gradients if x requires none
        args = (
            x,
            loop.residual_factor,
            query_states,
            self.value_embeddings.get(block.layer),
            loop.time,
            loop.loop_set,
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
        slot = first_slot + loop.slots_before
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

    def note_run(self, first_slot: int, loop: Any):
        """Refuse to run a core layer a second time in a loop: its slot of the cache would be filled twice."""
        place = first_slot, loop if isinstance(loop, int) else None  # a list: of one loop of each row
        if place in self.ran:
            raise ValueError(
                f"core_pass runs {name_of_loop(loop)} a second time, and the cache has one slot for both: pass "
                "use_cache=False (exits and drafts need a cache)"
            )
        self.ran.add(place)

    def of_first_rows(self, count: int) -> "PassContext":
        return self.of_rows(slice(count), count)

    def of_rows(self, rows: slice | torch.Tensor, count: int) -> "PassContext":
        """Return the context of `count` rows: the first ones (a slice) or those with these indices."""
        if count == self.num_rows:
            return self

        def select(batched):  # what is the same for all rows has a batch size of 1
            return take_rows(batched, rows) if batched is not None and batched.shape[0] > count else batched

        def has_rows(option) -> bool:
            return isinstance(option, torch.Tensor) and option.shape[:1] == (self.num_rows,)

        # contexts of the first rows share one dict, so that all contexts of the pass see what a block writes to it
        kept = self.kept
        if not isinstance(rows, slice):
            kept = {slot: tuple(states[rows] for states in pair) for slot, pair in kept.items()}
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
            kept=kept,
        )


def name_of_loop(loop: Any) -> str:
    return f"loop {loop + 1}" if isinstance(loop, int) else "a loop"


def context_of_tokens(trunk, ids, rotary, view) -> PassContext:
    """Return the context of tokens at different positions and loops, which `view` knows, and attends for. rotary:
    stacked tables."""
    return PassContext(
        num_rows=len(ids),
        masks=dict.fromkeys(trunk.layer_types),
        position_ids=None,
        position_embeddings=rotary_by_kind(trunk, rotary),
        value_embeddings=trunk.value_embeddings(ids),
        cache=view,
        site=trunk.site,
        options={"row_attention": view.row_attention},
    )
