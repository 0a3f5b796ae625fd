"""The task of the demo: after how many loops does the model answer a question that takes several hops?

Pairs say which symbol follows which, and a question asks for the symbol a number of hops away. Each hop needs the
result of the one before it.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from looped_eval.halting.calibration import exit_loops
from looped_eval.tasks.answering import CERTAINTY, QUESTIONS, answer
from looped_eval.tasks.generators import documents, p_hop_question
from looped_recipes.common.files import write_whole
from looped_recipes.common.words import counted
from looped_recipes.demo.training import train
from looped_recipes.settings.recipe import load_recipe
from looped_recipes.settings.sweep_files import OUTPUT
from modeling_looped.exit_criteria import ExitRule


RECIPE = Path(__file__).with_name("hops.yaml")
HOPS = [1, 2, 3, 4]
FORM = r"[a-h]{2}( [a-h]{2})* ; [a-h][1-4]"  # format of a question; other words are no tokens of the model


def train_models(output: Path, settings: Sequence[str], num_documents: int) -> tuple[Path, Path, dict]:
    """Train the looped model and the control: the same model with one loop, on the same questions."""
    questions = output / "questions.jsonl"
    if not questions.exists():
        texts = documents("p_hop", num_documents)
        write_whole(questions, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = {"data.source": str(questions), "data.cache_dir": str(output / "shards")}
    looped = train(load_recipe(RECIPE, settings, {**data, OUTPUT: str(output)}))
    one_loop = {"model.num_loops": 1, "evaluation.loops": [1], OUTPUT: str(output / "one_loop")}
    control = train(load_recipe(RECIPE, settings, {**data, **one_loop}))
    facts = {
        "parameters": looped.parameters,
        "loops": looped.loops,
        "steps": looped.steps,
        "training_flops": looped.flops,
        "control_flops": control.flops,
    }
    return looped.final, control.final, facts


class Answerer:
    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.rule = ExitRule("max_prob", CERTAINTY).checked(self.model.config)

    @torch.no_grad()
    def logits(self, questions: list[str]) -> list[torch.Tensor]:
        """Return the logits after equally long questions, for every loop of one pass: [questions, vocabulary] each."""
        inputs = self.tokenizer(questions, return_tensors="pt")
        outputs = self.model(**inputs, output_loop_logits=True, use_cache=False)
        return [logits[:, -1] for logits in outputs.loop_logits]

    def exits(self, logits: list[torch.Tensor]) -> torch.Tensor:
        """Return after how many loops each question stops: at the first certain loop, or at the last loop."""
        return exit_loops(self.rule, torch.stack([self.rule.criterion.score(of_loop, {})[0] for of_loop in logits]))

    def words(self, ids: torch.Tensor) -> list[str]:
        return [self.tokenizer.decode(i).strip() for i in ids.tolist()]

    def accuracy_and_exits(self, hops: int, count: int) -> dict:
        found = answer(self.model, self.tokenizer, [p_hop_question(number, hops) for number in range(count)])
        return {**found, "accuracy": dict(enumerate(found["accuracy"], start=1))}

    def after_each_loop(self, question: str) -> dict:
        """Return the model's answer and its probability after every loop, and the loop at which it stops."""
        logits = self.logits([question])
        best = [at.softmax(-1)[0].max(-1) for at in logits]
        return {
            "question": question,
            "answers": [[self.words(b.indices[None])[0], b.values.item()] for b in best],
            "exit": int(self.exits(logits)[0]),
        }


def unseen_question(hops: int, number: int = QUESTIONS) -> tuple[str, str]:
    """Return a question and its answer, from the split that is never trained on."""
    question = p_hop_question(number, hops)
    return question["text"], question["choices"][question["answer"]]


def measure(looped: Path, control: Path, count: int = QUESTIONS) -> dict:
    model, single = Answerer(looped), Answerer(control)
    found = {hops: model.accuracy_and_exits(hops, count) for hops in HOPS}
    question, right = unseen_question(HOPS[-1])
    return {
        "questions": count,
        "certainty": CERTAINTY,
        **{name: {hops: found[hops][name] for hops in HOPS} for name in ("accuracy", "exit_loops", "exit_accuracy")},
        "control": {hops: single.accuracy_and_exits(hops, count)["accuracy"][1] for hops in HOPS},
        "example": {"right": right, **model.after_each_loop(question)},
    }


def ask(folder: Path, question: str):
    """Print the model's answers to a question, or to one unseen question for each number of hops."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"there is no trained model in {folder}: run `looped demo` first, or name its --output")
    model = Answerer(folder)
    if question and not re.fullmatch(FORM, question):
        raise ValueError(
            f"{question!r} is not a question of this model: write which letter from a to h follows which, and one "
            "question of 1 to 4 steps, e.g. "
            "'cd fa ec bh hf ge ag db ; h2', what stands two steps after h"
        )
    # questions that are not on the page; their numbers differ, because the number determines the answer
    asked = [(question, None)] if question else [unseen_question(hops, QUESTIONS + hops) for hops in HOPS]
    for text, right in asked:
        print(f"\n{text} ?" + ("" if right is None else f"   (right: {right})"))
        said = model.after_each_loop(text)
        for loop, (word, sure) in enumerate(said["answers"], start=1):
            stops = f"   stops here, at least {CERTAINTY:.0%} sure" * (loop == said["exit"] and sure >= CERTAINTY)
            print(f"  after {counted(loop, 'loop')}: {word}  {sure:4.0%}{stops}")
