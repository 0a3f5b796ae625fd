"""Time of decoding with early exit at batch 1, 8 and 64, over that predicted from the loops and checks that ran."""

from collections.abc import Iterator
from functools import partial

from looped_eval.benchmark.decoding import exiting_model, measure_exits, passing_threshold
from looped_eval.benchmark.models import greedy, tokens
from looped_eval.common.timing import in_turns

from .against_llama import shaped
from .pieces import Measurement, Setting


CRITERIA = ("logit_margin", "latent_diff")
BATCHES = (1, 8, 64)
CHECKS = 4  # checks for each read-back by the host


def measurements(setting: Setting) -> Iterator[Measurement]:
    sizes = (
        {"prompt": 8, "new_tokens": 6, "repeats": 1}
        if setting.tiny
        else {"prompt": 64, "new_tokens": 64, "repeats": 3}
    )
    args = shaped(setting, 4, 8, 1024, dtype=setting.dtype, exit_interval=1, **sizes)
    model = None

    def on_prompts(measure, batch: int, criterion: str) -> dict:
        nonlocal model
        model = model or exiting_model(args)
        return measure(model, tokens(args, batch=batch, length=args.prompt), criterion, args)

    for batch in BATCHES[:2] if setting.tiny else BATCHES:
        for criterion in CRITERIA:
            yield Measurement(f"batch_{batch}_{criterion}", partial(on_prompts, measure_exits, batch, criterion))
        late = partial(on_prompts, measure_late_reads, batch, "latent_diff")
        yield Measurement(f"batch_{batch}_latent_diff_read_late", late)


def measure_late_reads(model, prompt, criterion: str, args) -> dict:
    """Return the time of a call that reads back one of CHECKS checks, over that of a call that reads back every check.
    The device is synchronized only at the start and the end of a call."""
    exits = {"exit_criterion": criterion, "exit_threshold": passing_threshold(model, prompt, criterion)}
    how = {"max_new_tokens": args.new_tokens, **greedy(prompt), **exits}

    def decode(checks: int):
        return model.generate(prompt, exit_read_interval=checks, **how)

    late, each = in_turns(lambda: decode(CHECKS), lambda: decode(1), args.repeats)
    return {"checks_for_a_read": CHECKS, "time_over_reading_each": late / each}
