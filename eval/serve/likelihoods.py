"""Log-probabilities of tokens, in the forms in which OpenAI's clients read them."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from tokenizers.decoders import DecodeStream


LEAST = -9999.0  # what OpenAI tells of a token that cannot come: JSON has no infinity


class Likelihood(NamedTuple):
    """Of one token, by the model itself: before temperature, biases and penalties."""

    text: str  # what it adds to the text
    logprob: float | None  # None: the first token of a prompt, which nothing foretells
    best: list[tuple[str, float]]  # the likeliest tokens in its place


def likelihoods(tokenizer, ids: list[int], logits: torch.Tensor, count: int) -> list[Likelihood]:
    """Of the last tokens of a text, each foretold by its row of logits [tokens, vocabulary]; `count` beside it."""
    told = ids[-len(logits) :]
    log_probabilities = logits.float().log_softmax(-1).clamp(min=LEAST)
    chosen = log_probabilities.gather(1, torch.tensor(told, device=logits.device)[:, None])[:, 0].tolist()
    best = log_probabilities.topk(min(count, logits.shape[-1]))
    texts, found = pieces(tokenizer, ids)[-len(told) :], []
    for token, text, own, others, values in zip(told, texts, chosen, best.indices.tolist(), best.values.tolist()):
        written = [text if other == token else tokenizer.decode(other) for other in others]
        found.append(Likelihood(text, own, list(zip(written, values))))
    return found


def pieces(tokenizer, ids: Sequence[int]) -> list[str]:
    """What every token adds to the text: nothing as long as a character is not whole."""
    stream = DecodeStream([], skip_special_tokens=True)
    return [stream.step(tokenizer._tokenizer, token) or "" for token in ids]


def of_completion(found: list[Likelihood]) -> dict:
    *offsets, _ = accumulate((len(each.text) for each in found), initial=0)
    return {
        "tokens": [each.text for each in found],
        "token_logprobs": [each.logprob for each in found],
        "top_logprobs": [of_likeliest(each) for each in found],
        "text_offset": offsets,
    }


def of_likeliest(one: Likelihood) -> dict[str, float] | None:
    """By text, the larger number where tokens are written alike; the token itself is among them."""
    if one.logprob is None:
        return None
    return dict(sorted([*one.best, (one.text, one.logprob)], key=lambda pair: pair[1]))


def of_chat(found: list[Likelihood]) -> dict:
    def told(text: str, logprob: float | None) -> dict:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {
        "content": [
            {**told(each.text, each.logprob), "top_logprobs": [told(*other) for other in each.best]} for each in found
        ]
    }
