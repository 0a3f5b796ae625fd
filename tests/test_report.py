"""The report: one page that stands alone, with what a run left and the commands for what it did not."""

import json
import math
import os
import random
import re
import shutil
from html.parser import HTMLParser
from itertools import product
from statistics import fmean

import pytest
import yaml

from looped_eval.common.run_folder import RunError, RunFolder, open_runs
from looped_eval.report import command as report
from looped_eval.report.about import facts
from looped_eval.report.measured import above_chance, results_of
from looped_eval.report.training import best_run, clip_shares, gradient_blocks
from looped_recipes.common.axis import written
from looped_recipes.common.flops import sizes
from looped_recipes.settings.costs import plan
from looped_recipes.settings.recipe import load_recipe, recipe_from_dict
from modeling_looped import LoopedConfig, depths_of_step


VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags close in order; collects charts by their titles, table cells, links and text."""

    def __init__(self, html: str):
        super().__init__()
        self.open, self.charts, self.cells, self.links, self.ids, self.text = [], [], [], [], [], ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "svg":
            self.charts.append(attributes["aria-label"])
        if tag == "a":
            self.links.append(attributes["href"])
        if tag in ("td", "th"):
            self.cells.append("")
        self.ids.append(attributes.get("id"))
        assert tag not in ("script", "link", "iframe") and not any(name.startswith("on") for name in attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def make_report(folders, output=None):
    """Where the page of these runs lies."""
    return report.main([*map(str, folders), *(["--output", str(output)] if output else [])])


def make_run(folder, loops=3, losses=None, finished=True, validation=True, lr=0.01, seed=0, held_out=None):
    """The folder of a small run of `recipes.pretrain`, without weights."""
    fields = {"hidden_size": 64, "vocab_size": 99, "num_attention_heads": 4, "num_loops": loops, "injection": "add"}
    recipe = recipe_from_dict(
        {
            "model": fields,
            "data": {"sequence_length": 32, "source": "<b>text</b>"},
            "training": {"rows_per_step": 4, "output_dir": str(folder), "seed": seed, "max_loss": 9.0},
            "optimizer": {"lr": lr},
        }
    )
    folder.mkdir(parents=True)
    recipe.save(folder / "recipe.yaml")
    if finished:
        LoopedConfig(**fields).save_pretrained(folder / "final")
    losses = [5 - 0.1 * step for step in range(20)] if losses is None else losses
    records = [
        {"step": step, "loss": loss, "gradient_norm": 1.5, "tokens_per_second": 1234.5}
        for step, loss in enumerate(losses)
    ]
    for record in records[::5]:
        record.update({f"residual_norm/loop_{k}": 1.0 + k for k in range(1, loops + 1)})
        record.update(residual_norm=1.0 + loops, state_change=0.25)
    if validation:
        depths = {f"validation/loss_at_{k}": 4 - 0.125 * k for k in range(1, 2 * loops + 1)}
        bits = {f"validation/bits_per_byte_at_{k}": 2 - 0.0625 * k for k in range(1, 2 * loops + 1)}
        records.append({"step": len(losses) - 1, **depths, **bits, "validation/loss": held_out or 4 - 0.125 * loops})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def page_of(*folders) -> Page:
    return Page(make_report(folders).read_text(encoding="utf-8"))


def add_results(run, depth: int, accuracy: float, where="results", model_args=None):
    folder = run / where / f"loops_{depth}" if model_args is None else run / where
    folder.mkdir(parents=True, exist_ok=True)
    metrics = {"alias": "hop", "acc,none": accuracy, "acc_stderr,none": 0.01, "acc_norm,none": 0.5, "f1,first": "N/A"}
    content = {"results": {"hop": metrics}, "config": {"model_args": model_args}}
    content["configs"] = {"hop": {"metadata": {"chance": 0.5}}}
    (folder / f"results_2025-01-0{depth}.json").write_text(json.dumps(content))


def test_the_page_holds_the_run_and_stands_alone(tmp_path):
    run = make_run(tmp_path / "first")
    html = make_report([run]).read_text(encoding="utf-8")
    page = Page(html)
    assert not re.search(r"https?://|@import|url\(", html)
    assert set(page.links) <= {f"#{name}" for name in page.ids} and len(page.links) >= 5
    charts = ["Loss", "Gradient before clipping", "cross-entropy", "bits per byte", "Over loops, at the end"]
    assert page.charts == [
        *charts,
        "After the last loop, over training",
    ]  # and no spectral radius, which was not logged
    assert '<p class="finding">6 loops are best here: 1.625 bits per byte; 3 loops as trained cost 0.188; ' in html
    assert "<title>first: loops 3, bits per byte 1.812</title>" in html
    parameters = sizes(LoopedConfig.from_pretrained(run / "final")).total
    for cell in (
        "finished",
        f"{parameters:,}",
        "<b>text</b>, 2,560 tokens seen",
        "1,234",
        "3.6250",
        "1.8125",
        "4.0000",
    ):
        assert cell in page.cells  # tokens: 20 steps of 4 rows of 32; losses at three loops; the norm after the last
    row = page.cells[page.cells.index("cross-entropy") :][2:8]
    assert [float(cell) for cell in row] == pytest.approx([4 - 0.125 * k for k in range(1, 7)], abs=1e-4)
    assert "rows_per_step: 4" in page.text  # the resolved recipe


def test_what_is_missing_names_the_command_that_makes_it(tmp_path):
    run = make_run(tmp_path / "the first", validation=False)
    text = page_of(run).text
    assert f"looped eval --model looped --model_args 'pretrained={run}/final,num_loops=1..3' --tasks" in text
    assert "--output" not in text  # the report finds what commands write by themselves
    for command in ("halting", "diagnose all"):
        assert f"looped {command} '{run}'" in text
    assert f"looped pretrain '{run}/recipe.yaml' evaluation.every=100" in text
    add_results(run, 1, 0.5)
    assert "looped eval" not in page_of(run).text


def test_a_phone_shows_findings_first_and_what_is_missing_last(tmp_path):
    html = make_report([make_run(tmp_path / "first")]).read_text(encoding="utf-8")
    folds = re.findall(r'<details class="phone">.*?</details>', html, flags=re.DOTALL)
    assert sum(fold.count("<svg") for fold in folds) == html.count("<svg") > 0
    assert not any('class="finding"' in fold or 'class="missing"' in fold for fold in folds)
    titles = re.findall(r"<h2 [^>]*>(.*?)</h2>", html)
    assert titles[-1] == "Not measured yet" and not {"Early exit", "Diagnostics"} & set(titles)


def test_runs_are_compared(tmp_path):
    first, second = make_run(tmp_path / "first"), make_run(tmp_path / "second", loops=4, lr=0.02)
    page = page_of(first, second)
    assert (first / "report.html").exists() and page.cells[1:3] == ["first", "second"]
    where = page.cells.index("optimizer.lr")
    assert page.cells[where + 1 : where + 3] == ["0.01", "0.02"]
    assert "model.num_loops" in page.cells and "training.output_dir" not in page.cells
    assert "data.source" not in page.cells  # the same in both
    again = make_run(tmp_path / "other" / "first")
    assert page_of(first, again).cells[1:3] == [str(first), str(again)]


def test_a_sweep_is_all_its_runs(tmp_path):
    for name, lr in (("lr=0.02", 0.02), ("lr=0.01", 0.01)):
        make_run(tmp_path / "sweep" / name, lr=lr)
    (tmp_path / "sweep" / "jobs").mkdir()
    page = page_of(tmp_path / "sweep")
    assert page.cells[1:3] == ["lr=0.01", "lr=0.02"]
    assert (tmp_path / "sweep" / "report.html").is_file()


def make_ablation(folder, losses: dict):
    """losses: {(loops, lr, seed): loss}. The sweep has 4 loops before 3."""
    for (loops, lr, seed), loss in losses.items():
        make_run(folder / f"loops={loops}_lr={lr}_seed={seed}", loops, lr=lr, seed=seed, held_out=loss)
    names = [f"loops={loops}_lr={lr}_seed={seed}" for loops, lr, seed in losses]
    (folder / "results.jsonl").write_text("".join(json.dumps({"name": name}) + "\n" for name in names))
    return folder


ABLATION = {  # by loops and rate, of three seeds
    (4, 0.01): (3.0, 3.1, 3.2),
    (4, 0.02): (2.9, 3.1, 3.0),  # -0.1, 0 and -0.2 against the rate 0.01
    (3, 0.01): (3.2, 3.4, 3.3),  # +0.2, +0.3 and +0.1 against 4 loops
    (3, 0.02): (3.2, 3.2, 3.2),  # 0, -0.2 and -0.1; +0.3, +0.1 and +0.2
}


def test_the_mean_depth_is_that_of_what_is_drawn(tmp_path):
    """Huginn's sampler draws one loop more than the mean of the recipe, and a maximum cuts its draws."""
    run = make_run(tmp_path / "run")
    drawn = {}
    for maximum in (None, 8):
        recipe = yaml.safe_load((run / "recipe.yaml").read_text())
        recipe["depth"] = {"sampler": "poisson_lognormal", "mean": 4.0, "maximum": maximum}
        (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        (folder,) = open_runs([run])
        drawn[maximum] = facts(folder)["depth in training"]
        depths = depths_of_step("poisson_lognormal", 4.0, 1, 0, range(4000), maximum=maximum)
        assert float(re.search(r"mean ([\d.]+)", drawn[maximum])[1]) == pytest.approx(fmean(depths), abs=0.15)
        runnable = ["training.steps=20", "training.micro_batch_size=4", "data.tokenizer=words"]
        assert plan(load_recipe(run / "recipe.yaml", runnable))["mean depth"] == folder.operations.mean_depth
    assert drawn[None] == "poisson_lognormal, mean 5"
    assert re.fullmatch(r"poisson_lognormal, mean 4\.\d+, none above 8", drawn[8])
    shutil.rmtree(run / "final")
    assert facts(open_runs([run])[0])["depth in training"] == drawn[8]  # while it is trained, too


def test_runs_at_equal_operations(tmp_path):
    """3 loops for 20 steps of 128 tokens, of which each needs 6 operations for a parameter that it meets, and 3 times
    4 * width * keys for every attention: 2 core layers are looped, and the unembedding is applied once."""
    run = make_run(tmp_path / "run")
    (folder,) = open_runs([run])
    n, config = sizes(LoopedConfig.from_pretrained(run / "final")), folder.config
    per_token = 6 * (3 * n.core + n.head) + 3 * 4 * 64 * 32 * 3 * config["num_core_layers"] + 6 * (n.outer + n.coda)
    per_token += 3 * 4 * 64 * 32 * (config["num_prelude_layers"] + config["num_coda_layers"])
    assert folder.operations.of_run(20) == 20 * 128 * per_token
    said = facts(folder)["training FLOPs"]
    assert said == f"{written(2560 * per_token)}, {written(per_token)} a token" and "×10" in said
    page = page_of(run, make_run(tmp_path / "deeper", loops=6))
    at = page.cells.index("training FLOPs")
    assert page.cells[at + 1] == said != page.cells[at + 2]
    shutil.rmtree(run / "final")
    assert facts(open_runs([run])[0])["training FLOPs"] == "–"  # the sizes of the model are not known for sure


def test_seeds_are_replicas(tmp_path):
    """By seed, the rate changes -0.05, -0.1 and -0.15 over both depths, and one loop less +0.25, +0.2 and +0.15: both
    have a deviation of 0.05. Student's 97.5 % of two degrees of freedom is 4.30265, so that the intervals reach 0.1242
    far, and that of the first mean, whose losses have a deviation of 0.1, twice as far."""
    losses = {(*setting, seed): loss for setting, of in ABLATION.items() for seed, loss in enumerate(of)}
    folder = make_ablation(tmp_path / "a", losses)
    assert report.headlines(open_runs([folder])) == [
        "model.num_loops: 3 against 4: the loss changes by +0.2000 [+0.0758, +0.3242] over 3 seeds.",
        "optimizer.lr: 0.02 against 0.01: no difference that 3 seeds tell (loss -0.1000 [-0.2242, +0.0242]).",
    ]
    page = page_of(folder)
    assert page.cells[:5] == ["model.num_loops", "optimizer.lr", "seeds", "mean loss, 95 %", "diverged"]
    assert page.cells[5:10] == ["4", "0.01", "3", "3.1000 [2.8516, 3.3484]", "0"]
    assert page.cells[20:25] == ["3", "0.02", "3", "3.2000 [3.2000, 3.2000]", "0"]
    assert page.cells[25 + 6 + 5] == "2 of 2" and "fewest" not in page.text


def test_runs_that_diverged_or_go_on_are_in_no_mean(tmp_path):
    losses = {(*setting, seed): loss for setting, of in ABLATION.items() for seed, loss in enumerate(of)}
    folder = make_ablation(tmp_path / "a", losses | {(3, 0.02, 2): 9.5})  # above max_loss
    (folder / "loops=3_lr=0.01_seed=2" / "diverged.txt").write_text("the loss of step 3 is nan")
    shutil.rmtree(folder / "loops=4_lr=0.02_seed=2" / "final")
    said = report.headlines(open_runs([folder]))
    assert said[0] == (  # +0.25 and +0.2, and 12.7062 of one degree of freedom times 0.025
        "model.num_loops: 3 against 4: no difference that 2 seeds tell (loss +0.2250 [-0.0927, +0.5427])."
    )
    assert said[2:] == [
        "2 runs diverged, in no mean: loops=3_lr=0.01_seed=2, loops=3_lr=0.02_seed=2.",
        "1 run without a last validation, in no mean: loops=4_lr=0.02_seed=2.",
    ]
    page = page_of(folder)
    assert page.cells[15:20] == ["3", "0.01", "2", "3.3000 [2.0294, 4.5706]", "1"]  # 12.7062 * 0.1


def test_a_limit_of_the_loss_is_for_the_end_of_a_run(tmp_path):
    folders = [make_run(tmp_path / name, held_out=9.5, finished=name == "a") for name in "ab"]
    ended, on_its_way = open_runs(folders)
    assert ended.status == "diverged: the run ended at 9.5000, above training.max_loss=9.0"
    assert on_its_way.status == "not finished: 20 steps so far"


def test_one_seed_has_no_interval(tmp_path):
    """Nothing else changes. Settings with one seed are compared in that seed where others have more."""
    losses = {(loops, lr, 0): of[0] for (loops, lr), of in ABLATION.items()}
    folder = make_ablation(tmp_path / "a", losses)
    best, said, *rest = report.headlines(open_runs([folder]))
    assert "needs the fewest bits per byte" in best and len(rest) == 4
    assert said == "Each of these runs is one seed, which has no interval: other seeds may order them otherwise."
    assert "Over seeds" not in page_of(folder).text
    for seed in (1, 2):
        make_run(folder / f"loops=3_lr=0.01_seed={seed}", lr=0.01, seed=seed, held_out=3.4)
    assert report.headlines(open_runs([folder])) == [
        "model.num_loops: 3 against 4: the loss changes by +0.2500 in one seed, which has no interval.",
        "optimizer.lr: 0.02 against 0.01: the loss changes by -0.0500 in one seed, which has no interval.",
    ]
    (folder / "results.jsonl").write_text('{"other": 1}\n')  # then in the order of names
    assert report.headlines(open_runs([folder]))[0].startswith("model.num_loops: 4 against 3")


def change(run, section, **settings):
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe[section] |= settings
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def test_settings_that_decide_no_loss_part_no_seeds(tmp_path):
    """3.2 +- 4.30265 * 0.2 / sqrt(3)."""
    runs = [make_run(tmp_path / f"{seed}", seed=seed, held_out=3 + 0.2 * seed) for seed in range(3)]
    change(runs[1], "logging", every=2)
    change(runs[1], "data", cache_dir="elsewhere")
    change(runs[2], "training", resume="changed", keep_last=1)
    assert report.headlines(open_runs(runs)) == ["Loss 3.2000 [2.7032, 3.6968] over 3 seeds."]


def test_a_run_that_was_trained_once_counts_for_both_settings(tmp_path):
    """4 loops change -0.1 without a rule and +0.4 with it, where 1 loop is that without: +0.15. The rule changes 0 at
    1 loop and +0.5 at 4: +0.25."""
    lines, losses = [], {("none", 1): 3.0, ("none", 4): 2.9, ("linear", 1): None, ("linear", 4): 3.4}
    for ((rule, loops), loss), seed in product(losses.items(), (0, 1)):
        line = {"name": f"{rule}_{loops}_{seed}", "model.num_loops": loops, "training.seed": seed}
        lines.append({**line, "model.residual_scaling": rule})
        if loss is None:
            lines[-1]["same_as"] = f"none_{loops}_{seed}"
        else:
            change(make_run(tmp_path / line["name"], loops, seed=seed, held_out=loss), "model", residual_scaling=rule)
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report.headlines(open_runs([tmp_path])) == [
        "model.num_loops: 4 against 1: the loss changes by +0.1500 [+0.1500, +0.1500] over 2 seeds.",
        "model.residual_scaling: linear against none: the loss changes by +0.2500 [+0.2500, +0.2500] over 2 seeds.",
    ]
    without_rule = [tmp_path / f"none_1_{seed}" for seed in (0, 1)]
    assert report.headlines(open_runs(without_rule)) == ["Loss 3.0000 [3.0000, 3.0000] over 2 seeds."]


def test_task_results_of_every_depth(tmp_path):
    run = make_run(tmp_path / "first")
    for depth, accuracy in ((1, 0.25), (2, 0.375)):
        add_results(run, depth, accuracy)
    add_results(run, 4, 0.75, where="plain", model_args="pretrained=x,num_loops=4")
    add_results(run, 5, 0.625, where="plain", model_args={"pretrained": "x", "num_loops": 5})
    (run / "results" / "results_broken.json").write_text('{"results": ')
    other = {"results": {"hop": {"acc,none": 1.0}}, "configs": {"hop": {"metadata": "chance: 0.5"}}}
    (run / "results" / "results_other.json").write_text(json.dumps(other))
    way = run / "step-00000010"  # a model of the way, and another run
    LoopedConfig().save_pretrained(way)
    add_results(way / "eval", 2, 0.125)
    add_results(make_run(run / "other"), 2, 0.125)
    found, chance, few, unread = results_of(RunFolder(run, "first"))
    assert found["hop acc"] == {"": {1: (0.25, 0.01), 2: (0.375, 0.01), 4: (0.75, 0.01), 5: (0.625, 0.01)}}
    assert set(found) == {"hop acc", "hop acc_norm"} and few == set() and len(unread) == 2
    assert chance == {"hop acc": 0.5, "hop acc_norm": 0.5}
    page = page_of(run)
    assert (
        "first: 1 of 1 accuracies is above chance at the best depth; 1 is left out," in page.text
        and "chance (0.5)" in page.text
    )
    where = page.cells.index("hop acc")
    assert (
        page.cells[where + 2] == "0.2500\xa0±\xa00.0100"
        and "results_broken.json holds no lm-eval results" in page.text
    )


def test_the_same_accuracy_with_and_without_an_error():
    """Of equal ones the least sure counts; of some results lm-eval gives no standard error, and alone they tell
    nothing."""
    found = {"hop acc": {"run": {1: (0.75, None), 2: (0.75, 0.25), 4: (0.5, None)}}}
    assert above_chance(found, {"hop acc": 0.5}) == ["run: 0 of 1 accuracies are above chance at the best depth."]
    alone = {"hop acc": {"run": {1: (0.5001, None), 2: (0.25, 0.125)}}}
    left_out = "1 is left out, of fewer than 20 questions or without a standard error."
    (said,) = above_chance(alone, {"hop acc": 0.5})
    assert said == f"run: 0 of 0 accuracies are above chance at the best depth; {left_out}"


def test_models_that_guess_are_rarely_above_chance():
    """Also where the best of many depths is taken: 8 of 100 questions with 4 answers."""
    draw, found = random.Random(0), {}
    for task in range(400):
        values = [sum(draw.random() < 0.25 for _ in range(100)) / 100 for _ in range(8)]
        points = {k: (value, math.sqrt(value * (1 - value) / 99)) for k, value in enumerate(values, start=1)}
        found[f"{task} acc"] = {"run": points}
    above = int(above_chance(found, dict.fromkeys(found, 0.25))[0].split()[1])
    assert above < 20  # of 10, and three standard deviations of that


def test_few_questions_tell_nothing_of_chance(tmp_path):
    """All right, lm-eval's error is 0. A whole evaluation beside the trial counts."""
    run = make_run(tmp_path / "first")
    for questions in (3, 24):
        metrics = {"acc,none": 1.0, "acc_stderr,none": 0.0, "sample_len": questions}
        content = {"results": {"hop": metrics}, "configs": {"hop": {"metadata": {"chance": 0.5}}}}
        content["n-samples"] = {"hop": {"effective": questions}}
        (run / f"results_{questions}.json").write_text(json.dumps(content))
    text = page_of(run).text
    said = "first, 3 questions: 0 of 0 accuracies are above chance at the best depth; 1 is left out, of fewer than 20"
    assert said in text and "first, 24 questions: 1 of 1 accuracies is above chance at the best depth." in text


def save_results(path, accuracy: float, config: dict, **others):
    path.parent.mkdir(parents=True, exist_ok=True)
    metrics = {"alias": "hop", "acc,none": accuracy, "acc_stderr,none": 0.01}
    path.write_text(json.dumps({"results": {"hop": metrics}, "config": config, **others}))


def test_the_newest_result_is_that_of_the_latest_time(tmp_path):
    run = make_run(tmp_path / "first")
    # lm-eval's names hold the time, which a copy keeps, unlike the time of the file
    dated = (("2026-02-01T00-00-00.000000", 0.5, 60), ("2026-01-01T00-00-00.000000", 0.25, 0))
    for name, accuracy, age in (("a", 0.125, 0), ("b", 0.75, 90), *dated):
        save_results(run / f"eval/results_{name}.json", accuracy, {"num_loops": 2})
        os.utime(run / f"eval/results_{name}.json", (1e9 - age, 1e9 - age))
    assert results_of(RunFolder(run, "first"))[0]["hop acc"] == {"": {2: (0.5, 0.01)}}
    for path in run.glob("eval/results_2026*"):
        path.unlink()
    assert results_of(RunFolder(run, "first"))[0]["hop acc"] == {"": {2: (0.125, 0.01)}}


def test_results_of_other_settings_are_curves_of_their_own(tmp_path):
    """A trial with few questions, or with exits, after the whole evaluation: no point of its curve."""
    run = make_run(tmp_path / "first")
    whole, trial = ({"n-samples": {"hop": {"original": 24, "effective": n}}, "n-shot": {"hop": 0}} for n in (24, 3))
    config = {"model_dtype": "torch.float32", "limit": None}
    for depth, accuracy in ((1, 0.25), (2, 0.375)):
        placed = {"model_args": f"pretrained=x,offload_folder=/{depth}"}  # changes no result
        save_results(run / f"eval/results_1{depth}.json", accuracy, {**config, **placed, "num_loops": depth}, **whole)
    save_results(run / "eval/results_2.json", 1.0, {**config, "num_loops": 2, "limit": 3.0}, **trial)
    exits = {"num_loops": 2, "exit_criterion": "kl", "exit_threshold": 0.5, "min_loops": 1}
    save_results(run / "eval/results_3.json", 0.0, {**config, **exits}, **whole)
    save_results(run / "eval/results_5.json", 0.125, {**config, **exits, "exit_selection": "stop"}, **whole)
    save_results(run / "eval/results_4.json", 0.5, {**config, "num_loops": 2}, **whole, chat_template="{{ turns }}")
    found, *_ = results_of(RunFolder(run, "first"))
    assert found["hop acc"] == {
        "24 questions, no exits": {1: (0.25, 0.01), 2: (0.375, 0.01)},
        "24 questions, with a chat template, no exits": {2: (0.5, 0.01)},
        "3 questions, no exits": {2: (1.0, 0.01)},
        "24 questions, exit_criterion=kl exit_threshold=0.5 min_loops=1": {2: (0.0, 0.01)},
        "24 questions, exit_criterion=kl exit_threshold=0.5 min_loops=1 exit_selection=stop": {2: (0.125, 0.01)},
    }
    cells = page_of(run).cells
    assert "first, 24 questions, no exits" in cells and "first, 3 questions, no exits" in cells


@pytest.mark.parametrize("config,depth", [
    ({"model_args": {"pretrained": "x", "num_loops": 2}}, 2),
    ({"model_args": "pretrained=x,num_loops=2"}, 2),
    ({"model_args": "pretrained=x", "num_loops": 5}, 5),
    ({"model_args": "pretrained=x"}, 3),  # as trained: the folder of the run says nothing of one evaluation
])  # fmt: skip
def test_the_depth_of_a_result_is_its_own(tmp_path, config, depth):
    run = make_run(tmp_path / "loops_9" / "loops_8")
    save_results(run / "eval/results_1.json", 0.5, config)
    save_results(run / "eval/loops_4/results_1.json", 0.25, {})
    found, *_ = results_of(RunFolder(run, "loops_8"))
    assert found["hop acc"][""] == {depth: (0.5, 0.01), 4: (0.25, 0.01)}


def test_what_other_commands_left_is_shown(tmp_path):
    run = make_run(tmp_path / "first")
    (run / "eval" / "diagnose").mkdir(parents=True)
    rows = [
        {"criterion": "kl", "mean_loops": 2.5, "perplexity": 12.25, "all": [1]},
        {"criterion": "gate", "mean_loops": 3},
    ]
    for path, content in (
        (run / "eval" / "halting", {"model": "first", "points": rows}),
        (
            run / "eval" / "diagnose" / "loop_cosine",
            {"seed": 7, "result": {"looped": {"slope": 0.515625}, "matrix": [[1.0]], "no": None}},
        ),
        (run / "eval" / "diagnose" / "token_norms", {"matrix": [[1.0]]}),
    ):
        path.with_suffix(".json").write_text(json.dumps(content))
    (run / "eval" / "diagnose" / "broken.json").write_text("{")
    page = page_of(run)
    assert "broken.json could not be read" in page.text
    assert "looped halting" not in page.text and "looped diagnose" not in page.text
    where = page.cells.index("kl")
    assert page.cells[where - 3 : where + 6] == [
        "criterion", "mean_loops", "perplexity", "kl", "2.5000", "12.2500", "gate", "3", "–",
    ]  # fmt: skip
    assert (
        page.cells[page.cells.index("looped.slope") + 1] == "0.5156"
        and "seed" not in page.cells
        and "token norms" in page.text
    )


def test_runs_are_compared_as_far_as_their_errors_allow(tmp_path):
    runs = [make_run(tmp_path / name, loops) for name, loops in (("first", 3), ("second", 4))]

    def first_sentence(error=None) -> str:
        for run in runs:
            records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            if error:
                records[-1]["validation/bits_per_byte_error"] = error
            (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return report.headlines(report.open_runs(runs))[0]

    said = "second needs the fewest bits per byte: 1.750, 0.062 fewer than first"  # 2 - 4/16 and 2 - 3/16
    assert first_sentence() == f"{said}."
    assert first_sentence(0.03) == f"{said} (each ± 0.030 over texts)."
    assert first_sentence(0.04) == (
        f"{said} (each ± 0.040 over texts: `looped budget` tells whether that is more than chance)."
    )
    assert best_run(report.open_runs(runs[:1])) == []


def test_norms_over_training(tmp_path):
    """Of the layer that is asked for, before clipping or after."""
    run = make_run(tmp_path / "run")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records[:20]:
        for block in ("lm_head", "core.0.mlp", "core.1.mlp", "core.1.self_attn", "core.2.mlp", "core.2.self_attn"):
            record[f"gradient_norm/{block}"] = 0.5 + record["step"]
        deepest = 3 if record["step"] < 19 else 2  # as where depths are drawn
        record |= {f"state_norm/loop_{k}": 8.0 * k for k in range(1, deepest + 1)}
    records[1]["gradient_norm"] = 0.25
    del records[2]["gradient_norm"]  # as where it was no number
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    blocks = ["head", "layer 1, MLP", "layer 2, MLP", "layer 2, attention"]
    states = ["State after the first loop", "State after the last loop"]
    assert page_of(run).charts[-6:] == states + [f"Gradient of {block}" for block in blocks]
    shallow = make_run(tmp_path / "shallow", loops=2)
    record = {"step": 0, "loss": 1.0} | {f"state_norm/loop_{k}": 5.0 * k for k in (1, 2)}
    (shallow / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    html = make_report([run, shallow]).read_text()
    assert "<title>run: step 3, ‖h‖ 24</title>" in html and "<title>shallow: step 0, ‖h‖ 10</title>" in html
    assert "<title>run: step 19, ‖h‖ 16</title>" in html
    folder = RunFolder(run, "run")
    assert gradient_blocks(folder, None) == ["lm_head", "core.0.mlp", "core.1.mlp", "core.1.self_attn"]
    assert gradient_blocks(folder, 3)[2:] == ["core.2.mlp", "core.2.self_attn"]
    assert clip_shares(folder, [0, 1, 2]) == pytest.approx({0: 1 / 1.5, 1: 1}, rel=1e-5)  # recipes clip at 1
    report.main([str(run), "--layer", "3", "--clipped", "--output", str(tmp_path / "page.html")])
    assert "Gradients after clipping." in Page((tmp_path / "page.html").read_text()).text
    with pytest.raises(RunError, match="--layer 4: run has layers 1 to 3"):
        report.main([str(run), "--layer", "4"])


def test_a_log_that_was_cut_off(tmp_path):
    run = make_run(tmp_path / "first")
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole[: whole.index('{"step": 12') + 20])
    page = page_of(run)
    assert "metrics.jsonl has 1 line that could not be read: left out." in page.text and "12 steps" in page.text
    assert "No validation was logged" in page.text


def test_damaged_lines_are_counted_and_said_once(tmp_path, capsys):
    """Empty ones are nothing that is lost."""
    run = make_run(tmp_path / "first")
    first, second, *rest = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([first, "\n", second[:9] + "\n", *rest]))
    assert "metrics.jsonl has 1 line that could not be read: left out." in page_of(run).text
    assert capsys.readouterr().err.count("left out what is no record: line 3\n") == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_run_that_diverged(tmp_path, bad):
    run = make_run(tmp_path / "first", losses=[5.0, 4.0, bad], finished=False, validation=False)
    page = page_of(run)
    assert f"diverged: loss is {bad} at step 2" in page.cells and page.charts[:2] == [
        "Loss",
        "Gradient before clipping",
    ]
    (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "loss": bad}) + "\n")
    page = page_of(run)
    assert "No finite loss was logged." in page.text and not page.charts
    stopped = make_run(tmp_path / "second", finished=False)
    assert "not finished: 20 steps so far" in page_of(stopped).cells
    (stopped / "diverged.txt").write_text("the loss of step 20 is nan on rows [1]")
    assert "diverged: the loss of step 20 is nan on rows [1]" in page_of(stopped).cells


def test_folders_without_a_run(tmp_path):
    run = make_run(tmp_path / "first")
    (tmp_path / "empty").mkdir()
    (tmp_path / "silent").mkdir()
    (tmp_path / "silent" / "metrics.jsonl").write_text('{"step": 1')
    for folder, words in (
        ("nowhere", "there is no folder .*looped pretrain RECIPE` makes one"),
        ("empty", "empty holds no metrics.jsonl: it is no output folder"),
        ("silent", "has logged nothing yet"),
    ):
        with pytest.raises(RunError, match=words):
            make_report([run, tmp_path / folder])
    assert not (run / "report.html").exists()


def test_a_run_is_the_same_by_the_name_of_its_model(tmp_path):
    run = make_run(tmp_path / "first")
    (of_model,) = open_runs([run / "final"])
    assert (of_model.folder, of_model.name) == (run, "first")
    assert of_model.results("halting.json") == run / "eval/halting.json"


def test_markdown_for_a_model_card(tmp_path, capsys):
    run = make_run(tmp_path / "first")
    report.main([str(run), "--output", str(tmp_path / "page.html"), "--markdown", str(tmp_path / "card.md")])
    card = (tmp_path / "card.md").read_text()
    assert (
        card.startswith("## This model: first\n\n**6 loops are best here") and "<td>" not in card and "svg" not in card
    )
    assert f"| made by | looped pretrain {run}/recipe.yaml |" in card
    assert re.search(r"\| cross-entropy \| first \| 3\.8750 \| 3\.7500 \|", card)
    rows = [line for line in card.splitlines() if line.startswith("|")]
    for line, following in zip(rows, rows[1:]):
        assert line.count("|") > 2 and (set(following) != set("|- ") or line.count("|") == following.count("|"))
    report.main([str(run), "--markdown"])
    assert card in capsys.readouterr().out
    report.main([str(run)])
    out = capsys.readouterr().out
    assert "| state | finished |" in out and f"the page: {run}/report.html" in out


def test_a_recipe_is_not_needed(tmp_path):
    run = make_run(tmp_path / "first")
    (run / "recipe.yaml").unlink()
    page = page_of(run)
    assert "finished" in page.cells and "– tokens seen" in " ".join(page.cells)
    (run / "recipe.yaml").write_text(yaml.safe_dump({"model": None, "data": None}))
    assert "finished" in page_of(run).cells


@pytest.mark.parametrize("name", ["<b>&|`x`\nbreak", b"\xff\xfe".decode(errors="surrogateescape")])
def test_a_run_may_have_any_name(tmp_path, name):
    runs = [make_run(tmp_path / "usual"), make_run(tmp_path / "other")]
    runs[0] = runs[0].rename(tmp_path / name)
    page = make_report(runs, tmp_path / "page.html")
    Page(page.read_text())
    text = report.to_markdown(report.title_of(found := report.open_runs(runs)), report.sections_of(found))
    assert "<b>" not in re.sub("`[^`]*`", "", text) and text.encode()
    rows = [line for line in text.splitlines() if line.startswith("| state")]
    assert len(rows) == 1 and rows[0].count("|") == 4
