"""Talk to a model, or let it complete text, in a terminal: `looped chat runs/demo/final [--num-loops 8]`.

A model whose tokenizer has a chat template answers in turns; any other completes each line by itself. Depth and exits
are those saved with the model unless options say otherwise; after each answer stands how many loops its tokens took.
Without a terminal, each line of the input is one prompt.
"""

import argparse

from looped_recipes.common.command_line import Parser


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("looped chat", __doc__)
    parser.add_argument("model", help="a saved model, or the folder of its training run")
    parser.add_argument("prompt", nargs="*", help="without one, prompts are read from the terminal")
    parser.add_argument("--num-loops", type=int, help="the most loops a token may take; default: that of the model")
    parser.add_argument("--exit-criterion", help="default: that saved with the model, if any; none leaves it out")
    parser.add_argument("--exit-threshold", type=float, help="default: the published one")
    parser.add_argument("--min-loops", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy")
    parser.add_argument("--seed", type=int, help="of sampling")
    parser.add_argument("--system", help="what the model is told before a conversation")
    parser.add_argument("--tokenizer", help="folder or name, for a model that comes without one")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    parser.add_device()
    parser.add_trust()
    return parser.parse_args(arguments)
