"""Halting: thresholds against a search over all of them, the dynamic batch against sequences that run alone."""

import itertools
import json
import math
import os
import random
import re
import shutil

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache

from looped_eval.common.model_folder import joined_tokens, unlearned_start
from looped_eval.halting import command as halting
from looped_eval.halting import measuring
from looped_eval.halting.calibration import (
    Units,
    calibrate,
    calibrate_loops,
    exit_loops,
    least_loops,
    never,
    perplexity_at,
)
from looped_eval.halting.scoring import at_depth, measure, with_sequence_exits, with_token_exits
from looped_recipes.common.flops import forward_flops_per_token, sizes
from looped_recipes.data.shards import prepare
from looped_recipes.data.tokenizers import mark_documents
from looped_recipes.engine.validation import validate
from looped_recipes.settings.recipe import DataConfig, recipe_of_run
from modeling_looped import LoopedConfig, LoopedForCausalLM
from modeling_looped.exit_criteria import CRITERIA, Criterion, ExitRule
from tests.helpers import quick_and_slow, random_ids, run_of, run_of_documents, tiny_model, tiny_tokenizer


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


class Depth:
    """One sequence after a full run at one depth."""

    def __init__(self, model, ids: torch.Tensor, depth: int):
        outputs = model(ids[None], num_loops=depth, output_loop_hidden_states=True)
        self.logits, self.state = outputs.logits[0], outputs.loop_hidden_states[-1][0]
        self.p = self.logits.softmax(-1)
        self.entropy = -(self.p * self.p.log()).sum(-1)
        self.best = self.logits.argmax(-1)
        self.leaves = None if model.exit_gate is None else model.gate(self.state).sigmoid()


def naive_score(name: str, depths: list[Depth]) -> torch.Tensor:
    """The score of every token after the last of these depths, from the definitions."""
    now, before = depths[-1], depths[-2] if len(depths) > 1 else None
    if name == "logit_margin":
        ordered = now.logits.sort(-1, descending=True).values
        return ordered[:, 0] - ordered[:, 1]
    if name == "max_prob":
        return now.p.max(-1).values
    if name == "entropy":
        return now.entropy
    if name == "gate":
        return 1 - math.prod(1 - depth.leaves for depth in depths)
    if name == "argmax_stability":
        same = torch.stack([depth.best == now.best for depth in depths[::-1]])  # latest first, itself included
        return same.double().cumprod(0).sum(0) - 1
    if before is None:
        return torch.full((len(now.p),), math.inf, dtype=torch.double)
    if name == "entropy_diff":
        return (now.entropy - before.entropy).abs()
    if name == "kl":
        return (before.p * (before.p / now.p).log()).sum(-1)
    if name == "minp_kl":
        likely = (torch.where(of.p >= 0.1 * of.p.amax(-1, True), of.p, 1 / of.p.shape[-1]) for of in (before, now))
        past, new = (p / p.sum(-1, True) for p in likely)
        return (past * (past / new).log()).sum(-1)
    if name == "cosine":
        return 1 - torch.cosine_similarity(now.state, before.state, dim=-1)
    return (now.state - before.state).norm(dim=-1) / now.state.norm(dim=-1)


def naive_scores(model, name: str, ids: torch.Tensor) -> list[torch.Tensor]:
    depths = [Depth(model, ids, depth) for depth in range(1, LOOPS + 1)]
    return [naive_score(name, depths[:depth]) for depth in range(1, LOOPS + 1)]


def middle_threshold(name: str, scores: torch.Tensor) -> float:
    """Between scores, so that rounding decides nothing; sequences halt at several loops."""
    values = scores[:-1][scores[:-1].isfinite()].unique()
    middle = len(values) // 2
    return (values[middle - 1] + values[middle]).item() / 2


@pytest.mark.parametrize("system", quick_and_slow(SYSTEMS, "final_only"))
@torch.no_grad()
def test_a_dynamic_batch_is_each_sequence_alone(system):
    model, rows = model_of(system), random_ids(5, 9)
    measured = measure(model, rows, LOOPS, criteria_of(model), batch_size=2)
    depths_seen = set()
    depths_of_rows = [[Depth(model, ids[:-1], depth) for depth in range(1, LOOPS + 1)] for ids in rows]
    for name, min_loops in itertools.product(criteria_of(model), (1, 2)):
        rule = ExitRule(name, middle_threshold(name, measured.sequences().scores[name]), min_loops)
        scored = with_sequence_exits(model, rows, rule, LOOPS, batch_size=3)
        for row, (ids, depths) in enumerate(zip(rows, depths_of_rows)):
            scores = [naive_score(name, depths[:depth]) for depth in range(1, LOOPS + 1)]
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
@pytest.mark.parametrize("name", ["logit_margin", "latent_diff"])
@torch.no_grad()
def test_rows_that_never_halt_run_to_their_own_depths(system, name):
    model, ids, depths = model_of(system), random_ids(3, 6), [2, 4, 3]
    rule = ExitRule(name, never(name), per_sequence=True)
    found, expected = model(ids, num_loops=depths, exit_rule=rule), model(ids, num_loops=depths)
    torch.testing.assert_close(found.logits, expected.logits)
    assert found.token_loops.tolist() == [[depth] * 6 for depth in depths]


@pytest.mark.parametrize("name", ["cache", "attention_mask", "output_hidden_states"])
def test_what_cannot_go_with_rows_that_halt_is_refused(name):
    given = {name: {"cache": DynamicCache(), "attention_mask": torch.tensor([[0, 1, 1]])}.get(name, True)}
    with pytest.raises(ValueError, match=f"exit_rule .* does not go with (an )?{name}( with padding)?:"):
        model_of("plain")(random_ids(1, 3), exit_rule=ExitRule("kl", 0.1, per_sequence=True), **given)


@pytest.mark.parametrize("name", ["latent_diff", "kl", "entropy_diff"])
@torch.no_grad()
def test_rows_of_one_token_halt_where_tokens_exit(name):
    """At an interval both compare with their last check."""
    model, ids = model_of("plain"), random_ids(16, 1)
    for threshold in (1e-3, 1e-2, 0.1, 0.3):
        row, token = (ExitRule(name, threshold, 2, 2, per_sequence=each) for each in (True, False))
        found, expected = (model(ids, num_loops=8, exit_rule=rule).token_loops for rule in (row, token))
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("min_loops", "interval"), [(1, 1), (5, 1), (3, 2)])
@torch.no_grad()
def test_rows_halt_by_the_mean_of_how_long_their_tokens_are_stable(min_loops, interval):
    """Counted from the first loop on, also where the first check is far beyond the threshold."""
    model, ids = model_of("plain"), random_ids(12, 6)
    count, last, expected = torch.zeros(12, 6), torch.full((12, 6), -1), torch.full((12,), 8)
    for loops in (k for k in range(1, 8) if (k - min_loops) % interval == 0):
        best = model(ids, num_loops=loops).logits.argmax(-1)
        count, last = torch.where(best == last, count + 1, 0), best
        expected = torch.where((expected == 8) & (count.mean(1) >= 1.5) & (loops >= min_loops), loops, expected)
    rule = ExitRule("argmax_stability", 1.5, min_loops, interval, per_sequence=True)
    assert torch.equal(model(ids, num_loops=8, exit_rule=rule).token_loops[:, 0], expected)
    assert len(expected.unique()) > 1


def test_rows_halt_under_a_mask_that_hides_nothing():
    """As every tokenizer gives one."""
    model, ids, rule = model_of("plain"), random_ids(2, 5), ExitRule("max_prob", 0.05, per_sequence=True)
    found = model(ids, attention_mask=torch.ones_like(ids), exit_rule=rule)
    assert torch.equal(found.logits, model(ids, exit_rule=rule).logits)


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
    if CRITERIA[name].remembers and not CRITERIA[name].exits_above:
        scores[0] = math.inf
    return Units(losses, {name: scores})


def run_each(units: Units, name: str, threshold: float, min_loops: int) -> tuple[float, float]:
    """Mean loops and perplexity, unit after unit."""
    losses, scores = units.losses.T.tolist(), units.scores[name].T.tolist()
    loops, lost = 0, 0.0
    for unit_losses, unit_scores in zip(losses, scores):
        depth = min_loops
        while depth < LOOPS:
            unreachable = name == "gate" and threshold == 1
            if not unreachable and direction(name) * unit_scores[depth - 1] >= direction(name) * threshold:
                break
            depth += 1
        loops, lost = loops + depth, lost + unit_losses[depth - 1]
    return loops / len(losses), math.exp(lost / len(losses))


@pytest.mark.parametrize("name", CRITERIA)
@pytest.mark.parametrize("ties", [False, True])
def test_the_threshold_is_the_cheapest_within_the_budget(name, ties):
    between = 0
    for seed, min_loops, budget in itertools.product(range(3), (1, 2, 3), (0.0, 0.005, 0.02, 0.5)):
        units = random_units(name, seed, ties)
        scores = units.scores[name]
        limit = (1 + budget) * units.losses[-1].mean().exp().item() + 1e-12
        candidates = {value for value in scores.flatten().tolist() if math.isfinite(value)} | {never(name), 1 - 1e-15}
        results = [run_each(units, name, threshold, min_loops) for threshold in candidates]
        cheapest = min(loops for loops, found in results if found <= limit)
        threshold = calibrate(name, units, budget, min_loops)
        loops, found = run_each(units, name, threshold, min_loops)
        assert found <= limit and loops == cheapest
        chosen = exit_loops(ExitRule(name, threshold, min_loops), scores)
        assert chosen.double().mean().item() == loops
        assert perplexity_at(chosen, units.losses) == pytest.approx(found)
        between += min_loops < loops < LOOPS
    assert between > 3


@pytest.mark.parametrize("exits_above", [True, False])
def test_adding_a_constant_to_a_criterion_of_ones_own_moves_its_threshold_alone(exits_above, monkeypatch):
    """Log-odds may all be negative."""
    own = Criterion(None, "state", exits_above, least=-math.inf)
    monkeypatch.setitem(CRITERIA, "log_odds", own)
    units = random_units("log_odds", 0, ties=False)
    for constant in (-0.5, -3.0):
        moved = Units(units.losses, {"log_odds": units.scores["log_odds"] + constant})
        assert least_loops("log_odds", moved, 1) == least_loops("log_odds", units, 1)
        for choose, wanted in ((calibrate, 0.02), (calibrate_loops, 1.5), (calibrate_loops, 3.0)):
            threshold = choose("log_odds", units, wanted, 1)
            assert threshold is not None and math.isfinite(threshold)
            assert choose("log_odds", moved, wanted, 1) == pytest.approx(threshold + constant, abs=1e-12)
            before = run_each(units, "log_odds", threshold, 1)
            assert run_each(moved, "log_odds", choose("log_odds", moved, wanted, 1), 1) == before


@pytest.mark.parametrize("name", CRITERIA)
@pytest.mark.parametrize("ties", [False, True])
def test_the_threshold_for_mean_loops_is_the_nearest_that_is_not_above(name, ties):
    found_some = missed_some = 0
    needs_two = bool(CRITERIA[name].remembers) and not CRITERIA[name].exits_above
    for seed, min_loops, wanted in itertools.product(range(3), (1, 2, 3), (1, 1.5, 2, 2.25, 3, 3.7)):
        if wanted < min_loops:
            continue
        units = random_units(name, seed, ties)
        candidates = {value for value in units.scores[name].flatten().tolist() if math.isfinite(value)} | {1 - 1e-15}
        loops_of = {threshold: run_each(units, name, threshold, min_loops)[0] for threshold in candidates}
        within = [loops for loops in loops_of.values() if loops <= wanted]
        threshold = calibrate_loops(name, units, wanted, min_loops)
        if not within:
            assert threshold is None and least_loops(name, units, min_loops) == pytest.approx(min(loops_of.values()))
            missed_some += 1
            continue
        assert run_each(units, name, threshold, min_loops)[0] == max(within)
        chosen = exit_loops(ExitRule(name, threshold, min_loops), units.scores[name])
        assert chosen.double().mean().item() == max(within)
        found_some += 1
    assert found_some > 20 and (missed_some > 0) == needs_two


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


# The command


def make_folder(tmp_path, **fields):
    """A saved model with a tokenizer, and 48 rows of 11 tokens that it wrote at full depth, so that depth pays."""
    model = tiny_model(vocab_size=30, num_loops=LOOPS, loop_loss="per_loop", eos_token_id=None, **fields)
    model.save_pretrained(tmp_path / "final")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "final")
    ids = model.generate(random_ids(48, 1, 30), max_new_tokens=10, do_sample=True, top_k=0)
    (tmp_path / "text.txt").write_text(" ".join(tokenizer.batch_decode(ids)))
    return tmp_path / "final"


def command(folder, *options) -> list[str]:
    text = str(folder.parent / "text.txt")
    sizes = ["--sequences", "12", "--length", "10", "--batch-size", "5", "--repeats", "1"]
    return [str(folder), text, *sizes, "--output", str(folder.parent), *options]


def test_the_command_measures_and_writes(tmp_path, capsys):
    folder = make_folder(tmp_path)
    before = LoopedForCausalLM.from_pretrained(folder)  # what another calibration, or other exits, left in the folder
    vars(before.generation_config).update(exit_selection="after", exit_interval=2, prompt_loops=1, draft_loops="auto")
    before.generation_config.save_pretrained(folder)
    (tmp_path / "halting.json").write_text('{"command": "looped halting that"}')
    args = halting.parse(command(folder, "--budget", "0.05", "--min-loops", "2", "--write", "entropy"))
    halting.run(args)
    replaced, first, *_ = (printed := capsys.readouterr().out).splitlines()
    assert "halting.json, of `looped halting that`, will be replaced" in replaced
    amount = f"12 rows to calibrate on and 12 to measure, of 10 tokens, by 9 of 10 criteria in {LOOPS} loops"
    assert first == amount  # before what takes minutes
    assert "gate is left out" in printed and "fixed depth" in printed
    content = json.loads((tmp_path / "halting.json").read_text())
    assert content["command"] == args.command  # so that the same again says nothing of what it replaces
    result = content["result"]
    assert (tmp_path / "halting.svg").read_text().startswith("<svg") and (tmp_path / "halting.html").is_file()
    assert [row["loops"] for row in result["fixed"]] == list(range(1, LOOPS + 1))
    names = [name for name in CRITERIA if name != "gate"]
    for table in (result["halting"], result["tokens"]):
        assert [row["criterion"] for row in table] == names
        for row in table:
            assert 2 <= row["mean_loops"] <= LOOPS and row["calibrated_ratio"] <= 1.05 + 1e-6
            assert row["ratio"] == pytest.approx(row["perplexity"] / result["fixed"][-1]["perplexity"], rel=1e-4)

    row = next(row for row in result["tokens"] if row["criterion"] == "entropy")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.exit_threshold == pytest.approx(row["threshold"], rel=1e-5)
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    written = model.generate(random_ids(3, 5, 30), **settings)
    plain = LoopedForCausalLM(model.config)
    plain.load_state_dict(model.state_dict())
    given = {"exit_criterion": "entropy", "exit_threshold": model.generation_config.exit_threshold, "min_loops": 2}
    asked = plain.eval().generate(random_ids(3, 5, 30), **settings, **given)
    assert written.sequences.equal(asked.sequences) and written.token_loops.equal(asked.token_loops)
    assert written.token_loops.double().mean() < LOOPS


@torch.no_grad()
def test_the_command_measures_at_equal_loops(tmp_path, capsys):
    """Alone, without budgets; a criterion that compares two loops has at least two."""
    folder = make_folder(tmp_path)
    criteria = ["--criteria", "entropy", "kl"]
    halting.run(halting.parse(command(folder, *criteria, "--mean-loops", "3", "1.5", "--write")))
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "halting.json").read_text())
    result, notes = content["result"], content["notes"]
    assert result["halting"] == result["tokens"] == [] and (tmp_path / "halting.svg").read_text().startswith("<svg")
    for unit in ("sequences", "tokens"):
        rows = result["at_mean_loops"][unit]
        assert [(row["criterion"], row["wanted_loops"]) for row in rows] == [
            ("entropy", 1.5), ("entropy", 3.0), ("kl", 3.0)
        ]  # fmt: skip
        note = f"at 1.5 mean loops of {unit} kl is left out: the least that a threshold reaches is 2"
        assert note in notes and f"note: {note}" in printed
        assert "loops asked for" in (tmp_path / "halting.html").read_text() and "wanted loops" in printed

    args = halting.parse(command(folder))  # what it says of tokens is what they give, one pass a row
    calibration, rows = halting.two_slices(args, folder, LoopedConfig.from_pretrained(folder))
    model = LoopedForCausalLM.from_pretrained(folder)
    row = result["at_mean_loops"]["tokens"][1]
    rule = ExitRule("entropy", row["threshold"])
    scores = [torch.stack(naive_scores(model, "entropy", ids[:-1])) for ids in calibration]  # of passes without exits
    before = torch.cat([exit_loops(rule, each) for each in scores])
    after = torch.cat([model(ids[None, :-1], exit_rule=rule).token_loops for ids in rows])
    for loops, key in ((before, "calibrated_loops"), (after, "mean_loops")):
        assert loops.double().mean().item() == pytest.approx(row[key], rel=1e-4)
    assert row["calibrated_loops"] <= 3 and row["perplexity"] > 0 and row["predicted_speedup"] < LOOPS
    at_three = [row for row in result["at_mean_loops"]["tokens"] if row["wanted_loops"] == 3]
    best = min(at_three, key=lambda row: row["calibrated_ratio"])
    if best["predicted_speedup"] > 1:
        assert model.generation_config.exit_criterion == best["criterion"]
        assert model.generation_config.exit_threshold == pytest.approx(best["threshold"], rel=1e-5)
    assert f"Calibrated to 3 mean loops, {best['criterion']} has the lowest perplexity there" in printed
    assert "; a fixed depth of 3 has " in printed and "; a fixed depth of 1.5" not in printed

    with pytest.raises(ValueError, match="at 1.5 mean loops of tokens kl is left out: .* is 2. Raise --mean-loops"):
        halting.run(halting.parse(command(folder, "--criteria", "kl", "--mean-loops", "1.5")))


def test_mean_loops_beside_budgets(tmp_path, capsys):
    folder = make_folder(tmp_path)
    halting.run(halting.parse(command(folder, "--criteria", "entropy", "--budget", "0.05", "--mean-loops", "2")))
    result = json.loads((tmp_path / "halting.json").read_text())["result"]
    assert [row["budget"] for rows in (result["halting"], result["tokens"]) for row in rows] == [0.05, 0.05]
    assert [row["wanted_loops"] for rows in result["at_mean_loops"].values() for row in rows] == [2, 2]
    printed = capsys.readouterr().out
    assert "within 5 %" in printed and "Calibrated to 2 mean loops, entropy has" in printed


def test_the_command_reads_what_the_run_held_out(tmp_path, capsys):
    """Rows of its validation split, every token at most once, of which none is a start token."""
    folder = make_folder(tmp_path)
    words = " ".join(random.Random(0).choices("abcdefghij", k=700))
    run_of(tmp_path, folder, words, joined_by=" ")
    options = command(folder, "--criteria", "logit_margin")
    del options[1]
    halting.run(halting.parse(options))
    read = f"validation split of {tmp_path} ({tmp_path / 'held_out.jsonl'})"
    assert read in capsys.readouterr().out
    assert json.loads((tmp_path / "halting.json").read_text())["text"] == read
    args = halting.parse([*options, "--num-loops", "4"])
    slices = halting.two_slices(args, folder, None)
    rows = [words[start : start + 21] for start in range(0, len(words) - 21, 22)]
    found = tiny_tokenizer().batch_decode(torch.cat(slices), clean_up_tokenization_spaces=False)
    assert len(set(found)) == len(found) == 24 and set(found) <= set(rows) and found != rows[:24]

    with pytest.raises(ValueError, match="leave out --tokenizer, or name a text"):
        halting.run(halting.parse([*options, "--tokenizer", str(folder)]))
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="in no training run.*name a text"):
        halting.run(halting.parse(options))


@pytest.mark.parametrize("stride", [None, 7], ids=["apart", "a token in common"])
def test_fixed_depths_are_those_of_the_runs_validation(tmp_path, stride):
    """Over the same rows, which keep their start tokens as what is read and not as what is to be predicted."""
    folder = make_folder(tmp_path)
    stream = run_of_documents(folder, stride=stride)
    recipe = recipe_of_run(tmp_path)
    validation = prepare(recipe.data).validation
    count = recipe.evaluation.rows = len(validation)
    args = halting.parse([str(folder), "--sequences", str(count // 2)])
    halting.check(args)
    rows = torch.cat(halting.two_slices(args, folder, None))
    assert sorted(rows.tolist()) == sorted(stream.unfold(0, 8, stride or 8).tolist())
    model = LoopedForCausalLM.from_pretrained(folder)
    logged = validate(Accelerator(cpu=True), model, model.config, recipe, validation)
    learned = measuring.learned_targets(rows, args.unlearned)
    for depth in range(1, LOOPS + 1):
        losses = at_depth(model, rows, depth, batch_size=5).losses[learned]
        assert losses.mean().item() == pytest.approx(logged[f"validation/loss_at_{depth}"], rel=1e-5)


def test_a_split_too_short_for_rows_as_trained_is_read_in_shorter_ones(tmp_path, capsys, monkeypatch):
    folder = make_folder(tmp_path)
    stream = run_of_documents(folder)  # rows of 8 tokens
    monkeypatch.setattr(halting, "LENGTH", 2)
    for given, length in (([], 2), (["--length", "3"], 3)):
        args = halting.parse([str(folder), *given])
        halting.check(args)
        monkeypatch.setattr(halting, "LEAST_SEQUENCES", len(stream) // 4 // 2)  # of 4 tokens at the most
        assert halting.two_slices(args, folder, None)[0].shape[1] == length + 1
    assert "note: --length 2 instead of 7, as in training: the validation split" in capsys.readouterr().out
    args = halting.parse([str(folder), "--length", "7"])
    halting.check(args)
    with pytest.raises(ValueError, match="fewer or shorter rows .--length."):
        halting.two_slices(args, folder, None)


def test_a_named_text_needs_no_recipe_that_is_understood(tmp_path):
    folder = make_folder(tmp_path)
    run_of_documents(folder)
    (tmp_path / "recipe.yaml").write_text("a_section_of_another_version: {}\n")
    args = halting.parse([str(folder), "a text"])
    halting.check(args)
    assert args.length == 128


@torch.no_grad()
def test_start_tokens_count_in_nothing_that_the_command_says(tmp_path, capsys):
    """Against every token by itself; a perplexity that is far from the last validation is said."""
    folder = make_folder(tmp_path)
    run_of_documents(folder)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "validation/loss_at_4": 1.0}\n')
    options = ["--criteria", "entropy", "--mean-loops", "2.5", "--sequences", "8", "--repeats", "1"]
    args = halting.parse([str(folder), *options, "--output", str(tmp_path)])
    halting.run(args)
    content = json.loads((tmp_path / "halting.json").read_text())
    assert content["length"] == 7 and "unlearned" not in content
    calibration, rows = halting.two_slices(args, folder, None)
    start = tiny_tokenizer().bos_token_id
    model, row = LoopedForCausalLM.from_pretrained(folder), content["result"]["at_mean_loops"]["tokens"][0]
    found = {"calibrated_loops": [], "mean_loops": [], "perplexity": []}
    for ids in calibration:  # each token exits by its scores in passes of fixed depth
        entropies = torch.stack(naive_scores(model, "entropy", ids[:-1]))[:, ids[1:] != start]
        found["calibrated_loops"] += exit_loops(ExitRule("entropy", row["threshold"]), entropies).tolist()
    targets, losses = calibration[:, 1:], []
    for depth in range(1, LOOPS + 1):
        logits = model(calibration[:, :-1], num_loops=depth).logits
        losses.append(F.cross_entropy(logits.mT, targets, ignore_index=start).item())
    ratios = [math.exp(loss - losses[-1]) for loss in losses]
    assert [fixed["calibrated_ratio"] for fixed in content["result"]["fixed"]] == pytest.approx(ratios, rel=1e-5)
    speedups = [fixed["predicted_speedup"] for fixed in content["result"]["fixed"]]
    flops = [forward_flops_per_token(model.config, 7, depth) for depth in range(1, LOOPS + 1)]
    assert speedups == pytest.approx([flops[-1] / each for each in flops], rel=1e-5)
    changes = []
    for ids in rows:  # and here what later tokens see are its exits
        outputs, kept = model(ids[None, :-1], exit_rule=ExitRule("entropy", row["threshold"])), ids[1:] != start
        found["mean_loops"] += outputs.token_loops[0][kept].tolist()
        found["perplexity"] += F.cross_entropy(outputs.logits[0][kept], ids[1:][kept], reduction="none").tolist()
        full = F.cross_entropy(model(ids[None, :-1]).logits[0][kept], ids[1:][kept], reduction="sum")
        changes.append([sum(found["perplexity"][-kept.sum() :]) - full.item(), kept.sum().item()])
    means = {key: sum(values) / len(values) for key, values in found.items()}
    assert row["calibrated_loops"] == pytest.approx(means["calibrated_loops"], rel=1e-4)
    assert row["mean_loops"] == pytest.approx(means["mean_loops"], rel=1e-4)
    assert row["perplexity"] == pytest.approx(math.exp(means["perplexity"]), rel=1e-4)
    draws = np.random.default_rng(0).choice(changes, (4000, 8)).sum(1)  # sequences, drawn again
    spread = row["ratio"] * (draws[:, 0] / draws[:, 1]).std() * math.sqrt(8 / 7)
    assert row["ratio_error"] == pytest.approx(spread, rel=0.05)
    flops = [measuring.flops_per_token(model.config, 7, *of) for of in ((4, 1), 2 * (means["calibrated_loops"],))]
    assert row["calibrated_speedup"] == pytest.approx(flops[0] / flops[1], rel=1e-4)  # it is read after each loop
    full = content["result"]["fixed"][-1]["perplexity"]
    assert f"note: at 4 loops perplexity is {full:.2f}, but 2.72 in the last validation" in capsys.readouterr().out


def test_documents_of_a_text_begin_as_prompts_do(tmp_path):
    tokenizer = tiny_tokenizer()
    assert unlearned_start(tokenizer) is None  # it does not begin prompts
    mark_documents(tokenizer, DataConfig(source="", start_token="<s>"))
    start = unlearned_start(tokenizer)
    assert start == tokenizer.bos_token_id
    documents = [{"text": "a b"}, {"text": "c"}]
    expected = tokenizer("a b").input_ids + [2] + tokenizer("c").input_ids + [2]
    assert list(joined_tokens(documents, tokenizer, start)) == expected
    tokenizer.bos_token = tokenizer.eos_token  # one token for both, which the end of each document has
    assert unlearned_start(tokenizer) is None


@torch.no_grad()
def test_what_the_command_says_is_what_each_sequence_alone_gives(tmp_path, monkeypatch):
    def timed(functions, *_):
        """A second for a loop, and half of one for exits."""
        seconds = {key: key if isinstance(key, int) else 0.5 for key in functions}
        return seconds, {key: function() for key, function in functions.items()}

    monkeypatch.setattr(measuring, "least_seconds", timed)
    folder = make_folder(tmp_path)
    args = halting.parse(command(folder, "--criteria", "logit_margin", "--budget", "0.5"))
    halting.run(args)
    result = json.loads((tmp_path / "halting.json").read_text())["result"]
    calibration, rows = halting.two_slices(args, folder, LoopedConfig.from_pretrained(folder))
    model = AutoModelForCausalLM.from_pretrained(folder)
    row, losses, loops = result["halting"][0], [], []
    for ids in rows:
        for depth in range(1, LOOPS + 1):
            logits = model(ids[None, :-1], num_loops=depth).logits[0]
            best = logits.topk(2).values
            if (best[:, 0] - best[:, 1]).mean() >= row["threshold"]:
                break
        losses.append(F.cross_entropy(logits, ids[1:]))
        loops.append(depth)
    assert row["mean_loops"] == pytest.approx(sum(loops) / len(loops), rel=1e-4) and 1 < row["mean_loops"] < LOOPS
    assert row["perplexity"] == pytest.approx(torch.stack(losses).mean().exp().item(), rel=1e-4)
    full = torch.stack([F.cross_entropy(model(ids[None, :-1]).logits[0], ids[1:]) for ids in rows]).mean().exp()
    assert result["fixed"][-1]["perplexity"] == pytest.approx(full.item(), rel=1e-4)
    speedups = [fixed["speedup"] for fixed in result["fixed"]]
    assert speedups == pytest.approx([LOOPS / k for k in range(1, LOOPS + 1)], rel=1e-4)
    assert row["measured_speedup"] == LOOPS / 0.5


def test_as_many_sequences_as_are_held_out(tmp_path):
    """Where nobody says how many; a number that is said is kept to."""
    folder = make_folder(tmp_path)
    run_of(tmp_path, folder, " ".join(random.Random(0).choices("abcdefghij", k=300)), joined_by=" ")
    options = [str(folder), "--length", "10", "--output", str(tmp_path), "--num-loops", "4"]
    args = halting.parse(options)
    slices = halting.two_slices(args, folder, None)
    assert args.sequences == 300 // 11 // 2 == 13 and [len(rows) for rows in slices] == [13, 13]
    with pytest.raises(ValueError, match="holds 300 tokens, fewer than 28 rows of 11: ask for fewer or shorter"):
        halting.two_slices(halting.parse([*options, "--sequences", "14"]), folder, None)
    with pytest.raises(ValueError, match="holds 300 tokens, fewer than 16 rows of 21"):
        halting.two_slices(halting.parse([*options, "--length", "20"]), folder, None)


class Counting:
    """A tokenizer that gives every word a token of its own, so that tokens tell where they come from."""

    eos_token_id = None

    def __init__(self):
        self.seen = 0

    def __call__(self, text, add_special_tokens, verbose):
        words = text.split()
        self.seen += len(words)
        return {"input_ids": list(range(self.seen - len(words), self.seen))}


def test_slices_do_not_overlap(tmp_path):
    (tmp_path / "text.txt").write_text("word " * 500)
    rows = halting.text_rows([str(tmp_path / "text.txt")], Counting(), 20, 9, seed=0)
    assert rows.shape == (20, 9) and len(rows.unique()) == 180
    assert not rows.flatten().equal(torch.arange(180)) and rows[:, 0].sort().values.equal(torch.arange(0, 180, 9))
    assert not rows.equal(halting.text_rows([str(tmp_path / "text.txt")], Counting(), 20, 9, seed=1))


def test_texts_are_joined_by_the_end_token():
    tokenizer = tiny_tokenizer()
    documents = iter([{"text": "a b"}, {"text": "c"}, {"text": "d"}])
    end, ids = tokenizer.eos_token_id, tokenizer("a b c", add_special_tokens=False)["input_ids"]
    found = list(itertools.islice(joined_tokens(documents, tokenizer), 5))
    assert end is not None and found == [*ids[:2], end, ids[2], end] and next(documents) == {"text": "d"}
    tokenizer.eos_token = None
    assert list(joined_tokens([{"text": "a b"}, {"text": "c"}], tokenizer)) == ids


def test_every_text_is_read(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 200)
    rows = halting.text_rows([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], tiny_tokenizer(), 20, 10, seed=0)
    assert (rows == 4).sum() == (rows == 5).sum() == 100


@pytest.mark.parametrize("short", range(3))
def test_a_text_that_is_too_short_for_its_share_is_named(tmp_path, short):
    """Longer texts do not fill it up."""
    texts, shares = [tmp_path / f"{name}.txt" for name in "abc"], [67, 67, 66]
    shorter, share = texts[short], shares[short]
    for text in texts:
        text.write_text(f"{text.stem} " * 200)
    shorter.write_text(f"{shorter.stem} " * (share - 1))  # and an end token
    shares[short] -= 1
    rows = halting.text_rows([str(text) for text in texts], tiny_tokenizer(), 20, 10, seed=0)
    assert [(rows == 4 + number).sum() for number in range(3)] == shares
    shorter.write_text(f"{shorter.stem} " * (share - 2))
    said = f"{shorter.name} holds {share - 1} tokens, fewer than the {share} that two slices of 10 sequences of 10"
    with pytest.raises(ValueError, match=said):
        halting.text_rows([str(text) for text in texts], tiny_tokenizer(), 20, 10, seed=0)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--budget", "-0.01"], "--budget -0.01 must be at least 0"),
        (["--budget", "nan"], "--budget nan"),
        (["--criteria", "margin"], "exit_criterion='margin' is not known"),
        (["--criteria", "gate"], "exit_gate='none'"),
        (["--mean-loops", "2", "4"], "--mean-loops 4 must be from 1 (--min-loops) to less than 4 (num_loops)"),
        (["--mean-loops", "1.5", "--min-loops", "2"], "--mean-loops 1.5 must be from 2 (--min-loops)"),
        (["--num-loops", "1"], "num_loops=1: with a single loop"),
        (["--min-loops", "4"], "--min-loops 4"),
        (["--sequences", "0"], "--sequences must be at least 1, got 0"),
        (["--sequences", "4000"], "fewer than the 88000 that two slices of 4000 sequences of 11 tokens take of it"),
        (["--criteria", "entropy", "--write", "kl"], "--write kl is not among"),
    ],
)
@pytest.mark.some(5)
def test_bad_input_is_refused_before_the_model_is_loaded(tmp_path, options, words):
    folder = make_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError) as error:
        halting.run(halting.parse(command(folder, *options)))
    assert words in str(error.value)


def test_a_folder_that_cannot_be_written_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    folder = make_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(PermissionError, match=f"^{tmp_path} can not be written to: .* another place, with --output$"):
        halting.run(halting.parse(command(folder)))


def test_models_that_cannot_exit_are_refused(tmp_path):
    folder = make_folder(tmp_path)
    for change, words in [
        ({"residual_depth": "run"}, "residual_depth='run'"),
        ({"num_loops": 1}, "with a single loop"),
    ]:
        fields = json.loads((folder / "config.json").read_text())
        fields.pop("num_hidden_layers")
        other = tmp_path / words
        shutil.copytree(folder, other)
        (other / "config.json").write_text(json.dumps({**fields, "loop_loss": "terminal", **change}))
        with pytest.raises(ValueError, match=re.escape(words)):
            halting.run(halting.parse(command(other)))
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="holds no tokenizer"):
        halting.run(halting.parse(command(folder)))
    with pytest.raises(ValueError, match="there is no folder 'nowhere'"):
        halting.run(halting.parse(["nowhere"]))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="model_type='llama' in its config.json, which is no looped model"):
        halting.run(halting.parse(command(folder)))


def test_a_model_without_numbers_at_full_depth_is_refused(tmp_path):
    folder = make_folder(tmp_path)
    model = LoopedForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data.fill_(math.nan)
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match="^after 4 loops the perplexity is not finite"):
        halting.run(halting.parse(command(folder)))


@pytest.mark.parametrize("shared", [{}, {"num_key_value_loops": 1}, {"key_value_interval": 2}], ids=str)
def test_what_exits_save_is_reckoned_as_training_reckons_it(shared):
    """Loops that share keys and values make none of them; each readout beyond the one at the end is coda and head."""
    outer = {"num_prelude_layers": 1, "num_coda_layers": 1, "injection": "add"}
    config = tiny_model(num_loops=8, **outer, **shared).config
    one = measuring.flops_per_token(config, 32, 2, 1)
    assert one == forward_flops_per_token(config, 32, 2)
    n = sizes(config)
    assert measuring.flops_per_token(config, 32, 2, 2) - one == 2 * (n.coda + n.head) + 4 * config.hidden_size * 32


def test_nothing_is_written_where_nothing_is_gained(tmp_path):
    folder = make_folder(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = (folder / "generation_config.json").read_text()
    args = halting.parse(command(folder))
    slow = [{"criterion": "kl", "calibrated_speedup": 1.2, "predicted_speedup": 0.9, "threshold": 0.5}]
    assert "nothing is written" in halting.write_threshold(model, folder, halting.BEST, slow, args)
    stuck = [{"criterion": "kl", "calibrated_speedup": 1.2, "predicted_speedup": 1.1, "threshold": -math.inf}]
    assert "nothing is written" in halting.write_threshold(model, folder, "kl", stuck, args)
    assert (folder / "generation_config.json").read_text() == before


def test_a_later_calibration_takes_the_place_of_one_at_another_depth(tmp_path):
    """Its threshold holds at the depth at which it was calibrated, also where that is the model's own."""
    folder = make_folder(tmp_path)
    rows = [{"criterion": "kl", "calibrated_speedup": 1.2, "predicted_speedup": 1.1, "threshold": 0.5}]
    for num_loops, saved in ((LOOPS - 1, LOOPS - 1), (LOOPS, None)):
        model, args = AutoModelForCausalLM.from_pretrained(folder), halting.parse(command(folder))
        args.num_loops = num_loops
        halting.write_threshold(model, folder, "kl", rows, args)
        generation_config = AutoModelForCausalLM.from_pretrained(folder).generation_config
        assert getattr(generation_config, "num_loops", None) == saved
        assert generation_config.exit_threshold == 0.5
