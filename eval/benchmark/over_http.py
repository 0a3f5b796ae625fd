"""Requests the same completions over HTTP from `looped serve` and from vLLM, each in a separate process."""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import URLError
from urllib.request import Request, urlopen

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


SECONDS_TO_START = 600


def asked_over_http(model, asked: list, arrivals: list[float], args, ways: dict[str, dict]) -> dict:
    """Measure vLLM at full depth and our server with each of `ways`: tokens/s of requests sent at once, and seconds
    from arrival to answer of requests sent at `arrivals`."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer_of_numbers(model.config.vocab_size).save_pretrained(folder)
        report = {}
        with running("--vllm", *vllm_command(args.vllm, folder, args)) as url:
            report["vllm"] = measured(url, folder, asked, arrivals, {}, args)
        with running("looped serve", *our_command(folder, args)) as url:
            for name, how in ways.items():
                report[name] = measured(url, folder, asked, arrivals, how, args)
    for name in ways:
        for figure in ("tokens_per_second", "latency_p50", "latency_p99"):
            report[name][f"{figure}_over_vllm"] = report[name][figure] / report["vllm"][figure]
    return report


def tokenizer_of_numbers(vocab: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer in which token 5 is the word "5"."""
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(vocab)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def vllm_command(python: str, folder: str, args) -> tuple[list[str], dict]:
    fixed = "--trust-remote-code --model-impl transformers --enforce-eager --no-enable-prefix-caching"
    sizes = ["--dtype", args.dtype, "--max-num-seqs", str(args.batch_size), "--max-model-len", "1024"]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, *fixed.split(), *sizes]
    cores = f"0-{torch.get_num_threads() - 1}"
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores, "HF_HUB_OFFLINE": "1"}
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # vLLM has other packages
    return command, {**others, **environment}


def our_command(folder: str, args) -> tuple[list[str], dict]:
    sizes = ["--dtype", args.dtype, "--max-rows", str(args.batch_size)]
    command = [sys.executable, "-m", "looped_eval.serve", folder, *sizes, "--device", args.device]
    return command, {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}


@contextmanager
def running(name: str, command: list[str], environment: dict):
    """Run a server and yield the address of its completions."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with TemporaryDirectory() as folder:
        log = Path(folder, "log")
        try:
            with log.open("w") as file:
                options = {"env": environment, "stdout": file, "stderr": subprocess.STDOUT}
                server = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], **options)
        except OSError as error:
            raise SystemExit(f"{name}: {command[0]} cannot be run: {error.strerror}") from None
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server, name, log)
            yield f"http://127.0.0.1:{port}/v1/completions"
        finally:
            server.terminate()
            server.wait()


def wait_for(url: str, server: subprocess.Popen, name: str, log: Path):
    begun = time.monotonic()
    while True:
        try:
            urlopen(url).read()
            return
        except (URLError, ConnectionError):
            time.sleep(0.5)
        if server.poll() is not None or time.monotonic() - begun > SECONDS_TO_START:
            errors = [line for line in log.read_text().splitlines() if "Error" in line] or ["it says nothing"]
            raise SystemExit(f"{name}: the server of {server.args[0]} did not start: {errors[-1].strip()}")


def measured(url: str, model: str, asked: list, arrivals: list[float], how: dict, args) -> dict:
    at_once = [0.0] * len(asked)
    complete_all(url, model, asked[: args.batch_size], at_once[: args.batch_size], how)  # warm-up
    speeds, latencies = [], []
    for _ in range(args.repeats):
        seconds, _ = complete_all(url, model, asked, at_once, how)
        speeds.append(sum(new_tokens for _, new_tokens in asked) / seconds)
        latencies += complete_all(url, model, asked, arrivals, how)[1]
    p50, p99 = (quantile(latencies, share) for share in (0.5, 0.99))
    return {"tokens_per_second": statistics.median(speeds), "latency_p50": p50, "latency_p99": p99}


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def complete_all(url: str, model: str, asked: list, arrivals: list[float], how: dict) -> tuple[float, list[float]]:
    """Return the seconds until all requests are answered, and the seconds from the arrival of each to its answer."""
    start = time.perf_counter()

    def complete(i: int) -> float:
        time.sleep(max(0.0, start + arrivals[i] - time.perf_counter()))
        (ids,), new_tokens = asked[i]
        body = {"model": model, "prompt": " ".join(map(str, ids.tolist())), "max_tokens": new_tokens, "temperature": 0}
        request = Request(url, json.dumps({**body, **how}).encode(), {"Content-Type": "application/json"})
        usage = json.load(urlopen(request))["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), new_tokens), usage
        return time.perf_counter() - start - arrivals[i]

    with ThreadPoolExecutor(len(asked)) as pool:
        latencies = list(pool.map(complete, range(len(asked))))
    return time.perf_counter() - start, latencies
