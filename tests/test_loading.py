"""What is saved is what is loaded, bit for bit; a checkpoint that does not fit is refused, not filled up silently."""

import json
import os

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import hub

from modeling_looped import (
    LoopedConfig,
    LoopedForCausalLM,
    LoopedForQuestionAnswering,
    LoopedForSequenceClassification,
    LoopedForTokenClassification,
    LoopedModel,
    save_public,
)

from .helpers import random_ids, tiny_config, tiny_model


CLASSES = [
    LoopedModel,
    LoopedForCausalLM,
    LoopedForSequenceClassification,
    LoopedForTokenClassification,
    LoopedForQuestionAnswering,
]
HEADS = CLASSES[2:]
# a prelude, a core and a coda, a gate and a norm of its own: something of every kind
SECTIONS = {"num_prelude_layers": 1, "num_coda_layers": 1, "exit_gate": "raw", "inter_loop_norm": "own"}
TRUNK_TENSOR = "core.1.mlp.up_proj.weight"


def assert_equal_weights(found, wanted):
    found, wanted = found.state_dict(), wanted.state_dict()
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def assert_equal_trunks(found, wanted):
    assert_equal_weights(getattr(found, "model", found), getattr(wanted, "model", wanted))


def edit(folder, change):
    """Rewrite the one weight file of `folder`."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def model():
    return tiny_model(**SECTIONS)


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path)
    return tmp_path


# Round trips


@pytest.mark.parametrize("preset", LoopedConfig.preset_names())
@pytest.mark.some(8)
def test_every_preset_comes_back_bit_for_bit(preset, tmp_path):
    model = tiny_model(preset=preset, pad_token_id=0)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LoopedForCausalLM and not loaded.training
    assert_equal_weights(loaded, model)
    ids = random_ids(2, 6)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("model_class", CLASSES)
def test_every_class_comes_back_bit_for_bit(model_class, tmp_path):
    model = tiny_model(model_class, **SECTIONS, num_labels=2)
    model.save_pretrained(tmp_path)
    assert_equal_weights(model_class.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("tied", [False, True])
def test_shards(tied, tmp_path):
    model = tiny_model(**SECTIONS, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3 and not (tmp_path / "model.safetensors").exists()
    assert_equal_weights(LoopedForCausalLM.from_pretrained(tmp_path), model)
    shards[1].unlink()
    with pytest.raises((OSError, ValueError), match=shards[1].name):
        LoopedForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize("sizes", [("5GB", "20KB"), ("20KB", "5GB"), ("20KB", "40KB")], ids="-".join)
def test_a_save_into_the_folder_of_an_older_one_is_what_opens(sizes, variant, tmp_path):
    """The same files are there as in a new folder."""
    older, model = tiny_model(**SECTIONS), tiny_model(**SECTIONS)
    with torch.no_grad():
        model.lm_head.weight += 1
    older.save_pretrained(tmp_path / "reused", variant=variant, max_shard_size=sizes[0])
    for folder in ("reused", "new"):
        model.save_pretrained(tmp_path / folder, variant=variant, max_shard_size=sizes[1])
    reused, new = ({path.name for path in (tmp_path / folder).iterdir()} for folder in ("reused", "new"))
    assert reused == new
    assert_equal_weights(LoopedForCausalLM.from_pretrained(tmp_path / "reused", variant=variant), model)


@pytest.mark.parametrize(("umask", "size"), [(0o022, "20KB"), (0o077, "5GB")])
def test_the_mode_of_weights_follows_the_umask(umask, size, tmp_path):
    before = os.umask(umask)
    try:
        tiny_model(**SECTIONS).save_pretrained(tmp_path / "ours", max_shard_size=size)
        save_public(tiny_model(num_loops=1), tmp_path / "public", "llama")
    finally:
        os.umask(before)
    files = [path for folder in ("ours", "public") for path in (tmp_path / folder).iterdir()]
    assert sum(path.suffix == ".safetensors" for path in files) > 1
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}


def test_a_save_that_writes_no_weights_of_this_name_leaves_those_that_are_there(tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    model = tiny_model(**SECTIONS)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    model.save_pretrained(tmp_path, variant="one")
    before = {path.name for path in tmp_path.iterdir()}
    model.save_pretrained(tmp_path, is_main_process=False)
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} - before == {"adapter_config.json", "adapter_model.safetensors"}
    assert before <= {path.name for path in tmp_path.iterdir()}


def test_a_save_while_others_wrap_the_method(model, tmp_path, monkeypatch):
    """As tools do that add to what is saved."""
    save = PreTrainedModel.save_pretrained
    wrapper = lambda self, folder, **kwargs: save(self, folder, **kwargs)  # noqa: E731
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", wrapper)
    model.save_pretrained(tmp_path)
    assert_equal_weights(LoopedForCausalLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_weights_are_saved_once_and_stay_tied(tied, tmp_path):
    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    loaded = LoopedForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert_equal_weights(loaded, model)


class TiedForCausalLM(LoopedForCausalLM):
    """One layer in two places, of another one matrix and one parameter of its own, and the head."""

    def __init__(self, config):
        super().__init__(config)
        first, second, _ = self.model.core
        for block in (first, second):
            block.factor, block.factor_of_loop = (nn.Parameter(torch.zeros(3)) for _ in range(2))
        self.model.core[2] = first
        second.mlp.down_proj.weight, second.factor = first.mlp.down_proj.weight, first.factor
        self.lm_head.weight = self.model.embed_tokens.weight
        self.post_init()


@pytest.mark.parametrize("tied", [False, True])
def test_layers_and_parameters_that_a_class_ties_stay_tied(tied, tmp_path):
    model = TiedForCausalLM(tiny_config(num_core_layers=3, tie_word_embeddings=tied))
    model.model.core[1].factor_of_loop.data += 1
    for _ in range(2):
        model.save_pretrained(tmp_path)
        names = {name for name, _ in model.named_parameters()}  # each once
        assert load_file(tmp_path / "model.safetensors").keys() == names
        loaded = TiedForCausalLM.from_pretrained(tmp_path)
        loaded.tie_weights()  # as resizing does
        first, second, third = loaded.model.core
        assert third is first and second.mlp.down_proj.weight is first.mlp.down_proj.weight
        assert second.factor is first.factor and loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert {name for name, _ in loaded.named_parameters()} == names
        assert_equal_weights(loaded, model)
        model = loaded


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", torch.float32, "auto"])
def test_dtype(dtype, folder, model):
    loaded = LoopedForCausalLM.from_pretrained(folder, dtype=dtype)
    wanted = torch.bfloat16 if "bfloat16" in str(dtype) else torch.float32
    assert {p.dtype for p in loaded.parameters()} == {wanted}
    assert_equal_weights(loaded, model.to(wanted))


def test_half_precision_is_kept(tmp_path):
    model = tiny_model().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert_equal_weights(LoopedForCausalLM.from_pretrained(tmp_path, dtype="auto"), model)


def test_loading_takes_nothing_from_the_random_state_and_leaves_it(folder):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    LoopedForCausalLM.from_pretrained(folder)
    assert torch.equal(torch.get_rng_state(), before)


# Other heads on the same trunk


@pytest.mark.parametrize("model_class", HEADS)
def test_causal_checkpoint_opens_with_another_head(model_class, folder, model):
    loaded = model_class.from_pretrained(folder, num_labels=3)
    assert_equal_trunks(loaded, model)
    assert all(p.isfinite().all() for p in loaded.parameters())


def test_causal_checkpoint_opens_as_the_trunk(folder, model):
    assert_equal_trunks(LoopedModel.from_pretrained(folder), model)
    assert_equal_trunks(AutoModel.from_pretrained(folder), model)


@pytest.mark.parametrize("model_class", [LoopedForCausalLM, *HEADS])
def test_trunk_opens_with_a_head(model_class, tmp_path):
    trunk = tiny_model(LoopedModel, **SECTIONS)
    trunk.save_pretrained(tmp_path)
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "model.safetensors"))
    loaded = model_class.from_pretrained(tmp_path)
    assert_equal_trunks(loaded, trunk)
    assert all(p.isfinite().all() for p in loaded.parameters())


def test_classifier_checkpoint_opens_as_causal_model(tmp_path):
    model = tiny_model(LoopedForSequenceClassification, **SECTIONS)
    model.save_pretrained(tmp_path)
    assert_equal_trunks(LoopedForCausalLM.from_pretrained(tmp_path), model)
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert_equal_weights(reloaded, model)


# Checkpoints that do not fit

MISFITS = {
    "missing": (lambda t: t.pop(f"model.{TRUNK_TENSOR}"), ["missing", TRUNK_TENSOR]),
    "missing norm": (lambda t: t.pop("model.inter_loop_norm.weight"), ["missing", "inter_loop_norm.weight"]),
    "layer too many": (
        lambda t: t.update({"model.core.2.mlp.up_proj.weight": torch.zeros(48, 32)}),
        ["not in the model", "core.2.mlp.up_proj.weight"],
    ),
    "unknown part": (
        lambda t: t.update({"model.adapter.weight": torch.zeros(3)}),
        ["not in the model", "adapter.weight"],
    ),
    "misshaped": (
        lambda t: t.update({f"model.{TRUNK_TENSOR}": torch.zeros(47, 32)}),
        ["another shape", TRUNK_TENSOR, "(47, 32)", "(48, 32)"],
    ),
    "transposed": (
        lambda t: t.update({f"model.{TRUNK_TENSOR}": torch.zeros(32, 48)}),
        ["another shape", TRUNK_TENSOR, "(32, 48)", "(48, 32)"],
    ),
}
HEAD_MISFITS = {
    "no head": (lambda t: t.pop("lm_head.weight"), ["missing", "lm_head.weight"]),
    "no gate": (lambda t: [t.pop("exit_gate.weight"), t.pop("exit_gate.bias")], ["missing", "exit_gate.weight"]),
    "head with a bias": (lambda t: t.update({"lm_head.bias": torch.zeros(99)}), ["not in the model", "lm_head.bias"]),
    "another head": (lambda t: t.update({"value_head.weight": torch.zeros(1, 32)}), ["value_head.weight"]),
    "smaller head": (
        lambda t: t.update({"lm_head.weight": torch.zeros(98, 32)}),
        ["another shape", "lm_head.weight", "(98, 32)", "(99, 32)"],
    ),
}


@pytest.mark.parametrize("model_class", [*CLASSES, AutoModelForCausalLM])
@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.covering
def test_trunk_that_does_not_fit_is_refused(misfit, model_class, folder):
    change, parts = MISFITS[misfit]
    edit(folder, change)
    with pytest.raises(ValueError) as caught:
        model_class.from_pretrained(folder)
    for part in [*parts, str(folder), "strict=False"]:
        assert part in str(caught.value)


@pytest.mark.parametrize("misfit", HEAD_MISFITS)
def test_head_that_does_not_fit_is_refused_by_its_own_class_alone(misfit, folder, model):
    change, parts = HEAD_MISFITS[misfit]
    edit(folder, change)
    with pytest.raises(ValueError) as caught:
        LoopedForCausalLM.from_pretrained(folder)
    for part in [*parts, str(folder), "strict=False"]:
        assert part in str(caught.value)
    for model_class in (LoopedModel, LoopedForSequenceClassification):
        assert_equal_trunks(model_class.from_pretrained(folder), model)


@pytest.mark.parametrize("model_class", CLASSES)
@pytest.mark.parametrize("misfit", ["missing", "layer too many", "misshaped"])
@pytest.mark.covering
def test_trunk_saved_alone_is_held_to_the_same(misfit, model_class, tmp_path):
    tiny_model(LoopedModel, **SECTIONS).save_pretrained(tmp_path)

    def change(tensors):
        named = {f"model.{name}": tensor for name, tensor in tensors.items()}
        MISFITS[misfit][0](named)
        tensors.clear()
        tensors.update({name.removeprefix("model."): tensor for name, tensor in named.items()})

    edit(tmp_path, change)
    with pytest.raises(ValueError) as caught:
        model_class.from_pretrained(tmp_path)
    for part in MISFITS[misfit][1]:
        assert part in str(caught.value)


def test_many_misfits_are_counted(folder):
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".mlp." in name])
    with pytest.raises(ValueError, match="and 7 more"):  # 3 matrices in each of 4 layers
        LoopedForCausalLM.from_pretrained(folder)


def test_config_of_another_model_is_refused(folder):
    for fields in ({"num_core_layers": 3}, {"num_core_layers": 1}, {"intermediate_size": 40}, {"mlp_gated": False}):
        with pytest.raises(ValueError, match="does not fit LoopedForCausalLM"):
            LoopedForCausalLM.from_pretrained(folder, config=tiny_config(**{**SECTIONS, **fields}))


@pytest.mark.parametrize("kept", [0, 4, 1000, -1])
def test_truncated_file_is_refused(kept, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match="truncated or damaged") as caught:
        LoopedForCausalLM.from_pretrained(folder)
    assert str(folder) in str(caught.value)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="model.safetensors"):
        LoopedForCausalLM.from_pretrained(folder)


# Ways around


def test_strict_false_loads_what_fits(folder, model):
    edit(folder, MISFITS["missing"][0])
    edit(folder, MISFITS["layer too many"][0])
    for load in (LoopedForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        loaded = load(folder, strict=False)
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor) == (TRUNK_TENSOR not in name)
        fresh = loaded.state_dict()[f"model.{TRUNK_TENSOR}"]
        assert 0.1 < fresh.std() < 0.3  # initializer_range is 0.2


def test_mismatched_sizes_can_be_ignored(folder, model):
    edit(folder, MISFITS["misshaped"][0])
    with pytest.raises(RuntimeError):
        LoopedForCausalLM.from_pretrained(folder, strict=False)  # transformers' own behaviour
    loaded = LoopedForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)
    assert loaded.model.core[1].mlp.up_proj.weight.shape == (48, 32)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_report_on_request_is_instead_of_an_error(folder):
    _, info = LoopedForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    edit(folder, MISFITS["missing"][0])
    loaded, info = LoopedForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(loaded, LoopedForCausalLM) and set(info["missing_keys"]) == {f"model.{TRUNK_TENSOR}"}


def test_weights_given_by_the_caller(model):
    loaded = LoopedForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict())
    assert_equal_weights(loaded, model)


def out_of_reach(monkeypatch) -> list[str]:
    """Return the list of the files that the Hub will be asked for."""
    asked = []

    def ask(_path, name, **_options):
        asked.append(name)
        raise LocalEntryNotFoundError("out of reach")

    monkeypatch.setattr(hub, "hf_hub_download", ask)
    return asked


def test_hub_out_of_reach_is_asked_for_two_files_only(monkeypatch, tmp_path):
    """Each question takes about 25 seconds, in which the client of the Hub tries again."""
    asked = out_of_reach(monkeypatch)
    with pytest.raises(OSError, match="couldn't connect"):
        LoopedForCausalLM.from_pretrained("me/looped", cache_dir=tmp_path)
    assert asked == ["config.json", "adapter_config.json"]


def test_cached_adapter_opens_with_the_hub_out_of_reach(monkeypatch, model, tmp_path):
    model.save_pretrained(tmp_path / "base")
    base = LoopedForCausalLM.from_pretrained(tmp_path / "base")
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--me--adapter"
    get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    out_of_reach(monkeypatch)
    opened = LoopedForCausalLM.from_pretrained("me/adapter", cache_dir=tmp_path / "hub")
    assert "lora_A" in " ".join(opened.state_dict())
