"""The papers' quantitative claims, measured again: `looped claims [ACTION] [FOLDER] [options]`.

looped claims                                        # the ledger and its page, from the JSON in results/
looped claims run runs/claims --minutes 60           # measures what is missing, goes on where it stopped
looped claims run runs/claims --only rates core --text my_text.jsonl
looped claims collect runs/claims                    # only reads what has been measured

`run` and `collect` write results/claims/NAME.json with the numbers of every seed that is whole, then the ledger. Each
claim is defined in a file for its paper, with the rule that gives its verdict: agrees, sign agrees, weaker, stronger,
not seen or disagrees; open, where the interval over seeds does not decide; or not reachable here. No verdict is
written by hand.
"""

import argparse
from pathlib import Path

from looped_recipes.common.command_line import Parser


ACTIONS = ("ledger", "run", "collect", "measure", "list")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("looped claims", __doc__)
    parser.add_argument("action", nargs="?", choices=ACTIONS, default="ledger")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/claims"), help="of the measurements")
    parser.add_argument("--minutes", type=float, default=60.0, help="run: no longer than that; the next call goes on")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these measurements; `list` names them")
    parser.add_argument("--seeds", nargs="+", type=int, help="run: these seeds; default: all of each measurement")
    parser.add_argument("--seed", type=int, default=0, help="measure: of one function, in FOLDER")
    parser.add_argument("--text", default="embedded", help="what trainings on text read, a data.source of a recipe")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the JSON and of CLAIMS.md")
    return parser.parse_args(arguments)
