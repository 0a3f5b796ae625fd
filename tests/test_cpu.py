"""What is done faster on CPUs is what torch does, to rounding: against float64, and beside torch's own kernels."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import Linear
from torch.nn import functional as F

from modeling_looped import LoopedConfig, LoopedForCausalLM, cpu
from modeling_looped.cpu import (
    RepeatedProduct,
    attend_single_query,
    is_slow_single_query,
    project,
    repeated_products,
)
from modeling_looped.shared_passes import SharedPasses

from .helpers import random_ids, tiny_model


def error(found, exact) -> float:
    return (found.double() - exact).norm().item() / exact.norm().item()


@pytest.mark.parametrize("mask_heads", [0, 1, 6])
@pytest.mark.parametrize("key_value_heads", [6, 2])
def test_attention_of_single_queries(key_value_heads, mask_heads, monkeypatch):
    monkeypatch.setattr(cpu, "has_amx", lambda: False)
    torch.manual_seed(0)
    queries = torch.randn(3, 6, 1, 16).bfloat16()
    keys, values = (torch.randn(3, key_value_heads, 50, 16).bfloat16()[:, :, :41] for _ in range(2))
    mask = torch.rand(3, mask_heads, 1, 41) > 0.3 if mask_heads else None
    assert is_slow_single_query(queries)
    found = attend_single_query(queries, keys, values, mask, 0.3)
    assert found.shape == queries.shape
    exact_keys, exact_values = (x.double().repeat_interleave(6 // key_value_heads, 1) for x in (keys, values))
    scores = 0.3 * queries.double() @ exact_keys.mT
    if mask_heads:
        scores = scores.masked_fill(~mask, float("-inf"))
    assert error(found, scores.softmax(-1) @ exact_values) < 4e-3


def test_the_usual_where_torch_does_as_well(monkeypatch):
    monkeypatch.setattr(cpu, "has_amx", lambda: False)
    queries = torch.randn(2, 4, 200, 16).bfloat16()
    assert not is_slow_single_query(queries)
    assert not is_slow_single_query(queries[:, :, :1].float())
    assert is_slow_single_query(queries[:, :, :1])
    monkeypatch.setattr(cpu, "has_amx", lambda: True)
    assert not is_slow_single_query(queries[:, :, :1])


def test_products_end_with_the_generation():
    with pytest.raises(RuntimeError, match="stop"), repeated_products(Linear(2, 2)):
        raise RuntimeError("stop")
    assert cpu._products.get() is None


def kept_for(layer):
    """The ordered copy of its weights, if this generation has one."""
    product = cpu._products.get().get(layer)
    return None if product is None else product.ordered


def read_often(layer, x):
    """What the layer says once it has been read often, and how its weights are kept then."""
    with repeated_products(layer), torch.no_grad():
        for _ in range(cpu.READS_BEFORE_ORDERING):
            assert torch.equal(project(layer, x), layer(x))
            assert kept_for(layer) is None
        return project(layer, x), kept_for(layer)


HAS_ORDER = read_often(Linear(256, 256).bfloat16(), torch.zeros(1, 256).bfloat16())[1] is not None
needs_order = pytest.mark.skipif(not HAS_ORDER, reason="oneDNN with bfloat16 on x86")
OPERATORS = {
    "_is_mkldnn_bf16_supported": lambda: True,
    "_reorder_linear_weight": lambda weight, rows: weight.clone(),
    "_linear_pointwise": lambda x, weight, bias, *_: F.linear(x, weight, bias),
}


def stand_in(monkeypatch, **operators):
    """Operators in place of oneDNN's, which few processors have."""
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**operators))


@pytest.fixture(params=["onednn", "stand-in"])
def has_order(request, monkeypatch):
    if request.param == "stand-in":
        stand_in(monkeypatch, **OPERATORS)
    elif not HAS_ORDER:
        pytest.skip("oneDNN with bfloat16 on x86")
    return request.param


@pytest.fixture
def orders_fp32(monkeypatch):
    """Whatever the processor and the size, fp32 weights are ordered as on those of AMD."""
    monkeypatch.setattr(cpu, "maker", lambda: "AMD")
    monkeypatch.setattr(cpu, "MIN_ORDERED_FP32_SIZE", 0)


@needs_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 67), (8, 67), (16, 1000), (512, 8192)])
@pytest.mark.some(8)
def test_ordered_weights_multiply_as_the_layer_does(shape, bias, dtype, orders_fp32, monkeypatch):
    monkeypatch.setattr(cpu, "MIN_ORDERED_SIZE", 0)
    torch.manual_seed(0)
    layer = Linear(*shape, bias=bias).to(dtype)
    for size in [(1,), (1, 1), (3, 1), (2, 5), (40, 1)]:
        x = torch.randn(*size, shape[0]).to(dtype)
        usual = F.linear(x, layer.weight, layer.bias)
        exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
        found, kept = read_often(layer, x)
        assert torch.is_tensor(kept) and found.shape == usual.shape
        rounding = 3e-3 if dtype == torch.bfloat16 else 1e-6
        assert error(found, exact) < max(1.1 * error(usual, exact), rounding)


def test_under_autocast_products_keep_its_precision(orders_fp32, monkeypatch):
    blind = torch.autocast("cpu", enabled=False)(OPERATORS["_linear_pointwise"])  # of autocast, as oneDNN
    stand_in(monkeypatch, **OPERATORS | {"_linear_pointwise": blind})
    layer, x = Linear(64, 64), torch.randn(2, 64)
    with torch.autocast("cpu", torch.bfloat16):
        found, kept = read_often(layer, x)
        assert found.dtype == torch.bfloat16 and torch.equal(found, layer(x))
    assert kept is None


@pytest.mark.parametrize(
    ("maker", "is_ordered"), [("AMD", True), ("Intel", False), ("", False)], ids=["AMD", "Intel", "others"]
)
def test_fp32_is_ordered_where_that_was_measured_to_gain(maker, is_ordered, monkeypatch):
    stand_in(monkeypatch, **OPERATORS)
    monkeypatch.setattr(cpu, "maker", lambda: maker)
    layer = Linear(512, 512)
    with repeated_products(layer):
        assert (layer in cpu._products.get()) == is_ordered


def test_a_single_long_row_of_fp32_is_left_to_torch_on_one_thread(orders_fp32, monkeypatch):
    stand_in(monkeypatch, **OPERATORS)
    long = cpu.LONG_ROW
    cases = [(1, 1, long, False), (1, 2, long, True), (1, 1, long - 1, True), (2, 1, long, True)]
    for threads, rows, width, is_kept in cases:
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        _, kept = read_often(Linear(width, 2, bias=False), torch.randn(rows, 1, width))
        assert (kept is not None) == is_kept


def test_requests_that_share_passes_share_what_is_kept(orders_fp32, monkeypatch):
    """One copy of each weight, which prompts read too, until the passes end."""
    stand_in(monkeypatch, **OPERATORS)
    made, order = [], cpu.order
    monkeypatch.setattr(cpu, "order", lambda weight: made.append(weight) or order(weight))
    monkeypatch.setattr(cpu, "READS_BEFORE_ORDERING", 0)
    model, ids = tiny_model(), random_ids(1, 5)
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with SharedPasses(model) as passes:
        results = [passes.generate(ids, **settings) for _ in range(2)]
    assert len(made) == len({id(weight) for weight in made}) == sum(type(m) is Linear for m in model.modules())
    assert cpu._products.get() is None
    for result in results:
        assert torch.equal(result, model.generate(ids, **settings))


def test_weights_are_ordered_only_where_they_stay_what_they_are(has_order):
    x = torch.randn(2, 256).bfloat16()
    hooked, offloaded, parametrized = (Linear(256, 256).bfloat16() for _ in range(3))
    hooked.register_forward_pre_hook(lambda *_: None)
    offloaded.forward = offloaded.forward  # as accelerate's hooks do
    torch.nn.utils.parametrizations.orthogonal(parametrized.float())
    for layer in (hooked, offloaded, parametrized.bfloat16()):
        assert read_often(layer, x)[1] is None
    assert read_often(Linear(8, 256).bfloat16(), x[:, :8])[1] is None  # too small to gain
    with torch.backends.mkldnn.flags(enabled=False):  # and nowhere for those who switch oneDNN off
        assert read_often(Linear(256, 256).bfloat16(), x)[1] is None


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_for_another_vocabulary_is_made_like_the_one_before(tied):
    model = tiny_model(tie_word_embeddings=tied)
    before = model.lm_head
    model.resize_token_embeddings(model.config.vocab_size)
    assert model.lm_head is before
    model.resize_token_embeddings(120)
    assert type(model.lm_head) is Linear and model.lm_head.init_role == before.init_role
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.equal(model.lm_head.weight[:99], before.weight[:99])
    assert model(random_ids(2, 5)).logits.shape == (2, 5, 120)


@pytest.mark.parametrize("how", ["copied_into", "other_memory"])
def test_weights_that_change_between_generations_are_ordered_anew(how, has_order):
    layer, x = Linear(256, 256).bfloat16(), torch.randn(2, 256).bfloat16()
    with repeated_products(layer), torch.no_grad():
        for _ in range(cpu.READS_BEFORE_ORDERING + 1):
            project(layer, x)
        before = kept_for(layer)
        new = torch.randn_like(layer.weight)
        if how == "copied_into":
            layer.weight.copy_(new)
        else:
            layer.weight.data = new
        for _ in range(cpu.READS_BEFORE_ORDERING + 1):
            torch.testing.assert_close(project(layer, x), layer(x), rtol=0.02, atol=0.05)
        assert torch.is_tensor(kept_for(layer)) and kept_for(layer) is not before


def test_ordered_weights_have_gradients_as_usual(has_order):
    layer, x = Linear(256, 256).bfloat16(), torch.randn(2, 256).bfloat16()
    with repeated_products(layer):
        with torch.no_grad():
            for _ in range(cpu.READS_BEFORE_ORDERING + 1):
                project(layer, x)
        assert torch.is_tensor(kept_for(layer))
        project(layer, x).sum().backward()
    torch.testing.assert_close(layer.weight.grad[0], x.sum(0))


def test_an_assistant_keeps_its_order_between_its_drafts(orders_fp32, monkeypatch):
    stand_in(monkeypatch, **OPERATORS)
    model, assistant = Linear(2, 2), Linear(2, 2)
    with repeated_products(model):
        outer, of_model = cpu._products.get(), cpu._products.get()[model]
        with repeated_products(assistant):
            of_assistant = outer[assistant]
            assert cpu._products.get() is outer and outer[model] is of_model
        with repeated_products(assistant):
            assert outer[assistant] is of_assistant
        assert cpu._products.get() is outer


def assert_same_but_for_ties(model, found, usual):
    """Another kernel rounds otherwise: where tokens part, that of `found` is all but the favourite of one loop."""
    for mine, others in zip(found, usual, strict=True):
        parts = (mine != others).nonzero().flatten().tolist()
        if parts:
            with torch.no_grad():
                by_loop = model(others[None, : parts[0]], output_loop_logits=True).loop_logits
            logits = torch.stack([of_loop[0, -1] for of_loop in by_loop]).float()
            step = torch.finfo(torch.bfloat16).eps * logits.abs().max()
            assert (logits[:, mine[parts[0]]] >= logits.amax(-1) - 2 * step).any()


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_beams": 3},
        {"exit_criterion": "logit_margin", "exit_threshold": 0.05},
        {"exit_criterion": "latent_diff", "exit_threshold": 0.3},
        {"draft_loops": 1},
    ],
)
@pytest.mark.some(3)
def test_generation_with_ordered_weights_says_what_it_says_without(how, has_order, monkeypatch):
    torch.manual_seed(0)
    config = LoopedConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=2,
        num_core_layers=2,
        num_loops=3,
        loop_loss="per_loop",
        initializer_range=0.1,
        eos_token_id=None,
    )
    model = LoopedForCausalLM(config).bfloat16().eval()
    prompt = torch.randint(3, 97, (3, 9))
    ordered, multiply = [], RepeatedProduct.__call__

    def watched(product, x):
        is_due = product.reads == cpu.READS_BEFORE_ORDERING
        y = multiply(product, x)
        ordered.extend([y is not None] * is_due)
        return y

    monkeypatch.setattr(RepeatedProduct, "__call__", watched)

    def generate():
        settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **how}
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)

    for _ in range(2):
        monkeypatch.setattr(cpu, "MIN_ORDERED_SIZE", 0)
        found = generate()
        assert ordered and all(ordered)
        monkeypatch.setattr(cpu, "MIN_ORDERED_SIZE", float("inf"))
        usual = generate()
        if has_order == "stand-in":
            assert torch.equal(found, usual)
        elif "num_beams" not in how:  # of beams the other sum may choose another sequence
            assert_same_but_for_ties(model, found, usual)
        ordered.clear()
        with torch.no_grad():  # the next generation knows nothing of this one's copies
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
