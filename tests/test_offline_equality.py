"""Every kind of request of the offline tasks: stock lm-eval, a run for each depth, and ours, one pass for all."""

import json
import os
import string
import subprocess
import sys
from pathlib import Path

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from looped_eval.harness.command import TASKS
from looped_eval.harness.looped_lm import LoopedLM
from tests.helpers import tiny_model


pytestmark = pytest.mark.slow  # test_harness.py compares with stock lm-eval in the same way in every run of the tests

DEPTHS = [1, 3]
NAMES = ["looped_p_hop_2", "looped_permutation_4", "looped_addition_2", "looped_addition_written", "looped_corpus"]
WINDOW = 48  # the questions of p_hop fit, those of addition_written too, the corpus is cut
LIMIT = 6


def character_tokenizer(padding_side: str) -> PreTrainedTokenizerFast:
    tokens = ["<pad>", "<s>", "</s>", "<unk>", *(string.ascii_letters + string.digits + string.punctuation + " \n")]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side=padding_side, **special)


def save(folder: Path, padding_side: str = "left") -> str:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = tiny_model(vocab_size=100, max_position_embeddings=WINDOW, injection="add", state_init="zeros", **special)
    model.save_pretrained(folder)
    character_tokenizer(padding_side).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def manager():
    return TaskManager(include_path=str(TASKS), include_defaults=False)


def evaluate(model, manager, **options) -> dict:
    options = {"device": "cpu", "bootstrap_iters": 0, "limit": LIMIT, **options}
    return simple_evaluate(model, tasks=list(NAMES), task_manager=manager, **options)


@pytest.fixture(scope="module")
def expected(tmp_path_factory, manager) -> dict[int, dict]:
    folder = save(tmp_path_factory.mktemp("stock"))
    return {
        depth: evaluate("hf", manager, model_args={"pretrained": folder, "num_loops": depth}, batch_size=1)
        for depth in DEPTHS
    }


def assert_same(found: dict, wanted: dict):
    for name in NAMES:
        assert len(found["samples"][name]) == len(wanted["samples"][name]) == LIMIT
        for one, other in zip(found["samples"][name], wanted["samples"][name]):
            assert one["arguments"] == other["arguments"]
            for (answer,), (right,) in zip(one["resps"], other["resps"]):
                if isinstance(right, str):
                    assert answer == right
                else:
                    assert answer == pytest.approx(right, rel=1e-5, abs=1e-5)
        metrics = {key: value for key, value in wanted["results"][name].items() if "," in key and "stderr" not in key}
        assert metrics and {key: found["results"][name][key] for key in metrics} == pytest.approx(metrics, rel=1e-5)


@pytest.mark.parametrize("batch_size,padding_side", [(1, "left"), (7, "left"), (7, "right")])
def test_batches_and_padding(tmp_path, manager, expected, batch_size, padding_side):
    lm = LoopedLM(save(tmp_path, padding_side), num_loops=DEPTHS, batch_size=batch_size, device="cpu")
    for depth in DEPTHS:
        assert_same(evaluate(lm.at(depth), manager), expected[depth])


def test_depths_differ_and_texts_exceed_the_window(expected):
    one, other = (expected[depth]["samples"] for depth in DEPTHS)
    assert all([s["resps"] for s in one[name]] != [s["resps"] for s in other[name]] for name in NAMES)
    texts = [sample["arguments"][0][0] for sample in one["looped_corpus"]]
    assert min(map(len, texts)) > 2 * WINDOW


def test_two_processes(tmp_path, expected):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "eval.harness",
        "--model", "looped", "--model_args", f"pretrained={save(tmp_path / 'model')},num_loops=1,3",
        "--tasks", ",".join(NAMES), "--batch_size", "7", "--limit", str(LIMIT), "--output_path", str(tmp_path / "out"),
        "--use_cache", str(tmp_path / "kept"),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=TASKS.parents[1])
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(path.name for path in tmp_path.glob("kept_rank*.db")) == ["kept_rank0.db", "kept_rank1.db"]
    for depth in DEPTHS:
        (path,) = (tmp_path / f"out/loops_{depth}").rglob("results_*.json")
        found = json.loads(path.read_text())["results"]
        for name in NAMES:
            metrics = {k: v for k, v in expected[depth]["results"][name].items() if "," in k and "stderr" not in k}
            assert {key: found[name][key] for key in metrics} == pytest.approx(metrics, rel=1e-5)
