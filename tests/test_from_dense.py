"""Dense models of transformers that are made to loop: at one loop they are what they were, bit for bit.

transformers' own models are the reference. What is tied or left out is compared with the dense model of those layers.
"""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.testing_utils import CaptureLogger, LoggingLevel
from transformers.utils import logging

from modeling_looped import LoopedConfig, LoopedForCausalLM, LoopedForSequenceClassification
from modeling_looped.formats.families import FAMILIES
from modeling_looped.formats.layer_choice import choose_layers
from modeling_looped.loop_parameters import LoopDelta

from .helpers import quick_and_slow, tiny_model


NUM_LAYERS = 6
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SLIDING = ("mistral", "gemma2", "gemma3_text", "olmo3")
# what the dense layers become, and how the input enters the loop
CONSTRUCTIONS = {
    "all in the core": {},
    "sections": {"num_prelude_layers": 2, "num_core_layers": 3, "num_coda_layers": 1},
    "concat": {"num_prelude_layers": 2, "num_core_layers": 3, "num_coda_layers": 1, "injection": "concat"},
    "concat, noise": {"injection": "concat", "state_init": "normal"},
    "add": {"num_prelude_layers": 1, "injection": "add"},
    "diagonal": {"injection": "diagonal"},
    "attention_all": {"num_coda_layers": 1, "injection": "attention_all"},
    "attention_first": {"injection": "attention_first"},
    "residual_all": {"injection": "residual_all"},
    "shared norm": {"num_prelude_layers": 1, "inter_loop_norm": "shared"},
    "own norm, damping": {"inter_loop_norm": "own", "loop_damping": True},
    "gate": {"num_prelude_layers": 2, "num_core_layers": 3, "num_coda_layers": 1, "loop_change_gate": True},
    "exit gate": {"exit_gate": "normed", "loop_loss": "exit_weighted"},
}
AT_EVERY_DEPTH = {  # constructions that are the dense model whatever the depth
    "concat": CONSTRUCTIONS["concat"],
    "gate": CONSTRUCTIONS["gate"],
    **{f"gate, {name}": {"injection": name, "loop_change_gate": True} for name in ("add", "attention_all")},
}
IDS = torch.randint(3, 61, (3, 9), generator=torch.Generator().manual_seed(1))


def dense_model(family: str = "llama", seed: int = 0, attention: str = "eager", **fields):
    windows = {"sliding_window": 4} if family in SLIDING else {}
    config = AutoConfig.for_model(family, **{**SIZES, **windows, **fields})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # the initial values of norms and biases would hide where they are
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.ndim > 1 else 1.0))
    return model.eval()


def looped(dense, attention: str = "eager", **options) -> LoopedForCausalLM:
    return LoopedForCausalLM.from_dense(dense, attn_implementation=attention, **options)


@torch.no_grad()
def logits(model, **arguments):
    return model(IDS, use_cache=False, **arguments).logits


@pytest.mark.parametrize(
    "family, construction",
    quick_and_slow(
        [(family, construction) for family in FAMILIES for construction in CONSTRUCTIONS],
        *[("llama", construction) for construction in CONSTRUCTIONS],
        *[(family, "concat") for family in FAMILIES],
    ),
)
@pytest.mark.some(11)
def test_one_loop_is_the_dense_model(family, construction):
    dense = dense_model(family)
    model = looped(dense, num_loops=3, **CONSTRUCTIONS[construction])
    assert model.config.num_loops == 3 and model.config.num_layers == NUM_LAYERS
    assert torch.equal(logits(model, num_loops=1), logits(dense))
    if family == "llama":
        assert torch.equal(logits(model), logits(dense)) == (construction in (*AT_EVERY_DEPTH, "concat, noise"))


def test_the_usual_attention():
    dense = dense_model(attention="sdpa")
    assert torch.equal(logits(looped(dense, "sdpa")), logits(dense))


@pytest.mark.parametrize("fields", [{"tie_word_embeddings": True}, {"head_dim": 12}, {"rope_theta": 77.0}])
def test_llamas_of_other_fields(fields):
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": fields.pop("rope_theta", 1e4)}}
    dense = dense_model(**fields, **rope)
    model = looped(dense, num_prelude_layers=1, injection="concat")
    assert torch.equal(logits(model), logits(dense))
    assert model.config.rope_parameters["rope_theta"] == rope["rope_parameters"]["rope_theta"]
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert is_tied == fields.get("tie_word_embeddings", False)


LONGER = {"linear": {"factor": 4.0}, "yarn": {"factor": 4.0}, "llama3": {
    "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}  # fmt: skip


@pytest.mark.parametrize("kind", LONGER)
def test_positions_made_longer_keep_their_base_and_their_trained_length(kind, tmp_path):
    dense = dense_model(rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    looped(dense).save_pretrained(tmp_path)
    rope = {"rope_type": kind, **LONGER[kind]}
    trained = {} if kind == "linear" else {"original_max_position_embeddings": 64}
    longer = dense_model(rope_parameters={**rope, **trained, "rope_theta": 77.0}, max_position_embeddings=256)
    opened = LoopedForCausalLM.from_pretrained
    for name in ("rope_parameters", "rope_scaling"):
        changes = {"max_position_embeddings": 256, name: rope}
        assert torch.equal(logits(looped(dense, **changes)), logits(longer))
        assert torch.equal(logits(opened(tmp_path, attn_implementation="eager", **changes)), logits(longer))
    assert "rope_theta" not in rope  # the caller's


def test_positions_of_two_layer_types_keep_both_bases():
    dense = dense_model("gemma3_text", layer_types=["sliding_attention", "full_attention"] * 3)
    before = {kind: rope["rope_theta"] for kind, rope in dense.config.rope_parameters.items()}
    assert len(set(before.values())) == 2
    rope = {"rope_type": "linear", "factor": 4.0}
    for given in (rope, {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}):
        after = looped(dense, rope_parameters=given).config.rope_parameters
        assert {kind: parameters["rope_theta"] for kind, parameters in after.items()} == before
        assert after["full_attention"]["factor"] == 4.0
        assert ("factor" in after["sliding_attention"]) == (given is rope)


# The same function at every depth


@pytest.mark.parametrize("construction", AT_EVERY_DEPTH)
def test_every_depth_is_the_dense_model(construction):
    dense = dense_model()
    model = looped(dense, num_loops=3, **AT_EVERY_DEPTH[construction])
    expected = logits(dense)
    for num_loops in (2, 5, [1, 4, 2]):
        torch.testing.assert_close(logits(model, num_loops=num_loops), expected, rtol=1e-5, atol=1e-5)
    every = model(IDS, output_loop_logits=True).loop_logits
    assert len(every) == 3 and all(torch.equal(each, expected) for each in every)
    model.train()
    shallow = model(IDS, num_loops=[3, 1, 2], backprop_loops=1).logits
    torch.testing.assert_close(shallow, expected, rtol=1e-5, atol=1e-5)


def test_a_closed_gate_decodes_as_the_dense_model():
    """Also with exits, where rows stand at different loops, and where drafts are checked."""
    dense = dense_model(eos_token_id=None)
    model = looped(dense, num_loops=4, **CONSTRUCTIONS["gate"])
    arguments = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = dense.generate(IDS, **arguments)
    assert torch.equal(model.generate(IDS, **arguments), expected)
    assert torch.equal(model.generate(IDS, draft_loops=1, **arguments), expected)
    exits = {"exit_criterion": "max_prob", "exit_threshold": 0.5}
    assert torch.equal(model.generate(IDS, **exits, **arguments), expected)


def test_gradients_reach_the_gate_and_open_it():
    model = looped(dense_model(), num_loops=3, **CONSTRUCTIONS["gate"]).train()
    gate = model.model.change_gate.factor
    for depths, window in ((3, None), ([1, 3, 2], None), ([1, 3, 2], 1)):
        model.zero_grad()
        model(IDS, labels=IDS, num_loops=depths, backprop_loops=window).loss.backward()
        assert gate.grad.abs().min() > 0
    model.zero_grad()
    model(IDS, labels=IDS, num_loops=1).loss.backward()
    assert gate.grad is None
    with torch.no_grad():
        gate.fill_(1.0)
    ungated = looped(dense_model(), num_loops=3, **{**CONSTRUCTIONS["gate"], "loop_change_gate": False})
    torch.testing.assert_close(logits(model.eval()), logits(ungated), rtol=1e-4, atol=1e-4)


def test_gradients_reach_the_half_of_concat_that_reads_the_state():
    model = looped(dense_model(), num_loops=2, **CONSTRUCTIONS["concat"]).train()
    model(IDS, labels=IDS).loss.backward()
    assert model.model.injection.proj.weight.grad[:, : SIZES["hidden_size"]].abs().max() > 0


# Which layers


def with_layers(dense, layers: list[int]):
    """The dense model of some of its layers."""
    dense = copy.deepcopy(dense)
    dense.model.layers = nn.ModuleList([dense.model.layers[layer] for layer in layers])
    dense.config.num_hidden_layers = len(layers)
    if getattr(dense.config, "layer_types", None) is not None:
        dense.config.layer_types = [dense.config.layer_types[layer] for layer in layers]
    return dense


@pytest.mark.parametrize(
    "options",
    [
        {"layers": [0, 1, 3, 4, 5], "num_prelude_layers": 2, "num_core_layers": 2, "num_coda_layers": 1},
        {"layers": [0, 1, 3, 4, 5], "num_prelude_layers": 2, "num_coda_layers": 1},
        {"layers": {"prelude": [0, 1], "core": [3, 4], "coda": [5]}},
        {"layers": {"core": [0, 1, 3, 4, 5]}},
    ],
)
@pytest.mark.some(2)
def test_layers_that_are_left_out(options):
    dense = dense_model()
    model = looped(dense, injection="concat", **options)
    assert torch.equal(logits(model, num_loops=1), logits(with_layers(dense, [0, 1, 3, 4, 5])))
    if "prelude" in str(options):
        assert [model.config.num_prelude_layers, model.config.num_core_layers, model.config.num_coda_layers] == [
            2,
            2,
            1,
        ]


# dense layers 1 to 4 in the core: two layers, two loops
TIED = {"num_prelude_layers": 1, "num_core_layers": 2, "num_coda_layers": 1}


@pytest.mark.parametrize("core_init, layers", [("lower", [1, 2]), ("stepwise", [1, 4])])
def test_tied_layers_are_those_of_the_dense_model(core_init, layers):
    dense = dense_model()
    model = looped(dense, core_init=core_init, **TIED)
    assert model.config.num_loops == 2
    assert torch.equal(logits(model), logits(with_layers(dense, [0, *layers, *layers, 5])))


@pytest.mark.parametrize(
    ("dtype", "places"), [(torch.float32, [(1, 3), (2, 4)]), (torch.bfloat16, [(1, 2, 3, 4)])], ids=str
)
def test_tied_layers_are_means(dtype, places):
    dense, num_loops = dense_model().to(dtype), len(places[0])
    model = looped(dense, core_init="average", num_loops=num_loops, num_prelude_layers=1, num_coda_layers=1)
    assert model.dtype == dtype
    for place, layers in enumerate(places):
        tied = model.model.core[place].state_dict()
        states = [dense.model.layers[layer].state_dict() for layer in layers]
        assert tied.keys() == states[0].keys()
        for name, tensor in tied.items():
            mean = torch.stack([state[name].float() for state in states]).mean(0)
            assert torch.equal(tensor, mean.to(dtype)), name


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("core_init", ["average", "lower", "stepwise"])
@pytest.mark.some(3)
def test_loops_with_weights_of_their_own_are_the_dense_layers(core_init, family):
    """At full rank, with norms of their own; at a lower one nearer to them than without."""
    dense = dense_model(family)
    options = {"core_init": core_init, "num_prelude_layers": 1, "num_core_layers": 1, "num_coda_layers": 1}
    near, full = (looped(dense, loop_lora_rank=rank, loop_norms=True, **options) for rank in (12, 48))
    assert full.config.num_loops == full.config.num_loop_sets == 4
    torch.testing.assert_close(logits(full), logits(dense), rtol=1e-3, atol=1e-3)
    bare = looped(dense, **options)
    errors = [(logits(model) - logits(dense)).norm() for model in (full, near, bare)]
    assert errors == sorted(errors)


@pytest.mark.parametrize("fields", [{}, {"injection": "add"}, {"injection": "diagonal"}], ids=str)
def test_each_loop_of_tied_layers_has_an_effect(fields):
    """And no depth but one loop for each dense layer, without an injection, is the dense model."""
    dense = dense_model()
    model = looped(dense, core_init="average", num_core_layers=2, loop_lora_rank=48, loop_norms=True, **fields)
    errors = [(logits(model, num_loops=depth) - logits(dense)).abs().max() for depth in range(1, 5)]
    assert [error < 1e-2 for error in errors] == [False, False, not fields, False]
    norms = model.model.core[0].input_layernorm.weight
    before = logits(model)
    for loop in range(3):
        with torch.no_grad():
            norms[loop] *= 2
        assert (logits(model) - before).abs().max() > 0.1
        with torch.no_grad():
            norms[loop] /= 2
    one = looped(dense, core_init="average", num_core_layers=6, injection="concat")  # one loop: nothing is tied
    assert torch.equal(logits(one), logits(dense))


@pytest.mark.parametrize("core_init", ["lower", "stepwise"])
@pytest.mark.parametrize(
    "family, fields, differ",
    [
        ("olmo3", {}, r"layers 1, 3, but these differ in sliding window \(S, L\)"),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0, 1, 1]}, r"layers 1, 3, .* rotary positions \(R, N\)"),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1, 0, 1]}, None),
        ("olmo3", {"layer_types": ["full_attention", "sliding_attention"] * 3}, None),
    ],
)
def test_loops_with_weights_of_their_own_attend_as_the_dense_layers(family, fields, differ, core_init):
    dense = dense_model(family, **fields)
    options = {**TIED, "core_init": core_init, "loop_lora_rank": 48, "loop_norms": True}
    if differ is None:
        torch.testing.assert_close(logits(looped(dense, **options)), logits(dense), rtol=1e-3, atol=1e-3)
        return
    with pytest.raises(ValueError, match=differ):
        looped(dense, **options)
    assert looped(dense, core_init=core_init, **TIED).config.num_loops == 2


def test_norms_of_each_loop_start_as_the_dense_ones():
    dense = dense_model()
    model = looped(dense, num_loops=2, loop_norms=True, loop_lora_rank=2, injection="concat")
    weight = model.model.core[3].input_layernorm.weight
    assert torch.equal(weight, dense.model.layers[3].input_layernorm.weight.expand(2, -1))
    assert torch.equal(logits(model), logits(dense))


@pytest.mark.parametrize(
    "num_dense, core, loops, expected",
    [(12, 3, 4, [0, 6, 11]), (12, 4, 3, [0, 4, 7, 11]), (6, 1, 6, [0]), (18, 6, 3, [0, 3, 7, 10, 14, 17])],
)
def test_stepwise_layers_are_evenly_spaced(num_dense, core, loops, expected):
    choice = choose_layers(num_dense, None, core, None, None, None, "stepwise")
    assert choice.num_loops == loops
    layers = [layer for (layer,) in choice.sources["core"]]
    assert len(layers) == len(expected) and layers[0] == 0
    ideal = [i * (num_dense - 1) / max(core - 1, 1) for i in range(core)]
    assert all(abs(layer - place) <= 0.5 for layer, place in zip(layers, ideal))


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"num_prelude_layers": 2, "num_core_layers": 3, "num_coda_layers": 2},
            r"2 \+ 3 \+ 2 = 7, but 6 dense layers are kept: lower the numbers$",
        ),
        ({"num_core_layers": 4}, r"0 \+ 4 \+ 0 = 4, but 6 dense layers are kept: name those .* layers=\[...\]"),
        (
            {"num_prelude_layers": 3, "num_coda_layers": 3},
            "num_prelude_layers=3 and num_coda_layers=3 leave no layer for the core: 6",
        ),
        ({"num_core_layers": 0}, "num_core_layers must be a whole number of at least 1, got 0"),
        ({"num_prelude_layers": 1.0}, "num_prelude_layers must be a whole number"),
        ({"num_loops": 0}, "num_loops must be a whole number of at least 1, got 0"),
        ({"core_init": "mean"}, "core_init must be one of copy, lower, stepwise, average, got 'mean'"),
        ({"core_init": "average"}, "say num_core_layers, or num_loops"),
        (
            {"core_init": "average", "num_core_layers": 4},
            r"num_core_layers=4 and num_loops=None do not divide the 6 .*\[0, 1, 2, 3, 4, 5\]",
        ),
        (
            {"core_init": "lower", "num_core_layers": 3, "num_loops": 3},
            "num_core_layers=3 and num_loops=3 do not divide the 6",
        ),
        ({"core_init": "lower", "num_loops": 7}, "num_core_layers=None and num_loops=7 do not divide the 6"),
        ({"layers": [0, 6]}, r"layers \[6\] are none of the dense model's, which has 0 to 5"),
        ({"layers": [0, -1]}, r"layers \[-1\] are none"),
        ({"layers": [0, 2, 1]}, r"in the order .* got \[0, 2, 1\]"),
        ({"layers": [0, 1, 1]}, "each once"),
        ({"layers": [[0], [2, 3], [5]]}, r"must be a list of numbers .* dict .*'core': \[2, 3\].* got \[\[0\], \[2"),
        ({"layers": {"core": []}}, "with layers for core"),
        ({"layers": {"core": [1], "head": [2]}}, "keys prelude, core and coda"),
        (
            {"layers": {"prelude": [0], "core": [1]}, "num_prelude_layers": 2},
            r"num_prelude_layers=2, but layers names 1 for prelude: \[0\]",
        ),
        ({"layers": {"prelude": [3], "core": [1]}}, "in the order"),
        (
            {"core_init": "average", "num_core_layers": 2, "injection": "concat"},
            "core_init='average' each of the num_loops=3 loops .* so only the last loop would have an effect: use",
        ),
        (
            {"core_init": "lower", "num_core_layers": 2, "loop_change_gate": True, "injection": "add"},
            "loop_change_gate=True starts without any change .* so only that would have an effect: use",
        ),
        ({"hidden_size": 64}, "hidden_size=64 cannot be chosen.*hidden_size=32"),
        ({"qk_norm": "free"}, "qk_norm='free' cannot be chosen.*qk_norm='none'"),
        ({"core_hidden_size": 16}, "core_hidden_size=16 cannot be chosen"),
        ({"tie_word_embeddings": True}, "would drop the dense model's head"),
        ({"injection": "add", "state_init": "embedding"}, "would add the input to itself"),
        ({"readout_norm": "none"}, "not in the model: model.norm.weight"),
        ({"n_loops": 3}, "did you mean `num_loops`"),
        ({"device_map": "auto"}, "no argument device_map"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        looped(dense_model(), **options)


def test_layers_that_slide_differently_do_not_become_one():
    types = ["sliding_attention"] + ["full_attention"] * 5
    dense = dense_model("qwen3", layer_types=types, sliding_window=4, use_sliding_window=True)
    model = looped(dense, num_prelude_layers=1, num_coda_layers=1)
    assert torch.equal(logits(model), logits(dense))
    assert sum(model.config.section_layer_types(), []) == types
    tied = looped(dense, core_init="lower", num_core_layers=3)
    assert sum(tied.config.section_layer_types(), []) == types[:3]
    with pytest.raises(ValueError, match=r"layers 0, 3 would become one, but differ in sliding window \(S, L\)"):
        looped(dense, core_init="average", num_core_layers=3)


def test_a_layer_choice_without_windows_has_none():
    types = ["sliding_attention"] + ["full_attention"] * 5
    dense = dense_model("qwen3", layer_types=types, sliding_window=4, use_sliding_window=True)
    model = looped(dense, layers=[1, 2, 3, 4, 5])
    assert not model.config.has_windows
    assert torch.equal(logits(model), logits(with_layers(dense, [1, 2, 3, 4, 5])))


# Folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Llama in several files, tied, in bf16, with a generation config of its own."""
    path = tmp_path_factory.mktemp("dense") / "llama"
    dense = dense_model(tie_word_embeddings=True).to(torch.bfloat16)
    dense.generation_config = GenerationConfig(temperature=0.6, do_sample=True, eos_token_id=[2, 5], pad_token_id=0)
    dense.save_pretrained(path, max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


def test_a_folder_in_several_files(folder, tmp_path):
    model = LoopedForCausalLM.from_dense(folder, num_prelude_layers=1, injection="concat", num_loops=2)
    dense = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and not model.training
    for name, tensor in dense.model.layers[3].state_dict().items():
        assert torch.equal(model.model.core[2].state_dict()[name], tensor), name
    assert model.lm_head.weight is model.model.embed_tokens.weight
    settings = model.generation_config
    assert (settings.temperature, settings.do_sample, settings.eos_token_id) == (0.6, True, [2, 5])
    config = model.config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    assert model.name_or_path == config.name_or_path == ""  # of no folder yet
    model.save_pretrained(tmp_path)
    again = LoopedForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model)) and again.generation_config.temperature == 0.6


@pytest.mark.parametrize("construction", ["sections", "concat", "add", "gate"])
def test_one_loop_is_the_dense_model_in_bfloat16(folder, construction):
    dense = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model = looped(folder, num_loops=2, **CONSTRUCTIONS[construction])
    assert model.dtype == dense.dtype == torch.bfloat16
    assert torch.equal(logits(model, num_loops=1), logits(dense))


def test_a_padding_token_that_there_is_not():
    """The first Llamas say pad_token_id=-1."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    dense = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, pad_token_id=-1)).eval()
    looped = LoopedForCausalLM.from_dense(dense).eval()
    assert looped.config.pad_token_id is None
    ids = torch.arange(10)[None]
    assert torch.equal(looped(ids).logits, dense(ids).logits)


def test_another_dtype(folder):
    model = LoopedForCausalLM.from_dense(folder, dtype=torch.float32)
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.dtype == torch.float32 and torch.equal(logits(model), logits(dense))


def test_a_tied_head_may_be_untied(folder):
    model = LoopedForCausalLM.from_dense(folder, tie_word_embeddings=False)
    head, table = model.lm_head.weight, model.model.embed_tokens.weight
    assert torch.equal(head, table) and head.data_ptr() != table.data_ptr()


def test_a_head_of_its_own_where_one_tensor_is_promised():
    """transformers keeps both, and the dense model reads its head."""
    dense = dense_model(tie_word_embeddings=True)
    dense.lm_head.weight = nn.Parameter(dense.lm_head.weight.flip(0))
    with pytest.raises(ValueError, match="tie_word_embeddings=False to keep both"):
        looped(dense)
    assert torch.equal(logits(looped(dense, tie_word_embeddings=False)), logits(dense))


def test_the_dense_model_is_left_alone():
    dense = dense_model()
    before = copy.deepcopy(dense.state_dict())
    model = looped(dense)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())


def test_other_families_are_refused(tmp_path):
    names = ", ".join(sorted(FAMILIES))
    with pytest.raises(ValueError, match=f"model_type='gpt2' is not a dense family.*{names}"):
        LoopedForCausalLM.from_dense(AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=8, n_head=2)))
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"model_type='looped' is not a dense family.*{names}"):
        LoopedForCausalLM.from_dense(tmp_path)


def test_only_a_language_model_is_made(folder):
    with pytest.raises(ValueError, match="makes a LoopedForCausalLM, not a LoopedForSequenceClassification"):
        LoopedForSequenceClassification.from_dense(folder)


def test_quantized_weights_are_refused(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="the dense weights are quantized"):
        LoopedForCausalLM.from_dense(tmp_path)


def test_weights_that_are_missing_or_unknown_are_named():
    dense = dense_model()
    dense.model.layers[2].mlp.extra = nn.Linear(2, 2)
    del dense.model.layers[3].mlp.up_proj.weight
    dense.model.layers[3].mlp.up_proj.weight = None
    with pytest.raises(ValueError, match="from it: .*core.3.mlp.up_proj.weight; not in .*core.2.mlp.extra.bias"):
        looped(dense)


def without(name: str, tensors: dict):
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda stored: without("model.layers.1.mlp.up_proj.weight", stored), "from it: .*1.mlp.up_proj.weight"),
        (lambda stored: {**stored, "model.layers.1.self_attn.q_proj.bias": torch.ones(32)}, "not in the .*bias"),
        (lambda stored: {**stored, "model.norm.weight": torch.ones(33)}, r"shape: .*\(33,\) instead of \(32,\)"),
    ],
)
def test_a_folder_whose_weights_do_not_fit_its_config(change, said, folder, tmp_path):
    """transformers makes up what is missing, and leaves out what is unknown."""
    shutil.copy(folder / "config.json", tmp_path)
    stored = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    save_file(change(without("lm_head.weight", stored)), tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=said):
        LoopedForCausalLM.from_dense(tmp_path)


def test_a_loop_trains_what_it_was_made_of():
    """More loops after a few steps lose less than before, and less than they do at one loop."""
    model = looped(dense_model(initializer_range=0.02), num_loops=2, **CONSTRUCTIONS["gate"]).train()
    optimizer = torch.optim.AdamW(model.parameter_groups(3e-3))
    first = model(IDS, labels=IDS).loss
    for _ in range(20):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    assert model(IDS, labels=IDS).loss < 0.5 * first
    assert model.model.change_gate.factor.abs().max() > 0


def test_a_dense_config_tells_the_looped_one():
    config = LlamaConfig(**SIZES)
    assert FAMILIES["llama"].fields(config)["hidden_size"] == 32
    assert LoopedConfig(num_loops=1).loop_change_gate is False


def said_of(load, *arguments, **options) -> str:
    with LoggingLevel(logging.WARNING), CaptureLogger(logging.get_logger("transformers")) as said:
        load(*arguments, **options)
    return said.out


NEW_AND_NEUTRAL = [
    {"loop_lora_rank": 4},
    {"loop_embedding": "learned"},
    {"loop_embedding": "time"},
    {"loop_embedding": "modulation"},
    {"inter_loop_norm": "own"},
    {"injection": "concat", "loop_change_gate": True, "loop_norms": True},
    {"prelude_norm": True, "injection": "add", "injection_norm": True},
]


@pytest.mark.parametrize("options", NEW_AND_NEUTRAL, ids=str)
def test_what_is_new_and_starts_as_it_should_is_not_called_missing(options):
    dense = dense_model()
    with LoggingLevel(logging.WARNING), CaptureLogger(logging.get_logger("transformers")) as said:
        model = LoopedForCausalLM.from_dense(dense, num_loops=2, **options)
    assert said.out == "" and all(tensor.isfinite().all() for tensor in model.state_dict().values())
    if "prelude_norm" not in options:
        torch.testing.assert_close(logits(model, num_loops=1), logits(dense))


def test_what_is_new_and_random_is_called_missing(tmp_path):
    """And, once the model is saved, whatever is missing in the folder, of which the dense model knew nothing."""
    dense = dense_model()
    said = said_of(LoopedForCausalLM.from_dense, dense, num_loops=2, loop_lora_rank=4, value_embeddings=True)
    assert "MISSING" in said and "value_embeds" in said and "loop_deltas" not in said
    model = LoopedForCausalLM.from_dense(dense, num_loops=2, loop_lora_rank=4)
    name = next(name for name in model.state_dict() if ".loop_deltas." in name)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    save_file(without(name, stored), tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"missing from it: {name}"):
        LoopedForCausalLM.from_pretrained(tmp_path)
    assert "loop_deltas" in said_of(LoopedForCausalLM.from_pretrained, tmp_path, strict=False)


@pytest.mark.parametrize("core_init", ["average", "stepwise", "lower"])
def test_every_part_of_a_delta_can_learn(core_init):
    """Where A and B are both 0, neither gets a gradient. The shared layer itself leaves a residual of 0."""
    dense = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 4}))
    model = LoopedForCausalLM.from_dense(
        dense, num_core_layers=2, num_loops=2, core_init=core_init, loop_lora_rank=64, loop_norms=True
    )
    deltas = [part for part in model.modules() if isinstance(part, LoopDelta)]
    assert deltas and all(delta.a.abs().amax(-1).min() > 0 for delta in deltas)


def test_nothing_that_is_set_afterwards_is_called_missing():
    """Of what is new, as heads that have nothing to begin from, transformers still says so."""
    dense = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 4})).eval()
    of_loops = {"num_loops": 2, "loop_lora_rank": 64, "loop_norms": True}
    with LoggingLevel(logging.WARNING), CaptureLogger(logging.get_logger("transformers")) as said:
        LoopedForCausalLM.from_dense(dense, num_core_layers=2, core_init="average", **of_loops)
        model = LoopedForCausalLM.from_dense(dense, loop_change_gate=True, **of_loops)
    assert said.out == "" and model.model.change_gate.factor.abs().max() == 0
    with LoggingLevel(logging.WARNING), CaptureLogger(logging.get_logger("transformers")) as said:
        LoopedForCausalLM.from_dense(dense, num_core_layers=2, num_loops=2, core_init="average", exit_gate="raw")
    assert "exit_gate" in said.out
