"""Peak memory of a training step with a loss at every loop over one with a loss at the last loop, for the same model,
with weights and optimizer included."""

import gc
import resource
from collections.abc import Iterator

import torch

from looped_eval.benchmark.models import build, looped_config, tokens, training_step

from .against_llama import shaped
from .pieces import Measurement, Setting


SHAPES = {"6x4_width_1536": (6, 4, 1536), "12x4_width_512": (12, 4, 512)}


def measurements(setting: Setting) -> Iterator[Measurement]:
    for name, shape in SHAPES.items():
        yield Measurement(name, lambda shape=shape: ratio(*shape, setting))


def ratio(layers: int, num_loops: int, width: int, setting: Setting) -> dict:
    # "terminal" first: on a CPU the peak is that of the process, which never falls
    terminal, per_loop = (peak(layers, num_loops, width, loss, setting) for loss in ("terminal", "per_loop"))
    return {"per_loop_over_terminal": per_loop / terminal, "terminal": terminal, "per_loop": per_loop}


def peak(layers: int, num_loops: int, width: int, loss: str, setting: Setting) -> int:
    gc.collect()  # frees the previous model
    args = shaped(setting, layers, num_loops, width)
    model = build(args, looped_config(args, loop_loss=loss)).train()
    step = training_step(model, tokens(args), setting.device == "cuda", output_logits=False)
    step()  # allocates the optimizer's moments
    if setting.device != "cuda":
        step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()
