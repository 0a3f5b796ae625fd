"""Every depth from one pass gives what stock lm-eval gives in a run for each."""

import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
from functools import partial
from pathlib import Path

import lm_eval.tasks
import pytest
import torch
import transformers
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import PreTrainedTokenizerFast

from looped_eval.budget import command as budget
from looped_eval.common.model_folder import open_tokenizer
from looped_eval.harness import command as harness
from looped_eval.harness import token_scorer
from looped_eval.harness.answers import checksum_of_weights
from looped_eval.harness.looped_lm import LoopedLM
from looped_recipes.common.command_line import parse_depths
from modeling_looped.exit_criteria import ExitRule
from tests.helpers import tiny_config, tiny_tokenizer
from tests.helpers_harness import save_model_and_tokenizer, task_configs, task_documents, words
from tests.helpers_processes import run_clean


DEPTHS = [1, 2, 4]
TASKS = ["choice", "letter", "rolling", "writing"]
WINDOW = 64  # of the tiny model


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tasks")
    for name, config in task_configs(folder).items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return str(folder)


@pytest.fixture(scope="module")
def manager(tasks):
    return TaskManager(include_path=tasks, include_defaults=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_model_and_tokenizer(tmp_path_factory.mktemp("model"), num_core_layers=1)


def run(model, manager, tasks=TASKS, batch_size=1, model_args=None, **options) -> dict:
    """lm-eval's results with all answers."""
    setup = {"batch_size": batch_size, "device": "cpu", "bootstrap_iters": 0, "task_manager": manager}
    return simple_evaluate(model, model_args=model_args, tasks=list(tasks), **setup, **options)


def stock(folder: str, manager, depth: int, batch_size: int = 1, tasks=TASKS, **arguments) -> dict:
    arguments = {"pretrained": folder, "num_loops": depth, **arguments}
    return run("hf", manager, tasks, batch_size, arguments)


def ours(folder: str, manager, depths, batch_size: int = 1, tasks=TASKS, **arguments) -> dict[int, dict]:
    lm = LoopedLM(folder, num_loops=depths, batch_size=batch_size, device="cpu", **arguments)
    return {depth: run(lm.at(depth), manager, tasks) for depth in lm.depths}


def numbers(answer) -> list[float]:
    return [float(number) for number in (answer if isinstance(answer, (tuple, list)) else [answer])]


def values(results: dict, task: str) -> dict[str, float]:
    """Metrics without what lm-eval says about them."""
    return {k: v for k, v in results["results"][task].items() if "," in k and "_stderr" not in k}


def assert_same(found: dict, expected: dict, tasks=TASKS):
    for task in tasks:
        assert len(found["samples"][task]) == len(expected["samples"][task]) > 5
        for one, other in zip(found["samples"][task], expected["samples"][task]):
            assert one["arguments"] == other["arguments"]
            for answer, wanted in zip(one["resps"], other["resps"]):
                if task == "writing":
                    assert answer == wanted
                else:
                    assert numbers(answer[0]) == pytest.approx(numbers(wanted[0]), rel=1e-5, abs=1e-5)
        metrics = values(expected, task)
        assert {name: values(found, task)[name] for name in metrics} == pytest.approx(metrics, rel=1e-5)


@pytest.fixture(scope="module")
def expected(model, manager) -> dict[int, dict]:
    torch.set_num_threads(1)
    return {depth: stock(model, manager, depth) for depth in DEPTHS}


@pytest.mark.parametrize("batch_size", [1, 7])
@pytest.mark.some(1)
def test_one_pass_equals_a_run_per_depth(model, manager, expected, batch_size):
    found = ours(model, manager, "1,2,4", batch_size)
    for depth in DEPTHS:
        assert_same(found[depth], expected[depth])
    answers = [sample["resps"] for sample in expected[1]["samples"]["choice"]]
    assert answers != [sample["resps"] for sample in expected[4]["samples"]["choice"]]


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("fields", [
    {"preset": "parcae", "hidden_size": 32, "position_embedding": "learned"},
    {"preset": "flt", "window_pattern": "SL", "sliding_window": 5, "exit_gate": "raw", "loop_loss": "exit_weighted"},
], ids=["coda", "windows"])  # fmt: skip
@pytest.mark.slow
def test_batches_of_other_models(tmp_path, manager, fields, padding_side):
    folder = save_model_and_tokenizer(tmp_path, padding_side, **fields)
    found = ours(folder, manager, [2, 3], batch_size=7)
    for depth in (2, 3):
        assert_same(found[depth], stock(folder, manager, depth, batch_size=1))


def test_a_small_model_is_not_summed_by_a_million_factors(monkeypatch):
    """These took 8 of the 10 milliseconds that every question to a small model paid for a look at its weights."""
    draw, drawn = torch.randint, []
    monkeypatch.setattr(torch, "randint", lambda *given, **named: drawn.append(given[2]) or draw(*given, **named))
    weights = nn.ParameterList([torch.arange(5.0), torch.ones(3, dtype=torch.complex128)])
    first = checksum_of_weights(weights)
    assert drawn == [(48,)] and len(first) == 2
    monkeypatch.setattr(torch, "randint", lambda *given, **named: draw(*given[:2], (2**20,), **named))
    assert checksum_of_weights(weights) == first  # of answers that were kept by more factors
    weights[1].data[2] += 1j
    assert checksum_of_weights(weights)[1] != first[1]


def test_choices_without_shared_rows(model, manager, expected):
    found = ours(model, manager, DEPTHS, 7, tasks=["choice", "letter"], logits_cache=False)
    assert_same(found[2], expected[2], ["choice", "letter"])


def test_half_precision(model, manager):
    found = ours(model, manager, [1, 3], 7, tasks=["letter", "rolling"], dtype="bfloat16")
    wanted = stock(model, manager, 3, 7, tasks=["letter", "rolling"], dtype="bfloat16", softmax_dtype="float32")
    for task in ("letter", "rolling"):
        for one, other in zip(found[3]["samples"][task], wanted["samples"][task]):
            assert numbers(one["resps"][0][0]) == pytest.approx(numbers(other["resps"][0][0]), rel=0.05, abs=0.1)


def test_mixed_precision_rounds_scores(model):
    exact, mixed = (
        LoopedLM(model, num_loops=2, device="cpu", mixed_precision_dtype=dtype).score_documents([[3, 4, 5]])[0][0, 0]
        for dtype in (None, "bfloat16")
    )
    assert exact != mixed and mixed.item() == pytest.approx(exact.item(), rel=0.05)


def test_log_probabilities_in_half_precision(model):
    """Of one depth alone as among several, and as a softmax in float64 of the model's logits."""
    text = "a b c d e f g"
    document, choice = Instance("loglikelihood_rolling", {}, (text,), 0), question("a b c", " d e f g")
    found = []
    for depths in (4, [2, 4]):
        lm = LoopedLM(model, num_loops=depths, device="cpu", dtype="bfloat16")
        found.append([*lm.loglikelihood_rolling([document], True), lm.loglikelihood([choice], True)[0][0]])
    ids = [lm.tokenizer.bos_token_id, *lm.tokenizer(text, add_special_tokens=False)["input_ids"]]
    expected = []
    for tokens, count in ((ids, 7), (lm.tokenizer(text)["input_ids"], 4)):
        with torch.no_grad():
            logits = lm.model(torch.tensor([tokens[:-1]]), num_loops=4).logits[0].double()
        log_p = logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])
        expected.append(log_p[-count:].sum().item())
    assert found[0] == pytest.approx(expected, rel=1e-5) and found[1] == pytest.approx(expected, rel=1e-5)
    lm = LoopedLM(model, num_loops=4, device="cpu", dtype="bfloat16", softmax_dtype="bfloat16")
    assert lm.loglikelihood_rolling([document], True) != pytest.approx(expected[:1], rel=1e-5)  # as it is asked for


def passes(monkeypatch, lm) -> list[int]:
    """Depths of the passes that the model makes from now on."""
    depths, forward = [], lm.model.model.forward

    def counted(*args, num_loops=None, **kwargs):
        depths.append(num_loops)
        return forward(*args, num_loops=num_loops, **kwargs)

    monkeypatch.setattr(lm.model.model, "forward", counted)
    return depths


def test_scoring_runs_once_beside_texts(model, manager, monkeypatch):
    """Batches of texts leave their padding in the tokenizer, and a cache in the model."""
    lm = LoopedLM(model, num_loops="1,2", batch_size=7, device="cpu")
    scored, score = [], lm.score_tokens
    monkeypatch.setattr(lm, "score_tokens", lambda *args, **kwargs: scored.append(lm.depth) or score(*args, **kwargs))
    for depth in (1, 2):
        run(lm.at(depth), manager)
    assert scored == [1, 1]  # choices and documents


def optimizer_step(model):
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
    model.zero_grad()


def write_through_data(model):
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.roll(1, 0))  # the same numbers elsewhere


def one_element(model):
    model.get_input_embeddings().weight.data[tiny_tokenizer()("a")["input_ids"][-1], 5] += 1.0


def load_others(model):
    model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()})


@pytest.mark.parametrize("change", [optimizer_step, write_through_data, one_element, load_others])
def test_a_model_that_changes_is_asked_again(model, change):
    """As in a callback of training: each time as stock lm-eval, at the same depth and at another."""
    looped = transformers.AutoModelForCausalLM.from_pretrained(model)
    setup = {"tokenizer": tiny_tokenizer(), "batch_size": 2}
    lm, stock_lm = LoopedLM(looped, num_loops=[2, 4], **setup), HFLM(looped, backend="causal", **setup)
    likelihoods = []
    for depth in (2, 2, 4):
        lm.at(depth)
        looped.config.num_loops = depth  # of the stock model
        found, expected = [], []
        for answers, asked in ((found, lm), (expected, stock_lm)):
            answers += [log_p for log_p, _ in asked.loglikelihood([scored("a b c d"), scored("e")], True)]
            answers += asked.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("a d",), 0)], True)
        assert found == pytest.approx(expected, rel=1e-5)
        texts = [asked_to_write("a b", max_gen_toks=3)]
        assert lm.generate_until(texts, True) == stock_lm.generate_until(texts, True)
        likelihoods.append(found[0])
        change(looped)
    assert len({*likelihoods}) == 3


def test_dropout_that_training_turned_on(tmp_path):
    """A callback that leaves it on gets what the model then answers, not what it answered before."""
    folder = save_model_and_tokenizer(tmp_path, residual_dropout=0.5)
    looped = transformers.AutoModelForCausalLM.from_pretrained(folder)
    lm = LoopedLM(looped, tokenizer=tiny_tokenizer(), num_loops=2)
    before = lm.loglikelihood([scored("a b c d")], True)
    assert lm.loglikelihood([scored("a b c d")], True) == before
    looped.train()
    assert lm.loglikelihood([scored("a b c d")], True) != before
    looped.eval()
    assert lm.loglikelihood([scored("a b c d")], True) == before


def test_adapters_and_tokenizers_that_change(model):
    """Without any change of weights."""
    peft = pytest.importorskip("peft")
    looped = transformers.AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(looped, lora)
    adapted.add_adapter("other", lora)
    lm = LoopedLM(adapted, tokenizer=tiny_tokenizer(), num_loops=[2, 4], batch_size=2)

    def answer() -> float:
        ((found, _),) = lm.loglikelihood([scored("a b c d")], True)
        fresh = LoopedLM(adapted, tokenizer=lm.tokenizer, num_loops=4)
        assert found == fresh.loglikelihood([scored("a b c d")], True)[0][0]
        return found

    found = [answer()]
    adapted.set_adapter("other")
    found.append(answer())
    with adapted.disable_adapter():
        found.append(answer())
    for module in adapted.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("other", 3.0)
    found.append(answer())
    vocabulary = json.loads(lm.tokenizer.backend_tokenizer.to_str())
    words = vocabulary["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    lm.tokenizer._tokenizer = type(lm.tokenizer.backend_tokenizer).from_str(json.dumps(vocabulary))
    found.append(answer())
    assert len({*found}) == len(found)


def test_the_model_runs_once_and_heads_only_where_asked(model, manager, monkeypatch):
    lm = LoopedLM(model, num_loops="1..4", batch_size=7, device="cpu")
    depths, heads, head = passes(monkeypatch, lm), [], lm.model.logits
    monkeypatch.setattr(lm.model, "logits", lambda hidden: heads.append(hidden.shape[:-1]) or head(hidden))
    run(lm.at(1), manager, ["letter"])
    assert depths == [4] * 2  # 9 documents, 3 choices, one row for the 3
    # 9 positions in all, one of each document, at every loop
    assert heads == [(1, 7)] * 4 + [(1, 2)] * 4
    for depth in (2, 3, 4):
        run(lm.at(depth), manager, ["letter"])
    assert depths == [4] * 2


@pytest.mark.parametrize("exits", [{}, {"exit_criterion": "kl", "exit_threshold": 0.3, "exit_selection": "after"}])
def test_logits_of_a_few_tokens_are_in_memory(model, monkeypatch, exits):
    lm = LoopedLM(model, num_loops=3, batch_size=2, device="cpu", **exits)
    documents, heads, head = [list(range(3, 23)), list(range(5, 12))], [], lm.model.logits
    whole = torch.stack(lm.score_documents(documents, True))
    loops = whole[0, 0, 2]
    assert 20 < loops < 20 * 3 if exits else loops == 20 * 3
    monkeypatch.setattr(token_scorer, "TOKENS_READ", 8)
    monkeypatch.setattr(lm.model, "logits", lambda hidden: heads.append(hidden.shape[1]) or head(hidden))
    torch.testing.assert_close(torch.stack(lm.score_documents(documents, True)), whole)
    num_read = 3 if exits else 1
    assert heads == [8] * 3 * num_read + [3] * num_read


def test_exits_that_stop_are_read_for_a_few_tokens_at_a_time(model, monkeypatch):
    exits = {"exit_criterion": "max_prob", "exit_threshold": 0.15, "exit_selection": "stop"}
    lm = LoopedLM(model, num_loops=3, batch_size=2, device="cpu", **exits)
    documents, read, log_p = [list(range(3, 23)), list(range(5, 12))], [], lm._log_p
    whole = torch.stack(lm.score_documents(documents, True))
    monkeypatch.setattr(token_scorer, "TOKENS_READ", 8)
    monkeypatch.setattr(lm, "_log_p", lambda logits, targets: read.append(len(logits)) or log_p(logits, targets))
    assert torch.stack(lm.score_documents(documents, True)).equal(whole)
    assert read == [8] * 3 + [3]


@pytest.mark.parametrize("depths", [[12], [1, 12]])
def test_the_batch_size_is_found_at_the_deepest_depth(model, manager, monkeypatch, depths):
    """Asked for more loops than its config has, a model holds the states and the cache of as many."""
    lm = LoopedLM(model, num_loops=depths, batch_size="auto", max_batch_size=2, device="cpu")
    asked, forward = [], lm.model.model.forward
    monkeypatch.setattr(
        lm.model.model, "forward", lambda *args, **kwargs: asked.append(kwargs) or forward(*args, **kwargs)
    )
    run(lm, manager, ["letter"])
    measured = [kwargs for kwargs in asked if kwargs["use_cache"]]
    assert len(measured) >= 5 and {kwargs["num_loops"] for kwargs in asked} == {12}
    assert {kwargs["output_loop_readout_states"] for kwargs in asked} == {len(depths) > 1}


def test_perplexity_and_bits_per_byte(model, manager):
    """Against the windows of lm-eval, cut here by hand, and a softmax in float64."""
    bits = ours(model, manager, [1, 3], 7, tasks=["rolling"])[3]["results"]["rolling"]
    looped = transformers.AutoModelForCausalLM.from_pretrained(model)
    tokenizer = tiny_tokenizer()
    nats = num_bytes = num_words = 0
    for row in task_documents()["rolling"]:
        ids = tokenizer(row["text"])["input_ids"]
        for start in range(0, len(ids), WINDOW):
            if start == 0:
                window, scored = [tokenizer.bos_token_id, *ids[:WINDOW]], ids[:WINDOW]
            else:  # as much context as fits before the last token of the window
                end = min(start + WINDOW, len(ids))
                window, scored = ids[max(0, end - WINDOW - 1) : end], ids[start:end]
            with torch.no_grad():
                log_p = looped(torch.tensor([window[:-1]])).logits[0].double().log_softmax(-1)
            nats -= log_p[-len(scored) :].gather(-1, torch.tensor(scored)[:, None]).sum().item()
        num_bytes += len(row["text"].encode())
        num_words += len(row["text"].split())
    assert bits["bits_per_byte,none"] == pytest.approx(nats / num_bytes / torch.tensor(2.0).log().item(), rel=1e-5)
    assert bits["word_perplexity,none"] == pytest.approx(torch.tensor(nats / num_words).exp().item(), rel=1e-5)


def test_a_document_has_one_start_token_also_where_the_tokenizer_adds_its_own(model):
    tokenizers = {"none": tiny_tokenizer(), "own": tiny_tokenizer()}
    start = [("<s>", tokenizers["own"].bos_token_id)]
    tokenizers["own"].backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=start)
    assert tokenizers["own"]("a")["input_ids"] == [1, 4]
    texts = "a b c", words(random.Random(2), 70)
    asked = [Instance("loglikelihood_rolling", {}, (text,), 0, ("", 0, 1)) for text in texts]
    found = {}
    for name, tokenizer in tokenizers.items():
        lm = LoopedLM(model, num_loops=[1, 3], batch_size=1, device="cpu", tokenizer=tokenizer)
        found[name] = [lm.at(depth).loglikelihood_rolling(asked, True) for depth in (1, 3)]
    assert found["own"] == found["none"]


def test_no_bar_is_drawn_where_none_is_wanted(model, capsys):
    lm = LoopedLM(model, num_loops=1, device="cpu")
    capsys.readouterr()  # the bar of loading
    lm.loglikelihood([scored("a")], disable_tqdm=True)
    lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("a b",), 0)], disable_tqdm=True)
    lm.generate_until([asked_to_write("a"), asked_to_write("b", temperature=0.5)], disable_tqdm=True)
    assert "it/s" not in capsys.readouterr().err


def test_texts_that_differ_in_their_last_token_alone(model):
    lm = LoopedLM(model, num_loops=[1, 2], batch_size=2, device="cpu")
    texts = [[3, 4, 5], [3, 4, 6]]
    for found, text in zip(lm.score_documents(texts), texts):
        torch.testing.assert_close(found, lm.score_documents([text])[0], rtol=1e-6, atol=0)  # of logits in fp32


def test_a_seed_draws_the_same_first_states_for_texts_and_answers(tmp_path):
    folder = save_model_and_tokenizer(tmp_path, state_init="normal", injection="add")
    one, both = (LoopedLM(folder, num_loops=depths, device="cpu", state_seed=3) for depths in (2, [1, 2]))
    found, expected = (lm.score_documents([[3, 4, 5, 6]])[0][-1, 0].item() for lm in (both, one))
    assert found == pytest.approx(expected, rel=1e-5)
    ids = one.tokenizer("a b", return_tensors="pt")["input_ids"]
    settings = {"max_new_tokens": 6, "do_sample": False, "num_loops": 2}
    seeded, other = (one.model.generate(ids, state_seed=seed, **settings)[0, 2:] for seed in (3, None))
    (text,) = one.generate_until([asked_to_write("a b")], disable_tqdm=True)
    assert text == one.tokenizer.decode(seeded, skip_special_tokens=True)
    assert not seeded.equal(other)


# early exit


def question(context: str, continuation: str) -> Instance:
    return Instance("loglikelihood", {}, (context, continuation), 0, ("", 0, 1))


@pytest.mark.parametrize(
    "criterion,threshold", [("max_prob", 0.3), ("entropy_diff", 0.2), ("latent_diff", 0.5), ("gate", 0.7)]
)
def test_exits_chosen_after_all_loops(tmp_path, criterion, threshold):
    folder = save_model_and_tokenizer(tmp_path, exit_gate="normed", loop_loss="exit_weighted", num_loops=6)
    arguments = {"exit_criterion": criterion, "exit_threshold": threshold, "min_loops": 2, "exit_selection": "after"}
    lm = LoopedLM(folder, num_loops=[3, 6], batch_size=2, device="cpu", **arguments)
    asked = [question("a b c d", " e f g h i"), question("c", " d d a e")]
    found = {depth: (lm.at(depth).loglikelihood(asked, disable_tqdm=True), lm.mean_loops) for depth in (3, 6)}

    all_loops = {3: [], 6: []}
    for i, request in enumerate(asked):
        ids = torch.tensor(lm.tokenizer("".join(request.args))["input_ids"])
        with torch.no_grad():
            outputs = lm.model(
                ids[None, :-1], output_loop_logits=True, output_loop_hidden_states=True, output_exit_probabilities=True
            )
        sums = {3: 0.0, 6: 0.0}
        for place in range(len(lm.tokenizer(request.args[0])["input_ids"]) - 1, len(ids) - 1):
            p = [logits[0, place].double().softmax(-1) for logits in outputs.loop_logits]
            entropies = [-(q * q.log()).sum() for q in p]
            states = [state[0, place] for state in outputs.loop_hidden_states]
            gate = outputs.exit_probabilities[0, place].double().cumsum(0)
            exits = [
                {
                    "max_prob": p[k].max() >= threshold,
                    "entropy_diff": k > 0 and (entropies[k] - entropies[k - 1]).abs() <= threshold,
                    "latent_diff": k > 0 and (states[k] - states[k - 1]).norm() / states[k].norm() <= threshold,
                    "gate": gate[k] >= threshold and k < 5,
                }[criterion]
                for k in range(6)
            ]
            for depth in (3, 6):
                loops = next((k + 1 for k in range(1, depth) if exits[k]), depth)
                all_loops[depth].append(loops)
                sums[depth] += p[loops - 1][ids[place + 1]].log().item()
        for depth in (3, 6):
            assert found[depth][0][i][0] == pytest.approx(sums[depth], rel=1e-5)
    for depth in (3, 6):
        assert found[depth][1] == pytest.approx(sum(all_loops[depth]) / len(all_loops[depth]))
    assert len(set(all_loops[6])) > 1, "all tokens exit alike: the threshold tests nothing"


CODA = {"num_prelude_layers": 1, "num_coda_layers": 1}


@pytest.mark.parametrize("fields,criterion,threshold", [
    ({}, "max_prob", 0.15), ({}, "latent_diff", 0.5), (CODA, "entropy_diff", 0.2), (CODA, "gate", 0.7)
])  # fmt: skip
@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.some(4)
def test_scored_rows_exit_as_in_passes_of_one_row(tmp_path, padding_side, fields, criterion, threshold):
    fields = {"exit_gate": "normed", "loop_loss": "exit_weighted", "num_loops": 6, **fields}
    folder = save_model_and_tokenizer(tmp_path, padding_side, **fields)
    arguments = {"exit_criterion": criterion, "exit_threshold": threshold, "min_loops": 2}
    asked = [("a b c d", " e f g h i"), ("c", " d d a e"), ("c", " d d a"), ("e f", " g")]
    asked = [question(*texts) for texts in asked]
    lm, after = (
        LoopedLM(folder, num_loops=[3, 6], batch_size=3, device="cpu", exit_selection=selection, **arguments)
        for selection in ("stop", "after")
    )
    differences = []
    for depth in (3, 6):
        found, sums, greedy, loops = lm.at(depth).loglikelihood(asked, disable_tqdm=True), [], [], []
        for request in asked:
            ids = torch.tensor(lm.tokenizer("".join(request.args))["input_ids"])
            first = len(lm.tokenizer(request.args[0])["input_ids"]) - 1
            rule = ExitRule(criterion, threshold, min_loops=2)
            with torch.no_grad():
                outputs = lm.model(ids[None, :-1], num_loops=depth, exit_rule=rule)
            log_p, targets = outputs.logits[0, first:].double().log_softmax(-1), ids[first + 1 :]
            sums.append(sum(row[token].item() for row, token in zip(log_p, targets)))
            greedy.append(log_p.argmax(-1).equal(targets))
            loops += outputs.token_loops[0, first:].tolist()
        assert [value for value, _ in found] == pytest.approx(sums, rel=1e-5)
        assert [is_greedy for _, is_greedy in found] == greedy
        assert lm.mean_loops == pytest.approx(sum(loops) / len(loops))
        others = after.at(depth).loglikelihood(asked, disable_tqdm=True)
        differences += [abs(one - other) for (one, _), (other, _) in zip(found, others)]
    assert max(differences) > 1e-3 and len(set(loops)) > 1, "all tokens exit alike: the threshold tests nothing"


def test_kept_answers_are_of_one_way_to_exit(model, tmp_path, monkeypatch):
    exits = {"exit_criterion": "max_prob", "exit_threshold": 0.15, "num_loops": 4, "device": "cpu"}
    asked = [question("a b c d", " e f g"), question("c", " d a")]

    def answers(selection, **where):
        lm = LoopedLM(model, exit_selection=selection, **exits, **where)
        return lm.loglikelihood(asked, True), lm.generate_until([asked_to_write("a b c")], True)

    fresh = {selection: answers(selection) for selection in ("stop", "after")}
    assert all(one != other for one, other in zip(*fresh.values()))
    for _ in range(2):
        for selection in ("after", "stop"):
            assert answers(selection, answers=str(tmp_path / "answers")) == fresh[selection]
        monkeypatch.setattr(LoopedLM, "score_tokens", lambda *_: pytest.fail("scored again"))
        monkeypatch.setattr(LoopedLM, "_model_generate", lambda *_, **__: pytest.fail("generated again"))


def test_exits_in_texts_longer_than_the_window(model):
    """A text of 70 words is scored in two windows; the second reaches back as far as 64 positions allow."""
    text = words(random.Random(1), 70)
    exits = {"exit_criterion": "max_prob", "exit_threshold": 0.3, "exit_selection": "after"}
    lm = LoopedLM(model, num_loops=[4], batch_size=2, device="cpu", **exits)
    (found,) = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0, ("", 0, 1))], True)
    ids = [lm.tokenizer.bos_token_id, *lm.tokenizer(text, add_special_tokens=False)["input_ids"]]
    total, loops = 0.0, []
    for window, places in ((ids[:64], range(64)), (ids[6:70], range(58, 64))):
        with torch.no_grad():
            outputs = lm.model(torch.tensor([window]), num_loops=4, output_loop_logits=True)
        p = torch.stack([logits[0].double().softmax(-1) for logits in outputs.loop_logits])  # [loops, 64, words]
        for place in places:
            taken = next((k for k in range(3) if p[k, place].max() >= 0.3), 3)
            total += p[taken, place, ids[len(loops) + 1]].log().item()
            loops.append(taken + 1)
    assert found == pytest.approx(total, rel=1e-5) and len(set(loops)) > 1
    assert lm.mean_loops == pytest.approx(sum(loops) / 70)


def test_contexts_that_are_cut_are_told(model, logged):
    lm = LoopedLM(model, num_loops=[1], device="cpu")
    lm.score_tokens([("", [5] * length, [6, 7]) for length in (62, 63)], True)
    assert not logged  # the last token is not read, so 63 and 2 fill 64 positions
    lm.score_tokens([("", [5] * length, [6, 7]) for length in (63, 64, 90)], True)
    (record,) = logged
    assert "2 of 3 requests are longer than max_length=64 tokens: their contexts lose" in record.getMessage()


def test_thresholds_that_are_always_or_never_reached(model, manager, expected):
    for threshold, depth in ((0.0, 2), (2.0, 4)):
        arguments = {"exit_criterion": "max_prob", "exit_threshold": min(threshold, 1.0), "min_loops": 2}
        found = ours(model, manager, [4], 7, tasks=["choice", "rolling"], **arguments)[4]
        assert_same(found, expected[depth], ["choice", "rolling"])
        assert found["config"]["mean_loops"] == depth


@pytest.mark.parametrize("selection,fewest", [("stop", 2), ("after", 4)])
def test_exits_of_generated_tokens(model, selection, fewest):
    arguments = {"exit_criterion": "max_prob", "exit_threshold": 0.2, "min_loops": 2, "exit_selection": selection}
    lm = LoopedLM(model, num_loops=4, batch_size=2, device="cpu", **arguments)
    prompts = ["a b c d", "e", "f g"]
    wishes = {"until": [], "max_gen_toks": 5}
    asked = [Instance("generate_until", {}, (prompt, wishes), 0, ("", 0, 1)) for prompt in prompts]
    texts, loops = lm.generate_until(asked, disable_tqdm=True), []
    for prompt, text in zip(prompts, texts):
        ids = lm.tokenizer(prompt, return_tensors="pt")["input_ids"]
        outputs = lm.model.generate(
            ids, max_new_tokens=5, do_sample=False, num_loops=4, return_dict_in_generate=True, **arguments
        )
        assert text == lm.tokenizer.decode(outputs.sequences[0, ids.shape[1] :], skip_special_tokens=True)
        loops += [taken for taken in outputs.token_loops[0].tolist() if taken]
    assert lm.mean_loops == pytest.approx(sum(loops) / len(loops))
    assert (min(loops), max(loops)) == (fewest, 4)


@pytest.mark.parametrize("exits", [{}, {"exit_criterion": "max_prob", "exit_threshold": 0.2}], ids=["plain", "exits"])
def test_options_that_were_saved_change_no_text(model, exits, monkeypatch):
    """Nor its loops; drafts of 2 loops are none at depth 1."""
    lm, found = LoopedLM(model, num_loops="1,4", device="cpu", **exits), []
    exits_saved = {"exit_criterion": "max_prob", "prompt_loops": 1, "exit_interval": 3}
    for saved in ({}, {"draft_loops": 2}, exits_saved, {"max_new_tokens": 2}):
        with monkeypatch.context() as patched:
            for name, value in saved.items():
                patched.setattr(lm.model.generation_config, name, value, raising=False)
            for depth in lm.depths:
                found.append([lm.at(depth).generate_until([asked_to_write("a b c")], True), lm.mean_loops])
    assert found[:2] == found[2:4] == found[4:6] == found[6:]


def test_exits_after_all_loops_of_texts_by_a_model_with_a_coda(tmp_path):
    """It runs after every loop, so that `generate` can keep no cache."""
    model = save_model_and_tokenizer(tmp_path, num_coda_layers=1)
    exits = {"exit_criterion": "max_prob", "exit_threshold": 0.1, "exit_selection": "after"}
    lm = LoopedLM(model, num_loops=4, device="cpu", **exits)
    (text,) = lm.generate_until([asked_to_write("a b c")], disable_tqdm=True)
    ids = lm.tokenizer("a b c", return_tensors="pt")["input_ids"]
    outputs = lm.model.generate(
        ids, max_new_tokens=6, do_sample=False, use_cache=False, num_loops=4, return_dict_in_generate=True, **exits
    )
    assert text == lm.tokenizer.decode(outputs.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    assert lm.mean_loops == outputs.token_loops.double().mean().item()


def asked_to_write(prompt: str, **wishes) -> Instance:
    return Instance("generate_until", {}, (prompt, {"until": [], "max_gen_toks": 6, **wishes}), 0, ("", 0, 1))


def test_a_temperature_alone_is_sampling(model):
    """lm-eval samples wherever the temperature is above 0: each repeat is another text, and none is kept."""
    torch.manual_seed(0)
    lm = LoopedLM(model, num_loops=2, batch_size=2, device="cpu")
    for wishes in ({"temperature": 1.0}, {"temperature": 1.0, "do_sample": True}):
        texts = lm.generate_until([asked_to_write("a b", **wishes) for _ in range(3)], disable_tqdm=True)
        assert len(set(texts)) > 1 and not lm.answers
    greedy = [asked_to_write("a b", temperature=0.0)] * 2
    assert len(set(lm.generate_until(greedy, disable_tqdm=True))) == 1 and lm.answers


def test_mean_loops_of_texts_that_stop_do_not_depend_on_the_batch(model):
    """A row of a batch is written on after its stop string, until the last one stops; by itself it ends there."""
    arguments = {"exit_criterion": "max_prob", "exit_threshold": 0.2}
    prompts, counted = ["a b c d", "e", "f g", "h i j a"], []
    lm = LoopedLM(model, num_loops=4, batch_size=1, device="cpu", **arguments)
    (free,) = lm.generate_until([asked_to_write(prompts[0], until=["zz"], max_gen_toks=12)], disable_tqdm=True)
    half = len(free) // 2
    wishes = {"until": [free[half : half + 2], "zz"], "max_gen_toks": 12}  # at which the first of them stops
    for batch_size in (1, 2, 4):
        lm = LoopedLM(model, num_loops=4, batch_size=batch_size, device="cpu", **arguments)
        lm.generate_until([asked_to_write(prompt, **wishes) for prompt in prompts], disable_tqdm=True)
        counted.append(lm.loops)
    assert counted[0] == counted[1] == counted[2]
    tokens = sum(answer.tokens for answer in counted[0][""].values())
    assert len(prompts) < tokens < 12 * len(prompts), "none or all stop at once: nothing is tested"


def test_loops_of_sampled_texts(model):
    """Both of two texts to one request are counted."""
    torch.manual_seed(0)
    lm = LoopedLM(model, num_loops=4, batch_size=3, device="cpu", exit_criterion="max_prob", exit_threshold=0.3)
    requests = [asked_to_write(prompt, temperature=1.0) for prompt in ("a b", "a b", "c")]
    lm.generate_until(requests, disable_tqdm=True)
    twice, once = lm.loops[""].values()
    assert (twice.tokens, once.tokens) == (12, 6)
    assert lm.mean_loops == (twice.loops + once.loops) / 18 and 1 < lm.mean_loops < 4


def test_greedy_texts_are_kept_where_others_are_sampled(model):
    """In the order of the requests, and counted in the mean loops, with sampled ones beside them or without."""
    arguments = {"exit_criterion": "max_prob", "exit_threshold": 0.3}
    lm = LoopedLM(model, num_loops=4, batch_size=2, device="cpu", **arguments)
    greedy, sampled = (
        [asked_to_write(prompt, **wishes) for prompt in ("a b", "c", "d e f")] for wishes in ({}, {"temperature": 1.0})
    )
    alone = lm.generate_until(greedy, disable_tqdm=True)
    lm = LoopedLM(model, num_loops=4, batch_size=2, device="cpu", **arguments)
    mixed = [request for pair in zip(sampled, greedy) for request in pair]
    texts = lm.generate_until(mixed, disable_tqdm=True)
    assert texts[1::2] == alone and texts[::2] != alone and len(lm.answers) == 3
    assert sum(answer[2] for answer in lm.answers.values()) == len(alone) * 6
    assert sum(answer.tokens for answer in lm.loops[""].values()) > len(alone) * 6


# the command


def command(*arguments: str, monkeypatch):
    # without lm-eval's own tasks, which are many to read
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setattr(sys, "argv", ["eval.harness", *arguments])
    harness.main(sys.argv[1:])


def read(folder: Path, pattern: str) -> list[dict]:
    return [json.loads(line) for path in folder.rglob(pattern) for line in path.read_text().splitlines()]


def test_loops_of_each_task_and_question(model, tasks, tmp_path, monkeypatch, capsys):
    """They are those of passes of one row."""
    exits = "exit_criterion=max_prob,exit_threshold=0.15"
    command(
        "--model", "looped", "--model_args", f"pretrained={model},num_loops=2,4,{exits}", "--tasks", "choice,letter",
        "--include_path", tasks, "--batch_size", "7", "--device", "cpu", "--output_path", str(tmp_path / "out"),
        "--log_samples", "--limit", "4", "--use_cache", str(tmp_path / "cache"), monkeypatch=monkeypatch,
    )  # fmt: skip
    assert "; 1 more in the table." in capsys.readouterr().out  # of four: mean loops are no measure to be best at
    lm = LoopedLM(model, device="cpu")
    rule, of_depths = ExitRule("max_prob", 0.15), {}
    for depth in (2, 4):
        folder, of_tasks = tmp_path / f"out/loops_{depth}", []
        (results,) = [json.loads(path.read_text()) for path in folder.rglob("results_*.json")]
        for task in ("choice", "letter"):
            of_task = []
            for sample in read(folder, f"samples_{task}_*.jsonl"):
                found = []
                for request in sample["arguments"].values():
                    ids = torch.tensor([lm.tokenizer(request["arg_0"] + request["arg_1"])["input_ids"]])
                    first = len(lm.tokenizer(request["arg_0"])["input_ids"]) - 1
                    with torch.no_grad():
                        outputs = lm.model(ids[:, :-1], num_loops=depth, exit_rule=rule)
                    found.append(outputs.token_loops[0, first:])
                assert sample["loops"] == [int(loops.sum()) for loops in found]
                assert sample["tokens"] == [len(loops) for loops in found]
                of_task += found
            of_tasks.append(torch.cat(of_task).double().mean().item())
            assert results["results"][task]["mean_loops"] == pytest.approx(of_tasks[-1])
        assert abs(of_tasks[0] - of_tasks[1]) > 1e-3
        of_depths[depth] = of_tasks
    for place, task in enumerate(("choice", "letter")):
        row = f"| mean loops of {task} | {of_depths[2][place]:.4f} | {of_depths[4][place]:.4f} |"
        assert row in (tmp_path / "out/depth.md").read_text().splitlines()


def test_several_thresholds_in_one_call_are_calls_of_one(model, tasks, tmp_path, monkeypatch, capsys):
    """Beside lm-eval's results at each: a table in which every number has its threshold and mean loops."""
    found = {}
    for name, thresholds in {"both": "0.15,0.3", "low": "0.15", "high": "0.3"}.items():
        arguments = f"pretrained={model},num_loops=2,4,exit_criterion=max_prob,exit_threshold={thresholds}"
        command(
            "--model", "looped", "--model_args", arguments, "--tasks", "choice,letter",
            "--include_path", tasks, "--batch_size", "7", "--device", "cpu", "--output_path", str(tmp_path / name),
            "--limit", "3", monkeypatch=monkeypatch,
        )  # fmt: skip
        found[name] = (tmp_path / name / "exits.csv").read_text().splitlines()
    header, *rows = found["both"]
    assert header == "exit_criterion,exit_threshold,exit_selection,num_loops,task,metric,mean_loops,value,stderr"
    assert rows == found["low"][1:] + found["high"][1:] and len(rows) == 16 and len({*rows}) == 16
    for line in rows:
        _, threshold, _, depth, task, metric, loops, value, error = line.split(",")
        folder = tmp_path / "both" / f"threshold_{threshold}" / f"loops_{depth}"
        (results,) = [json.loads(path.read_text()) for path in folder.rglob("results_*.json")]
        of_task = results["results"][task]
        assert float(value) == of_task[f"{metric},none"] and float(error) == of_task[f"{metric}_stderr,none"]
        assert float(loops) == of_task["mean_loops"] and results["config"]["exit_threshold"] == float(threshold)
    assert "| choice acc | threshold 0.15 |" in (tmp_path / "both/depth.md").read_text()


def test_command(model, tasks, expected, tmp_path, monkeypatch, capsys):
    arguments = [
        "--model", "looped", "--model_args", f"pretrained={model},num_loops=1,2,4", "--tasks", ",".join(TASKS),
        "--include_path", tasks, "--batch_size", "7", "--device", "cpu", "--output_path", str(tmp_path / "out"),
        "--log_samples", "--use_cache", str(tmp_path / "cache"),
    ]  # fmt: skip
    command(*arguments, monkeypatch=monkeypatch)
    assert "| choice acc | " in capsys.readouterr().out
    assert "| 4 loops |" in (tmp_path / "out/depth.md").read_text()
    assert (tmp_path / "out/depth.svg").read_text().startswith("<svg")
    for depth in DEPTHS:
        folder = tmp_path / f"out/loops_{depth}"
        (results,) = [json.loads(path.read_text()) for path in folder.rglob("results_*.json")]
        assert results["config"]["model_args"]["num_loops"] == results["config"]["num_loops"] == depth
        assert results["versions"] == expected[depth]["versions"] and "torch" in results["package_versions"]
        assert {*expected[depth]} - {"samples"} <= {*results}
        for task in TASKS:
            assert len(read(folder, f"samples_{task}_*.jsonl")) == len(task_documents()[task])
            assert values(results, task) == pytest.approx(values(expected[depth], task), rel=1e-5)

    # a second time, from the answers that were kept
    monkeypatch.setattr(LoopedLM, "score_tokens", lambda *_: pytest.fail("scored again"))
    monkeypatch.setattr(LoopedLM, "_model_generate", lambda *_, **__: pytest.fail("generated again"))
    on_any_device = [argument for argument in arguments if argument not in ("--device", "cpu")]
    command(*on_any_device, monkeypatch=monkeypatch)


def test_exits_after_all_loops_save_none(model, tasks, monkeypatch, capsys):
    arguments = f"pretrained={model},num_loops=4,exit_criterion=max_prob,exit_threshold=0.1,exit_selection=after"
    options = ["--tasks", "letter", "--include_path", tasks, "--device", "cpu", "--limit", "2"]
    command("--model", "looped", "--model_args", arguments, *options, monkeypatch=monkeypatch)
    said = capsys.readouterr().out
    assert re.search(r"With exits: [123]\.\d\d of 4 loops\.$", said, re.MULTILINE)


def test_a_config_file_says_where_tasks_and_results_lie(model, tasks, tmp_path, monkeypatch):
    """Also where the model is named beside it, and lies in a training run, which has a folder for results."""
    run = Path(shutil.copytree(model, tmp_path / "run"))
    (run / "metrics.jsonl").write_text("")
    config = {"include_path": tasks, "output_path": str(tmp_path / "out"), "tasks": ["letter"], "limit": 2}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    arguments = ["--config", str(tmp_path / "config.yaml"), "--model", "looped", "--device", "cpu"]
    command(*arguments, "--model_args", f"pretrained={run},num_loops=1", monkeypatch=monkeypatch)
    assert (tmp_path / "out/depth.md").is_file() and not (run / "eval").exists()


def test_the_token_of_the_hub_is_that_of_the_environment(model, tasks, monkeypatch):
    class TrackerError(Exception):
        pass

    def tracker(**options):
        raise TrackerError(options["token"])

    monkeypatch.setattr(harness, "EvaluationTracker", tracker)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    arguments = ["--model", "looped", "--model_args", f"pretrained={model}", "--tasks", "letter", "--device", "cpu"]
    with pytest.raises(TrackerError, match="^hf_secret$"):
        command(*arguments, "--include_path", tasks, monkeypatch=monkeypatch)


def test_a_few_questions_tell_no_best_depth(model, tmp_path, monkeypatch, capsys):
    """Their right answers are those that the model chooses at its deepest alone: its accuracies are 0 and 1."""
    lm = LoopedLM(model, num_loops=[1, 4], device="cpu")
    rows = []
    for number in range(10):
        question = words(random.Random(number), 5)
        requests = [Instance("loglikelihood", {}, (question, f" {answer}"), 0, ("", 0, 1)) for answer in "abc"]
        shallow, deep = ([answer[0] for answer in lm.at(depth).loglikelihood(requests)] for depth in (1, 4))
        if shallow.index(max(shallow)) != deep.index(max(deep)):
            rows.append({"question": question, "choices": ["a", "b", "c"], "answer": deep.index(max(deep))})
    config = {**task_configs(tmp_path)["letter"], "num_fewshot": 0, "metric_list": [{"metric": "acc"}]}
    (tmp_path / "letter.yaml").write_text(json.dumps(config))
    (tmp_path / "letter.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--tasks", "letter", "--include_path", str(tmp_path), "--device", "cpu"]
    arguments = f"pretrained={model},num_loops=1,4"
    command("--model", "looped", "--model_args", arguments, *options, monkeypatch=monkeypatch)
    assert "letter acc is highest at 4 loops (1.0000)." in capsys.readouterr().out
    budget.main([model, "--loops", "1,4", *options, "--output", str(tmp_path / "out")])
    assert "letter acc is highest at 4 loops (1.0000)." in capsys.readouterr().out


def test_predictions_alone_have_no_curve(model, tasks, tmp_path, monkeypatch, capsys):
    """lm-eval's metric `bypass`, 999 at every depth, says that nothing was scored."""
    arguments = ["--model", "looped", "--model_args", f"pretrained={model},num_loops=1,2", "--tasks", "writing"]
    arguments += ["--include_path", tasks, "--device", "cpu", "--output_path", str(tmp_path), "--predict_only"]
    command(*arguments, monkeypatch=monkeypatch)
    said = capsys.readouterr().out
    assert "bypass" not in said and "999" not in said and "Nothing was scored." in said
    assert not list(tmp_path.glob("depth.*"))
    assert len(read(tmp_path / "loops_2", "samples_writing_*.jsonl")) == len(task_documents()["writing"])


def scored(prompt: str) -> Instance:
    return Instance("loglikelihood", {}, (prompt, " a b"), 0, ("", 0, 1))


def test_answers_are_written_after_every_batch(model, tmp_path, monkeypatch):
    """Once for all answers and depths of a batch, so that a run that ends amid a batch loses this one alone."""
    SqliteDict = pytest.importorskip("sqlitedict").SqliteDict
    written, commit = [], SqliteDict.commit
    monkeypatch.setattr(SqliteDict, "commit", lambda *arguments: written.append(arguments) or commit(*arguments))
    lm = LoopedLM(model, num_loops="1,2,4", batch_size=2, device="cpu", answers=str(tmp_path / "kept"))
    batches, score = iter(range(3)), lm._from_logits

    def score_two_batches(tokens):
        if next(batches) == 2:
            raise KeyboardInterrupt
        return score(tokens)

    monkeypatch.setattr(lm, "_from_logits", score_two_batches)
    requests = [scored(prompt) for prompt in ("a", "b c", "d e f", "g h i j", "a c e g i")]
    with pytest.raises(KeyboardInterrupt):
        lm.loglikelihood(requests, disable_tqdm=True)
    assert len(written) == 2
    in_file = sqlite3.connect(tmp_path / "kept_rank0.db").execute("select count(*) from answers").fetchone()
    assert in_file == (2 * 2 * 3,)  # batches, requests and depths

    monkeypatch.setattr(lm, "_from_logits", score)
    asked, loglikelihoods = len(written), lm.loglikelihood(requests, disable_tqdm=True)
    assert len(written) == asked + 1  # the last request, and none for what was kept
    rolling = [Instance("loglikelihood_rolling", {}, (text,), 0, ("", 0, 1)) for text in ("a b c", "d e")]
    documents = lm.loglikelihood_rolling(rolling, disable_tqdm=True)
    texts = lm.generate_until([asked_to_write("a b"), asked_to_write("c")], disable_tqdm=True)
    assert len(written) == asked + 1 + 1 + len(texts)

    again = LoopedLM(model, num_loops="1,2,4", batch_size=2, device="cpu", answers=str(tmp_path / "kept"))
    for name in ("_from_logits", "_from_losses", "_model_generate"):
        monkeypatch.setattr(again, name, lambda *_, name=name, **__: pytest.fail(f"{name} was called again"))
    assert again.loglikelihood(requests, disable_tqdm=True) == loglikelihoods
    assert again.loglikelihood_rolling(rolling, disable_tqdm=True) == documents
    assert again.generate_until([asked_to_write("a b"), asked_to_write("c")], disable_tqdm=True) == texts


def test_answers_are_kept_in_a_new_folder(model, tmp_path):
    LoopedLM(model, num_loops=1, device="cpu", answers=str(tmp_path / "new/kept")).loglikelihood([scored("a")], True)
    assert (tmp_path / "new/kept_rank0.db").is_file()


def test_a_model_in_a_subfolder(model):
    folder, name = Path(model).parent, Path(model).name
    lm = LoopedLM(str(folder), num_loops=1, device="cpu", subfolder=name)
    expected = LoopedLM(model, num_loops=1, device="cpu").loglikelihood([scored("a")], True)
    assert lm.loglikelihood([scored("a")], True) == expected


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickled_answers_are_not_read(model, tmp_path):
    SqliteDict = pytest.importorskip("sqlitedict").SqliteDict
    lm = LoopedLM(model, num_loops=2, device="cpu", answers=str(tmp_path / "kept"))
    request = scored("a")
    lm._forget_if_changed()
    with SqliteDict(str(tmp_path / "kept_rank0.db"), tablename="answers", autocommit=True) as pickles:
        pickles[lm._key("loglikelihood", request.args, 2)] = Payload(tmp_path / "was_run")
    with pytest.raises(ValueError):
        lm.loglikelihood([request], disable_tqdm=True)
    assert not (tmp_path / "was_run").exists()


def test_answers_of_other_weights_are_not_kept(tmp_path):
    """Of a model that is trained on in the same folder, or read in another dtype."""

    def key(scale: float, **arguments) -> str:
        folder = save_model_and_tokenizer(tmp_path / "model", initializer_range=scale)
        return key_of(folder, tmp_path, **arguments)

    assert key(0.02) == key(0.02)
    assert len({key(0.02), key(0.03), key(0.02, dtype="bfloat16")}) == 3


def key_of(folder: str | Path, kept: Path, **arguments) -> str:
    """Of an answer that is kept."""
    lm = LoopedLM(str(folder), num_loops=1, device="cpu", answers=str(kept / "kept"), **arguments)
    return lm._key("loglikelihood", ("a", "b"), 1)


def test_answers_to_another_question_are_not_recalled(tmp_path):
    """Whatever changes an answer is in its key, and what does not change it is not."""
    folder = Path(save_model_and_tokenizer(tmp_path / "model"))
    other = shutil.copytree(folder, tmp_path / "other")
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    changes = [
        {}, {"max_length": 20}, {"add_bos_token": True}, {"prefix_token_id": 3}, {"tokenizer": str(other)},
        {"truncation": True}, {"softmax_dtype": "float64"}, {"think_end_token": "c"},
    ]  # fmt: skip
    keys = [key_of(folder, tmp_path, **arguments) for arguments in changes]
    assert len({*keys}) == len(changes)
    same = {"batch_size": 3, "logits_cache": False, "max_length": WINDOW, "dtype": "float32"}
    assert key_of(folder, tmp_path, **same) == keys[0]

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    keys.append(key_of(folder, tmp_path))
    shutil.copyfile(other / "tokenizer.json", folder / "tokenizer.json")
    keys.append(key_of(folder, tmp_path))
    assert len({*keys}) == len(keys)


def test_the_cache_of_simple_evaluate(model, manager, expected, tmp_path, monkeypatch):
    """It is filled as by the stock model, with no answer twice, and read without the model."""
    sqlitedict = pytest.importorskip("sqlitedict")
    arguments, caches = {"pretrained": model, "num_loops": 4}, [str(tmp_path / name) for name in ("ours", "hf")]
    for name, cache in zip(("looped", "hf"), caches):
        assert_same(run(name, manager, TASKS, 7, arguments, use_cache=cache), expected[4])
    ours_kept, hf_kept = (dict(sqlitedict.SqliteDict(f"{cache}_rank0.db")) for cache in caches)
    assert ours_kept.keys() == hf_kept.keys()
    monkeypatch.setattr(LoopedLM, "score_tokens", lambda *_, **__: pytest.fail("scored again"))
    monkeypatch.setattr(LoopedLM, "_model_generate", lambda *_, **__: pytest.fail("generated again"))
    assert_same(run("looped", manager, TASKS, 7, arguments, use_cache=caches[0]), expected[4])

    lm = LoopedLM(model, num_loops=[1, 4], device="cpu")
    with pytest.raises(ValueError, match=r"num_loops is 1\+4: name one depth, or use .*answers="):
        run(lm, manager, ["letter"], use_cache=str(tmp_path / "several"))


def test_what_is_scored_before_an_interruption_is_in_that_cache(model, tmp_path, monkeypatch):
    sqlitedict = pytest.importorskip("sqlitedict")
    lm = LoopedLM(model, num_loops=2, batch_size=1, device="cpu")
    caching = CachingLM(lm, str(tmp_path / "kept.db"))
    batches, score = iter(range(2)), lm._from_logits
    monkeypatch.setattr(lm, "_from_logits", lambda tokens: score(tokens) if next(batches, None) is not None else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        caching.loglikelihood([scored("a"), scored("b c"), scored("d e f")])
    assert len(sqlitedict.SqliteDict(str(tmp_path / "kept.db"))) == 2


def test_answers_of_models_that_are_given_as_objects(model, tmp_path, monkeypatch):
    """Others by their weights, config or adapter get answers of their own; the same, loaded again, is not asked."""
    pytest.importorskip("sqlitedict")
    peft = pytest.importorskip("peft")

    def load(seed: int | None = None, adapter: int | None = None, **fields):
        looped = transformers.AutoModelForCausalLM.from_pretrained(model, **fields)
        if seed is not None:
            looped.load_state_dict(tiny_state(looped, seed))
        if adapter is not None:
            torch.manual_seed(adapter)
            looped = peft.get_peft_model(
                looped, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
            )
        return looped

    def tiny_state(looped, seed: int) -> dict:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(x.shape, generator=generator) for name, x in looped.state_dict().items()}

    def answer(looped, **answers) -> float:
        lm = LoopedLM(looped, tokenizer=tiny_tokenizer(), num_loops=2, **answers)
        return lm.loglikelihood([scored("a b c d")], True)[0][0]

    kept = {"answers": str(tmp_path / "kept")}
    changes = [{}, {"seed": 0}, {"seed": 1}, {"adapter": 0}, {"adapter": 1}, {"rms_norm_eps": 0.5}]
    found = [answer(load(**change), **kept) for change in changes]
    assert found == [answer(load(**change)) for change in changes] and len({*found}) == len(changes)
    monkeypatch.setattr(LoopedLM, "score_tokens", lambda *_, **__: pytest.fail("scored again"))
    assert [answer(load(**change), **kept) for change in changes] == found


def test_answers_of_another_adapter_are_not_recalled(tmp_path):
    peft = pytest.importorskip("peft")
    folder, adapter = save_model_and_tokenizer(tmp_path / "model"), str(tmp_path / "adapter")
    keys = [key_of(folder, tmp_path)]
    for seed in (0, 1):
        torch.manual_seed(seed)
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), lora).save_pretrained(adapter)
        keys += [key_of(folder, tmp_path, peft=adapter)] * (1 + seed)
    assert len({*keys}) == 3 and keys[2] == keys[3]


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig", "aLoRA"])
def test_adapters_around_the_model_are_refused(model, tmp_path, kind):
    """By their folder and as an object, also at one depth; those in layers are not."""
    peft = pytest.importorskip("peft")
    if kind == "aLoRA":
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[3, 4])
    else:
        config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    adapted = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(model), config)
    adapted.save_pretrained(tmp_path)
    message = "adapter 'default' is of the kind .*Evaluate one depth at a time with .*--model hf"
    for depths in (2, [2, 4]):
        with pytest.raises(ValueError, match=message):
            LoopedLM(model, peft=str(tmp_path), num_loops=depths, device="cpu")
        with pytest.raises(ValueError, match=message):
            LoopedLM(adapted, tokenizer=tiny_tokenizer(), num_loops=depths)


@pytest.mark.parametrize("config", [
    {"name": "LoraConfig", "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False},
    {"name": "IA3Config", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"],
     "init_ia3_weights": False},
], ids=["lora", "ia3"])  # fmt: skip
def test_adapters_in_layers_are_those_of_stock_lm_eval(model, manager, tmp_path, config):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = getattr(peft, config["name"])(
        task_type="CAUSAL_LM", **{name: value for name, value in config.items() if name != "name"}
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    found = ours(model, manager, [2, 4], 7, ["choice", "rolling"], peft=str(tmp_path))[2]
    assert_same(found, stock(model, manager, 2, 7, ["choice", "rolling"], peft=str(tmp_path)), ["choice", "rolling"])


def test_stock_models_pass_through(model, tasks, tmp_path, monkeypatch, capsys):
    arguments = ["--model", "hf", "--model_args", f"pretrained={model},num_loops=2", "--tasks", "letter"]
    command(*arguments, "--include_path", tasks, "--device", "cpu", monkeypatch=monkeypatch)
    assert "|letter" in capsys.readouterr().out
    command(*arguments[:-1], "looped_p_hop_1", "--limit", "3", "--device", "cpu", monkeypatch=monkeypatch)
    assert "|looped_p_hop_1" in capsys.readouterr().out  # those of eval/tasks are known


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_report_is_proposed_where_it_has_the_result(is_inside, model, tasks, tmp_path, monkeypatch, capsys):
    """Of a training run, or a model in it: results that go elsewhere are in no report."""
    shutil.copytree(model, tmp_path / "run" / "final")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    named = tmp_path / "run" if is_inside else tmp_path / "run" / "final"
    arguments = ["--model", "looped", "--model_args", f"pretrained={named},num_loops=1"]
    arguments += ["--tasks", "letter", "--include_path", str(tasks), "--device", "cpu", "--log_samples"]
    elsewhere = [] if is_inside else ["--output_path", str(tmp_path / "elsewhere")]
    command(*arguments, *elsewhere, monkeypatch=monkeypatch)
    assert ("looped report" in capsys.readouterr().out) == is_inside
    assert (tmp_path / ("run/eval/lm_eval" if is_inside else "elsewhere") / "depth.md").is_file()


def test_a_run_that_cannot_be_written_names_the_option(model, tasks, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(model, run / "final")
    (run / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    monkeypatch.setattr(os, "access", lambda path, mode: path != run)
    arguments = ["--model", "looped", "--model_args", f"pretrained={run}", "--tasks", "letter", "--device", "cpu"]
    with pytest.raises(PermissionError, match=f"^{run} can not be written to: .* another place, with --output$"):
        command(*arguments, "--include_path", str(tasks), monkeypatch=monkeypatch)


@pytest.mark.slow
def test_plain_lm_eval_with_remote_code_alone(model, tasks, expected, tmp_path):
    """The folder's own code, in a Python that does not know this package."""
    script = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("modeling_looped", "eval"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
import functools, runpy, lm_eval.tasks
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)  # to save time
runpy.run_module("lm_eval", run_name="__main__")
"""
    output = tmp_path / "out"
    run_clean(
        script.strip(), "--model", "hf", "--model_args", f"pretrained={model},trust_remote_code=True,num_loops=4",
        "--tasks", ",".join(TASKS), "--include_path", tasks, "--device", "cpu", "--output_path", str(output),
        tmp_path=tmp_path, HF_HOME=os.environ["HF_HOME"],
    )  # fmt: skip
    (results,) = [json.loads(path.read_text()) for path in output.rglob("results_*.json")]
    for task in TASKS:
        assert values(results, task) == pytest.approx(values(expected[4], task), rel=1e-6)


@pytest.mark.slow
def test_two_processes(model, tasks, manager, tmp_path):
    """Without shots: lm-eval draws them anew in every process, so that two ask with others than one."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "eval.harness",
        "--model", "looped", "--model_args", f"pretrained={model},num_loops=1,2,4", "--tasks", ",".join(TASKS),
        "--include_path", tasks, "--batch_size", "7", "--device", "cpu", "--output_path", str(tmp_path),
        "--log_samples", "--use_cache", str(tmp_path / "kept"), "--num_fewshot", "0",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(path.name for path in tmp_path.glob("kept_rank*.db")) == ["kept_rank0.db", "kept_rank1.db"]
    for depth in DEPTHS:
        expected = run("hf", manager, model_args={"pretrained": model, "num_loops": depth}, num_fewshot=0)
        (results,) = [json.loads(path.read_text()) for path in (tmp_path / f"loops_{depth}").rglob("results_*.json")]
        for task in TASKS:
            samples = read(tmp_path / f"loops_{depth}", f"samples_{task}_*.jsonl")
            assert sorted(sample["doc_id"] for sample in samples) == list(range(len(task_documents()[task])))
            assert values(results, task) == pytest.approx(values(expected, task), rel=1e-5)


# bad input


@pytest.mark.parametrize("written,depths", [
    ("4", [4]), (4, [4]), ("1,2,8", [1, 2, 8]), ("8+1+2", [1, 2, 8]), ("1..4", [1, 2, 3, 4]), ([2, "3"], [2, 3]),
    ("1..2,6", [1, 2, 6]),
])  # fmt: skip
def test_depths(written, depths):
    assert parse_depths(written) == depths


@pytest.mark.parametrize("written", [0, -1.0, "0", "-2", "1,x", "4..1", "", "1..", 2.5, True, "2,0"])
def test_depths_that_are_none(written):
    with pytest.raises(ValueError, match="num_loops=.*write 4 or"):
        parse_depths(written)


def test_commas_of_depths_are_kept():
    assert harness.join_depths("pretrained=x,num_loops=1,2,4") == "pretrained=x,num_loops=1+2+4"
    assert harness.join_depths("num_loops=1..2,6,dtype=float32") == "num_loops=1..2+6,dtype=float32"
    assert harness.join_depths("num_loops=8,dtype=float32") == "num_loops=8,dtype=float32"
    assert harness.join_depths("max_length=8,dtype=float32") == "max_length=8,dtype=float32"


@pytest.mark.parametrize("written", ["num_loops=1,2,4", "num_loops=1+2+4", "num_loops=1..2,4", [1, 2, 4]])
def test_several_depths_of_a_model_that_lm_eval_makes(model, manager, monkeypatch, written):
    """It would evaluate the deepest alone, so that no weights are read."""
    monkeypatch.setattr(HFLM, "__init__", lambda *_, **__: pytest.fail("the model was loaded"))
    is_text = isinstance(written, str)
    arguments = f"pretrained={model},{written}" if is_text else {"pretrained": model, "num_loops": written}
    with pytest.raises(ValueError, match=r"num_loops=1\+2\+4: lm-eval .*`looped eval` .*simple_evaluate\(lm.at"):
        run("looped", manager, ["letter"], model_args=arguments)


def test_one_depth_of_a_model_that_lm_eval_makes(model, manager, expected):
    for arguments in (f"pretrained={model},num_loops=2,dtype=float32", {"pretrained": model, "num_loops": [2]}):
        assert_same(run("looped", manager, TASKS, 7, arguments), expected[2])


def refused(message: str, monkeypatch, tasks, model_args: str, *arguments: str, task: str = "letter"):
    """The command fails with the message, and no weights are read."""
    loads = lambda *_, **__: pytest.fail("the model was loaded")  # noqa: E731
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", loads)
    monkeypatch.setattr("modeling_looped.LoopedForCausalLM.from_pretrained", loads)
    with pytest.raises((ValueError, TypeError), match=message):
        command(
            "--model", "looped", "--model_args", model_args, "--tasks", task, "--include_path", tasks,
            "--device", "cpu", *arguments, monkeypatch=monkeypatch,
        )  # fmt: skip


@pytest.mark.parametrize("arguments,message", [
    ("num_loops=0", "num_loops=0 is no depth"),
    ("num_loops=1,-2", r"num_loops=1\+-2 is no depth"),
    ("num_loops=many", "num_loops=many is no depth"),
    ("exit_criterion=boredom,exit_threshold=1", "'boredom' is not known: choose one of logit_margin"),
    ("exit_criterion=gate", "needs a model with an exit gate"),
    ("exit_criterion=max_prob", "pass exit_threshold"),
    ("exit_threshold=0.5", "go with an exit_criterion"),
    ("exit_criterion=max_prob,exit_threshold=0.3+many", "0.3[+]many: write a number, or several"),
    ("exit_criterion=max_prob,exit_threshold=0.5,2", "exit_threshold=2.0 is no probability"),
    ("exit_selection=after", "go with an exit_criterion"),
    ("exit_criterion=kl,exit_selection=weighted", "exit_selection='weighted' cannot be evaluated: 'stop' ends"),
    ("num_loops=2,exit_criterion=max_prob,exit_threshold=0.5,min_loops=3", "min_loops=3 is more than"),
])  # fmt: skip
def test_arguments_that_mean_nothing(model, tasks, monkeypatch, arguments, message):
    refused(message, monkeypatch, tasks, f"pretrained={model},{arguments}")


def test_other_mistakes(model, tasks, tmp_path, monkeypatch):
    monkeypatch.setattr(lm_eval.tasks, "__file__", f"{tasks}/__init__.py")  # its own are many to read
    refused("no task is called 'nothing'", monkeypatch, tasks, f"pretrained={model}", task="nothing")
    refused("needs a model", monkeypatch, tasks, "num_loops=2")
    refused("no config.json was found", monkeypatch, tasks, f"pretrained={tmp_path}")
    (tmp_path / "file").write_text("")
    refused(
        "--output: .*file is a file: name", monkeypatch, tasks, f"pretrained={model}", "--output", f"{tmp_path}/file"
    )
    refused("--limit -2 must be above 0", monkeypatch, tasks, f"pretrained={model}", "--limit", "-2")
    refused("batch_size=2: write it as --batch_size", monkeypatch, tasks, f"pretrained={model},batch_size=2")
    refused("leave it out of gen_kwargs", monkeypatch, tasks, f"pretrained={model}", "--gen_kwargs", "num_loops=2")

    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text('{"model_type": "llama"}')
    refused("has model_type 'llama', which has no loops", monkeypatch, tasks, f"pretrained={tmp_path / 'llama'}")

    run_depth = save_model_and_tokenizer(tmp_path / "run", residual_scaling="sqrt", residual_depth="run")
    refused("cannot share a pass", monkeypatch, tasks, f"pretrained={run_depth},num_loops=1..3")

    mute = save_model_and_tokenizer(tmp_path / "mute")
    for path in Path(mute).glob("tokenizer*"):
        path.unlink()
    refused("no tokenizer could be opened", monkeypatch, tasks, f"pretrained={mute}")


def test_tokenizers_that_do_not_fit_are_refused(tmp_path):
    """Their tokens ended in an error of an index or of a type, once texts were scored."""
    folder = save_model_and_tokenizer(tmp_path)
    backend = Tokenizer(models.WordLevel({"a": 0, "far": 200}, unk_token="a"))  # no ids between
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="a").save_pretrained(folder)
    for opened in (partial(LoopedLM, folder), lambda: open_tokenizer(tmp_path, None, tiny_config())):
        with pytest.raises(ValueError, match="tokenizer has ids up to 200, but the model vocab_size=99"):
            opened()
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="a").save_pretrained(folder)
    with pytest.raises(ValueError, match="the tokenizer has neither a bos nor an eos token"):
        LoopedLM(folder)
    assert LoopedLM(folder, prefix_token_id=1).prefix_token_id == 1


def test_depths_in_the_generation_kwargs_of_a_task(model, tmp_path, monkeypatch):
    """By itself or in a group; also where lm-eval alone has read the task."""
    (tmp_path / "deep.jsonl").write_text('{"question": "a b", "answer": "c"}\n')
    config = task_configs(tmp_path)["writing"] | {"task": "deep", "tag": "tagged"}
    config["generation_kwargs"] = {**config["generation_kwargs"], "num_loops": 2}
    (tmp_path / "deep.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "deeps.yaml").write_text(yaml.safe_dump({"group": "deeps", "task": ["deep"]}))
    message = "num_loops: what is generated has .*: leave it out of the generation_kwargs of task deep"
    with monkeypatch.context() as patched:
        for task in ("deep", "deeps", "tagged", str(tmp_path / "deep.yaml")):
            refused(message, patched, str(tmp_path), f"pretrained={model}", task=task)
    lm = LoopedLM(model, num_loops=1, device="cpu")
    with pytest.raises(ValueError, match=message):
        run(lm, TaskManager(include_path=str(tmp_path), include_defaults=False), ["deep"])


def test_one_depth_of_a_model_scaled_by_the_run(tmp_path, manager):
    folder = save_model_and_tokenizer(tmp_path, residual_scaling="sqrt", residual_depth="run")
    found = ours(folder, manager, 2, 7, tasks=["choice", "rolling"])[2]
    assert_same(found, stock(folder, manager, 2, tasks=["choice", "rolling"]), ["choice", "rolling"])


def test_the_largest_batch_is_looked_for_once(model, monkeypatch):
    """Not at every depth again."""
    looked = []
    monkeypatch.setattr(HFLM, "_detect_batch_size", lambda self, requests=None, pos=0: looked.append(requests) or 7)
    lm = LoopedLM(model, num_loops="1..3", batch_size="auto", device="cpu")
    assert [lm.at(depth)._detect_batch_size() for depth in lm.depths] == [7, 7, 7] and looked == [None]
    assert lm._detect_batch_size([("", [1], [2])]) == 7 and len(looked) == 2


def test_fewer_requests_than_sizes_to_look_for(model):
    requests = [scored("a"), scored("b c")]
    expected = LoopedLM(model, num_loops="1,2", device="cpu").loglikelihood(requests, True)
    lm = LoopedLM(model, num_loops="1,2", batch_size="auto:4", max_batch_size=2, device="cpu")
    assert lm.loglikelihood(requests, True) == [pytest.approx(answer) for answer in expected]
    assert lm.batch_schedule == 4


def test_a_process_searches_the_size_of_its_batches_for_itself(model, monkeypatch):
    """One that recalls all of its answers never comes to a search, so another would wait for it forever."""
    lm = LoopedLM(model, num_loops="1,2", batch_size="auto", max_batch_size=2, device="cpu")
    expected = [lm._detect_batch_size(), lm.loglikelihood([scored("a"), scored("b c")], True)]
    lm = LoopedLM(model, num_loops="1,2", batch_size="auto", max_batch_size=2, device="cpu")
    lm._world_size = 2
    monkeypatch.setattr(lm, "all_gather", lambda _: pytest.fail("waited for the other process"), raising=False)
    assert [lm._detect_batch_size(), lm.loglikelihood([scored("a"), scored("b c")], True)] == expected
    assert lm.world_size == 2


def test_what_the_command_is_not_called_with(tmp_path):
    with pytest.raises(ValueError, match="is no command of lm-eval: name the model so, --model looped"):
        harness.main([str(tmp_path), "--tasks", "some"])
    arguments = ["--model", "looped", "--model_args", f"pretrained={tmp_path}", "--tasks", "some"]
    with pytest.raises(ValueError, match="--include_path nowhere: there is no such folder"):
        harness.main([*arguments, "--include_path", "nowhere"])


FOLDERS = ["arc", "gsm8k", "hellaswag", "mmlu/default", "piqa", "sciq", "super_glue/boolq"]


@pytest.mark.parametrize("folders", [FOLDERS, pytest.param(None, marks=pytest.mark.slow)], ids=["theirs", "all"])
def test_tasks_and_tags_of_lm_eval_are_checked(folders, monkeypatch):
    """Tasks of its index name their tags, and tags their tasks."""
    names = ["arc_easy", "ai2_arc", "mmlu", "gsm8k", "parcae_zero_shot"]
    if folders:  # all of lm-eval's are many to read
        theirs = [Path(lm_eval.tasks.__file__).parent / folder for folder in folders]
        of_these = TaskManager(include_path=[*theirs, harness.TASKS], include_defaults=False)
        monkeypatch.setattr(harness, "tasks_of", lambda names, *_: (of_these, names))
    manager, tasks = harness.asked_tasks(EvaluatorConfig(tasks=names, include_path=[harness.TASKS]))
    assert tasks == names and {"arc_challenge", "boolq", "mmlu_virology"} <= set(manager.all_subtasks)
    assert "ai2_arc" in manager.task_index["arc_easy"].tags and "arc_easy" in manager.task_index["ai2_arc"].tags
    for task in names:
        harness.check_tasks(manager, [task])
