"""Models and seeds compared at every depth, so at every compute budget (fully looped transformers, appendix A.4):

looped budget flt=runs/flt-0,runs/flt-1 lt=runs/lt --num-loops 1,3,6,9,12 --text val.jsonl

A folder holds a saved model, or is its training run. Folders of one name are seeds of one model: their mean, and their
standard deviation. One pass scores all depths. Measures: bits per byte and perplexity per token of texts, each read by
itself (--text) or all as one stream in windows (--stream, see streams.py); every metric of lm-eval's --tasks; CORE on
a bundle, with --six the six accuracies of the Fully Looped Transformer's table 1. Bits per byte come with their
standard error over documents or windows, and with differences between models on the same rows, whose error counts the
spread of several folders too.
"""

import argparse
from pathlib import Path

from looped_recipes.common.command_line import Parser, folder, names


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("looped budget", __doc__, {"--loops": "--num-loops"})
    parser.add_argument("models", nargs="+", metavar="MODEL", help="DIR, or NAME=DIR,DIR,... for several seeds")
    parser.add_argument("--num-loops", default="1,3,6,9,12", help="depths: 1,3,6 or 1..8")
    parser.add_argument("--text", metavar="JSONL", help="texts to score, one JSON object with a field `text` a line")
    parser.add_argument("--stream", action="append", default=[], metavar="NAME=FILE", help="texts as one stream, the "
                        "same or parquet; wikitext_2 alone is the public file")  # fmt: skip
    parser.add_argument("--stream-tokens", type=int, help="of each stream; by default all")
    parser.add_argument("--stream-group", type=int, default=1, help="windows are scored in whole groups of so many")
    parser.add_argument("--tasks", type=names, default=[], help="lm-eval's, with commas")
    parser.add_argument("--include-path", help="folder with more tasks than lm-eval's and those of this project")
    parser.add_argument("--num-fewshot", type=int)
    limit = "take the first texts of --text and the first documents of each task: 100 so many, 0.1 a tenth"
    parser.add_argument("--limit", type=float, help=limit)
    parser.add_argument("--core", metavar="BUNDLE", help="unpacked eval_bundle, see `looped core --help`")
    parser.add_argument("--core-examples", type=int, help="of each task of CORE, e.g. 500; by default all")
    parser.add_argument("--core-max-length", type=int, help="longer prompts of CORE are cut; by default the model's")
    parser.add_argument("--six", action="store_true", help="with --core: the six accuracies of FLT's table 1 too")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, help="window of texts and streams, by default the model's")
    parser.add_device()
    parser.add_trust()
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=folder, default=Path("runs/budget"), help="folder for the table and the plot")
    return parser.parse_args(arguments)
