"""The demo at a size that takes seconds: the same code, fewer steps on less text."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from looped_recipes import demo
from looped_recipes.common.metrics import read_metrics


@pytest.mark.slow
def test_demo_learns_at_every_depth_and_leaves_a_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "choose_precision", lambda: None)
    text = [f"def add_{i}(a, b):\n    return a + b + {i}\n" * 8 for i in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in text))
    output = tmp_path / "run"
    final = demo.main(
        [
            f"data.source={tmp_path / 'text.jsonl'}",
            f"data.cache_dir={tmp_path / 'shards'}",
            "data.tokenizer_vocab_size=300",
            "data.sequence_length=32",
            "data.validation_fraction=0.1",
            "model.hidden_size=64",
            "model.num_attention_heads=2",
            "training.steps=30",
            "evaluation.every=3",
            "evaluation.rows=8",
            f"training.output_dir={output}",
        ]
    )
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    assert len(tokenizer) <= model.config.vocab_size and model.config.num_loops == 4
    validations = [record for record in read_metrics(output / "metrics.jsonl") if "validation/loss" in record]
    after = demo.by_depth(output / "metrics.jsonl", "bits_per_byte")
    assert list(after) == [1, 2, 3, 4, 5, 6, 7, 8]
    for depth in (1, 2, 3, 4):
        assert after[depth] < 0.7 * validations[0][f"validation/bits_per_byte_at_{depth}"]
    assert (output / "depth.png").stat().st_size > 1000
    assert (output / "report.html").read_text(encoding="utf-8").count('<svg class="chart"') >= 3
    printed = capsys.readouterr().out
    for words in ("written with 1 loop:", "written with 4 loops:", "(deeper than trained)", "report.html"):
        assert words in printed
