"""vLLM's engine, on a CPU, against `generate`: tokens and log-probabilities of every preset.

`make test-serving` runs this in an environment of its own, with vLLM's CPU build; elsewhere it is skipped.
"""

import gc
import json
import os
import socket
import subprocess
import sys
import time

import pytest
import torch

from modeling_looped import LoopedConfig, LoopedForCausalLM
from tests.helpers import tiny_tokenizer


os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
vllm = pytest.importorskip("vllm", reason="vLLM is not installed: see `make test-serving`")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.timeout(900)  # an engine takes its time to start

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
SYSTEMS = [*LoopedConfig.preset_names(), *OTHERS]
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict:
    """Folders, and answers at some depths: all before the first engine, which changes the classes of its models."""
    made = {}
    for system in SYSTEMS:
        model, folder = build(system), str(tmp_path_factory.mktemp(system))
        model.save_pretrained(folder)
        depths = (None, 1, 5) if system == "parcae" else (None,)
        made[system] = folder, {depth: [greedy(model, prompt, depth) for prompt in PROMPTS] for depth in depths}
    return made


@pytest.fixture
def serves(saved):
    """Asks an engine, one at a time in this process, several requests at a time."""
    engines = []

    def check(system: str, num_loops: int | None = None, times: int = 1, **settings):
        folder, answers = saved[system]
        fixed = {"model_impl": "transformers", "trust_remote_code": True, "skip_tokenizer_init": True}
        numbers = {"dtype": "float32", "enforce_eager": True, "max_model_len": 200, "seed": 0}
        engines.append(vllm.LLM(model=folder, **fixed, **numbers, **settings))
        asked = {"temperature": 0, "max_tokens": NEW_TOKENS, "logprobs": 1, "ignore_eos": True, "detokenize": False}
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        for _ in range(times):
            results = engines[0].generate(prompts, vllm.SamplingParams(**asked), use_tqdm=False)
            for result, (tokens, expected) in zip(results, answers[num_loops], strict=True):
                served = result.outputs[0]
                assert list(served.token_ids) == tokens
                told = [of_token[token].logprob for token, of_token in zip(tokens, served.logprobs)]
                torch.testing.assert_close(torch.tensor(told), torch.tensor(expected), rtol=0, atol=2e-5)

    yield check
    engines.clear()
    gc.collect()


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system(serves, system):
    serves(system)


@pytest.mark.parametrize("system", ["ouro", "windows"])
def test_prompts_in_chunks_and_shared_prefixes(serves, system):
    chunks = {"enable_chunked_prefill": True, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    serves(system, times=2, enable_prefix_caching=True, **chunks)  # the second time from what was kept of the first


@pytest.mark.parametrize("num_loops", [1, 5])
def test_another_depth(serves, num_loops):
    serves("parcae", num_loops, hf_overrides={"num_loops": num_loops})


# In processes of their own

TWO_RANKS = """
import json, sys
import vllm

if __name__ == "__main__":
    folder, prompts = sys.argv[1], json.loads(sys.argv[2])
    fixed = {"model_impl": "transformers", "trust_remote_code": True, "skip_tokenizer_init": True, "dtype": "float32"}
    engine = vllm.LLM(model=folder, **fixed, enforce_eager=True, max_model_len=200, seed=0, tensor_parallel_size=2)
    asked = vllm.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    results = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
    print("TOKENS", json.dumps([list(result.outputs[0].token_ids) for result in results]))
"""
OWN_PROCESS = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def test_tensor_parallel(saved, tmp_path):
    folder, answers = saved["ouro"]
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    command = [sys.executable, str(script), folder, json.dumps(PROMPTS)]
    done = subprocess.run(command, env=OWN_PROCESS, capture_output=True, text=True)
    lines = [line.removeprefix("TOKENS ") for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert lines, done.stderr[-3000:]
    assert json.loads(lines[0]) == [tokens for tokens, _ in answers[None]]


def test_its_server_and_the_client_of_openai(saved):
    folder, answers = saved["huginn"]
    tiny_tokenizer().save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = "--model-impl transformers --trust-remote-code --dtype float32 --enforce-eager --max-model-len 200"
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]  # what `vllm serve` runs
    command = [*server, *options.split(), "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}) as server:
        try:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
            wait_for(client, server)
            for prompt, (tokens, _) in zip(PROMPTS, answers[None]):
                extra = {"ignore_eos": True, "return_token_ids": True}
                asked = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "extra_body": extra}
                assert client.completions.create(model=folder, **asked).choices[0].token_ids == tokens
        finally:
            server.terminate()


def wait_for(client, server, seconds: int = 300):
    begun = time.monotonic()
    while True:
        assert server.poll() is None and time.monotonic() - begun < seconds, "the server did not start"
        try:
            return client.models.list()
        except openai.APIConnectionError:
            time.sleep(1)
