"""Requests that share passes: keys and values in pages with flex attention, against attention request by request."""

from collections.abc import Iterator
from functools import partial

from looped_eval.benchmark.pages import pages

from .against_llama import shaped
from .pieces import Measurement, Setting


def measurements(setting: Setting) -> Iterator[Measurement]:
    for requests, prompt in ((2, 16),) if setting.tiny else ((8, 512), (32, 512), (8, 3072)):
        sizes = {"batch_size": requests, "prompt": prompt, "new_tokens": 6 if setting.tiny else 48, "repeats": 1}
        args = shaped(setting, 4, 8, 1024, dtype=setting.dtype, **sizes)
        yield Measurement(f"requests_{requests}_prompt_{prompt}", partial(pages, args))
