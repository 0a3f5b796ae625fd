"""Dense families of transformers as looped models of one loop: equal bit for bit, in float32 and bfloat16.

transformers' own models are the reference. Sizes are odd: grouped heads that are not hidden_size / num_heads wide,
windows shorter than the sequence, norm weights far from their initial values.
"""

import pytest
import torch
import transformers
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedConfig

from modeling_looped import LoopedConfig, LoopedForCausalLM
from modeling_looped.cpu import fast_paths
from modeling_looped.formats.families import FAMILIES, family_of

from .helpers import quick_and_slow


SIZES = {
    "vocab_size": 61,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = {"sliding_window": 4}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
CASES = {
    "llama": ("Llama", {"head_dim": 12, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"head_dim": 12, **WINDOW}),
    "mistral without window": ("Mistral", {"head_dim": 12, "sliding_window": None}),
    "qwen2": ("Qwen2", {"num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "qwen2 with windows": (
        "Qwen2",
        {"hidden_size": 32, "use_sliding_window": True, "max_window_layers": 2, **WINDOW},
    ),
    "qwen3": ("Qwen3", {"head_dim": 12, "attention_bias": True}),
    "smollm3": ("SmolLM3", {"hidden_size": 32, "no_rope_layers": [1, 0, 1, 0, 1], "mlp_bias": True}),
    "smollm3 with windows": (
        "SmolLM3",
        {"hidden_size": 32, "use_sliding_window": True, "no_rope_layer_interval": 2, **WINDOW},
    ),
    "olmo2": ("Olmo2", {"hidden_size": 32}),
    "olmo2 with biases": ("Olmo2", {"hidden_size": 32, "attention_bias": True}),
    "olmo3": ("Olmo3", {"hidden_size": 32, "layer_types": ["sliding_attention", "full_attention"] * 2, **WINDOW}),
    "gemma": ("Gemma", {"head_dim": 12}),
    "gemma2": ("Gemma2", {**GEMMA, **WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2 without softcaps": (
        "Gemma2",
        {**GEMMA, **WINDOW, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (
        "Gemma3Text",
        {**GEMMA, **WINDOW, "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
         "rope_parameters": NESTED},
    ),
    "gemma3 of sliding layers": (
        "Gemma3Text",
        {**GEMMA, **WINDOW, "layer_types": ["sliding_attention"] * 4, "final_logit_softcapping": 3.0},
    ),
}  # fmt: skip
SPLITS = {"core": (0, 4, 0), "sections": (1, 2, 1)}
DTYPES = [torch.float32, torch.bfloat16]


def dense_config(case: str, **fields) -> PreTrainedConfig:
    name, own = CASES[case]
    return getattr(transformers, f"{name}Config")(**{**SIZES, **own, **fields})


def attention_of(case: str) -> list[str]:
    """sdpa has no softcap; transformers' Gemma 2 has no sdpa even without one."""
    return ["eager"] if "gemma2" in case else ["eager", "sdpa"]


def dense_model(config, attention: str, dtype):
    torch.manual_seed(0)
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = model_class._from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.8))
    return model.to(dtype).eval()


def looped_fields(config, split: str = "core") -> dict:
    prelude, core, coda = SPLITS[split]
    fields = family_of(config).fields(config)
    return {
        **fields,
        "window_pattern": fields.pop("layer_windows"),
        "rope_pattern": fields.pop("layer_ropes"),
        "num_prelude_layers": prelude,
        "num_core_layers": core,
        "num_coda_layers": coda,
        "num_loops": 1,
    }


def looped_model(dense, split: str = "core") -> LoopedForCausalLM:
    """The dense model's weights in a looped one; all of them, and all that it has."""
    config, family = dense.config, family_of(dense.config)
    model = LoopedForCausalLM._from_config(
        LoopedConfig(**looped_fields(config, split)), attn_implementation=config._attn_implementation
    )
    sections = [("prelude", i) for i in range(SPLITS[split][0])] + [("core", i) for i in range(SPLITS[split][1])]
    sections += [("coda", i) for i in range(SPLITS[split][2])]
    weights = {}
    for name, tensor in dense.state_dict().items():
        if name.startswith("model.layers."):
            layer, inside = name.removeprefix("model.layers.").split(".", 1)
            section, index = sections[int(layer)]
            name = f"model.{section}.{index}.{family.renamed(inside)}"
        weights[name] = tensor
    model.load_state_dict(weights)
    return model.to(dense.dtype).eval()


def over_cases(test):
    cases = [(case, attention) for case in CASES for attention in attention_of(case)]
    quick = [(case, attention) for case, attention in cases if attention == attention_of(case)[-1]]
    return pytest.mark.parametrize(("case", "attention"), quick_and_slow(cases, *quick))(test)


def both(case: str, attention: str, dtype, split: str = "core"):
    dense = dense_model(dense_config(case), attention, dtype)
    return looped_model(dense, split), dense


def ids_and_mask(rows: int = 2, length: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    """The second row is padded from the left."""
    ids = torch.randint(1, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return ids, mask


def test_every_family_has_a_case():
    assert {dense_config(case).model_type for case in CASES} == set(FAMILIES)


@over_cases
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
@pytest.mark.some(14)
def test_logits_are_bitwise_equal(case, attention, dtype):
    dense = dense_model(dense_config(case), attention, dtype)
    ids, mask = ids_and_mask()
    expected, padded = dense(ids).logits, dense(ids, attention_mask=mask).logits[mask.bool()]
    for split in SPLITS:
        looped = looped_model(dense, split)
        assert torch.equal(looped(ids).logits, expected), split
        assert torch.equal(looped(ids, attention_mask=mask).logits[mask.bool()], padded), split


@over_cases
@pytest.mark.parametrize("dtype", quick_and_slow(DTYPES, torch.bfloat16))
@pytest.mark.some(7)
def test_greedy_decoding_is_bitwise_equal(case, attention, dtype):
    looped, dense = both(case, attention, dtype, "sections")
    ids, mask = ids_and_mask(length=7)
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with fast_paths(False):
        ours, expected = (model.generate(ids, attention_mask=mask, **options) for model in (looped, dense))
    assert torch.equal(ours.sequences, expected.sequences)
    for logits, expected_logits in zip(ours.logits, expected.logits, strict=True):
        assert torch.equal(logits, expected_logits)


@pytest.mark.parametrize("case", ["llama", "olmo2", "smollm3", "gemma2", "gemma3"])
@pytest.mark.parametrize("cache", ["static", "exits"])
@pytest.mark.some(4)
def test_other_ways_to_decode(case, cache):
    """A static cache, and rows of a batch at loops of their own."""
    looped, dense = both(case, attention_of(case)[-1], torch.float32, "sections")
    ids, mask = ids_and_mask(length=7)
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    other = {"cache_implementation": "static"}
    if cache == "exits":
        other = {"exit_criterion": "latent_diff", "exit_threshold": 0.0}
    assert torch.equal(looped.generate(ids, **options, **other), dense.generate(ids, **options))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.some(7)
def test_gradients_are_those_of_the_dense_model(case):
    looped, dense = both(case, attention_of(case)[-1], torch.float32)
    ids, mask = ids_and_mask()
    for model in (looped, dense):
        model.train()(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    expected = dict(dense.named_parameters())
    for name, parameter in looped.named_parameters():
        theirs = name
        if name.startswith("model.core."):
            layer, inside = name.removeprefix("model.core.").split(".", 1)
            back = {ours: dense_name for dense_name, ours in family_of(dense.config).renames.items()}
            first, rest = inside.split(".", 1)
            theirs = f"model.layers.{layer}.{back.get(first, first)}.{rest}"
        torch.testing.assert_close(parameter.grad, expected[theirs].grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_initial_norms_and_biases_are_those_of_the_family(case):
    config = dense_config(case)
    dense = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    looped = LoopedForCausalLM(LoopedConfig(**looped_fields(config)))
    ours, theirs = (
        {p.unique().item() for n, p in model.named_parameters() if n.endswith("norm.weight")}
        for model in (looped, dense)
    )
    assert ours == theirs
    assert all((p == 0).all() for n, p in looped.named_parameters() if n.endswith("bias"))


@pytest.mark.parametrize("case", quick_and_slow(CASES, "llama", "olmo2", "gemma3"))
def test_a_saved_model_opens_again(case, tmp_path):
    looped, _ = both(case, "eager", torch.float32, "sections")
    looped.save_pretrained(tmp_path)
    again = LoopedForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids, mask = ids_and_mask()
    with torch.no_grad():
        assert torch.equal(again(ids, attention_mask=mask).logits, looped(ids, attention_mask=mask).logits)


def test_more_loops_are_the_layers_once_more():
    """Two loops of a dense model are the dense model of twice the layers."""
    looped, dense = both("gemma2", "eager", torch.float32)
    config = dense_config("gemma2", num_hidden_layers=8, layer_types=dense.config.layer_types * 2)
    twice = dense_model(config, "eager", torch.float32)
    weights = dense.state_dict()
    for name in list(weights):
        if name.startswith("model.layers."):
            layer, inside = name.removeprefix("model.layers.").split(".", 1)
            weights[f"model.layers.{int(layer) + 4}.{inside}"] = weights[name]
    twice.load_state_dict(weights)
    ids, mask = ids_and_mask()
    with torch.no_grad():
        found, expected = looped(ids, attention_mask=mask, num_loops=2).logits, twice(ids, attention_mask=mask).logits
    assert torch.equal(found[mask.bool()], expected[mask.bool()])


# What cannot be expressed


class FamilyOfTomorrow(PreTrainedConfig):
    model_type = "tomorrow"


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (FamilyOfTomorrow(), ["'tomorrow'", "gemma2", "smollm3"]),
        (transformers.GraniteConfig(), ["'granite'", "llama"]),
        (dense_config("gemma", use_bidirectional_attention=True), ["gemma", "use_bidirectional_attention=True"]),
        (dense_config("gemma3", attn_logit_softcapping=9.0), ["gemma3_text", "attn_logit_softcapping=9.0"]),
        (dense_config("qwen2", layer_types=["sliding_attention"] * 4), ["slide", "use_sliding_window=False"]),
        (
            dense_config("qwen2", layer_types=["chunked_attention", *["full_attention"] * 3]),
            ["qwen2", "chunked_attention"],
        ),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_what_cannot_be_expressed_is_refused(config, parts):
    with pytest.raises(ValueError) as caught:
        family_of(config).fields(config)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_biases_that_the_layers_of_a_family_do_not_have_are_left_out():
    config = dense_config("mistral", attention_bias=True)
    assert family_of(config).fields(config)["attention_bias"] == "none"


def test_a_field_that_is_new_to_a_family_is_refused_unless_it_is_left_at_its_default():
    @strict
    class NewerConfig(transformers.LlamaConfig):
        logit_multiplier: float = 1.0

    config = NewerConfig(**{**SIZES, "hidden_size": 32})
    assert family_of(config).fields(config)["norm_rounding"] == "before_weight"
    config.logit_multiplier = 2.0
    with pytest.raises(ValueError, match="logit_multiplier=2.0"):
        family_of(config).fields(config)


def test_a_field_that_the_family_does_not_have_changes_nothing():
    """Gemma's config.json has a hidden_activation, which transformers' Gemma does not read."""
    config = dense_config("gemma", hidden_act="silu", hidden_activation="gelu")
    assert family_of(config).fields(config)["hidden_act"] == "silu"


# Softcaps and the kernels that have none


def softcapped(**fields) -> LoopedConfig:
    return LoopedConfig(**{**looped_fields(dense_config("gemma2")), **fields})


def test_softcaps_take_eager_attention_unless_another_kernel_has_one():
    assert LoopedForCausalLM(softcapped()).config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="'sdpa' has no softcap.*attention_softcap=2.0"):
        LoopedForCausalLM._from_config(softcapped(), attn_implementation="sdpa")
    model = LoopedForCausalLM(softcapped())
    with pytest.raises(ValueError, match="'sdpa' has no softcap"):
        model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attention_softcap=2.0.*use generate"):
        model.generate_batch([[1, 2, 3]])
    model.config._attn_implementation = "sdpa"  # past all checks
    with pytest.raises(ValueError, match="'sdpa' has no softcap"):
        model(ids_and_mask()[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_softcaps():
    looped, _ = both("gemma2", "eager", torch.float32)
    ids, mask = ids_and_mask()
    with torch.no_grad():
        expected = looped(ids, attention_mask=mask).logits
        looped.set_attn_implementation("flex_attention")
        found = looped(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)


# Norms in low precision


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("rounding", ["after_weight", "before_weight"])
def test_norms_round_where_they_say(offset, rounding):
    model = LoopedForCausalLM(
        LoopedConfig(**{**looped_fields(dense_config("llama")), "norm_offset": offset, "norm_rounding": rounding})
    )
    norm = model.model.core[0].input_layernorm.to(torch.bfloat16)
    nn.init.normal_(norm.weight)
    x = torch.randn(5, SIZES["hidden_size"], dtype=torch.bfloat16)
    wide, factor = x.float(), norm.weight.float() + offset
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    expected = (normed * factor).to(x.dtype)
    if rounding == "before_weight":
        expected = normed.to(x.dtype) * factor.to(x.dtype)
    assert torch.equal(norm(x), expected)
