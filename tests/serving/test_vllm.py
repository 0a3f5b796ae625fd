"""vLLM's engine, on a CPU, against `generate`: tokens and log-probabilities of every preset.

`make test-serving` runs this in an environment of its own, with vLLM's CPU build; elsewhere it is skipped.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from modeling_looped import LoopedConfig, LoopedForCausalLM
from tests.helpers import tiny_tokenizer
from tests.serving.systems import NEW_TOKENS, PROMPTS, SIZES, SYSTEMS, build, greedy


os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
vllm = pytest.importorskip("vllm", reason="vLLM is not installed: see `make test-serving`")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.timeout(900)  # an engine takes its time to start


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict:
    """Folders, and answers at some depths: all before the first engine, which changes the classes of its models."""
    made = {}
    for system in SYSTEMS:
        model, folder = build(system), str(tmp_path_factory.mktemp(system))
        model.save_pretrained(folder)
        depths = (None, 1, 5) if system == "parcae" else (None,)
        made[system] = folder, {depth: [greedy(model, prompt, depth) for prompt in PROMPTS] for depth in depths}
    exits = build("ouro")
    exits.generation_config.exit_criterion = "kl"
    wide = {"core_hidden_size": 256, "core_num_attention_heads": 4, "injection": "concat", "state_init": "zeros"}
    config = LoopedConfig(**SIZES, num_core_layers=1, coda_input="linear", **wide)
    for name, model in {"exits": exits, "wide_core": LoopedForCausalLM(config)}.items():
        made[name] = str(tmp_path_factory.mktemp(name)), {}
        model.save_pretrained(made[name][0])
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
            for result, (tokens, expected, rounding) in zip(results, answers[num_loops], strict=True):
                served = result.outputs[0]
                assert list(served.token_ids) == tokens
                told = [of_token[token].logprob for token, of_token in zip(tokens, served.logprobs)]
                torch.testing.assert_close(torch.tensor(told), torch.tensor(expected), rtol=0, atol=rounding)

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


@pytest.mark.parametrize("system", ["ouro", "parcae"])
def test_tensor_parallel(saved, system, tmp_path):
    folder, answers = saved[system]
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    command = [sys.executable, str(script), folder, json.dumps(PROMPTS)]
    done = subprocess.run(command, env=OWN_PROCESS, capture_output=True, text=True)
    lines = [line.removeprefix("TOKENS ") for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert lines, done.stderr[-3000:]
    assert json.loads(lines[0]) == [tokens for tokens, *_ in answers[None]]


def engine_of(saved, name: str, **settings):
    fixed = {"model_impl": "transformers", "trust_remote_code": True, "skip_tokenizer_init": True, "dtype": "float32"}
    return vllm.LLM(model=saved[name][0], **fixed, enforce_eager=True, max_model_len=200, **settings)


def test_saved_exits_are_refused(saved):
    with pytest.raises(ValueError, match="exit_criterion='kl'.*\"num_loops\": 3"):
        engine_of(saved, "exits")
    engine_of(saved, "exits", hf_overrides={"num_loops": 3})  # a depth that is asked for runs to the end


def test_heads_of_the_cores_own_are_refused(saved):
    with pytest.raises(ValueError, match="core_num_attention_heads=4 and num_attention_heads=2"):
        engine_of(saved, "wide_core")


def test_its_server_and_the_client_of_openai(saved):
    folder, answers = saved["huginn"]
    tiny_tokenizer().save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = "--model-impl transformers --trust-remote-code --dtype float32 --enforce-eager --max-model-len 200"
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]  # what `vllm serve` runs
    command = [*server, *options.split(), "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with subprocess.Popen(command, env=environment, start_new_session=True) as server:
        try:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
            wait_for(client, server)
            for prompt, (tokens, *_) in zip(PROMPTS, answers[None]):
                extra = {"ignore_eos": True, "return_token_ids": True}
                asked = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "extra_body": extra}
                assert client.completions.create(model=folder, **asked).choices[0].token_ids == tokens
        finally:
            stop(server)


def stop(server, seconds: int = 60):
    """The server and, if it does not end by itself, the processes that it began."""
    server.terminate()
    try:
        server.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)


def wait_for(client, server, seconds: int = 300):
    begun = time.monotonic()
    while True:
        assert server.poll() is None and time.monotonic() - begun < seconds, "the server did not start"
        try:
            return client.models.list()
        except openai.APIConnectionError:
            time.sleep(1)
