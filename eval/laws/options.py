"""Scaling laws of looping from a table of runs: `looped laws LAW RUNS.csv|jsonl [options]`.

isoflop       the loops and tokens with the least loss at each FLOP budget (a parabola in log mu) and their power laws;
              the best mean depth that was run at each budget, beside runs of fixed depth 1
parametric    E + X N^-x + Y D^-y: N effective parameters at the training depth, D tokens; with the frontier, the mean
              depth of least loss at each FLOP budget
test_time     L_inf + Z e^(-z T) for every run, beside three rival forms, in range and beyond the training depth
unified       the parametric law and Z e^(-z T mu^-gamma), jointly; --conditioning one (gamma = 1), learned or none (0)
conditioning  those three decays above the floor that the parametric law gives
collect       makes the table: `looped laws collect RUN... --output runs.csv`, from folders of looped pretrain
              or looped sweep

Columns of the table: see eval/laws/run_table.py. N counts the tables of value embeddings and FLOPs do not, unless
--effective-parameters or --flops names another column; the result says which it was. Runs of mean depth 1 are the
baseline of figure 6, and no law is fitted to them.

The laws are those of Parcae (section 5, appendices K and L). Each writes LAW.json and LAW.svg to --output. A fit that
did not converge, or that the runs do not determine, says so and gives no number. Intervals are 95 % of --bootstrap
refits to runs drawn anew, or, for a single curve, to residuals drawn anew.
"""

import argparse

from looped_recipes.common.command_line import Parser


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("looped laws", __doc__)
    laws = ("isoflop", "parametric", "test_time", "unified", "conditioning", "collect")
    parser.add_argument("law", choices=laws, metavar="LAW", help=" | ".join(laws))
    parser.add_argument(
        "inputs", nargs="+", metavar="RUNS", help="a table of runs; folders of runs or sweeps for collect"
    )
    parser.add_argument(
        "--output", default=None, help="folder of LAW.json and LAW.svg (runs/laws); collect: the table"
    )
    parser.add_argument("--held-out", metavar="RUNS", help="a table of runs to predict")
    parser.add_argument("--by", metavar="COLUMN", help="fit the runs of each value of a column apart, e.g. parameters")
    parser.add_argument("--min-depth", type=float, default=0.0, help="leave out runs with a mean depth below this")
    parser.add_argument(
        "--effective-parameters",
        metavar="COLUMN",
        default="effective_parameters",
        help="N of the laws, e.g. effective_parameters_without_value_tables",
    )
    parser.add_argument(
        "--flops", metavar="COLUMN", default="flops", help="C of the laws, e.g. flops_with_value_tables"
    )
    parser.add_argument("--conditioning", choices=["one", "learned", "none"], help="unified: gamma; default: one")
    parser.add_argument("--restarts", type=int, help="default: 500; unified 1000; test_time 100 a curve")
    parser.add_argument(
        "--bootstrap", type=int, default=200, help="resamples for 95%% intervals (those of isoflop need none); 0: none"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)
