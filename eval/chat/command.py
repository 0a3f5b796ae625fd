"""A conversation with a model, or completion of single prompts."""

import sys
from contextlib import suppress

import torch
from transformers import TextStreamer

from looped_eval.common.findings import loops_in_words
from looped_eval.common.model_folder import loops_by_default, open_config, open_model, open_tokenizer
from looped_recipes.common.command_line import check_prompt
from looped_recipes.common.words import counted

from .options import parse


class Conversation:
    def __init__(self, model, tokenizer, settings: dict, system: str | None = None):
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.answers_in_turns = bool(tokenizer.chat_template)
        if system and not self.answers_in_turns:
            raise ValueError("--system needs a tokenizer with a chat template, and this model's has none")
        check_prompt(system or "")
        self.turns = [{"role": "system", "content": system}] if system else []

    def ids_of(self, text: str) -> dict[str, torch.Tensor]:
        if not self.answers_in_turns:
            return self.tokenizer(text, return_tensors="pt").to(self.model.device)
        self.turns.append({"role": "user", "content": text})
        return self.tokenizer.apply_chat_template(
            self.turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self.model.device)

    def room_after(self, prompt: dict[str, torch.Tensor]) -> int:
        """Return how many new tokens fit after a prompt. The last one needs no position, because it is not read."""
        return self.model.config.max_position_embeddings + 1 - prompt["input_ids"].shape[1]

    def prompt_of(self, text: str) -> dict[str, torch.Tensor]:
        """Tokenize a text with as many earlier turns as fit. The answer needs room for its maximum length, but at most
        for half of the positions."""
        check_prompt(text)
        prompt, first = self.ids_of(text), 1 if self.turns and self.turns[0]["role"] == "system" else 0
        forgotten, wanted = 0, min(self.settings["max_new_tokens"], self.model.config.max_position_embeddings // 2)
        while self.room_after(prompt) < wanted and len(self.turns) > first + 2:
            del self.turns[first : first + 2]  # a question and its answer
            forgotten += 1
            self.turns.pop()  # the current question, which ids_of adds again
            prompt = self.ids_of(text)
        if self.room_after(prompt) < 1:
            raise ValueError(
                f"{prompt['input_ids'].shape[1]} tokens are more than the max_position_embeddings="
                f"{self.model.config.max_position_embeddings} that this model reads: write less"
            )
        if forgotten:
            print(f"[{counted(forgotten, 'turn')} of the beginning left out: no more room]")
        return prompt

    def answer(self, text: str) -> tuple[str, float]:
        """Print the answer while it is generated; return it and the mean loops of its tokens."""
        prompt = self.prompt_of(text)
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        settings = {**self.settings, "max_new_tokens": min(self.settings["max_new_tokens"], self.room_after(prompt))}
        outputs = self.model.generate(**prompt, **settings, streamer=streamer, return_dict_in_generate=True)
        written = self.tokenizer.decode(outputs.sequences[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        if self.answers_in_turns:
            self.turns.append({"role": "assistant", "content": written})
        return written, outputs.token_loops.double().mean().item()


def lines_of_terminal():
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401  `input` then takes lines of any length, which a terminal cuts at 4,095 bytes
    with suppress(EOFError):
        while True:
            yield input("\n> ")


def prompts_of(terminal):
    for line in lines_of_terminal() if terminal.isatty() else terminal:
        if line.strip():
            yield line.rstrip("\n")


def answer_and_go_on(conversation: Conversation, prompt: str, in_terminal: bool) -> float | None:
    """Return the mean loops of an answer. In a terminal, a prompt that is refused and an answer that Ctrl-C ends leave
    the conversation as it was, and None is returned."""
    turns = list(conversation.turns)
    try:
        return conversation.answer(prompt)[1]
    except (ValueError, KeyboardInterrupt) as error:
        if not in_terminal:
            raise
        conversation.turns = turns
        print(f"error: {error}" if isinstance(error, ValueError) else "\n[ended: this turn is left out]")
        return None


def main(arguments: list[str] | None = None):
    args = parse(arguments)
    if args.max_new_tokens < 1 or args.temperature < 0:
        raise ValueError(
            f"--max-new-tokens must be at least 1 and --temperature at least 0, got {args.max_new_tokens} and "
            f"{args.temperature}"
        )
    folder, config = open_config(args.model)
    tokenizer = open_tokenizer(folder, args.tokenizer, config)
    model = open_model(folder, args, dtype=args.dtype)
    names = ("num_loops", "exit_criterion", "exit_threshold", "min_loops")
    settings = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.exit_criterion == "none":  # switches off the criterion that was saved with the model
        settings["exit_criterion"] = None
    if args.num_loops is not None or args.exit_criterion not in (None, "none"):
        settings["draft_loops"] = None  # drafts that were saved with the model change no text, and may not go with it
    settings |= {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
    if args.temperature > 0:
        settings["temperature"] = args.temperature
    if args.seed is not None:
        torch.manual_seed(args.seed)
    full = args.num_loops or loops_by_default(model)
    conversation = Conversation(model, tokenizer, settings, args.system)
    if in_terminal := not args.prompt and sys.stdin.isatty():
        how = "answers in turns" if conversation.answers_in_turns else "was trained on no chats: it completes text"
        print(f"{folder} {how}, with {full} loops at most; Ctrl-D ends")
    for prompt in [" ".join(args.prompt)] if args.prompt else prompts_of(sys.stdin):
        loops = answer_and_go_on(conversation, prompt, in_terminal)
        if loops is not None:
            print(f"[{loops_in_words(loops, full, ' a token')}]")
