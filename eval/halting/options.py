"""Early exit within a budget: `looped halting MODEL [TEXT...] [--budget 0.01] [--mean-loops 1.5 2] [--write]`.

MODEL is a saved model or the folder of its training run, TEXT txt, jsonl, parquet or a dataset (default: what the run
held out for validation). On one slice of the text, every exit criterion gets the threshold with the fewest loops whose
perplexity is at most 1 + budget times that of full depth, or for each of --mean-loops the threshold whose mean loops
are nearest to it and not above; on another slice, without overlap, this is measured:

    sequences   text is scored, and a sequence leaves its batch when the mean score of its tokens passes the threshold
                (readout blind spot, appendix H); the speed-up is over scoring the same batches at full depth
    tokens      each token exits by itself, as in generate; --write stores the criterion, its threshold and min_loops
                in the model's generation_config.json, which generate then follows

Sequences are as long as rows of the training, and those of its held-out text begin where validation cuts them. Start
tokens that the model has not learned to predict are read and count in nothing. A note says if perplexity is far above
that of the run's last validation.

At equal mean loops criteria differ in what reading costs, which is in the predicted speed-up: those on logits read
them at every check.

Prints perplexity, loops and speed-up, and writes halting.json, halting.html and halting.svg (perplexity over
tokens/s) to eval/ of the training run, where looped report finds them, or, without one, to runs/eval/<model>.
"""

import argparse

from looped_recipes.common.command_line import Parser, folder


BEST = "the cheapest"
SEQUENCES, LEAST_SEQUENCES = 64, 8  # in a slice
LENGTH = 128
BUDGETS = [0.01, 0.003, 0.03]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("looped halting", __doc__)
    parser.add_argument("model")
    parser.add_argument("text", nargs="*", help="default: what the training run held out")
    parser.add_argument(
        "--text", nargs="+", default=[], dest="more_text", metavar="TEXT", help="the same, as elsewhere"
    )
    budgets = "how much worse perplexity may be, 0.01 for 1 %%; those after the first add points to the picture; "
    budgets += f"default: {' '.join(map(str, BUDGETS))}, or none beside --mean-loops"
    parser.add_argument("--budget", type=float, nargs="+", help=budgets)
    means = "also or instead: mean loops to compare criteria at, e.g. 1.5 2 3"
    parser.add_argument("--mean-loops", type=float, nargs="+", default=[], metavar="LOOPS", help=means)
    parser.add_argument("--criteria", nargs="+", help="default: all")
    parser.add_argument("--num-loops", type=int, help="full depth; default: that of the model")
    parser.add_argument("--min-loops", type=int, default=1)
    sequences = f"in each of the two slices; default: {SEQUENCES}, or as many as are held out"
    parser.add_argument("--sequences", type=int, help=sequences)
    length = f"tokens that are read of a sequence; default: as in training, or {LENGTH} for a model without its run"
    parser.add_argument("--length", type=int, help=length)
    parser.set_defaults(may_be_shorter=False)  # where no length is given, if too few rows of the default are held out
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2, help="of the timed runs, of which the fastest counts")
    parser.add_argument("--tokenizer", help="folder or name, for a model that comes without one")
    parser.add_argument("--seed", type=int, default=0, help="order of the documents")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16", "float64"], default="float32")
    parser.add_device()
    parser.add_trust()
    write = "store the threshold that this criterion has for tokens at the first budget; without a name, the cheapest "
    write += "criterion. Without budgets: at the first of --mean-loops, that with the lowest perplexity. Both are "
    write += "chosen on the slice of the calibration"
    parser.add_argument("--write", nargs="?", const=BEST, metavar="CRITERION", help=write)
    place = "folder for what is written; default: eval/ of the training run"
    parser.add_argument("--output", type=folder, help=place)
    args = parser.parse_args(arguments)
    args.text += args.more_text
    if args.budget is None:
        args.budget = [] if args.mean_loops else BUDGETS
    return args
