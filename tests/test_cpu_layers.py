"""Layers are torch's own: whoever looks for them, replaces them or watches them finds what there is in any model."""

import logging
from types import SimpleNamespace

import peft
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from modeling_looped import LoopedForCausalLM, cpu, row_graphs
from modeling_looped.cpu import fast_paths, is_slow_single_query, project, repeated_products
from modeling_looped.presets import PRESETS
from modeling_looped.switches import is_switched_on

from .helpers import random_ids, tiny_config, tiny_model
from .test_cpu import OPERATORS, stand_in


@pytest.fixture(autouse=True)
def ordering(monkeypatch):
    """Weights of any size are ordered at once, by operators that every processor has."""
    stand_in(monkeypatch, **OPERATORS)
    monkeypatch.setattr(cpu, "maker", lambda: "AMD")
    monkeypatch.setattr(cpu, "has_amx", lambda: False)
    for name in ("MIN_ORDERED_SIZE", "MIN_ORDERED_FP32_SIZE", "READS_BEFORE_ORDERING"):
        monkeypatch.setattr(cpu, name, 0)


def generate(model, **how):
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **how}
    return model.generate(random_ids(2, 7), **settings)


def linears(model) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


@pytest.mark.parametrize("preset", PRESETS)
def test_linear_layers_are_torchs(preset):
    with torch.device("meta"):
        model = LoopedForCausalLM(tiny_config(preset))
    found = linears(model)
    assert {type(module) for module in found.values()} == {nn.Linear}
    matrices = {name.removesuffix(".weight") for name, p in model.named_parameters() if p.ndim == 2}
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    assert matrices - tables <= found.keys()  # nothing else holds matrices


FAST = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def watched_calls(monkeypatch) -> list:
    """Which layers are multiplied with by themselves."""
    calls, multiply = [], cpu.RepeatedProduct.__call__

    def watched(product, x):
        y = multiply(product, x)
        calls.extend([product.layer] * (y is not None))
        return y

    monkeypatch.setattr(cpu.RepeatedProduct, "__call__", watched)
    return calls


@FAST
@pytest.mark.parametrize("how", [{}, {"exit_criterion": "latent_diff", "exit_threshold": 0.3}], ids=["plain", "exits"])
def test_tokens_are_those_without_fast_paths(dtype, how, monkeypatch):
    model = tiny_model().to(dtype)
    calls = watched_calls(monkeypatch)
    fast = generate(model, **how)
    assert set(calls) == set(linears(model).values())
    calls.clear()
    with fast_paths(False):
        assert torch.equal(generate(model, **how), fast)
        with fast_paths(True):
            assert cpu.fast_paths_are_on()
        assert not cpu.fast_paths_are_on()
    assert not calls and cpu.fast_paths_are_on()


def test_switched_off_everything_is_torchs(monkeypatch):
    layer, x = nn.Linear(48, 20), torch.randn(1, 48)
    query = torch.randn(2, 4, 1, 16).bfloat16()
    assert is_slow_single_query(query)
    with fast_paths(False), repeated_products(layer):
        assert not cpu._products.get()
        assert torch.equal(project(layer, x), F.linear(x, layer.weight, layer.bias))
        assert not is_slow_single_query(query)


@pytest.mark.parametrize("name", [cpu.FAST_PATHS, row_graphs.GRAPHS])
def test_the_environment_sets_the_switches(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    assert is_switched_on(name, "it")
    for value in ("1", "0"):
        monkeypatch.setenv(name, value)
        assert is_switched_on(name, "it") == (value == "1")
    monkeypatch.setenv(name, "no")
    with pytest.raises(ValueError, match=f"{name}='no' is not known: choose 1, with it, or 0"):
        is_switched_on(name, "it")


@FAST
@pytest.mark.parametrize("register", ["of the layer", "before it", "of all modules"])
def test_hooks_see_every_call(register, dtype):
    model = tiny_model().to(dtype)
    layers, seen = set(linears(model).values()), []

    def hook(module, *_):
        if module in layers:
            seen.append(module)

    if register == "of all modules":
        handles = [nn.modules.module.register_module_forward_hook(hook)]
    else:
        name = "register_forward_hook" if register == "of the layer" else "register_forward_pre_hook"
        handles = [getattr(layer, name)(hook) for layer in layers]
    try:
        found = generate(model)
        with_fast_paths = seen.copy()
        seen.clear()
        with fast_paths(False):
            assert torch.equal(generate(model), found)
        assert with_fast_paths == seen
        of_core = 6 * model.config.num_loops  # a pass for each token, the first over the prompt
        assert all(seen.count(layer) == (6 if layer is model.lm_head else of_core) for layer in layers)
    finally:
        for handle in handles:
            handle.remove()


def test_hooks_change_what_they_change(monkeypatch):
    model, calls = tiny_model(), watched_calls(monkeypatch)
    before = generate(model)
    model.lm_head.register_forward_hook(lambda layer, inputs, logits: -logits)
    calls.clear()
    changed = generate(model)
    assert model.lm_head not in calls and model.model.core[0].mlp.up_proj in calls
    assert not torch.equal(changed, before)
    with fast_paths(False):
        assert torch.equal(generate(model), changed)


class EightBit(nn.Module):
    """A layer as quantisers put it in the place of one of torch."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (layer.weight.detach() / self.scale).round().to(torch.int8))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


class EightBitLinear(nn.Linear):
    """The same as a subclass, which most quantisers make."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.quantised = EightBit(layer)

    def forward(self, x):
        return self.quantised(x)


@pytest.mark.parametrize("kind", [EightBit, EightBitLinear])
@pytest.mark.parametrize(
    "how", [{}, {"exit_criterion": "logit_margin", "exit_threshold": 0.1}], ids=["plain", "exits"]
)
def test_other_modules_in_place_of_the_layers(kind, how):
    model, rounded = tiny_model(), tiny_model()
    for name, layer in linears(model).items():
        eight_bit = kind(layer)
        model.set_submodule(name, eight_bit)
        inner = getattr(eight_bit, "quantised", eight_bit)
        with torch.no_grad():
            rounded.get_submodule(name).weight.copy_(inner.weight.float() * inner.scale)
    found = generate(model, **how)
    assert all(module.calls for module in model.modules() if isinstance(module, EightBit))
    with fast_paths(False):
        assert torch.equal(generate(rounded, **how), found)


@FAST
def test_lora_layers_are_called(dtype, monkeypatch):
    model = tiny_model().to(dtype)
    plain, calls = generate(model), watched_calls(monkeypatch)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings).to(dtype)
    found = generate(adapted)
    assert not torch.equal(found, plain)
    names = {name.split(".")[-1] for name, module in model.named_modules() if module in calls}
    assert names == {"k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    with fast_paths(False):
        assert torch.equal(generate(adapted), found)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("how", ["missing", "not implemented"])
def test_without_an_operator_of_decoding(name, how, monkeypatch):
    model = tiny_model().to(torch.bfloat16)
    with fast_paths(False):
        expected = generate(model)

    def refuse(*_):
        raise NotImplementedError(name)

    operators = {key: value for key, value in OPERATORS.items() if key != name}
    stand_in(monkeypatch, **operators, **({} if how == "missing" else {name: refuse}))
    calls = watched_calls(monkeypatch)
    assert torch.equal(generate(model), expected)
    assert not calls


def test_where_torch_does_not_tell_who_watches_the_call_is_usual(monkeypatch):
    layer, x = nn.Linear(48, 20), torch.randn(1, 48)
    calls = watched_calls(monkeypatch)
    with repeated_products(layer), torch.no_grad():
        project(layer, x)
        assert calls.pop() is layer
        with monkeypatch.context() as patch:
            patch.delattr(torch._C, "_are_functorch_transforms_active")
            assert torch.equal(project(layer, x), layer(x))
        with monkeypatch.context() as patch:
            patch.setattr(nn.modules, "module", SimpleNamespace())
            assert torch.equal(project(layer, x), layer(x))
    assert not calls


def test_transforms_see_the_usual_call(monkeypatch):
    layer, x = nn.Linear(48, 20), torch.randn(3, 48)
    calls = watched_calls(monkeypatch)
    with repeated_products(layer), torch.no_grad():
        torch.testing.assert_close(torch.vmap(lambda row: project(layer, row))(x), layer(x))
        torch.func.grad(lambda row: project(layer, row).sum())(x[0])
        compiled = torch.compile(lambda rows: project(layer, rows), backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), layer(x))
        assert not calls
        project(layer, x)
        assert calls == [layer]


def test_weights_that_are_shown_for_a_while_are_not_taken(monkeypatch):
    """FSDP puts plain weights into a layer while its block runs, offloading moves them in."""
    layer, x = nn.Linear(48, 20, device="meta"), torch.randn(1, 48)
    calls = watched_calls(monkeypatch)
    with repeated_products(layer):
        layer.to_empty(device="cpu")
        project(layer, x)
        layer.reset_parameters()
        assert torch.equal(project(layer, x), layer(x))
    assert not calls


def test_the_second_copy_of_weights_is_said(logged, request, monkeypatch):
    model = tiny_model().to(torch.bfloat16)
    size = sum(2 * layer.weight.numel() for layer in linears(model).values())
    logger = logging.getLogger(cpu.__name__)
    logger.setLevel(logging.INFO)
    request.addfinalizer(lambda: logger.setLevel(logging.NOTSET))
    generate(model)
    assert [record.levelname for record in logged] == ["INFO"]
    message = logged[0].getMessage()
    assert f" {size} bytes" in message and "a second time" in message and "LOOPED_CPU_FAST_PATHS=0" in message
    with fast_paths(False):
        generate(model)
    monkeypatch.setattr(cpu, "maker", lambda: "Intel")
    generate(model.float())
    assert len(logged) == 1


def test_weights_are_kept_once_where_memory_is_short(logged, request, monkeypatch):
    model = tiny_model().to(torch.bfloat16)
    size = sum(2 * layer.weight.numel() for layer in linears(model).values())
    calls = watched_calls(monkeypatch)
    logger = logging.getLogger(cpu.__name__)
    logger.setLevel(logging.INFO)
    request.addfinalizer(lambda: logger.setLevel(logging.NOTSET))
    for left, message in ((2 * size - 1, "goes without"), (2 * size, "a second time")):
        monkeypatch.setattr(cpu, "memory_left", lambda left=left: left)
        calls.clear()
        generate(model)
        assert message in logged[-1].getMessage() and bool(calls) == (message == "a second time")


@pytest.mark.parametrize(("limit", "left"), [("max", None), ("4096", 4096 - 3000 + 700), (None, None)])
def test_what_a_container_may_still_take_bounds_what_is_left(limit, left, tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "CONTAINER", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 2000\nfile 900\ninactive_file 500\nactive_file 200\n")
    found = cpu.memory_left()
    assert found == left if left else found > 2**20


@FAST
def test_weights_that_change_places_are_read_as_they_are(dtype, monkeypatch):
    layer, x = nn.Linear(48, 20).to(dtype), torch.randn(2, 48).to(dtype)
    calls = watched_calls(monkeypatch)
    with repeated_products(layer), torch.no_grad():
        project(layer, x)
        assert calls.pop() is layer
        layer.weight = nn.Parameter(-layer.weight)
        assert torch.equal(project(layer, x), layer(x))
    assert not calls
