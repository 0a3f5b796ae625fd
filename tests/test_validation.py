"""Bad input is refused with the value and advice; unusual input that means something is not; configs travel whole."""

import copy
import json
import pickle
from contextlib import contextmanager

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, BatchEncoding, DynamicCache

from modeling_looped import (
    LoopedConfig,
    LoopedConfigError,
    LoopedForCausalLM,
    LoopedForSequenceClassification,
    LoopedModel,
    foreign_names,
)

from .helpers import TINY, random_ids, tiny_config, tiny_model


ROPE = {"rope_type": "default", "rope_theta": 500.0}
NESTED_ROPE = {"full_attention": dict(ROPE), "sliding_attention": dict(ROPE)}

# fields, and what the message must contain: the field, the value, and what to do
REFUSED = {
    # values
    "unknown injection": ({"injection": "quantum"}, ["injection", "quantum", "attention_all"]),
    "unknown loss": ({"loop_loss": "mean"}, ["loop_loss", "mean", "per_loop"]),
    "unknown readout": ({"readout_norm": "batchnorm"}, ["readout_norm", "batchnorm", "layernorm"]),
    "no loops": ({"num_loops": 0}, ["num_loops", "0", "at least 1"]),
    "negative loops": ({"num_loops": -3}, ["num_loops", "-3", "at least 1"]),
    "loops as text": ({"num_loops": "8"}, ["num_loops", "'8'", "int"]),
    "loops as float": ({"num_loops": 2.5}, ["num_loops", "2.5", "int"]),
    "loops as bool": ({"num_loops": True}, ["num_loops", "True", "int"]),
    "loops as list": ({"num_loops": [1, 2]}, ["num_loops", "[1, 2]", "int"]),
    "loops as None": ({"num_loops": None}, ["num_loops", "None", "int"]),
    "no core": ({"num_core_layers": 0}, ["num_core_layers", "0", "at least 1"]),
    "negative prelude": ({"num_prelude_layers": -1}, ["num_prelude_layers", "-1", "not negative"]),
    "no vocabulary": ({"vocab_size": 0}, ["vocab_size", "0", "at least 1"]),
    "no heads": ({"num_attention_heads": 0}, ["num_attention_heads", "0", "at least 1"]),
    "no head size": ({"head_dim": 0}, ["head_dim", "0", "at least 1"]),
    "negative head size": ({"head_dim": -8}, ["head_dim", "-8", "at least 1"]),
    "zero eps": ({"rms_norm_eps": 0.0}, ["rms_norm_eps", "0.0", "positive"]),
    "zero softcap": ({"logit_softcap": 0.0}, ["logit_softcap", "0.0", "positive"]),
    "negative scale": ({"residual_scale": -1.0}, ["residual_scale", "-1.0", "positive"]),
    "endless penalty": ({"norm_penalty": float("inf")}, ["norm_penalty", "inf", "finite"]),
    "penalty not a number": ({"norm_penalty": float("nan")}, ["norm_penalty", "nan", "finite"]),
    "negative entropy weight": ({"exit_entropy_weight": -0.1}, ["exit_entropy_weight", "-0.1", "not negative"]),
    "full dropout": ({"residual_dropout": 1.0}, ["residual_dropout", "1.0", "[0, 1)"]),
    "classifier dropout": ({"classifier_dropout": 1.5}, ["classifier_dropout", "1.5", "[0, 1)"]),
    "small letters": ({"window_pattern": "sl"}, ["window_pattern='sl'", "S and L"]),
    "unknown activation": ({"hidden_act": "swoosh"}, ["hidden_act", "swoosh", "silu"]),
    "pad token outside": ({"pad_token_id": 99}, ["pad_token_id", "99", "vocab_size"]),
    "unknown rope": ({"rope_parameters": {"rope_type": "spiral"}}, ["rope_type", "spiral", "yarn"]),
    "rope base not a number": ({"rope_theta": float("nan")}, ["rope_theta=nan", "finite"]),
    "rope base below 0": ({"rope_theta": -10000.0}, ["rope_theta=-10000.0", "above 0"]),
    "endless rope factor of a layer type": (
        {
            "rope_parameters": {**NESTED_ROPE, "full_attention": {**ROPE, "factor": float("inf")}},
            "window_pattern": "SL",
        },
        ["factor=inf", "finite"],
    ),
    "rope factors not numbers": (
        {
            "rope_parameters": {
                **ROPE,
                "rope_type": "longrope",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0, 1.0],
                "long_factor": [1.0, float("nan")],
            },
        },
        ["long_factor=[1.0, nan]", "finite"],
    ),
    "positions without an end": (
        {"max_position_embeddings": 10**15},
        ["max_position_embeddings", "at most 1000000000"],
    ),
    "readout alphas without an end": ({"num_readout_alphas": 10**12}, ["num_readout_alphas", "at most 1000000000"]),
    "core heads without an end": (
        {"core_num_attention_heads": 10**12},
        ["core_num_attention_heads", "at most 1000000000"],
    ),
    "rope of one layer type alone": (
        {"rope_parameters": {"full_attention": dict(ROPE)}, "window_pattern": "SL"},
        ["rope_parameters", "full_attention", "flat", "each of sliding_attention"],
    ),
    "rope of unknown layers": (
        {"rope_parameters": {**NESTED_ROPE, "chunked_attention": dict(ROPE)}, "window_pattern": "SL"},
        ["rope_parameters", "chunked_attention", "flat"],
    ),
    "rope of layer types beside a flat one": (
        {"rope_parameters": {**NESTED_ROPE, "rope_theta": 3.0}, "window_pattern": "SL"},
        ["rope_parameters", "full_attention, sliding_attention, rope_theta", "flat"],
    ),
    "unknown rope of a layer type": (
        {"rope_parameters": {**NESTED_ROPE, "full_attention": {"rope_type": "spiral"}}, "window_pattern": "SL"},
        ["rope_type", "spiral", "yarn"],
    ),
    "rope letters": ({"rope_pattern": "RXN"}, ["rope_pattern", "RXN", "R and N"]),
    "no rope letters": ({"rope_pattern": ""}, ["rope_pattern", "''", "R and N"]),
    "zero softcap on scores": ({"attention_softcap": 0.0}, ["attention_softcap", "0.0", "positive"]),
    "negative attention scale": ({"attention_scale": -1.0}, ["attention_scale", "-1.0", "positive"]),
    "endless norm offset": ({"norm_offset": float("inf")}, ["norm_offset", "inf", "finite"]),
    "future format": ({"format_version": 99}, ["format_version", "99", "Upgrade"]),
    "no format": ({"format_version": 0}, ["format_version", "0"]),
    # misspelt
    "num_loop": ({"num_loop": 3}, ["num_loop", "num_loops"]),
    "injektion": ({"injektion": "add"}, ["injektion", "injection"]),
    "readout_norms": ({"readout_norms": "none"}, ["readout_norms", "readout_norm"]),
    # sizes that do not divide
    "hidden by heads": ({"hidden_size": 30}, ["hidden_size=30", "num_attention_heads=4"]),
    "heads by groups": ({"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
    "odd rotary head": ({"hidden_size": 20}, ["head_dim=5", "even", "learned"]),
    "derived depth": ({"num_hidden_layers": 5}, ["num_hidden_layers=5", "2 * 3", "6", "num_core_layers"]),
    # positions
    "rope without its factor": ({"rope_parameters": {"rope_type": "linear"}}, ["rope_parameters", "linear", "factor"]),
    "rope without all of its keys": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4}},
        ["rope_parameters", "llama3", "low_freq_factor"],
    ),
    "rope factors of another head": (
        {
            "rope_parameters": {
                **ROPE,
                "rope_type": "longrope",
                "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 4,
                "long_factor": [1.0] * 3,
            },
        },
        ["3 numbers in long_factor", "head_dim=8", "4 frequencies"],
    ),
    "a part of the head": ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5", "whole head", "'default'"]),
    # windows
    "no interval beside a window": (
        {"key_value_interval": 0, "sliding_window": 4},
        ["key_value_interval must be at least 1, got 0"],
    ),
    "pattern letters": ({"window_pattern": "SXL"}, ["window_pattern", "SXL", "S and L"]),
    "empty pattern": ({"window_pattern": ""}, ["window_pattern", "''", "S and L"]),
    "window of none alone": ({"sliding_window": 0}, ["sliding_window", "0", "at least 2"]),
    "window of none": ({"window_pattern": "SL", "sliding_window": 0}, ["sliding_window", "0"]),
    "window of one": ({"window_pattern": "SL", "sliding_window": 1}, ["sliding_window=1", "at least 2"]),
    # combinations without a meaning
    **{
        f"{injection} from {state}": (
            {"injection": injection, "state_init": state},
            [f"injection='{injection}'", "embedding", f"'{state}'"],
        )
        for injection in ("residual_all", "attention_first", "attention_all")
        for state in ("zeros", "normal")
    },
    "input never read": ({"state_init": "zeros"}, ["injection='none'", "state_init='zeros'", "embedding"]),
    "a norm where nothing is added": (
        {"injection_norm": True, "injection": "attention_all"},
        ["injection_norm", "injection='attention_all'", "residual_all", "False"],
    ),
    "a norm without an injection": ({"injection_norm": True}, ["injection_norm", "injection='none'", "False"]),
    "a wide state without a map into it": (
        {"core_hidden_size": 40},
        ["core_hidden_size=40", "hidden_size=32", "injection to be 'concat' or 'diagonal'", "got 'none'"],
    ),
    "a wide state that the coda cannot read": (
        {"core_hidden_size": 40, "injection": "diagonal", "state_init": "zeros"},
        ["core_hidden_size=40", "coda_input to be 'linear'", "got 'none'"],
    ),
    "heads of the core that share no key": (
        {"core_num_attention_heads": 3, "num_key_value_heads": 2},
        ["core_num_attention_heads=3", "num_attention_heads=4", "num_key_value_heads=2"],
    ),
    **{
        f"a wide state beside {name}={value}": (
            {
                "core_hidden_size": 40,
                "injection": "diagonal",
                "state_init": "zeros",
                "coda_input": "linear",
                name: value,
            },
            ["core_hidden_size=40", "hidden_size=32", f"{name} to be", f"got {value!r}"],
        )
        for name, value in (
            ("state_init", "embedding"),
            ("inter_loop_norm", "shared"),
            ("exit_gate", "normed"),
            ("latent_loss", 0.1),
            ("latent_anchor", 0.1),
        )
    },
    "no width of the core": ({"core_hidden_size": 0}, ["core_hidden_size", "0", "at least 1"]),
    "no rank": ({"loop_lora_rank": 0}, ["loop_lora_rank", "0", "at least 1"]),
    "more layers than any model": ({"num_core_layers": 10**5}, ["num_core_layers", "at most 10000", "100000"]),
    "heads that are too wide together": (
        {"num_attention_heads": 10**5, "head_dim": 10**5},
        ["num_attention_heads=100000", "head_dim=100000", "at most 1000000000"],
    ),
    "run depth, per loop": (
        {"residual_depth": "run", "loop_loss": "per_loop"},
        ["residual_depth='run'", "loop_loss='per_loop'", "terminal"],
    ),
    "run depth, gate": (
        {"residual_depth": "run", "exit_gate": "raw"},
        ["residual_depth='run'", "exit_gate='raw'", "trained"],
    ),
    "run depth, penalty": (
        {"residual_depth": "run", "norm_penalty": 0.5},
        ["residual_depth='run'", "norm_penalty=0.5", "trained"],
    ),
    "shared raw norm": (
        {"inter_loop_norm": "shared", "readout_norm": "none"},
        ["inter_loop_norm='shared'", "readout_norm='none'", "own"],
    ),
    "shared alpha": (
        {"inter_loop_norm": "shared", "readout_norm": "alpha"},
        ["inter_loop_norm='shared'", "readout_norm='alpha'", "final_only", "own"],
    ),
    "coda of raw norm": (
        {"coda_input": "norm", "readout_norm": "none", "num_coda_layers": 1},
        ["coda_input='norm'", "readout_norm='none'"],
    ),
    "no coda to norm for": ({"coda_input": "norm"}, ["coda_input='norm'", "num_coda_layers=0"]),
    "gate of raw norm": (
        {"exit_gate": "normed", "readout_norm": "none"},
        ["exit_gate='normed'", "readout_norm='none'", "raw"],
    ),
    "gate of alpha": (
        {"exit_gate": "normed", "readout_norm": "alpha"},
        ["exit_gate='normed'", "readout_norm='alpha'", "raw"],
    ),
    "alpha beyond raw": ({"readout_alpha": 1.5}, ["readout_alpha", "[0, 1]", "1.5"]),
    "learned alpha at its end": (
        {"readout_norm": "final_alpha", "readout_alpha": 1},
        ["readout_alpha=1", "sigmoid", "readout_alpha_learned=False"],
    ),
    "learned alpha at its beginning": (
        {"readout_norm": "final_alpha", "readout_alpha": 0},
        ["readout_alpha=0", "sigmoid", "readout_alpha_learned=False"],
    ),
    "no alphas": ({"num_readout_alphas": 0}, ["num_readout_alphas", "at least 1", "0"]),
    "negative anchor": ({"scale_anchor": -1.0}, ["scale_anchor", "not negative", "-1.0"]),
    "mixed logits, no gate": (
        {"loop_loss": "exit_weighted_logits"},
        ["loop_loss='exit_weighted_logits'", "exit_gate", "normed"],
    ),
    "exit loss, no gate": ({"loop_loss": "exit_weighted"}, ["loop_loss='exit_weighted'", "exit_gate", "normed"]),
    "gate loss, no gate": ({"loop_loss": "gate"}, ["loop_loss='gate'", "exit_gate", "normed"]),
    "gate loss, penalty": (
        {"loop_loss": "gate", "exit_gate": "raw", "norm_penalty": 0.1},
        ["loop_loss='gate'", "norm_penalty=0.1", "0"],
    ),
    "gate loss, latent": (
        {"loop_loss": "gate", "exit_gate": "raw", "latent_loss": 0.1, "scale_anchor": 2.0},
        ["loop_loss='gate'", "latent_loss=0.1", "scale_anchor=2.0"],
    ),
    "run depth, anchor": (
        {"residual_depth": "run", "scale_anchor": 0.5},
        ["residual_depth='run'", "scale_anchor=0.5", "trained"],
    ),
}

# unusual, and meant: every one runs, trains and decodes
ACCEPTED = {
    "attention injection with prelude norm": {
        "injection": "attention_all",
        "prelude_norm": True,
        "num_prelude_layers": 1,
    },
    "one of everything": {"num_core_layers": 1, "num_loops": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
    "wide heads": {"head_dim": 12},
    "odd heads with learned positions": {"head_dim": 7, "position_embedding": "learned"},
    "latent keys of a group": {"kv_latent_size": 5, "num_key_value_heads": 2},
    "raw gate beside a shared norm": {"exit_gate": "raw", "inter_loop_norm": "shared"},
    "exit loss on a raw readout": {"exit_gate": "raw", "loop_loss": "exit_weighted", "readout_norm": "none"},
    "penalty on a raw readout": {"norm_penalty": 0.01, "readout_norm": "none"},
    "final-only norm before the coda": {"coda_input": "norm", "readout_norm": "final_only", "num_coda_layers": 1},
    "final-only norm between loops": {"inter_loop_norm": "shared", "readout_norm": "final_only"},
    "norm between loops, raw at the last": {
        "inter_loop_norm": "shared",
        "readout_norm": "final_raw",
        "exit_gate": "normed",
        "loop_loss": "exit_weighted_logits",
    },
    "raw at the last, nothing else normed": {"readout_norm": "final_raw"},
    "fixed alpha at its end": {"readout_norm": "alpha", "readout_alpha": 1, "readout_alpha_learned": False},
    "alpha that does not apply": {"readout_alpha": 1, "num_readout_alphas": 5},
    "tapered norm between loops": {"inter_loop_norm": "shared", "readout_norm": "taper", "norm_affine": False},
    "losses of states together": {"scale_anchor": 1, "latent_loss": 0.1, "latent_anchor": 0.1, "norm_penalty": 0.1},
    "linear readout without a coda": {"coda_input": "linear"},
    "run depth with an injection": {"residual_depth": "run", "residual_scaling": "linear", "injection": "add"},
    "noise and windows": {"injection": "concat", "state_init": "normal", "window_pattern": "SSL", "sliding_window": 3},
    "value embeddings and a coda": {"value_embeddings": True, "num_coda_layers": 1, "num_prelude_layers": 1},
    "norms without weights": {"norm_affine": False, "block_norm": "residual_sandwich", "readout_norm": "layernorm"},
    "whole numbers for real ones": {"residual_scale": 2, "norm_penalty": 1, "logit_softcap": 15},
    "scaled rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
}


@contextmanager
def refuses(parts, error=(ValueError, TypeError)):
    """An error must come whose message has all the parts."""
    with pytest.raises(error) as caught:
        yield
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_bad_config_is_refused(case):
    fields, parts = REFUSED[case]
    with refuses(parts, LoopedConfigError):
        LoopedConfig(**{**TINY, **fields})


# of a value, of a choice, of a size, of positions, of a combination: all are found by what finds them above
ASSIGNED_LATER = [
    "no loops",
    "unknown injection",
    "heads by groups",
    "derived depth",
    "unknown rope",
    "window of none alone",
    "input never read",
    "gate loss, no gate",
]


@pytest.mark.parametrize("case", ASSIGNED_LATER)
def test_bad_field_assigned_later_is_refused_before_a_model_is_built(case):
    fields, parts = REFUSED[case]
    for model_class in (LoopedForCausalLM, LoopedModel, LoopedForSequenceClassification):
        config = tiny_config()
        with refuses(parts):
            for name, value in fields.items():
                setattr(config, name, value)
            model_class(config)


def test_config_errors_are_value_errors_and_strict_errors():
    for error in (ValueError, StrictDataclassError):
        with pytest.raises(error):
            LoopedConfig(num_loops="8")


def test_future_config_says_so_before_its_new_values_are_called_unknown(tmp_path):
    fields = {**tiny_config().to_dict(), "format_version": 99, "injection": "quantum", "num_loop": 3}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for load in (LoopedConfig.from_pretrained, AutoConfig.from_pretrained, LoopedForCausalLM.from_pretrained):
        with refuses(["format_version=99", "Upgrade modeling_looped", "process that does not import"], ValueError):
            load(tmp_path)


def test_unknown_preset_is_refused_with_the_known_ones():
    with refuses(["'huginnn'", "huginn", "parcae"], ValueError):
        LoopedConfig.from_preset("huginnn")
    with refuses(["num_loop", "num_loops"], ValueError):
        LoopedConfig.from_preset("huginn", num_loop=3)


@pytest.mark.parametrize("field", ["num_core_layers", "hidden_size"])
def test_numbers_of_another_type_are_refused_by_their_name_in_every_preset(field):
    for preset in LoopedConfig.preset_names():
        for value in ("64", None, 64.0, [64]):
            with refuses([f"'{field}' expected int, got {type(value).__name__}"], LoopedConfigError):
                LoopedConfig.from_preset(preset, **{field: value})


def test_a_base_beside_other_rotary_parameters_is_refused_wherever_it_comes_from(tmp_path):
    tiny_model(rope_parameters=dict(ROPE)).save_pretrained(tmp_path)
    for make in (LoopedConfig.from_pretrained, LoopedForCausalLM.from_pretrained, AutoConfig.from_pretrained):
        with refuses(["rope_theta=7.0", "'rope_theta': 500.0", "as rope_parameters"]):
            make(tmp_path, rope_theta=7.0)
    with refuses(["rope_theta=7.0", "'rope_theta': 1000000.0", "as rope_parameters"]):
        LoopedConfig.from_preset("ouro", rope_theta=7.0)
    config = LoopedConfig(rope_theta=7.0)
    assert config.rope_parameters["rope_theta"] == 7.0
    config.rope_parameters = {"rope_type": "linear", "factor": 4.0}
    with refuses(["'factor': 4.0} has no rope_theta"]):
        config.validate()


def test_depth_that_disagrees_is_refused_when_set():
    config = tiny_config(num_prelude_layers=1)
    config.num_hidden_layers = 7
    with refuses(["num_hidden_layers=8", "1 + 0 + 2 * 3 = 7"], ValueError):
        config.num_hidden_layers = 8


@pytest.mark.parametrize("case", ACCEPTED)
@pytest.mark.some(11)
def test_unusual_config_runs_trains_and_decodes(case):
    model = tiny_model(**ACCEPTED[case])
    ids = random_ids(2, 6)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    whole = model(ids).logits
    cache = DynamicCache(config=model.config)
    parts = [model(part, past_key_values=cache).logits for part in (ids[:, :4], ids[:, 4:])]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


# Calls

CALLS = {
    "labels too short": ({"labels": torch.zeros(2, 4, dtype=torch.long)}, ["labels", "(2, 4)", "(2, 6)", "-100"]),
    "labels of one row": ({"labels": torch.zeros(6, dtype=torch.long)}, ["labels", "(6,)", "(2, 6)"]),
    "labels one hot": ({"labels": torch.zeros(2, 6, 99)}, ["labels", "(2, 6, 99)", "(2, 6)"]),
    "shifted labels": ({"shift_labels": torch.zeros(2, 5, dtype=torch.long)}, ["labels", "(2, 5)", "(2, 6)"]),
    "both inputs": ({"inputs_embeds": torch.zeros(2, 6, 32)}, ["input_ids", "inputs_embeds", "both"]),
    "no inputs": ({"input_ids": None}, ["input_ids", "inputs_embeds", "neither"]),
    "one row of ids": ({"input_ids": torch.zeros(6).long()}, ["input_ids", "[batch, length]", "(6,)"]),
    "ids as a list": ({"input_ids": [[5, 6]]}, ["input_ids", "[batch, length]", "list"]),
    "embeddings of one row": ({"input_ids": None, "inputs_embeds": torch.zeros(6, 32)}, ["inputs_embeds", "(6, 32)"]),
    "no loops": ({"num_loops": 0}, ["num_loops", "at least 1", "0"]),
    "negative loops": ({"num_loops": -2}, ["num_loops", "at least 1", "-2"]),
    "loops as text": ({"num_loops": "4"}, ["num_loops", "int", "'4'"]),
    "loops as bool": ({"num_loops": True}, ["num_loops", "int", "True"]),
    "loops as float": ({"num_loops": 2.0}, ["num_loops", "int", "2.0"]),
    "loops of three rows": ({"num_loops": [1, 2, 3]}, ["num_loops", "3 depths", "2 sequences"]),
    "tensor of three rows": ({"num_loops": torch.tensor([1, 2, 3])}, ["num_loops", "3 depths", "2 sequences"]),
    "tensor of tables": ({"num_loops": torch.ones(2, 1, dtype=torch.long)}, ["num_loops", "(2, 1)"]),
    "tensor of floats": ({"num_loops": torch.ones(2)}, ["num_loops", "float32", "int"]),
    "zero in a list": ({"num_loops": [2, 0]}, ["num_loops", "[2, 0]", "at least 1"]),
    "short mask": ({"attention_mask": torch.ones(2, 3)}, ["attention_mask", "(2, 3)", "(2, 6)"]),
    "long mask": ({"attention_mask": torch.ones(2, 9)}, ["attention_mask", "(2, 9)", "(2, 6)"]),
    "mask of three rows": ({"attention_mask": torch.ones(3, 6)}, ["attention_mask", "(3, 6)", "(2, 6)"]),
    "mask of one row": ({"attention_mask": torch.ones(6)}, ["attention_mask", "(6,)", "(2, 6)"]),
    "no backprop": ({"backprop_loops": 0}, ["backprop_loops", "at least 1", "0"]),
    "no gate": ({"output_exit_probabilities": True}, ["exit_gate='none'"]),
    "losses of nothing": ({"output_loop_losses": True}, ["labels"]),
}


@pytest.mark.parametrize("case", CALLS)
def test_bad_call_is_refused(case):
    arguments, parts = CALLS[case]
    with refuses(parts):
        tiny_model()(**{"input_ids": random_ids(2, 6), **arguments})


@pytest.mark.parametrize("arguments", [{}, {"input_ids": random_ids(2, 6), "inputs_embeds": torch.zeros(2, 6, 32)}])
def test_trunk_too_wants_one_input(arguments):
    with refuses(["input_ids", "inputs_embeds"], ValueError):
        tiny_model(LoopedModel)(**arguments)


def test_embedded_input_has_no_value_embeddings():
    with refuses(["value_embeddings", "input_ids"], ValueError):
        tiny_model(value_embeddings=True)(inputs_embeds=torch.zeros(2, 6, 32))


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((2, 5, 32), "tokens (2, 6)"),
        ((1, 6, 32), "tokens (2, 6)"),
        ((6, 32), "tokens (2, 6)"),
        ((2, 6, 16), "state_size=32"),
    ],
)
def test_initial_state_of_another_shape(shape, wanted):
    model = tiny_model(injection="add", state_init="normal")
    with refuses(["initial_state", str(shape), wanted], ValueError):
        model(random_ids(2, 6), initial_state=torch.zeros(shape))


def test_what_a_tokenizer_gives_without_tensors_is_no_prompt():
    inputs = BatchEncoding({"input_ids": [[3, 4]], "attention_mask": [[1, 1]]})
    with refuses(["must be a tensor, got list", "return_tensors='pt'"], TypeError):
        tiny_model().generate(**inputs, max_new_tokens=2)
    with refuses(["must be a tensor, got BatchEncoding", "generate(**tokenizer("], TypeError):
        tiny_model().generate(inputs, max_new_tokens=2)


def test_noise_is_drawn_only_for_models_that_start_from_it():
    with refuses(["noise", "'zeros'", "normal"], ValueError):
        tiny_model(injection="add", state_init="zeros").sample_initial_state(2, 6)


def test_more_tokens_than_learned_positions():
    model = tiny_model(position_embedding="learned", max_position_embeddings=8)
    assert model(random_ids(1, 8)).logits.shape[1] == 8
    with refuses(["9 tokens", "max_position_embeddings=8", "shorten"], ValueError):
        model(random_ids(1, 9))
    cache = DynamicCache(config=model.config)
    model(random_ids(1, 6), past_key_values=cache)
    with refuses(["9 tokens", "max_position_embeddings=8"], ValueError):
        model(random_ids(1, 3), past_key_values=cache)
    with refuses(["9 tokens", "max_position_embeddings=8"], ValueError):
        model.generate(random_ids(1, 6), max_new_tokens=6, eos_token_id=None)


def test_states_between_loops_mean_nothing_if_the_scale_follows_the_run():
    model = tiny_model(residual_scaling="linear", residual_depth="run")
    for output in ("output_loop_logits", "output_loop_hidden_states"):
        with refuses(["residual_depth='run'", "each depth by itself"], ValueError):
            model(random_ids(2, 6), **{output: True})


# Configs that travel

TRAVELLERS = {
    "plain": {},
    "windows": {"window_pattern": "SSL", "num_prelude_layers": 1, "num_coda_layers": 2},
    "rope": {"rope_parameters": dict(ROPE), "window_pattern": "SL", "sliding_window": 5},
    "labels": {"num_labels": 3, "pad_token_id": 0, "eos_token_id": [2, 5]},
    "half": {"dtype": "bfloat16"},
    **{name: {"preset": name} for name in LoopedConfig.preset_names()},
}


def traveller(name):
    return tiny_config(**TRAVELLERS[name])


def same(config, other):
    assert type(other) is LoopedConfig
    where_from = {"transformers_version": None, "_name_or_path": None}
    assert {**other.to_dict(), **where_from} == {**config.to_dict(), **where_from}
    assert other.num_hidden_layers == config.num_hidden_layers
    assert getattr(other, "layer_types", "absent") == getattr(config, "layer_types", "absent")
    other.validate()


@pytest.mark.parametrize("name", TRAVELLERS)
@pytest.mark.some(12)
def test_config_survives_every_trip(name, tmp_path):
    config = traveller(name)
    before = copy.deepcopy(config.to_dict())
    same(config, LoopedConfig.from_dict(config.to_dict()))
    same(config, LoopedConfig(**config.to_dict()))
    same(config, LoopedConfig.from_dict(json.loads(config.to_json_string(use_diff=False))))
    same(config, LoopedConfig.from_dict(json.loads(config.to_json_string())))
    same(config, copy.deepcopy(config))
    same(config, copy.copy(config))
    same(config, pickle.loads(pickle.dumps(config)))
    assert config.to_dict() == before
    config.save_pretrained(tmp_path)
    for load in (LoopedConfig.from_pretrained, AutoConfig.from_pretrained):
        loaded = load(tmp_path)
        assert loaded.architectures == config.architectures
        same(config, loaded)


@pytest.mark.parametrize("name", ["plain", "windows", "rope"])
def test_config_json_names_the_slots_and_the_format(name, tmp_path):
    config = traveller(name)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    slots = config.num_prelude_layers + config.num_coda_layers + 3 * config.num_core_layers
    assert written["num_hidden_layers"] == slots
    assert written["format_version"] == 2 and written["model_type"] == "looped"


def test_depth_is_chosen_while_loading(tmp_path):
    tiny_model(num_prelude_layers=1).save_pretrained(tmp_path)
    for load in (LoopedConfig.from_pretrained, AutoConfig.from_pretrained):
        config = load(tmp_path, num_loops=8)
        assert (config.num_loops, config.num_hidden_layers) == (8, 1 + 2 * 8)
    model = LoopedForCausalLM.from_pretrained(tmp_path, num_loops=8)
    ids = random_ids(2, 6)
    torch.testing.assert_close(model(ids).logits, tiny_model(num_prelude_layers=1)(ids, num_loops=8).logits)
    for bad in (0, "8"):
        with refuses(["num_loops", str(bad)]):
            LoopedForCausalLM.from_pretrained(tmp_path, num_loops=bad)


def test_layer_types_exist_only_with_a_pattern_and_follow_the_slots():
    assert not hasattr(tiny_config(), "layer_types")
    config = tiny_config(window_pattern="SL", num_prelude_layers=1, num_core_layers=3, num_coda_layers=1, num_loops=2)
    # layers S L S L and the last one L; slots are prelude, coda, then the core once per loop
    letters = "S" + "L" + "LSL" * 2
    assert config.layer_types == [{"S": "sliding_attention", "L": "full_attention"}[letter] for letter in letters]
    assert config.sliding_window == TINY["max_position_embeddings"] // 4
    config.num_loops = 3
    assert len(config.layer_types) == config.num_hidden_layers == 11


def test_layer_types_are_not_dropped_silently():
    config = tiny_config(window_pattern="SL", num_core_layers=2)
    assert (
        tiny_config(window_pattern="SL", num_core_layers=2, layer_types=config.layer_types).to_dict()
        == config.to_dict()
    )
    config.layer_types = list(config.layer_types)
    plain = ["full_attention"] * tiny_config().num_hidden_layers
    assert not tiny_config(layer_types=plain).has_windows
    for change in (
        lambda: tiny_config(layer_types=["sliding_attention"] * len(plain)),
        lambda: tiny_config(sliding_window=8, layer_types=plain),
        lambda: config.update({"layer_types": plain}),
    ):
        with refuses(["layer_types", "derived from window_pattern", "sliding_window"]):
            change()


def test_presets_do_not_share_what_can_change():
    first = LoopedConfig.from_preset("flt")
    first.rope_parameters["rope_theta"] = 1.0
    assert LoopedConfig.from_preset("flt").rope_parameters["rope_theta"] == 10000.0


def test_a_name_that_tools_write_is_compared_with_those_here_once(monkeypatch):
    """Every model that is opened brings the same ones: a tenth of the time in which a small one opens."""
    tiny_config(written_by_a_tool=1)
    monkeypatch.setattr(foreign_names.difflib, "get_close_matches", None)
    tiny_config(written_by_a_tool=2)
