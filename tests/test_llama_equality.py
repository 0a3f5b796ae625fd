"""With injection and residual scaling off, C layers looped N times are a Llama of C * N layers with copied weights.

transformers' LlamaForCausalLM is the reference, and equal means equal bit for bit: the same operations on the same
numbers in the same order. Only a residual scale, which Llama has to carry in its weights, is compared to rounding.
"""

import pytest
import torch

from modeling_looped.cpu import fast_paths

from .helpers_llama import make_looped, sources, tokens, unroll


SHAPES = {
    "one_layer": {"num_core_layers": 1, "num_loops": 4},
    "core": {"num_core_layers": 2, "num_loops": 3},
    "prelude_and_coda": {"num_prelude_layers": 2, "num_core_layers": 2, "num_coda_layers": 1, "num_loops": 3},
    "grouped_query": {"num_core_layers": 2, "num_loops": 3, "num_key_value_heads": 2},
    "wide_heads": {"num_core_layers": 2, "num_loops": 2, "head_dim": 16},
    "tied_head": {"num_core_layers": 2, "num_loops": 3, "tie_word_embeddings": True},
    "everything": {
        "num_prelude_layers": 1,
        "num_core_layers": 2,
        "num_coda_layers": 2,
        "num_loops": 2,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}
ATTENTION = ["eager", "sdpa"]


def left_padding(length: int) -> torch.Tensor:
    """Mask of two rows, the second with a third of its positions padded."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, : length // 3] = 0
    return mask


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_bitwise_equal(shape, attention):
    looped = make_looped(attention, **SHAPES[shape])
    llama = unroll(looped)
    with torch.no_grad():
        assert torch.equal(looped(tokens()).logits, llama(tokens()).logits)


@pytest.mark.parametrize("num_loops", [1, 2, 5])
def test_another_depth_is_a_llama_of_that_depth(num_loops):
    looped = make_looped(**SHAPES["prelude_and_coda"])
    llama = unroll(looped, num_loops)
    with torch.no_grad():
        assert torch.equal(looped(tokens(), num_loops=num_loops).logits, llama(tokens()).logits)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("attention", ATTENTION)
def test_depth_per_row_is_a_llama_per_row(attention, padded):
    looped = make_looped(attention, **SHAPES["prelude_and_coda"])
    ids, depths = tokens(4), [2, 4, 1, 2]
    mask = left_padding(9).repeat(2, 1) if padded else torch.ones_like(ids)
    with torch.no_grad():
        logits = looped(ids, num_loops=depths, attention_mask=mask if padded else None).logits
        for row, depth in enumerate(depths):
            shown = mask[row].bool()
            alone = unroll(looped, depth)(ids[row : row + 1, shown]).logits
            torch.testing.assert_close(logits[row : row + 1, shown], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("shape", ["core", "everything"])
def test_left_padding(shape, attention):
    looped = make_looped(attention, **SHAPES[shape])
    llama = unroll(looped)
    mask = left_padding(9)
    with torch.no_grad():
        expected = llama(tokens(), attention_mask=mask).logits
        assert torch.equal(looped(tokens(), attention_mask=mask).logits[mask.bool()], expected[mask.bool()])


def test_angles_that_grow_with_a_text_are_not_those_of_an_earlier_one():
    """A dynamic RoPE of transformers keeps them: there the reference is a Llama that has read nothing else."""
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    looped = make_looped(rope_parameters=rope, max_position_embeddings=8)
    with torch.no_grad():
        for length in (12, 40, 20, 8, 12, 5):
            ids = tokens(length=length)
            assert torch.equal(looped(ids).logits, unroll(looped)(ids).logits)


def test_packed_documents():
    """Positions that start again at 0 begin a document, which sees nothing of the one before."""
    looped = make_looped(**SHAPES["prelude_and_coda"])
    llama = unroll(looped)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1, 2]])
    with torch.no_grad():
        packed = looped(tokens(), position_ids=positions, use_cache=False).logits
        assert torch.equal(packed, llama(tokens(), position_ids=positions, use_cache=False).logits)
        alone = looped(tokens()[:1, 4:], use_cache=False).logits
    torch.testing.assert_close(packed[:1, 4:], alone, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=["usual", "fast"])
def kernels(request):
    """torch's own, whose results are Llama's to the last bit; or those of cpu.py, to rounding."""
    with fast_paths(request.param == "fast"):
        yield request.param


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.covering
def test_loss_is_bitwise_equal_and_gradients_are_summed_over_loops(shape, attention):
    looped = make_looped(attention, **SHAPES[shape]).train()
    llama = unroll(looped).train()
    labels = tokens().clone()
    labels[0, :3] = -100
    loss, expected = looped(tokens(), labels=labels).loss, llama(tokens(), labels=labels).loss
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()

    summed = {}  # as the backward pass adds them: last loop first
    for layer, block in reversed(list(zip(llama.model.layers, sources(looped, looped.config.num_loops), strict=True))):
        of_block = dict(block.named_parameters())
        for name, parameter in layer.named_parameters():
            ours = of_block[name]
            summed[ours] = summed[ours] + parameter.grad if ours in summed else parameter.grad
    for name in ("embed_tokens.weight", "norm.weight"):
        summed[looped.model.get_parameter(name)] = llama.model.get_parameter(name).grad
    summed[looped.lm_head.weight] = llama.lm_head.weight.grad
    assert set(summed) == set(looped.parameters())
    for name, parameter in looped.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        assert torch.equal(parameter.grad, summed[parameter]), name


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.some(7)
def test_cached_decoding_is_bitwise_equal(shape, attention):
    """A prompt, then token by token."""
    looped = make_looped(attention, **SHAPES[shape])
    llama = unroll(looped)
    ids = tokens(length=12)
    caches = [None, None]
    with torch.no_grad():
        for start, end in [(0, 5), (5, 8), *((i, i + 1) for i in range(8, 12))]:
            outputs = [
                model(ids[:, start:end], past_key_values=cache, use_cache=True)
                for model, cache in zip((looped, llama), caches)
            ]
            caches = [output.past_key_values for output in outputs]
            assert torch.equal(outputs[0].logits, outputs[1].logits), (start, end)
    assert len(caches[0].layers) == len(caches[1].layers) == looped.config.num_hidden_layers


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("shape", ["core", "everything"])
@pytest.mark.covering
def test_generate_is_bitwise_equal(shape, attention, beams, cache, kernels):
    looped = make_looped(attention, **SHAPES[shape])
    llama = unroll(looped)
    arguments = {
        "attention_mask": left_padding(7),
        "max_new_tokens": 8,
        "num_beams": beams,
        "do_sample": False,
        "pad_token_id": 0,
        "cache_implementation": cache,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    ours, expected = (model.generate(tokens(length=7), **arguments) for model in (looped, llama))
    assert torch.equal(ours.sequences, expected.sequences)
    assert len(ours.logits) == len(expected.logits) == 8
    for logits, expected_logits in zip(ours.logits, expected.logits):
        if kernels == "usual":
            assert torch.equal(logits, expected_logits)
        else:
            torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("attention", ATTENTION)
def test_a_head_and_an_mlp_are_taken_from_one_loop(attention):
    """As docs/diagnose.md says: head 1 of layer 0 in loop 2, counted from 0, and the MLP of layer 1 in loop 1."""
    looped = make_looped(attention, **SHAPES["prelude_and_coda"])
    llama, config, core, now = unroll(looped), looped.config, looped.model.core, {}
    whole = llama(tokens()).logits
    first, size = config.num_prelude_layers, config.head_dim
    llama.model.layers[first + 4].self_attn.o_proj.register_forward_pre_hook(
        lambda layer, inputs: inputs[0].index_fill(-1, torch.arange(size, 2 * size), 0)
    )
    llama.model.layers[first + 3].mlp.register_forward_hook(lambda mlp, inputs, output: 0 * output)

    looped.model.attention_sites[config.core_slot(2)].register_forward_hook(
        lambda site, inputs, output: (output[0].index_fill(2, torch.tensor([1]), 0), *output[1:])
    )
    core[1].register_forward_pre_hook(
        lambda block, inputs, kwargs: now.update(loop=config.split_slot(kwargs["site"].layer_idx)[1]), with_kwargs=True
    )
    core[1].mlp.register_forward_hook(lambda mlp, inputs, output: (now["loop"] != 1) * output)

    found = looped(tokens()).logits
    assert torch.equal(found, llama(tokens()).logits) and not torch.equal(found, whole)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(looped.generate(tokens(), **options), llama.generate(tokens(), **options))


def test_hidden_states_and_attentions_are_those_of_the_unrolled_layers():
    looped = make_looped("eager", **SHAPES["prelude_and_coda"])
    llama = unroll(looped)
    with torch.no_grad():
        ours, expected = (
            model(tokens(), output_hidden_states=True, output_attentions=True) for model in (looped, llama)
        )
    for name in ("hidden_states", "attentions"):
        assert len(ours[name]) == len(expected[name])
        for position, (state, expected_state) in enumerate(zip(ours[name], expected[name])):
            assert torch.equal(state, expected_state), (name, position)


@pytest.mark.parametrize("residual_scale", [1.0, 0.7])
@pytest.mark.parametrize("rule", ["sqrt", "linear", "factored"])
def test_residual_rules_are_llamas_with_scaled_output_projections(rule, residual_scale):
    """eps with n = N in the core and n = 1 outside; L = 2 + 2 + 1 unique layers, of which 3 are the reference."""
    looped = make_looped(
        **SHAPES["prelude_and_coda"],
        residual_scaling=rule,
        residual_scale=residual_scale,
        residual_reference_layers=3,
    )
    llama = unroll(looped)
    prelude_or_coda, core = {
        "sqrt": (1.0, 1 / 3**0.5),
        "linear": (1.0, 1 / 3),
        "factored": ((3 / 5) ** 0.5, (3 / 5) ** 0.5 / 3),
    }[rule]
    scales = [prelude_or_coda] * 2 + [core] * 6 + [prelude_or_coda]
    with torch.no_grad():
        for layer, scale in zip(llama.model.layers, scales, strict=True):
            layer.self_attn.o_proj.weight.mul_(scale * residual_scale)
            layer.mlp.down_proj.weight.mul_(scale * residual_scale)
        expected = llama(tokens()).logits
        torch.testing.assert_close(looped(tokens()).logits, expected, rtol=1e-5, atol=1e-5)
        unscaled = unroll(looped)(tokens()).logits
    assert (unscaled - expected).abs().max() > 0.01


@pytest.mark.parametrize("attention", ATTENTION)
def test_bfloat16_agrees_to_its_precision(attention):
    looped = make_looped(attention, **SHAPES["prelude_and_coda"])
    llama = unroll(looped)
    with torch.no_grad():
        exact = llama(tokens()).logits
        ours, theirs = (model.to(torch.bfloat16)(tokens()).logits.float() for model in (looped, llama))
    assert (ours - exact).abs().max() < 2 * (theirs - exact).abs().max() + 0.01
