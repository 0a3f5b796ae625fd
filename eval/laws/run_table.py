"""The table of runs that the scaling laws read: one row per run and test depth, as CSV or JSON lines.

| column | meaning |
|---|---|
| run | name of the run |
| mean_depth | mean loops in training, mu |
| tokens | training tokens, D |
| loss | validation cross-entropy at test_depth |
| test_depth | loops of the evaluation, T; without this column every loss is taken at the training depth |
| flops | C of the whole training (Parcae, appendix D); value embedding tables are lookups and do not count |
| flops_with_value_tables | the same, plus 6 per token for each parameter of the value embedding tables |
| effective_parameters | N(mu): without the embedding; the core counts mu times, each value embedding table once |
| effective_parameters_without_value_tables | the same without the value embedding tables |

Other columns are kept and can be selected by name. `collect` makes the table from folders of looped pretrain.
"""

import csv
import io
import json
import math
from pathlib import Path

import torch

from looped_recipes.common.command_line import typed
from looped_recipes.common.files import write_whole
from looped_recipes.common.words import counted

from .fitting import FitError


POSITIVE = ("mean_depth", "tokens", "loss", "test_depth", "flops", "effective_parameters")


class RunTable:
    """Rows as dicts; numeric columns as float64 tensors."""

    def __init__(self, rows: list[dict], source: str):
        self.rows, self.source = rows, source

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.tensor([row[name] for row in self.rows], dtype=torch.float64)

    def columns(self, names) -> dict[str, torch.Tensor]:
        return {name: self[name] for name in names}

    def where(self, keep) -> "RunTable":
        return RunTable([row for row in self.rows if keep(row)], self.source)

    def by(self, name: str) -> dict:
        """Split into one table per value of a column, in ascending order of the values."""
        values = sorted({row[name] for row in self.rows}, key=lambda value: (isinstance(value, str), value))
        return {value: self.where(lambda row, value=value: row[name] == value) for value in values}

    def numbered(self, name: str) -> torch.Tensor:
        """Return for each row the rank of its value among the column's distinct values in ascending order, [n]."""
        order = {value: i for i, value in enumerate(self.by(name))}
        return torch.tensor([order[row[name]] for row in self.rows])

    def need(self, *names: str) -> "RunTable":
        """Raise FitError if columns or numbers are missing or out of range; else return this table."""
        present = {key for row in self.rows for key in row}
        missing = [name for name in names if name not in present]
        if missing:
            raise FitError(
                f"{self.source} lacks {counted(len(missing), 'column')}: {', '.join(missing)}; "
                f"it has {', '.join(sorted(present)) or 'none'}"
            )
        for number, row in enumerate(self.rows, start=1):
            for name in names:
                if name in POSITIVE:
                    check_positive(row.get(name), name, f"{self.source}, row {number} ({row['run']})")
        return self

    def at_training_depth(self) -> "RunTable":
        """Return the rows at T = mu, one for every run; all rows if the table has no test depths."""
        if not any("test_depth" in row for row in self.rows):
            return self
        self.need("test_depth", "mean_depth")
        kept = self.where(lambda row: row["test_depth"] == row["mean_depth"])
        lost = sorted({row["run"] for row in self.rows} - {row["run"] for row in kept.rows})
        if lost:
            raise FitError(
                f"{self.source}: no row with test_depth equal to mean_depth for {', '.join(lost[:5])}"
                f"{' and others' if len(lost) > 5 else ''}; evaluate these runs at their training depth"
            )
        return kept


def check_positive(value, name: str, where: str):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FitError(f"{where}: {name} must be a number, got {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise FitError(f"{where}: {name} must be positive and finite, got {value!r}; leave diverged runs out")


def value_of(column: str, text: str):
    """Return the number that a text says, but for names of runs, which may look like one, as those by date do."""
    try:
        return text if column == "run" or "_" in text else float(text)  # float also reads 1_000
    except ValueError:
        return text


def read_table(path: str | Path) -> RunTable:
    path = Path(path)
    if path.suffix not in (".csv", ".jsonl"):
        raise FitError(f"a table of runs is a .csv or .jsonl, got {str(path)!r}")
    if not path.is_file():
        raise FitError(f"there is no table {path}; `{typed('looped laws collect RUN... --output', path)}` makes one")
    if path.suffix == ".csv":
        rows = [
            {key: value_of(key, value) for key, value in row.items() if key and value not in (None, "")}
            for row in csv.DictReader(io.StringIO(text_of(path), newline=""))
        ]
    else:
        rows = [
            json_row(line, f"{path}, line {i}") for i, line in enumerate(text_of(path).split("\n"), 1) if line.strip()
        ]
    if not rows:
        raise FitError(f"{path} holds no runs")
    first_of: dict[str, int] = {}
    for number, row in enumerate(rows, start=1):
        row["run"] = str(row.get("run", f"row {number}"))
        first = first_of.setdefault(json.dumps(row, sort_keys=True), number)
        if first != number:
            raise FitError(f"{path}: rows {first} and {number} ({row['run']}) are the same: leave one out")
    return RunTable(rows, path.name)


def text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")  # with a byte order mark, as Excel writes it, or without
    except UnicodeDecodeError as error:
        raise FitError(f"{path} is not UTF-8 ({error}): save it as that") from None


def json_row(line: str, where: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise FitError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise FitError(f"{where} must hold an object, got {line[:60]!r}")
    return row


def write_table(rows: list[dict], path: str | Path):
    path, text = Path(path), io.StringIO(newline="")
    if path.suffix == ".jsonl":
        text.writelines(json.dumps(row) + "\n" for row in rows)
    else:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    write_whole(path, text.getvalue())


class LeftOut(FitError):
    """Raised for a folder of a sweep that has no place in a table: its run diverged, or it holds none."""


def collect(folder: str | Path) -> list[dict]:
    """Return the rows of one finished run of looped pretrain: its last validation, one row per depth."""
    from looped_recipes.common.flops import effective_parameters, sizes
    from looped_recipes.common.metrics import divergence_of, last_validation, read_metrics, why_diverged
    from looped_recipes.settings.operations import Operations
    from looped_recipes.settings.recipe import recipe_of_run
    from looped_recipes.settings.sweep_files import JOBS
    from modeling_looped import LoopedConfig

    folder = Path(folder)
    if (why := divergence_of(folder)) is not None:  # such a run may lack the files below
        raise LeftOut(f"diverged: {why}")
    if folder.resolve().name == JOBS and not (folder / "recipe.yaml").exists():
        raise LeftOut("holds no run, but what a cluster was told")
    if not (folder / "recipe.yaml").exists():
        raise FitError(f"{folder} has no recipe.yaml: it is no run of looped pretrain, so leave it out")
    for part in ("metrics.jsonl", "final/config.json"):
        if not (folder / part).exists():
            raise FitError(
                f"{folder} has no {part}: the run is not finished; `looped pretrain {folder}/recipe.yaml` goes on"
            )
    recipe, config = recipe_of_run(folder), LoopedConfig.from_pretrained(folder / "final")
    records = read_metrics(folder / "metrics.jsonl")
    last = next((record for record in reversed(records) if "validation/loss" in record), None)
    if last is None:
        raise FitError(f"{folder}/metrics.jsonl holds no validation loss; train with evaluation.rows above 0")
    if (why := why_diverged(last["validation/loss"], recipe.training.max_loss)) is not None:
        raise LeftOut(f"diverged: {why}")
    depth, steps, operations = recipe.mean_depth(config), last["step"] + 1, Operations(recipe, config)
    facts = {
        "run": folder.name,
        "parameters": sizes(config).total,
        "effective_parameters": effective_parameters(config, depth),
        "effective_parameters_without_value_tables": effective_parameters(config, depth, value_tables=False),
        "mean_depth": depth,
        "depth_sampler": recipe.depth.sampler,
        "tokens": steps * operations.tokens_per_step,
        "flops": operations.of_run(steps),
        "flops_with_value_tables": operations.of_run(steps, value_tables=True),
        "seed": recipe.training.seed,
    }
    return [{**facts, "test_depth": k, "loss": loss} for k, loss in last_validation([last], "loss").items()]
