"""Answers of a given form: a processor of logits that allows only tokens with which the text can still have it."""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from transformers import LogitsProcessor
from transformers.generation.configuration_utils import GenerationMode


try:
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer
except ImportError:
    LLMatcher = None

KINDS = ("text", "json_object", "json_schema")
# a space, or a line and its indentation: a model that repeats itself could fill the answer with white space
JSON_TEXT = {"whitespace_pattern": r" |\n[ \t]{0,16}"}
# where only one text can follow, its tokens are not set by the tokenizer, which may turn it into another text, with a
# space before it or in lower case, or into a special token
GRAMMAR = '%llguidance {"no_forcing": true}\nstart: '
CHOOSES_ONE_TOKEN = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)  # and never takes one back


@dataclass(frozen=True)
class Form:
    """What an answer must be."""

    field: str  # of the request, which asks for it
    matcher: Any  # of an answer that is to begin
    begin: str | None = None  # of a tool call, where it may be one
    example: str = ""  # of a tool call without arguments

    @property
    def may_call(self) -> bool:
        return self.begin is not None


def schema_of(response_format: Any) -> dict | None:
    """Return the JSON schema that the field of a request asks for, or None if any text will do."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind not in KINDS:
        raise ValueError(f"response_format={response_format!r} must be an object whose type is {', '.join(KINDS)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        form = '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
        raise ValueError(f"response_format={response_format!r} must have the form {form}")
    return schema


class KeepsToForm(LogitsProcessor):
    """Of one row, behind a prompt of `length` tokens. field: see `Form`."""

    def __init__(self, matcher, length: int, field: str = "response_format"):
        self.matcher, self.read, self.field = matcher, length, field

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.matcher.consume_tokens(input_ids[0, self.read :].tolist())
        self.read = input_ids.shape[1]
        allowed = self.matcher.compute_logit_bias()  # a byte for each token, 0 for those that do not go on
        if self.matcher.is_error():
            raise ValueError(f"{self.field} has a schema too large to keep: {reason(self.matcher)}")
        allowed = torch.frombuffer(bytearray(allowed), dtype=torch.uint8).to(scores.device)
        scores = scores.masked_fill(allowed == 0, -torch.inf)
        if scores.isneginf().all():
            raise ValueError(
                f"generation_config forbids all tokens with which the answer keeps to {self.field}: leave out what "
                "forbids tokens there, such as min_new_tokens or suppress_tokens"
            )
        return scores


def keeps_to_form(form: Form, model, generation_config, length: int) -> KeepsToForm:
    """Return the processor of one answer; raise if its form cannot be kept. generation_config: a prepared one."""
    if (mode := generation_config.get_generation_mode()) not in CHOOSES_ONE_TOKEN:
        raise ValueError(f"{form.field} does not go with {mode.value.replace('_', ' ')}: leave one out")
    if (drafts := generation_config.depth_options.draft_loops) is not None:
        raise ValueError(f"{form.field} does not go with draft_loops={drafts!r}: leave one out")
    ends, own = generation_config.eos_token_id, model.generation_config.eos_token_id
    if ends != own:
        raise ValueError(f"{form.field} goes with the model's own eos_token_id={own}, not with {ends}: leave it out")
    return KeepsToForm(form.matcher.deep_copy(), length, form.field)


def form_of_schema(schema: dict, words) -> Form:
    try:
        return Form("response_format", matcher_of_rule(json_rule(schema), words))
    except ValueError as error:
        raise ValueError(f"response_format has {error}") from error


def vocabulary(tokenizer, model):
    """Return the tokens as llguidance reads them. For many it takes seconds in which no request is answered, so the
    server asks for it once when it starts."""
    if LLMatcher is None:
        raise ValueError("a form of the answer is not served here: it needs the package llguidance")
    ends = model.generation_config.eos_token_id
    return words_of(tokenizer, model.config.vocab_size, tuple(ends) if isinstance(ends, list) else (ends,))


def json_rule(schema: dict) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_TEXT})}"


@lru_cache(maxsize=32)  # large schemas take seconds
def matcher_of_rule(rule: str, words):
    """Return the matcher of answers of which this rule of a grammar is the whole; raise if it cannot be kept."""
    matcher = LLMatcher(words, LLMatcher.grammar_from_lark(GRAMMAR + rule), log_level=0)
    first = matcher.deep_copy()
    first.compute_logit_bias()  # where some schemas fail
    for each in (matcher, first):
        if each.is_error():
            raise ValueError(f"a schema that cannot be kept: {reason(each)}")
    return matcher


def reason(matcher) -> str:
    said = matcher.get_error().split("\n<state>")[0]  # of its parser
    said = said.rpartition("failed to compile JSON schema: ")[2].split("\n   1 | ")[0]  # without the lines of GRAMMAR
    return "it refers to itself alone" if said == "NoExtensionBias" else said


@lru_cache(maxsize=2)
def words_of(tokenizer, vocab_size: int, ends: tuple[int | None, ...]):
    if not all(end is not None and 0 <= end < vocab_size for end in ends):
        raise ValueError(f"a form of the answer needs a token that ends it, and eos_token_id is {ends[0]}")
    try:
        return from_tokenizer(tokenizer, vocab_size, list(ends))
    except ValueError as error:
        raise ValueError(f"a form of the answer does not go with this model's tokenizer: {error}") from error
