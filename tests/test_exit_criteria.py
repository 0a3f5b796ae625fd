"""Exit criteria against their formulas in tests/naive_exits.py, and which rules are refused."""

import functools
import itertools
import math
from typing import NamedTuple, get_args

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState

from modeling_looped import LoopedForCausalLM, LoopedModel, generation
from modeling_looped.exit_criteria import CRITERIA, INITIAL, Criterion, ExitCriterion, ExitRule

from .helpers import random_ids, tiny_config, tiny_model
from .naive_exits import EXITS_ABOVE, SCORES, NaiveRule, Readings


LOOPS = 8
over_criteria = pytest.mark.parametrize("name", CRITERIA)


class Reading(NamedTuple):
    """What there is after a loop."""

    logits: torch.Tensor | None = None
    state: torch.Tensor | None = None
    gate: torch.Tensor | None = None


def score_of(name: str, reading: Reading, memory: dict):
    return CRITERIA[name].score(getattr(reading, CRITERIA[name].needs), memory)


def random_readings(tokens: int, dtype=torch.float64) -> list[Reading]:
    """Of every loop, [tokens, ...]: steps that shrink, so that tokens settle at different loops."""
    generator = torch.Generator().manual_seed(0)
    readings, logits, state = [], torch.zeros(tokens, 7), torch.zeros(tokens, 5)
    for loop in range(LOOPS):
        size = 2.0 * 0.5**loop
        logits = logits + size * torch.randn(tokens, 7, generator=generator)
        state = state + size * torch.randn(tokens, 5, generator=generator)
        gate = torch.randn(tokens, generator=generator) - 1
        readings.append(Reading(*(tensor.to(dtype) for tensor in (logits, state, gate))))
    return readings


def naive_readings(readings: list[Reading], token: int) -> Readings:
    """Those of one token, as lists."""
    logits, states, gates = ([kind[token].double() for kind in kinds] for kinds in zip(*readings))
    return Readings(logits, states, [gate.item() for gate in gates])


def scores(name: str, readings: list[Reading]) -> torch.Tensor:
    """[loops, tokens]"""
    results, memory = [], {}
    for reading in readings:
        score, memory = score_of(name, reading, memory)
        results.append(score)
    return torch.stack(results)


def exit_loops(rule, readings: list[Reading]) -> list[int]:
    """As decoders ask an `ExitRule`: the first loop at which each token exits, or the last."""
    tokens = len(readings[0].gate)
    loops, memory = torch.zeros(tokens, dtype=torch.long), {}
    for loop, reading in enumerate(readings, start=1):
        if rule.scores_at(loop):
            score, memory = score_of(rule.name, reading, memory)
            if rule.checks_at(loop):
                loops = torch.where((loops == 0) & rule.exits(score), loop, loops)
    return torch.where(loops == 0, len(readings), loops).tolist()


def naive_exit_loop(rule: NaiveRule, readings: Readings) -> int:
    for loop in range(1, LOOPS):
        if rule.stops(Readings(*(kind[:loop] for kind in readings))):
            return loop
    return LOOPS


# Scores


def test_every_criterion_has_a_formula():
    assert set(CRITERIA) == set(SCORES) == set(get_args(ExitCriterion))
    assert {name for name, kind in CRITERIA.items() if kind.exits_above} == set(EXITS_ABOVE)


def test_closed_forms():
    """Distributions of which every score is known by heart."""
    before, now = Reading(torch.tensor([0.25, 0.5, 0.25]).log()), Reading(torch.tensor([0.5, 0.25, 0.25]).log())
    expected = {
        "logit_margin": math.log(2),
        "max_prob": 0.5,
        "entropy": 1.5 * math.log(2),
        "entropy_diff": 0.0,
        "kl": 0.25 * math.log(2),  # .25 log(.25/.5) + .5 log(.5/.25)
        "argmax_stability": 0,
    }
    for name, value in expected.items():
        _, memory = score_of(name, before, {})
        score, _ = score_of(name, now, memory)
        assert score.item() == pytest.approx(value, abs=1e-7), name

    states = [Reading(state=torch.tensor(state)) for state in ([3.0, 0.0], [3.0, 4.0])]
    _, memory = score_of("latent_diff", states[0], {})
    assert score_of("latent_diff", states[1], memory)[0].item() == pytest.approx(4 / 5)
    _, memory = score_of("gate", Reading(gate=torch.tensor(0.0)), {})
    score, _ = score_of("gate", Reading(gate=torch.tensor(math.log(3))), memory)
    assert score.item() == pytest.approx(1 - 0.5 * 0.25)


@pytest.mark.parametrize("name", ["latent_diff", "cosine"])
def test_a_state_that_stays_zero_has_settled(name):
    """That of padding whose embedding is 0."""
    zero, other = torch.zeros(3), torch.tensor([1.0, 0.0, -1.0])
    readings = [Reading(state=torch.stack(states)) for states in [(zero, other), (zero, other)]]
    assert scores(name, readings).tolist() == [[math.inf, math.inf], [0.0, pytest.approx(0.0, abs=1e-6)]]


@pytest.mark.parametrize("name", ["latent_diff", "cosine"])
def test_padding_loops_no_longer_than_tokens(name):
    model, ids = tiny_model(pad_token_id=0, num_loops=4), random_ids(2, 5)
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 0  # as in a new model
    ids[0, :2] = 0
    runs = []
    model.model.core[0].register_forward_hook(lambda *_: runs.append(1))
    out = model(ids, attention_mask=(ids != 0).long(), exit_rule=ExitRule(name, math.inf, min_loops=2))
    assert len(runs) == 2 and (out.token_loops == 2).all()


@over_criteria
def test_scores_are_the_formulas(name):
    readings = random_readings(tokens=6)
    found = scores(name, readings)
    for token in range(6):
        alone = naive_readings(readings, token)
        rule = NaiveRule(name, 0.0)
        expected = [rule.score(Readings(*(kind[:loop] for kind in alone))) for loop in range(1, LOOPS + 1)]
        assert found[:, token].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@over_criteria
def test_any_leading_dimensions(name):
    readings = random_readings(tokens=6)
    square = [Reading(*(kind.view(2, 3, *kind.shape[1:]) for kind in reading)) for reading in readings]
    assert torch.equal(scores(name, square), scores(name, readings).view(LOOPS, 2, 3))


@over_criteria
def test_tokens_begin_apart(name):
    """A token whose readings begin anew forgets those before, whatever the others do."""
    readings, start = random_readings(tokens=2), 3
    memory = {}
    for loop, reading in enumerate(readings):
        if loop == start:
            memory = {
                part: torch.stack([kept[0], torch.full_like(kept[1], INITIAL[part])]) for part, kept in memory.items()
            }
        score, memory = score_of(name, reading, memory)
        alone = [Reading(*(kind[i : i + 1] for kind in reading)) for i in (0, 1) for reading in readings]
        assert score[0] == scores(name, alone[:LOOPS][: loop + 1])[-1, 0]
        later = alone[LOOPS:][start if loop >= start else 0 : loop + 1]
        assert score[1] == scores(name, later)[-1, 0]


@over_criteria
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_in_single(name, dtype):
    """The scores of rounded readings, not rounded scores."""
    readings = random_readings(6, dtype)
    exact = [Reading(*(kind.double() for kind in reading)) for reading in readings]
    torch.testing.assert_close(scores(name, readings).double(), scores(name, exact).double(), rtol=1e-4, atol=1e-5)


def test_a_gate_that_half_precision_takes_for_certain():
    """sigmoid(6.25) is 1 in bfloat16; the threshold 1 means never, also where exits are certain to any precision."""
    reading = Reading(gate=torch.tensor([6.25, 500.0], dtype=torch.bfloat16))
    assert torch.sigmoid(reading.gate)[0] == 1
    score, _ = score_of("gate", reading, {})
    assert score[0].item() == pytest.approx(1 / (1 + math.exp(-6.25)), rel=1e-12) and score[0] < 1
    assert not ExitRule("gate", 1.0).exits(score).any()
    assert ExitRule("gate", 0.999).exits(score).tolist() == [False, True]


# Rules


@over_criteria
@pytest.mark.parametrize(("min_loops", "interval"), [(1, 1), (3, 1), (1, 2), (4, 2), (3, 3), (LOOPS, 1)])
def test_exits_are_those_of_the_formulas(name, min_loops, interval):
    """At thresholds that lie between the scores."""
    readings, tokens = random_readings(tokens=12), range(12)
    seen = [score for score in scores(name, readings).flatten().tolist() if math.isfinite(score)]
    thresholds = (
        [1, 2]
        if name == "argmax_stability"
        else torch.tensor(seen).double().quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    )
    found = set()
    for threshold in [*thresholds, math.inf, -math.inf, 0.0]:
        loops = exit_loops(ExitRule(name, threshold, min_loops, interval), readings)
        rule = NaiveRule(name, threshold, min_loops, interval)
        assert loops == [naive_exit_loop(rule, naive_readings(readings, token)) for token in tokens]
        found |= set(loops)
    assert found <= {*range(min_loops, LOOPS, interval), LOOPS}
    assert len(found) >= min(2, len(range(min_loops, LOOPS + 1, interval)))


@over_criteria
def test_always_and_never(name):
    always, never = (-math.inf, math.inf) if name in EXITS_ABOVE else (math.inf, -math.inf)
    readings = random_readings(tokens=3)
    for min_loops, interval in itertools.product((1, 4), (1, 2)):
        assert exit_loops(ExitRule(name, always, min_loops, interval), readings) == [min_loops] * 3
        assert exit_loops(ExitRule(name, never, min_loops, interval), readings) == [LOOPS] * 3


@pytest.mark.parametrize(
    ("rule", "reads", "checks"),
    [
        (ExitRule("logit_margin", 1.0), [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8]),
        (ExitRule("entropy", 1.0, 4, 2), [4, 6, 8], [4, 6, 8]),
        (ExitRule("kl", 1.0, 4, 1), [3, 4, 5, 6, 7, 8], [4, 5, 6, 7, 8]),  # one to compare with
        (ExitRule("latent_diff", 1.0, 5, 3), [2, 5, 8], [5, 8]),
        (ExitRule("latent_diff", 1.0, 5, 3, per_sequence=True), [2, 5, 8], [5, 8]),
        (ExitRule("entropy_diff", 1.0, 2, 2), [2, 4, 6, 8], [2, 4, 6, 8]),
        (ExitRule("argmax_stability", 2.0, 5, 1), [3, 4, 5, 6, 7, 8], [5, 6, 7, 8]),
        (ExitRule("argmax_stability", 2.0, 5, 2, per_sequence=True), [1, 3, 5, 7], [5, 7]),  # the mean of whole counts
        (ExitRule("argmax_stability", 1.5, 5, 1), [3, 4, 5, 6, 7, 8], [5, 6, 7, 8]),  # as many as 2
        (ExitRule("argmax_stability", 2.0, 6, 2), [2, 4, 6, 8], [6, 8]),
        (ExitRule("argmax_stability", math.inf, 3, 1), [1, 2, 3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8]),
        (ExitRule("gate", 0.5, 4, 3), [1, 2, 3, 4, 5, 6, 7, 8], [4, 7]),  # a sum over all loops
    ],
    ids=str,
)
def test_loops_that_a_rule_reads(rule, reads, checks):
    """No more than it needs: a reading of logits costs as much as several layers."""
    assert [loop for loop in range(1, LOOPS + 1) if rule.scores_at(loop)] == reads
    assert [loop for loop in range(1, LOOPS + 1) if rule.checks_at(loop)] == checks


def test_published_thresholds():
    published = {"entropy_diff": 1e-3, "kl": 1e-3, "latent_diff": 0.03, "argmax_stability": 5, "gate": 1.0}
    published |= {"minp_kl": 1e-5, "cosine": 1e-3}
    config = tiny_config(exit_gate="raw")
    for name in CRITERIA:
        if name in published:
            assert ExitRule(name).checked(config) == ExitRule(name, published[name])
        else:
            with pytest.raises(ValueError, match=f"'{name}' has no published threshold: pass exit_threshold"):
                ExitRule(name).checked(config)


# What is refused


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "exit_criterion='margin' is not known: choose one of logit_margin, ", {"criterion": "margin"}),
        (ValueError, r"exit_criterion=\['gate'\] is not known", {"criterion": ["gate"]}),
        (ValueError, "exit_criterion='gate' needs a model with an exit gate.* e.g. 'kl'", {"criterion": "gate"}),
        (TypeError, "exit_threshold must be a number, got '0.5'", {"threshold": "0.5"}),
        (TypeError, "exit_threshold must be a number, got True", {"threshold": True}),
        (ValueError, r"exit_threshold=-0.5 is out of range: .* above the threshold", {"threshold": -0.5}),
        (ValueError, r"exit_threshold=-1 .* below the threshold", {"criterion": "kl", "threshold": -1}),
        (ValueError, "exit_threshold=nan is out of range", {"threshold": math.nan}),
        (ValueError, "exit_threshold=1.5 is no probability", {"criterion": "max_prob", "threshold": 1.5}),
        (ValueError, "min_loops=4 is more than the num_loops=3 .*exit_criterion=None", {"min_loops": 4}),
        (ValueError, "min_loops=2 is more than the num_loops=1", {"min_loops": 2, "num_loops": 1}),
        (ValueError, "min_loops must be at least 1, got 0", {"min_loops": 0}),
        (TypeError, "min_loops must be an int, got 1.0", {"min_loops": 1.0}),
        (TypeError, "min_loops must be an int, got True", {"min_loops": True}),
        (ValueError, "exit_interval must be at least 1, got -2", {"exit_interval": -2}),
        (TypeError, "exit_interval must be an int, got '2'", {"exit_interval": "2"}),
        (ValueError, "prompt_loops=4 must be between 1 and num_loops=3", {"prompt_loops": 4}),
        (TypeError, "prompt_loops must be an int, got 2.0", {"prompt_loops": 2.0}),
        (ValueError, "exit_threshold, min_loops without exit_criterion: .*'kl'", {"criterion": None, "min_loops": 2}),
        (
            ValueError,
            "^prompt_loops without exit_criterion: name the criterion",
            {"criterion": None, "threshold": None} | {"prompt_loops": 2},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_rules_are_refused_by_generate(error, message, arguments):
    """Before any pass is run."""
    model = tiny_model(loop_loss="per_loop")
    model.model.forward = None
    rename = {name: f"exit_{name}" for name in ("criterion", "threshold")}
    given = {"criterion": "logit_margin", "threshold": 0.5, **arguments}
    with pytest.raises(error, match=message):
        model.generate(random_ids(1, 3), max_new_tokens=2, **{rename.get(k, k): v for k, v in given.items()})


def test_a_model_whose_residuals_follow_the_run_cannot_exit():
    config = tiny_config(residual_depth="run", residual_scaling="linear")
    with pytest.raises(ValueError, match="residual_depth='run' .* early exit means nothing"):
        ExitRule("kl").checked(config)


@pytest.mark.parametrize(("loop_loss", "warns"), [("terminal", True), ("per_loop", False)])
def test_warning_where_exits_were_not_trained(loop_loss, warns, monkeypatch):
    said = []
    monkeypatch.setattr(generation.logger, "warning_once", said.append)
    tiny_model(loop_loss=loop_loss).generate(random_ids(1, 3), max_new_tokens=2, exit_criterion="kl")
    assert any("loop_loss='terminal'" in text and "not trained" in text for text in said) == warns


def test_what_a_new_criterion_remembers_needs_a_value_to_begin_with(monkeypatch):
    def second(state, memory):
        count = memory.get("readings", 0) + torch.ones(state.shape[:-1])
        return count, {"readings": count}

    monkeypatch.setitem(CRITERIA, "second", Criterion(second, "state", True, 2.0, remembers=("readings",)))
    model = tiny_model(loop_loss="per_loop", num_loops=4, eos_token_id=None)
    arguments = {"exit_criterion": "second", "max_new_tokens": 4, "return_dict_in_generate": True}
    with pytest.raises(ValueError, match="'second' remembers readings, .* put it in exit_criteria.INITIAL"):
        model.generate(random_ids(2, 3), **arguments)
    monkeypatch.setitem(INITIAL, "readings", 0)
    loops = model.generate(random_ids(2, 3), **arguments).token_loops
    assert loops[:, 1:].tolist() == [[2, 2, 2]] * 2


class OwnLoop(LoopedModel):
    def loop(self, *arguments):
        return super().loop(*arguments)


class OwnForward(LoopedForCausalLM):
    def forward(self, *arguments, **named):
        return super().forward(*arguments, **named)


def with_own_loop(model):
    model.model.__class__ = OwnLoop


def with_own_forward(model):
    model.__class__ = OwnForward


def hooked(name: str):
    def hook(model):
        model.get_submodule(name).register_forward_hook(lambda *_: None)

    return hook


@pytest.mark.parametrize(
    "change, obstacle",
    [
        (with_own_loop, "a forward, loop or attention that is not the model's own"),
        (with_own_forward, "a forward, loop or attention that is not the model's own"),
        (hooked("model"), "hooks on the model, its trunk or its attention_sites"),
        (hooked("model.attention_sites.1"), "hooks on the model, its trunk or its attention_sites"),
    ],
)
@pytest.mark.parametrize("way", [{"exit_criterion": "kl"}, {"draft_loops": 1}], ids=["exits", "drafts"])
def test_passes_that_others_changed_are_not_taken_apart(change, obstacle, way):
    model = tiny_model(loop_loss="per_loop")
    change(model)
    model.generate(random_ids(1, 3), max_new_tokens=2)
    with pytest.raises(ValueError, match=obstacle):
        model.generate(random_ids(1, 3), max_new_tokens=2, **way)


def in_mixed_precision(model):
    AcceleratorState._reset_state()  # of other tests in this process
    accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model, evaluation_mode=True)
    AcceleratorState._reset_state()


def unwrapped(model):
    in_mixed_precision(model)
    accelerate.utils.extract_model_from_parallel(model, keep_fp32_wrapper=False)


over_wrappers = pytest.mark.parametrize(
    "wrap",
    [
        in_mixed_precision,
        unwrapped,
        accelerate.cpu_offload,
        lambda model: setattr(model, "forward", torch.compile(model.forward, backend="eager")),
    ],
    ids=["precision", "unwrapped", "offload", "compiled"],
)


@over_wrappers
def test_a_model_whose_forward_is_wrapped_exits(wrap):
    model, ids = tiny_model(loop_loss="per_loop", num_core_layers=1, num_loops=2), random_ids(1, 3)
    expected = model.generate(ids, max_new_tokens=4, exit_criterion="kl", exit_threshold=0.0)
    wrap(model)
    assert "forward" in vars(model)
    found = model.generate(ids, max_new_tokens=4, exit_criterion="kl", exit_threshold=0.0)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("way", [{"exit_criterion": "kl", "exit_threshold": 0.0}, {"draft_loops": 1}])
@pytest.mark.parametrize("together", [False, True])
def test_rows_run_in_the_precision_of_a_wrapper(way, together):
    """As the model's forward does in plain decoding. No token exits at this threshold."""
    model, ids = tiny_model(loop_loss="per_loop", num_loops=2, eos_token_id=None), random_ids(1, 3)
    in_mixed_precision(model)
    expected = model.generate(ids, max_new_tokens=4)
    seen = set()
    model.model.core[0].mlp.down_proj.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    if together:
        (result,) = model.generate_batch(ids.tolist(), max_new_tokens=4, **way).values()
        found = torch.tensor([ids[0].tolist() + result.generated_tokens])
    else:
        found = model.generate(ids, max_new_tokens=4, **way)
    assert torch.equal(found, expected) and seen == {torch.bfloat16}
    assert not torch.is_autocast_enabled("cpu")


def changes_logits(forward):
    @functools.wraps(forward)
    def changed(*arguments, **named):
        outputs = forward(*arguments, **named)
        outputs.logits[..., 5] += 1e4
        return outputs

    return changed


@pytest.mark.parametrize("of_class", [False, True], ids=["instance", "class"])
def test_a_changed_forward_is_refused_with_exits(of_class):
    """Also where functools.wraps hides who wrote it."""
    model, ids = tiny_model(loop_loss="per_loop"), random_ids(1, 3)
    if of_class:

        class Changed(type(model)):
            forward = changes_logits(type(model).forward)

        model.__class__ = Changed
    else:
        model.forward = changes_logits(model.forward)
    assert model.generate(ids, max_new_tokens=3)[0, 3:].tolist() == [5, 5, 5]
    with pytest.raises(ValueError, match="a forward, loop or attention that is not the model's own"):
        model.generate(ids, max_new_tokens=3, exit_criterion="kl")


@over_wrappers
def test_a_changed_forward_is_refused_within_a_wrapper(wrap):
    model, ids = tiny_model(loop_loss="per_loop"), random_ids(1, 3)
    model.forward = changes_logits(model.forward)
    wrap(model)
    with pytest.raises(ValueError, match="a forward, loop or attention that is not the model's own"):
        model.generate(ids, max_new_tokens=3, draft_loops=1)


def offloaded(model):
    """Wrapped as compressed_tensors.offload.module wraps every module: what runs is in an attribute."""
    source = "lambda self, *arguments, **named: self._original_forward_func(self, *arguments, **named)"
    for module in model.modules():
        module._original_forward_func = module.forward.__func__
        forward = eval(source, {"__name__": "compressed_tensors.offload.module"})  # a function of that file
        module.forward = functools.update_wrapper(forward, module._original_forward_func).__get__(module)


def test_offloaded_modules_exit_and_loop_deeper_but_not_with_another_forward():
    model, ids = tiny_model(loop_loss="per_loop", num_loops=2), random_ids(1, 3)
    exits = {"max_new_tokens": 3, "exit_criterion": "kl", "exit_threshold": 0.0}
    expected, deeper = model.generate(ids, **exits), model(ids, num_loops=4).logits
    offloaded(model)
    assert torch.equal(model.generate(ids, **exits), expected)
    assert torch.equal(model(ids, num_loops=4).logits, deeper)
    model._original_forward_func = changes_logits(model._original_forward_func)
    with pytest.raises(ValueError, match="a forward, loop or attention that is not the model's own"):
        model.generate(ids, **exits)


@pytest.mark.parametrize("way", [{}, {"exit_criterion": "kl"}], ids=["plain", "exits"])
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"output_loop_hidden_states": True}, "generate does not return output_loop_hidden_states: leave that out"),
        ({"initial_state": torch.zeros(1, 3, 32)}, "generate does not take initial_state, .*: pass state_seed"),
        ({"exit_rule": ExitRule("kl", 0.0)}, "generate does not take exit_rule, .*: pass exit_criterion"),
        ({"attention_mask": torch.ones(1, 4)}, r"shape \(1, 4\), but the input \(1, 3\)"),
        ({"attention_mask": torch.ones(2, 3)}, r"shape \(2, 3\), but the input \(1, 3\)"),
        ({"attention_mask": torch.ones(3)}, r"shape \(3,\), but the input \(1, 3\)"),
    ],
    ids=["outputs", "state", "rule", "long mask", "mask of more rows", "mask without rows"],
)
def test_what_generate_could_not_give_is_refused(arguments, message, way):
    with pytest.raises(ValueError, match=message):
        tiny_model(loop_loss="per_loop").generate(random_ids(1, 3), max_new_tokens=2, **arguments, **way)
