"""One page about one or more runs: `looped report RUN... [--output report.html] [--markdown [card.md]]`.

RUN is an output folder of looped pretrain, or of looped sweep for all its runs. The page holds training curves, loss
over depth, norms of the state and of gradients (Fully Looped, figures 2, 3, 6 and 7), what differs between the runs,
and, where the folder has them: lm-eval results (results*.json anywhere in it), what looped halting and looped diagnose
found (eval/). Runs that differ in their seed alone are replicas: the page begins with the mean loss of every
combination of settings and with what each setting changes, with intervals over seeds. What is missing is left out,
with the command that makes it. The page is one file that needs no network and no JavaScript; --markdown gives the same
tables as a section for a model card.
"""

import argparse

from looped_recipes.common.command_line import Parser


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("looped report", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output folder of looped pretrain or looped sweep")
    parser.add_argument("--output", help="the page; default: report.html in the first folder")
    parser.add_argument("--markdown", nargs="?", const="-", help="also as Markdown, into a file or to the terminal")
    parser.add_argument("--layer", type=int, help="whose gradients are drawn, counted from 1; by default the middle")
    parser.add_argument("--clipped", action="store_true", help="draw gradients after clipping")
    return parser.parse_args(arguments)
