"""CORE and CORE-extended (Parcae, appendix M) at every depth from one pass of the model:

looped core MODEL --bundle eval_bundle --num-loops 1,2,4 --examples 500 --output core.json
looped core MODEL --bundle eval_bundle --extended --seeds 1234,2345,3456     # as Parcae's tables 4, 5 and 6

The mean over tasks of (a - r) / (1 - r), where r is what guessing scores. Of choices, and of contexts in a schema, the
one with the least mean cross-entropy counts; language modelling is right if every token is the likeliest. Prompts are
the bundle's, not lm-eval's. --extended takes the other tasks of appendix M as the eval_meta_data.csv there describes
them, or from a list that it names.

Without --seeds nothing is random. A seed chooses the shots and, in models whose first state is noise, draws that noise
for every prompt (from its tokens, so that batches do not matter). Values then are means over the seeds, with their
standard deviation (divided by the number of seeds, as the authors' code has it).
"""

import argparse
from pathlib import Path

from looped_recipes.common.command_line import Parser, names

from .bundle import DESCRIBED


def parse_seeds(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(map(int, text.split(","))))
    except ValueError:
        raise argparse.ArgumentTypeError(f"seeds are whole numbers with commas between them, got {text!r}") from None


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("looped core", __doc__, {"--loops": "--num-loops"})
    parser.add_argument("model")
    parser.add_argument("--bundle", required=True, help="the unpacked eval_bundle")
    parser.add_argument("--num-loops", help="4, or 1,2,4, or 1..8; by default the model's own depth")
    parser.add_argument("--examples", type=int, help="of each task, e.g. 500; by default all")
    parser.add_argument(
        "--extended",
        metavar="YAML",
        nargs="?",
        const=DESCRIBED,
        help="CORE-extended too; of a list in the bundle that holds all its tasks, or by default as the bundle says",
    )
    parser.add_argument("--tasks", type=names, help="these alone, e.g. arc_easy,copa")
    parser.add_argument("--seeds", type=parse_seeds, help="of shots and first states, e.g. 1234,2345,3456")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, help="longer prompts lose their beginning; by default the model's")
    parser.add_device()
    parser.add_trust()
    parser.add_argument("--output", type=Path, help="JSON to write")
    return parser.parse_args(arguments)
