"""What an installed package must do, run by itself where its source is not: `python smoke.py`."""

import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import looped_eval.report.command
import looped_recipes.demo.command
import modeling_looped


def main():
    assert version("modeling-looped") == modeling_looped.__version__
    for module in (modeling_looped, looped_recipes.demo.command, looped_eval.report.command):
        assert "site-packages" in module.__file__, f"{module.__file__} is not the installed one"
    assert (Path(modeling_looped.__file__).parent / "py.typed").is_file()
    assert looped_recipes.demo.text.RECIPE.is_file()
    config = modeling_looped.LoopedConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_core_layers=1, num_loops=3
    )
    model = modeling_looped.LoopedForCausalLM(config).eval()
    ids = torch.tensor([[1, 2, 3]])
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(loaded(ids, num_loops=2).logits, model(ids, num_loops=2).logits)
        assert loaded.generate(ids, max_new_tokens=2, do_sample=False, num_loops=2).shape == (1, 5)
    print(f"modeling-looped {modeling_looped.__version__} works")


if __name__ == "__main__":
    main()
