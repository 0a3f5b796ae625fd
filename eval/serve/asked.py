"""The request that the current context answers: its fields that transformers does not read, and data about its
answer."""

import json
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import LogitsProcessorList

from looped_eval.common.text_of_tokens import TextOfTokens
from modeling_looped.depth_options import DEPTH_FIELDS, DepthOptions

from .answer_parts import AnswerParts, EndsWithCall, parser_behind
from .grammars import Form
from .likelihoods import Likelihood, pieces
from .request_checks import LENGTHS_OF_CONFIG, SAY_LENGTH
from .stop_texts import StopTexts


def has_length(config: str | None) -> bool:
    """Return whether a generation config (JSON, checked before) sets the length of the answer."""
    fields = {} if config is None else json.loads(config)
    return any(fields.get(name) is not None for name in LENGTHS_OF_CONFIG)


@dataclass
class Asked:
    fields: dict[str, Any]  # depth fields
    seed: int | None
    has_length: bool  # the request sets the length of the answer
    has_config: bool  # the request has a generation_config
    most_calls: int | None = None  # tool calls that are told; None: all
    names_tool: bool = False  # tool_choice is one tool
    prompt: str | list[int] | None = None  # only in completions
    echoes: bool = False  # the prompt is returned before the answer
    is_prompt_alone: bool = False  # only the prompt is returned
    form: Form | None = None  # that the answer must have
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)  # of the scores of tokens
    likeliest: int | None = None  # number of likeliest tokens to return at each position; None: no log-probabilities
    is_checked: bool = False  # later errors are not caused by the request
    full_depth: int = 0
    options: DepthOptions = DepthOptions()
    loops: list[int] = field(default_factory=list)  # of each token of the answer
    likelihoods: list[Likelihood] = field(default_factory=list)
    end_tokens: tuple[int, ...] = ()  # each of them ends the text
    has_ended: bool = False  # with one of end_tokens
    stops: StopTexts = field(default_factory=lambda: StopTexts(None))

    @classmethod
    def taken_from(cls, body: dict, form: Form | None = None) -> "Asked":
        """Move the fields that transformers does not read from the body to a new object."""
        config, prompt = body.get("generation_config"), body.get("prompt")
        body.pop("response_format", None)  # its form is given
        fields = {name: body.pop(name) for name in DEPTH_FIELDS if name in body}
        asked = cls(
            fields,
            seed=body.pop("seed", None),
            has_length=any(body.get(name) is not None for name in SAY_LENGTH) or has_length(config),
            has_config=config is not None,
            prompt=prompt,
            echoes=bool(body.pop("echo", False)),
            form=form,
            likeliest=likeliest_beside(body),
        )
        if prompt is None:
            choice, parallel = body.pop("tool_choice", None), body.pop("parallel_tool_calls", None)
            asked.most_calls = 0 if choice == "none" else 1 if parallel is False else None
            asked.names_tool = isinstance(choice, dict)
        if asked.echoes and body.get("max_tokens") == 0:
            asked.is_prompt_alone, body["max_tokens"] = True, 1
        if isinstance(prompt, list):
            body["prompt"] = ""  # `put_tokens` replaces the tokens of this text
        return asked

    def note_end(self, tokens: list[int]):
        self.has_ended = bool(tokens) and tokens[-1] in self.end_tokens

    def parts(self, tokenizer, prompt: list[int], parser=None) -> AnswerParts:
        """Return what reads the answer: in a conversation a text of its own, else one that goes on from its prompt."""
        before = () if self.prompt is None else prompt
        text, ends = TextOfTokens(tokenizer, before, skip_special_tokens=parser is None), self.end_tokens
        if parser is not None:  # it needs those that its template names
            template = json.dumps(getattr(tokenizer, "response_template", None), ensure_ascii=False).replace("\\", "")
            ends = [end for end in ends if tokenizer.decode(end) not in template]
        text.skipped.update(ends)
        begin = None if self.form is None else self.form.begin
        return AnswerParts(text, self.stops, parser, self.most_calls, begin, self.end_tokens)

    def ends_with_call(self, tokenizer, prompt: list[int]) -> EndsWithCall | None:
        """Return what ends an answer that may have one tool call, or None where it may have more or none is read."""
        if self.most_calls != 1 or (parser := parser_behind(tokenizer, prompt)) is None:
            return None
        reader = replace(self, stops=StopTexts(self.stops.texts))
        return EndsWithCall(reader.parts(tokenizer, prompt, parser), len(prompt))

    def finish(self, choice: dict):
        """Correct the finish_reason of a choice in OpenAI's format: its last allowed token may end the text."""
        if (self.has_ended or self.stops.is_met) and choice["finish_reason"] == "length":
            choice["finish_reason"] = "stop"
        if self.names_tool and choice["finish_reason"] == "tool_calls":  # as OpenAI's servers say it
            choice["finish_reason"] = "stop"

    def likelihoods_before_stop(self) -> list[Likelihood]:
        """Return the log-probabilities without those of tokens that were cut off with a stop text."""
        begin = len(self.likelihoods) - len(self.loops)
        prompt, found = self.likelihoods[:begin], self.likelihoods[begin:]
        answer = "".join(each.text for each in found)
        too_long = len(answer) - len(StopTexts(self.stops.texts).before(answer, is_last=True))
        while found and (too_long > 0 or found[-1].begins_a_character):  # which is cut off, with nothing behind it
            too_long -= len(found.pop().text)
        return prompt + found

    def text_of_prompt(self, tokenizer) -> str:
        return "".join(pieces(tokenizer, self.prompt)) if isinstance(self.prompt, list) else self.prompt

    def fields_of_loops(self) -> dict:
        saved = 1 - sum(self.loops) / (self.full_depth * len(self.loops)) if self.loops else 0
        return {"token_loops": self.loops, "saved_percent": round(100 * saved, 1)}


def likeliest_beside(body: dict) -> int | None:
    """Remove and return the number of likeliest tokens: one number in completions, two fields in conversations."""
    logprobs, top = body.pop("logprobs", None), body.pop("top_logprobs", None)
    if logprobs is None or logprobs is False:
        return None
    return (top or 0) if logprobs is True else logprobs


current_request: ContextVar[Asked] = ContextVar("asked")
