"""Early exit within a budget: calibrates thresholds and measures their effect."""

import itertools
import math
from pathlib import Path

import torch

from looped_eval.common.held_out import HeldOutError, own_run, rows_as_trained, run_data
from looped_eval.common.model_folder import (
    joined_tokens,
    open_config,
    open_model,
    open_tokenizer,
    results_folder,
    training_run,
    unlearned_start,
)
from looped_eval.common.run_folder import name_of
from looped_recipes.common.checksums import renew_checksum
from looped_recipes.common.command_line import check_counts, say_result, trust_of, typed
from looped_recipes.common.files import check_writable
from looped_recipes.common.metrics import read_metrics
from looped_recipes.common.provenance import note_what_is_replaced, write_json
from looped_recipes.common.token_losses import perplexity
from looped_recipes.data.sources import training_source
from looped_recipes.settings.recipe import DataConfig, RecipeError
from modeling_looped import LoopedConfig
from modeling_looped.depth_options import EXIT_FIELDS
from modeling_looped.exit_criteria import CRITERIA, ExitRule

from .calibration import mean_perplexity
from .conclusion import (
    best_at_equal_loops,
    cheapest,
    conclusion,
    conclusion_at_loops,
    exits_gain,
    shallowest,
)
from .measuring import learned_targets, out_of_reach, sequence_level, token_level
from .options import BEST, LEAST_SEQUENCES, LENGTH, SEQUENCES, parse
from .page import write_page
from .scoring import measure


# Arguments and text


def check(args) -> tuple[Path, LoopedConfig, list[str], list[str]]:
    """Check the arguments without loading weights. Return the model's folder, its config, the criteria, and notes."""
    folder, config = open_config(args.model, args.trust_remote_code)
    args.num_loops = config.num_loops if args.num_loops is None else args.num_loops
    for budget in args.budget:
        if not (0 <= budget < math.inf):
            raise ValueError(f"--budget {budget} must be at least 0: 0.01 lets perplexity be 1 % worse")
    if args.num_loops < 2:
        raise ValueError(f"num_loops={args.num_loops}: with a single loop there is nothing to exit from")
    if not 1 <= args.min_loops < args.num_loops:
        raise ValueError(f"--min-loops {args.min_loops} must be at least 1 and below num_loops={args.num_loops}")
    for mean in args.mean_loops:
        if not args.min_loops <= mean < args.num_loops:
            raise ValueError(
                f"--mean-loops {mean:g} must be from {args.min_loops} (--min-loops) to less than {args.num_loops} "
                "(num_loops): at full depth no token exits"
            )
    args.may_be_shorter = args.length is None
    args.length = default_length(args.model) if args.length is None else args.length
    check_counts(args, ("sequences", "length", "batch_size", "repeats"))
    if config.position_embedding == "learned" and args.length > config.max_position_embeddings:
        raise ValueError(
            f"--length {args.length} is more than the max_position_embeddings={config.max_position_embeddings} "
            "positions that this model has learned"
        )
    notes = []
    args.criteria = args.criteria or list(CRITERIA)
    if "gate" in args.criteria and config.exit_gate == "none" and len(args.criteria) > 1:
        args.criteria = [name for name in args.criteria if name != "gate"]
        notes.append("gate is left out: this model has none (exit_gate='none')")
    for name in args.criteria:
        ExitRule(name, 0, args.min_loops).checked(config, args.num_loops)
    if args.write not in (None, BEST, *args.criteria):
        raise ValueError(f"--write {args.write} is not among the measured criteria: {', '.join(args.criteria)}")
    if config.loop_loss == "terminal":
        notes.append(
            "loop_loss='terminal': unless depths were drawn in training, exits before the last loop are not trained"
        )
    return folder, config, args.criteria, notes


def default_length(model: str) -> int:
    """Return how many tokens are read in a row of the model's training run, of which the last is only a target."""
    run = training_run(model)
    try:
        return LENGTH if run is None else run_data(run).sequence_length - 1
    except (HeldOutError, RecipeError):  # where no text is named, the held-out one, which is read later, is refused
        return LENGTH


def text_rows(
    texts: list[str], tokenizer, count: int, length: int, seed: int, start: int | None = None
) -> torch.Tensor:
    """Return [count, length] tokens, equally many of each text: documents in random order, each with `start` before it
    and the end token after it."""
    ids = []
    for number, text in enumerate(texts, start=1):
        share = -(-count * length * number // len(texts)) - len(ids)
        documents = training_source(DataConfig(source=text)).load().shuffle(seed=seed)
        found = list(itertools.islice(joined_tokens(documents, tokenizer, start), share))
        if len(found) < share:
            raise ValueError(
                f"{text} holds {len(found)} tokens, fewer than the {share} that two slices of {count // 2} "
                f"sequences of {length} tokens take of it: lower --sequences or --length, or add text to it"
            )
        ids += found
    rows = torch.tensor(ids).view(count, length)
    return rows[torch.randperm(count, generator=torch.Generator().manual_seed(seed))]


def two_slices(args, folder: Path, config) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows to calibrate on and other rows to measure on; set args.read to the name of their text, and
    args.unlearned to a token of it that is no target."""
    count, length = 2 * (args.sequences or SEQUENCES), args.length + 1
    if args.text:
        tokenizer = open_tokenizer(folder, args.tokenizer, config)
        args.read, args.unlearned = ", ".join(args.text), unlearned_start(tokenizer)
        rows = text_rows(args.text, tokenizer, count, length, args.seed, args.unlearned)
    else:
        least, run = count if args.sequences else 2 * LEAST_SEQUENCES, own_run(args.model, args.tokenizer)
        try:
            rows, args.unlearned, args.read = rows_as_trained(run, count, length, args.seed, least)
        except HeldOutError as error:
            if not args.may_be_shorter or args.length <= LENGTH:
                raise
            print(f"note: --length {LENGTH} instead of {args.length}, as in training: {error}")
            args.length = LENGTH
            rows, args.unlearned, args.read = rows_as_trained(run, count, LENGTH + 1, args.seed, least)
    args.sequences = len(rows) // 2
    rows = rows[: 2 * args.sequences]
    return rows.to(args.device).chunk(2)


FAR = 1.5  # times the perplexity of the last validation


def far_from_validation(args, full: dict) -> list[str]:
    """Say if the model predicts this text much worse than what its run held out. full: the row of full depth."""
    run = training_run(args.model)
    records = [] if run is None else read_metrics(run / "metrics.jsonl")
    losses = [record[name] for record in records if (name := f"validation/loss_at_{full['loops']}") in record]
    if not losses or full["perplexity"] <= FAR * perplexity(losses[-1]):
        return []
    return [
        f"at {full['loops']} loops perplexity is {full['perplexity']:.2f}, but {perplexity(losses[-1]):.2f} in the "
        f"last validation of {run}: thresholds hold for text and lengths like those they are calibrated on, so name "
        "text like that of its use, or another --length"
    ]


# Output

LEAVING = "sequences that leave the batch when their mean score passes the threshold"

# saved fields of exits, and of drafts, which cannot be combined with exits
REPLACED = (*EXIT_FIELDS, "num_loops", "draft_loops", "draft_tokens")


def write_threshold(model, folder: Path, criterion: str, rows: list[dict], args) -> str:
    """Save the exits calibrated for tokens as the default of generate; return what was done in words."""
    among = [row for row in rows if criterion in (BEST, row["criterion"])]
    if not among:
        return "nothing is written: no threshold has so few loops"
    row = best_at_equal_loops(among) if "wanted_loops" in among[0] else cheapest(among)
    if criterion == BEST and row["predicted_speedup"] <= 1:
        return "nothing is written: no criterion is predicted to save more than it costs (name one to insist)"
    if not math.isfinite(row["threshold"]):
        return f"nothing is written: within the budget no token may exit by {row['criterion']}"
    chosen = {"exit_criterion": row["criterion"], "exit_threshold": row["threshold"], "min_loops": args.min_loops}
    if args.num_loops != model.config.num_loops:
        chosen["num_loops"] = args.num_loops
    for name in REPLACED:
        vars(model.generation_config).pop(name, None)
    for name, value in chosen.items():
        setattr(model.generation_config, name, value)
    model.generation_config._from_model_config = False  # else loading makes a new one without these fields
    model.generation_config.save_pretrained(folder)
    renew_checksum(folder, "generation_config.json")
    return f"{folder / 'generation_config.json'}: " + ", ".join(f"{name}={value}" for name, value in chosen.items())


def cell(key: str, value) -> str:
    if key == "budget":
        return f"{100 * value:g} %"
    if key == "wanted_loops":
        return f"{value:g}"
    if isinstance(value, float) and not math.isfinite(value):
        return "never" if key == "threshold" else "unknown"
    if isinstance(value, float):
        digits = {"tokens_per_second": 0, "ratio": 4, "ratio_error": 4, "calibrated_ratio": 4}.get(key, 3)
        return f"{value:,.{digits}f}" if key != "threshold" else f"{value:.4g}"
    return str(value)


def table(rows: list[dict]) -> str:
    lines = [[key.replace("_", " ") for key in rows[0]], *([cell(*item) for item in row.items()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  " + "  ".join(text.rjust(width) for text, width in zip(line, widths)) for line in lines)


def next_command(args, fixed: list[dict], tokens: list[dict]) -> str:
    """Return the command that uses the result: exits if they gain, else the fixed depth that is enough.

    To write, it is the same command again, so that the threshold is calibrated on the same text."""
    if args.write is not None:
        return typed("looped chat", args.model, *trust_of(args))
    if not args.budget:
        reached = [mean for mean in args.mean_loops if any(row["wanted_loops"] == mean for row in tokens)]
        best = best_at_equal_loops([row for row in tokens if row["wanted_loops"] == reached[0]])
        at_mean = "" if reached[0] == args.mean_loops[0] else f" --mean-loops {reached[0]:g}"
        return f"{args.command}{at_mean} --write {best['criterion']}"
    if exits_gain(fixed, tokens, args.budget[0]):
        return f"{args.command} --write"
    depth = shallowest(fixed, args.budget[0])["loops"]
    return typed("looped chat", args.model, *trust_of(args), "--num-loops", depth)


def exits(unit: str, rows: list[dict]) -> list[dict]:
    return [{"exits": f"each {unit}", **row} for row in rows]


def split(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """Return the rows of budgets, and those of mean loops, each of these together."""
    of_loops = [row for row in rows if "wanted_loops" in row]
    return [row for row in rows if "budget" in row], sorted(of_loops, key=lambda row: row["wanted_loops"])


def at_first(rows: list[dict], key: str) -> list[dict]:
    """Return the rows with the same value as the first one."""
    return [row for row in rows if row[key] == rows[0][key]]


def run(args) -> Path:
    folder, config, names, notes = check(args)
    output = Path(args.output or results_folder(args.model))
    check_writable(output, "with --output")
    note_what_is_replaced(output / "halting.json", args.command)
    calibration_rows, rows = two_slices(args, folder, config)
    amount = f"{len(calibration_rows)} rows to calibrate on and {len(rows)} to measure, of {args.length} tokens"
    print(f"{amount}, by {len(names)} of {len(CRITERIA)} criteria in {args.num_loops} loops", flush=True)
    model = open_model(folder, args, dtype=getattr(torch, args.dtype))

    measured = measure(model, calibration_rows, args.num_loops, names, args.batch_size)
    learned = learned_targets(calibration_rows, args.unlearned).cpu()
    parts = {"sequences": measured.sequences(learned), "tokens": measured.tokens(learned)}
    if not math.isfinite(mean_perplexity(parts["tokens"].losses[-1])):
        raise ValueError(
            f"after {args.num_loops} loops the perplexity is not finite, so no exit can be held against it: choose "
            "fewer --num-loops, or another checkpoint"
        )
    missed = {unit: out_of_reach(units, names, unit, args) for unit, units in parts.items()}
    if not args.budget and len(missed["tokens"]) == len(names) * len(args.mean_loops):
        raise ValueError(f"{'; '.join(missed['tokens'])}. Raise --mean-loops, or name other --criteria")
    notes += sum(missed.values(), [])
    fixed, found, full = sequence_level(model, parts, rows, names, args)
    notes += far_from_validation(args, fixed[-1])
    halting, sequences_at_loops = split(found)
    tokens, tokens_at_loops = split(token_level(model, parts["tokens"], rows, names, full, args))

    print(f"{args.model}: two slices of {args.sequences} sequences of {args.length} tokens, {args.read}")
    for note in notes:
        print(f"note: {note}")
    print("\nfixed depth", table(fixed), sep="\n")
    for sequence_rows, token_rows in (
        (at_first(halting, "budget"), tokens),
        (sequences_at_loops, tokens_at_loops),
    ):
        if sequence_rows:
            print(f"\n{LEAVING}", table(sequence_rows), sep="\n")
        if token_rows:
            print("\ntokens that exit by themselves, as in generate", table(token_rows), sep="\n")

    others = ("output", "write", "read", "unlearned", "may_be_shorter", "command")
    asked = {key: value for key, value in vars(args).items() if key not in others}
    result = {"fixed": fixed, "halting": exits("sequence", halting), "tokens": exits("token", tokens)}
    if args.mean_loops:
        of_tokens = exits("token", tokens_at_loops)
        result["at_mean_loops"] = {"sequences": exits("sequence", sequences_at_loops), "tokens": of_tokens}
    content = {**asked, "text": args.read, "notes": notes, "result": result}
    write_json(output / "halting.json", content, args.command, digits=6)
    write_page(name_of(folder), content, output)
    print("", *(output / f"halting.{kind}" for kind in ("json", "svg", "html")), sep="\n")
    if args.write is not None:
        asked_first = tokens or [row for row in tokens_at_loops if row["wanted_loops"] == args.mean_loops[0]]
        print(write_threshold(model, folder, args.write, asked_first, args))
    said = [conclusion(fixed, tokens, args.budget[0], args.num_loops)] if args.budget else []
    said += [conclusion_at_loops(fixed, tokens_at_loops)] if tokens_at_loops else []
    say_result(" ".join(said), next_command(args, fixed, tokens or tokens_at_loops))
    return output


def main(arguments: list[str]):
    run(parse(arguments))
