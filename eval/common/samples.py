"""Items of multiple-choice tasks, read from the samples that lm-eval logs."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from looped_recipes.common.files import lines_of


WRITTEN_AT = re.compile(r"_(\d{4}-\d\d-\d\dT[\d.-]+)$")  # time at the end of lm-eval's file names
DEPTH = re.compile(r"loops_\d+")


@dataclass(frozen=True)
class Item:
    task: str
    doc_id: int
    doc_hash: str
    gold: int
    log_likelihoods: np.ndarray  # [candidates]
    lengths: np.ndarray  # [candidates]
    candidates: tuple[str, ...] = ()
    prompt: int = 0  # hash of the contexts and candidates as the model got them

    @property
    def key(self) -> tuple:
        return self.task, self.doc_id, self.doc_hash


def read_samples(path: Path | str, length: Callable[[str], int]) -> list[Item]:
    """Read the items of multiple-choice tasks from a file of samples, or from all such files in a folder."""
    path = Path(path)
    files = sorted(path.rglob("samples_*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"{path} is no file of samples and no folder with any: run lm-eval with --log_samples")
    of_tasks: dict[str, list[Path]] = {}
    for file in files:
        of_tasks.setdefault(WRITTEN_AT.sub("", file.stem).removeprefix("samples_"), []).append(file)
    refuse_several_runs(path, of_tasks)
    named = {task: max(of_task) for task, of_task in of_tasks.items()}  # the newest of equal calls in one folder
    items = [item for name, file in named.items() for item in read_items(file, name, length)]
    if not items:
        raise ValueError(f"{path} holds no multiple-choice samples: candidates are compared here")
    return items


def refuse_several_runs(path: Path, of_tasks: dict[str, list[Path]]):
    """Refuse samples of one task from several runs: from several folders, or from calls with other arguments. Refuse
    samples of several depths, each of which `looped eval` writes to a folder loops_N, of whatever tasks."""
    several = [files for task, files in of_tasks.items() if len({call_of(file, task) for file in files}) > 1]
    files = sum(of_tasks.values(), [])
    inside = {folder for file in files for folder in file.parents if folder.is_relative_to(path)}
    if len([folder for folder in inside if DEPTH.fullmatch(folder.name)]) > 1:
        several.append(files)
    if not several:
        return
    common = os.path.commonpath([file.parent for file in several[0]])
    choices = {Path(common, file.relative_to(common).parts[0]) for file in several[0]}
    if all(DEPTH.fullmatch(choice.name) for choice in choices):
        what, choices = "depths", sorted(choices, key=lambda choice: int(choice.name.removeprefix("loops_")))
    else:
        what, choices = "runs", sorted(choices)
    raise ValueError(f"{path} holds samples of several {what}: name one of {', '.join(map(str, choices))}")


def call_of(file: Path, task: str) -> tuple:
    """Return the folder of a file of samples and, from lm-eval's results beside it, the model and its shots."""
    written = WRITTEN_AT.search(file.stem)
    results = file.with_name(f"results_{written[1] if written else ''}.json")
    found = json.loads(results.read_text(encoding="utf-8")) if results.is_file() else {}
    return file.parent, json.dumps(found.get("config", {}).get("model_args")), found.get("n-shot", {}).get(task)


@dataclass(frozen=True)
class Question:
    """A sample that lm-eval logged for a multiple-choice task."""

    sample: dict
    candidates: list[str]
    log_likelihoods: np.ndarray  # [candidates]

    @property
    def target(self) -> str:
        return str(self.sample["target"]).strip()

    @property
    def chooses_contexts(self) -> bool:
        """Whether the candidates are contexts of one ending, as in WinoGrande."""
        contexts = {str(given["arg_0"]) for given in self.sample["arguments"].values()}
        return len({candidate.strip() for candidate in self.candidates}) == 1 and len(contexts) > 1


def read_items(file: Path, task: str, length: Callable[[str], int]) -> list[Item]:
    questions: dict[tuple, Question] = {}
    for number, line in enumerate(lines_of(file), start=1):
        if not line.strip():
            continue
        try:
            question = question_in(json.loads(line))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}, line {number} is no sample that lm-eval logs with --log_samples") from error
        if question is None:
            continue
        if np.isnan(question.log_likelihoods).any():
            raise ValueError(
                f"{file}, doc_id {question.sample['doc_id']}: the log-likelihood of a candidate is nan: the model "
                "gives no numbers; evaluate another checkpoint, or leave this model out"
            )
        key = question.sample["doc_id"], question.sample["doc_hash"]
        questions.setdefault(key, question)  # lm-eval logs an item again for each further filter
    items = []
    for question, gold in zip(questions.values(), gold_indices(task, [*questions.values()])):
        lengths = np.array([max(1, length(candidate)) for candidate in question.candidates], dtype=np.float64)
        sample, candidates = question.sample, tuple(candidate.strip() for candidate in question.candidates)
        prompt = hash(json.dumps([sample["arguments"][f"gen_args_{i}"] for i in range(len(candidates))]))
        of_model = question.log_likelihoods, lengths
        items.append(Item(task, sample["doc_id"], sample["doc_hash"], gold, *of_model, candidates, prompt))
    return items


def question_in(sample: dict) -> Question | None:
    """Return the question of a sample; None if it has fewer than two candidates, or is of another kind of task."""
    asked = with_context([sample["arguments"][f"gen_args_{i}"] for i in range(len(sample["arguments"]))])
    if len(asked) < 2:
        return None
    sample["doc_id"], sample["doc_hash"], sample["target"]  # an error if it lacks one
    log_likelihoods = np.array([float(response[0]) for response in sample["filtered_resps"][: len(asked)]])
    return Question(sample, [arguments["arg_1"] for arguments in asked], log_likelihoods)


def with_context(asked: list[dict]) -> list[dict]:
    """Drop the requests that lm-eval's acc_mutual_info appends: the same candidates again, without their context."""
    half = len(asked) // 2
    again = [{**arguments, "arg_0": ""} for arguments in asked[:half]]
    return asked[:half] if again == asked[half:] else asked


def gold_indices(task: str, questions: list[Question]) -> list[int]:
    """Return the index of the right candidate of every question of a task.

    If candidates are numbers, a target may be a candidate or an index. A document's `gold` may be the index, or be
    counted from 1, or mean something else. All questions of a task use the same meaning, which must agree with `acc`:
    there lm-eval logs whether the likeliest candidate is right.
    """
    possible = {name: [read(question) for question in questions] for name, read in READINGS.items()}
    possible = {name: golds for name, golds in possible.items() if None not in golds}
    if not possible:
        raise ValueError(f"{task}: {why_no_gold(questions)}")
    agreeing = {name: golds for name, golds in possible.items() if all(map(agrees_with_acc, questions, golds))}
    if not agreeing:
        raise ValueError(
            f"{task}: the acc that lm-eval logged is not that of {' or of '.join(possible)}: this task scores its "
            "questions in a way of its own, which is not known here"
        )
    if any(golds != next(iter(agreeing.values())) for golds in agreeing.values()):
        raise ValueError(
            f"{task}: the right candidate may be {' or '.join(agreeing)}, and no logged acc tells which: run lm-eval "
            "with the metric acc, on more questions"
        )
    return next(iter(agreeing.values()))


def by_text(question: Question) -> int | None:
    texts = [candidate.strip() for candidate in question.candidates]
    return texts.index(question.target) if texts.count(question.target) == 1 else None


def by_index(question: Question) -> int | None:
    return None if question.chooses_contexts else number_of_candidate(question.target, question)


def by_answer_from_0(question: Question) -> int | None:
    answer = question.sample.get("doc", {}).get("answer")
    return number_of_candidate(str(answer), question) if question.chooses_contexts else None


def by_answer_from_1(question: Question) -> int | None:
    answer = str(question.sample.get("doc", {}).get("answer"))
    counted_from_0 = str(int(answer) - 1) if answer.isdecimal() else ""
    return number_of_candidate(counted_from_0, question) if question.chooses_contexts else None


def by_gold(question: Question) -> int | None:
    gold = question.sample.get("doc", {}).get("gold")
    return gold if type(gold) is int and 0 <= gold < len(question.candidates) else None


READINGS = {
    "the one whose text is the target": by_text,
    "the one whose index is the target": by_index,
    "the document's `gold`, counted from 0": by_gold,
    "the document's `answer`, counted from 0": by_answer_from_0,
    "the document's `answer`, counted from 1": by_answer_from_1,
}


def number_of_candidate(text: str, question: Question) -> int | None:
    return int(text) if text.isdecimal() and int(text) < len(question.candidates) else None


def agrees_with_acc(question: Question, gold: int) -> bool:
    logged = question.sample.get("acc")
    return logged is None or bool(logged) == (question.log_likelihoods.argmax() == gold)


def why_no_gold(questions: list[Question]) -> str:
    if any(question.chooses_contexts for question in questions):
        return "contexts are chosen here, and its documents have no `answer` or `gold` that is the number of one"
    for question in questions:
        if by_text(question) is None and by_index(question) is None:
            where = f"doc_id {question.sample['doc_id']}"
            return f"{where}: target {question.target!r} is none of the {len(question.candidates)} candidates"
    return "its targets are neither all texts of candidates nor all indices"


def length_in(tokenizer: str | None) -> Callable[[str], int]:
    if tokenizer is None:
        return lambda text: len(text.encode())
    from .model_folder import named_tokenizer

    loaded = named_tokenizer(tokenizer)
    return lambda text: len(loaded(text, add_special_tokens=False)["input_ids"])
