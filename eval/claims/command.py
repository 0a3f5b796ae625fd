"""Measures, collects, and writes the ledger."""

import argparse
from pathlib import Path

from looped_recipes.common.command_line import say_result, typed
from looped_recipes.common.provenance import write_json

from .definition import Measurement, Setting
from .functions import FUNCTIONS, RESULT
from .ledger import ledger, said, write_ledger
from .measuring import collect, run
from .options import parse
from .papers import PAPERS


def chosen(names: list[str] | None, seeds: list[int] | None) -> list[Measurement]:
    known = {measurement.name: measurement for paper in PAPERS for measurement in paper.measurements}
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        raise ValueError(f"--only {' '.join(unknown)}: there is no such measurement; they are {', '.join(known)}")
    found = [known[name] for name in names or known]
    if not seeds:
        return found
    for measurement in found if names else []:
        if not set(seeds) & set(measurement.seeds):
            asked, has = (" ".join(map(str, numbers)) for numbers in (seeds, measurement.seeds))
            raise ValueError(f"--only {measurement.name} --seeds {asked}: it has the seeds {has}")
    return [m._replace(seeds=tuple(s for s in m.seeds if s in seeds)) for m in found]


def measure(args: argparse.Namespace):
    """Run one measuring function, in the process that `run` starts for it."""
    name = " ".join(args.only or [])
    if name not in FUNCTIONS:
        raise ValueError(f"measure needs --only and one of {', '.join(FUNCTIONS)}, got {name!r}")
    write_json(args.folder / RESULT.format(name), FUNCTIONS[name](args.seed, args.folder), digits=6)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.action == "measure":
        measure(args)
        return 0
    measurements, missing = chosen(args.only, args.seeds), []
    if args.action == "list":
        for measurement in measurements:
            print(f"{measurement.name:12} seeds {', '.join(map(str, measurement.seeds))}")
        return 0
    if args.action in ("run", "collect"):
        setting = Setting(args.folder, args.text)
        if args.action == "run":
            missing = run(measurements, setting, args.minutes)
        every = chosen(args.only, None)  # also seeds that earlier calls measured
        for path in collect(every, setting, args.results / "claims"):
            print(f"written: {path}")
    if not (args.results / "claims").is_dir():
        if missing:
            say_result(
                "The time is up, and nothing is whole yet.", f"{typed('looped claims run', args.folder)}  # goes on"
            )
            return 0
        raise ValueError(
            f"there are no measurements in {args.results / 'claims'}: `looped claims run FOLDER` makes some, and "
            "--results names another folder"
        )
    rows = ledger(PAPERS, args.results)
    written: list[Path] = write_ledger(PAPERS, rows, args.results)
    print(f"written: {', '.join(map(str, written))}")
    then = [f"{typed('looped claims run', args.folder)}  # missing: {', '.join(missing)}"] if missing else []
    say_result(said(rows), *then)
    return 0
