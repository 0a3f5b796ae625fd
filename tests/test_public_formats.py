"""Folders in the layouts of published looped models: what they compute, what comes back, what is refused."""

import json
import os
import re
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
import transformers
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    QuantoConfig,
    pipeline,
)

from looped_eval.harness.looped_lm import LoopedLM
from modeling_looped import (
    LoopedConfig,
    LoopedForCausalLM,
    LoopedForSequenceClassification,
    LoopedModel,
    register_public_formats,
    save_public,
)
from modeling_looped.exit_criteria import ExitRule
from modeling_looped.formats import folder as folder_of_formats
from modeling_looped.formats.reading import open_public
from modeling_looped.formats.registry import LAYOUTS
from modeling_looped.formats.writing import public_config
from modeling_looped.generation import SeededStates

from . import public_folders as public
from .helpers import tiny_model, tiny_tokenizer


IDS = torch.randint(0, 40, (2, 11), generator=torch.Generator().manual_seed(0))

# by name: what makes the folder, what is changed in its config, what it computes, the layout it is written in
CASES = {
    "ouro": (public.ouro, {}, public.ouro_logits, "ouro"),
    "ouro tied": (public.ouro, {"tie_word_embeddings": True}, public.ouro_logits, "ouro"),
    "nanbeige": (public.nanbeige, {}, public.nanbeige_logits, "nanbeige"),
    "nanbeige without norms between": (
        public.nanbeige,
        {"skip_loop_final_norm": True, "num_loops": 3},
        public.nanbeige_logits,
        "nanbeige",
    ),
    "huginn": (public.huginn, {}, public.huginn_logits, "huginn"),
    "retrofitted": (public.huginn, {"is_retrofitted": True}, public.huginn_logits, "retrofitted"),
    "retrofitted olmo": (
        public.huginn,
        {"is_retrofitted": True, "is_olmo": True},
        public.huginn_logits,
        "retrofitted-olmo",
    ),
    "parcae": (public.parcae, {}, public.parcae_logits, "parcae"),
    "parcae concat": (
        public.parcae,
        {"injection_type": "linear", "logit_softcap": 15.0},
        public.parcae_logits,
        "parcae",
    ),
    "parcae add, grouped": (
        public.parcae,
        {"injection_type": "add", "num_key_value_heads": 1, "tie_embeddings": False},
        public.parcae_logits,
        "parcae",
    ),
    "parcae gated": (
        public.parcae,
        {"mlp_class_name": "GatedMLP", "nonlin_name": "SiLU", "init_strategy": "takase"},
        public.parcae_logits,
        "parcae-gated",
    ),
}


if "all_heads" not in get_args(LoopedConfig.__annotations__["qk_norm"]):
    del CASES["retrofitted olmo"]  # its blocks cannot be said


def stored(folder) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    for file in folder.glob("*.bin"):
        tensors |= torch.load(file, weights_only=True)
    return tensors


def made(name: str):
    make, changes, _, _ = CASES[name]
    config, tensors = make(**changes)
    if name.startswith("parcae") and not config["tie_embeddings"]:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].flip(0).clone()
    return config, tensors


def write(folder, config, tensors, num_shards=2):
    return public.write_folder(folder, config, tensors, num_shards, pickled="_class_name" in config)


def assert_same_tensors(got: dict, wanted: dict):
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(6)
def test_logits_are_those_of_the_release(name, tmp_path):
    config, tensors = made(name)
    model = LoopedForCausalLM.from_pretrained(write(tmp_path, config, tensors)).double()
    torch.testing.assert_close(model(IDS).logits, CASES[name][2](config, tensors, IDS), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["huginn", "retrofitted", "parcae"])
def test_logits_from_a_first_state(name, tmp_path):
    config, tensors = made(name)
    model = LoopedForCausalLM.from_pretrained(write(tmp_path, config, tensors)).double()
    state = model.sample_initial_state(2, 11, torch.Generator().manual_seed(0)).double()
    logits = model(IDS, initial_state=state).logits
    torch.testing.assert_close(logits, CASES[name][2](config, tensors, IDS, state), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(8)
def test_there_and_back(name, dtype, tmp_path):
    """Public, ours, public: the same tensors to the last bit, and on the way a folder like any of ours."""
    config, tensors = made(name)
    tensors = {key: tensor if key == "freqs_cis" else tensor.to(dtype) for key, tensor in tensors.items()}
    if "_class_name" not in config:
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
    model = LoopedForCausalLM.from_pretrained(write(tmp_path / "public", config, tensors))
    assert type(model) is LoopedForCausalLM and model.dtype == dtype
    logits = model(IDS).logits
    model.save_pretrained(tmp_path / "ours")
    assert all(not key.startswith(("transformer.", "model.layers.")) for key in stored(tmp_path / "ours"))
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "looped"
    ours = LoopedForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(ours(IDS).logits, logits)

    save_public(ours, tmp_path / "back", CASES[name][3])
    assert_same_tensors(stored(tmp_path / "back"), tensors)
    again = LoopedForCausalLM.from_pretrained(tmp_path / "back")
    assert torch.equal(again(IDS).logits, logits)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    for key in ("model_type", "_class_name", "num_hidden_layers", "total_ut_steps", "mean_recurrence", "rope_theta"):
        assert written.get(key) == config.get(key), key


def test_what_is_loaded_into(tmp_path):
    """Other models leave the heads out; theirs are new."""
    folder = write(tmp_path, *made("ouro"))
    whole = LoopedForCausalLM.from_pretrained(folder)
    trunk = LoopedModel.from_pretrained(folder)
    assert type(trunk) is LoopedModel
    assert torch.equal(trunk(IDS).last_hidden_state, whole.model(IDS).last_hidden_state)
    classifier = LoopedForSequenceClassification.from_pretrained(folder, num_labels=5)
    assert classifier.score.out_features == 5
    assert torch.equal(classifier.model(IDS).last_hidden_state, trunk(IDS).last_hidden_state)


def test_arguments_of_loading(tmp_path):
    folder = write(tmp_path, *made("huginn"))
    whole = LoopedForCausalLM.from_pretrained(folder)
    placed = LoopedForCausalLM.from_pretrained(folder, device_map="auto", dtype=torch.float64, num_loops=5)
    assert placed.dtype == torch.float64 and placed.config.num_loops == 5 and placed.trained_depth == 3
    torch.testing.assert_close(placed(IDS, num_loops=3).logits, whole(IDS).logits.double(), rtol=0, atol=1e-3)
    assert LoopedConfig.from_pretrained(folder, num_loops=7).num_loops == 7
    config = LoopedConfig.from_pretrained(folder)
    config.attention_dropout = 0.25
    assert LoopedForCausalLM.from_pretrained(folder, config=config).config.attention_dropout == 0.25
    model, info = LoopedForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_offloaded_to_disk(tmp_path):
    folder = write(tmp_path / "folder", *made("parcae"))
    whole = LoopedForCausalLM.from_pretrained(folder)
    names = {".".join(name.split(".")[: 2 if name.startswith("model.") else 1]) for name in whole.state_dict()}
    places = {name: "disk" if name == "model.core" else "cpu" for name in names}
    part = LoopedForCausalLM.from_pretrained(folder, device_map=places, offload_folder=str(tmp_path / "offload"))
    assert torch.equal(part(IDS).logits, whole(IDS).logits)


def test_models_that_are_ours_are_saved_as_ours(tmp_path):
    LoopedForCausalLM.from_pretrained(write(tmp_path / "public", *made("ouro")))
    model = tiny_model()
    model.save_pretrained(tmp_path / "ours")
    assert set(stored(tmp_path / "ours")) == set(model.state_dict())


def test_what_a_folder_was_taken_for_is_said(tmp_path, logged):
    """That alone: its config names no end of a text, so that its tokenizer is read, with which nothing is wrong."""
    folder = write(tmp_path, *made("huginn"))
    tiny_tokenizer().save_pretrained(folder)
    transformers.utils.logging.enable_propagation()
    try:
        LoopedForCausalLM.from_pretrained(folder)
    finally:
        transformers.utils.logging.disable_propagation()
    said = "was opened as Huginn: 2 layers and 1 before the loop and 2 after the loop, 3 loops"
    warned = [record.getMessage() for record in logged if record.levelname == "WARNING"]
    assert len(warned) == 1 and said in warned[0], warned


def test_an_adapter_for_a_public_folder(tmp_path):
    peft = pytest.importorskip("peft")
    folder = write(tmp_path / "public", *made("huginn"))
    base = LoopedForCausalLM.from_pretrained(folder)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    again = LoopedForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(again(IDS).logits, adapted(IDS).logits)


def test_the_harness_opens_what_auto_classes_open(tmp_path):
    folder = write(tmp_path / "ouro", *made("ouro"))
    tiny_tokenizer().save_pretrained(folder)
    lm = LoopedLM(pretrained=str(folder), device="cpu", num_loops="1,2,3")
    assert torch.equal(lm.model(IDS).logits, LoopedForCausalLM.from_pretrained(folder)(IDS).logits)
    with pytest.raises(ValueError, match="looped convert"):
        LoopedLM(pretrained=str(write(tmp_path / "parcae", *made("parcae"))), device="cpu")


def test_presets_of_published_systems_fit_their_layouts():
    """Sizes, loop and blocks of the presets are what these layouts can say."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_attention_heads": 2}
    for name in set(public.PUBLIC_REPOSITORIES) & set(LoopedConfig.preset_names()):
        config = LoopedConfig.from_preset(name, **sizes)
        assert public_config(LAYOUTS[name], config)


def test_what_configs_leave_out():
    """Llama's defaults are those of transformers; Parcae's vocabulary is padded; rotary positions have the base of the
    public code."""
    sizes = {"vocab_size": 47, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}
    config, heads = {**sizes, "num_hidden_layers": 2, "max_position_embeddings": 64}, {"num_key_value_heads": 4}
    wanted, looped = transformers.LlamaConfig(**config), LAYOUTS["llama"].read_config(config)
    names = "hidden_act rms_norm_eps initializer_range attention_dropout tie_word_embeddings use_cache"
    assert looped.items() >= {**heads, **{name: getattr(wanted, name) for name in names.split()}}.items()
    assert looped["rope_parameters"]["rope_theta"] == wanted.rope_parameters["rope_theta"]
    config = public.parcae(vocab_size=65)[0]
    del config["padded_vocab_size"], config["rope_settings"]
    for strategy, scale in (("scaled-geiping", 1.0), ("takase", 48**0.5)):
        looped = LAYOUTS["parcae"].read_config({**config, "init_strategy": strategy})
        assert (looped["vocab_size"], looped["embedding_scale"]) == (128, scale)
        assert looped["rope_parameters"]["rope_theta"] == 50000
    config = public.huginn()[0]
    del config["rope_base"]
    assert LAYOUTS["huginn"].read_config(config)["rope_parameters"]["rope_theta"] == 50000
    config = public.huginn(is_retrofitted=True, max_position_embeddings=96)[0]
    assert LAYOUTS["retrofitted"].read_config(config)["max_position_embeddings"] == 96


@pytest.mark.parametrize("num_loops", [3, 5])
@pytest.mark.parametrize("core", [1, 3])
def test_value_gates_are_written_where_they_are_read(core, num_loops):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_attention_heads": 2}
    layers = {"num_prelude_layers": 1, "num_core_layers": core, "num_coda_layers": 1}
    config = LoopedConfig.from_preset("parcae", **sizes, **layers, num_loops=num_loops)
    read = LAYOUTS["parcae"].read_config(public_config(LAYOUTS["parcae"], config))
    assert read["num_loops"] == num_loops and read.items() >= {**sizes, **layers}.items()


# Generation


def test_a_saved_threshold_is_an_exit(tmp_path):
    config, tensors = public.ouro(early_exit_threshold=0.7)
    model = LoopedForCausalLM.from_pretrained(write(tmp_path / "public", config, tensors))
    assert (model.generation_config.exit_criterion, model.generation_config.exit_threshold) == ("gate", 0.7)
    model.save_pretrained(tmp_path / "ours")
    again = LoopedForCausalLM.from_pretrained(tmp_path / "ours")
    assert (again.generation_config.exit_criterion, again.generation_config.exit_threshold) == ("gate", 0.7)
    save_public(again, tmp_path / "back", "ouro")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["early_exit_threshold"] == 0.7
    assert "exit" not in (tmp_path / "back" / "generation_config.json").read_text()
    torch.testing.assert_close(again.double()(IDS).logits, public.ouro_logits(config, tensors, IDS), rtol=0, atol=2e-5)
    words = {}
    LAYOUTS["ouro"].write_generation(words, SimpleNamespace(exit_criterion="max_prob", exit_threshold=0.7))
    assert not words  # the threshold of another rule


def test_tokens_that_end_a_text(tmp_path):
    """What the releases leave out: the end of a turn, and ids that only their tokenizers know."""
    folder = write(tmp_path / "ouro", *public.ouro(vocab_size=49152))
    assert LoopedForCausalLM.from_pretrained(folder).generation_config.eos_token_id == [0, 2]
    folder = write(tmp_path / "huginn", *public.huginn(vocab_size=65536, padded_vocab_size=65536))
    model = LoopedForCausalLM.from_pretrained(folder)
    assert (model.config.bos_token_id, model.config.pad_token_id) == (65504, 65509)
    assert model.generation_config.eos_token_id == [65505, 65508]
    folder = write(tmp_path / "retrofitted", *made("retrofitted"))
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    model = LoopedForCausalLM.from_pretrained(folder)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    tokenizer.add_tokens([f"<{i}>" for i in range(47)])
    tokenizer.add_special_tokens({"pad_token": "<beyond the embedding>"})
    tokenizer.save_pretrained(folder)
    assert LoopedForCausalLM.from_pretrained(folder).config.pad_token_id is None


def test_auto_classes_on_request(tmp_path):
    register_public_formats()
    for name in ("ouro", "nanbeige", "huginn", "retrofitted"):
        folder = write(tmp_path / name, *made(name))
        tiny_tokenizer().save_pretrained(folder)
        assert type(AutoConfig.from_pretrained(folder)) is LoopedConfig
        model = AutoModelForCausalLM.from_pretrained(folder, num_loops=4)
        assert type(model) is LoopedForCausalLM and model.config.num_loops == 4
        direct = LoopedForCausalLM.from_pretrained(folder, num_loops=4)
        assert torch.equal(model(IDS).logits, direct(IDS).logits)
        assert AutoConfig.from_pretrained(folder).auto_map == {}  # TRL asks, where transformers has no such class
        AutoModelForSequenceClassification.from_pretrained(folder)
        assert pipeline("text-generation", str(folder), max_new_tokens=3, do_sample=False)("a b c")
        model.save_pretrained(tmp_path / f"{name} saved")
        assert LoopedForCausalLM.from_pretrained(tmp_path / f"{name} saved").config.model_type == "looped"


def test_a_loop_that_is_chosen_after_all_have_run(tmp_path):
    """As the release of Ouro reads out: the cache holds every loop, and each token, also of the prompt, is read at the
    first loop where the probability of an exit so far reaches the threshold."""
    config, tensors = public.ouro()
    tensors["model.early_exit_gate.weight"] *= 2
    model = LoopedForCausalLM.from_pretrained(write(tmp_path, config, tensors)).double()
    threshold = 0.6
    exits, wanted = public.ouro_exit_loops(config, tensors, IDS, threshold)
    assert len(exits.unique()) == 3
    rule = ExitRule("gate", threshold, selection="after")
    outputs = model(IDS, exit_rule=rule, use_cache=True)
    assert torch.equal(outputs.token_loops, exits + 1)
    torch.testing.assert_close(outputs.logits, wanted, rtol=1e-5, atol=2e-5)
    last = model(IDS[:, -1:], past_key_values=model(IDS[:, :-1]).past_key_values, exit_rule=rule)
    torch.testing.assert_close(last.logits, wanted[:, -1:], rtol=1e-5, atol=2e-5)

    ids = IDS
    for _ in range(5):
        ids = torch.cat([ids, public.ouro_exit_loops(config, tensors, ids, threshold)[1][:, -1:].argmax(-1)], dim=1)
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 46}
    exits = {"exit_criterion": "gate", "exit_threshold": threshold, "exit_selection": "after"}
    assert torch.equal(model.generate(IDS, **exits, **settings), ids)
    assert model.generate(IDS, **exits, **settings, num_beams=2).shape == ids.shape
    for wrong in ({"exit_selection": "later"}, {"prompt_loops": 2}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            model.generate(IDS, **{**exits, **wrong}, **settings)
    with pytest.raises(ValueError, match="exit_selection without exit_criterion"):
        model.generate(IDS, exit_selection="after", **settings)


def test_all_loops_read_out_by_the_probability_of_an_exit(tmp_path):
    """As the release of Ouro does with `use_weighted_exit`."""
    config, tensors = public.ouro()
    tensors["model.early_exit_gate.weight"] *= 2
    model = LoopedForCausalLM.from_pretrained(write(tmp_path, config, tensors)).double()
    weighted = {"exit_criterion": "gate", "exit_selection": "weighted"}
    rule = ExitRule("gate", selection="weighted").checked(model.config)
    wanted = public.ouro_weighted_logits(config, tensors, IDS)
    assert (wanted - model(IDS).logits).abs().max() > 0.01
    outputs = model(IDS, exit_rule=rule, use_cache=True)
    torch.testing.assert_close(outputs.logits, wanted, rtol=1e-5, atol=2e-5)
    assert outputs.token_loops.tolist() == [[3] * IDS.shape[1]] * len(IDS)
    last = model(IDS[:, -1:], cache=model(IDS[:, :-1]).cache, exit_rule=rule, logits_to_keep=1)
    torch.testing.assert_close(last.logits, wanted[:, -1:], rtol=1e-5, atol=2e-5)
    labelled = LoopedForCausalLM.from_pretrained(tmp_path, loop_loss="exit_weighted_logits").double()
    loss = F.cross_entropy(wanted[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())  # as the release gives with labels
    torch.testing.assert_close(labelled(IDS, labels=IDS).loss, loss, rtol=1e-5, atol=2e-5)
    shallow = model(IDS, exit_rule=rule, num_loops=[2, 3])
    torch.testing.assert_close(
        shallow.logits[:1],
        public.ouro_weighted_logits({**config, "total_ut_steps": 2}, tensors, IDS[:1]),
        rtol=1e-5,
        atol=2e-5,
    )
    assert shallow.token_loops[:, 0].tolist() == [2, 3]
    assert model(IDS, exit_rule=rule, output_logits=False).logits is None

    ids = IDS
    for _ in range(5):
        ids = torch.cat([ids, public.ouro_weighted_logits(config, tensors, ids)[:, -1:].argmax(-1)], dim=1)
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 46}
    assert torch.equal(model.generate(IDS, **weighted, **settings), ids)
    assert model.generate(IDS, **weighted, **settings, num_beams=2).shape == ids.shape
    for wrong in ({"exit_threshold": 0.5}, {"min_loops": 2}, {"exit_criterion": "kl"}, {"prompt_loops": 2}):
        with pytest.raises(ValueError, match=rf"'weighted'.*{next(iter(wrong))}|{next(iter(wrong))}.*'weighted'"):
            model.generate(IDS, **{**weighted, **wrong}, **settings)
    model.generation_config.exit_criterion, model.generation_config.exit_threshold = "gate", 0.5  # of another call
    assert torch.equal(model.generate(IDS, exit_selection="weighted", **settings), ids)


def test_noise_to_start_from_while_generating(tmp_path):
    """h_0 of every position is drawn by its number: neither the batch nor the cache changes what is written."""
    model = LoopedForCausalLM.from_pretrained(write(tmp_path, *made("huginn"))).double()
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 46}
    seeded = model.generate(IDS, state_seed=3, **settings)
    states = SeededStates(model, 3)
    ids = IDS
    for _ in range(6):
        logits = model(ids, initial_state=states.of_inputs({"input_ids": ids})).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(seeded, ids)
    assert torch.equal(model.generate(IDS[1:], state_seed=3, **settings), seeded[1:])
    assert torch.equal(model.generate(IDS, state_seed=3, use_cache=False, **settings), seeded)
    others = [model.generate(IDS, **settings), model.generate(IDS, state_seed=4, **settings)]
    assert not any(torch.equal(seeded, other) for other in others)
    before = torch.zeros(1, IDS.shape[1] + 1, dtype=torch.long)
    padded, mask = (torch.cat([before, each], dim=1) for each in (IDS[:1], torch.ones_like(IDS[:1])))
    for positions in ({}, {"position_ids": torch.arange(padded.shape[1])[None] - before.shape[1]}):
        found = model.generate(padded, attention_mask=mask, state_seed=3, **positions, **settings)
        assert torch.equal(found[:, before.shape[1] :], seeded[:1])
    with pytest.raises(ValueError, match="state_seed=3 goes with plain decoding"):
        model.generate(IDS, state_seed=3, exit_criterion="max_prob", exit_threshold=0.5, **settings)
    with pytest.raises(ValueError, match="state_init='normal'"):
        tiny_model().generate(IDS, state_seed=3, **settings)


# What is refused


@pytest.mark.parametrize(
    "name,changes,said",
    [
        ("ouro", {"mixture": 3}, "mixture=3"),
        ("ouro", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("ouro", {"early_exit_step": 2}, "early_exit_step=2"),
        ("ouro", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("ouro", {"hidden_size": None}, "hidden_size"),
        ("nanbeige", {"qk_layernorm": True}, "qk_layernorm=True"),
        ("nanbeige", {"head_dim": 8, "kv_channels": 12}, "'head_dim': 8, 'kv_channels': 12} must be equal"),
        ("nanbeige", {"attention_bias": True}, "attention_bias=True"),
        ("nanbeige", {"loop_middle_layers": 2}, "loop_middle_layers=2"),
        ("nanbeige", {"insert_ngram_layer_idx": [1]}, "insert_ngram_layer_idx"),
        ("huginn", {"initial_state_mode": "skip-adapter"}, "skip-adapter"),
        ("huginn", {"test_time_noise": 0.1}, "test_time_noise=0.1"),
        ("huginn", {"injection_type": "add"}, "injection_type='add'"),
        ("huginn", {"n_heads": 3}, "n_heads"),
        ("parcae", {"clip_qkv": 8}, "clip_qkv=8"),
        ("parcae", {"init_strategy": "shaped"}, "init_strategy='shaped'"),
        ("parcae", {"nonlin_name": "GELU"}, "GELU"),
        ("parcae", {"mean_recurrence": 4, "mean_backprop_depth": 3, "n_layers_in_recurrent_block": 1}, "gates"),
        ("parcae", {"rope_settings": {"use_rope": False}}, "rope_settings"),
    ],
)
def test_configs_that_mean_something_else(name, changes, said, tmp_path):
    config, tensors = made(name)
    folder = write(tmp_path, {**config, **changes}, tensors)
    with pytest.raises(ValueError, match=said):
        LoopedForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("words", [{"model_type": "mamba"}, {"_class_name": "GPTConfig"}])
def test_a_folder_of_no_known_kind(words, tmp_path):
    folder = write(tmp_path, {"hidden_size": 8, **words}, made("ouro")[1], num_shards=1)
    with pytest.raises(ValueError, match="What opens.*Ouro.*Huginn.*Parcae.*Nanbeige.*from_dense"):
        LoopedForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", ["ouro", "huginn", "parcae"])
def test_tensors_that_do_not_fit(name, tmp_path):
    config, tensors = made(name)
    victim = next(key for key in tensors if key.endswith("mlp.down_proj.weight") or key.endswith("mlp.fc.weight"))
    fewer = {key: tensor for key, tensor in tensors.items() if key != victim}
    other = {
        "missing": fewer,
        "of another shape": {**tensors, victim: tensors[victim][:, 1:].contiguous()},
        "not in the model": {**tensors, victim.replace("mlp", "mlp2"): tensors[victim].clone()},
    }
    for said, changed in other.items():
        folder = write(tmp_path / said, config, changed)
        with pytest.raises(ValueError, match=said):
            LoopedForCausalLM.from_pretrained(folder)
    assert LoopedForCausalLM.from_pretrained(tmp_path / "missing", strict=False)


def test_rows_that_cannot_be_split(tmp_path):
    config, tensors = made("huginn")
    tensors["transformer.coda.0.attn.Wqkv.weight"] = tensors["transformer.coda.0.attn.Wqkv.weight"][1:].contiguous()
    with pytest.raises(ValueError, match="q_proj.weight \\(71, 24\\) instead of \\(24, 24\\)"):
        LoopedForCausalLM.from_pretrained(write(tmp_path, config, tensors))


@pytest.mark.parametrize("settings", [QuantoConfig("int8"), {"quant_method": "torchao", "quant_type": "int8"}])
def test_quantisers_that_keep_the_first_of_fused_matrices(settings, tmp_path):
    """Before the quantiser is asked for; layouts without such matrices leave it to transformers."""
    for name, fused in (("huginn", "Wqkv"), ("retrofitted", "Wqkv"), ("parcae gated", "fc"), ("ouro", None)):
        place = write(tmp_path / name, *made(name))
        if fused is None:
            assert open_public(place, {"quantization_config": settings}) is not None
        else:
            said = rf"\(.*{fused}\.weight\), of which quant_method='(quanto|torchao)' keeps the first alone"
            with pytest.raises(ValueError, match=rf"{said}: run `looped convert {re.escape(str(place))} OUT`"):
                LoopedForCausalLM.from_pretrained(place, quantization_config=settings, strict=False)
    for whole in ({"load_in_8bit": True}, BitsAndBytesConfig(load_in_4bit=True)):
        assert open_public(tmp_path / "huginn", {"quantization_config": whole}) is not None


def test_two_heads_where_one_is_promised(tmp_path):
    config, tensors = made("huginn")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    with pytest.raises(ValueError, match="two that differ"):
        LoopedForCausalLM.from_pretrained(write(tmp_path, config, tensors))


def test_a_shard_is_missing(tmp_path):
    folder = write(tmp_path, *made("ouro"), num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(OSError, match="00002-of-00003"):
        LoopedForCausalLM.from_pretrained(folder)


class Hostile:
    def __reduce__(self):
        return os.mkdir, (self.path,)

    def __init__(self, path):
        self.path = str(path)


def test_a_pickle_runs_nothing(tmp_path):
    config, tensors = made("parcae")
    folder = write(tmp_path / "folder", config, {**tensors, "extra": Hostile(tmp_path / "ran")})
    with pytest.raises(Exception, match="[Ww]eights"):
        LoopedForCausalLM.from_pretrained(folder)
    assert not (tmp_path / "ran").exists()


def test_an_interrupted_file(tmp_path):
    folder = write(tmp_path, *made("ouro"), num_shards=1)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="truncated or damaged"):
        LoopedForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", ["ouro", "huginn"])
@pytest.mark.parametrize(
    "content, said",
    [("[]", "JSON object"), ("{", "no JSON"), ("{}", "weight_map"), ('{"weight_map": {"a": 1}}', "weight_map")],
)
def test_an_index_that_is_none(name, content, said, tmp_path):
    folder = write(tmp_path, *made(name), num_shards=2)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=said):
        LoopedForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", ["ouro", "huginn"])
@pytest.mark.parametrize("is_absolute", [False, True])
def test_an_index_names_files_of_its_folder(name, is_absolute, tmp_path):
    folder = write(tmp_path / "folder", *made(name), num_shards=2)
    shard, index = "model-00001-of-00002.safetensors", folder / "model.safetensors.index.json"
    (folder / shard).rename(tmp_path / shard)
    place = tmp_path / shard if is_absolute else f"../{shard}"
    index.write_text(index.read_text().replace(shard, str(place)))
    with pytest.raises(ValueError, match="outside its folder"):
        LoopedForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("kept", [0, 100, 5000])
def test_a_damaged_file_whose_names_tell_the_layout(kept, tmp_path):
    folder = write(tmp_path, *made("huginn"), num_shards=1)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:kept])
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        LoopedForCausalLM.from_pretrained(folder)


def test_an_index_tells_the_layout(tmp_path):
    """Of a repository on the Hub, a config fetches no weights."""
    folder = write(tmp_path, *made("huginn"), num_shards=3)
    config = LoopedConfig.from_pretrained(folder)
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    assert LoopedConfig.from_pretrained(folder).to_dict() == config.to_dict()
    with pytest.raises(OSError, match="model-00001-of-00003"):
        LoopedForCausalLM.from_pretrained(folder)


@pytest.mark.skipif(not hasattr(transformers.utils.hub, "resolve_revision"), reason="of transformers 5.24")
@pytest.mark.parametrize("opener", [LoopedConfig, LoopedForCausalLM])
def test_the_hub_is_asked_once_what_a_branch_is(opener, tmp_path, monkeypatch):
    repository, commit = tmp_path / "models--looped--tiny", "0" * 40
    write(repository / "snapshots" / commit, *made("huginn"), num_shards=3)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    pinned = []

    def recording(call):
        def recorded(*args, **kwargs):
            pinned.append(hasattr(kwargs.get("revision"), "resolved"))
            return call(*args, **kwargs)

        return recorded

    monkeypatch.setattr(HfApi, "resolve_revision", recording(HfApi.resolve_revision))
    monkeypatch.setattr(folder_of_formats, "cached_file", recording(folder_of_formats.cached_file))
    opener.from_pretrained("looped/tiny", cache_dir=tmp_path)
    assert pinned[0] is False and len(pinned) > 2 and all(pinned[1:])


@pytest.mark.parametrize("content", ["[]", "null", "3"])
def test_a_config_that_is_no_object(content, tmp_path):
    folder = write(tmp_path, *made("ouro"))
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match="must be a JSON object"):
        LoopedForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("changes", [{"hidden_size": "24"}, {"num_attention_heads": 0}])
def test_sizes_that_are_none(changes, tmp_path):
    config, tensors = made("ouro")
    config = {name: value for name, value in config.items() if name != "head_dim"}
    with pytest.raises(ValueError, match=next(iter(changes))):
        LoopedForCausalLM.from_pretrained(write(tmp_path, {**config, **changes}, tensors))


def test_the_code_of_a_folder_is_not_asked_for(tmp_path, monkeypatch):
    """Looking for a tokenizer neither runs what the folder has, nor asks whether to."""
    config, tensors = made("ouro")
    folder = write(tmp_path, {**config, "eos_token_id": None}, tensors)
    (folder / "configuration_ouro.py").write_text("raise SystemExit")
    asked = []
    monkeypatch.setattr("builtins.input", lambda *_: asked.append(True) or "n")
    LoopedForCausalLM.from_pretrained(folder)
    assert not asked


def test_tables_that_follow_from_others_need_not_be_there(tmp_path):
    config, tensors = made("huginn")
    wanted = LoopedForCausalLM.from_pretrained(write(tmp_path / "with", config, tensors))(IDS).logits
    fewer = {name: tensor for name, tensor in tensors.items() if name not in ("freqs_cis", "lm_head.weight")}
    assert torch.equal(
        LoopedForCausalLM.from_pretrained(write(tmp_path / "without", config, fewer))(IDS).logits, wanted
    )


def test_a_folder_that_was_saved_before_is_ours_still(tmp_path):
    """A config of ours is read as ever, also without a word about its format."""
    model = tiny_model()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "format_version"}))
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(LoopedForCausalLM.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


def test_layouts_are_known_by_their_names():
    assert set(LAYOUTS) >= {"ouro", "huginn", "retrofitted", "parcae", "nanbeige", "llama"}
    assert all(layout.name == name for name, layout in LAYOUTS.items())
