"""Benchmarks run and print what they promise; how fast anything is, is no matter of tests."""

import argparse
import json
import math
import platform
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch

from looped_eval.benchmark import bandwidth, decoding, graphs, kept_tokens, over_http, pages, products
from looped_eval.benchmark import command as benchmark
from looped_eval.benchmark.serving import serve
from looped_eval.benchmark.wider import widened
from looped_recipes.common.errors import CommandError
from modeling_looped.exit_criteria import ExitRule

from .helpers import quick_and_slow, random_ids, tiny_model, tiny_tokenizer


SHAPE = {"width": 64, "ff": 96, "layers": 1, "loops": 3, "vocab": 99, "batch": 2, "length": 12, "repeats": 1}
OF_DECODING = {"prompt": 8, "new-tokens": 6, "batches": 2}


def lines_of(which: str, capsys, **options) -> dict[str, dict]:
    arguments = [part for name, value in {**SHAPE, **options}.items() for part in (f"--{name}", str(value))]
    benchmark.main([which, *arguments])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for line in lines:
        assert line.keys() >= {"command", "commit", "hardware", "dtype"} and which in line["command"]
    return {line["benchmark"]: line for line in lines}


def ratios(line) -> list[float]:
    """All numbers in a line, however deep."""
    if isinstance(line, dict):
        return [number for value in line.values() for number in ratios(value)]
    return [line] if isinstance(line, float) else []


@pytest.mark.parametrize("which", ["train", "depths"])
@pytest.mark.parametrize("dtype", quick_and_slow(["float32", "bfloat16"], "float32"))
def test_of_passes(which, dtype, capsys):
    lines = lines_of(which, capsys, dtype=dtype, continuation=4)
    assert list(lines) == [which]
    assert ratios(lines[which]) and all(math.isfinite(ratio) for ratio in ratios(lines[which]))


@pytest.mark.parametrize(
    ("which", "options", "message"),
    [
        ("llama", {"repeats": 0}, "--repeats must be at least 1, got 0"),
        ("exits", {"batches": 0}, r"--batch-sizes must be at least 1 each, got \[0\]"),
        ("exits", {"new-tokens": 1}, "--new-tokens 1: the first is the prompt's, and is not timed: pass 2 or more"),
        ("depths", {"continuation": 99}, "--continuation 99 must be at most --length 12"),
        ("exits", {"criteria": "confidence"}, "exit_criterion='confidence' is not known: choose one of"),
        ("exits", {"criteria": "latent_diff", "loops": 2}, "num_loops=2: latent_diff has no score before the last"),
    ],
)
def test_what_cannot_be_measured(which, options, message, capsys):
    with pytest.raises(ValueError, match=message):
        lines_of(which, capsys, **{**OF_DECODING, **options})


def test_products_are_those_of_a_cpu():
    args = benchmark.parse(["products", "--device", "cpu"])
    args.device = "cuda"
    with pytest.raises(ValueError, match="products measures the ways of cpu.py, not --device cuda: pass --device cpu"):
        benchmark.check(args)


def test_a_measurement_of_memory_that_fails_says_why(monkeypatch):
    args = benchmark.parse(["memory", *"--device cpu --width 64 --ff 96 --layers 1 --vocab 99 --length 12".split()])
    failed = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nValueError: out of memory\n")
    monkeypatch.setattr(benchmark.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(CommandError, match="memory of a terminal loss could not be measured: ValueError: out of mem"):
        benchmark.memory(args)


def test_memory_is_that_of_the_device_that_is_named(monkeypatch):
    args = benchmark.parse(["_memory", *"--device cpu --width 64 --ff 96 --layers 1 --vocab 99 --length 12".split()])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(benchmark, "training_step", lambda *_, **__: lambda: None)  # which would ask the driver
    peaks = iter([5, 12])
    monkeypatch.setattr(benchmark, "peak_bytes", lambda on_gpu: 0 if on_gpu else next(peaks))
    assert benchmark.measure_memory(args) == {"peak": 7}


@pytest.mark.parametrize("options", [{}, {"exit-interval": 2}], ids=str)
@pytest.mark.some(1)
def test_of_decoding(options, capsys):
    lines = lines_of("decode", capsys, **OF_DECODING, **options)
    assert list(lines) == ["llama", "bandwidth", "exits"]
    assert {name for name in lines["exits"] if name.startswith("batch")} == {
        "batch_2_logit_margin",
        "batch_2_latent_diff",
        "batch_2_gate",
    }
    assert all(1 <= lines["exits"][name]["mean_loops"] <= 3 for name in lines["exits"] if name.startswith("batch"))
    assert all(ratio > 0 and math.isfinite(ratio) for line in lines.values() for ratio in ratios(line))


def test_of_scoring(capsys):
    line = lines_of("harness", capsys, requests=2)["harness"]
    assert all(math.isfinite(line[name]) for name in ("over_stock", "over_one_depth", "over_runs"))


def test_both_limits_of_bandwidth(monkeypatch):
    """By hand: all weights but the embedding once, those of the core and every slot's keys and values N times."""
    rates = {None: 1000.0, "core": 4000.0}
    monkeypatch.setattr(bandwidth, "bytes_per_second", lambda device, size=None: rates["core" if size else None])
    model = tiny_model(num_loops=3)
    core = 4 * sum(parameter.numel() for parameter in model.model.core.parameters())
    head = 4 * (model.lm_head.weight.numel() + model.model.norm.weight.numel())
    keys_and_values = 4 * 2 * 32 * 6 * 10  # bytes, both, width, 2 layers x 3 loops, tokens before
    limits = bandwidth.limits_of(model, 10)
    assert limits.memory_seconds == pytest.approx((3 * core + head + keys_and_values) / 1000)
    assert limits.cache_seconds == pytest.approx((core + head + keys_and_values) / 1000 + 2 * core / 4000)


@pytest.mark.slow
def test_of_decoding_by_a_trained_model(tmp_path, capsys):
    tiny_model(loop_loss="per_loop", max_position_embeddings=64).save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text("a b c d e f g h " * 20)
    lines = lines_of(
        "decode",
        capsys,
        **OF_DECODING,
        model=tmp_path,
        **{"text-file": tmp_path / "text.txt"},
    )
    assert list(lines) == ["llama", "bandwidth", "exits", "speculation", "sharing"]
    drafts = [lines["speculation"]["rows_2"][f"draft_loops_{loops}"] for loops in ("auto", 1, 2)]
    assert all(each["same_tokens"] and 1 <= each["passes_per_token"] <= 3 for each in drafts)
    assert lines["sharing"]["last"]["cache_bytes"] * 3 == lines["sharing"]["none"]["cache_bytes"]


@pytest.mark.parametrize(
    "fields", [{}, {"num_key_value_heads": 2, "tie_word_embeddings": True}], ids=["plain", "shared"]
)
def test_a_wider_model_computes_the_same(fields):
    model = tiny_model(**fields)
    wide, ids = widened(model, 3), torch.tensor([[5, 3, 8, 13, 21, 34]])
    assert wide.config.hidden_size == 3 * model.config.hidden_size
    assert wide.num_parameters() > 6 * model.num_parameters()
    torch.testing.assert_close(wide(ids, num_loops=2).logits, model(ids, num_loops=2).logits)


def test_a_model_that_is_another_when_wider():
    with pytest.raises(SystemExit, match="--widen: wider, this model computes something else"):
        widened(tiny_model(injection="concat"), 2)


def test_of_a_cache_in_8_bits(capsys):
    line = lines_of("cache", capsys, **OF_DECODING)["cache"]
    assert line["rows_2"]["bytes_over_own"] == pytest.approx((64 + 4) / (4 * 64), abs=1e-4)
    assert math.isfinite(line["rows_2"]["time_over_own"])


def test_of_serving(capsys):
    options = {"requests": 3, "prompt": 8, "new-tokens": 4}
    arguments = [part for name, value in {**SHAPE, **options}.items() for part in (f"--{name}", str(value))]
    benchmark.main(["serving", *arguments, "--criteria", "latent_diff", "kl"])
    line = json.loads(capsys.readouterr().out)
    for criterion in ("latent_diff", "kl"):
        assert 1 <= line[criterion]["mean_loops"] <= 3 and 1 <= line[criterion]["rows_in_a_pass"] <= 2
        assert all(ratio > 0 and math.isfinite(ratio) for ratio in ratios(line[criterion]))


def test_of_a_long_prompt(capsys):
    line = lines_of("long_prompt", capsys, prompt=40)["long_prompt"]
    assert all(ratio >= 0 and math.isfinite(ratio) for ratio in ratios(line))
    pauses = line["longest_pause_in_tokens"], line["longest_pause_in_tokens_whole"]
    assert all(pause > 0 and math.isfinite(pause) for pause in pauses)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_of_pages(capsys):
    with torch.compiler.set_stance("force_eager"):
        line = lines_of("pages", capsys, prompt=9)["pages"]
    assert line["pages_over_apart"] > 0 and min(line["passes"].values()) >= 2


def test_weights_that_serving_reads():
    """Of a request alone, those of the loop in every loop, and of the head at every token but that of the prompt."""
    model = tiny_model(num_loops=4)
    model.generation_config.eos_token_id = None
    asked = [(random_ids(1, 5), 6), (random_ids(1, 3, seed=1), 6)]
    loop = sum(parameter.numel() for parameter in model.model.core.parameters())
    alone = serve(model, asked[:1], [0.0], 1, {})
    assert alone.weights == 5 * (4 * loop + model.lm_head.weight.numel()) and alone.tokens_per_readout == 1
    assert alone.weights <= serve(model, asked, [0.0, 0.0], 2, {}).weights <= 2 * alone.weights


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="oneDNN's order, on x86")
def test_of_products(capsys):
    line = lines_of("products", capsys)["products"]
    assert line.keys() >= {"64_to_64", "64_to_96", "96_to_64", "64_to_99"}
    assert all(ratio > 0 and math.isfinite(ratio) for ratio in ratios(line))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'ModuleNotFoundError: vllm'; exit 1", "did not start: ModuleNotFoundError: vllm"),
        (None, "cannot be run"),
    ],
    ids=["fails", "is not there"],
)
def test_a_server_that_does_not_start(script, message, tmp_path):
    python = tmp_path / "python"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    with pytest.raises(SystemExit, match=f"--vllm: .*{message}"):
        with over_http.running("--vllm", [str(python)], {}):
            pass


@pytest.mark.slow
def test_our_server_over_http():
    """Its answers have as many tokens as were asked for, which `complete_all` checks."""
    args = argparse.Namespace(**SHAPE | {"dtype": "float32", "device": "cpu", "batch_size": 2, "repeats": 1})
    model = tiny_model(vocab_size=99, eos_token_id=None, max_position_embeddings=64)
    asked = [(torch.randint(3, 99, (1, length)), length) for length in (4, 7)]
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        over_http.tokenizer_of_numbers(99).save_pretrained(folder)
        with over_http.running("looped serve", *over_http.our_command(folder, args)) as url:
            how = {"exit_criterion": "latent_diff", "exit_threshold": 0.5}
            told = over_http.measured(url, folder, asked, [0.0, 0.1], how, args)
    assert all(number > 0 and math.isfinite(number) for number in told.values())


def test_without_a_trained_model(tmp_path, capsys):
    with pytest.raises(SystemExit, match="--model DIR: a trained model is needed"):
        lines_of("speculation", capsys)
    with pytest.raises(SystemExit, match="--model: there is no folder 'nowhere'"):
        lines_of("speculation", capsys, model="nowhere")
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="holds no tokenizer"):
        lines_of("sharing", capsys, model=tmp_path)


# the ratios, of made-up seconds


def args_of(which: str, **fields):
    shape = "--device cpu --width 64 --ff 96 --layers 1 --loops 3 --vocab 99 --batch 2 --length 12".split()
    args = benchmark.parse([which, *shape])
    vars(args).update(fields)
    return args


def test_speeds_over_a_llama(monkeypatch):
    """Ours take 2 seconds, the Llama's 6; operations by hand, of a rate of 1,000 a second."""
    monkeypatch.setattr(benchmark, "in_turns", lambda ours, theirs, repeats: (2.0, 6.0))
    monkeypatch.setattr(benchmark, "measured_rate", lambda *_: 1000.0)
    found = benchmark.train(args_of("train"))
    assert (found["speedup_over_llama"], found["speedup_with_logits_returned"]) == (3.0, 3.0)
    layers = 3 * (6 * (4 * 64**2 + 3 * 64 * 96) + 4 * 3 * 64 * 12 / 2)  # causal: half of all pairs
    operations = 2 * 12 * (layers + 6 * 99 * 64)
    assert found["utilisation_of_matmul_rate"] == pytest.approx(operations / 2 / 1000)
    assert found["llama_utilisation"] == pytest.approx(operations / 6 / 1000)
    assert benchmark.llama(args_of("llama", prompt=8, new_tokens=2)) == {"speedup_over_llama": 3.0}
    assert benchmark.unrolled_llama(args_of("train")).config.num_hidden_layers == 3


def test_all_depths_and_both_losses_over_one(monkeypatch):
    monkeypatch.setattr(benchmark, "in_turns", lambda every, one, repeats: (6.0, 2.0))
    found = benchmark.depths(args_of("depths", continuation=4))
    trunk, head = 3 * (4 * 64**2 + 3 * 64 * 96 + 64 * 12), 99 * 64
    assert found["all_depths_over_one"] == found["all_depths_at_continuation_over_one"] == 3.0
    assert found["predicted_by_flops"] == pytest.approx((trunk + 3 * head) / (trunk + head))
    peaks = iter([10, 25])
    done = lambda *_, **__: SimpleNamespace(returncode=0, stdout=json.dumps({"peak": next(peaks)}))  # noqa: E731
    monkeypatch.setattr(benchmark.subprocess, "run", done)
    assert benchmark.memory(args_of("memory"))["per_loop_over_terminal"] == 2.5


def test_decoding_over_its_limits(monkeypatch):
    """The faster way counts, after half of the new tokens."""
    asked, seconds = [], {"as_it_is": [0.5, 0.4], "static_cache": [0.9, 0.8]}

    def limits(model, length):
        asked.append(length)
        return bandwidth.Limits(1, 2.0, 3.0, 0.2, 0.1)

    monkeypatch.setattr(bandwidth, "limits_of", limits)
    names = {id(way): name for name, way in bandwidth.WAYS.items()}
    monkeypatch.setattr(bandwidth, "seconds_of_tokens", lambda model, ids, number, way: seconds[names[id(way)]])
    found = bandwidth.against_limits(None, torch.zeros(1, 5), 8)
    assert asked == [9] and found["best"] == "as_it_is" and found["as_it_is_tokens_per_second"] == 2.5
    of_best = found["best_over_memory_limit"], found["best_over_cache_limit"]
    assert of_best == pytest.approx((0.5, 0.25)) and found["static_cache_over_memory_limit"] == pytest.approx(0.25)


def test_the_rate_of_reading(monkeypatch):
    """A second between any two readings of the clock, in which 64 MiB are read."""
    clock = iter(range(1000))
    monkeypatch.setattr(bandwidth, "now", lambda: next(clock))
    assert bandwidth.bytes_per_second("cpu", 2**20, repeats=2) == 2**26


def test_costs_of_tokens_that_exit():
    """Of tokens with 1 and 3 loops: a criterion of logits reads them after every loop, one of states at the exit."""
    model, loops = tiny_model(num_loops=3), torch.tensor([[1, 3]])
    core = sum(parameter.numel() for parameter in model.model.core.parameters())
    head = model.lm_head.weight.numel()
    costs = [(None, 2), (ExitRule("latent_diff", 0.1), 2), (ExitRule("logit_margin", 0.1), 1 + 3)]
    for rule, readouts in costs:
        rule = rule and rule.checked(model.config)
        assert decoding.cost(model, rule, loops) == 4 * core + readouts * head
        assert decoding.cost_per_loop(model, rule, loops) == core + readouts * head / 4
    every_second = ExitRule("logit_margin", 0.1, interval=2).checked(model.config)  # after loop 2, and after the last
    assert decoding.cost(model, every_second, torch.tensor([[3]])) == 3 * core + 2 * head


@torch.no_grad()
def test_three_checks_in_ten_pass():
    model, ids = tiny_model(exit_gate="raw", loop_loss="per_loop"), random_ids(8, 12)
    decoding.spread_gate(model, ids)
    states = torch.stack(model(ids, output_loop_hidden_states=True, use_cache=False).loop_hidden_states)
    logits = model.gate(states.flatten(0, 1))
    assert (logits.mean().item(), logits.std().item()) == pytest.approx((-1.0, 1.0), abs=1e-4)
    rows = torch.cat([ids, ids[:, :1]], 1)
    for criterion, sign in (("logit_margin", 1), ("latent_diff", -1)):
        scores = decoding.measure(model, rows, 3, [criterion], 8).scores[criterion][:-1]
        passing = sign * (scores[scores.isfinite()] - decoding.passing_threshold(model, ids, criterion)) >= 0
        assert passing.float().mean().item() == pytest.approx(0.3, abs=0.02)


def test_ratios_of_ways_that_are_slower(monkeypatch):
    """8 bits: 3 - 1 seconds over 2 - 1. Pages, quartiles: 3 over 2. Fast paths: 1 over 4; graphs: 4 over 1."""
    monkeypatch.setattr(
        kept_tokens,
        "least_seconds",
        lambda calls, repeats: ({key: (2 + (key[0] == "int8")) if key[1] > 1 else 1 for key in calls}, {}),
    )
    args = args_of("cache", batch_sizes=[1], new_tokens=4)
    assert kept_tokens.cache(args)["rows_1"]["time_over_own"] == 2.0
    monkeypatch.setattr(
        pages, "decode", lambda model, way, prompts, new: [3.0, 3, 9] if way[0] == "f" else [2.0, 2, 9]
    )
    found = pages.pages(args_of("pages", prompt=8, new_tokens=4, repeats=1))
    assert (found["pages_over_apart"], found["milliseconds_of_a_pass_apart"]) == (1.5, 2000.0)
    monkeypatch.setattr(products, "in_turns", lambda fast, usual, repeats: (1.0, 4.0))
    assert products.over_torch(lambda: None, args) == 0.25
    monkeypatch.setattr(graphs, "in_turns", lambda with_graphs, without, repeats: (1.0, 4.0))
    monkeypatch.setattr(graphs, "passing_threshold", lambda *_: 0.1)
    found = graphs.of_rows(None, torch.zeros(1, 4), args_of("graphs", new_tokens=10))
    assert found["plain_speedup"] == found["exits_speedup"] == 4.0
    assert found["plain_milliseconds_of_a_token"] == 100.0


def test_graphs_are_measured_on_any_gpu(monkeypatch):
    monkeypatch.setattr(graphs, "exiting_model", lambda args: None)
    for device in ("cuda", "cuda:1"):
        assert graphs.graphs(args_of("graphs", device=device, batch_sizes=[])) == {}
    with pytest.raises(SystemExit, match="--device cpu: passes are graphs on cuda alone"):
        graphs.graphs(args_of("graphs", device="cpu"))


def test_quantiles_of_latencies():
    assert [over_http.quantile([4.0, 1.0, 3.0, 2.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 3.0, 4.0]
