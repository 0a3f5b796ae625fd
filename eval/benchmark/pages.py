"""A pass over the tokens of many requests, whose keys and values flex attention reads in pages, over one in which each
request attends by itself.

Called by `looped benchmark pages`.
"""

import statistics
from concurrent.futures import ThreadPoolExecutor

import torch

from looped_eval.common.timing import now
from modeling_looped.shared_passes import SharedPasses

from .models import build, greedy, looped_config, tokens


WAYS = {"sdpa": "apart", "flex_attention": "pages"}


class Timed(SharedPasses):
    """Records the seconds of passes in which all rows take part; the first pass waits until all are there."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seconds: list[float] = []
        self.has_begun = False

    def tick(self):
        is_full = len(self.decoders) == self.max_rows and not any(decoder.is_done for decoder in self.decoders)
        self.has_begun |= is_full
        if not self.has_begun:
            return
        start = now()
        super().tick()
        if is_full:
            self.seconds.append(now() - start)


def pages(args) -> dict:
    """Compare both ways on prompts of half of --prompt to all of it, one row each, whose loops are not in step."""
    model = build(args, looped_config(args)).eval()
    lengths = [args.prompt - i * args.prompt // (2 * args.batch_size) for i in range(args.batch_size)]
    prompts = [tokens(args, batch=1, length=length) for length in lengths]
    decode(model, "flex_attention", prompts, 4)  # warm-up, which compiles
    seconds = {way: [] for way in WAYS}
    for _ in range(args.repeats):
        for way in WAYS:
            seconds[way] += decode(model, way, prompts, args.new_tokens)
    # other load on the machine slows single passes, which hardly changes the first quartile
    typical = {WAYS[way]: statistics.quantiles(found, n=4)[0] for way, found in seconds.items()}
    return {
        "pages_over_apart": typical["pages"] / typical["apart"],
        **{f"milliseconds_of_a_pass_{name}": 1e3 * value for name, value in typical.items()},
        "passes": {WAYS[way]: len(found) for way, found in seconds.items()},
    }


def decode(model, way: str, prompts: list[torch.Tensor], new_tokens: int) -> list[float]:
    model.set_attn_implementation(way)
    # never met, since no state is this close to the previous one; checks keep the passes of loops separate
    never = {"exit_criterion": "latent_diff", "exit_threshold": 0.0, "prompt_loops": 1}

    def generate(prompt: torch.Tensor):
        passes.generate(prompt, max_new_tokens=new_tokens, **greedy(prompt), **never)

    with Timed(model, max_rows=len(prompts)) as passes, ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(generate, prompts))
    if len(passes.seconds) < 2:
        raise ValueError(f"--new-tokens {new_tokens}: no pass had the rows of all requests, so pass more")
    return passes.seconds
