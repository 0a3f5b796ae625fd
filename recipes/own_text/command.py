"""Train two models on one text, with the same operations for each token, and compare them."""

import time
from pathlib import Path
from statistics import median

import torch

from looped_recipes.common.command_line import say_result, typed
from looped_recipes.common.flops import forward_flops_per_token, sizes
from looped_recipes.common.metrics import last_validation, read_metrics
from looped_recipes.common.provenance import write_json
from looped_recipes.common.words import counted
from looped_recipes.data.shards import prepare
from looped_recipes.data.sources import check_files
from looped_recipes.engine.distributed import make_accelerator
from looped_recipes.engine.optimizers import build_optimizers
from looped_recipes.engine.resume import differing
from looped_recipes.engine.training import Pretraining
from looped_recipes.settings.recipe import Recipe, load_recipe, recipe_of_run
from looped_recipes.settings.sections import LENGTHS
from modeling_looped import LoopedForCausalLM

from .options import parse


HERE = Path(__file__).parent
NAMES = ("looped", "plain")
OF_TRAINING = 0.75  # share of the minutes for training steps; the rest is for data, validation, checkpoints
OF_MEASURING = 0.02  # share of the minutes in which each model's step is timed
LEAST_STEPS = 20


def seconds_per_step(recipe: Recipe, minutes: float) -> float:
    """Return the median time of whole steps at the mean depth, on random tokens, measured for `minutes` on the device
    and in the precision of the training; the first step is not counted."""
    accelerator = make_accelerator()
    model = LoopedForCausalLM(recipe.model_config()).to(accelerator.device).train()
    optimizers = build_optimizers(model, recipe.optimizer, recipe.training.steps)
    size = (recipe.training.rows_per_step, recipe.data.sequence_length)
    rows = torch.randint(model.config.vocab_size, size, device=accelerator.device)
    end, seconds = time.perf_counter() + 60 * minutes, []
    while len(seconds) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        for some in rows.split(recipe.training.micro_batch_size):
            with accelerator.autocast():
                loss = model(some, labels=some, output_logits=False, use_cache=False).loss
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def number_of_steps(args, recipes: list[Recipe]) -> int:
    """Return the number of steps that fit; for a run that was begun before and continues, its number of steps."""
    for recipe in recipes:
        begun = Path(recipe.training.output_dir) / "recipe.yaml"
        if begun.is_file():
            before = recipe_of_run(begun.parent)
            if Path(before.data.source).resolve() != Path(recipe.data.source).resolve():
                raise ValueError(
                    f"{args.output} has models of {before.data.source}: choose another folder for those of "
                    f"{args.text}, as --output {args.output}_2"
                )
            steps = before.training.steps
            print(f"{args.output} goes on with the {steps} steps that it began with, whatever --minutes says; "
                  "with another --output there is a new beginning")  # fmt: skip
            return steps
    prepare(recipes[0].data)  # first, because the text may be too short
    print(f"measuring how many steps fit into {counted(f'{args.minutes:g}', 'minute')}", flush=True)
    seconds = sum(seconds_per_step(recipe, args.minutes * OF_MEASURING) for recipe in recipes)
    steps = int(60 * args.minutes * OF_TRAINING / seconds)
    if steps < LEAST_STEPS:
        longer = LEAST_STEPS * seconds / 60 / OF_TRAINING
        print(f"{steps} steps fit; {LEAST_STEPS} are the least, for about {longer:.1f} minutes")
    return max(LEAST_STEPS, steps)


def held_out(run: Pretraining) -> dict:
    """Return the results of a run on the held-out text."""
    records = read_metrics(run.metrics.path)
    errors = [record.get("validation/bits_per_byte_error") for record in records if "validation/loss" in record]
    return {
        "parameters": sizes(run.config).total,
        "bits_per_byte": last_validation(records, "bits_per_byte"),
        "error": errors[-1],
    }


def forward_flops(run: Pretraining, depth: int) -> float:
    return forward_flops_per_token(run.config, run.recipe.data.sequence_length, depth)


def main(arguments: list[str] | None = None) -> dict:
    args = parse(arguments)
    if not args.minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {args.minutes:g}")

    check_files(args.text)
    of_both = {"data.source": "FILE", "training.output_dir": "--output"}
    of_both |= {f"training.{name}": "--minutes" for name in (*LENGTHS, "stop_after")}
    apart = {name for name, *_ in differing(*(load_recipe(HERE / f"{name}.yaml").to_dict() for name in NAMES))}
    for override in args.overrides:
        if (key := override.partition("=")[0]) in of_both:
            raise ValueError(f"{override} is of both models here: say {of_both[key]} instead")
        if key in apart:
            raise ValueError(
                f"{override} would make both models alike in what is compared: leave it out, or train recipes of your "
                "own with `looped pretrain`"
            )

    def recipe(name: str) -> Recipe:
        own = {"data.source": args.text, "training.output_dir": str(args.output / name)}
        return load_recipe(HERE / f"{name}.yaml", args.overrides, own)

    recipes = {name: recipe(name) for name in NAMES}
    steps = number_of_steps(args, list(recipes.values()))
    result, flops = {}, {}
    for name in NAMES:
        recipes[name].training.steps = steps
        run = Pretraining(recipes[name])
        print(f"{name}: {sizes(run.config).total:,} parameters, {run.total_steps} steps")
        run.train()
        result[name] = held_out(run)
        flops |= {(name, depth): forward_flops(run, depth) for depth in result[name]["bits_per_byte"]}
    print(table(result, flops))
    write_json(args.output / "comparison.json", {"result": result}, args.command, digits=6)
    say_result(in_words(result, flops), typed("looped chat", args.output / "looped"), report(args.output))
    return result


def table(result: dict, flops: dict) -> str:
    lines = [f"\n{'held-out text':24}{'bits per byte':>14}{'operations':>12}{'parameters':>13}"]
    for (name, depth), count in flops.items():
        bits, parameters = result[name]["bits_per_byte"][depth], result[name]["parameters"]
        label = f"looped, {counted(depth, 'loop')}" if name == "looped" else name
        lines.append(f"{label:24}{bits:14.3f}{count / flops['plain', 1]:12.2f}{parameters:13,}")
    return "\n".join(lines)


def report(output: Path) -> str:
    return typed("looped report", *(output / name for name in NAMES))


def in_words(result: dict, flops: dict) -> str:
    """Compare the plain model with the looped one at the depth whose operations are nearest to the plain model's."""
    depths = [depth for name, depth in flops if name == "looped"]
    depth = min(depths, key=lambda depth: abs(flops["looped", depth] - flops["plain", 1]))
    looped, plain = result["looped"], result["plain"]
    difference = looped["bits_per_byte"][depth] - plain["bits_per_byte"][1]
    fewer = 1 - looped["parameters"] / plain["parameters"]
    error = max(looped["error"] or 0, plain["error"] or 0)
    verdict = f"{abs(difference):.3f} {'more' if difference > 0 else 'fewer'} bits per byte"
    seen = "" if abs(difference) > 2 * error else ", so this is no clear difference"
    return (
        f"With as many operations for each token, the looped model has {fewer:.0%} fewer parameters and {verdict} on "
        f"held-out text; each has a standard error of {error:.3f}{seen}."
    )
