"""Halting: thresholds against a search over all of them, the dynamic batch against sequences that run alone."""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from eval.halting_calibration import Units, calibrate, exit_loops, never, perplexity_at
from eval.halting_run import at_depth, measure, with_halting, with_token_exits
from modeling_looped.exit_criteria import CRITERIA, ExitRule
from tests.helpers import random_ids, tiny_model


LOOPS = 4
SYSTEMS = {
    "plain": {"exit_gate": "raw"},
    "flt": {"preset": "flt"},
    "parcae": {"preset": "parcae", "num_core_layers": 2, "exit_gate": "normed"},  # prelude, coda, value embeddings
    "huginn": {"preset": "huginn", "num_prelude_layers": 1, "num_coda_layers": 1},
    "ouro": {"preset": "ouro"},
    "final_only": {"preset": "readout_per_loop_final_only"},
    "damping": {"preset": "readout_damping"},
    "inter_loop_norm": {"preset": "readout_inter_loop_norm"},
    "learned": {"position_embedding": "learned"},
    "windows": {"window_pattern": "SL", "sliding_window": 3},
}
over_systems = pytest.mark.parametrize("system", SYSTEMS)


def model_of(system: str):
    return tiny_model(**SYSTEMS[system], tie_word_embeddings=False).double()


def criteria_of(model) -> list[str]:
    return [name for name in CRITERIA if name != "gate" or model.config.exit_gate != "none"]


def direction(name: str) -> int:
    return 1 if CRITERIA[name].exits_above else -1


def naive_scores(model, name: str, ids: torch.Tensor) -> list[torch.Tensor]:
    """The score of every token of one sequence after each loop, from a full run at every depth."""
    scores, before = [], None
    stay, streak = torch.ones(len(ids), dtype=torch.double), torch.zeros(len(ids), dtype=torch.double)
    for depth in range(1, LOOPS + 1):
        outputs = model(ids[None], num_loops=depth, output_loop_hidden_states=True)
        logits, state = outputs.logits[0], outputs.loop_hidden_states[-1][0]
        p = logits.softmax(-1)
        ordered = logits.sort(-1, descending=True).values
        entropy = -(p * p.log()).sum(-1)
        no_score = torch.full((len(ids),), math.inf, dtype=torch.double)
        if name == "gate":
            stay = stay * (1 - model.gate(outputs.loop_hidden_states[-1])[0].sigmoid())
        if before is not None:
            streak = torch.where(p.argmax(-1) == before[0].argmax(-1), streak + 1, 0)
        scores.append(
            {
                "logit_margin": lambda: ordered[:, 0] - ordered[:, 1],
                "max_prob": lambda: p.max(-1).values,
                "entropy": lambda: entropy,
                "entropy_diff": lambda: no_score if before is None else (entropy - before[1]).abs(),
                "kl": lambda: no_score if before is None else (before[0] * (before[0] / p).log()).sum(-1),
                "latent_diff": lambda: (
                    no_score if before is None else (state - before[2]).norm(dim=-1) / state.norm(dim=-1)
                ),
                "argmax_stability": lambda: streak,
                "gate": lambda: 1 - stay,
            }[name]()
        )
        before = (p, entropy, state)
    return scores


def middle_threshold(name: str, scores: torch.Tensor) -> float:
    """Between scores, so that rounding decides nothing; sequences halt at several loops."""
    values = scores[:-1][scores[:-1].isfinite()].unique()
    middle = len(values) // 2
    return (values[middle - 1] + values[middle]).item() / 2


@over_systems
@torch.no_grad()
def test_a_dynamic_batch_is_each_sequence_alone(system):
    model, rows = model_of(system), random_ids(5, 9)
    measured = measure(model, rows, LOOPS, criteria_of(model), batch_size=2)
    depths_seen = set()
    for name, min_loops in itertools.product(criteria_of(model), (1, 2)):
        rule = ExitRule(name, middle_threshold(name, measured.sequences().scores[name]), min_loops)
        scored = with_halting(model, rows, rule, LOOPS, batch_size=3)
        for row, ids in enumerate(rows):
            scores = naive_scores(model, name, ids[:-1])
            torch.testing.assert_close(measured.scores[name][:, row], torch.stack(scores), atol=1e-8, rtol=1e-6)
            depth = min_loops
            while depth < LOOPS and not direction(name) * scores[depth - 1].mean() >= direction(name) * rule.threshold:
                depth += 1
            logits = model(ids[None, :-1], num_loops=depth).logits[0]
            assert scored.loops[row] == depth
            torch.testing.assert_close(scored.losses[row], F.cross_entropy(logits, ids[1:], reduction="none"))
            depths_seen.add(depth)
    assert len(depths_seen) > 2


@over_systems
@torch.no_grad()
def test_losses_of_one_pass_are_those_of_each_depth(system):
    model, rows = model_of(system), random_ids(3, 8)
    losses = measure(model, rows, LOOPS, ["entropy"], batch_size=2).losses
    for depth in range(1, LOOPS + 1):
        torch.testing.assert_close(at_depth(model, rows, depth, batch_size=2).losses, losses[depth - 1])


def random_units(name: str, seed: int, ties: bool) -> Units:
    """Losses that fall and rise over the loops, and scores that need not be monotone."""
    generator = torch.Generator().manual_seed(seed)
    losses = torch.rand(LOOPS, 12, generator=generator, dtype=torch.double) * 0.2 + 2
    scores = torch.rand(LOOPS, 12, generator=generator, dtype=torch.double)
    if ties:
        scores = (scores * 4).round() / 4
    if CRITERIA[name].compares and not CRITERIA[name].exits_above:
        scores[0] = math.inf
    return Units(losses, {name: scores})


@pytest.mark.parametrize("name", CRITERIA)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("min_loops", [1, 2, 3])
def test_the_threshold_is_the_cheapest_within_the_budget(name, ties, min_loops):
    found = 0
    for seed, budget in itertools.product(range(8), (0.0, 0.005, 0.02, 0.5)):
        units = random_units(name, seed, ties)
        losses, scores = units.losses, units.scores[name]
        limit = (1 + budget) * losses[-1].mean().exp().item()

        def run(threshold):
            """Each unit by itself: (mean loops, perplexity)."""
            loops, lost = 0, 0.0
            for unit in range(losses.shape[1]):
                depth = min_loops
                while depth < LOOPS:
                    score = scores[depth - 1, unit].item()
                    unreachable = name == "gate" and threshold == 1
                    if not unreachable and direction(name) * score >= direction(name) * threshold:
                        break
                    depth += 1
                loops, lost = loops + depth, lost + losses[depth - 1, unit].item()
            return loops / losses.shape[1], math.exp(lost / losses.shape[1])

        candidates = {value for value in scores.flatten().tolist() if math.isfinite(value)} | {never(name), 1 - 1e-15}
        results = [run(threshold) for threshold in candidates]
        cheapest = min(loops for loops, perplexity in results if perplexity <= limit + 1e-12)
        threshold = calibrate(name, units, budget, min_loops)
        loops, perplexity = run(threshold)
        assert perplexity <= limit + 1e-12 and loops == cheapest
        chosen = exit_loops(ExitRule(name, threshold, min_loops), scores)
        assert chosen.double().mean().item() == loops
        assert perplexity_at(chosen, losses) == pytest.approx(perplexity)
        found += 1 < loops < LOOPS
    assert found > 3


@torch.no_grad()
def test_token_exits_are_measured_on_what_generate_would_see():
    model, rows = model_of("plain"), random_ids(2, 7)
    measured = measure(model, rows, LOOPS, ["entropy"], batch_size=2)
    rule = ExitRule("entropy", middle_threshold("entropy", measured.tokens().scores["entropy"]))
    scored = with_token_exits(model, rows, rule, LOOPS, batch_size=1)
    assert 1 < scored.loops.double().mean() < LOOPS
    for row, ids in enumerate(rows):  # token after token, on a cache
        cache = None
        for place in range(len(ids) - 1):
            outputs = model(ids[None, place : place + 1], past_key_values=cache, num_loops=LOOPS, exit_rule=rule)
            cache = outputs.past_key_values
            assert outputs.token_loops.item() == scored.loops[row, place]
            loss = F.cross_entropy(outputs.logits[0], ids[place + 1 : place + 2])
            torch.testing.assert_close(scored.losses[row, place], loss)
