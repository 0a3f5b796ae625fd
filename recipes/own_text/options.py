"""Your own text in ten minutes: `looped own-text FILE [--minutes 10]`.

Trains a small looped model (about 5 million parameters, three loops) on a text, and beside it a plain model that takes
as many operations for each token, with a layer of its own for every one that the looped model applies. Both see the
same rows, and are compared on the part of the text that was held out. FILE is txt, jsonl or parquet, or a folder of
them; a text below a megabyte is learned by heart rather than understood. The recipes are own_text/looped.yaml and
own_text/plain.yaml.
"""

import argparse
from pathlib import Path

from looped_recipes.common.command_line import Parser


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("looped own-text", __doc__)
    parser.add_argument("text", metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of both recipes")
    parser.add_argument("--minutes", type=float, default=10, help="for both models together, about; default: 10")
    parser.add_argument("--output", type=Path, default=Path("runs/own_text"), help="folder of both runs")
    return parser.parse_args(arguments)
