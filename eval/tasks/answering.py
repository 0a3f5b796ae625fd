"""Accuracy on generated tasks after every loop, and the loops after which questions exit."""

import torch

from looped_eval.halting.calibration import exit_loops
from modeling_looped.exit_criteria import ExitRule


QUESTIONS = 252  # of each difficulty
CERTAINTY = 0.9  # a question exits once every word of its answer has this probability


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
