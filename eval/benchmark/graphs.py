"""Decoding whose passes are CUDA graphs, over the same kernel by kernel, by `looped benchmark graphs`."""

import os
from unittest.mock import patch

import torch

from looped_eval.common.timing import in_turns
from modeling_looped.row_graphs import GRAPHS, RECORDED_DEVICES

from .decoding import exiting_model, passing_threshold
from .models import greedy, tokens


def graphs(args) -> dict:
    """Measure, per number of rows, plain decoding and decoding with exits."""
    if torch.device(args.device).type not in RECORDED_DEVICES:
        raise SystemExit(f"--device {args.device}: passes are graphs on {' and '.join(RECORDED_DEVICES)} alone")
    model = exiting_model(args)
    prompts = {rows: tokens(args, batch=rows, length=args.prompt) for rows in args.batch_sizes}
    return {f"rows_{rows}": of_rows(model, prompt, args) for rows, prompt in prompts.items()}


def of_rows(model, prompt: torch.Tensor, args) -> dict:
    exits = {"exit_criterion": "latent_diff", "exit_threshold": passing_threshold(model, prompt, "latent_diff")}
    settings, result = {"max_new_tokens": args.new_tokens, **greedy(prompt)}, {}
    for name, how in {"plain": {}, "exits": exits}.items():

        def decode(value: str, how=how):
            with patch.dict(os.environ, {GRAPHS: value}):
                model.generate(prompt, **settings, **how)

        with_graphs, without = in_turns(lambda: decode("1"), lambda: decode("0"), args.repeats)
        result[f"{name}_speedup"] = without / with_graphs
        result[f"{name}_milliseconds_of_a_token"] = 1e3 * with_graphs / args.new_tokens
    return result
