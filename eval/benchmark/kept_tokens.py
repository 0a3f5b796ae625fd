"""What a cache in 8 bits saves in memory, and what it costs in time: `looped benchmark cache`."""

from functools import partial
from itertools import product

from looped_eval.common.timing import least_seconds

from .models import build, greedy, looped_config, tokens


def cache(args) -> dict:
    """Measure, per number of rows and after a prompt of --length tokens, bytes and time of a token, over those with
    the dtype of the model."""
    model, report = build(args, looped_config(args)).eval(), {}
    for rows in args.batch_sizes:
        prompt = tokens(args, batch=rows, length=args.length)
        generate = partial(model.generate, prompt, **greedy(prompt))
        calls = {
            (kept, count): partial(generate, cache_dtype=kept, max_new_tokens=count)
            for kept, count in product((None, "int8"), (1, 1 + args.new_tokens))
        }
        seconds, _ = least_seconds(calls, args.repeats)
        own, int8 = (seconds[kept, 1 + args.new_tokens] - seconds[kept, 1] for kept in (None, "int8"))
        held = generate(cache_dtype="int8", max_new_tokens=2, return_dict_in_generate=True).cache
        in_own_type = sum(states[..., :1, :].nbytes for layer in held.layers for states in (layer.keys, layer.values))
        report[f"rows_{rows}"] = {
            "bytes_over_own": held.bytes_of_token / in_own_type,
            "time_over_own": int8 / own,
        }
    return report
