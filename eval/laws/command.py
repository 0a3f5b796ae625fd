"""Scaling laws of looping from a table of runs."""

from collections import Counter
from pathlib import Path

from looped_eval.common.run_folder import runs_in
from looped_recipes.common.command_line import say_result, typed
from looped_recipes.common.provenance import write_json
from looped_recipes.common.words import counted

from .analyses import conditioning, isoflop, parametric, test_time, unified
from .fitting import Fit, FitError
from .forms import PARAMETRIC, TEST_TIME
from .frontier import is_fixed_depth
from .options import parse
from .page import finding, write_page
from .run_table import LeftOut, RunTable, collect, read_table, write_table


THEN = {"isoflop": "parametric", "parametric": "unified", "test_time": "conditioning", "unified": "conditioning"}

READ_BY = {
    "held_out": ("parametric", "unified", "conditioning"),
    "conditioning": ("unified",),
    "restarts": ("parametric", "test_time", "unified", "conditioning"),
}


def run(law: str, table: RunTable, held_out: RunTable | None, args) -> tuple[dict, Fit | None]:
    """Return the result of a law and, if it consists of a single fit, that fit."""
    if law == "isoflop":
        return isoflop(table), None
    how = {"resamples": args.bootstrap, "seed": args.seed}
    if args.restarts is not None:
        how["restarts"] = args.restarts
    if law == "test_time":
        return test_time(table, **how), None
    if law == "conditioning":
        return conditioning(table, held_out, **how), None
    if law == "unified":
        return unified(table, held_out, args.conditioning or "one", **how)
    return parametric(table, held_out, **how)


def show(result: dict, indent: str = ""):
    """Print the result as lines, with numbers to five digits. Predictions are only in the JSON."""
    for key, value in result.items():
        if key == "rows" and isinstance(value, list):
            continue
        if isinstance(value, dict):
            print(f"{indent}{key}")
            show(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            print(f"{indent}{key}")
            for item in value:
                print(f"{indent}  " + "  ".join(f"{name} {number(each)}" for name, each in item.items()))
        elif isinstance(value, list) and value and isinstance(value[0], str):
            print(f"{indent}{key}")
            for line in value:
                print(f"{indent}  {line}")
        elif value not in ([], {}):
            print(f"{indent}{key:24} {number(value)}")


def number(value) -> str:
    if isinstance(value, (list, tuple)):
        return " .. ".join(map(number, value))
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def collect_all(named: list[str], output: str | None):
    folders = [folder for name in named for folder in runs_in(Path(name))]
    for folder, count in Counter(folder.resolve() for folder in folders).items():
        if count > 1:
            raise FitError(f"the run {folder} is named {count} times: name it once, or it would count as several")
    rows_of = {}
    for folder in folders:
        try:
            rows_of[folder] = collect(folder)
        except LeftOut as why:
            print(f"left out: {folder} {why}")
    if not rows_of:
        raise FitError("no folder is left that holds a finished run")
    names = [folder.resolve().name for folder in rows_of]
    unique = len(set(names)) == len(names)  # runs of several sweeps may have the same names
    rows = [
        {**row, "run": name if unique else str(folder)}
        for (folder, found), name in zip(rows_of.items(), names)
        for row in found
    ]
    path = Path(output or "runs/laws/runs.csv")
    write_table(rows, path)
    enough, law = enough_for(rows)
    then = typed(f"looped laws {law}", path) if law else typed("looped report", next(iter(rows_of)))
    say_result(f"{len(rows)} losses of {counted(len(rows_of), 'run')} are in {path}: {enough}.", then)


def enough_for(rows: list[dict]) -> tuple[str, str | None]:
    """Return which law these runs suffice for, in words and as the name of its command."""
    looped = [row for row in rows if not is_fixed_depth(row)]
    curves = Counter(row["run"] for row in looped)  # number of losses of each run
    differ = all(len({row.get(name) for row in looped}) > 1 for name in ("effective_parameters", "tokens"))
    needed, depths = len(PARAMETRIC.names) + 1, len(TEST_TIME["exponential"].names) + 1
    if len(curves) >= needed and differ:
        return "enough for the law of training", "parametric"
    asked = f"{needed} looped runs of different effective parameters and tokens"
    if max(curves.values(), default=0) >= depths:
        return f"enough for curves over test depth, but the law of training needs {asked}", "test_time"
    return f"too few for a law: that of training needs {asked}, a curve over test depth {depths} depths of a run", None


def next_law(law: str, table: RunTable, path: str) -> list[str]:
    """Return the command that fits the next law to the same table, if its runs suffice for that law."""
    then = THEN.get(law)
    known = then == "parametric" or any("test_depth" in row for row in table.rows)
    return [typed(f"looped laws {then}", path)] if then and known and enough_for(table.rows)[1] == "parametric" else []


def with_named_columns(table: RunTable, args) -> RunTable:
    """Put the columns that the command names in place of `effective_parameters` (N) and `flops` (C)."""
    named = {"effective_parameters": args.effective_parameters, "flops": args.flops}
    table.need(*(column for name, column in named.items() if column != name))
    rows = [{**row, **{name: row[column] for name, column in named.items() if column in row}} for row in table.rows]
    return RunTable(rows, table.source)


def check(args):
    for name, read_by in READ_BY.items():
        if getattr(args, name) is not None and args.law not in read_by:
            option, laws = name.replace("_", "-"), ", ".join(read_by)
            raise FitError(f"--{option} has no effect on {args.law}, only on {laws}: leave it out")
    if args.restarts is not None and args.restarts < 1:
        raise FitError(f"--restarts must be at least 1, got {args.restarts}")
    if args.bootstrap < 0:
        raise FitError(f"--bootstrap must be at least 0, got {args.bootstrap}")


def runs_of_law(path: str, args) -> RunTable:
    """Read a table and keep the runs to which the law applies."""
    table = with_named_columns(read_table(path), args)
    if args.min_depth:
        table.need("mean_depth")
        table = table.where(lambda row: is_fixed_depth(row) or row["mean_depth"] >= args.min_depth)
    if args.law != "isoflop":
        table = table.where(lambda row: not is_fixed_depth(row))
    if not len(table):
        if args.min_depth:
            raise FitError(f"{path} holds no looped runs of mean depth {args.min_depth:g} or more")
        raise FitError(f"{path} holds only runs of mean depth 1, the baseline: a law needs runs with more loops")
    return table


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    check(args)
    if args.law == "collect":
        collect_all(args.inputs, args.output)
        return 0
    if len(args.inputs) != 1:
        raise FitError(f"{args.law} reads one table, got {', '.join(args.inputs)}; `collect` makes one of run folders")
    table = runs_of_law(args.inputs[0], args)
    held_out = runs_of_law(args.held_out, args) if args.held_out else None
    parts = {"": table} if args.by is None else table.need(args.by).by(args.by)
    others = {"": held_out} if args.by is None or held_out is None else held_out.need(args.by).by(args.by)
    output = Path(args.output or "runs/laws")
    output.mkdir(parents=True, exist_ok=True)
    failed = False
    for value, part in parts.items():
        name = args.law if args.by is None else f"{args.law}_{args.by}={number(value)}"
        if held_out is not None and value not in others:
            print(f"{args.held_out} holds no runs of {args.by}={number(value)}: nothing is predicted for these")
        result, fitted = run(args.law, part, others.get(value), args)
        result["columns"] = {"N": args.effective_parameters, "C": args.flops}
        result |= {"seed": args.seed}
        write_json(output / f"{name}.json", result, args.command)
        show(result)
        print(f"written: {output / name}.json")
        if result.get("converged", True):
            write_page(args.law, result, part, fitted, output / name)
            print(f"the page: {output / name}.html")
            say_result(finding(args.law, result), *next_law(args.law, part, args.inputs[0]))
        else:
            failed = True
            print(f"\nNo law was found: {result.get('reason', 'the fit did not converge')}.")
    return int(failed)
