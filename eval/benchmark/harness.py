"""Time to score all depths from one pass, over that of a single depth and of lm-eval's `hf` model.

Multiple-choice requests, contexts of 64 to 256 tokens and continuations of 2 to 16. Ratios:

over_stock          one pass for all depths / lm-eval's `hf` at full depth, which runs the head at every position
over_one_depth      one pass for all depths / `looped` at full depth alone
over_runs           one pass for all depths / lm-eval's `hf` at every depth, one after the other
"""

import random

from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from looped_eval.common.timing import in_turns
from looped_eval.harness.looped_lm import LoopedLM

from .models import build, looped_config


def requests_of(args) -> list[tuple[str, list[int], list[int]]]:
    generator = random.Random(0)
    return [
        (
            str(number),
            generator.choices(range(3, args.vocab), k=generator.randint(64, 256)),
            generator.choices(range(3, args.vocab), k=generator.randint(2, 16)),
        )
        for number in range(args.requests)
    ]


def harness(args) -> dict[str, float]:
    model = build(args, looped_config(args)).eval()
    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
    requests, setup = requests_of(args), {"tokenizer": tokenizer, "batch_size": args.batch_size}
    stock = HFLM(model, **setup)
    every, deepest = (LoopedLM(model, num_loops=loops, **setup) for loops in (f"1..{args.num_loops}", args.num_loops))

    def stock_at(depth: int):
        model.config.num_loops = depth
        stock._loglikelihood_tokens(requests, disable_tqdm=True)

    def one_pass():
        every.score_tokens(requests, disable_tqdm=True)

    of_all, of_stock = in_turns(one_pass, lambda: stock_at(args.num_loops), args.repeats)
    again, alone = in_turns(one_pass, lambda: deepest.score_tokens(requests, disable_tqdm=True), args.repeats)
    last, runs = in_turns(one_pass, lambda: [stock_at(k) for k in range(1, args.num_loops + 1)], args.repeats)
    return {"over_stock": of_all / of_stock, "over_one_depth": again / alone, "over_runs": last / runs}
