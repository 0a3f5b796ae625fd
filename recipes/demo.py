"""A first look, from nothing: `python -m recipes.demo [section.key=value ...]`.

Trains the small model of recipes/demo.yaml for a few minutes with `recipes.pretrain`, shows its loss at every
depth, also deeper than it was trained, draws it, lets the model write, and puts the run on one page. The text is
Python's own library and documentation, which every machine with Python has. runs/demo/final is an ordinary model
folder.
"""

import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from looped_eval.report.command import make_report
from looped_recipes.common.canvas import canvas
from looped_recipes.common.command_line import print_help, run_command
from looped_recipes.common.metrics import read_metrics
from looped_recipes.engine.training import Divergence, Pretraining
from looped_recipes.settings.recipe import load_recipe


PROMPT = 'def read(self, size=-1):\n    """'


def choose_precision():
    """bf16 where this processor multiplies it in hardware; accelerate reads this."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"):
        os.environ.setdefault("ACCELERATE_MIXED_PRECISION", "bf16")


def by_depth(metrics: Path, measure: str) -> dict[int, float]:
    """The last validation of a run: {depth: value}."""
    last = [record for record in read_metrics(metrics) if "validation/loss" in record][-1]
    prefix = f"validation/{measure}_at_"
    return {int(key.removeprefix(prefix)): value for key, value in last.items() if key.startswith(prefix)}


def draw(bits: dict[int, float], trained_loops: int, path: Path):
    with canvas(path) as [axis]:
        axis.plot(bits.keys(), bits.values(), marker="o")
        axis.axvline(trained_loops, linestyle=":", color="gray", label="trained depth")
        axis.set(xlabel="loops", ylabel="held-out bits per byte", xticks=list(bits))
        axis.legend()


def write(folder: Path, loops: list[int]):
    """The same prompt and seed at several depths."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    for num_loops in loops:
        torch.manual_seed(0)
        ids = model.generate(
            **prompt, num_loops=num_loops, max_new_tokens=64, do_sample=True, temperature=0.7, top_k=50
        )
        print(f"\n--- written with {num_loops} loop{'s' * (num_loops > 1)}:\n{tokenizer.decode(ids[0])}")


def main(overrides: list[str]) -> Path:
    print_help(overrides, __doc__, least=0)
    choose_precision()
    run = Pretraining(load_recipe(Path(__file__).with_suffix(".yaml"), overrides))
    config = run.config
    print(f"{run.bare.num_parameters():,} parameters: {config.num_core_layers} layer, {config.num_loops} loops")
    final = run.train()
    bits = by_depth(run.metrics.path, "bits_per_byte")
    print("\nheld-out bits per byte, every depth from one pass:")
    for depth, value in bits.items():
        print(f"  {depth} loops  {value:.3f}" + ("   (deeper than trained)" if depth > config.num_loops else ""))
    draw(bits, config.num_loops, run.output / "depth.png")
    write(final, [1, config.num_loops])
    print(f"\nloss over depth: {run.output / 'depth.png'}")
    print(f"the run on one page: {make_report([run.output])}")
    print(f"the model: AutoModelForCausalLM.from_pretrained({str(final)!r})")
    return final


if __name__ == "__main__":
    run_command(main, Divergence)
