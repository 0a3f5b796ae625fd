"""Depth as an argument: per row of a batch, with gradients in the last loops only, and what is refused."""

import contextlib

import numpy as np
import pytest
import torch
from transformers import DynamicCache, StaticCache

from modeling_looped import checks, training_warnings
from modeling_looped.injection import INJECTIONS, Injection

from . import naive
from .helpers import SECTIONS, initial_state_of, random_ids, tiny_config, tiny_model
from .naive import DoubleRotary


SYSTEMS = {
    "plain": {},
    "windows": {**SECTIONS, "window_pattern": "SSL", "sliding_window": 3, "num_key_value_heads": 2},
    "learned_positions": {"position_embedding": "learned", "inter_loop_norm": "own", "loop_damping": True},
    "run_depth": {**SECTIONS, "residual_depth": "run", "residual_scaling": "linear"},
    "final_only": {"readout_norm": "final_only", "num_coda_layers": 1, "coda_input": "norm"},
    "gated_change": {"loop_change_gate": True, "injection": "add", "num_coda_layers": 1},
    "second_keys": {**SECTIONS, "key_value_interval": 2, "num_key_value_heads": 2},
    "flt": {"preset": "flt"},
    "flt_residual": {"preset": "flt_residual"},
    "lt_attention": {"preset": "lt_attention"},
    "huginn": {"preset": "huginn", **SECTIONS},
    "parcae": {"preset": "parcae", **SECTIONS},
    "ouro": {"preset": "ouro"},
}
READ_BETWEEN_LOOPS = [system for system in SYSTEMS if system != "run_depth"]  # its loops are of no shallower run
over_systems = pytest.mark.parametrize("system", SYSTEMS)
DEPTHS = [2, 5, 1, 3, 3]  # of models trained with 3 loops


def model_of(system: str, **fields):
    """In float64, rotary tables too, which transformers makes in float32 whatever the model."""
    model = tiny_model(**{**SYSTEMS[system], **fields}).double()
    if model.config.position_embedding == "rope":
        model.model.rotary_emb = DoubleRotary(model.config)
    return model


def row_of(tensor, row: int):
    return None if tensor is None else tensor[row : row + 1]


def assert_same(actual, expected, tolerance: float = 1e-10):
    """To rounding, where rounding is counted in units of the largest value."""
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * scale)


# Rows of mixed depth


@over_systems
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask")
@pytest.mark.covering
@pytest.mark.some(5)
def test_rows_equal_rows_alone(system, implementation):
    """With left padding. Flex attention uncompiled, since its compiler takes minutes on a CPU; eager attention, whose
    softmax is in float32 whatever the model, in single precision."""
    model = tiny_model(**SYSTEMS[system]) if implementation == "eager" else model_of(system)
    model.set_attn_implementation(implementation)
    ids, padding = random_ids(5, 7), [0, 3, 0, 1, 6]
    mask = (torch.arange(7) >= torch.tensor(padding)[:, None]).long()
    state = initial_state_of(model, 5, 7)
    stance = "force_eager" if implementation == "flex_attention" else "default"
    with torch.compiler.set_stance(stance), torch.no_grad():
        batch = model(ids, num_loops=DEPTHS, attention_mask=mask, initial_state=state).logits
        for row, (depth, pad) in enumerate(zip(DEPTHS, padding)):
            arguments = {"num_loops": depth, "attention_mask": mask[row : row + 1]}
            alone = model(ids[row : row + 1], initial_state=row_of(state, row), **arguments).logits
            assert_same(batch[row, pad:], alone[0, pad:], 1e-5 if implementation == "eager" else 1e-10)


@over_systems
def test_rows_equal_rows_alone_in_single_precision(system):
    model, ids = tiny_model(**SYSTEMS[system]), random_ids(5, 7)
    with torch.no_grad():
        batch = model(ids, num_loops=DEPTHS).logits
        for row, depth in enumerate(DEPTHS):
            assert_same(batch[row : row + 1], model(ids[row : row + 1], num_loops=depth).logits, 1e-5)


@over_systems
@pytest.mark.parametrize("make_cache", [lambda config: DynamicCache(config=config), lambda config: DynamicCache(),
                                        lambda config: StaticCache(config=config, max_cache_len=9)],
                         ids=["of_the_config", "without_arguments", "static"])  # fmt: skip
@pytest.mark.covering
@pytest.mark.some(5)
def test_rows_equal_rows_alone_with_a_cache(system, make_cache):
    """Padded rows, piece by piece, at depths that change from piece to piece, no row ever deeper than its first."""
    model, ids = model_of(system), random_ids(3, 9)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    passes = [(slice(0, 5), [2, 5, 3]), (slice(5, 6), [1, 5, 3]), (slice(6, 8), [2, 1, 1]), (slice(8, 9), [1, 4, 3])]
    caches = [make_cache(model.config) for _ in range(4)]
    for part, depths in passes:
        with torch.no_grad():
            batch = model(
                ids[:, part], attention_mask=mask[:, : part.stop], past_key_values=caches[3], num_loops=depths
            ).logits
            for row, depth in enumerate(depths):
                alone = model(
                    ids[row : row + 1, part],
                    attention_mask=mask[row : row + 1, : part.stop],
                    past_key_values=caches[row],
                    num_loops=depth,
                ).logits
                real = mask[row, part].bool()
                assert_same(batch[row][real], alone[0][real])


@pytest.mark.parametrize("make", [list, tuple, torch.tensor, np.array, lambda d: torch.tensor(d, dtype=torch.int32)])
def test_every_way_to_give_depths(make):
    model, ids = model_of("plain"), random_ids(5, 4)
    with torch.no_grad():
        expected = torch.cat([model(row[None], num_loops=depth).logits for row, depth in zip(ids, DEPTHS)])
        assert_same(model(ids, num_loops=make(DEPTHS)).logits, expected)
        same = model(ids, num_loops=3).logits
        assert torch.equal(model(ids, num_loops=make([3] * 5)).logits, same)
        assert torch.equal(model(ids, num_loops=torch.tensor(3)).logits, same)
        assert torch.equal(model(ids, num_loops=np.int64(3)).logits, same)
        assert torch.equal(model(ids).logits, same)


@pytest.mark.parametrize("system", READ_BETWEEN_LOOPS)
@pytest.mark.parametrize("backprop_loops", [None, 1, 2, 9])
@pytest.mark.covering
@pytest.mark.some(5)
def test_states_and_logits_of_every_loop(system, backprop_loops):
    """Row i at loop k is its run of depth min(k, depth of i); also where rows end together, to truncate gradients."""
    model, ids = model_of(system), random_ids(5, 6)
    state = initial_state_of(model, 5, 6)
    out = model(
        ids,
        num_loops=DEPTHS,
        backprop_loops=backprop_loops,
        initial_state=state,
        output_loop_logits=True,
        output_loop_hidden_states=True,
        output_exit_probabilities=model.exit_gate is not None,
    )
    assert len(out.loop_logits) == len(out.loop_hidden_states) == 5
    for row, depth in enumerate(DEPTHS):
        for k in range(1, 6):
            alone = model(
                ids[row : row + 1],
                num_loops=min(k, depth),
                initial_state=row_of(state, row),
                output_loop_hidden_states=True,
                output_exit_probabilities=model.exit_gate is not None,
            )
            assert_same(out.loop_logits[k - 1][row : row + 1], alone.logits)
            assert_same(out.loop_hidden_states[k - 1][row : row + 1], alone.loop_hidden_states[-1])
        assert_same(out.logits[row], out.loop_logits[-1][row])
        if model.exit_gate is not None:
            assert_same(out.exit_probabilities[row, :, :depth], alone.exit_probabilities[0])  # k = 5: its own depth
            assert not out.exit_probabilities[row, :, depth:].any()


@contextlib.contextmanager
def rows_of_each_block(model):
    """How many rows each block has seen, in all its calls."""
    rows = {name: 0 for name, module in model.named_modules() if hasattr(module, "arrangement")}

    def counter(name):
        def count(module, arguments):
            rows[name] += len(arguments[0])

        return count

    handles = [model.get_submodule(name).register_forward_pre_hook(counter(name)) for name in rows]
    yield rows
    for handle in handles:
        handle.remove()


CASES = [(system, case) for system in SYSTEMS for case in ("forward", "backprop", "cached")]
CASES += [(system, "every_loop") for system in READ_BETWEEN_LOOPS]


@pytest.mark.parametrize(("system", "case"), CASES)
@pytest.mark.covering
def test_finished_rows_cost_no_compute(system, case):
    model, ids = model_of(system), random_ids(5, 6)
    arguments = {"backprop": {"backprop_loops": 2}, "every_loop": {"output_loop_hidden_states": True}}.get(case, {})
    cache = None
    if case == "cached":
        cache = model(ids, num_loops=5).past_key_values
    with rows_of_each_block(model) as rows:
        model(ids[:, -1:] if cache else ids, num_loops=DEPTHS, past_key_values=cache, **arguments)
    assert len(rows) == model.config.num_layers
    for name, count in rows.items():
        assert count == (sum(DEPTHS) if "core" in name else 5), name


# Gradients of the last loops


def truncated_logits(model, weights: dict, ids, num_loops: int, backprop_loops: int, initial_state=None):
    """Logits after every loop of one row, by the formulas; loops before the last `backprop_loops` are constants."""
    config = model.config
    x = config.embedding_scale * weights["model.embed_tokens.weight"][ids]
    if config.position_embedding == "learned":
        x = x + weights["model.embed_positions.weight"][: ids.shape[1]]
    for layer in range(config.num_prelude_layers):
        x = naive.block(config, weights, f"model.prelude.{layer}", layer, x, naive.residual_factor(config, 1), ids)
    embedded = naive.norm(config, weights, "model.prelude_norm", x) if config.prelude_norm else x
    state = {"embedding": embedded, "zeros": torch.zeros_like(embedded), "normal": initial_state}[config.state_init]
    scale = naive.residual_factor(config, num_loops if config.residual_depth == "run" else config.num_loops)
    logits, kept = [], {}
    for t in range(num_loops):
        with torch.set_grad_enabled(t >= num_loops - backprop_loops):
            read = naive.one_loop(config, weights, state, embedded, t, scale, ids, kept=kept)
            state = naive.between_loops(config, weights, read)
        logits.append(naive.logits_of(config, weights, read, t + 1, ids))
    return logits


CASES = [(system, "last_loop") for system in SYSTEMS] + [(system, "every_loop") for system in READ_BETWEEN_LOOPS]


@pytest.mark.parametrize(("system", "read"), CASES)
@pytest.mark.parametrize(
    ("num_loops", "backprop_loops"), [(3, 1), (4, 2), ([1, 3, 2], 1), ([1, 4, 2], 2), ([1, 3, 2], 9)]
)
@pytest.mark.covering
@pytest.mark.some(5)
def test_gradients_of_the_last_loops(system, read, num_loops, backprop_loops):
    """Equal to those of each row run by itself, truncated at its own depth; of the logits' product with a constant."""
    model, ids, every_loop = model_of(system).train(), random_ids(3, 4), read == "every_loop"
    depths = [num_loops] * 3 if isinstance(num_loops, int) else num_loops
    generator = torch.Generator().manual_seed(2)
    constants = torch.randn(4, 3, 4, model.config.vocab_size, generator=generator, dtype=torch.float64)
    state = initial_state_of(model, 3, 4)

    out = model(
        ids,
        num_loops=num_loops,
        backprop_loops=backprop_loops,
        initial_state=state,
        output_loop_logits=every_loop,
    )
    loops = out.loop_logits if every_loop else [out.logits]
    sum((logits * constant).sum() for logits, constant in zip(loops, constants)).backward()

    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if model.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    for weight in weights.values():
        weight.requires_grad_()
    expected_logits, total = [], 0.0
    for row, depth in enumerate(depths):
        logits = truncated_logits(model, weights, ids[row : row + 1], depth, backprop_loops, row_of(state, row))
        expected_logits.append(logits[-1])
        # a row that has finished keeps its last state, so the later loops of the batch read it again
        of_loops = [logits[min(k, depth - 1)] for k in range(max(depths))] if every_loop else logits[-1:]
        total = total + sum((x[0] * constant[row]).sum() for x, constant in zip(of_loops, constants))
    total.backward()

    assert_same(out.logits, torch.cat(expected_logits))
    for name, parameter in model.named_parameters():
        expected = weights[name].grad
        if expected is None or expected.abs().max() == 0:
            assert parameter.grad is None or parameter.grad.abs().max() == 0, name
        else:
            error = (parameter.grad - expected).norm() / expected.norm()
            assert error < 1e-10, (name, error.item())


def test_truncation_changes_gradients_and_nothing_else():
    model, ids = model_of("ouro"), random_ids(3, 5)
    gradients = []
    for backprop_loops in (None, 9, 2):
        model.zero_grad()
        out = model(ids, labels=ids, num_loops=[4, 2, 3], backprop_loops=backprop_loops)
        out.loss.backward()
        gradients.append((out.loss.item(), model.model.core[0].mlp.up_proj.weight.grad.clone()))
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=1e-12) == pytest.approx(gradients[2][0], rel=1e-12)
    assert_same(gradients[0][1], gradients[1][1])
    assert (gradients[0][1] - gradients[2][1]).norm() > 1e-3 * gradients[0][1].norm()


@pytest.mark.parametrize("injection", INJECTIONS)
@pytest.mark.parametrize(
    "num_loops, backprop_loops, reaches",
    [(4, None, True), (4, 4, True), (4, 2, False), ([3, 4], 2, False), ([4, 2], 2, True)],
)
def test_a_prelude_that_gets_no_gradient_is_warned_of(injection, num_loops, backprop_loops, reaches, monkeypatch):
    said, ids = [], random_ids(2, 5)
    monkeypatch.setattr(training_warnings.logger, "warning_once", said.append)
    model = tiny_model(num_prelude_layers=1, injection=injection).train()
    model(ids, labels=ids, num_loops=num_loops, backprop_loops=backprop_loops).loss.backward()
    before = [model.model.embed_tokens.weight, *model.model.prelude.parameters()]
    assert {parameter.grad is not None for parameter in before} == {injection != "none" or reaches}
    assert len(said) == (injection == "none" and not reaches)
    assert all("raise backprop_loops or leave it out" in line for line in said)


def test_a_prelude_that_is_frozen_on_purpose_is_not_warned_of(monkeypatch):
    class Own(Injection):
        def forward(self, state, embedded):
            return state + embedded

    said, ids = [], random_ids(2, 5)
    monkeypatch.setattr(training_warnings.logger, "warning_once", said.append)
    model = tiny_model(num_prelude_layers=1).train()
    for part in (model.model.embed_tokens, model.model.prelude):
        part.requires_grad_(False)
    model(ids, labels=ids, num_loops=4, backprop_loops=2).loss.backward()
    model.enable_input_require_grads()  # as PEFT does with gradient checkpointing
    model(ids, labels=ids, num_loops=4, backprop_loops=2).loss.backward()
    model.disable_input_require_grads()
    model.requires_grad_(True)
    model.model.injection = Own(model.config)
    model(ids, labels=ids, num_loops=4, backprop_loops=2).loss.backward()
    assert model.model.embed_tokens.weight.grad is not None
    model.model.injection = Injection(model.config)
    model.eval()(ids, labels=ids, num_loops=4, backprop_loops=2)
    assert said == []


def test_a_config_that_has_changed_since_is_told_in_a_pass(monkeypatch):
    said, model, ids = [], tiny_model(), random_ids(2, 5)
    monkeypatch.setattr(checks.logger, "warning_once", said.append)
    model.config.num_loops = 5  # which a pass follows
    model(ids)
    assert said == []
    model.config.injection = "add"
    model(ids)
    assert len(said) == 1 and "injection='add' (built with 'none')" in said[0] and "build another" in said[0]


def test_training_from_zeros_in_the_place_of_noise_is_warned_of(monkeypatch):
    said, ids, model = [], random_ids(2, 5), tiny_model(injection="add", state_init="normal", num_loops=3)
    monkeypatch.setattr(training_warnings.logger, "warning_once", said.append)
    model.train()(ids, labels=ids, initial_state=model.sample_initial_state(2, 5))
    with torch.no_grad():
        model(ids, labels=ids)
    model.eval()(ids, labels=ids)
    tiny_model(injection="add", state_init="zeros").train()(ids, labels=ids)
    assert said == []
    for depth in (3, [1, 2]):
        model.train()(ids, labels=ids, num_loops=depth)
    assert len(set(said)) == 1 and "begins from zeros, while" in said[0] and "DrawnDepths" in said[0]


def test_a_class_that_draws_its_noise_itself_is_not_warned_of_zeros(monkeypatch):
    said, ids, model = [], random_ids(2, 5), tiny_model(injection="add", state_init="normal").train()
    monkeypatch.setattr(training_warnings.logger, "warning_once", said.append)
    monkeypatch.setattr(model.model, "initial_state", lambda embedded, given: torch.randn_like(embedded))
    model(ids, labels=ids)
    assert said == []


@pytest.mark.parametrize("fields", [{"inter_loop_norm": "own"}, {"loop_damping": True}, {}], ids=str)
@pytest.mark.parametrize("num_loops, backprop_loops", [(1, 1), (4, 1), (4, 2), (4, None), ([4, 2], 1), ([4, 2], 2)])
def test_what_acts_between_loops_and_gets_no_gradient_is_warned_of(fields, num_loops, backprop_loops, monkeypatch):
    said, ids, model = [], random_ids(2, 5), tiny_model(injection="add", state_init="zeros", **fields).train()
    monkeypatch.setattr(training_warnings.logger, "warning_once", said.append)
    model(ids, labels=ids, num_loops=num_loops, backprop_loops=backprop_loops).loss.backward()
    is_untrained = any(weight.grad is None for weight in model.parameters())
    assert len(said) == (is_untrained and num_loops != 1)
    assert all(f"backprop_loops=1 the parameters of {next(iter(fields))}, which" in line for line in said)


def test_a_loss_of_states_gives_the_prelude_no_gradients_of_zero():
    """They would cost a backward pass, and weight decay would act on what is not trained."""
    model, ids = tiny_model(num_prelude_layers=1, latent_loss=0.1).train(), random_ids(2, 5)
    model(ids, labels=ids, num_loops=4, backprop_loops=3).loss.backward()
    assert all(weight.grad is None for weight in model.model.prelude.parameters())
    model(ids, labels=ids, num_loops=[4, 3], backprop_loops=3).loss.backward()
    assert all(weight.grad.any() for weight in model.model.prelude.parameters())


def test_gradients_that_reach_no_keys_are_refused():
    model, ids = tiny_model(num_key_value_loops=2), random_ids(2, 4)
    assert model(ids, labels=ids, num_loops=4, backprop_loops=3).loss.requires_grad
    with pytest.raises(ValueError, match=r"none of the last 2 loops of 4 .* num_key_value_loops=2"):
        model(ids, num_loops=[4, 3], backprop_loops=2)
    with torch.no_grad():
        model(ids, num_loops=4, backprop_loops=2)


def test_backprop_loops_leaves_no_cache_of_rows_that_end_together():
    model, ids = model_of("plain"), random_ids(2, 4)
    assert model(ids, num_loops=[1, 3], backprop_loops=1).past_key_values is None
    with pytest.raises(ValueError, match=r"\[1, 3\] are aligned at their last loops.*Run without a cache"):
        model(ids, num_loops=[1, 3], backprop_loops=1, past_key_values=DynamicCache())
    assert model(ids, num_loops=3, backprop_loops=1).past_key_values.get_seq_length() == 4


# The initial state


@pytest.mark.parametrize("system", ["huginn", "parcae"])
def test_initial_state(system):
    model, ids = model_of(system), random_ids(2, 6)
    state = initial_state_of(model, 2, 6)
    with torch.no_grad():
        logits = model(ids, initial_state=state).logits
        _, expected, _ = naive.forward(model.config, dict(model.state_dict()), ids, initial_state=state)
        assert_same(logits, expected[-1])
        zeros = model(ids, initial_state=torch.zeros_like(state)).logits
        assert torch.equal(model(ids).logits, zeros)  # in eval nothing is random
        assert torch.equal(model.train()(ids).logits, zeros)  # nor in training: who trains passes the noise
        assert not torch.allclose(logits, zeros)


def test_sampled_initial_state_is_a_function_of_its_generator():
    model = model_of("huginn", state_init_std=0.5)
    assert model_of("huginn").to("meta").sample_initial_state(1, 2).device.type == "meta"  # where the model is
    samples = [model.sample_initial_state(20, 30, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(samples[0], samples[1]) and not torch.equal(samples[0], samples[2])
    assert samples[0].abs().max() <= 1.5  # three standard deviations
    assert samples[0].std().item() == pytest.approx(0.5 * 0.9866, rel=0.02)  # that of a normal cut there


def test_initial_state_that_does_not_fit():
    model, ids = model_of("huginn"), random_ids(2, 6)
    state = initial_state_of(model, 2, 6)
    for wrong in (state[:1], state[:, :5], state[..., :31]):
        with pytest.raises(ValueError, match=rf"{tuple(wrong.shape)}".replace("(", r"\(").replace(")", r"\)")):
            model(ids, initial_state=wrong)
    with pytest.raises(ValueError, match="state_init='normal'; this one starts from 'embedding'"):
        model_of("plain").sample_initial_state(2, 6)


@pytest.mark.parametrize("preset", ["lt", "lt_input", "lt_attention", "parcae", "huginn", "ouro", "readout_damping"])
def test_a_run_goes_on_from_any_state(preset):
    """Two loops and three more are five, whatever the model starts from by itself."""
    model, ids = tiny_model(preset=preset).double(), random_ids(2, 6)
    with torch.no_grad():
        states = model(ids, num_loops=5, output_loop_hidden_states=True).loop_hidden_states
        second = model.model.to_next_loop(states[1])
        further = model(ids, num_loops=3, initial_state=second, output_loop_hidden_states=True).loop_hidden_states
    torch.testing.assert_close(torch.stack(further), torch.stack(states[2:]))


def test_no_run_goes_on_where_the_first_loop_is_another():
    ids = random_ids(2, 6)
    for fields, said in ({"preset": "flt"}, "injection='attention_all'"), ({"loop_change_gate": True}, "gate=True"):
        model = tiny_model(**fields)
        with pytest.raises(ValueError, match=f"{said}.*leave out initial_state"):
            model(ids, initial_state=torch.zeros(2, 6, model.config.state_size))


# What is refused

WRONG_DEPTHS = [
    (0, ValueError, "got 0"),
    (-2, ValueError, "got -2"),
    ([3, 0], ValueError, r"got \[3, 0\]"),
    ([3, -1], ValueError, r"got \[3, -1\]"),
    (torch.tensor([3, 0]), ValueError, r"got \[3, 0\]"),
    (True, TypeError, "got True"),
    ([True, 3], TypeError, r"got \[True, 3\]"),
    ("3", TypeError, "got '3'"),
    (["3", 3], TypeError, "got"),
    (2.0, TypeError, "got 2.0"),
    (np.float64(2), TypeError, "got 2.0"),
    (np.array([2.0, 3.0]), TypeError, r"got \[2.0, 3.0\]"),
    (np.True_, TypeError, "got True"),
    ([2.0, 3], TypeError, r"got \[2.0, 3\]"),
    (torch.tensor([2.0, 3.0]), TypeError, "torch.float32"),
    (torch.tensor([True, True]), TypeError, "torch.bool"),
    (torch.tensor([[2, 3]]), TypeError, r"shape \(1, 2\)"),
    ([3], ValueError, "got 1 depths for a batch of 2 sequences"),
    ([3, 3, 3], ValueError, "got 3 depths for a batch of 2 sequences"),
    ((3,), ValueError, "got 1 depths for a batch of 2 sequences"),
    (torch.tensor([3, 3, 3]), ValueError, "got 3 depths for a batch of 2 sequences"),
    ([], ValueError, "got 0 depths for a batch of 2 sequences"),
]


@pytest.mark.parametrize(("num_loops", "error", "message"), WRONG_DEPTHS, ids=lambda x: str(x).replace("\n", ""))
def test_wrong_depths(num_loops, error, message):
    model, ids = model_of("plain"), random_ids(2, 4)
    for call in (model, model.model, lambda ids, **kwargs: model.generate(ids, max_new_tokens=1, **kwargs)):
        with pytest.raises(error, match=f"num_loops is the number of loops to run.*{message}"):
            call(ids, num_loops=num_loops)


@pytest.mark.parametrize(
    ("backprop_loops", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), ("2", TypeError),
                                  (1.5, TypeError), ([1, 2], TypeError)]
)  # fmt: skip
def test_wrong_backprop_loops(backprop_loops, error):
    model, ids = model_of("plain"), random_ids(2, 4)
    with pytest.raises(error, match="backprop_loops must be (at least 1|an int), got"):
        model(ids, backprop_loops=backprop_loops)


def test_recorded_states_and_attentions_need_one_depth():
    model, ids = tiny_model(attn_implementation="eager"), random_ids(2, 4)
    for asked in ("output_hidden_states", "output_attentions"):
        with pytest.raises(ValueError, match=r"one depth for all rows, got \[1, 2\]; run rows of one depth"):
            model(ids, num_loops=[1, 2], **{asked: True})
        assert getattr(model(ids, num_loops=[2, 2], **{asked: True}), asked.removeprefix("output_")) is not None
        setattr(model.config, asked, True)
        with pytest.raises(ValueError, match=r"one depth for all rows, got \[1, 2\]"):
            model(ids, num_loops=[1, 2])
        setattr(model.config, asked, False)


def test_selected_states_are_counted_at_the_configured_depth():
    """transformers counts layers by config.num_hidden_layers, however many a pass runs."""
    model, ids = tiny_model(num_core_layers=2, num_loops=2), random_ids(2, 4)
    everything = model(ids, output_hidden_states=True).hidden_states
    if found := [state for state in model(ids, output_hidden_states=[-1]).hidden_states if state is not None]:
        assert torch.equal(found[-1], everything[-1])
    for depth in (1, 5):
        with pytest.raises(ValueError, match=rf"output_hidden_states=\[-1\] selects .* pass runs {2 * depth}:"):
            model(ids, num_loops=depth, output_hidden_states=[-1])


def test_default_depth_is_that_of_the_config():
    model = tiny_model().double()
    ids = random_ids(2, 4)
    with torch.no_grad():
        for num_loops in (1, 4):
            other = type(model)(tiny_config(num_loops=num_loops)).double().eval()
            other.load_state_dict(model.state_dict())  # nothing in the weights depends on the depth
            assert torch.equal(other(ids).logits, model(ids, num_loops=num_loops).logits)
