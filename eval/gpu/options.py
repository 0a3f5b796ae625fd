"""Checks the project on a GPU: `looped gpu OUT [options]`, or `bash recipes/gpu_check.sh OUT [options]`.

Runs the tests marked `gpu`, the benchmarks, one real training and small runs of the papers' claims, one after the
other. Each has its own process and its own limit of time, and one that fails stops no other. Every number is in
OUT/measured.jsonl as soon as it is known; check.json and index.html, with the verdict first, are written anew after
every piece. A second call goes on with what is missing, trainings from their checkpoints. `--list` names the pieces.
"""

import argparse
from pathlib import Path

from looped_recipes.common.command_line import Parser

from .pieces import NAMES, PIECES


class ListPieces(argparse.Action):
    """Print the list and end the command, as --help does: the list needs no GPU."""

    def __call__(self, parser, namespace, values, option_string=None):
        for piece in PIECES:
            print(f"{piece.name:17} {piece.expected:4} s expected, {piece.limit} at most   {piece.what}")
        print(f"all: {sum(piece.expected for piece in PIECES) / 60:.0f} minutes expected")
        parser.exit()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("looped gpu", __doc__)
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/gpu"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU: proves the code, measures nothing")
    parser.add_argument("--text", default="embedded", help="what the trainings read, a data.source of a recipe")
    parser.add_argument("--minutes", type=float, default=30.0, help="no piece runs beyond that; the next call goes on")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--named", nargs="+", default=[], help="of the pieces, the measurements of these names alone")
    parser.add_argument("--list", action=ListPieces, nargs=0, help="the pieces, and what each is expected to take")
    parser.add_argument("--piece", choices=NAMES, help="run this one here, without a limit")
    return parser.parse_args(arguments)
