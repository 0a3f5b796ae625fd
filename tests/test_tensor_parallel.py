"""The plan by which transformers splits a model over ranks, and two ranks that follow it."""

import os
import socket
import subprocess
import sys

import pytest
import torch

from modeling_looped.config_plans import fsdp_plan
from modeling_looped.layers import heads_of_rank
from tests.helpers import LIKE_GEMMA3, LIKE_OLMO2, SECTIONS, tiny_model
from tests.helpers_processes import import_paths


SYSTEMS = {
    "plain": {},
    "latent": {"num_key_value_heads": 2, "kv_latent_size": 8, "qk_norm": "learned", "attention_bias": "qkv"},
    "windows": {"window_pattern": "SL", "sliding_window": 3, "loop_loss": "per_loop"},
    "like_olmo2": {**LIKE_OLMO2, "num_key_value_heads": 2},
    "like_gemma3": LIKE_GEMMA3,
    "flt": {"preset": "flt"},
    "first_keys": {"num_key_value_loops": 1},
    "of_loops": {"loop_norms": True, "qk_norm": "learned", "loop_embedding": "learned"},
    "huginn": {"preset": "huginn", **SECTIONS},
    "ouro": {"preset": "ouro"},
    "parcae": {"preset": "parcae", **SECTIONS},
}
INPUT_IDS = torch.arange(3, 21).view(2, 9)

# What a rank does: outputs, gradients and tokens of every folder, to the folder. All ranks must agree on them. Then
# drafts of the last model, where each rank would choose another plan, as by times of its own.
RANK = """
import faulthandler, sys, torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig
from modeling_looped import LoopedForCausalLM
from modeling_looped.proposals import Plan, Planner

torch.set_num_threads(1)
input_ids = torch.arange(3, 21).view(2, 9)
for folder in sys.argv[1:]:
    model = LoopedForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2)).eval()
    assert model.model.core[0].mlp.up_proj.weight.to_local().shape == (24, 32)
    outputs = model(input_ids, labels=input_ids)
    outputs.loss.backward()
    gradients = {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in model.named_parameters() if p.grad is not None
    }
    with torch.no_grad():
        mixed = model(input_ids, num_loops=[1, 4]).logits
        tokens = model.generate(input_ids, max_new_tokens=5, do_sample=False)
        static = model.generate(input_ids, max_new_tokens=5, do_sample=False, cache_implementation="static")
    torch.save([outputs.loss.detach(), mixed, tokens, static, gradients], f"{folder}/rank{dist.get_rank()}.pt")
    model.save_pretrained(f"{folder}/again")
Planner.choose = lambda self, rows: Plan(1 + dist.get_rank(), None, 1)
faulthandler.dump_traceback_later(60, exit=True)  # ranks whose passes differ would wait for each other
drafted = model.generate(input_ids, max_new_tokens=16, do_sample=False, draft_loops="auto")
faulthandler.cancel_dump_traceback_later()
torch.save(drafted, f"{folder}/drafted{dist.get_rank()}.pt")
dist.barrier()
dist.destroy_process_group()
"""


def build(system: str):
    return tiny_model(**{"vocab_size": 98, "pad_token_id": 0, "eos_token_id": None, **SYSTEMS[system]})


def with_wildcards(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


@pytest.mark.parametrize("system", SYSTEMS)
def test_plan_splits_every_matrix_of_the_blocks_and_names_nothing_else(system):
    model = build(system)
    plan = dict(model.config.base_model_tp_plan)
    plan.pop("embed_tokens", None)  # which transformers may add to split a tied head
    blocks = [
        (name, module)
        for name, module in model.model.named_modules()
        if name.split(".")[0] in ("prelude", "core", "coda", "value_embeds")
    ]
    assert set(plan) <= {with_wildcards(name) for name, _ in blocks}
    matrices = {with_wildcards(name) for name, module in blocks if isinstance(module, torch.nn.Linear)}
    # the latent is shared by all heads; norms as wide as all heads leave attention whole
    wide = system == "like_olmo2"
    whole = {name for name in matrices if "kv_down_proj" in name or (wide and "self_attn" in name)}
    assert {name for name, style in plan.items() if style in ("colwise", "rowwise")} == matrices - whole
    assert {name for name in matrices - whole if name.endswith(("o_proj", "down_proj"))} == {
        name for name, style in plan.items() if style == "rowwise"
    }
    for name in model._tp_plan:  # with the head's own
        assert any(name == with_wildcards(module) for module, _ in model.named_modules()), name


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_equal_one(tmp_path):
    expected = {}
    for system in SYSTEMS:
        model = build(system)
        folder = str(tmp_path / system)
        model.save_pretrained(folder)
        outputs = model(INPUT_IDS, labels=INPUT_IDS)
        outputs.loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            mixed = model(INPUT_IDS, num_loops=[1, 4]).logits
            tokens = model.generate(INPUT_IDS, max_new_tokens=5, do_sample=False)
        expected[folder] = model, outputs.loss.detach(), mixed, tokens, gradients

    (tmp_path / "rank.py").write_text(RANK.strip())
    arguments = ["--nproc_per_node=2", f"--master_port={free_port()}", str(tmp_path / "rank.py"), *expected]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": import_paths()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for folder, (model, loss, mixed, tokens, gradients) in expected.items():
        for rank in (0, 1):
            found_loss, found_mixed, found_tokens, found_static, found = torch.load(f"{folder}/rank{rank}.pt")
            torch.testing.assert_close(found_loss, loss)
            torch.testing.assert_close(found_mixed, mixed, rtol=1e-4, atol=1e-4)
            assert torch.equal(found_tokens, tokens) and torch.equal(found_static, tokens)
            assert found.keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert (found[name] - gradient).norm() < 1e-4 * gradient.norm(), (folder, rank, name)
        again = type(model).from_pretrained(f"{folder}/again")
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    tokens = model.generate(INPUT_IDS, max_new_tokens=16, do_sample=False)
    assert all(torch.equal(torch.load(f"{folder}/drafted{rank}.pt"), tokens) for rank in (0, 1))


def test_norms_of_heads_are_whole_on_every_rank():
    """Of learned norms each rank has the gradients of its own heads, which are added up."""
    plan = tiny_model(qk_norm="learned").config.base_model_tp_plan
    for norm in ("q_norm", "k_norm"):
        assert plan[f"core.*.self_attn.{norm}"] == "replicated_with_grad_allreduce"


def test_fsdp_gathers_the_embedding_and_every_section():
    fields = {"num_prelude_layers": 1, "num_coda_layers": 1, "injection": "add"}
    assert list(fsdp_plan(tiny_model(**fields).config)) == ["embed_tokens", "prelude.*", "core.*", "coda.*"]
    assert list(fsdp_plan(tiny_model().config)) == ["embed_tokens", "core.*"]


def test_heads_of_a_rank_whose_weights_are_quantised(monkeypatch):
    """Their shards, as torchao's, have no mesh; ranks that split a layer follow each other."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    heads = torch.randn(2, 3, 4, 8)
    assert torch.equal(heads_of_rank(heads, 2, torch.nn.Linear(8, 16)), heads[..., 2:, :])
