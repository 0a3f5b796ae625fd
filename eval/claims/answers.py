"""Accuracy on generated tasks after every loop, and the loops after which questions exit (read by depth.py)."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from looped_eval.halting.calibration import exit_loops
from looped_eval.tasks.generators import addition_question, p_hop_question, permutation_question, row_question
from modeling_looped.exit_criteria import ExitRule


QUESTIONS = 252  # of each difficulty
CERTAINTY = 0.9  # a question exits once every word of its answer has this probability
LEVELS = (1, 2, 3, 4)
# task -> (name of its difficulty, levels of difficulty, function that makes question `number` at `level`)
TASKS: dict[str, tuple[str, tuple[int, ...], Callable[[int, int], dict]]] = {
    "p_hop": ("hops", LEVELS, p_hop_question),
    "permutation": ("swaps", LEVELS, permutation_question),
    "addition": ("digits", (8,), addition_question),
    "row": ("moves", (1, 2, 3), row_question),
}


@torch.no_grad()
def answer(model, tokenizer, asked: list[dict]) -> dict:
    """Return the share of right answers after every loop, the mean loops until every word is certain, and the share of
    right answers at that exit. All questions must be equally long; an answer is right if all its words are, each
    predicted with the right words before it."""
    right = [question["choices"][question["answer"]] for question in asked]
    text = [f"{question['text']} {words}" for question, words in zip(asked, right)]
    ids = tokenizer(text, return_tensors="pt").input_ids
    count = len(tokenizer(asked[0]["text"]).input_ids)
    outputs = model(input_ids=ids, output_loop_logits=True, use_cache=False)
    rule = ExitRule("max_prob", CERTAINTY).checked(model.config)
    answers = [logits[:, count - 1 : -1] for logits in outputs.loop_logits]
    correct = [(logits.argmax(-1) == ids[:, count:]).all(1) for logits in answers]
    least_certain = [rule.criterion.score(logits, {})[0].amin(1) for logits in answers]
    exits = exit_loops(rule, torch.stack(least_certain))
    at_exit = torch.stack(correct)[exits - 1, torch.arange(len(asked))]
    return {
        "accuracy": [found.double().mean().item() for found in correct],
        "exit_loops": exits.double().mean().item(),
        "exit_accuracy": at_exit.double().mean().item(),
    }


def answers(folder: Path, task: str, systems: tuple[str, ...]) -> dict:
    """Measure every system that was trained in the folder at each difficulty."""
    harder, levels, question = TASKS[task]
    found = {}
    for system in systems:
        model = AutoModelForCausalLM.from_pretrained(folder / system / "final").eval()
        tokenizer = AutoTokenizer.from_pretrained(folder / system / "final")
        asked = {level: [question(number, level) for number in range(QUESTIONS)] for level in levels}
        found[system] = {str(level): answer(model, tokenizer, questions) for level, questions in asked.items()}
    return {"task": task, "harder": harder, "questions": QUESTIONS, "certainty": CERTAINTY, "systems": found}
