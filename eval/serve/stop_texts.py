"""Stop texts: an answer ends before the first of them, as OpenAI's clients expect."""

from transformers.generation.stopping_criteria import StopStringCriteria


class StopsInAnswer(StopStringCriteria):
    """Searches stop texts in the answer only: the end of the prompt cannot be the beginning of one."""

    reads_rows_apart = True

    def __init__(self, tokenizer, texts: str | list[str], prompt_length: int):
        super().__init__(tokenizer, texts)
        self.prompt_length = prompt_length

    def __call__(self, input_ids, scores, **kwargs):
        return super().__call__(input_ids[:, self.prompt_length :], scores, **kwargs)


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

    def shorten(self, choice: dict, is_last: bool):
        """Cut the text of a choice in OpenAI's format, of a whole answer or of a part of one."""
        holder, name = (choice, "text")
        for of_chat in ("message", "delta"):
            if of_chat in choice:
                holder, name = choice[of_chat], "content"
        if (text := self.before(holder.get(name) or "", is_last)) or name in holder:
            holder[name] = text
        if self.is_met and choice.get("finish_reason") == "length":  # its last allowed token completes it
            choice["finish_reason"] = "stop"


def begun(stop: str, text: str) -> int:
    """Return with how many first characters of `stop`, but not all of them, the text ends."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
