"""The demo at a size that takes seconds: the same code, fewer steps on less text."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes import demo


TEXT = [f"def add_{i}(a, b):\n    return a + b + {i}\n" * 4 for i in range(40)]


@pytest.fixture
def small(monkeypatch):
    """A corpus of a few kilobytes, short rows, and a model of the demo's shape."""
    monkeypatch.setattr(demo, "read_corpus", lambda seed: (TEXT[:-2], TEXT[-2:]))
    monkeypatch.setattr(demo, "VOCAB_SIZE", 300)
    monkeypatch.setattr(demo, "WIDTH", 64)
    monkeypatch.setattr(demo, "SEQUENCE_LENGTH", 32)


def run(output, steps: int = 20) -> dict:
    demo.main(["--steps", str(steps), "--output", str(output)])
    return json.loads((output / "demo.json").read_text())


def test_corpus_is_found_and_split_by_document():
    training, held_out = demo.read_corpus(seed=0)
    assert sum(map(len, training)) > 1_000_000
    assert 0 < len(held_out) < len(training) / 20
    assert not set(training) & set(held_out)
    assert demo.read_corpus(seed=0) == (training, held_out)
    assert demo.read_corpus(seed=1) != (training, held_out)


def test_learns_at_every_depth_and_repeats(small, tmp_path, capsys):
    untrained, trained = run(tmp_path / "a", steps=0), run(tmp_path / "b")
    num_loops = AutoModelForCausalLM.from_pretrained(tmp_path / "b").config.num_loops
    assert len(trained["bits_per_byte_by_depth"]) == 2 * num_loops
    for before, after in zip(untrained["bits_per_byte_by_depth"], trained["bits_per_byte_by_depth"][:num_loops]):
        assert after < 0.7 * before
    assert run(tmp_path / "c")["bits_per_byte_by_depth"] == trained["bits_per_byte_by_depth"]
    assert "written with 4 loops" in capsys.readouterr().out


def test_saved_folder_opens_and_scores_as_reported(small, tmp_path):
    report = run(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    held_out = demo.encode(tokenizer, TEXT[-2:])
    nats = 0.0
    for start in range(0, len(held_out) - 1, demo.SEQUENCE_LENGTH):  # depth 2 by itself, token by token
        window = held_out[None, start : start + demo.SEQUENCE_LENGTH + 1]
        with torch.no_grad(), demo.autocast():
            logits = model(window, num_loops=2).logits[0, :-1].double()
        nats -= logits.log_softmax(-1)[range(len(logits)), window[0, 1:]].sum().item()
    bits = nats / torch.log(torch.tensor(2.0)).item() / sum(len(text.encode()) for text in TEXT[-2:])
    assert report["bits_per_byte_by_depth"][1] == pytest.approx(bits, rel=1e-3)
