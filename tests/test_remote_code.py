"""A saved folder opens with `trust_remote_code=True` in a Python that does not know this package."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
import transformers

from modeling_looped import LoopedConfig, LoopedForCausalLM
from modeling_looped.auto_classes import AUTO_CLASSES
from modeling_looped.formats.saved_code import saved_code
from tests.helpers import tiny_model, tiny_tokenizer
from tests.helpers_processes import import_paths, run_clean


INPUT_IDS = torch.tensor([[5, 9, 33, 7, 12], [4, 60, 2, 2, 17]])
DEPTHS = [2, 3]  # per row
SOME = ["AutoModelForCausalLM", "AutoModelForSequenceClassification"]

# Opens every folder, writes what comes out and saves each model again. Arguments: folders, where to save, results.
CHILD = """
import importlib, json, sys

class Hidden:  # the package may be installed beside torch
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "modeling_looped":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
try:
    importlib.import_module("modeling_looped")
    sys.exit("modeling_looped is installed here, so nothing is tested")
except ModuleNotFoundError:
    pass

import torch, transformers

folders, again, results, input_ids, depths = json.loads(sys.argv[1])
input_ids = torch.tensor(input_ids)
found = {}
transformers.AutoConfig.from_pretrained(next(iter(folders.values())), trust_remote_code=True)
assert not any(name.endswith(".modeling_looped") for name in sys.modules), "a config runs the code of models"
for auto, folder in folders.items():
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    assert type(model.config).__module__.startswith("transformers_modules."), type(model.config)
    with torch.no_grad():
        outputs = model(input_ids=input_ids, num_loops=depths)
        found[auto] = [value for value in outputs.values() if torch.is_tensor(value)]
    if model.can_generate():
        found["generate"] = model.generate(input_ids, num_loops=2, do_sample=False, max_new_tokens=6)
    model.save_pretrained(again + "/" + auto)
torch.save(found, results)
"""


FIELDS = {
    "num_key_value_heads": 2, "num_prelude_layers": 1, "num_coda_layers": 1, "injection": "concat",
    "window_pattern": "SL", "sliding_window": 3, "exit_gate": "normed", "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of each class, and what the class gives here."""
    root = tmp_path_factory.mktemp("saved")
    folders, expected = {}, {}
    torch.set_num_threads(1)
    for auto, model_class in AUTO_CLASSES.items():
        model = tiny_model(model_class, **FIELDS)
        with torch.no_grad():
            outputs = model(input_ids=INPUT_IDS, num_loops=DEPTHS)
        expected[auto] = [value for value in outputs.values() if torch.is_tensor(value)]
        if model.can_generate():
            expected["generate"] = model.generate(INPUT_IDS, num_loops=2, do_sample=False, max_new_tokens=6)
        folders[auto] = str(root / auto)
        model.save_pretrained(folders[auto], max_shard_size="20kB")
    tiny_tokenizer().save_pretrained(folders["AutoModelForCausalLM"])
    return folders, expected


def open_elsewhere(folders, tmp_path):
    again, results = tmp_path / "again", tmp_path / "results.pt"
    arguments = [folders, str(again), str(results), INPUT_IDS.tolist(), DEPTHS]
    run_clean(CHILD, json.dumps(arguments), tmp_path=tmp_path)
    return {auto: str(again / auto) for auto in folders}, torch.load(results)


def assert_same(found, expected, classes):
    assert found.keys() == {*classes, "generate"}
    assert torch.equal(found["generate"], expected["generate"])
    for auto in classes:
        assert len(found[auto]) == len(expected[auto]) > 0
        assert all(torch.equal(a, b) for a, b in zip(found[auto], expected[auto])), auto


@pytest.fixture(
    scope="module", params=[SOME, pytest.param(list(AUTO_CLASSES), marks=pytest.mark.slow)], ids=["some", "all"]
)
def opened(saved, request, tmp_path_factory):
    """Folders opened elsewhere: where remote code saved them again, and what they gave."""
    folders = {auto: saved[0][auto] for auto in request.param}
    return open_elsewhere(folders, tmp_path_factory.mktemp("elsewhere"))


def test_every_class_opens_elsewhere_bit_for_bit_and_saves_again(saved, opened):
    folders, expected = saved
    saved_again, found = opened
    assert_same(found, expected, saved_again)
    for auto, folder in saved_again.items():
        assert code_of(folder) == code_of(folders[auto])
        # and the installed package beats the code in the folder
        model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
        assert type(model) is AUTO_CLASSES[auto] and type(model.config) is LoopedConfig


@pytest.mark.slow
def test_what_remote_code_wrote_is_as_complete_as_what_the_package_wrote(saved, opened, tmp_path):
    _, found = open_elsewhere(opened[0], tmp_path)
    assert_same(found, saved[1], opened[0])


def code_of(folder):
    return {name: open(os.path.join(folder, name)).read() for name in os.listdir(folder) if name.endswith(".py")}


def test_folder_is_complete(saved):
    for folder in saved[0].values():
        auto_map = json.load(open(os.path.join(folder, "config.json")))["auto_map"]
        assert auto_map == {
            "AutoConfig": "configuration_looped.LoopedConfig",
            "AutoModel": "modeling_looped.LoopedModel",
            "AutoModelForCausalLM": "modeling_looped.LoopedForCausalLM",
            "AutoModelForQuestionAnswering": "modeling_looped.LoopedForQuestionAnswering",
            "AutoModelForSequenceClassification": "modeling_looped.LoopedForSequenceClassification",
            "AutoModelForTokenClassification": "modeling_looped.LoopedForTokenClassification",
        }
        assert code_of(folder) == {f"{name}.py": text for name, text in saved_code().items()}
    for text in saved_code().values():
        assert text.startswith("# Copyright") and text.count("Licensed under the Apache License") == 1
    assert "auto_map" not in json.load(open(os.path.join(saved[0]["AutoModelForCausalLM"], "tokenizer_config.json")))


@pytest.mark.slow
def test_causal_folder_serves_every_task_elsewhere(saved, tmp_path):
    """The pipeline, another head on the same trunk, a fresh model of the config; and never without consent."""
    folders, *_ = saved
    script = """
import sys, torch, transformers
from transformers import AutoModelForSequenceClassification
folder = sys.argv[1]
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
assert tokenizer("a b j")["input_ids"] == [4, 5, 13]
pipe = transformers.pipeline("text-generation", model=folder, trust_remote_code=True)
text = pipe("a b c", num_loops=1, max_new_tokens=3, do_sample=False)[0]["generated_text"]
assert text.startswith("a b c"), text

causal = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
classifier = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True, num_labels=4)
assert classifier(torch.tensor([[2, 3, 4]])).logits.shape == (1, 4)
for name, weight in causal.model.state_dict().items():
    assert torch.equal(weight, classifier.model.state_dict()[name]), name

config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True, num_loops=5)
assert config.num_hidden_layers == 12
fresh = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
assert len(fresh(torch.tensor([[2, 3]]), output_loop_logits=True).loop_logits) == 5

try:
    transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    sys.exit("ran foreign code without consent")
except ValueError as error:
    assert "trust_remote_code=True" in str(error)
"""
    run_clean(script.strip(), folders["AutoModelForCausalLM"], tmp_path=tmp_path)


@pytest.mark.slow
def test_opens_from_the_hub_cache(saved, tmp_path):
    """Files of a hub repository are collected import by import, not as a folder."""
    folders, expected = saved
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--looped--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    os.symlink(folders["AutoModelForCausalLM"], repository / "snapshots" / commit)
    script = """
import json, sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained("looped/tiny", trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model)
with torch.no_grad():
    torch.save(model(torch.tensor(json.loads(sys.argv[1])), num_loops=[2, 3]).logits, sys.argv[2])
"""
    results = tmp_path / "logits.pt"
    hub = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    run_clean(script.strip(), json.dumps(INPUT_IDS.tolist()), str(results), tmp_path=tmp_path, **hub)
    assert torch.equal(torch.load(results), expected["AutoModelForCausalLM"][0])


def test_wrapped_class_saves_under_its_own_name(tmp_path):
    """FSDP2 replaces the class of a sharded model; its folder must not depend on that class."""
    model = tiny_model(**FIELDS)
    model.__class__ = type("FSDPLoopedForCausalLM", (LoopedForCausalLM,), {"__module__": "torch.nn.modules.module"})
    model.save_pretrained(tmp_path)
    written = json.load(open(tmp_path / "config.json"))
    assert written["architectures"] == ["LoopedForCausalLM"]
    assert written["auto_map"]["AutoModelForCausalLM"] == "modeling_looped.LoopedForCausalLM"
    assert not (tmp_path / "module.py").exists()


def test_subclassed_config_keeps_its_own_map(tmp_path):
    class OtherConfig(LoopedConfig):
        model_type = "other"

    config = OtherConfig()
    config.auto_map = {"AutoModel": "modeling_other.OtherModel"}
    config.save_pretrained(tmp_path)
    assert json.load(open(tmp_path / "config.json"))["auto_map"]["AutoModel"] == "modeling_other.OtherModel"
    assert not list(tmp_path.glob("*.py"))  # the code of others is not copied unless it asks for it
    OtherConfig.register_for_auto_class()
    config.save_pretrained(tmp_path)
    assert (tmp_path / f"{__name__.rpartition('.')[2]}.py").exists()


@pytest.mark.slow
def test_a_class_of_anothers_that_is_registered_opens(tmp_path):
    """As docs/architecture.md says of a part of one's own."""
    page = Path(__file__).parents[1] / "docs" / "architecture.md"
    code = page.read_text("utf-8").split("```python\n")[1].split("```")[0]
    (tmp_path / "my_looped.py").write_text(code[: code.index("\n\nmodel = ")] + "\n")
    script = """
import torch
from my_looped import GatedForCausalLM
from modeling_looped import LoopedConfig
GatedForCausalLM.register_for_auto_class("AutoModelForCausalLM")
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_core_layers=1)
model = GatedForCausalLM(LoopedConfig(num_loops=2, injection="add", **sizes))
torch.nn.init.normal_(model.model.injection.gate)
model.save_pretrained("saved")
torch.save(model.eval()(torch.arange(3, 9)[None]).logits, "logits.pt")
"""
    opening = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("saved", trust_remote_code=True)
assert type(model).__name__ == "GatedForCausalLM", type(model)
assert torch.equal(model(torch.arange(3, 9)[None]).logits, torch.load("logits.pt"))
"""
    for each in (script, opening):
        paths = [str(tmp_path), *import_paths().split(os.pathsep)]
        run_clean(f"import sys\nsys.path[:0] = {paths}{each}", tmp_path=tmp_path)


def test_a_config_that_is_pushed_while_it_is_saved_takes_its_code_along(tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr(LoopedConfig, "push_to_hub", lambda self, name, **options: pushed.append((name, options)))
    LoopedConfig().save_pretrained(tmp_path / "tiny", push_to_hub=True, private=True)
    LoopedConfig().save_pretrained(tmp_path / "tiny", push_to_hub=True, repo_id="me/other")
    assert pushed == [("tiny", {"private": True}), ("me/other", {})]
    found = sorted(file.name for file in (tmp_path / "tiny").iterdir())
    assert found == ["config.json", "configuration_looped.py", "modeling_looped.py"]


def test_code_that_cannot_be_written_leaves_what_was_there(tmp_path, monkeypatch):
    LoopedConfig().save_pretrained(tmp_path)
    before = code_of(tmp_path)
    write, left = Path.write_bytes, len(before["configuration_looped.py"]) + 100

    def written(self, data):
        nonlocal left
        count = write(self, data[:left])
        left -= count
        if count < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        return count

    monkeypatch.setattr(Path, "write_bytes", written)
    monkeypatch.setattr(Path, "write_text", lambda self, text, *_: written(self, text.encode()))
    with pytest.raises(OSError, match="No space"):
        LoopedConfig().save_pretrained(tmp_path)
    assert code_of(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", *sorted(before)]


def test_saving_into_a_folder_of_links_leaves_what_they_point_to(tmp_path):
    """As the cache of the Hub is: other folders share those files."""
    LoopedConfig().save_pretrained(tmp_path)
    (tmp_path / "blob").write_text("shared")
    (tmp_path / "modeling_looped.py").unlink()
    (tmp_path / "modeling_looped.py").symlink_to("blob")
    LoopedConfig().save_pretrained(tmp_path)
    assert (tmp_path / "blob").read_text() == "shared"
    assert code_of(tmp_path)["modeling_looped.py"] == saved_code()["modeling_looped"]
