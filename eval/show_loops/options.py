"""How long a model thinks over each token: `looped show MODEL "prompt" [--output page.html]`.

Lets the model write with early exit, prints the text with every token coloured by the loops it took, and writes one
HTML page, without scripts and without a network, that also shows each token's logit margin over loops under the
pointer. The criterion is that of --exit-criterion, else that of the model's generation_config.json (see
`looped halting --write`), else kl at its published threshold. The first new token is read from the prompt's pass: it
takes the loops of the prompt, and is not counted among the others.
"""

import argparse

from looped_recipes.common.command_line import Parser


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("looped show", __doc__)
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("--exit-criterion")
    parser.add_argument("--exit-threshold", type=float, help="default: the published one")
    parser.add_argument("--min-loops", type=int)
    parser.add_argument("--num-loops", type=int, help="the most loops a token may take; default: that of the model")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument("--tokenizer", help="folder or name, for a model that comes without one")
    parser.add_device()
    parser.add_trust()
    parser.add_argument("--output", default="loops.html")
    return parser.parse_args(arguments)
