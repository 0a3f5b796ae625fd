"""Every recipe is a model that can be built, and a plan whose numbers are the papers'."""

import dataclasses
import json
import math
import os
import re
import shutil
import typing
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import yaml

from looped_recipes import sweep
from looped_recipes.common.activation_memory import kept_of_token
from looped_recipes.common.axis import written
from looped_recipes.common.files import check_writable
from looped_recipes.common.flops import sizes
from looped_recipes.engine.optimizers import rate_factor
from looped_recipes.engine.run_checkpoints import RunCheckpoints
from looped_recipes.engine.sweep_runs import load_sweep
from looped_recipes.engine.sweeps import optima
from looped_recipes.settings import estimates
from looped_recipes.settings.costs import plan
from looped_recipes.settings.foreign_keys import HERE, PLACES
from looped_recipes.settings.operations import Operations
from looped_recipes.settings.ranges import RANGES
from looped_recipes.settings.recipe import RecipeError, load_recipe, recipe_of_run, refuse_another_place
from looped_recipes.settings.run_checks import check_run, note_on_windows
from looped_recipes.settings.sections import LENGTHS, SECTIONS
from looped_recipes.settings.sweep_files import is_sweep
from looped_recipes.settings.yaml_files import parse_yaml
from modeling_looped import LoopedConfig, LoopedForCausalLM, depths_of_step
from modeling_looped.presets import PRESETS
from tests.helpers import random_ids
from tests.helpers_recipes import RECIPES, runs_of_sweep


SMALL = (
    "cache",
    "claims",
    "demo",
    "gpu",
    "own_text",
    "smoke",
    "speculation",
    "tasks",
    "tiny",
)  # not of published length


FILES = sorted(path for path in RECIPES.rglob("*.yaml") if path.parent.name != "accelerate")
SINGLE = [path for path in FILES if not is_sweep(path)]
SWEEPS = [path for path in FILES if is_sweep(path)]


def name(path):
    return str(path.relative_to(RECIPES))


@pytest.mark.parametrize("path", SINGLE, ids=name)
@pytest.mark.some(36)
def test_recipe_is_built_and_planned(path):
    recipe = load_recipe(path)
    costs = plan(recipe)
    assert costs["parameters"] > 0
    assert note_on_windows(recipe, recipe.model_config()) is None
    assert costs["training FLOPs per token"] > costs["forward FLOPs per token"] > 0
    if recipe.training.epochs is None and path.parent.name not in SMALL:
        assert costs["tokens"] >= 1e8


def test_windows_without_effect_are_told():
    """As of presets whose contexts are longer than the rows that a run has."""
    recipe = load_recipe(RECIPES / "fully_looped/base_flt_swa.yaml")
    config = recipe.model_config()
    recipe.data.sequence_length = config.sliding_window + 1
    assert note_on_windows(recipe, config) is None
    recipe.data.sequence_length = config.sliding_window
    assert f"={config.sliding_window} has no effect" in note_on_windows(recipe, config)


def comparable(recipe) -> dict:
    """All that a run is, but for where it is written."""
    fields = recipe.to_dict()
    fields["training"].pop("output_dir")
    return fields


@pytest.mark.parametrize("path", SWEEPS, ids=name)
@pytest.mark.some(12)
def test_sweep_runs_are_recipes(path):
    raw = yaml.safe_load(path.read_text())
    runs = runs_of_sweep(path)
    grids = raw.get("grid", [])
    sizes = [math.prod(map(len, grid.values())) for grid in (grids if isinstance(grids, list) else [grids])]
    assert len(runs) == (len(raw["runs"]) if "runs" in raw else sum(sizes))
    assert len({json.dumps(comparable(run.recipe)) for run in runs}) == len(runs)
    of_one_model = {json.dumps([run.recipe.model, run.recipe.data.sequence_length], default=str): run for run in runs}
    assert not any(note_on_windows(run.recipe, run.recipe.model_config()) for run in of_one_model.values())
    for run in (runs[0], runs[-1]):
        assert plan(run.recipe)["parameters"] > 0
        settings = dict(run.settings)
        if (own := settings.pop("recipe", None)) is not None:
            assert run.path == path.parent / own
        for key, value in settings.items():
            section, field = key.split(".")
            section = getattr(run.recipe, section)
            assert (section[field] if isinstance(section, dict) else getattr(section, field)) == value


@pytest.mark.parametrize(
    "folder", sorted({path.parts[len(RECIPES.parts)] for path in FILES if path.parent != RECIPES})
)
def test_every_family_has_a_readme(folder):
    assert (RECIPES / folder / "README.md").stat().st_size > 500


# Parcae, appendix O: runs, and the depths at which each is evaluated
LAW_DEPTHS = [1, 2, 4, 6, 8, 10, 12, 16, 20, 24]
LAW_SWEEPS = {
    "isoflop_140m": (36, LAW_DEPTHS),
    "isoflop_370m": (18, LAW_DEPTHS),
    "isoflop_140m_fixed": (6, [1]),
    "isoflop_370m_fixed": (3, [1]),
    "depth_140m": (6, list(range(1, 25))),
    "depth_370m": (6, list(range(1, 25))),
}


@pytest.mark.parametrize("sweep", LAW_SWEEPS)
def test_law_sweeps(sweep):
    """Published budgets, depths and sizes, no run twice; a baseline whose depth is never drawn; documents enough."""
    count, depths = LAW_SWEEPS[sweep]
    runs = runs_of_sweep(RECIPES / f"parcae/{sweep}.sweep.yaml")
    assert len(runs) == len({json.dumps(run.settings) for run in runs}) == count
    size = PUBLISHED["parcae/small" if "140m" in sweep else "parcae/medium"]
    budgets = {1e18, 2e18, 4e18, 8e18, 16e18, 64e18} if "140m" in sweep else {32e18, 64e18, 128e18}
    assert {run.recipe.training.flops for run in runs} == ({None} if "depth" in sweep else budgets)
    assert {run.recipe.model["num_loops"] for run in runs} == ({1} if "fixed" in sweep else {2, 4, 6, 8, 10, 12})
    for run in runs:
        recipe, costs = run.recipe, plan(run.recipe)
        assert recipe.evaluation.loops == depths and costs["parameters"] == size
        assert recipe.depth.sampler == ("fixed" if "fixed" in sweep else "poisson")
        assert costs["loops with gradients, at the mean depth"] == -(-costs["mean depth"] // 2)  # equation 6
        if "depth" in sweep:
            assert recipe.training.tokens == 11.2e9
        else:
            assert costs["training FLOPs"] == pytest.approx(recipe.training.flops, rel=1e-3)
        assert recipe.data.max_documents * 1000 > costs["tokens"]  # a document is about a thousand tokens


@pytest.mark.parametrize("size", ["small", "medium", "large", "xlarge"])
def test_depths_of_table_5(size):
    """Figure 7, and the curves that the unified law predicts: T from 1 to 16; a Transformer has one depth."""
    looped, transformer = (load_recipe(RECIPES / f"parcae/{each}{size}.yaml") for each in ("", "transformer_"))
    assert looped.evaluation.loops == list(range(1, 17)) and transformer.evaluation.loops == [1]
    assert transformer.depth.sampler == "fixed" and transformer.model["num_loops"] == 1
    assert looped.training.tokens == transformer.training.tokens


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
    "parcae/rdm/parcae_350m": 378_558_464,
    "fully_looped/small_flt": 2 * 151_680 * 384 + 12 * 6 * 384**2,
    "fully_looped/base_lt": 2 * 151_680 * 768 + 12 * 12 * 768**2,
}


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_published_parameter_counts(recipe):
    assert plan(load_recipe(RECIPES / f"{recipe}.yaml"))["parameters"] == PUBLISHED[recipe]


@pytest.mark.parametrize(
    "recipe, d, ff, layers", [("parcae_100m", 1024, 3520, 3), ("parcae_350m", 2048, 7040, 4)], ids=["100m", "350m"]
)
def test_parcae_of_the_rdm_comparison_is_counted_by_hand(recipe, d, ff, layers):
    """Pre-norm blocks, A, B and the step; with the prelude norm and C that equation 3 adds, neither count is table
    17's, whose 100M is that of the RDM beside it."""
    recipe = load_recipe(RECIPES / f"parcae/rdm/{recipe}.yaml")
    count = 65536 * d + layers * (4 * d * d + 3 * d * ff + 2 * d) + d * d + 2 * d + d
    assert plan(recipe)["parameters"] == count
    recipe.model.update(prelude_norm=True, coda_input="linear")
    assert plan(recipe)["parameters"] == count + d * d + d
    assert count + d * d + d not in (114_242_560, 378_558_464)


def test_recurrent_depth_recipes_take_262144_tokens_a_step():
    """Figures 15 and 16: 10 billion tokens are 38 thousand steps, 8.5 billion a little more than 32 thousand."""
    for recipe in ("rdm_100m", "rdm_350m", "parcae_100m", "parcae_350m", "rdm_100m_pre_norm", "rdm_350m_pre_norm"):
        recipe = load_recipe(RECIPES / f"parcae/rdm/{recipe}.yaml")
        assert recipe.training.rows_per_step * recipe.data.sequence_length == 262_144
    assert plan(load_recipe(RECIPES / "parcae/rdm/rdm_100m.yaml"))["steps"] == 38_147


# runs of a table, and the depths it reads
ABLATIONS = {
    "sampling": (3, {1, 4, 8, 16, 64}),
    "table_2_100m": (15, {16}),
    "table_2_350m": (15, {8}),
    "table_4": (4, {1, 4, 8}),
    "table_8": (4, {1, 4, 8, 16}),
    "table_9": (6, {1, 4, 8, 16, 64}),
    "table_10": (5, {1, 4, 8, 16, 20, 64}),
}


def test_every_ablation_of_parcae_is_listed():
    assert sorted(ABLATIONS) == sorted(
        path.name.removesuffix(".sweep.yaml") for path in (RECIPES / "parcae/ablations").iterdir()
    )


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations_of_parcae_are_the_runs_of_their_tables(name):
    """As many, no two alike, and each is evaluated at the depths of the table and at its own mean."""
    count, depths = ABLATIONS[name]
    runs = runs_of_sweep(RECIPES / f"parcae/ablations/{name}.sweep.yaml")
    assert len(runs) == count
    recipes = []
    for run in runs:
        mean = run.recipe.model_config().num_loops
        loops = run.recipe.evaluation.loops or range(1, mean + 1)
        assert depths | {mean} <= set(loops)
        assert plan(run.recipe)["steps"] >= run.recipe.schedule.warmup_steps + (run.recipe.schedule.decay_steps or 0)
        recipes.append({**run.recipe.to_dict(), "training": {**run.recipe.to_dict()["training"], "output_dir": None}})
    assert all(one != other for i, one in enumerate(recipes) for other in recipes[:i])


def test_ablations_differ_in_what_the_tables_say():
    def settings(name, *keys):
        return [
            tuple(
                getattr(run.recipe, section).get(key)
                if section == "model"
                else getattr(getattr(run.recipe, section), key)
                for section, key in keys
            )
            for run in runs_of_sweep(RECIPES / f"parcae/ablations/{name}.sweep.yaml")
        ]

    systems = ("model", "block_norm"), ("model", "injection"), ("depth", "per"), ("optimizer", "lr")
    for name in ("table_2_100m", "table_2_350m"):
        rates = [2e-4, 4e-4, 6e-4, 8e-4, 1e-3]
        assert settings(name, *systems) == [
            (*system, rate)
            for system in (("pre", None, "micro_batch"), (None, None, "micro_batch"), ("pre", "diagonal", "sequence"))
            for rate in rates
        ]
    assert settings("table_4", ("model", "injection"), ("depth", "per"), ("model", "prelude_norm")) == [
        ("concat", "micro_batch", False),
        (None, "micro_batch", False),
        (None, "sequence", False),
        (None, "sequence", None),
    ]
    assert settings("table_8", ("model", "hidden_size"), ("depth", "per"), ("depth", "rows_per_draw")) == [
        (None, "micro_batch", 32),
        (None, "sequence", None),
        (2048, "micro_batch", 32),
        (2048, "sequence", None),
    ]
    assert settings("table_9", ("model", "num_loops"), ("depth", "backprop_loops")) == [
        (mean, 4) for mean in (4, 8, 14, 20, 26, 32)
    ]
    assert settings("table_10", ("model", "num_loops"), ("depth", "backprop_loops")) == [
        (20, window) for window in (4, 6, 8, 10, 12)
    ]
    assert settings("sampling", ("depth", "backprop_loops"), ("depth", "split")) == [
        (None, "total"),
        (8, "total"),
        (8, "prefix"),
    ]


def test_parcae_trains_with_the_optimizer_of_table_21():
    for size, lr in (("small", 8e-3), ("medium", 8e-3), ("large", 6e-3), ("xlarge", 6e-3)):
        for prefix in ("", "transformer_"):
            recipe = load_recipe(RECIPES / f"parcae/{prefix}{size}.yaml")
            optimizer = recipe.optimizer
            assert (optimizer.name, optimizer.lr, optimizer.muon_lr) == ("normuon", lr, 8e-3)
            assert (optimizer.betas, optimizer.eps, optimizer.weight_decay) == ([0.8, 0.95], 1e-10, 0.0)
            assert (optimizer.muon_momentum, optimizer.muon_momentum_start) == (0.95, 0.85)
            assert (optimizer.muon_momentum_steps, optimizer.clip) == (300, 1.0)
            assert (optimizer.muon_weight_decay, optimizer.muon_weight_decay_end) == (0.2, 0.0)
            schedule = recipe.schedule
            assert (schedule.name, schedule.warmup_steps, schedule.decay_fraction) == ("wsd", 0, 0.5)
            assert recipe.training.rows_per_step * recipe.data.sequence_length == 256 * 2048


def test_flt_trains_with_the_plain_muon_of_its_code():
    """0.02 without decay, momentum from 0.85 to 0.95 over 300 steps; rates fall to zero over the last fifth."""
    for path in (RECIPES / "fully_looped").glob("*.yaml"):
        if is_sweep(path):
            continue
        recipe = load_recipe(path)
        optimizer, schedule = recipe.optimizer, recipe.schedule
        assert (optimizer.name, optimizer.muon_lr, optimizer.muon_weight_decay) == ("muon", 0.02, 0.0), path
        assert (optimizer.muon_momentum_start, optimizer.muon_momentum) == (0.85, 0.95)
        assert (optimizer.muon_momentum_steps, optimizer.clip, optimizer.weight_decay) == (300, 1.0, 0.0)
        assert (optimizer.embedding_lr, optimizer.head_lr, optimizer.reference_width) == (0.2, 0.004, 768)
        assert (optimizer.betas, optimizer.eps) == ([0.8, 0.95], 1e-10)
        assert (schedule.name, schedule.warmup_steps, schedule.decay_fraction) == ("wsd", 0, 0.2)
        assert schedule.final_ratio == 0.0


def test_flops_are_those_of_the_formula():
    """C = (2 N1 + 6 N2) D and attention, written out for Parcae 140M: mean depth 8, 4 loops with gradients."""
    costs = plan(load_recipe(RECIPES / "parcae/small.yaml"))
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


@pytest.mark.parametrize(
    "settings, is_refused",
    [
        (["depth.backprop_loops=2"], True),
        (["depth.backprop_loops=half", "model.num_prelude_layers=1", "model.tie_word_embeddings=true"], True),
        (["depth.backprop_loops=2", "model.tie_word_embeddings=true"], False),  # the head's gradients
        (["depth.backprop_loops=3"], False),
        (["depth.backprop_loops=2", "model.injection=add"], False),
        (["depth.backprop_loops=2", "depth.sampler=poisson"], False),
        (["depth.backprop_loops=2", "model.exit_gate=raw", "training.freeze_all_but_gate=true"], False),
    ],
    ids=str,
)
def test_recipes_whose_embedding_would_get_no_gradient(settings, is_refused):
    recipe = load_recipe(RECIPES / "smoke/base.yaml", settings)  # three loops
    if is_refused:
        with pytest.raises(RecipeError, match="of 3 loops and model.injection='none' the embedding and the prelude"):
            check_run(recipe)
    else:
        check_run(recipe)


@pytest.mark.parametrize("gate_alone", [["model.loop_loss=gate"], ["training.freeze_all_but_gate=true"]], ids=str)
def test_a_gate_by_itself_sends_nothing_back(gate_alone):
    """A forward pass that reads every loop out, and no gradients or moments."""
    settings = ["model.exit_gate=raw", "model.loop_loss=per_loop", *gate_alone]
    recipe = load_recipe(RECIPES / "smoke/ouro.yaml", settings)
    config = recipe.model_config()
    costs, head = plan(recipe), config.vocab_size * config.hidden_size
    forward = costs["forward FLOPs per token"] + 2 * (config.num_loops - 1) * head
    assert costs["training FLOPs per token"] == pytest.approx(forward, rel=0.01)
    if recipe.training.freeze_all_but_gate:
        parts = estimates.memory(recipe, config)
        assert parts["gradients"] == parts["optimizer"] == 0 < parts["weights"]


def test_operations_are_those_of_the_depths_that_are_drawn():
    """While depths grow they are fewer; Huginn's sampler adds a loop; a maximum cuts."""
    growing = ["depth.curriculum=linear", "depth.curriculum_steps=8", "depth.curriculum_target=backward"]
    recipe = load_recipe(RECIPES / "smoke/lt.yaml", ["model.num_loops=3", *growing, "training.steps=10"])
    operations = Operations(recipe, recipe.model_config())
    at_depth = [operations.at_depth(depth, None, False) for depth in (1, 1, 1, 2, 2, 2, 3, 3, 3, 3)]
    assert [operations.per_token(step) for step in range(10)] == at_depth
    costs = plan(recipe)
    assert costs["training FLOPs"] == pytest.approx(operations.tokens_per_step * sum(at_depth))
    for steps in (2, 5, 9, 50):
        assert operations.steps_within(operations.of_run(steps)) == steps
    for depth, window in ((3, 8), (8, 3)):
        settings = [f"depth.backprop_loops={window}", f"model.num_loops={depth}"]
        recipe = load_recipe(RECIPES / "smoke/lt_input.yaml", settings)
        assert plan(recipe)["loops with gradients, at the mean depth"] == 3
    with_tables = load_recipe(
        RECIPES / "smoke/lt.yaml", ["model.value_embeddings=true", *growing, "training.steps=10"]
    )
    operations = Operations(with_tables, with_tables.model_config())
    more = 6 * sizes(operations.config).value_tables * operations.tokens_per_step * 10  # also while depths grow
    assert operations.of_run(10, value_tables=True) - operations.of_run(10) == pytest.approx(more) != 0
    half = [
        load_recipe(RECIPES / "smoke/lt.yaml", ["depth.backprop_loops=half", f"model.num_loops={n}"]) for n in (4, 5)
    ]
    assert [recipe.backprop_loops(recipe.model_config()) for recipe in half] == [2, 3]  # rounded up

    for sampler, settings, drawn in (("poisson_lognormal", [], 5.0), ("poisson", ["depth.maximum=4"], 3.2)):
        recipe = load_recipe(RECIPES / "smoke/lt.yaml", [f"depth.sampler={sampler}", "depth.mean=4", *settings])
        depths = depths_of_step(sampler, 4, 1, 0, range(2000), maximum=recipe.depth.maximum)
        assert plan(recipe)["mean depth"] == pytest.approx(fmean(depths), abs=0.15)
        assert plan(recipe)["mean depth"] == pytest.approx(drawn, abs=0.1)


def kept_by_a_pass(config, rows: int, length: int) -> float:
    """Numbers of a token that autograd keeps, without weights and logits."""
    model = LoopedForCausalLM(config).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    trunk, every_loop = model.get_decoder(), config.loop_loss != "terminal"
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = trunk(random_ids(rows, length), output_loop_readout_states=every_loop, use_cache=False, has_loss=True)
        shallower = out.loop_readout_states[:-1] if every_loop else []
        read = [trunk.readout(state, loop) for loop, state in enumerate(shallower, start=1)]
        logits = [model.lm_head(state) for state in (*read, out.last_hidden_state)]
    assert len(logits) == 1 + len(read)  # alive until here
    return sum(storage.nbytes() for storage in kept.values()) / 4 / rows / length


TINY = {
    "vocab_size": 100, "hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 2, "num_core_layers": 3,
    "num_loops": 4, "max_position_embeddings": 64, "attention_dropout": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_activations_are_those_that_autograd_keeps(preset):
    config = LoopedConfig.from_preset(preset, **TINY)
    readouts = 1 if config.loop_loss == "terminal" else config.num_loops
    kept = kept_by_a_pass(config, rows=2, length=32)
    assert kept_of_token(config, config.num_loops, readouts, False) == pytest.approx(kept, rel=0.02)


WIDER_CORE = {"core_hidden_size": 192, "core_num_attention_heads": 3, "core_intermediate_size": 512}


@pytest.mark.parametrize(
    "fields",
    [
        *({"block_norm": name} for name in ("pre", "post", "branch_sandwich", "residual_sandwich")),
        *({"qk_norm": name, "num_key_value_heads": 1} for name in ("learned", "all_heads", "free")),
        *({"injection": name, "injection_norm": True} for name in ("add", "concat", "diagonal")),
        {"injection": "residual_all"},
        {"injection": "attention_first"},
        {"injection": "attention_all", "block_norm": "post"},
        {"inter_loop_norm": "own", "norm_affine": False},
        {"loop_damping": True},
        {"loop_change_gate": True},
        {"kv_latent_size": 64},
        {"residual_dropout": 0.1},
        {"residual_dropout": 0.1, "residual_dropout_on": "attention"},
        {"loop_lora_rank": 16, "kv_latent_size": 64},
        {"loop_embedding": "modulation"},
        {"value_embeddings": True, "prelude_norm": True},
        {"mlp_gated": False},
        {"head_dim": 32},
        {**WIDER_CORE, "injection": "concat", "state_init": "zeros", "coda_input": "linear", "num_coda_layers": 1},
    ],
    ids=str,
)
def test_activations_of_options_are_those_that_autograd_keeps(fields):
    config = LoopedConfig(**TINY | fields)
    kept = kept_by_a_pass(config, rows=2, length=32)
    assert kept_of_token(config, config.num_loops, 1, False) == pytest.approx(kept, rel=0.01)


def test_budget_in_flops():
    costs = plan(load_recipe(RECIPES / "parcae/small.yaml", ["training.tokens=null", "training.flops=1e18"]))
    assert costs["training FLOPs"] == pytest.approx(1e18, rel=0.01)


def test_value_tables_are_counted_by_name():
    costs, tables = plan(load_recipe(RECIPES / "parcae/small.yaml")), 3 * 32_768 * 768
    assert costs["effective parameters"] - costs["effective parameters without value tables"] == tables
    assert costs["training FLOPs per token with value tables"] - costs["training FLOPs per token"] == 6 * tables
    assert not any("value tables" in key for key in plan(load_recipe(RECIPES / "parcae/rdm/rdm_100m.yaml")))


def test_flt_trains_on_20_tokens_for_every_parameter():
    """As its code counts: 2.54 billion at 127M; 1.38 as its text counts, without the token embedding."""
    costs = plan(load_recipe(RECIPES / "fully_looped/small_flt.yaml"))
    without_embedding = 151_680 * 384 + 12 * 6 * 384**2
    assert costs["steps"] == 20 * (without_embedding + 151_680 * 384) // 2**19 == 4848
    assert costs["tokens"] / 1e9 == pytest.approx(2.54, abs=0.005)
    costs = plan(load_recipe(RECIPES / "fully_looped/small_flt.yaml", ["training.count_embedding=false"]))
    assert costs["parameters without token embedding"] == without_embedding
    assert costs["steps"] == 20 * without_embedding // 2**19
    assert costs["tokens"] / 1e9 == pytest.approx(1.38, abs=0.005)


def test_a_tied_embedding_is_counted_once_or_not_at_all():
    """48 layers have the paper's 438M parameters, or 339.8M without the table that is embedding and head in one."""
    path, blocks = RECIPES / "residual_scaling/48_layers.yaml", 48 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768
    costs = plan(load_recipe(path))
    assert costs["parameters"] == blocks + 128_256 * 768
    assert costs["parameters without embedding and tied head"] == blocks == 339_813_120
    length = ["training.steps=null", "training.tokens_per_parameter=20"]
    for more, counted in ([], costs["parameters"]), (["training.count_embedding=false"], blocks):
        assert plan(load_recipe(path, [*length, *more]))["steps"] == 20 * counted // (256 * 2048)


def test_flt_recipes_are_what_its_code_runs():
    """Rates times sqrt(768 / d), no warm-up, the last fifth of the steps linear, one token before every document."""
    small = load_recipe(RECIPES / "fully_looped/small_lt.yaml")
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
    rates = [rate_factor(schedule, 1000, step) for step in (0, 500, 800, 801, 900, 999)]
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
    runs = runs_of_sweep(RECIPES / f"fully_looped/{sweep_name}.sweep.yaml")
    shown = [tuple(run.recipe.model[key] for key in ("preset", "num_core_layers", "num_loops")) for run in runs]
    assert set(shown) == FLT_SWEEPS[sweep_name] and len(shown) == len(set(shown))
    for run in runs:
        steps = plan(run.recipe)["steps"]
        assert steps == 2000 if sweep_name == "diagnostics" else steps > 4000
        assert run.recipe.evaluation.loops == [1, 3, 6, 9, 12]
        assert run.recipe.logging.monitor_every == (1 if sweep_name == "diagnostics" else 50)


def test_flt_attention_variants():
    """Table 2: three key/value heads of six; its full attention is the run of figure 4."""
    configs = {
        run.name: run.recipe.model_config() for run in runs_of_sweep(RECIPES / "fully_looped/table_2.sweep.yaml")
    }
    assert set(configs) == {"gqa", "mla", "swa"}
    for config in configs.values():
        assert (config.num_core_layers, config.num_loops, config.num_attention_heads) == (12, 12, 6)
    assert configs["gqa"].num_key_value_heads == 3 and configs["mla"].kv_latent_size == 128
    assert (configs["swa"].window_pattern, configs["swa"].sliding_window) == ("SSSL", 256)


def test_flt_loss_placement():
    """END, FEW and STEP of the public code, and what their readouts cost."""
    runs = runs_of_sweep(RECIPES / "fully_looped/loss_placement.sweep.yaml")
    assert [run.recipe.model["loop_loss"] for run in runs] == ["terminal", "last_third", "per_loop"]
    costs = [plan(run.recipe)["training FLOPs per token"] for run in runs]
    readout = 6 * 151_680 * 384
    assert [cost - costs[0] for cost in costs] == [0, (3 - 1) * readout, (9 - 1) * readout]  # of nine loops


@pytest.mark.parametrize("path", sorted((RECIPES / "fully_looped").glob("*.yaml")), ids=name)
def test_flt_recipes_are_evaluated_at_the_budgets(path):
    recipes = [run.recipe for run in runs_of_sweep(path)] if is_sweep(path) else [load_recipe(path)]
    assert {tuple(recipe.evaluation.loops) for recipe in recipes} == {(1, 3, 6, 9, 12)}


def test_decay_product():
    recipe = load_recipe(
        RECIPES / "residual_scaling/workshop_340m.yaml", ["optimizer.lr=5e-4", "optimizer.weight_decay=0"]
    )
    assert recipe.optimizer.weight_decay == pytest.approx(0.02)


def test_optima():
    results = [
        {"lr": 1.0, "n": 1, "loss": 2.2},
        {"lr": 2.0, "n": 1, "loss": 2.0},
        {"lr": 1.0, "n": 2, "loss": 1.0},
        {"lr": 2.0, "n": 2, "loss": None},
    ]
    assert {n: found["lr"] for n, found in optima(results, "lr", "n").items()} == {1: None, 2: None}
    results += [{"lr": lr, "n": n, "loss": 2.5} for lr in (0.5, 4.0) for n in (1, 2)]
    best = optima(results, "lr", "n")
    assert (best[1]["best"], best[1]["loss"]) == (2.0, 2.0) and best[1]["lr"] is not None
    assert (best[2]["best"], best[2]["loss"]) == (1.0, 1.0)


def test_the_last_word_about_the_length_of_a_run_counts(tmp_path):
    """A recipe that extends another, a sweep and a command may each name one of the five; two at once are refused."""
    (tmp_path / "base.yaml").write_text("training: {steps: 60, save_every: 7}")
    (tmp_path / "more.yaml").write_text("extends: base.yaml\ntraining: {epochs: 2}")
    lengths = {
        "base.yaml": {"steps": 60},
        "base.yaml training.tokens=500": {"tokens": 500.0},
        "base.yaml training.epochs=null": {"steps": 60},
        "more.yaml": {"epochs": 2.0},
        "more.yaml training.steps=5": {"steps": 5},
    }
    for line, expected in lengths.items():
        name, *overrides = line.split()
        training = load_recipe(tmp_path / name, overrides).training
        assert {each: getattr(training, each) for each in LENGTHS if getattr(training, each) is not None} == expected
        assert training.save_every == 7
    swept = load_recipe(tmp_path / "base.yaml", changes={"training.flops": 1e9}).training
    assert (swept.steps, swept.flops) == (None, 1e9)
    reason = "training.tokens=500.0 would have no effect with training.steps, which says how long the run is"
    with pytest.raises(RecipeError, match=reason):
        load_recipe(tmp_path / "more.yaml", ["training.tokens=500", "training.steps=3"])


def test_epochs_are_planned_with_the_tokens_that_are_expected():
    """WikiText-103, a word and the space after it, in rows of 256 every 128, four times, 64 a step; twice the tokens,
    since rows overlap by half."""
    costs = plan(load_recipe(RECIPES / "readout/44m/per_loop_raw.yaml"))
    rows = (206_400_000 - 256) // 128 + 1
    assert costs["steps"] == -(-4 * rows // 64)
    assert costs["tokens"] == pytest.approx(4 * 2 * 2 * 103_227_021, rel=1e-3)
    assert "expected_tokens" in plan(load_recipe(RECIPES / "readout/44m.yaml", ["data.expected_tokens=null"]))["steps"]


def test_parts_of_epochs_are_rounded_up_once():
    for hundredths in (1, 7, 28, 110, 251, 10**8):
        recipe = load_recipe(RECIPES / "smoke/base.yaml", [f"training.epochs={hundredths / 100}"])
        steps = Operations(recipe, recipe.model_config()).num_steps
        per_step = 100 * recipe.training.rows_per_step
        for num_rows in (10_000, 10_001):
            assert steps(num_rows) == -(-hundredths * num_rows // per_step)


def test_a_sweep_is_run_once_drawn_and_summed_up(tmp_path, capsys):
    """A run that diverges is recorded and left out; done ones are not run again."""
    documents = [f"{i} birds in the hand are worth {2 * i} in the bush. " * 8 for i in range(80)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    (tmp_path / "rates.sweep.yaml").write_text(
        yaml.safe_dump(
            {
                "recipe": str(RECIPES / "smoke/residual_scaling.yaml"),
                "set": {
                    "training.steps": 3,
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
    assert "best optimizer.lr, linear, model.num_loops 2: none (only 1 of 2 learning rates trained" in printed
    results = [json.loads(line) for line in (tmp_path / "runs" / "results.jsonl").read_text().splitlines()]
    assert len(results) == 8
    for result in results:
        assert ("diverged" in result) == (result["loss"] is None) == (result["optimizer.lr"] == 1e4)
        # without scaling and with 1/N, one loop is the same: trained once
        assert ("same_as" in result) == (result["name"].startswith("num_loops=1_residual_scaling=linear_"))
    of_name = {result["name"]: result for result in results}
    for result in results:
        if "same_as" in result:
            assert result["metrics"] == of_name[result["same_as"]]["metrics"]
            assert result["model.residual_scaling"] == "linear"
    (panel, _) = json.loads((tmp_path / "runs" / "optima.json").read_text())["optima"]
    assert panel["model.residual_scaling"] == "none" and set(panel["best"]) == set(panel["shift"]) == {"1", "2"}
    drawn = (tmp_path / "runs" / "results.svg").read_text()
    for result in results:  # every run that has a loss is a point
        said = f"num_loops = {result['model.num_loops']}, best: 0.01: optimizer.lr 0.01, validation loss "
        assert (result["loss"] is None) or f"{said}{written(result['loss'])}<" in drawn
    assert "optimizer.lr 10,000" not in drawn
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    sweep.main(arguments)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")} == before and len(before) == 6


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.step=3"], "'step'.*did you mean 'steps'"),
        (["trainin.steps=3"], "'trainin'.*did you mean 'training'"),
        (["model.num_loop=3"], "'num_loop'.*did you mean 'num_loops'"),
        (["model.context_length=3"], "'context_length'.*did you mean 'max_position_embeddings'"),
        (["model.recurrences=3"], "'recurrences'.*did you mean 'num_loops'"),
        (["steps=3"], "not an override"),
        (["training.steps=many"], "training.steps must be int, got 'many'"),
        (["data.packing=tetris"], "one of concatenate, best_fit, got 'tetris'"),
        (["data.packing=best_fit", "data.stride=3"], "stride=3"),
        (["data.stride=65"], "data.stride=65 is longer than data.sequence_length=64"),
        (["data.expected_tokens=63"], "data.expected_tokens=63 do not fill one row of data.sequence_length=64"),
        (["data.document_masking=true", "data.document_tokens=none"], "document_tokens is 'none'"),
        (["data.start_token=<s>", "data.document_tokens=end"], "start_token='<s>' would begin documents"),
        (["depth.split=prefix"], "backprop_loops"),
        (["depth.mean=4"], "needs a sampler"),
        (["data.joined_by=x", "data.validation_split=v"], "joined_by must be white space.*got 'x'"),
        (['data.joined_by="\\n"'], "name a data.validation_split"),
        (['data.joined_by="\\n"', "data.validation_split=v", "data.packing=best_fit"], "data.packing='best_fit'"),
        (['data.joined_by="\\n"', "data.validation_split=v", "data.document_start=a"], "data.document_start='a'"),
        (["depth.per=micro_batch"], "got per='micro_batch' and rows_per_draw=None"),
        (["depth.rows_per_draw=4"], "got per='batch' and rows_per_draw=4"),
        (["depth.curriculum=linear"], "curriculum='linear' and curriculum_steps=None"),
        (["depth.curriculum_steps=4"], "curriculum=None and curriculum_steps=4"),
        (["depth.curriculum=linear", "depth.curriculum_steps=4"], "'forward' grows the loops without gradients"),
        (["schedule.name=wsd"], "decay_steps and schedule.decay_fraction"),
        (["training.rows_per_step=0"], "at least 1, got 0"),
        (["training.steps=0"], "training.steps must be at least 1, got 0"),
        (["evaluation.every=0"], "evaluation.every must be at least 1, got 0"),
        (["logging.monitor_every=-1"], "logging.monitor_every must be at least 1, got -1"),
        (["training.tokens=.nan"], "training.tokens must be above 0 and finite, got nan"),
        (["optimizer.lr=-1e-3"], "optimizer.lr must be above 0 and finite, got -0.001"),
        (["optimizer.name=muon", "optimizer.muon_lr=-1"], "optimizer.muon_lr must be above 0 and finite, got -1"),
        (["optimizer.lr=0"], "optimizer.lr must be above 0 and finite, got 0.0"),
        (["optimizer.betas=[0.9, 1]"], r"betas must be two numbers from 0 to below 1, got \[0.9, 1.0\]"),
        (["optimizer.betas=[0.9]"], r"betas must be two numbers from 0 to below 1, got \[0.9\]"),
        (["evaluation.loops=[0, 2]"], r"depths of at least 1, got \[0, 2\]"),
        (["evaluation.loops=[2, 2]"], r"different depths of at least 1, got \[2, 2\]"),
        (["logging.trackers=[wandb, wandb]"], "name each once, got"),
        (["training.taper_start=0.5", "training.taper_end=0.5"], "0 <= start < end <= 1, got 0.5 and 0.5"),
        (["training.compile=cuda_graphs", "depth.per=sequence"], "needs passes of one shape, but .*'sequence'"),
        (["training.steps=["], "'\\[' is not YAML"),
        (["optimizer.decay_product=1e-5", "optimizer.weight_decay=0.1"], "not both"),
        (
            ["optimizer.muon_lr=0.5"],
            r"muon_lr=0.5 .* no effect with optimizer.name='adamw'.*\(optimizer.muon_lr=0.02\)",
        ),
        (["schedule.name=cosine", "schedule.decay_steps=3"], "decay_steps=3 would have no effect"),
        (
            ["data.validation_fraction=0.1", "data.validation_source=v.jsonl"],
            r"=0.1 .* with data.validation_source='v.jsonl': leave .*, or set .* \(data.validation_fraction=0.01\)",
        ),
        (["optimizer.decay_product=.nan"], "decay_product must lie between 0 and 1, got nan"),
        (["training.max_loss=.inf"], "max_loss must be above 0 and finite, got inf"),
        (["data.tokenizer_max_characters=-3"], "tokenizer_max_characters must be at least 1, got -3"),
        (["training.seed=-1"], "training.seed must be at least 0, got -1"),
        (["training.seed=4294967296"], "training.seed must be at most 4.29497e.09, got 4294967296"),
        (["model.dtype=banana"], "model.dtype does nothing in a recipe"),
        (["model.rope_parameters={rope_type: default, rope_thetta: 3}"], "'rope_thetta'; did you mean 'rope_theta'"),
        (
            ["model.rope_parameters={full_attention: {rope_thetta: 3}}"],
            "of full_attention: unknown key .*'rope_thetta'; did you mean 'rope_theta'",
        ),
        (["model.num_loops=1000000000"], "model.num_loops must be at most 4096, got 1000000000"),
        (["data.source=''"], "data.source must not be empty"),
        (['data.cache_dir="a\\nb"'], "data.cache_dir must be one line of printable characters"),
        (["training.steps=1:30"], "training.steps must be int, got '1:30'"),
        (
            ["training.output_dir=~nobody-of-this-name/x"],
            "training.output_dir='~nobody.*there is no user of that name",
        ),
    ],
)
def test_bad_recipes(overrides, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(RECIPES / "smoke/base.yaml", overrides)


def test_files_that_are_not_recipes(tmp_path):
    with pytest.raises(RecipeError, match="there is no recipe"):
        load_recipe(tmp_path / "missing.yaml")
    with pytest.raises(RecipeError, match="core.sweep.yaml is a sweep, of many runs: `looped sweep "):
        load_recipe(RECIPES / "claims/core.sweep.yaml")
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


def test_a_recipe_that_is_named_is_found_from_every_folder(tmp_path, monkeypatch):
    """Beside the file that names it, or in the package; never where the command is typed."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "a.yaml").write_text("extends: smoke/base.yaml\ntraining: {seed: 3}")
    (own / "a.sweep.yaml").write_text("recipe: parcae/small.yaml\ngrid: {training.seed: [1, 2]}")
    (own / "b.yaml").write_text("extends: other.yaml")
    (tmp_path / "other.yaml").write_text("training: {steps: 3}")
    for folder, path in ((own, Path()), (tmp_path, Path("own")), (tmp_path, own)):
        monkeypatch.chdir(folder)
        assert load_recipe(path / "a.yaml").training.seed == 3
        assert [run.recipe.training.seed for run in load_sweep(path / "a.sweep.yaml")] == [1, 2]
        with pytest.raises(RecipeError, match="there is no recipe .*other.yaml"):
            load_recipe(path / "b.yaml")


@pytest.mark.parametrize("name", ["parcae/small.yaml", "smoke/rdm.yaml"])
def test_saved_recipe_opens_again(tmp_path, name):
    recipe = load_recipe(RECIPES / name)
    recipe.save(tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


def test_the_weight_decay_of_a_saved_recipe_follows_another_rate(tmp_path):
    load_recipe(RECIPES / "smoke/rdm.yaml").save(tmp_path / "recipe.yaml")
    again = load_recipe(tmp_path / "recipe.yaml", ["optimizer.lr=1e-3"])
    assert again.optimizer.weight_decay == pytest.approx(4.0e-5 / 1e-3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["schedule.warmup_steps=25"], "warmup_steps=25 .* do not fit into a run of 24 steps"),
        (["training.output_dir=/dev/null/run"], "'/dev/null/run' can not be written"),
        (["optimizer.head_lr=1", "model.tie_word_embeddings=true"], "head_lr would have no effect: it needs a head"),
        (["training.freeze_all_but_gate=true"], "needs a model with an exit gate"),
        (["training.taper_end=0.5"], "it needs model.readout_norm 'taper'"),
        (["depth.sampler=poisson", "depth.split=prefix", "depth.backprop_loops=4"], "backprop_loops=4 and mean=3"),
        (["model.window_pattern=SSSL", "model.sliding_window=4"], "4 letters for 2 layers"),
        (["model.window_pattern=LL", "model.sliding_window=4"], "without a layer that slides"),
        (["model.rope_pattern=RNR"], "rope_pattern='RNR' has 3 letters for 2 layers"),
        (["model.rope_pattern=R"], "rope_pattern='R' would have no effect without .* a layer without rotary"),
        (["model.rope_parameters={full_attention: {rope_theta: 9.0}}"], "type full_attention: pass one flat dict"),
        (["model.round_embedding_scale=true"], "no effect without an embedding_scale"),
        (["model.norm_affine=false", "model.norm_offset=1"], "norm_offset=1 would have no effect without an RMS norm"),
        (["model.num_core_layers=500", "model.num_loops=4000"], "500 layers and 4000 loops are more than"),
        (["training.stop_after=25"], "stop_after=25 would have no effect in a run of 24 steps"),
        (["training.export_every=25"], "export_every=25 would have no effect in a run of 24 steps"),
        (
            ["depth.curriculum=linear", "depth.curriculum_steps=25", "depth.curriculum_target=total"],
            "curriculum_steps=25 is more than the 24 steps",
        ),
        (["logging.profile_steps=1", "logging.profile_from=24"], "profile_from=24 lies beyond a run of 24 steps"),
        (["training.freeze_all_but_gate=true", "model.exit_gate=raw", "optimizer.name=muon"], "it needs all weights"),
        (["training.steps=null"], "say how long to train"),
    ],
)
def test_a_plan_refuses_what_a_launch_would(overrides, message):
    with pytest.raises(RecipeError, match=message):
        plan(load_recipe(RECIPES / "smoke/base.yaml", overrides))


def test_a_final_folder_of_something_else_is_refused_before_training(tmp_path):
    recipe = load_recipe(RECIPES / "smoke/base.yaml", [f"training.output_dir={tmp_path}"])
    plan(recipe)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "thesis.tex").write_text("the only copy")
    with pytest.raises(RecipeError, match="final exists and is not a saved model"):
        plan(recipe)


def test_a_recipe_that_no_run_wrote_is_not_written_over(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"extends: smoke/base.yaml\ntraining: {{output_dir: {tmp_path}}}  # of my own")
    with pytest.raises(RecipeError, match="recipe.yaml exists, but no run beside it: .* choose another training.outp"):
        plan(load_recipe(path))
    plan(load_recipe(path, [f"training.output_dir={tmp_path / 'run'}"]))
    (tmp_path / "metrics.jsonl").write_text("")  # a run has begun
    plan(load_recipe(path))


def test_numbers_inside_of_rotary_positions_are_read_as_others():
    """YAML reads 1e6 as text."""
    given = "{rope_type: longrope, rope_theta: 1e6, factor: 4, short_factor: [1e0, 2E-1, 3.0, 1]}"
    recipe = load_recipe(RECIPES / "smoke/lt.yaml", [f"model.rope_parameters={given}"])
    rope = {"rope_type": "longrope", "rope_theta": 1e6, "factor": 4, "short_factor": [1.0, 0.2, 3.0, 1]}
    assert recipe.model["rope_parameters"] == rope
    of_types = "{full_attention: {rope_theta: 1e6}, sliding_attention: {rope_theta: 1e4}}"
    recipe = load_recipe(RECIPES / "smoke/lt.yaml", [f"model.rope_parameters={of_types}"])
    assert recipe.model["rope_parameters"]["full_attention"] == {"rope_theta": 1e6}


def test_whole_numbers_are_read_alike_in_every_section():
    """YAML reads 1e4 as text, and 4.0 as a number that is not whole."""
    whole = ["model.num_loops=4.0", "model.max_position_embeddings=1e4", "training.steps=1e2", "data.stride=7.0"]
    recipe = load_recipe(RECIPES / "smoke/lt.yaml", whole)
    config = recipe.model_config()
    assert [config.num_loops, config.max_position_embeddings, recipe.training.steps, recipe.data.stride] == [
        4,
        10**4,
        100,
        7,
    ]
    assert load_recipe(RECIPES / "smoke/lt.yaml", ["model.rms_norm_eps=1"]).model_config().rms_norm_eps == 1
    for setting in ("model.num_loops=2.5", "training.steps=2.5"):
        with pytest.raises(RecipeError, match="int"):
            load_recipe(RECIPES / "smoke/lt.yaml", [setting]).model_config()


def test_every_number_has_its_range():
    for name, section in SECTIONS.items():
        hints = typing.get_type_hints(section)
        numbers = {key for key, hint in hints.items() if {"int", "float"} & set(re.findall(r"\w+", str(hint)))}
        assert numbers == set(RANGES[name])
    ends = ["training.seed=4294967295", "schedule.decay_fraction=1", "schedule.final_ratio=1", "schedule.name=wsd"]
    ends = load_recipe(RECIPES / "smoke/base.yaml", ends)  # the ends of a range are inside
    assert (ends.training.seed, ends.schedule.decay_fraction) == (2**32 - 1, 1)


def test_yaml_that_says_a_thing_twice_or_not_at_all(tmp_path):
    base, path = RECIPES / "smoke/lt.yaml", tmp_path / "a.yaml"
    for text, message in [
        ("training:\n  steps: 3\n  seed: 1\n  steps: 4\n", "line 4, column 3: 'steps' stands twice, first in line 2"),
        ("optimizer:\n  lr:\n", "line 2, column 3: 'lr' has no value: write one, or null"),
        ("data: {}\ntraining: {steps: 3}\ndata: {}\n", "line 3, column 1: 'data' stands twice, first in line 1"),
    ]:
        path.write_text(text)
        with pytest.raises(RecipeError, match=message):
            load_recipe(path)
    path.write_text(f"extends: {base}\noptimizer:\nschedule: {{}}\n")
    assert load_recipe(path) == load_recipe(base)
    path.write_text(f"extends: {base}\ntraining: {{steps: 010, seed: '7'}}\n")
    assert (load_recipe(path).training.steps, load_recipe(path).training.seed) == (10, 7)


def test_a_text_that_is_read_again_gives_values_of_its_own():
    """The runs of a sweep begin with the text of one recipe, and each changes what it holds."""
    first, again = (parse_yaml("model: {window_pattern: [S, L]}", "a recipe") for _ in range(2))
    first["model"]["window_pattern"].append("S")
    assert (
        again == parse_yaml("model: {window_pattern: [S, L]}", "a recipe") == {"model": {"window_pattern": ["S", "L"]}}
    )


def test_null_gives_a_setting_its_default_back(tmp_path):
    """In a recipe that extends another, in a sweep and in an argument. Where null is a value, it stays one."""
    (tmp_path / "base.yaml").write_text(
        "data: {tokenizer_vocab_size: 512, max_documents: 7}\nmodel: {preset: flt, num_loops: 7, sliding_window: 8}\n"
        "training: {steps: 3, keep_best: false, micro_batch_size: 2, rows_per_step: 2}\n"
    )
    (tmp_path / "child.yaml").write_text(
        "extends: base.yaml\ndata: {tokenizer_vocab_size: null, max_documents: null}\nlogging: {project: ~}\n"
        "model: {num_loops: null, sliding_window: null}\ntraining: {keep_best: null}\n"
    )
    lines = ["data.tokenizer_vocab_size=null", "data.max_documents=null", "model.num_loops=~", "logging.project=null"]
    lines += ["model.sliding_window=null", "training.keep_best=null"]
    recipes = {
        "child": load_recipe(tmp_path / "child.yaml"),
        "arguments": load_recipe(tmp_path / "base.yaml", lines),
        "sweep": load_recipe(tmp_path / "base.yaml", changes=dict.fromkeys(line.split("=")[0] for line in lines)),
    }
    (tmp_path / "left_out.yaml").write_text(
        "model: {preset: flt, sliding_window: null}\ntraining: {steps: 3, micro_batch_size: 2, rows_per_step: 2}\n"
    )
    left_out = load_recipe(tmp_path / "left_out.yaml")
    assert all(recipe == left_out for recipe in recipes.values()), recipes
    assert left_out.data.tokenizer_vocab_size == 32768 and left_out.model_config().num_loops != 7
    (tmp_path / "first.yaml").write_text("training: {steps: 3, seed: null}")  # it takes nothing back
    with pytest.raises(RecipeError, match="training.seed must be int, got None"):
        load_recipe(tmp_path / "first.yaml")
    with pytest.raises(RecipeError, match="'optimizer.lr=' holds no value: write one, or optimizer.lr=null for"):
        load_recipe(tmp_path / "base.yaml", ["optimizer.lr="])


def test_home_folders_are_found_everywhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.yaml").write_text("training: {steps: 3, output_dir: ~/run, initialize_from: ~/model}")
    (tmp_path / "a.yaml").write_text("extends: ~/base.yaml\ndata: {cache_dir: ~/shards}")
    recipe = load_recipe("~/a.yaml", ["data.source=~/text.jsonl"])
    found = [recipe.training.output_dir, recipe.training.initialize_from, recipe.data.cache_dir, recipe.data.source]
    assert found == [str(tmp_path / name) for name in ("run", "model", "shards", "text.jsonl")]


@pytest.mark.parametrize("output", [".", "runs/../one", "./one/"])
def test_a_run_may_lie_in_the_folder_it_was_launched_in(output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.txt").touch()
    run = Path(os.path.normpath(output)).absolute()
    recipe = load_recipe(RECIPES / "smoke/lt.yaml", [f"training.output_dir={output}", "data.source=my.txt"])
    recipe.save(run / "recipe.yaml")
    monkeypatch.chdir("/")
    assert recipe_of_run(run).data.source == str(tmp_path / "my.txt")


def test_paths_of_a_run_are_those_of_the_folder_it_was_launched_in(tmp_path, monkeypatch):
    (tmp_path / "launched" / "elsewhere").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "launched")
    Path("my.txt").write_text("a text")
    load_recipe(RECIPES / "smoke" / "lt.yaml", ["data.source=my.txt", "training.output_dir=runs/one"]).save(
        "runs/one/recipe.yaml"
    )
    assert recipe_of_run("runs/one").data.source == "my.txt"
    monkeypatch.chdir("elsewhere")
    found = recipe_of_run("../runs/one").data
    assert found.source == str(tmp_path / "launched" / "my.txt")
    assert found.tokenizer == load_recipe(RECIPES / "smoke" / "lt.yaml").data.tokenizer
    shutil.copytree("../runs/one", "copied")
    assert recipe_of_run("copied").data.source == "my.txt"


@pytest.mark.parametrize("output", ["../x/run", "link/run", "{tmp_path}/run", "runs/run"])
def test_a_run_notes_the_folder_it_was_launched_in(output, tmp_path, monkeypatch):
    """The name of a run beside that folder, behind a link, or of a full path, does not tell it."""
    for folder in ("launched/in", "disk", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "launched" / "in")
    Path("link").symlink_to(tmp_path / "disk")
    output, own = output.format(tmp_path=tmp_path), {"data.source": "*.txt", "dense.path": "model"}
    for folder in (tmp_path / "launched" / "in", tmp_path / "elsewhere"):
        (folder / "model").mkdir()
        (folder / "my.txt").write_text(f"a text of {folder}")
    sizes = ["model.num_loops=2", "data.tokenizer=name/of_one"]
    changes = {"training.output_dir": output, **own}
    recipe = load_recipe(RECIPES / "retrofit" / "tiny" / "control.yaml", sizes, changes)
    run = SimpleNamespace(recipe=recipe, output=Path(output), folder=Path(output, "checkpoints"), metrics=mock.Mock())
    RunCheckpoints.write_beginning(run, 0, None)
    folder = Path(output).resolve()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = recipe_of_run(folder)
    places = {"data.source": found.data.source, "dense.path": found.dense.path}
    assert places == {key: str(tmp_path / "launched" / "in" / value) for key, value in own.items()}
    assert found.data.tokenizer == "name/of_one"
    path = folder / "recipe.yaml"
    if not output.startswith("/"):  # `looped pretrain` would begin a new run
        with pytest.raises(RecipeError, match="launched in .*/launched/in, and from here its training.output_dir"):
            refuse_another_place(path, load_recipe(path))
    refuse_another_place(path, load_recipe(path, ["training.output_dir=new"]))
    monkeypatch.chdir(tmp_path / "launched" / "in")
    refuse_another_place(path, load_recipe(path))


def test_a_place_that_cannot_be_written_is_said_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # of a system mounted to be read
    with pytest.raises(PermissionError, match=f"{tmp_path} can not be written to: .* another place, with --output"):
        check_writable(tmp_path / "results" / "of" / "today")
    check_writable(tmp_path.parent / "new")


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ("training.checkpoint_every=10", "here that is training.save_every"),
        ("training.learning_rate=1", "here that is optimizer.lr"),
        ("training.clip=1", "here that is optimizer.clip"),
        ("data.sources=[a, b]", "here that is data.source, one folder, into which several sources are mixed before"),
        ("data.source=[a, b]", "must be str, got ['a', 'b']; name one folder, into which several sources are mixed"),
        ("model.warmup_steps=1", "here that is schedule.warmup_steps"),
        ("training.stepz=1", "did you mean 'steps'?"),
        ("optimizer.every=1", "known are name, lr"),  # of two sections
    ],
)
def test_keys_of_other_places_are_told_where_they_stand(setting, advice):
    with pytest.raises(RecipeError, match=re.escape(advice)):
        load_recipe(RECIPES / "smoke" / "lt.yaml", [setting])


def test_places_of_foreign_keys_are_there():
    keys = {f"{name}.{field.name}" for name, section in SECTIONS.items() for field in dataclasses.fields(section)}
    assert {place for place in HERE if " " not in place} <= keys
    assert not set(PLACES) & {field.partition(".")[2] for field in keys}


# settings of trainings as the papers or their public code have them; where these are silent, as the README there
SAID = {
    "huginn/huginn": {
        "model.num_loops": 32,
        "data.sequence_length": 4097,
        "depth.sampler": "poisson_lognormal",
        "depth.backprop_loops": 8,
        "optimizer.lr": 4e-5,
        "optimizer.betas": [0.9, 0.95],
        "optimizer.decay_product": 4e-5,
        "schedule.name": "constant",
        "schedule.warmup_steps": 4096,
        "training.tokens": 800e9,
        "training.rows_per_step": 4096,
    },
    "ouro/gate": {
        "model.loop_loss": "gate",
        "training.freeze_all_but_gate": True,
        "training.initialize_from": "runs/ouro/stage_4/final",
    },
    "parcae/small": {
        "data.packing": "best_fit",
        "data.cropped": "drop",
        "depth.sampler": "poisson",
        "depth.per": "sequence",
        "depth.backprop_loops": 4,
        "optimizer.muon_value_gates": True,
        "training.tokens": 11.2e9,
        "evaluation.rows": 1024,
    },
    "parcae/medium": {"training.tokens": 29.6e9},
    "parcae/large": {"training.tokens": 61.6e9},
    "parcae/xlarge": {"training.tokens": 104e9},
    "parcae/rdm/rdm_100m": {
        "depth.backprop_loops": 8,
        "depth.rows_per_draw": 32,
        "optimizer.lr": 4e-4,
        "optimizer.betas": [0.9, 0.95],
        "optimizer.decay_product": 4e-5,
        "schedule.warmup_steps": 4096,
        "schedule.decay_steps": 4096,
        "training.tokens": 10e9,
    },
    "parcae/rdm/rdm_350m": {
        "model.num_loops": 8,
        "depth.backprop_loops": 4,
        "optimizer.lr": 2e-4,
        "training.tokens": 14e9,
    },
    "residual_scaling/workshop_340m": {"model.residual_scaling": "linear", "optimizer.decay_product": 1e-5},
    "retrofit/tinyllama": {
        "dense.layers": [0, 1, 2, 3, *range(10, 22)],
        "depth.curriculum": "sqrt",
        "depth.curriculum_steps": 37_500,
        "depth.rows_per_draw": 512,
        "optimizer.lr": 5e-5,
        "optimizer.muon_lr": 1e-3,
        "training.steps": 50_000,
        "training.rows_per_step": 1024,
    },
    "retrofit/tinyllama_heal": {"model.num_loops": 1, "training.steps": 2500},
    "retrofit/llama_1b": {"dense.layers": [0, 1, 2, 3, *range(6, 16)], "model.rope_parameters.rope_theta": 5e5},
    "retrofit/llama_1b_mean_32": {
        "dense.layers": [0, 1, *range(10, 16)],
        "model.num_loops": 32,
        "depth.backprop_loops": 8,
        "depth.curriculum": "linear",
        "depth.curriculum_steps": 3125,
        "training.steps": 25_000,
    },
    "readout/44m": {
        "data.tokenizer_vocab_size": 20_000,
        "data.sequence_length": 256,
        "data.stride": 128,
        "optimizer.lr": 3e-4,
        "optimizer.weight_decay": 0.01,
        "schedule.name": "constant",
        "training.epochs": 4,
        "training.rows_per_step": 64,
    },
    "readout/129m": {"model.hidden_size": 768, "model.num_core_layers": 12, "training.rows_per_step": 32},
    "readout/44m/as_released": {"model.init_scheme": "torch"},
    "readout/44m/scale_anchor": {"model.scale_anchor": 0.01},
    "readout/ouro_1b4": {
        "data.sequence_length": 2048,
        "optimizer.lr": 3e-4,
        "schedule.name": "cosine",
        "schedule.final_ratio": 0.1,
        "training.steps": 16_667,
        "training.rows_per_step": 39,
    },
    "readout/ouro_1b4_raw": {"model.preset": "readout_1b4_raw"},
}


@pytest.mark.parametrize("recipe", SAID)
def test_trainings_are_as_published(recipe):
    found = load_recipe(RECIPES / f"{recipe}.yaml").to_dict()
    for setting, value in SAID[recipe].items():
        place = found
        for part in setting.split("."):
            place = place[part]
        assert place == value, setting


# table 1: loops, weight of the entropy, tokens of a row and of a step, RoPE base, rates at the beginning and the end
OURO = {
    "1a": (8, 0.1, 4, 4, 1e4, 3e-4, 3e-4),
    "1b": (4, 0.05, 4, 8, 1e4, 3e-4, 3e-4),
    "2": (4, 0.05, 16, 8, 4e4, 3e-4, 3e-5),
    "3": (4, 0.05, 64, 8, 1e6, 3e-5, 3e-5),
    "4": (4, 0.05, 32, 8, 1e6, 3e-5, 1e-5),
}


@pytest.mark.parametrize("stage", OURO)
def test_stages_of_ouro_are_as_published(stage):
    loops, entropy, row, step, base, first, last = OURO[stage]
    recipe = load_recipe(RECIPES / f"ouro/stage_{stage}.yaml")
    config = recipe.model_config()
    assert (config.num_loops, config.exit_entropy_weight, config.loop_loss) == (loops, entropy, "exit_weighted")
    assert config.rope_parameters["rope_theta"] == base
    length, schedule = recipe.data.sequence_length, recipe.schedule
    assert (length, recipe.training.rows_per_step * length) == (row * 2**10, step * 2**20)
    longest = max(row for number, (_, _, row, *_) in OURO.items() if number <= stage)
    assert config.max_position_embeddings == longest * 2**10
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay) == (first, 0.1)
    assert (recipe.optimizer.betas, recipe.optimizer.clip) == ([0.9, 0.95], 1.0)
    assert schedule.name == ("constant" if first == last else "cosine")
    if first != last:
        assert first * schedule.final_ratio == pytest.approx(last, rel=1e-5)
    stages = list(OURO)
    before = stages[stages.index(stage) - 1] if stage != "1a" else None
    assert recipe.training.initialize_from == (before and f"runs/ouro/stage_{before}/final")


READOUTS = (
    "terminal_rmsnorm", "terminal_raw", "per_loop_rmsnorm", "per_loop_raw", "per_loop_final_only", "terminal_penalty",
    "per_loop_penalty", "exit_weighted", "damping", "inter_loop_norm",
)  # fmt: skip


@pytest.mark.parametrize("size", ["44m", "129m"])
def test_readouts_are_the_systems_that_their_files_are_named_after(size):
    """And a sweep has all ten, of three seeds each."""
    for readout in READOUTS:
        path = RECIPES / "readout" / size / f"{readout}.yaml"
        assert load_recipe(path).model["preset"] == f"readout_{readout}"
    runs = runs_of_sweep(RECIPES / f"readout/{size}.sweep.yaml")
    found = {(run.recipe.model["preset"], run.recipe.training.seed) for run in runs}
    assert found == {(f"readout_{readout}", seed) for readout in READOUTS for seed in range(3)}


def test_flt_recipes_are_the_systems_that_they_are_named_after():
    systems = ("lt", "lt_input", "lt_attention", "flt", "flt_residual")
    for size, layers in (("small", 6), ("base", 12)):
        for system in systems:
            model = load_recipe(RECIPES / f"fully_looped/{size}_{system}.yaml").model
            assert (model["preset"], model["num_core_layers"]) == (system, layers)


KEPT = RECIPES.parent / "results" / "claims"
MEASURED = [  # what is called growth there is no sweep
    path
    for path in SWEEPS
    if path.parent.name == "claims"
    and (KEPT / path.name.replace(".sweep.yaml", ".json")).is_file()
    and path.name != "growth.sweep.yaml"
]


@pytest.mark.parametrize("path", MEASURED, ids=name)
def test_sweeps_of_claims_are_those_whose_results_are_kept(path):
    """Each run of results/claims has the settings that the sweep gives the run of its name now."""
    results = KEPT / path.name.replace(".sweep.yaml", ".json")
    runs = {run.name: run.settings for run in runs_of_sweep(path)}
    for seed in json.loads(results.read_text(encoding="utf-8"))["seeds"].values():
        for measured in seed.get("runs", []):
            settings = {key: value for key, value in measured.items() if "." in key and "/" not in key}
            assert settings == {} or runs[measured["name"]].items() >= settings.items()


def test_four_layers_take_as_many_operations_as_four_loops():
    of_run = {run.name: plan(run.recipe) for run in runs_of_sweep(RECIPES / "claims/depth.sweep.yaml")}
    looped, plain, deep = (of_run[name] for name in ("looped", "as_many_parameters", "as_many_operations"))
    assert looped["parameters"] == pytest.approx(plain["parameters"], rel=0.01)
    readouts = 3 * 2 * 128 * 128  # the logits of loops 1 to 3, with their loss
    assert looped["forward FLOPs per token"] - deep["forward FLOPs per token"] in (0, readouts)


def test_the_transformer_beside_parcae_has_neither_injection_nor_c():
    model = load_recipe(RECIPES / "claims/transformer.yaml").model_config()
    assert (model.num_loops, model.injection, model.coda_input, model.prelude_norm) == (1, "none", "none", False)
