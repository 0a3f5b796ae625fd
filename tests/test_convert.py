"""`looped convert`: between layouts, with tokenizer and generation config, or not at all."""

import json
import os

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from looped_recipes.average import main as average
from looped_recipes.common import hub
from looped_recipes.common.checksums import write_checksums
from looped_recipes.convert import main
from modeling_looped import LoopedConfig, LoopedForCausalLM, save_public
from modeling_looped.formats import writing
from modeling_looped.formats.writing import whole_folder

from . import public_folders as public
from .helpers import tiny_model, tiny_tokenizer
from .test_public_formats import CASES, IDS, assert_same_tensors, made, stored, write


def run(*arguments):
    main([str(argument) for argument in arguments])


@pytest.mark.parametrize("name", ["ouro", "huginn", "retrofitted", "parcae", "nanbeige"])
def test_there_and_back(name, tmp_path):
    config, tensors = made(name)
    tensors = {key: tensor if key == "freqs_cis" else tensor.bfloat16() for key, tensor in tensors.items()}
    folder = write(tmp_path / "public", config, tensors)  # whose config.json says float32, or nothing
    tiny_tokenizer().save_pretrained(folder)
    GenerationConfig(temperature=0.7, do_sample=True, eos_token_id=2).save_pretrained(folder)
    run(folder, tmp_path / "ours")
    run(tmp_path / "ours", tmp_path / "back", "--to", CASES[name][3])
    assert_same_tensors(stored(tmp_path / "back"), tensors)
    for out in ("ours", "back"):
        assert AutoTokenizer.from_pretrained(tmp_path / out).encode("a b") == tiny_tokenizer().encode("a b")
        assert GenerationConfig.from_pretrained(tmp_path / out).temperature == 0.7
        assert (tmp_path / out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_source_that_is_not_there(tmp_path, monkeypatch):
    """Without a connection, of which the Hub's client says so after a minute."""
    monkeypatch.setattr(hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    for name in (tmp_path / "nothing", "nothing", "a/b/c"):
        with pytest.raises(ValueError, match=f"no folder '{name}', and repositories on the Hub have names like owner"):
            run(name, tmp_path / "ours")
    with pytest.raises(OSError, match="no folder 'a/b', and the Hub does not answer .*refused.* set HF_HUB_OFFLINE=1"):
        run("a/b", tmp_path / "ours")
    monkeypatch.setattr(hub, "is_offline_mode", lambda: True)
    with pytest.raises(OSError, match="a/b is no folder with a config.json"):
        run("a/b", tmp_path / "ours")


def test_it_says_of_what(tmp_path, capsys):
    """Of a training run too, which holds its model in final/."""
    folder = write(tmp_path / "public/final", *made("ouro"))
    for source, out in ((folder, "ours"), (folder.parent, "of_the_run")):
        run(source, tmp_path / out)
        assert f"parameters of {folder}, our own layout" in capsys.readouterr().out


def test_a_tokenizer_from_elsewhere(tmp_path):
    folder = write(tmp_path / "public", *made("parcae"))
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    run(folder, tmp_path / "ours", "--tokenizer", tmp_path / "tokenizer")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "ours")) == 30


SECTIONS = {"num_prelude_layers": 1, "num_coda_layers": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize("fields", [{}, SECTIONS, {"residual_scaling": "linear", "residual_scale": 3.0, **SECTIONS}])
def test_unrolled_into_llama(fields, tmp_path):
    """transformers' own Llama computes what the loop does."""
    scaled = "residual_scaling" in fields
    model = tiny_model(
        num_loops=3, **({**fields, "num_prelude_layers": 0, "num_coda_layers": 0} if scaled else fields)
    )
    model.save_pretrained(tmp_path / "ours")
    if scaled:  # eps is 3 / 3 = 1 in the loop, but 3 outside of it: refused as long as it says so
        with pytest.raises(ValueError, match="residual_scaling='linear'"):
            run(tmp_path / "ours", tmp_path / "llama", "--to", "llama", "--unroll")
        return
    run(tmp_path / "ours", tmp_path / "llama", "--to", "llama", "--unroll")
    llama = LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    assert llama.config.num_hidden_layers == model.config.num_hidden_layers
    torch.testing.assert_close(llama(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


def test_an_unrolled_loop_is_copied_a_shard_at_a_time(tmp_path, monkeypatch):
    model, copied, copy = tiny_model(num_loops=6), [], writing.with_own_memory
    monkeypatch.setattr(writing, "SHARD_SIZE", 50_000)
    monkeypatch.setattr(
        writing, "with_own_memory", lambda part: copied.append(sum(x.nbytes for x in part.values())) or copy(part)
    )
    save_public(model, tmp_path / "llama", "llama", unroll=True)
    assert len(copied) > 3 and max(copied) <= 50_000
    llama = LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    torch.testing.assert_close(llama(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


def test_one_loop_is_a_llama(tmp_path):
    model = tiny_model(num_loops=1, inter_loop_norm="shared", tie_word_embeddings=True)
    save_public(model, tmp_path / "llama", "llama")
    llama = LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    torch.testing.assert_close(llama(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="inter_loop_norm='shared'"):  # which has a place between two loops
        save_public(tiny_model(num_loops=2, inter_loop_norm="shared"), tmp_path / "two", "llama", unroll=True)


@pytest.mark.parametrize("between", ["none", "shared"])
def test_pure_loops_are_nanbeige(between, tmp_path):
    model = tiny_model(num_loops=3, inter_loop_norm=between, num_key_value_heads=2, head_dim=12)
    save_public(model, tmp_path / "out", "nanbeige")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    logits = public.nanbeige_logits(config, stored(tmp_path / "out"), IDS)
    torch.testing.assert_close(model(IDS).logits.double(), logits, rtol=0, atol=1e-4)
    assert torch.equal(LoopedForCausalLM.from_pretrained(tmp_path / "out")(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    "to,fields,said",
    [
        ("llama", {}, "loops 3 times.*--unroll.*--num-loops 1 makes"),
        ("llama", {"num_loops": 1, "qk_norm": "free", "logit_softcap": 9.0}, "logit_softcap=9.0, qk_norm='free'"),
        ("nanbeige", {"injection": "add", "num_coda_layers": 1}, "num_coda_layers=1.*injection='add'"),
        ("ouro", {}, "exit_gate='none'"),
        ("huginn", {"preset": "parcae", "hidden_size": 32, "num_attention_heads": 2}, "value_embeddings=True"),
        ("parcae", {"preset": "ouro"}, "."),
    ],
)
def test_what_a_layout_cannot_say(to, fields, said, tmp_path):
    model = tiny_model(**fields)
    with pytest.raises(ValueError, match=said):
        save_public(model, tmp_path / "out", to)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", [None, "llama", "nanbeige"])
def test_quantized_weights_are_refused(to, tmp_path):
    """Their tensors mean nothing without their scales, which the layouts' names would take along unread."""
    tiny_model(num_loops=1).save_pretrained(tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "of_elsewhere"}
    (tmp_path / "ours" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="weights of .*ours are quantized"):
        run(tmp_path / "ours", tmp_path / "out", *(["--to", to] if to else []))
    if to:
        with pytest.raises(ValueError, match="weights of .*ours are quantized"):
            save_public(LoopedForCausalLM.from_pretrained(tmp_path / "ours"), tmp_path / "out", to)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_place_that_cannot_be_written_is_said_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # of a system mounted to be read
    monkeypatch.setattr(LoopedForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("was read"))
    for name in ("a", "b"):
        write(tmp_path / name, *made("ouro"))
    one, other, out = (str(tmp_path / name) for name in ("a", "b", "out"))
    for command, arguments in ((main, [one, out]), (average, [out, one, other])):
        with pytest.raises(PermissionError, match=f"{tmp_path} can not be written to: .* as OUT"):
            command(arguments)


@pytest.mark.parametrize("to", [None, "llama", "nanbeige"])
def test_an_adapter_beside_the_weights_is_refused(to, tmp_path):
    """Its matrices were written beside those that it adapts, under names that no program reads."""
    folder = tmp_path / "ours"
    tiny_model(num_loops=1).save_pretrained(folder)
    get_peft_model(LoopedForCausalLM.from_pretrained(folder), LoraConfig()).save_pretrained(folder)
    with pytest.raises(ValueError, match="ours has an adapter beside its weights: merge it"):
        run(folder, tmp_path / "out", *(["--to", to] if to else []))
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_model_that_a_disk_has_changed_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path / "ours")
    write_checksums(tmp_path / "ours")
    weights = tmp_path / "ours" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(ValueError, match="model.safetensors has the checksum"):
        run(tmp_path / "ours", tmp_path / "out")


def test_a_saved_depth_is_not_left_out(tmp_path):
    model = tiny_model(num_loops=3)
    model.generation_config.num_loops = 2
    model.save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="says num_loops=2 and the config num_loops=3.*--num-loops"):
        run(tmp_path / "ours", tmp_path / "out", "--to", "nanbeige")
    for depth in (2, 3):
        out = tmp_path / str(depth)
        run(tmp_path / "ours", out, "--to", "llama", "--unroll", "--num-loops", depth)
        expected = model(IDS, num_loops=depth).logits
        torch.testing.assert_close(LlamaForCausalLM.from_pretrained(out)(IDS).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("to,fields", [("ouro", {"preset": "ouro"}), ("nanbeige", {})])
def test_saved_exits_that_a_layout_cannot_say_are_named(to, fields, tmp_path, logged):
    model = tiny_model(**fields)
    exits = {"exit_criterion": "gate", "exit_threshold": 0.5} if to == "ouro" else {"exit_criterion": "max_prob"}
    for name, value in {**exits, "min_loops": 2, "num_loops": model.config.num_loops}.items():
        setattr(model.generation_config, name, value)
    save_public(model, tmp_path / "out", to)
    [said] = [record.getMessage() for record in logged if "left out" in record.getMessage()]
    assert ("exit_criterion='max_prob'" in said) == (to == "nanbeige") and "min_loops=2" in said
    assert "exit_threshold" not in said and "num_loops" not in said


def test_nothing_is_overwritten(tmp_path):
    folder = write(tmp_path / "public", *made("ouro"))
    for out in (folder, tmp_path / "mine"):
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / "notes").write_text("kept")
        before = sorted(path.name for path in out.iterdir())
        with pytest.raises(FileExistsError, match="nothing is overwritten"):
            run(folder, out)
        assert sorted(path.name for path in out.iterdir()) == before


def test_a_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = write(tmp_path / "public", *made("ouro"))

    def fail(*arguments, **options):
        raise OSError("no space left")

    monkeypatch.setattr("modeling_looped.formats.writing.shutil.copyfile", fail)
    tiny_tokenizer().save_pretrained(folder)
    for options in ([], ["--to", "ouro"]):
        with pytest.raises(OSError, match="no space left"):
            run(folder, tmp_path / "out", *options)
        assert [path.name for path in tmp_path.iterdir()] == ["public"]


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    folder = write(tmp_path / "public", *made("ouro"))

    def fail(*arguments, **options):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("safetensors.torch.serialize_file", fail)
    for options in ([], ["--to", "ouro"]):
        with pytest.raises(OSError, match="could not be written.*No space left"):
            run(folder, tmp_path / "out", *options)
        assert [path.name for path in tmp_path.iterdir()] == ["public"]


def test_a_link_to_nothing_is_there_already(tmp_path):
    folder = write(tmp_path / "public", *made("ouro"))
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        run(folder, tmp_path / "out")


@pytest.mark.parametrize("kind", ["link", "current", "disk"])
def test_a_folder_whose_place_none_can_take_is_said_before_the_work(kind, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    place = tmp_path / "empty"
    if kind == "link":
        place = tmp_path / "out"
        place.symlink_to(tmp_path / "empty")
    elif kind == "current":
        monkeypatch.chdir(place)
        place = "."
    else:
        monkeypatch.setattr("os.path.ismount", lambda path: str(path) == str(place))
    with pytest.raises(FileExistsError, match="no folder can take its place: name a new one in it"):
        whole_folder(place, lambda folder: pytest.fail("the work has begun"))
    assert not any((tmp_path / "empty").iterdir())


def test_another_that_was_faster_keeps_its_folder(tmp_path):
    def fill(place):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes").write_text("kept")

    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        whole_folder(tmp_path / "out", fill)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_tokenizer_that_is_not_there(tmp_path):
    folder = write(tmp_path / "public", *made("ouro"))
    with pytest.raises(OSError, match="no tokenizer in .*nowhere"):
        run(folder, tmp_path / "out", "--tokenizer", tmp_path / "nowhere")


def test_a_layout_whose_own_fields_do_not_go_with_the_model(tmp_path):
    tiny_model(num_prelude_layers=0, num_coda_layers=0).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="layout of Huginn cannot say this model: as it reads, coda_input='norm'"):
        run(tmp_path / "ours", tmp_path / "out", "--to", "huginn")


@pytest.mark.parametrize("layout", ["huginn", "parcae"])
def test_biases_of_grouped_heads_have_no_tensor(layout, tmp_path):
    sizes = {"num_key_value_heads": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 32}
    config = LoopedConfig.from_preset(layout, **sizes, vocab_size=50, num_loops=2, attention_bias="qk")
    LoopedForCausalLM(config).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="num_key_value_heads=2 .* must be num_attention_heads=4"):
        run(tmp_path / "ours", tmp_path / "out", "--to", layout)
    assert not (tmp_path / "out").exists()


def test_a_head_that_differs_from_a_tied_embedding_is_not_left_out(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    model = LoopedForCausalLM(LoopedConfig(**sizes, num_core_layers=2, num_loops=1, tie_word_embeddings=True))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
    with pytest.raises(ValueError, match="set it to False to write both"):
        save_public(model, tmp_path / "llama", "llama")
    model.config.tie_word_embeddings = False
    save_public(model, tmp_path / "llama", "llama")
    llama = LlamaForCausalLM.from_pretrained(tmp_path / "llama").eval()
    assert (llama(IDS).logits - model.eval()(IDS).logits).abs().max() < 1e-5


def test_options_that_mean_nothing(tmp_path):
    with pytest.raises(ValueError, match="--unroll is for --to llama"):
        run(tmp_path, tmp_path / "out", "--unroll")
    with pytest.raises(ValueError, match="choose one of"):
        save_public(tiny_model(), tmp_path / "out", "gpt")


def test_a_checkpoint_of_training_is_exported_first(tmp_path):
    (tmp_path / "run/checkpoints/step-00000003").mkdir(parents=True)
    for source in ("run/checkpoints/step-00000003", "run"):
        with pytest.raises(OSError, match=f"{source} holds no saved model: `looped export {tmp_path}/run` makes one"):
            run(tmp_path / source, tmp_path / "out")
    with pytest.raises(OSError, match="no such repository"):
        run(tmp_path, tmp_path / "out")


def test_a_dense_model_that_loops_once_is_a_llama_again(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    dense = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, num_key_value_heads=2)).to(torch.bfloat16)
    save_public(LoopedForCausalLM.from_dense(dense), tmp_path / "back", "llama")
    back = LlamaForCausalLM.from_pretrained(tmp_path / "back")
    assert back.dtype == torch.bfloat16 and back.config.num_hidden_layers == 3
    for name, tensor in dense.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)
