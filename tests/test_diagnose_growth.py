"""Growth over N, cosines between loops, best learning rates: against closed forms and brute force."""

import copy
import math

import pytest
import torch

from looped_eval.common.hooks import trace
from looped_eval.diagnose import figures, growth, sentences, transfer
from looped_recipes.common.measures import increment_products, power_law
from modeling_looped import LoopedConfig, LoopedForCausalLM
from tests.helpers import random_ids, tiny_config, tiny_model
from tests.helpers_diagnose import BATCH, DECAY, embedded, known_model, linear_model


WIDE = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4}


def theorem_config(**fields) -> LoopedConfig:
    """W_ij ~ N(0, 1/d), as in theorem 1."""
    return LoopedConfig(**{**WIDE, "num_core_layers": 1, "initializer_range": 64**-0.5, **fields})


def test_power_law():
    assert power_law([1, 2, 4, 8], [3, 6, 12, 24]) == pytest.approx({"slope": 1, "standard_error": 0, "points": 4})
    noisy = power_law([1, 2, 4], [1, 4, 4])  # logs base 2: 0, 2, 2 at 0, 1, 2
    assert noisy["slope"] == pytest.approx(1) and noisy["standard_error"] == pytest.approx((2 / 3 / 2) ** 0.5)
    assert power_law([1, 2, 4], [1.0, float("nan"), 4.0])["slope"] is None
    assert "diverged" in power_law([1, 2, 4], [1.0, 0.0, 4.0])["why"]
    with pytest.raises(ValueError, match="at least 3 points, got 2"):
        power_law([1, 2], [1, 2])


@pytest.mark.slow
def test_growth_has_the_exponents_of_the_theory():
    """Theorem 1 and appendix 7.1, at initialisation; seeds and width leave an error of about 0.1."""
    result = growth.residual_norm(theorem_config(), loops=[4, 8, 16, 32], seeds=2, steps=0, num_tokens=32)
    for arrangement, rules in growth.NORM_THEORY.items():
        for rule, exponent in rules.items():
            fit = result[arrangement].get(rule, {}).get("slope")
            if exponent is None:
                assert fit["first_step"]["slope"] < -0.2
            else:
                assert fit["first_step"]["slope"] == pytest.approx(exponent, abs=0.15), (arrangement, rule)


def test_residual_norm_is_that_of_the_models_themselves():
    """Brute force: R at every step, from the public states of a model trained by hand."""
    config = theorem_config(hidden_size=32, intermediate_size=48, num_core_layers=2)
    result = growth.residual_norm(config, loops=[1, 2, 3], rules=["factored"], seeds=1, steps=2, num_tokens=16)
    changes = growth.update_size(config, loops=[1, 2, 3], rules=["factored"], seeds=1, steps=2, num_tokens=16)
    fields = {**config.to_dict(), "num_loops": 3, "trained_num_loops": None, "residual_scaling": "factored"}
    fields.pop("num_hidden_layers")
    torch.manual_seed(0)
    model = LoopedForCausalLM(LoopedConfig(**fields))
    ids = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)  # one rate
    states = []
    for _ in range(3):
        outputs = model(ids, labels=ids, output_loop_hidden_states=True)
        states.append(outputs.loop_hidden_states[-1].detach())
        optimizer.zero_grad()
        outputs.loss.backward()
        optimizer.step()
    expected = [state.square().mean(-1).sqrt().mean().item() for state in states]
    measured = [step[2] for step in result["looped"]["factored"]["R"]]
    assert measured == pytest.approx(expected, rel=1e-5)
    updates = [(b - a).square().mean().sqrt().item() for a, b in zip(states, states[1:])]
    assert [step[2] for step in changes["looped"]["factored"]["update"]] == pytest.approx(updates, rel=1e-3)


def test_early_training_at_another_rate_is_another():
    slow, fast = (growth.early_training(tiny_config(), 0, 1, lr, 8).updates[0] for lr in (1e-4, 1e-2))
    assert fast > 10 * slow


def test_unshared_stack_has_the_rule_of_its_depth():
    config = theorem_config(num_core_layers=2)
    stack = growth.unshared(config, 9, "sqrt")
    assert (stack.num_core_layers, stack.num_loops) == (18, 1)
    assert stack.residual_factor(1) == pytest.approx(1 / 3)
    assert growth.unshared(config, 9, "none").residual_factor(1) == 1
    assert growth.unshared(config, 9, "linear").residual_factor(1) == pytest.approx(1 / 9)
    for fields in ({"injection": "add", "state_init": "zeros"}, {"num_coda_layers": 1}, {"loop_damping": True}):
        result = growth.residual_norm(
            theorem_config(**fields), loops=[1, 2, 3], rules=["none"], seeds=1, steps=0, num_tokens=8
        )
        assert "unshared" not in result and next(iter(fields)) in result["no_unshared"]


@pytest.mark.parametrize(
    "fields",
    [
        {"inter_loop_norm": "own"},
        {"loop_damping": True},
        {"loop_change_gate": True},
        {"injection": "add", "state_init": "zeros"},
        {"loop_embedding": "sinusoidal"},
        {"block_norm": "residual_sandwich"},
        {"init_scheme": "zero_output"},
        {"init_scheme": "takase"},
        {"prelude_norm": True, "num_prelude_layers": 1},
    ],
    ids=str,
)
def test_no_theory_where_a_loop_does_more_than_add(fields):
    name, value = next(iter(fields.items()))
    assert f"{name}={value!r}: it needs" in growth.why_no_theory(theorem_config(**fields))


def test_theory_is_given_only_where_its_premises_hold():
    how = {"loops": [1, 2, 3], "rules": ["none"], "seeds": 1, "steps": 1, "num_tokens": 8}
    for measure in (growth.residual_norm, growth.update_size):
        plain, normed = (
            measure(tiny_config(num_core_layers=1, **each), **how)
            for each in ({"num_prelude_layers": 1, "num_coda_layers": 1}, {"inter_loop_norm": "own"})
        )
        said = [getattr(sentences, measure.__name__)(result) for result in (plain, normed)]
        assert plain["looped"]["none"]["slope"]["theory"] == 1 and said[0].endswith("under no scaling (theory 1).")
        assert normed["looped"]["none"]["slope"]["theory"] is None and "(theory" not in said[1]
        assert said[1].endswith(" No theory for a model with inter_loop_norm='own': it needs 'none'.")
    assert (plain["exponent_of_eta_eps_N"]["theory"], normed["exponent_of_eta_eps_N"]["theory"]) == (1, None)


def test_a_power_of_n_is_said_with_its_error():
    """By hand: logs base 2 of R are 0, 2, 2 at 0, 1, 2, which is a slope of 1 with an error of 0.58; or 0, 1.1, 2."""
    for curve, words in (([1, 4, 4], "no power of N"), ([1, 2**1.1, 4], "N^1.00 ± 0.06 (misfit)")):
        slope = growth.slopes([1, 2, 4], [curve], 1.0)
        result = {"loops": [1, 2, 4], "looped": {"none": {"R": [curve], "update": [curve], "slope": slope}}}
        assert f"goes as {words} under no scaling (theory 1)." in sentences.residual_norm(result)
        assert f"goes as {words} under no scaling (theory 1)." in sentences.update_size(result)
        assert figures.residual_norm(result)[0].title == f"no scaling, shared layers: {words}"
        assert figures.update_size(result)[0].title == f"no scaling: {words}"


def test_the_factored_rule_is_named_by_what_it_divides_by():
    """lambda / (N sqrt(L / reference)), against the eps that the model has."""
    config = tiny_config(num_core_layers=3, residual_reference_layers=12)
    how = {"loops": [1, 2, 3], "rules": ["factored"], "seeds": 1, "steps": 1, "num_tokens": 8}
    assert growth.looped(config, 2, "factored").residual_factor(2) == pytest.approx(1 / (2 * (3 / 12) ** 0.5))
    for measure in (growth.residual_norm, growth.update_size):
        result = measure(config, **how)
        name = measure.__name__
        assert " under 1/(N√(L/12)) (theory 0)." in getattr(sentences, name)(result)
        assert getattr(figures, name)(result)[0].title.startswith("1/(N√(L/12))")
        assert " under 1/(N√L) (theory 0)." in getattr(sentences, name)({**result, "residual_reference_layers": 1})
    options = {"loops": [1, 2], "rates": [1e-3, 2e-3, 4e-3], "rules": ["factored"], "steps": 1, "rows_per_step": 1}
    assert sentences.lr_transfer(transfer.lr_transfer(config, BATCH, **options)).startswith("1/(N√(L/12)), 3 layers:")


def test_increments_of_a_linear_loop():
    """d_i = (D - 1) D^(i-1) e, so cosines and energies are sums over channels."""
    model = linear_model(DECAY)
    e = embedded(model).flatten(0, 1)
    steps = torch.stack([(DECAY - 1) * DECAY**i * e for i in range(4)])  # [N, tokens, d]
    result = growth.increments(trace(model, BATCH, 4).trajectory, eps=1.0)
    for i in range(4):
        for j in range(4):
            cosine = torch.nn.functional.cosine_similarity(steps[i], steps[j], dim=-1).mean().item()
            assert result["cosine"][i][j] == pytest.approx(cosine, rel=1e-6)
            product = (steps[i] * steps[j]).mean(-1).mean().item()
            assert result["product"][i][j] == pytest.approx(product, rel=1e-5)
    energy = result["energy"]
    assert energy["H_N"] == pytest.approx((DECAY**4 * e).square().mean().item(), rel=1e-5)
    assert energy["H_0"] + energy["linear"] + energy["quadratic"] == pytest.approx(energy["H_N"], rel=1e-5)


def test_increments_in_one_direction_and_in_none():
    straight = trace(known_model(along=0.5), BATCH, 4).states
    cosines, products = increment_products(straight)
    assert cosines.flatten().tolist() == pytest.approx([1.0] * 9, rel=1e-6)
    assert products.flatten().tolist() == pytest.approx([0.25] * 9, rel=1e-6)
    axes = torch.eye(4)[:, None, None, :].cumsum(0)  # each step along another axis
    assert torch.allclose(increment_products(list(axes))[0], torch.eye(3))


def test_loop_cosine_tells_shared_weights_from_independent_ones():
    model = LoopedForCausalLM(theorem_config(num_core_layers=2)).eval()
    result = growth.loop_cosine(model, {"input_ids": random_ids(2, 16, 64)}, copies=12, num_loops=6, num_tokens=32)
    assert len(result["model"]["cosine"]) == 6 and len(result["unshared"]["cosine"]) == 12
    assert result["looped"]["off_diagonal"]["mean"] > 0.4
    assert abs(result["unshared"]["off_diagonal"]["mean"]) < 0.1
    for stack in ("model", "looped", "unshared"):
        energy = result[stack]["energy"]
        assert energy["H_0"] + energy["linear"] + energy["quadratic"] == pytest.approx(energy["H_N"], rel=1e-3)
    # independent increments add up along the diagonal alone
    assert result["unshared"]["energy"]["quadratic"] < 2 * result["unshared"]["energy"]["quadratic_diagonal"]
    assert result["looped"]["energy"]["quadratic"] > 4 * result["looped"]["energy"]["quadratic_diagonal"]


def test_cosines_of_a_trained_model_alone():
    """Figures 6 and 8 are of the model itself: no fresh ones beside it."""
    model = tiny_model()
    assert set(growth.loop_cosine(model, BATCH, copies=0)) == {"num_loops", "copies", "steps", "model"}


@pytest.mark.slow
def test_sixty_four_unshared_copies_of_twelve_layers_fit():
    config = theorem_config(num_core_layers=12, hidden_size=32, intermediate_size=64)
    stack = growth.increments_of_stack(config, "unshared", 64, steps=0, lr=1e-4, num_tokens=8)
    assert len(stack["cosine"]) == 64 and abs(stack["off_diagonal"]["mean"]) < 0.05


def test_training_of_measures_leaves_random_numbers_and_the_model_alone():
    model = tiny_model(residual_dropout=0.3)
    before, noise = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    growth.loop_cosine(model, BATCH, copies=2, steps=1, num_tokens=8)
    growth.residual_norm(model.config, loops=[1, 2, 3], rules=["none"], seeds=1, steps=1, num_tokens=8)
    transfer.lr_transfer(model.config, BATCH, loops=[1], rates=[1e-3, 2e-3, 4e-3], steps=1, rows_per_step=1)
    assert torch.equal(noise, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# Learning rates


@pytest.mark.slow
def test_lr_transfer_trains_every_cell_and_leaves_out_what_diverged():
    config = tiny_config(initializer_range=0.02)
    batch = {"input_ids": random_ids(1, 16).expand(8, 16).contiguous()}  # the same row: soon known by heart
    result = transfer.lr_transfer(
        config, batch, loops=[2, 1], rates=[1e4, 1e-5, 1e-3, 1e-2], rules=["none", "linear"], steps=8
    )
    assert result["rates"] == [1e-5, 1e-3, 1e-2, 1e4] and [p["rule"] for p in result["panels"]] == ["none", "linear"]
    for panel in result["panels"]:
        for curve in panel["curves"].values():
            untrained, slow, fast, absurd = curve["loss"]
            assert untrained == pytest.approx(math.log(99), rel=0.05)
            assert fast < slow < untrained and absurd is None
            assert curve["loss_of_seeds"] == [[loss] for loss in curve["loss"]]
            assert curve["optimum"]["lr"] is None and "beside one that diverged" in curve["optimum"]["why"]


def test_lr_transfer_with_and_without_the_rates_of_depth(monkeypatch):
    """The rates of the blocks at depths 2 and 8, where 2 is the reference, and shifts over both N and depth."""
    used = []

    class Recorded(torch.optim.AdamW):
        def __init__(self, groups, **options):
            used.append({group["name"]: group["lr"] for group in groups})
            super().__init__(groups, **options)

    monkeypatch.setattr(torch.optim, "AdamW", Recorded)
    config = tiny_config(residual_scaling="factored", residual_reference_layers=2)
    options = {"loops": [1], "layers": [8, 2], "rates": [1e-3, 2e-3, 4e-3], "steps": 1, "rows_per_step": 1}
    result = transfer.lr_transfer(config, BATCH, **options)
    assert [rates["blocks"] / rates["base"] for rates in used] == pytest.approx([1.0] * 3 + [0.5] * 3)
    assert set(result["shift_over_layers"]["factored"]["1"]) == {"2", "8"}
    used.clear()
    transfer.lr_transfer(config, BATCH, **options, correct_for_depth=False)
    assert [rates["blocks"] / rates["base"] for rates in used] == pytest.approx([1.0] * 6)


def test_the_sentence_on_rates_says_why_there_is_no_best_one():
    few = {"lr": None, "why": "only 2 of 5 learning rates trained, and 3 are needed"}
    curves = {"1": {"optimum": few}, "4": {"optimum": {"lr": 1e-3}}}
    said = sentences.lr_transfer({"panels": [{"rule": "linear", "layers": 2, "curves": curves}]})
    assert said == f"1/N, 2 layers: best rates cannot be compared (N = 1: {few['why']})."


def test_the_sentence_on_rates_gives_the_shift_with_its_interval():
    """Over N from the first to the last that has a best rate, over L where there is one N; MOVER's by hand."""
    one, four = ({"lr": 2.0**lr, "interval": [2 ** (lr - 0.3), 2 ** (lr + 0.4)], "seeds": 2} for lr in (-8, -9))
    none = {"lr": None, "why": "only 2 of 5 learning rates trained, and 3 are needed"}
    best_of_n = {"1": one, "2": {"lr": 0.1}, "4": four, "8": none, "16": none}
    curves = {n: {"optimum": found} for n, found in best_of_n.items()}
    said = sentences.lr_transfer({"panels": [{"rule": "linear", "layers": 2, "curves": curves}]})
    assert said == (
        "1/N, 2 layers: the best rate moves by −1.00 octaves [−1.50, −0.50] from N = 1 to N = 4; "
        "none at N = 8, N = 16."
    )
    of_layers = [
        {"rule": "linear", "layers": at, "curves": {"4": {"optimum": each}}} for at, each in ((2, four), (8, one))
    ]
    said = sentences.lr_transfer({"panels": of_layers})
    assert said == "1/N, N = 4: the best rate moves by +1.00 octaves [+0.50, +1.50] from L = 2 to L = 8."
    said = sentences.lr_transfer({"panels": of_layers[1:]})
    assert said.startswith("1/N, N = 4: the best rate at L = 8 is 0.00391 [0.00317, 0.00515]")
    without = {"1": {"optimum": {"lr": 1e-3, "interval": None}}, "2": {"optimum": {"lr": 2e-3, "interval": None}}}
    said = sentences.lr_transfer({"panels": [{"rule": "sqrt", "layers": 1, "curves": without}]})
    assert said == "1/√N, 1 layer: the best rate moves by +1.00 octaves (no interval) from N = 1 to N = 2."


def test_lr_transfer_leaves_out_runs_above_max_loss():
    batch = {"input_ids": random_ids(1, 16).expand(8, 16).contiguous()}
    options = {"loops": [1], "rates": [1e-5, 1e-3, 1e-2], "steps": 8}
    config = tiny_config(initializer_range=0.02)
    (panel,) = transfer.lr_transfer(config, batch, **options)["panels"]
    _, slow, fast = panel["curves"]["1"]["loss"]
    (panel,) = transfer.lr_transfer(config, batch, **options, max_loss=(slow + fast) / 2)["panels"]
    assert panel["curves"]["1"]["loss"] == [None, None, fast]
    assert "only 1 of 3" in panel["curves"]["1"]["optimum"]["why"]


def test_the_loss_of_lr_transfer_is_the_mean_over_seeds():
    options = {"loops": [1], "rates": [1e-3, 2e-3, 4e-3], "steps": 1, "rows_per_step": 1, "max_loss": 100.0}
    (panel,) = transfer.lr_transfer(tiny_config(), BATCH, **options, seeds=2)["panels"]
    curve = panel["curves"]["1"]
    assert curve["loss"] == pytest.approx([sum(losses) / 2 for losses in curve["loss_of_seeds"]])


def test_lr_transfer_measures_rows_that_are_not_trained_on():
    """Random tokens, which nothing but having seen them foretells."""
    config = tiny_config(num_core_layers=1, num_loops=1)
    loss = transfer.trained_loss(config, {"input_ids": random_ids(4, 8)}, 2e-2, 8, 4, seed=0, max_loss=100.0)
    assert loss > math.log(99)


def test_the_rate_of_lr_transfer_rises_and_falls_to_zero(monkeypatch):
    used = []

    class Recorded(torch.optim.AdamW):
        def step(self, *args):
            used.append(self.param_groups[0]["lr"])
            return super().step(*args)

    monkeypatch.setattr(torch.optim, "AdamW", Recorded)
    transfer.trained_loss(tiny_config(), BATCH, 1e-3, steps=20, rows_per_step=1, seed=0)
    assert used == pytest.approx([0, 5e-4, *[1e-3] * 14, 1e-3, 7.5e-4, 5e-4, 2.5e-4])


# Bad input


@pytest.mark.parametrize(
    "options,message",
    [
        ({"loops": [1, 2]}, "at least 3 different depths"),
        ({"loops": [1, 2, 2]}, "at least 3 different depths"),
        ({"loops": [0, 1, 2]}, "at least 1"),
        ({"seeds": 0}, "at least 1"),
        ({"rules": ["cubic"]}, "rules must be among none, sqrt, linear, factored"),
    ],
)
@pytest.mark.parametrize("measure", [growth.residual_norm, growth.update_size], ids=lambda m: m.__name__)
def test_bad_sweeps_are_refused(measure, options, message):
    with pytest.raises(ValueError, match=message):
        measure(tiny_config(), **options)


def test_other_bad_input_is_refused():
    with pytest.raises(ValueError, match="at least 1 step, got 0"):
        growth.update_size(tiny_config(), steps=0)
    with pytest.raises(ValueError, match="at least 2 of them, got num_loops=1"):
        growth.loop_cosine(tiny_model(), BATCH, num_loops=1)
    with pytest.raises(ValueError, match="got num_loops=3 and copies=1"):
        growth.loop_cosine(tiny_model(), BATCH, copies=1)
    with pytest.raises(ValueError, match="at least 3 positive learning rates"):
        transfer.lr_transfer(tiny_config(), BATCH, rates=[1e-3, 1e-2])
    with pytest.raises(ValueError, match="at least 2 of them; got 1"):
        transfer.lr_transfer(tiny_config(), {"input_ids": random_ids(1, 8)})
    with pytest.raises(ValueError, match="max_loss must be positive, or left out, got 0"):
        transfer.lr_transfer(tiny_config(), BATCH, max_loss=0.0)
    with pytest.raises(ValueError, match="got 'cubic'"):
        transfer.lr_transfer(tiny_config(), BATCH, rules=["cubic"])
