"""Accuracy of one model, or a paired bootstrap of two, from the samples that lm-eval logs (readout paper, table 7):

lm_eval ... --tasks readout_nine_as_released --log_samples --output_path A; the same for B
looped statistics A B --tokenizer MODEL --output statistics.json
looped statistics A1,A2,A3 B1,B2,B3 --output statistics.json

A and B are files of samples or folders that hold them, of any number of multiple-choice tasks; each candidate's
log-likelihood is divided by its length, in the tokenizer's tokens, or in bytes if none is named, with the space before
it (acc_norm of lm-eval divides by characters, without this space). Accuracy is averaged over tasks, the other scores
over items, with intervals from resampling items in pairs, for accuracy within each task. A verdict needs 20 items.
These intervals are of two trained models. Several seeds of each, in pairs by their order, give Student's interval of
the mean difference over seeds, on these items.
"""

import math
from pathlib import Path
from statistics import NormalDist, fmean

import numpy as np

from looped_eval.common.run_folder import folders_of
from looped_eval.common.samples import Item, length_in, read_samples
from looped_recipes.common.command_line import Parser, run_command, say_result, typed
from looped_recipes.common.intervals import FEWEST, over_seeds, students_reach
from looped_recipes.common.provenance import write_json
from looped_recipes.common.words import counted


RESAMPLES = 10_000
LEAST_RESAMPLES = 1_000
SCORES = ("candidate_nll", "gold_nll", "gold_margin", "gold_probability")
ACCURACIES = ("accuracy", "normalised_accuracy")


# scores of one item


def item_scores(item: Item) -> dict[str, float]:
    """Return the scores of one item. All except `accuracy` use log-likelihoods divided by lengths.

    candidate_nll: their negative mean over candidates. gold_margin: that of the right candidate minus the best of the
    other candidates. gold_probability: probability of the right candidate in a softmax over candidates. gold_nll: its
    negative logarithm. The paper's "candidate NLL" of 1.475 must be gold_nll: guessing has a gold_nll of 1.20 on its
    items, and candidate_nll would mean 1.475 nats per token, which a model of its perplexity does not have.
    """
    normalised = item.log_likelihoods / item.lengths
    probabilities = np.exp(normalised - normalised.max())
    return {
        "accuracy": float(item.log_likelihoods.argmax() == item.gold),
        "normalised_accuracy": float(normalised.argmax() == item.gold),
        "candidate_nll": float(-normalised.mean()),
        "gold_nll": float(np.log(probabilities.sum()) - normalised[item.gold] + normalised.max()),
        "gold_margin": float(normalised[item.gold] - np.delete(normalised, item.gold).max()),
        "gold_probability": float(probabilities[item.gold] / probabilities.sum()),
    }


# intervals


def paired_bootstrap(
    first: np.ndarray,
    second: np.ndarray,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    tasks: np.ndarray | None = None,
) -> tuple[float, float] | None:
    """Return the percentile interval of mean(second - first) over items resampled with replacement, or None if there
    is a single item, of any task.

    tasks: the task of each item; the mean is then that of the tasks' means, and items are resampled within a task.
    Resamples of n items scatter by sqrt((n - 1) / n) of what means of n items do, and percentiles take this scatter
    for known: the interval is widened by the inverse, and by the ratio of Student's quantile to the normal one, with
    the degrees of freedom of Welch and Satterthwaite, as a task of few items may decide how means of tasks scatter.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(f"a paired interval needs equally many scores of both, got {len(first)} and {len(second)}")
    differences = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    of_tasks = [differences] if tasks is None else [differences[tasks == task] for task in sorted({*tasks})]
    if min(map(len, of_tasks)) < 2:
        return None
    mean = np.mean([of.mean() for of in of_tasks])
    items, variances = np.array([(len(of), of.var(ddof=1) / len(of)) for of in of_tasks]).T  # of the tasks' means
    degrees = variances.sum() ** 2 / (variances**2 / (items - 1)).sum() if variances.any() else 1
    of_tasks = [(of - of.mean()) * math.sqrt(len(of) / (len(of) - 1)) for of in of_tasks]
    rng = np.random.default_rng(0)
    means = [np.mean([of[rng.integers(len(of), size=len(of))].mean() for of in of_tasks]) for _ in range(resamples)]
    reach = students_reach(1.0, degrees, level=level) / NormalDist().inv_cdf((1 + level) / 2)
    low, high = mean + reach * np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def averages(items: list[Item]) -> dict[str, float]:
    """Return the means of one model: accuracies over tasks, the other scores over items."""
    tasks, found = np.array([item.task for item in items]), [item_scores(item) for item in items]
    columns = {name: np.array([scores[name] for scores in found]) for name in (*ACCURACIES, *SCORES)}
    by_task = {name: [columns[name][tasks == task].mean() for task in sorted(set(tasks))] for name in ACCURACIES}
    return {name: float(np.mean(by_task.get(name, columns[name]))) for name in columns}


def compare(first: list[Item], second: list[Item], level: float = 0.95, resamples: int = RESAMPLES) -> dict:
    """Return the means of both models, their difference, and its interval. A score that is infinite for an item,
    because a model gives a candidate no probability at all, has no difference."""
    ours = pair(first, second)
    sides = [[of_pair[side] for of_pair in ours] for side in (0, 1)]
    means, scores = [averages(side) for side in sides], [[item_scores(item) for item in side] for side in sides]
    result = {"items": len(ours), "tasks": sorted({a.task for a, _ in ours}), "level": level, "resamples": resamples}
    result["other_prompts"] = sum(a.prompt != b.prompt for a, b in ours)
    tasks = np.array([item.task for item in sides[0]])
    for name in (*ACCURACIES, *SCORES):
        a, b = (np.array([score[name] for score in of_side]) for of_side in scores)
        finite = np.isfinite([a, b]).all()
        of_tasks = tasks if name in ACCURACIES else None
        interval = paired_bootstrap(a, b, level, resamples, tasks=of_tasks) if finite else None
        first_mean, second_mean = (of_side[name] for of_side in means)
        result[name] = {
            "first": first_mean,
            "second": second_mean,
            "change": second_mean - first_mean if finite else None,
            "interval": interval,
        }
    return result


def compare_seeds(first: list[list[Item]], second: list[list[Item]], level: float = 0.95) -> dict:
    """Return what `compare` does of the i-th seeds of two models in pairs: means over seeds, and Student's interval of
    the mean difference."""
    pairs = [of_pair for of_seed in (*first[1:], *second) for of_pair in pair(first[0], of_seed)]
    result = {"items": len(first[0]), "tasks": sorted({item.task for item in first[0]}), "level": level}
    result["seeds"], result["other_prompts"] = len(first), len({a.key for a, b in pairs if a.prompt != b.prompt})
    means = [[averages(of_seed) for of_seed in side] for side in (first, second)]
    for name in (*ACCURACIES, *SCORES):
        a, b = ([of_seed[name] for of_seed in side] for side in means)
        finite = np.isfinite([a, b]).all()
        change = over_seeds([theirs - ours for ours, theirs in zip(a, b)], level=level) if finite else None
        result[name] = {
            "first": fmean(a),
            "second": fmean(b),
            "change": change and change.value,
            "interval": change and (change.low, change.high),
            "first_seeds": a,
            "second_seeds": b,
        }
    return result


def pair(first: list[Item], second: list[Item]) -> list[tuple[Item, Item]]:
    of_second = {item.key: item for item in second}
    of_first = {item.key: item for item in first}
    alone = sorted({*of_first} ^ {*of_second})
    if alone:
        task, doc_id, _ = alone[0]
        same_tasks = {item.task for item in first} == {item.task for item in second}
        read = "; a file's task is read from its name, samples_TASK_TIME.jsonl: keep the names that lm-eval gave"
        raise ValueError(
            f"{len(alone)} items are in one of the two only, e.g. doc_id {doc_id} of {task}: compare runs of the same "
            f"tasks, without a --limit or with the same{'' if same_tasks else read}"
        )
    pairs = [(item, of_second[key]) for key, item in of_first.items()]
    other = [(a, b) for a, b in pairs if (a.candidates, a.gold) != (b.candidates, b.gold)]
    if other:
        a, b = other[0]
        raise ValueError(
            f"{len(other)} of {len(pairs)} items have other candidates or another right one in one of the two, e.g. "
            f"doc_id {a.doc_id} of {a.task}: {list(a.candidates)}, of which {a.gold} is right, counted from 0, and "
            f"{list(b.candidates)}, of which {b.gold} is: evaluate both by the same version of the task"
        )
    return pairs


def items_of(result: dict) -> str:
    items = f"{result['items']:,}"
    return f"{counted(items, 'item')} of {counted(len(result['tasks']), 'task')}"


def table(result: dict) -> str:
    percent = f"{100 * result['level']:g} %"
    seeds = f", {result['seeds']} seeds each" if "seeds" in result else ""
    lines = [f"| {items_of(result)}{seeds} | first | second | change | {percent} |"]
    lines.append("|---|---:|---:|---:|---|")
    for name in (*ACCURACIES, *SCORES):
        score = result[name]
        interval = "–" if score["interval"] is None else "[{:+.4f}, {:+.4f}]".format(*score["interval"])
        change = "–" if score["change"] is None else f"{score['change']:+.4f}"
        values = f"{score['first']:.4f} | {score['second']:.4f} | {change}"
        lines.append(f"| {name.replace('_', ' ')} | {values} | {interval} |")
    return "\n".join(lines)


def table_of_one(result: dict) -> str:
    lines = [f"| {items_of(result)} | mean |", "|---|---:|"]
    return "\n".join(lines + [f"| {name.replace('_', ' ')} | {result[name]:.4f} |" for name in (*ACCURACIES, *SCORES)])


def difference_in_words(result: dict) -> str:
    """Say which model has the lower gold_nll, which accuracies say the opposite, and what the intervals are of."""
    change, interval = result["gold_nll"]["change"], result["gold_nll"]["interval"]
    if change is None:
        return "No verdict: a right candidate has no probability at all, and so an infinite gold_nll."
    if interval is None:
        return f"No verdict from {items_of(result)}: gold_nll of the second less the first is {change:+.4f}."
    lies = "of the second less the first lies in [{:+.4f}, {:+.4f}]"
    said = f"gold_nll {lies.format(*interval)}."
    if result["items"] < FEWEST:
        return f"No verdict from {items_of(result)}, fewer than {FEWEST} items: {said}"
    low, high = interval
    of_what = " This is of these trained models, not over seeds."
    if "seeds" in result:
        of_what = f" This is over {result['seeds']} seeds, on these items."
    if low <= 0 <= high:
        return f"Neither is clearly better: {said}{of_what}"
    said = f"The {'first' if low > 0 else 'second'} has the lower gold_nll: {said}"
    for name in ACCURACIES:
        of_accuracy = result[name]["interval"]
        if of_accuracy is not None and (of_accuracy[0] > 0 < low or of_accuracy[1] < 0 > high):
            said += f" But it has the lower {name.replace('_', ' ')}, which {lies.format(*of_accuracy)}."
    return said + of_what


def main(arguments: list[str] | None = None) -> dict:
    parser = Parser("looped statistics", __doc__)
    parser.add_argument("first", help="file or folder of samples, or several with commas: seeds of one model")
    parser.add_argument("second", nargs="?", help="without it, the scores of the first alone")
    parser.add_argument("--tokenizer", help="folder or name; lengths are in its tokens")
    parser.add_argument("--level", type=float, default=0.95)
    parser.add_argument("--resamples", type=int, default=RESAMPLES)
    parser.add_argument("--output", type=Path, help="JSON to write")
    options = parser.parse_args(arguments)
    if not 0 < options.level < 1 or options.resamples < LEAST_RESAMPLES:
        raise ValueError(
            f"--level must lie between 0 and 1, and --resamples be at least {LEAST_RESAMPLES:,}, as the ends of an "
            f"interval of fewer are chance; got {options.level:g} and {options.resamples}"
        )
    seeds = [folders_of(side) for side in (options.first, options.second) if side is not None]
    if len(seeds[0]) != len(seeds[-1]) or len(seeds) == 1 < len(seeds[0]):
        given = " and ".join(str(len(side)) for side in seeds)
        raise ValueError(f"seeds are compared in pairs, got {given}: name as many of a second model, A1,A2 B1,B2")
    length = length_in(options.tokenizer)
    first, *second = [[read_samples(folder, length) for folder in side] for side in seeds]
    if not second:
        (first,) = first
        result = {"items": len(first), "tasks": sorted({item.task for item in first}), **averages(first)}
        print(table_of_one(result))
        found = f"Normalised accuracy is {result['normalised_accuracy']:.4f} over {items_of(result)}."
        then = [f"{typed('looped statistics', options.first)} OTHER"]
    else:
        if len(first) > 1:
            result = compare_seeds(first, second[0], options.level)
        else:
            result = compare(first[0], second[0][0], options.level, options.resamples)
        print(table(result))
        found = difference_in_words(result)
        if result["other_prompts"]:
            found += (
                f" Of {counted(result['items'], 'item')}, {result['other_prompts']} had other prompts in one of the "
                "two, such as other shots or a chat template: the difference is of these, too."
            )
        then = [] if options.output else [f"{options.command} --output statistics.json"]
    if options.output:
        write_json(options.output, result, options.command)
    say_result(found, *then)
    return result


if __name__ == "__main__":
    run_command(main)
