"""Try faults for a while and write what came of them.

    python -m tests.faults --minutes 10 --seed 1 --output results
    python -m tests.faults --only recipes --trials 500

Writes reliability.json and RELIABILITY.md into --output; ends with 1 if any outcome is not good.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import get_args

from looped_recipes.common.command_line import Parser, run_command
from looped_recipes.common.files import write_whole
from looped_recipes.common.provenance import provenance, write_json
from tests.faults.campaign import Outcome, campaigns, run_campaign


OUTCOMES = get_args(Outcome)
INTRODUCTION = """\
Faults on purpose, and what came of them. Right: the result equals, bit for bit, that of a run without it. Refused: one
line that quotes what is wrong and says what to do. Silent: a wrong result without a word. Traceback: an error that
advises nothing. Lost: work that cannot be resumed.""".splitlines()


def main(arguments: list[str] | None = None):
    names = list(campaigns())
    parser = Parser("python -m tests.faults", __doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these campaigns alone")
    parser.add_argument("--minutes", type=float, default=5, help="of each campaign, at most")
    parser.add_argument("--trials", type=int, default=None, help="of each campaign, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None, help="folder of reliability.json and RELIABILITY.md")
    args = parser.parse_args(arguments)
    found = {
        name: in_a_process_of_its_own(run_campaign, name, args.seed, args.minutes, args.trials) for name in args.only
    }
    if args.output is not None:
        write_json(args.output / "reliability.json", {"seed": args.seed, "campaigns": found}, args.command)
        write_whole(args.output / "RELIABILITY.md", page(found, args))
    return int(any(campaign["bad"] for campaign in found.values()))


def in_a_process_of_its_own(function, *arguments):
    """Campaigns fork, which goes wrong beside threads that another one has left."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


def page(found: dict[str, dict], args) -> str:
    """A row for each campaign, and the faults that were not met well."""
    made_by = provenance(args.command)
    rows = [
        f"| {campaign['about']} | {campaign['trials']} | "
        + " | ".join(str(campaign["outcomes"].get(outcome, 0)) for outcome in OUTCOMES)
        + " |"
        for campaign in found.values()
    ]
    bad = [
        f"- {name}: {trial['outcome']}: `{trial['fault']}`: {trial['detail']}"
        for name, campaign in found.items()
        for trial in campaign["bad"]
    ]
    return "\n".join(
        [
            "# Reliability",
            "",
            *INTRODUCTION,
            "",
            f"| campaign | faults | {' | '.join(OUTCOMES)} |",
            f"|---|{'---|' * (len(OUTCOMES) + 1)}",
            *rows,
            "",
            *(["Not met well:", "", *bad, ""] if bad else []),
            f"`{made_by['command']}`, commit {made_by['commit']}, {made_by['hardware']}, "
            + ", ".join(f"{name} {version}" for name, version in made_by["versions"].items()),
            "",
        ]
    )


if __name__ == "__main__":
    run_command(main)
