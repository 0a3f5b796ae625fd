"""Plain decoding at one depth with CUDA graphs: one graph runs a whole token of all rows.

Without graphs, transformers' own loop decodes, pass by pass.
"""

import torch

from .cache import LoopedCache
from .checks import check_length
from .clients import adds_virtual_tokens
from .compatibility import CACHE, look_up
from .depth import read_depths
from .row_engine import IN_TICKS, RowEngine, rope_type_by_length
from .row_graphs import can_have_graphs
from .row_passes import enter
from .tensors import on_device
from .token_selector import first_batchwise_part


def goes_in_step(model, num_rows: int, processors, criteria, config, model_kwargs: dict) -> bool:
    """Return whether this call runs here. The caller has checked that no option changes decoding."""
    options, depths = config.depth_options, model_kwargs.get("num_loops", model.config.num_loops)
    others = {name for name, value in model_kwargs.items() if value is not None} - IN_TICKS
    if others or options.runs_all_loops or type(model_kwargs.get(CACHE)) is not LoopedCache:
        return False
    if adds_virtual_tokens(model) or first_batchwise_part(processors, criteria):
        return False
    # transformers goes on computing ended rows, and scores, logits and stop strings show it
    stop_strings = look_up("transformers.generation.stopping_criteria", "StopStringCriteria", ())
    ends_by_strings = any(isinstance(criterion, stop_strings) for criterion in criteria)
    shows = config.output_scores or config.output_logits or ends_by_strings
    if num_rows > 1 and (shows or rope_type_by_length(model.model) is not None):
        return False
    # buffers here hold all places, while the cache of transformers holds only the window
    if model.config.has_windows and 2 * model.config.sliding_window < config.max_length:
        return False
    return can_have_graphs(model, options.is_int8) and isinstance(read_depths(depths, num_rows), int)


def decode_in_step(engine: RowEngine):
    """Replace `_sample` of transformers."""
    depth, running = engine.limits[0], engine.selector.running
    try:
        while rows := running():
            logits = next_logits(engine, rows, depth)
            engine.emit(rows, logits[:, -1], [depth] * len(rows))
    except BaseException:  # e.g. from a streamer: the caller's cache still gets what was computed
        if engine.config.cache_is_given and running():
            engine.store_back(max(engine.last_places(running())))
        raise
    return engine.output()


def next_logits(engine: RowEngine, rows: list[int], depth: int) -> torch.Tensor:
    group, ids = engine.at_last_tokens(rows), engine.selector.last_tokens(rows)
    check_length(engine.trunk.config, max(group.places) + 1)
    positions = on_device(group.positions, ids.device)[:, None]
    rotary = engine.rotary(engine.trunk.embed_tokens.weight, positions, max(group.positions))
    graphs = engine.graphs
    if graphs is not None and (logits := graphs.token(group, ids, positions, rotary)) is not None:
        return logits
    tokens = enter([group], ids)
    return tokens.read_logits([depth] * len(rows), tokens.run_all_loops(depth))
