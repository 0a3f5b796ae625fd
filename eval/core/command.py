"""CORE and CORE-extended (Parcae, appendix M) at every depth from one pass of the model."""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from looped_eval.common.curves import Curves, table
from looped_eval.common.findings import best_depths
from looped_eval.harness.looped_lm import LoopedLM
from looped_eval.harness.question import check_question
from looped_recipes.common.command_line import say_result, typed
from looped_recipes.common.provenance import write_json

from .bundle import CoreTask, read_tasks
from .options import parse
from .scoring import accuracies


# the tasks of table 15, with their labels in the bundle
EXTENDED = """
    hellaswag_zeroshot hellaswag lambada_openai winograd winogrande bigbench_language_identification
    bigbench_conlang_translation bigbench_conceptual_combinations jeopardy bigbench_qa_wikidata arc_easy arc_challenge
    mmlu_zeroshot mmlu_fewshot bigbench_misconceptions copa commonsense_qa piqa openbook_qa siqa
    bigbench_novel_concepts bigbench_strange_stories bigbench_strategy_qa bigbench_dyck_languages agi_eval_lsat_ar
    bigbench_cs_algorithms bigbench_operators bigbench_repeat_copy_logic bigbench_elementary_math_qa
    bigbench_logical_deduction simple_arithmetic_nospaces simple_arithmetic_withspaces math_qa logi_qa squad coqa boolq
    pubmed_qa_labeled agi_eval_lsat_rc agi_eval_lsat_lr agi_eval_sat_en bigbench_understanding_fables
    winogender_mc_female winogender_mc_male enterprise_pii_classification bbq
""".split()


class Suite(NamedTuple):
    """The evaluated tasks, and the tasks over which each mean is taken."""

    tasks: dict[str, CoreTask]  # by label
    means: dict[str, list[str]]  # labels of the tasks of "core" and "core_extended"

    def seeded(self, seed: int) -> "Suite":
        return self._replace(tasks={label: replace(task, shots_seed=seed) for label, task in self.tasks.items()})


def read_suite(bundle, examples: int | None, extended: str | None, only: list[str] | None) -> Suite:
    lists = {"core": read_tasks(bundle, examples=examples)}
    if extended:
        lists["core_extended"] = read_extended(bundle, extended, examples)
    tasks = {task.label: task for members in reversed(lists.values()) for task in members}
    if only is None:
        return Suite(tasks, {name: [task.label for task in members] for name, members in lists.items()})
    unknown = [label for label in only if label not in tasks]
    if unknown:
        more = "" if extended else "; --extended brings more"
        raise ValueError(f"there is no task {', '.join(unknown)}; known are {', '.join(tasks)}{more}")
    return Suite({label: tasks[label] for label in only}, {})


def core_scores(
    model,
    tokenizer,
    bundle: Path | str,
    loops: list[int] | None = None,
    examples: int | None = None,
    extended: str | None = None,
    batch_size: int = 8,
    device: str | None = None,
    max_length: int | None = None,
    tasks: list[str] | None = None,
    seeds: list[int] | None = None,
    trust_remote_code: bool = False,
) -> dict[int, dict]:
    """Return {depth: {"core", "core_extended" if `extended` is set, "tasks": {label: {"accuracy", "centered"}}}}.

    loops: depths; None is the model's default. examples: number per task; None is all. extended: name of the longer
    list, or eval_meta_data.csv. max_length: longer prompts lose their beginning; None is the model's limit. tasks:
    labels of the only tasks to evaluate; means over tasks are then left out.
    seeds: every value is then a mean over seeds with a "..._deviation" beside it; "seeds" is {seed: scores as above}.
    """
    suite = read_suite(bundle, examples, extended, tasks)
    setup = {"batch_size": batch_size, "device": device, "max_length": max_length}
    lm = LoopedLM(model, tokenizer=tokenizer, num_loops=loops, trust_remote_code=trust_remote_code, **setup)
    if seeds is None:
        return scores_of(lm, suite)
    by_seed = {}
    for seed in seeds:
        lm.state_seed = seed if lm.config.state_init == "normal" else None
        by_seed[seed] = scores_of(lm, suite.seeded(seed))
    return {depth: over_seeds({seed: found[depth] for seed, found in by_seed.items()}) for depth in lm.depths}


def scores_of(lm: LoopedLM, suite: Suite) -> dict[int, dict]:
    found = {label: accuracies(lm, task) for label, task in suite.tasks.items()}
    results = {}
    for column, depth in enumerate(lm.depths):
        of_tasks = {
            label: {"accuracy": values[column], "centered": suite.tasks[label].centered(values[column])}
            for label, values in found.items()
        }
        results[depth] = {name: mean_centered(of_tasks, labels) for name, labels in suite.means.items()}
        results[depth]["tasks"] = of_tasks
    return results


def over_seeds(found: dict[int, dict]) -> dict:
    """Combine the scores of one depth over seeds: means with deviations."""
    one = next(iter(found.values()))
    result = {}
    for name in (name for name in one if name != "tasks"):
        result |= with_deviation(name, [of_seed[name] for of_seed in found.values()])
    result["tasks"] = {}
    for label, scores in one["tasks"].items():
        of_task = result["tasks"][label] = {}
        for name in scores:
            of_task |= with_deviation(name, [of_seed["tasks"][label][name] for of_seed in found.values()])
    return {**result, "seeds": found}


def with_deviation(name: str, values: list[float]) -> dict[str, float]:
    deviation = {f"{name}_deviation": float(np.std(values))} if len(values) > 1 else {}
    return {name: statistics.fmean(values)} | deviation


def read_extended(bundle, listed: str, examples: int | None) -> list[CoreTask]:
    tasks = read_tasks(bundle, listed, examples, only=EXTENDED)
    missing = sorted(set(EXTENDED) - {task.label for task in tasks})
    if missing:
        raise ValueError(f"{listed} of {bundle} lists no {', '.join(missing)}, which CORE-extended is a mean over")
    return tasks


def mean_centered(of_tasks: dict[str, dict], labels: list[str]) -> float:
    return sum(of_tasks[label]["centered"] for label in labels) / len(labels)


def curves_of(results: dict[int, dict], series: str = "") -> Curves:
    curves: Curves = {}
    for depth, found in results.items():
        points = {"CORE": (found, "core"), "CORE-extended": (found, "core_extended")}
        points |= {label: (scores, "accuracy") for label, scores in found["tasks"].items()}
        for measure, (values, name) in points.items():
            if name in values:
                point = (values[name], values.get(f"{name}_deviation"))
                curves.setdefault(measure, {}).setdefault(series, {})[depth] = point
    return curves


def next_commands(options) -> list[str]:
    """Return commands that add the means over tasks, or the deviations over seeds, if this run had none."""
    if options.tasks:
        return [typed("looped core", options.model, "--bundle", options.bundle)]
    return [] if options.seeds else [f"{options.command} --seeds 1234,2345,3456"]


def main(arguments: list[str] | None = None) -> dict[int, dict]:
    options = parse(arguments)
    check_question(options.model, options.num_loops)
    results = core_scores(
        options.model,
        tokenizer=None,  # that of the model
        trust_remote_code=options.trust_remote_code,
        bundle=options.bundle,
        loops=options.num_loops,
        examples=options.examples,
        extended=options.extended,
        batch_size=options.batch_size,
        device=options.device,
        max_length=options.max_length,
        tasks=options.tasks,
        seeds=options.seeds,
    )
    curves = curves_of(results)
    print(table(curves))
    if options.output:
        write_json(options.output, {"depths": results}, options.command)
        print(f"written: {options.output}")
    say_result(best_depths(curves), *next_commands(options))
    return results
