"""Perplexity and norm of the state over the whole validation split, over seeds (readout blind spot, table 2):

looped sweep recipes/readout/44m.sweep.yaml
looped readout-table runs/44m

Each folder is a training run, or holds training runs. Windows are those of the recipe, over the whole validation
split; each of their `sequence_length` tokens has a target, there is no dropout, and a token counts in every window it
is in. For every run:

    norm              mean over tokens of ||H_K||
    perplexity        of the readout after the last loop
    trained loss      exp of the cross-entropy that is trained: of the last loop, its mean over loops or over the last
                      third of them, weighted by the exit distribution, or that of logits so weighted; with
                      loop_loss "gate" there is none. The paper's table 2 has this one.

Runs that differ in their seed alone are one system: mean and sample standard deviation.
"""

import argparse

from looped_recipes.common.command_line import Parser, folder


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("looped readout-table", __doc__)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a training run, or a sweep's folder of them")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float64"], default="float32")
    parser.add_device()
    parser.add_trust()
    parser.add_argument("--output", type=folder, help="for readout_table.json and .md; default: the first folder")
    return parser.parse_args(arguments)
