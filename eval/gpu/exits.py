"""Decoding with early exit at batch 1, 8 and 64, over what the operations of the loops and checks that ran predict."""

from collections.abc import Iterator

from looped_eval.benchmark.decoding import exiting_model, measure_exits
from looped_eval.benchmark.models import tokens

from .against_llama import shaped
from .pieces import Measurement, Setting


CRITERIA = ("logit_margin", "latent_diff")
BATCHES = (1, 8, 64)


def measurements(setting: Setting) -> Iterator[Measurement]:
    sizes = (
        {"prompt": 8, "new_tokens": 6, "repeats": 1}
        if setting.tiny
        else {"prompt": 64, "new_tokens": 64, "repeats": 3}
    )
    args = shaped(setting, 4, 8, 1024, dtype=setting.dtype, exit_interval=1, **sizes)
    model = None
    for batch in BATCHES[:2] if setting.tiny else BATCHES:
        for criterion in CRITERIA:

            def run(batch=batch, criterion=criterion):
                nonlocal model
                model = model or exiting_model(args)
                return measure_exits(model, tokens(args, batch=batch, length=args.prompt), criterion, args)

            yield Measurement(f"batch_{batch}_{criterion}", run)
