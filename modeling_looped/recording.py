"""Which runs of the blocks `output_hidden_states` and `output_attentions` show: those that the output is made of."""

from collections.abc import Callable

import torch
from transformers.utils.output_capturing import _active_collector


def unrecorded(run: Callable, *arguments):
    """What `run` returns; its blocks are not among the recorded ones."""
    collected = None if torch.compiler.is_compiling() else _active_collector.get()
    recorded = [states for states in (collected or {}).values() if isinstance(states, list)]
    lengths = [len(states) for states in recorded]
    result = run(*arguments)
    for states, length in zip(recorded, lengths):
        del states[length:]
    return result
