"""llama.cpp on a CPU against the model: its converter reads what `looped convert` writes, and its logits are the same.

`pip install llama-cpp-python sentencepiece` builds it, which takes half an hour on two cores, and the environment
variable LLAMA_CPP names a clone of llama.cpp, such as `vendor/llama.cpp` in the source of that package; elsewhere this
is skipped.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from looped_recipes.convert import main as convert
from modeling_looped import LoopedConfig, LoopedForCausalLM


llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
CLONE = Path(os.environ.get("LLAMA_CPP", ""))
if not (CLONE / "convert_hf_to_gguf.py").is_file():
    pytest.skip("LLAMA_CPP names no clone of llama.cpp", allow_module_level=True)
FLOAT32 = 0  # in llama.cpp's enumeration of types
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_loops": 4}
SIZES |= {"num_core_layers": 2, "max_position_embeddings": 128, "initializer_range": 0.1}
TEXT = Path(__file__).read_text(encoding="utf-8")
TEXT += "It's 2026 and  naïve words don't\n\n stop:\t12345 + ½ = λ²\r\n" * 3
THETA = {"rope_type": "default", "rope_theta": 50_000.0}
# what docs/convert.md tells the reader to do
CONVERTER = """
import runpy, sys
sys.path.insert(0, CLONE)
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "dbrx"
sys.argv = ["convert_hf_to_gguf.py", OUT, "--outtype", "f32", "--outfile", FILE]
runpy.run_path(CLONE + "/convert_hf_to_gguf.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("fields", "layout"),
    [
        ({}, ["nanbeige"]),
        ({"inter_loop_norm": "shared", "num_key_value_heads": 2}, ["nanbeige"]),
        ({"tie_word_embeddings": True, "rope_parameters": THETA}, ["nanbeige", "--num-loops", "6"]),
        ({"num_prelude_layers": 1, "num_coda_layers": 1}, ["llama", "--unroll"]),
    ],
    ids=["plain", "normed", "tied_and_deeper", "unrolled"],
)
def test_its_tokens_and_logits_are_ours(fields, layout, tmp_path):
    from looped_recipes.data.tokenizers import train_bpe  # needs what vLLM's environment lacks

    tokenizer = train_bpe([TEXT], 500)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    model = LoopedForCausalLM(LoopedConfig(vocab_size=len(tokenizer), **SIZES, **ends, **fields)).eval()
    model.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    convert([str(tmp_path / "ours"), str(tmp_path / "out"), "--to", *layout])
    names = {"CLONE": str(CLONE), "OUT": str(tmp_path / "out"), "FILE": str(tmp_path / "out.gguf")}
    code = "".join(f"{name} = {value!r}\n" for name, value in names.items()) + CONVERTER
    path = os.pathsep.join([str(CLONE / "gguf-py"), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})

    how = {"n_ctx": 128, "logits_all": True, "n_threads": 1, "type_k": FLOAT32, "type_v": FLOAT32, "verbose": False}
    engine = llama_cpp.Llama(str(tmp_path / "out.gguf"), **how)
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    assert engine.tokenize(TEXT.encode(), add_bos=False) == ids
    assert engine.tokenize(TEXT.encode()) == tokenizer(TEXT).input_ids
    assert engine.detokenize(ids).decode() == TEXT
    ids = ids[-40:]
    engine.eval(ids[:30])
    for token in ids[30:]:  # from its cache
        engine.eval([token])
    with torch.no_grad():
        depth = {"num_loops": int(layout[-1])} if "--num-loops" in layout else {}
        logits = model(torch.tensor([ids]), **depth).logits[0].numpy()
    np.testing.assert_allclose(engine.scores[: len(ids)], logits, rtol=0, atol=2e-5)
