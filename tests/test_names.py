"""A misspelt name, or what other libraries call a thing, is never passed over unheard; what tools pass is."""

import inspect
from dataclasses import fields

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    configuration_utils,
    pipeline,
)

from looped_eval.harness.looped_lm import LoopedLM
from modeling_looped import LoopedConfig, LoopedModel, configuration_looped, foreign_names, generation
from modeling_looped.depth_options import DEPTH_FIELDS

from .helpers import random_ids, tiny_config, tiny_model, tiny_tokenizer


IDS = random_ids(1, 4)
FIELDS = [field.name for field in fields(LoopedConfig)]


@pytest.fixture
def said(monkeypatch):
    said = []
    for module in (foreign_names, configuration_looped):
        monkeypatch.setattr(module.logger, "warning_once", lambda said_now: said_now in said or said.append(said_now))
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.some(100)
@pytest.mark.parametrize("name", sorted(foreign_names.FIELD_OF))
def test_a_foreign_field_is_answered_with_ours(name, said):
    advice = foreign_names.FIELD_OF[name]
    assert advice.split()[0].split("=")[0].rstrip(",") in FIELDS
    if name in foreign_names.SPELLINGS_OF_EPS:
        LoopedConfig(**{name: 1e-3})
        tiny_config().update({name: 1e-3})
        assert len(said) == 1 and f"`{name}`" in said[0] and advice in said[0]
        return
    for give in (
        lambda: LoopedConfig(**{name: 3}),
        lambda: LoopedConfig.from_preset("lt", **{name: 3}),
        lambda: tiny_config().update({name: 3}),
        lambda: LoopedConfig.from_dict(tiny_config().to_dict(), **{name: 3}),
    ):
        with pytest.raises(ValueError) as caught:
            give()
        said = str(caught.value)
        assert f"`{name}`" in said and (advice in said or "derived" in said)


def test_the_tables_hold_no_name_of_ours_or_of_transformers():
    ours = {*FIELDS, *vars(GenerationConfig()), *foreign_names.ARGUMENTS_OF_TOOLS}
    assert not ours & {*foreign_names.FIELD_OF, *foreign_names.ARGUMENT_OF}
    for table in (foreign_names.FIELDS, foreign_names.ARGUMENTS):
        spelt = " ".join(table.values()).split()
        assert len(spelt) == len(set(spelt))


@pytest.mark.parametrize(
    "name", ["loops", "num_loop", "depth", "total_ut_steps", "exit_treshold", "output_loop_logit"]
)
def test_a_foreign_argument_is_answered_with_ours(name):
    model = tiny_model()
    for call in (model, model.generate, *([model.model] if "loop" in name and "out" not in name else [])):
        if name == "exit_treshold" and call is model:
            continue  # not of forward
        with pytest.raises(TypeError, match=f"has no argument `{name}`; did you mean") as caught:
            call(IDS, **{name: 1})
        assert isinstance(caught.value, ValueError)
    config = GenerationConfig()
    config.loops = 1
    with pytest.raises(ValueError, match="generation_config has no argument `loops`"):
        model.generate(IDS, generation_config=config)


@pytest.mark.parametrize(
    "name", ["n_layerz", "rope_bases", "nb_loop", "total_ut_step", "droput", "max_seq_lenght", "N_LAYER"]
)
def test_a_misspelt_foreign_field_is_answered_too(name):
    with pytest.raises(ValueError, match=f"no field `{name}`; did you mean"):
        tiny_config(**{name: 3})


@pytest.mark.parametrize("name", sorted(DEPTH_FIELDS.keys() - {"num_loops"}))
def test_a_pass_answers_arguments_of_generate(name):
    with pytest.raises(TypeError, match=f"has no argument `{name}`; did you mean `(exit_rule|generate)"):
        tiny_model()(IDS, **{name: 1})


def test_a_field_of_generation_that_nothing_reads_is_heard(said, monkeypatch):
    monkeypatch.setattr(generation.logger, "warning_once", said.append)
    model = tiny_model(eos_token_id=None)
    config = GenerationConfig(max_new_tokens=1, do_sample=False)
    model.generate(IDS, generation_config=config)
    assert said == []
    config.flavour = "sweet"
    model.generate(IDS, generation_config=config)
    assert said == ["generation_config has flavour, which nothing reads."]


def test_what_nothing_knows_is_heard(said):
    model = tiny_model()
    plain = model(IDS).logits
    assert torch.equal(model(IDS, flavour="sweet").logits, plain)
    assert len(said) == 1 and "`flavour`" in said[0]  # of the causal LM and its trunk together
    tiny_config(flavour="sweet")
    assert len(said) == 2
    AutoConfig.for_model("looped", colour=1)
    assert len(said) == 3 and "`colour`" in said[2]
    with pytest.raises(ValueError, match="state_size=3 cannot be set"):
        LoopedConfig(state_size=3)


def test_what_tools_pass_is_no_news(said, folder):
    model = tiny_model()
    model(IDS, num_items_in_batch=3, cu_seq_lens_q=None, return_dict=True, token_type_ids=IDS, is_causal=True)
    model.model(IDS, logits_to_keep=1)  # TRL's distillation gives it to the trunk of any model whose forward names it
    model.generate(IDS, max_new_tokens=2, num_beams=2)
    fields = {"auto_map": {}, "quantization_config": None, "torch_dtype": "float32", "_attn_implementation": "sdpa"}
    fields |= {"tie_encoder_decoder": False}  # of older transformers, and close to is_encoder_decoder
    LoopedConfig(**{**tiny_config().to_dict(), **fields, "rope_theta": 500.0, "max_length": 20, "num_labels": 3})
    AutoConfig.from_pretrained(folder, trust_remote_code=False, revision="main", attn_implementation="eager")
    AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map="cpu", low_cpu_mem_usage=True)
    assert said == []


def test_what_is_of_a_tokenizer_is_no_news(said, folder, monkeypatch):
    heard = []
    monkeypatch.setattr(configuration_utils.logger, "warning", heard.append)
    given = {"padding_side": "left", "model_max_length": 8, "pad_token": "<|eos|>", "fix_mistral_regex": True}
    tokenizer = AutoTokenizer.from_pretrained(folder, **given)
    assert (tokenizer.padding_side, tokenizer.model_max_length, tokenizer.pad_token) == ("left", 8, "<|eos|>")
    AutoTokenizer.from_pretrained(folder, **tokenizer.init_kwargs)  # as TransformerLens opens one a second time
    assert said == heard == []
    with pytest.raises(ValueError, match="`pad_token`; did you mean `pad_token_id`"):
        AutoModelForCausalLM.from_pretrained(folder, pad_token="<|eos|>")


def test_what_is_of_loading_is_no_news(said, folder, tmp_path):
    """Pipelines open the config, and the tokenizer, with it before the model."""
    signature = inspect.signature(PreTrainedModel.from_pretrained).parameters.values()
    named = {parameter.name for parameter in signature if parameter.kind is parameter.KEYWORD_ONLY} - {"config"}
    assert named
    AutoConfig.from_pretrained(folder, **dict.fromkeys(named - {"revision"}, False))
    how = {"max_memory": {"cpu": 80_000}, "offload_folder": str(tmp_path), "low_cpu_mem_usage": True}
    model = pipeline("text-generation", str(folder), device_map="auto", model_kwargs=how).model
    assert said == [] and set(model.hf_device_map.values()) == {"cpu", "disk"}
    pipeline("text-generation", str(folder), model_kwargs={"device_map": "cpu"})
    assert said == []


@pytest.mark.parametrize("name", ["loops", "n_layer", "num_loop"])
def test_loading_answers_with_ours(name, folder):
    for load in (AutoModelForCausalLM, AutoConfig, LoopedModel, LoopedConfig):
        with pytest.raises(ValueError, match=f"no field `{name}`; did you mean `num_"):
            load.from_pretrained(folder, **{name: 2})


def test_loading_takes_no_arguments_of_generate(folder):
    with pytest.raises(ValueError, match="not take exit_criterion, min_loops: .*generate.*--gen_kwargs.*looped eval"):
        AutoModelForCausalLM.from_pretrained(folder, exit_criterion="kl", min_loops=2)
    with pytest.raises(ValueError, match="unexpected keyword argument 'flavour'.*fields of LoopedConfig"):
        AutoModelForCausalLM.from_pretrained(folder, flavour="sweet")
    with pytest.raises(ValueError, match="; generate has exit_criterion .with exit_threshold"):
        AutoModelForCausalLM.from_pretrained(folder, early_exit_threshold=0.5)  # Ouro's
    config = AutoConfig.from_pretrained(folder)
    with pytest.raises(ValueError, match="takes num_loops from the config that is passed: set it there"):
        AutoModelForCausalLM.from_pretrained(folder, config=config, num_loops=2)


@pytest.mark.parametrize("lm", [HFLM, LoopedLM])
def test_model_arguments_of_lm_eval(lm, folder):
    with pytest.raises(ValueError, match="no field `loops`; did you mean `num_loops`"):
        lm.create_from_arg_string(f"pretrained={folder},loops=1", {"device": "cpu"})


EXIT, GUIDANCE = {"exit_criterion": "kl", "exit_threshold": 0.1}, {"guidance_scale": 1.5}


@pytest.mark.parametrize("how", [GUIDANCE, {"num_beams": 2}, EXIT], ids=str)
def test_what_generate_hands_on_is_known(how, said):
    """Tokenizers, which its own criteria read, and a second prompt."""
    given = {"tokenizer": tiny_tokenizer(), "assistant_tokenizer": tiny_tokenizer(), "synced_gpus": False}
    given |= {"negative_prompt_ids": IDS}
    tiny_model(loop_loss="per_loop", eos_token_id=None).generate(
        IDS, max_new_tokens=2, do_sample=False, **given, **how
    )
    assert said == []
