"""Stop texts: an answer ends before the first of them, as OpenAI's clients expect."""

import torch
from transformers.generation import StoppingCriteria


LETTERS = "abcdef"  # decoded before an end of an answer, since tokenizers drop a space at the beginning of a text


class StopsInAnswer(StoppingCriteria):
    """Searches stop texts in the answer only: the end of the prompt cannot be the beginning of one.

    It ends the tokens that StopStringCriteria of transformers ends, but decodes their end. That class first compares
    the texts with the whole vocabulary, which takes seconds, and a minute if they are many.

    begins_a_text: the answer does not go on from the prompt, so its first space may be dropped, as in a conversation.
    """

    reads_rows_apart = True

    def __init__(self, tokenizer, texts: str | list[str], prompt_length: int, begins_a_text: bool = False):
        self.tokenizer, self.prompt_length, self.begins_a_text = tokenizer, prompt_length, begins_a_text
        self.texts = [texts] if isinstance(texts, str) else texts
        most = max(len(text.encode()) for text in self.texts)  # each token has one byte or more
        self.sizes = range(most, most + 4)  # where tokens are bytes, one of these ends begins with a whole character
        self.letters = tokenizer(LETTERS, add_special_tokens=False).input_ids

    def __call__(self, input_ids, scores, **kwargs):
        answers = input_ids[:, self.prompt_length :][:, -self.sizes[-1] - 1 :].tolist()
        return torch.tensor([*map(self.is_met, answers)], device=input_ids.device)

    def is_met(self, tokens: list[int]) -> bool:
        ends = [self.end(tokens, size) for size in self.sizes]
        return any(text in end for text in self.texts for end in ends)

    def end(self, tokens: list[int], size: int) -> str:
        if self.begins_a_text and len(tokens) <= size:
            return decode(self.tokenizer, tokens)
        return decode(self.tokenizer, [*self.letters, *tokens[-size:]]).partition(LETTERS)[2]


def decode(tokenizer, tokens: list[int]) -> str:
    """Return the text of tokens as it stands in them: with special tokens, and spaces as they are."""
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class StopTexts:
    """Reads an answer part by part, and holds back an end that may be the beginning of a stop text."""

    def __init__(self, texts: str | list[str] | None):
        self.texts = [texts] if isinstance(texts, str) else list(texts or ())
        self.held, self.is_met = "", False

    def before(self, part: str, is_last: bool) -> str:
        """Return the text that can be sent now."""
        if self.is_met:
            return ""
        text = self.held + part
        places = [text.index(stop) for stop in self.texts if stop in text]
        if places:
            self.is_met = True
            return text[: min(places)]
        held = 0 if is_last else max((begun(stop, text) for stop in self.texts), default=0)
        told, self.held = text[: len(text) - held], text[len(text) - held :]
        return told


def begun(stop: str, text: str) -> int:
    """Return with how many first characters of `stop`, but not all of them, the text ends."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
