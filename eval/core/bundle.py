"""Reads the public evaluation bundle of CORE from a local folder.

core.yaml lists tasks (label, dataset_uri, num_fewshot, icl_task_type, continuation_delimiter). eval_data/ contains
their items, one JSON object per line. eval_meta_data.csv contains the scores of guessing, in percent, and for many
more tasks their category (a folder of eval_data), type and number of shots.
"""

import csv
import json
import random
from dataclasses import dataclass
from pathlib import Path

import yaml

from looped_recipes.common.files import lines_of


SHUFFLE_SEED, SHOTS_SEED = 1337, 1234
DESCRIBED = "eval_meta_data.csv"
# facts that eval_meta_data.csv lacks
FILES = {"mmlu_zeroshot": "mmlu", "mmlu_fewshot": "mmlu"}
DELIMITERS = {"mmlu_zeroshot": "Answer: ", "mmlu_fewshot": "\nAnswer: ", "logi_qa": "\nAnswer: "}
FIELDS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}


@dataclass(frozen=True)
class CoreTask:
    label: str
    kind: str  # a key of FIELDS
    items: list[dict]
    num_shots: int
    delimiter: str  # between the context and the text that is scored
    guessing: float  # accuracy of guessing
    shots_seed: int = SHOTS_SEED

    def centered(self, accuracy: float) -> float:
        return (accuracy - self.guessing) / (1 - self.guessing)

    def shots(self, index: int) -> list[dict]:
        """Draw other items as shots. They depend only on the index and the seed, not on the order of evaluation."""
        others = [i for i in range(len(self.items)) if i != index]
        return [self.items[i] for i in random.Random(self.shots_seed + index).sample(others, self.num_shots)]


def read_tasks(
    bundle: Path | str, listed: str = "core.yaml", examples: int | None = None, only: list[str] | None = None
) -> list[CoreTask]:
    """Read the tasks that a file of the bundle lists, each with the first `examples` of its shuffled items, or all.

    listed: a YAML, or eval_meta_data.csv for the tasks of core.yaml and all others that the CSV describes.
    only: labels of the tasks to read; None is all.
    """
    bundle = Path(bundle)
    if examples is not None and examples < 1:
        raise ValueError(f"examples={examples}: evaluate at least 1 of each task, or leave it out for all")
    for needed in (listed, DESCRIBED, "eval_data"):
        if not (bundle / needed).exists():
            raise ValueError(
                f"{bundle} is no evaluation bundle: it has no {needed}; unpack the public one (eval_bundle.zip) and "
                "give its folder"
            )
    guessing = _guessing(bundle / DESCRIBED)
    entries = _described(bundle) if listed == DESCRIBED else _listed(bundle / listed)
    wanted = [entry for entry in entries if only is None or entry["label"] in only]
    return [_task(bundle, entry, guessing, examples) for entry in wanted]


def _listed(path: Path) -> list[dict]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))["icl_tasks"]


def _rows(path: Path) -> list[dict]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _guessing(path: Path) -> dict[str, float]:
    return {row["Eval Task"]: float(row["Random baseline"] or 0) / 100 for row in _rows(path)}


def _described(bundle: Path) -> list[dict]:
    """Return entries as in core.yaml: those of core.yaml itself, and the others from columns of eval_meta_data.csv."""
    rows = _rows(bundle / DESCRIBED)
    missing = [name for name in ("Task Category", "Task Type", "#shots") if name not in rows[0]]
    if missing:
        raise ValueError(
            f"{bundle / DESCRIBED} has no column {', '.join(missing)}: name a list like core.yaml with the tasks"
            " that are wanted"
        )
    core = _listed(bundle / "core.yaml") if (bundle / "core.yaml").exists() else []
    known = {entry["label"] for entry in core}
    return [*core, *(_entry(row) for row in rows if row["Eval Task"] not in known)]


def _entry(row: dict) -> dict:
    label, folder = row["Eval Task"], row["Task Category"].strip().replace(" ", "_")
    return {
        "label": label,
        "dataset_uri": f"{folder}/{FILES.get(label, label)}.jsonl",
        "num_fewshot": [int(row["#shots"])],
        "icl_task_type": row["Task Type"].strip().replace(" ", "_"),
        "continuation_delimiter": DELIMITERS.get(label, " "),
    }


def _task(bundle: Path, entry: dict, guessing: dict[str, float], examples: int | None) -> CoreTask:
    label, kind = entry["label"], entry["icl_task_type"]
    if kind not in FIELDS:
        raise ValueError(f"task {label!r} is of type {kind!r}; CORE knows {', '.join(FIELDS)}: take it out")
    if label not in guessing:
        raise ValueError(f"eval_meta_data.csv has no random baseline for task {label!r}: add its row")
    path = bundle / "eval_data" / entry["dataset_uri"].removeprefix("local_data/")
    if not path.is_file():
        raise ValueError(f"task {label!r} wants {path}, which is not there")
    items = [json.loads(line) for line in lines_of(path) if line.strip()]
    random.Random(SHUFFLE_SEED).shuffle(items)
    items, num_shots = items[:examples], entry["num_fewshot"][0]
    if len(items) <= num_shots:
        raise ValueError(
            f"task {label!r} has {len(items)} items, too few for {num_shots} shots beside the one that is asked"
        )
    missing = sorted({field for item in items for field in FIELDS[kind] if field not in item})
    if missing:
        raise ValueError(f"items of task {label!r} in {path} have no {', '.join(missing)}, which {kind} needs")
    return CoreTask(label, kind, items, num_shots, entry.get("continuation_delimiter", " "), guessing[label])
