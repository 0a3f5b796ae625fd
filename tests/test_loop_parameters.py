"""What each loop has of its own, against the formulas with merged weights, in float64: deltas, norms, embeddings."""

import copy
import math

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from looped_recipes.common.flops import count, sizes
from looped_recipes.engine.optimizers import build_optimizers
from looped_recipes.settings.model_fields import check_model
from looped_recipes.settings.recipe import OptimizerConfig, RecipeError
from modeling_looped import LoopedConfig, LoopedForCausalLM
from modeling_looped.formats.relaxed import set_delta, set_loop_residuals, shared_parameters
from modeling_looped.loop_embedding import SinusoidalLoopEmbedding
from modeling_looped.loop_parameters import LoopDelta, parameters_by_loop

from . import naive
from .helpers import SECTIONS, Graphs, quick_and_slow, random_ids, tiny_config, tiny_model
from .helpers_llama import SIZES, tokens
from .naive import DoubleRotary


BOTH = {"loop_lora_rank": 2, "loop_norms": True}
OF_LOOPS = {  # a depth-k prefix is a depth-k run
    "deltas": {"loop_lora_rank": 2},
    "norms": {"loop_norms": True, "qk_norm": "learned", "block_norm": "branch_sandwich"},
    "both": {**BOTH, **SECTIONS, "attention_bias": "qkv", "kv_latent_size": 6, "injection": "concat"},
    "sandwich": {**BOTH, "block_norm": "residual_sandwich", "mlp_gated": False, "injection": "attention_all"},
    "learned": {"loop_embedding": "learned", "injection": "residual_all"},
    "sinusoidal": {"loop_embedding": "sinusoidal", "injection": "attention_all", "loop_lora_rank": 1},
    "everything": {**BOTH, **SECTIONS, "loop_embedding": "learned", "qk_norm": "learned", "window_pattern": "SL"},
}
OF_RUNS = {
    "time": {"loop_embedding": "time"},
    "modulation": {"loop_embedding": "modulation", "injection": "attention_all", "block_norm": "branch_sandwich"},
    "modulation_of_loops": {"loop_embedding": "modulation", **BOTH, "block_norm": "residual_sandwich"},
}
SYSTEMS = OF_LOOPS | OF_RUNS
over_systems = pytest.mark.parametrize("system", SYSTEMS)
DEPTHS = [2, 4, 3]  # of models trained with 3 loops
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def model_of(system: str, **fields) -> LoopedForCausalLM:
    """In float64; every parameter shaken."""
    fields = {"num_key_value_heads": 2, "sliding_window": 4, "eos_token_id": None, "pad_token_id": 0} | fields
    if "window_pattern" not in SYSTEMS[system]:
        del fields["sliding_window"]
    return tiny_model(**{**fields, **SYSTEMS[system]}).double()


def exact_model_of(system: str, **fields) -> LoopedForCausalLM:
    """Rotary tables too, which transformers makes in float32 whatever the model."""
    model = model_of(system, **fields)
    model.model.rotary_emb = DoubleRotary(model.config)
    return model


def padded(rows: int, length: int) -> dict:
    mask = (torch.arange(length) >= torch.tensor([0, length - 1, 2, 1])[:rows, None]).long()
    return {"input_ids": random_ids(rows, length) * mask, "attention_mask": mask}


# Against the formulas


@over_systems
@pytest.mark.parametrize("num_loops", [1, 2, 3, 5])
@pytest.mark.covering
def test_every_depth_equals_the_formulas(system, num_loops):
    """Below, at and above the trained depth: deeper loops take the last set."""
    model, ids = exact_model_of(system), random_ids(2, 6)
    states, logits, _ = naive.forward(model.config, model.state_dict(), ids, num_loops)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, num_loops=num_loops).logits, logits[-1], **CLOSE)
        if system in OF_LOOPS:
            found = model(ids, num_loops=num_loops, output_loop_hidden_states=True).loop_hidden_states
            for ours, theirs in zip(found, states, strict=True):
                torch.testing.assert_close(ours, theirs, **CLOSE)


def test_angles_of_loops_are_not_rounded():
    """In bfloat16 the angle after 100 is 100.5."""
    embedding = SinusoidalLoopEmbedding(tiny_config(loop_embedding="sinusoidal"))
    found = embedding(101, 102, torch.zeros(1, 1, 32, dtype=torch.bfloat16))
    angles = [101 * 10000 ** (-i / 16) for i in range(16)]
    wanted = torch.tensor([*map(math.cos, angles), *map(math.sin, angles)])
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float().flatten(), wanted, rtol=0, atol=2**-8)


@pytest.mark.parametrize("sets", [1, 2, 5])
def test_number_of_sets(sets):
    model, ids = exact_model_of("everything", num_loop_parameters=sets), random_ids(2, 6)
    assert {len(parameter) for parameter in parameters_by_loop(model)} == {sets}
    for num_loops in (2, 6):
        _, logits, _ = naive.forward(model.config, model.state_dict(), ids, num_loops)
        torch.testing.assert_close(model(ids, num_loops=num_loops).logits, logits[-1], **CLOSE)


# Rows at loops of their own


@over_systems
def test_rows_equal_rows_alone(system):
    model, inputs = model_of(system), padded(3, 6)
    with torch.no_grad():
        batch = model(**inputs, num_loops=DEPTHS).logits
        for row, depth in enumerate(DEPTHS):
            alone = model(**{name: x[row : row + 1] for name, x in inputs.items()}, num_loops=depth).logits
            seen = inputs["attention_mask"][row].bool()
            torch.testing.assert_close(batch[row, seen], alone[0, seen], **CLOSE)


@over_systems
@pytest.mark.parametrize("num_loops", [DEPTHS, 4], ids=str)
@pytest.mark.covering
@pytest.mark.some(4)
def test_gradients_of_the_last_loops(system, num_loops):
    """Rows that end together stand at loops of their own. By the formulas, states before the window are constants."""
    model, ids = exact_model_of(system), random_ids(3, 5)
    config, eps = model.config, naive.residual_factor(model.config, model.config.num_loops)
    model.train()
    model(ids, num_loops=num_loops, backprop_loops=2, use_cache=False).logits.square().sum().backward()

    weights = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.state_dict().items()}
    depths = num_loops if isinstance(num_loops, list) else [num_loops] * 3
    for row, depth in zip(ids[:, None], depths):
        x = weights["model.embed_tokens.weight"][row]
        for layer in range(config.num_prelude_layers):
            x = naive.block(config, weights, f"model.prelude.{layer}", layer, x, 1.0, row)
        state = x
        for t in range(depth):
            with torch.set_grad_enabled(t >= depth - 2):
                state = naive.one_loop(config, weights, state, x, t, eps, row, depth)
        naive.logits_of(config, weights, state, depth, row).square().sum().backward()
    for name, parameter in model.named_parameters():
        expected = weights[name].grad
        if parameter.grad is None:
            assert expected is None or not expected.any(), name
        else:
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-8, atol=1e-8 * expected.abs().max().item())
    assert all(parameter.grad is not None for parameter in parameters_by_loop(model))


@over_systems
@pytest.mark.some(4)
def test_reentrant_checkpointing_changes_nothing(system):
    model, ids = model_of(system).train(), random_ids(2, 5)
    gradients = []
    for reentrant in (None, False, True):
        model.zero_grad()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(ids, labels=ids, use_cache=False, num_loops=[2, 4]).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        for other in gradients[1:]:
            torch.testing.assert_close(other[name], gradient, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "fields", [{}, {"inter_loop_norm": "shared"}, {"num_coda_layers": 1, "loop_loss": "per_loop"}], ids=str
)
def test_reentrant_checkpointing_begins_where_gradients_do(fields, frozen):
    """A state that the last loops, or the coda, only read, or an embedding that is not trained, is a constant for
    their blocks."""
    model, ids = tiny_model(num_loops=4, **fields).double().train(), random_ids(2, 5)
    model.model.embed_tokens.requires_grad_(not frozen)
    gradients = []
    for reentrant in (None, True):
        model.zero_grad()
        if reentrant:
            model.gradient_checkpointing_enable({"use_reentrant": True})
        model(ids, labels=ids, use_cache=False, backprop_loops=None if frozen else 2).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert "model.core.0.self_attn.q_proj.weight" in gradients[0]
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-8, atol=1e-10)


# Cache and decoding


@over_systems
@pytest.mark.parametrize("num_loops", [4, DEPTHS], ids=str)
@pytest.mark.covering
def test_cached_equals_uncached(system, num_loops):
    model, inputs = model_of(system), padded(3, 8)
    mask = inputs["attention_mask"]
    with torch.no_grad():
        whole = model(**inputs, num_loops=num_loops, use_cache=False).logits
        first = model(inputs["input_ids"][:, :5], attention_mask=mask[:, :5], num_loops=num_loops)
        cache, parts = first.past_key_values, [first.logits]
        for end in (7, 8):
            ids = inputs["input_ids"][:, parts[0].shape[1] + sum(part.shape[1] for part in parts[1:]) : end]
            part = model(ids, attention_mask=mask[:, :end], past_key_values=cache, num_loops=num_loops)
            parts.append(part.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1)[mask.bool()], whole[mask.bool()], **CLOSE)


def generate(model, ids, mask, **arguments):
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, **arguments
    )
    return out.sequences[:, ids.shape[1] :].tolist(), out.token_loops.tolist()


@pytest.mark.parametrize("system", quick_and_slow(OF_LOOPS, "sandwich", "everything"))
def test_rows_that_exit_apart_equal_rows_alone(system):
    """In continuous depth rows stand at loops and tokens of their own."""
    model, inputs = model_of(system, num_loops=4), padded(4, 6)
    ids, mask = inputs.values()
    with torch.no_grad():
        logits = model(ids, num_loops=2, attention_mask=mask).logits[:, -1]
    threshold = logits.topk(2).values.diff().abs().median().item()
    exits = {"exit_criterion": "logit_margin", "exit_threshold": threshold}
    batch, loops = generate(model, ids, mask, **exits)
    assert len({loop for row in loops for loop in row[1:]}) > 1
    for row in range(4):
        only = ids[row : row + 1, mask[row] == 1]
        assert generate(model, only, torch.ones_like(only), **exits) == ([batch[row]], [loops[row]])
    assert generate(model, ids, mask, exit_criterion="logit_margin", exit_threshold=1e9) == generate(model, ids, mask)


@pytest.mark.parametrize("system", quick_and_slow(OF_LOOPS, "both", "sinusoidal"))
def test_drafts_change_nothing(system):
    model, inputs = model_of(system), padded(3, 6)
    plain = generate(model, *inputs.values())
    for draft_loops in (1, 2):
        assert generate(model, *inputs.values(), draft_loops=draft_loops, draft_tokens=3) == plain


@pytest.mark.parametrize("system", quick_and_slow(SYSTEMS, "norms", "modulation_of_loops"))
def test_decoding_at_any_depth_equals_whole_passes(system):
    model, inputs = model_of(system), padded(2, 5)
    ids, mask = inputs.values()
    for arguments in ({"num_loops": 4}, {"num_loops": [1, 4]}, {"cache_implementation": "static"}):
        found, _ = generate(model, ids, mask, **arguments)
        so_far, seen = ids, mask
        for token in range(6):
            with torch.no_grad():
                depth = arguments.get("num_loops", 3)
                logits = model(so_far, attention_mask=seen, num_loops=depth, use_cache=False).logits
            so_far = torch.cat([so_far, logits[:, -1:].argmax(-1)], dim=1)
            seen = torch.nn.functional.pad(seen, (0, 1), value=1)
            assert so_far[:, -1].tolist() == [row[token] for row in found]


@pytest.mark.parametrize("system", ["everything", "both"])
def test_beams_and_batches(system):
    model, ids = model_of(system, num_loops=2), random_ids(2, 5)
    beams = model.generate(ids, num_beams=3, max_new_tokens=4, do_sample=False)
    uncached = model.generate(ids, num_beams=3, max_new_tokens=4, do_sample=False, use_cache=False)
    assert torch.equal(beams, uncached)


def test_warm_start_with_the_time():
    """The one way to decode row by row of a model whose loops follow the depth of the run."""
    fields = {"injection": "add", "state_init": "zeros"}
    model, inputs = model_of("time", **fields), padded(3, 5)
    batch, _ = generate(model, *inputs.values(), warm_start=True)
    for row, (ids, mask) in enumerate(zip(*inputs.values())):
        only = ids[None, mask == 1]
        assert generate(model, only, torch.ones_like(only), warm_start=True)[0] == [batch[row]]


# The start, and the number of sets


@over_systems
@pytest.mark.parametrize("scheme", ["normal", "scaled_zero", "takase", "zero_output", "torch"])
@pytest.mark.covering
def test_a_new_model_is_that_without(system, scheme):
    """Whatever the scheme; but for sinusoids, which are never zero."""
    if SYSTEMS[system].get("loop_embedding") == "sinusoidal":
        pytest.skip("a fixed embedding")
    fields = {**SYSTEMS[system], "init_scheme": scheme}
    torch.manual_seed(0)
    model = LoopedForCausalLM(tiny_config(**fields)).double().eval()
    none = {"loop_lora_rank": None, "loop_norms": False, "loop_embedding": "none"}
    plain = LoopedForCausalLM(tiny_config(**{**fields, **none})).double().eval()
    weights = model.state_dict()
    for name, parameter in plain.state_dict().items():
        parameter.copy_(weights[name][0] if weights[name].shape != parameter.shape else weights[name])
    ids = random_ids(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, num_loops=4).logits, plain(ids, num_loops=4).logits, **CLOSE)
    for part in model.modules():
        if isinstance(part, LoopDelta):
            assert part.a.abs().max() <= part.a.shape[-1] ** -0.5 and part.a.std() > 0.3 * part.a.shape[-1] ** -0.5


@over_systems
@pytest.mark.some(3)
def test_saved_and_opened_at_another_depth(system, tmp_path):
    model, ids = model_of(system), random_ids(2, 6)
    model.config.num_loops = 5
    with torch.no_grad():
        expected = {depth: model(ids, num_loops=depth).logits for depth in (2, 5)}
    model.save_pretrained(tmp_path / "model")
    opened = [
        LoopedForCausalLM.from_pretrained(tmp_path / "model"),
        LoopedForCausalLM.from_pretrained(tmp_path / "model", num_loops=7),
        LoopedForCausalLM.from_pretrained(tmp_path / "model", trained_num_loops=7),
    ]
    opened[1].save_pretrained(tmp_path / "again")
    opened.append(LoopedForCausalLM.from_pretrained(tmp_path / "again", num_loops=2))
    for other in opened:
        assert {name: p.shape for name, p in other.named_parameters()} == {
            name: p.shape for name, p in model.named_parameters()
        }
        for depth, logits in expected.items():
            with torch.no_grad():
                found = other(ids, num_loops=depth).logits
            if system in OF_LOOPS:
                assert torch.equal(found, logits)
            else:  # products of one row round by where weights lie in memory
                torch.testing.assert_close(found, logits, **CLOSE)
    assert LoopedConfig.from_pretrained(tmp_path / "model").num_loop_parameters in (3, None)


def test_the_default_config_says_nothing_of_loops():
    config = tiny_config()
    assert config.to_dict()["num_loop_parameters"] is None and not config.has_sets_in_core
    model = LoopedForCausalLM(config)
    assert not any("loop_" in name for name, _ in model.named_parameters())
    assert tiny_config(loop_norms=True).to_dict()["num_loop_parameters"] == 3


# What is refused


@pytest.mark.parametrize("value", ["time", "modulation"])
def test_what_reads_loops_of_a_deeper_run_is_refused(value):
    for fields in ({"loop_loss": "per_loop"}, {"exit_gate": "raw"}, {"norm_penalty": 0.1}):
        with pytest.raises(ValueError, match=f"loop_embedding='{value}'.*not a run of depth k"):
            tiny_config(loop_embedding=value, **fields)
    model, ids = tiny_model(loop_embedding=value), random_ids(1, 4)
    for arguments in ({"output_loop_logits": True}, {"output_loop_hidden_states": True}):
        with pytest.raises(ValueError, match=f"loop_embedding='{value}'.*each depth by itself"):
            model(ids, **arguments)
    with pytest.raises(ValueError, match=f"loop_embedding='{value}'.*early exit means nothing"):
        model.generate(ids, exit_criterion="logit_margin", exit_threshold=1.0)
    with pytest.raises(ValueError, match=f"loop_embedding='{value}'.*cannot be drafted"):
        model.generate(ids, draft_loops=1)


def test_counts_are_checked():
    for name in ("loop_lora_rank", "num_loop_parameters"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            tiny_config(**{name: 0})
    with pytest.raises(ValueError, match="did you mean `loop_embedding`"):
        tiny_config(timestep_embedding=True)
    given = {"num_loop_parameters": 4}
    with pytest.raises(RecipeError, match="num_loop_parameters=4 would have no effect without a loop_lora_rank"):
        check_model(given, tiny_config(**given))
    given = {"loop_norms": True, "norm_affine": False}
    with pytest.raises(RecipeError, match="loop_norms=True would have no effect without norm_affine"):
        check_model(given, tiny_config(**given))
    for qk_norm in ("learned", "all_heads"):
        of_loops = {**given, "qk_norm": qk_norm}
        check_model(of_loops, tiny_config(**of_loops))
        assert len(parameters_by_loop(tiny_model(num_core_layers=1, **of_loops))) == 2  # norms of queries and keys


# Around the model


def test_lora_of_peft_is_shared_by_all_loops():
    """It adapts the shared layers, and leaves what loops have of their own as it is."""
    model, ids = exact_model_of("deltas"), random_ids(2, 6)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(model), lora).double().eval()
    assert not any("loop_deltas" in name for name, p in adapted.named_parameters() if p.requires_grad)
    with torch.no_grad():
        expected = adapted(input_ids=ids, num_loops=4).logits
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(ids, num_loops=4).logits, expected, **CLOSE)
        _, logits, _ = naive.forward(merged.config, merged.state_dict(), ids, 4)
    torch.testing.assert_close(expected, logits[-1], **CLOSE)
    assert not torch.equal(expected, model(ids, num_loops=4).logits)
    for name, weight in merged.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]) == (".loop_deltas." in name or "_proj" not in name)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_what_optimizers_make_of_them(name):
    model = tiny_model(**SYSTEMS["everything"], attention_bias="qk")
    config = OptimizerConfig(name=name, lr=0.01, muon_lr=0.02, weight_decay=0.1, decay_all=False)
    optimizers, names = build_optimizers(model, config, 10), {id(p): name for name, p in model.named_parameters()}
    held = {names[id(p)]: group for o in optimizers for group in o.param_groups for p in group["params"]}
    assert held.keys() == set(names.values())
    for name, group in held.items():
        if "loop_deltas" in name:
            assert group.get("name") != "muon"
            assert (group["weight_decay"] == 0) == name.endswith("bias"), name
        elif "norm" in name or "loop_embedding" in name:
            assert group["weight_decay"] == 0, name
    groups = {group["name"]: {id(p) for p in group["params"]} for group in model.parameter_groups(0.01)}
    inside = {id(p) for name, p in model.named_parameters() if ".core." in name}
    assert inside <= groups["blocks"] and id(model.model.loop_embedding.weight) in groups["base"]


def test_operations_count_one_set():
    fields = {**SYSTEMS["deltas"], "loop_norms": True, "num_loops": 4}
    plain, own = tiny_config(num_loops=4), tiny_config(**fields)
    model = LoopedForCausalLM(own)
    deltas = [part for part in model.modules() if isinstance(part, LoopDelta)]
    rank_1 = sum(part.a.shape[-1] + part.b.shape[1] for part in deltas)
    assert sizes(own).core - sizes(plain).core == 2 * rank_1
    assert sizes(own).total == count(model) == sizes(plain).total + 4 * 2 * rank_1 + 3 * 4 * 32  # four norms
    assert sizes(tiny_config(loop_embedding="modulation")).core == sizes(tiny_config()).core


def test_tensor_parallel_leaves_the_core_whole():
    plan = tiny_config(**SECTIONS, loop_lora_rank=2).base_model_tp_plan
    assert plan and not any(name.startswith("core") for name in plan)
    assert any(name.startswith("core") for name in tiny_config(loop_norms=True).base_model_tp_plan)
    # a tied head, which is split, has its weight there
    tied = tiny_config(loop_lora_rank=2, tie_word_embeddings=True).base_model_tp_plan
    assert tied == {"embed_tokens": "embedding_rowwise"}


@pytest.mark.slow
@pytest.mark.parametrize("system", OF_RUNS)
def test_one_graph_of_each_depth(system):
    torch._dynamo.reset()
    model, graphs, ids = tiny_model(**SYSTEMS[system]), Graphs(), random_ids(2, 6)
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    with torch.no_grad():
        for num_loops in (3, 2, [1, 3], 3):
            expected = model(ids, num_loops=num_loops).logits
            torch.testing.assert_close(compiled(ids, num_loops=num_loops).logits, expected)
    assert graphs.count == 3
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_compiled_block_is_not_compiled_for_each_loop():
    torch._dynamo.reset()
    model, graphs, ids = tiny_model(**SYSTEMS["both"]), Graphs(), random_ids(2, 6)
    expected = model(ids, num_loops=8, use_cache=False).logits
    model.model.core[0].compile(backend=graphs)
    torch.testing.assert_close(model(ids, num_loops=8, use_cache=False).logits, expected)
    assert graphs.count <= 3  # loops 0 and 1, and any other
    torch._dynamo.reset()


# Layers of a dense model as loops


def unrolled_llama(num_layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=num_layers, attention_bias=False)).eval()
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 1.0))
    return llama


def tie_layers(model, per_loop_state: list[dict[str, torch.Tensor]]):
    """Shared weights as the mean over loops, and what is left to each loop as its own."""
    for name, weight in shared_parameters(model).items():
        if all(getattr(state.get(name), "shape", None) == weight.shape for state in per_loop_state):
            weight.detach().copy_(torch.stack([state[name] for state in per_loop_state]).mean(0))
    set_loop_residuals(model, per_loop_state)


def relative_errors(model, per_loop_state: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Of each weight: the norm of its difference from the wanted one over the norm of that, in its worst loop."""
    errors: dict[str, float] = {}
    for t, state in enumerate(per_loop_state):
        merged = naive.weights_at(model.config, model.state_dict(), t)
        for name, wanted in state.items():
            error = (merged[f"model.core.{name}"] - wanted).norm() / wanted.norm()
            errors[name] = max(error.item(), errors.get(name, 0.0))
    return errors


def tied(llama: LlamaForCausalLM, num_loops: int, **fields):
    """A looped model of a Llama's layers, and the weights of every loop."""
    layers = [layer.state_dict() for layer in llama.model.layers]
    size = len(layers) // num_loops
    states = [
        {f"{i}.{name}": weight for i in range(size) for name, weight in layers[t * size + i].items()}
        for t in range(num_loops)
    ]
    looped = LoopedForCausalLM(LoopedConfig(**SIZES, num_core_layers=size, num_loops=num_loops, **fields)).eval()
    looped.to(llama.dtype)
    for name in ("embed_tokens", "norm"):
        getattr(looped.model, name).load_state_dict(getattr(llama.model, name).state_dict())
    looped.lm_head.load_state_dict(llama.lm_head.state_dict())
    tie_layers(looped, states)
    return looped, states


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_rank_is_the_unrolled_model(dtype):
    llama = unrolled_llama(6).to(dtype)
    looped, states = tied(llama, 3, loop_lora_rank=48, loop_norms=True)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-9
    if dtype == torch.float64:  # in which transformers computes neither norms nor rotary tables
        for layer in [llama.model, *llama.model.layers]:
            for name, part in list(layer.named_children()):
                if "norm" in name:
                    exact = torch.nn.RMSNorm(32, eps=llama.config.rms_norm_eps, dtype=dtype)
                    exact.weight = part.weight
                    setattr(layer, name, exact)
        llama.model.rotary_emb = looped.model.rotary_emb = DoubleRotary(looped.config)
    with torch.no_grad():
        torch.testing.assert_close(looped(tokens()).logits, llama(tokens()).logits, rtol=tolerance, atol=tolerance)
    left_out = relative_errors(looped, states)
    assert max(left_out.values()) < 1e-5
    assert left_out.keys() == {name for name, _ in plain_names(looped)}


def plain_names(looped):
    return [(n, p) for n, p in looped.model.core.named_parameters() if "loop_deltas" not in n]


def test_a_lower_rank_leaves_out_the_smallest_singular_values():
    llama = unrolled_llama(4).double()
    looped, states = tied(llama, 2, loop_lora_rank=5)
    left_out = relative_errors(looped, states)
    for name, shared in plain_names(looped):
        wanted = torch.stack([state[name] for state in states])
        torch.testing.assert_close(shared.detach(), wanted.mean(0))
        rest = wanted - wanted.mean(0)
        if "norm" not in name:
            rest = torch.linalg.svdvals(rest)[:, 5:]
        expected = (rest.flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)).max().item()
        assert left_out[name] == pytest.approx(expected), name
    set_loop_residuals(looped, states)
    assert relative_errors(looped, states) == pytest.approx(left_out)


@torch.no_grad()
def test_few_of_many_singular_values_are_found_as_well_and_repeatably():
    torch.manual_seed(0)
    layer = torch.nn.Linear(400, 300)
    delta, found = LoopDelta(layer, rank=4, num_sets=2), []
    for _ in range(2):
        set_delta(delta, 1, layer.weight, torch.zeros_like(layer.weight))
        found.append((delta.b[1] @ delta.a[1]).detach())
    assert torch.equal(*found)
    least = torch.linalg.svdvals(layer.weight)[4:].norm()
    assert ((layer.weight - found[0]).norm() / least).item() == pytest.approx(1, abs=1e-4)


def test_biases_are_tied_too():
    torch.manual_seed(0)
    model = tiny_model(loop_lora_rank=48, loop_norms=True, attention_bias="qkv", num_loops=2).double()
    for delta in (part for part in model.modules() if isinstance(part, LoopDelta)):
        torch.nn.init.normal_(delta.b)  # also what lies beyond the number of singular values is set anew
    states = [{name: torch.randn_like(p[0] if "norm" in name else p) for name, p in plain_names(model)} for _ in "ab"]
    tie_layers(model, states)
    assert max(relative_errors(model, states).values()) < 1e-10
    for t, state in enumerate(states):
        merged = naive.weights_at(model.config, model.state_dict(), t)
        for name, weight in state.items():
            torch.testing.assert_close(merged[f"model.core.{name}"], weight)


def test_weights_that_do_not_fit_are_refused():
    model = tiny_model(loop_lora_rank=2, num_loops=2)
    state = {name: p.detach() for name, p in plain_names(model)}
    name = "0.mlp.up_proj.weight"
    with pytest.raises(ValueError, match="1 loops for a model with num_loop_parameters=2"):
        tie_layers(model, [state])
    with pytest.raises(ValueError, match=f"loop 1 .*missing \\['{name}'\\]"):
        tie_layers(model, [state, {key: w for key, w in state.items() if key != name}])
    with pytest.raises(ValueError, match="not in the model \\['9.weight'\\]"):
        tie_layers(model, [{**state, "9.weight": state[name]}, state])
    with pytest.raises(ValueError, match=r"has shape \(3,\), but that of the model is \(48, 32\)"):
        tie_layers(model, [state, {**state, name: torch.zeros(3)}])
    with pytest.raises(ValueError, match="nothing of their own"):
        tie_layers(tiny_model(), [state] * 3)
