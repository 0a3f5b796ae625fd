"""The request that is answered in this context: what it asks for beyond the fields that transformers reads, and what
is known of its answer."""

import json
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from modeling_looped.depth_options import DEPTH_FIELDS, DepthOptions

from .likelihoods import Likelihood
from .request_checks import LENGTHS_OF_CONFIG, SAY_LENGTH
from .stop_texts import StopTexts


def has_length(config: str | None) -> bool:
    """Whether the JSON of a generation config, which has been checked, says how long the answer is."""
    fields = {} if config is None else json.loads(config)
    return any(fields.get(name) is not None for name in LENGTHS_OF_CONFIG)


@dataclass
class Asked:
    fields: dict[str, Any]  # of depth
    seed: int | None
    has_length: bool  # says how many tokens it wants
    has_config: bool  # a generation config of its own
    prompt: str | list[int] | None = None  # of completions
    echoes: bool = False  # the prompt comes before the answer
    is_prompt_alone: bool = False  # and there is no answer
    likeliest: int | None = None  # tokens beside the log-probability of each; None: no log-probabilities
    is_checked: bool = False  # what fails now is no fault of the request
    full_depth: int = 0
    options: DepthOptions = DepthOptions()
    loops: list[int] = field(default_factory=list)  # that its tokens have taken
    likelihoods: list[Likelihood] = field(default_factory=list)
    end_tokens: tuple[int, ...] = ()  # any of which ends the text
    has_ended: bool = False  # with one of them
    stops: StopTexts = field(default_factory=lambda: StopTexts(None))

    @classmethod
    def taken_from(cls, body: dict) -> "Asked":
        """And out of the body."""
        config, prompt = body.get("generation_config"), body.get("prompt")
        fields = {name: body.pop(name) for name in DEPTH_FIELDS if name in body}
        asked = cls(
            fields,
            seed=body.pop("seed", None),
            has_length=any(body.get(name) is not None for name in SAY_LENGTH) or has_length(config),
            has_config=config is not None,
            prompt=prompt,
            echoes=bool(body.pop("echo", False)),
            likeliest=likeliest_beside(body),
        )
        if asked.echoes and body.get("max_tokens") == 0:
            asked.is_prompt_alone, body["max_tokens"] = True, 1
        if isinstance(prompt, list):
            body["prompt"] = ""  # its tokens are put in place of those of this text
        return asked

    def note_end(self, tokens: list[int]):
        self.has_ended = bool(tokens) and tokens[-1] in self.end_tokens

    def finish(self, choice: dict, is_last: bool):
        """A choice of OpenAI's form, as it is told."""
        self.stops.shorten(choice, is_last)
        if self.has_ended and choice.get("finish_reason") == "length":  # it ended with the last token that it had
            choice["finish_reason"] = "stop"

    def likelihoods_of(self, answer: str) -> list[Likelihood]:
        """Without tokens of a text at which it stops."""
        found = list(self.likelihoods)
        too_long = sum(len(each.text) for each in found[len(found) - len(self.loops) :]) - len(answer)
        while self.stops.is_met and too_long > 0:
            too_long -= len(found.pop().text)
        return found

    def text_of_prompt(self, tokenizer) -> str:
        return (
            tokenizer.decode(self.prompt, skip_special_tokens=True) if isinstance(self.prompt, list) else self.prompt
        )

    def fields_of_loops(self) -> dict:
        saved = 1 - sum(self.loops) / (self.full_depth * len(self.loops)) if self.loops else 0
        return {"token_loops": self.loops, "saved_percent": round(100 * saved, 1)}


def likeliest_beside(body: dict) -> int | None:
    """Completions say it by one number, conversations by two fields."""
    logprobs, top = body.pop("logprobs", None), body.pop("top_logprobs", None)
    if logprobs is None or logprobs is False:
        return None
    return (top or 0) if logprobs is True else logprobs


current_request: ContextVar[Asked] = ContextVar("asked")
