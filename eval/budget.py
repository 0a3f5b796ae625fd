"""What a model is worth at every compute budget (fully looped transformers, appendix A.4):

python -m eval.budget flt=runs/flt-0/final,runs/flt-1/final lt=runs/lt/final --loops 1,3,6,9,12 --text validation.jsonl

Folders of one name are seeds of one model: their mean, and their standard deviation. Measures: bits per byte and
perplexity per token of the texts, every metric of lm-eval's --tasks, CORE on a bundle. One pass scores all depths.
"""

import argparse
import json
import math
import shlex
import statistics
import sys
from pathlib import Path

from lm_eval.tasks import TaskManager

from .bench import commit, processor
from .core import core_scores
from .core_bundle import read_tasks
from .curves import Curves, draw, table
from .harness import TASKS, curves_of, results_by_depth
from .looped_lm import LoopedLM, check_question, parse_depths


def parse_models(arguments: list[str]) -> dict[str, list[str]]:
    """DIR or NAME=DIR,DIR,... as {name: folders}."""
    models: dict[str, list[str]] = {}
    for argument in arguments:
        name, _, folders = argument.partition("=")
        if not folders or "/" in name:  # a folder whose own name may hold an equals sign
            path = Path(argument)
            name, folders = (path.parent if path.name == "final" else path).name, argument
        if name in models or not all(folders.split(",")):
            raise ValueError(f"{argument!r}: write DIR or NAME=DIR,DIR,... with a name of its own for each model")
        models[name] = folders.split(",")
    return models


def read_texts(path: str) -> list[str]:
    """The field `text` of each line."""
    texts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            texts.append(json.loads(line)["text"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: expected a JSON object with a field 'text'") from error
    if not any(texts):
        raise ValueError(f"{path} holds no text")
    return texts


def text_curves(lm: LoopedLM, texts: list[str]) -> Curves:
    """Over the tokens and bytes of the texts: special tokens are context, and in neither sum."""
    documents = [lm.tok_encode(text, add_special_tokens=False) for text in texts]
    log_p = sum(lm.score_documents(documents))[:, 0]
    tokens, num_bytes = sum(map(len, documents)), sum(len(text.encode()) for text in texts)
    curves: Curves = {"bits per byte": {"": {}}, "perplexity": {"": {}}}
    for depth, nats in zip(lm.depths, (-log_p).tolist()):
        curves["bits per byte"][""][depth] = (nats / math.log(2) / num_bytes, None)
        curves["perplexity"][""][depth] = (math.exp(min(nats / tokens, 700)), None)
    return curves


def measure(lm: LoopedLM, args, texts: list[str] | None, manager: TaskManager | None) -> dict[str, dict[int, float]]:
    """{measure: {depth: value}} of one folder."""
    curves = text_curves(lm, texts) if texts else {}
    if args.tasks:
        options = {"tasks": args.tasks, "task_manager": manager, "num_fewshot": args.num_fewshot, "limit": args.limit}
        options |= {"batch_size": args.batch_size, "bootstrap_iters": 0, "log_samples": False}
        curves |= curves_of(results_by_depth(lm, {"pretrained": lm.pretrained}, {}, **options))
    if args.core:
        scores = core_scores(lm.model, lm.tokenizer, args.core, lm.depths, args.core_examples, None, args.batch_size)
        curves["CORE"] = {"": {depth: (found["core"], None) for depth, found in scores.items()}}
    return {name: {depth: value for depth, (value, _) in points[""].items()} for name, points in curves.items()}


def over_seeds(found: dict[str, list[dict[str, dict[int, float]]]]) -> Curves:
    """Mean and standard deviation over the folders of each model."""
    curves: Curves = {}
    for name, seeds in found.items():
        for measured in seeds[0]:
            for depth in seeds[0][measured]:
                values = [seed[measured][depth] for seed in seeds]
                deviation = statistics.stdev(values) if len(values) > 1 else None
                points = curves.setdefault(measured, {}).setdefault(name, {})
                points[depth] = (statistics.fmean(values), deviation)
    return curves


def parse(arguments: list[str] | None):
    parser = argparse.ArgumentParser(prog="eval.budget", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL", help="DIR, or NAME=DIR,DIR,... for several seeds")
    parser.add_argument("--loops", default="1,3,6,9,12", help="depths: 1,3,6 or 1..8")
    parser.add_argument("--text", metavar="JSONL", help="texts to score, one JSON object with a field `text` a line")
    parser.add_argument("--tasks", type=lambda names: names.split(","), default=[], help="lm-eval's, with commas")
    parser.add_argument("--include_path", help="folder with more tasks than lm-eval's and those of eval/tasks")
    parser.add_argument("--num_fewshot", type=int)
    parser.add_argument("--limit", type=float)
    parser.add_argument("--core", metavar="BUNDLE", help="unpacked eval_bundle, see eval/core.py")
    parser.add_argument("--core_examples", type=int, help="of each task of CORE, e.g. 500; by default all")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--max_length", type=int, help="window, by default the model's")
    parser.add_argument("--device", help="by default a GPU if there is one")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path, default=Path("runs/budget"), help="folder for the table and the plot")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None):
    args = parse(arguments)
    models = parse_models(args.models)
    depths = parse_depths(args.loops)
    if not (args.text or args.tasks or args.core):
        raise ValueError("nothing to measure: pass --text, --tasks or --core")
    texts = read_texts(args.text) if args.text else None
    if args.core:
        read_tasks(args.core, examples=args.core_examples)  # its mistakes too are found before a model is loaded
    manager = TaskManager(include_path=[path for path in (TASKS, args.include_path) if path]) if args.tasks else None
    unknown = [task for task in args.tasks if not manager.match_tasks([task])]
    if unknown:
        raise ValueError(f"Tasks not found: {', '.join(unknown)}")
    for folder in sum(models.values(), []):
        check_question(folder, depths)

    found: dict[str, list] = {name: [] for name in models}
    for name, folders in models.items():
        for folder in folders:
            setup = {"batch_size": args.batch_size, "device": args.device, "dtype": args.dtype}
            lm = LoopedLM(folder, num_loops=depths, max_length=args.max_length, **setup)
            found[name].append(measure(lm, args, texts, manager))
    curves = over_seeds(found)
    print(table(curves))
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "budget.md").write_text(table(curves), encoding="utf-8")
    command = f"python -m eval.budget {shlex.join(sys.argv[1:] if arguments is None else arguments)}"
    where = {"command": command, "commit": commit(), "hardware": processor()}
    record = {**where, "models": models, "values": found, "curves": curves}
    (args.output / "budget.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    draw(curves, args.output / "budget.png")


if __name__ == "__main__":
    main()
