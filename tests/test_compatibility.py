"""The copy of this code beside a saved model imports and computes the same where names of transformers are gone."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import modeling_looped
from modeling_looped import LoopedConfig, LoopedForCausalLM

from .helpers import quick_and_slow, random_ids, tiny_config, tiny_model


COPY = "copy_of_looped"
LLAMA = "transformers.models.llama.modeling_llama"
CAPTURING = "transformers.utils.output_capturing"
# names that nothing promises to keep, and whether all goes on without them
GONE = {
    (LLAMA, "LlamaRotaryEmbedding"): False,
    (CAPTURING, "capture_outputs"): True,
    ("transformers.utils.generic", "merge_with_config_defaults"): True,
    ("transformers.utils", "can_return_tuple"): True,
    ("transformers.modeling_rope_utils", "ROPE_INIT_FUNCTIONS"): True,
    ("transformers.modeling_layers", "GenericForTokenClassification"): True,
    ("transformers.cache_utils", "QuantizedCache"): True,
    ("transformers.cache_utils", "StaticCache"): True,
    ("transformers.cache_utils", "StaticLayer"): True,
    ("safetensors", "SafetensorError"): True,
    ("torch.cpu", "get_capabilities"): True,
    ("torch.compiler", "nested_compile_region"): True,
    ("transformers.generation.logits_process", "EtaLogitsWarper"): True,
    ("transformers.generation.stopping_criteria", "StopStringCriteria"): True,
    ("torch.nn.attention.flex_attention", "BlockMask"): True,
    ("torch.nn.attention.flex_attention", "flex_attention"): True,
    ("torch._C", "_are_functorch_transforms_active"): True,
}
FIELDS = {
    "num_prelude_layers": 1,
    "num_coda_layers": 1,
    "window_pattern": "SL",
    "sliding_window": 3,
    "pad_token_id": 0,
}
IDS = random_ids(2, 5)


@pytest.fixture
def fresh_copy(monkeypatch):
    """Imports a file of the package anew, under another name and without registering anything."""
    package = ModuleType(COPY)
    package.__path__ = [str(Path(modeling_looped.__file__).parent)]
    monkeypatch.setitem(sys.modules, COPY, package)
    yield lambda file: importlib.import_module(f"{COPY}.{file}")
    for name in [name for name in sys.modules if name.startswith(f"{COPY}.")]:
        del sys.modules[name]


def results_of(model) -> list[torch.Tensor]:
    with torch.no_grad():
        outputs = model(IDS, num_loops=2, output_loop_logits=True)
        as_tuple = model(IDS, num_loops=2, return_dict=False)
        cached = model(IDS)
        exits = {"exit_criterion": "max_prob", "exit_threshold": 0.3, "eos_token_id": None}
        tokens = [model.generate(IDS, max_new_tokens=4, do_sample=False, **more) for more in ({}, exits)]
    assert cached.past_key_values.get_seq_length() == 5
    return [*outputs.loop_logits, as_tuple[0], cached.logits, *tokens]


@pytest.fixture(scope="module")
def expected():
    model = tiny_model(**FIELDS)
    model.set_attn_implementation("eager")
    return model.state_dict(), results_of(model)


QUICK = [
    (LLAMA, "LlamaRotaryEmbedding"), (CAPTURING, "capture_outputs"),
    ("transformers.utils.generic", "merge_with_config_defaults"),
    ("transformers.generation.logits_process", "EtaLogitsWarper"),
    ("transformers.generation.stopping_criteria", "StopStringCriteria"),
]  # fmt: skip


@pytest.mark.parametrize("module, name", quick_and_slow(GONE, *QUICK))
@pytest.mark.some(2)
def test_without_a_name(module, name, fresh_copy, expected, monkeypatch):
    monkeypatch.delattr(f"{module}.{name}", raising=False)
    model_class = fresh_copy("causal_lm").LoopedForCausalLM
    config = fresh_copy("configuration_looped").LoopedConfig(**tiny_config(**FIELDS).to_dict())
    assert model_class is not LoopedForCausalLM and type(config) is not LoopedConfig
    if not GONE[module, name]:
        with pytest.raises(ImportError, match=f"has no {name}.*older transformers, or a newer modeling_looped"):
            model_class(config)
        return
    weights, wanted = expected
    model = model_class(config).eval()
    model.load_state_dict(weights)
    model.set_attn_implementation("eager")
    for found, right in zip(results_of(model), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_a_class_to_inherit_from_that_is_gone(fresh_copy, monkeypatch):
    monkeypatch.delattr("transformers.modeling_layers.GenericForTokenClassification")
    model = fresh_copy("heads").LoopedForTokenClassification(tiny_config())
    with pytest.raises(ImportError, match="has no GenericForTokenClassification"):
        model(IDS)


def test_without_the_recorder_nothing_is_taken_from_it(fresh_copy, monkeypatch):
    monkeypatch.delattr(f"{CAPTURING}._active_collector")
    assert fresh_copy("compatibility").recorded_states() == []


def test_what_cannot_be_recorded_is_refused(fresh_copy, monkeypatch):
    monkeypatch.delattr(f"{CAPTURING}.capture_outputs")
    model = fresh_copy("causal_lm").LoopedForCausalLM(tiny_config())
    with pytest.raises(ImportError, match="output_hidden_states cannot be recorded"):
        model(IDS, output_hidden_states=True)
