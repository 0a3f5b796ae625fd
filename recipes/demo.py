"""A first look, from nothing: train a small looped model for a minute or two, measure it at every depth, let it write.

    python -m recipes.demo [--steps 150] [--output runs/demo] [--seed 0]

The text is Python's own standard library and language reference, which every machine with Python has. The result is
an ordinary model folder: `AutoModelForCausalLM.from_pretrained("runs/demo")`.
"""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import random
import sysconfig
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, get_cosine_schedule_with_warmup

from modeling_looped import LoopedConfig, LoopedForCausalLM


VOCAB_SIZE = 2048
WIDTH = 384
SEQUENCE_LENGTH = 256
BATCH_SIZE = 8
MATRIX_RATE, OTHER_RATE = 0.02, 5e-3  # Muon for the matrices of the blocks, AdamW for the rest
END_OF_TEXT = "<|endoftext|>"
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3"}


def read_corpus(seed: int) -> tuple[list[str], list[str]]:
    """Training and held-out documents: the language reference's topics and the library's modules, split by "
    "document."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in library.rglob("*.py") if not NOT_LIBRARY & set(path.relative_to(library).parts))
    documents = [path.read_text(encoding="utf-8", errors="ignore") for path in paths if path.name != "topics.py"]
    documents = [text for text in documents + [topics[name] for name in sorted(topics)] if text.strip()]
    random.Random(seed).shuffle(documents)
    num_held_out = len(documents) // 50
    return documents[num_held_out:], documents[:num_held_out]


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every byte is a token, so nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def encode(tokenizer, documents: list[str]) -> torch.LongTensor:
    """One stream of tokens, every document followed by the end of text."""
    ids = tokenizer(documents, add_special_tokens=False)["input_ids"]
    return torch.tensor([token for document in ids for token in [*document, tokenizer.eos_token_id]])


def make_config(tokenizer) -> LoopedConfig:
    """One layer applied four times; the loss is the mean over the depths, so that every depth is of use."""
    return LoopedConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=11 * WIDTH // 4,
        num_attention_heads=WIDTH // 64,
        num_core_layers=1,
        num_loops=4,
        max_position_embeddings=1024,
        injection="add",
        state_init="zeros",
        residual_scaling="sqrt",
        loop_loss="per_loop",
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def autocast():
    """bf16 where this processor multiplies it in hardware, else fp32."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.autocast("cpu", torch.bfloat16, bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")))


def train(model, tokens: torch.LongTensor, steps: int, seed: int):
    matrices = [parameter for parameter in model.model.core.parameters() if parameter.ndim == 2]
    in_muon = set(map(id, matrices))
    others = [parameter for parameter in model.parameters() if id(parameter) not in in_muon]
    optimizers = [
        torch.optim.Muon(matrices, MATRIX_RATE, weight_decay=0.0),
        torch.optim.AdamW(others, OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [get_cosine_schedule_with_warmup(optimizer, steps // 20, steps) for optimizer in optimizers]
    generator = torch.Generator().manual_seed(seed)
    model.train()
    start = time.perf_counter()
    for step in range(1, steps + 1):
        starts = torch.randint(len(tokens) - SEQUENCE_LENGTH, (BATCH_SIZE,), generator=generator)
        batch = torch.stack([tokens[i : i + SEQUENCE_LENGTH] for i in starts.tolist()])
        with autocast():
            loss = model(batch, labels=batch, output_logits=False, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % max(1, steps // 10) == 0:
            speed = step * batch.numel() / (time.perf_counter() - start)
            print(f"step {step:4}/{steps}   loss {loss.item():.3f}   {speed:,.0f} tokens/s", flush=True)


@torch.no_grad()
def bits_per_byte(model, tokens: torch.LongTensor, num_bytes: int, num_loops: int) -> list[float]:
    """Bits per byte of `tokens` after every loop, all from one pass per batch."""
    model.eval()
    nats = torch.zeros(num_loops)
    windows = [tokens[i : i + SEQUENCE_LENGTH + 1] for i in range(0, len(tokens) - 1, SEQUENCE_LENGTH)]
    for window in windows:  # windows overlap by one token, so that each token but the first is predicted once
        with autocast():
            outputs = model(window[None], labels=window[None], num_loops=num_loops, output_logits=False)
        nats += outputs.loop_losses * (len(window) - 1)
    return (nats / math.log(2) / num_bytes).tolist()


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)

    training_text, held_out_text = read_corpus(options.seed)
    print(
        f"{sum(map(len, training_text)) / 1e6:.1f} MB of text in {len(training_text)} documents; training a tokenizer"
    )
    tokenizer = train_tokenizer(training_text)
    tokens, held_out = encode(tokenizer, training_text), encode(tokenizer, held_out_text)
    held_out_bytes = sum(len(text.encode()) for text in held_out_text)

    model = LoopedForCausalLM(make_config(tokenizer))
    config = model.config
    print(
        f"{model.num_parameters() / 1e6:.1f} M parameters: {config.num_core_layers} layer x {config.num_loops} loops; "
        f"{options.steps} steps of {BATCH_SIZE * SEQUENCE_LENGTH} tokens out of {len(tokens) / 1e6:.1f} M"
    )
    start = time.perf_counter()
    train(model, tokens, options.steps, options.seed)
    seconds = time.perf_counter() - start

    by_depth = bits_per_byte(model, held_out, held_out_bytes, num_loops=2 * config.num_loops)
    print("\nheld-out bits per byte, every depth from one pass:")
    for depth, bits in enumerate(by_depth, start=1):
        print(f"  {depth} loops  {bits:.3f}" + ("   (deeper than trained)" if depth > config.num_loops else ""))

    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    report = {
        "command": f"python -m recipes.demo --steps {options.steps} --seed {options.seed}",
        "bits_per_byte_by_depth": by_depth,
        "parameters": model.num_parameters(),
        "tokens_seen": options.steps * BATCH_SIZE * SEQUENCE_LENGTH,
        "training_seconds": seconds,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
    }
    (options.output / "demo.json").write_text(json.dumps(report, indent=2) + "\n")

    model = AutoModelForCausalLM.from_pretrained(options.output)
    prompt = tokenizer('def read(self, size=-1):\n    """', return_tensors="pt")
    for num_loops in (1, config.num_loops):
        torch.manual_seed(options.seed)
        ids = model.generate(
            prompt.input_ids, num_loops=num_loops, max_new_tokens=64, do_sample=True, temperature=0.7, top_k=50
        )
        print(f"\n--- written with {num_loops} loop{'s' * (num_loops > 1)}:\n{tokenizer.decode(ids[0])}")
    print(f"\nsaved to {options.output}: AutoModelForCausalLM.from_pretrained({str(options.output)!r})")


if __name__ == "__main__":
    main()
