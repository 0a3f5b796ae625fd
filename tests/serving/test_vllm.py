"""vLLM's engine, on a CPU, against `generate`: tokens and log-probabilities of every preset.

`make test-serving` runs this in an environment of its own, with vLLM's CPU build; elsewhere it is skipped.
"""

import gc
import os

import pytest
import torch

from modeling_looped import LoopedConfig, LoopedForCausalLM


os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
vllm = pytest.importorskip("vllm", reason="vLLM is not installed: see `make test-serving`")

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "head_dim": 64,  # the least that its kernel takes on a CPU
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "num_loops": 3,
}
# what no preset has
OTHERS = {
    "windows": {"window_pattern": "SL", "sliding_window": 8, "num_core_layers": 2},
    "grouped": {"num_attention_heads": 4, "num_key_value_heads": 2, "qk_norm": "learned"},
}
PROMPTS = [[5, 9, 33, 7, 100, 101, 102], [3], list(range(11, 38)), [200, 201, 4, 4]]
NEW_TOKENS = 12


def build(system: str) -> LoopedForCausalLM:
    torch.manual_seed(0)
    fields = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **SIZES}
    if system in OTHERS:
        config = LoopedConfig(**{"num_core_layers": 1, **fields, **OTHERS[system]})
    else:
        config = LoopedConfig.from_preset(system, **fields, num_key_value_heads=2)
    model = LoopedForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    return model


def greedy(model, prompt: list[int], num_loops: int | None = None) -> tuple[list[int], list[float]]:
    ids = torch.tensor([prompt])
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        num_loops=num_loops,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = result.sequences[0, len(prompt) :].tolist()
    return tokens, [float(logits[0].log_softmax(-1)[token]) for logits, token in zip(result.logits, tokens)]


@pytest.fixture
def engine(tmp_path):
    """An engine for a model, one at a time in this process."""
    made = []

    def make(model, **settings):
        model.save_pretrained(tmp_path)
        fixed = {"model_impl": "transformers", "trust_remote_code": True, "skip_tokenizer_init": True}
        numbers = {"dtype": "float32", "enforce_eager": True, "max_model_len": 200, "seed": 0}
        made.append(vllm.LLM(model=str(tmp_path), **fixed, **numbers, **settings))
        return made[-1]

    yield make
    made.clear()
    gc.collect()


def assert_serves(llm, model, num_loops: int | None = None):
    """Several requests at a time."""
    settings = {"temperature": 0, "max_tokens": NEW_TOKENS, "logprobs": 1, "ignore_eos": True, "detokenize": False}
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for prompt, answer in zip(PROMPTS, llm.generate(prompts, vllm.SamplingParams(**settings), use_tqdm=False)):
        tokens, log_probabilities = greedy(model, prompt, num_loops)
        served = answer.outputs[0]
        assert list(served.token_ids) == tokens
        told = [of_token[token].logprob for token, of_token in zip(tokens, served.logprobs)]
        torch.testing.assert_close(torch.tensor(told), torch.tensor(log_probabilities), rtol=0, atol=2e-5)


@pytest.mark.parametrize("system", [*LoopedConfig.preset_names(), *OTHERS])
def test_every_system(engine, system):
    model = build(system)
    assert_serves(engine(model), model)


@pytest.mark.parametrize("system", ["ouro", "windows"])
def test_prompts_in_chunks_and_shared_prefixes(engine, system):
    model = build(system)
    chunks = {"enable_chunked_prefill": True, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    llm = engine(model, **chunks, enable_prefix_caching=True)
    for _ in range(2):  # the second time from what was kept of the first
        assert_serves(llm, model)


@pytest.mark.parametrize("num_loops", [1, 5])
def test_another_depth(engine, num_loops):
    model = build("parcae")
    assert_serves(engine(model, hf_overrides={"num_loops": num_loops}), model, num_loops)
