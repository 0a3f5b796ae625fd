"""A first look, from nothing, in five to fifteen minutes on two CPU cores: `looped demo`.

Trains a looped model and a control with one loop on questions that take several steps, shows after how many loops each
kind of question is answered, then trains a small looped model on text, Python's own library and documentation, and
shows its loss at every depth. All of it is on one page, OUTPUT/demo.html. OUTPUT/final, the text model, is an ordinary
model folder; OUTPUT/hops/final is the model of the questions, which --ask asks.
"""

import argparse
from pathlib import Path

from looped_recipes.common.command_line import Parser


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("looped demo", __doc__)
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="section.key=value",
        help="of the text model's recipe, recipes/demo/text.yaml, e.g. data.source=my_texts.jsonl",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="default: runs/demo")
    parser.add_argument(
        "--ask",
        nargs="?",
        const="",
        metavar="QUESTION",
        help="ask the trained model, e.g. 'cd fa ec bh hf ge ag db ; h2', or some unseen questions if none is given",
    )
    return parser.parse_args(arguments)
