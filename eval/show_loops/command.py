"""Show how many loops a model runs for each token, as a page."""

import os
import sys
from pathlib import Path

import torch
from transformers import GenerationConfig

from looped_eval.common.findings import loops_in_words
from looped_eval.common.model_folder import open_config, open_model, open_tokenizer
from looped_eval.common.text_of_tokens import TextOfTokens
from looped_recipes.common.command_line import check_counts, check_prompt, say_result, trust_of, typed
from looped_recipes.common.files import check_file, write_whole
from looped_recipes.common.words import counted
from modeling_looped.exit_criteria import ExitRule

from .options import parse
from .page import Piece, Shown, Token, color, finding, ink, page, visible


def rule_of(args, folder: Path, config) -> ExitRule:
    """Return the exit rule of the arguments, else of generation_config.json; also set args.num_loops if it is None."""
    stored = GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None
    if args.num_loops is None:
        args.num_loops = getattr(stored, "num_loops", None) or config.num_loops
    criterion, threshold, min_loops = args.exit_criterion, args.exit_threshold, args.min_loops
    if criterion is None and getattr(stored, "exit_criterion", None):
        criterion = stored.exit_criterion
        threshold = getattr(stored, "exit_threshold", None) if threshold is None else threshold
        min_loops = getattr(stored, "min_loops", None) if min_loops is None else min_loops
    if criterion is None and threshold is not None:
        raise ValueError(f"--exit-threshold {threshold} without --exit-criterion: name one, e.g. logit_margin")
    min_loops = 1 if min_loops is None else min_loops
    return ExitRule(criterion or "kl", threshold, min_loops).checked(config, args.num_loops)


def check(args, config, prompt_length: int):
    check_counts(args, ["max_new_tokens"])
    if args.temperature < 0:
        raise ValueError(f"--temperature must be at least 0, got {args.temperature}")
    if prompt_length == 0:
        raise ValueError(f"the prompt {args.prompt!r} holds no tokens: write something to go on from")
    length = prompt_length + args.max_new_tokens
    if config.position_embedding == "learned" and length > config.max_position_embeddings:
        raise ValueError(
            f"{prompt_length} tokens of prompt and {args.max_new_tokens} new ones are more than the "
            f"max_position_embeddings={config.max_position_embeddings} that this model has learned"
        )


def write(model, ids: torch.Tensor, rule: ExitRule, args) -> tuple[list[int], list[int]]:
    """Generate; return the new tokens and the loops of each."""
    torch.manual_seed(args.seed)
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    outputs = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=args.max_new_tokens,
        num_loops=args.num_loops,
        exit_criterion=rule.name,
        exit_threshold=rule.threshold,
        min_loops=rule.min_loops,
        exit_selection="stop",
        draft_loops=None,  # that of generation_config
        return_dict_in_generate=True,
        **sampling,
    )
    return outputs.sequences[0, ids.shape[1] :].tolist(), outputs.token_loops[0].tolist()


@torch.no_grad()
def margins(model, ids: torch.Tensor, num_new: int, num_loops: int) -> list[list[float]]:
    """Return the logit margins after every loop at the positions that predict the last `num_new` tokens."""
    places = torch.arange(ids.shape[1] - num_new, ids.shape[1], device=ids.device) - 1
    states = model.model(ids, num_loops=num_loops, output_loop_readout_states=True, use_cache=False)
    best = []  # of each loop: [new, 2]
    for loop, state in enumerate(states.loop_readout_states):
        best.append(model.logits_after_loop(state[:, places], loop)[0].topk(2).values.float())
    return torch.stack([values[:, 0] - values[:, 1] for values in best], dim=1).tolist()


def split(tokenizer, prompt: list[int], new: list[int]) -> list[tuple[str, list[int]]]:
    """Split the new text into pieces, each with the indices of its tokens. Tokens that share a character are kept
    together, and so are bytes that are no character and what follows them, up to `LONGEST` tokens."""
    reader, pieces, waiting = TextOfTokens(tokenizer, prompt, skip_special_tokens=False), [], []
    for number, token in enumerate(new):
        waiting.append(number)
        text, told = reader.add(token), len(waiting) - len(reader.pending)
        if text and told > 0:
            pieces.append((text, waiting[:told]))
            waiting = waiting[told:]
    return [*pieces, (reader.end(), waiting)] if waiting else pieces


def painted(shown: Shown) -> str:
    """Return the text with ANSI colours for a terminal."""

    def paint(text: str, loops: float) -> str:
        background = color(loops, shown.num_loops)
        start = "\x1b[48;2;{};{};{};38;2;{};{};{}m".format(*background, *ink(background))
        return "\n".join(f"{start}{line}\x1b[0m" if line else "" for line in visible(text).split("\n"))

    text = "".join(paint(piece.text, piece.loops) for piece in shown.pieces)
    keys = " ".join(paint(f" {k} ", k) + f" {count}" for k, count in shown.counts().items())
    return f"\x1b[2m{visible(shown.prompt)}\x1b[0m{text}\n\nloops after the first token: {keys}"


def plain(shown: Shown) -> str:
    text = "".join(visible(piece.text) for piece in shown.pieces)
    keys = ", ".join(f"{k}: {count}" for k, count in shown.counts().items())
    return f"{visible(shown.prompt)}{text}\n\ntokens after the first by loops: {keys}"


def has_colors(stream) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def show(args) -> Shown:
    check_prompt(args.prompt)
    folder, config = open_config(args.model, args.trust_remote_code)
    rule = rule_of(args, folder, config)
    tokenizer = open_tokenizer(folder, args.tokenizer, config)
    tokenizer.clean_up_tokenization_spaces = False  # the text as it stands in its tokens
    prompt = tokenizer(args.prompt)["input_ids"]
    check(args, config, len(prompt))
    model = open_model(folder, args)
    ids = torch.tensor([prompt], device=args.device)
    new, loops = write(model, ids, rule, args)
    curves = margins(model, torch.tensor([prompt + new], device=args.device), len(new), args.num_loops)
    tokens = [Token(*pair) for pair in zip(loops, curves)]
    pieces = [Piece(text, [tokens[i] for i in numbers]) for text, numbers in split(tokenizer, prompt, new)]
    sign = "≥" if rule.criterion.exits_above else "≤"
    words = f"a token exits where {rule.name} {sign} {rule.threshold:.4g}" + (
        f", after {counted(rule.min_loops, 'loop')} at the earliest" if rule.min_loops > 1 else ""
    )
    facts = {"model": args.model, "decoding": f"temperature {args.temperature:g}" if args.temperature else "greedy"}
    threshold = rule.threshold if rule.name == "logit_margin" else None
    return Shown(args.prompt, pieces, args.num_loops, words, threshold, facts)


def main(arguments: list[str]) -> Shown:
    args = parse(arguments)
    output = Path(args.output)
    check_file(output)
    shown = show(args)
    print(painted(shown) if has_colors(sys.stdout) else plain(shown))
    write_whole(output, page(shown))
    print(f"\nthe page: {output}")
    mean = loops_in_words(shown.mean_loops, shown.num_loops)
    took = f"On average a token after the first took {mean}; {shown.rule}." if shown.later else finding(shown)
    exits = typed("looped halting", args.model, *trust_of(args))
    say_result(took, *([exits] if shown.num_loops > 1 else []))  # one loop has no exits
    return shown
