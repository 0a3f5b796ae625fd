"""Who optimizes what at which rate, and what changes with the step."""

import math

import pytest
import torch
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
)

from looped_recipes.engine.muon import NorMuon
from looped_recipes.engine.optimizers import (
    apply_step_settings,
    build_optimizers,
    learning_rates,
    rate_factor,
    refuse_idle_rate,
    set_learning_rates,
)
from looped_recipes.engine.stable_adamw import StableAdamW
from looped_recipes.pretrain import main as pretrain
from looped_recipes.settings.recipe import DepthConfig, OptimizerConfig, RecipeError, ScheduleConfig, load_recipe
from looped_recipes.settings.relations import check_schedule
from looped_recipes.sweep import run_sweep
from modeling_looped import LoopedConfig

from .helpers import tiny_model
from .helpers_pretrain import SMOKE


MUON = {"name": "muon", "muon_lr": 0.02, "lr": 0.004, "betas": [0.8, 0.95], "eps": 1e-10}
# written out, not taken from the code: projections of attention and MLP
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "kv_down_proj", "gate_proj", "up_proj", "down_proj")


def names_of(model, groups) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return sorted(names[id(parameter)] for group in groups for parameter in group["params"])


def rates_of(model, optimizers, key: str = "lr") -> dict[str, float]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: group[key]
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize("preset", LoopedConfig.preset_names())
def test_muon_takes_the_projections_of_the_blocks_and_adamw_the_rest(preset):
    model = tiny_model(preset=preset)
    muon, adamw = build_optimizers(model, OptimizerConfig(**MUON), total_steps=10)
    expected = [
        name for name, _ in model.named_parameters() if name.split(".")[-2] in MATRICES and name.endswith(".weight")
    ]
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    assert names_of(model, muon.param_groups) == sorted(expected)
    everything = names_of(model, muon.param_groups + adamw.param_groups)
    assert everything == sorted(name for name, _ in model.named_parameters())


def test_muon_takes_a_layer_without_a_role_in_a_block_of_ones_own():
    model = tiny_model(num_core_layers=1)
    model.model.core[0].mlp.router = torch.nn.Linear(model.config.hidden_size, 4)
    muon, adamw = build_optimizers(model, OptimizerConfig(**MUON), total_steps=10)
    assert "model.core.0.mlp.router.weight" in names_of(model, muon.param_groups)
    assert "model.core.0.mlp.router.bias" in names_of(model, adamw.param_groups)


def test_latent_attention_biases_and_gates():
    model = tiny_model(
        kv_latent_size=16, attention_bias="qkv", qk_norm="learned", exit_gate="raw", value_embeddings=True
    )
    muon, adamw = build_optimizers(model, OptimizerConfig(**MUON), total_steps=10)
    assert "model.core.0.self_attn.kv_down_proj.weight" in names_of(model, muon.param_groups)
    rest = names_of(model, adamw.param_groups)
    for name in (
        "exit_gate.weight",
        "lm_head.weight",
        "model.core.0.self_attn.q_norm.weight",
        "model.core.0.self_attn.q_proj.bias",
        "model.core.1.self_attn.value_gate.weight",
        "model.value_embeds.1.weight",
    ):
        assert name in rest


def test_normuon_takes_what_muon_takes_and_gates_where_asked():
    """Parcae's table 20 has gates of value embeddings with AdamW, its code with Muon."""
    model = tiny_model(preset="parcae", num_prelude_layers=1, num_coda_layers=1)
    plain, _ = build_optimizers(model, OptimizerConfig(**MUON), 10)
    normuon, adamw = build_optimizers(model, OptimizerConfig(**{**MUON, "name": "normuon"}), 10)
    assert isinstance(normuon, NorMuon) and normuon.param_groups[0]["lr"] == 0.02
    assert names_of(model, normuon.param_groups) == names_of(model, plain.param_groups)
    gates = {name for name, _ in model.named_parameters() if "value_gate" in name}
    assert gates and gates < set(names_of(model, adamw.param_groups))
    settings = OptimizerConfig(**{**MUON, "name": "normuon", "muon_value_gates": True})
    normuon, adamw = build_optimizers(model, settings, 10)
    assert set(names_of(model, normuon.param_groups)) == {*names_of(model, plain.param_groups), *gates}
    assert not gates & set(names_of(model, adamw.param_groups))


def test_clipping_and_atan2_make_it_the_optimizer_of_recurrent_depth_models():
    for settings in ({"update_clipping": True}, {"atan2": True}, {"update_clipping": True, "atan2": True}):
        (found,) = build_optimizers(tiny_model(), OptimizerConfig(lr=0.1, eps=1e-6, **settings), 10)
        assert isinstance(found, StableAdamW)
        group = found.param_groups[0]
        assert (group["clipping"], group["atan2"]) == (settings.get("update_clipping", False), "atan2" in settings)
        assert (group["lr"], group["eps"], group["betas"]) == (0.1, 1e-6, (0.9, 0.95))


@pytest.mark.parametrize("preset, clip_as_one", [("huginn", "attention_and_mlp"), ("rdm", "mlp"), ("rdm", None)])
def test_what_public_codes_keep_in_one_tensor_is_clipped_as_one(preset, clip_as_one):
    """Huginn's has Wqkv.weight, qk_bias and mlp.fc.weight, Parcae's mlp.fc.weight."""
    model = tiny_model(preset=preset, num_prelude_layers=1, num_core_layers=2, num_coda_layers=1)
    config = OptimizerConfig(update_clipping=True, clip_as_one=clip_as_one, decay_all=False)
    (found,) = build_optimizers(model, config, 10)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    sets = {}
    for number, (parameter, _) in enumerate(found.members()):
        sets.setdefault(found.first_of.get(number, number), set()).add(names[id(parameter)])
    expected = []
    for block in ("model.prelude.0", "model.core.0", "model.core.1", "model.coda.0"):
        if clip_as_one is not None:
            expected.append({f"{block}.mlp.{name}_proj.weight" for name in ("gate", "up")})
        if clip_as_one == "attention_and_mlp":
            expected.append({f"{block}.self_attn.{name}_proj.weight" for name in "qkv"})
            expected.append({f"{block}.self_attn.{name}_proj.bias" for name in "qk"})
    assert sorted(map(sorted, (each for each in sets.values() if len(each) > 1))) == sorted(map(sorted, expected))
    assert set().union(*sets.values()) == set(names.values())


def test_vectors_and_what_parcae_exempts_do_not_decay():
    """Written out: everything with fewer than two dimensions, B of the injection and C, and the norms of each loop."""
    model = tiny_model(
        preset="parcae",
        num_prelude_layers=1,
        num_coda_layers=1,
        residual_scaling="factored",
        attention_bias="qkv",
        loop_norms=True,
    )
    config = OptimizerConfig(lr=0.01, weight_decay=0.1, embedding_lr=0.05, decay_all=False)
    optimizers = build_optimizers(model, config, 10)
    decay, rates = rates_of(model, optimizers, "weight_decay"), rates_of(model, optimizers)
    everywhere = rates_of(model, build_optimizers(model, OptimizerConfig(lr=0.01, embedding_lr=0.05), 10))
    assert rates == everywhere
    exempt = {"model.injection.input_proj.weight", "model.coda_proj.weight"}
    exempt |= {name for name, parameter in model.named_parameters() if parameter.ndim < 2}
    norms = {f"model.core.{i}.{name}_layernorm.weight" for i in (0, 1) for name in ("input", "post_attention")}
    assert {model.get_parameter(name).shape for name in norms} == {(3, 32)}  # loops, width
    exempt |= norms
    assert exempt < set(decay) and "model.injection.log_rate" in exempt
    assert decay == {name: 0.0 if name in exempt else 0.1 for name in decay}


def test_adamw_groups_are_those_of_the_model():
    """Residual scaling, appendix 8.2: L / L_ref = 2 / 0.5, so that rates and eps inside blocks are halved."""
    model = tiny_model(residual_scaling="factored", residual_reference_layers=0.5)
    config = OptimizerConfig(lr=0.01, weight_decay=0.1, eps=1e-8)
    (adamw,) = build_optimizers(model, config, total_steps=10)
    rates, eps, decay = (rates_of(model, [adamw], key) for key in ("lr", "eps", "weight_decay"))
    for name, rate in rates.items():
        factor = 0.5 if name.startswith("model.core") else 1.0
        assert math.isclose(rate, 0.01 * factor) and math.isclose(eps[name], 1e-8 * factor) and decay[name] == 0.1
    assert adamw.param_groups[0]["betas"] == (0.9, 0.95)


def test_muon_follows_the_same_rule_of_depth():
    model = tiny_model(residual_scaling="factored", residual_reference_layers=0.5)
    config = OptimizerConfig(**MUON, muon_weight_decay=0.1)
    rates = rates_of(model, build_optimizers(model, config, 10))
    assert rates["model.core.0.mlp.up_proj.weight"] == 0.01
    assert rates["model.core.0.input_layernorm.weight"] == 0.002
    assert rates["lm_head.weight"] == 0.004
    config = OptimizerConfig(**MUON, muon_weight_decay=0.1, keep_decay_product=True)
    muon, _ = build_optimizers(model, config, 10)
    assert math.isclose(muon.param_groups[0]["lr"] * muon.param_groups[0]["weight_decay"], 0.02 * 0.1)


def test_a_recipe_can_leave_the_rule_of_depth_out():
    model = tiny_model(residual_scaling="factored", residual_reference_layers=0.5)
    for config in (
        OptimizerConfig(lr=0.01, correct_for_depth=False),
        OptimizerConfig(**MUON, correct_for_depth=False),
    ):
        optimizers = build_optimizers(model, config, total_steps=10)
        rates, eps = (rates_of(model, optimizers, key) for key in ("lr", "eps"))
        matrix, norm = "model.core.0.mlp.up_proj.weight", "model.core.0.input_layernorm.weight"
        assert rates[matrix] == (config.muon_lr if config.name == "muon" else config.lr)
        assert rates[norm] == rates["lm_head.weight"] == config.lr and eps[norm] == config.eps


def test_embedding_and_head_have_their_own_rates():
    """FLT: 0.2 and 0.004, times sqrt(768 / d), which is sqrt(24) at d = 32."""
    model = tiny_model(preset="flt")
    config = OptimizerConfig(**MUON, embedding_lr=0.2, head_lr=0.008, reference_width=768)
    rates = rates_of(model, build_optimizers(model, config, 10))
    assert math.isclose(rates["model.embed_tokens.weight"], 0.2 * 24**0.5)
    assert math.isclose(rates["lm_head.weight"], 0.008 * 24**0.5)
    assert rates["model.core.0.mlp.up_proj.weight"] == 0.02


def test_the_decay_of_an_embedding_with_a_rate_of_its_own_keeps_the_product():
    config = OptimizerConfig(lr=0.01, embedding_lr=0.05, weight_decay=0.1, keep_decay_product=True)
    model = tiny_model()
    optimizers = build_optimizers(model, config, 10)
    rates, decay = rates_of(model, optimizers), rates_of(model, optimizers, "weight_decay")
    assert rates["model.embed_tokens.weight"] == 0.05 and math.isclose(decay["model.embed_tokens.weight"], 0.02)
    assert all(math.isclose(rate * decay[name], 0.001) for name, rate in rates.items())


def test_every_embedding_table_has_the_embedding_rate():
    model = tiny_model(value_embeddings=True, position_embedding="learned", tie_word_embeddings=True)
    rates = rates_of(model, build_optimizers(model, OptimizerConfig(lr=0.01, embedding_lr=0.1), 10))
    fast = {name for name, rate in rates.items() if rate == 0.1}
    assert fast == {"model.embed_tokens.weight", "model.embed_positions.weight", "model.value_embeds.1.weight"}
    assert len(rates) == len(list(model.parameters()))


def test_a_tied_head_has_no_rate_of_its_own():
    model = tiny_model(tie_word_embeddings=True)
    with pytest.raises(RecipeError, match="head_lr=0.1.*tied"):
        build_optimizers(model, OptimizerConfig(head_lr=0.1), 10)


def test_only_what_requires_gradients_is_optimized():
    model = tiny_model(exit_gate="raw", loop_loss="gate")
    model.requires_grad_(False)
    model.exit_gate.requires_grad_(True)
    (only,) = build_optimizers(model, OptimizerConfig(**MUON, embedding_lr=1.0), 10)
    assert names_of(model, only.param_groups) == ["exit_gate.bias", "exit_gate.weight"]
    model.requires_grad_(False)
    with pytest.raises(RecipeError, match="nothing to train"):
        build_optimizers(model, OptimizerConfig(), 10)


def test_rates_are_logged_by_the_names_of_their_settings():
    for name, logged in (("adamw", {"lr": 0.01}), ("normuon", {"lr": 0.01, "muon_lr": 0.5})):
        config = OptimizerConfig(name=name, lr=0.01, muon_lr=0.5)
        assert learning_rates(build_optimizers(tiny_model(), config, 10)) == logged
    rates = {"muon_lr": 0.5, "embedding_lr": 0.2, "head_lr": 0.3}
    for decay in (0.0, 0.1):
        config = OptimizerConfig(name="muon", lr=0.01, weight_decay=decay, keep_decay_product=False, **rates)
        optimizers = build_optimizers(tiny_model(preset="flt"), config, 10)
        assert learning_rates(optimizers) == rates  # nothing has the rate `lr`
        assert learning_rates(build_optimizers(tiny_model(), config, 10)) == {"lr": 0.01, **rates}


def test_a_rate_that_no_parameter_has_is_refused(tmp_path):
    """Only where it is asked for: recipes hold one although their own parts leave it without effect."""
    flt, parcae = SMOKE / "flt.yaml", SMOKE / "parcae.yaml"
    refuse_idle_rate(load_recipe(flt), ())
    refuse_idle_rate(load_recipe(flt), ["optimizer.muon_lr", "training.steps"])
    message = "optimizer.lr=0.5 would have no effect, .*muon_lr=0.02, optimizer.embedding_lr=0.05, .*head_lr=0.004"
    decay = "optimizer.weight_decay=0.1"
    for more in [], [decay]:
        with pytest.raises(RecipeError, match=message):
            refuse_idle_rate(load_recipe(flt, ["optimizer.lr=0.5", *more]), ["optimizer.lr"])
    by_rate = load_recipe(flt, [decay, "optimizer.keep_decay_product=true"])
    refuse_idle_rate(by_rate, ["optimizer.lr"])  # it decides the decay of the embedding
    refuse_idle_rate(load_recipe(flt, ["optimizer.embedding_lr=null"]), ["optimizer.lr"])
    refuse_idle_rate(load_recipe(parcae), ["optimizer.lr"])
    with pytest.raises(RecipeError, match=message):
        pretrain([str(flt), "optimizer.lr=0.5", f"training.output_dir={tmp_path / 'run'}"])
    (tmp_path / "a.sweep.yaml").write_text(f"recipe: {flt}\ngrid: {{optimizer.lr: [0.5, 0.1]}}\n")
    with pytest.raises(RecipeError, match=message):
        run_sweep(str(tmp_path / "a.sweep.yaml"), [f"training.output_dir={tmp_path / 'runs'}"], None)
    assert not (tmp_path / "run").exists() and not (tmp_path / "runs").exists()


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Five quintic iterations of Muon, in float64."""
    x = matrix.double()
    x = x.T if len(matrix) > matrix.shape[1] else x
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if len(matrix) > matrix.shape[1] else x


def test_first_step_of_muon_is_the_orthogonal_update_times_the_published_factor():
    model = tiny_model()
    weight = model.model.core[0].mlp.up_proj.weight  # [48, 32]: taller than wide
    config = OptimizerConfig(**MUON, muon_weight_decay=0.5)
    optimizers = build_optimizers(model, config, total_steps=10)
    # a well-conditioned gradient: small singular values would amplify the rounding of bf16
    gradient = torch.linalg.qr(torch.randn(48, 32, dtype=torch.float64))[0] * torch.linspace(1, 3, 32)
    weight.grad = gradient.float()
    before = weight.detach().double()
    for optimizer in optimizers:
        optimizer.step()
    # with an empty buffer the momentum scales the gradient, which the iteration forgets
    expected = -0.02 * math.sqrt(48 / 32) * newton_schulz(gradient)
    update = weight.detach().double() - before * (1 - 0.02 * 0.5)
    # the iterations are in bf16; without the factor the difference would be 0.18
    assert (update - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("name", ["muon", "normuon"])
def test_momentum_is_warmed_and_decay_runs_out(name):
    """0.2 (1 - step / steps), as rates fall: what comes after the last step would have none."""
    model = tiny_model()
    config = OptimizerConfig(**{**MUON, "name": name}, muon_weight_decay=0.2, muon_weight_decay_end=0.0)
    optimizers = build_optimizers(model, config, total_steps=1000)
    group = optimizers[0].param_groups[0]
    for step, momentum, decay in (
        (0, 0.85, 0.2),
        (150, 0.90, 0.17),
        (300, 0.95, 0.14),
        (1000, 0.95, 0.0),
        (75, 0.875, 0.185),
    ):
        apply_step_settings(optimizers, step, config, total_steps=1000)
        assert math.isclose(group["momentum"], momentum) and math.isclose(group["weight_decay"], decay, abs_tol=1e-12)
    assert all(group["weight_decay"] == 0 for group in optimizers[1].param_groups)


def schedule(config: ScheduleConfig, total_steps: int, steps, optimizer: OptimizerConfig | None = None) -> list[float]:
    optimizers = build_optimizers(tiny_model(), optimizer or OptimizerConfig(lr=0.5), total_steps)
    rates = []
    for step in steps:
        set_learning_rates(optimizers, config, total_steps, step)
        rates.append(optimizers[0].param_groups[0]["lr"])
    return rates


def test_constant_schedule_warms_up():
    assert schedule(ScheduleConfig("constant", warmup_steps=4), 100, [0, 1, 4, 99]) == [0, 0.125, 0.5, 0.5]


def test_cosine_schedule_ends_at_its_ratio():
    rates = schedule(ScheduleConfig("cosine", warmup_steps=10, final_ratio=0.1), 110, [5, 10, 60, 85, 110])
    half = 0.5 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.75)))
    assert torch.allclose(torch.tensor(rates), torch.tensor([0.25, 0.5, 0.275, half, 0.05]))


@pytest.mark.parametrize("warmup", [0, 7])
def test_schedules_are_those_of_transformers(warmup):
    """Bit for bit, so that a run goes on as it began."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    constant = get_constant_schedule_with_warmup(optimizer, warmup)
    cosine = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, 50, min_lr_rate=0.1)
    for name, theirs in (("constant", constant), ("cosine", cosine)):
        ours = ScheduleConfig(name, warmup_steps=warmup, final_ratio=0.1)
        for step in range(51):
            assert rate_factor(ours, 50, step) == theirs.lr_lambdas[0](step)


def test_warmup_stable_decay_decays_linearly():
    by_steps = ScheduleConfig("wsd", warmup_steps=10, decay_steps=20, final_ratio=0.2)
    rates = schedule(by_steps, 100, [0, 5, 10, 79, 80, 90, 100])
    assert torch.allclose(torch.tensor(rates), torch.tensor([0, 0.25, 0.5, 0.5, 0.5, 0.3, 0.1]))
    by_fraction = ScheduleConfig("wsd", warmup_steps=10, decay_fraction=0.2, final_ratio=0.2)
    assert schedule(by_fraction, 100, range(100)) == schedule(by_steps, 100, range(100))


def test_rates_are_a_function_of_the_step_alone():
    config = ScheduleConfig("wsd", warmup_steps=10, decay_steps=20)
    there, back = list(range(100)), list(range(99, -1, -1))
    assert schedule(config, 100, there) == schedule(config, 100, back)[::-1]


def test_every_group_follows_the_schedule_from_its_own_rate():
    model = tiny_model(preset="flt")
    optimizers = build_optimizers(model, OptimizerConfig(**MUON, embedding_lr=0.2), 100)
    base = rates_of(model, optimizers)
    set_learning_rates(optimizers, ScheduleConfig("wsd", decay_fraction=0.5), 100, 75)
    assert rates_of(model, optimizers) == pytest.approx({name: rate / 2 for name, rate in base.items()})


@pytest.mark.parametrize(
    "config, message",
    [
        (ScheduleConfig("cosine", warmup_steps=101), "warmup_steps=101.*100 steps"),
        (ScheduleConfig("wsd", warmup_steps=60, decay_fraction=0.5), "50 steps of decay.*100 steps"),
    ],
)
def test_a_schedule_longer_than_the_run_is_refused(config, message):
    with pytest.raises(RecipeError, match=message):
        check_schedule(config, DepthConfig(), 100)
