"""Parts that users put in the place of ours: followed everywhere, or refused with a reason, and never dropped."""

import copy
import dataclasses
from functools import partial
from types import MethodType
from typing import get_args

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, modeling_utils
from transformers import initialization as init
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from looped_eval.halting.scoring import measure
from modeling_looped import (
    ExitRule,
    LoopedConfig,
    LoopedForCausalLM,
    LoopedForSequenceClassification,
    SharedPasses,
    checks,
)
from modeling_looped.auto_classes import AUTO_CLASSES
from modeling_looped.compatibility import eager_attention
from modeling_looped.config_errors import LoopedConfigError
from modeling_looped.cpu import fast_paths
from modeling_looped.depth import one_or_rows
from modeling_looped.exit_criteria import CRITERIA, INITIAL, Criterion
from modeling_looped.injection import Injection
from modeling_looped.layers import AttentionSite, LoopedAttention, LoopedBlock
from modeling_looped.loading import OUR_CLASSES, LoopedCheckpointError
from modeling_looped.modeling_looped import LoopedModel
from modeling_looped.overrides import is_changed

from .helpers import quick_and_slow, random_ids, shake, tiny_config, tiny_model


class Half(Injection):
    def forward(self, state, embedded):
        return state + embedded / 2


class WithInjection(LoopedForCausalLM):
    part: type[Injection]

    def __init__(self, config):
        super().__init__(config)
        self.model.injection = self.part(config)
        self.post_init()


class HalfForCausalLM(WithInjection):
    part = Half


class Gated(Injection):
    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, state, embedded):
        return state + torch.sigmoid(self.gate) * embedded


class GatedForCausalLM(WithInjection):
    part = Gated


class FilledGated(Gated):
    def init_parameters(self):
        init.constant_(self.gate, 0.25)


class FilledGatedForCausalLM(WithInjection):
    part = FilledGated


# What a folder holds


@pytest.mark.parametrize("cls", [LoopedForCausalLM, AutoModelForCausalLM, LoopedForSequenceClassification])
def test_a_folder_of_another_class_whose_tensors_all_fit_is_refused(cls, tmp_path):
    model = HalfForCausalLM(tiny_config(injection="add")).eval()
    model.save_pretrained(tmp_path)
    with pytest.raises(LoopedCheckpointError, match="saved by HalfForCausalLM"):
        cls.from_pretrained(tmp_path)
    ids = random_ids(2, 7)
    assert torch.equal(HalfForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)
    assert not torch.equal(LoopedForCausalLM.from_pretrained(tmp_path, strict=False)(ids).logits, model(ids).logits)


def test_the_classes_of_ours_are_those_of_auto_classes():
    assert OUR_CLASSES == {cls.__name__ for cls in AUTO_CLASSES.values()}


def test_a_class_of_others_opens_folders_of_ours(tmp_path):
    tiny_model(injection="add").save_pretrained(tmp_path)
    assert type(HalfForCausalLM.from_pretrained(tmp_path)) is HalfForCausalLM


def test_parameters_that_nothing_fills_are_refused(tmp_path):
    tiny_model(injection="add").save_pretrained(tmp_path / "plain")
    with pytest.raises(LoopedCheckpointError, match="missing from it: model.injection.gate"):
        GatedForCausalLM.from_pretrained(tmp_path / "plain")
    with pytest.raises(LoopedCheckpointError, match=r"gate is not in the checkpoint, and Gated .*init_parameters\(\)"):
        GatedForCausalLM.from_pretrained(tmp_path / "plain", strict=False)
    opened = FilledGatedForCausalLM.from_pretrained(tmp_path / "plain", strict=False)
    assert opened.model.injection.gate.tolist() == [0.25] * opened.config.hidden_size

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3)).save_pretrained(tmp_path / "dense")
    sections = {"num_prelude_layers": 1, "num_coda_layers": 1, "num_loops": 2, "injection": "add"}
    with pytest.raises(LoopedCheckpointError, match="Gated does not say what it is"):
        GatedForCausalLM.from_dense(tmp_path / "dense", **sections)
    made = FilledGatedForCausalLM.from_dense(tmp_path / "dense", **sections)
    assert made.model.injection.gate.tolist() == [0.25] * 16


def test_a_config_that_changed_after_the_model_was_built_is_told(tmp_path, monkeypatch):
    model, said = tiny_model(), []
    monkeypatch.setattr(checks.logger, "warning_once", said.append)
    model.config.num_loops, model.config.logit_softcap = 7, 30.0  # followed
    model.save_pretrained(tmp_path)
    assert not said
    model.config.injection, model.config.rms_norm_eps = "add", 0.5
    model.save_pretrained(tmp_path)
    assert "injection='add' (built with 'none')" in said[0] and "rms_norm_eps=0.5" in said[0]


def test_a_model_may_follow_a_changed_config_and_what_is_said_of_it_allows_that(tmp_path, monkeypatch):
    model, ids, said = tiny_model(exit_gate="raw"), random_ids(1, 4), []
    monkeypatch.setattr(checks.logger, "warning_once", said.append)
    before = model(ids, output_exit_probabilities=True).exit_probabilities
    model.config.exit_gate = "normed"
    assert not torch.allclose(before, model(ids, output_exit_probabilities=True).exit_probabilities)
    model.save_pretrained(tmp_path)
    assert "exit_gate='normed' (built with 'raw'). This model may follow that in part or not at all: build" in said[0]
    assert "exit_gate='normed' (built with 'raw'). This model may follow that in part or not at all," in said[1]


def other_values(field) -> list:
    """Values that a field of the config may have besides its default; some are refused beside the others."""
    now = field.default
    if isinstance(now, bool):
        return [not now]
    if isinstance(now, str):
        return [word for word in get_args(field.type) if word != now]
    if isinstance(now, (int, float)):
        return [2 * now + 1]
    kinds = str(field.type)
    return [True] if "bool" in kinds else [2] if "int" in kinds else [0.5] if "float" in kinds else []


def test_no_field_changes_what_is_saved_without_a_word(tmp_path, monkeypatch):
    """Whatever is assigned to the config: the model follows, or it is told, or the folder does not open silently."""
    ids, told, differ, compared = random_ids(1, 5), [], [], 0
    monkeypatch.setattr(checks.logger, "warning", told.append)
    sizes = {"num_core_layers": 1, "num_loops": 2, "norm_affine": False, "embedding_scale": 3.7}
    built = tiny_model(readout_norm="rmsnorm", **sizes)
    changes = [(field.name, value) for field in dataclasses.fields(LoopedConfig) for value in other_values(field)]
    for name, value in changes:
        model = copy.deepcopy(built)
        told.clear()
        try:
            setattr(model.config, name, value)
            model.config.validate()
            with torch.no_grad():
                expected = model(ids, use_cache=False).logits
                model.save_pretrained(tmp_path)
                if told:
                    compared += 1
                    continue
                reopened, report = LoopedForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
                logits = reopened(ids, use_cache=False).logits
        except (LoopedConfigError, ValueError, TypeError, IndexError, RuntimeError, AttributeError):
            continue  # refused
        compared += 1
        if not told and not report["missing_keys"] and not torch.equal(logits, expected):  # transformers tells of keys
            differ.append((name, value))
    assert not differ and compared > 60


def test_a_gate_that_was_not_built_or_is_frozen_is_told():
    model, ids = tiny_model(), random_ids(2, 7)
    model.config.loop_loss = "exit_weighted"
    with pytest.raises(ValueError, match="loop_loss='exit_weighted'.* built without one: .*exit_gate='raw'"):
        model(ids, labels=ids)
    model = tiny_model(exit_gate="raw", loop_loss="gate").train()
    model(ids, labels=ids).loss.backward()
    model.exit_gate.requires_grad_(False)
    with pytest.raises(ValueError, match=r"whose weights are frozen, .* modules_to_save=\['exit_gate'\]"):
        model(ids, labels=ids)
    assert model.eval()(ids, labels=ids).loss > 0


# Blocks: a slot of the cache belongs to a place, not to a block


def grown(model):
    model.model.core.append(copy.deepcopy(model.model.core[0]))
    model.config.num_core_layers += 1


def pruned(model):
    del model.model.core[1]
    model.config.num_core_layers -= 1


def tied(model):
    model.model.core[2] = model.model.core[0]


def reordered(model):
    model.model.core = nn.ModuleList(reversed(model.model.core))


def moved(model):
    model.model.core[1] = model.model.prelude[0]


@pytest.mark.parametrize("change", [tied, grown, pruned, reordered, moved], ids=lambda change: change.__name__)
@pytest.mark.parametrize("fields", [{}, {"key_value_interval": 2}], ids=["own_keys", "shared_keys"])
def test_layers_can_be_tied_added_taken_away_and_moved(change, fields):
    model = tiny_model(num_core_layers=3, num_prelude_layers=1, num_coda_layers=1, num_loops=4, **fields)
    change(model)
    ids = random_ids(2, 7)
    torch.testing.assert_close(model(ids).logits, model(ids, use_cache=False).logits)
    settings = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **settings)
    assert torch.equal(model.generate(ids, **settings), expected)
    assert torch.equal(model.generate(ids, exit_criterion="kl", exit_threshold=0.0, **settings), expected)
    if not fields:
        assert torch.equal(model.generate(ids, draft_loops=2, **settings), expected)


def test_a_core_that_the_config_does_not_count_is_refused():
    model = tiny_model(num_core_layers=2)
    model.model.core.append(copy.deepcopy(model.model.core[0]))
    with pytest.raises(ValueError, match="3 layers in its core, but config.num_core_layers=2: set that to 3"):
        model(random_ids(2, 7))


class Steered(LoopedBlock):
    def forward(self, hidden_states, *args, steer=None, **kwargs):
        return super().forward(hidden_states, *args, **kwargs) + steer


def test_arguments_of_own_blocks_go_with_their_rows():
    model, ids = tiny_model(num_loops=4), random_ids(3, 7)
    for block in model.model.core:
        block.__class__ = Steered
    steer, depths = torch.randn(3, 1, model.config.hidden_size), [2, 1, 4]
    mixed = model(ids, num_loops=depths, steer=steer).logits
    rule = ExitRule("latent_diff", 0.3)
    exits = model(ids, steer=steer, exit_rule=rule).token_loops
    for row in range(3):
        alone = {"input_ids": ids[row : row + 1], "steer": steer[row : row + 1]}
        torch.testing.assert_close(mixed[row : row + 1], model(**alone, num_loops=depths[row]).logits)
        assert torch.equal(exits[row : row + 1], model(**alone, exit_rule=rule).token_loops)


# Ways of decoding that do not call what was replaced are refused


class Sharper(LoopedAttention):
    def attend(self, site, queries, keys, values, mask, kwargs):
        return super().attend(site, 4 * queries, keys, values, mask, kwargs)


class SharperSite(AttentionSite):
    def forward(self, queries, *args, **kwargs):
        return super().forward(4 * queries, *args, **kwargs)


class OwnMasks(LoopedModel):
    def attention_masks(self, *args):
        return super().attention_masks(*args)


def with_own_attention(model, monkeypatch):
    for block in model.model.core:
        block.self_attn.__class__ = Sharper


def with_own_site(model, monkeypatch):
    for site in model.model.attention_sites:
        site.__class__ = SharperSite


def with_replaced_sites(model, monkeypatch):
    for site in model.model.attention_sites:
        usual = site.forward
        site.forward = lambda queries, *args, usual=usual, **kwargs: usual(4 * queries, *args, **kwargs)


def with_hooked_sites(model, monkeypatch):
    for site in model.model.attention_sites:
        site.register_forward_pre_hook(lambda module, args: (4 * args[0], *args[1:]))


def with_a_global_hook(model, monkeypatch):
    def sharper(module, args):
        return (4 * args[0], *args[1:]) if isinstance(module, AttentionSite) else None

    monkeypatch.setitem(nn.modules.module._global_forward_pre_hooks, "sharper", sharper)


def with_own_masks(model, monkeypatch):
    model.model.__class__ = OwnMasks


def with_own_kernel(model, monkeypatch):
    registered = ALL_ATTENTION_FUNCTIONS._global_mapping  # of `register`, which cannot be undone
    of_torch = registered["sdpa"]
    monkeypatch.setitem(registered, "sdpa", lambda *args, **kwargs: of_torch(*args, **kwargs))


def with_own_eager_kernel(model, monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "eager", eager_attention)
    model.set_attn_implementation("eager")


def with_own_flex_kernel(model, monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flex_attention", eager_attention)
    model.set_attn_implementation("flex_attention")


KERNELS = with_own_kernel, with_own_eager_kernel, with_own_flex_kernel


@pytest.mark.parametrize("change", [with_own_attention, with_own_site, with_own_masks, *KERNELS])
@pytest.mark.parametrize("options", [{"exit_criterion": "kl"}, {"draft_loops": 2}], ids=["exits", "drafts"])
def test_decoding_in_rows_refuses_attention_that_it_would_not_call(change, options, monkeypatch):
    model = tiny_model(num_loops=4)
    change(model, monkeypatch)
    with pytest.raises(ValueError, match="attention that is not the model's own"):
        model.generate(random_ids(2, 7), max_new_tokens=3, **options)


@pytest.mark.parametrize("change", [with_own_site, with_replaced_sites, with_hooked_sites, with_a_global_hook])
def test_own_sites_are_called_where_the_cpu_has_faster_ways(change, monkeypatch):
    """Of single queries in bfloat16."""
    model, ids = tiny_model(num_core_layers=1, num_loops=2).bfloat16(), random_ids(2, 8)

    def last_logits():
        with torch.no_grad():
            cache = model(ids[:, :-1]).cache
            return model(ids[:, -1:], cache=cache).logits

    before = last_logits()
    change(model, monkeypatch)
    found = last_logits()
    with fast_paths(False):
        expected = last_logits()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1)
    assert (found - before).abs().max() > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_sites_serve_loops_beyond_the_configured_depth(dtype, monkeypatch):
    fields = {"num_prelude_layers": 1, "num_core_layers": 2, "eos_token_id": None}
    shallow, deep = (tiny_model(num_loops=loops, **fields).to(dtype) for loops in (2, 4))
    deep.load_state_dict(shallow.state_dict())
    ids, how = random_ids(2, 7), {"num_loops": 4, "max_new_tokens": 5, "do_sample": False}
    before = deep(ids).logits
    for model in (shallow, deep):
        with_own_site(model, monkeypatch)
    torch.testing.assert_close(shallow(ids, num_loops=4).logits, deep(ids).logits)
    assert not torch.allclose(deep(ids).logits, before, atol=0.5)
    assert torch.equal(shallow.generate(ids, **how), deep.generate(ids, **how))


def test_a_site_deeper_than_the_config_has_the_slot_of_its_loop():
    class Noted(AttentionSite):
        def forward(self, *args, **kwargs):
            slots.append(self.layer_idx)
            return super().forward(*args, **kwargs)

    model, slots = tiny_model(num_core_layers=1, num_loops=2), []
    for site in model.model.attention_sites:
        site.__class__ = Noted
    model(random_ids(2, 7), num_loops=4)
    assert slots == [0, 1, 2, 3]


def test_a_replaced_forward_of_a_site_is_refused_beyond_the_configured_depth(monkeypatch):
    model, ids = tiny_model(num_core_layers=1, num_loops=2), random_ids(2, 7)
    with_replaced_sites(model, monkeypatch)
    model(ids)
    with pytest.raises(ValueError, match=r"forward of attention_sites\[0\] was replaced, and loop 3 has no site"):
        model(ids, num_loops=3)


def test_a_head_that_reads_weights_of_others_passes_their_gradients():
    class TiedHead(nn.Module):
        def __init__(self, embedding):
            super().__init__()
            self.proj = nn.Linear(embedding.weight.shape[1], embedding.weight.shape[1])
            self.embedding = [embedding]  # not registered again

        def forward(self, x):
            return self.proj(x) @ self.embedding[0].weight.T

    model, ids = tiny_model(loop_loss="per_loop", num_loops=3), random_ids(2, 7)
    model.lm_head = TiedHead(model.model.embed_tokens)
    weight = model.model.embed_tokens.weight
    (ours,) = torch.autograd.grad(model(ids, labels=ids).loss, weight)
    losses = [
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        for logits in model(ids, output_loop_logits=True).loop_logits
    ]
    torch.testing.assert_close(ours, torch.autograd.grad(sum(losses) / 3, weight)[0])


def test_what_changes_a_module_is_seen_and_what_only_records_is_not(monkeypatch):
    model = tiny_model(injection="add")
    model(random_ids(2, 7), output_hidden_states=True)  # leaves hooks of transformers
    assert not any(map(is_changed, model.modules()))
    model.model.core_pass = lambda *args: model.model.forward(*args)
    assert is_changed(model.model)
    monkeypatch.setattr(type(model.model.injection), "forward", lambda self, state, embedded: state)
    assert is_changed(model.model.injection)


def change_the_second_loop(trunk, vector):
    def core_pass(state, embedded, loop, depth, context):
        after = type(trunk).core_pass(trunk, state, embedded, loop, depth, context)
        return after + vector * one_or_rows(lambda t: t == 1, loop, after.device, 3)

    trunk.core_pass = core_pass


@pytest.mark.parametrize("way", ["plain", "exits", "drafts", "shared"])
def test_a_loop_of_ones_own_is_run_in_every_way_of_decoding(way):
    model = tiny_model(num_loops=4, eos_token_id=None)
    ids, mask = random_ids(2, 7), torch.ones(2, 7, dtype=torch.long)
    generate = partial(model.generate, ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    before = generate()
    change_the_second_loop(model.model, 3 * torch.randn(model.config.hidden_size))
    wanted = ids
    for _ in range(8):
        wanted = torch.cat([wanted, model(wanted, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert not torch.equal(wanted, before)
    if way == "shared":
        with SharedPasses(model, max_rows=2) as passes:
            found = passes.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    else:
        options = {"exits": {"exit_criterion": "kl", "exit_threshold": 0.0}, "drafts": {"draft_loops": 2}}
        found = generate(**options.get(way, {}))
    assert torch.equal(found, wanted)


def test_a_loop_of_ones_own_knows_the_loops_of_rows_of_different_depth():
    model, ids = tiny_model(num_loops=4), random_ids(2, 7)
    change_the_second_loop(model.model, torch.ones(model.config.hidden_size))
    one_by_one = [model(ids[i : i + 1], num_loops=depth).logits for i, depth in enumerate((1, 3))]
    torch.testing.assert_close(model(ids, num_loops=[1, 3]).logits, torch.cat(one_by_one))


def put_trunk(model, trunk: type[LoopedModel]):
    """Give a model a trunk of this class with the weights of its own."""
    weights = model.model.state_dict()
    model.model = trunk(model.config).eval()
    model.model.load_state_dict(weights)


class MeanOfLoops(LoopedModel):
    """Reads out the mean of the states over loops."""

    in_list = False

    def loop(self, embedded, state, plan, every_loop, context):
        states = super().loop(embedded, state, plan, True, context)[1]
        means = [torch.stack(states[:loop]).mean(0) for loop in range(1, len(states) + 1)]
        return means[-1], (means if self.in_list else states) if every_loop else []


@pytest.mark.parametrize("num_coda_layers", [0, 1])
def test_states_of_a_loop_of_ones_own_end_with_what_it_returns(num_coda_layers):
    model, ids = tiny_model(num_loops=3, num_coda_layers=num_coda_layers), random_ids(2, 7)
    put_trunk(model, MeanOfLoops)
    logits = model(ids).logits
    for asked in ({"output_loop_logits": True}, {"output_loop_losses": True, "labels": ids}):
        with pytest.raises(ValueError, match="MeanOfLoops.loop returns another state than the last of its 3 states"):
            model(ids, **asked, use_cache=False)
    model.model.in_list = True
    outputs = model(ids, output_loop_logits=True, use_cache=False)
    torch.testing.assert_close(outputs.logits, logits)
    for depth, found in enumerate(outputs.loop_logits, start=1):
        torch.testing.assert_close(found, model(ids, num_loops=depth).logits)


class DoubledLoop(LoopedModel):
    def loop(self, *inputs):
        final, states = super().loop(*inputs)
        return 2 * final, [2 * state for state in states]


class DoubledTrunk(LoopedModel):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.last_hidden_state = 2 * outputs.last_hidden_state
        return outputs


class DoubledLogits(LoopedForCausalLM):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = 2 * outputs.logits
        return outputs


@pytest.mark.parametrize("part", [DoubledLoop, DoubledTrunk, DoubledLogits])
@pytest.mark.parametrize("selection", ["stop", "after", "weighted"])
def test_exits_within_a_pass_follow_what_replaces_it_or_refuse_it(part, selection):
    """A rule that no token passes gives the logits of full depth."""
    criterion = "gate" if selection == "weighted" else "max_prob"
    fields = {"exit_gate": "raw", "loop_loss": "exit_weighted", "num_coda_layers": 1, "readout_norm": "none"}
    model, ids = tiny_model(num_loops=3, **fields), random_ids(2, 7)
    if part is DoubledLogits:
        model.__class__ = part
    else:
        put_trunk(model, part)
    for per_sequence in (False, True) if selection == "stop" else (False,):
        rule = ExitRule(criterion, torch.inf, selection=selection, per_sequence=per_sequence)
        if part is DoubledLoop and selection != "stop":
            wanted = {"after": "logits", "weighted": "exit_logits"}[selection]
            full = model(ids, output_exit_logits=selection == "weighted", use_cache=False)
            torch.testing.assert_close(model(ids, exit_rule=rule, use_cache=False).logits, full[wanted])
            continue
        with pytest.raises(ValueError, match="a forward( or loop)? that is not the model's own"):
            model(ids, exit_rule=rule, use_cache=False)


@pytest.mark.parametrize("selection", quick_and_slow(["stop", "after", "weighted"], "stop"))
def test_exits_of_a_compiled_trunk(selection):
    criterion = "gate" if selection == "weighted" else "max_prob"
    fields = {"num_core_layers": 1, "num_loops": 2, "exit_gate": "raw", "loop_loss": "exit_weighted"}
    model, ids = tiny_model(**fields), random_ids(2, 7)
    threshold = {} if selection == "weighted" else {"exit_threshold": 0.15}  # tokens exit after 1 and 2 loops
    rule = ExitRule(criterion, *threshold.values(), selection=selection)
    asked = {"exit_criterion": criterion, "exit_selection": selection, **threshold}
    wanted = model(ids, exit_rule=rule, use_cache=False)
    assert selection == "weighted" or {*wanted.token_loops.flatten().tolist()} == {1, 2}
    tokens = model.generate(ids, max_new_tokens=3, **asked)
    model.model = torch.compile(model.model, backend="eager")
    torch.testing.assert_close(model(ids, exit_rule=rule, use_cache=False).logits, wanted.logits)
    assert torch.equal(model.generate(ids, max_new_tokens=3, **asked), tokens)


@pytest.mark.slow
def test_a_loop_of_ones_own_is_compiled_whole_with_the_states_of_every_loop():
    class AsItIs(LoopedModel):
        def loop(self, *inputs):
            return super().loop(*inputs)

    model, ids = tiny_model(num_loops=3, loop_loss="per_loop"), random_ids(2, 7)
    wanted = model(ids, labels=ids, use_cache=False).loss
    put_trunk(model, AsItIs)
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, labels=ids, use_cache=False).loss, wanted)
    model.to("meta")
    assert len(model(ids.to("meta"), output_loop_logits=True, use_cache=False).loop_logits) == 3


def test_a_loop_of_ones_own_may_change_its_input_alone():
    class Scaled(LoopedModel):
        def loop(self, embedded, state, *others):
            return super().loop(2 * embedded, state, *others)

    model, ids = tiny_model(num_loops=3, injection="add"), random_ids(2, 7)
    put_trunk(model, Scaled)
    for asked in ({}, {"backprop_loops": 1}):
        by_loop = model(ids, num_loops=[1, 3], output_loop_logits=True, **asked).loop_logits[-1]
        one_by_one = [model(ids[i : i + 1], num_loops=depth).logits for i, depth in enumerate((1, 3))]
        torch.testing.assert_close(by_loop, torch.cat(one_by_one))


# Losses


class WithAuxiliary(LoopedForCausalLM):
    """Adds the mean square of the states after every loop but the last, over the labelled tokens."""

    def auxiliary_loss(self, outputs, labels):
        states = torch.stack(outputs.loop_hidden_states[:-1])
        return states[:, labels != -100].square().mean()


@pytest.mark.parametrize("fields", [{}, {"loop_loss": "per_loop"}, {"norm_penalty": 0.1}], ids=str)
@pytest.mark.parametrize("output_logits", [True, False])
def test_an_auxiliary_loss_is_added_to_ours(fields, output_logits):
    plain = tiny_model(num_loops=3, **fields).train()
    model = WithAuxiliary(plain.config).train()
    model.load_state_dict(plain.state_dict())
    ids = random_ids(2, 7)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.3, -100)
    labels[:, -1] = -100  # nothing follows it, so that the shifted labels have as many

    ours = plain(ids, labels=labels, output_loop_hidden_states=True)
    shifted = torch.cat([labels[:, 1:], labels.new_full((2, 1), -100)], 1) != -100
    wanted = ours.loss + torch.stack([state[shifted].square().mean() for state in ours.loop_hidden_states[:-1]]).mean()
    found = model(ids, labels=labels, output_logits=output_logits, output_loop_losses=True)
    torch.testing.assert_close(found.loss, wanted)
    assert found.loop_hidden_states is None  # not asked for
    torch.testing.assert_close(found.loop_losses, plain(ids, labels=labels, output_loop_losses=True).loop_losses)

    found.loss.backward()
    wanted.backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_passes_of_a_step_add_up_to_one_auxiliary_loss():
    model, ids = WithAuxiliary(tiny_config(num_loops=3)).train(), random_ids(3, 7)
    labels = ids.clone()
    labels[0, 3:] = -100
    items = int((labels[:, 1:] != -100).sum())
    parts = [model(ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=items).loss for i in range(3)]
    torch.testing.assert_close(sum(parts), model(ids, labels=labels).loss)
    assert model(ids, labels=torch.full_like(ids, -100)).loss == 0  # the mean over no token is nan


class Distilled(LoopedForCausalLM):
    """Adds KL(last loop || loop k), the last loop held fixed, averaged over a row's loops before its last."""

    def auxiliary_loss(self, outputs, labels):
        *students, teacher = (
            self.logits_after_loop(state, loop, outputs.depths).log_softmax(-1)
            for loop, state in enumerate(outputs.loop_readout_states)
        )
        total = torch.zeros_like(labels, dtype=teacher.dtype)
        for loop, student in enumerate(students):
            apart = functional.kl_div(student, teacher.detach(), reduction="none", log_target=True).sum(-1)
            total = total + apart * (loop < outputs.depths - 1) / (outputs.depths - 1).clamp(min=1)
        return total[labels != -100].mean()


def naive_distillation(logits: torch.Tensor) -> torch.Tensor:
    """The same for the logits of one row, [loops, tokens, vocabulary]."""
    with torch.no_grad():
        wanted = logits[-1].softmax(-1)
    apart = [(wanted * (wanted.log() - each.softmax(-1).log())).sum(-1).mean() for each in logits[:-1]]
    return sum(apart) / max(1, len(apart))


@pytest.mark.parametrize("loop_loss", ["terminal", "per_loop"])
@pytest.mark.parametrize("computes_again", [False, True])
def test_an_auxiliary_loss_reads_what_rows_of_different_depth_say_after_every_loop(loop_loss, computes_again):
    config = tiny_config(num_coda_layers=1, loop_loss=loop_loss, readout_norm="alpha", num_readout_alphas=4)
    plain = shake(LoopedForCausalLM(config)).double().train()
    model = Distilled(config).double().train()
    model.load_state_dict(plain.state_dict())
    if computes_again:
        model.gradient_checkpointing_enable()
    ids, depths = random_ids(3, 7), [1, 4, 2]

    found = model(ids, labels=ids, num_loops=depths, output_logits=False).loss
    rows = []
    for row, depth in zip(ids.split(1), depths):
        logits = torch.cat(plain(row, num_loops=depth, output_loop_logits=True).loop_logits)[:, :-1]
        losses = [functional.cross_entropy(each, row[0, 1:]) for each in logits]
        ours = losses[-1] if loop_loss == "terminal" else sum(losses) / depth
        rows.append(ours + naive_distillation(logits))
    wanted = torch.stack(rows).mean()
    torch.testing.assert_close(found, wanted)

    found.backward()
    wanted.backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_states_of_every_loop_do_not_make_a_loss_of_the_last_loop_decode_them():
    model, ids, decoded = WithAuxiliary(tiny_config(num_loops=3)).train(), random_ids(1, 7), []
    model.lm_head.register_forward_hook(lambda head, inputs, logits: decoded.append(logits[..., 0].numel()))
    model(ids, labels=ids, output_logits=False)
    assert sum(decoded) == 6


@pytest.mark.parametrize("with_own_trunk", [False, True])
def test_a_training_pass_without_labels_says_that_it_has_no_auxiliary_loss(with_own_trunk, monkeypatch):
    class WithTrunk(WithAuxiliary):
        def __init__(self, config):
            super().__init__(config)
            self.model = LoopedModel(config)
            self.post_init()

    said = []
    monkeypatch.setattr("modeling_looped.training_warnings.logger.warning_once", said.append)
    model, ids = (WithTrunk if with_own_trunk else WithAuxiliary)(tiny_config()), random_ids(2, 7)
    model.train()(ids, labels=ids)
    model.eval()(ids)
    assert not said
    model.train().model(ids)  # as TRL's trainers do
    assert f"auxiliary_loss of {type(model).__name__} of this model has no part" in said[0] and "OwnLoss" in said[0]


def test_an_auxiliary_loss_costs_no_exits():
    model, ids = WithAuxiliary(tiny_config(num_loops=3, eos_token_id=None)).eval(), random_ids(1, 7)
    found = model.generate(
        ids, exit_criterion="kl", exit_threshold=0.0, max_new_tokens=3, return_dict_in_generate=True
    )
    assert found.token_loops.shape == (1, 3)


@pytest.mark.parametrize("name", ["Distil", "DistilForTokenClassification"])
def test_the_name_of_a_class_does_not_choose_its_loss(name, monkeypatch):
    said = []
    monkeypatch.setattr(modeling_utils.logger, "warning_once", said.append)
    model, ids = type(name, (LoopedForCausalLM,), {})(tiny_config()).eval(), random_ids(2, 7)
    outputs = model(ids, labels=ids)
    expected = functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss, expected)
    assert not said


# Criteria


def test_what_an_own_criterion_remembers_begins_anew_with_every_token(monkeypatch):
    def third(state, memory):
        count = memory.get("readings", INITIAL["readings"]) + torch.ones(state.shape[:-1])
        return count, {"readings": count}

    monkeypatch.setitem(INITIAL, "readings", 0)
    declared = Criterion(third, "state", exits_above=True, default=3, remembers=("readings",), counts_readings=True)
    monkeypatch.setitem(CRITERIA, "third", declared)
    monkeypatch.setitem(CRITERIA, "undeclared", declared._replace(remembers=()))
    model, ids = tiny_model(num_loops=6, eos_token_id=None), random_ids(1, 7)
    settings = {"max_new_tokens": 5, "return_dict_in_generate": True}
    assert model.generate(ids, exit_criterion="third", **settings).token_loops[0, 1:].tolist() == [3] * 4
    with pytest.raises(ValueError, match=r"third returns readings to be remembered, .* remembers=\(\)"):
        model.generate(ids, exit_criterion="undeclared", **settings)


def test_what_a_subclass_of_the_criterion_remembers_must_be_named_too(monkeypatch):
    class Third(Criterion):
        def after_loop(self, model, state, logits, memory):
            count = memory.get("readings", INITIAL["readings"]) + torch.ones(state.shape[:-1])
            return count, {"readings": count}

    monkeypatch.setitem(INITIAL, "readings", 0)
    named = Third(None, "state", exits_above=True, default=3, every_loop=True, remembers=("readings",))
    monkeypatch.setitem(CRITERIA, "third", named)
    monkeypatch.setitem(CRITERIA, "undeclared", Third(None, "state", exits_above=True, default=3))
    model, ids = tiny_model(num_loops=6, eos_token_id=None), random_ids(1, 7)
    settings = {"max_new_tokens": 5, "return_dict_in_generate": True}
    assert model.generate(ids, exit_criterion="third", **settings).token_loops[0, 1:].tolist() == [3] * 4
    for use in (
        lambda: model.generate(ids, exit_criterion="undeclared", **settings),
        lambda: model(ids, exit_rule=ExitRule("undeclared")),
        lambda: measure(model, ids, 3, ["undeclared"], 1),
    ):
        with pytest.raises(ValueError, match=r"Third returns readings to be remembered, .* remembers=\(\)"):
            use()


@pytest.mark.parametrize("min_loops", [1, 2, 3, 4, 5])
def test_a_criterion_may_look_back_over_two_loops(min_loops, monkeypatch):
    def change(state, memory):
        last, older = (memory.get(name, torch.full_like(state, torch.inf)) for name in ("last", "older"))
        return (state - older).norm(dim=-1), {"last": state, "older": last}

    for name in ("last", "older"):
        monkeypatch.setitem(INITIAL, name, torch.inf)
    ours = Criterion(change, "state", exits_above=False, remembers=("last", "older"), looks_back=2)
    monkeypatch.setitem(CRITERIA, "change", ours)
    model, ids = tiny_model(num_loops=6), random_ids(8, 1)
    states = torch.stack(model(ids, output_loop_hidden_states=True).loop_hidden_states)[:, :, 0]
    scores = torch.stack(
        [(states[k] - states[k - 2]).norm(dim=-1) for k in range(2, 6)], dim=1
    ).detach()  # loops 3 to 6
    threshold = scores.median().item()
    first = max(min_loops, 3)
    expected = [next((k for k in range(first, 6) if row[k - 3] <= threshold), 6) for row in scores.tolist()]
    found = model(ids, exit_rule=ExitRule("change", threshold, min_loops)).token_loops[:, 0].tolist()
    assert found == expected and first in found


def test_a_criterion_says_its_least_score(monkeypatch):
    def log_probability(logits, memory):
        return logits.log_softmax(-1).amax(-1), {}

    ours = Criterion(log_probability, "logits", exits_above=True, least=-float("inf"))
    monkeypatch.setitem(CRITERIA, "log_probability", ours)
    model, ids = tiny_model(num_loops=3), random_ids(1, 7)
    loops = model(ids, exit_rule=ExitRule("log_probability", -1e9)).token_loops
    assert loops.eq(1).all()


WAYS_WITH_A_CACHE = {
    "plain": lambda model, ids: model(ids),
    "exits of a pass": lambda model, ids: model(ids, exit_rule=ExitRule("max_prob", 0.9), use_cache=False),
    "generate": lambda model, ids: generated(model, ids),
    "static": lambda model, ids: generated(model, ids, cache_implementation="static"),
    "exits": lambda model, ids: generated(model, ids, exit_criterion="kl", exit_threshold=0.0),
    "drafts": lambda model, ids: generated(model, ids, draft_loops=2),
    "shared": lambda model, ids: shared(model, ids),
}


def generated(model, ids, **options):
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None, **options)


def shared(model, ids):
    with SharedPasses(model, max_rows=2) as passes:
        return generated(passes, ids)


def change_loop_two(trunk, change):
    def core_pass(self, state, embedded, loop, depth, context):
        run = partial(type(self).core_pass, self, embedded=embedded, loop=loop, depth=depth, context=context)
        return change(run, state, one_or_rows(lambda t: t == 1, loop, state.device, 3))

    trunk.core_pass = MethodType(core_pass, trunk)


def repeat(run, state, is_second):
    return run(run(state)) if torch.as_tensor(is_second).any() else run(state)


def skip(run, state, is_second):
    return state if torch.as_tensor(is_second).any() else run(state)


def run_and_discard(run, state, is_second):
    return torch.where(torch.as_tensor(is_second), state, run(state))


@pytest.mark.parametrize("way", WAYS_WITH_A_CACHE)
@pytest.mark.parametrize(
    ("change", "message"),
    [(repeat, "runs loop 2 a second time, and"), (skip, "ran 0 of the 2 core layers in loop 2, and the cache has a")],
)
def test_a_loop_that_leaves_the_cache_wrong_is_refused(way, change, message):
    model = tiny_model(num_loops=4, num_core_layers=2)
    change_loop_two(model.model, change)
    with pytest.raises(ValueError, match=message):
        WAYS_WITH_A_CACHE[way](model, random_ids(2, 7))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(("change", "loops"), [(repeat, 5), (skip, 3)])
def test_a_loop_can_be_repeated_or_left_out_without_a_cache(implementation, change, loops):
    model, ids = tiny_model(num_loops=4, num_core_layers=2, attn_implementation=implementation), random_ids(2, 7)
    wanted, text = model(ids, num_loops=loops).logits, generated(model, ids, num_loops=loops)
    change_loop_two(model.model, change)
    torch.testing.assert_close(model(ids, use_cache=False).logits, wanted)
    assert torch.equal(generated(model, ids, use_cache=False), text)


@pytest.mark.parametrize("way", ["generate", "static", "drafts", "shared"])
def test_a_loop_is_left_out_with_a_cache_if_it_runs(way):
    model, ids = tiny_model(num_loops=4, num_core_layers=2), random_ids(2, 7)
    text = generated(model, ids, num_loops=3)
    change_loop_two(model.model, run_and_discard)
    assert torch.equal(WAYS_WITH_A_CACHE[way](model, ids), text)
