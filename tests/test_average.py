"""`looped average`: the mean of what safetensors read from the folders, and nothing where there is no such mean."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoTokenizer

from looped_recipes.average import main
from looped_recipes.settings.model_file import class_in_file
from modeling_looped import LoopedConfig, LoopedForCausalLM, LoopedForSequenceClassification

from .helpers import shake, tiny_model, tiny_tokenizer
from .test_public_formats import made, write


def save(folder: Path, seed: int, dtype=torch.float32, **fields) -> Path:
    shake(tiny_model(**fields), seed=seed + 1).to(dtype).save_pretrained(folder)
    return folder


def run(*arguments) -> Path:
    return main([str(argument) for argument in arguments])


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("options", "shares"), [((), (1 / 3, 1 / 3, 1 / 3)), (("--decay", "0.5"), (1 / 7, 2 / 7, 4 / 7))]
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_mean(options, shares, tied, tmp_path):
    folders = [save(tmp_path / f"step-{seed}", seed, tie_word_embeddings=tied) for seed in range(3)]
    tiny_tokenizer().save_pretrained(folders[-1])
    mean = stored(run(tmp_path / "mean", *folders, *options))
    models = [stored(folder) for folder in folders]
    assert mean.keys() == models[0].keys()
    for name, tensor in mean.items():
        expected = sum(share * model[name].double() for share, model in zip(shares, models, strict=True))
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-7)
    assert AutoTokenizer.from_pretrained(tmp_path / "mean").encode("a b") == tiny_tokenizer().encode("a b")
    opened = LoopedForCausalLM.from_pretrained(tmp_path / "mean")
    assert opened.config.num_loops == LoopedConfig.from_pretrained(folders[-1]).num_loops


def test_equal_weights_stay_as_they_are(tmp_path):
    folders = [save(tmp_path / name, 0) for name in ("one", "another", "third")]
    mean = stored(run(tmp_path / "mean", *folders))
    assert all(torch.equal(mean[name], tensor) for name, tensor in stored(folders[0]).items())


def test_sixteen_bits_are_rounded_once(tmp_path):
    folders = [save(tmp_path / f"{seed}", seed, torch.bfloat16) for seed in range(4)]
    mean, models = stored(run(tmp_path / "mean", *folders)), [stored(folder) for folder in folders]
    for name, tensor in mean.items():
        expected = torch.stack([model[name].double() for model in models]).mean(0)
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.double(), expected, rtol=1.001 * 2**-8, atol=1e-6)  # half of the last place


def test_published_layouts_and_runs(tmp_path):
    config, tensors = made("ouro")
    published = write(tmp_path / "ouro", config, tensors)
    ours = save_ours(published, tmp_path / "run/final")
    mean = LoopedForCausalLM.from_pretrained(run(tmp_path / "mean", published, ours.parent))
    expected = LoopedForCausalLM.from_pretrained(published)
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(mean.get_parameter(name), weight * 1.5, rtol=1e-6, atol=1e-7)


def save_ours(published: Path, folder: Path) -> Path:
    """Save the model of a published folder, with all weights twice as large."""
    model = LoopedForCausalLM.from_pretrained(published)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_core_layers": 3}, "num_core_layers is 3 and 2"),
        ({"num_loops": 5}, "num_loops is 5 and 3"),
        ({"readout_norm": "none"}, "readout_norm is none and rmsnorm"),
    ],
)
def test_models_of_another_shape(fields, said, tmp_path):
    other, last = save(tmp_path / "other", 0, **fields), save(tmp_path / "last", 1)
    with pytest.raises(ValueError, match=f"other and .*last differ in more than their weights .*{said}"):
        run(tmp_path / "mean", other, last)
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize("name", ["./first", "first/", "last/../first", "link"])
def test_a_model_that_is_named_in_two_ways_counts_once(name, tmp_path, monkeypatch):
    save(tmp_path / "first", 0)
    save(tmp_path / "last", 1)
    (tmp_path / "link").symlink_to("first")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is named twice: it would count twice"):
        run("mean", "first", "last", name)


def test_what_is_refused(tmp_path):
    first, last = save(tmp_path / "first", 0), save(tmp_path / "last", 1)
    with pytest.raises(ValueError, match="a mean is of two models or more, and only .*first is named"):
        run(tmp_path / "mean", first)
    with pytest.raises(ValueError, match="first is named twice: it would count twice"):
        run(tmp_path / "mean", first, last, first)
    tiny_model(LoopedForSequenceClassification).save_pretrained(tmp_path / "head")
    with pytest.raises(ValueError, match="head is not of LoopedForCausalLM, where lm_head.weight would be new or"):
        run(tmp_path / "mean", tmp_path / "head", last)
    shutil.copytree(first, tmp_path / "adapted")
    get_peft_model(LoopedForCausalLM.from_pretrained(first), LoraConfig()).save_pretrained(tmp_path / "adapted")
    with pytest.raises(ValueError, match="adapted has an adapter beside its weights: merge it"):
        run(tmp_path / "mean", tmp_path / "adapted", last)
    for decay in ("0", "1.5", "nan"):
        with pytest.raises(ValueError, match=f"--decay {decay}: choose a number above 0, up to 1"):
            run(tmp_path / "mean", first, last, "--decay", decay)
    with pytest.raises(OSError, match="a/b/c is no folder with a config.json"):
        run(tmp_path / "mean", "a/b/c", last)
    with pytest.raises(FileExistsError, match="first"):
        run(first, first, last)
    torch.nn.init.constant_((broken := LoopedForCausalLM.from_pretrained(first)).lm_head.weight, float("nan"))
    broken.save_pretrained(tmp_path / "broken")
    with pytest.raises(ValueError, match="lm_head.weight of .*broken is not finite: leave that model out"):
        run(tmp_path / "mean", tmp_path / "broken", last)
    assert not (tmp_path / "mean").exists()


def test_the_models_of_an_own_class(tmp_path, monkeypatch):
    """Their code goes along, so the mean opens as they do."""
    path = tmp_path / "scaled_by_average.py"
    path.write_text(
        "import torch\nfrom modeling_looped import LoopedForCausalLM\n"
        "class Scaled(LoopedForCausalLM):\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.gain = torch.nn.Parameter(torch.ones(()))\n"
        "        self.post_init()\n"
    )
    cls = class_in_file(path)
    folders = []
    for seed in range(2):
        shake(tiny_model(cls), seed=seed + 1).save_pretrained(tmp_path / f"{seed}")
        folders.append(tmp_path / f"{seed}")
    with pytest.raises(ValueError, match="where gain would be new or left out: .* --trust-remote-code"):
        run(tmp_path / "mean", *folders)
    mean = stored(run(tmp_path / "mean", *folders, "--trust-remote-code"))
    torch.testing.assert_close(mean["gain"], sum(stored(folder)["gain"] for folder in folders) / 2)
    opened = LoopedForCausalLM.from_pretrained(tmp_path / "mean", trust_remote_code=True)
    assert type(opened).__name__ == "Scaled"
