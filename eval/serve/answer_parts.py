"""An answer from its tokens: the same text and parts, whether it comes at once or as a stream."""

import re
from collections.abc import Iterable
from itertools import chain

import torch
from transformers.cli.serving.utils import ToolCall, response_events_to_chunks
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.generation import StoppingCriteria
from transformers.utils import logging
from transformers.utils.chat_parsing import ResponseParser

from looped_eval.common.text_of_tokens import INCOMPLETE, TextOfTokens

from .stop_texts import StopTexts, decode


logger = logging.get_logger(__name__)

BYTE_OF_LETTER = {letter: byte for byte, letter in bytes_to_unicode().items()}  # in names of byte-level tokens
# what a parser of answers raises at a text that its template does not foresee
WRITTEN_WRONGLY = (ValueError, TypeError, LookupError, AttributeError, RuntimeError)


def bytes_of_token(tokenizer, token: int) -> bytes | None:
    """Return the bytes that a token stands for behind others, or None where its name does not tell them."""
    text, name = decode(tokenizer, [token]), tokenizer.convert_ids_to_tokens(token)
    if INCOMPLETE not in text:
        return decode(tokenizer, [token, token]).removeprefix(text).encode()  # with the space before it
    if name == INCOMPLETE:
        return name.encode()
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", name):
        return bytes([int(name[1:-1], 16)])
    return bytes(BYTE_OF_LETTER[letter] for letter in name) if BYTE_OF_LETTER.keys() >= {*name} else None


class AnswerParts:
    """Reads the tokens of an answer, up to its first stop text, into texts, thoughts and tool calls.

    most_calls: how many tool calls are told; None: all. An answer whose only content is calls that are not told has
    their text as its content.
    begin: how an answer begins that has parts; any other is one text, without the tokens `ends`. None: all have them.
    """

    def __init__(
        self,
        text: TextOfTokens,
        stops: StopTexts,
        parser=None,
        most_calls: int | None = None,
        begin: str | None = None,
        ends: Iterable[int] = (),
    ):
        self.text, self.stops, self.parser, self.most_calls = text, stops, parser, most_calls
        self.begin, self.ends, self.waiting = begin, ends, ""
        self.held: dict[str, str] = {}  # white space at the end of each field that has begun
        self.num_calls, self.has_text, self.text_of_calls = 0, False, ""

    def put(self, token: int) -> list[str | ToolCall]:
        return self.read(self.text.add(token))

    def end(self) -> list[str | ToolCall]:
        return self.read(self.text.end(), is_last=True)

    def whole(self, tokens: list[int]) -> list[str | ToolCall]:
        return [*chain.from_iterable(map(self.put, tokens)), *self.end()]

    def read(self, text: str, is_last: bool = False) -> list[str | ToolCall]:
        text = self.stops.before(text, is_last)
        if self.parser is not None and self.begin is not None:
            text = self.since_begin(text, is_last)
        if self.parser is None:
            return [text] if text else []
        events, is_read = [], False
        self.parser._buffer += text
        while not is_read:
            try:
                self.parser._process(events, eos=is_last)
                is_read = True
            except WRITTEN_WRONGLY as error:  # such a tool call is left out, not what is beside it
                warn_of_lost_call(error)
                self.parser._reset_to_implicit()
        told = [*filter(self.is_told, chain.from_iterable(parts_of(self.stripped(event)) for event in events))]
        self.has_text |= any(type(part) is str for part in told)
        self.text_of_calls += "".join(map(text_of_call, events))
        if is_last and not self.num_calls and not self.has_text and self.text_of_calls.strip():
            told.append(self.text_of_calls.strip())
        return told

    def since_begin(self, text: str, is_last: bool) -> str:
        """Return "" until it is known whether the answer begins with `begin`, then its whole text."""
        self.waiting += text
        begun = self.waiting.lstrip()
        if not is_last and begun != self.begin and self.begin.startswith(begun):
            return ""
        if not begun.startswith(self.begin):
            self.parser = None
            self.text.skipped.update(self.ends)
        self.begin = None
        return self.waiting

    def is_told(self, part: str | ToolCall) -> bool:
        if not isinstance(part, ToolCall):
            return True
        if self.num_calls == self.most_calls:
            return False
        self.num_calls += 1
        return True

    def stripped(self, event: dict) -> dict:
        """Return the event without white space at the beginning and end of its field, unless the template keeps it."""
        field = event["field"]
        if event["type"] != "region_chunk" or not self.parser._spec.fields[field].content_args.get("strip", True):
            return event
        text = self.held[field] + event["text"] if field in self.held else event["text"].lstrip()
        told = text.rstrip()
        if text:
            self.held[field] = text[len(told) :]
        return {**event, "text": told}


class EndsWithCall(StoppingCriteria):
    """Ends an answer, behind a prompt of `length` tokens, with its first tool call. parts: a reader of its own."""

    reads_rows_apart = True  # there is one

    def __init__(self, parts: AnswerParts, length: int):
        self.parts, self.read = parts, length

    def __call__(self, input_ids, scores, **kwargs):
        for token in input_ids[0, self.read :].tolist():
            self.parts.put(token)
        self.read = input_ids.shape[1]
        return torch.tensor([self.parts.num_calls > 0], device=input_ids.device)


def parser_behind(tokenizer, prompt: list[int]) -> ResponseParser | None:
    """Return what parts an answer to this prompt, or None where the tokenizer has no template for it."""
    template = getattr(tokenizer, "response_template", None)
    return None if template is None else ResponseParser(template, prefix=tokenizer.decode(prompt))


def text_of_call(event: dict) -> str:
    return event["text"] if event["type"] == "region_chunk" and event["field"] == "tool_calls" else ""


def parts_of(event: dict) -> list[str | ToolCall]:
    if isinstance(calls := event.get("value"), list) and event.get("field") == "tool_calls":  # of one region
        return [part for call in calls for part in parts_of({**event, "value": call})]
    try:
        return response_events_to_chunks([event])
    except WRITTEN_WRONGLY as error:  # a tool call without a name or arguments
        warn_of_lost_call(error)
        return []


def warn_of_lost_call(error: Exception):
    said = str(error.args[0] if error.args else "")
    reason = re.match(r"(transform placeholder '\{[^']*\}')?[^'\"\n]*", said)[0]  # what follows may quote the answer
    reason = re.split(r"\. Available| at position", reason)[0]
    logger.warning_once(
        "A tool call was left out of an answer: it is cut off or badly formed, or the response_template of the "
        f"tokenizer is wrong ({type(error).__name__}: {reason})."
    )
