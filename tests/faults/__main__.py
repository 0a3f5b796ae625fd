"""Try faults for a while and write what came of them.

    python -m tests.faults --minutes 10 --seed 1 --output results/reliability
    python -m tests.faults --only recipes --trials 500

Writes OUTPUT/reliability.json and prints a table; ends with 1 if any outcome is not good.
"""

import importlib
import tempfile
import time
from pathlib import Path

from recipes.common.command_line import Parser, run_command
from recipes.common.provenance import write_json
from tests.faults.campaign import GOOD, campaigns, tally


def main(arguments: list[str] | None = None):
    names = list(campaigns())
    parser = Parser("tests.faults", __doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these campaigns alone")
    parser.add_argument("--minutes", type=float, default=5, help="of each campaign, at most")
    parser.add_argument("--trials", type=int, default=None, help="of each campaign, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None, help="folder of reliability.json")
    args = parser.parse_args(arguments)
    found = {name: run(name, args) for name in args.only}
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        write_json(args.output / "reliability.json", {"seed": args.seed, "campaigns": found}, args.command)
    if any(campaign["bad"] for campaign in found.values()):
        raise SystemExit(1)


def run(name: str, args) -> dict:
    campaign = importlib.import_module(f"tests.faults.campaign_{name}")
    end, seen = time.monotonic() + 60 * args.minutes, []
    with tempfile.TemporaryDirectory(prefix="looped-faults-") as folder:
        for trial in campaign.trials(args.seed, Path(folder)):
            seen.append(trial)
            if trial.outcome not in GOOD:
                print(f"{name}: {trial.outcome}: {trial.fault}: {trial.detail}", flush=True)
            if time.monotonic() > end or len(seen) == args.trials:
                break
    outcomes = dict(tally(seen))
    print(f"{name}: {len(seen)} trials, {outcomes}", flush=True)
    bad = [trial._asdict() for trial in seen if trial.outcome not in GOOD]
    return {"about": campaign.__doc__.splitlines()[0], "trials": len(seen), "outcomes": outcomes, "bad": bad}


if __name__ == "__main__":
    run_command(main)
