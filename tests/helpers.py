"""Models small enough for a test, in which nothing is hidden by an initialisation that is zero, one or tiny."""

import json
import random
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from modeling_looped import LoopedConfig, LoopedForCausalLM


SECTIONS = {"num_prelude_layers": 1, "num_coda_layers": 1}
TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_core_layers": 2,
    "num_loops": 3,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # at this width 0.02 gives uniform attention, which forgives wrong masks and positions
}
# what layers of dense families are made of, for 2 core layers between a prelude and a coda
LIKE_OLMO2 = {
    "num_prelude_layers": 1,
    "num_coda_layers": 1,
    "block_norm": "post",
    "qk_norm": "all_heads",
    "attention_bias": "qkvo",
    "rope_rounding": "rotated",
    "rope_pattern": "NR",
    "norm_rounding": "before_weight",
    "mlp_bias": True,
}
LIKE_GEMMA3 = {
    "num_prelude_layers": 1,
    "num_coda_layers": 1,
    "num_key_value_heads": 2,
    "block_norm": "branch_sandwich",
    "norm_offset": 1.0,
    "qk_norm": "learned",
    "attention_scale": 0.4,
    "window_pattern": "SLSS",
    "sliding_window": 4,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
    },
    "embedding_scale": 2.0,
    "round_embedding_scale": True,
}
LIKE_GEMMA2 = {**LIKE_GEMMA3, "attention_softcap": 1.5, "logit_softcap": 3.0, "round_logit_softcap": True}


class Gone:
    """The streamer of a client that hangs up: after so many calls, of which the first is that of the prompt."""

    def __init__(self, after: int):
        self.left = after

    def put(self, ids):
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("gone")


def tiny_config(preset: str | None = None, **fields) -> LoopedConfig:
    """A config of width 32 with 2 core layers and 3 loops, of a named system or of none; `fields` win."""
    fields = {**TINY, **fields}
    return LoopedConfig(**fields) if preset is None else LoopedConfig.from_preset(preset, **fields)


@torch.no_grad()
def shake(model: torch.nn.Module, std: float = 0.2, seed: int = 0) -> torch.nn.Module:
    """Add noise to every parameter, so that zero outputs, unit norms and closed gates cannot hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += std * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


def tiny_model(model_class=LoopedForCausalLM, preset: str | None = None, **fields) -> torch.nn.Module:
    """A seeded, shaken model in eval mode."""
    torch.manual_seed(0)
    return shake(model_class(tiny_config(preset, **fields))).eval()


def random_ids(batch_size: int, length: int, vocab_size: int = TINY["vocab_size"], seed: int = 0) -> torch.LongTensor:
    """Token ids without the special ones below 3."""
    return torch.randint(3, vocab_size, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def initial_state_of(model, batch_size: int, length: int) -> torch.Tensor | None:
    """Noise where the model takes any, so that state_init "normal" is not tested from zeros alone."""
    if model.config.state_init != "normal":
        return None
    return model.sample_initial_state(batch_size, length, torch.Generator().manual_seed(1)).double()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Words a to z and four special tokens: 30 ids."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def save_other_tokenizer(folder: Path):
    """As many tokens, but another of them for "a" and for "b"."""
    tiny_tokenizer().save_pretrained(folder)
    parts = json.loads((folder / "tokenizer.json").read_text())
    words = parts["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (folder / "tokenizer.json").write_text(json.dumps(parts))


def run_of(folder: Path, tokenizer: Path, held_out: str, **data) -> Path:
    """Makes a folder the training run of the model in folder/final: one metric, and a recipe with other text to train
    on than what it held out."""
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "loss": 1.0}) + "\n")
    for name, text in (("trained", "z y x w " * 100), ("held_out", held_out)):
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    data = {"sequence_length": 8, "tokenizer": str(tokenizer), "cache_dir": str(folder / "shards"), **data}
    data |= {"source": str(folder / "trained.jsonl"), "validation_source": str(folder / "held_out.jsonl")}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"data": data, "training": {"steps": 1}}))
    return folder


def run_of_documents(folder, **data):
    """A run that held out 28 documents of 3 to 9 words, between start and end tokens; their tokens."""
    run_of(folder.parent, folder, "", **data)
    draw, tokenizer = random.Random(0), tiny_tokenizer()
    texts = [" ".join(draw.choices("abcdefghij", k=draw.randint(3, 9))) for _ in range(28)]
    (folder.parent / "held_out.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    marked = (f"<s> {text} </s>" for text in texts)
    return tokenizer(" ".join(marked), add_special_tokens=False, return_tensors="pt")["input_ids"][0]


def quick_and_slow(cases, *quick) -> list:
    """Cases of a parameter for `make test-all`, those that `quick` names for `make test` too."""
    return [
        case if case in quick else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)
        for case in cases
    ]


def wait_until(condition: Callable[[], object], seconds: float = 60):
    """A failure if the condition does not come to hold in that time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} seconds"
        time.sleep(0.001)


def is_region(node) -> bool:
    return node.target is torch.ops.higher_order.invoke_subgraph


class Graphs:
    """A backend that runs the captured graph as it is and counts the graphs, and the regions of each."""

    def __init__(self):
        self.count, self.regions = 0, []

    def __call__(self, graph, example_inputs):
        self.count += 1
        self.regions.append(len({str(node.args[1]) for node in graph.graph.nodes if is_region(node)}))
        return graph

    def __deepcopy__(self, memo):  # transformers copies its compile config, and the count would go with the copy
        return self


def logits_alive(monkeypatch, model) -> list[int]:
    """Return a list to which every call of `model.logits` adds how many of its results are in memory."""
    made, counts, logits = [], [], model.logits

    def watched(hidden):
        result = logits(hidden)
        made.append(weakref.ref(result))
        counts.append(sum(reference() is not None for reference in made))
        return result

    monkeypatch.setattr(model, "logits", watched)
    return counts
