"""Every recipe is a model that can be built, and a plan whose numbers are the papers'."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from recipes import sweep
from recipes.config import RecipeError, load_recipe
from recipes.optimizers import build_schedulers, set_learning_rates
from recipes.plan import plan
from recipes.sweep import is_sweep, load_sweep, optima


FOLDER = Path(__file__).parent.parent / "recipes"
FILES = sorted(path for path in FOLDER.rglob("*.yaml") if path.parent.name != "accelerate")
RECIPES = [path for path in FILES if not is_sweep(path)]
SWEEPS = [path for path in FILES if is_sweep(path)]


def name(path):
    return str(path.relative_to(FOLDER))


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_recipe_is_built_and_planned(path):
    recipe = load_recipe(path)
    costs = plan(recipe)
    assert costs["parameters"] > 0
    assert costs["training FLOPs per token"] > costs["forward FLOPs per token"] > 0
    if recipe.training.epochs is None and path.parent.name not in (FOLDER.name, "smoke", "claims", "tasks"):
        assert costs["tokens"] >= 1e8


@pytest.mark.parametrize("path", SWEEPS, ids=name)
def test_sweep_runs_are_recipes(path):
    raw = yaml.safe_load(path.read_text())
    runs = load_sweep(path)
    expected = len(raw["runs"]) if "runs" in raw else 1
    for values in raw.get("grid", {}).values():
        expected *= len(values)
    assert len(runs) == expected
    for run in (runs[0], runs[-1]):
        assert plan(run.recipe)["parameters"] > 0
        for key, value in run.settings.items():
            section, field = key.split(".")
            section = getattr(run.recipe, section)
            assert (section[field] if isinstance(section, dict) else getattr(section, field)) == value


@pytest.mark.parametrize("folder", sorted({path.parts[len(FOLDER.parts)] for path in FILES if path.parent != FOLDER}))
def test_every_family_has_a_readme(folder):
    assert (FOLDER / folder / "README.md").stat().st_size > 500


PUBLISHED = {
    "parcae/small": 144_323_136,
    "parcae/medium": 388_003_328,
    "parcae/large": 776_655_680,
    "parcae/xlarge": 1_338_591_744,
    "parcae/transformer_small": 143_141_184,
    "parcae/transformer_medium": 385_903_104,
    "parcae/transformer_large": 773_375_040,
    "parcae/transformer_xlarge": 1_333_868_544,
    "parcae/rdm/rdm_100m": 114_242_560,
    "parcae/rdm/rdm_350m": 382_765_056,
    "fully_looped/small_flt": 2 * 151_680 * 384 + 12 * 6 * 384**2,
    "fully_looped/base_lt": 2 * 151_680 * 768 + 12 * 12 * 768**2,
}


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_published_parameter_counts(recipe):
    assert plan(load_recipe(FOLDER / f"{recipe}.yaml"))["parameters"] == PUBLISHED[recipe]


def test_flops_are_those_of_the_formula():
    """C = (2 N1 + 6 N2) D and attention, written out for Parcae 140M: mean depth 8, 4 loops with gradients."""
    costs = plan(load_recipe(FOLDER / "parcae/small.yaml"))
    d, ff, length, vocabulary = 768, 3072, 2048, 32768
    block = 4 * d * d + 2 * d * ff + 2 * d
    gate = 6 * 32  # of value embeddings: layers 1, 3 and 5, one each in prelude, core and coda
    attention = 4 * d * length
    prelude = 2 * block + gate + d
    core = 2 * block + gate + d * d + 2 * d
    coda = 2 * block + gate + d * d
    head = d + vocabulary * d
    expected = 6 * (prelude + coda + head) + 4 * 3 * attention + (2 * core + 2 * attention) * (4 + 3 * 4)
    assert costs["training FLOPs per token"] == expected
    assert costs["steps"] == -(-11_200_000_000 // (256 * 2048))


def test_budget_in_flops():
    costs = plan(load_recipe(FOLDER / "parcae/small.yaml", ["training.tokens=null", "training.flops=1e18"]))
    assert costs["training FLOPs"] == pytest.approx(1e18, rel=0.01)


def test_flt_trains_on_20_tokens_for_every_parameter():
    """As its code counts: 2.54 billion at 127M; 1.38 as its text counts, without the token embedding."""
    costs = plan(load_recipe(FOLDER / "fully_looped/small_flt.yaml"))
    without_embedding = 151_680 * 384 + 12 * 6 * 384**2
    assert costs["steps"] == 20 * (without_embedding + 151_680 * 384) // 2**19 == 4848
    assert costs["tokens"] / 1e9 == pytest.approx(2.54, abs=0.005)
    costs = plan(load_recipe(FOLDER / "fully_looped/small_flt.yaml", ["training.count_embedding=false"]))
    assert costs["parameters without embedding"] == without_embedding
    assert costs["steps"] == 20 * without_embedding // 2**19
    assert costs["tokens"] / 1e9 == pytest.approx(1.38, abs=0.005)


def test_flt_recipes_are_what_its_code_runs():
    """Rates times sqrt(768 / d), no warm-up, the last fifth of the steps linear, one token before every document."""
    small = load_recipe(FOLDER / "fully_looped/small_lt.yaml")
    assert (small.data.document_tokens, small.data.start_token, small.data.sequence_length) == (
        "start", "<|im_start|>", 1024,
    )  # fmt: skip
    optimizer, schedule = small.optimizer, small.schedule
    assert (optimizer.name, optimizer.betas, optimizer.eps) == ("muon", [0.8, 0.95], 1e-10)
    assert (optimizer.embedding_lr, optimizer.head_lr, optimizer.reference_width) == (0.2, 4e-3, 768)
    assert (optimizer.muon_lr, optimizer.muon_momentum, optimizer.muon_momentum_start) == (0.02, 0.95, 0.85)
    assert (optimizer.muon_momentum_steps, optimizer.weight_decay, optimizer.muon_weight_decay) == (300, 0, 0)
    assert (optimizer.clip, schedule.warmup_steps) == (1.0, 0)
    assert small.training.rows_per_step * small.data.sequence_length == 2**19
    (scheduler,) = build_schedulers([torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)], schedule, 1000)
    rates = []
    for step in (0, 500, 800, 801, 900, 999):
        set_learning_rates([scheduler], step)
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1, 1, 1, 199 / 200, 0.5, 1 / 200])


FLT_SYSTEMS = ["lt", "lt_input", "lt_attention", "flt"]
FLT_SWEEPS = {  # (systems, layers, loops) that a table or figure shows
    "table_1_small": {(system, 6, loops) for system in FLT_SYSTEMS for loops in (3, 6, 9)},
    "table_1_base": {(system, 12, loops) for system in FLT_SYSTEMS for loops in (3, 6, 9)},
    "figure_4": {(system, 12, 12) for system in FLT_SYSTEMS},
    "diagnostics": {(system, 6, loops) for system in [*FLT_SYSTEMS, "flt_residual"] for loops in (6, 9, 12)},
}


@pytest.mark.parametrize("sweep_name", FLT_SWEEPS)
def test_flt_sweeps_hold_what_is_shown_once(sweep_name):
    runs = load_sweep(FOLDER / f"fully_looped/{sweep_name}.sweep.yaml")
    shown = [tuple(run.recipe.model[key] for key in ("preset", "num_core_layers", "num_loops")) for run in runs]
    assert set(shown) == FLT_SWEEPS[sweep_name] and len(shown) == len(set(shown))
    for run in runs:
        steps = plan(run.recipe)["steps"]
        assert steps == 2000 if sweep_name == "diagnostics" else steps > 4000
        assert run.recipe.evaluation.loops == [1, 3, 6, 9, 12]
        assert run.recipe.logging.monitor_every == (1 if sweep_name == "diagnostics" else 50)


def test_flt_attention_variants():
    """Table 2: three key/value heads of six; its full attention is the run of figure 4."""
    configs = {run.name: run.recipe.model_config() for run in load_sweep(FOLDER / "fully_looped/table_2.sweep.yaml")}
    assert set(configs) == {"gqa", "mla", "swa"}
    for config in configs.values():
        assert (config.num_core_layers, config.num_loops, config.num_attention_heads) == (12, 12, 6)
    assert configs["gqa"].num_key_value_heads == 3 and configs["mla"].kv_latent_size == 128
    assert (configs["swa"].window_pattern, configs["swa"].sliding_window) == ("SSSL", 256)


def test_flt_loss_placement():
    """END, FEW and STEP of the public code, and what their readouts cost."""
    runs = load_sweep(FOLDER / "fully_looped/loss_placement.sweep.yaml")
    assert [run.recipe.model["loop_loss"] for run in runs] == ["terminal", "last_third", "per_loop"]
    costs = [plan(run.recipe)["training FLOPs per token"] for run in runs]
    readout = 6 * 151_680 * 384
    assert [cost - costs[0] for cost in costs] == [0, (3 - 1) * readout, (9 - 1) * readout]  # of nine loops


@pytest.mark.parametrize("path", sorted((FOLDER / "fully_looped").glob("*.yaml")), ids=name)
def test_flt_recipes_are_evaluated_at_the_budgets(path):
    recipes = [run.recipe for run in load_sweep(path)] if is_sweep(path) else [load_recipe(path)]
    assert {tuple(recipe.evaluation.loops) for recipe in recipes} == {(1, 3, 6, 9, 12)}


def test_decay_product():
    recipe = load_recipe(
        FOLDER / "residual_scaling/workshop_340m.yaml", ["optimizer.lr=5e-4", "optimizer.weight_decay=0"]
    )
    assert recipe.optimizer.weight_decay == pytest.approx(0.02)


def test_optima():
    results = [
        {"lr": 1.0, "n": 1, "loss": 3.0},
        {"lr": 2.0, "n": 1, "loss": 2.0},
        {"lr": 1.0, "n": 2, "loss": 1.0},
        {"lr": 2.0, "n": 2, "loss": None},
    ]
    assert optima(results, "lr", "n") == {1: 2.0, 2: 1.0}


def test_epochs_are_planned_with_the_tokens_that_are_expected():
    """WikiText-103 in rows of 256 every 128, four times, 64 a step; twice the tokens, since rows overlap by half."""
    costs = plan(load_recipe(FOLDER / "readout/44m/per_loop_raw.yaml"))
    rows = (103_227_021 - 256) // 128 + 1
    assert costs["steps"] == -(-4 * rows // 64)
    assert costs["tokens"] == pytest.approx(4 * 2 * 103_227_021, rel=1e-4)
    assert "expected_tokens" in plan(load_recipe(FOLDER / "readout/44m.yaml", ["data.expected_tokens=null"]))["steps"]


def test_a_sweep_is_run_once_drawn_and_summed_up(tmp_path, capsys):
    """A run that diverges is recorded and left out; done ones are not run again."""
    documents = [f"{i} birds in the hand are worth {2 * i} in the bush. " * 8 for i in range(80)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    (tmp_path / "rates.sweep.yaml").write_text(
        yaml.safe_dump(
            {
                "recipe": str(FOLDER / "smoke/residual_scaling.yaml"),
                "set": {
                    "training.steps": 6,
                    "training.max_loss": 6.0,
                    "data.source": str(tmp_path / "text.jsonl"),
                    "data.cache_dir": str(tmp_path / "shards"),
                    "data.tokenizer_vocab_size": 280,
                },
                "grid": {
                    "model.residual_scaling": ["none", "linear"],
                    "model.num_loops": [1, 2],
                    "optimizer.lr": [1e-2, 1e4],
                },
                "plot": {"x": "optimizer.lr", "curve": "model.num_loops", "panel": ["model.residual_scaling"]},
            }
        )
    )
    arguments = [str(tmp_path / "rates.sweep.yaml"), f"training.output_dir={tmp_path / 'runs'}"]
    sweep.main(arguments)
    printed = capsys.readouterr().out
    assert "best optimizer.lr by model.num_loops linear: 1: 0.01, 2: 0.01\n" in printed
    results = [json.loads(line) for line in (tmp_path / "runs" / "results.jsonl").read_text().splitlines()]
    assert len(results) == 8
    for result in results:
        assert ("diverged" in result) == (result["loss"] is None) == (result["optimizer.lr"] == 1e4)
    assert (tmp_path / "runs" / "results.png").read_bytes().startswith(b"\x89PNG")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    sweep.main(arguments)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")} == before and len(before) == 8


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.step=3"], "'step'.*did you mean 'steps'"),
        (["trainin.steps=3"], "'trainin'.*did you mean 'training'"),
        (["model.num_loop=3"], "'num_loop'.*did you mean 'num_loops'"),
        (["steps=3"], "not an override"),
        (["training.steps=many"], "training.steps must be int, got 'many'"),
        (["data.packing=tetris"], "one of concatenate, best_fit, got 'tetris'"),
        (["data.packing=best_fit", "data.stride=3"], "stride=3"),
        (["data.document_masking=true", "data.document_tokens=none"], "document_tokens is 'none'"),
        (["data.start_token=<s>", "data.document_tokens=end"], "start_token='<s>' would begin documents"),
        (["depth.split=prefix"], "backprop_loops"),
        (["depth.mean=4"], "needs a sampler"),
        (["schedule.name=wsd"], "decay_steps and schedule.decay_fraction"),
        (["training.rows_per_step=0"], "at least 1, got 0"),
        (["training.steps=0"], "training.steps must be at least 1, got 0"),
        (["evaluation.every=0"], "evaluation.every must be at least 1, got 0"),
        (["logging.monitor_every=-1"], "logging.monitor_every must be at least 1, got -1"),
        (["training.tokens=.nan"], "training.tokens must be above 0 and finite, got nan"),
        (["optimizer.lr=-1e-3"], "optimizer.lr must be above 0 and finite, got -0.001"),
        (["optimizer.betas=[0.9]"], r"betas must be two numbers from 0 to below 1, got \[0.9\]"),
        (["evaluation.loops=[0, 2]"], r"depths of at least 1, got \[0, 2\]"),
        (["training.steps=["], "'\\[' is not YAML"),
        (["optimizer.decay_product=1e-5", "optimizer.weight_decay=0.1"], "not both"),
    ],
)
def test_bad_recipes(overrides, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(FOLDER / "smoke/base.yaml", overrides)


def test_files_that_are_not_recipes(tmp_path):
    with pytest.raises(RecipeError, match="there is no recipe"):
        load_recipe(tmp_path / "missing.yaml")
    (tmp_path / "self.yaml").write_text("extends: self.yaml")
    with pytest.raises(RecipeError, match="extends itself"):
        load_recipe(tmp_path / "self.yaml")
    (tmp_path / "broken.yaml").write_text("model: [")
    with pytest.raises(RecipeError, match="not YAML"):
        load_recipe(tmp_path / "broken.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(RecipeError, match="not YAML"):
        load_recipe(tmp_path / "binary.yaml")
    (tmp_path / "numbered.yaml").write_text("extends: 3")
    with pytest.raises(RecipeError, match="extends must name a recipe, got 3"):
        load_recipe(tmp_path / "numbered.yaml")


def test_saved_recipe_opens_again(tmp_path):
    recipe = load_recipe(FOLDER / "parcae/small.yaml")
    recipe.save(tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
