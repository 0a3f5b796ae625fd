"""Decoding with passes as CUDA graphs, against decoding that launches kernel by kernel."""

from collections.abc import Iterator

from looped_eval.benchmark.graphs import graphs

from .against_llama import shaped
from .pieces import Measurement, Setting


def measurements(setting: Setting) -> Iterator[Measurement]:
    for rows in (1, 8):
        yield Measurement(f"rows_{rows}", lambda rows=rows: speedup(rows, setting))


def speedup(rows: int, setting: Setting) -> dict:
    if setting.device == "cpu":
        return {"said": ["a CPU has no CUDA graphs"]}
    sizes = {"batch_sizes": [rows], "prompt": 64, "new_tokens": 64, "repeats": 3}
    args = shaped(setting, 4, 8, 1024, dtype=setting.dtype, **sizes)
    return graphs(args)[f"rows_{rows}"]
