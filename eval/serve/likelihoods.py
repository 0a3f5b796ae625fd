"""Log-probabilities of tokens, in the formats that OpenAI's clients read."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from looped_eval.common.text_of_tokens import INCOMPLETE, TextOfTokens

from .answer_parts import bytes_of_token


LEAST = -9999.0  # OpenAI's value for impossible tokens: JSON has no infinity


class Likelihood(NamedTuple):
    """Log-probability of one token by the model alone, before temperature, biases and penalties."""

    text: str  # that the token adds
    own: bytes | None  # of the token, which may be a part of a character; None: not known
    logprob: float | None  # None: the first token of a prompt, which is not predicted
    best: list[tuple[str, bytes | None, float]]  # the likeliest tokens at its position

    @property
    def begins_a_character(self) -> bool:
        """Whether its text comes with a later token."""
        return not self.text and bool(self.own)


class Foretold(NamedTuple):
    """What is kept of the logits at one position: a whole vocabulary of them for every token would fill the memory."""

    token: int
    logprob: float | None
    best: list[tuple[int, float]]  # the likeliest tokens


def foretold(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[Foretold]:
    """Return what `logits` [tokens, vocabulary] say of the tokens that they predict. count: tokens in `best`."""
    log_probabilities = logits.float().log_softmax(-1).clamp_(min=LEAST)
    chosen = log_probabilities.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best = log_probabilities.topk(min(count, logits.shape[-1]))
    pairs = [list(zip(*each)) for each in zip(best.indices.tolist(), best.values.tolist())]
    return [*map(Foretold, tokens, chosen, pairs)]


def likelihoods(tokenizer, ids: list[int], said: list[Foretold], prompt_texts: Sequence[str] = ()) -> list[Likelihood]:
    """Return one per token of the end of `ids`, of which `said` tells. prompt_texts: of the first of these tokens."""
    found, texts = [], TextOfTokens(tokenizer, ids[: len(ids) - len(said)])
    for i, each in enumerate(said, start=1):
        is_part = texts.is_in_a_character()
        told = {token: named(texts, token, is_part) for token in (each.token, *(token for token, _ in each.best))}
        own = b"" if each.token in texts.skipped else told[each.token][1]
        text = texts.add(each.token) + (texts.end() if i == len(said) else "")
        text = prompt_texts[i - 1] if i <= len(prompt_texts) else text
        told[each.token] = text, own
        best = [(*told[token], value) for token, value in each.best]
        found.append(Likelihood(text, own, each.logprob, best))
    return found


def named(texts: TextOfTokens, token: int, is_part: bool) -> tuple[str, bytes | None]:
    """Return the text and bytes of a token that could come next. OpenAI's servers write the bytes of an incomplete
    character. is_part: the tokens before it begin a character."""
    text = texts.would_add(token)
    own = bytes_of_token(texts.tokenizer, token) if is_part or INCOMPLETE in text else text.encode()
    if INCOMPLETE not in text or own is None:
        return text, own
    try:
        return own.decode(), own
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own), own


def pieces(tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds: an empty text until a character is complete."""
    return [*map(TextOfTokens(tokenizer).add, ids)]


def parts_of_prompt(tokenizer, prompt: str) -> list[str]:
    """Return the part of a prompt that each token stands for, also special ones; joined, they are the prompt."""
    texts = pieces(tokenizer, tokenizer(prompt).input_ids)
    if "".join(texts) == prompt:
        return texts
    if not tokenizer.is_fast:
        raise ValueError(
            f"a {type(tokenizer).__name__} does not tell where the tokens of this prompt stand in its text, as "
            "logprobs with echo do: write it without special tokens, or pass its tokens as prompt"
        )
    spans = tokenizer(prompt, return_offsets_mapping=True).offset_mapping
    ends = accumulate((end for _, end in spans), max, initial=0)  # of the tokens before each
    texts, limit = [], len(prompt)
    for (begin, end), end_before in reversed([*zip(spans, ends)]):
        cut = min(begin, end_before, limit) if end > 0 else limit  # (0, 0): the tokenizer added this token
        texts.append(prompt[cut:limit])
        limit = cut
    return texts[::-1]


def of_completion(found: list[Likelihood]) -> dict:
    *offsets, _ = accumulate((len(each.text) for each in found), initial=0)
    return {
        "tokens": [each.text for each in found],
        "token_logprobs": [each.logprob for each in found],
        "top_logprobs": [of_likeliest(each) for each in found],
        "text_offset": offsets,
    }


def of_likeliest(one: Likelihood) -> dict[str, float] | None:
    """Return {text: log-probability}, including the token itself; of tokens with equal texts the larger one counts."""
    if one.logprob is None:
        return None
    pairs = [*((text, logprob) for text, _, logprob in one.best), (one.text, one.logprob)]
    return dict(sorted(pairs, key=lambda pair: pair[1]))


def of_chat(found: list[Likelihood]) -> dict:
    def told(text: str, own: bytes | None, logprob: float | None) -> dict:
        return {"token": text, "logprob": logprob, "bytes": None if own is None else list(own)}

    return {
        "content": [
            {**told(each.text, each.own, each.logprob), "top_logprobs": [told(*other) for other in each.best]}
            for each in found
        ]
    }
