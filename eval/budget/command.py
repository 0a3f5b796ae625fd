"""Models and seeds compared at every depth, so at every compute budget (fully looped transformers, appendix A.4)."""

import math
import statistics
from collections.abc import Collection
from itertools import islice
from pathlib import Path

import torch
from lm_eval.tasks import TaskManager

from looped_eval.common.curves import Curves, Point, draw, more_is_better, of_few_questions, table
from looped_eval.common.findings import best_depths
from looped_eval.common.model_folder import model_folder
from looped_eval.common.run_folder import folders_of, name_of
from looped_eval.common.task_names import TASKS, tasks_of
from looped_eval.core.bundle import read_tasks
from looped_eval.core.command import core_scores
from looped_eval.harness.command import check_limit, curves_of, results_by_depth
from looped_eval.harness.looped_lm import LoopedLM
from looped_eval.harness.question import check_question
from looped_recipes.common.command_line import parse_depths, say_result, typed
from looped_recipes.common.files import check_writable, write_whole
from looped_recipes.common.intervals import students_reach
from looped_recipes.common.provenance import note_what_is_replaced, write_json
from looped_recipes.common.words import counted
from looped_recipes.data.tokenizers import read_tokenizer, share_kept, tokenizer_hash

from .fully_looped import lambada_perplexity, six_curves
from .options import parse
from .row_scores import RowScores, mean_of, variance_of_mean
from .streams import parse_stream, score_windows, texts_of, windows


RESAMPLES = 1000  # for standard errors of lm-eval's metrics without a formula
SPREAD, OF_LM_EVAL = "standard deviation over folders", "lm-eval's standard error"  # behind ± of a model
RESOLUTION = 0.0005  # half of the last digit of bits per byte in papers
SAMPLE = 1000  # texts that tell what its tokens hold
KEEPS_ALL = 0.99  # part of a text; where a tokenizer keeps less, bits per byte are of less text


def parse_models(arguments: list[str]) -> dict[str, list[str]]:
    """Parse DIR or NAME=DIR,DIR,... into {name: folders}."""
    models: dict[str, list[str]] = {}
    for argument in arguments:
        name, _, folders = argument.partition("=")
        if not folders or "/" in name or Path(argument).exists():  # a folder, whose name may hold an equals sign
            name, folders = name_of(argument), argument
        if name in models:
            raise ValueError(f"{argument!r}: write DIR or NAME=DIR,DIR,... with a name of its own for each model")
        models[name] = folders_of(folders)
    return models


def have_one_tokenizer(models: dict[str, list[str]]) -> bool:
    """Whether all models have the same tokenizer; refuse folders of one model that have several."""
    of_models = set()
    for name, folders in models.items():
        found = {kind_of(read_tokenizer(folder)) for folder in folders}
        if len(found) > 1:
            raise ValueError(
                f"{name}={','.join(folders)} have different tokenizers, so they are no seeds of one model: give each "
                "tokenizer a NAME= of its own"
            )
        of_models |= found
    return len(of_models) == 1


def kind_of(tokenizer) -> str:
    return tokenizer_hash(tokenizer) if tokenizer.is_fast else str(sorted(tokenizer.get_vocab().items()))


def read_texts(path: str, limit: float | None) -> list[str]:
    """Return the texts, or the first ones: `limit` of them, or below 1 that part of them, as lm-eval counts it."""
    texts = list(texts_of(path))
    if limit is not None:
        texts = texts[: math.ceil(len(texts) * limit) if limit < 1 else int(limit)]
    if not any(texts):
        raise ValueError(f"{path} holds no text{'' if limit is None else f' within --limit {limit:g}'}")
    return texts


def score_texts(lm: LoopedLM, texts: list[str]) -> RowScores:
    """Score each text separately; special tokens are context and count in neither sum."""
    documents = [lm.tokens_of_document(text) for text in texts]
    nats = -torch.stack(lm.score_documents(documents), dim=-1)[:, 0]
    tokens, num_bytes = (torch.tensor(sizes, dtype=torch.float64) for sizes in (
        [len(document) for document in documents], [len(text.encode()) for text in texts]
    ))  # fmt: skip
    return RowScores(nats, nats, tokens, num_bytes)


def score_rows(lm: LoopedLM, args, texts: list[str] | None) -> dict[str, RowScores]:
    """Return {prefix of measures: scores}: "" is the prefix for --text and "NAME " for each --stream."""
    rows = {"": score_texts(lm, texts)} if texts else {}
    for name, path in map(parse_stream, args.stream):
        cut = windows(lm.tokenizer, texts_of(path), lm.max_length, args.stream_tokens, args.stream_group)
        rows[f"{name} "] = score_windows(lm, cut)
    return rows


def row_curves(name: str, scores: RowScores, depths: list[int]) -> Curves:
    values = {"bits per byte": scores.bits_per_byte(), "perplexity": scores.perplexity()}
    return {
        name + measure: {"": {depth: (value, None) for depth, value in zip(depths, of_depths.tolist())}}
        for measure, of_depths in values.items()
    }


def lossy_models(models: dict[str, list[str]], args, texts: list[str] | None) -> dict[str, float]:
    """Return models whose tokenizers drop text or do not know it, with the part that they keep."""
    samples = [texts[:SAMPLE]] if texts else []
    samples += [list(islice(texts_of(path), SAMPLE)) for _, path in map(parse_stream, args.stream)]
    tokenizers = {name: read_tokenizer(folders[0]) for name, folders in models.items()}
    kept = {
        name: min((share_kept(each, sample) for sample in samples), default=1) for name, each in tokenizers.items()
    }
    return {name: share for name, share in kept.items() if share < KEEPS_ALL}


def precision_curves(
    found: dict[str, list[dict[str, RowScores]]], depths: list[int], alone: Collection[str] = ()
) -> Curves:
    """Return standard errors of bits per byte over rows, and differences to the first model if rows are the same.
    alone: models that are not compared.

    The error of a difference is that over rows and, if both models have several folders, that over folders too.
    """
    curves: Curves = {}
    means = {
        model: {name: mean_of([seed[name] for seed in seeds]) for name in seeds[0]} for model, seeds in found.items()
    }
    first = next(iter(means))
    for model, of_names in means.items():
        for name, scores in of_names.items():
            if not scores.has_error:
                continue
            errors = scores.bits_per_byte_error().tolist()
            points = {depth: (error, None) for depth, error in zip(depths, errors)}
            curves.setdefault(f"{name}bits per byte, standard error", {})[model] = points
            other = means[first][name]
            same_rows = torch.equal(scores.bytes, other.bytes)  # else another tokenizer cut other windows
            if model != first and same_rows and not {model, first} & {*alone}:
                difference, over_rows = scores.less(other)
                variance = over_rows.square()
                if counts_folders(len(found[model]), len(found[first])):
                    variance += sum(variance_of_mean([seed[name] for seed in found[each]]) for each in (model, first))
                errors = variance.sqrt().tolist()
                points = dict(zip(depths, zip(difference.tolist(), errors)))
                curves.setdefault(f"{name}bits per byte, less that of {first}", {})[model] = points
    return curves


def without(models: Collection[str], curves: Curves) -> Curves:
    """Leave these models out of bits per byte."""
    shown: Curves = {}
    for measure, of_models in curves.items():
        omitted = models if measure.endswith("bits per byte") else ()
        if kept := {name: points for name, points in of_models.items() if name not in omitted}:
            shown[measure] = kept
    return shown


def counts_folders(ours: int, theirs: int) -> bool:
    """Whether the error of a difference is over folders too: a single folder does not tell how folders differ."""
    return min(ours, theirs) > 1


def sizes_of(rows: dict[str, RowScores]) -> list[str]:
    """Say how much text was scored, and how much would reduce the standard error to half of the last digit."""
    return [
        f"{name}bits per byte: {scores.tokens.sum():,.0f} tokens and {scores.bytes.sum():,.0f} bytes in "
        f"{rows_in_words(scores)}"
        for name, scores in rows.items()
    ]


def rows_in_words(scores: RowScores) -> str:
    if not scores.has_error:
        return "one row; a standard error needs at least two"
    rows, tokens = f"{len(scores.tokens):,} rows", scores.tokens_for(RESOLUTION)
    return rows if tokens is None else f"{rows}; a standard error of {RESOLUTION} would take about {tokens:,} tokens"


def measure(
    lm: LoopedLM, args, rows: dict[str, RowScores], manager: TaskManager | None
) -> tuple[dict[str, dict[int, Point]], dict[str, bool], set[str]]:
    """Return {measure: {depth: (value, lm-eval's standard error or None)}} of a folder, whether more is better, and
    which measures are of few questions."""
    curves: Curves = {}
    better: dict[str, bool] = {}
    few: set[str] = set()
    for name, scores in rows.items():
        curves |= row_curves(name, scores, lm.depths)
    if args.tasks:
        options = {"tasks": args.tasks, "task_manager": manager, "num_fewshot": args.num_fewshot, "limit": args.limit}
        options |= {"batch_size": args.batch_size, "bootstrap_iters": RESAMPLES, "log_samples": False}
        results = results_by_depth(lm, {"pretrained": lm.pretrained}, {}, **options)
        curves |= curves_of(results)
        if results:
            first = next(iter(results.values()))
            better, few = more_is_better(first), of_few_questions(first)
    if args.core:
        setup = {"batch_size": args.batch_size, "max_length": args.core_max_length}
        setup |= {"loops": lm.depths, "examples": args.core_examples}
        scores = core_scores(lm.model, lm.tokenizer, args.core, **setup)
        curves["CORE"] = {"": {depth: (found["core"], None) for depth, found in scores.items()}}
        if args.six:
            curves |= six_curves(scores) | lambada_perplexity(lm, args.core, args.core_examples)
    return {name: points[""] for name, points in curves.items()}, better, few


def mean_and_spread(found: dict[str, list[dict[str, dict[int, Point]]]], of_means: bool = False) -> Curves:
    """Return mean and standard deviation over the folders of each model, or with `of_means` the standard error of the
    mean; for one folder, value and standard error."""
    curves: Curves = {}
    for name, seeds in found.items():
        for measured in seeds[0]:
            for depth in seeds[0][measured]:
                values = [seed[measured][depth][0] for seed in seeds]
                spread = statistics.stdev(values) if len(values) > 1 else seeds[0][measured][depth][1]
                if of_means and len(values) > 1:
                    spread /= math.sqrt(len(values))
                points = curves.setdefault(measured, {}).setdefault(name, {})
                points[depth] = (statistics.fmean(values), spread)
    return curves


def kinds_of_errors(curves: Curves, precision: Curves, models: dict[str, list[str]]) -> dict[str, dict[str, str]]:
    """Return {measure: {model: what stands behind ±}} for those that have an error."""
    kinds: dict[str, dict[str, str]] = {}
    of_first = len(next(iter(models.values())))
    for measure, of_models in (curves | precision).items():
        for name, points in of_models.items():
            kind = SPREAD if len(models[name]) > 1 else OF_LM_EVAL
            if measure in precision:
                over = "rows and folders" if counts_folders(len(models[name]), of_first) else "rows"
                kind = f"standard error over {over}"
            if any(error is not None for _, error in points.values()):
                kinds.setdefault(measure, {})[name] = kind
    return kinds


def with_kinds(curves: Curves, kinds: dict[str, dict[str, str]]) -> Curves:
    """Append to the names of series what stands behind their ±."""
    said = {measure: {name: f"{name}: ± {kind}" for name, kind in of.items()} for measure, of in kinds.items()}
    return {
        measure: {said.get(measure, {}).get(name, name): points for name, points in of_models.items()}
        for measure, of_models in curves.items()
    }


def what_spreads_are(curves: Curves, precision: Curves, models: dict[str, list[str]]) -> list[str]:
    """Say what stands behind ± in the tables."""
    several = any(len(folders) > 1 for folders in models.values())
    kinds = kinds_of_errors(curves, {}, models).values()
    said = ["± of a model of several folders is their standard deviation"] * several
    said += [f"± of a single folder is {OF_LM_EVAL}"] * any(OF_LM_EVAL in of_models.values() for of_models in kinds)
    first = next(iter(models))
    compared = {name for measure, of in precision.items() if measure.endswith(f"less that of {first}") for name in of}
    for model in (name for name in models if name in compared):
        counts = len(models[model]), len(models[first])
        which = f"± of {model} less {first}, {counts[0]} against {counted(counts[1], 'folder')}, is the standard error"
        if counts_folders(*counts):
            times = students_reach(1.0, 2 * (min(counts) - 1))
            said.append(f"{which} over rows and folders, and {times:.1f} times it a 95 % interval")
        else:
            alone = ", which does not tell how folders differ" if several else ""
            said.append(f"{which} over rows only{alone}")
    return ["; ".join(said)] if said else []


def values_of(points: dict[str, dict[int, Point]]) -> dict[str, dict[int, float]]:
    return {name: {depth: value for depth, (value, _) in of_depths.items()} for name, of_depths in points.items()}


def main(arguments: list[str] | None = None):
    args = parse(arguments)
    models = {
        name: [str(model_folder(folder) or folder) for folder in folders]  # no folder: a name on the Hub
        for name, folders in parse_models(args.models).items()
    }
    depths = parse_depths(args.num_loops)
    check_writable(args.output, "with --output")
    note_what_is_replaced(args.output / "budget.json", args.command)
    if not (args.text or args.stream or args.tasks or args.core):
        raise ValueError("nothing to measure: pass --text, --stream, --tasks or --core")
    check_limit(args.limit)
    if args.limit is not None and not (args.text or args.tasks):
        raise ValueError(
            f"--limit {args.limit:g} is of --text and --tasks: leave it out, or shorten streams by --stream-tokens "
            "and CORE by --core-examples"
        )
    if args.six and not args.core:
        raise ValueError("--six reads its tasks from the bundle of CORE: pass --core BUNDLE too")
    streams = [name for name, _ in map(parse_stream, args.stream)]
    if len(set(streams)) < len(streams):
        raise ValueError(f"two streams have the same name: {', '.join(streams)}")
    texts = read_texts(args.text, args.limit) if args.text else None
    if args.core:
        read_tasks(args.core, examples=args.core_examples)  # finds mistakes before a model is loaded
    manager = None
    if args.tasks:
        manager, args.tasks = tasks_of(args.tasks, [path for path in (TASKS, args.include_path) if path])
    for folder in sum(models.values(), []):
        check_question(folder, depths)
    one_tokenizer = have_one_tokenizer(models)

    found: dict[str, list] = {name: [] for name in models}
    better: dict[str, bool] = {}
    few: set[str] = set()
    rows: dict[str, list] = {name: [] for name in models}
    for name, folders in models.items():
        for folder in folders:
            setup = {"batch_size": args.batch_size, "device": args.device, "dtype": args.dtype}
            trust, length = args.trust_remote_code, args.max_length
            lm = LoopedLM(folder, num_loops=depths, max_length=length, trust_remote_code=trust, **setup)
            rows[name].append(score_rows(lm, args, texts))
            points, of_tasks, of_few = measure(lm, args, rows[name][-1], manager)
            found[name].append(points)
            better |= of_tasks
            few |= of_few
    curves = mean_and_spread(found)
    lossy = {} if one_tokenizer else lossy_models(models, args, texts)
    order = sorted(models, key=lossy.__contains__)  # all others are compared with the first
    models, rows, found = ({name: of[name] for name in order} for of in (models, rows, found))
    precision, sizes = precision_curves(rows, depths, lossy), sizes_of(next(iter(rows.values()))[0])
    tables = [table(curves), *([table(precision)] if precision else [])]
    per_token = [name for name in curves if name.endswith("perplexity") and name not in better and not one_tokenizer]
    note = f"{', '.join(per_token)}: per token, and the models have different tokenizers, so not compared"
    notes = [*what_spreads_are(curves, precision, models), *sizes, *([note] if per_token else [])]
    notes += [
        f"{name}: its tokens give back {share:.1%} of the text, so its bits per byte are not compared"
        for name, share in lossy.items()
    ]
    shown = "\n".join([*tables, *notes])
    print(shown)
    write_whole(args.output / "budget.md", shown + "\n")
    values = {name: [values_of(points) for points in of_folders] for name, of_folders in found.items()}
    kinds = kinds_of_errors(curves, precision, models)
    record = {"models": models, "values": values, "curves": curves, "precision": precision, "errors": kinds}
    write_json(args.output / "budget.json", {**record, "sizes": sizes}, args.command)
    draw(with_kinds(curves, kinds), args.output / "budget.svg")
    print(f"written: {args.output / 'budget.md'}, budget.json and budget.svg")
    first = next(iter(models.values()))[0]
    means = {name: of for name, of in mean_and_spread(found, of_means=True).items() if name not in per_token}
    say_result(best_depths(without(lossy, means), better, found, few), typed("looped halting", first))
