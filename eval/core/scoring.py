"""Prompts and scores of CORE: prompts of the bundle, and the answer with the least mean cross-entropy."""

from typing import NamedTuple

import torch

from looped_eval.common.model_folder import start_token
from looped_eval.harness.looped_lm import LoopedLM

from .bundle import CoreTask


class Request(NamedTuple):
    """A request to score the tokens `asked` after the tokens `given`."""

    given: list[int]
    asked: list[int]


def prompts(task: CoreTask, index: int) -> list[str]:
    """Return a prompt for each choice or context; for language modelling, one without the answer and one with it."""
    item, delimiter = task.items[index], task.delimiter
    shots = "".join(answered(task.kind, shot, delimiter) + "\n\n" for shot in task.shots(index))
    if task.kind == "multiple_choice":
        return [shots + item["query"] + delimiter + choice for choice in item["choices"]]
    if task.kind == "schema":
        return [shots + context + delimiter + item["continuation"] for context in item["context_options"]]
    question = shots + item["context"].strip() + delimiter
    # a space at the end may belong to the first token of the answer
    return [question.strip(), question + item["continuation"]]


def answered(kind: str, item: dict, delimiter: str) -> str:
    if kind == "multiple_choice":
        return item["query"] + delimiter + item["choices"][item["gold"]]
    if kind == "schema":
        return item["context_options"][item["gold"]] + delimiter + item["continuation"]
    return item["context"].strip() + delimiter + item["continuation"]


def common_length(first: list[int], *others: list[int]) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(first), *map(len, others)) if others else len(first)
    return next((i for i in range(length) if any(other[i] != first[i] for other in others)), length)


def requests_of(kind: str, tokens: list[list[int]]) -> list[Request]:
    """Return the requests of one item: the tokens of its prompts, each split into given and scored tokens.

    For choices, the tokens after the common prefix of all prompts are scored; in a schema, the common suffix. In
    language modelling the first prompt lacks the answer, and the additional tokens of the second are scored.
    """
    if kind == "schema":
        length = common_length(*[row[::-1] for row in tokens])
        starts = [len(row) - length for row in tokens]
    else:
        starts = [common_length(*tokens)] * len(tokens)
    if kind == "language_modeling":
        tokens, starts = tokens[1:], starts[1:]
    # at least one token is given and one is scored, even if one choice is a prefix of another
    starts = [min(max(start, 1), len(row) - 1) for start, row in zip(starts, tokens)]
    return [Request(row[:start], row[start:]) for start, row in zip(starts, tokens)]


def score(lm: LoopedLM, requests: list[Request]) -> torch.Tensor:
    """Return the mean cross-entropy of scored tokens, and how many of them are not the likeliest token, as
    [depths, 2, requests]."""
    sums = torch.zeros(len(lm.depths), 3, len(requests), dtype=torch.float64)
    mine = slice(lm.rank, None, lm.world_size)
    sums[:, :, mine] = lm.score_tokens([("", *request) for request in requests[mine]])
    if lm.world_size > 1:
        sums = lm.accelerator.reduce(sums.to(lm.device), reduction="sum").cpu()
    lengths = torch.tensor([len(request.asked) for request in requests])
    return torch.stack([-sums[:, 0] / lengths, sums[:, 1]], dim=1)


def accuracies(lm: LoopedLM, task: CoreTask) -> list[float]:
    """Return the accuracy on one task at each depth; nan if the model gives no numbers for an item."""
    tokenizer, start = lm.tokenizer, start_token(lm.tokenizer)
    of_items = []
    for index in range(len(task.items)):
        tokens = [[start, *tokenizer(text, add_special_tokens=False)["input_ids"]] for text in prompts(task, index)]
        of_items.append(requests_of(task.kind, tokens))
    scores = score(lm, [request for requests in of_items for request in requests])
    right = torch.zeros(len(lm.depths), dtype=torch.float64)
    for item, of_item in zip(task.items, scores.split([len(requests) for requests in of_items], dim=-1)):
        losses, misses = of_item.unbind(1)
        is_right = (misses[:, 0] == 0) if task.kind == "language_modeling" else (losses.argmin(-1) == item["gold"])
        right += torch.where(losses.isnan().any(-1), torch.nan, is_right.double())  # argmin takes nan for the least
    return (right / len(task.items)).tolist()
