"""Sweeps: which runs they hold, which of them are one, and what counts as diverged."""

import importlib
import json
import math
import shutil
import sys
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
from accelerate.state import AcceleratorState, PartialState

from looped_recipes.common.metrics import DIVERGED, MetricsLog, divergence_of
from looped_recipes.common.replicas import Outcome, Replicas
from looped_recipes.engine import sweeps
from looped_recipes.engine.sweep_runs import load_sweep, runs_of
from looped_recipes.engine.sweeps import charts_of, optima, outcome, write_results
from looped_recipes.plan import main as plan_main
from looped_recipes.settings import sweep_files
from looped_recipes.settings.recipe import RecipeError
from looped_recipes.settings.sweep_files import Plot, read_sweep
from looped_recipes.sweep import run_sweep
from tests.helpers_pretrain import replace_wandb, smoke_settings
from tests.helpers_recipes import RECIPES, runs_of_sweep


SCALING = RECIPES / "residual_scaling"
RATES = [5e-4, 7.5e-4, 1e-3, 1.25e-3, 1.5e-3, 2e-3, 3e-3, 4e-3]  # table 4
LOOPS = [1, 2, 4, 8]


def points(runs):
    """(layers, rule, loops, base rate) as the recipes themselves have them."""
    configs = [(run.recipe.model_config(), run.recipe.optimizer) for run in runs]
    return [(c.num_core_layers, c.residual_scaling, c.num_loops, optimizer.lr) for c, optimizer in configs]


def test_figure_5_is_128_points_and_120_runs():
    """Panels a and b: 12 layers, eps = 1/sqrt N and 1/N; c and d: 24 and 48 layers, 1/N with the depth's factor."""
    runs = runs_of_sweep(SCALING / "transfer.sweep.yaml")
    panels = [(12, "sqrt"), (12, "linear"), (24, "factored"), (48, "factored")]
    found = points(runs)
    assert len(found) == len(set(found)) == 128
    assert set(found) == {(*panel, n, lr) for panel, n, lr in product(panels, LOOPS, RATES)}
    twins = [(run, point) for run, point in zip(runs, found) if run.same_as is not None]
    assert [point for _, point in twins] == [(12, "linear", 1, lr) for lr in RATES]
    of_name = dict(zip([run.name for run in runs], found))
    assert [of_name[run.same_as] for run, _ in twins] == [(12, "sqrt", 1, lr) for lr in RATES]
    folders = {run.recipe.training.output_dir for run in runs}
    assert len(folders) == 128


def test_figure_5_is_trained_as_the_paper_says():
    """Tables 2 to 4: 20,000 steps of half a million tokens, warm-up 500, decay 1,000; divergence judged at the end."""
    for run in runs_of_sweep(SCALING / "transfer.sweep.yaml"):
        recipe, config = run.recipe, run.recipe.model_config()
        assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (768, 12, 12)
        assert config.vocab_size == 128_256 and config.tie_word_embeddings and config.initializer_range == 0.02
        assert recipe.training.steps == 20_000 and recipe.training.seed == 0
        assert recipe.training.rows_per_step * recipe.data.sequence_length == 2**19
        schedule, optimizer = recipe.schedule, recipe.optimizer
        assert (schedule.name, schedule.warmup_steps, schedule.decay_steps) == ("wsd", 500, 1000)
        assert (optimizer.name, optimizer.betas, optimizer.weight_decay) == ("adamw", [0.9, 0.95], 0.1)
        assert optimizer.eps == 1e-8 and optimizer.correct_for_depth and recipe.training.max_loss == 4.0
        eps = {"sqrt": config.num_loops**-0.5, "linear": 1 / config.num_loops}
        factored = (12 / config.num_core_layers) ** 0.5 / config.num_loops
        expected = eps.get(config.residual_scaling, factored)
        assert config.residual_factor(config.num_loops) == pytest.approx(expected)


def test_factored_over_depth_with_and_without_the_rates_of_depth():
    runs = runs_of_sweep(SCALING / "depth_transfer.sweep.yaml")
    found = [(run.recipe.optimizer.correct_for_depth, *point) for run, point in zip(runs, points(runs))]
    assert len(found) == len(set(found))
    depths = [(True, 3), (True, 6), (True, 12), (False, 3), (False, 6), (False, 12), (False, 24), (False, 48)]
    assert set(found) == {(on, depth, "factored", n, lr) for (on, depth), n, lr in product(depths, LOOPS, RATES)}
    twins = {point for run, point in zip(runs, found) if run.same_as is not None}
    assert twins == {(False, 12, "factored", n, lr) for n, lr in product(LOOPS, RATES)}  # 12 layers: no correction


def test_workshop_sweep():
    runs = runs_of_sweep(SCALING / "workshop.sweep.yaml")
    for run in runs:
        assert run.recipe.optimizer.lr * run.recipe.optimizer.weight_decay == pytest.approx(1e-5)
    assert {(rule, n) for _, rule, n, _ in points(runs)} == set(product(["sqrt", "linear"], LOOPS))
    assert {run.recipe.model_config().num_loops for run in runs if run.same_as} == {1}


def written(tmp_path, text) -> Path:
    path = tmp_path / "a.sweep.yaml"
    path.write_text(f"recipe: {RECIPES / 'smoke/residual_scaling.yaml'}\n{text}")
    return path


def test_what_differs_is_trained_apart(tmp_path):
    """Other seeds, rates or layers are other runs; other names of the same eps are not."""
    grid = "grid: {training.seed: [0, 1], optimizer.lr: [1e-3, 2e-3], model.num_core_layers: [1, 2]}"
    assert not [run for run in load_sweep(written(tmp_path, grid)) if run.same_as]
    same = """
set: {model.num_core_layers: 12, model.num_loops: 4}
runs:
- {name: factored, model.residual_scaling: factored}
- {name: linear, model.residual_scaling: linear}
- {name: halved, model.residual_scaling: sqrt, model.residual_scale: 0.5}
- {name: sqrt, model.residual_scaling: sqrt}
- {name: each its own depth, model.residual_scaling: linear, model.residual_depth: run}
"""
    assert [run.same_as for run in load_sweep(written(tmp_path, same))] == [None, "factored", "factored", None, None]


def test_the_same_settings_twice_are_refused(tmp_path):
    grids = "grid:\n- {model.num_loops: [1, 2]}\n- {model.num_loops: [2, 4]}\n"
    with pytest.raises(RecipeError, match="two runs have the name 'num_loops=2'"):
        load_sweep(written(tmp_path, grids))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("runs: [{name: ../../x}]", "the name '../../x' would be another folder"),
        ("grid: {model.num_loops: 3}", "a list of values for each setting"),
        ("grid: {training.output_dir: [a, b]}", "training.output_dir in grid would have no effect"),
        ("set: {training.output_dir: a}\nruns: [{name: a}]", "training.output_dir in set would have no effect"),
        ("set: {model.num_loops: 3}\ngrid: {model.num_loops: [1]}", "every run sets anew"),
        ("grid: {model.num_loops: []}", "holds no run"),
        ("runs: [{name: 3}]", "the name 3 is no text"),
        ("grid: {training.seed: [1]}\nplot: {x: optimizer.lr, curve: training.seed}", "not a setting of every run"),
        (
            "grid: {optimizer.betas: [[0.9, 0.95]], optimizer.lr: [1.0], model.num_loops: [1]}\n"
            "plot: {x: optimizer.lr, curve: model.num_loops, panel: [optimizer.betas]}",
            "panel of plot must be numbers or words",
        ),
        (
            "grid: {model.injection: [add, concat], model.num_loops: [1]}\n"
            "plot: {x: model.injection, curve: model.num_loops}",
            "must be numbers above 0, got model.injection in .*: leave plot out, `looped report`",
        ),
        (
            "grid: {optimizer.lr: [1e-3], model.tie_word_embeddings: [true], model.num_loops: [1]}\n"
            "plot: {x: model.tie_word_embeddings, curve: model.num_loops}",
            "must be numbers above 0",
        ),
        (
            "grid: {schedule.warmup_steps: [0, 4], model.num_loops: [1]}\n"
            "plot: {x: schedule.warmup_steps, curve: model.num_loops}",
            r"must be numbers above 0, got schedule.warmup_steps in \[0, 4\]",
        ),
        ("runs: [{name: results.svg}]", "the name 'results.svg' is of the sweep itself"),
        ("runs: [{name: " + 51 * "🙂" + "}]", "is longer than 200 bytes"),
        ("grid: {model.num_loops: [1]}\nruns: [{name: a}]", "one of grid and runs"),
        ("set: {training.seed: 1}", "one of grid and runs"),
        ("grid: [{training.seed: [1, 2]}, {model.num_loops: [1, 2]}]", "its grids hold more than 3 runs"),
        ("runs: [{name: a}, {name: b}, {name: c}, {name: d}]", "more than 3 runs"),
        ("grid: [", "is not YAML"),
    ],
)
def test_what_is_no_sweep_is_said(tmp_path, text, message, monkeypatch):
    monkeypatch.setattr(sweep_files, "MOST_RUNS", 3)
    with pytest.raises(RecipeError, match=message):
        load_sweep(written(tmp_path, text))


def test_an_override_of_what_is_swept_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="'model.num_loops=4' would overrule what the runs"):
        load_sweep(written(tmp_path, "grid: {model.num_loops: [1, 2]}"), ["model.num_loops=4"])
    in_some = "set: {optimizer.lr: 1e-3}\nruns: [{name: a}, {name: 2e-3, optimizer.lr: 2e-3}]"
    runs = load_sweep(written(tmp_path, in_some))
    assert {run.name: run.recipe.optimizer.lr for run in runs} == {"a": 1e-3, "2e-3": 2e-3}
    (run,) = load_sweep(written(tmp_path, "grid: {optimizer.lr: [2e-3]}"))
    assert run.settings["optimizer.lr"] == 2e-3


def test_a_path_among_the_settings_is_one_word_of_a_name(tmp_path):
    (run,) = load_sweep(written(tmp_path, "grid: {data.cache_dir: [../../x/🙂]}"))
    assert run.name == "cache_dir=.._.._x_🙂" and run.recipe.data.cache_dir == "../../x/🙂"
    assert Path(run.recipe.training.output_dir) == Path("runs/a") / run.name


def test_the_folder_of_a_sweep_is_named_without_the_ending(tmp_path):
    path = written(tmp_path, "grid: {model.num_loops: [1]}")
    (run,) = load_sweep(path.rename(tmp_path / "b.yaml"))
    assert Path(run.recipe.training.output_dir).parent == Path("runs/b")


def test_a_plan_counts_what_is_trained(tmp_path, capsys):
    path = written(tmp_path, "grid: {model.residual_scaling: [sqrt, linear], model.num_loops: [1, 2]}")
    plan_main([str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert "the same as residual_scaling=sqrt_num_loops=1" in lines[2] and lines[4].startswith("all 3 runs: ")


@pytest.mark.parametrize(
    ("records", "loss", "diverged"),
    [
        ([9.0, 3.5], 3.5, None),  # above the limit within the run, below at its end
        ([3.0, 4.5], None, "the run ended at 4.5000, above training.max_loss=4.0"),
        ([3.0, float("nan")], None, "validation loss of nan"),
        ([], None, "validation loss of nan"),
    ],
)
def test_divergence_is_judged_at_the_end(tmp_path, records, loss, diverged):
    arguments = [f"training.output_dir={tmp_path}", "training.max_loss=4.0"]
    (run,) = load_sweep(written(tmp_path, "grid: {model.num_loops: [1]}"), arguments)
    assert outcome(run) is None
    folder = Path(run.recipe.training.output_dir)
    (folder / "final").mkdir(parents=True)
    (folder / "final/config.json").write_text("{}")
    lines = [json.dumps({"step": step, "validation/loss": value}) for step, value in enumerate(records)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    result = outcome(run)
    assert result["loss"] == loss
    assert (diverged in result["diverged"]) if diverged else ("diverged" not in result)


def test_the_result_of_another_recipe_is_not_taken(tmp_path):
    """Where shards lie, who made them and what a plan reckons with decide no loss; the text does."""
    path = written(tmp_path, "grid: {model.num_loops: [1]}")
    (run,) = load_sweep(path, [f"training.output_dir={tmp_path}"])
    folder = Path(run.recipe.training.output_dir)
    (folder / "final").mkdir(parents=True)
    (folder / "final/config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "validation/loss": 3.0}))
    run.recipe.save(folder / "recipe.yaml")
    more = ["data.cache_dir=elsewhere", "data.num_proc=2", "data.expected_tokens=1e6"]
    (same,) = load_sweep(path, [f"training.output_dir={tmp_path}", *more])
    assert outcome(same)["loss"] == 3.0
    (other,) = load_sweep(path, [f"training.output_dir={tmp_path}", "data.max_documents=5"])
    with pytest.raises(RecipeError, match="result of another recipe: data.max_documents was 40, is 5"):
        outcome(other)


def test_runs_of_other_text_or_precision_are_not_compared(training_text, tmp_path, monkeypatch):
    """Runs that finished before the text, or the launch, was another. Other settings of data may have other texts."""
    source = tmp_path / "train.jsonl"
    source.write_bytes((training_text / "train.jsonl").read_bytes())
    arguments = smoke_settings(tmp_path, tmp_path / "runs", "training.steps=2")

    def sweep(rates, *more):
        lines = "".join(f"- {{name: r{rate}, optimizer.lr: {rate}}}\n" for rate in rates)
        path = tmp_path / "a.sweep.yaml"
        path.write_text(f"recipe: {RECIPES / 'smoke' / 'huginn.yaml'}\nruns:\n{lines}{''.join(more)}")
        run_sweep(str(path), arguments, None)
        return [json.loads(line)["name"] for line in (tmp_path / "runs" / "results.jsonl").read_text().splitlines()]

    assert sweep([0.001]) == ["r0.001"]
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        for state in (AcceleratorState, PartialState):  # those of other tests stay as they are
            patch.setattr(state, "_shared_state", {})
        message = r"runs 'r0.001' and 'r0.002' can not be compared, .* in their precision \('no', 'bf16'\)"
        with pytest.raises(RecipeError, match=message):
            sweep([0.002, 0.001])
    source.write_text("".join(json.dumps({"text": f"{i} other words {i}" * 30}) + "\n" for i in range(99)))
    for rates in ([0.001, 0.002], [0.002, 0.001]):
        with pytest.raises(RecipeError, match="in their text of training, with the same settings of data"):
            sweep(rates)
    assert not (tmp_path / "runs" / "r0.002" / "metrics.jsonl").exists()
    of_other_data = "- {name: short, data.sequence_length: 48}\n"
    assert sweep([0.001], of_other_data) == ["r0.001", "short"]
    shutil.rmtree(tmp_path / "runs" / "r0.001")
    assert sweep([0.001, 0.002], of_other_data) == ["r0.001", "r0.002", "short"]


def test_a_run_that_stopped_is_recorded_with_its_reason(tmp_path):
    (run,) = load_sweep(written(tmp_path, "grid: {model.num_loops: [1]}"), [f"training.output_dir={tmp_path}"])
    folder = Path(run.recipe.training.output_dir)
    folder.mkdir(parents=True)
    (folder / DIVERGED).write_text("the loss of step 3 is nan")
    assert outcome(run)["diverged"] == "the loss of step 3 is nan" and outcome(run)["loss"] is None


def test_a_run_that_diverged_is_not_the_result_of_one_that_leaves_out_more_steps(tmp_path):
    path, arguments = written(tmp_path, "grid: {model.num_loops: [1]}"), [f"training.output_dir={tmp_path}"]
    (run,) = load_sweep(path, arguments)
    folder = Path(run.recipe.training.output_dir)
    folder.mkdir(parents=True)
    (folder / DIVERGED).write_text("the loss of step 3 is nan")
    run.recipe.save(folder / "recipe.yaml")
    assert outcome(run)["loss"] is None
    (other,) = load_sweep(path, [*arguments, "training.skip_nonfinite_steps=5"])
    with pytest.raises(RecipeError, match="training.skip_nonfinite_steps was 0, is 5"):
        outcome(other)


def test_a_run_that_goes_on_has_not_diverged(tmp_path):
    (tmp_path / DIVERGED).write_text("the loss of step 3 is nan")
    MetricsLog(tmp_path / "metrics.jsonl", accelerator=None).start(0, None)
    assert divergence_of(tmp_path, loss=3.0) is None


def test_a_run_that_diverges_ends_in_its_trackers_before_the_next(training_text, tmp_path, monkeypatch):
    """It takes a run that begins before the last has ended for the same one."""
    told = []
    replace_wandb(monkeypatch, lambda *what: told.append(what))
    runs = "runs: [{name: high, optimizer.lr: 1.0e+20}, {name: low, optimizer.lr: 0.001}]\n"
    path = tmp_path / "a.sweep.yaml"
    path.write_text(f"recipe: {RECIPES / 'smoke' / 'huginn.yaml'}\n{runs}")
    more = ["training.steps=3", "logging.trackers=[wandb]"]
    run_sweep(str(path), smoke_settings(training_text, tmp_path / "runs", *more), None)
    assert (tmp_path / "runs" / "high" / DIVERGED).exists()
    told = [(what, value and value["name"].rpartition("-")[0]) for what, value in told if what in ("start", "end")]
    assert told == [("start", "high"), ("end", None), ("start", "low"), ("end", None)]


@pytest.mark.parametrize("process", [0, 1])
def test_of_several_processes_one_writes_that_a_run_diverged(process, tmp_path, monkeypatch):
    """Those of several machines may have one number, and would write to one temporary file."""
    (run,) = load_sweep(written(tmp_path, "grid: {model.num_loops: [1]}"), [f"training.output_dir={tmp_path}"])
    training = mock.Mock(**{"train.side_effect": sweeps.Divergence("the loss of step 3 is nan")})
    monkeypatch.setattr(sweeps, "Pretraining", lambda recipe: training)
    monkeypatch.setattr(sweeps, "refuse_other_conditions", lambda *_: None)
    monkeypatch.setattr("looped_recipes.engine.saving.process_index", lambda: process)
    sweeps.train(run)
    assert (Path(run.recipe.training.output_dir) / DIVERGED).exists() == (process == 0)


def test_switches_beside_words_are_drawn():
    plot = {"x": "optimizer.lr", "curve": "training.gradient_checkpointing"}
    results = [
        {plot["x"]: lr, plot["curve"]: value, "loss": 3.0}
        for value in ("selective", False)
        for lr in (1e-3, 2e-3, 4e-3)
    ]
    (chart,) = charts_of(results, Plot(**plot, panel=[]))
    assert [line.name.split(" = ")[1].split(",")[0] for line in chart.lines if line.name] == ["False", "selective"]
    assert list(optima(results, **plot)) == [False, "selective"]
    assert list(optima([{**result, plot["curve"]: n} for result, n in zip(results, (10, 9, 1))], **plot)) == [1, 9, 10]


def test_a_point_with_a_diverged_seed_is_not_drawn():
    plot = {"x": "optimizer.lr", "curve": "model.num_loops"}
    losses = {1e-3: [2.0, 2.5], 2e-3: [1.0, None], 4e-3: [3.0, 3.5]}
    results = [{plot["x"]: lr, plot["curve"]: 2, "loss": loss} for lr, of_x in losses.items() for loss in of_x]
    (chart,) = charts_of(results, Plot(**plot, panel=[]))
    assert chart.lines[0].points == [(1e-3, 2.25), (4e-3, 3.25)]


def test_unequal_replicas_are_refused_before_training(tmp_path):
    entries = ((0.001, 0), (0.002, 0), (0.002, 1), (0.004, 0))
    runs = "".join(f"- {{optimizer.lr: {lr}, training.seed: {s}, model.num_loops: 2}}\n" for lr, s in entries)
    plot = "plot: {x: optimizer.lr, curve: model.num_loops}\n"
    message = r"equally many runs at every optimizer.lr, but model.num_loops=2 has 1 at 0.001, 2 at 0.002, 1 at 0.004"
    with pytest.raises(RecipeError, match=message):
        load_sweep(written(tmp_path, f"runs:\n{runs}{plot}"))
    assert len(load_sweep(written(tmp_path, f"runs:\n{runs}"))) == 4


def test_a_sweep_is_read_once_and_trains_to_the_end(tmp_path, monkeypatch):
    """The file may change, or go, while its runs are trained."""
    path = written(tmp_path, "grid: {optimizer.lr: [0.001, 0.002], model.num_loops: [2]}\n"
                             "plot: {x: optimizer.lr, curve: model.num_loops}\n")  # fmt: skip

    def train(runs):
        path.unlink()
        return [{"name": run.name, **run.settings, "loss": 3.0} for run in runs]

    with pytest.raises(RecipeError, match="training.stop_after=1 would leave run .* without a result: leave it out"):
        run_sweep(str(path), ["training.stop_after=1"], None)
    monkeypatch.setattr(sweeps, "outcome", lambda run: {})
    monkeypatch.setattr(sweeps, "run_all", train)
    run_sweep(str(path), [f"training.output_dir={tmp_path / 'runs'}"], None)
    assert (tmp_path / "runs" / "optima.json").is_file()


@pytest.mark.parametrize(("curve", "panel"), [("model.num_loops", "[recipe]"), ("recipe", "null")])
def test_a_plot_keeps_recipes_apart(tmp_path, curve, panel):
    """Losses are parabolas in log2 of the rate; the lowest point of each recipe is at a rate of its own."""
    least = {"residual_scaling": (2.0, 0.002), "ouro": (4.0, 0.004)}
    recipes = [str(RECIPES / f"smoke/{name}.yaml") for name in least]
    path = written(
        tmp_path,
        f"grid: {{recipe: {recipes}, model.num_loops: [2], optimizer.lr: [0.001, 0.002, 0.004, 0.008]}}\n"
        f"plot: {{x: optimizer.lr, curve: {curve}, panel: {panel}}}\n",
    )
    sweep = read_sweep(path)
    runs = runs_of(sweep, [f"training.output_dir={tmp_path / 'runs'}"])
    for run in runs:
        lowest, best = least[run.path.stem]
        loss = lowest + math.log2(run.recipe.optimizer.lr / best) ** 2
        (folder := Path(run.recipe.training.output_dir) / "final").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder.parent / "metrics.jsonl").write_text(json.dumps({"step": 1, "validation/loss": loss}))
    write_results(sweep, tmp_path / "runs", [outcome(run) for run in runs])
    panels = json.loads((tmp_path / "runs" / "optima.json").read_text())["optima"]
    found = {panel.get("recipe", name): best for panel in panels for name, best in panel["best"].items()}
    found = {Path(name).stem: (best["loss"], best["lr"]) for name, best in found.items()}
    assert found == {name: pytest.approx(best) for name, best in least.items()}


def test_a_sweep_ends_with_what_seeds_tell(tmp_path, monkeypatch, capsys):
    """The rate changes 0.3 and 0.5: 0.4 +- 12.7062 * 0.1, with Student's 97.5 % of one degree of freedom."""
    losses = {(0.001, 0): 3.0, (0.001, 1): 3.2, (0.002, 0): 3.3, (0.002, 1): 3.7}

    def found(run):
        return {"loss": losses[run.settings["optimizer.lr"], run.settings.get("training.seed", 0)]}

    monkeypatch.setattr(sweeps, "outcome", found)
    path, folder = written(tmp_path, "grid: {optimizer.lr: [0.001, 0.002], training.seed: [0, 1]}"), tmp_path / "runs"
    run_sweep(str(path), [f"training.output_dir={folder}"], None)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "optimizer.lr: 0.002 against 0.001: no difference that 2 seeds tell (loss +0.4000 [-0.8706, +1.6706]).",
        f"the table: looped report {folder}",
    ]
    run_sweep(str(written(tmp_path, "grid: {optimizer.lr: [0.001, 0.002]}")), [f"training.output_dir={folder}"], None)
    assert "against" not in capsys.readouterr().out


def test_settings_that_change_together_are_one_axis():
    """Such as those of a recipe of its own for some runs."""
    settings = [{"model.preset": "rdm", "model.num_loops": 2}, {"model.preset": "lt", "model.injection": "add"}]
    first, second = (
        [Outcome(f"{i}", {**setting, "training.seed": seed}, 3.0 + i) for seed in (0, 1)]
        for i, setting in enumerate(settings)
    )
    assert Replicas(first + second).sentences() == [
        "model.preset, model.num_loops, model.injection: lt, not set, add against rdm, 2, not set: "
        "the loss changes by +1.0000 [+1.0000, +1.0000] over 2 seeds."
    ]
    assert Replicas(first).sentences() == ["Loss 3.0000 [3.0000, 3.0000] over 2 seeds."]
    again = Replicas([*first, first[1]._replace(name="again", loss=9.0)])  # the first run of a seed counts
    assert again.sentences() == [
        "Loss 3.0000 [3.0000, 3.0000] over 2 seeds.",
        "Left out, with the settings and seed of an earlier run: again (as 0).",
    ]
    of_another_seed = Outcome("c", {**settings[1], "training.seed": 2}, 3.0)
    (said,) = Replicas([*first, of_another_seed]).sentences()
    assert said.endswith(": no two runs of one seed differ in this alone.")
    diverged = Replicas([*first, of_another_seed._replace(loss=None)])
    assert diverged.sentences() == ["1 run diverged, in no mean: c."]


def said_of(runs, losses, folder, capsys) -> list[str]:
    sweeps.say_over_seeds(runs, [{"loss": loss} for loss in losses], folder)
    return capsys.readouterr().out.splitlines()[:-1]


def test_settings_that_decide_no_loss_are_no_axis(tmp_path, capsys):
    """3.2 is the mean of 3.0, 3.2 and 3.4, whose deviation is 0.2: 4.30265 * 0.2 / sqrt(3) = 0.4968."""
    seeds = """
- {name: a, training.seed: 0, logging.every: 1, data.cache_dir: x, training.save_every: 3}
- {name: b, training.seed: 1, logging.every: 2, training.resume: changed, evaluation.every: 4}
- {name: c, training.seed: 2, data.num_proc: 2, training.compile: true}
"""
    runs = load_sweep(written(tmp_path, f"runs:{seeds}"))
    assert said_of(runs, (3.0, 3.2, 3.4), tmp_path, capsys) == ["Loss 3.2000 [2.7032, 3.6968] over 3 seeds."]
    deciding = ("training.steps: 7", "data.sequence_length: 32", "evaluation.rows: 4", "training.rows_per_step: 4")
    for key, value in (setting.split(": ") for setting in deciding):
        runs = load_sweep(written(tmp_path, f"grid: {{{key}: [{value}, 16], training.seed: [0, 1]}}"))
        (said,) = said_of(runs, (3.0, 3.0, 3.5, 3.5), tmp_path, capsys)
        assert said == f"{key}: 16 against {value}: the loss changes by +0.5000 [+0.5000, +0.5000] over 2 seeds."


def ended(name, loss, seed, **settings) -> Outcome:
    return Outcome(name, {"training.seed": seed, **{f"model.{key}": value for key, value in settings.items()}}, loss)


def test_the_same_settings_and_seed_count_once():
    """1.1 +- 12.7062 * 0.1, of 1.0 and 1.2 and of no other run."""
    runs = [ended("a", 1.0, 0), ended("b", 1.2, 1), ended("again", 9.0, 1)]
    found = Replicas(runs)
    assert found.sentences() == [
        "Loss 1.1000 [-0.1706, 2.3706] over 2 seeds.",
        "Left out, with the settings and seed of an earlier run: again (as b).",
    ]
    assert found.rows() == [["2", "1.1000 [-0.1706, 2.3706]", "0"]]
    assert Replicas([*runs, ended("third", None, 0)]).sentences()[1:] == [
        "Left out, with the settings and seed of an earlier run: again (as b), third (as a)."
    ]


def of_rates(losses: dict) -> list[Outcome]:
    """losses: {(rate, width): loss of each seed, None if it diverged}"""
    return [
        ended(f"{rate}_{width}_{seed}", loss, seed, rate=rate, width=width)
        for (rate, width), of_seeds in losses.items()
        for seed, loss in of_seeds.items()
    ]


def test_a_run_that_is_missing_takes_no_comparison_with_it():
    """Rate 2 has no pair of seed 0 at width 64, nor of seed 1 at width 128: both have seed 2, while no width has all
    seeds. There it changes -0.2 and -0.4."""
    first = {0: 3.0, 1: 3.1, 2: 3.2}
    losses = {(1, 64): first, (1, 128): first, (2, 64): {0: None, 1: 3.0, 2: 3.0}, (2, 128): {0: 2.9, 1: None, 2: 2.8}}
    found = Replicas(of_rates(losses))
    assert found.sentences()[0] == (
        "model.rate: 2 against 1: the loss changes by -0.3000 in one seed, which has no interval."
    )
    # width 64 with 3 seeds is more than one seed of both: it changes -0.1, -0.2 and -0.3
    losses |= {(2, 64): {0: 2.9, 1: 2.9, 2: 2.9}, (2, 128): {2: 9.0}}
    rate = Replicas(of_rates(losses)).differences()[0]
    assert rate.words == (  # 4.30265 * 0.1 / sqrt(3) = 0.2484
        "model.rate: 2 against 1, in 1 of 2 other settings: no difference that 3 seeds tell "
        "(loss -0.2000 [-0.4484, +0.0484])"
    )
    # two seeds of both are four pairs: -0.1 and -0.1 in seed 0, -0.2 and -0.4 in seed 1
    losses |= {(2, 128): {0: 2.9, 1: 2.7, 2: None}}
    rate = Replicas(of_rates(losses)).differences()[0]
    assert rate.value == "-0.2000 [-1.4706, +1.0706]" and (rate.used, rate.of) == (2, 2)  # 12.7062 * 0.1
    losses = {(1, 64): first, (1, 128): first, (2, 64): {0: 3.0}, (2, 128): {1: 3.0}}
    assert Replicas(of_rates(losses)).differences()[0].words == (
        "model.rate: 2 against 1: 2 of 2 other settings have pairs, but of no common seed"
    )


def test_other_settings_with_either_value_are_counted():
    """Width 128 has rate 1 alone; rate 2 changes -0.1 at width 64, in both seeds."""
    losses = {(1, 64): {0: 3.0, 1: 3.0}, (1, 128): {0: 2.0, 1: 2.0}, (2, 64): {0: 2.9, 1: 2.9}}
    assert Replicas(of_rates(losses)).sentences()[0] == (
        "model.rate: 2 against 1, in 1 of 2 other settings: "
        "the loss changes by -0.1000 [-0.1000, -0.1000] over 2 seeds."
    )


def test_runs_that_are_trained_once_count_for_both_settings(tmp_path, capsys):
    """4 loops change -0.1 without a rule and +0.4 with it, where 1 loop is that without: +0.15. The rule changes 0 at
    1 loop and +0.5 at 4: +0.25. Seeds are equal."""
    grid = "{model.residual_scaling: [none, linear], model.num_loops: [1, 4], training.seed: [0, 1]}"
    runs = load_sweep(written(tmp_path, f"grid: {grid}"))
    assert [run.same_as is not None for run in runs] == [False] * 4 + [True] * 2 + [False] * 2
    assert said_of(runs, [3.0, 3.0, 2.9, 2.9, 3.0, 3.0, 3.4, 3.4], tmp_path, capsys) == [
        "model.num_loops: 4 against 1: the loss changes by +0.1500 [+0.1500, +0.1500] over 2 seeds.",
        "model.residual_scaling: linear against none: the loss changes by +0.2500 [+0.2500, +0.2500] over 2 seeds.",
    ]


@pytest.mark.parametrize("more", [[], ["--runner", "slurm"]], ids=["here", "slurm"])
def test_a_sweep_is_refused_before_the_imports_of_training(more):
    """As in a new process: what this project imports is imported anew, and once more for the next test."""
    slow = {"datasets", "scipy.stats", "lm_eval", "looped_recipes.engine.training"}
    with mock.patch.dict(sys.modules):
        for name in [*sys.modules]:
            if name in slow or name.partition(".")[0] == "looped_recipes":
                del sys.modules[name]
        sweep = importlib.import_module("looped_recipes.sweep")
        errors = importlib.import_module("looped_recipes.settings.recipe")
        with pytest.raises(errors.RecipeError, match="schedule.warmup_steps=20 .*run of 6 steps"):
            sweep.main(["tasks/p_hop.sweep.yaml", "training.steps=6", *more])
        assert not slow & sys.modules.keys()


def test_the_run_that_cannot_begin_is_named(tmp_path, monkeypatch):
    def prepare(*_, **__):
        raise RecipeError("36 documents hold too few tokens")

    monkeypatch.setattr("looped_recipes.engine.training.prepare", prepare)
    path = written(tmp_path, "runs: [{name: long, data.sequence_length: 4096}]\n")
    with pytest.raises(RecipeError, match="run 'long': 36 documents hold too few tokens"):
        run_sweep(str(path), [f"training.output_dir={tmp_path / 'runs'}"], None)


def test_of_several_processes_one_says_and_writes_results(tmp_path, monkeypatch, capsys):
    path = written(tmp_path, "grid: {optimizer.lr: [0.001, 0.002], model.num_loops: [2]}\n"
                             "plot: {x: optimizer.lr, curve: model.num_loops}\n")  # fmt: skip
    result = {"optimizer.lr": 0.001, "model.num_loops": 2, "loss": 3.0}
    monkeypatch.setattr(sweeps, "outcome", lambda run: result)
    monkeypatch.setattr(sweeps, "is_main_process", lambda: False)
    run_sweep(str(path), [f"training.output_dir={tmp_path / 'runs'}"], None)
    assert capsys.readouterr().out == "" and not (tmp_path / "runs").exists()
