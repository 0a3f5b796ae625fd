"""Accuracy on generated tasks after every loop, and the loops after which questions exit (read by depth.py)."""

from collections.abc import Callable
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from looped_eval.tasks.answering import CERTAINTY, QUESTIONS, answer
from looped_eval.tasks.generators import addition_question, p_hop_question, permutation_question, row_question


LEVELS = (1, 2, 3, 4)
# task -> (name of its difficulty, levels of difficulty, function that makes question `number` at `level`)
TASKS: dict[str, tuple[str, tuple[int, ...], Callable[[int, int], dict]]] = {
    "p_hop": ("hops", LEVELS, p_hop_question),
    "permutation": ("swaps", LEVELS, permutation_question),
    "addition": ("digits", (8,), addition_question),
    "row": ("moves", (1, 2, 3), row_question),
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
