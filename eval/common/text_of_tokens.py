"""The text of tokens that come one by one."""

from collections.abc import Sequence


INCOMPLETE = "\ufffd"  # what tokenizers write for bytes that are no character, or not yet
CONTEXT = 16  # tokens before a text whose decoding tells how it begins
CHARACTER = 4  # bytes of the longest character, so tokens at most
LONGEST = 16  # tokens that wait for a whole character: a tokenizer may have told none of so many stray bytes


class TextOfTokens:
    """Decodes tokens one by one: each has the text that it adds to those before it, or "" until a character is whole.

    before: tokens that the text follows. Without any it is a text of its own, and tokenizers drop its first space.
    """

    def __init__(self, tokenizer, before: Sequence[int] = (), skip_special_tokens: bool = True):
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.told, self.text_of_told, self.pending = [], "", []
        added = tokenizer.added_tokens_decoder.items() if skip_special_tokens else ()
        self.skipped = {number for number, token in added if token.special}
        for token in before[-CONTEXT:]:
            self.add(token)

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=self.skip_special_tokens)

    def after_told(self, tokens: list[int]) -> str:
        text = self.decode(self.told + tokens)
        if text.startswith(self.text_of_told):
            return text[len(self.text_of_told) :]
        return self.decode(tokens)  # stray bytes: some decoders write U+FFFD for those told before them, too

    def add(self, token: int) -> str:
        if token in self.skipped:
            return ""
        self.pending.append(token)
        text = self.after_told(self.pending)
        if text and not text.endswith(INCOMPLETE):
            return self.tell(len(self.pending))
        return self.tell(len(self.pending) - CHARACTER) if len(self.pending) > LONGEST else ""

    def tell(self, count: int) -> str:
        text = self.after_told(self.pending[:count])
        self.told, self.pending = self.pending[:count], self.pending[count:]
        self.text_of_told = self.decode(self.told)
        return text

    def would_add(self, token: int) -> str:
        """Return the text of a token that could come next; also of special tokens and of incomplete characters."""
        return self.after_told([*self.pending, token]) or self.tokenizer.decode(token)

    def is_in_a_character(self) -> bool:
        """Return whether the last tokens begin a character that the next one may end."""
        return bool(self.pending) and INCOMPLETE in self.after_told(self.pending)

    def end(self) -> str:
        """Return the text of tokens at the end that are no whole character."""
        return self.after_told(self.pending)
