"""What loops lose that share: `python -m looped_recipes.cache.compare RUNS [results.json]`, of the sweep beside it.

Bits per byte of rows that every run held out, and bytes of the cache per token in fp32. The first half of a row is the
prompt, and the second, which is measured, is read token by token. Models trained without sharing are also read with
slots that are shared (`cache_sharing`), and all of them with a cache in 8 bits (`cache_dtype`).
"""

import math
from pathlib import Path
from statistics import fmean

import torch

from looped_recipes.common.command_line import print_help, run_command
from looped_recipes.common.flops import cache_numbers_per_token
from looped_recipes.common.provenance import write_json
from looped_recipes.common.ratios import ratio
from looped_recipes.common.token_losses import token_losses
from looped_recipes.data.packing import PackedRows
from looped_recipes.data.shards import prepare
from looped_recipes.settings.recipe import recipe_of_run
from modeling_looped import LoopedForCausalLM
from modeling_looped.int8_cache import SIZE_BYTES


ROWS = 64
FP32_BYTES = 4


@torch.no_grad()
def bits_per_byte(model, rows: PackedRows, **arguments) -> float:
    """Return bits per byte of the second halves, read token by token with the cache that `arguments` select."""
    numbers = list(range(min(ROWS, len(rows))))
    batch = rows.batch(numbers)
    text, num_bytes = batch["input_ids"], rows.num_bytes(batch["labels"])
    half = text.shape[1] // 2
    outputs = model.generate(
        text[:, :half],
        attention_mask=torch.ones_like(text[:, :half]),
        max_new_tokens=text.shape[1] - half,
        prefix_allowed_tokens_fn=lambda row, ids: [int(text[row, len(ids)])],  # force the text
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        **arguments,
    )
    assert torch.equal(outputs.sequences, text)
    losses = token_losses(torch.stack(outputs.logits, dim=1), text[:, half:])
    bytes_of_targets = num_bytes[:, half - 1 : -1]
    nats = (losses * (bytes_of_targets > 0)).sum(-1)
    return (ratio(nats, bytes_of_targets.sum(-1)) / math.log(2)).item()


def readings(model) -> dict[str, tuple[dict, float]]:
    """Return the ways to read with a model, by name: arguments of generate, and bytes of the cache per token."""
    config = model.config
    numbers = cache_numbers_per_token(config)
    ways = {
        "trained": ({}, FP32_BYTES * numbers),
        "in 8 bits": ({"cache_dtype": "int8"}, numbers + SIZE_BYTES * numbers // config.head_dim),
    }
    if not config.shares_keys:
        slots = {"last": 1, **{f"cyclic-{count}": count for count in (2, 3)}}
        for policy, count in slots.items():
            ways[policy] = ({"cache_sharing": policy}, FP32_BYTES * cache_numbers_per_token(config, count))
    return ways


def measure(folder: Path) -> dict:
    model = LoopedForCausalLM.from_pretrained(folder / "final").eval()
    rows = prepare(recipe_of_run(folder).data).validation
    return {
        way: {"bits_per_byte": bits_per_byte(model, rows, **arguments), "bytes_per_token": num_bytes}
        for way, (arguments, num_bytes) in readings(model).items()
    }


def main(arguments: list[str]):
    print_help(arguments, __doc__)
    folders = [folder.parent for folder in sorted(Path(arguments[0]).glob("*/final"))]
    if not folders:
        raise ValueError(f"{arguments[0]} holds no finished runs: name the folder of the sweep")
    runs = {folder.name: measure(folder) for folder in folders}
    means: dict[str, dict] = {}
    for run, ways in runs.items():
        model = run.rpartition("seed=")[0].rstrip("_") or "none shared"
        for way, found in ways.items():
            of_seeds = means.setdefault(f"{model}, {way}", {**found, "bits_per_byte": []})
            of_seeds["bits_per_byte"].append(found["bits_per_byte"])
    for name, found in means.items():
        bits = found["bits_per_byte"]
        print(f"{name:40} {found['bytes_per_token']:8.0f}  {fmean(bits):.4f}  {' '.join(f'{x:.4f}' for x in bits)}")
    if arguments[1:]:
        write_json(arguments[1], {"read": means}, digits=6)


if __name__ == "__main__":
    run_command(main)
