"""Attention implementations, windows, packed documents, maps on request, and half precision."""

import contextlib
import copy

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, create_causal_mask, sdpa_mask
from transformers.utils import is_flash_attn_2_available

from modeling_looped import LoopedForCausalLM
from modeling_looped.norms import LoopedNorm
from tests.helpers import SECTIONS, random_ids, shake, tiny_config, tiny_model


SYSTEMS = {
    "plain": {},
    "grouped": {"num_key_value_heads": 2},
    "latent": {"kv_latent_size": 8, "qk_norm": "learned"},
    "windows": {**SECTIONS, "window_pattern": "SSL", "sliding_window": 3},
    "learned_positions": {"position_embedding": "learned", "readout_norm": "layernorm"},
    "flt": {"preset": "flt"},
    "flt_windows": {"preset": "flt", "num_core_layers": 3, "window_pattern": "S", "sliding_window": 2},
    "huginn": {"preset": "huginn", **SECTIONS},
    "parcae": {"preset": "parcae", **SECTIONS},
    "ouro": {"preset": "ouro"},
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask"),
]
over_systems = pytest.mark.parametrize("system", SYSTEMS)


def build(system: str, **fields) -> torch.nn.Module:
    return tiny_model(**{**SYSTEMS[system], **fields})


@contextlib.contextmanager
def attention(model, implementation: str):
    """`implementation` set at run time. Flex attention uncompiled: its compiled kernel has a slow test of its own."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    uncompiled = implementation == "flex_attention"
    with torch.compiler.set_stance("force_eager") if uncompiled else contextlib.nullcontext(), torch.no_grad():
        yield
    model.set_attn_implementation(before)


def close(found, expected, atol: float = 3e-5):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def relative_error(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


# Implementations


@over_systems
@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
@pytest.mark.covering
@pytest.mark.some(5)
def test_implementations_agree(system, implementation):
    model = build(system)
    ids = random_ids(3, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    runs = [
        {"attention_mask": mask},
        {"attention_mask": mask, "num_loops": [2, 4, 1]},  # rows are sorted and leave: so must those of the mask
        {"num_loops": [1, 4, 2], "use_cache": False},
    ]
    for run in runs:
        with attention(model, "eager"):
            expected = model(ids, **run).logits
        with attention(model, implementation):
            found = model(ids, **run).logits
        kept = run["attention_mask"].bool() if "attention_mask" in run else slice(None)
        assert relative_error(found[kept], expected[kept]) < 1e-5


@pytest.mark.parametrize("system", ["grouped", "windows", "flt", "parcae"])
@pytest.mark.parametrize(
    "implementation, cache",
    [
        ("eager", None),
        ("sdpa", None),
        ("flex_attention", None),
        # for these, generate makes the masks before it calls us; with flex attention it fails for every model
        ("eager", "static"),
        ("sdpa", "static"),
    ],
)
@pytest.mark.covering
@pytest.mark.some(2)
def test_implementations_agree_in_decoding(system, implementation, cache):
    model = build(system, pad_token_id=0, eos_token_id=None)
    ids = random_ids(3, 6)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    arguments = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    for num_loops in (2, [2, 1, 3]):
        with attention(model, "sdpa"):
            expected = [
                model.generate(
                    ids[i : i + 1, mask[i].bool()],
                    num_loops=num_loops if isinstance(num_loops, int) else num_loops[i],
                    **arguments,
                )
                for i in range(3)
            ]
        with attention(model, implementation):
            found = model.generate(
                ids, attention_mask=mask, num_loops=num_loops, cache_implementation=cache, **arguments
            )
        assert torch.equal(found.sequences[:, 6:], torch.cat([alone.sequences[:, -4:] for alone in expected]))
        alone = torch.cat([torch.stack(alone.logits) for alone in expected], dim=1)
        assert relative_error(torch.stack(found.logits), alone) < 1e-5


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_masks_made_by_the_caller(implementation):
    """A mask of four dimensions is taken as it is; where rows run to different depths, it is sorted with them."""
    model = build("grouped")
    ids = random_ids(3, 9)
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    with attention(model, implementation):
        embeds, positions = model.get_input_embeddings()(ids), torch.arange(9)[None]
        mask = create_causal_mask(model.config, embeds, padding, past_key_values=None, position_ids=positions)
        assert len(mask.shape) == 4
        for num_loops in (3, [1, 2, 4]):
            expected = model(ids, attention_mask=padding, num_loops=num_loops).logits
            found = model(ids, attention_mask=mask, num_loops=num_loops).logits
            close(found[padding.bool()], expected[padding.bool()])


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_chosen_at_construction_or_at_run_time(implementation, tmp_path):
    model = build("windows")
    ids = random_ids(2, 7)
    with attention(model, implementation):
        expected = model(ids).logits
    model.save_pretrained(tmp_path)
    loaded = LoopedForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation)
    made = AutoModelForCausalLM.from_config(model.config, attn_implementation=implementation).eval()
    made.load_state_dict(model.state_dict())
    for other in (loaded, made):
        assert other.config._attn_implementation == implementation
        with attention(other, implementation):
            assert torch.equal(other(ids).logits, expected)


@pytest.mark.parametrize("with_cache", [True, False])
def test_own_attention_function_sees_every_slot(with_cache):
    """A kernel with a cache of its own addresses it by `module.layer_idx`: every block call must be another slot."""
    seen = []

    def recorder(module, *args, **kwargs):
        seen.append(module.layer_idx)
        return sdpa_attention_forward(module, *args, **kwargs)

    AttentionInterface.register("recorder", recorder)
    AttentionMaskInterface.register("recorder", sdpa_mask)
    model = build("windows")
    ids = random_ids(2, 7)
    expected = model(ids, num_loops=4).logits
    with attention(model, "recorder"):
        assert torch.equal(model(ids, num_loops=4, use_cache=with_cache).logits, expected)
    slots = model.config.num_hidden_layers + model.config.num_core_layers
    assert len(seen) == slots
    if with_cache:
        assert sorted(seen) == list(range(slots))


def test_what_is_registered_as_sdpa_is_called(monkeypatch):
    """Also for single queries in bfloat16, which a CPU computes faster by another way."""
    model, seen = build("plain").bfloat16(), []

    def recorder(module, *args, **kwargs):
        seen.append(module.layer_idx)
        return sdpa_attention_forward(module, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", recorder)
    model.generate(random_ids(1, 3), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert len(seen) == 3 * model.config.num_hidden_layers


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"window_pattern": "SL", "sliding_window": 3}])
def test_compiled_flex_attention(fields):
    model = tiny_model(num_key_value_heads=2, **fields)
    ids = random_ids(3, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad():
        expected = [model(ids, attention_mask=mask, num_loops=depth).logits for depth in (3, [2, 4, 1])]
        model.set_attn_implementation("flex_attention")
        found = [model(ids, attention_mask=mask, num_loops=depth).logits for depth in (3, [2, 4, 1])]
    for a, b in zip(found, expected):
        close(a[mask.bool()], b[mask.bool()])


@pytest.mark.gpu
@pytest.mark.skipif(not is_flash_attn_2_available(), reason="flash-attn is not installed")
@pytest.mark.parametrize("system", ["grouped", "latent", "windows", "flt"])
def test_flash_attention(system, device):
    model = build(system, head_dim=32).to(device, torch.bfloat16)
    ids = random_ids(3, 9).to(device)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    for num_loops in (3, [2, 4, 1]):
        with attention(model, "eager"):
            expected = model(ids, attention_mask=mask, num_loops=num_loops).logits
        with attention(model, "flash_attention_2"):
            found = model(ids, attention_mask=mask, num_loops=num_loops).logits
        assert relative_error(found[mask.bool()], expected[mask.bool()]) < 0.05


# Windows and packed documents

POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], [0, 1, 0, 1, 2, 3, 4, 5, 6]])


def documents(positions):
    """Per row, the slices of its documents."""
    for row, position in enumerate(positions.tolist()):
        starts = [i for i, p in enumerate(position) if p == 0] + [len(position)]
        for start, end in zip(starts, starts[1:]):
            yield row, slice(start, end)


@over_systems
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.covering
@pytest.mark.some(5)
def test_packed_documents_equal_documents_alone(system, implementation):
    model = build(system).double()
    ids = random_ids(2, 9)
    with attention(model, implementation):
        for num_loops in (3, [1, 4]):
            packed = model(ids, position_ids=POSITIONS, num_loops=num_loops).logits
            for row, document in documents(POSITIONS):
                depth = num_loops if isinstance(num_loops, int) else num_loops[row]
                alone = model(ids[row : row + 1, document], num_loops=depth).logits
                # whatever the dtype of the model, the softmax of eager attention is in fp32
                close(packed[row, document], alone[0], atol=1e-5 if implementation == "eager" else 1e-9)


@pytest.mark.parametrize("use_cache", [True, False])
def test_one_packed_row_for_the_batch(use_cache):
    """Positions [1, length] hold for every row, and a cache that is about to be made changes nothing."""
    model = build("windows")
    ids = random_ids(3, 9)
    with torch.no_grad():
        packed = model(ids, position_ids=POSITIONS[:1], use_cache=use_cache).logits
        for _, document in documents(POSITIONS[:1]):
            close(packed[:, document], model(ids[:, document]).logits)


def test_packed_gradients_stay_inside_their_document():
    model = build("windows")
    embeds = model.get_input_embeddings()(random_ids(1, 9)).detach().requires_grad_()
    model(inputs_embeds=embeds, position_ids=POSITIONS[:1]).logits[0, 5].sum().backward()
    reached = embeds.grad[0].abs().sum(-1) > 0
    assert reached.tolist() == [False] * 4 + [True] * 2 + [False] * 3


@pytest.mark.parametrize("packed", [False, True])
def test_maps_are_zero_outside_window_and_document(packed):
    model = build("windows", sliding_window=2, num_core_layers=3)  # S S L S L over prelude, core, coda
    arguments = {"position_ids": POSITIONS} if packed else {}
    with attention(model, "eager"):
        maps = model(random_ids(2, 9), output_attentions=True, **arguments).attentions
    loops = model.config.num_loops
    assert len(maps) == 1 + 3 * loops + 1
    for letter, found in zip("S" + "SLS" * loops + "L", maps):
        expected = torch.zeros(2, 9, 9, dtype=torch.bool)
        for row, document in documents(POSITIONS if packed else POSITIONS.new_zeros(2, 9) + torch.arange(9)):
            for query in range(document.start, document.stop):
                for key in range(document.start, query + 1):
                    expected[row, query, key] = letter == "L" or query - key < 2
        assert found.shape == (2, 4, 9, 9)
        assert torch.equal(found > 0, expected[:, None].expand_as(found))
        torch.testing.assert_close(found.sum(-1), torch.ones(2, 4, 9))


@pytest.mark.parametrize("system", ["windows", "latent", "flt", "huginn", "ouro"])
@pytest.mark.parametrize("num_loops", [1, 4])
@pytest.mark.covering
def test_maps_and_states_of_every_block_call(system, num_loops):
    model = build(system)
    config = model.config
    with attention(model, "eager"):
        outputs = model(
            random_ids(2, 5),
            num_loops=num_loops,
            output_attentions=True,
            output_hidden_states=True,
            output_loop_hidden_states=True,
        )
        last = model.model(random_ids(2, 5), num_loops=num_loops).last_hidden_state
    calls = config.num_prelude_layers + config.num_core_layers * num_loops + config.num_coda_layers
    assert len(outputs.attentions) == calls and len(outputs.hidden_states) == calls + 1
    assert torch.equal(outputs.hidden_states[-1], last)
    if system != "huginn":  # whose embedding is scaled before it enters
        embedded = model.get_input_embeddings()(random_ids(2, 5))
        if config.prelude_norm and not config.num_prelude_layers:  # what the first layer reads is normed
            embedded = model.model.prelude_norm(embedded)
        assert torch.equal(outputs.hidden_states[0], embedded)
    for loop, state in enumerate(outputs.loop_hidden_states[:-1], start=1):
        # what enters the first layer of the next loop is H only where nothing is done between loops
        if system in ("windows", "latent"):
            position = config.num_prelude_layers + config.num_core_layers * loop
            assert torch.equal(outputs.hidden_states[position], state)


@pytest.mark.parametrize("system", ["windows", "huginn", "plain"])
def test_where_states_maps_and_keys_of_a_layer_in_a_loop_are_found(system):
    """As the table of docs/diagnose.md says."""
    model = build(system, num_core_layers=2, num_loops=3)
    config, trunk, ran, of_sites = model.config, model.model, [], {}
    before, core, after = config.num_prelude_layers, config.num_core_layers, config.num_coda_layers
    sites = [before + after + (k - 1) * core + j for k in range(1, 4) for j in range(core)]
    sites = [*range(before), *sites, *range(before, before + after)]  # by order of execution
    for block in (*trunk.prelude, *trunk.core, *trunk.coda):
        block.register_forward_hook(lambda _, a, output: ran.append(output))
    for i, site in enumerate(trunk.attention_sites):
        site.register_forward_hook(lambda _, a, output, i=i: of_sites.update({i: (output[1], a[1])}))
    with attention(model, "eager"):
        kinds = {"output_hidden_states": True, "output_attentions": True}
        outputs = model(random_ids(2, 5), use_cache=True, output_loop_hidden_states=True, **kinds)
        every = model(random_ids(2, 5), output_loop_logits=True, **kinds)
    assert len(ran) == 2 * len(outputs.attentions) + (2 * after)  # the coda ran after every loop of the second pass
    for i, site in enumerate(sites):
        assert torch.equal(outputs.attentions[i], of_sites[site][0])
        if config.sliding_window is None:
            assert torch.equal(outputs.cache.layers[site].keys, of_sites[site][1])
        if i < len(sites) - 1:
            assert torch.equal(outputs.hidden_states[i + 1], ran[i])
    for k, state in enumerate(outputs.loop_hidden_states, start=1):
        last = before + k * core
        assert torch.equal(outputs.hidden_states[last], state) == (last < len(sites))  # else it is normed
    assert torch.equal(every.hidden_states[-1], outputs.hidden_states[-1])
    assert list(map(len, (every.hidden_states, every.attentions))) == [len(sites) + 1, len(sites)]


def test_the_site_that_a_layer_gets_tells_its_loop():
    """Also where gradient checkpointing computes it again, and beyond the depth of the config."""
    model, seen, ids = build("windows", num_loops=2), [], random_ids(2, 5)

    def in_the_second_loop(_, args, kwargs, output):
        _, loop = model.config.split_slot(kwargs["site"].layer_idx)
        seen.append(loop)
        return (3 * output[0], *output[1:]) if loop == 1 else output

    model.model.core[0].self_attn.register_forward_hook(in_the_second_loop, with_kwargs=True)

    def gradients():
        seen.clear()
        return torch.autograd.grad(model(ids, labels=ids, num_loops=3).loss, list(model.parameters()))

    model.train()
    expected = gradients()
    assert seen == [0, 1, 2]
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(gradients(), expected)
    assert seen == [0, 1, 2, 2, 1, 0]


# Half precision


def roundings(model, ids, dtype) -> float:
    """How many unit roundoffs of `dtype` the logits are away from those in float64."""
    with torch.no_grad():
        found = copy.deepcopy(model).to(dtype)(ids).logits
        exact = copy.deepcopy(model).double()(ids).logits
    assert found.dtype == dtype and found.isfinite().all()
    return relative_error(found, exact) / (torch.finfo(dtype).eps / 2)


@over_systems
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.covering
def test_half_precision_rounds_no_more_than_single_precision(system, dtype):
    """Errors grow over the loops, but from as many roundings: there is no place where half precision loses more."""
    model, ids = build(system), random_ids(2, 9)
    assert roundings(model, ids, dtype) < 1.5 * roundings(model, ids, torch.float32)  # 0.36 to 0.65 times


@pytest.mark.parametrize("block_norm", ["pre", "branch_sandwich", "residual_sandwich"])
@pytest.mark.parametrize("readout_norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.covering
def test_a_stream_whose_squares_overflow(block_norm, readout_norm, dtype):
    model = tiny_model(block_norm=block_norm, readout_norm=readout_norm, embedding_scale=5000.0)
    ids = random_ids(2, 9)
    assert (model.get_input_embeddings()(ids) * 5000).abs().max() > 1000  # squared: above the 65504 of fp16
    assert roundings(model, ids, dtype) < 1.5 * roundings(model, ids, torch.float32)  # 0.56 to 1.13 times


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 2e4])
def test_norm_is_the_rounded_exact_norm(dtype, size):
    torch.manual_seed(0)
    norm = LoopedNorm(64, eps=1e-6).to(dtype)
    x = (torch.randn(50, 64) * size).clamp(-6e4, 6e4).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    # one rounding of the result, not of the squares and their sum
    error = (norm(x).double() - exact).abs()
    assert (error <= 0.51 * torch.finfo(dtype).eps * 2 ** exact.abs().log2().floor() + 1e-9).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softcap_is_the_rounded_exact_softcap(dtype):
    model = tiny_model(logit_softcap=15.0).to(dtype)
    hidden = (torch.randn(200, 32) * 5).to(dtype)
    with torch.no_grad():
        raw = model.lm_head(hidden).double()
        found = model.logits(hidden).double()
    exact = 15 * torch.tanh(raw / 15)
    assert exact.abs().max() > 14.5
    assert ((found - exact).abs() <= 0.51 * torch.finfo(dtype).eps * 2 ** exact.abs().log2().floor() + 1e-9).all()


@over_systems
def test_autocast_training_is_near_single_precision(system):
    fields = {**SYSTEMS[system], "initializer_range": 0.05}
    torch.manual_seed(0)
    model = shake(LoopedForCausalLM(tiny_config(**fields)), std=0.05).train()
    ids = random_ids(2, 9)
    gradients = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(ids, labels=ids).loss
        loss.backward()
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
        assert loss.dtype == torch.float32
        gradients.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    (exact_loss, *exact), (loss, *found) = gradients
    assert abs(loss - exact_loss) < 0.02 * exact_loss  # 3e-4 at most
    assert len(found) == len(exact)
    for a, b in zip(found, exact):
        assert torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.98  # 0.9997 at least


def test_sites_beyond_the_configured_depth_can_be_copied():
    trunk = tiny_model(num_loops=2).model
    slot = trunk.config.core_slot(7)
    copied = copy.copy(trunk.site(slot))
    assert (copied.layer_idx, copied.scaling) == (slot, trunk.site(0).scaling)


def test_documents_in_a_row_may_be_longer_together_than_learned_positions():
    """Positions start again at each; where they do not, the row is refused as one without positions is."""
    model, ids = tiny_model(**SYSTEMS["learned_positions"], max_position_embeddings=6), random_ids(1, 10)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])
    logits = model(ids, position_ids=positions, use_cache=False).logits
    apart = torch.cat([model(ids[:, :6]).logits, model(ids[:, 6:]).logits], dim=1)
    torch.testing.assert_close(logits, apart, rtol=1e-4, atol=1e-4)
    for given in (None, torch.arange(10)[None]):
        with pytest.raises(ValueError, match="10 tokens are more than the max_position_embeddings=6"):
            model(ids, position_ids=given)
