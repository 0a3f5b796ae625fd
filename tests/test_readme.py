"""What the README says is so: its code runs, its counts are those of the models, its paths exist."""

import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from modeling_looped import LoopedConfig, LoopedForCausalLM, save_public
from tests.helpers import tiny_config, tiny_model


ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def published_counts() -> list[tuple[str, str, int]]:
    """(preset, overrides, parameters) of every table row that starts with a preset and ends with a number."""
    rows = re.findall(r"^\| `(\w+)` \|(.*)\| ([\d,]+) \|$", README, flags=re.MULTILINE)
    return [
        (preset, "".join(re.findall(r"`(\w+=.*)`", middle)), int(count.replace(",", "")))
        for preset, middle, count in rows
    ]


@pytest.mark.parametrize("preset,overrides,count", published_counts())
def test_parameter_counts(preset, overrides, count):
    config = LoopedConfig.from_preset(preset, **eval(f"dict({overrides})"))
    with torch.device("meta"):
        model = LoopedForCausalLM(config)
    model.tie_weights()
    assert model.num_parameters() == count


def test_every_preset_has_a_row():
    assert {preset for preset, _, _ in published_counts()} == set(LoopedConfig.preset_names())


def test_code_runs(tmp_path, monkeypatch):
    """All Python of the README as one script, on a tiny model in the place of the demo's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(special_tokens=["<end>"], initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    tokenizer.save_pretrained(tmp_path / "runs/demo/final")
    config = tiny_config(vocab_size=len(tokenizer), num_loops=4)
    LoopedForCausalLM(config).save_pretrained(tmp_path / "runs/demo/final")

    monkeypatch.chdir(tmp_path)
    make_repositories(tmp_path)
    script = "\n".join(re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL))
    names = {}
    exec(compile(script, "README.md", "exec"), names)
    assert names["model"].config.model_type == "looped"
    assert torch.isfinite(names["outputs"].loss)


def make_repositories(folder: Path):
    """Small models in folders of the names that stand in the README."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    save_public(tiny_model(preset="ouro", num_core_layers=2), folder / "ByteDance/Ouro-1.4B", "ouro")
    layers = {"HuggingFaceTB/SmolLM2-135M": 30, "TinyLlama/TinyLlama_v1.1": 22}
    for name, count in layers.items():
        LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=count)).save_pretrained(folder / name)
    qwen = Qwen3Config(**sizes, num_hidden_layers=28, num_key_value_heads=2, head_dim=8)
    Qwen3ForCausalLM(qwen).save_pretrained(folder / "Qwen/Qwen3-0.6B")


def test_paths_exist():
    tree = README.split("## What is where")[1].split("```")[1]
    folders, paths = {}, []  # the folder that each indent is in
    for line in tree.strip().splitlines():
        indent = len(line) - len(line.lstrip())
        inside = "".join(folders[width] for width in sorted(folders) if width < indent)
        for name in re.match(r"((?:[\w.]+(?:/|\.\w+) ?)+)", line.strip())[0].split():
            paths.append(inside + name)
            if name.endswith("/"):
                folders = {width: folder for width, folder in folders.items() if width < indent} | {indent: name}
    assert len(paths) > 60
    assert [path for path in paths if not (ROOT / path).exists()] == []
