"""Decoding with early exit at batch 1, 8 and 64, over what the operations of the loops and checks that ran predict."""

from argparse import Namespace
from collections.abc import Iterator

from looped_eval.benchmark.decoding import exiting_model, measure_exits
from looped_eval.benchmark.models import tokens

from .against_llama import shaped
from .pieces import Measurement, Setting


# and every how many checks are read back from the device
WAYS = (("logit_margin", 1), ("latent_diff", 1), ("latent_diff", 4))
BATCHES = (1, 8, 64)


def measurements(setting: Setting) -> Iterator[Measurement]:
    sizes = (
        {"prompt": 8, "new_tokens": 6, "repeats": 1}
        if setting.tiny
        else {"prompt": 64, "new_tokens": 64, "repeats": 3}
    )
    args = shaped(setting, 4, 8, 1024, dtype=setting.dtype, exit_interval=1, exit_read_interval=1, **sizes)
    model = None
    for batch in BATCHES[:2] if setting.tiny else BATCHES:
        for criterion, reads in WAYS:

            def run(batch=batch, criterion=criterion, reads=reads):
                nonlocal model
                model = model or exiting_model(args)
                how = Namespace(**{**vars(args), "exit_read_interval": reads})
                found = measure_exits(model, tokens(args, batch=batch, length=args.prompt), criterion, how)
                # beside the aim, which is for exits that are read at every check
                return found if reads == 1 else {f"{name}_read_late": value for name, value in found.items()}

            late = "" if reads == 1 else f"_read_every_{reads}"
            yield Measurement(f"batch_{batch}_{criterion}{late}", run)
