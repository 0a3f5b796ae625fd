"""Small tasks and models for lm-eval, and a model that knows the answers."""

import json
import math
import random
from functools import cache
from pathlib import Path

from lm_eval import utils
from lm_eval.api.model import LM

from tests.helpers import tiny_model, tiny_tokenizer


utils.env.from_string = cache(utils.env.from_string)  # else a task's templates are compiled anew for every document


def words(generator: random.Random, count: int) -> str:
    return " ".join(generator.choices("abcdefghij", k=count))


def task_documents() -> dict[str, list[dict]]:
    """Per task. Lengths differ, so that batches are padded; the last are longer than the model's window."""
    generator = random.Random(0)
    lengths = [3, 9, 1, 14, 5, 20, 7, 2, 90]
    choices = [
        {
            "question": words(generator, length),
            "choices": [words(generator, 1 + (length + i) % 3) for i in range(3)],
            "answer": generator.randrange(3),
        }
        for length in lengths
    ]
    return {
        "choice": choices,
        "letter": [{**row, "choices": ["a", "b", "c"]} for row in choices],
        "rolling": [{"text": words(generator, length + 1)} for length in [*lengths, 200]],
        "writing": [{"question": words(generator, length), "answer": "a b c"} for length in lengths],
    }


def task_configs(folder: Path) -> dict[str, dict]:
    choice = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "answer",
        "doc_to_choice": "choices",
        "num_fewshot": 1,
        "fewshot_split": "test",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    rolling = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    }
    writing = {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["j"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match"}],
    }
    configs = {"choice": choice, "letter": choice, "rolling": rolling, "writing": writing}
    for name, rows in task_documents().items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        configs[name] = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(path)}},
            "test_split": "test",
            **configs[name],
        }
    return configs


def save_model_and_tokenizer(folder: Path, padding_side: str = "left", **fields) -> str:
    tiny_model(**{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **fields}).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = padding_side
    tokenizer.save_pretrained(folder)
    return str(folder)


class AnsweringModel(LM):
    """A model that finds answers with a function of the context, or scores all alike; a byte costs 8 bits."""

    def __init__(self, answer=None):
        super().__init__()
        self.answer = answer

    def loglikelihood(self, requests):
        return [(self.score(*request.args), False) for request in requests]

    def score(self, context: str, continuation: str) -> float:
        return 0.0 if self.answer and continuation.strip() == self.answer(context) else -1.0

    def loglikelihood_rolling(self, requests):
        return [-math.log(256) * len(request.args[0].encode()) for request in requests]

    def generate_until(self, requests):
        return [f" {self.answer(request.args[0])} 7 =" for request in requests]
